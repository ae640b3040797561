"""Forking: a new execution that has done what another one had done before a step, and goes on from there.

It takes over the records before that step, their part of the log and the state they made, and may have another input, and another state.
What was edited is an event of its log, so that a resumed fork sees the same. The one that it came from is left alone, whether it has
ended or not. A child that is still waited for is not taken over: the fork starts one of its own.

The journal is copied first, in as many commits as that takes, and the last one makes the execution: as long as that has not happened
there is none, and forking again under the same id begins anew. Large results are not copied: both refer to the same blob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.codec import encode
from holdfast.engine import Absent, Push, Put
from holdfast.errors import Conflict, InvalidInput
from holdfast.layers.blobs import Blobs
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.bulk import delete_all, write_all
from holdfast.layers.workflows.entries import (
    BEGUN,
    STATE,
    LogEvent,
    Meta,
    StepRecord,
    check_execution,
    data_prefix,
    items_prefix,
    log_prefix,
    meta_key,
    raw,
    state_record,
    steps_prefix,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.reading import journal_of, log_of, standing_of, told_in
from holdfast.layers.workflows.rewinding import (
    FORKED,
    Fold,
    Records,
    cut_before,
    over_migrations,
    path_of,
    places,
    with_children,
    writing,
)
from holdfast.layers.workflows.starting import start_execution
from holdfast.layers.workflows.state import DELETE, KEYS_MAX, SET, Write, check_key

UNCHANGED: Final = object()
"""The input stays as it was."""
READ_MAX: Final = 20
"""How often one that is running is read, until it has done nothing meanwhile."""


async def fork_execution(
    scope: Scope,
    queue: Queue,
    blobs: Blobs,
    source: str,
    id: str,
    from_step: str,
    *,
    input: Any = UNCHANGED,
    state: dict[str, Any] | None = None,
    without: Sequence[str] = (),
) -> None:
    """Make the execution `id`, which goes on from a step of another. Conflict when there is one of this id."""
    written = _edits(state or {}, without)
    _, _, meta = await standing_of(scope, source)
    records, events = await _of_one_moment(scope, source)
    steps = meta.config.get("steps", [])
    cut = with_children(cut_before(records, events, steps, from_step), records)
    cut = over_migrations(cut, records, events, steps)
    path, before = path_of(from_step), _before(records, events, steps, path_of(from_step))
    fold = Fold()
    for event in events:
        fold.add(event)
    fold.cut(cut)
    if fold.version:
        records[STATE] = state_record(fold.version)
    else:
        records.pop(STATE, None)
    now = scope.clock.now_ms()
    edited = LogEvent(now, FORKED, path, scope.actor, writes=written, branch=before)
    kept = [each for each in fold.events if each.path or each.writes or each.body_writes or each.version]
    fold.add(edited)
    told = told_in(kept)
    forked = _meta(meta, check_execution(id), path, now, input)
    absent = Absent(meta_key(id))
    parts: list[Parts] = [
        _record(blobs, id, each, record)
        for each, record in records.items()
        if each not in cut.dropped and each not in told and record.status != BEGUN
    ]
    parts += [([Put(f"{log_prefix(id)}{number:019d}", encode(each))], []) for number, each in enumerate(kept, 1)]
    parts += [(writing(id, fold.view, [key]), []) for key in fold.view.cells if fold.view.cell(key) is not None]
    taken = Conflict(f"there is an execution {id!r} already; a fork needs an id of its own", key=meta_key(id))
    try:
        await delete_all(scope, *_prefixes(id), absent=absent)
        await write_all(scope, parts, absent)
    except Conflict as conflict:
        raise (taken if conflict.key == absent.key else conflict) from conflict
    also: Parts = ([Push(log_prefix(id), encode(edited))], [])
    if await start_execution(scope, queue, forked, forked.config.get("concurrency"), also, begun=now) is None:
        raise taken


def _prefixes(id: str) -> tuple[str, ...]:
    return steps_prefix(id), log_prefix(id), data_prefix(id), items_prefix(id)


def _edits(state: dict[str, Any], without: Sequence[str]) -> dict[str, Write]:
    if len(state) + len(without) > KEYS_MAX:
        raise InvalidInput(f"a fork edits at most {KEYS_MAX} keys of the state")
    for key, value in state.items():
        raw(value, f"{check_key(key)!r} of the state")
    return {
        **{key: [SET, value] for key, value in state.items()},
        **{check_key(key): [DELETE, None] for key in without},
    }


async def _of_one_moment(scope: Scope, id: str) -> tuple[dict[str, StepRecord], list[LogEvent]]:
    """What an execution has done, although it may be running."""
    for _ in range(READ_MAX):
        records, events = await journal_of(scope, id)
        if len(await log_of(scope, id)) == len(events):
            return records, events
    raise Conflict(f"execution {id!r} does more while it is read, each of {READ_MAX} times; pause it, and fork it then")


def _before(records: Records, events: list[LogEvent], steps: list[str], path: str) -> str:
    """The last call of the same branch before this one: what the code does after it sees the edited state."""
    branch = path.rpartition("/")[0]
    if branch:
        return branch
    placed = places(records, events, steps)
    earlier = [each for each in placed if "/" not in each and placed[each] < placed.get(path, 0)]
    return max(earlier, key=lambda each: placed[each], default="")


def _meta(meta: Meta, id: str, path: str, now: int, input: Any) -> Meta:
    """What the fork is: the same, by itself, and from where it came."""
    given = meta.input if input is UNCHANGED else raw(input, f"the input of execution {id!r}")
    config = {**meta.config, "forked_from": meta.id, "forked_at": path}
    return msgspec.structs.replace(
        meta, id=id, created_at=now, input=given, config=config, parent="", parent_path="", detached=False
    )


def _record(blobs: Blobs, id: str, path: str, record: StepRecord) -> Parts:
    key = steps_prefix(id) + path
    if record.blob is None:
        return [Put(key, encode(record))], []
    part = blobs.attach(record.blob, key)
    return [Put(key, encode(record)), *part.operations], list(part.conditions)
