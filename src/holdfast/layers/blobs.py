"""Blobs: values too large for an entry, kept as files named by the sha256 of their content, per space.

    file    <root>/<space>/<first two hex digits>/<sha256>     its mtime: when it was last known to be wanted
    file    <root>/<space>/uploads/<id>                        not finished; flocked by whoever writes it
    entry   blobs/<sha256>           = size    the blob may be referenced: its file is durable and no sweep is removing it
    entry   blobs/<sha256>/<holder>  = size    one reference; with a ttl it ends by itself, exactly

How it works. `put` makes the file durable, then its entry. `attach` gives the conditions and operations with which the
*caller's* batch makes a reference, so what points to a blob and the reference that keeps it are one commit. `sweep`
removes the files that nobody references and nobody wanted within a grace period.

Why an entry per reference and not a counter: attaching twice as the same holder counts once, and detaching twice
takes nothing from others; a reference can have a ttl of its own; nobody writes another's entry, so the ownership rule
holds; and who holds what can be read. The count is the number of live entries; a sweep needs only the first one.

Why it is safe. A reference is refused (Conflict on `blobs/<sha256>`) unless that entry exists, and a sweep deletes the
entry *before* it looks for references the last time. So either the sweep sees the reference and keeps the file, or the
reference is refused and its caller uploads again. That is no matter of timing: the grace period only makes refusals
rare. Uploads hold a shared file lock from rename to commit, a sweep holds it exclusively: neither can fall between the
other's steps, and the kernel releases the lock of a killed process. The race is drawn at `_sweep_step`.

How it fails. A killed upload leaves a file in `uploads/`, or one without an entry: the sweep removes both. A sweep
killed between its steps leaves a referenced blob without its entry: reading works, the next put or sweep restores it.
A file that was altered, truncated or lost behind our back is Damaged or NotFound when read, never served, and healed
by uploading the same content. In an async or volatile space a machine's crash can bring back a reference that had been
removed just before; its blob may be gone.

What it is not: no quota (entries are charged, files are not), and nothing for several hosts unless they share `root`.
A sweep deletes entries that others made, and an agent of a keeper may not: the keeper itself sweeps, or an administrator.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

import msgspec

from holdfast.clock import Clock, Duration, duration_ms, optional_ms
from holdfast.codec import encode
from holdfast.engine import Absent, Batch, Condition, Delete, Engine, Operation, Put, ValueIs
from holdfast.errors import Conflict, Damaged, InvalidInput, NotFound, StorageFull, Unavailable
from holdfast.ids import new_id
from holdfast.keys import Subspace, check_name

BLOB_BYTES_MAX: Final = 64 * 1024**3
CHUNK_BYTES: Final = 1024**2
CHUNK_BYTES_MAX: Final = 64 * 1024**2
SWEEP_STEP: Final = 64
"""Files a sweep decides about under one lock; uploads to the same folder wait that long."""
LOCK_POLL_S: Final = 0.005
LOCK_POLLS_MAX: Final = 6000
FOLDER_NAME_MAX: Final = 200

BLOBS: Final = Subspace("blobs")

Source: TypeAlias = (
    bytes | bytearray | memoryview | os.PathLike[str] | BinaryIO | Iterable[bytes] | AsyncIterable[bytes]
)

_END: Final[Any] = object()

P = ParamSpec("P")
T = TypeVar("T")

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_REMEDY: Final = "Put the same content again, or restore the file from a backup"
_UPLOAD: Final = re.compile(r"[0-9a-f]{30}")


class BlobRef(msgspec.Struct, frozen=True):
    """What a blob is: its content's hash and size. Goes into records as it is."""

    sha256: str
    size: int


class Part(NamedTuple):
    """A part of the caller's batch."""

    conditions: tuple[Condition, ...]
    operations: tuple[Operation, ...]


class SweepReport(msgspec.Struct, frozen=True):
    """Blobs removed and kept, uploads that nobody was finishing, and the bytes that both gave back."""

    removed: int
    freed_bytes: int
    kept: int
    abandoned: int


