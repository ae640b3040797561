"""A client's connection to a keeper, and what becomes of requests when it breaks.

Any number of requests are under way at once; answers find theirs by id. When the connection ends, the client connects
again by itself, with growing pauses, and says everything again that was not answered: reads as they were, commits with
their request id, so that one that had been done is answered from memory and not done twice. Requests that cannot be
repeated (drop, load, compact, a commit without a request id) are `OutcomeUnknown` at once. Watches go on after the last
commit they received.

A request that never left is `Unavailable` after CONNECT_S, one whose answer was lost is `OutcomeUnknown` (a read:
`Unavailable`) after RESOLVE_S. Watches wait for as long as it takes. A keeper that refuses what is said again, because of a
rate or of rules, tells nothing of what became of it the first time: over its rate it is said once more when there is room,
and otherwise it is `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import msgspec

from holdfast.engine import ChangeSet, Receipt
from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    Error,
    IncompatibleStore,
    InvalidInput,
    OutcomeUnknown,
    RateLimitExceeded,
    Unavailable,
)
from holdfast.identity import Identity
from holdfast.wire import (
    PROTOCOL,
    REPLY_BYTES_MAX,
    UNREADABLE,
    Cancel,
    Changes,
    Committed,
    Done,
    Failed,
    Frames,
    Goodbye,
    Grant,
    Hello,
    Message,
    Ping,
    Receipts,
    Reply,
    Watch,
    Watching,
    Welcome,
    decode_reply,
    frame,
    raised,
)

CONNECT_S: Final = 10.0
RESOLVE_S: Final = 30.0
RETRY_S_MIN: Final = 0.02
RETRY_S_MAX: Final = 1.0
PING_S: Final = 10.0
"""After so long a silence the client asks whether anybody is there."""
SILENCE_S: Final = 30.0
"""After so long a silence the connection is given up."""
LOOK_S, ANSWER_S = 2.5, 6.0
"""How often that is looked at, and what counts while somebody waits for an answer: a lease of 30 s survives a connection that went dead."""
CLOSE_S: Final = 10.0
WAITING_MAX: Final = 100_000
"""Requests that wait for a connection."""
HELD_S: Final = 0.001
"""How long what is patient waits for something to be sent with. The keeper lets it wait for as long as it said."""
WINDOW_BYTES: Final = 1024 * 1024
"""What a watch may have received and not yet handed out."""

T = TypeVar("T")
log = logging.getLogger("holdfast.remote")


class Address(msgspec.Struct, frozen=True):
    """Where a keeper listens: a host and a port, or a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Asked(msgspec.Struct, eq=False):
    """A request that waits for its answer."""

    first: bytes
    again: Callable[[int], Message] | None
    """How it is said again; None: it cannot be."""
    answer: asyncio.Future[Any]
    deadline: float
    request_id: str | None = None
    sent: bool = False
    reading: bool = False
    repeated: bool = False
    """It was said more than once: whoever refuses it now may have done it before."""


class Follower:
    """A watch: what has come of it and was not yet taken."""

    def __init__(
        self, client: Client, id: int, space: str, prefixes: list[str], cursor: str | None, live: bool
    ) -> None:
        self._client = client
        self._id = id
        self._space = space
        self._prefixes = prefixes
        self._cursor = cursor
        self._live = live
        self._commits: deque[tuple[ChangeSet, int]] = deque()
        self._news = asyncio.Event()
        self._buffered = 0
        self._taken = 0
        self._end: Error | None = None
        self._over = False
        self._began = False
        """The keeper has taken it once: that it goes on is not asked for anew."""

    def asked(self) -> bytes:
        """The request, to go on where it stands."""
        self._taken = 0
        granted = WINDOW_BYTES - self._buffered
        return frame(Watch(self._id, self._space, self._prefixes, self._cursor, self._live, granted))

    def received(self, message: Reply, size: int) -> None:
        if isinstance(message, Changes):
            self._commits.extend((commit, 0) for commit in message.commits[:-1])
            self._commits.append((message.commits[-1], size))
            self._cursor = message.commits[-1].cursor
            self._buffered += size
        elif isinstance(message, Watching):
            self._cursor = message.cursor
            self._began = True
        elif isinstance(message, Failed):
            error = raised(message)
            if self._began and isinstance(error, RateLimitExceeded):
                self._client.follow_later(self._id, error.retry_after)
                return
            self.end(error)
        elif isinstance(message, Done):
            self._over = True
        self._news.set()

    def end(self, error: Error) -> None:
        self._end = error
        self._news.set()

    async def next(self) -> ChangeSet | None:
        """The next commit; None when everything was told."""
        while not self._commits:
            if self._end is not None:
                raise self._end
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        commit, size = self._commits.popleft()
        self._buffered -= size
        self._taken += size
        if self._taken > WINDOW_BYTES // 2:
            self._client.say(Grant(self._id, self._taken))
            self._taken = 0
        return commit

    def close(self) -> None:
        if self._client.unfollow(self._id) and not self._over and self._end is None:
            self._client.say(Cancel(self._id))


