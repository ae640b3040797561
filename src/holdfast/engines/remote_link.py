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
from typing import Any, Final, TypeVar

import msgspec

from holdfast.engine import ChangeSet, Receipt
from holdfast.engines.remote_line import LOOK_S, Line
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
    FRAME_BYTES_MAX,
    PORT,
    PROTOCOL,
    Cancel,
    Changes,
    Committed,
    Done,
    Failed,
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
ANSWER_S: Final = 6.0
"""What counts while somebody waits for an answer: a lease of 30 s survives a connection that went dead."""
SLOWEST_BYTES_S: Final = FRAME_BYTES_MAX / 60
"""A link may be as slow as this: so much longer than ANSWER_S a keeper may be silent while a large request is on its way."""
CLOSE_S: Final = 10.0
EXPIRE_S: Final = 0.25
"""How often, at most, is looked whose time is over."""
WAITING_MAX: Final = 100_000
"""Requests that wait for a connection."""
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

    @property
    def has_place(self) -> bool:
        """Where it goes on is known. Otherwise it begins wherever the keeper stands when it hears of it."""
        return self._cursor is not None

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
            self._client.placed(self._id)
        elif isinstance(message, Failed):
            error = raised(message)
            if self._began and isinstance(error, RateLimitExceeded):
                self._client.follow_later(self._id, error.retry_after)
                return
            self._client.unfollow(self._id)  # it is not asked for again, whenever its end is taken
            self.end(error)
        elif isinstance(message, Done):
            self._client.unfollow(self._id)
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
        self._line: Line | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._turns: deque[asyncio.Future[None]] = deque()
        """Those who wait for room, the first one first."""
        self._placing: set[int] = set()
        """Watches whose place was asked for and not heard. What changes something waits for it: should the connection break, it would
        be done, and the watch begin after it."""
        self._promised = 0
        """Room that was given to one of them, who has not come yet."""
        self._pause = 0.0
        """Before the next connection: it grows while connections end before anything is answered."""
        self._expiry: asyncio.TimerHandle | None = None
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
        if self._line is not None and (self._turns or len(self._asked) + self._promised >= self._in_flight_max):
            return self._ask_later(make, again, request_id, reading)
        return self._ask(make, again, request_id, reading, patient)

    async def _ask_later(
        self,
        make: Callable[[int], Message],
        again: Callable[[int], Message] | None,
        request_id: str | None,
        reading: bool,
    ) -> Any:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was its turn: the next one has it
                self._promised -= 1
                self._make_room()
            raise
        self._promised -= 1
        try:
            answer = self._ask(make, again, request_id, reading)
        except BaseException:  # it is not sent, and the next one comes
            self._make_room()
            raise
        return await answer

    def _make_room(self) -> None:
        """Whoever waits longest comes first, as far as there is room; all of them when nothing is sent any more."""
        while self._turns and (
            self._line is None or self._closed or len(self._asked) + self._promised < self._in_flight_max
        ):
            turn = self._turns.popleft()
            if not turn.done():
                self._promised += 1
                turn.set_result(None)

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
        sent = line is not None and (reading or not self._placing)
        self._asked[id] = asked = Asked(first, again, answer, 0.0, request_id, sent, reading)
        if line is not None:
            if sent:
                line.write(first, patient=patient)
        elif len(self._asked) > WAITING_MAX:
            del self._asked[id]
            raise Unavailable(f"{self._failure}; {WAITING_MAX:,} requests wait for it already. Nothing was changed")
        else:
            asked.deadline = self._loop.time() + CONNECT_S
            self._expire_at(asked.deadline)
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
            if cursor is None:
                self._placing.add(self._ids)
        else:
            self._connect()
        return follower

    def placed(self, id: int) -> None:
        """It is known where a watch stands, or that it does not: what was asked for after it can go."""
        if id not in self._placing:
            return
        self._placing.discard(id)
        if self._placing or self._line is None:
            return
        for number, asked in list(self._asked.items()):
            if asked.answer.done() and not asked.sent:
                self._fail(number)
            elif not asked.sent:
                asked.sent = True
                self._line.write(asked.first)

    def follow_later(self, id: int, seconds: float) -> None:
        """A watch goes on when its agent is not over its rate any more."""
        self._loop.call_later(seconds, self._follow_again, id, self._line)

    def _follow_again(self, id: int, line: Line | None) -> None:
        follower = self._followers.get(id)
        if follower is not None and line is not None and self._line is line:  # on another one it was asked for already
            line.write(follower.asked())

    def unfollow(self, id: int) -> bool:
        self.placed(id)
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
        self._pause = 0.0
        if self._turns:
            self._make_room()

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
                if type(message) is Changes:
                    self._pause = 0.0
                follower.received(message, size)
            return
        if asked.repeated and isinstance(message, Failed) and self._is_open(message.id, asked, raised(message)):
            return
        del self._asked[message.id]
        self._pause = 0.0
        if self._turns:
            self._make_room()
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

    def _say_again(self, id: int, line: Line | None) -> None:
        asked = self._asked.get(id)
        if asked is not None and asked.again is not None and line is not None and self._line is line:
            line.write(frame(asked.again(id)))

    # --- connections ---

    async def connect(self) -> None:
        """For the first time: whoever opens a store is told at once what is wrong."""
        try:
            await self._open()
        except UnicodeError:
            raise InvalidInput(f"{self.address.host!r} is no name of a host; write holdfast://host:{PORT}") from None
        except OSError as exc:
            raise Unavailable(self._unreachable(exc)) from exc

    def _connect(self) -> None:
        if self._connecting is None and not self._closed:
            self._connecting = self._loop.create_task(self._reconnect())

    async def _open(self) -> None:
        line = Line(self)
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
        now = self._loop.time()
        for id, asked in list(self._asked.items()):
            # Nobody waits for it any more, or it was said on connection after connection and none brought an answer.
            if asked.answer.done() or (asked.repeated and now >= asked.deadline):
                self._fail(id)
        self._make_room()
        for id in sorted((*self._asked, *self._followers)):  # a watch stands before what was asked after it
            if id in self._followers:
                line.write(self._followers[id].asked())
                if not self._followers[id].has_place:
                    self._placing.add(id)
                continue
            asked = self._asked[id]
            asked.repeated = asked.sent and asked.again is not None
            if not asked.sent:
                asked.deadline = 0.0  # that was for a connection
                if self._placing and not asked.reading:
                    continue
            line.write(frame(asked.again(id)) if asked.sent and asked.again is not None else asked.first)
            asked.sent = True

    async def _reconnect(self) -> None:
        """Try until it works, nobody waits any more, or the keeper does not want us."""
        try:
            if self._pause > RETRY_S_MIN:
                await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311
            while not self._closed and (self._asked or self._followers):
                try:
                    await self._open()
                    return
                except (AuthenticationFailed, IncompatibleStore, InvalidInput) as exc:
                    self._give_up(exc)
                    return
                except (OSError, Error) as exc:
                    self._failure = self._unreachable(exc)
                    if self._pause >= RETRY_S_MAX:
                        log.warning("%s; trying again", self._failure)
                self._expire()
                self._pause = min(max(self._pause * 2, RETRY_S_MIN), RETRY_S_MAX)
                await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311
        finally:
            self._connecting = None
            if self._line is None and not self._closed and (self._asked or self._followers):
                self._connect()

    def lost(self, line: Line, reason: str) -> None:
        """A connection ended."""
        if self._line is not line:
            return
        self._line = None
        self._placing.clear()
        self._make_room()
        if self._loop.time() - line.born_at > RETRY_S_MAX:
            self._pause = 0.0
        self._pause = min(max(self._pause * 2, RETRY_S_MIN), RETRY_S_MAX)
        self._failure = f"the connection to the keeper at {self.address} ended: {reason}"
        deadline = self._loop.time() + RESOLVE_S
        for id, asked in list(self._asked.items()):
            asked.deadline = min(asked.deadline, deadline) if asked.deadline else deadline
            if (
                asked.again is None and asked.sent
            ) or self._closed:  # nobody connects again for one that is being closed
                self._fail(id)
        self._expire_at(deadline)
        self._connect()

    def _expire_at(self, when: float) -> None:
        """Look then whose time is over, unless that is looked at before: an attempt to connect may take as long as that."""
        if self._closed or (self._expiry is not None and self._expiry.when() <= when):
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._line is not None:
            return
        now = self._loop.time()
        for id, asked in list(self._asked.items()):
            if asked.answer.done() or now >= asked.deadline:
                self._fail(id)
        if self._asked:
            self._expire_at(max(now + EXPIRE_S, min(asked.deadline for asked in self._asked.values())))

    def _fail(self, id: int) -> None:
        """Nobody will answer this any more."""
        asked = self._asked.pop(id)
        if self._turns:
            self._make_room()
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
        on_its_way_s = line.unheard / SLOWEST_BYTES_S
        if silent > SILENCE_S + on_its_way_s or now - line.mute_since > ANSWER_S + on_its_way_s:
            line.abort()
        elif silent > PING_S or now > line.mute_since:
            self.say(Ping(0xFFFFFFFF))

    async def close(self) -> None:
        """Wait for what was asked, as long as there is a connection, and let go."""
        waiting = [asked.answer for asked in self._asked.values()]
        self._closed = True
        self._make_room()
        if waiting and self._line is not None:
            await asyncio.wait(waiting, timeout=CLOSE_S)
        for id in list(self._asked):
            self._failure = "the store was closed"
            self._fail(id)
        for follower in self._followers.values():
            follower.end(Unavailable("the store is closed"))
        self._followers.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._line is not None:
            line, self._line = self._line, None
            await line.close(CLOSE_S)
