"""Trying again what failed: an execution that ended without a result goes on from a step.

The records from that step on are removed, and its state becomes what the steps before it had made: the log is folded without those
that are taken back, and says so itself. All of it is one commit, so it is refused where it would not fit into one.
"""

from __future__ import annotations

from collections.abc import Callable

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
    COMPLETED,
    PENDING,
    Execution,
    LogEvent,
    StepRecord,
    data_prefix,
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
from holdfast.layers.workflows.limits import slots_key, taking
from holdfast.layers.workflows.state import SET, View


async def retry_execution(scope: Scope, queue_of: Callable[[str], Queue], id: str, from_step: str | None) -> None:
    """Let it go on from a step, or from what failed. Conflict if it has not ended, or has a result and no step is named."""
    entry, described = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
    if entry is None or described is None:
        raise NotFound(f"there is no execution {id!r}; it was never started, or its record has expired")
    execution, meta = execution_of(entry), meta_of(described)
    if not execution.ended or (execution.status == COMPLETED and from_step is None):
        raise Conflict(
            f"execution {id!r} is {execution.status}; only what has failed can be tried again", key=entry.key
        )
    records = {
        each.key[len(steps_prefix(id)) :]: decode(each.value, StepRecord)
        for each in await _all(scope, steps_prefix(id))
    }
    dropped = _taken_back(records, from_step)
    events = await _all(scope, log_prefix(id))
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
        Push(log_prefix(id), encode(LogEvent(now, "retried", by=scope.actor, writes=dict.fromkeys(dropped)))),
    ]
    needed: list[Condition] = [VersionIs(entry.key, entry.version), *conditions]
    limit = meta.config.get("concurrency")
    if isinstance(limit, int):
        slot, free = taking(meta, limit)
        operations += slot
        needed += free
    operations += await _state_before(scope, id, events, dropped)
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


def _taken_back(records: dict[str, StepRecord], from_step: str | None) -> list[str]:
    """The paths that are done again, with all that is below them."""
    if from_step is None:
        roots = {path for path, record in records.items() if record.status in ("failed", "retrying")}
        return sorted(path for path in records if any(path == root or path.startswith(f"{root}/") for root in roots))
    path = from_step if "#" in from_step else f"{from_step}#0"
    if not any(each == path or each.startswith(f"{path}/") for each in records):
        known = ", ".join(sorted({each.partition("/")[0] for each in records if not each.startswith("~")})[:20])
        raise InvalidInput(f"there is no step {from_step!r} to go on from; recorded are {known}")
    position = records[path].position if path in records else None
    return sorted(
        each
        for each, record in records.items()
        if each == path
        or each.startswith((f"{path}/", "~when:"))
        or each == "~body"
        or (position is not None and "/" not in each and record.position > position)
        or (position is not None and "/" in each and _root_after(records, each, position))
    )


def _root_after(records: dict[str, StepRecord], path: str, position: int) -> bool:
    root = records.get(path.partition("/")[0])
    return root is not None and root.position > position


async def _state_before(scope: Scope, id: str, events: list[Entry], dropped: list[str]) -> list[Operation]:
    """What makes the state that of the steps that remain."""
    gone = set(dropped)
    told = [decode(event.value, LogEvent) for event in events]
    if not any(event.writes and event.path in gone for event in told):
        return []
    view, before = View(), View()
    for event in told:
        if event.event == "retried":
            continue
        for whose, writes in ((event.path, event.writes), ("", event.body_writes)):
            number = before.next()
            for key, write in writes.items():
                before.apply(key, write, number)
                if not (whose and whose in gone):
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
