"""A running target as its launcher sees it: output, input, control, and how it ended.

Output is read from the target's pipes only when somebody asks for it, so a reader that stops reading stops the writer, and
this side keeps no more than one read in memory. After the end, what is in the pipes can still be read. Everything else is a
message to the warden (warden.py), which answers for the tree; here is only what to do when it does not answer: it is killed, and the
zygote and `settle_leftovers` end what it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import NESTING_MAX, check_json, decode
from holdfast.errors import Conflict, InvalidInput, OutcomeUnknown, Unavailable
from holdfast.processes.kernel import send
from holdfast.processes.leftovers import SETTLING_S, is_living, settle_leftovers
from holdfast.processes.messages import (
    Answer,
    Failure,
    Hello,
    Measure,
    Outcome,
    Over,
    Pause,
    Reason,
    Refused,
    Resume,
    Started,
    Stop,
    frame,
    outcomes,
    reports,
)
from holdfast.processes.orders import Order

READ_BYTES: Final = 256 * 1024
"""The most that one step of `output` gives."""
GRACE: Final = 0.7
"""Seconds between TERM and KILL, so that a stop is done within one."""
ANSWER_S_MAX: Final = 2.0
"""How long a warden may take to answer."""
DEATH_S_MAX: Final = 10.0
"""How long a killed tree is waited for before its outcome is called unknown."""
OUTCOME_BYTES_MAX: Final = 64 * 1024 * 1024
TIMEOUT_CODE: Final = 124
"""The exit code of a timeout, as the command `timeout` has it."""

Stream = Literal["stdout", "stderr"]
StopReason = Literal["stopped", "timeout", "killed"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree uses, all its members together."""

    memory: int
    """Bytes now."""
    peak_memory: int
    cpu_seconds: float
    """Since the start, ended members included."""
    fds: int
    max_fds: int
    processes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended; its whole tree is dead. Of a `lost` one the figures are not known, and are 0."""

    reason: Reason
    code: int
    """As shells tell it: the child's own, 128 + n for a signal n; 124 for a timeout."""
    exit_code: int | None
    """What the child itself exited with; None if a signal ended it."""
    signal: int | None
    peak_memory: int
    cpu_seconds: float
    max_fds: int
    duration: float
    """Seconds."""
    value: bytes | None = None
    """What a function returned, as JSON; None if it did not return, and for commands."""
    failure: Failure | None = None
    """What a function raised."""

    @property
    def result(self) -> Any:
        """What a function returned."""
        if self.value is None:
            raise Conflict(
                "it returned nothing: it was no function, or did not come to its end; see reason, code and failure"
            )
        return decode(self.value)


