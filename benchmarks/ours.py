"""Our side of the benchmarks: a store as a user opens it, everything on, and the rows both sides write."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.rounds import Turn
from holdfast import Space
from holdfast.engines.sqlite_file import PAGE_BYTES, WAL_PAGES_MAX

KEYS: Final = 1024
"""Ours and the peers write these many keys in turn."""

_numbers = itertools.count(1)


def next_row() -> tuple[str, str]:
    """A key, and a value nobody has written before."""
    number = next(_numbers)
    return f"agents/{number % KEYS:04d}/state", f"value {number:012d}"


def next_bare_row() -> tuple[str, bytes]:
    """The same for a peer: the value as the bytes the library would store."""
    key, value = next_row()
    return key, f'"{value}"'.encode()


def writers(space: Space, count: int) -> Turn:
    """A turn of so many concurrent writers, each of which sets one record after the other."""
    return writing([space.records.set] * count)


def writing(writes: Sequence[Callable[[str, str], Awaitable[object]]]) -> Turn:
    """A turn in which each of these writes one row after the other."""

    async def write(put: Callable[[str, str], Awaitable[object]], end: float) -> int:
        done, clock = 0, time.perf_counter
        while clock() < end:
            key, value = next_row()
            await put(key, value)
            done += 1
        return done

    async def turn(seconds: float) -> float:
        began = time.perf_counter()
        end = began + seconds
        if len(writes) == 1:
            done = [await write(writes[0], end)]
        else:
            done = await asyncio.gather(*(write(put, end) for put in writes))
        return sum(done) / (time.perf_counter() - began)

    return turn


async def grow(space: Space, path: Path) -> None:
    """Write until the write-ahead log has its full size, as the peers do before they are measured."""
    turn, log = writers(space, 64), Path(f"{path}-wal")
    while not log.exists() or log.stat().st_size < WAL_PAGES_MAX * PAGE_BYTES:
        await turn(0.2)
