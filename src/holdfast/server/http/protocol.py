"""A connection that has limits: uvicorn's own, with a time for everything a client may keep the server waiting for.

    the head      from the connection, or the first byte of the next request, to its end          408, closed
    the body      from the head to its end; who reads it answers 408 itself, this is behind that   closed
    an answer     that waits to be taken                                                           closed
    connections   that are too many (`server/admission.py`)                                         503, closed

Between two requests uvicorn's own limit holds. Refusals at this level have the same shape as all others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import ref

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.errors import Error, InvalidInput
from holdfast.server.http.failures import BodyTooSlow, failure_of, status_of
from holdfast.server.http.limits import Limits

if TYPE_CHECKING:
    from holdfast.server.http.port import Port

CONNECTION: Final = "holdfast.connection"
"""In the state of a request: a weak reference to its connection."""
GRACE_S: Final = 1.0
"""What a body's reader has to answer by itself before the connection is closed."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    port: ClassVar[Port]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, CONNECTION: ref(self)}
        self._phase: tuple[str, int] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.port.admission.come(self)
        self._look()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.admission.leave(self)
        self._enter(None)
        self._unstall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.write_s_max, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unstall()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidInput(f"this is not HTTP, or its head is over {self.limits.head_bytes_max:,} bytes"))

    def turn_away(self, error: Error) -> None:
        """It has not shown a token, and another one needs its place."""
        self.port.keeper.turned_away("http", error, "" if self.client is None else "{}:{}".format(*self.client))
        self._refuse(error)

    @property
    def limits(self) -> Limits:
        return self.port.limits

    def _look(self) -> None:
        """Which part of a request is outstanding."""
        if self.transport.is_closing():
            self._enter(None)
        elif self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._enter(("head", id(self.cycle)))
        elif self.conn.their_state is h11.SEND_BODY:
            self._enter(("body", id(self.cycle)))
        else:
            self._enter(None)

    def _enter(self, phase: tuple[str, int] | None) -> None:
        if phase == self._phase:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._phase = phase
        if phase is not None:
            limits = self.limits
            left = limits.head_s_max if phase[0] == "head" else limits.body_s_max + GRACE_S
            self._deadline = self.loop.call_later(left, self._too_late, phase[0])

    def _too_late(self, phase: str) -> None:
        if phase == "head":
            self._refuse(BodyTooSlow(f"the head of the request did not arrive within {self.limits.head_s_max:g} s"))
        else:
            self.transport.abort()

    def _refuse(self, error: Error) -> None:
        """Say why, and close."""
        body = msgspec.json.encode(failure_of(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        try:
            events = (h11.Response(status_code=status_of(error), headers=headers), h11.Data(body), h11.EndOfMessage())
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer is under way already
            self.transport.abort()
        else:
            self.transport.close()

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def bounded(port: Port) -> type[BoundedProtocol]:
    """Connections of this port, with its limits."""
    return type("Bounded", (BoundedProtocol,), {"port": port})
