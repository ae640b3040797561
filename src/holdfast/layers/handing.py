"""Messages that do not stand in line: who puts one hands it over to somebody of the same process who has room for it.

The message is put under the receiver's lease by the commit that makes it, as if it had been put and taken in the same moment. That is
fair only where nobody stands in line, and right only while the lease lives: both are conditions of the commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engine import Condition, Empty, Entry, Increment, Operation, Present, Put, Receipt
from holdfast.errors import Conflict
from holdfast.layers.leases import Lease
from holdfast.layers.queue_entries import depth_key, ready_prefix
from holdfast.layers.scope import Scope

if TYPE_CHECKING:
    from holdfast.layers.receiving import Receiver


class Handing:
    """One such message, before it is there."""

    __slots__ = ("_lease", "_receiver", "_value", "key")

    def __init__(self, receiver: Receiver, lease: Lease, key: str, value: bytes) -> None:
        self.key = key
        """Where it is going to stand. It is new: ids of one process differ, and so do their leases."""
        self._receiver = receiver
        self._lease = lease
        self._value = value

    async def commit(
        self, scope: Scope, operations: tuple[Operation, ...], conditions: tuple[Condition, ...]
    ) -> Receipt | None:
        """Do it, with what belongs to it; None, and nothing is written, where others stand in line or the lease has ended."""
        receiver = self._receiver
        handed = Put(self.key, self._value), Increment(depth_key(receiver.name, "reserved"), 1)
        needed = Present(self._lease.key), Empty(ready_prefix(receiver.name))
        receiver.promised.add(self.key)
        try:
            receipt = await scope.commit((*operations, *handed), (*conditions, *needed))
        except Conflict as conflict:
            if conflict.condition != "empty" and conflict.key != self._lease.key:
                raise
            return None
        except BaseException:
            receiver.doubt()
            raise
        finally:
            receiver.promised.discard(self.key)
        entry = Entry(self.key, self._value, receipt.version, scope.actor, receipt.at, receipt.at)
        receiver.arrive(self._lease, entry)
        return receipt


def handing(receiver: Receiver, rest: str, value: bytes) -> Handing | None:
    """A message for this receiver, if there is room; `rest` is the last part of its key."""
    lease = receiver.lease
    return Handing(receiver, lease, receiver.place(lease) + rest, value) if lease and receiver.room > 0 else None
