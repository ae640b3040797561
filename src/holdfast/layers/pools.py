"""Pools: so many units of something, and a line of those who want some (`locks.py`).

A pool is a semaphore whose users may take several units at once. What is kept is the same: the size under `permits/pool/`, and who has
or wants how many under `locks/pool/`. What is free is counted from the line, so it is never below zero and nobody has to give
anything back that died.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.clock import Duration
from holdfast.errors import InvalidInput
from holdfast.layers.locks import Wanted


class Pool:
    """So many units of something, allocated and given back; never more than there are."""

    def __init__(self, wanted: Callable[[int, Duration | None, Duration | None], Wanted], size: int) -> None:
        self._wanted = wanted
        self.size = size

    def allocate(self, units: int = 1, *, ttl: Duration | None = None, wait: Duration | None = 0) -> Wanted:
        """Some units, as long as the block lasts."""
        if type(units) is not int or not 0 < units <= self.size:
            raise InvalidInput(f"between 1 and {self.size} units can be allocated, not {units!r}")
        return self._wanted(units, ttl, wait)

    async def available(self) -> int:
        """How many units nobody has at the moment."""
        return await self._wanted(1, None, 0).available()
