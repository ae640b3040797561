"""The hot tier: an engine around a durable one that answers from memory, or from Redis, what it knows to be new enough.

`get`, `scan` and `commit` are the durable engine's, so whoever uses the contract as it is gets what it promises. Who can do
with less asks `get_seen` and `scan_seen` (`offers.Caches`), and says how much: the answer shows revision `seen` of the
space, or a later one; with 0 it is at most as old as the tier's ttl.

How it works. From the first such read on, the space's feed is followed by cursor, and `Followed` knows which names changed
at which revision. An item is kept with the revision it was read at; it answers if its name has not changed since, and
if that proves it for `seen`. Nothing rests on a message that removes it: a lost one leaves `applied` behind, and then
nobody who has seen more is answered from here. Reads that miss are done once for all who want the same. What comes back
is kept only if it is not older than what is there or than what is known to have changed. This process's own commits are
known from their receipts, and their entries are kept at once where they can be told (`cache_writes.py`).

A gap in the feed (Compacted: it was shortened, or the space was dropped, loaded or restored) makes it forget the whole space
and begin again. While the feed is cut, `applied` stands still: session readers are served as far as it proves, eventual ones until
the ttl. Spaces that are volatile or whose reads are audited pass through, and so does what may not be watched.

The order of looking: this process's memory (`cache_memory.py`), then a shelf that processes share (`Shelf`; Redis's is
`engines/redis_shelf.py`), then the durable engine. A shelf that fails is a miss.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from holdfast.clock import Clock
from holdfast.engine import SCAN_MAX, Batch, Engine, Entry, Page, Receipt, Touch
from holdfast.middleware.cache_followed import Followed
from holdfast.middleware.cache_following import CLOCK_SKEW_MS, Following
from holdfast.middleware.cache_memory import Item, Memory, Name
from holdfast.middleware.cache_options import Cache, CacheStats
from holdfast.middleware.cache_shelf import Shelf, copy_of, item_of, label
from holdfast.middleware.cache_writes import UNKNOWN, Known, Unknown, changed_keys, entry_after
from holdfast.middleware.snapshot import get_seeing
from holdfast.middleware.wrapper import Wrapper

PENDING_MAX: Final = 64
"""Copies on their way to a shelf; more are not sent."""
REWRITTEN_ENTRIES_MAX: Final = 64
REWRITTEN_BYTES_MAX: Final = 64 * 1024
"""A page up to this size is kept up to date by one's own commits; a larger one would cost more than the commit."""
PAGE: Final = "page"


