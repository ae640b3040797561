"""One connection of a client to a keeper: what is written leaves together, what comes is taken apart.

Whatever is said in one step of the loop leaves as one message; what is patient goes with whatever is said next, or a moment
later. What the connection is for, and what becomes of requests when it ends, is the client's (`remote_link.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from holdfast.errors import Error, IncompatibleStore, Unavailable
from holdfast.wire import (
    REPLY_BYTES_MAX,
    UNREADABLE,
    Committed,
    Failed,
    Frames,
    Hello,
    Receipts,
    Welcome,
    decode_reply,
    frame,
    raised,
)

if TYPE_CHECKING:
    from holdfast.engines.remote_link import Client

LOOK_S: Final = 2.5
"""How often a client looks whether its connection is alive."""
HELD_S: Final = 0.001
"""How long what is patient waits for something to be sent with. The keeper lets it wait for as long as it said."""


class Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(REPLY_BYTES_MAX)
        self._out: list[bytes] = []
        self._flushing: asyncio.Handle | None = None
        self._hurries = False
        """It is flushed in the loop's next step, and not later."""
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._look: asyncio.TimerHandle | None = None
        self._reason = "it was closed by the other side"
        self._heard = False
        self.unheard = 0
        """Bytes that were written, and that the other side may not have yet: it has said nothing since."""
        self.born_at = self.heard_at = self.mute_since = self._loop.time()

    async def greet(self, hello: Hello) -> Welcome:
        self.write(frame(hello))
        return await self._welcome

    def write(self, data: bytes, *, patient: bool = False) -> None:
        self._out.append(data)
        if self._hurries:
            return
        if not patient:
            self._hurries = True
            if self._flushing is not None:  # for those that are patient
                self._flushing.cancel()
            self._flushing = self._loop.call_soon(self._flush)
        elif self._flushing is None:
            self._flushing = self._loop.call_later(HELD_S, self._flush)

    def _flush(self) -> None:
        self._hurries, self._flushing = False, None
        if self._out and self._transport is not None and not self._transport.is_closing():
            data = b"".join(self._out)
            self.unheard += len(data)
            self._transport.write(data)
        self._out = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._check()

    def _check(self) -> None:
        self._client.look()
        self._look = self._loop.call_later(LOOK_S, self._check)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        self._heard = True
        self.unheard = 0 if self._transport is None else self._transport.get_write_buffer_size()
        frames, client = self._frames, self._client
        frames.feed(data)
        try:
            for body in frames.take(len(data)):
                message = decode_reply(body)
                if type(message) is Receipts:
                    client.committed(message.ids, message.receipts)
                elif type(message) is Committed:
                    client.committed([message.id], [message.receipt])
                elif isinstance(message, Welcome):
                    if not self._welcome.done():
                        self._welcome.set_result(message)
                elif isinstance(message, Failed) and message.id == 0:
                    self._refused(raised(message))
                else:
                    client.received(message, len(body) + 4)
        except (Error, *UNREADABLE) as exc:
            why = (
                "it speaks HTTP; the keeper's other port, usually 7420, is for this"
                if data[:4] == b"HTTP"
                else str(exc)
            )
            self._refused(IncompatibleStore(f"what answers at {client.address} is not a keeper, or a newer one: {why}"))
            self.abort()

    def _refused(self, error: Error) -> None:
        self._reason = str(error)
        if not self._welcome.done():
            self._welcome.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        reason = self._reason if exc is None else str(exc) or type(exc).__name__
        if not self._welcome.done():
            at = self._client.address
            if at.port and at.tls is None and not self._heard:
                reason = f"what answers at {at} said nothing ({reason}); a keeper with TLS is reached by holdfasts://"
            self._welcome.set_exception(Unavailable(reason))
        if not self._ended.done():
            self._ended.set_result(None)
        self._client.lost(self, reason)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self, seconds: float) -> None:
        """Send what is ready and end, within so long."""
        if self._transport is not None:
            self._flush()
            self._transport.close()
            await asyncio.wait([self._ended], timeout=seconds)
            self._transport.abort()
