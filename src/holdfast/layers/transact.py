"""Functions that read, compute and write, all or nothing: the only retry loop in Holdfast.

A `Transaction` remembers the version of everything it read and buffers what it writes; at the end both become one
batch: "if everything I read is still as I read it, write this". When it is not, the batch is refused, nothing has
changed, and the function runs again on fresh reads, after a short random pause that grows with each attempt.

Increments and writes of keys that were not read carry no condition, so they never make a transaction conflict. There is
no protection against phantoms: a transaction reads keys, not ranges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from holdfast.codec import integer
from holdfast.engine import (
    Absent,
    AtLeast,
    Condition,
    Delete,
    Entry,
    Increment,
    Operation,
    Present,
    Put,
    Receipt,
    ValueIs,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import shown
from holdfast.layers.scope import Scope

ATTEMPTS_MAX: Final = 100
PAUSE_S_MAX: Final = 0.1
PAUSE_S_FIRST: Final = 0.001

_CALLED: Final[dict[type, str]] = {AtLeast: "at_least", Present: "present", ValueIs: "value"}
"""What a refusal calls the conditions that no read makes."""

T = TypeVar("T")


class Transaction:
    """Reads remembered, writes buffered. Keys are engine keys; capabilities put their own names in front."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.operations: list[Operation] = []
        self.conditions: list[Condition] = []
        self.receipt: Receipt | None = None
        """Of the commit, if there was something to commit."""
        self.request_id: str | None = None
        """Of the commit, as audit and feed tell it; a fresh one if there is none."""
        self._read: dict[str, Entry | None] = {}
        self._written: dict[str, bytes | None] = {}
        self._added: dict[str, int] = {}
        self._required: set[tuple[str, str]] = set()
        self._over = False

    async def read(self, *keys: str) -> list[Entry | None]:
        """The entries as they were before this transaction; the commit needs them unchanged."""
        missing = [key for key in keys if key not in self._read]
        if missing:
            for key, entry in zip(missing, await self.scope.engine.get(self.scope.space, missing), strict=True):
                self._read[key] = entry
                self.conditions.append(Absent(key) if entry is None else VersionIs(key, entry.version))
        return [self._read[key] for key in keys]

    async def value(self, key: str) -> bytes | None:
        """What this transaction sees under the key: its own writes over what it read."""
        if key in self._written:
            base = self._written[key]
        else:
            [entry] = await self.read(key)
            base = None if entry is None else entry.value
        added = self._added.get(key)
        if added is None:
            return base
        number = 0 if base is None else integer(base)
        if number is None:
            raise InvalidInput(f"{shown(key)} is incremented, but it holds no 64-bit integer")
        return b"%d" % (number + added)

    def changes(self, key: str) -> bool:
        """Whether it writes this key itself."""
        return key in self._written or key in self._added

    def put(self, op: Put) -> None:
        self.check_open()
        self.operations.append(op)
        self._written[op.key] = op.value
        self._added.pop(op.key, None)

    def delete(self, key: str) -> None:
        self.check_open()
        self.operations.append(Delete(key))
        self._written[key] = None
        self._added.pop(key, None)

    def increment(self, op: Increment) -> None:
        self.check_open()
        self.operations.append(op)
        self._added[op.key] = self._added.get(op.key, 0) + op.delta

    def require(self, *conditions: Condition) -> None:
        """Further conditions; one that fails ends the transaction, also where its key was read."""
        self.check_open()
        self.conditions.extend(conditions)
        self._required.update((each.key, _CALLED[type(each)]) for each in conditions if type(each) in _CALLED)  # type: ignore[union-attr]

    def may_pass(self, conflict: Conflict) -> bool:
        """Whether a refusal is because something changed that was read, so that another attempt may go well."""
        return conflict.key in self._read and (conflict.key, conflict.condition) not in self._required

    def check_open(self) -> None:
        if self._over:
            raise InvalidInput(
                "this transaction is over, and what is written to it now would be lost; write before its function returns"
            )

    async def commit(self) -> None:
        self._over = True
        required = len(self.conditions) > len(self._read)
        if self.operations or required or len(self._read) > 1:  # a single read is a snapshot already
            self.receipt = await self.scope.commit(tuple(self.operations), tuple(self.conditions), self.request_id)


async def transact(
    begin: Callable[[], Transaction], work: Callable[[Transaction], Awaitable[T]], attempts: int = ATTEMPTS_MAX
) -> T:
    """Run the work in a transaction until it commits; Conflict when every attempt met a change."""
    if type(attempts) is not int or attempts < 1:
        raise InvalidInput(f"attempts must be a whole number, at least 1, not {attempts!r:.60}")
    pause = PAUSE_S_FIRST
    while True:
        attempts -= 1
        transaction = begin()
        answer = await work(transaction)
        try:
            await transaction.commit()
        except Conflict as conflict:
            if attempts <= 0 or not transaction.may_pass(conflict):
                raise
            import random  # only who meets another needs it

            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311 - spreads contenders, guards nothing
            pause = min(pause * 2, PAUSE_S_MAX)
        else:
            return answer
