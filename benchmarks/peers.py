"""The peers: bare SQLite, as fast as a careful loop makes it, with the fsync the library has too.

Same file system, WAL, synchronous=FULL, and the page size and log size of a Holdfast file. Statements are prepared once
(both drivers cache them by text), a single upsert is its own transaction, and every value differs from all before it:
SQLite skips an upsert that changes nothing, fsync included. There is one table, `kv(key, value)`, without a feed, an
audit, request ids or owners.

There are two: on Python's own `sqlite3`, with which such a loop is written and by which the goals of writing are judged, and on apsw, which
the library uses. apsw needs three quarters of the time for a row of many, so beside it the ratios are lower; they are told too.

Before measuring, the write-ahead log is grown to its full size (`grow`), because overwriting a log is cheaper than
appending to one, and the library's log grows faster than a peer's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import apsw

from holdfast.engines.sqlite_file import PAGE_BYTES, WAL_PAGES_MAX

APSW: Final = f"apsw, SQLite {apsw.sqlite_lib_version()}"
STDLIB: Final = f"sqlite3, SQLite {sqlite3.sqlite_version}"

UPSERT: Final = "INSERT INTO kv VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
SELECT: Final = "SELECT value FROM kv WHERE key = ?"


class Bare:
    """A SQLite file with one table, and the statements of the bare loops."""

    def __init__(self, cursor: apsw.Cursor | sqlite3.Cursor, close: Callable[[], None], path: Path) -> None:
        self.execute: Callable[..., Any] = cursor.execute
        self.execute_many: Callable[..., Any] = cursor.executemany
        self.close = close
        self._log = Path(f"{path}-wal")
        self._pragma(f"page_size = {PAGE_BYTES}")
        if self._pragma("journal_mode = WAL") != [("wal",)]:
            raise RuntimeError(f"{path} cannot be put into WAL mode")
        self._pragma(f"wal_autocheckpoint = {WAL_PAGES_MAX}")
        self._pragma("synchronous = FULL")
        if self._pragma("synchronous") != [(2,)] or self._pragma("page_size") != [(PAGE_BYTES,)]:
            raise RuntimeError(f"{path} is not set up as the peer must be")
        self.execute("CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")

    def upsert(self, key: str, value: bytes) -> None:
        """One row, one transaction, one fsync."""
        self.execute(UPSERT, (key, value))

    def upsert_many(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """These rows in one transaction with one fsync."""
        self.execute("BEGIN IMMEDIATE")
        self.execute_many(UPSERT, rows)
        self.execute("COMMIT")

    def select(self, key: str) -> bytes:
        """One value by primary key."""
        rows = self.execute(SELECT, (key,)).fetchall()
        return rows[0][0]  # type: ignore[no-any-return]

    def grow(self, row: Callable[[], tuple[str, bytes]]) -> None:
        """Write, without fsync, until the log has its full size."""
        self._pragma("synchronous = OFF")
        while self._log.stat().st_size < WAL_PAGES_MAX * PAGE_BYTES:
            self.upsert(*row())
        self._pragma("synchronous = FULL")

    def _pragma(self, text: str) -> list[Any]:
        # Read to the end: a statement that still has rows to give is not finished, and what follows it would not run.
        return list(self.execute(f"PRAGMA {text}").fetchall())


def with_apsw(path: Path) -> Bare:
    """The peer on the SQLite the library uses."""
    connection = apsw.Connection(str(path))
    return Bare(connection.cursor(), connection.close, path)


def with_stdlib(path: Path) -> Bare:
    """The peer on Python's own SQLite."""
    connection = sqlite3.connect(path, isolation_level=None)
    return Bare(connection.cursor(), connection.close, path)
