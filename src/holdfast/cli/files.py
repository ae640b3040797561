"""The files of an export: written whole or not at all, read as often as it takes."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from holdfast.engines.private import private_file
from holdfast.errors import InvalidInput, NotFound, Unavailable
from holdfast.layers.transfer import LINE_BYTES_MAX, Lines

STDIO: Final = "-"
SPOOLED_BYTES_MAX: Final = 8 * 1024 * 1024
"""A piped import larger than this is kept in a temporary file while it is checked."""


@contextmanager
def file_to_write(name: str, force: bool) -> Iterator[IO[bytes]]:
    """Where an export goes. A file is written beside itself and takes its name when it is complete and on disk.

    It is for its user alone, as a store is, and one that it replaces does not make it otherwise.
    """
    if name == STDIO:
        sys.stdout.flush()
        yield sys.stdout.buffer
        return
    path = Path(name)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):  # a device or a named pipe
        with path.open("wb") as file:
            yield file
        return
    if path.exists() and not force:
        raise InvalidInput(f"{path} exists already; name another file, or add --force")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb", opener=private_file) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        raise Unavailable(f"{path} cannot be written ({exc.strerror}); check the folder and its permissions") from exc
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def lines_to_read(name: str) -> Iterator[Lines]:
    """The lines of an export, to be read several times; what cannot be read twice is kept aside first."""
    if name == STDIO:
        if sys.stdin is None or sys.stdin.isatty():
            raise InvalidInput("name the export, or pipe it into this command")
        file: IO[bytes] = sys.stdin.buffer
    else:
        try:
            file = open(name, "rb")  # noqa: SIM115
        except FileNotFoundError:
            raise NotFound(f"there is no file {name}") from None
        except OSError as exc:
            raise InvalidInput(f"{name} cannot be read: {exc.strerror}") from exc
    with tempfile.SpooledTemporaryFile(max_size=SPOOLED_BYTES_MAX) as spool:
        if name == STDIO or not file.seekable():
            shutil.copyfileobj(file, spool)
            kept: IO[bytes] = spool
        else:
            kept = file

        def lines() -> Iterator[bytes]:
            kept.seek(0)
            return iter(lambda: kept.readline(LINE_BYTES_MAX + 1), b"")

        try:
            yield lines
        finally:
            if name != STDIO:
                file.close()
