"""The binary port: `holdfast.wire` spoken to any number of clients at once.

A connection says who it is (`Hello`) and then sends requests without waiting. Each is started in the order it came and
answered when it is done; answers that are ready together leave together. A connection has at most `in_flight` requests
under way: beyond that, nothing more of it is read until some are answered, so one that floods delays itself. The same
happens when it does not take its answers, when it has had its turn (TURN_FRAMES), and for a moment when it is over its rate.

How it fails. What cannot be read as a message is answered with `invalid_request`; if not even an id can be found, the
connection is closed. When a connection ends, its watches end, and what it had sent is finished: its client connects again
and asks with the same request id. A client that connects again is welcomed only after everything of its old connection is
settled (see `holdfast.wire`). A token that ends or is revoked closes its connections within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from holdfast.engine import Batch, Engine, Page, Submits, cursor_at
from holdfast.errors import AuthenticationFailed, Error, InvalidInput, RateLimitExceeded, Unavailable
from holdfast.identity import Identity
from holdfast.ids import is_generated
from holdfast.middleware.telemetry import Observe, Span
from holdfast.server.requests import WORK, Answer, id_in, unexpected
from holdfast.server.served import Served
from holdfast.server.sockets import unix_socket
from holdfast.wire import (
    HELLO_BYTES_MAX,
    PROTOCOL,
    REPLY_BYTES_MAX,
    UNREADABLE,
    Cancel,
    Changes,
    Commit,
    Done,
    Entries,
    Frames,
    Get,
    Goodbye,
    Grant,
    Hello,
    Message,
    Request,
    Scanned,
    Watch,
    Watching,
    Welcome,
    decode_request,
    failed,
    frame,
)

HELLO_S: Final = 10.0
"""How long a connection may take to say who it is."""
CHECK_S: Final = 1.0
"""How often a connection's token and its silence are looked at."""
TURN_FRAMES: Final = 64
"""How many requests are started of one connection before the others have a turn."""
PENALTY_S_MAX: Final = 0.1
"""How long nothing more is read of a connection that was over its rate; less if there is less to wait."""
LINGER_S: Final = 1.0
"""How long a keeper that stops lets clients take their last answers."""
CLIENT_ID_MAX: Final = 64

log = logging.getLogger("holdfast.server")


