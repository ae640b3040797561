"""The binary port: `holdfast.wire` spoken to any number of clients at once.

A connection says who it is (`Hello`) and then sends requests without waiting. Each is started in the order it came and
answered when it is done; answers that are ready together leave together. A connection has at most `in_flight` requests
under way: beyond that, nothing more of it is read until some are answered, so one that floods delays itself. The same
happens when it does not take its answers, when it has had its turn (TURN_FRAMES), and for a moment when it is over its rate.
How many there may be, and whose, is in `admission.py`.

How it fails. What cannot be read as a message is answered with `invalid_request`; if not even an id can be found, the
connection is closed. When a connection ends, its watches end, and what it had sent is finished: its client connects again
and asks with the same request id. A client that connects again is welcomed only after everything of its old connection is
settled (see `holdfast.wire`). A token that ends or is revoked closes its connections within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from holdfast.errors import Error
from holdfast.identity import Identity
from holdfast.middleware.telemetry import Observe, Span
from holdfast.server.admission import Admission
from holdfast.server.connection import Connection
from holdfast.server.handshakes import Handshakes
from holdfast.server.served import Served
from holdfast.server.sockets import unix_socket
from holdfast.server.unfinished import Unfinished
from holdfast.wire import (
    Goodbye,
)

CHECK_S: Final = 1.0
"""How often a connection's token and its silence are looked at."""
LINGER_S: Final = 1.0
"""How long a keeper that stops lets clients take their last answers."""


class Limits(msgspec.Struct, frozen=True):
    """What clients may do at most."""

    connections: int = 10_000
    connections_before_hello: int = 10_000
    connections_per_token: int = 10_000
    connections_for_administrators: int = 16
    in_flight: int = 1_024
    watches: int = 1_000
    frame_bytes: int = 24 * 1024 * 1024
    idle_s: float = 300.0
    frame_s: float = 60.0
    """From the beginning of a request to its end, while it is read; as long as a body over HTTP."""
    unfinished_bytes: int = 512 * 1024 * 1024
    """Large requests that have begun and are not complete, of all clients together."""
    unfinished_bytes_per_token: int = 64 * 1024 * 1024


class BinaryPort:
    """The listening side, and every connection it has."""

    def __init__(
        self, keeper: Served, limits: Limits, observe: Observe, span: Span | None = None, *, sole_owner: bool
    ) -> None:
        self.keeper = keeper
        self.limits = limits
        self.observe = observe
        self.span = span
        """Around every request, if somebody traces."""
        self.sole_owner = sole_owner
        """Nobody but this process commits to the store: what `Batch.fresh` promises is then known to hold."""
        self.connections: set[Connection] = set()
        self.admission = Admission(self)
        self.unfinished = Unfinished(self)
        self.clients: dict[tuple[str, str], Connection] = {}
        self.closing: str | None = None
        self._servers: list[asyncio.Server] = []
        self._handshakes: list[Handshakes] = []
        self._check: asyncio.TimerHandle | None = None
        self._last_gone: asyncio.Event | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take connections at an address; gives the port, which the system chooses if it is 0."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._maker(tls), host, port, backlog=1024)
        self._started(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_at(self, path: Path) -> None:
        """Take connections at a unix socket, which only this user can open."""
        loop = asyncio.get_running_loop()
        self._started(await loop.create_unix_server(lambda: Connection(self), sock=unix_socket(path)))

    def _maker(self, tls: ssl.SSLContext | None) -> Callable[[], asyncio.Protocol]:
        """What makes a connection; with TLS, after its handshake."""
        if tls is None:
            return lambda: Connection(self)
        handshakes = Handshakes(tls, self.turned_away)
        self._handshakes.append(handshakes)
        return lambda: handshakes.before(lambda: Connection(self))

    def turned_away(self, error: Error, peer: str) -> None:
        """One that has not said who it is, or is not believed, is told so and closed."""
        self.keeper.turned_away("binary", error, peer)

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.admission.leave(connection)
        self.unfinished.forget(connection)
        if self._last_gone is not None and not self.connections:
            self._last_gone.set()

    def _started(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._check is None:
            self._look()

    def _look(self) -> None:
        """Close whose token has ended, and who has been silent for too long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.look(now)
        self._check = loop.call_later(CHECK_S, self._look)

    @property
    def open_connections(self) -> int:
        """Those that shake hands included."""
        return len(self.connections) + sum(len(each) for each in self._handshakes)

    @property
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self.connections)

    @property
    def watchers(self) -> int:
        return sum(len(connection.watches) for connection in self.connections)

    def disconnect(self, concerned: Callable[[Identity], bool]) -> None:
        """Look at the connections of these identities now: whose token has ended is told so, others come again."""
        now = asyncio.get_running_loop().time()
        for connection in self._connections_of(concerned):
            connection.look(now)
            connection.close()

    def renew(self, concerned: Callable[[Identity], bool]) -> None:
        """What stands between these identities and the store is another: from their next request on, they ask through it."""
        for connection in self._connections_of(concerned):
            connection.renew()

    def _connections_of(self, concerned: Callable[[Identity], bool]) -> list[Connection]:
        return [each for each in self.connections if each.identity is not None and concerned(each.identity)]

    async def stop(self, reason: str, within_s: float) -> None:
        """Take nothing new, finish what is under way, close."""
        self.closing = reason
        for server in self._servers:
            server.close()
        for handshakes in self._handshakes:
            handshakes.close()
        for connection in self.connections:
            connection.send(Goodbye(reason))
            connection.watches.end()
        busy = [connection.settled() for connection in self.connections if connection.in_flight]
        if busy:
            await asyncio.wait([asyncio.ensure_future(each) for each in busy], timeout=within_s)
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            self._last_gone = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last_gone.wait(), LINGER_S)
        for connection in list(self.connections):
            connection.abandon()
        if self._check is not None:
            self._check.cancel()
        for server in self._servers:
            await server.wait_closed()
