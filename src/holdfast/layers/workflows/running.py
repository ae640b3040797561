"""One run of one execution: from the message that allows it to its end, or to where it has to wait.

The code runs in a task; beside it, this looks after what comes from outside: signals, the time, being paused or cancelled, the
worker's own end. When all branches of the code wait, and not just for a moment, the execution is put aside by one commit: the record
says what it waits for, and the message moves from the reservation to where it comes back by itself when the first wait is over. Without
a time there is no message until somebody sends one. Then the task is cancelled: what it was is in the journal.

How it fails. A worker that lost its reservation is refused by the store, and stops; so does one whose store cannot be reached. Code
that does not repeat itself (NonDeterminism) pauses the execution, with the error, so that it can go on with other code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final, Protocol

import msgspec

from holdfast.clock import Clock, sleep_or
from holdfast.codec import decode
from holdfast.engine import Condition, Delete, Present, Receipt
from holdfast.errors import (
    AccessDenied,
    Conflict,
    Damaged,
    Error,
    InvalidInput,
    LeaseLost,
    MigrationFailed,
    NonDeterminism,
    NotFound,
    QuotaExceeded,
    TimedOut,
)
from holdfast.layers.blobs import BlobRef, Blobs, Part
from holdfast.layers.messages import Message
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.state_type import StateType
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.archiving import ending
from holdfast.layers.workflows.branches import BRANCH, Branch, Runnable
from holdfast.layers.workflows.children import cancel_children, outcome_of, telling
from holdfast.layers.workflows.context import Context
from holdfast.layers.workflows.definitions import Definition
from holdfast.layers.workflows.entries import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    FAILED,
    INLINE_BYTES_MAX,
    PAUSE,
    PAUSED,
    RESUME,
    RUNNING,
    Execution,
    Fault,
    Meta,
    StepRecord,
    Wait,
    fault_of,
    raw,
    steps_prefix,
)
from holdfast.layers.workflows.journal import Abandoned, Journal, Parts
from holdfast.layers.workflows.limits import leaving
from holdfast.layers.workflows.mail import Letter, Mail, calling_off
from holdfast.layers.workflows.migrating import settle_state, upgrade_of
from holdfast.layers.workflows.performing import flush
from holdfast.layers.workflows.plan import run_steps
from holdfast.layers.workflows.shape import is_earlier
from holdfast.layers.workflows.standing import Standing
from holdfast.layers.workflows.turns import Turns
from holdfast.layers.workflows.waiting import Waiting

OLD_CODE_MS: Final = 5_000
"""After what time an execution of newer code is offered again, to whoever has that."""
HOLD_MS: Final = 500
"""An execution whose next wait is over so soon is not put aside."""
HOPELESS: Final = (InvalidInput, AccessDenied, QuotaExceeded, Damaged, NotFound)
"""Refusals of the store that would be repeated."""
SHOWN_S: Final = 0.05
"""After so long, that it runs is written down by itself; mostly it is part of the first step's commit. Nothing depends on it."""
STOP_S_MAX: Final = 10.0
"""How long code that was cancelled may take to end; it is left alone then, and can write nothing."""
WAITS_SHOWN_MAX: Final = 100
"""Of what an execution waits for, as much is shown."""
TRIES_MAX: Final = 1_000
"""How often an end is tried again because a parent or a line changed in the same moment."""

log = logging.getLogger("holdfast.workflows")


class Host(Protocol):
    """What a run needs of its worker."""

    scope: Scope
    threads: Executor | None
    replaced: Mapping[str, Callable[..., Any]]
    state_types: Mapping[str, StateType]
    """Of typed states, by workflow."""

    def queue_of(self, name: str) -> Queue: ...
    def defined(self, name: str) -> Definition: ...
    def blobs(self) -> Blobs: ...
    def task(self, tid: str) -> TaskHandle: ...
    async def control(self, id: str, what: str) -> None: ...
    def make_room(self, message: Message) -> None: ...


