"""Connections to a PostgreSQL server: how they are made, what is sent over them, what their errors mean.

psycopg makes a connection (addresses, encryption, logging in); after that a `Link` speaks through psycopg's `pq`, the
wrapper of libpq, without cursors and adapters: what is sent here is a handful of prepared statements with binary
parameters, and a general driver's work per call would cost as much as the server's. A link is always in pipeline mode.
`send` takes any number of calls, which go out together and come back together: one round trip. Without BEGIN the calls
of one `send` are one transaction, committed at its end.

A reply is collected by the event loop, not by the task that waits for it: if that task is cancelled the link finishes
what was asked and serves the next. There are two kinds of failure, and they are kept apart. `Refused`: the server answered
with an error, so its transaction is rolled back. `Broken`: the connection ended, and whether what was sent last has
happened is open. A server that does not answer within REPLY_S counts as broken.

The password is in the connection string only. That is kept by psycopg, and no message here repeats any part of it.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.engines.postgres_schema import DEFAULT_SCHEMA, check_schema_name
from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    Damaged,
    Error,
    IncompatibleStore,
    InvalidInput,
    StorageFull,
    Unavailable,
)

LINKS_MAX: Final = 8
"""Connections one engine has for commits and reads; a watching engine has one more."""
TOO_MANY: Final = "53300"
CONNECT_S: Final = 10
LOCK_WAIT_S: Final = 30
"""How long to wait for another process to finish its commit."""
IDLE_IN_TRANSACTION_S: Final = 10
"""After this the server ends a transaction whose client is silent, so that a lost machine holds no lock for long."""
REPLY_S: Final = 60.0
"""How long to wait for any answer at all."""

CONNECTION_DEFAULTS: Final = {
    "connect_timeout": str(CONNECT_S),
    "application_name": "holdfast",
    "client_encoding": "UTF8",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "40000",
}

SESSION: Final = {
    "default_transaction_isolation": "read committed",
    "lock_timeout": f"{LOCK_WAIT_S}s",
    "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_S}s",
    # Every statement here goes through an index, whatever the statistics of a table that was empty a minute ago say.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}


class Statement(NamedTuple):
    """Something the server is asked to do, prepared on a link when it is first used there."""

    name: bytes
    sql: bytes


def statement(name: str, sql: str) -> Statement:
    return Statement(name.encode(), sql.encode())


Value = bytes | None
Call = tuple[Statement, Sequence[Value]]
Rows = list[list[Value]]


class Refused(Exception):
    """The server answered with an error; nothing of its transaction stays."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Broken(Exception):
    """The connection ended before the answer came."""


# --- parameters and rows, in PostgreSQL's binary format ---

_pack_int8 = struct.Struct(">q").pack
_unpack_int8 = struct.Struct(">q").unpack
_pack_int4 = struct.Struct(">i").pack
_pack_array = struct.Struct(">iiIii").pack
_BOOL, _BYTEA, _INT8, _TEXT = 16, 17, 20, 25
_NULL: Final = b"\xff\xff\xff\xff"
_EIGHT: Final = b"\0\0\0\x08"

SEPARATOR: Final = "\x1f"
"""Of texts that are sent as one, if none of them has it."""
TRUE, FALSE = b"\x01", b"\0"

_BINARY: Final = [1] * 64
_FAILED: Final = frozenset({pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED})


def int8(number: int | None) -> Value:
    return None if number is None else _pack_int8(number)


def int4(number: int) -> bytes:
    return _pack_int4(number)


def text(value: str | None) -> Value:
    return None if value is None else value.encode()


# An array without elements is sent as NULL: a function unpacks each array it is given, used or not.


def int8_array(numbers: Sequence[int | None]) -> Value:
    if not numbers:
        return None
    parts = [_NULL if number is None else _EIGHT + _pack_int8(number) for number in numbers]
    return _pack_array(1, 1, _INT8, len(parts), 1) + b"".join(parts)


def int8s(numbers: Sequence[int]) -> Value:
    """The same for many, and none of them NULL."""
    if not numbers:
        return None
    flat = [8] * (2 * len(numbers))
    flat[1::2] = numbers
    return _pack_array(1, 0, _INT8, len(numbers), 1) + _pack_many(len(numbers)).pack(*flat)


@functools.lru_cache(256)
def _pack_many(count: int) -> struct.Struct:
    return struct.Struct(">" + "iq" * count)


