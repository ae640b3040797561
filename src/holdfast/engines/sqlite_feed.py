"""The feed of one space in a SQLite file, as `feed.follow` reads it: rows of groups, and the bell that tells of new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engine import ChangeSet
from holdfast.engines.sqlite_file import translating
from holdfast.engines.sqlite_rows import Execute, first_row, head_of, read_feed
from holdfast.errors import Compacted

if TYPE_CHECKING:
    from holdfast.engines.sqlite import SqliteEngine


class SqliteFeed:
    """`Feed` of one space in the file."""

    def __init__(self, engine: SqliteEngine, space: str) -> None:
        self._engine = engine
        self._space = space

    async def bounds(self) -> tuple[int, int]:
        floor, revision, _ = self._position()
        return floor, revision

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        engine = self._engine
        with translating(engine._path), engine._snapshot() as read:
            floor, revision, space = self._position(read)
            if after < floor:
                raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
            return read_feed(read, space, after, limit) if after < revision else []

    async def changed(self, after: int) -> None:
        with self._engine._bell.listening() as rung:  # before looking, so that nothing falls in between
            if self._position()[1] <= after:
                await rung

    def _position(self, within: Execute | None = None) -> tuple[int, int, int]:
        """The space's floor, revision and id; all 0 while there is no such space."""
        engine = self._engine
        engine._check_usable()
        with translating(engine._path):
            read = within or engine._reading()
            row = first_row(read, "SELECT floor, id FROM spaces WHERE name = ?", (self._space,))
            return (0, 0, 0) if row is None else (row[0], head_of(read, row[1])[0], row[1])