class Pipe:
    """The reading end of a pipe, closed once."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _nothing(*_: object) -> None:
    """What a child without a link says."""


class Child:
    """A target that was started. Made by `Launcher.start`."""

    def __init__(
        self,
        order: Order,
        streams: dict[Stream, Pipe],
        stdin: Pipe | None,
        outcome: Pipe,
        settled: Callable[[int], Awaitable[None]],
        started_at_ms: int,
    ) -> None:
        self.order = order
        self.pid = 0
        """The target's; its warden is another."""
        self._started_at_ms = started_at_ms
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._stdin = stdin
        self._outcome_pipe = outcome
        self._settled = settled
        self._said: Callable[[bytes], object] = _nothing
        self._close: Callable[[], object] = _nothing
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._started: asyncio.Future[Started | Refused] = self._loop.create_future()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._answers: deque[asyncio.Future[Answer]] = deque()
        self._asked: Reason | None = None
        self._outcome = bytearray()
        self._loop.add_reader(outcome.fd, self._read_outcome)
        self._burial: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "ended" if self._ended.done() else "running"
        return f"<Child {self.pid} {state} {self.order.marker}>"

    @property
    def started_at(self) -> datetime:
        """When it was started, by the launcher's clock."""
        return as_datetime(self._started_at_ms)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    # --- output and input ---

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """What it prints, as it prints it, each stream in order. One reader at a time; the next goes on where this one stopped."""
        while self._streams:
            progress = False
            for name, pipe in list(self._streams.items()):
                over = self._ended.done()  # asked before reading: then nobody writes after what is read
                try:
                    data = os.read(pipe.fd, READ_BYTES)
                except BlockingIOError:
                    if not over:
                        continue
                    data = b""  # somebody outside the tree was given the pipe; the tree itself is dead
                if data:
                    progress = True
                    yield name, data
                else:
                    self._streams.pop(name, None)
                    pipe.close()
            if progress:
                await asyncio.sleep(0)  # who prints without end must not keep the loop
            elif self._streams:
                await self._readable()

    async def _readable(self) -> None:
        woken = asyncio.Event()

        def wake(*_: object) -> None:
            woken.set()

        fds = [pipe.fd for pipe in self._streams.values()]
        for fd in fds:
            self._loop.add_reader(fd, wake)
        self._ended.add_done_callback(wake)
        try:
            await woken.wait()
        finally:
            self._ended.remove_done_callback(wake)
            for fd in fds:
                self._loop.remove_reader(fd)

    async def write(self, data: bytes) -> None:
        """Write to the input of an interactive child; waits while it does not read."""
        if not self.order.interactive:
            raise InvalidInput("this order is not interactive: it has no input to write to")
        left = memoryview(data)
        while left:
            pipe = self._stdin
            if pipe is None:
                raise InvalidInput("the input of this child is closed")
            try:
                left = left[os.write(pipe.fd, left) :]
            except BlockingIOError:
                await self._writable(pipe.fd)
            except OSError:
                self.close_stdin()
                raise InvalidInput("the child reads no more input: it has closed it, or has ended") from None

    async def _writable(self, fd: int) -> None:
        woken = asyncio.Event()
        self._loop.add_writer(fd, woken.set)
        try:
            await woken.wait()
        finally:
            self._loop.remove_writer(fd)

    def close_stdin(self) -> None:
        """Say that there is no more input."""
        if self._stdin is not None:
            self._loop.remove_writer(self._stdin.fd)
            self._stdin.close()
            self._stdin = None

    # --- control ---

    async def usage(self) -> Usage:
        """What its tree uses now; after the end, what it used."""
        if not self._ended.done():
            with contextlib.suppress(Conflict):
                answer = await self._ask(Measure())
                return Usage(
                    answer.memory,
                    answer.peak_memory,
                    answer.cpu_seconds,
                    answer.fds,
                    answer.max_fds,
                    answer.processes,
                )
        ended = await self.wait()
        return Usage(0, ended.peak_memory, ended.cpu_seconds, 0, ended.max_fds, 0)

    async def pause(self) -> None:
        """Stop the CPU of its whole tree; its timeout stands still too."""
        await self._ask(Pause())

    async def resume(self) -> None:
        """Let it go on."""
        await self._ask(Resume())

    async def stop(self, reason: StopReason = "stopped", *, grace: Duration | None = None) -> Ended:
        """Ask its tree to end (TERM), and kill it after the grace. The first reason that was accepted is the one it ends with."""
        return await self._end(reason, duration_ms(GRACE if grace is None else grace, name="grace"))

    async def kill(self) -> Ended:
        """Kill its tree. Returns when all of it is dead."""
        return await self._end("killed", 0)

    async def wait(self) -> Ended:
        """How it ended, when it has."""
        return await asyncio.shield(self._ended)

    async def _end(self, reason: StopReason, grace_ms: int) -> Ended:
        if self._asked is None:
            self._asked = reason
        with contextlib.suppress(Conflict):
            self._post(Stop(reason, grace_ms))
        await asyncio.wait({self._ended}, timeout=grace_ms / 1000 + ANSWER_S_MAX)
        if not self._ended.done():
            # The warden does not do its work; its death sets the zygote to it.
            hello = self._hello.result()
            send(hello.pid, hello.started, signals.SIGKILL)
            await asyncio.wait({self._ended}, timeout=DEATH_S_MAX)
        if not self._ended.done():
            raise OutcomeUnknown(
                f"the processes of {self.order.marker!r} were killed and are not dead; wait() tells when they are"
            )
        return self._ended.result()

    def _post(self, request: msgspec.Struct) -> asyncio.Future[Answer]:
        if self._ended.done() or self._burial is not None:
            raise Conflict("this child has ended")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answers.append(answer)
        self._said(frame(request))
        return answer

    async def _ask(self, request: msgspec.Struct) -> Answer:
        answer = self._post(request)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), ANSWER_S_MAX)
        except TimeoutError:
            raise Unavailable("the warden of this child does not answer; kill() ends both") from None

    # --- what its warden says ---

    def _hear(self, body: bytes) -> None:
        report = reports.decode(body)
        match report:
            case Hello():
                self._hello.set_result(report)
            case Started(pid=pid):
                self.pid = pid
                self._started.set_result(report)
            case Refused():
                self._started.set_result(report)
            case Answer():
                answer = self._answers.popleft()
                if not answer.done():
                    answer.set_result(report)
            case Over():
                self._bury(report)

    def _is_gone(self) -> None:
        """The warden's end is closed, and it has not said that the tree is dead."""
        lost = Unavailable("its warden was killed")
        for early in (self._hello, self._started):
            if not early.done():
                early.set_exception(lost)
                early.exception()
        if not self._ended.done() and self._burial is None and self.pid:
            self._burial = self._loop.create_task(self._bury_the_lost())

    async def _bury_the_lost(self) -> None:
        await self._settled(self._hello.result().pid)
        target = self._started.result()
        began = target.started if isinstance(target, Started) else 0
        while True:
            try:
                await settle_leftovers(self.order.marker)
            except OutcomeUnknown:
                continue  # no end is told without proof
            if not is_living(self.pid, began):
                break
            send(self.pid, began, signals.SIGKILL)
            await asyncio.sleep(SETTLING_S)
        killed = Over(self._asked or "lost", None, int(signals.SIGKILL), 0, 0.0, 0, 0)
        self._bury(killed)

    def _bury(self, over: Over) -> None:
        self._read_outcome(last=True)
        outcome = self._decoded()
        code = over.code if over.code is not None else 128 + (over.signal or 0)
        ended = Ended(
            over.reason,
            TIMEOUT_CODE if over.reason == "timeout" else code,
            over.code,
            over.signal,
            over.peak_memory,
            over.cpu_seconds,
            over.max_fds,
            over.duration_ms / 1000,
            outcome.value,
            outcome.failure,
        )
        if not self._started.done():
            self._started.set_result(Started(0))  # it was ended before it began
        self._ended.set_result(ended)
        self.close_stdin()
        self._hang_up()
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(Conflict("this child has ended"))
                answer.exception()

    # --- a function's outcome ---

    def _read_outcome(self, last: bool = False) -> None:
        """What is in the pipe; at the end all of it."""
        while self._outcome_pipe.fd >= 0:
            try:
                data = os.read(self._outcome_pipe.fd, READ_BYTES)
            except BlockingIOError:
                if not last:
                    return
                data = b""
            self._outcome += data
            if not data or len(self._outcome) > OUTCOME_BYTES_MAX:
                self._loop.remove_reader(self._outcome_pipe.fd)
                self._outcome_pipe.close()
            elif not last:
                return

    def _decoded(self) -> Outcome:
        if not self._outcome:
            return Outcome()
        try:
            outcome = outcomes.decode(self._outcome)
            if outcome.value is not None:
                check_json(outcome.value, levels=NESTING_MAX)
            return outcome
        except Exception as exc:
            return Outcome(failure=Failure("Damaged", f"the outcome of the function is unreadable: {exc}", ""))
        finally:
            self._outcome = bytearray()

    def _release(self) -> None:
        """Close every descriptor; nobody will read any more."""
        for pipe in self._streams.values():
            self._loop.remove_reader(pipe.fd)
            pipe.close()
        self._streams.clear()
        self.close_stdin()
        if self._outcome_pipe.fd >= 0:
            self._loop.remove_reader(self._outcome_pipe.fd)
            self._outcome_pipe.close()
        self._hang_up()

    def _hang_up(self) -> None:
        """Nothing is said any more; a child that nobody holds is freed at once, with its descriptors."""
        self._close()
        self._said, self._close = _nothing, _nothing
