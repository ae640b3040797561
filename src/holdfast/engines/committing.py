"""Group commit over a network: one group of a space is under way at a time, and what arrives meanwhile is the next.

Spaces commit in parallel. There is no timer: the first batch leaves at once, and the longer the server takes, the more
batches the next group has. The group is written by a task of its own, so a caller that is cancelled breaks nobody else's
reply; one that was cancelled before its batch was taken is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.engine import Batch, Receipt
from holdfast.engines.grouping import CommitQueue, Waiting, answer
from holdfast.errors import Unavailable

QUEUES_KEPT: Final = 64
"""Spaces whose queues stay when they are empty; mostly somebody comes back at once."""

WriteGroup = Callable[[str, list[Waiting]], Awaitable[None]]
"""Commits a group of one space and one durability, and leaves every item's outcome in it."""


class Committer:
    """The commits of one engine, grouped by space."""

    def __init__(self, write: WriteGroup) -> None:
        self._write = write
        self._queues: dict[str, CommitQueue] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def commit(self, space: str, durability: str, batch: Batch, size: int) -> Receipt:
        """Queue a batch that `check_batch` has accepted, and wait for what becomes of it."""
        if self._closed:
            raise Unavailable("the store is closed")
        reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(space)
        if queue is None:
            queue = self._queues[space] = CommitQueue()
        queue.add(Waiting(space, durability, batch, size, reply))
        if space not in self._tasks:
            self._tasks[space] = asyncio.create_task(self._run(space, queue))
        return await reply

    async def _run(self, space: str, queue: CommitQueue) -> None:
        """Write group after group until nobody waits."""
        try:
            while queue:
                items = queue.take_group()
                if items:
                    await self._write_one(space, items)
        finally:
            del self._tasks[space]
            if len(self._queues) > QUEUES_KEPT:
                del self._queues[space]

    async def _write_one(self, space: str, items: list[Waiting]) -> None:
        try:
            await self._write(space, items)
        except BaseException as exc:  # whoever waits must hear of it
            for item in items:
                item.outcome = exc  # an outcome from before the failure was never written
            if not isinstance(exc, Exception):
                raise
        finally:
            answer(items)

    async def close(self) -> None:
        """Finish what was accepted; take no more."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
