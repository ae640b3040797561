"""What a keeper holds, in numbers: counted every few seconds, so that whoever reads the metrics waits for nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.clock import Clock
from holdfast.codec import integer
from holdfast.engine import SCAN_MAX
from holdfast.errors import Error
from holdfast.layers.lines import LOCKS
from holdfast.layers.queue_entries import DEPTHS, STATES
from holdfast.layers.task_states import COUNTS, STATUSES, TASKS
from holdfast.layers.workflows.entries import STATUSES as EXECUTION_STATUSES
from holdfast.layers.workflows.entries import TALLIES
from holdfast.store import Store

COUNT_MS: Final = 10_000
QUEUES_MAX: Final = 100_000
"""Queues of one space whose numbers are added up; the messages of more are not told."""

log = logging.getLogger("holdfast.gauges")


class Gauges:
    """Bytes, locks, messages, tasks and executions of the whole store, as they were at the last count.

    Messages, tasks and executions are added up from the numbers that are kept with every change of them; nothing is counted one by one.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.state_bytes = 0
        self.locks_held = 0
        self.queue_depth = 0
        self.messages = dict.fromkeys(STATES, 0)
        """By where they are: ready, delayed, reserved, dead."""
        self.tasks: dict[str, int] = dict.fromkeys(STATUSES, 0)
        """By status; those that have ended as long as they are kept."""
        self.executions: dict[str, int] = dict.fromkeys(EXECUTION_STATUSES, 0)
        """By status: of workflows, in all spaces."""
        self._store = store
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def count(self) -> None:
        """Count now."""
        used = [(info.name, each) for info in await self._store.engine.spaces() for each in info.usage]
        self.state_bytes = sum(each.bytes for _, each in used)
        self.queue_depth = sum(each.keys for _, each in used if each.subspace == "queues")
        locked = {name for name, each in used if each.subspace == LOCKS.name and each.keys and name[0] != "_"}
        self.executions = await self._executions({name for name, each in used if each.subspace == TALLIES.name})
        lines = [await self._store.locks_of(name).list() for name in locked]
        self.locks_held = sum(len(state.holders) for states in lines for state in states)

        self.messages = await self._messages({name for name, each in used if each.subspace == DEPTHS.name})
        self.tasks = await self._tasks({name for name, each in used if each.subspace == TASKS.name})

    async def _messages(self, spaces: set[str]) -> dict[str, int]:
        found = dict.fromkeys(STATES, 0)
        for name in spaces:
            after, seen = None, 0
            while seen < QUEUES_MAX * len(STATES):
                page = await self._store.engine.scan(name, DEPTHS.root, after=after, limit=SCAN_MAX)
                for entry in page.entries:
                    state = entry.key.rpartition("/")[2]
                    if state in found:
                        found[state] += max(0, integer(entry.value) or 0)
                if not page.more:
                    break
                after, seen = page.entries[-1].key, seen + len(page.entries)
        return found

    async def _tasks(self, spaces: set[str]) -> dict[str, int]:
        found: dict[str, int] = dict.fromkeys(STATUSES, 0)
        for name in spaces:
            entries = await self._store.engine.get(name, [COUNTS + status for status in STATUSES])
            for status, entry in zip(STATUSES, entries, strict=True):
                found[status] += 0 if entry is None else max(0, integer(entry.value) or 0)
        return found

    async def _executions(self, spaces: set[str]) -> dict[str, int]:
        """From the counts that every change of a status maintains: a few entries per workflow."""
        found = dict.fromkeys(EXECUTION_STATUSES, 0)
        for name in sorted(spaces):
            page = await self._store.engine.scan(name, TALLIES.prefix("status"), limit=SCAN_MAX)
            for entry in page.entries:
                status = entry.key.rpartition("/")[2]
                if status in found:
                    found[status] += integer(entry.value) or 0
        return found

    async def _run(self) -> None:
        while True:
            try:
                await self.count()
            except Error as exc:
                log.warning("the store could not be counted: %s", exc)
            except Exception:
                log.exception("the store could not be counted")
            await self._clock.sleep_until(self._clock.now_ms() + COUNT_MS)
