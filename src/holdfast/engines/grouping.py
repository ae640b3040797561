"""Group commit: what arrives while one commit is under way is committed as one.

A queue of batches, each with whom to answer. The engine takes a group when it can write, commits it, and answers
everybody. There is no timer: a lone writer is a group of one, and the busier the store the larger its groups. A caller
that was cancelled before its batch was taken is left out; one that is cancelled later just does not hear the answer.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import msgspec

from holdfast.engine import Batch, Receipt
from holdfast.errors import Unavailable

GROUP_BATCHES_MAX: Final = 1024
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024


class Waiting(msgspec.Struct, eq=False):
    """A batch in the queue, and whom to answer."""

    space: str
    durability: str
    batch: Batch
    size: int
    reply: asyncio.Future[Receipt] | None = None
    outcome: Receipt | BaseException | None = None


class CommitQueue:
    """Batches that wait to be committed. Every item is taken once, by the writer or by `refuse_all`, in whichever thread."""

    def __init__(self) -> None:
        self._items: list[Waiting] = []
        self._taking = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Waiting) -> None:
        with self._taking:
            self._items.append(item)
            self.bytes += item.size

    def take_group(self) -> list[Waiting]:
        """The oldest batches: of one durability, bounded in number and bytes."""
        with self._taking:
            count, size = self._group()
            group, self._items = self._items[:count], self._items[count:]
            self.bytes -= size
        return [item for item in group if item.reply is None or not item.reply.cancelled()]

    def _group(self) -> tuple[int, int]:
        """How many batches the next group has, and their bytes."""
        items = self._items
        fits = len(items) <= GROUP_BATCHES_MAX and self.bytes <= GROUP_BYTES_MAX
        if fits and len({item.durability for item in items}) <= 1:
            return len(items), self.bytes
        size = 0
        for count, item in enumerate(items):
            full = count == GROUP_BATCHES_MAX or size + item.size > GROUP_BYTES_MAX
            if count and (full or item.durability != items[0].durability):
                return count, size
            size += item.size
        return len(items), size

    def refuse_all(self, reason: str) -> None:
        """Tell whoever still waits that nothing of theirs was written."""
        refused: list[Waiting] = []
        while self._items:
            refused += self.take_group()
        for item in refused:
            item.outcome = Unavailable(reason)
        answer(refused)


def answer(items: list[Waiting]) -> None:
    """Give everybody their outcome; on the event loop."""
    for item in items:
        outcome, reply = item.outcome, item.reply
        if reply is None or reply.done():
            continue
        if isinstance(outcome, Receipt):
            reply.set_result(outcome)
        else:
            reply.set_exception(outcome or Unavailable("the batch was not committed"))
