"""Which documents have contributions, and in which mode these are made: one entry per document, written by the first of them.

Keys: `modes/documents/<name>`, value "merge" or "reject". Whoever contributes first creates it, before the contribution; it then stays
as it is until the document is deleted, also when all contributions were withdrawn. Behind a policy nobody changes it but
orchestrators and administrators.

How it works. A contribution is conditional on the mode it was made in (`condition`), so two writers that were opened with
different modes cannot both write, and nothing is read to find that out. Only the first one of a document finds the condition
refused because there is no mode yet: it writes one (`settle`) and tries again. The mode is not written in the batch of the
contribution, since a repeated request must be the same batch. A listing finds documents without a body here.

How it fails. Another mode is InvalidInput. What was contributed before there were modes has none, and gets the next one's.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from holdfast.codec import decode, encode
from holdfast.engine import Absent, Condition, Entry, Put, ValueIs
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import Subspace
from holdfast.layers.scope import Scope

MODES: Final = Subspace("modes")
MODES_OF_DOCUMENTS: Final = MODES.prefix("documents")
Mode: TypeAlias = Literal["merge", "reject"]


class ContributionMode:
    """The mode of one document, as one of its writers means it."""

    def __init__(self, scope: Scope, name: str, mode: Mode) -> None:
        if mode not in ("merge", "reject"):
            raise InvalidInput(f"mode must be 'merge' or 'reject', not {mode!r:.60}")
        self.key = MODES_OF_DOCUMENTS + name
        self._scope = scope
        self._name = name
        self._mode: Mode = mode
        self._value = encode(mode)
        self.condition: Condition = ValueIs(self.key, self._value)

    async def settle(self, conflict: Conflict) -> None:
        """Make what refused a contribution hold; InvalidInput when the document has another mode."""
        present = conflict.actual
        if present is None:
            try:
                await self._scope.commit((Put(self.key, self._value),), (Absent(self.key),))
                return
            except Conflict as lost:  # another was first
                if lost.key != self.key:
                    raise
                present = lost.actual
        self._refuse(present)

    async def check(self) -> None:
        """InvalidInput when the document has another mode."""
        [present] = await self._scope.engine.get(self._scope.space, [self.key])
        self._refuse(present)

    def _refuse(self, present: Entry | None) -> None:
        if present is not None and present.value != self._value:
            raise InvalidInput(
                f"contributions to {self._name!r} are made in mode {decode(present.value)!r:.60} since the first one, and this is "
                f"{self._mode!r}; open the document with mode={decode(present.value)!r:.60}, or delete it first"
            )
