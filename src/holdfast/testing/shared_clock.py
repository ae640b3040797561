"""A clock that several processes share: one moves it, the others see it move.

Its time is eight bytes of a file that all of them have mapped. Whoever sleeps on it in another process looks every few
milliseconds.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from pathlib import Path
from typing import Final

from holdfast.clock import Duration, ManualClock

LOOK_S: Final = 0.002
_TIME: Final = struct.Struct("<q")


class SharedClock(ManualClock):
    """A ManualClock for every process that opens the same file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not path.exists():
            path.write_bytes(_TIME.pack(self._now_ms))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _TIME.size)

    def now_ms(self) -> int:
        return int(_TIME.unpack_from(self._shared)[0])

    def advance(self, by: Duration) -> None:
        super().advance(by)
        _TIME.pack_into(self._shared, 0, self._now_ms)

    def set_back(self, by: Duration) -> None:
        super().set_back(by)
        _TIME.pack_into(self._shared, 0, self._now_ms)

    async def sleep_until(self, at_ms: int) -> None:
        while self.now_ms() < at_ms:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
