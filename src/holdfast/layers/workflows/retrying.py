"""Trying again what failed: an execution that ended without a result goes on from a step.

The records from that step on are removed, and its state becomes what the steps before it had made: the log is folded without those
that are taken back, and says so itself. All of it is one commit, so it is refused where it would not fit into one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from holdfast.codec import encode
from holdfast.engine import (
    OPERATIONS_MAX,
    AtLeast,
    Condition,
    Delete,
    Increment,
    Operation,
    Push,
    Put,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import unescape
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    CANCEL,
    CHILD,
    COMPLETED,
    PAUSE,
    PENDING,
    RESUME,
    Execution,
    LogEvent,
    ended_key,
    execution_key,
    live_key,
    log_prefix,
    mail_prefixes,
    steps_prefix,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.limits import slots_key, taking
from holdfast.layers.workflows.reading import every, log_of, records_of, standing_of
from holdfast.layers.workflows.rewinding import RETRIED, Cut, Fold, cut_before, failed_cut, with_children, writing
from holdfast.layers.workflows.state import Cell


async def retry_execution(scope: Scope, queue_of: Callable[[str], Queue], id: str, from_step: str | None) -> None:
    """Let it go on from a step, or from what failed. Conflict if it has not ended, or has a result and no step is named."""
    entry, execution, meta = await standing_of(scope, id)
    if not execution.ended or (execution.status == COMPLETED and from_step is None):
        raise Conflict(
            f"execution {id!r} is {execution.status}; only what has failed can be tried again", key=entry.key
        )
    records = await records_of(scope, id)
    events = [event for _, event in await log_of(scope, id)]
    steps = meta.config.get("steps", [])
    cut = failed_cut(records, events, steps) if from_step is None else cut_before(records, events, steps, from_step)
    cut = with_children(cut, records)
    dropped = sorted(cut.dropped)
    now = scope.clock.now_ms()
    again = Execution(id, meta.name, PENDING, now, execution.started_at)
    putting, conditions = split(queue_of(meta.name).putting({"execution": id}, priority=meta.priority))
    operations: list[Operation] = [
        Put(execution_key(id), encode(again), tag=tag_of(PENDING)),
        Put(live_key(meta.name, id), b"null"),
        Delete(ended_key(meta.name, execution.ended_at or 0, id)),
        Increment(tally_key(meta.name, execution.status), -1),
        Increment(tally_key(meta.name, PENDING), 1),
        *putting,
        *(Delete(steps_prefix(id) + path) for path in dropped),
        Push(log_prefix(id), encode(_told(now, scope.actor, cut))),
    ]
    needed: list[Condition] = [VersionIs(entry.key, entry.version), *conditions]
    limit = meta.config.get("concurrency")
    if isinstance(limit, int):
        slot, free = taking(meta, limit)
        operations += slot
        needed += free
    operations += _state_before(id, events, cut)
    operations += [Delete(key) async for key in _obsolete(scope, id, cut)]
    if len(operations) > OPERATIONS_MAX:
        raise InvalidInput(
            f"to go on from there, {len(dropped):,} steps of execution {id!r} would have to be taken back at once, with their "
            f"state; a commit has {OPERATIONS_MAX} operations. Name a later step, or start it anew"
        )
    try:
        await scope.commit(tuple(operations), tuple(needed))
    except Conflict as conflict:
        if conflict.key == slots_key(meta) and any(isinstance(each, AtLeast) for each in needed):
            raise Conflict(
                f"as many executions of {meta.name!r} as may run are running; try again later", key=conflict.key
            ) from conflict
        raise


async def _obsolete(scope: Scope, id: str, cut: Cut) -> AsyncIterator[str]:
    """What its worker was to do when it lived, which it would do again, and the ends of children that are taken back."""
    prefix, _ = mail_prefixes(id)
    async for entry in every(scope, prefix):
        name = unescape(entry.key[len(prefix) :].partition("/")[0])
        if name in (CANCEL, PAUSE, RESUME) or name.removeprefix(CHILD) in cut.dropped:
            yield entry.key


def _told(now: int, by: str, cut: Cut) -> LogEvent:
    """What the log says of it, so that whoever reads it later takes back the same."""
    return LogEvent(now, RETRIED, by=by, writes=dict.fromkeys(sorted(cut.dropped)), body_writes=cut.kept)


def _state_before(id: str, events: list[LogEvent], cut: Cut) -> list[Operation]:
    """What makes the state that of the steps that remain."""
    fold = Fold()
    for event in events:
        fold.add(event)
    was = fold.view
    fold.cut(cut)
    changed = [key for key in was.cells if not _same(was.cell(key), fold.view.cell(key))]
    return writing(id, fold.view, changed)


def _same(one: Cell | None, other: Cell | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.kind == other.kind and one.read() == other.read()
