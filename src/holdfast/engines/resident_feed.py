"""The feed of the resident engine: recent commits from memory, older ones from the file, and whom a commit wakes.

`Tail` keeps the newest commits of all spaces together, bounded in bytes, so that whoever watches live never touches the
file. A watcher that is further behind reads the file, up to the revision memory has reached: a commit is in the file a
moment before memory shows it, and nobody may be told of what a read would not show yet.

`Bells` wake only those whose prefix a commit touches, whatever the number of others: for every length of a prefix that
somebody waits with, the key's beginning of that length is looked up. Who was not woken meanwhile has missed nothing, so
its feed goes on from the commit that woke it, even if what came before is compacted by then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from holdfast.engine import ChangeSet
from holdfast.engines.evaluation import Stored
from holdfast.engines.sqlite_file import translating
from holdfast.engines.sqlite_rows import first_row, read_feed
from holdfast.errors import Compacted

if TYPE_CHECKING:
    from holdfast.engines.resident import ResidentEngine

TAIL_BYTES_MAX: Final = 2 * 1024 * 1024
"""Small, because Python's garbage collector looks at every commit that is kept: with 16 MiB the slowest commits took twice as long."""
COMMIT_BYTES: Final = 400
"""What a commit takes in memory, about, besides what it takes in the file."""


class Recent:
    """The newest commits of one space: all of those after `floor`."""

    __slots__ = ("commits", "floor")

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.commits: list[Stored] = []

    def after(self, revision: int, limit: int) -> list[ChangeSet]:
        start = bisect_right(self.commits, revision, key=lambda commit: commit.version)
        return list(self.commits[start : start + limit])


class Tail:
    """The newest commits of all spaces; the oldest leave first, whichever space they belong to."""

    def __init__(self) -> None:
        self._groups: deque[tuple[Recent, int, int]] = deque()
        """Whose, how many commits, how many bytes."""
        self.bytes = 0

    def add(self, recent: Recent, commits: list[Stored], size: int) -> None:
        """`size` is how many bytes they have as a row."""
        size += COMMIT_BYTES * len(commits)
        recent.commits += commits
        self._groups.append((recent, len(commits), size))
        self.bytes += size
        if self.bytes > TAIL_BYTES_MAX:
            self._trim(TAIL_BYTES_MAX * 9 // 10)  # more at once, because the front of a list is dear to remove

    def _trim(self, size: int) -> None:
        gone: Counter[Recent] = Counter()
        while self.bytes > size:
            recent, count, each = self._groups.popleft()
            gone[recent] += count
            self.bytes -= each
        for recent, count in gone.items():
            recent.floor = recent.commits[count - 1].version
            del recent.commits[:count]


class Bells:
    """Who waits for changes of one space, by the beginning of the keys they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[int | None]]] = {}
        self._lengths: Counter[int] = Counter()

    async def wait(self, prefixes: tuple[str, ...]) -> int | None:
        """The version of the next commit that touches a prefix; None when there is another reason to look."""
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        for prefix in prefixes:
            self._waiting.setdefault(prefix, set()).add(waiter)
            self._lengths[len(prefix)] += 1
        try:
            return await waiter
        finally:
            for prefix in prefixes:
                self._leave(prefix, waiter)

    def _leave(self, prefix: str, waiter: asyncio.Future[int | None]) -> None:
        waiting = self._waiting[prefix]
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[prefix]
        self._lengths[len(prefix)] -= 1
        if not self._lengths[len(prefix)]:
            del self._lengths[len(prefix)]

    def ring(self, commits: Iterable[Stored]) -> None:
        for commit in commits:
            for change in commit.changes:
                for length in self._lengths:
                    for waiter in self._waiting.get(change.key[:length], ()):
                        if not waiter.done():
                            waiter.set_result(commit.version)

    def ring_all(self) -> None:
        for waiting in self._waiting.values():
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)


class ResidentFeed:
    """`Feed` of one space for one watcher."""

    def __init__(self, engine: ResidentEngine, space: str, prefixes: tuple[str, ...]) -> None:
        self._engine = engine
        self._space = space
        self._prefixes = tuple(dict.fromkeys(prefixes)) or ("",)
        self._quiet_until = 0
        """Up to this revision nothing has touched the prefixes since this watcher last read."""

    async def bounds(self) -> tuple[int, int]:
        home = self._engine.look_up(self._space)
        return (0, 0) if home is None else (home.floor, home.revision)

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        home = self._engine.look_up(self._space)
        if home is None:
            return []
        after = max(after, self._quiet_until)
        if after < home.floor:
            raise _compacted(home.floor, after)
        if after >= home.revision:
            return []
        if after >= home.recent.floor:
            return home.recent.after(after, limit)
        return self._read_file(home.id or 0, after, home.revision, limit)

    def _read_file(self, space: int, after: int, upto: int, limit: int) -> list[ChangeSet]:
        engine = self._engine
        with translating(engine.path), engine.snapshot() as read:
            (floor,) = first_row(read, "SELECT floor FROM spaces WHERE id = ?", (space,))
            if after < floor:  # it is being compacted
                raise _compacted(floor, after)
            return [commit for commit in read_feed(read, space, after, limit) if commit.version <= upto]

    async def changed(self, after: int) -> None:
        home = self._engine.look_up(self._space)
        if home is not None and home.revision > max(after, self._quiet_until):
            await asyncio.sleep(0)
            return
        version = await self._engine.bells(self._space).wait(self._prefixes)
        if version is not None:
            self._quiet_until = version - 1


def _compacted(floor: int, after: int) -> Compacted:
    return Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
