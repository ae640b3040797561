"""Backups of a store that is being served: a copy made in one step, given out in pieces.

The copy is a file beside the store, without a name: it is opened and removed at once, so that nothing is left of it
whatever happens. It is there until all of it was read, or nobody has asked for IDLE_MS. Commits go on meanwhile.

How it fails. A copy that is not there any more is NotFound: begin again. A disk without room for it is StorageFull.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.clock import Clock
from holdfast.errors import NotFound, Unavailable
from holdfast.ids import new_id
from holdfast.store import Store

PIECE_BYTES: Final = 1024 * 1024
COPIES_MAX: Final = 4
IDLE_MS: Final = 60_000


class _Copy:
    """A copy that is being read."""

    def __init__(self, file: BinaryIO, size: int, asked_at: int) -> None:
        self.file = file
        self.size = size
        self.asked_at = asked_at


class Backups:
    """The copies of one store that are being read."""

    def __init__(self, store: Store, folder: Path | None, clock: Clock) -> None:
        self._store = store
        self._folder = folder
        self._clock = clock
        self._copies: dict[str, _Copy] = {}

    async def begin(self) -> tuple[str, int]:
        """Copy the store as it is now; gives the name to ask with, and how many bytes there are."""
        now = self._clock.now_ms()
        for id in [id for id, copy in self._copies.items() if now - copy.asked_at > IDLE_MS]:
            self._forget(id)
        if len(self._copies) >= COPIES_MAX:
            raise Unavailable(f"{COPIES_MAX} backups are being read already; try again later")
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=self._folder) as folder:
            path = Path(folder, "copy.db")
            await self._store.backup(path)
            file, size = path.open("rb"), path.stat().st_size  # noqa: ASYNC230
        id = new_id()
        self._copies[id] = _Copy(file, size, now)
        return id, size

    def read(self, id: str, offset: int) -> bytes:
        """A piece of it; after the last one it is gone."""
        copy = self._copies.get(id)
        if copy is None:
            raise NotFound("this backup is not there any more; begin another")
        copy.asked_at = self._clock.now_ms()
        copy.file.seek(min(max(offset, 0), copy.size))
        piece = copy.file.read(PIECE_BYTES)
        if offset + len(piece) >= copy.size:
            self._forget(id)
        return piece

    def close(self) -> None:
        for id in list(self._copies):
            self._forget(id)

    def _forget(self, id: str) -> None:
        self._copies.pop(id).file.close()
