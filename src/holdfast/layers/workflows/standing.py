"""How an execution stands, and the parts of the commits that move it: to running, aside, to its end.

Whoever has its message moves it, on condition that nobody else has meanwhile: every move needs the record at the version that is known.
The counts by status move in the same commit, and so does the message.
"""

from __future__ import annotations

import asyncio

from holdfast.codec import encode
from holdfast.engine import Condition, Delete, Increment, Operation, Present, Put, Receipt, VersionIs
from holdfast.layers.blobs import Part
from holdfast.layers.messages import Message
from holdfast.layers.queue_entries import QUEUES, depth_key
from holdfast.layers.queues import split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    PENDING,
    RUNNING,
    Execution,
    Fault,
    StepRecord,
    Wait,
    ended_key,
    execution_key,
    live_key,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.journal import Journal, Parts
from holdfast.layers.workflows.limits import LINE


class Standing:
    """The record of one execution, in the hands of the worker that has its message."""

    def __init__(
        self,
        scope: Scope,
        message: Message,
        execution: Execution,
        version: int,
        written: asyncio.Future[Receipt] | None = None,
    ) -> None:
        self.now = execution
        """As it is stored."""
        self._scope = scope
        self._message = message
        self._version = version
        self._written = written
        """What tells that it is stored, and its version, if that is not known yet."""
        self._next: Execution | None = None

    @property
    def runs(self) -> bool:
        """Whether it is written down that it runs, here."""
        return self.now.status == RUNNING and self.now.message == self._message.id and not self.now.waits

    async def written(self) -> None:
        """Return when it is stored. Cancelled when it is not going to be."""
        if self._written is not None:
            self._version = (await self._written).version

    async def was_refused(self) -> bool:
        """Whether it was not stored after all, when that is known."""
        if self._written is None:
            return False
        await asyncio.wait([self._written])
        return self._written.cancelled()

    def opening(self) -> Parts:
        """It runs: what the first commit of a run says, if that was not known."""
        if self.runs:
            self._next = None
            return [], []
        was, now = self.now, self._scope.clock.now_ms()
        place = was.rests if was.rests.startswith(LINE) else ""  # whether it still stands there, its end will look
        self._next = Execution(
            was.id, was.name, RUNNING, now, was.started_at or now, message=self._message.id, rests=place
        )
        return self._moving(self._next)

    def opened(self, receipt: Receipt) -> None:
        """What `opening` gave was committed."""
        if self._next is not None:
            self.now, self._version = self._next, receipt.version

    def _moving(self, to: Execution, ttl_ms: int | None = None) -> Parts:
        """From how it stands to how it is going to, if nobody else has moved it."""
        was = self.now
        operations: list[Operation] = [Put(execution_key(to.id), encode(to), ttl_ms, tag_of(to.status))]
        if was.status != to.status:
            operations += [Increment(tally_key(to.name, was.status), -1), Increment(tally_key(to.name, to.status), 1)]
        return operations, [VersionIs(execution_key(to.id), self._version)]

    def put_aside(self, status: str, waits: tuple[Wait, ...], due: int | None, fault: Fault | None) -> Parts:
        """Let go of the message until it is due; for good if it never is."""
        was, now = self.now, self._scope.clock.now_ms()
        operations, conditions = split(self._message.acking() if due is None else self._message.delaying(due))
        to = Execution(
            was.id,
            was.name,
            status,
            now,
            was.started_at if status == PENDING else was.started_at or now,
            error=fault,
            message="" if due is None else self._message.id,
            rests=next((op.key for op in operations if isinstance(op, Put)), ""),
            waits=waits,
        )
        moving, needed = self._moving(to)
        return [*operations, *moving], [*conditions, *needed]

    def ended(self, journal: Journal, to: Execution, kept: Part, ttl_ms: int | None, *others: Parts) -> Parts:
        """Its end: the record for as long as it is kept, the last event, the end of its message, and what others are told."""
        operations, conditions = self._moving(to, ttl_ms)
        acking, needed = split(self._message.acking())
        if to.blob is not None:
            operations.append(journal.record("~result", StepRecord("completed", kind="result", blob=to.blob)))
        operations += [
            Delete(live_key(to.name, to.id)),
            Put(ended_key(to.name, to.ended_at or 0, to.id), encode(to.status), ttl_ms),
            journal.event(to.status, error=to.error),
            *kept.operations,
            *acking,
        ]
        conditions += [*kept.conditions, *needed]
        for more, needs in others:
            operations += more
            conditions += needs
        return operations, conditions


def taken_over(execution: Execution) -> Parts:
    """What ends the message that an execution was put aside with, on condition that nobody has it."""
    if not execution.rests.startswith(QUEUES.prefix("delayed")):
        return [], []
    queue = QUEUES.split(execution.rests, 3)[1]
    operations: list[Operation] = [Delete(execution.rests), Increment(depth_key(queue, "delayed"), -1)]
    conditions: list[Condition] = [Present(execution.rests)]
    return operations, conditions
