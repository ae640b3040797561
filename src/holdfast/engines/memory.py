"""The memory engine: the specification, running.

Each space is a dictionary, a sorted list of its keys, a sorted list of expiries (`Space`, which the resident engine has
too) and a list of commits. A commit is evaluated and applied within one step of the event loop, so there is nothing to
lock. It keeps the last COMMITS_MAX commits; whoever wants older ones gets `Compacted`, and request ids are remembered as
long as their commit is.

It serves `memory:` stores, the volatile spaces of embedded stores, and the tests of every other engine, which must do
what it does. Nothing in it survives the process.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from itertools import islice
from typing import Final

from sortedcontainers import SortedList

from holdfast.checking import check_batch, check_durability, check_keys, check_scan
from holdfast.clock import Clock, SystemClock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo, Usage
from holdfast.engines.evaluation import Group, ids_upto, size_of
from holdfast.engines.feed import follow
from holdfast.engines.stored import Stored
from holdfast.errors import Compacted, InvalidInput, Unavailable
from holdfast.keys import prefix_end, subspace_of

COMMITS_MAX: Final = 200_000


class MemoryEngine:
    """Spaces in this process's memory."""

    def __init__(self, *, clock: Clock | None = None, first_revision: int = 0) -> None:
        self._clock = clock or SystemClock()
        self._first_revision = first_revision
        self._spaces: dict[str, _MemorySpace] = {}
        self._dropped: dict[str, _MemorySpace] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    async def commit(self, space: str, batch: Batch) -> Receipt:
        check_batch(batch)
        return self.write(space, batch)

    def write(self, space: str, batch: Batch) -> Receipt:
        """What `commit` does with a batch that was checked, at once."""
        home = self._find(space) or self._made(space)
        group = Group(home, self._clock.now_ms())
        receipt = group.evaluate(batch)
        if not group.empty:
            self._spaces[space] = home  # only now: what is refused, or writes nothing, makes no space
            home.apply(group)
            self._ring(space)
        return receipt

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        check_keys(keys)
        home = self._find(space)
        if home is None:
            return [None] * len(keys)
        now = max(self._clock.now_ms(), home.time)
        return [home.live(key, now) for key in keys]

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        home = self._find(space)
        if home is None:
            return Page([], False, 0)
        return home.page(prefix, after, limit, reverse, max(self._clock.now_ms(), home.time))

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return follow(_MemoryFeed(self, space), prefixes, cursor, live)

    async def close(self) -> None:
        self._closed = True
        for space in list(self._waiting):
            self._ring(space)

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        return self.make(space, durability, audit_reads=audit_reads)

    def make(self, space: str, durability: Durability, *, audit_reads: bool = False) -> SpaceInfo:
        """What `create` does, at once."""
        check_durability(durability)
        known = self._find(space)
        if known is not None and known.durability != durability:
            raise InvalidInput(
                f"space {space!r} exists with durability {known.durability!r}; it cannot be opened as {durability!r}"
            )
        home = self._spaces[space] = known or self._made(space, durability)
        home.audit_reads = home.audit_reads or audit_reads
        return home.info(space)

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        names = sorted(self._spaces) if name is None else [name]
        return [home.info(each) for each in names if (home := self._find(each)) is not None]

    async def drop(self, space: str) -> None:
        self.forget(space)

    def forget(self, space: str) -> None:
        """What `drop` does, at once."""
        home = self._find(space)
        if home is not None:
            del self._spaces[space]
            self._dropped[space] = _MemorySpace(home.revision + 1, home.time, home.last_id)
            self._ring(space)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        home = self._spaces[space] = self._find(space) or self._made(space)
        home.load(entries)
        home.revision = home.floor = max(home.revision, revision)
        home.commits.clear()
        home.requests.clear()

    async def compact(self, space: str, upto: int) -> None:
        home = self._find(space)
        if home is not None:
            home.compact(upto)

    async def inspect(self) -> list[Finding]:
        return [
            Finding(
                "note",
                "durability",
                "everything is in this process's memory and is lost when it ends, whatever durability a space asks for",
                "open a file, such as holdfast.open('team.db'), to keep it",
            )
        ]

    def _find(self, space: str) -> _MemorySpace | None:
        if self._closed:
            raise Unavailable("the store is closed")
        return self._spaces.get(space)

    def _made(self, space: str, durability: Durability = "sync") -> _MemorySpace:
        """A new space, not yet known; it goes on where one of that name was dropped."""
        left = self._dropped.get(space)
        home = _MemorySpace(self._first_revision)
        if left is not None:
            home = _MemorySpace(left.revision, left.time, left.last_id)
        home.durability = durability
        home.created_at = max(self._clock.now_ms(), home.time)
        return home

    def _bounds(self, space: str) -> tuple[int, int]:
        home = self._find(space) or self._dropped.get(space)
        return (self._first_revision, self._first_revision) if home is None else (home.floor, home.revision)

    def _ring(self, space: str) -> None:
        for waiter in self._waiting.pop(space, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _rung(self, space: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(space, set())
        waiting.add(waiter)
        try:
            await waiter
        finally:
            waiting.discard(waiter)


class Space:
    """The entries of one space and their order, and its head: what batches are evaluated on, but for request ids."""

    def __init__(self, revision: int = 0, time: int = 0, last_id: int = 0) -> None:
        self.revision = revision
        self.time = time
        self.last_id = last_id
        self.floor = revision
        self.durability: Durability = "sync"
        self.audit_reads = False
        self.created_at = 0
        self.entries: dict[str, Entry] = {}
        self.entry: Callable[[str], Entry | None] = self.entries.get
        self.keys: SortedList[str] = SortedList()
        self.expiries: SortedList[tuple[int, str]] = SortedList()
        self.usage: dict[tuple[str, str], list[int]] = {}

    # --- State ---

    def first(self, prefix: str, after: str | None, limit: int) -> list[Entry]:
        return [self.entries[key] for key in islice(self.keys_under(prefix, after, False), limit)]

    def vacant(self, prefix: str) -> bool:
        return next(self.keys_under(prefix, None, False), None) is None

    def due(self, now: int, limit: int) -> list[Entry]:
        if not self.expiries or self.expiries[0][0] > now:
            return []
        return [
            self.entries[key]
            for _, key in islice(self.expiries.irange(maximum=(now + 1,), inclusive=(True, False)), limit)
        ]

    # --- reading ---

    def live(self, key: str, now: int) -> Entry | None:
        entry = self.entries.get(key)
        if entry is None or (entry.expires_at is not None and entry.expires_at <= now):
            return None
        return entry

    def page(self, prefix: str, after: str | None, limit: int, reverse: bool, now: int) -> Page:
        live = (self.live(key, now) for key in self.keys_under(prefix, after, reverse))
        found = list(islice((entry for entry in live if entry is not None), limit + 1))
        return Page(found[:limit], len(found) > limit, self.revision)

    def keys_under(self, prefix: str, after: str | None, reverse: bool) -> Iterator[str]:
        low, high = prefix, prefix_end(prefix)
        with_low = True
        if after is not None and reverse:
            high = after if high is None else min(high, after)
        elif after is not None and after >= low:
            low, with_low = after, False
        keys: Iterator[str] = self.keys.irange(low, high, (with_low, False), reverse)
        return keys

    def info(self, name: str) -> SpaceInfo:
        return SpaceInfo(
            name=name,
            durability=self.durability,
            revision=self.revision,
            created_at=self.created_at,
            audit_reads=self.audit_reads,
            feed_floor=self.floor,
            next_expiry=self.expiries[0][0] if self.expiries else None,
            usage=[Usage(*where, *amount) for where, amount in sorted(self.usage.items())],
        )

    # --- writing ---

    def apply(self, group: Group) -> None:
        if group.is_plain:
            self.entries.update(group.writes)  # type: ignore[arg-type]
        else:
            self._store_each(group)
        for (owner, subspace), (keys, size) in group.usage.items():
            self.charge(owner, subspace, keys, size)
        self.revision, self.last_id = group.revision, group.last_id
        if group.commits:
            self.time = group.now

    def _store_each(self, group: Group) -> None:
        entries = self.entries
        for key, entry in group.writes.items():
            old = entries.get(key)
            if old is None or entry is None or old.expires_at is not None or entry.expires_at is not None:
                self.store(key, entry)
            else:
                entries[key] = entry

    def load(self, entries: Collection[Entry]) -> None:
        """Entries exactly as given, over those that are there."""
        self.last_id = max(self.last_id, ids_upto(entries))
        for entry in entries:
            old = self.entries.get(entry.key)
            if old is not None:
                self.charge(old.owner, subspace_of(old.key), -1, -size_of(old))
            self.store(entry.key, entry)
            self.charge(entry.owner, subspace_of(entry.key), 1, size_of(entry))

    def store(self, key: str, entry: Entry | None) -> None:
        old = self.entries.get(key)
        if old is not None and old.expires_at is not None:
            self.expiries.remove((old.expires_at, key))
        if entry is None:
            if old is not None:
                del self.entries[key]
                self.keys.remove(key)
            return
        if old is None:
            self.keys.add(key)
        self.entries[key] = entry
        if entry.expires_at is not None:
            self.expiries.add((entry.expires_at, key))

    def charge(self, owner: str, subspace: str, keys: int, size: int) -> None:
        amount = self.usage.setdefault((owner, subspace), [0, 0])
        amount[0] += keys
        amount[1] += size
        if not amount[0]:
            del self.usage[owner, subspace]


class _MemorySpace(Space):
    """A space whose commits and requests are in memory too: all of the `State` its batches are evaluated on."""

    def __init__(self, revision: int, time: int = 0, last_id: int = 0) -> None:
        super().__init__(revision, time, last_id)
        self.commits: list[Stored] = []
        self.requests: dict[tuple[str, str], Stored] = {}

    def request(self, actor: str, request_id: str) -> Stored | None:
        return self.requests.get((actor, request_id))

    def apply(self, group: Group) -> None:
        super().apply(group)
        for commit in group.commits:
            self.commits.append(commit)
            if commit.request_id is not None:
                self.requests[commit.actor, commit.request_id] = commit
        if len(self.commits) > COMMITS_MAX * 1.1:
            self.compact(self.commits[-COMMITS_MAX - 1].version)

    def position(self, revision: int) -> int:
        """Where in `commits` the first one after a revision stands."""
        return bisect_right(self.commits, revision, key=lambda commit: commit.version)

    def compact(self, upto: int) -> None:
        count = self.position(upto)
        for commit in self.commits[:count]:
            asked = (commit.actor, commit.request_id or "")
            if self.requests.get(asked) is commit:  # the id may have been used again, after its window
                del self.requests[asked]
        del self.commits[:count]
        self.floor = max(self.floor, min(upto, self.revision))


class _MemoryFeed:
    """`Feed` of one memory space."""

    def __init__(self, engine: MemoryEngine, space: str) -> None:
        self._engine = engine
        self._space = space

    async def bounds(self) -> tuple[int, int]:
        return self._engine._bounds(self._space)

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        floor, _ = self._engine._bounds(self._space)
        if after < floor:
            raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
        home = self._engine._find(self._space)
        if home is None:
            return []
        start = home.position(after)
        return list(home.commits[start : start + limit])

    async def changed(self, after: int) -> None:
        if self._engine._bounds(self._space)[1] <= after:
            await self._engine._rung(self._space)
