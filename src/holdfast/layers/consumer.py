"""A durable consumer of a space's feed: where it stands is an entry, and moves in the same batch as the effect.

The entry holds `{"cursor": …}` and whatever else the consumer keeps with it. Every step is conditional on the entry being
as it was read, so of two processes that do the same work one is refused and has changed nothing: no lease is needed for
correctness. Which of them should try at all is the caretaker's business.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec import decode, encode
from holdfast.engine import SYSTEM_ACTOR as ACTOR
from holdfast.engine import Absent, Batch, Condition, Engine, Operation, Put, VersionIs, cursor_at
from holdfast.errors import Damaged


class Consumer:
    """The position of one consumer in one space's feed."""

    def __init__(self, engine: Engine, space: str, key: str) -> None:
        self._engine = engine
        self._space = space
        self._key = key
        self._condition: Condition = Absent(key)
        self.state: dict[str, Any] = {}
        self.version = 0
        """The version of the entry, which is that of the last step."""

    async def load(self) -> str:
        """Read where it stands; the cursor of the very beginning if it never moved."""
        [entry] = await self._engine.get(self._space, [self._key])
        if entry is None:
            self._condition, self.state, self.version = Absent(self._key), {}, 0
        else:
            self._condition, self.version = VersionIs(self._key, entry.version), entry.version
            self.state = decode(entry.value)
            if not isinstance(self.state, dict):
                raise Damaged(f"{self._key!r} does not say where its reader stands any more: somebody changed it")
        return str(self.state.get("cursor", cursor_at(0)))

    async def advance(self, cursor: str, *operations: Operation, **state: Any) -> None:
        """Commit the operations and the new position together; Conflict when another process was faster."""
        self.state = {**self.state, **state, "cursor": cursor}
        move = Put(self._key, encode(self.state))
        receipt = await self._engine.commit(self._space, Batch(ACTOR, (*operations, move), (self._condition,)))
        self._condition, self.version = VersionIs(self._key, receipt.version), receipt.version
