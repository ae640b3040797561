"""Trying again what failed: an execution that ended without a result goes on from a step.

The records from that step on are removed, and its state becomes what the steps before it had made: the log is folded without those
that are taken back, and says so itself. Mostly that is one commit. What does not fit into one takes several: the first says in the
log what is taken back, and holds the execution, paused, so that nobody runs it; the last lets it go. Each needs it to stand as the first
left it. Whoever dies in between leaves it paused: `resume()`, or `retry()` again, goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.codec import decode, encode
from holdfast.engine import (
    OPERATIONS_MAX,
    SCAN_MAX,
    AtLeast,
    Condition,
    Delete,
    Entry,
    Increment,
    Operation,
    Push,
    Put,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    CANCEL,
    COMPLETED,
    PAUSE,
    PAUSED,
    PENDING,
    RESUME,
    Execution,
    LogEvent,
    StepRecord,
    Wait,
    data_prefix,
    ended_key,
    execution_key,
    execution_of,
    live_key,
    log_prefix,
    meta_key,
    meta_of,
    signals_prefix,
    steps_prefix,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.limits import slots_key, taking
from holdfast.layers.workflows.state import SET, View

AT_ONCE_MAX: Final = OPERATIONS_MAX - 16
"""Operations that take steps back in one commit; the rest is for the execution itself."""
BYTES_MAX: Final = 8 * 1024 * 1024


async def retry_execution(scope: Scope, queue_of: Callable[[str], Queue], id: str, from_step: str | None) -> None:
    """Let it go on from a step, or from what failed. Conflict if it has not ended, or has a result and no step is named."""
    entry, described = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
    if entry is None or described is None:
        raise NotFound(f"there is no execution {id!r}; it was never started, or its record has expired")
    execution, meta = execution_of(entry), meta_of(described)
    if is_rewinding(execution):
        await finish_rewinding(scope, queue_of, id)
        return
    if not execution.ended or (execution.status == COMPLETED and from_step is None):
        raise Conflict(
            f"execution {id!r} is {execution.status}; only what has failed can be tried again", key=entry.key
        )
    records = {
        each.key[len(steps_prefix(id)) :]: decode(each.value, StepRecord)
        for each in await _all(scope, steps_prefix(id))
    }
    events = [decode(each.value, LogEvent) for each in await _all(scope, log_prefix(id))]
    dropped = _taken_back(records, from_step, _order(events))
    again = await _again(scope, id, dropped)
    now = scope.clock.now_ms()
    waits = () if len(again) <= AT_ONCE_MAX else (Wait("rewind", path=from_step or ""),)
    to = Execution(id, meta.name, PAUSED if waits else PENDING, now, execution.started_at, waits=waits)
    operations: list[Operation] = [
        Put(execution_key(id), encode(to), tag=tag_of(to.status)),
        Put(live_key(meta.name, id), b"null"),
        Delete(ended_key(meta.name, execution.ended_at or 0, id)),
        Increment(tally_key(meta.name, execution.status), -1),
        Increment(tally_key(meta.name, to.status), 1),
        Push(log_prefix(id), encode(LogEvent(now, "retried", by=scope.actor, writes=dict.fromkeys(dropped)))),
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
    events = [decode(each.value, LogEvent) for each in await _all(scope, log_prefix(id))]
    dropped = list(next(event.writes for event in reversed(events) if event.event == "retried"))
    group: list[Operation] = []
    size = 0
    for op in await _again(scope, id, dropped):
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


async def _again(scope: Scope, id: str, dropped: list[str]) -> list[Operation]:
    """What takes these steps back: their records, their state, and what was asked of the worker before. Doing it twice does no harm."""
    letters = [each.key for name in (CANCEL, PAUSE, RESUME) for each in await _all(scope, signals_prefix(id, name))]
    events = [decode(each.value, LogEvent) for each in await _all(scope, log_prefix(id))]
    return [
        *(Delete(key) for key in letters),
        *(Delete(steps_prefix(id) + path) for path in dropped),
        *_state_before(id, events, dropped),
    ]


def _taken_back(records: dict[str, StepRecord], from_step: str | None, order: dict[str, int]) -> list[str]:
    """The paths that are done again, with all that is below them."""
    if from_step is None:
        roots = {
            path
            for path, record in records.items()
            if record.status in ("failed", "retrying") or (record.status == "waiting" and record.away is not None)
        }
        return sorted(path for path in records if any(path == root or path.startswith(f"{root}/") for root in roots))
    path = from_step if "#" in from_step else f"{from_step}#0"
    if not any(each == path or each.startswith(f"{path}/") for each in records):
        known = ", ".join(sorted({each.partition("/")[0] for each in records if not each.startswith("~")})[:20])
        raise InvalidInput(f"there is no step {from_step!r} to go on from; recorded are {known}")
    root = path.partition("/")[0]
    later = {each for each in {name.partition("/")[0] for name in records} if _is_after(records, order, each, root)}
    return sorted(
        each
        for each in records
        if each == path or each.startswith((f"{path}/", "~when:")) or each == "~body" or each.partition("/")[0] in later
    )


def _is_after(records: dict[str, StepRecord], order: dict[str, int], one: str, other: str) -> bool:
    """Whether one call of the trunk comes after another. A map or gather has no record of its own, so no position that is known: of
    those it is known when the first thing below them happened."""
    if one == other or one.startswith("~"):
        return False
    here, there = records.get(one), records.get(other)
    if here is not None and there is not None:
        return here.position > there.position
    return order.get(one, -1) > order.get(other, -1)


def _order(events: list[LogEvent]) -> dict[str, int]:
    """When the first thing happened below each call of the trunk, as a place in the log."""
    found: dict[str, int] = {}
    for number, event in enumerate(events):
        if event.path:
            found.setdefault(event.path.partition("/")[0], number)
    return found


def _state_before(id: str, events: list[LogEvent], dropped: list[str]) -> list[Operation]:
    """What makes the state that of the steps that remain."""
    gone = set(dropped)
    if not any(event.writes and event.path in gone for event in events if event.event != "retried"):
        return []
    told: list[tuple[str, dict[str, Any]]] = []
    for event in events:
        if event.event != "retried":
            told += [(event.path, event.writes), ("", event.body_writes)]
        elif set(event.writes) != gone:  # what was taken back before, and done again since, counts as it was done again
            told = [(path, writes) for path, writes in told if not path or path not in event.writes]
    view, before = View(), View()
    for path, writes in told:
        number = before.next()
        for key, write in writes.items():
            before.apply(key, write, number)
            if not path or path not in gone:
                view.apply(key, write, number)
    operations: list[Operation] = []
    for key in before.cells:
        cell, was = view.cell(key), before.cell(key)
        if cell is None:
            if was is not None:
                operations.append(Delete(data_prefix(id) + key))
            continue
        if was is not None and cell.kind == was.kind and cell.read() == was.read():
            continue
        if cell.kind == SET:
            operations.append(Put(data_prefix(id) + key, encode(cell.read())))
        else:
            operations += View().operations(id, {key: [cell.kind, cell.read()]})
    return operations


async def _all(scope: Scope, prefix: str) -> list[Entry]:
    found: list[Entry] = []
    while True:
        page = await scope.engine.scan(scope.space, prefix, after=found[-1].key if found else None, limit=SCAN_MAX)
        found += page.entries
        if not page.more:
            return found
