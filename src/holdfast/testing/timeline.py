"""A clock that moves when nobody has anything to do: hours pass in a moment, and in the same order each time.

For a store in memory: what waits for a disk, a server or a thread looks as if it had nothing to do, and time passes it by.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final, TypeVar

T = TypeVar("T")
TURNS: Final = 60
"""Of the event loop without the work being done, before time passes."""
LEAPS_MAX: Final = 20_000
"""Of the clock; whatever needs more never comes."""
HORIZON_MS: Final = 1_000 * 86_400_000
"""Nor does what comes later than this."""


class Timeline:
    """A clock whose time is that of the next sleeper, whenever `run` finds nothing else to do."""

    def __init__(self, now_ms: int = 1_750_000_000_000) -> None:
        self._now_ms = now_ms
        self._sleepers: list[tuple[int, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    def now_ms(self) -> int:
        return self._now_ms

    async def sleep_until(self, at_ms: int) -> None:
        while self._now_ms < at_ms:
            woken = asyncio.Event()
            heapq.heappush(self._sleepers, (at_ms, next(self._numbers), woken))
            await woken.wait()

    def advance(self, ms: int) -> None:
        """Let so much time pass."""
        self._now_ms += ms

    def leap(self) -> None:
        """To when the next sleeper wants to be woken."""
        while self._sleepers:
            at_ms, _, woken = heapq.heappop(self._sleepers)
            if woken._waiters:  # somebody still sleeps there
                self._now_ms = max(self._now_ms, at_ms)
                woken.set()
                return

    async def run(self, work: asyncio.Future[T]) -> T:
        """Let time pass until the work is done."""
        horizon = self._now_ms + HORIZON_MS
        for _ in range(LEAPS_MAX):
            for _ in range(TURNS):
                if work.done():
                    return work.result()
                await asyncio.sleep(0)
            self.leap()
            if self._now_ms > horizon:
                break
        raise AssertionError("nothing happens any more")