class Blobs:
    """The blobs of one space.

    ref = await blobs.put(Path("report.pdf"))
    conditions, operations = blobs.attach(ref, "tasks/17")
    await engine.commit(space, Batch(actor, (*operations, Put("tasks/17", encode(ref))), conditions))
    """

    def __init__(self, engine: Engine, space: str, actor: str, root: Path, clock: Clock) -> None:
        self._engine = engine
        self._space = space
        self._actor = actor
        self.root = Path(os.path.abspath(root))
        """The folder of the store's blobs; a space has one of its own in it."""
        self._home = self.root / _folder_name(space)
        self._uploads = self._home / "uploads"
        self._clock = clock
        self._durable: set[Path] = set()

    # --- writing ---

    async def put(self, data: Source) -> BlobRef:
        """Keep this content, durably. References nothing: attach the result in your next commit, or a sweep removes it.

        Takes bytes, the path of a file, an open binary file, or an iterable of bytes, async or not, whose items may have
        any size. Content that is there already is replaced by itself, which also heals a damaged file.
        """
        if isinstance(data, str | Mapping) or not isinstance(data, os.PathLike | Iterable | AsyncIterable):
            raise InvalidInput(
                f"a blob is made of bytes, a pathlib.Path, an open binary file or an iterable, not {type(data).__name__}"
            )
        upload = _Upload(self._uploads / new_id())
        try:
            await self._io(self._begin, upload)
            async with aclosing(self._chunks(data)) as chunks:
                async for chunk in chunks:
                    await self._io(upload.write, chunk)
            ref = await self._io(upload.finish)
            await self._publish(upload, ref)
            return ref
        finally:
            await self._io(upload.discard)

    def _begin(self, upload: _Upload) -> None:
        _make_root(self.root)
        upload.begin()

    async def _publish(self, upload: _Upload, ref: BlobRef) -> None:
        path = self._path(ref.sha256)
        batch = Batch(self._actor, (Put(_key(ref.sha256), encode(ref.size)),), (Absent(_key(ref.sha256)),))
        await self._io(self._make_folder, path.parent)
        for _ in range(LOCK_POLLS_MAX):
            with self._locked(path.parent, fcntl.LOCK_SH) as held:
                if held:
                    await self._io(upload.publish, path, self._clock.now_ms())
                    with suppress(Conflict):  # it exists, and while we hold the lock no sweep removes it
                        await self._engine.commit(self._space, batch)
                    return
            await asyncio.sleep(LOCK_POLL_S)
        raise Unavailable(f"a sweep has held {path.parent} for {LOCK_POLLS_MAX * LOCK_POLL_S:.0f} s; is it stopped?")

    async def _chunks(self, data: Source) -> AsyncGenerator[bytes, None]:
        """The content in pieces of CHUNK_BYTES. Copies, so that what is hashed is what is written."""
        if isinstance(data, bytes | bytearray | memoryview):
            for start in range(0, len(view := _view(data)), CHUNK_BYTES):
                yield bytes(view[start : start + CHUNK_BYTES])
        elif isinstance(data, os.PathLike):
            with _open_source(Path(data)) as file:
                while chunk := await self._io(_read_source, file):
                    yield chunk
        else:
            pending = bytearray()
            async for item in self._items(data):
                if not isinstance(item, bytes | bytearray | memoryview):
                    raise InvalidInput(f"a blob is made of bytes; the iterable gave {type(item).__name__}")
                pending += _view(item)
                while len(pending) >= CHUNK_BYTES:
                    yield bytes(pending[:CHUNK_BYTES])
                    del pending[:CHUNK_BYTES]
            yield bytes(pending)

    async def _items(self, data: BinaryIO | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """What an iterable gives; one that is not async may take its time. What a caller's own code raises is passed on as it is."""
        if isinstance(data, AsyncIterable):
            async for item in data:
                yield item
        elif callable(getattr(data, "read", None)):
            while (item := await self._io(_read_source, cast(BinaryIO, data))) != b"":
                yield item
        else:
            pull = partial(next, iter(data), _END)
            while (item := await self._in_thread(pull)) is not _END:
                yield item

    # --- references ---

    def attach(self, ref: BlobRef, holder: str, *, ttl: Duration | None = None) -> Part:
        """What your batch needs to reference the blob as `holder` (the key of what points to it is a good name).

        The batch is refused (Conflict) when the blob is not there, or is being removed: put it again. Attaching again
        as the same holder replaces the reference, ttl included: that is how to let go of it after a while. A reference
        belongs to the agent that made it; where a keeper guards that, another agent needs a holder's name of its own.
        """
        _check_ref(ref)
        size = encode(ref.size)
        reference = Put(reference_key(ref, holder), size, ttl_ms=optional_ms(ttl))
        return Part((ValueIs(_key(ref.sha256), size),), (reference,))

    def detach(self, ref: BlobRef, holder: str) -> Part:
        """What your batch needs to end the reference; one that has ended already is no error."""
        _check_ref(ref)
        return Part((), (Delete(reference_key(ref, holder)),))

    # --- reading ---

    def path(self, ref: BlobRef) -> str:
        """Where the content lies, for people and programs that look for themselves; read it through `stream`."""
        _check_ref(ref)
        return str(self._path(ref.sha256))

    async def read(self, ref: BlobRef) -> bytes:
        """The whole content, verified. NotFound when there is none, Damaged when it is not what was put."""
        _check_ref(ref)
        reader = _Reader(self._path(ref.sha256), ref)
        try:
            return await self._io(reader.read, ref.size)
        finally:
            reader.close()

    def stream(self, ref: BlobRef, chunk: int = CHUNK_BYTES) -> AsyncIterator[bytes]:
        """The content piece by piece. Its size is verified before the first piece, its hash before the *last* one.

        So whoever has got `ref.size` bytes has got the truth; of what comes before, only that much is known. An
        altered blob raises Damaged in place of its last piece: act on the whole, or be ready to undo.
        """
        _check_ref(ref)
        if type(chunk) is not int or not 0 < chunk <= CHUNK_BYTES_MAX:
            raise InvalidInput(f"a chunk has between 1 and {CHUNK_BYTES_MAX:,} bytes, not {chunk!r}")
        return self._pieces(ref, chunk)

    async def _pieces(self, ref: BlobRef, chunk: int) -> AsyncIterator[bytes]:
        reader = _Reader(self._path(ref.sha256), ref)
        try:
            while True:
                if piece := await self._io(reader.read, chunk):
                    yield piece
                if not reader.left:
                    return
        finally:
            reader.close()

    async def check(self, ref: BlobRef, *, content: bool = True) -> None:
        """NotFound or Damaged where a blob is not what was put. Without `content` only its file and size are looked at."""
        _check_ref(ref)
        reader = _Reader(self._path(ref.sha256), ref)
        try:
            await self._io(reader.read, 0)
            while content and reader.left:
                await self._io(reader.read, CHUNK_BYTES)
        finally:
            reader.close()

    # --- sweeping ---

    async def sweep(self, grace: Duration = "1h") -> SweepReport:
        """Remove the blobs that nobody references, and that no upload or sweep found wanted within the grace period.

        Holds the names of one of 256 folders at a time. Two sweeps at once do no harm.
        """
        before = self._clock.now_ms() - duration_ms(grace, name="grace")
        abandoned, freed = await self._io(_remove_abandoned, self._uploads)
        removed = kept = 0
        for shard in [self._home / name for name in await self._io(_names, self._home, _SHARD)]:
            names = await self._io(_names, shard, _SHA256)
            aged = await self._io(_aged, shard, names, before)
            sizes: list[int] = []
            for start in range(0, len(aged), SWEEP_STEP):
                sizes += await self._sweep_step(shard, aged[start : start + SWEEP_STEP], before)
            removed, freed, kept = removed + len(sizes), freed + sum(sizes), kept + len(names) - len(sizes)
        return SweepReport(removed, freed, kept, abandoned)

    async def _sweep_step(self, shard: Path, names: list[str], before: int) -> list[int]:
        """Decide about a few aged files of one folder; gives the sizes of those removed.

        sweep                                    somebody attaches               somebody puts the same content
        -----                                    -----------------               ------------------------------
        (1) lock, exclusively; look at mtimes    commit: (2) sees it, kept       renamed before (1): young, kept
        (2) scan: no reference
                                                 commit: (4) sees it, kept       waits for the lock
        (3) delete blobs/<sha256>
                                                 commit: refused, puts again         ·
        (4) scan again: still none                                                   ·
        (5) what is wanted gets a new mtime,                                         ·
            and its entry back                                                       ·
        (6) unlink the rest; unlock                                              renames, commits: blob and entry anew

        A kill after (3) leaves a file without entry: (5) or (6) of the next sweep, or a put, make it whole.
        """
        with self._locked(shard, fcntl.LOCK_EX) as held:
            if not held:  # an upload is at work here, or another sweep: the next one comes by
                return []
            names = await self._io(_aged, shard, names, before)  # (1)
            wanted = await self._references(names)  # (2)
            if idle := [name for name in names if name not in wanted]:
                await self._commit(*(Delete(_key(name)) for name in idle))  # (3)
                wanted |= await self._references(idle)  # (4)
            entries = await self._engine.get(self._space, [_key(name) for name in wanted])
            await self._io(
                _refresh, shard, wanted, self._clock.now_ms()
            )  # (5), mtime first: it covers a commit cut off
            bare = [name for name, entry in zip(wanted, entries, strict=True) if entry is None]
            if bare:
                await self._commit(*(Put(_key(name), wanted[name]) for name in bare))
            return await self._io(_unlink, shard, [name for name in idle if name not in wanted])  # (6)

    async def _references(self, names: list[str]) -> dict[str, bytes]:
        """Those of the blobs that have a live reference, with their size as it stands in the entry."""
        scans = (self._engine.scan(self._space, BLOBS.prefix(name), limit=1) for name in names)
        pages = await asyncio.gather(*scans)
        return {name: page.entries[0].value for name, page in zip(names, pages, strict=True) if page.entries}

    async def _commit(self, *operations: Operation) -> None:
        await self._engine.commit(self._space, Batch(self._actor, operations))

    # --- files ---

    def _path(self, sha256: str) -> Path:
        return self._home / sha256[:2] / sha256

    async def _io(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Work on files of ours, in a thread."""
        try:
            return await self._in_thread(work, *args, **kwargs)
        except OSError as exc:
            self._refuse(exc)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A cancelled caller waits for it: no file is closed under a thread that writes to it."""
        running = asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    def _refuse(self, exc: OSError) -> NoReturn:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"the disk that holds {self.root} is full; free some space and repeat the call") from exc
        raise Unavailable(
            f"the blob folder {self.root} cannot be used: {exc.strerror or exc}. It must be a folder on a working disk "
            "that this user may read and write"
        ) from exc

    @contextmanager
    def _locked(self, shard: Path, mode: int) -> Iterator[bool]:
        """Try to lock a folder, shared by uploads or for a sweep alone; never waits, so it needs no thread."""
        try:
            fd = os.open(shard / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            self._refuse(exc)
        try:
            held = False
            with suppress(BlockingIOError):
                fcntl.flock(fd, mode | fcntl.LOCK_NB)
                held = True
            yield held
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of fd: closing ours alone would not unlock
            os.close(fd)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in self._durable:  # once a process: whoever made it may have died before its name was durable
            _fsync_folder(folder.parent)
            _fsync_folder(self.root)
            with suppress(PermissionError):  # the parent of the root need not be ours to read
                _fsync_folder(self.root.parent)
            self._durable.add(folder)


class _Upload:
    """A file that becomes a blob. The lock on it says that its writer lives, however slow the content comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._fd < 0 or os.fstat(self._fd).st_nlink == 0:  # a sweep came between the file and our lock on it
            self.discard()
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > BLOB_BYTES_MAX:
            raise InvalidInput(f"a blob holds at most {BLOB_BYTES_MAX:,} bytes; divide what is larger")
        self._digest.update(chunk)
        left = memoryview(chunk)
        while left:
            left = left[os.write(self._fd, left) :]

    def finish(self) -> BlobRef:
        os.fsync(self._fd)
        return BlobRef(self._digest.hexdigest(), self._size)

    def publish(self, path: Path, now_ms: int) -> None:
        _set_mtime(self._fd, now_ms)
        os.replace(self._path, path)
        _fsync_folder(path.parent)

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)


class _Reader:
    """A blob being read, checked on the way. Opens at the first read, so that nothing leaks if there is none."""

    def __init__(self, path: Path, ref: BlobRef) -> None:
        self.left = ref.size
        self._path = path
        self._ref = ref
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    def read(self, count: int) -> bytes:
        file = self._file or self._open()
        count = min(count, self.left)
        data = file.read(count)
        self._digest.update(data)
        self.left -= len(data)
        if len(data) < count:
            raise Damaged(f"blob {self._ref.sha256} was truncated while it was read")
        if not self.left and self._digest.hexdigest() != self._ref.sha256:
            raise Damaged(f"blob {self._ref.sha256} was altered: its content has another hash. {_REMEDY}")
        return data

    def _open(self) -> BinaryIO:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            raise NotFound(
                f"there is no blob {self._ref.sha256}: it was not put into this space, or was removed unreferenced"
            ) from None
        size = os.fstat(self._file.fileno()).st_size
        if size != self._ref.size:
            raise Damaged(f"blob {self._ref.sha256} has {size:,} bytes and should have {self._ref.size:,}. {_REMEDY}")
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open_source(path: Path) -> BinaryIO:
    """A file of the user's, to be put; what is wrong with it is not our folder's fault."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block, a device might never end
            raise InvalidInput(f"{path} is not a regular file")
        return path.open("rb")
    except FileNotFoundError as exc:
        raise NotFound(f"there is no file {path}") from exc
    except OSError as exc:
        raise InvalidInput(f"{path} cannot be read: {exc.strerror}") from exc


def _read_source(file: BinaryIO) -> bytes:
    """The next piece of a file of the user's."""
    try:
        return file.read(CHUNK_BYTES)
    except (OSError, ValueError) as exc:  # ValueError: it is closed
        name = getattr(file, "name", "that was given")
        words = exc.strerror if isinstance(exc, OSError) and exc.strerror else f"{exc}"
        raise InvalidInput(f"the file {name} cannot be read: {words}. Give one that is open for reading bytes") from exc


def _view(data: bytes | bytearray | memoryview) -> memoryview:
    """The bytes of something that has them; not of every second one of something else, which only a copy has."""
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError, BufferError) as exc:
        raise InvalidInput(
            f"this memoryview cannot be read as it is ({exc}); give its content: view.tobytes()"
        ) from exc


# --- what a sweep does to files; each runs in a thread ---


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(folder) if pattern.fullmatch(name))
    return []


