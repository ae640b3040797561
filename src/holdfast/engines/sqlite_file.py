"""The SQLite file: its schema, how it is opened safely, how processes take turns and wake each other.

Opening. The first process converts the file to WAL and writes the schema under the file lock, so two first openers never
race. `application_id` tells a Holdfast store from any other SQLite file, `user_version` is the schema's version; a
foreign or newer file is refused before anything is written. SQLite before 3.51.3 is refused: it could corrupt a WAL that
several connections share.

Taking turns. SQLite's own busy handler polls and starves; processes take an exclusive flock on `<file>-lock` around each
write transaction instead. Whoever has to wait first takes `<file>-turn` and keeps it while waiting, so the process that
just committed cannot take the lock again before the one that waits: no process is starved. A byte of that file, which all
map into memory, says whether somebody waits, or died waiting; where it is 0 the turn is not asked for. The kernel frees the
locks of a process that dies.

Waking. After a commit the writer reads one byte of the lock file. Watchers in other processes have an inotify watch on that
file, which tells of reads too, so a commit costs one small system call however many watch, and nothing on the disk. Where there is no inotify they compare SQLite's
`data_version` every POLL_S seconds, which also covers a lost event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar

import apsw

from holdfast.engines.private import make_file, open_beside, sync_folder
from holdfast.engines.sqlite_place import check_place
from holdfast.errors import Damaged, Error, IncompatibleStore, InvalidInput, OutcomeUnknown, StorageFull, Unavailable

T = TypeVar("T")

APPLICATION_ID: Final = 0x486F6C64  # "Hold"
SCHEMA_VERSION: Final = 3
SQLITE_VERSION_MIN: Final = 3_051_003
PAGE_BYTES: Final = 2048
"""Small pages: a commit writes every page it touches to the log, whole."""
BUSY_MS: Final = 10_000
"""How long to wait for another program that has locked the file, such as the sqlite3 shell."""
WAL_PAGES_MAX: Final = 1_000
"""The write-ahead log is folded into the file when it has this many pages."""
WAL_BYTES_KEPT: Final = 64 * 1024 * 1024
"""A write-ahead log that grew larger is truncated to this size."""
POLL_S: Final = 0.25
EVENTS_BYTES: Final = 1024
"""Events of inotify read at once, of 16 bytes each; the kernel makes one of those that follow each other and are alike."""
MMAP_BYTES: Final = 1024 * 1024 * 1024
"""How much of the file is read through a memory map, shared by all processes: it keeps reads cheap in a large store."""
CACHE_KIB: Final = 4 * 1024
"""Pages a connection may keep in memory: twice as many as the log has. All others are read through the map. Not more, because SQLite walks
through all it keeps at the end of each commit that has put pages of a tree in order, which most do."""
REVISION_BITS: Final = 43
REVISION_MAX: Final = 2**REVISION_BITS - 1
"""The last revision a space can reach: a hundred thousand commits a second for two years and nine months, without a pause."""
VALUE_INLINE_MAX: Final = 320
"""Longer values are kept in a table of their own: a row and its key then fit into a quarter of a page."""
VALUE: Final = "ifnull(value, (SELECT value FROM large WHERE (space, key) = (entries.space, entries.key)))"
"""The value of a row of `entries`."""
_SIGNATURE_BYTES: Final = 32
"""The lock file begins with a byte that `ring` reads and the number of the process that owns the store, if one does."""
ASYNC_JUMP: Final = 2**20
"""By how much the revision of an async space jumps when the machine was restarted."""

ENTRIES: Final = f"""CREATE TABLE entries (
    space INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB,
    version INTEGER NOT NULL,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    expires_at INTEGER,
    tag TEXT NOT NULL,
    PRIMARY KEY (space, key)
) STRICT, WITHOUT ROWID;
-- Values of over {VALUE_INLINE_MAX} bytes; `entries.value` is NULL then. Small rows keep every look-up in `entries` short.
CREATE TABLE large (
    space INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    UNIQUE (space, key)
) STRICT;
CREATE INDEX expiries ON entries (space, expires_at, key) WHERE expires_at IS NOT NULL;
"""
FOLDS: Final = """-- Spaces whose entries are behind their feed, and from which revision on (`sqlite_folds.py`).
CREATE TABLE folds (space INTEGER PRIMARY KEY, revision INTEGER NOT NULL) STRICT;
"""
READABLE: Final = f"""-- For people with a SQLite shell.
CREATE VIEW readable AS
    SELECT spaces.name AS space, key, CAST({VALUE} AS TEXT) AS value, version, owner, tag,
           datetime(entries.created_at / 1000, 'unixepoch') AS created_at,
           datetime(updated_at / 1000, 'unixepoch') AS updated_at,
           datetime(expires_at / 1000, 'unixepoch') AS expires_at
    FROM entries JOIN spaces ON spaces.id = entries.space;
