"""The place of a store's file: what a store can be kept in, and whether its path still names the file that is open.

SQLite names its log by the file's path. So a file has to have one name, and it has to keep it for as long as anybody has it open.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable
from pathlib import Path

import apsw

from holdfast.errors import InvalidInput


def check_place(path: Path) -> None:
    """Refuse what a store cannot be kept in, before anything is made beside it: all but a file with one name, or nothing yet.

    OSError where that cannot be told.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        raise InvalidInput(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput(
            f"{path} is a device, a pipe or a socket, and a store is kept in a regular file; name one, or one that does not exist yet"
        )
    if found.st_nlink > 1:
        raise InvalidInput(
            f"{path} is a file with {found.st_nlink} names (hard links), and SQLite keeps a log beside each: what is written "
            f"through one is lost to the others. Remove the other names, which find {path.parent} -samefile {path} shows if they are "
            "near. A link is no backup; holdfast backup makes one"
        )


def gone(connection: apsw.Connection, path: Path) -> Callable[[], str | None]:
    """What tells, with one look at the path, that it no longer names the connection's file, and what that means.

    SQLite itself remembers which file it has open. Nothing but the path says that it was removed or replaced: SQLite goes on
    writing, into a file that nobody opens again, or into the log of the one that took its place.
    """
    moved = array("i", [0])
    address, _ = moved.buffer_info()
    ask, question = connection.file_control, apsw.SQLITE_FCNTL_HAS_MOVED

    def look() -> str | None:
        ask("main", question, address)
        if not moved[0]:
            return None
        return f"{path} was removed, renamed or replaced while this process had it open; nothing was changed. Open the store again"

    return look
