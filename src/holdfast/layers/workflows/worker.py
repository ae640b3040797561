"""Workers: any number of them, on any machine that reaches the store, run executions of the workflows they know.

    async with space.workflows.worker([Research, approve_trade], concurrency=50):
        ...

A worker takes messages from the queue of each of its workflows, `workflows.<name>`. A message names an execution, and having it reserved is
the right to run it; executions of workflows that nobody knows wait in their queue, and are seen there. What a message allows depends on
how the execution stands:

    pending, or put aside with this message    run it
    put aside with another message, or none    take over, if that message still lies where it was left
    running, ended, not there                  the message is not needed: drop it

One watch of the feed tells a worker what was sent to those it runs. A clean stop gives every message back at once; a worker that dies loses
its lease, 10 s by default, and whoever comes next goes on. Schedules of its workflows are its business too (`firing.py`). An execution in whose hands DEATHS_MAX workers died in a row is failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from holdfast.clock import sleep_or
from holdfast.codec import encode
from holdfast.engine import Entry, Receipt, cursor_at
from holdfast.errors import Compacted, Conflict, Empty, Error, InvalidInput, LeaseLost, NotFound
from holdfast.layers.blobs import Blobs
from holdfast.layers.coordination import Coordination
from holdfast.layers.messages import Hand, Message
from holdfast.layers.queue_entries import check_queue
from holdfast.layers.queues import Options, Queue
from holdfast.layers.schemas import Schemas
from holdfast.layers.scope import Scope
from holdfast.layers.state_type import StateType
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.archiving import archive_due, archive_queue
from holdfast.layers.workflows.definitions import Definition, is_older, registry
from holdfast.layers.workflows.entries import (
    CANCEL,
    EXECUTIONS,
    INBOX,
    PAUSED,
    PENDING,
    Execution,
    Fault,
    Meta,
    execution_key,
    execution_of,
    inbox_key,
    meta_key,
    meta_of,
    queue_name,
)
from holdfast.layers.workflows.firing import Firing
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.known import make_known
from holdfast.layers.workflows.limits import LINE
from holdfast.layers.workflows.outside import Outside
from holdfast.layers.workflows.running import OLD_CODE_MS, Run
from holdfast.layers.workflows.service import Service
from holdfast.layers.workflows.standing import Standing, taken_over
from holdfast.layers.workflows.task_ends import Ends

LEASE_MS: Final = 10_000
CONCURRENCY: Final = 50
CONCURRENCY_MAX: Final = 10_000
THREADS_MAX: Final = 64
AHEAD_MAX: Final = 32
HELD_MS: Final = 200
"""How long a message is held for which there is no room."""
"""Messages taken ahead, while there is room to run them."""
RETRY_MS: Final = 200
ARCHIVE_TRIES: Final = 3
"""At once, where an execution changes while it is being archived."""
ARCHIVE_AGAIN_S: Final = 60
DEATHS_MAX: Final = 20

log = logging.getLogger("holdfast.workflows")


Described = tuple[Meta, Execution]
Work = Callable[..., Coroutine[Any, Any, None]]


class Started(NamedTuple):
    """An execution that somebody here is about to start: `written` tells that it is."""

    meta: Meta
    execution: Execution
    written: asyncio.Future[Receipt]


class Worker:
    """Runs executions. Made by `space.workflows.worker`; `async with worker:`, or `await worker.run()`."""

    def __init__(
        self,
        scope: Scope,
        coordination: Coordination,
        workflows: Sequence[Any],
        concurrency: int,
        lease_ms: int,
        blobs: Callable[[], Blobs],
        queues: Sequence[str] = (),
        steps_only: bool = False,
    ) -> None:
        if steps_only and not queues:
            raise InvalidInput("a worker for steps only serves queues: queues=[…]")
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"concurrency is between 1 and {CONCURRENCY_MAX:,}, not {concurrency!r}")
        self.scope = scope
        self.workflows = registry(workflows)
        self.concurrency = concurrency
        self.threads: Executor | None = None
        """Where steps run that are not async."""
        self.replaced: Mapping[str, Callable[..., Any]] = {}
        """What is called instead of a step's function, by the step's name: for tests."""
        self.state_types: Mapping[str, StateType] = {}
        self.blobs = blobs
        self._coordination = coordination
        self._served = [check_queue(name) for name in dict.fromkeys(queues)]
        self._executes = [] if steps_only else list(self.workflows)
        self._service = Service(self)
        self._ends = Ends(scope, self.queue_of)
        self._guards: dict[str, asyncio.Task[None]] = {}
        """By lease: who waits for its loss."""
        self._options = Options(lease_ms, "release", "release", "release")
        self._queues: dict[str, Queue] = {}
        self._runs: dict[str, Run] = {}
        self._coming: dict[str, bool] = {}
        """Executions that are about to run here, and whether something was sent to them since that is known."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: set[Message] = set()
        """What has a place."""
        self._free = concurrency
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    # --- its life ---

    async def __aenter__(self) -> Worker:
        self._task = asyncio.get_running_loop().create_task(self.run())
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Leave what runs to others, at once, and return when that is done."""
        self._stopping.set()
        if self._task is not None:
            task, self._task = self._task, None
            await task

    async def finished(self) -> None:
        """Return when one that was begun with `async with` has ended; what ended it is raised."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def run(self) -> None:
        """Run whatever comes, until it is stopped or cancelled."""
        self._stopping.clear()
        if self.threads is None:
            self.threads = ThreadPoolExecutor(min(self.concurrency, THREADS_MAX), "holdfast-step")
        loop = asyncio.get_running_loop()
        await self._register()
        await self._announce()
        cursor = cursor_at(await self._now())
        loops = [loop.create_task(self._follow(cursor)), loop.create_task(self._ends.follow())]
        if self._executes:
            loops.append(loop.create_task(Firing(self).run()))
        for name in self._executes:
            work, queue = partial(self._work, self.workflows[name]), self.queue_of(name)
            loops.append(loop.create_task(self._consume(queue, work, partial(self._begin_started, queue, work))))
            if self.workflows[name].archive:
                loops.append(loop.create_task(self._consume(self._queue(archive_queue(name)), self._archive)))
        for name in self._served:
            loops.append(loop.create_task(self._consume(self._queue(name), self._service.work)))
        stopped = loop.create_task(self._stopping.wait())
        self._ready.set()
        try:
            done, _ = await asyncio.wait([*loops, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            for task in (*loops, stopped):
                task.cancel()
            await asyncio.wait([*loops, stopped])
            await self._wind_up()

    async def _register(self) -> None:
        """Make the types of states known. Conflict when one of the same version looks different: it needs a higher version."""
        found: dict[str, StateType] = {}
        for name, definition in self.workflows.items():
            if (shape := definition.shape) is not None:
                shape.check_defaults()
                known = await Schemas(self.scope).register(shape.type, shape.version, shape.document)
                found[name] = shape.state_type(known.schemas)
        self.state_types = found

    async def _announce(self) -> None:
        """Say what is served, for those who start workflows by name."""
        try:
            await make_known(self.scope, [self.workflows[name] for name in self._executes])
        except Error as exc:
            log.info("that %s are served is not said: %s", ", ".join(self.workflows), exc)

    async def _wind_up(self) -> None:
        for queue in self._queues.values():
            if (served := queue.served) is not None:
                served.rooms.pop(self._room, None)
        for run in self._runs.values():
            run.stop()
        self._service.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for guard in self._guards.values():
            guard.cancel()
        archiving = (archive_queue(name) for name in self._executes if self.workflows[name].archive)
        for queue in (*map(self.queue_of, self._executes), *map(self._queue, (*archiving, *self._served))):
            try:
                await queue.give_back()
            except Error as exc:
                log.info("what was taken ahead comes back when the lease ends: %s", exc)
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.threads = None

    def abandon(self) -> None:
        """End as a process does that is killed: nothing is given back, nothing is said. For tests of what comes after."""
        for task in (*self._tasks, *self._guards.values(), self._task):
            if task is not None:
                task.cancel()

    # --- for its runs ---

    def queue_of(self, name: str) -> Queue:
        return self._queue(queue_name(name))

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(self.scope, self._coordination, name, self._options)
        return self._queues[name]

    def task(self, tid: str) -> TaskHandle:
        return TaskHandle(self.scope, self._coordination, self.blobs, tid)

    def defined(self, name: str) -> Definition:
        if name not in self.workflows:
            raise InvalidInput(f"this worker knows no workflow {name!r}; give the workflow itself")
        return self.workflows[name]

    async def control(self, id: str, what: str) -> None:
        """Ask for something of an execution; one that has ended needs nothing."""
        try:
            await Outside(self.scope, self.queue_of, self.task).control(id, what)
        except (NotFound, Conflict):
            return

    # --- what comes ---

    async def _consume(self, queue: Queue, work: Work, hand: Hand | None = None) -> None:
        clock = self.scope.clock
        while True:
            while self._free <= 0:  # what waits is for others, as long as there is no room here
                self._freed.clear()
                await self._freed.wait()
            queue.take_ahead(AHEAD_MAX if self.concurrency > 1 else 0, self._room, hand)
            try:
                message = await queue.take(wait=None)
            except Empty:  # what was handed over has filled it
                continue
            except Error as exc:
                log.warning("messages of %s cannot be taken, and are tried again: %s", queue.name, exc)
                await clock.sleep_until(clock.now_ms() + RETRY_MS)
                continue
            try:
                has_room = await self._has_room()
            except asyncio.CancelledError:
                await message.give_back()
                raise
            if not has_room:
                await message.give_back()
                continue
            self._begin(message, work(message))

    def _begin(self, message: Message, work: Coroutine[Any, Any, None]) -> None:
        self._free -= 1
        self._begun.add(message)
        self._guard(message)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, message))

    def _begin_started(
        self, queue: Queue, work: Work, message: Message, what: Described, written: asyncio.Future[Receipt]
    ) -> None:
        """Get an execution that somebody here is about to start."""
        self._coming.setdefault(what[0].id, False)
        self._begin(message, work(message, Started(*what, written)))
        if self._free <= 0 and (served := queue.served) is not None:
            served.call_off()

    def _guard(self, message: Message) -> None:
        """Be told when the lease is lost under which this, and others, were taken."""
        _, queue, lease, _ = message.key.split("/", 3)
        if f"{queue}/{lease}" not in self._guards:
            guarding = asyncio.get_running_loop().create_task(self._until_lost(message))
            self._guards[f"{queue}/{lease}"] = guarding

    async def _until_lost(self, message: Message) -> None:
        """What runs under a lost lease can write nothing any more: it is cancelled, so that it does not go on for nothing."""
        await message.until_lost()
        for run in list(self._runs.values()):
            if run.message.lost:
                run.lose()
        self._service.lose()
        _, queue, lease, _ = message.key.split("/", 3)
        self._guards.pop(f"{queue}/{lease}", None)

    def make_room(self, message: Message) -> None:
        """It is over, or about to be: another can be run."""
        if message in self._begun:
            self._begun.discard(message)
            self._free += 1
            self._freed.set()

    def _room(self) -> int:
        """For how many there is room that have not come yet."""
        if self._stopping.is_set():
            return 0
        return self._free - sum(served.pending for queue in self._queues.values() if (served := queue.served))

    async def _has_room(self) -> bool:
        """Whether there is room. If what came by another queue has filled it, that may be over soon; others wait for the message, too."""
        clock = self.scope.clock
        until = clock.now_ms() + HELD_MS
        while self._free <= 0:
            self._freed.clear()
            if not await sleep_or(clock, until, self._freed):
                return False
        return True

    def _done(self, message: Message, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.make_room(message)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an execution could not be run", exc_info=error)

    async def _archive(self, message: Message) -> None:
        """Archive the execution that a message names; whatever fails, it is tried again."""
        id = _execution_in(message)
        try:
            if id is not None:
                await self._archive_now(id)
            await message.ack()
        except Error as exc:
            log.warning("execution %s could not be archived, and stays until it is: %s", id, exc)
            try:
                await message.release(delay=ARCHIVE_AGAIN_S)
            except Error as again:
                log.info("message %s comes back when the lease ends: %s", message.id, again)

    async def _archive_now(self, id: str) -> None:
        for _ in range(ARCHIVE_TRIES):
            try:
                return await archive_due(self.scope, self.blobs(), id)
            except Conflict as conflict:  # it was tried again meanwhile, and may have ended again
                refused = conflict
        raise refused

    async def _work(self, definition: Definition, message: Message, started: Started | None = None) -> None:
        if started is not None:
            await asyncio.sleep(0)  # what is written leaves first
        id = _execution_in(message) if started is None else started.meta.id
        try:
            if id is None or not await self._run(definition, message, id, started):
                await message.ack()
            elif not message.settled:
                await message.give_back(delay=None if message.lost else RETRY_MS / 1000)
        except LeaseLost as exc:
            log.info("execution %s is another worker's: %s", id, exc)
        except Error as exc:
            log.warning("execution %s is given back: %s", id, exc)
            await message.give_back(delay=RETRY_MS / 1000)
        finally:
            self._coming.pop(id or "", None)

    async def _run(self, definition: Definition, message: Message, id: str, started: Started | None = None) -> bool:
        """Run it as far as it goes; False when the message is not needed.

        Of one that is being started here nothing need be read: nobody else knows it. What is sent to it is told by the feed.
        """
        if started is not None:
            if (
                id not in self._runs
                and not self._stopping.is_set()
                and not is_older(definition.version, started.meta.version)
            ):
                return await self._run_started(definition, message, started)
            await started.written
        while True:
            self._coming.setdefault(id, False)
            entry, described, inbox = await self._read(id)
            if entry is None or described is None:
                return False
            version, meta, execution = entry.version, meta_of(described), execution_of(entry)
            if meta.name != definition.name or execution.ended:
                return False
            before = self._runs.get(id)
            if before is None:
                break
            if not await self._replaces(before, execution, message):
                return False
            await before.over.wait()
        run = Run(self, definition, message, meta, Standing(self.scope, message, execution, version))
        if inbox is not None:
            await run.mail.read(inbox)
        claim = await self._claim(execution, message, run)
        if claim is None:
            return False
        if is_older(definition.version, meta.version):
            await run.put_off(OLD_CODE_MS, definition.version)
            return True
        if self._stopping.is_set():
            await message.release()
            return True
        if id in self._runs:  # another message of the same execution came in between
            return await self._run(definition, message, id)
        with self._running(run):
            if message.attempts >= DEATHS_MAX:
                await run.give_up(Fault("WorkerDied", f"{message.attempts} workers died while they ran it"))
            else:
                fresh = execution.status == PENDING and execution.started_at is None
                await run.run(fresh=fresh, claim=claim if _is_aside(execution, message) else None)
        return True

    async def _run_started(self, definition: Definition, message: Message, started: Started) -> bool:
        standing = Standing(self.scope, message, started.execution, 0, started.written)
        run = Run(self, definition, message, started.meta, standing)
        with self._running(run):
            await run.run(fresh=True, claim=None)
        return True

    @contextmanager
    def _running(self, run: Run) -> Iterator[None]:
        id = run.meta.id
        self._runs[id] = run
        if self._coming.pop(id, True):  # what came before it was here; or nobody looked
            run.mailed()
        try:
            yield
        finally:
            del self._runs[id]
            run.over.set()
            stands = run.standing.now
            awaiting = self._coordination.awaiting(self.scope, EXECUTIONS)
            awaiting.tell(execution_key(id), (lambda: encode(stands)) if stands.ended else None)

    async def _read(self, id: str) -> list[Entry | None]:
        return await self.scope.engine.get(self.scope.space, [execution_key(id), meta_key(id), inbox_key(id)])

    async def _replaces(self, before: Run, execution: Execution, message: Message) -> bool:
        """Whether a message ends, or follows, a run of the same execution that is not over here."""
        if await before.standing.was_refused():  # somebody else has started it
            return True
        if before.message.id == message.id:  # it was taken from us and came back: the lease had ended
            before.lose()
            return True
        if execution.message == message.id and _waits(execution):
            return True  # the one it was put aside with: the other run was woken in vain, and is about to see that
        if not _is_aside(execution, message):
            # It ended, was seen to have ended, and was tried again, all before its run here was over.
            return execution.status == PENDING and execution.started_at is not None
        [left] = await self.scope.engine.get(self.scope.space, [execution.rests or inbox_key(execution.id)])
        return left is not None or not execution.rests  # it was put aside, and the run is about to see that

    async def _claim(self, execution: Execution, message: Message, run: Run) -> Parts | None:
        """What taking over needs; None when there is nothing to take over."""
        if execution.rests.startswith(LINE):
            [place] = await self.scope.engine.get(self.scope.space, [execution.rests])
            if place is not None:  # it is not its turn
                return ([], []) if run.mail.has(CANCEL) else None
            return [], []
        if execution.message == message.id or (execution.status == PENDING and not execution.message):
            return [], []
        if _is_aside(execution, message):
            return taken_over(execution)
        return None

    # --- what is sent to those it runs ---

    async def _now(self) -> int:
        found = await self.scope.engine.spaces(self.scope.space)
        return found[0].revision if found else 0

    async def _follow(self, cursor: str) -> None:
        scope, clock = self.scope, self.scope.clock
        while True:
            try:
                async for commit in scope.engine.watch(scope.space, INBOX, cursor=cursor):
                    cursor = commit.cursor
                    for change in commit.changes:
                        id = change.key[len(INBOX) :]
                        run = self._runs.get(id)
                        if run is not None:
                            run.mailed()
                        elif id in self._coming:
                            self._coming[id] = True
                        if self._service.doing(id):
                            await self._service.mailed(id)
            except Error as exc:
                log.debug("the feed of %s is followed anew: %s", scope.space, exc)
                await clock.sleep_until(clock.now_ms() + RETRY_MS)
                if isinstance(exc, Compacted):
                    try:
                        cursor = cursor_at(await self._now())
                    except Error:
                        continue
                self._coming = dict.fromkeys(self._coming, True)
                for run in self._runs.values():
                    run.mailed()
                await self._look_at_steps()

    async def _look_at_steps(self) -> None:
        for id in self._service.ids():
            try:
                await self._service.mailed(id)
            except Error as exc:
                log.debug("whether the steps of %s are still wanted is seen when they are done: %s", id, exc)

    def __repr__(self) -> str:
        return f"<Worker for {', '.join(self.workflows)} in {self.scope.space!r}>"


def _is_aside(execution: Execution, message: Message) -> bool:
    """Put aside, with another message or none."""
    return execution.message != message.id and _waits(execution)


def _waits(execution: Execution) -> bool:
    return bool(execution.waits) or execution.status == PAUSED


def _execution_in(message: Message) -> str | None:
    """The execution that a message names; whoever may put messages may put anything."""
    body = message.body
    id = body.get("execution") if isinstance(body, dict) else None
    return id if isinstance(id, str) and id else None