"""  # noqa: S608 - a constant of our own
SCHEMA: Final = f"""
CREATE TABLE spaces (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    durability TEXT NOT NULL,
    audit_reads INTEGER NOT NULL,
    floor INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    dropped INTEGER NOT NULL
) STRICT;
-- `boot` is the machine's boot id when the file was last opened for the first time since; `first_revision`, where new
-- spaces begin.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
{ENTRIES}-- One row per group of commits that became durable together; `commits` is a msgpack list. The newest row of a
-- space is its head: revision, time and last assigned id. It is never removed, so no other row is written per commit.
-- `id` is space * 2^{REVISION_BITS} + the group's last revision.
CREATE TABLE feed (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    last_id INTEGER NOT NULL,
    commits BLOB NOT NULL
) STRICT;
-- Which commit answered a request; its receipt is in the feed.
CREATE TABLE requests (
    space INTEGER NOT NULL,
    actor TEXT NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (space, actor, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
    space INTEGER NOT NULL,
    owner TEXT NOT NULL,
    subspace TEXT NOT NULL,
    keys INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (space, owner, subspace)
) STRICT, WITHOUT ROWID;
{FOLDS}{READABLE}PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


class ForeignFile(IncompatibleStore):
    """The file is no Holdfast store of any version, so nobody uses the lock files beside it."""


def connect(path: Path) -> apsw.Connection:
    """A connection to an existing store, set up as every one must be."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(BUSY_MS)
    connection.execute(f"PRAGMA synchronous = FULL; PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    connection.wal_autocheckpoint(WAL_PAGES_MAX)
    connection.pragma("cache_size", -CACHE_KIB)
    connection.pragma("mmap_size", MMAP_BYTES)
    # Plans must not depend on bound values: otherwise a range on an indexed column is planned anew at each execution.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


def prepare(path: Path, lock: AbstractContextManager[object], boot: str) -> None:
    """Create the file, or make sure that it is one of ours and ready; raise a helpful error otherwise.

    A store that is in use already is recognised without taking the lock, so opening it waits for nobody. Who has the lock
    already gives a context that does nothing.
    """
    if apsw.SQLITE_VERSION_NUMBER < SQLITE_VERSION_MIN:
        version = apsw.sqlite_lib_version()
        raise IncompatibleStore(
            f"SQLite {version} can corrupt a shared file; holdfast needs 3.51.3 or newer (upgrade apsw)"
        )
    with translating(path):
        if path.exists() and _with_connection(path, lambda connection: _is_ready(connection, path, boot)):
            return
        with lock:
            make_file(path)
            _with_connection(path, lambda connection: _make_ready(connection, path, boot))


def _with_connection(path: Path, work: Callable[[apsw.Connection], T]) -> T:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    try:
        connection.set_busy_timeout(BUSY_MS)
        return work(connection)
    finally:
        connection.close()


def _is_ready(connection: apsw.Connection, path: Path, boot: str) -> bool:
    """Whether nothing needs to be written before the store is used.

    Looked at in one snapshot: another process may be creating the store right now, and half of what it writes looks like
    a file of another program.
    """
    connection.execute("BEGIN")
    try:
        if not is_ours(connection, path) or connection.pragma("journal_mode") != "wal":
            return False
        if connection.pragma("user_version") < SCHEMA_VERSION:
            return False
        return connection.execute("SELECT value FROM meta WHERE key = 'boot'").fetchall() == [(boot,)]
    finally:
        if connection.in_transaction:  # not after every error
            connection.execute("ROLLBACK")


def is_ours(connection: apsw.Connection, path: Path) -> bool:
    """Ours, or new and empty (False); a foreign or newer file raises."""
    if connection.pragma("application_id") == APPLICATION_ID:
        schema = connection.pragma("user_version")
        if schema > SCHEMA_VERSION:
            raise IncompatibleStore(
                f"{path} was written by a newer holdfast (schema {schema}, this one knows {SCHEMA_VERSION}); upgrade holdfast"
            )
        return True
    if connection.pragma("application_id") or connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall():
        raise ForeignFile(f"{path} is a SQLite file of another program, not a Holdfast store; nothing was changed")
    return False


def _make_ready(connection: apsw.Connection, path: Path, boot: str) -> None:
    """With the lock held: create what is missing, and notice a restart of the machine."""
    ours = is_ours(connection, path)
    if not ours:
        connection.pragma("page_size", PAGE_BYTES)
    _use_wal(connection, path)  # a backup comes without
    connection.pragma("synchronous", "FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not ours:
            connection.execute(SCHEMA)
        elif connection.pragma("user_version") < SCHEMA_VERSION:
            _migrate(connection)
        _note_boot(connection, boot)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    sync_folder(path.parent)


def _migrate(connection: apsw.Connection) -> None:
    """From schema 1, which had every value in `entries`, a table with rowids; from schema 2, which had no `folds`."""
    if connection.pragma("user_version") < 2:
        connection.execute(
            "DROP VIEW readable; DROP INDEX expiries; ALTER TABLE entries RENAME TO entries_1;"  # noqa: S608
            f"{ENTRIES}{READABLE}"
            f"INSERT INTO large SELECT space, key, value FROM entries_1 WHERE length(value) > {VALUE_INLINE_MAX};"
            f"INSERT INTO entries SELECT space, key, CASE WHEN length(value) <= {VALUE_INLINE_MAX} THEN value END, version, "
            "owner, created_at, updated_at, expires_at, tag FROM entries_1 ORDER BY space, key;"
            "DROP TABLE entries_1"
        )
    connection.execute(f"{FOLDS}PRAGMA user_version = {SCHEMA_VERSION}")


def _note_boot(connection: apsw.Connection, boot: str) -> None:
    """After a restart of the machine, let the versions of async spaces jump.

    Their last commits may be lost with the power, and with them versions that were given out already. The jump keeps
    those from being given out twice; cursors from before it are Compacted, since what they saw may be gone.
    """
    known = connection.execute("SELECT value FROM meta WHERE key = 'boot'").fetchall()
    if known == [(boot,)]:
        return
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('boot', ?)", (boot,))
    if known:
        rows = connection.execute("SELECT id FROM spaces WHERE durability = 'async'").fetchall()
        for space in [int(row[0]) for row in rows]:  # type: ignore[arg-type]
            first, last = feed_id(space, 0), feed_id(space, REVISION_MAX)
            connection.execute(
                "INSERT INTO feed SELECT ifnull(max(id), ?2) + ?1, ifnull(time, 0), ifnull(last_id, 0) + ?1, x'90' "
                "FROM feed WHERE id BETWEEN ?2 AND ?3",  # of a space that has lost all of them too
                (ASYNC_JUMP, first, last),
            )
            connection.execute(
                "UPDATE spaces SET floor = coalesce((SELECT max(id) - ?1 FROM feed WHERE id BETWEEN ?1 AND ?2), 0) WHERE id = ?3",
                (first, last, space),
            )


def feed_id(space: int, revision: int) -> int:
    """The row of the feed that ends with this revision."""
    return (space << REVISION_BITS) + revision


def boot_id() -> str:
    """What changes when the machine is restarted; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _use_wal(connection: apsw.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != [("wal",)]:
        raise Unavailable(f"{path} is on a file system that cannot share memory between processes; use a local disk")


class FileLock:
    """The turn to write, between processes. Not for use by two threads at once."""

    def __init__(self, path: Path) -> None:
        with translating(path):
            check_place(path)
        self._path = path
        self._lock = _open_beside(path, "-lock")
        try:
            self._turn = _open_beside(path, "-turn")
            if not os.fstat(self._turn).st_size:
                os.pwrite(self._turn, b"\0", 0)
            self._waits = mmap.mmap(self._turn, 1)
            if os.fstat(self._lock).st_size <= _SIGNATURE_BYTES:
                os.pwrite(self._lock, b"!", _SIGNATURE_BYTES)  # behind a signature, which may be there already
            self._shown = mmap.mmap(self._lock, 2, access=mmap.ACCESS_READ)
        except OSError as exc:
            os.close(self._lock)
            raise _cannot_open(path, exc) from exc
        except BaseException:
            os.close(self._lock)
            raise

    def try_acquire(self) -> bool:
        """Take the lock if it is free and nobody waits for it."""
        try:
            if self._waits[0]:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._waits[0] = 0  # who waited has died: who waits has the turn
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self) -> None:
        """Wait for the lock, ahead of whoever releases it now and wants it again."""
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            self._waits[0] = 1
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            self._waits[0] = 0
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def release(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def is_signed(self) -> bool:
        """Whether a process keeps the lock for as long as it lives, or kept it until it died. Costs no system call.

        Its commits are in the feed before they are in the entries (`sqlite_folds.py`). What was read from the entries while
        this was still False afterwards is up to date.
        """
        return self._shown[1] != 0

    def sign(self) -> None:
        """Having the lock, and to keep it: write this process's number into its file, for others to see."""
        try:
            os.pwrite(self._lock, str(os.getpid()).encode().ljust(_SIGNATURE_BYTES - 1, b"\0"), 1)
        except OSError as exc:
            raise _cannot_open(self._path, exc) from exc

    @contextlib.contextmanager
    def signed(self) -> Iterator[None]:
        """Sign, and take that back if what follows fails, unless there was a signature before."""
        before = self.is_signed
        try:
            self.sign()
            yield
        except BaseException:
            if not before:
                self.unsign()
            raise

    def unsign(self) -> None:
        """Having the lock, with all entries up to date."""
        with contextlib.suppress(OSError):  # then others go on as if there were something to fold
            os.pwrite(self._lock, bytes(_SIGNATURE_BYTES - 1), 1)

    def owner(self) -> int | None:
        """The process that keeps the lock for as long as it lives, if it can be told."""
        try:
            owner = int(os.pread(self._lock, _SIGNATURE_BYTES - 1, 1).rstrip(b"\0"))
            os.kill(owner, 0)  # one that was killed could not take its name away
        except PermissionError:
            return owner  # it is another user's
        except (OSError, ValueError):
            return None
        return owner

    def ring(self) -> None:
        """Tell watchers in other processes that something was committed."""
        try:
            os.pread(self._lock, 1, 0)
        except OSError:
            return  # they find out by themselves a moment later

    def close(self) -> None:
        self._shown.close()
        self._waits.close()
        os.close(self._lock)
        os.close(self._turn)

    def remove(self) -> None:
        """Close, and leave nothing beside a file that turned out to be no store."""
        self.close()
        for suffix in ("-lock", "-turn"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def _open_beside(path: Path, suffix: str) -> int:
    try:
        return open_beside(path, suffix)
    except OSError as exc:
        raise _cannot_open(path, exc) from exc


class Bell:
    """Says when somebody may have committed, this process or another; it may say so for nothing."""

    _IN_ACCESS: Final = 0x1

    def __init__(self, path: Path, data_version: Callable[[], int], rung: Callable[[], None]) -> None:
        self._name = f"{path}-lock"
        self._data_version = data_version
        self._rung = rung
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._poller: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """From here on."""
        if self._poller is None:
            self._poller = self._loop.create_task(self._poll())
            self._fd = self._listen()

    def _listen(self) -> int | None:
        """An inotify watch on the lock file; None where there is no inotify, or the loop cannot wait for it."""
        import ctypes  # only who waits for others needs it

        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            return None
        fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        try:
            if libc.inotify_add_watch(fd, os.fsencode(self._name), self._IN_ACCESS) < 0:
                raise OSError(ctypes.get_errno(), "inotify")
            self._loop.add_reader(fd, self._heard, fd)
        except (OSError, NotImplementedError):
            os.close(fd)
            return None
        return fd

    def drain(self) -> None:
        """Hear nothing of what was rung so far. For who has the file's lock, has just rung itself, and knows what came before."""
        if self._fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, EVENTS_BYTES)

    def _heard(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, EVENTS_BYTES)
        self._rung()

    async def _poll(self) -> None:
        """The safety net, for a lost event and for systems without inotify."""
        seen = -1
        while True:
            with contextlib.suppress(apsw.Error):  # whoever looks is told what is wrong
                version = self._data_version()
                if version != seen:
                    seen = version
                    self._rung()
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class translating:
    """SQLite's errors, outside of a commit, as ours. The one table; a failing COMMIT is judged in `sqlite.py`."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, apsw.Error):
            raise translate(self._path, exc) from exc
        if isinstance(exc, OSError):
            raise _cannot_open(self._path, exc) from exc


def translate(path: Path, exc: apsw.Error) -> Error:
    """What a SQLite error means to the caller, when nothing was committed.

    It names the file without its folder: a keeper's clients hear it, to whom the paths of its host are nothing.
    """
    if isinstance(exc, apsw.FullError):
        return StorageFull(
            f"the disk that holds {path.name} is full; nothing was changed. Free some space and try again"
        )
    if isinstance(exc, apsw.NotADBError):
        return ForeignFile(f"{path.name} is not a SQLite file; nothing was changed")
    if isinstance(exc, apsw.CorruptError):
        return Damaged(f"{path.name} is damaged ({exc}); restore it from a backup")
    if isinstance(exc, apsw.BusyError | apsw.LockedError):
        return Unavailable(
            f"{path.name} has been locked by another program for {BUSY_MS // 1000} s; nothing was changed"
        )
    if isinstance(exc, apsw.CantOpenError | apsw.ReadOnlyError | apsw.PermissionsError):
        return Unavailable(f"{path.name} cannot be opened for writing ({exc}); check the folder and its permissions")
    if isinstance(exc, apsw.IOError) and _lacks_room(path, exc):
        return StorageFull(
            f"the disk that holds {path.name} is full; whoever opens the store needs some room there, also to read it. "
            "Nothing was changed. Free some space and try again"
        )
    if isinstance(exc, apsw.IOError):
        return Unavailable(f"the disk that holds {path.name} failed ({exc}); nothing was changed. Check the disk")
    return Unavailable(f"SQLite refused to work on {path.name}: {exc}")


_NO_INDEX: Final = frozenset({apsw.SQLITE_IOERR_SHMOPEN, apsw.SQLITE_IOERR_SHMSIZE, apsw.SQLITE_IOERR_SHMMAP})
"""SQLite's index of the log, the first thing that it makes beside the file, could not be made."""
INDEX_BYTES: Final = 32 * 1024


def _lacks_room(path: Path, exc: apsw.IOError) -> bool:
    """Whether it is that index that could not be made, for want of room."""
    if exc.extendedresult not in _NO_INDEX:  # type: ignore[attr-defined]  # apsw does not declare it
        return False
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < INDEX_BYTES


def in_doubt(path: Path, exc: BaseException) -> OutcomeUnknown:
    """A COMMIT that failed on the disk: its frames may or may not survive."""
    return OutcomeUnknown(
        f"writing to the disk that holds {path.name} failed during a commit ({exc}): it may or may not have happened. "
        "Check the disk, open the store again and repeat the request with the same request id"
    )


def _cannot_open(path: Path, exc: OSError) -> Error:
    if exc.errno == errno.ENOSPC:
        return StorageFull(
            f"the disk that holds {path.name} is full; nothing was changed. Free some space and try again"
        )
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return InvalidInput(f"the folder of {path} does not exist; create it, or name another path")
    if exc.errno == errno.EISDIR:
        return InvalidInput(f"{path} is a folder; name a file in it")
    return Unavailable(f"{path} cannot be opened for writing ({exc.strerror}); check the folder and its permissions")
