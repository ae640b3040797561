"""One task in the hands of a manager: launched, listened to, controlled, and written down when it has ended.

The order of things is that of the ledger: spawning is committed before anything is started, running acknowledges the request when it
is, and the end is one commit with all that belongs to it. Output is read only as fast as it is kept, so a program that prints
more than the store takes waits in its own `write`.

Commands are done one after the other, in the order in which they were given; what is typed into a task has a line of its own, because
a program that does not read must not keep its STOP from being heard. A command that ends a task is answered when that is written:
its processes are dead then.

How it fails. A step that is refused because the task is not this manager's any more (LeaseLost) ends its processes and writes
nothing. Whatever else goes wrong here is a failure of the task, with its reason: nothing says that it runs when nobody runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from holdfast.errors import Conflict, Error, InvalidInput, LeaseLost
from holdfast.layers.task_control import ENDING, Control
from holdfast.layers.task_launch import Launch, TaskOutcome
from holdfast.layers.task_ledger import TaskLedger
from holdfast.layers.task_states import StopReason, TaskError, TaskState
from holdfast.manager.orders import MIB, input_of, order_of, outcome_of, refusal_of
from holdfast.processes import Child, Launcher

WRITES_MAX: Final = 64
"""Commands to write that wait because a program does not read."""
GIVEN: Final[dict[str, StopReason]] = {"STOP": "stop", "CANCEL": "cancel", "KILL": "kill"}

log = logging.getLogger("holdfast.manager")


class Run:
    """A task from when a manager takes it to when it lets go of it."""

    def __init__(self, tid: str, ledger: TaskLedger, launcher: Launcher, marker: str, env: Mapping[str, str]) -> None:
        self.tid = tid
        self._ledger = ledger
        self._launcher = launcher
        self._marker = marker
        self._env = env
        self._launch: Launch | None = None
        self._child: Child | None = None
        self._step = asyncio.Lock()
        """Held by whoever changes the state."""
        self._commands: asyncio.Queue[Control | None] = asyncio.Queue()
        self._typed: asyncio.Queue[Control | None] = asyncio.Queue(WRITES_MAX)
        self._last_command = ""
        self._started = asyncio.Event()
        """Set when it runs, or never will."""
        self._over = asyncio.Event()

    # --- its life ---

    async def go(self, launch: Launch) -> None:
        """From the commit that took it to the one that ends it."""
        self._launch = launch
        listening: list[asyncio.Task[None]] = []
        try:
            for control in await self._ledger.pending(self.tid):
                self.control(control)
            outcome = await self._start(launch)
            if outcome is None:
                loop = asyncio.get_running_loop()
                listening = [loop.create_task(self._obey()), loop.create_task(self._type(launch))]
                outcome = await self._follow(launch)
            async with self._step:
                await self._finish(launch, outcome)
        except LeaseLost as exc:
            log.warning("task %s is let go of: %s", self.tid, exc)
        except Exception as exc:  # a task must not say that it runs when nobody runs it
            log.exception("task %s cannot be written down as it should be, and has failed", self.tid)
            await self._abandon(launch, exc)
        finally:
            self._over.set()
            self._started.set()
            await self._let_go(launch, listening)

    async def _start(self, launch: Launch) -> TaskOutcome | None:
        """Launch it; None when it runs."""
        try:
            order = order_of(launch, self._marker, self._env)
            self._child = child = await self._launcher.start(order)
        except Error as exc:
            log.info("task %s could not be started: %s", self.tid, exc)
            return refusal_of(exc)
        await self._ledger.running(launch, child.pid)
        self._started.set()
        return None

    async def _follow(self, launch: Launch) -> TaskOutcome:
        child = self._child
        assert child is not None  # noqa: S101 - it was started
        try:
            async for stream, data in child.output():
                await self._ledger.output(launch, [(stream, data)])
        except (LeaseLost, Conflict):
            raise
        except (Error, OSError) as exc:  # such as a disk that is full
            log.warning("the output of task %s cannot be kept, and it is ended: %s", self.tid, exc)
            ended = await child.kill()
            await launch.drop_output()
            return TaskOutcome("failed", ended.code, error=_unkept(exc))
        return outcome_of(await child.wait(), launch.spec)

    async def _finish(self, launch: Launch, outcome: TaskOutcome) -> None:
        """The commit that ends it; without output and result, and failed, if those cannot be kept."""
        try:
            await self._ledger.finished(launch, outcome)
        except (LeaseLost, Conflict):
            raise
        except (Error, OSError) as exc:
            log.warning("the outcome of task %s cannot be kept, and it has failed: %s", self.tid, exc)
            await launch.drop_output()
            await self._ledger.finished(launch, TaskOutcome("failed", outcome.return_code, error=_unkept(exc)))

    async def _abandon(self, launch: Launch, exc: Exception) -> None:
        if self._child is not None:
            await self._child.kill()
        try:
            await self._ledger.abandon(launch, f"{type(exc).__name__}: {exc}"[:500])
        except Error as failure:
            log.error("task %s is let go of: %s", self.tid, failure)

    async def _let_go(self, launch: Launch, listening: list[asyncio.Task[None]]) -> None:
        """Whatever happened: no process of it lives, and nobody waits for an answer."""
        if self._child is not None and not self._child.has_ended:
            await self._child.kill()
        if not launch.state.ended:
            await launch.spool.discard()
        if listening:
            self._commands.put_nowait(None)
            await asyncio.wait(listening[:1])
            listening[1].cancel()
            await asyncio.gather(*listening, return_exceptions=True)
        if not launch.state.ended:
            return  # what it was told waits for whoever has it next
        with suppress(Error):
            for line in (self._commands, self._typed):
                while not line.empty():
                    if (control := line.get_nowait()) is not None:
                        await self._answer(control, "rejected", f"the task is {launch.state.status}")

    # --- what it is told ---

    def control(self, control: Control) -> None:
        """Take a command; one that was seen before is not done twice."""
        if control.id <= self._last_command:
            return
        self._last_command = control.id
        self._commands.put_nowait(control)

    async def end(self, reason: StopReason, by: str | None = None) -> None:
        """End it for this reason, or for the one it is being ended for already; returns when that is written."""
        await self._started.wait()
        launch, child = self._launch, self._child
        if launch is None or child is None:
            return
        async with self._step:
            if not launch.state.ended and launch.state.stop is None and launch.state.manager == self._ledger.tid:
                await self._ledger.stopping(launch, reason, by)
        if reason == "kill":
            await child.kill()
        else:
            await child.stop()
        await self._over.wait()

    async def _obey(self) -> None:
        """Do what comes, until it is over."""
        ending: list[asyncio.Task[None]] = []
        while (control := await self._commands.get()) is not None:
            if control.error is not None:
                await self._answer(control, "error", control.error)
            elif control.command in ENDING:
                ending.append(asyncio.get_running_loop().create_task(self._end(control)))
            elif control.command == "WRITE":
                await self._queue_write(control)
            else:
                await self._do(control)
        if ending:
            await asyncio.gather(*ending, return_exceptions=True)

    async def _do(self, control: Control) -> None:
        child, launch = self._child, self._launch
        assert child is not None  # noqa: S101 - it was started
        assert launch is not None  # noqa: S101
        try:
            match control.command:
                case "PAUSE" | "RESUME":
                    pausing = control.command == "PAUSE"
                    await (child.pause() if pausing else child.resume())
                    async with self._step:
                        if launch.state.paused != pausing and not self._over.is_set():
                            await self._ledger.pausing(launch, pausing)
                    await self._answer(control, "ok", "paused" if pausing else "running")
                case "PING":
                    await self._answer(control, "ok", "PONG")
                case _:
                    await self._answer(control, "ok", **await self._status(launch, child))
        except (LeaseLost, Conflict) as exc:
            await self._answer(control, "rejected", f"the task is ending: {exc}")
        except Error as exc:
            await self._answer(control, "error", str(exc))

    async def _status(self, launch: Launch, child: Child) -> dict[str, Any]:
        usage, state = await child.usage(), launch.state
        return {
            "state": state.status,
            "pid": state.pid,
            "attempt": state.attempt,
            "paused": state.paused,
            "memory_mb": round(usage.memory / MIB, 3),
            "peak_memory_mb": round(usage.peak_memory / MIB, 3),
            "cpu_seconds": round(usage.cpu_seconds, 3),
            "fds": usage.fds,
            "processes": usage.processes,
            "output_bytes": launch.spool.size,
        }

    async def _end(self, control: Control) -> None:
        launch = self._launch
        assert launch is not None  # noqa: S101 - it was started
        given = GIVEN[control.command]
        before = launch.state.stop
        await self.end(given, control.by)
        state = launch.state
        told = None if before is None else f"it was being ended already: {before.reason}; the first reason stays"
        done = state.ended and state.status in ("cancelled", "killed")
        await self._answer(
            control,
            "ok" if done and (before is None or given == "kill") else "rejected",
            told or f"the task is {state.status}",
            state=state.status,
            return_code=state.return_code,
        )

    # --- its input ---

    async def _queue_write(self, control: Control) -> None:
        launch = self._launch
        if launch is None or not launch.spec.interactive:
            await self._answer(control, "rejected", "the task is not interactive: it has no input to write to")
        elif self._typed.full():
            await self._answer(
                control, "rejected", f"{WRITES_MAX} writes wait already: the task does not read its input"
            )
        else:
            self._typed.put_nowait(control)

    async def _type(self, launch: Launch) -> None:
        child = self._child
        assert child is not None  # noqa: S101 - it was started
        if first := input_of(launch):
            with suppress(InvalidInput):  # it need not read it
                await child.write(first)
        if not launch.spec.interactive:
            child.close_stdin()
            return
        while (control := await self._typed.get()) is not None:
            try:
                await child.write(control.data)
                if control.closes:
                    child.close_stdin()
            except (InvalidInput, ValueError) as exc:
                await self._answer(control, "rejected", str(exc))
            else:
                await self._answer(control, "ok")

    async def _answer(
        self, control: Control, status: Literal["ok", "rejected", "error"], message: str | None = None, **details: Any
    ) -> None:
        try:
            await self._ledger.answer(control, status, message, **details)
        except (Conflict, LeaseLost) as exc:
            log.debug("command %s of task %s was answered already: %s", control.id, self.tid, exc)

    @property
    def state(self) -> TaskState | None:
        """The task as this manager wrote it last."""
        return None if self._launch is None else self._launch.state


def _unkept(exc: Exception) -> TaskError:
    return TaskError(type(exc).__name__, f"what it printed or returned could not be kept: {exc}")
