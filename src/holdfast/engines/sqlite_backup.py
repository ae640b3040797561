"""A consistent copy of a store's file as it is now, in a new one; others may go on writing.

How it fails. No file is left. What is said names the file it is about: the store, where that could not be read, and the copy where
there is no room for it or it could not be written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import apsw

from holdfast.engines.private import new_file, sync_folder
from holdfast.engines.sqlite_file import connect, translate, translating

_READING: Final = frozenset({apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ})


def copy_file(path: Path, target: Path) -> None:
    """Copy the store at `path`; once this returns the copy is on the disk, its name included."""
    with translating(target), new_file(target):
        with translating(path):
            source = connect(path)
        try:
            source.execute("VACUUM INTO ?", (str(target),))
        except apsw.Error as exc:
            raise translate(target if _is_about_the_copy(exc) else path, exc) from exc
        finally:
            source.close()
        sync_folder(target.parent)


def _is_about_the_copy(exc: apsw.Error) -> bool:
    if isinstance(exc, apsw.IOError):
        return exc.extendedresult not in _READING  # type: ignore[attr-defined]  # apsw does not declare it
    return isinstance(exc, apsw.FullError | apsw.CantOpenError)
