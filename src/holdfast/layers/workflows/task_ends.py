"""Telling executions that the tasks they wait for have ended.

Every worker follows the states of tasks. When one has ended that is the work of a step, which `journal/errands/<tid>` says, whoever
sees it first sends the execution its letter and removes that entry, in one commit; the others find nothing to do. A worker that begins, or
lost its place in the feed, looks at all errands there are: an end that nobody saw is found then. So it does not matter which
manager ran the task, how it ended, and who was there to see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from holdfast.codec import decode, encode
from holdfast.engine import Delete, cursor_at
from holdfast.errors import Compacted, Conflict, Error
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.task_states import ENDED, STATES, readable_state, state_key, status_in
from holdfast.layers.transact import Transaction, transact
from holdfast.layers.workflows.entries import (
    ERRANDS,
    STEP,
    Errand,
    Told,
    errand_key,
    execution_key,
    execution_of,
)
from holdfast.layers.workflows.mail import sending

PAGE: Final = 500
RETRY_MS: Final = 200

log = logging.getLogger("holdfast.workflows")


class Ends:
    """Who looks out for ends of tasks. A part of a worker."""

    def __init__(self, scope: Scope, queue_of: Callable[[str], Queue]) -> None:
        self._scope = scope
        self._queue_of = queue_of

    async def follow(self) -> None:
        """Tell of every end, for ever."""
        scope, cursor = self._scope, None
        while True:
            try:
                if cursor is None:
                    found = await scope.engine.spaces(scope.space)
                    cursor = cursor_at(found[0].revision if found else 0)
                    await self._look()
                async for commit in scope.engine.watch(scope.space, STATES, cursor=cursor):
                    tids = [
                        change.key[len(STATES) :] for change in commit.changes if _is_over(change.exists, change.tag)
                    ]
                    if tids:
                        await self._tell(tids)
                    cursor = commit.cursor
            except Error as exc:
                log.debug("ends of tasks in %s are followed anew: %s", scope.space, exc)
                if isinstance(exc, Compacted):
                    cursor = None
                await scope.clock.sleep_until(scope.clock.now_ms() + RETRY_MS)

    async def _look(self) -> None:
        """At all errands: those whose task has ended, or is gone."""
        scope, after = self._scope, None
        while True:
            page = await scope.engine.scan(scope.space, ERRANDS, after=after, limit=PAGE)
            tids = [entry.key[len(ERRANDS) :] for entry in page.entries]
            states = await scope.engine.get(scope.space, [state_key(tid) for tid in tids]) if tids else []
            over = []
            for tid, entry in zip(tids, states, strict=True):
                state = readable_state(entry)
                if state is None or state.ended:
                    over.append(tid)
            await self._tell(over)
            if not page.more:
                return
            after = page.entries[-1].key

    async def _tell(self, tids: list[str]) -> None:
        if not tids:
            return
        errands = await self._scope.engine.get(self._scope.space, [errand_key(tid) for tid in tids])
        for tid, entry in zip(tids, errands, strict=True):
            if entry is not None:
                await self._send(tid, decode(entry.value, Errand))

    async def _send(self, tid: str, errand: Errand) -> None:
        async def work(transaction: Transaction) -> None:
            there, entry = await transaction.read(errand_key(tid), execution_key(errand.execution))
            if there is None:
                return  # somebody else has told
            transaction.operations.append(Delete(errand_key(tid)))
            if entry is None or (execution := execution_of(entry)).ended:
                return
            operations, conditions = sending(
                self._queue_of(execution.name), entry, execution, STEP + errand.path, encode(Told(tid))
            )
            transaction.operations += operations
            transaction.conditions += [each for each in conditions if each not in transaction.conditions]

        try:
            await transact(lambda: Transaction(self._scope), work)
        except Conflict as conflict:
            log.warning("execution %s is told of the end of task %s later: %s", errand.execution, tid, conflict)


def _is_over(exists: bool, tag: str) -> bool:
    try:
        return exists and status_in(tag) in ENDED
    except Error:
        return False  # no library wrote it