class CachedEngine(Wrapper):
    """The durable engine with a hot tier in front of it.

    `store` names it among all whose copies a shelf holds. `watched` is what may be watched, if that is not everything.
    """

    def __init__(
        self,
        inner: Engine,
        clock: Clock,
        options: Cache,
        shelf: Shelf | None = None,
        *,
        store: str = "",
        watched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._shelf = shelf
        self._ttl_ms = options.ttl_ms
        self._shared_ttl_ms = options.shared_ttl_ms
        self._memory = Memory(options.entries)
        self._following = Following(inner, clock, store, watched, self._memory.forget_space)
        self._spaces = self._following.spaces
        self._flights: dict[object, asyncio.Future[Item | None]] = {}
        self._copying: dict[tuple[Name, ...], asyncio.Future[list[bytes | None] | None]] = {}
        self._pending: set[asyncio.Task[None]] = set()
        self._stats = CacheStats()

    @property
    def stats(self) -> CacheStats:
        """What the tier has done, and how far its feeds are behind."""
        followed, now = [home for home in self._spaces.values() if not home.passing], self._clock.now_ms()
        return replace(
            self._stats,
            flushes=self._following.flushes,
            spaces=len(followed),
            behind=max((home.behind for home in followed), default=0),
            lag_ms=max((home.lag_ms for home in followed), default=0),
            proof_age_ms=max((now - home.proved_ms for home in followed if home.asked or home.cut), default=0),
            feeds_cut=sum(home.cut for home in followed),
            shared_errors=self._stats.shared_errors + (0 if self._shelf is None else self._shelf.errors),
        )

    # --- reading ---

    async def get_seen(self, space: str, keys: list[str], seen: int) -> tuple[list[Entry | None], int]:
        home = self._spaces.get(space)
        if home is None:
            home = await self._following.begin(space)
        if home is None or home.passing:
            return await get_seeing(self.inner, space, keys)
        if len(keys) != 1:
            return await self._get_several(home, keys, seen)
        item = await self._entry(home, keys[0], seen)
        return [item.entries[0] if item.entries else None], item.since

    async def scan_seen(self, space: str, prefix: str, seen: int, *, limit: int = 1000) -> Page:
        home = self._spaces.get(space)
        if home is None:
            home = await self._following.begin(space)
        if home is None or home.passing or not _is_page(prefix, limit):
            return await self.inner.scan(space, prefix, limit=limit)
        return _page_of(await self._page(home, prefix, seen, limit), limit)

    async def read_seen(
        self, space: str, keys: list[str], prefix: str, seen: int, *, limit: int = 1000
    ) -> tuple[list[Entry | None], Page, int]:
        home = self._spaces.get(space)
        if home is None:
            home = await self._following.begin(space)
        if home is None or home.passing or not _is_page(prefix, limit):
            entries, revision = await get_seeing(self.inner, space, keys)
            page = await self.inner.scan(space, prefix, limit=limit)
            return entries, page, max(revision, page.revision)
        names: list[Name] = [*((space, key) for key in keys), (space, prefix, PAGE)]
        missing = [place for place, name in enumerate(names) if not self._remembers(home, name, seen)]
        shelf = self._shelf if len(missing) > 1 else None  # one alone is asked for as any other
        copies: list[Item | None] = [None] * len(names)
        if shelf is not None:
            found = await self._copies(shelf, home, tuple(names[place] for place in missing), seen)
            for place, copy in zip(missing, found, strict=True):
                copies[place] = copy
        told: list[Item] = []
        for name, copy in zip(names, copies, strict=True):
            if copy is not None:
                self._stats.shared_hits += 1
                told.append(copy)
            elif len(name) == 2:
                told.append(await self._entry(home, name[1], seen, shelf is not None))
            else:
                told.append(await self._page(home, prefix, seen, limit, shelf is not None))
        entries = [item.entries[0] if item.entries else None for item in told[:-1]]
        return entries, _page_of(told[-1], limit), max(item.since for item in told)

    async def _entry(self, home: Followed, key: str, seen: int, looked: bool = False) -> Item:
        name = (home.space, key)
        item = self._memory.get(name)
        if item is not None and self._holds(home, key, item, seen):
            self._hit(item)
            return item

        async def read() -> Page:
            [entry], revision = await get_seeing(self.inner, home.space, [key])
            return Page([] if entry is None else [entry], False, revision)

        return await self._fetch(home, name, name, key, seen, read, looked)

    async def _page(self, home: Followed, prefix: str, seen: int, limit: int, looked: bool = False) -> Item:
        name = (home.space, prefix, PAGE)
        item = self._memory.get(name)
        if item is not None and self._holds(home, prefix, item, seen):
            self._hit(item)
            return item

        def read() -> Coroutine[Any, Any, Page]:
            return self.inner.scan(home.space, prefix, limit=limit)

        return await self._fetch(home, name, (*name, limit), prefix, seen, read, looked)

    async def _get_several(self, home: Followed, keys: list[str], seen: int) -> tuple[list[Entry | None], int]:
        """From memory, if there is a revision at which all of them are known; they are asked for together otherwise."""
        found: list[Entry | None] = []
        since, at = 0, max(home.known, seen)
        for key in keys:
            item = self._memory.get((home.space, key))
            if item is None or not self._holds(home, key, item, 0):
                break
            found.append(item.entries[0] if item.entries else None)
            since, at = max(since, item.since), min(at, item.at)
        else:
            if since <= at and seen <= at:
                self._stats.hits += 1
                return found, since
        self._stats.misses += 1
        identity, applied, read_at = home.identity, home.applied, self._clock.now_ms()
        entries, revision = await get_seeing(self.inner, home.space, keys)
        if home.passing or identity is not home.identity:
            return entries, revision
        home.known = max(home.known, revision)
        # The snapshot is not older than what was applied before, nor than the newest of what it shows.
        at = max((entry.version for entry in entries if entry is not None), default=0)
        for entry in entries:
            if entry is not None:
                item = Item([entry], max(at, applied), entry.version, read_at)
                self._keep(home, (home.space, entry.key), entry.key, item)
        return entries, revision

    def _holds(self, home: Followed, name: str, item: Item, seen: int) -> bool:
        """Whether the item may be shown to one who has seen this revision."""
        home.asked = True
        if home.changed.get(name, 0) > item.at or self._clock.now_ms() >= item.until:
            return False
        if item.at < home.applied and item.at >= home.floor:
            item.at = home.applied  # it has not changed up to there
        return seen <= item.at

    def _remembers(self, home: Followed, name: Name, seen: int) -> bool:
        item = self._memory.get(name)
        return item is not None and self._holds(home, name[1], item, seen)

    def _hit(self, item: Item) -> None:
        self._stats.hits += 1
        if not item.entries:
            self._stats.negative_hits += 1

    # --- missing ---

    async def _fetch(
        self,
        home: Followed,
        name: Name,
        flight: object,
        changed: str,
        seen: int,
        read: Callable[[], Coroutine[Any, Any, Page]],
        looked: bool = False,
    ) -> Item:
        """What is asked for, read once for all who ask for it at the same time. `looked`: it is not on the shelf."""
        outdated = False
        while not outdated:
            under_way = self._flights.get(flight)
            if under_way is None:
                if looked:
                    return await self._lead(flight, self._read(home, name, changed, read))
                return await self._lead(flight, self._find(home, name, changed, seen, read))
            item = await asyncio.shield(under_way)
            if item is not None and seen <= item.at:
                return item
            outdated = item is not None  # it began before what this reader has seen; one that begins now does not
            item = self._memory.get(name)
            if item is not None and self._holds(home, changed, item, seen):
                return item
        return await self._read(home, name, changed, read)

    async def _lead(self, flight: object, finding: Coroutine[Any, Any, Item]) -> Item:
        """Find it, and tell those who wait for it. If the one who finds is cancelled, one of them goes on."""
        self._flights[flight] = told = asyncio.get_running_loop().create_future()
        try:
            item = await finding
        except Exception as exc:
            told.set_exception(exc)
            told.exception()  # nobody may wait
            raise
        else:
            told.set_result(item)
            return item
        finally:
            del self._flights[flight]
            if not told.done():
                told.set_result(None)

    async def _find(
        self, home: Followed, name: Name, changed: str, seen: int, read: Callable[[], Coroutine[Any, Any, Page]]
    ) -> Item:
        if self._shelf is not None and (item := await self._copied(self._shelf, home, name, changed, seen)) is not None:
            self._stats.shared_hits += 1
            return item
        return await self._read(home, name, changed, read)

    async def _read(
        self, home: Followed, name: Name, changed: str, read: Callable[[], Coroutine[Any, Any, Page]]
    ) -> Item:
        self._stats.misses += 1
        identity, read_at = home.identity, self._clock.now_ms()
        page = await read()
        home.known = max(home.known, page.revision)
        since = page.revision
        if len(name) == 2 and page.entries:
            since = page.entries[0].version
        item = Item(page.entries, page.revision, since, read_at, page.more)
        if not home.passing and identity is home.identity:  # not forgotten in between
            self._keep(home, name, changed, item, share=True)
        return item

    def _keep(self, home: Followed, name: Name, changed: str, item: Item, *, share: bool = False) -> None:
        """Remember what was read, unless it is older than what is known."""
        if not item.fits or not home.covers(changed):
            return
        item.keep_until(item.read_at + self._ttl_ms)
        if home.changed.get(changed, 0) > item.at or not self._memory.put(name, item):
            self._stats.fills_refused += 1
            return
        self._stats.fills += 1
        if share and self._shelf is not None and item.entries:
            self._share(self._shelf, home, name, item)

    # --- the shelf ---

    async def _copied(self, shelf: Shelf, home: Followed, name: Name, changed: str, seen: int) -> Item | None:
        """The copy that others left, if it may be shown to one who has seen this revision."""
        identity = home.identity
        return self._judged(home, identity, name, await shelf.get(identity, label(name)), seen)

    async def _copies(self, shelf: Shelf, home: Followed, names: tuple[Name, ...], seen: int) -> list[Item | None]:
        """Several of them, fetched in one round trip and once for all who ask for the same at the same time."""
        identity, under_way = home.identity, self._copying.get(names)
        data: list[bytes | None] | None = None  # as it stays for others if this one is cancelled: a miss
        if under_way is not None:
            data = await asyncio.shield(under_way)
        else:
            self._copying[names] = told = asyncio.get_running_loop().create_future()
            try:
                data = await shelf.get_all(identity, [label(name) for name in names])
            finally:
                del self._copying[names]
                told.set_result(data)
        if data is None:
            return [None] * len(names)
        return [self._judged(home, identity, name, copy, seen) for name, copy in zip(names, data, strict=True)]

    def _judged(self, home: Followed, identity: str, name: Name, data: bytes | None, seen: int) -> Item | None:
        """A copy that was asked for when the space had this identity, if it may be shown to one who has seen this revision."""
        changed = name[1]
        if data is None or identity is not home.identity or home.passing or not home.covers(changed):
            return None
        item, now = item_of(data), self._clock.now_ms()
        if item is None:
            self._stats.shared_errors += 1
            return None
        if item.read_at < home.shared_since_ms or item.read_at > now + CLOCK_SKEW_MS:
            return None
        item.keep_until(item.read_at + self._shared_ttl_ms)
        if not self._holds(home, changed, item, seen):
            return None
        item.until = min(item.until, now + self._ttl_ms)
        if self._memory.entries_max:
            self._memory.put(name, item)
        return item

    def _share(self, shelf: Shelf, home: Followed, name: Name, item: Item) -> None:
        """Send a copy on its way; nobody waits for it."""
        if len(self._pending) >= PENDING_MAX:
            return
        identity, at = home.identity, item.at
        copy = copy_of(item)

        async def put() -> None:
            if not await shelf.put(identity, label(name), at, copy, self._shared_ttl_ms):
                self._stats.fills_refused += 1

        task = asyncio.get_running_loop().create_task(put())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    # --- writing ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        receipt = await self.inner.commit(space, batch)
        home = self._spaces.get(space)
        if home is not None and not home.passing:
            self._committed(home, batch, receipt)
        return receipt

    def _committed(self, home: Followed, batch: Batch, receipt: Receipt) -> None:
        """What this process wrote is known at once, if everything before it is known."""
        home.known = max(home.known, receipt.version)
        for op in batch.operations:
            if isinstance(op, Touch):  # it has no revision: only whoever did it knows
                self._forget_all_of(home, op.key)
        if receipt.version != home.applied + 1:
            return
        keys = changed_keys(batch, receipt)
        if keys is None:
            return
        written: dict[str, Known] = {}
        if len(set(keys)) == len(keys):
            for op, result in zip(batch.operations, receipt.results, strict=True):
                if not isinstance(op, Touch):
                    key = keys[len(written)]
                    written[key] = entry_after(op, result, self._before(home, key), batch.actor, receipt)
        pages = self._rewritten(home, written, receipt.version)
        home.note(receipt.version, keys)
        for key, entry in written.items():
            if not isinstance(entry, Unknown):
                now = self._clock.now_ms()
                item = Item([] if entry is None else [entry], receipt.version, receipt.version, now)
                self._keep(home, (home.space, key), key, item, share=True)
        for prefix, item in pages.items():
            self._keep(home, (home.space, prefix, PAGE), prefix, item, share=True)

    def _before(self, home: Followed, key: str) -> Known:
        """What was under the key at the last revision applied."""
        item = self._memory.get((home.space, key))
        if item is not None and self._holds(home, key, item, home.applied):
            return item.entries[0] if item.entries else None
        for prefix in _prefixes(key):
            page = self._memory.get((home.space, prefix, PAGE))
            if page is not None and self._holds(home, prefix, page, home.applied):
                place = bisect_left(page.entries, key, key=lambda entry: entry.key)
                there = page.entries[place : place + 1]
                return there[0] if there and there[0].key == key else None
        return UNKNOWN

    def _rewritten(self, home: Followed, written: dict[str, Known], revision: int) -> dict[str, Item]:
        """The pages of which everything is known after this commit."""
        pages: dict[str, Item] = {}
        for prefix in {prefix for key in written for prefix in _prefixes(key)}:
            page = self._memory.get((home.space, prefix, PAGE))
            changes = {key: entry for key, entry in written.items() if key.startswith(prefix)}
            if page is None or not self._holds(home, prefix, page, home.applied):
                continue
            if len(page.entries) > REWRITTEN_ENTRIES_MAX or page.size > REWRITTEN_BYTES_MAX:
                continue
            if any(isinstance(entry, Unknown) for entry in changes.values()):
                continue
            entries = {entry.key: entry for entry in page.entries}
            for key, entry in changes.items():
                if entry is None or isinstance(entry, Unknown):
                    entries.pop(key, None)
                else:
                    entries[key] = entry
            ordered = [entries[key] for key in sorted(entries)]
            pages[prefix] = Item(ordered, revision, revision, page.read_at)
        return pages

    def _forget_all_of(self, home: Followed, key: str) -> None:
        self._memory.forget((home.space, key))
        for prefix in _prefixes(key):
            self._memory.forget((home.space, prefix, PAGE))

    async def drop(self, space: str) -> None:
        try:
            await self.inner.drop(space)
        finally:
            await self._following.end(space)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        try:
            await self.inner.load(space, entries, revision)
        finally:
            await self._following.end(space)

    async def close(self) -> None:
        await self._following.close()
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        if self._shelf is not None:
            await self._shelf.close()
        await self.inner.close()


def _is_page(prefix: str, limit: int) -> bool:
    """Whether it can be kept as one item."""
    return prefix[-1:] == "/" and type(limit) is int and 0 < limit <= SCAN_MAX


def _page_of(item: Item, limit: int) -> Page:
    return Page(item.entries[:limit], item.more or len(item.entries) > limit, item.since)


def _prefixes(key: str) -> list[str]:
    return [key[: place + 1] for place, letter in enumerate(key) if letter == "/"]