class Limits(msgspec.Struct, frozen=True):
    """What clients may do at most."""

    connections: int = 10_000
    in_flight: int = 1_024
    watches: int = 1_000
    frame_bytes: int = 24 * 1024 * 1024
    idle_s: float = 300.0


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
        self.clients: dict[tuple[str, str], Connection] = {}
        self.closing: str | None = None
        self._servers: list[asyncio.Server] = []
        self._check: asyncio.TimerHandle | None = None
        self._last_gone: asyncio.Event | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take connections at an address; gives the port, which the system chooses if it is 0."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), host, port, ssl=tls, backlog=1024)
        self._started(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_at(self, path: Path) -> None:
        """Take connections at a unix socket, which only this user can open."""
        loop = asyncio.get_running_loop()
        self._started(await loop.create_unix_server(lambda: Connection(self), sock=unix_socket(path)))

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
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
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self.connections)

    @property
    def watchers(self) -> int:
        return sum(len(connection.watches) for connection in self.connections)

    def disconnect(self, concerned: Callable[[Identity], bool]) -> None:
        """Look at the connections of these identities now: whose token has ended is told so, others come again."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.connections):
            if connection.identity is not None and concerned(connection.identity):
                connection.look(now)
                connection.close()

    async def stop(self, reason: str, within_s: float) -> None:
        """Take nothing new, finish what is under way, close."""
        self.closing = reason
        for server in self._servers:
            server.close()
        for connection in self.connections:
            connection.send(Goodbye(reason))
            connection.end_watches()
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


class _WatchState:
    """A watch of one connection: how much may still be sent."""

    __slots__ = ("granted", "more", "task")

    def __init__(self, granted: int) -> None:
        self.granted = granted
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, port: BinaryPort) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(HELLO_BYTES_MAX)
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self.identity: Identity | None = None
        self._held = 0
        """Why nothing more is read, besides a full pipe: a welcome, a watch that does not know where it stands, its rate."""
        self._engine: Engine
        self._at_once: Submits | None = None
        self._client: tuple[str, str] | None = None
        self._heard_at = self._loop.time()
        self._closed = False
        self._paused = False
        self._slowed = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.watches: dict[int, _WatchState] = {}
        self.in_flight = 0
        self._settled: asyncio.Event | None = None

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        port = self._port
        if port.closing is not None or len(port.connections) >= port.limits.connections:
            reason = port.closing or f"there are {len(port.connections):,} connections already; try again later"
            self._give_up(Unavailable(reason))
            return
        port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._port.gone(self)
        if self._client is not None and self._port.clients.get(self._client) is self and not self.in_flight:
            del self._port.clients[self._client]
        self.end_watches()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self._heard_at = self._loop.time()
        self._frames.feed(data)
        self._read()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._pause()

    def resume_writing(self) -> None:
        self._writable.set()
        self._resume()

    def _pause(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self._closed and self._writable.is_set() and not self._held:
            self._paused = False
            self._read()
            if not self._paused and not self._closed:
                self._transport.resume_reading()

    def _hold(self) -> None:
        self._held += 1
        self._pause()

    def _let_go(self) -> None:
        self._held -= 1
        self._resume()

    def _slow_down(self, retry_after: float) -> None:
        """It is over its rate: whatever else it has sent can wait."""
        if not self._slowed:
            self._slowed = True
            self._hold()
            self._loop.call_later(min(retry_after, PENALTY_S_MAX), self._go_on)

    def _go_on(self) -> None:
        self._slowed = False
        self._let_go()

    def _read(self) -> None:
        """Start every request that has come, up to what may be in flight."""
        limit, left = self._port.limits.in_flight, TURN_FRAMES
        try:
            while not self._paused and not self._closed:
                if self.in_flight >= limit:
                    self._pause()
                    return
                if not left:
                    self._hold()
                    self._loop.call_soon(self._let_go)
                    return
                left -= 1
                body = self._frames.next()
                if body is None:
                    return
                self._message(body)
        except Error as exc:
            self._give_up(exc)

    def _message(self, body: bytes) -> None:
        try:
            message = decode_request(body)
        except UNREADABLE as exc:
            self._send_failure(id_in(body), InvalidInput(f"the message cannot be understood: {exc}"))
            return
        if self.identity is None:
            self._hello(message)
        else:
            self._request(message)

    def _request(self, message: Request) -> None:
        if isinstance(message, Watch):
            self._watch(message)
        elif isinstance(message, Grant):
            self._grant(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Hello):
            raise InvalidInput("Hello was said already")
        else:
            self._start(message)

    # --- sending ---

    def send(self, message: Message) -> None:
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out) if len(self._out) > 1 else self._out[0])
        self._out = []

    def _send_failure(self, id: int | None, error: Error) -> None:
        """Answer a request with an error; without an id, it is the connection's and its last answer."""
        if id is None:
            self._give_up(error)
        else:
            self.send(failed(id, error))

    def _give_up(self, error: Error) -> None:
        self.send(failed(0, error))
        self.close()

    def close(self) -> None:
        """Send what is ready, and end."""
        self._flush()
        self._closed = True
        self._transport.close()

    def finish(self) -> None:
        """Send what is ready, say that nothing follows, and let the other side close.

        What it still sends is thrown away, but taken: closing with something unread makes the system forget what was sent.
        """
        self._flush()
        self._closed = True
        if self._transport.is_closing():
            return
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
                self._transport.resume_reading()
            else:  # TLS
                self._transport.close()
        except (OSError, RuntimeError):  # it is gone, or reading is on
            log.debug("a connection ended while the keeper stopped")

    def look(self, now: float) -> None:
        """Called about once a second."""
        limits, identity = self._port.limits, self.identity
        if identity is None:
            if now - self._heard_at > HELLO_S and not self._held:
                self._give_up(AuthenticationFailed(f"no Hello within {HELLO_S:g} s"))
        elif not self._port.keeper.is_valid(identity):
            self._give_up(AuthenticationFailed("the token has ended or was revoked"))
        elif now - self._heard_at > limits.idle_s and not self.in_flight:
            self._give_up(Unavailable(f"nothing was heard for {limits.idle_s:g} s"))
        elif not self._writable.is_set() and now - self._heard_at > limits.idle_s:
            self._transport.abort()  # it does not take its answers either

    # --- the beginning ---

    def _hello(self, message: Request) -> None:
        if not isinstance(message, Hello):
            raise AuthenticationFailed("the first message must be Hello with a token")
        if message.protocol != PROTOCOL:
            raise InvalidInput(f"this keeper speaks version {PROTOCOL} of the protocol, not {message.protocol}")
        if not 0 < len(message.client) <= CLIENT_ID_MAX:
            raise InvalidInput(f"a client's id has between 1 and {CLIENT_ID_MAX} characters")
        identity = self._port.keeper.authenticate(message.token)
        self._client = (identity.token_id, message.client)
        before = self._port.clients.get(self._client)
        self._port.clients[self._client] = self
        if before is None or before is self:
            self._welcome(identity)
            return
        self._hold()
        self._spawn(self._welcome_after(before, identity))

    async def _welcome_after(self, before: Connection, identity: Identity) -> None:
        before.abandon()
        await before.settled()
        if not self._closed:
            self._welcome(identity)
        self._let_go()

    def _welcome(self, identity: Identity) -> None:
        limits = self._port.limits
        self.identity = identity
        self._engine = engine = self._port.keeper.engine_for(identity)
        self._at_once = engine if isinstance(engine, Submits) else None
        self._frames.frame_bytes_max = limits.frame_bytes
        self.send(Welcome(identity, limits.in_flight, limits.frame_bytes))

    def abandon(self) -> None:
        """Take nothing more from this connection: its client has another one."""
        self._closed = True
        self._transport.abort()

    async def settled(self) -> None:
        """Return when everything that was taken from it is done."""
        if self.in_flight:
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()

    # --- requests ---

    def _start(self, message: Any) -> None:
        """Do it, and answer."""
        if isinstance(message, Commit) and message.batch.fresh and not self._is_fresh(message.batch):
            batch = message.batch
            batch = Batch(batch.actor, batch.operations, batch.conditions, batch.request_id)
            message = Commit(message.id, message.space, batch)
        self.in_flight += 1
        if self._at_once is None or not self._started_at_once(self._at_once, message):
            self._spawn(self._run(message, self._loop.time()))

    def _started_at_once(self, engine: Submits, message: Any) -> bool:
        """Without a task, where the engine can: most commits and gets."""
        if self._port.closing is not None or self._port.span is not None:
            return False
        began = self._loop.time()
        try:
            if type(message) is Commit:
                return engine.submit(message.space, message.batch, Answer(self, message.id, began))
            if type(message) is Get:
                entries = engine.read(message.space, message.keys)
                if entries is None:
                    return False
                self._answer(message.id, Entries(message.id, entries))
                self.observed("get", "ok", began)
                return True
        except Error as exc:
            self._refuse(message.id, exc)
            self.observed(WORK[type(message)][0], exc.code, began)
            return True
        return False

    def _refuse(self, id: int, error: Error) -> None:
        self.send(failed(id, error))
        if isinstance(error, RateLimitExceeded):
            self._slow_down(error.retry_after)

    def observed(self, op: str, outcome: str, began: float) -> None:
        """It was answered, or has to be forgotten."""
        self._port.observe(op, outcome, self._loop.time() - began)
        self._finished()

    def _is_fresh(self, batch: Batch) -> bool:
        """Whether what `fresh` promises can be believed. Another keeper of this store may have answered it already: a late
        message must be recognised. And an id that somebody chose may come again: it must be remembered."""
        return self._port.sole_owner and batch.request_id is not None and is_generated(batch.request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, message: Any, began: float) -> None:
        op, work = WORK[type(message)]
        outcome = "ok"
        try:
            if self._port.closing is not None:
                raise Unavailable(self._port.closing)
            span = self._port.span
            if span is None:
                self._answer(message.id, await work(self._engine, message))
            else:
                with span(op, getattr(message, "space", "")):
                    self._answer(message.id, await work(self._engine, message))
        except Error as exc:
            outcome = exc.code
            self._refuse(message.id, exc)
        except Exception as exc:
            outcome = "error"
            log.exception("%s failed unexpectedly", op)
            self.send(failed(message.id, unexpected(op, exc)))
        finally:
            self.observed(op, outcome, began)

    def _answer(self, id: int, message: Message) -> None:
        data = frame(message)
        while len(data) > REPLY_BYTES_MAX:
            if not isinstance(message, Scanned) or len(message.page.entries) < 2:
                raise InvalidInput(
                    f"the answer has {len(data):,} bytes; the limit is {REPLY_BYTES_MAX:,}. Ask for less at once"
                )
            page = message.page
            message = Scanned(id, Page(page.entries[: len(page.entries) // 2], True, page.revision))
            data = frame(message)
        self._write(data)

    def _finished(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            if self._settled is not None:
                self._settled.set()
            if self._closed and self._client is not None and self._port.clients.get(self._client) is self:
                del self._port.clients[self._client]
        if self._paused and self.in_flight <= self._port.limits.in_flight // 2:
            self._resume()

    # --- watches ---

    def _watch(self, message: Watch) -> None:
        if message.id in self.watches:
            raise InvalidInput(f"request {message.id} is under way already")
        limit = self._port.limits.watches
        if self._port.closing is not None or len(self.watches) >= limit:
            reason = self._port.closing or f"a connection has at most {limit:,} watches"
            self.send(failed(message.id, Unavailable(reason)))
            return
        state = self.watches[message.id] = _WatchState(message.granted)
        if message.cursor is None:
            self._hold()  # it begins before whatever this connection sends after it
        state.task = self._loop.create_task(self._follow(message, state))

    async def _follow(self, message: Watch, state: _WatchState) -> None:
        id, outcome = message.id, "ok"
        try:
            await self._tell(message, state)
            self.send(Done(id))
        except Error as exc:
            outcome = exc.code
            self.send(failed(id, exc))
        except Exception as exc:
            outcome = "error"
            log.exception("watch failed unexpectedly")
            self.send(failed(id, unexpected("watch", exc)))
        finally:
            self.watches.pop(id, None)
            self._port.observe("watch", outcome, 0.0)

    async def _tell(self, message: Watch, state: _WatchState) -> None:
        cursor = message.cursor
        if cursor is None:
            try:
                found = await self._engine.spaces(message.space)
            finally:
                self._let_go()
            cursor = cursor_at(found[0].revision) if found else None
        commits = self._engine.watch(message.space, *message.prefixes, cursor=cursor, live=message.live)
        self.send(Watching(message.id, cursor))
        async for commit in commits:
            data = frame(Changes(message.id, [commit]))
            while state.granted <= 0:
                state.more.clear()
                await state.more.wait()
            if not self._writable.is_set():
                await self._writable.wait()
            state.granted -= len(data)
            self._write(data)

    def _grant(self, message: Grant) -> None:
        state = self.watches.get(message.id)
        if state is not None:
            state.granted += message.more
            state.more.set()

    def _cancel(self, message: Cancel) -> None:
        state = self.watches.pop(message.id, None)
        if state is not None and state.task is not None:
            state.task.cancel()

    def end_watches(self) -> None:
        for state in list(self.watches.values()):
            if state.task is not None:
                state.task.cancel()
        self.watches.clear()
