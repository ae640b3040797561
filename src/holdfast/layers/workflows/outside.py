"""Cancelling, pausing and resuming an execution from outside.

What a worker has is the worker's to do: it is sent a letter. One that nobody has, because it has not begun, sleeps, waits for something, is
paused or stands in line, needs no worker. It is moved here, by one commit, on condition that it stands as it was read and that its
message still lies where it was left; so it is done at once, also when no worker knows the workflow.

The message of one that has not begun is not looked for: whoever takes it sees that it is not needed. A worker that took it a moment ago, and
has written nothing yet, is refused by the store when it tries to.

What is to be cancelled with it, its children and the tasks it waits for, comes first, and before that the letter that asks for its
own end: should whoever cancels die on the way, the next worker that has it goes on with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Condition, Delete, Entry, Increment, Operation, Present, Push, Put, VersionIs
from holdfast.errors import Conflict, NotFound, Unavailable
from holdfast.layers.queue_entries import QUEUES, depth_key, rest_of
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.archiving import ending
from holdfast.layers.workflows.children import outcome_of, stop_task, telling
from holdfast.layers.workflows.entries import (
    CANCEL,
    CANCELLED,
    PAUSE,
    PAUSED,
    PENDING,
    RUNNING,
    Execution,
    LogEvent,
    Meta,
    StepRecord,
    Wait,
    ended_key,
    execution_key,
    execution_of,
    live_key,
    log_prefix,
    meta_key,
    meta_of,
    steps_prefix,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.limits import LINE, leaving
from holdfast.layers.workflows.mail import calling_off, sending, waking
from holdfast.layers.workflows.retrying import finish_rewinding, is_rewinding
from holdfast.layers.workflows.sending import send

TRIES_MAX: Final = 1_000
"""How often it is tried again because the execution, its parent or its line changed in the same moment."""


class Outside:
    """Who controls executions without running them."""

    def __init__(self, scope: Scope, queue_of: Callable[[str], Queue], task_of: Callable[[str], TaskHandle]) -> None:
        self._scope = scope
        self._queue_of = queue_of
        self._task_of = task_of

    async def control(self, id: str, what: str) -> None:
        """Cancel, pause or resume it. NotFound when there is none; Conflict when it has ended."""
        scope, warned = self._scope, False
        for _ in range(TRIES_MAX):
            entry, described = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
            if entry is None or described is None:
                raise NotFound(f"there is no execution {id!r}; it was never started, or its record has expired")
            execution, meta = execution_of(entry), meta_of(described)
            if execution.ended:
                if warned:
                    return  # a worker was faster
                raise Conflict(
                    f"execution {id!r} is {execution.status}, and takes nothing more",
                    key=entry.key,
                    condition="status",
                    actual=entry,
                )
            if is_rewinding(execution) and what != CANCEL:
                if what == PAUSE:
                    return
                await finish_rewinding(scope, self._queue_of, id)
                return
            free = await self._letting_go(execution)
            if free is None:
                if warned:
                    return  # whoever has it has read the letter, or is going to
                parts = sending(self._queue_of(execution.name), entry, execution, what, self._by())
            elif what == CANCEL:
                records = await self._records(id)
                others = [each for each in records if each.status == "waiting" and each.child]
                if others and not warned:
                    await send(scope, self._queue_of, id, CANCEL, self._by())
                    warned = True
                    await self._cancel(others)
                    continue
                parts = await self._cancelling(entry, execution, meta, records, free)
            elif what == PAUSE:
                if execution.status == PAUSED:
                    return
                parts = self._pausing(entry, execution, free)
            elif execution.status != PAUSED:
                return  # it goes on as it is
            else:
                parts = await self._resuming(entry, execution, free)
            try:
                await scope.commit(tuple(parts[0]), tuple(dict.fromkeys(parts[1])))
                return
            except Conflict:
                continue
        raise Unavailable(
            f"execution {id!r} changed each of {TRIES_MAX:,} times that something was to be done about it"
        )

    def _by(self) -> bytes:
        return encode({"by": self._scope.actor})

    async def _letting_go(self, execution: Execution) -> Parts | None:
        """What removes the message that it was put aside with; None when somebody has it."""
        if execution.status == PENDING and not execution.waits:
            return [], []
        if not execution.waits and execution.status != PAUSED:
            return None
        if not execution.rests.startswith(QUEUES.prefix("delayed")):
            return [], []
        queue = QUEUES.split(execution.rests, 3)[1]
        ready = QUEUES.prefix("ready", queue) + rest_of(execution.rests)
        found = await self._scope.engine.get(self._scope.space, [execution.rests, ready])
        for entry, state in zip(found, ("delayed", "ready"), strict=True):
            if entry is not None:
                return [Delete(entry.key), Increment(depth_key(queue, state), -1)], [Present(entry.key)]
        return None

    async def _records(self, id: str) -> list[StepRecord]:
        scope, prefix, found = self._scope, steps_prefix(id), list[StepRecord]()
        after: str | None = None
        while True:
            page = await scope.engine.scan(scope.space, prefix, after=after, limit=SCAN_MAX)
            found += [decode(entry.value, StepRecord) for entry in page.entries]
            if not page.more:
                return found
            after = page.entries[-1].key

    async def _cancel(self, records: list[StepRecord]) -> None:
        """Children and tasks; those that have ended need nothing."""
        for record in records:
            if record.kind != "child":
                await stop_task(self._task_of(record.child))
                continue
            try:
                await self.control(record.child, CANCEL)
            except (NotFound, Conflict):
                continue

    # --- the commits ---

    async def _cancelling(
        self, entry: Entry, was: Execution, meta: Meta, records: list[StepRecord], free: Parts
    ) -> Parts:
        now = self._scope.clock.now_ms()
        ttl_ms, archiving = ending(self._scope, self._queue_of(was.name), meta, CANCELLED)
        to = Execution(was.id, was.name, CANCELLED, now, was.started_at or now, now)
        told = await telling(self._scope, self._queue_of, meta, outcome_of(to))
        slot = await leaving(self._scope, self._queue_of(was.name), meta, was.rests)
        operations, conditions = self._moving(entry, was, to, "cancelled", ttl_ms)
        operations += [Delete(live_key(to.name, to.id)), Put(ended_key(to.name, now, to.id), encode(CANCELLED), ttl_ms)]
        for more, needed in (free, told, slot, calling_off(to.id, records), archiving):
            operations += more
            conditions += needed
        return operations, conditions

    def _pausing(self, entry: Entry, was: Execution, free: Parts) -> Parts:
        in_line = was.rests if was.rests.startswith(LINE) else ""
        to = Execution(
            was.id,
            was.name,
            PAUSED,
            self._scope.clock.now_ms(),
            was.started_at,
            rests=in_line,
            waits=was.waits if in_line else (),
        )
        operations, conditions = self._moving(entry, was, to, "paused")
        return [*operations, *free[0]], [*conditions, *free[1]]

    async def _resuming(self, entry: Entry, was: Execution, free: Parts) -> Parts:
        """It may run again: what it waited for it finds out by itself."""
        status = PENDING if was.started_at is None else RUNNING
        to = msgspec.structs.replace(was, status=status, updated_at=self._scope.clock.now_ms(), error=None, message="")
        if was.rests.startswith(LINE):
            [place] = await self._scope.engine.get(self._scope.space, [was.rests])
            if place is not None:  # it is not its turn
                operations, conditions = self._moving(entry, was, to, "resumed")
                return operations, [*conditions, Present(was.rests)]
        else:
            to = msgspec.structs.replace(to, rests="")
        to = msgspec.structs.replace(to, waits=(Wait("resume"),))
        operations, conditions = self._moving(entry, was, to, "resumed")
        woken, needed = waking(self._queue_of(was.name), to)
        return [*operations, *woken, *free[0]], [*conditions, *needed, *free[1]]

    def _moving(self, entry: Entry, was: Execution, to: Execution, event: str, ttl_ms: int | None = None) -> Parts:
        operations: list[Operation] = [
            Put(entry.key, encode(to), ttl_ms, tag_of(to.status)),
            Increment(tally_key(to.name, was.status), -1),
            Increment(tally_key(to.name, to.status), 1),
            Push(log_prefix(to.id), encode(LogEvent(to.updated_at, event, by=self._scope.actor))),
        ]
        conditions: list[Condition] = [VersionIs(entry.key, entry.version)]
        return operations, conditions
