"""Firing schedules: what a worker does about those of the workflows that it serves.

It reads them once and then follows the feed, from before it read; it sleeps until the first is due, or the feed tells of a change. When one
is due, the execution and the schedule's next time are one commit, on condition that the schedule is as it was read. All workers
try at the same moment, one commits, and the others are refused and read what it is now. So nobody leads, and nothing is polled.

How it fails. Where the store cannot be reached, all is looked at again RETRY_MS later. A schedule that cannot be fired (its input is refused, its zone is gone) is logged, left as it is, and tried again when it
changes or AGAIN_MS later; the others are not kept from theirs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import msgspec

from holdfast.clock import sleep_or
from holdfast.codec import decode, encode
from holdfast.engine import Condition, Operation, Put, VersionIs, cursor_at
from holdfast.errors import Compacted, Conflict, Error, OutcomeUnknown, Unavailable
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.definitions import Definition
from holdfast.layers.workflows.reading import every
from holdfast.layers.workflows.schedules import (
    SCHEDULES,
    Schedule,
    due_instants,
    execution_id,
    next_after,
    schedule_key,
)
from holdfast.layers.workflows.starting import meta_for, start_execution

AGAIN_MS: Final = 60_000
RETRY_MS: Final = 200

log = logging.getLogger("holdfast.workflows")


class Serving(Protocol):
    """What firing needs of its worker."""

    scope: Scope
    workflows: dict[str, Definition]

    def queue_of(self, name: str) -> Queue: ...


class Firing:
    """The schedules of one worker."""

    def __init__(self, worker: Serving) -> None:
        self._worker = worker
        self._scope = worker.scope
        self._known: dict[str, tuple[Schedule, int]] = {}
        """By id: the schedule, and its version."""
        self._put_off: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Fire what is due, until it is cancelled."""
        scope, clock = self._scope, self._scope.clock
        following: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    if following is None or following.done():
                        cursor = await self._cursor()
                        await self._load()
                        following = asyncio.get_running_loop().create_task(self._follow(cursor))
                    self._changed.clear()
                    for schedule, version in list(self._known.values()):
                        if self._due_at(schedule) <= clock.now_ms():
                            await self._fire(schedule, version)
                    at = min((self._due_at(schedule) for schedule, _ in self._known.values()), default=None)
                    await sleep_or(clock, at, self._changed)
                except Error as exc:
                    log.warning("the schedules of space %s are looked at again: %s", scope.space, exc)
                    await clock.sleep_until(clock.now_ms() + RETRY_MS)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])

    def _due_at(self, schedule: Schedule) -> int:
        return max(schedule.next_at, self._put_off.get(schedule.id, 0))

    # --- what there is ---

    async def _cursor(self) -> str:
        found = await self._scope.engine.spaces(self._scope.space)
        return cursor_at(found[0].revision if found else 0)

    async def _load(self) -> None:
        self._known.clear()
        async for entry in every(self._scope, SCHEDULES.root):
            self._learn(entry.key, entry.value, entry.version)

    def _learn(self, key: str, value: bytes | None, version: int) -> None:
        """How a schedule is now; one that is paused, or another's to fire, is not ours to look at."""
        id = key[len(SCHEDULES.root) :]
        self._known.pop(id, None)
        self._put_off.pop(id, None)
        if value is None:
            return
        try:
            schedule = decode(value, Schedule)
        except Error as exc:
            log.warning("schedule %s cannot be read: %s", id, exc)
            return
        if not schedule.paused and schedule.id == id and schedule.workflow in self._worker.workflows:
            self._known[id] = schedule, version

    async def _follow(self, cursor: str) -> None:
        """Hear of changes; whatever goes wrong, all is read anew."""
        scope = self._scope
        try:
            async for commit in scope.engine.watch(scope.space, SCHEDULES.root, cursor=cursor):
                for change in commit.changes:
                    if change.exists and change.value is None:
                        return  # it is too large for the feed: read it
                    if self._version_of(change.key) < commit.version:
                        self._learn(change.key, change.value if change.exists else None, commit.version)
                self._changed.set()
        except Compacted:
            log.debug("the feed of %s does not reach back; its schedules are read anew", scope.space)
        except Error as exc:
            log.debug("the feed of %s is followed anew: %s", scope.space, exc)
            await scope.clock.sleep_until(scope.clock.now_ms() + RETRY_MS)
        finally:
            self._changed.set()

    def _version_of(self, key: str) -> int:
        known = self._known.get(key[len(SCHEDULES.root) :])
        return 0 if known is None else known[1]

    # --- firing ---

    async def _fire(self, schedule: Schedule, version: int) -> None:
        """Start what is due, one commit each, in order."""
        scope, id = self._scope, schedule.id
        try:
            instants, missed = due_instants(schedule, scope.clock.now_ms())
            if not instants:
                await self._pass_over(schedule, version, missed)
            for due in instants:
                schedule, version = await self._start(schedule, version, due, missed)
                missed = 0
        except Conflict:  # another worker was quicker, or somebody changed it
            await self._read(id)
        except (Unavailable, OutcomeUnknown):  # the store's fault, not the schedule's: all is tried again, soon
            raise
        except Exception as exc:  # a workflow's own code makes its key
            log.warning("schedule %s could not be fired, and is tried again: %r", id, exc)
            self._put_off[id] = scope.clock.now_ms() + AGAIN_MS

    async def _start(self, schedule: Schedule, version: int, due: int, missed: int) -> tuple[Schedule, int]:
        scope, definition = self._scope, self._worker.workflows[schedule.workflow]
        id = execution_id(schedule, due)
        now = scope.clock.now_ms()
        meta = meta_for(definition, decode(bytes(schedule.input)), id, now, priority=schedule.priority)
        after = msgspec.structs.replace(
            schedule,
            next_at=next_after(schedule, due),
            last_at=due,
            last_id=id,
            started=schedule.started + 1,
            missed=schedule.missed + missed,
        )
        operations, conditions = self._moving(after, version)
        queue = self._worker.queue_of(definition.name)
        receipt = await start_execution(scope, queue, meta, definition.concurrency, (operations, conditions))
        if receipt is None:  # it was started before, by a schedule of the same id
            receipt = await scope.commit(tuple(operations), tuple(conditions))
        self._known[schedule.id] = after, receipt.version
        return after, receipt.version

    async def _pass_over(self, schedule: Schedule, version: int, missed: int) -> None:
        due = next_after(schedule, self._scope.clock.now_ms())
        after = msgspec.structs.replace(schedule, next_at=due, missed=schedule.missed + missed)
        operations, conditions = self._moving(after, version)
        receipt = await self._scope.commit(tuple(operations), tuple(conditions))
        self._known[schedule.id] = after, receipt.version

    def _moving(self, after: Schedule, version: int) -> tuple[list[Operation], list[Condition]]:
        key = schedule_key(after.id)
        return [Put(key, encode(after))], [VersionIs(key, version)]

    async def _read(self, id: str) -> None:
        [entry] = await self._scope.engine.get(self._scope.space, [schedule_key(id)])
        if entry is None:
            self._learn(schedule_key(id), None, 0)
        else:
            self._learn(entry.key, entry.value, entry.version)