def joined(parts: Sequence[str]) -> Value:
    """Texts as one, behind a character that is in none of them and separates them."""
    if not parts:
        return None
    separator = SEPARATOR
    whole = separator.join(parts)
    if whole.count(separator) >= len(parts):
        used = set(whole)
        separator = next(
            each for each in map(chr, chain(range(1, 0xD800), range(0xE000, 0x110000))) if each not in used
        )
        whole = separator.join(parts)
    return (separator + whole).encode()


def text_array(values: Sequence[str | None]) -> Value:
    return _array(_TEXT, [None if value is None else value.encode() for value in values])


def bool_array(values: Sequence[bool]) -> Value:
    return _array(_BOOL, [TRUE if value else FALSE for value in values])


def bytea_array(values: Sequence[bytes]) -> Value:
    return _array(_BYTEA, values)


def _array(oid: int, values: Sequence[Value]) -> Value:
    if not values:
        return None
    parts = [_pack_array(1, 1, oid, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(len(value).to_bytes(4, "big"))
            parts.append(value)
    return b"".join(parts)


def number(value: Value) -> int:
    return int.from_bytes(value or b"", "big", signed=True)


def optional_number(value: Value) -> int | None:
    return None if value is None else int.from_bytes(value, "big", signed=True)


def string(value: Value) -> str:
    return (value or b"").decode()


# --- one connection ---


class Link:
    """One connection, in pipeline mode. One `send` at a time."""

    def __init__(self, connection: psycopg.AsyncConnection, trips: Callable[[], None]) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._pg.enter_pipeline_mode()
        self._loop = asyncio.get_running_loop()
        self._socket = self._pg.socket
        self._prepared: set[bytes] = set()
        self._trips = trips
        self._reply: asyncio.Future[list[Rows]] | None = None
        self._then: Callable[[Link], None] | None = None
        self._asked: deque[bytes | None] = deque()
        """For each command under way the statement it prepares; None for a call, whose rows are wanted."""
        self._results: list[Rows] = []
        self._error: Refused | None = None
        self._patient_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """One for many calls: to make and to cancel one for each takes a tenth of what a call takes here."""
        self._flushing = False
        self.closed = False
        self.heard: Callable[[str], None] | None = None
        """Is told of notifications."""
        self.ended: Callable[[], None] | None = None
        """Is told when the connection ends by itself."""
        self._loop.add_reader(self._socket, self._readable)

    @property
    def idle(self) -> bool:
        """Nothing is under way and no transaction is open."""
        return self._reply is None and self._pg.transaction_status == pq.TransactionStatus.IDLE

    def send(self, *calls: Call, then: Callable[[Link], None] | None = None) -> asyncio.Future[list[Rows]]:
        """Send these calls together. `then` is told when the answer has come, whether or not anybody still waits for it."""
        reply = self._reply = self._loop.create_future()
        self._then = then
        self._results = []
        self._error = None
        pg, prepared = self._pg, self._prepared
        try:
            if self.closed:
                raise psycopg.OperationalError("the connection is closed")
            for statement_, values in calls:
                if statement_.name not in prepared:
                    pg.send_prepare(statement_.name, statement_.sql)
                    prepared.add(statement_.name)
                    self._asked.append(statement_.name)
                pg.send_query_prepared(statement_.name, values, _BINARY[: len(values)], 1)
                self._asked.append(None)
            pg.pipeline_sync()
            self._trips()
            self._patient_until = self._loop.time() + REPLY_S
            if self._timer is None:
                self._timer = self._loop.call_at(self._patient_until, self._look)
            if pg.flush():
                self._flushing = True
                self._loop.add_writer(self._socket, self._writable)
        except psycopg.OperationalError as exc:
            self._break(exc)
        return reply

    def _writable(self) -> None:
        try:
            if self._pg.flush() == 0:
                self._flushing = False
                self._loop.remove_writer(self._socket)
        except psycopg.OperationalError as exc:
            self._break(exc)

    def _readable(self) -> None:
        pg = self._pg
        try:
            pg.consume_input()
            if self._reply is not None:
                while not pg.is_busy():
                    result = pg.get_result()
                    if result is None:
                        if pg.status == pq.ConnStatus.BAD:
                            raise psycopg.OperationalError("the server closed the connection")
                        continue
                    if self._take(result):
                        break
            if self.heard is not None:
                while (notification := pg.notifies()) is not None:
                    self.heard(notification.extra.decode())
        except psycopg.OperationalError as exc:
            self._break(exc)

    def _take(self, result: Any) -> bool:
        """Keep a result; True when it is the last."""
        status = result.status
        if status == pq.ExecStatus.PIPELINE_SYNC:
            self._finish()
            return True
        preparing = self._asked.popleft()
        if status in _FAILED:
            if preparing is not None:
                self._prepared.discard(preparing)
            if self._error is None:
                state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
                message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message or b""
                self._error = Refused(state.decode(), message.decode(errors="replace"))
        elif preparing is None:
            get, columns = result.get_value, range(result.nfields)
            self._results.append([[get(row, column) for column in columns] for row in range(result.ntuples)])
        return False

    def _finish(self) -> None:
        reply, then = self._reply, self._then
        self._reply = self._then = None
        if reply is not None and not reply.done():
            if self._error is None:
                reply.set_result(self._results)
            else:
                reply.set_exception(self._error)
        if then is not None:
            then(self)

    def _look(self) -> None:
        """Whether the server is silent for too long."""
        self._timer = None
        if self._reply is None:
            return
        if self._loop.time() < self._patient_until:
            self._timer = self._loop.call_at(self._patient_until, self._look)
        else:
            self._break(psycopg.OperationalError(f"the server has not answered for {REPLY_S:g} s"))

    def _break(self, exc: BaseException) -> None:
        """The connection is of no use any more; whoever waits is told."""
        self.close()
        reply, then, ended = self._reply, self._then, self.ended
        self._reply = self._then = self.ended = None
        if reply is not None and not reply.done():
            broken = Broken(str(self._error or exc).strip())
            broken.__cause__ = self._error or exc
            reply.set_exception(broken)
        if then is not None:
            then(self)
        if ended is not None:
            ended()

    def close(self) -> None:
        """Let go of it; a transaction that is open is rolled back by the server."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        if self._flushing:
            self._loop.remove_writer(self._socket)
        self._pg.finish()


Connect = Callable[[], Awaitable[Link]]
"""Makes one more connection, ready for use."""


class NoConnection(Unavailable):
    """The server has no more connections to give."""


class Pool:
    """The connections of one engine: made when they are needed, kept until it closes.

    Where the server has no more to give, those that there are have to do.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.closed = False

    async def run(self, *calls: Call) -> list[Rows]:
        """Send these calls over any connection: one round trip, one transaction."""
        link = await self.acquire()
        return await link.send(*calls, then=self.release)

    def idle(self) -> Link | None:
        """A connection of one's own, until it is released, if there is one that nobody uses."""
        while self._idle:
            link = self._idle.pop()
            if not link.closed:
                self._busy.add(link)
                return link
        return None

    async def acquire(self) -> Link:
        """A connection of one's own, until it is released."""
        while True:
            if self.closed:
                raise Unavailable("the store is closed")
            if (link := self.idle()) is not None:
                return link
            if len(self._busy) + self._connecting < LINKS_MAX:
                try:
                    return await self._make()
                except NoConnection:
                    if self._idle:
                        continue
                    if not self._busy and not self._connecting:
                        raise
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake_one()  # it was our turn, and we do not take it
                raise

    async def _make(self) -> Link:
        self._connecting += 1
        try:
            link = await self._connect()
        except BaseException:
            self._wake_one()
            raise
        finally:
            self._connecting -= 1
        if self.closed:
            link.close()
            raise Unavailable("the store is closed")
        self._busy.add(link)
        return link

    def release(self, link: Link) -> None:
        """Give a connection back; one with an open transaction is closed, which rolls it back."""
        self._busy.discard(link)
        if self.closed or not link.idle:
            link.close()
        if not link.closed:
            self._idle.append(link)
        self._wake_one()

    def _wake_one(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def close(self) -> None:
        """Let go of every connection; whoever waits for an answer is told that there will be none."""
        self.closed = True
        for link in [*self._idle, *self._busy]:
            link._break(Unavailable("the store is closed"))
        while self._waiting:
            self._wake_one()


# --- where the server is ---


class Address(NamedTuple):
    """A store's URL, taken apart. Printing it must not show the password, so it is never printed."""

    conninfo: str
    schema: str

    def __repr__(self) -> str:
        return f"Address(schema={self.schema!r})"


def read_url(url: str) -> Address:
    """The connection string for libpq, and which schema to use; everything but `schema` is libpq's."""
    schema = DEFAULT_SCHEMA
    try:
        parts = urlsplit(url)
        options = [option for option in parts.query.split("&") if option]
        schema = next((unquote(each[7:]) for each in options if each.startswith("schema=")), schema)
        query = "&".join(option for option in options if not option.startswith("schema="))  # libpq reads the rest
        given = conninfo_to_dict(urlunsplit(("postgresql", parts.netloc, parts.path, query, "")))
    except (psycopg.ProgrammingError, ValueError):
        # The driver's message repeats parts of the URL, and one of them may be the password.
        raise InvalidInput(
            "this is no URL of a PostgreSQL server; write postgresql://user:password@host:5432/database?schema=holdfast, "
            "with special characters of the password escaped as %XX"
        ) from None
    settings = CONNECTION_DEFAULTS | {name: str(value) for name, value in given.items() if value is not None}
    return Address(make_conninfo(**settings), check_schema_name(schema))


async def dial(address: Address) -> psycopg.AsyncConnection:
    """A new connection with everything set that must be; errors are ours."""
    try:
        connection = await psycopg.AsyncConnection.connect(address.conninfo, autocommit=True)
    except psycopg.Error as exc:
        raise translate(exc.sqlstate or _sqlstate_of(str(exc)), _plain(exc), "") from None
    try:
        settings = SESSION | {"search_path": f'"{address.schema}"'}
        names = ", ".join("set_config(%s, %s, false)" for _ in settings)
        await connection.execute(
            f"SELECT {names}, set_config('synchronous_commit', replace("
            "current_setting('synchronous_commit'), 'off', 'on'), false)",
            [part for pair in settings.items() for part in pair],
            prepare=False,
        )
    except BaseException as exc:
        connection.pgconn.finish()
        if isinstance(exc, psycopg.Error):
            raise translate(exc.sqlstate or "08006", _plain(exc), "") from exc
        raise
    return connection


def _plain(exc: BaseException) -> str:
    """The first line of a driver's message."""
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)


def _sqlstate_of(message: str) -> str:
    """libpq gives a failed connection no code, only the server's words."""
    for words, state in (
        ("password authentication failed", "28P01"),
        ("no password supplied", "28P01"),
        ("no pg_hba.conf entry", "28000"),
        ("authentication failed", "28000"),
        ("role ", "28000"),
        ("database ", "3D000"),
        ("too many clients", TOO_MANY),
        ("too many connections", TOO_MANY),
        ("connection slots are reserved", TOO_MANY),
    ):
        if words in message and ("does not exist" in message or not words.endswith(" ")):
            return state
    return "08001"


# --- what errors mean ---


def translate(sqlstate: str, message: str, doing: str = "nothing was changed") -> Error:
    """What an error of the server means to the caller, when nothing was committed. The one table."""
    changed = f"; {doing}" if doing else ""
    kind = sqlstate[:2]
    if sqlstate == "53100":
        return StorageFull(f"the server's disk is full{changed}. Free some space and try again")
    if sqlstate == "25006":
        return Unavailable(
            f"the server takes no writes: it is a standby, or set to read only{changed}. Connect to the primary "
            "(several hosts and target_session_attrs=read-write in the URL find it)"
        )
    if kind == "28":
        return AuthenticationFailed(f"the server does not accept these credentials: {message}")
    if sqlstate == "42501":
        return AccessDenied(f"the server's role may not do this: {message}. Grant it the schema, or let it create one")
    if sqlstate == "3D000":
        return InvalidInput(f"{message}; create it with createdb, or name another")
    if sqlstate == "55P03":
        return Unavailable(
            f"another process has held this space for {LOCK_WAIT_S} s, as if it had been stopped{changed}"
        )
    if sqlstate in ("40001", "40P01"):
        return Unavailable(f"the server ended this transaction to resolve a conflict ({message}){changed}. Try again")
    if sqlstate in ("XX001", "XX002"):
        return Damaged(f"the server's data is damaged ({message}); restore it from a backup")
    if sqlstate in ("42P01", "42883", "3F000", "42703"):
        return IncompatibleStore(
            f"the store's tables are gone or have changed ({message}){changed}; it was dropped, or migrated by a newer holdfast"
        )
    if sqlstate == TOO_MANY:
        return NoConnection(
            f"the server has no connection left ({message}){changed}. Raise its max_connections: a process takes up to "
            f"{LINKS_MAX + 1}; or put a keeper in front of it"
        )
    if kind in ("08", "57", "53"):
        return Unavailable(f"the server cannot be reached, or cannot serve now: {message}{changed}")
    return Unavailable(f"PostgreSQL refused to work: {message} ({sqlstate}){changed}")


def refused(exc: Refused) -> Error:
    return translate(exc.sqlstate, str(exc))
