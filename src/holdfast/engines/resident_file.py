"""How the resident engine comes to own its file: the lock for life, a look at what a crash left, and loading.

A file whose write-ahead log was not folded was not closed cleanly. SQLite recovers it; what a failing disk or a power
failure may have done to it is looked for by `quick_check`, for at most CHECK_S_MAX seconds: start-up must stay short, and
loading reads every page of the entries anyway, checks included. `holdfast doctor` checks without a limit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NamedTuple

import apsw

from holdfast.engines.resident_space import DamagedRows, Link, ResidentSpace, load_spaces
from holdfast.engines.sqlite_file import FileLock, boot_id, connect, prepare, translating
from holdfast.engines.sqlite_rows import first_revision, first_row
from holdfast.errors import Damaged, Unavailable

CLAIM_WAIT_S: Final = 2.0
"""How long to wait for another process to let go of the file; one that embeds it lets go after each commit."""
CLAIM_RETRY_S: Final = 0.02
CHECK_S_MAX: Final = 1.0
CHECK_STEPS: Final = 1_000
"""Steps of SQLite's between two looks at the time."""


class Opened(NamedTuple):
    """A file that is ours, and what it holds."""

    link: Link
    spaces: list[ResidentSpace]
    data_version: int
    """As this connection sees it; it changes when another one writes."""
    first_revision: int
    """Where new spaces begin."""


async def claim(path: Path, lock: FileLock) -> None:
    """Take the lock, to keep it. Whoever has it is named in the refusal."""
    left = CLAIM_WAIT_S
    while not lock.try_acquire():
        if left <= 0:
            owner = lock.owner()
            who = "another process" if owner is None else f"process {owner}"
            raise Unavailable(
                f"{path} is owned by {who}, and a resident store has one owner at a time; connect to that process, or end it"
            )
        await asyncio.sleep(CLAIM_RETRY_S)
        left -= CLAIM_RETRY_S


def open_file(path: Path, seconds: Callable[[], float]) -> Opened:
    """With the lock held: make the file ready, see whether it is whole, and load it."""
    was_left_open = _has_log(path)
    prepare(path, nullcontext(), boot_id())
    with translating(path):
        connection = connect(path)
    try:
        link = Link(connection, connection.cursor().execute)
        with translating(path):
            if was_left_open:
                _check(path, connection, seconds)
            spaces = load_spaces(link)
            data_version = int(first_row(link.execute, "PRAGMA data_version")[0])
            first = first_revision(link.execute)
            # Loading is faster through the map. From here on it would count as this process's memory, for nothing.
            connection.pragma("mmap_size", 0)
            connection.wal_autocheckpoint(0)  # `resident_log.py` does that
        return Opened(link, spaces, data_version, first)
    except (DamagedRows, UnicodeDecodeError) as exc:
        connection.close()
        raise Damaged(f"{path} is damaged ({exc}); restore it from a backup") from exc
    except BaseException:
        connection.close()
        raise


def _has_log(path: Path) -> bool:
    try:
        return os.stat(f"{path}-wal").st_size > 0
    except FileNotFoundError:
        return False


def _check(path: Path, connection: apsw.Connection, seconds: Callable[[], float]) -> None:
    deadline = seconds() + CHECK_S_MAX
    connection.set_progress_handler(lambda: seconds() > deadline, CHECK_STEPS)
    try:
        [(answer,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    except apsw.InterruptError:
        return  # it is large; so far it is whole
    finally:
        connection.set_progress_handler(None)
    if answer != "ok":
        raise Damaged(f"{path} is damaged ({answer}); restore it from a backup")
