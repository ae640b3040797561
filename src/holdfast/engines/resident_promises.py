"""Promises of the resident engine: deletions that their sender hears of before they are in the file (`Batch.early`).

Who releases a lock would wait for an fsync of its own, only to hear what is known as soon as its batch has come: that the entry is
there and its own. So, where few commit and none is about to begin anyway, it is told at once, and the batch is queued: it is written
with the next group, or with one that begins for it within PROMISE_MS; at once if somebody watches what it deletes.

Nobody but its sender can tell the difference. Commits come after it in the queue, and whoever reads, watches or administers the
space waits until it was written (`kept`). A write under the lock that is still under way comes first: then nothing is promised.

How it fails. With a crash before it is written, or no room for it on the disk, it has not happened: what was given up is
there until it ends by itself. Its receipt therefore shows the version before it, which no other commit can be given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from holdfast.clock import Clock
from holdfast.engine import Delete, Mine, Receipt
from holdfast.engines.grouping import Turns, Waiting
from holdfast.engines.resident_space import ResidentSpace

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
        self._gone: dict[str, set[str]] = {}
        """By space: the keys of which somebody believes that they are deleted."""
        self._waiters: list[asyncio.Future[None]] = []

    def make(self, home: ResidentSpace, item: Waiting, is_watched: Callable[[str], bool]) -> Receipt | None:
        """Tell what comes of a batch, and queue it; None if it has to wait like others, and nothing was done."""
        batch, name, turns = item.batch, home.name, self._turns
        if not turns.may_promise or turns.queue.promised >= PROMISES_MAX:
            return None
        if not batch.fresh or len(batch.operations) != 1 or item.durability != "sync":
            return None
        op = batch.operations[0]
        if type(op) is not Delete or batch.conditions not in ((), (Mine(op.key),)):
            return None
        key, now = op.key, max(self._clock.now_ms(), home.time)
        entry, gone = home.entries.get(key), self._gone.get(name)
        if (
            entry is None
            or entry.owner != batch.actor
            or (entry.expires_at is not None and entry.expires_at <= now)
            or (gone is not None and key in gone)
        ):
            return None
        if gone is None:
            self._gone[name] = {key}
        else:
            gone.add(key)
        item.reply = _KNOWN
        turns.promise(item, soon=is_watched(key))
        return Receipt(home.revision, now, [True])

    def owed(self, space: str) -> bool:
        """Whether somebody was told of something that cannot be read in this space yet."""
        return space in self._gone

    async def kept(self, space: str | None = None) -> None:
        """Return when nothing is owed in this space, or in any."""
        while space in self._gone if space is not None else self._gone:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            self._turns.ask()
            await waiter

    def keep(self) -> None:
        """All are in the file now; or they cannot be, and are forgotten."""
        if self._gone:
            self._gone.clear()
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
