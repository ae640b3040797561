"""The launcher: starts targets through a warm zygote and keeps count of them.

    async with Launcher() as launcher:
        child = await launcher.start(Order(argv=("make", "all"), timeout="5m", limits=Limits(memory_mb=512)))
        async for stream, data in child.output(): ...
        ended = await child.wait()

A launcher belongs to one event loop and uses no threads; between launches it costs nothing. Its children die with it: also when
it is killed, because every warden sees its socket close. A zygote that dies is replaced; what it forked lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Final

from holdfast.clock import Clock, SystemClock, duration_ms
from holdfast.codec import encode
from holdfast.errors import Error, InvalidInput, NotRunnable, OutcomeUnknown, TargetMissing, Unavailable
from holdfast.processes import kernel
from holdfast.processes.child import Child, Pipe, Stream
from holdfast.processes.leftovers import settle_leftovers
from holdfast.processes.links import Link
from holdfast.processes.messages import Ready, Refused, Settled, Work, frame, news
from holdfast.processes.orders import Allowed, Order

PIPE_BYTES: Final = 256 * 1024
"""The pipes of output are made this large where the system allows it."""
READY_S_MAX: Final = 20.0
"""How long a zygote may take to import what it is told to."""
HELLO_S_MAX: Final = 10.0
"""How long a fork may take, on a machine that is very busy."""
SPARE_S: Final = 0.02
"""After a launch, until a warden is forked for the next."""
ATTEMPTS_MAX: Final = 3
"""Zygotes that are tried for one launch."""
SETTLED_S_MAX: Final = 3.0
LEAVING_S_MAX: Final = 10.0
"""How long a zygote is waited for when the launcher closes."""

_ZYGOTE: Final = "holdfast.processes.zygote"
_SLOT_BYTES: Final = 256
"""Reserved in the zygote's environment; more than a marker with its name."""