class Run:
    """One run. Made by a worker that has taken the message of an execution."""

    def __init__(self, host: Host, definition: Definition, message: Message, meta: Meta, standing: Standing) -> None:
        self.scope = host.scope
        self.clock: Clock = host.scope.clock
        self.threads = host.threads
        self.replaced = host.replaced
        self.queue_of: Callable[[str], Queue] = host.queue_of
        self.defined: Callable[[str], Definition] = host.defined
        self.control = host.control
        self.task = host.task
        self.definition = definition
        self.message = message
        self.meta = meta
        self.standing = standing
        self.journal = Journal(host.scope, meta.id, message.key)
        self.mail = Mail(host.scope, meta.id)
        self.turns = Turns()
        self.runnable = Runnable(self._idle)
        self.branches: set[Branch] = set()
        self.news = asyncio.Event()
        self.waiting = Waiting(self.clock, self.mail, self.turns, self.runnable, self.news)
        self.over = asyncio.Event()
        """Set by its worker when this run is over."""
        self.context = Context(self)
        self._host = host
        self._known = host.state_types.get(definition.name)
        self._upgrade = upgrade_of(definition.shape, self._known)
        self._parking: asyncio.Future[Receipt] | None = None
        self._ending = False
        self._mailed = False
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self.journal.opening = standing.opening
        self.journal.opened = standing.opened
        self.journal.on_failure = self.news.set

    # --- for the code ---

    def leave(self, branches: list[str]) -> None:
        """These branches are over: for whom they would have waited, nobody need."""
        self.journal.leave(*branches)
        if self.turns.forget(*branches):
            self.waiting.distribute()

    async def result(self, record: StepRecord) -> Any:
        """What a step gave."""
        if record.blob is None:
            return decode(bytes(record.result))
        return decode(await self._host.blobs().read(record.blob))

    async def keep(self, data: bytes, path: str) -> tuple[BlobRef, Part]:
        """Keep a large result as a blob; gives what refers to it."""
        try:
            ref = await self._host.blobs().put(data)
        except Error as exc:
            raise Abandoned from exc
        return ref, self._host.blobs().attach(ref, self._holder(path))

    def attaching(self, ref: BlobRef | None, path: str) -> Parts:
        """A reference of one's own to what a child has kept."""
        if ref is None:
            return [], []
        part = self._host.blobs().attach(ref, self._holder(path))
        return list(part.operations), list(part.conditions)

    def _holder(self, path: str) -> str:
        return steps_prefix(self.meta.id) + path

    # --- its life ---

    async def run(self, *, fresh: bool, claim: Parts | None) -> None:
        """Run it until it ends, waits, or must be left to another."""
        try:
            if claim is not None and not await self._claim(claim):
                return
            if not fresh:
                await self.journal.load(self._upgrade)
                self.turns.load(self.journal.records)
            if await self._obey() or not await self._settle_state():
                return
            loop = asyncio.get_running_loop()
            showing = None if self.standing.runs else loop.call_later(SHOWN_S, self.journal.open)
            self._main = loop.create_task(self._run_code())
            self._main.add_done_callback(lambda _: self.news.set())
            await self.standing.written()
            try:
                await self._look_after(self._main)
            finally:
                if showing is not None:
                    showing.cancel()
        except (Abandoned, Error) as exc:
            await self._leave(exc)
        finally:
            self.journal.left = True  # code that cleans up when it is cancelled begins nothing any more
            await self._stop_code()
            await self.journal.stop()

    async def _settle_state(self) -> bool:
        """Let the state be of the version that the code has; False when that cannot be."""
        shape, journal = self.definition.shape, self.journal
        mine = "" if shape is None else shape.version
        needed = journal.version or self.meta.config.get("state_version", "")
        if mine or needed:
            await self.standing.written()
        if is_earlier(mine, needed):
            await self.put_off(OLD_CODE_MS, f"{self.definition.version}, state {mine or 'untyped'}")
            return False
        if shape is None or self._known is None:
            return True
        try:
            await settle_state(self, shape, self._known)
        except MigrationFailed as exc:
            await self._pause(fault_of(exc))
            return False
        return True

    async def _leave(self, exc: BaseException) -> None:
        """This run cannot go on. What another run could not do either pauses the execution, so that somebody looks."""
        cause = exc.__cause__ or exc
        log.info("this run of execution %s is over: %s: %s", self.meta.id, type(cause).__name__, cause)
        if isinstance(cause, HOPELESS):
            operations, conditions = self.standing.put_aside(PAUSED, (), None, fault_of(cause))
            try:
                await self.scope.commit(tuple(operations), (Present(self.message.key), *conditions))
                self.message.committed()
            except Error as again:
                log.warning("execution %s cannot even be paused, and is tried again: %s", self.meta.id, again)

    async def _claim(self, claim: Parts) -> bool:
        """Take over from the message that this execution was put aside with, unless somebody has."""
        if self.standing.now.status == PAUSED and not self.mail.all(CANCEL, RESUME):
            await self.message.ack()  # what woke it must wait as well
            return False
        operations, conditions = self.standing.opening()
        try:
            receipt = await self.scope.commit(
                (*claim[0], *operations), (Present(self.message.key), *claim[1], *conditions)
            )
        except Conflict:
            await self.message.ack()
            return False
        self.standing.opened(receipt)
        self.journal.opening = None
        return True

    async def give_up(self, fault: Fault) -> None:
        """Fail it without running it."""
        try:
            await self.journal.load()
            await self._end(FAILED, None, fault)
        finally:
            await self.journal.stop()

    async def put_off(self, ms: int, version: str) -> None:
        """Offer it again after a while, to somebody who has newer code."""
        waits = (Wait("code", name=version, until=self.clock.now_ms() + ms),)
        operations, conditions = self.standing.put_aside(
            self.standing.now.status, waits, waits[0].until, self.standing.now.error
        )
        await self.scope.commit(tuple(operations), (Present(self.message.key), *conditions))
        self.message.committed()

    async def _look_after(self, main: asyncio.Task[None]) -> None:
        while True:
            self.news.clear()
            if self._parking is not None:
                if self._parking.done() and await self._parked(self._parking):
                    return
            elif main.done():
                if not main.cancelled() and (error := main.exception()) is not None:
                    raise error
                return
            elif self.journal.failure is not None:
                raise Abandoned from self.journal.failure
            elif not self._ending:
                if self._stopping:
                    await self._hand_over()
                    return
                if self._mailed:
                    self._mailed = False
                    await self.mail.read()
                    if await self._obey():
                        return
                    self.waiting.distribute()
                if self._over():
                    await self._stop_code()
                    timeout = TimedOut(f"the execution took longer than {(self.definition.timeout_ms or 0) / 1000:g} s")
                    await self._end(FAILED, None, fault_of(timeout))
                    return
                self.waiting.tick()
            if not self.news.is_set():
                await self._sleep()

    async def _sleep(self) -> None:
        """Until there is something to look at."""
        at = None if self._parking is not None or self._ending else self._first_at()
        self.waiting.looked_at = at
        if at is None:
            await self.news.wait()
        else:
            await sleep_or(self.clock, at, self.news)

    def _first_at(self) -> int | None:
        """When the first of the times comes that matter to it."""
        deadline, at = self._deadline(), self.waiting.first_at()
        return at if deadline is None else deadline if at is None else min(deadline, at)

    def _deadline(self) -> int | None:
        timeout = self.definition.timeout_ms
        return None if timeout is None else (self.standing.now.started_at or self.clock.now_ms()) + timeout

    def _over(self) -> bool:
        deadline = self._deadline()
        return deadline is not None and deadline <= self.clock.now_ms()

    def mailed(self) -> None:
        """Something was sent to it."""
        self._mailed = True
        self.news.set()

    def lose(self) -> None:
        """Its message is not under this lease any more."""
        self.journal.lose(LeaseLost(f"the lease under which execution {self.meta.id!r} ran has ended"))

    def stop(self) -> None:
        """The worker ends: leave it to another, at once."""
        self._stopping = True
        self.news.set()

    # --- the code ---

    async def _run_code(self) -> None:
        trunk = Branch("", self.journal)
        trunk.task = asyncio.current_task()
        self.branches.add(trunk)
        BRANCH.set(trunk)
        definition = self.definition
        await self.standing.written()  # all is made ready while its start is being written
        try:
            if definition.steps:
                result = await run_steps(self, definition)
            elif definition.takes_input:
                result = await definition.target(self.context, self.context.input)
            else:
                result = await definition.target(self.context)
            value = raw(result, f"the result of execution {self.meta.id!r}")
        except NonDeterminism as exc:
            await self._pause(fault_of(exc))
        except Exception as exc:
            await self._end(FAILED, None, fault_of(exc))
        else:
            await self._end(COMPLETED, value, None)

    async def _stop_code(self) -> None:
        main = self._main
        if main is None or main.done() or main is asyncio.current_task():
            return
        main.cancel()
        _, left = await asyncio.wait([main], timeout=STOP_S_MAX)
        if left:
            log.warning("the code of execution %s does not end; it can write nothing any more", self.meta.id)
        elif not main.cancelled() and (error := main.exception()) is not None and not isinstance(error, Abandoned):
            log.info("the code of execution %s ended with %r when it was cancelled", self.meta.id, error)

    # --- being put aside ---

    def _idle(self) -> None:
        """Nothing of its code can go on by itself, unless a task that it has just started itself awaits a call."""
        if self.runnable.made:
            asyncio.get_running_loop().call_soon(self._park)
        else:
            self._park()

    def _park(self) -> None:
        if self.runnable.count or self._ending or self._parking is not None or self._stopping:
            return
        if self.journal.failure is not None:
            return
        self.news.set()
        if not self.waiting:
            return
        if self.turns.forget():
            self.waiting.distribute()
            if self.runnable.count:
                return
        due = self.waiting.first_at()
        if due is not None and due - self.clock.now_ms() <= HOLD_MS:
            return
        self._flush_all()
        unchanged = self.mail.unchanged  # as it is now: what is read from here on must find it awake
        self._parking = self.journal.close(lambda: self._aside(unchanged))
        self._parking.add_done_callback(lambda _: self.news.set())

    def _flush_all(self) -> None:
        for branch in list(self.branches):
            if not branch.is_step and (operations := flush(self, branch)):
                self.journal.stage(operations)

    def _aside(self, unchanged: Condition) -> Parts:
        waits = self.waiting.waits[:WAITS_SHOWN_MAX]
        operations, conditions = self.standing.put_aside(RUNNING, waits, self._first_at(), None)
        return operations, [*conditions, unchanged]

    async def _parked(self, parking: asyncio.Future[Receipt]) -> bool:
        """Whether it was put aside; if something has come in the meantime, it goes on."""
        self._parking = None
        try:
            parking.result()
        except Conflict:
            await self.mail.read()
            if await self._obey():
                return True
            self.waiting.distribute()
            self.waiting.tick()
            if self.runnable.count == 0:
                self._idle()
            return False
        except Error as exc:
            raise Abandoned from exc
        self.message.committed()
        return True

    async def _pause(self, fault: Fault | None) -> None:
        """Stay where it is until somebody says that it goes on; unless that, or its end, was said in the meantime."""
        self._ending = True
        while True:
            if self.mail.has(CANCEL):
                await self._end(CANCELLED, None, None)
                return
            letters = self.mail.all(PAUSE, RESUME)
            resumed = fault is None and bool(letters) and letters[-1].name == RESUME

            def parts(letters: list[Letter] = letters, resumed: bool = resumed) -> Parts:
                read = [Delete(letter.key) for letter in letters]
                if resumed:
                    operations, conditions = split(self.message.releasing())
                    return [*operations, *read], list(conditions)
                aside, needed = self.standing.put_aside(PAUSED, (), None, fault)
                return [*aside, self.journal.event("paused", error=fault), *read], [*needed, self.mail.unchanged]

            try:
                await self._close(parts)
            except Conflict:
                await self.mail.read()
            else:
                self.message.committed()
                if not resumed:
                    log.info("execution %s of %s is paused", self.meta.id, self.meta.name)
                return

    async def _close(self, parts: Callable[[], Parts]) -> None:
        try:
            await self.journal.close(parts)
        except Conflict:
            raise
        except Error as exc:
            raise Abandoned from exc

    async def _hand_over(self) -> None:
        """Give the message back, so that another worker goes on at once."""
        self.journal.left = True
        await self._stop_code()
        self._ending = True
        self._flush_all()

        def parts() -> Parts:
            operations, conditions = split(self.message.releasing())
            begun, needed = self.standing.opening() if self.journal.opening is not None else ([], [])
            return [*operations, *begun], [*conditions, *needed]

        await self._close(parts)
        self.message.committed()

    async def _obey(self) -> bool:
        """Do what was asked of the worker: whether that was the end of this run."""
        if not self.mail.all(CANCEL, PAUSE, RESUME):
            return False
        if self.mail.has(CANCEL):
            await self._stop_code()
            await self._end(CANCELLED, None, None)
            return True
        is_paused = self.mail.all(PAUSE, RESUME)[-1].name == PAUSE
        if is_paused:
            self.journal.left = True
            await self._stop_code()
            await self._pause(None)
            return True
        for name in (PAUSE, RESUME):
            while (letter := self.mail.take(name)) is not None:
                self.journal.stage([Delete(letter.key)])
        return False

    # --- its end ---

    async def _end(self, status: str, value: msgspec.Raw | None, fault: Fault | None) -> None:
        """Result, what its parent is told, and the end of its message are one commit."""
        self._ending = True
        self._host.make_room(self.message)  # who is told of its end may have the next one for us
        self._flush_all()
        if status != COMPLETED:
            await cancel_children(self)
        blob: BlobRef | None = None
        kept = Part((), ())
        if value is not None and len(bytes(value)) > INLINE_BYTES_MAX:
            blob, kept = await self.keep(bytes(value), "~result")
            value = None
        was = self.standing.now
        for _ in range(TRIES_MAX):
            now = self.clock.now_ms()
            to = Execution(
                was.id, was.name, status, now, was.started_at or now, now, fault, value or raw(None, ""), blob
            )
            ttl_ms, archiving = ending(self.scope, self.queue_of(self.meta.name), self.meta, status)
            telling_parts = await telling(self.scope, self.queue_of, self.meta, outcome_of(to))
            slot_parts = await leaving(self.scope, self.queue_of(self.meta.name), self.meta, was.rests)
            try:
                called_off = calling_off(self.meta.id, self.journal.records.values())
                others = telling_parts, slot_parts, called_off, archiving
                await self._close(lambda: self.standing.ended(self.journal, to, kept, ttl_ms, *others))  # noqa: B023 - sent before it changes
            except Conflict:
                continue
            self.standing.now = to
            self.message.committed()
            why = "" if fault is None else f": {fault.type}, as `holdfast workflow show` tells in full"
            word = "been cancelled" if status == CANCELLED else status
            level = logging.WARNING if status == FAILED else logging.INFO
            log.log(level, "execution %s of %s has %s%s", was.id, was.name, word, why)
            return
        raise Abandoned
