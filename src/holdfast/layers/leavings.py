"""What dead consumers have left: whose it was, and what becomes of it.

Messages that a consumer had begun when its lease ended stand under `reserved/<q>/<lease>/`. They are moved under one's own lease, on
condition that the other has ended, and fail: one attempt more, with the reason, and then what `on_death` says. The dead one's
acknowledgement, should it come back to life, is refused, since the message is not where it was; if nobody was there to take it, it
is acknowledged all the same.

Of those of a consumer that takes some ahead, `reserved/<q>/<lease>~/`, nobody knows whether they had begun: to write that down for each
would cost a commit, and to take the first ones to another place than the others a tenth of the speed. They go back to the line without an attempt more, with a tag, SUSPECT, that says so. A message with a tag, also one that
failed before, is written down when it begins: the receiver moves it from the one place to the other before anybody gets it. So
nobody's death counts against a message that was not begun, however many took it ahead and died, and it does not become a dead
letter by that; one that does kill its consumers has one death more before it does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.engine import Absent, Batch, Entry, Present, Take
from holdfast.errors import Conflict
from holdfast.layers.queue_entries import AHEAD, CONSUMERS, NO_LEASE, RESERVED, SUSPECT
from holdfast.layers.scope import Scope

RECLAIMED_MAX: Final = 64
"""Messages of a dead consumer that one commit moves."""
DIED: Final = "its consumer died"

Settle = Callable[[Entry, str], Awaitable[None]]
"""What to do with a message; the text is why it failed, or the tag with which it goes back."""


class Leavings:
    """Looks for them in one queue, on behalf of one who takes messages."""

    def __init__(self, scope: Scope, name: str, abandoned: Settle, unbegun: Settle) -> None:
        self._scope = scope
        self._name = name
        self._abandoned = abandoned
        self._unbegun = unbegun

    async def search(self, mine: str, live: set[str]) -> None:
        """Find what dead consumers have left: one look per lease that has something. `mine` is one's own lease."""
        prefix = RESERVED.prefix(self._name)
        after = f"{prefix}{NO_LEASE}0"  # dead letters are no business of this
        while True:
            page = await self._scope.engine.scan(self._scope.space, prefix, after=after, limit=1)
            if not page.entries:
                return
            found = page.entries[0].key[len(prefix) :].partition("/")[0]
            after = f"{prefix}{found}0"
            owner = found.removesuffix(AHEAD)
            if owner not in live and owner != mine:
                await self.reclaim(mine, owner, is_ahead=found != owner)

    async def reclaim(self, mine: str, dead: str, *, is_ahead: bool = False) -> None:
        """Take what a dead consumer had begun, or had taken ahead, unless it lives."""
        place = AHEAD if is_ahead else ""
        take = Take(RESERVED.prefix(self._name, dead + place), RESERVED.prefix(self._name, mine + place), RECLAIMED_MAX)
        gone = Absent(CONSUMERS.key(self._name, dead))
        batch = Batch(self._scope.actor, (take,), (Present(CONSUMERS.key(self._name, mine)), gone))
        while True:
            try:
                receipt = await self._scope.engine.commit(self._scope.space, batch)
            except Conflict as conflict:
                if conflict.key != gone.key:
                    raise
                return  # it lives
            entries = receipt.results[0]
            assert isinstance(entries, list)  # noqa: S101 - what a Take gives
            for entry in entries:
                if is_ahead:
                    await self._unbegun(entry, entry.tag or SUSPECT)
                else:
                    await self._abandoned(entry, DIED)
            if len(entries) < RECLAIMED_MAX:
                return
