"""The server a store is on: whether it can keep one, what time it is there, and whether it has crashed.

A server that crashed may have lost the last commits of async spaces, whose versions were given out already; one that took
over from another may have lost commits of any space. The first connection that finds `running` empty, or of another
timeline, lets the versions of those spaces jump, so that none is given out twice; cursors from before raise `Compacted`,
since what they saw may be gone. Every connection looks before it is used, and no connection outlives a crash.
"""

from __future__ import annotations

from typing import Final

from psycopg import AsyncConnection

from holdfast.clock import Clock, SystemClock
from holdfast.engines.postgres_functions import CLOCK
from holdfast.engines.postgres_link import FALSE, TRUE, Link, int4, number, statement, string
from holdfast.engines.postgres_schema import OPENING_LOCK, RECOVER, SERVER_VERSION_MIN, TIMELINE
from holdfast.engines.postgres_statements import BEGIN, COMMIT, LOCK
from holdfast.errors import IncompatibleStore, Unavailable

_GREET: Final = statement(
    "greet",
    f"SELECT {CLOCK}, current_setting('fsync'), {TIMELINE}, (SELECT timeline FROM running LIMIT 1), "  # noqa: S608
    "(SELECT value FROM meta WHERE key = 'timeline')",
)
_RECOVER: Final = statement("recover", RECOVER)
_NOT_RUNNING: Final = statement("not_running", "DELETE FROM running")
_RUNNING: Final = statement("running", f"INSERT INTO running VALUES ({TIMELINE})")  # noqa: S608
_MARK: Final = statement(
    "mark",
    f"INSERT INTO meta VALUES ('timeline', {TIMELINE}) ON CONFLICT (key) DO UPDATE SET value = excluded.value",  # noqa: S608
)


class ServerTime:
    """What time it is for the store: the server's clock as well as a client can tell, or the clock a test has given."""

    def __init__(self, clock: Clock) -> None:
        self._given = None if type(clock) is SystemClock else clock
        self._local = SystemClock()
        self._offset: int | None = None

    def given(self) -> int | None:
        """The given clock's time; None when the server's counts."""
        return None if self._given is None else self._given.now_ms()

    def now(self) -> int:
        """The given clock's time, or what the server's clock has reached at least."""
        return self.server() if self._given is None else self._given.now_ms()

    def server(self) -> int:
        return self._local.now_ms() + (self._offset or 0)

    def observe(self, server_ms: int, *, exact: bool = False) -> None:
        """An answer of the server carried this time. It is a little old, so the largest offset seen is the truest."""
        offset = server_ms - self._local.now_ms()
        if exact or self._offset is None or offset > self._offset:
            self._offset = offset


async def check_server(connection: AsyncConnection) -> None:
    """Refuse a server that cannot keep a store."""
    rows = await connection.execute(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'), "
        "current_setting('server_encoding'), pg_is_in_recovery()"
    )
    version, shown, encoding, standby = await rows.fetchone() or (0, "?", "?", False)
    if version < SERVER_VERSION_MIN:
        raise IncompatibleStore(f"this server is PostgreSQL {shown}; holdfast needs 13 or newer")
    if encoding != "UTF8":
        raise IncompatibleStore(
            f"this database is encoded as {encoding}, which cannot hold every text; make one with "
            "createdb --encoding=UTF8 --template=template0"
        )
    if standby:
        raise Unavailable(
            "this server is a standby and takes no writes; connect to the primary (several hosts and "
            "target_session_attrs=read-write in the URL find it)"
        )


async def greet(link: Link, locks: int, time: ServerTime) -> bool:
    """On every new connection: what time it is there, and whether the server has crashed since. Gives whether fsync is on."""
    [rows] = await link.send((_GREET, ()))
    clock, fsync, timeline, running, _ = rows[0]
    time.observe(number(clock))
    if running != timeline:
        await _recover(link, locks)
    return string(fsync) == "on"


async def _recover(link: Link, locks: int) -> None:
    """The first connection since a crash, or since another server took over: versions that may be lost are passed over."""
    _, _, rows = await link.send((BEGIN, ()), (LOCK, (int4(OPENING_LOCK), int4(locks))), (_GREET, ()))
    _, _, timeline, running, last = rows[0]
    if running != timeline:
        took_over = TRUE if last is not None and last != timeline else FALSE
        await link.send((_RECOVER, (took_over,)), (_NOT_RUNNING, ()), (_RUNNING, ()), (_MARK, ()), (COMMIT, ()))
    else:
        await link.send((COMMIT, ()))
