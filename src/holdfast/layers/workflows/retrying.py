"""Trying again what failed: an execution that ended without a result goes on from a step.

The records from that step on are removed, and its state becomes what the steps before it had made: the log is folded without those
that are taken back, and says so itself. Mostly that is one commit. What does not fit into one takes several: the first says in the
log what is taken back, and holds the execution, paused, so that nobody runs it; the last lets it go. Each needs it to stand as the first
left it. Whoever dies in between leaves it paused: `resume()`, or `retry()` again, goes on from there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from holdfast.codec import decode, encode
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
from holdfast.errors import Conflict
from holdfast.keys import unescape
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    BEGUN,
    CANCEL,
    CHILD,
    COMPLETED,
    PAUSE,
    PAUSED,
    PENDING,
    RESUME,
    RETRIED,
    STEP,
    Execution,
    LogEvent,
    StepRecord,
    Wait,
    ended_key,
    execution_key,
    execution_of,
    live_key,
    log_prefix,
    mail_prefixes,
    meta_key,
    meta_of,
    state_key,
    state_record,
    steps_prefix,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.limits import slots_key, taking
from holdfast.layers.workflows.reading import every, journal_of, log_of, standing_of
from holdfast.layers.workflows.rewinding import (
    Cut,
    Fold,
    cut_before,
    failed_cut,
    over_migrations,
    with_children,
    writing,
)
from holdfast.layers.workflows.state import Cell

AT_ONCE_MAX: Final = OPERATIONS_MAX - 16
"""Operations that take steps back in one commit; the rest is for the execution itself."""
BYTES_MAX: Final = 8 * 1024 * 1024


async def retry_execution(scope: Scope, queue_of: Callable[[str], Queue], id: str, from_step: str | None) -> None:
    """Let it go on from a step, or from what failed. Conflict if it has not ended, or has a result and no step is named."""
    entry, execution, meta = await standing_of(scope, id)
    if is_rewinding(execution):
        await finish_rewinding(scope, queue_of, id)
        return
    if not execution.ended or (execution.status == COMPLETED and from_step is None):
        raise Conflict(
            f"execution {id!r} is {execution.status}; only what has failed can be tried again", key=entry.key
        )
    records, events = await journal_of(scope, id)
    steps = meta.config.get("steps", [])
    if from_step is None:
        cut = failed_cut(records, events, steps, execution.error.step if execution.error is not None else "")
    else:
        cut = cut_before(records, events, steps, from_step)
    cut = over_migrations(with_children(cut, records), records, events, steps)
    again = await _again(scope, id, events, cut)
    now = scope.clock.now_ms()
    waits = () if len(again) <= AT_ONCE_MAX else (Wait("rewind", path=from_step or ""),)
    to = Execution(id, meta.name, PAUSED if waits else PENDING, now, execution.started_at, waits=waits)
    operations: list[Operation] = [
        Put(execution_key(id), encode(to), tag=tag_of(to.status)),
        Put(live_key(meta.name, id), b"null"),
        Delete(ended_key(meta.name, execution.ended_at or 0, id)),
        Increment(tally_key(meta.name, execution.status), -1),
        Increment(tally_key(meta.name, to.status), 1),
        Push(log_prefix(id), encode(_told(now, scope.actor, cut))),
    ]
    needed: list[Condition] = [VersionIs(entry.key, entry.version)]
    limit = meta.config.get("concurrency")
    if isinstance(limit, int):
        slot, free = taking(meta, limit)
        operations += slot
        needed += free
    if not waits:
        putting, conditions = split(queue_of(meta.name).putting({"execution": id}, priority=meta.priority))
        operations += [*again, *putting]
        needed += conditions
    try:
        await scope.commit(tuple(operations), tuple(needed))
    except Conflict as conflict:
        if conflict.key == slots_key(meta) and any(isinstance(each, AtLeast) for each in needed):
            raise Conflict(
                f"as many executions of {meta.name!r} as may run are running; try again later", key=conflict.key
            ) from conflict
        raise
    if waits:
        await finish_rewinding(scope, queue_of, id)


def is_rewinding(execution: Execution) -> bool:
    """Whether it is being taken back to a step, in several commits."""
    return execution.status == PAUSED and any(wait.kind == "rewind" for wait in execution.waits)


async def finish_rewinding(scope: Scope, queue_of: Callable[[str], Queue], id: str) -> None:
    """Take back what the log says is to be taken back, as far as that was not done, and let it run."""
    entry, described = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
    if entry is None or described is None or not is_rewinding(execution_of(entry)):
        return  # somebody else has
    execution, meta = execution_of(entry), meta_of(described)
    stands = VersionIs(entry.key, entry.version)
    events = [event for _, event in await log_of(scope, id)]
    last = max(number for number, event in enumerate(events) if event.event == RETRIED)
    cut = Cut(frozenset(events[last].writes), events[last].body_writes)
    group: list[Operation] = []
    size = 0
    for op in await _again(scope, id, events[:last], cut):
        size += len(op.value) if isinstance(op, Put | Push) else 0
        if group and (len(group) == AT_ONCE_MAX or size > BYTES_MAX):
            await scope.commit(tuple(group), (stands,))
            group, size = [], 0
        group.append(op)
    to = Execution(id, meta.name, PENDING, scope.clock.now_ms(), execution.started_at)
    putting, conditions = split(queue_of(meta.name).putting({"execution": id}, priority=meta.priority))
    group += [
        Put(entry.key, encode(to), tag=tag_of(PENDING)),
        Increment(tally_key(meta.name, PAUSED), -1),
        Increment(tally_key(meta.name, PENDING), 1),
        *putting,
    ]
    await scope.commit(tuple(group), (stands, *conditions))


async def _again(scope: Scope, id: str, events: list[LogEvent], cut: Cut) -> list[Operation]:
    """What takes these steps back: their records, their state, and what was asked of the worker before. Doing it twice does no harm.
    What was under way has its time anew.

    `events` are those before it was decided to take them back.
    """
    steps = steps_prefix(id)
    return [
        *[Delete(key) async for key in _obsolete(scope, id, cut)],
        *[
            Delete(each.key)
            async for each in every(scope, steps)
            if each.key[len(steps) :] in cut.dropped or decode(each.value, StepRecord).status == BEGUN
        ],
        *_state_before(id, events, cut),
    ]


async def _obsolete(scope: Scope, id: str, cut: Cut) -> AsyncIterator[str]:
    """What its worker was to do when it lived, which it would do again, and how what is taken back ended elsewhere."""
    prefix, _ = mail_prefixes(id)
    async for entry in every(scope, prefix):
        name = unescape(entry.key[len(prefix) :].partition("/")[0])
        if name in (CANCEL, PAUSE, RESUME) or name.removeprefix(CHILD).removeprefix(STEP) in cut.dropped:
            yield entry.key


def _told(now: int, by: str, cut: Cut) -> LogEvent:
    """What the log says of it, so that whoever reads it later takes back the same."""
    return LogEvent(now, RETRIED, by=by, writes=dict.fromkeys(sorted(cut.dropped)), body_writes=cut.kept)


def _state_before(id: str, events: list[LogEvent], cut: Cut) -> list[Operation]:
    """What makes the state that of the steps that remain."""
    fold = Fold()
    for event in events:
        fold.add(event)
    was, version = fold.view, fold.version
    fold.cut(cut)
    of_version: list[Operation] = []
    if fold.version != version:
        record = encode(state_record(fold.version))
        of_version = [Put(state_key(id), record) if fold.version else Delete(state_key(id))]
    changed = [key for key in was.cells if not _same(was.cell(key), fold.view.cell(key))]
    return [*of_version, *writing(id, fold.view, changed)]


def _same(one: Cell | None, other: Cell | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.kind == other.kind and one.read() == other.read()
