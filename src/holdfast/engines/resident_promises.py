"""Promises of the resident engine: deletions that their sender hears of before they are in the file (`Batch.early`).

Who releases a lock would wait for an fsync of its own, only to hear what is decided as soon as the batch is looked at. So such a
batch is judged at once, on the entries in memory and the promises before it, and its sender is told. Then it is queued before
everybody else, so that it is judged the same again with the group that writes it: the next one, or one that begins for it within
PROMISE_MS; at once if somebody watches what it deletes.

Nobody but its sender can tell the difference. Commits come after it in the queue, and whoever reads, watches or administers the
space waits until it was written (`kept`). It overtakes what is queued and was not answered yet, but nothing that names what
it deletes: a write under the lock that is still under way comes first, and then nothing is promised.

How it fails. With a crash before it is written, or no room for it on the disk, it has not happened: what was given up is
there until it ends by itself. Its receipt therefore shows the version before it, which no other commit can be given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from holdfast.clock import Clock
from holdfast.engine import Batch, Delete, Receipt
from holdfast.engines.evaluation import Group
from holdfast.engines.grouping import Turns, Waiting
from holdfast.engines.resident_space import ResidentSpace
from holdfast.errors import Error

PROMISES_MAX: Final = 256
"""Made and not yet kept; more wait like everybody."""

log = logging.getLogger("holdfast.resident")


class _Known:
    """The reply to a batch whose sender was told before: there is nobody to answer."""

    def set_result(self, receipt: Receipt) -> None:
        pass

    def set_exception(self, error: BaseException) -> None:
        log.warning("what somebody gave up could not be written, and is there until it ends by itself: %s", error)


_KNOWN: Final = _Known()


class Promises:
    """What was told and is not written yet."""

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns = turns
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, Group] = {}
        """By space: what the promises come to, all together."""
        self._count = 0
        self._waiters: list[asyncio.Future[None]] = []

    def make(self, home: ResidentSpace, item: Waiting, is_watched: Callable[[str], bool]) -> Receipt | None:
        """Tell what comes of a batch, and queue it; None if it has to wait like others, and nothing was done.

        Only in a step of the loop in which no thread has the connection, and the entries in memory are the newest.
        """
        batch = item.batch
        if not batch.fresh or not batch.operations or item.durability != "sync" or self._count >= PROMISES_MAX:
            return None
        queue, now = self._turns.queue, max(self._clock.now_ms(), home.time)
        for op in batch.operations:
            if type(op) is not Delete or queue.names(op.key):
                return None
        if home.due(now, 1):
            return None  # an expiry comes first, and this may be about it
        group = self._groups.get(home.name) or Group(home, now)
        group.now = max(group.now, now)
        try:
            receipt = group.evaluate(batch)
        except Error:
            return None  # it hears why when its turn has come
        self._groups[home.name] = group
        self._count += 1
        item.reply = _KNOWN
        self._turns.promised(item, soon=any(is_watched(key) for key in _deleted(batch)))
        return Receipt(home.revision, receipt.at, receipt.results)

    def owed(self, space: str) -> bool:
        """Whether somebody was told of something that cannot be read in this space yet."""
        return space in self._groups

    async def kept(self, space: str | None = None) -> None:
        """Return when nothing is owed in this space, or in any."""
        while space in self._groups if space is not None else self._groups:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            self._turns.ask()
            await waiter

    def keep(self) -> None:
        """All are in the file now; or they cannot be, and are forgotten."""
        if self._groups:
            self._groups.clear()
            self._count = 0
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _deleted(batch: Batch) -> list[str]:
    return [op.key for op in batch.operations if type(op) is Delete]
