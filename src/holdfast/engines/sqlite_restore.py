"""A backup in the place of a store's file: how it gets there whole, and why no version is given a second time.

The backup is copied beside the store (`copy_backup`) and made ready there: its revisions jump (`advance_all`) beyond all that
may have been given since it was made, and beyond those of the file that it replaces, if that can still be read. Its feed and
its request ids are forgotten, so a cursor from before is Compacted. Spaces that only the replaced file knows are remembered
as if they had been dropped; for those that nobody remembers `first_revision` is where new spaces begin. Then it takes the
store's name in one step, and the replaced file keeps another (`Place.put`): a crash leaves the one or the other.

Nobody else may have the store meanwhile. The file's lock tells of an owner and of a commit under way; leaving WAL mode, which
SQLite grants to the only connection there is, tells of everybody else, and folds the log into the file on the way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Final

import apsw
import msgspec

from holdfast.engine import beyond
from holdfast.engines.private import sync_folder
from holdfast.engines.sqlite_file import FileLock, is_ours, translating
from holdfast.engines.sqlite_rows import Execute, Writer, first_revision, first_row, head_of
from holdfast.errors import Damaged, Error, InvalidInput, NotFound, Unavailable

WAIT_S: Final = 2.0
"""How long to wait for a process that is about to let go of the store."""
RETRY_S: Final = 0.02
PAGES_AT_ONCE: Final = 4_096
"""Pages copied between two calls of `progress`."""


class Reached(msgspec.Struct, frozen=True):
    """How far a file's spaces are, dropped ones included."""

    revisions: dict[str, int] = {}
    first_revision: int = 0
    time: int = 0
    """Of the newest commit."""
    is_empty: bool = True
    """Whether it has no space but those whose names begin with an underscore, which are the store's own."""


def copy_backup(backup: Path, made: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Copy a backup, checked, into a new file that nobody knows yet; gives when the newest commit in it was made.

    `progress` is told how many pages are done, and how many there are.
    """
    if not backup.is_file():
        raise NotFound(f"there is no backup at {backup}")
    with translating(backup), _connected(backup, apsw.SQLITE_OPEN_READONLY) as source:
        if not is_ours(source, backup):
            raise InvalidInput(f"{backup} is an empty file and no backup")
        with _connected(made, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) as target:
            with target.backup("main", source, "main") as copying:
                while not copying.done:
                    copying.step(PAGES_AT_ONCE)
                    if progress is not None:
                        progress(copying.page_count - copying.remaining, copying.page_count)
            [(answer,)] = target.execute("PRAGMA quick_check(1)").fetchall()
            if answer != "ok":
                raise Damaged(f"{backup} is damaged ({answer}); take another backup")
            return reached(target.execute).time


def advance_all(made: Path, others: Reached, age_ms: int) -> None:
    """Let the revisions of all spaces jump, in one transaction; see above. The entries must have been folded.

    `age_ms` is how long ago the backup was made.
    """
    with translating(made), _connected(made) as connection:
        rows = Writer(connection.execute, connection.executemany)
        connection.execute("PRAGMA synchronous = FULL; BEGIN IMMEDIATE")
        mine = reached(connection.execute)
        for name in sorted({*mine.revisions, *others.revisions}):
            goal = beyond(max(mine.revisions.get(name, 0), others.revisions.get(name, 0)), age_ms)
            row = first_row(rows.execute, "SELECT id FROM spaces WHERE name = ?", (name,))
            rows.advance(rows.remember(name, goal) if row is None else row[0], goal)
        first = beyond(max(mine.first_revision, others.first_revision), age_ms)
        rows.execute("INSERT OR REPLACE INTO meta VALUES ('first_revision', ?)", (str(first),))
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = DELETE")  # all of it is in the one file now


def reached(execute: Execute) -> Reached:
    """How far the spaces of a file are. The feed tells, also where the entries are behind it."""
    revisions, newest, is_empty = dict[str, int](), 0, True
    for space, name, dropped in execute("SELECT id, name, dropped FROM spaces").fetchall():
        revisions[name], time, _ = head_of(execute, space)
        newest = max(newest, time)
        is_empty = is_empty and bool(dropped or name.startswith("_"))
    return Reached(revisions, first_revision(execute), newest, is_empty)


class Place:
    """Where a store is, or is to be, with nobody else in it until the `with` block ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._let_go)
        self.replaced: Reached | None = Reached()
        """How far the store that is there is; None when its file cannot be read."""

    def __enter__(self) -> Place:
        with contextlib.ExitStack() as failing:
            failing.push(self)
            self._take()
            if self.path.exists():
                self.replaced = self._look()
            failing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()

    def _let_go(self) -> None:
        if self.path.exists():
            self._lock.close()
        else:
            self._lock.remove()

    def _take(self) -> None:
        """The lock; an owner has it for as long as it lives."""
        left = WAIT_S
        while not self._lock.try_acquire():
            if left <= 0:
                owner = self._lock.owner()
                raise self._in_use("another process" if owner is None else f"process {owner}")
            sleep(RETRY_S)
            left -= RETRY_S
        self._closing.callback(self._lock.release)

    def _look(self) -> Reached | None:
        """How far the store is, and whether anybody has it open; from here on nobody can read it either."""
        try:
            connection = self._closing.enter_context(_connected(self.path))
            connection.set_busy_timeout(round(WAIT_S * 1000))
            if is_ours(connection, self.path):
                connection.execute("PRAGMA journal_mode = DELETE")
                connection.execute("BEGIN EXCLUSIVE")
                return reached(connection.execute)
            return Reached()
        except (apsw.BusyError, apsw.LockedError) as exc:
            raise self._in_use("another program") from exc
        except (apsw.CorruptError, apsw.NotADBError, Damaged):
            return None
        except apsw.Error as exc:
            with translating(self.path):
                raise exc

    def _in_use(self, who: str) -> Error:
        return Unavailable(
            f"{self.path} is in use by {who}; end everything that has it open (a keeper: SIGTERM), then restore. Nothing was changed"
        )

    def put(self, made: Path) -> Path | None:
        """Let a file take the store's name; gives the name that the replaced file has from now on, if there was one."""
        aside = None
        with translating(self.path):
            with made.open("rb") as file:  # before the link: a file with two names is not opened
                os.fsync(file.fileno())
            if self.path.exists():
                made.chmod(self.path.stat().st_mode & 0o777)
                aside = _unused(self.path)
                try:
                    os.link(self.path, aside)
                except OSError:  # a file system without links
                    self.path.rename(aside)
                # Only a file that could not be read still has these; its log must not be taken for the new one's.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.path}-wal", f"{aside}-wal")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.path}-shm")
            made.replace(self.path)
            sync_folder(self.path.parent)
        self._lock.unsign()
        return aside


def _unused(path: Path) -> Path:
    """A name for what is replaced."""
    number, name = 1, path.with_name(f"{path.name}.replaced")
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.replaced-{number}")
    return name


@contextlib.contextmanager
def _connected(path: Path, flags: int = apsw.SQLITE_OPEN_READWRITE) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(path), flags=flags)
    try:
        yield connection
    finally:
        connection.close()
