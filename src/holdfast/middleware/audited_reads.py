"""Reads that leave a trace, for spaces that ask for it.

After a read has succeeded, a note of it is appended under `audit/notes/`, from where the sealer takes it into the
audit. The read is answered only when the note is as durable as the space: an audit that can miss reads is none. That
makes a read cost a commit; it is meant for spaces where that is the point. The store's own book-keeping is not noted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container
from typing import Final

from holdfast.codec import encode
from holdfast.engine import SYSTEM_ACTOR, Batch, ChangeSet, Engine, Entry, Page, Push, Receipt
from holdfast.errors import Conflict
from holdfast.keys import subspace_of
from holdfast.middleware.wrapper import Wrapper

NOTES: Final = "audit/notes/"
NOTE_TTL_MS: Final = 24 * 3_600_000
UNNOTED: Final = frozenset({"answers", "audit", "system"})
"""Subspaces of the store's own book-keeping: neither noted nor audited."""


class AuditedReads(Wrapper):
    """Notes every get, scan and watch on behalf of one actor, and what refusals and takes show; where only some spaces ask for it, `spaces` has them.

    The notes are written through `notes`, which the actor's own rules may not bind.
    """

    def __init__(
        self, inner: Engine, actor: str, notes: Engine | None = None, spaces: Container[str] | None = None
    ) -> None:
        super().__init__(inner)
        self._actor = actor
        self._notes = notes or inner
        self._spaces = spaces

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        entries = await self.inner.get(space, keys)
        await self._note(space, "get", [key for key in keys if subspace_of(key) not in UNNOTED])
        return entries

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        page = await self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        if prefix.split("/", 1)[0] not in UNNOTED:
            await self._note(space, "scan", [prefix])
        return page

    async def commit(self, space: str, batch: Batch) -> Receipt:
        """A refusal shows an entry, and a take gives some: that is reading too."""
        try:
            receipt = await self.inner.commit(space, batch)
        except Conflict as conflict:
            if conflict.actual is not None and subspace_of(conflict.actual.key) not in UNNOTED:
                await self._note(space, "refusal", [conflict.actual.key])
            raise
        taken = [entry.key for result in receipt.results if isinstance(result, list) for entry in result]
        await self._note(space, "take", taken)
        return receipt

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        """Noted once, when it begins."""
        noted = [prefix for prefix in prefixes or ("",) if prefix.split("/", 1)[0] not in UNNOTED]
        await self._note(space, "watch", noted)
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            yield commit

    async def _note(self, space: str, operation: str, keys: list[str]) -> None:
        if self._spaces is not None and space not in self._spaces:
            return
        for start in range(0, len(keys), 100):
            notes = [
                encode({"actor": self._actor, "operation": operation, "key": key, "outcome": "read"})
                for key in keys[start : start + 100]
            ]
            batch = Batch(SYSTEM_ACTOR, tuple(Push(NOTES, note, NOTE_TTL_MS) for note in notes))
            await self._notes.commit(space, batch)
