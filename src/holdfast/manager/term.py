"""A term of a manager: from one registration to its end.

Four things go on at once: requests are taken as long as there is room, what dead managers left is adopted, commands are heard, and
pipelines are moved on. All of them wait for the feed. A term is over when the manager leaves, or when its lease is lost; then its
processes are killed, nothing more is written, and what was reserved goes back to the queue.

A manager that leaves because nobody needs it gives up its place on the host first, and looks once more then: whoever submits a task
and finds the place taken has been seen, and whoever finds it free starts another manager.

    PAUSE, RESUME    launch nothing until told otherwise; what runs goes on
    STOP             launch nothing more; tasks get the grace to come to their end, then they are stopped
    CANCEL, KILL     the same without grace; KILL kills them
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from holdfast.clock import Clock, duration_ms, sleep_or
from holdfast.engine import SCAN_MAX, Engine, cursor_at
from holdfast.errors import Conflict, Empty, Error, LeaseLost, NotFound
from holdfast.layers.messages import Message
from holdfast.layers.task_control import ENDING, Control
from holdfast.layers.task_ledger import TaskLedger
from holdfast.layers.task_states import MANAGERS, StopReason, TaskState
from holdfast.layers.task_submission import SPAWN_REQUESTS
from holdfast.manager.options import ManagerOptions
from holdfast.manager.running import GIVEN, Run
from holdfast.processes import Launcher, settle_leftovers
from holdfast.space import Space

RETRY_MS: Final = 200
"""After the feed could not be followed, or a request could not be looked at."""
LATE_MS: Final = 20
"""How long after the end of another manager's lease it is looked for: clocks differ."""

log = logging.getLogger("holdfast.manager")


