"""The SQLite engine: strictly consistent spaces in one file, shared by any number of processes without a server.

A commit. `commit()` queues its batch; the loop's next step takes everything queued as one group: take the file's lock,
BEGIN IMMEDIATE, evaluate the batches on an overlay (`evaluation.Group`), write the post-images once, COMMIT with an
fsync, reply. A small group runs inline on the event loop, because handing it to a thread costs more than the write; a
large one, or one that must wait for another process's turn, runs in a thread, and takes whatever has been queued by the
time its turn comes. A writer that was alone the last time commits at once, without the queue. Replies, refusals
included, leave only after the COMMIT: what they show is durable.

Request ids are not looked up first: they are inserted, and only if that collides is the group rolled back and evaluated
again with look-ups. A collision is a retry, and retries are rare. Ids the library made for one attempt (`fresh`) are in
the feed only, and searched there should somebody repeat them.

Reads run inline too, on the connection that writes, whose cache is warm, or on another while the thread has that one.
Both show a commit only after its fsync, so a read is as durable as the space asks. Durability `async` commits without the fsync: it survives a crash of the process, not of the
machine. Volatile spaces are known to the file by name, and live in this process's memory.

Failure. A full disk rolls back: StorageFull, nothing changed. An I/O error in COMMIT leaves the outcome open, because
the frames may survive a crash: OutcomeUnknown, and this engine refuses further writes until it is opened again, when
SQLite decides. An I/O error anywhere else rolls back. When the file was removed, renamed or replaced, which is looked for
before each group, no write is taken any more either, and nothing changed (`sqlite_place.py`). The file's side of all this is in `sqlite_file.py`.

Beside a resident engine that owns the file this one can read and watch; see `sqlite_folds.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeVar

import apsw
import msgspec

from holdfast.checking import check_batch, check_durability, check_keys, check_scan
from holdfast.clock import Clock, SystemClock
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Finding, Page, Receipt, SpaceInfo
from holdfast.engines.evaluation import Group
from holdfast.engines.feed import follow
from holdfast.engines.feed_tail import Following, Tails
from holdfast.engines.grouping import Turns, Waiting, answer
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.private import real_path
from holdfast.engines.sqlite_backup import copy_file
from holdfast.engines.sqlite_duties import Duties
from holdfast.engines.sqlite_feed import SqliteFeed
from holdfast.engines.sqlite_file import (
    Bell,
    FileLock,
    ForeignFile,
    boot_id,
    connect,
    in_doubt,
    prepare,
    translate,
    translating,
)
from holdfast.engines.sqlite_folds import fetch_over, fold_all, fold_left, select_over
from holdfast.engines.sqlite_place import gone
from holdfast.engines.sqlite_rows import (
    AT_ONCE_MAX,
    GET,
    Execute,
    SpaceState,
    Writer,
    describe,
    fetch,
    first_row,
    head_of,
)
from holdfast.engines.stored import Stored
from holdfast.errors import OutcomeUnknown, Unavailable

LOCK_WAIT_S: Final = 30
"""How long to wait for another process to finish its commit."""
INLINE_BYTES_MAX: Final = 512 * 1024
"""A group with more bytes than this is written in a thread."""

T = TypeVar("T")
_UNCLEAR: Final = (None,)
_SPACE, _BATCH = attrgetter("space"), attrgetter("batch")

_Done = tuple[SpaceState, Group, list[str]]
"""What a group did to a space, and the keys that `Writer.group` gave."""


class _Moved(Exception):
    """The space was dropped and made anew, with another durability, since this process looked."""


class _Home(msgspec.Struct):
    """What this process remembers of a space."""

    id: int
    durability: Durability
    created_at: int
    seen: int
    """`data_version` when it was looked up."""


_ENGINES: Final[weakref.WeakSet[SqliteEngine]] = weakref.WeakSet()


def _disown() -> None:
    """In a child after a fork: SQLite's connections and locks belong to the parent."""
    for engine in _ENGINES:
        engine._failed = "this store was opened before a fork; open it again in the child process"
        engine._homes.clear()


os.register_at_fork(after_in_child=_disown)