class _Zygote:
    """The launcher's side of a zygote."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        # The slot stands last, where no process title reaches it.
        env = {**os.environ, kernel.SLOT_VARIABLE: "-" * _SLOT_BYTES}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and modules the launcher was given
                [sys.executable, "-P", "-m", _ZYGOTE, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=env,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.is_alive = True
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._settled: dict[int, asyncio.Event] = {}
        self._link = Link(ours, self._hear, self._is_gone)

    async def wait_ready(self) -> None:
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), READY_S_MAX)
        except TimeoutError:
            raise Unavailable(
                f"the zygote took more than {READY_S_MAX:.0f} s to start; is a module it imports stuck?"
            ) from None
        if ready.problem:
            raise InvalidInput(ready.problem)

    async def launch(self, fds: Sequence[int]) -> None:
        """Hand over the descriptors of a launch."""
        while self.is_alive:
            try:
                socket.send_fds(self._link.sock, [b"L"], list(fds))
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError:
                return  # seen as an end of the child's own link

    async def settled(self, warden: int) -> None:
        """Return when what a dead warden left is dead, or this zygote cannot tell."""
        if self.is_alive:
            event = self._settled.setdefault(warden, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), SETTLED_S_MAX)
            self._settled.pop(warden, None)

    async def leave(self) -> None:
        """Let it go, and wait for it: it stays until its wardens are done."""
        self._link.close()
        self._is_gone()
        deadline = asyncio.get_running_loop().time() + LEAVING_S_MAX
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self._process.kill()
                self._process.wait()
                return
            await asyncio.sleep(0.002)

    def _hear(self, body: bytes) -> None:
        match news.decode(body):
            case Ready() as ready:
                if not self._ready.done():
                    self._ready.set_result(ready)
            case Settled(warden):
                self._settled.setdefault(warden, asyncio.Event()).set()

    def _is_gone(self) -> None:
        self.is_alive = False
        for event in self._settled.values():
            event.set()
        if not self._ready.done():
            self._ready.set_exception(Unavailable("the zygote died while it started; what it printed says why"))
            self._ready.exception()


class Launcher:
    """Starts targets, each under a warden of its own."""

    def __init__(
        self,
        *,
        allowed: Allowed | None = None,
        preload: Sequence[str] = (),
        clock: Clock | None = None,
        spare: bool = False,
    ) -> None:
        """With `spare`, one warden is forked ahead and waits for its work: a launch takes half the time."""
        self._allowed = allowed
        self._keeps_spare = spare
        self._spare: tuple[_Zygote, Child] | None = None
        self._making: asyncio.Task[None] | None = None
        self._preload = tuple(preload)
        """Modules that are imported once, in the zygote; functions that need them start faster. They must start no thread."""
        self._clock = clock or SystemClock()
        self._zygote: _Zygote | None = None
        self._hiring = asyncio.Lock()
        self._children: set[Child] = set()
        """Those that have not ended."""
        self._known: weakref.WeakSet[Child] = weakref.WeakSet()
        """And those whose output somebody may still read."""
        self._closed = False

    async def __aenter__(self) -> Launcher:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def children(self) -> frozenset[Child]:
        """Those that have not ended."""
        return frozenset(self._children)

    @property
    def zygote_pid(self) -> int | None:
        """The zygote's process, if there is one."""
        return self._zygote.pid if self._zygote is not None and self._zygote.is_alive else None

    async def open(self) -> None:
        """Start the zygote, so that the first launch is a warm one."""
        kernel.check()
        try:
            await self._hire()
        except BaseException:
            await self.close()
            raise
        self._want_spare()

    async def start(self, order: Order) -> Child:
        """Start what is ordered. Raises NotRunnable or TargetMissing for a command that cannot be executed.

        A function is looked for by the new process, because that runs its module: what is wrong with it is told by `wait()`.
        """
        if self._allowed is not None:
            self._allowed.check(order)
        work = self._work(order)
        problem: Unavailable | None = None
        for _ in range(ATTEMPTS_MAX):
            try:
                zygote = await self._hire()
            except Unavailable as exc:
                problem = exc
                continue
            child = await self._try(order, work, zygote)
            if child is not None:
                return child
        raise Unavailable(
            "no process could be forked: the machine has too many, or too little memory. Nothing was started"
        ) from problem

    async def close(self) -> None:
        """Kill every child that lives, and end the zygote. Output that was not read is gone."""
        self._closed = True
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        if self._spare is not None:
            self._spare[1]._release()
        await asyncio.gather(*(child.kill() for child in self.children), return_exceptions=True)
        for child in tuple(self._known):
            child._release()
        async with self._hiring:
            if self._zygote is not None:
                await self._zygote.leave()
                self._zygote = None

    async def _hire(self) -> _Zygote:
        """A zygote that can fork; a new one if the last has died."""
        async with self._hiring:
            if self._closed:
                raise InvalidInput("this launcher is closed")
            if self._zygote is None or not self._zygote.is_alive:
                if self._zygote is not None:
                    await self._zygote.leave()
                self._zygote = _Zygote(self._preload)
            await self._zygote.wait_ready()
            return self._zygote

    async def _try(self, order: Order, work: Work, zygote: _Zygote) -> Child | None:
        """Launch once; None if certainly nothing was started."""
        child = self._take_spare(order, zygote) or await self._warden(order, zygote)
        if child is None:
            return None
        try:
            child._said(frame(work))
            try:
                started = await child._started
            except Unavailable:
                await zygote.settled(child._hello.result().pid)
                await settle_leftovers(order.marker)
                raise OutcomeUnknown(
                    "its warden was killed while it was being started: it may have begun, and is dead now"
                ) from None
        except BaseException:
            child._release()  # the warden sees it and ends what it started
            raise
        if isinstance(started, Refused):
            child._release()
            raise (TargetMissing if started.missing else NotRunnable)(started.message)
        if self._closed:
            child._release()
            raise InvalidInput("this launcher was closed while it started something; that is ended again")
        self._want_spare()
        self._known.add(child)
        if child.has_ended:
            return child
        self._children.add(child)
        child._ended.add_done_callback(lambda _: self._children.discard(child))
        return child

    async def _warden(self, order: Order, zygote: _Zygote) -> Child | None:
        """A child whose warden waits for its work; None if there is none, and certainly nothing was started."""
        try:
            child, sock, fds = self._prepare(order, zygote)
        except OSError as exc:
            raise Unavailable(
                f"no pipes for another process: {exc.strerror}; end some, or raise the limit of open files"
            ) from exc
        link = Link(sock, child._hear, child._is_gone)
        child._said, child._close = link.say, link.close
        try:
            try:
                await zygote.launch(fds)
            finally:
                for fd in fds:
                    os.close(fd)
            await asyncio.wait_for(asyncio.shield(child._hello), HELLO_S_MAX)
        except (Unavailable, TimeoutError):
            child._release()
            return None  # it had not been told what to do
        except BaseException:
            child._release()
            raise
        return child

    # --- a warden ahead ---

    def _want_spare(self) -> None:
        """Have a warden ready for the next launch. It is forked a moment later: what was just launched needs the processor."""
        if self._keeps_spare and self._spare is None and self._making is None and not self._closed:
            self._making = asyncio.get_running_loop().create_task(self._make_spare())

    async def _make_spare(self) -> None:
        try:
            await asyncio.sleep(SPARE_S)
            zygote = await self._hire()
            child = await self._warden(Order(argv=("true",)), zygote)
            if child is not None:
                self._spare = zygote, child
        except Error:
            return  # then the next launch forks for itself, and says what is wrong
        finally:
            self._making = None

    def _take_spare(self, order: Order, zygote: _Zygote) -> Child | None:
        """The warden that was forked ahead, if it lives and has the streams that this order needs."""
        if self._spare is None or order.interactive or order.quiet:
            return None
        (parent, child), self._spare = self._spare, None
        if parent is not zygote or child._started.done():  # it, or its zygote, was killed
            child._release()
            return None
        child.order, child._started_at_ms = order, self._clock.now_ms()
        return child

    def _prepare(self, order: Order, zygote: _Zygote) -> tuple[Child, socket.socket, list[int]]:
        """Pipes and sockets of a launch: our ends in a Child, theirs in the order of a warden's Streams."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(theirs.close)

            def opened(fd: int) -> int:
                undo.callback(os.close, fd)
                return fd

            def pipe() -> tuple[int, int]:
                reading, writing = os.pipe()
                return opened(reading), opened(writing)

            def null(flags: int) -> int:
                return opened(os.open(os.devnull, flags))

            streams: dict[Stream, Pipe] = {}
            theirs_fds: list[int] = []
            stdin = None
            if order.interactive:
                reading, writing = pipe()
                stdin = writing
                theirs_fds.append(reading)
            else:
                theirs_fds.append(null(os.O_RDONLY))
            reads: dict[Stream, int] = {}
            names: tuple[Stream, ...] = ("stdout", "stderr")
            for name in names:
                if order.quiet:
                    theirs_fds.append(null(os.O_WRONLY))
                else:
                    reads[name], writing = pipe()
                    theirs_fds.append(writing)
                    with contextlib.suppress(OSError):
                        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            outcome, writing = pipe()
            theirs_fds.append(writing)
            for fd in (*reads.values(), outcome, *([stdin] if stdin is not None else [])):
                os.set_blocking(fd, False)
            streams.update({name: Pipe(fd) for name, fd in reads.items()})
            started_at = self._clock.now_ms()
            held = None if stdin is None else Pipe(stdin)
            child = Child(order, streams, held, Pipe(outcome), zygote.settled, started_at)
            undo.pop_all()
            return child, ours, [theirs.detach(), *theirs_fds]

    def _work(self, order: Order) -> Work:
        limits = order.limits
        return Work(
            argv=None if order.argv is None else list(order.argv),
            function=order.function,
            parameters=encode([list(order.args), dict(order.kwargs)]),
            env=order.environment(os.environ),
            cwd=_cwd(order),
            timeout_ms=None if order.timeout is None else duration_ms(order.timeout, name="timeout"),
            memory_bytes=None if limits.memory_mb is None else max(1, round(limits.memory_mb * 1024 * 1024)),
            cpu_percent=limits.cpu_percent,
            max_fds=limits.max_fds,
            modules=None if self._allowed is None else self._allowed.modules,
            marker=order.marker,
            short=order.short,
            name=order.name,
        )


def _cwd(order: Order) -> str:
    try:
        return os.path.abspath(os.fspath(order.cwd or "."))
    except OSError as exc:
        raise NotRunnable("the launcher's own working directory is gone, and the order names no other") from exc