class Lock(Protocol):
    """The manager's place on its host."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class Term:
    """One registration. Made by `Manager`."""

    def __init__(
        self,
        space: Space,
        engine: Engine,
        clock: Clock,
        ledger: TaskLedger,
        launcher: Launcher,
        options: ManagerOptions,
        place: Lock,
        marker: str,
        env: Mapping[str, str],
    ) -> None:
        self._space = space
        self._engine = engine
        self._clock = clock
        self._ledger = ledger
        self._launcher = launcher
        self._options = options
        self._place = place
        self._marker = marker
        self._env = env
        lease_ms = duration_ms(options.lease)
        self._queue = space.queue(SPAWN_REQUESTS, lease=lease_ms / 1000, on_stop="release", on_death="release")
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Of runs, and of what is done about commands."""
        self._slots = asyncio.Semaphore(options.concurrency)
        self._going = asyncio.Event()
        """Whether requests are taken."""
        self._going.set()
        self._interrupt = asyncio.Event()
        """Set by whoever needs the slot in which a request is waited for."""
        self._changed = asyncio.Event()
        """Whether the managers have changed."""
        self._busy_at = clock.now_ms()
        """When it last had something to do."""
        self._quiet = asyncio.Event()
        """Whether nothing runs."""
        self._quiet.set()
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._orders_to_end: list[Control] = []
        self._last_command = ""

    @property
    def is_leaving(self) -> bool:
        """Whether it launches nothing more."""
        return self._leaving.is_set()

    async def serve(self) -> bool:
        """Serve until it leaves (True) or its lease is lost (False)."""
        spawn = asyncio.get_running_loop().create_task
        keep = self._keep_up
        taking = [spawn(keep("taking requests", self._take)), spawn(keep("adopting", self._adopt))]
        pipelines = self._space.tasks.pipelines
        others = [spawn(keep("hearing commands", self._hear)), spawn(keep("moving pipelines on", pipelines.run))]
        lost, leaving = spawn(self._ledger.lease.lost.wait()), spawn(self._leaving.wait())
        try:
            await _first(*taking, *others, lost, leaving)
            await _stop(*taking)
            if not lost.done():
                emptying = spawn(self._empty())
                await _first(*others, lost, emptying)
            return not lost.done()
        finally:
            await _stop(*taking, *others, lost, leaving)
            await _stop(*self._tasks)

    async def _keep_up(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it until it is done. What goes wrong with one thing must not end everything that runs here."""
        while True:
            try:
                return await work()
            except Error as exc:
                log.warning("%s failed and goes on: %s", what, exc)
            except Exception:
                log.exception("%s failed unexpectedly and goes on", what)
            await self._pause()

    # --- taking ---

    async def _take(self) -> None:
        """Take requests, as long as there is room."""
        idle_ms = duration_ms(self._options.idle)
        while True:
            await self._going.wait()
            await self._slots.acquire()
            request = None
            try:
                left_ms = self._busy_at + idle_ms - self._clock.now_ms()
                request = await self._next_request(max(left_ms, 1) / 1000)
            except Empty:
                if await self._is_unneeded(idle_ms):
                    self._leaving.set()
                    return
            finally:
                if request is None:
                    self._slots.release()
            if request is not None:
                self._begin(request.id, self._from_request(request))

    async def _next_request(self, wait: float) -> Message | None:
        """The next request; None when its slot is wanted for something else, or nothing is to be taken for now."""
        spawn = asyncio.get_running_loop().create_task
        taking, interrupted = spawn(self._queue.take(wait=wait)), spawn(self._interrupt.wait())
        try:
            await asyncio.wait((taking, interrupted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop(interrupted, *(() if taking.done() else (taking,)))
        self._interrupt.clear()
        return None if taking.cancelled() else taking.result()

    async def _is_unneeded(self, idle_ms: int) -> bool:
        """Whether it may leave; it has given up its place then."""
        if self._runs:
            self._busy_at = self._clock.now_ms()
        if self._clock.now_ms() - self._busy_at < idle_ms:
            return False
        self._place.release()
        stats = await self._queue.stats()
        if stats.ready or stats.delayed:
            self._busy_at = self._clock.now_ms()
            return not self._place.acquire()
        return True

    def _begin(self, tid: str, work: Callable[[Run], Awaitable[None]]) -> None:
        """Work on a task, in a slot that was taken for it."""
        run = Run(tid, self._ledger, self._launcher, f"{self._marker}/{tid}", self._env)
        self._runs[tid] = run
        self._quiet.clear()

        async def whole() -> None:
            try:
                await work(run)
            except Error as exc:
                log.warning("task %s is let go of: %s", tid, exc)
            except Exception:
                log.exception("task %s is let go of: a defect", tid)
            finally:
                self._slots.release()
                if self._runs.get(tid) is run:
                    del self._runs[tid]
                self._busy_at = self._clock.now_ms()
                if not self._runs:
                    self._quiet.set()

        self._aside(whole())

    def _from_request(self, request: Message) -> Callable[[Run], Awaitable[None]]:
        async def work(run: Run) -> None:
            try:
                launch = await self._ledger.spawning(request)
                if launch is not None:
                    await run.go(launch)
            except Error:
                await self._give_back(request)
                raise
            await self._give_back(request)

        return work

    async def _give_back(self, request: Message) -> None:
        """A request that was not acknowledged must not stay in these hands: whoever gets it next sees what to do."""
        if not request.settled:
            await request.give_back(delay=RETRY_MS / 1000)

    # --- adopting ---

    async def _adopt(self) -> None:
        """Take over what dead managers left, as soon as their leases have ended."""
        following = asyncio.get_running_loop().create_task(self._follow_managers())
        try:
            while True:
                self._changed.clear()
                for manager in await self._ledger.dead():
                    async for tid in self._ledger.left_by(manager):
                        await self._take_over(tid, manager)
                await sleep_or(self._clock, await self._next_end(), self._changed)
        finally:
            await _stop(following)

    async def _take_over(self, tid: str, manager: str) -> None:
        try:
            state = await (await self._space.tasks.get(tid)).state()
        except NotFound:
            return
        if state.host == self._options.host:
            killed = await settle_leftovers(f"{self._marker}/{tid}")
            if killed:
                log.warning("%d processes that manager %s had left of task %s were ended", killed, manager, tid)
        self._interrupt.set()
        await self._slots.acquire()
        if tid in self._runs:  # its request has come meanwhile
            self._slots.release()
            return

        async def work(run: Run) -> None:
            launch = await self._ledger.adopt(tid, manager)
            if launch is not None:
                log.info("task %s is taken over from manager %s, attempt %d", tid, manager, launch.state.attempt)
                await run.go(launch)

        self._begin(tid, work)

    async def _next_end(self) -> int | None:
        """When the first of the other managers' leases ends, if it is not renewed."""
        page = await self._engine.scan(self._space.name, MANAGERS, limit=SCAN_MAX)
        ends = [each.expires_at for each in page.entries if each.expires_at and not each.key.endswith(self._ledger.tid)]
        return min(ends) + LATE_MS if ends else None

    async def _follow_managers(self) -> None:
        while True:
            try:
                cursor = await self._cursor()
                self._changed.set()
                async for _ in self._engine.watch(self._space.name, MANAGERS, cursor=cursor):
                    self._changed.set()
            except Error as exc:
                log.debug("the registry is followed anew: %s", exc)
                await self._pause()

    # --- being controlled ---

    async def _hear(self) -> None:
        """Hear commands, those included that came while the feed could not be followed."""
        while True:
            try:
                cursor = await self._cursor()
                for tid in (self._ledger.tid, *self._runs):
                    for control in await self._ledger.pending(tid):
                        self._dispatch(control)
                async for control in self._ledger.controls(cursor):
                    self._dispatch(control)
            except Error as exc:
                log.debug("commands are followed anew: %s", exc)
                await self._pause()

    def _dispatch(self, control: Control) -> None:
        if control.tid == self._ledger.tid:
            if control.id > self._last_command:
                self._last_command = control.id
                self._aside(self._obey(control))
        elif (run := self._runs.get(control.tid)) is not None:
            run.control(control)
        else:
            self._aside(self._answer_for_nobody(control))

    async def _answer_for_nobody(self, control: Control) -> None:
        """Commands to tasks that no manager has: those that end, or are not there, are told so; questions are answered."""
        state: TaskState | None
        try:
            state = await (await self._space.tasks.get(control.tid)).state()
        except Error:
            state = None
        if state is None:
            await self._answer(control, "error", f"there is no task {control.tid}")
        elif state.ended:
            await self._answer(control, "rejected", f"the task is {state.status}", state=state.status)
        elif state.manager is None and control.error is not None:
            await self._answer(control, "error", control.error)
        elif state.manager is None and control.command in ("STATUS", "PING"):
            await self._answer(control, "ok", "it waits for a manager that has room", state=state.status)

    async def _obey(self, control: Control) -> None:
        """Commands to the manager itself."""
        if control.error is not None:
            await self._answer(control, "error", control.error)
        elif control.command in ENDING:
            self._orders_to_end.append(control)
            await self.leave(GIVEN[control.command], control.by)
        elif control.command in ("PAUSE", "RESUME"):
            (self._going.clear if control.command == "PAUSE" else self._going.set)()
            self._interrupt.set()
            await self._answer(control, "ok", "paused" if control.command == "PAUSE" else "running")
        elif control.command == "WRITE":
            await self._answer(control, "rejected", "a manager has no input to write to")
        elif control.command == "PING":
            await self._answer(control, "ok", "PONG")
        else:
            await self._answer(control, "ok", **self._status())

    def _status(self) -> dict[str, Any]:
        info = self._ledger.info
        return {
            "state": "running",
            "host": info.host,
            "pid": info.pid,
            "capacity": info.capacity,
            "draining": self.is_leaving,
            "paused": not self._going.is_set(),
            "running": sorted(self._runs),
        }

    # --- leaving ---

    async def leave(self, reason: StopReason, by: str | None = None) -> None:
        """Launch nothing more, and end what runs: at once, or with "stop" and "shutdown" after the grace."""
        self._ledger.ends_as = "killed" if reason == "kill" else "cancelled"
        self._leaving.set()
        if reason in ("stop", "shutdown"):
            await sleep_or(self._clock, self._clock.now_ms() + duration_ms(self._options.grace), self._quiet)
        given: StopReason = "kill" if reason == "kill" else "shutdown"
        await asyncio.gather(*(run.end(given, by) for run in list(self._runs.values())), return_exceptions=True)

    async def _empty(self) -> None:
        """Wait for what runs, and answer those who wanted the end."""
        self._place.release()
        await self._ledger.drain()
        await self._quiet.wait()
        for control in self._orders_to_end:
            await self._answer(control, "ok", "the manager has ended")

    # --- what they share ---

    async def _answer(self, control: Control, status: Any, message: str | None = None, **details: Any) -> None:
        try:
            await self._ledger.answer(control, status, message, **details)
        except (Conflict, LeaseLost) as exc:
            log.debug("command %s of %s was answered already: %s", control.id, control.tid, exc)

    async def _cursor(self) -> str:
        found = await self._engine.spaces(self._space.name)
        return cursor_at(found[0].revision if found else 0)

    async def _pause(self) -> None:
        await self._clock.sleep_until(self._clock.now_ms() + RETRY_MS)

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.warning("something was not done: %s", exc)


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Return when one of them has ended; raise what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
