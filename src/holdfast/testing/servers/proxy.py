"""A TCP proxy that cuts connections where it hurts: before a request arrives, in its middle, after it took effect, and late.

It stands between an engine and its server, in a thread of its own. For each piece a client sends, `choose` says what
happens to it:

    None      it is passed on
    before    the connection ends, and the server never sees the piece
    inside    the server sees half of it, and then the connection ends
    after     the server does what it was asked, and the answer is lost
    late      the connection ends for the client at once; the server gets the piece LATE_S later, when the client may
              have sent it again
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Literal

Cut = Literal["before", "inside", "after", "late"]
CUTS: Final[tuple[Cut, ...]] = ("before", "inside", "after", "late")
PIECE: Final = 1 << 16
LATE_S: Final = 0.1
ANSWER_S: Final = 2.0
"""How long `after` waits for the answer that it throws away."""


class Proxy:
    """Listens on `port` of the loopback and passes everything on to `target_port`, but for what `choose` cuts."""

    def __init__(self, target_port: int, choose: Callable[[], Cut | None] = lambda: None) -> None:
        self._target_port = target_port
        self.choose = choose
        self.cuts: Counter[Cut] = Counter()
        self.port = 0
        self._loop: asyncio.AbstractEventLoop
        self._open: set[asyncio.StreamWriter] = set()
        self._refusing = False

    @classmethod
    @contextlib.contextmanager
    def running(cls, target_port: int, choose: Callable[[], Cut | None] = lambda: None) -> Iterator[Proxy]:
        proxy = cls(target_port, choose)
        ready, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(proxy._run(ready, end)), name="proxy", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield proxy
        finally:
            end.set()
            thread.join()

    def part(self) -> None:
        """A broken network: all connections end, and no new one is accepted until `heal`."""
        self._refusing = True
        self._loop.call_soon_threadsafe(self._cut_all)

    def heal(self) -> None:
        self._refusing = False

    async def _run(self, ready: threading.Event, end: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await asyncio.to_thread(end.wait)
        server.close()
        self._cut_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=ANSWER_S) if others else None

    def _cut_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, up_writer}
        answers = asyncio.create_task(_pass_on(up_reader, writer))
        try:
            with contextlib.suppress(OSError):
                await self._requests(reader, writer, up_reader, up_writer, answers)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            self._open -= {writer, up_writer}
            writer.transport.abort()
            up_writer.transport.abort()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
        answers: asyncio.Task[None],
    ) -> None:
        while piece := await reader.read(PIECE):
            cut = self.choose()
            if cut is None:
                up_writer.write(piece)
                await up_writer.drain()
                continue
            self.cuts[cut] += 1
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            if cut == "before":
                return
            if cut == "late":
                writer.transport.abort()
                await asyncio.sleep(LATE_S)
            up_writer.write(piece[: len(piece) // 2] if cut == "inside" else piece)
            await up_writer.drain()
            if cut != "inside":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(up_reader.read(1), ANSWER_S)
            return


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server's answers, as they come, until one side has ended."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()
