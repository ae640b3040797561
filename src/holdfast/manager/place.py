"""What a manager has on its host: a lock that one process holds at a time, and a log.

    team.db-managers/<space>@<host>.lock    held by the manager that serves; its pid is written in it
    team.db-managers/<space>@<host>.log     what it has to say, bounded

For a store that is no file: under `$XDG_STATE_HOME/holdfast/managers` (`~/.local/state/…`), with a digest of the URL in the name.

The lock is the kernel's (flock): however its holder dies, it is free in the same moment, so the next manager need not wait for a
lease. It says who serves on this host and nothing else; what a manager may write is decided by its lease in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.engines.registry import file_of, split_url
from holdfast.errors import InvalidInput, Unavailable
from holdfast.identity import check_space


def store_id(url: str, space: str) -> str:
    """A short name of one space of one store, the same for whoever uses the same URL or file."""
    name = str(file_of(url) or re.sub(r"//[^/@]*@", "//", url))
    return hashlib.sha256(f"{name}\0{space}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a manager's files are."""

    folder: Path
    name: str

    @classmethod
    def of(cls, url: str, space: str, host: str) -> Place:
        check_space(space)
        if split_url(url)[0] == "memory":
            raise InvalidInput(
                "a memory: store is this process's alone, and no manager can reach it; run holdfast.manager.Manager in this process"
            )
        file = file_of(url)
        if file is not None:
            return cls(Path(f"{file}-managers"), f"{space}@{host}")
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return cls(Path(state) / "holdfast" / "managers", f"{store_id(url, space)}-{space}@{host}")

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def blobs(self) -> Path:
        """Where outputs go that are too large, when the store has no folder for them."""
        return self.folder / f"{self.name}.blobs"

    def make(self) -> None:
        """Make the folder, for this user alone."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise Unavailable(f"the folder {self.folder} cannot be made ({exc.strerror}); a manager needs it") from exc

    def is_held(self) -> bool:
        """Whether a manager serves here, or is about to."""
        lock = PlaceLock(self)
        try:
            return not lock.acquire(note=False)
        finally:
            lock.release()


class PlaceLock:
    """The lock of a place. Held until it is released, or its process ends."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._fd: int | None = None

    def acquire(self, *, note: bool = True) -> bool:
        """Take it; False when another process has it."""
        if self._fd is not None:
            return True
        self._place.make()
        try:
            fd = os.open(self._place.folder / f"{self._place.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise Unavailable(
                f"the lock of a manager in {self._place.folder} cannot be opened: {exc.strerror}"
            ) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        if note:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Let it go."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
