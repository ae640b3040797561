"""The feed of one space in a SQLite file, as `feed.follow` and its tail read it: rows of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engine import ChangeSet
from holdfast.engines.sqlite_file import translating
from holdfast.engines.sqlite_rows import Execute, first_revision, first_row, head_of, read_feed
from holdfast.errors import Compacted

if TYPE_CHECKING:
    from holdfast.engines.sqlite import SqliteEngine


class SqliteFeed:
    """The feed of one space, as the file has it."""

    def __init__(self, engine: SqliteEngine, space: str) -> None:
        self._engine = engine
        self._space = space
        self._id: int | None = None
        """Never changes, not when the space is dropped and made anew either."""

    async def bounds(self) -> tuple[int, int]:
        engine = self._engine
        engine._check_usable()
        with translating(engine._path):
            read = engine._reading()
            if (space := self._found(read)) is None:
                first = first_revision(read)
                return first, first
            (floor,) = first_row(read, "SELECT floor FROM spaces WHERE id = ?", (space,))
            return floor, head_of(read, space)[0]

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        engine = self._engine
        engine._check_usable()
        with translating(engine._path):
            read = engine._reading()
            if (space := self._found(read)) is None:
                return []
            # No snapshot: what is compacted between the two raises the floor, and the floor is looked at last.
            commits = read_feed(read, space, after, limit)
            (floor,) = first_row(read, "SELECT floor FROM spaces WHERE id = ?", (space,))
        if after < floor:
            raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
        return commits

    def _found(self, read: Execute) -> int | None:
        if self._id is None:
            row = first_row(read, "SELECT id FROM spaces WHERE name = ?", (self._space,))
            self._id = None if row is None else row[0]
        return self._id
