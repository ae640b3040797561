"""Folders and files of a store, made for their user alone: what is kept in them may be secret.

A store is what its path leads to: links are followed first (`real_path`), so that whatever stands beside the file stands beside
one file, whichever way it was reached.

What is there keeps its mode: who shares a store with other users has said so by chmod, and files beside a shared one are
made as it is. SQLite does the same with its log and its shared memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidInput

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
READING_AND_WRITING: Final = 0o666
OURS: Final = ".holdfast"
"""A folder that nobody but Holdfast uses; version control leaves it alone."""


def real_path(path: str | Path) -> Path:
    """The file that a path leads to, whether it is there or not."""
    return Path(os.path.realpath(path))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it, durably; OSError where that cannot be."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # another process made it, a moment ago
    sync_folder(folder.parent)
    if folder.name == OURS:
        (folder / ".gitignore").write_text("*\n")


def make_file(path: Path) -> None:
    """An empty file, unless there is one; OSError where that cannot be."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def open_beside(path: Path, suffix: str) -> int:
    """A file beside a store's, to read and write; one that is missing is made as the store's file is."""
    name, flags = f"{path}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        mode = os.stat(path).st_mode & READING_AND_WRITING
    except FileNotFoundError:
        mode = FILE_MODE
    try:
        fd = os.open(name, flags | os.O_EXCL, mode)
    except FileExistsError:
        return os.open(name, flags, mode)
    os.fchmod(fd, mode)  # whatever this process's umask is: others have to take their turns
    return fd


def private_file(name: str, flags: int) -> int:
    """For `open(…, opener=private_file)`: what it makes is for its user alone."""
    return os.open(name, flags, FILE_MODE)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[None]:
    """An empty file to be filled inside; InvalidInput when there is one already, and none is left when that fails."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        raise InvalidInput(f"{path} exists already; name a file that does not") from None
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
