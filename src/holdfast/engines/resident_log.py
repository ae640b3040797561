"""Folding the write-ahead log of a file that is being written to, without making commits wait for it.

When LOG_PAGES_MAX pages were written, a connection of its own, in a thread of its own, brings them into the file while
commits go on and append more. The log can begin anew only when nothing is left in it, so the few pages that were appended
meanwhile are folded in a second step, in which the writing connection has its turn between two groups.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import apsw

from holdfast.engines.sqlite_file import connect

LOG_PAGES_MAX: Final = 4_000


class Log:
    """The write-ahead log of the connection that writes."""

    def __init__(self, path: Path, writer: apsw.Connection) -> None:
        self._path = path
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._beside: apsw.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-log")
        self.folding: asyncio.Future[apsw.Error | None] | None = None
        """Not None while the thread is at work."""
        self._folded_at = 0
        self.is_folded_but_for_the_rest = False

    def fold_if_long(self, then: Callable[[apsw.Error | None], None]) -> None:
        """With the writing connection in hand: begin to fold if that is due; `then` hears how it went, on the loop."""
        if self.folding is not None:
            return
        (written, _) = self._writer.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)
        if written - self._folded_at < LOG_PAGES_MAX:
            return

        def done(future: asyncio.Future[apsw.Error | None]) -> None:
            self.folding = None
            error = future.result()
            self.is_folded_but_for_the_rest = error is None
            then(error)

        self._folded_at = written
        self.folding = running = self._loop.run_in_executor(self._thread, self._fold_most)
        running.add_done_callback(done)

    def _fold_most(self) -> apsw.Error | None:
        try:
            if self._beside is None:
                self._beside = connect(self._path)
        except apsw.Error as exc:
            return exc
        return _fold(self._beside)

    def fold_rest(self) -> apsw.Error | None:
        """With the writing connection in hand, in whichever thread."""
        self.is_folded_but_for_the_rest = False
        return _fold(self._writer)

    def close(self) -> None:
        self._thread.shutdown()
        if self._beside is not None:
            with contextlib.suppress(apsw.Error):
                self._beside.close()


def _fold(connection: apsw.Connection) -> apsw.Error | None:
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    except apsw.Error as exc:
        return exc
    return None
