"""Group commit over a network: one group of a space is under way at a time, and what arrives meanwhile is the next.

Spaces commit in parallel. There is no timer: the first batch leaves with whatever else the loop's step brings, or at once if
nothing else is about to run, and the longer the server takes, the more batches the next group has. No caller's task writes a
group, so one that is cancelled breaks nobody else's reply; one that was cancelled before its batch was taken is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from holdfast.engine import Batch, Receipt
from holdfast.engines.grouping import CommitQueue, Waiting, answer
from holdfast.errors import Unavailable

QUEUES_KEPT: Final = 64
"""Spaces whose queues stay when they are empty; mostly somebody comes back at once."""

Over = Callable[[Awaitable[None] | None], None]
"""Is told once of a group: that every item has its outcome, or what is still to be awaited until it has."""
BeginGroup = Callable[[str, list[Waiting], Over], None]
"""Begins to commit a group of one space and one durability."""


class Committer:
    """The commits of one engine, grouped by space."""

    def __init__(self, begin: BeginGroup) -> None:
        self._begin = begin
        self._queues: dict[str, CommitQueue] = {}
        self._busy: set[str] = set()
        """Spaces with a group under way, or about to be."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._rested = asyncio.Event()
        """Set when no space is busy any more."""
        self._closed = False

    async def commit(self, space: str, durability: str, batch: Batch, size: int) -> Receipt:
        """Queue a batch that `check_batch` has accepted, and wait for what becomes of it."""
        if self._closed:
            raise Unavailable("the store is closed")
        loop = asyncio.get_running_loop()
        queue = self._queues.get(space)
        if queue is None:
            queue = self._queues[space] = CommitQueue()
        item = Waiting(space, durability, batch, size, _loop=loop)
        queue.add(item)
        if space not in self._busy:
            self._busy.add(space)
            if getattr(loop, "_ready", True):
                loop.call_soon(self._next, space, queue)
            else:  # nobody can come in this step of asyncio's loop; others do not tell
                self._next(space, queue)
        await item
        return item.told()

    def _next(self, space: str, queue: CommitQueue) -> None:
        """Begin the next group, if anybody waits."""
        while queue:
            items = queue.take_group()
            if items:
                return self._write(space, queue, items)
        if len(self._queues) > QUEUES_KEPT:
            del self._queues[space]
        return self._rest(space)

    def _rest(self, space: str) -> None:
        self._busy.discard(space)
        if not self._busy:
            self._rested.set()

    def _write(self, space: str, queue: CommitQueue, items: list[Waiting]) -> None:
        try:
            self._begin(space, items, partial(self._over, space, queue, items))
        except BaseException as exc:
            self._over(space, queue, items, _fail(exc))

    def _over(self, space: str, queue: CommitQueue, items: list[Waiting], rest: Awaitable[None] | None) -> None:
        if rest is None:
            if queue:  # those who wait leave before those who are answered go on
                self._next(space, queue)
                answer(items)
            else:  # who goes on may have the next; and who ends the program keeps nobody from it
                try:
                    answer(items)
                finally:
                    self._next(space, queue)
        else:
            task = asyncio.get_running_loop().create_task(self._finish(space, queue, items, rest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, space: str, queue: CommitQueue, items: list[Waiting], rest: Awaitable[None]) -> None:
        try:
            await rest
        except BaseException as exc:  # whoever waits must hear of it
            for item in items:
                item.outcome = exc  # an outcome from before the failure was never written
            if not isinstance(exc, Exception):
                self._rest(space)
                raise
        finally:
            answer(items)
        self._next(space, queue)

    async def close(self) -> None:
        """Finish what was accepted; take no more."""
        self._closed = True
        while self._busy:
            self._rested.clear()
            await self._rested.wait()


async def _fail(exc: BaseException) -> None:
    raise exc