class Client:
    """One client of a keeper, through as many connections as it takes."""

    def __init__(self, address: Address, token: str) -> None:
        self.address = address
        self.identity: Identity | None = None
        self._token = str(token)  # of a Secret, its text
        self._name = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._ids = 0
        self._asked: dict[int, Asked] = {}
        self._followers: dict[int, Follower] = {}
        self._line: _Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._in_flight_max = 1
        self._frame_bytes_max = 0
        self._closed = False
        self._failure = ""

    # --- requests ---

    def ask(
        self,
        make: Callable[[int], Message],
        again: Callable[[int], Message] | None,
        *,
        request_id: str | None = None,
        reading: bool = False,
        patient: bool = False,
    ) -> Awaitable[Any]:
        """Say it, say it `again` if need be; to be awaited at once, for the answer.

        It is said before this returns, unless so much is under way that it has to wait. What is patient goes with whatever is
        said next, or a moment later.
        """
        if len(self._asked) >= self._in_flight_max and self._line is not None:
            return self._ask_later(make, again, request_id, reading)
        return self._ask(make, again, request_id, reading, patient)

    async def _ask_later(
        self,
        make: Callable[[int], Message],
        again: Callable[[int], Message] | None,
        request_id: str | None,
        reading: bool,
    ) -> Any:
        while len(self._asked) >= self._in_flight_max and self._line is not None:
            self._room.clear()
            await self._room.wait()
        return await self._ask(make, again, request_id, reading)

    def _ask(
        self,
        make: Callable[[int], Message],
        again: Callable[[int], Message] | None,
        request_id: str | None,
        reading: bool,
        patient: bool = False,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise Unavailable("the store is closed")
        self._ids = id = self._ids + 1
        first = frame(make(id))
        if self._frame_bytes_max and len(first) > self._frame_bytes_max + 4:
            raise InvalidInput(
                f"the request has {len(first):,} bytes; the keeper takes {self._frame_bytes_max:,}. Send less at once"
            )
        line, answer = self._line, self._loop.create_future()
        self._asked[id] = asked = Asked(first, again, answer, 0.0, request_id, line is not None, reading)
        if line is not None:
            line.write(first, patient=patient)
        elif len(self._asked) > WAITING_MAX:
            del self._asked[id]
            raise Unavailable(f"{self._failure}; {WAITING_MAX:,} requests wait for it already. Nothing was changed")
        else:
            asked.deadline = self._loop.time() + CONNECT_S
            self._connect()
        return answer

    def follow(self, space: str, prefixes: list[str], cursor: str | None, live: bool) -> Follower:
        if self._closed:
            raise Unavailable("the store is closed")
        self._ids += 1
        follower = Follower(self, self._ids, space, prefixes, cursor, live)
        self._followers[self._ids] = follower
        if self._line is not None:
            self._line.write(follower.asked())
        else:
            self._connect()
        return follower

    def follow_later(self, id: int, seconds: float) -> None:
        """A watch goes on when its agent is not over its rate any more."""
        self._loop.call_later(seconds, self._follow_again, id, self._line)

    def _follow_again(self, id: int, line: _Line | None) -> None:
        follower = self._followers.get(id)
        if follower is not None and line is not None and self._line is line:  # on another one it was asked for already
            line.write(follower.asked())

    def unfollow(self, id: int) -> bool:
        return self._followers.pop(id, None) is not None

    def say(self, message: Message) -> None:
        """Something that has no answer; it is about this connection, so it is lost with it."""
        if self._line is not None:
            self._line.write(frame(message))

    def committed(self, ids: list[int], receipts: list[Receipt]) -> None:
        """These commits were done."""
        for id, receipt in zip(ids, receipts, strict=True):
            asked = self._asked.pop(id, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_result(receipt)
        if not self._room.is_set():
            self._room.set()

    def received(self, message: Reply, size: int) -> None:
        if isinstance(message, Goodbye):
            log.info("the keeper at %s goes away: %s", self.address, message.reason)
            return
        if isinstance(message, Welcome | Committed | Receipts):
            return
        asked = self._asked.get(message.id)
        if asked is None:
            follower = self._followers.get(message.id)
            if follower is not None:
                follower.received(message, size)
            return
        if asked.repeated and isinstance(message, Failed) and self._is_open(message.id, asked, raised(message)):
            return
        del self._asked[message.id]
        if not self._room.is_set():
            self._room.set()
        if asked.answer.done():
            return
        if isinstance(message, Failed):
            asked.answer.set_exception(raised(message))
        else:
            asked.answer.set_result(message)

    def _is_open(self, id: int, asked: Asked, error: Error) -> bool:
        """Whether it is not known what became of a request that was said again, and now refused by `error`."""
        refused = isinstance(error, RateLimitExceeded | AccessDenied | Unavailable)
        if not refused or asked.reading or asked.answer.done():
            return False
        self._failure = f"what was said again after a broken connection was refused: {error}"
        if not isinstance(error, RateLimitExceeded) or self._loop.time() + error.retry_after > asked.deadline:
            self._fail(id)
        else:
            self._loop.call_later(error.retry_after, self._say_again, id, self._line)
        return True

    def _say_again(self, id: int, line: _Line | None) -> None:
        asked = self._asked.get(id)
        if asked is not None and asked.again is not None and line is not None and self._line is line:
            line.write(frame(asked.again(id)))

    # --- connections ---

    async def connect(self) -> None:
        """For the first time: whoever opens a store is told at once what is wrong."""
        try:
            await self._open()
        except OSError as exc:
            raise Unavailable(self._unreachable(exc)) from exc

    def _connect(self) -> None:
        if self._connecting is None and not self._closed:
            self._connecting = self._loop.create_task(self._reconnect())

    async def _open(self) -> None:
        line = _Line(self)
        address = self.address
        async with asyncio.timeout(CONNECT_S):
            if address.path:
                await self._loop.create_unix_connection(lambda: line, address.path, ssl=address.tls)
            else:
                await self._loop.create_connection(lambda: line, address.host, address.port, ssl=address.tls)
            try:
                welcome = await line.greet(Hello(PROTOCOL, self._token, self._name, together=True))
            except BaseException:
                line.abort()
                raise
        self.identity = welcome.identity
        self._in_flight_max, self._frame_bytes_max = welcome.in_flight_max, welcome.frame_bytes_max
        self._line = line
        self._room.set()
        for id in [id for id, asked in self._asked.items() if asked.answer.done()]:
            del self._asked[id]  # nobody waits for it any more
        for id in sorted((*self._asked, *self._followers)):  # a watch stands before what was asked after it
            if id in self._followers:
                line.write(self._followers[id].asked())
                continue
            asked = self._asked[id]
            asked.repeated = asked.sent and asked.again is not None
            line.write(frame(asked.again(id)) if asked.sent and asked.again is not None else asked.first)
            asked.sent = True

    async def _reconnect(self) -> None:
        """Try until it works, nobody waits any more, or the keeper does not want us."""
        pause = RETRY_S_MIN
        try:
            while not self._closed and (self._asked or self._followers):
                try:
                    await self._open()
                    return
                except (AuthenticationFailed, IncompatibleStore, InvalidInput) as exc:
                    self._give_up(exc)
                    return
                except (OSError, Error) as exc:
                    self._failure = self._unreachable(exc)
                    if pause >= RETRY_S_MAX:
                        log.warning("%s; trying again", self._failure)
                self._expire()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(pause * 2, RETRY_S_MAX)
        finally:
            self._connecting = None
            if self._line is None and not self._closed and (self._asked or self._followers):
                self._connect()

    def lost(self, line: _Line, reason: str) -> None:
        """A connection ended."""
        if self._line is not line:
            return
        self._line = None
        self._room.set()
        self._failure = f"the connection to the keeper at {self.address} ended: {reason}"
        deadline = self._loop.time() + RESOLVE_S
        for id, asked in list(self._asked.items()):
            asked.deadline = min(asked.deadline, deadline) if asked.deadline else deadline
            if asked.again is None:
                self._fail(id)
        self._connect()

    def _expire(self) -> None:
        now = self._loop.time()
        for id, asked in list(self._asked.items()):
            if asked.answer.done() or now >= asked.deadline:
                self._fail(id)

    def _fail(self, id: int) -> None:
        """Nobody will answer this any more."""
        asked = self._asked.pop(id)
        self._room.set()
        if asked.answer.done():
            return
        if asked.sent and not asked.reading:
            text = f"{self._failure}; what was asked may have been done. Repeat it with the same request id to find out"
            asked.answer.set_exception(OutcomeUnknown(text, request_id=asked.request_id))
        else:
            asked.answer.set_exception(Unavailable(f"{self._failure}. Nothing was changed"))

    def _give_up(self, error: Error) -> None:
        for asked in self._asked.values():
            if asked.answer.done():
                continue
            if asked.sent and not asked.reading:
                text = f"what was asked may have been done, and the keeper does not answer any more: {error}"
                asked.answer.set_exception(OutcomeUnknown(text, request_id=asked.request_id))
            else:
                asked.answer.set_exception(type(error)(str(error)))
        for follower in self._followers.values():
            follower.end(type(error)(str(error)))
        self._asked.clear()
        self._followers.clear()

    def _unreachable(self, exc: BaseException) -> str:
        cause = str(exc) or type(exc).__name__
        if isinstance(exc, ssl.SSLError) and exc.reason == "WRONG_VERSION_NUMBER":
            return f"what answers at {self.address} does not speak TLS; a keeper without certificates is reached by holdfast://"
        return (
            f"the keeper at {self.address} cannot be reached ({cause}). Is it running? Start one with: holdfast serve"
        )

    def look(self) -> None:
        """Called every LOOK_S while a connection is open."""
        if (line := self._line) is None:
            return
        silent = (now := self._loop.time()) - line.heard_at
        if not self._asked or silent < LOOK_S:
            line.mute_since = now
        if silent > SILENCE_S or now - line.mute_since > ANSWER_S:
            line.abort()
        elif silent > PING_S or now > line.mute_since:
            self.say(Ping(0xFFFFFFFF))

    async def close(self) -> None:
        """Wait for what was asked, as long as there is a connection, and let go."""
        waiting = [asked.answer for asked in self._asked.values()]
        self._closed = True
        self._room.set()
        if waiting and self._line is not None:
            await asyncio.wait(waiting, timeout=CLOSE_S)
        for id in list(self._asked):
            self._failure = "the store was closed"
            self._fail(id)
        for follower in self._followers.values():
            follower.end(Unavailable("the store is closed"))
        self._followers.clear()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._line is not None:
            line, self._line = self._line, None
            await line.close()


class _Line(asyncio.Protocol):
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
        self.heard_at = self.mute_since = self._loop.time()

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
            self._transport.write(b"".join(self._out))
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

    async def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()
            await asyncio.wait([self._ended], timeout=CLOSE_S)
            self._transport.abort()