class SqliteEngine:
    """Spaces in a SQLite file. Use `await SqliteEngine.open(path)`; it belongs to the event loop that opened it."""

    @classmethod
    async def open(cls, path: str | Path, *, clock: Clock | None = None) -> SqliteEngine:
        """Open the store, creating the file if there is none."""
        path = real_path(path)
        lock = FileLock(path)
        try:
            await asyncio.to_thread(prepare, path, lock, boot_id())
            with translating(path):
                await asyncio.to_thread(fold_left, path, lock)
            return cls(path, lock, clock or SystemClock())
        except ForeignFile:
            lock.remove()
            raise
        except BaseException:
            lock.close()
            raise

    def __init__(self, path: Path, lock: FileLock, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        with translating(path):
            self._writer = connect(path)
            self._reader = connect(path)
        self._gone = gone(self._writer, path)
        self._write: Execute = self._writer.cursor().execute
        self._rows = Writer(self._write, self._writer.cursor().executemany)
        self._read_beside: Execute = self._reader.cursor().execute
        self._synchronous = "sync"
        self._states: dict[str, SpaceState] = {}
        self._data_version = -1
        self._homes: dict[str, _Home] = {}
        # Volatile versions must not repeat after a restart: they start at the clock's microseconds.
        self._volatile = MemoryEngine(clock=clock, first_revision=clock.now_ms() * 1000)
        self._turns = Turns("holdfast-sqlite", self._commit_next, self._commit_at_once)
        self._duties = Duties(self._turns.queue)
        self._giving_up: asyncio.TimerHandle | None = None
        self._failed: str | None = None
        self._closed = False
        self._bell = Bell(path, lambda: int(self._reader.pragma("data_version")), self._look)
        self._tails = Tails(lambda space: SqliteFeed(self, space))
        self._made: list[tuple[str, int, list[Stored]]] = []
        """What was committed and watchers are not told of yet: in which space, after which revision."""
        self._is_news = False
        """Whether others have committed, and watchers are not told of it yet."""
        _ENGINES.add(self)

    # --- commits ---

    async def commit(self, space: str, batch: Batch) -> Receipt:
        size = check_batch(batch)
        home = self._homes.get(space)
        if home is None or home.durability == "volatile":
            home = self._home(space)
            if home is not None and home.durability == "volatile":
                return await self._volatile.commit(space, batch)
        item = Waiting(space, "sync" if home is None else home.durability, batch, size)
        try:
            if not self._turns.enter(item):
                await item
            outcome = item.outcome
            return outcome if type(outcome) is Receipt else item.told()
        except _Moved:
            self._homes.pop(space, None)
            return await self.commit(space, batch)

    def _commit_at_once(self, item: Waiting) -> bool:
        """For a writer that was alone the last time too."""
        if item.size > INLINE_BYTES_MAX or not self._lock.try_acquire():
            return False
        self._commit_and_release([item])
        if self._made or self._is_news:
            self._tell()
        return True

    def _commit_next(self) -> None:
        """Commit what is queued: inline if it is our turn and it is small, otherwise in the thread; so is what is administered."""
        queue = self._turns.queue
        if not queue and not self._duties:
            return
        have_lock = self._lock.try_acquire()
        if have_lock and queue.bytes <= INLINE_BYTES_MAX and not self._duties.are_next:
            self._duties.was_last = False
            if self._duties:
                self._turns.ask()
            self._answer(self._commit_and_release(queue.take_group()))
        elif have_lock:
            self._turns.start_thread(self._commit_in_thread)
        elif (owner := self._lock.owner()) is not None:
            self._refuse_all(f"process {owner} has {self._path} for itself; connect to it. Nothing was changed")
        else:
            self._giving_up = self._loop.call_later(LOCK_WAIT_S, self._give_up)
            self._turns.start_thread(self._wait_and_commit).add_done_callback(self._give_up_no_more)

    def _wait_and_commit(self) -> None:
        self._lock.acquire()
        self._commit_in_thread()

    def _commit_in_thread(self) -> None:
        self._duties.was_last = self._duties.are_next
        if self._duties.was_last and self._duties.do_next(self._do_and_release, self._tails.look_all):
            return
        done = self._commit_and_release(self._turns.queue.take_group())
        self._loop.call_soon_threadsafe(self._answer, done)

    def _do_and_release(self, work: Callable[[], T]) -> T:
        try:
            self._states.clear()
            return self._transaction(work)
        finally:
            self._lock.release()

    def _give_up(self) -> None:
        """Whoever waits is told; and whoever comes later and waits in vain, after as long again."""
        self._giving_up = self._loop.call_later(LOCK_WAIT_S, self._give_up)
        self._refuse_all(
            f"another process has held the lock of {self._path} for {LOCK_WAIT_S} s, as if it had been stopped; "
            "nothing was changed"
        )

    def _give_up_no_more(self, _: object) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _refuse_all(self, reason: str) -> None:
        self._duties.refuse_all(reason)
        self._turns.queue.refuse_all(reason)

    def _commit_and_release(self, items: list[Waiting]) -> list[Waiting]:
        """With the lock held: commit a group and release the lock. Outcomes are in the items."""
        try:
            if items:
                self._commit_group(items)
        except BaseException as exc:  # whoever waits must hear of it
            for item in items:
                item.outcome = exc
        finally:
            self._lock.release()
        return items

    def _commit_group(self, items: list[Waiting]) -> None:
        by_space: dict[str, list[Waiting]] = {items[0].space: items}
        if len(items) > 1 and len(set(map(_SPACE, items))) > 1:
            by_space = {}
            for item in items:
                by_space.setdefault(item.space, []).append(item)
        try:
            try:
                done = self._transaction(lambda: self._evaluate(by_space, known_new=True), items[0].durability)
            except apsw.ConstraintError:  # a request id is not new
                done = self._transaction(lambda: self._evaluate(by_space, known_new=False), items[0].durability)
            for state, group, noted in done:
                if self._tails:
                    self._made.append((state.name, state.revision, group.commits))
                if state.keep(group, noted):
                    self._states[state.name] = state
                else:
                    self._states.pop(state.name, None)
        except OutcomeUnknown as doubt:
            for item in items:
                if isinstance(item.outcome, Receipt):
                    item.outcome = OutcomeUnknown(str(doubt), request_id=item.batch.request_id)
                else:  # it was refused, on the strength of what may not have happened
                    item.outcome = Unavailable(f"the disk that holds {self._path} failed; nothing was changed")

    def _transaction(self, work: Callable[[], T], durability: str = "sync") -> T:
        """With the lock held: run the work, and commit if it wrote anything. A failure leaves nothing behind, or is in doubt."""
        if self._closed or self._failed is not None:
            self._check_usable()
        if (reason := self._gone()) is not None:
            self._failed = reason
            self._check_usable()
        try:
            if durability != self._synchronous:
                self._write(f"PRAGMA synchronous = {'FULL' if durability == 'sync' else 'NORMAL'}")
                self._synchronous = durability
            self._write("BEGIN IMMEDIATE")
            before = self._writer.total_changes()
            inherited = self._lock.is_signed
            try:
                if inherited:  # its owner is gone
                    fold_all(self._rows)
                answer = work()
            except BaseException:
                self._states.clear()
                self._rollback()
                raise
            if self._writer.total_changes() == before:
                self._rollback()
                if inherited:
                    self._lock.unsign()
                return answer
            try:
                self._write("COMMIT")
            except apsw.FullError:
                self._states.clear()
                self._rollback()
                raise
            except apsw.Error as exc:
                self._states.clear()
                self._failed = f"an earlier commit to {self._path} failed on the disk ({exc}); open the store again"
                with contextlib.suppress(apsw.Error):
                    self._rollback()
                raise in_doubt(self._path, exc) from exc
        except apsw.ConstraintError:
            raise
        except apsw.Error as exc:
            raise translate(self._path, exc) from exc
        if inherited:
            self._lock.unsign()
        self._data_version = self._writer.data_version()  # our own commit counts too; others' show when we look again
        self._lock.ring()
        self._bell.drain()  # we have the lock: what others committed came before, and `_evaluate` has seen it
        return answer

    def _rollback(self) -> None:
        if self._writer.in_transaction:
            self._write("ROLLBACK")

    def _evaluate(self, by_space: dict[str, list[Waiting]], *, known_new: bool) -> list[_Done]:
        """Evaluate and write the batches of each space."""
        if self._is_outdated():
            self._states.clear()
            self._is_news = True
        now = self._clock.now_ms()
        done: list[_Done] = []
        for name, items in by_space.items():
            state = self._states.get(name) or SpaceState(self._write, name)
            lives = state.id is not None and not state.dropped
            if items[0].durability != (state.durability if lives else "sync"):  # one that is made here is sync
                for item in items:
                    item.outcome = _Moved()
                continue
            batches = list(map(_BATCH, items))
            if len(batches) > 1 or len(batches[0].operations) > 1:
                state.prepare(batches)
                state.expect(batches)
            group = Group(state, now)
            outcomes = group.evaluate_all(batches, known_new=known_new)
            for item, outcome in zip(items, outcomes, strict=True):
                item.outcome = outcome
            noted = [] if group.empty else self._rows.group(state, group, requests_are_new=known_new)
            done.append((state, group, noted))
        return done

    def _answer(self, items: list[Waiting]) -> None:
        try:
            self._tell()
        finally:
            answer(items)

    def _tell(self) -> None:
        """Hand what was committed to those who watch."""
        while self._made:
            self._tails.made(*self._made.pop(0))
        if self._is_news:
            self._is_news = False
            self._look()

    # --- reads ---

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        home = self._homes.get(space)
        if home is not None and len(keys) == 1 and home.durability != "volatile":
            # The usual read: one small entry that does not expire. A key that is found is a valid one.
            execute = self._write if self._turns.in_thread is None else self._read_beside
            try:
                row = execute(GET, (home.id, keys[0])).get
            except (apsw.Error, TypeError, UnicodeError):
                row = _UNCLEAR  # what is wrong gets its name below
            if self._lock.is_signed:
                row = _UNCLEAR  # the row may be behind the feed
            if row is None:
                check_keys(keys)
                return [None]
            if row[0] is not None and row[5] is None:
                return [Entry(keys[0], *row)]
        check_keys(keys)
        home = self._home(space)
        if home is None:
            return [None] * len(keys)
        if len(keys) <= AT_ONCE_MAX and home.durability != "volatile":
            # One statement is a snapshot by itself; what time it is matters only if something expires.
            with translating(self._path):
                rows = {entry.key: entry for entry in fetch(self._reading(), home.id, keys)}
            if not self._lock.is_signed and all(entry.expires_at is None for entry in rows.values()):
                return [rows.get(key) for key in keys]
        if home.durability == "volatile":
            return await self._volatile.get(space, keys)
        with translating(self._path), self._snapshot() as read:
            now = max(self._clock.now_ms(), head_of(read, home.id)[1])
            entries = fetch_over(read, home.id, keys)
        found = {entry.key: entry for entry in entries if entry.expires_at is None or entry.expires_at > now}
        return [found.get(key) for key in keys]

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        check_scan(prefix, after, limit)
        home = self._home(space)
        if home is None:
            return Page([], False, 0)
        if home.durability == "volatile":
            return await self._volatile.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        with translating(self._path), self._snapshot() as read:
            revision, time, _ = head_of(read, home.id)
            now = max(self._clock.now_ms(), time)
            found = select_over(read, home.id, prefix, after, limit + 1, reverse=reverse, now=now)
        return Page(found[:limit], len(found) > limit, revision)

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        home = self._home(space)
        if home is not None and home.durability == "volatile":
            return self._volatile.watch(space, *prefixes, cursor=cursor, live=live)
        if not live:  # it waits for nothing, so nobody has to tell it of what comes
            return follow(SqliteFeed(self, space), prefixes, cursor, live=False)
        return follow(self._watching(space, prefixes), prefixes, cursor)

    @contextlib.contextmanager
    def _watching(self, space: str, prefixes: tuple[str, ...]) -> Iterator[Following]:
        self._bell.listen()
        with self._tails.watching(space, prefixes) as feed:
            yield feed

    def _look(self) -> None:
        """Somebody may have committed: whoever watches a space that has moved is to look."""
        for space in self._tails:
            home, revision = self._homes.get(space), None
            if home is not None:
                with contextlib.suppress(apsw.Error):  # whoever looks is told what is wrong
                    revision = head_of(self._reading(), home.id)[0]
            self._tails.look(space, revision)

    def _reading(self) -> Execute:
        """How to read now. The connection that writes has what it wrote in its cache, so it reads too, unless the thread has it."""
        return self._write if self._turns.in_thread is None else self._read_beside

    def _is_outdated(self) -> bool:
        """Whether another connection has committed since the last time this was asked. In a transaction only."""
        version = self._writer.data_version()
        if version == self._data_version:
            return False
        self._data_version = version
        return True

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Execute]:
        """Several reads of one moment. Never held across an await."""
        read = self._reading()
        read("BEGIN")
        try:
            yield read
        finally:
            read("COMMIT")

    def _home(self, space: str) -> _Home | None:
        """The space, if it exists.

        Ids never change, so they are looked up once. That a durable space was dropped and made anew shows at its next
        commit. Only a volatile one, which is not in the file, must be asked about whenever the file has changed.
        """
        home = self._homes.get(space)
        if home is None or (home.durability == "volatile" and home.seen != self._reader.pragma("data_version")):
            return self._look_up(space, home)
        return home

    def _look_up(self, space: str, known: _Home | None) -> _Home | None:
        self._check_usable()
        with translating(self._path), self._snapshot() as read:
            seen = self._reader.pragma("data_version")
            sql = "SELECT id, durability, created_at FROM spaces WHERE name = ? AND NOT dropped"
            row = first_row(read, sql, (space,))
        if (
            known is not None
            and known.durability == "volatile"
            and (row is None or row[1:] != (known.durability, known.created_at))
        ):
            self._volatile.forget(space)
        if row is None:
            self._homes.pop(space, None)
            return None
        id, durability, created_at = row
        home = self._homes[space] = _Home(id, durability, created_at, seen)
        return home

    def _check_usable(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")
        if self._failed is not None:
            raise Unavailable(self._failed)

    # --- the life of spaces ---

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        check_durability(durability)
        self._home(space)  # one that another dropped is forgotten, before it is made anew
        known = await self.spaces(space)
        if not known or known[0].durability != durability or audit_reads > known[0].audit_reads:
            await self._administer(lambda: self._rows.create(space, durability, audit_reads, self._clock.now_ms()))
            self._homes.pop(space, None)
            if durability == "volatile":
                await self._volatile.create(space, durability)
            known = await self.spaces(space)
        return known[0]

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self._check_usable()
        with translating(self._path), self._snapshot() as read:
            infos = describe(read, name)
        return [await self._with_volatile(info) if info.durability == "volatile" else info for info in infos]

    async def _with_volatile(self, info: SpaceInfo) -> SpaceInfo:
        held = await self._volatile.spaces(info.name)
        if not held:
            return info
        return msgspec.structs.replace(held[0], durability="volatile", audit_reads=info.audit_reads)

    async def drop(self, space: str) -> None:
        home = self._home(space)
        if home is not None:
            await self._administer(lambda: self._rows.drop(home.id))
            await self._volatile.drop(space)
            self._homes.pop(space, None)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        home = self._home(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.load(space, entries, revision)
        else:
            await self._administer(lambda: self._rows.load(space, entries, revision, self._clock.now_ms()))

    async def compact(self, space: str, upto: int) -> None:
        home = self._home(space)
        if home is not None and home.durability == "volatile":
            await self._volatile.compact(space, upto)
        elif home is not None:
            while await self._administer(lambda: self._rows.compact(home.id, upto)):
                pass

    async def _administer(self, work: Callable[[], T]) -> T:
        """A transaction of our own, in the thread, when our turn has come."""
        self._check_usable()
        reply = self._duties.add(work)
        self._turns.ask()
        return await reply

    # --- the store as a whole ---

    async def inspect(self) -> list[Finding]:
        self._check_usable()
        with translating(self._path):
            from holdfast.engines import sqlite_doctor

            return await self._loop.run_in_executor(None, sqlite_doctor.examine, self._path)

    async def backup(self, target: Path) -> None:
        """A consistent copy of the whole file as it is now, while others go on writing."""
        await self._loop.run_in_executor(None, copy_file, self._path, target)

    async def close(self) -> None:
        while self._duties and not self._closed:
            self._turns.ask()
            await (asyncio.sleep(0) if (running := self._turns.in_thread) is None else asyncio.wait([running]))
        if not self._closed:
            await self._turns.close()
        if self._closed:  # perhaps meanwhile
            return
        self._closed = True
        self._homes.clear()
        await self._volatile.close()
        self._bell.close()
        self._tails.begin_anew()  # who watches is told
        self._reader.close()
        self._writer.close()
        self._lock.close()
