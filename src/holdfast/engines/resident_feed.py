"""The feed of the resident engine: recent commits from memory, older ones from the file, and whom a commit wakes.

`Tail` keeps the newest commits that somebody is about to look at, bounded in bytes, so that whoever watches live never touches
the file. A watcher that is further behind reads the file, up to the revision memory has reached: a commit is in the file a
moment before memory shows it, and nobody may be told of what a read would not show yet.

Who waits is woken when a commit touches its prefix (`bells.py`), and goes on from there, even if what came before is compacted by then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from holdfast.engine import ChangeSet
from holdfast.engines.bells import Listener
from holdfast.engines.sqlite_file import translating
from holdfast.engines.sqlite_rows import first_row, read_feed
from holdfast.engines.stored import Stored
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

    def skip(self, revision: int) -> None:
        """There were commits up to this one, and they are not kept."""
        self.floor = revision

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
            recent.floor = max(recent.floor, recent.commits[count - 1].version)  # what followed may have been skipped
            del recent.commits[:count]


class ResidentFeed:
    """`Feed` of one space for one watcher."""

    def __init__(self, engine: ResidentEngine, space: str, listener: Listener | None = None) -> None:
        self._engine = engine
        self._space = space
        self._listener = listener
        """Of one who watches live. As long as there is one, commits are kept in memory."""
        self._quiet_until = 0
        """Up to this revision nothing has touched the prefixes since this watcher last read."""

    async def bounds(self) -> tuple[int, int]:
        home = self._engine.look_up(self._space)
        first = self._engine.first_revision
        return (first, first) if home is None else (home.floor, home.revision)

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
        if self._listener is not None and (position := await self._listener.wait()) is not None:
            self._quiet_until = position


def _compacted(floor: int, after: int) -> Compacted:
    return Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
