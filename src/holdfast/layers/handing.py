"""Messages that do not stand in line: who puts one hands it over to somebody of the same process who has room for it.

The message is put under the receiver's lease by the commit that makes it, as if it had been put and taken in the same moment. That is
fair only where nobody stands in line, and right only while the lease lives: both are conditions of the commit.

It is handed over when the commit is sent, with a promise: while the store writes, whoever gets it makes everything ready, and begins
when the promise is kept. One that is not kept is cancelled: then there is no such message, or it comes by another way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from holdfast.engine import Condition, Empty, Entry, Increment, Operation, Present, Put, Receipt
from holdfast.errors import Conflict
from holdfast.layers.messages import Hand, Message
from holdfast.layers.queue_entries import depth_key, ready_prefix
from holdfast.layers.scope import Scope

if TYPE_CHECKING:
    from holdfast.layers.leases import Lease
    from holdfast.layers.queues import Queue
    from holdfast.layers.receiving import Receiver


class Handing:
    """One such message, before it is there."""

    __slots__ = ("_hand", "_key", "_lease", "_queue", "_receiver", "_value")

    def __init__(self, queue: Queue, receiver: Receiver, lease: Lease, hand: Hand, rest: str, value: bytes) -> None:
        self._queue = queue
        self._receiver = receiver
        self._lease = lease
        self._hand = hand
        self._key = receiver.place(lease) + rest
        """Where it is going to stand. It is new: ids of one process differ, and so do their leases."""
        self._value = value

    async def commit(
        self, scope: Scope, operations: tuple[Operation, ...], conditions: tuple[Condition, ...], told: Any
    ) -> Receipt | None:
        """Do it, with what belongs to it; None, and nothing is written, where others stand in line or the lease has ended.

        Who gets it is `told` what it is about.
        """
        name = self._receiver.name
        handed = Put(self._key, self._value), Increment(depth_key(name, "reserved"), 1)
        needed = Present(self._lease.key), Empty(ready_prefix(name))
        message = Message(self._queue, self._receiver, Entry(self._key, self._value, 0, scope.actor, 0, 0))
        written: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._hand(message, told, written)
        try:
            receipt = await scope.commit((*operations, *handed), (*conditions, *needed))
        except Conflict as conflict:
            written.cancel()
            message.committed()  # nothing stands there
            if conflict.condition != "empty" and conflict.key != self._lease.key:
                raise
            return None
        except BaseException:
            written.cancel()
            message.forsake()
            raise
        if written.done():  # whoever should have had it was cancelled
            message.forsake()
        else:
            written.set_result(receipt)
        return receipt


def handing(queue: Queue, receiver: Receiver, rest: str, value: bytes) -> Handing | None:
    """A message for this receiver, if somebody has room for it; `rest` is the last part of its key."""
    lease, hand = receiver.lease, receiver.hand
    return None if lease is None or hand is None else Handing(queue, receiver, lease, hand, rest, value)