def _aged(shard: Path, names: list[str], before: int) -> list[str]:
    """Those of the blobs that were last wanted before an instant."""
    aged = []
    for name in names:
        with suppress(FileNotFoundError):
            if (shard / name).stat().st_mtime_ns <= before * 1_000_000:
                aged.append(name)
    return aged


def _refresh(shard: Path, names: Iterable[str], now_ms: int) -> None:
    for name in names:
        with suppress(FileNotFoundError, PermissionError):  # another user's file is looked at again, that is all
            _set_mtime(shard / name, now_ms)


def _unlink(shard: Path, names: Iterable[str]) -> list[int]:
    """Remove the blobs; gives their sizes."""
    sizes = []
    for name in names:
        with suppress(FileNotFoundError):
            size = (shard / name).stat().st_size
            (shard / name).unlink()
            sizes.append(size)
    return sizes


def _remove_abandoned(uploads: Path) -> tuple[int, int]:
    """Remove the uploads whose writer is dead, which is when its lock is free; gives their number and bytes."""
    count = freed = 0
    for name in _names(uploads, _UPLOAD):
        with suppress(FileNotFoundError, BlockingIOError), open(uploads / name, "rb") as upload:
            fcntl.flock(upload, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(upload.fileno()).st_size
            (uploads / name).unlink()
            count, freed = count + 1, freed + size
    return count, freed


def _set_mtime(file: int | Path, at_ms: int) -> None:
    os.utime(file, ns=(at_ms * 1_000_000, at_ms * 1_000_000))


def _make_root(root: Path) -> None:
    """The folder of a store's blobs, for its user alone, unless the store's file beside it is not. One that is there stays as it is."""
    if root.is_dir():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o700
    with suppress(FileNotFoundError):
        if root.with_name(root.name.removesuffix("-blobs")).stat().st_mode & 0o077:  # as `holdfast.open` names it
            mode = 0o777
    root.mkdir(mode, exist_ok=True)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- names ---


def _key(sha256: str) -> str:
    return BLOBS.key(sha256)


def reference_key(ref: BlobRef, holder: str) -> str:
    return BLOBS.key(ref.sha256, check_name(holder, "holder"))


def _folder_name(space: str) -> str:
    """A folder for a space: one for each name, also where the file system ignores case."""
    name = "".join(
        c if c in "abcdefghijklmnopqrstuvwxyz0123456789_-" else f"%{ord(c):x}." for c in check_name(space, "space")
    )
    return name if len(name) <= FOLDER_NAME_MAX else "=" + hashlib.sha256(space.encode()).hexdigest()


def is_blob(sha256: str, size: int) -> bool:
    """Whether a blob can have this name and size; no library makes another, and a client may."""
    return _SHA256.fullmatch(sha256) is not None and 0 <= size <= BLOB_BYTES_MAX


def _check_ref(ref: BlobRef) -> None:
    if not isinstance(ref, BlobRef):
        raise InvalidInput(f"a blob is named by the BlobRef that put gave, not by {type(ref).__name__}")
    if type(ref.sha256) is not str or _SHA256.fullmatch(ref.sha256) is None:
        raise InvalidInput(f"{ref.sha256!r:.80} is not a sha256: 64 lower-case hexadecimal digits")
    if type(ref.size) is not int or not 0 <= ref.size <= BLOB_BYTES_MAX:
        raise InvalidInput(f"a blob has between 0 and {BLOB_BYTES_MAX:,} bytes, not {ref.size!r:.30}")
