"""Running the HTTP port in an event loop that is there already.

    server = await serve_http(app, host="127.0.0.1", port=0)
    print(server.port)
    await server.stop()

Nothing is done about signals, logging or the event loop: that is the business of whoever runs it. Stopping takes a bounded
time: no new connection is taken, new requests are refused, feeds and those who stand in line for a lock are told that the
server stops, bodies that are not here yet are not waited for, what is running is finished; what has not finished within `Limits.stop_s_max` is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette

from holdfast.errors import Error, Unavailable
from holdfast.server.handshakes import Handshakes
from holdfast.server.http.limits import Limits
from holdfast.server.http.port import Port
from holdfast.server.http.protocol import bounded
from holdfast.server.sockets import unix_socket

PORT: Final = 7421
BACKLOG: Final = 512
TICK_S: Final = 0.01


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, and told to stop by an event rather than by looking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not self.leave.is_set():
            await self.on_tick(next(ticks) * 10)  # renews the date of the answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.leave.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, let everybody finish; whoever has not after the time there is, is cancelled."""
        state = self.server_state
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._until_idle()
        except TimeoutError:
            for task in list(state.tasks):
                task.cancel()

    async def _until_idle(self) -> None:
        while True:
            if not self.server_state.connections and not self.server_state.tasks:
                return
            await asyncio.sleep(TICK_S)


class HttpServer:
    """A port that is open. Made by `serve_http`."""

    def __init__(
        self,
        port: Port,
        server: _Uvicorn,
        task: asyncio.Task[None],
        listening: socket.socket,
        handshakes: Handshakes | None,
    ) -> None:
        self._port = port
        self._handshakes = handshakes
        self._server = server
        self._task = task
        self._is_unix = listening.family == socket.AF_UNIX
        address = listening.getsockname()
        self.path: Path | None = Path(address) if self._is_unix else None
        self.port: int | None = None if self._is_unix else int(address[1])
        """The real one, also when 0 was asked for."""

    @property
    def connections(self) -> int:
        """How many are open, those that shake hands included."""
        return len(self._server.server_state.connections) + len(self._handshakes or ())

    def limit(self, limits: Limits) -> None:
        """These limits from the next connection and the next request on; what is open stays."""
        self._port.shares.limits = limits

    async def wait(self) -> None:
        """Return when it has stopped."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Refuse what is new, finish what is running, close."""
        self._port.shares.stop()
        self._server.leave.set()
        if self._handshakes is not None:
            self._handshakes.close()
        limit = self._port.limits.stop_s_max + 1
        await asyncio.wait((self._task,), timeout=limit)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        if not self._task.done():
            self._task.cancel()
        await asyncio.wait((self._task,))
        if self.path is not None:
            self.path.unlink(missing_ok=True)


async def serve_http(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    path: str | Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    """Open the port: a host and a port (0: any that is free), or a unix socket; with TLS if a context is given."""
    shared: Port = app.state.port
    limits = shared.limits
    listening = unix_socket(Path(path)) if path is not None else _tcp(host, port)
    config = uvicorn.Config(
        app,
        http=bounded(shared),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_s_max,
        timeout_graceful_shutdown=limits.stop_s_max,
        h11_max_incomplete_event_size=limits.head_bytes_max,
        backlog=BACKLOG,
    )
    config.load()
    handshakes = None if tls is None else _with_tls(config, tls, shared)
    server = _Uvicorn(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
    opened = HttpServer(shared, server, task, listening, handshakes)
    while not server.started:
        if task.done():
            raise Unavailable("the HTTP port did not start") from task.exception()
        await asyncio.sleep(TICK_S)
    return opened


def _with_tls(config: uvicorn.Config, tls: ssl.SSLContext, shared: Port) -> Handshakes:
    """Connections come to uvicorn when they have shaken hands."""

    def turned_away(error: Error, peer: str) -> None:
        shared.keeper.turned_away("http", error, peer)

    def make(**given: Any) -> asyncio.Protocol:
        return handshakes.before(lambda: protocol(**given))

    protocol, handshakes = config.http_protocol_class, Handshakes(tls, turned_away)
    config.http_protocol_class = make  # type: ignore[assignment]  # it is only called
    return handshakes


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Inherited by every connection. Without it the second part of an answer waits for the client's delayed ACK, 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as exc:
        raise Unavailable(f"HTTP cannot listen at {host}:{port}: {exc.strerror or exc}; choose another") from exc
