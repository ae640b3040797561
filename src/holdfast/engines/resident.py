"""The resident engine: one process owns a SQLite file and has all of its entries in memory. The keeper's own.

It is the memory engine's state over the SQLite engine's file, schema and rows: a file written by either is opened by the
other. There is no log of its own: the feed is the log, one row per group, and the rows of the entries follow it
(`resident_folding.py`). Opening loads the tables and lays the feed over them (`resident_space.py`). The file's lock is held
from opening to closing, so nobody else can write; others may read.

A commit is evaluated on the entries in memory, its row goes into the file, COMMIT, and only then is it shown and is the
reply sent: what a reply shows, reads included, is durable (`resident_commit.py`). Reads are answered from memory and never
touch the file. The feed, the audit and request ids stay in the file, so memory does not grow with history; a bounded tail
of the feed is in memory for live watchers (`resident_feed.py`). Request ids are inserted, and looked up only if one
collides, as in `sqlite.py`; durability async and volatile are as they are there.

Failure. A full disk refuses what it has no room for, until there is room. After an I/O error in COMMIT nobody knows what
is on the disk, and memory may be behind the file: everything is refused from then on, reads too. `failure` says why, and
`on_failure` is called, so that a server can end; opening the store again finds out. Damage found while opening is Damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from holdfast.checking import check_batch, check_durability, check_keys, check_scan
from holdfast.clock import Clock, SystemClock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo
from holdfast.engines import sqlite_doctor
from holdfast.engines.bells import Bells
from holdfast.engines.feed import follow
from holdfast.engines.grouping import Together, Waiting
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.private import real_path
from holdfast.engines.resident_commit import Done, GroupCommit
from holdfast.engines.resident_feed import ResidentFeed, Tail
from holdfast.engines.resident_file import Opened, claim, open_file
from holdfast.engines.resident_space import ResidentSpace
from holdfast.engines.sqlite_backup import copy_file
from holdfast.engines.sqlite_file import REVISION_MAX, FileLock, ForeignFile, connect, translating
from holdfast.engines.sqlite_rows import Execute
from holdfast.errors import InvalidInput, Unavailable
from holdfast.offers import Replies, Reply

OnFailure = Callable[[str], None]

_ENGINES: Final[weakref.WeakSet[ResidentEngine]] = weakref.WeakSet()


def _disown() -> None:
    """In a child after a fork: the store belongs to the parent, and so must the lock when the parent has ended."""
    for engine in _ENGINES:
        engine._commits.failure = "this store was opened before a fork; its owner is the parent process"
        engine._spaces.clear()
        engine._lock.close()
        engine._closed = True  # there is nothing for the child to close


os.register_at_fork(after_in_child=_disown)


class ResidentEngine:
    """Spaces in memory, and in a SQLite file. Use `await ResidentEngine.open(path)`; it belongs to that event loop."""

    @classmethod
    async def open(
        cls, path: str | Path, *, clock: Clock | None = None, on_failure: OnFailure | None = None
    ) -> ResidentEngine:
        """Own the store, creating the file if there is none. `on_failure` is called once, when the engine has to stop."""
        path = real_path(path)
        lock = FileLock(path)
        try:
            await claim(path, lock)
            with lock.signed():
                opened = await asyncio.to_thread(open_file, path, asyncio.get_running_loop().time)
                return cls(path, lock, clock or SystemClock(), on_failure, opened)
        except ForeignFile:
            lock.remove()
            raise
        except BaseException:
            lock.close()
            raise

    def __init__(self, path: Path, lock: FileLock, clock: Clock, on_failure: OnFailure | None, opened: Opened) -> None:
        self.path = path
        self.on_failure = on_failure
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._link = opened.link
        self._reader: apsw.Connection | None = None
        self.first_revision = opened.first_revision
        self._spaces = {space.name: space for space in opened.spaces if not space.dropped}
        self._dropped = {space.name: space for space in opened.spaces if space.dropped}
        # Volatile versions must not repeat after a restart: they start at the clock's microseconds.
        self._volatile = MemoryEngine(clock=clock, first_revision=clock.now_ms() * 1000)
        for home in self._spaces.values():
            if home.durability == "volatile":
                self._volatile.make(home.name, "volatile")
        self._commits = GroupCommit(path, lock, clock, opened, self)
        self._rows, self._submit = self._commits.rows, self._commits.submit
        self._tail = Tail()
        self._bells: weakref.WeakValueDictionary[str, Bells] = weakref.WeakValueDictionary()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        _ENGINES.add(self)

    def fold_every(self, seconds: float) -> None:
        """How long a commit may be in the feed only, before its entries are written too."""
        self._commits.fold_every_s = seconds

    @property
    def failure(self) -> str | None:
        """Why this engine refuses everything; None as long as it works."""
        return self._commits.failure

    # --- commits ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        item = self._checked(space, batch)
        if isinstance(item, Receipt):
            return item
        if not self._commits.enter(item):
            await item
        return item.told()

    def submit(self, space: str, batch: Batch, reply: Reply) -> bool:
        """`commit` for a server (`offers.Submits`): no coroutine, no task."""
        item = self._checked(space, batch, reply)
        if type(item) is Waiting:
            self._submit(item)
        else:
            reply.set_result(item)  # type: ignore[arg-type]
        return True

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        """`submit` of several, as one."""
        home = self._spaces.get(space)
        if home is None or self._closed or home.durability == "volatile":
            return False
        size = 0
        try:
            for batch in batches:
                if not batch.fresh:
                    return False
                size += check_batch(batch)
        except InvalidInput:
            return False
        item = Together(space, home.durability, batches[0], size, count=len(batches), batches=batches, replies=replies)
        self._submit(item)
        return True

    def read(self, space: str, keys: list[str]) -> list[Entry | None] | None:
        """`get` for a server, of what is in memory."""
        home = self._spaces.get(space)
        if home is None or home.durability == "volatile":
            return None
        if len(keys) == 1 and type(keys[0]) is str:
            # The usual read: one entry that does not expire. A key that is found is a valid one.
            entry = home.entries.get(keys[0])
            if entry is not None and entry.expires_at is None:
                return [entry]
        check_keys(keys)
        now = max(self._clock.now_ms(), home.time)
        return [home.live(key, now) for key in keys]

    def _checked(self, space: str, batch: Batch, reply: Reply | None = None) -> Waiting | Receipt:
        """A batch for the queue; or the receipt, if the space is volatile."""
        size = check_batch(batch)
        home = self._spaces.get(space)
        if home is None or self._closed:
            self._check_usable()
            return Waiting(space, "sync", batch, size, None, reply)
        if home.durability == "volatile":
            return self._volatile.write(space, batch)
        return Waiting(space, home.durability, batch, size, None, reply)

    def homes(self) -> list[ResidentSpace]:
        return list(self._spaces.values())

    def write_volatile(self, space: str, batch: Batch) -> Receipt:
        return self._volatile.write(space, batch)

    def home_of(self, space: str) -> ResidentSpace:
        """The space to evaluate batches on; one that does not exist goes on where one of that name was dropped."""
        return (
            self._spaces.get(space) or self._dropped.get(space) or ResidentSpace(self._link, space, self.first_revision)
        )

    def apply(self, done: list[Done]) -> None:
        """Show what is in the file now, and wake whoever waits for it."""
        for home, group, id, size in done:
            if not home.exists:
                self._dropped.pop(home.name, None)
                self._spaces[home.name] = home
            home.adopt(group, id, size)
            if group.commits:
                bells = self._bells.get(home.name)
                if bells is not None and bells.ring(group.commits[0].version - 1, group.commits):
                    self._tail.add(home.recent, group.commits, size)
                else:  # nobody looks: objects that are not kept are cheap
                    home.recent.skip(group.commits[-1].version)

    def fail(self, reason: str) -> None:
        """Show nothing any more, and let the owner know."""
        self._spaces.clear()
        self._wake_all()
        if self.on_failure is not None:
            self._loop.call_soon(self.on_failure, reason)

    def _check_usable(self) -> None:
        self._commits.check()
        if self._closed:
            raise Unavailable("the store is closed")

    # --- reads ---

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        found = self.read(space, keys) if space in self._spaces else None
        if found is not None:
            return found
        check_keys(keys)
        home = self._find(space)
        return [None] * len(keys) if home is None else await self._volatile.get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        home = self._find(space)
        if home is None:
            return Page([], False, 0)
        if home.durability == "volatile":
            return await self._volatile.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        return home.page(prefix, after, limit, reverse, max(self._clock.now_ms(), home.time))

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        home = self._find(space)
        if home is not None and home.durability == "volatile":
            return self._volatile.watch(space, *prefixes, cursor=cursor, live=live)
        if not live:
            return follow(ResidentFeed(self, space), prefixes, cursor, live=False)
        return follow(self._watching(space, prefixes), prefixes, cursor)

    @contextlib.contextmanager
    def _watching(self, space: str, prefixes: tuple[str, ...]) -> Iterator[ResidentFeed]:
        bells = self._bells.get(space)
        if bells is None:
            bells = self._bells[space] = Bells()  # for as long as somebody watches the space live
        with bells.listening(prefixes) as listener:
            yield ResidentFeed(self, space, listener)

    def _find(self, space: str) -> ResidentSpace | None:
        self._check_usable()
        return self._spaces.get(space)

    def look_up(self, space: str) -> ResidentSpace | None:
        """For a feed: the space, or what is left of one that was dropped."""
        return self._find(space) or self._dropped.get(space)

    def _wake_all(self) -> None:
        for bells in list(self._bells.values()):
            bells.ring_all()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Execute]:
        """For a feed: several reads of the file at one moment. Never held across an await."""
        if self._reader is None:
            self._reader = connect(self.path)
        read = self._reader.execute
        read("BEGIN")
        try:
            yield read
        finally:
            read("COMMIT")

    # --- the life of spaces ---

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        check_durability(durability)
        home = self._find(space)
        if home is None or home.durability != durability or audit_reads > home.audit_reads:
            now = self._clock.now_ms()
            await self._administer(space, lambda: self._rows.create(space, durability, audit_reads, now))
        [info] = await self.spaces(space)
        return info

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self._check_usable()
        names = sorted(self._spaces) if name is None else [name]
        infos = [home.info(each) for each in names if (home := self._spaces.get(each)) is not None]
        return [await self._with_volatile(info) if info.durability == "volatile" else info for info in infos]

    async def _with_volatile(self, info: SpaceInfo) -> SpaceInfo:
        held = await self._volatile.spaces(info.name)
        return msgspec.structs.replace(held[0], audit_reads=info.audit_reads) if held else info

    async def drop(self, space: str) -> None:
        home = self._find(space)
        if home is not None and home.id is not None:
            id = home.id
            await self._administer(space, lambda: self._rows.drop(id))

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        home = self._find(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.load(space, entries, revision)
        else:
            now = self._clock.now_ms()
            # No entry may be newer than the head: to who lays the feed over the rows it would have every commit that follows.
            reached = max([revision, *(entry.version for entry in entries)])
            await self._administer(space, lambda: self._rows.load(space, entries, reached, now), REVISION_MAX, entries)

    async def compact(self, space: str, upto: int) -> None:
        home = self._find(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.compact(space, upto)
        elif home is not None and home.id is not None:
            id = home.id
            while await self._administer(space, lambda: self._rows.compact(id, upto), upto):
                pass

    async def _administer(
        self, space: str, work: Callable[[], Any], folded_upto: int = 0, entries: list[Entry] | None = None
    ) -> Any:
        """Change the rows of a space; afterwards it is in memory what it is in the file.

        `folded_upto` is the revision up to which the work needs the feed in the entries, or takes it away.
        """
        folding = self._commits.folding

        def is_behind(home: ResidentSpace) -> bool:
            return home.unfolded.folded is not None and home.unfolded.folded < folded_upto

        def run() -> Any:
            home = self.home_of(space)
            if is_behind(home):
                folding.write_all(home)
            return work()

        def then() -> None:
            home = self.home_of(space)
            self._spaces.pop(space, None)
            home.refresh()
            if home.dropped or is_behind(home):
                folding.forget(home)
            if home.dropped:
                home = self._dropped[space] = ResidentSpace(self._link, space)
                home.refresh()
                self._volatile.forget(space)
            else:
                self._dropped.pop(space, None)
                self._spaces[space] = home
                home.load(entries or ())
                home.note_rows({entry.key: entry for entry in entries or ()})
                if home.durability == "volatile":
                    self._volatile.make(space, "volatile")
            if (entries is not None or home.dropped) and (bells := self._bells.get(space)) is not None:
                bells.ring_all()

        return await self._commits.administer(run, then)

    # --- the store as a whole ---

    async def inspect(self) -> list[Finding]:
        self._check_usable()
        count = sum(len(home.entries) for home in self._spaces.values())
        owner = (
            f"this process ({os.getpid()}) owns the file and has its {count:,} entries in memory; others may read it"
        )
        with translating(self.path):
            findings = await self._loop.run_in_executor(None, sqlite_doctor.examine, self.path)
        return [Finding("ok", "resident", owner), *findings]

    async def backup(self, target: Path) -> None:
        """A consistent copy of the whole file as it is now, while commits go on."""
        self._check_usable()
        await self._loop.run_in_executor(None, copy_file, self.path, target)

    async def close(self) -> None:
        if self._closing is None and not self._closed:
            self._closed = True  # what was accepted is finished; nothing new is
            self._closing = self._loop.create_task(self._close())
        if self._closing is not None:
            await asyncio.shield(self._closing)  # who is cancelled does not leave it half closed

    async def _close(self) -> None:
        await self._commits.close()
        folded = all(home.unfolded.folded is None for home in self._spaces.values())
        self._spaces.clear()
        await self._volatile.close()
        self._wake_all()
        with contextlib.suppress(apsw.Error):  # the disk may have failed
            if self._reader is not None:
                self._reader.close()
        if folded and self.failure is None:
            self._lock.unsign()
        self._lock.release()
        _ENGINES.discard(self)  # a child must not close what has these numbers by then
        self._lock.close()
