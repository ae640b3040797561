"""TLS for the ports of a keeper, begun only on connections that are counted.

Whoever listens with TLS itself (`create_server(ssl=…)`) hears of a connection when its handshake is over, and until then
nobody can count it or close it. So a port listens without, and a connection is counted here before it is asked for TLS. When
that is done the port's own protocol begins, and the port's own limits count.

    how many    at most HANDSHAKES_MAX of a port; beyond that the one that has taken longest makes room
    how long    HANDSHAKE_S

So somebody who only connects takes a bounded number of file descriptors, and nobody's place: who shakes hands at once is not
the one that has taken longest.

How it fails. Who is too late or one too many is closed without a word, for there is no language yet; the log says so, as of
all who do not get in (`refusals.py`). Of a handshake that goes wrong the client tells.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final

from holdfast.errors import Error, Unavailable
from holdfast.server.sockets import peer_of

HANDSHAKE_S: Final = 5.0
"""How long a connection may take for its TLS handshake."""
HANDSHAKES_MAX: Final = 256
"""Connections of one port that shake hands at once."""

TurnedAway = Callable[[Error, str], None]
"""Told of each that did not get in, and from where it came."""


class Handshakes:
    """The connections of one port that are not TLS yet."""

    def __init__(self, context: ssl.SSLContext, turned_away: TurnedAway) -> None:
        self._context = context
        self._turned_away = turned_away
        self._under_way: dict[asyncio.Task[None], str] = {}
        """And from where they come; the oldest first."""

    def __len__(self) -> int:
        return len(self._under_way)

    def before(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """What a listening socket gives a new connection to; after the handshake, what `make` gives goes on with it."""
        return _Accepted(self, make)

    def begin(self, connection: socket.socket, peer: str, make: Callable[[], asyncio.Protocol]) -> None:
        task = asyncio.get_running_loop().create_task(self._shake(connection, peer, make))
        self._under_way[task] = peer
        task.add_done_callback(lambda task: self._ended(task, connection))
        if len(self._under_way) > HANDSHAKES_MAX:
            oldest = next(iter(self._under_way))
            self._turned_away(
                Unavailable(
                    f"more than {HANDSHAKES_MAX} connections have not finished their TLS handshake, and this one has taken longest"
                ),
                self._under_way.pop(oldest),
            )
            oldest.cancel()

    def close(self) -> None:
        """Let go of all of them."""
        for task in self._under_way:
            task.cancel()

    def _ended(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._under_way.pop(task, None)
        if task.cancelled():
            connection.close()

    async def _shake(self, connection: socket.socket, peer: str, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S)
        except ConnectionAbortedError:
            self._turned_away(Unavailable(f"no TLS handshake within {HANDSHAKE_S:g} s"), peer)
        except OSError:
            connection.close()  # it speaks no TLS, or has gone


class _Accepted(asyncio.Protocol):
    """One connection, until it is known: its socket is taken out of the transport before anything is read."""

    def __init__(self, handshakes: Handshakes, make: Callable[[], asyncio.Protocol]) -> None:
        self._handshakes = handshakes
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            connection.setblocking(False)
            self._handshakes.begin(connection, peer_of(transport), self._make)
        finally:
            transport.abort()  # type: ignore[attr-defined]  # its own descriptor; the connection has another
