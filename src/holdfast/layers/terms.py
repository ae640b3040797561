"""One term of an orchestrator: its lease, what it writes under it, and what it takes out of the outbox.

Everything is committed by the term's own scope, which needs the lease. What was published is noted, that is taken out of the outbox,
by the next commit of the term, whatever that is about; by one of its own after NOTE_S, if there is none; and when the term ends.

A busy orchestrator's decisions need no fsync of their own: one that comes less than BUSY_S after another waits up to PATIENCE_MS for a
commit to go with (`Batch.patience_ms`). What comes after a pause is committed at once.

How it fails. A note that is refused, because somebody else took the entry out or put another there, is given up, and the commit it
came with is tried without it. Where the store is away, what was published is noted later; when the term has ended by then, whoever
takes the entry over publishes it again, unless it is the same process, which remembers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from holdfast.engine import Condition, Delete, Operation, Receipt, VersionIs
from holdfast.errors import Conflict, Error, LeaseLost
from holdfast.layers.agenda import Agenda, ToPublish
from holdfast.layers.correlation_entries import OUTBOX
from holdfast.layers.leases import Lease, Leases

RETRY_MS: Final = 200
NOTE_S: Final = 0.05
"""How long the outbox may still show what was published, if no other commit takes it out."""
NOTES_MAX: Final = 32
"""Entries of the outbox that one commit takes out."""
PATIENCE_MS: Final = 15
BUSY_S: Final = 0.05

log = logging.getLogger("holdfast.orchestrator")


class Term:
    """One life of an orchestrator: from its lease to the end of it."""

    def __init__(self, id: str, lease: Lease, agenda: Agenda, leases: Leases, told: dict[str, None]) -> None:
        self.id = id
        self.lease = lease
        self.agenda = agenda
        self.scope = lease.guarding()
        self.news = asyncio.Event()
        self.sleeps_until: int | None = None
        """When it looks by itself; None: not before there is news."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.unnoted: list[ToPublish] = []
        """What was published, and is still in the outbox."""
        self.unnoted_since = 0.0
        """By the loop's time."""
        self.noting: asyncio.Task[None] | None = None
        self._decided_at = -BUSY_S
        """The last time, by the loop's."""
        self._leases = leases
        self._told = told
        lease.tell(self.news)

    @property
    def lost(self) -> bool:
        return self.lease.lost.is_set()

    def lose(self) -> None:
        """The store has refused something for want of the lease."""
        self._leases.lose(self.lease)

    def patience_ms(self) -> int:
        """How long the decision that is to be committed now may wait for company."""
        before, self._decided_at = self._decided_at, asyncio.get_running_loop().time()
        return PATIENCE_MS if self._decided_at - before < BUSY_S else 0

    async def commit(
        self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...] = (), *, patience_ms: int = 0
    ) -> Receipt:
        """A batch of this term, which also takes out of the outbox what was published meanwhile."""
        clock = self.scope.clock
        while True:
            noted = [self.unnoted.pop() for _ in range(min(len(self.unnoted), NOTES_MAX))]
            # First: one of them may make room for another decision of the same id.
            removed = tuple(Delete(OUTBOX + work.corr_id) for work in noted)
            as_written = (VersionIs(OUTBOX + work.corr_id, work.version) for work in noted)
            began = clock.now_ms()
            try:
                batch = self.scope.batch((*removed, *operations), (*conditions, *as_written))
                if patience_ms:
                    batch = msgspec.structs.replace(batch, patience_ms=patience_ms)
                receipt = await self.scope.sent(batch)
                self.scope.session.saw(receipt.version)
            except BaseException as exc:
                gone = [work for work in noted if isinstance(exc, Conflict) and exc.key == OUTBOX + work.corr_id]
                self.unnoted += [work for work in noted if work not in gone]
                for (
                    work
                ) in gone:  # somebody took it out, or put another there; or this was cancelled and done all the same
                    self.agenda.published(work)
                    if isinstance(exc, Conflict) and exc.actual is None:
                        self._forget(work)
                if not gone:
                    raise
            else:
                self.agenda.took(clock.now_ms() - began)
                for work in noted:
                    self.agenda.published(work, receipt.version)
                    self._forget(work)
                return receipt

    def _forget(self, work: ToPublish) -> None:
        """It is out of the outbox: nobody will be asked to publish it again."""
        if work.decision is not None:
            self._told.pop(work.decision.id, None)

    async def note_soon(self) -> None:
        """Take out of the outbox what no other commit has taken out by then."""
        loop = asyncio.get_running_loop()
        try:
            while self.unnoted and (left_s := self.unnoted_since + NOTE_S - loop.time()) > 0:  # noqa: ASYNC110 - for a time
                await asyncio.sleep(left_s)
            await self._note_all()
        finally:
            self.noting = None
            if self.agenda.is_outgrown:
                self.news.set()

    async def note_now(self) -> None:
        """Nobody else will."""
        if self.noting is not None:
            self.noting.cancel()
            await asyncio.wait([self.noting])
        await self._note_all()

    async def _note_all(self) -> None:
        while self.unnoted and not self.lost:
            try:
                await self.commit(())
            except LeaseLost:
                self.lose()
            except Error as exc:
                log.warning("what was published is noted later: %s", exc)
                now = self.scope.clock.now_ms()
                for work in self.unnoted:
                    self.agenda.release(work, now, now + RETRY_MS)
                self.unnoted.clear()
                self.news.set()
