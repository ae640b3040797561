"""The PostgreSQL engine: spaces in a schema of a database, for any number of processes on any number of machines.

A commit is one round trip. Batches that arrive while a group of their space is under way form the next group
(`committing.py`); a group is evaluated here, by the same evaluation every engine uses, on what this process remembers, and
written by one call under the space's advisory lock if nobody has written in between (`postgres_commit.py`). The lock is
held until the log is flushed, so the commits of a space are totally ordered, and what anybody can see is durable.

A read is one statement and one snapshot. It asks the server, always: what is remembered serves evaluations only, whose
truth the server checks. Durability `async` commits without waiting for the flush: the server's crash may lose the last
commits, and then lets versions jump, so none is given twice. Volatile spaces are known to the database by name, and live
in this process's memory.

The tables are in `postgres_schema.py`, the statements in `postgres_statements.py`, connections and what their errors mean in
`postgres_link.py`, watching in `postgres_feed.py`.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
import psycopg

from holdfast.checking import check_batch, check_durability, check_keys, check_scan
from holdfast.clock import Clock, SystemClock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo, Usage
from holdfast.engines import postgres_doctor
from holdfast.engines.committing import Committer
from holdfast.engines.evaluation import size_of
from holdfast.engines.feed import follow
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.postgres_commit import MadeAnew, Writer
from holdfast.engines.postgres_feed import Bell
from holdfast.engines.postgres_link import (
    FALSE,
    TRUE,
    Address,
    Broken,
    Call,
    Link,
    Pool,
    Refused,
    Rows,
    dial,
    int4,
    int8,
    number,
    optional_number,
    read_url,
    refused,
    string,
    text,
    text_array,
    translate,
)
from holdfast.engines.postgres_rows import bounds_of, entry_of, load_call
from holdfast.engines.postgres_schema import prepare
from holdfast.engines.postgres_server import ServerTime, check_server, greet
from holdfast.engines.postgres_state import SpaceState
from holdfast.engines.postgres_statements import (
    AUDIT_READS,
    BEGIN,
    BEGIN_SNAPSHOT,
    CLEAR_FEED,
    CLEAR_REQUESTS,
    COMMIT,
    DROPPED,
    EMPTY,
    EMPTY_HEAD,
    FLOOR,
    GET,
    GET_MANY,
    HEAD,
    LOCK,
    MAKE,
    OLDEST,
    REVIVE,
    ROLLBACK,
    SCAN,
    SCAN_BACKWARDS,
    SET_HEAD,
    SIZES,
    SPACE,
    SPACES,
    USAGE,
)
from holdfast.errors import DurabilityUnavailable, InvalidInput, Unavailable
from holdfast.keys import subspace_of

READ_TRIES: Final = 3
"""Connections a read is tried on."""
COMPACT_ROWS: Final = 1000
"""Feed rows removed per transaction."""


class _Home(msgspec.Struct):
    """What this process remembers of a space."""

    id: int
    durability: Durability
    created_at: int


_ENGINES: Final[weakref.WeakSet[PostgresEngine]] = weakref.WeakSet()


def _disown() -> None:
    """In a child after a fork: the connections belong to the parent."""
    for engine in _ENGINES:
        engine._failed = "this store was opened before a fork; open it again in the child process"


os.register_at_fork(after_in_child=_disown)


class PostgresEngine:
    """Spaces in a schema of a PostgreSQL database. Use `await PostgresEngine.open(url)`."""

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None) -> PostgresEngine:
        """Connect, and make the schema if it is not there."""
        address = read_url(url)
        connection = await dial(address)
        try:
            await check_server(connection)
            locks = await prepare(connection, address.schema)
            engine = cls(address, locks, clock or SystemClock())
            engine._pool.release(await engine._greeted(connection))
        except BaseException as exc:
            connection.pgconn.finish()
            raise _translated(exc) from exc
        return engine

    def __init__(self, address: Address, locks: int, clock: Clock) -> None:
        self._address = address
        self._locks = locks
        self._time = ServerTime(clock)
        self._pool = Pool(self._connect)
        self._bell = Bell(self._pool.run, self._ask, self._connect, locks)
        self._writer = Writer(self._pool, self._time, locks, self._bell.committed)
        self._committer = Committer(self._writer.begin)
        self._homes: dict[str, _Home] = {}
        self._finding = asyncio.Lock()
        """Of who commits to a space that is not known yet: they queue up in the order in which they came."""
        # Volatile versions must not repeat after a restart: they start at the clock's microseconds.
        self._volatile = MemoryEngine(clock=clock, first_revision=clock.now_ms() * 1000)
        self._fsync = True
        self.trips = 0
        """Round trips so far."""
        self._failed: str | None = None
        self._closed = False
        _ENGINES.add(self)

    async def _connect(self) -> Link:
        return await self._greeted(await dial(self._address))

    async def _greeted(self, connection: psycopg.AsyncConnection) -> Link:
        link = Link(connection, self._count)
        try:
            self._fsync = await greet(link, self._locks, self._time)
        except BaseException:
            link.close()
            raise
        return link

    def _count(self) -> None:
        self.trips += 1

    # --- commits ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        size = check_batch(batch)
        while True:
            if space in self._homes and not self._finding.locked():
                home = await self._home(space)
            else:  # a request that is repeated must not overtake its first attempt
                async with self._finding:
                    home = await self._home(space)
            if home is not None and home.durability == "volatile":
                return await self._volatile.commit(space, batch)
            durability = "sync" if home is None else home.durability
            self._admit(durability)
            try:
                return await self._committer.commit(space, durability, batch, size)
            except MadeAnew:
                self._homes.pop(space, None)

    def _admit(self, durability: str) -> None:
        if durability == "sync" and not self._fsync:
            raise DurabilityUnavailable(
                "the server runs with fsync = off, so nothing it says is on its disk. Set fsync = on in postgresql.conf "
                "and reload it, or open the store (or make the space) with durability 'async' or 'volatile'"
            )

    async def require(self, durability: Durability) -> None:
        """Refuse with DurabilityUnavailable if this server cannot give that durability."""
        self._admit(durability)

    # --- reads ---

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        check_keys(keys)
        home = await self._home(space)
        if home is None:
            return [None] * len(keys)
        if home.durability == "volatile":
            return await self._volatile.get(space, keys)
        if len(keys) == 1:
            [rows] = await self._ask((GET, (int4(home.id), int8(self._time.given()), keys[0].encode())))
            return [entry_of(rows[0]) if rows else None]
        [rows] = await self._ask((GET_MANY, (int4(home.id), int8(self._time.given()), text_array(sorted(set(keys))))))
        found = {entry.key: entry for entry in map(entry_of, rows)}
        return [found.get(key) for key in keys]

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        home = await self._home(space)
        if home is None:
            return Page([], False, 0)
        if home.durability == "volatile":
            return await self._volatile.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        low, high = bounds_of(prefix, after, reverse)
        within = (int8(self._time.given()), text(low), text(high), int8(limit + 1))
        [rows] = await self._ask((SCAN_BACKWARDS if reverse else SCAN, (int4(home.id), *within)))
        found = [entry_of(row[1:]) for row in rows if row[1] is not None]
        return Page(found[:limit], len(found) > limit, number(rows[0][0]))

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return self._watch(space, prefixes, cursor, live)

    async def _watch(
        self, space: str, prefixes: tuple[str, ...], cursor: str | None, live: bool
    ) -> AsyncIterator[ChangeSet]:
        home = await self._home(space)
        if home is not None and home.durability == "volatile":
            async for commit in self._volatile.watch(space, *prefixes, cursor=cursor, live=live):
                yield commit
            return
        with self._bell.watching(space, prefixes) as feed:
            async for commit in follow(feed, prefixes, cursor, live):
                yield commit

    async def _ask(self, *calls: Call) -> list[Rows]:
        """A read; a connection that breaks meanwhile costs nothing but time."""
        self._check_usable()
        for _ in range(READ_TRIES):
            try:
                return await self._pool.run(*calls)
            except Refused as exc:
                raise refused(exc) from exc
            except Broken as exc:
                failure = exc
                self._check_usable()
        raise Unavailable(f"the connection to the server broke ({failure})") from failure

    async def _home(self, space: str) -> _Home | None:
        """The space, if it exists.

        Ids never change, so they are looked up once. That a durable space was dropped and made anew shows at its next
        commit. Only a volatile one, of which the database has no more than the name, must be asked about each time.
        """
        home = self._homes.get(space)
        if home is None or home.durability == "volatile" or self._closed or self._failed:
            return await self._look_up(space, home)
        return home

    async def _look_up(self, space: str, known: _Home | None) -> _Home | None:
        [rows] = await self._ask((SPACE, (text(space),)))
        found = None
        if rows and rows[0][3] == FALSE:
            id, durability, created_at, _ = rows[0]
            found = _Home(number(id), string(durability), number(created_at))  # type: ignore[arg-type]
        if known is not None and known.durability == "volatile" and found != known:
            self._volatile.forget(space)
        if found is None:
            self._homes.pop(space, None)
        else:
            self._homes[space] = found
            self._writer.know(space, found.id)
        return found

    def _check_usable(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")
        if self._failed is not None:
            raise Unavailable(self._failed)

    # --- the life of spaces ---

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        check_durability(durability)
        self._admit(durability)
        known = await self.spaces(space)
        if not known or known[0].durability != durability or audit_reads > known[0].audit_reads:
            await self._administer(space, lambda link, state: self._create(link, state, durability, audit_reads))
            self._homes.pop(space, None)
            if durability == "volatile":
                await self._volatile.create(space, durability)
            known = await self.spaces(space)
        return known[0]

    async def _create(self, link: Link, state: SpaceState, durability: Durability, audit_reads: bool) -> None:
        audited = TRUE if audit_reads else FALSE
        if state.id is None:
            await link.send((MAKE, (text(state.name), text(durability), audited, int8(self._time.now()))))
        elif state.dropped:
            created_at = max(state.now, state.time)
            await link.send((REVIVE, (int4(state.id), text(durability), audited, int8(created_at))))
        elif state.durability != durability:
            raise InvalidInput(
                f"space {state.name!r} exists with durability {state.durability!r}; it cannot be opened as {durability!r}"
            )
        elif audit_reads:
            await link.send((AUDIT_READS, (int4(state.id),)))

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        asked = (text(name),)
        _, rows, usages, _ = await self._ask((BEGIN_SNAPSHOT, ()), (SPACES, asked), (USAGE, asked), (COMMIT, ()))
        held: dict[int, list[Usage]] = {}
        for id, owner, subspace, keys, size in usages:
            held.setdefault(number(id), []).append(Usage(string(owner), string(subspace), number(keys), number(size)))
        infos = [self._info(row, held) for row in rows]
        return [await self._with_volatile(info) if info.durability == "volatile" else info for info in infos]

    def _info(self, row: list[bytes | None], held: dict[int, list[Usage]]) -> SpaceInfo:
        id, name, durability, created_at, audit_reads, floor, revision, due = row
        return SpaceInfo(
            name=string(name),
            durability=string(durability),  # type: ignore[arg-type]
            revision=number(revision),
            created_at=number(created_at),
            audit_reads=audit_reads == TRUE,
            feed_floor=number(floor),
            next_expiry=optional_number(due),
            usage=held.get(number(id), []),
        )

    async def _with_volatile(self, info: SpaceInfo) -> SpaceInfo:
        held = await self._volatile.spaces(info.name)
        return msgspec.structs.replace(held[0], audit_reads=info.audit_reads) if held else info

    async def drop(self, space: str) -> None:
        if await self._home(space) is not None:
            await self._administer(space, self._drop)
            await self._volatile.drop(space)
            self._homes.pop(space, None)

    async def _drop(self, link: Link, state: SpaceState) -> None:
        """Empty the space; what stays is its name and a head one revision further."""
        if state.id is None or state.dropped:
            return
        id, revision = int4(state.id), state.revision + 1
        head = (SET_HEAD, (id, int8(revision), int8(0), int8(state.time), int8(state.last_id)))
        await link.send(*((each, (id,)) for each in EMPTY), head, (DROPPED, (id, int8(revision))))

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        home = await self._home(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.load(space, entries, revision)
            return
        self._admit("sync" if home is None else home.durability)
        await self._administer(space, lambda link, state: self._load(link, state, entries, revision))

    async def _load(self, link: Link, state: SpaceState, entries: list[Entry], revision: int) -> None:
        now = max(state.now or self._time.now(), state.time)
        if state.id is None:
            [rows] = await link.send((MAKE, (text(state.name), b"sync", FALSE, int8(now))))
            state.id = number(rows[0][0])
        elif state.dropped:
            await link.send((REVIVE, (int4(state.id), b"sync", FALSE, int8(now))))
        id, given = int4(state.id), {entry.key: entry for entry in entries}
        [rows] = await link.send((SIZES, (id, text_array(list(given)))))
        usage: dict[tuple[str, str], list[int]] = {}
        gone: list[tuple[str, int]] = []
        for key, version, owner, size in rows:
            gone.append((string(key), number(version)))
            amount = usage.setdefault((string(owner), subspace_of(string(key))), [0, 0])
            amount[0] -= 1
            amount[1] -= number(size)
        for entry in given.values():
            amount = usage.setdefault((entry.owner, subspace_of(entry.key)), [0, 0])
            amount[0] += 1
            amount[1] += size_of(entry)
        reached = max(state.revision, revision)
        step = state.step + 1 if reached == state.revision else 0
        call = load_call(state, list(given.values()), gone, usage, self._locks, reached)
        await link.send(
            call,
            (CLEAR_FEED, (id, int8(0), int8(reached), int8(step))),
            (CLEAR_REQUESTS, (id, int8(reached))),
            (FLOOR, (id, int8(reached))),
        )

    async def compact(self, space: str, upto: int) -> None:
        home = await self._home(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.compact(space, upto)
        elif home is not None:
            while await self._administer(space, lambda link, state: self._compact(link, state, upto)):
                pass

    async def _compact(self, link: Link, state: SpaceState, upto: int) -> bool:
        """Remove some of the feed up to a revision; True when there is more to remove. The head stays, emptied."""
        if state.id is None or state.dropped:
            return False
        id, upto = int4(state.id), min(upto, state.revision)
        [rows] = await link.send((OLDEST, (id, int8(upto), int8(COMPACT_ROWS))))
        floor, revision, step = (optional_number(each) for each in rows[-1])
        calls: list[Call] = []
        more = len(rows) == COMPACT_ROWS
        if revision is not None and step is not None:
            is_head = (revision, step) == (state.revision, state.step)
            end = (int8(revision), int8(step if is_head else step + 1))
            calls = [(CLEAR_FEED, (id, int8(floor), *end)), (CLEAR_REQUESTS, (id, int8(revision)))]
            if is_head:
                calls.append((EMPTY_HEAD, (id, *end)))
        calls.append((FLOOR, (id, int8(revision if more else upto))))
        await link.send(*calls)
        return more

    async def _administer(self, space: str, work: Callable[[Link, SpaceState], Awaitable[object]]) -> object:
        """A transaction of our own with the space's lock, or that for making spaces if there is none of this name."""
        self._check_usable()
        link: Link | None = None
        try:
            link = await self._pool.acquire()
            state = await self._lock(link, space)
            answer = await work(link, state)
            await link.send((COMMIT, ()))
        except (Refused, Broken) as exc:
            raise _translated(exc) from exc
        finally:
            if link is not None:
                self._pool.release(link)
            self._writer.forget(space)
            self._bell.tails.look(space)
        if state.id is not None:
            self._bell.committed(space, state.id, 0, state.revision + 1, ())
        return answer

    async def _lock(self, link: Link, space: str) -> SpaceState:
        [rows] = await link.send((SPACE, (text(space),)))
        while True:
            id = number(rows[0][0]) if rows else 0
            head = (HEAD, (text(space), int8(self._time.given())))
            _, _, rows = await link.send((BEGIN, ()), (LOCK, (int4(self._locks), int4(id))), head)
            if bool(rows) == bool(id):
                return SpaceState(space, rows)
            await link.send((ROLLBACK, ()))

    # --- the store as a whole ---

    async def inspect(self) -> list[Finding]:
        self._check_usable()
        connection = await dial(self._address)
        try:
            return await postgres_doctor.examine(connection, self._address.schema)
        except psycopg.Error as exc:
            raise _translated(exc) from exc
        finally:
            connection.pgconn.finish()

    async def close(self) -> None:
        if self._closed:
            return
        if self._failed is None:
            await self._committer.close()
        self._closed = True
        await self._bell.close()
        await self._volatile.close()
        if self._failed is None:
            self._pool.close()


def _translated(exc: BaseException) -> BaseException:
    """A failure of the connection, beside commits, as the caller knows it."""
    if isinstance(exc, psycopg.Error):
        return translate(exc.sqlstate or "08006", str(exc).strip())
    if isinstance(exc, Refused):
        return refused(exc)
    if isinstance(exc, Broken):
        return Unavailable(f"the connection to the server broke ({exc}); look whether it was done, and try again")
    return exc
