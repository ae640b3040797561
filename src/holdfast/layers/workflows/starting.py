"""The commit that makes an execution: what it is, how it stands, and the message that lets a worker run it."""

from __future__ import annotations

from typing import Any

from holdfast.codec import encode
from holdfast.engine import Absent, Condition, Increment, Operation, Put
from holdfast.errors import InvalidInput
from holdfast.layers.queue_entries import priority_element
from holdfast.layers.queues import Queue, split
from holdfast.layers.workflows.definitions import Definition
from holdfast.layers.workflows.entries import (
    PENDING,
    Execution,
    Meta,
    Wait,
    check_execution,
    execution_key,
    live_key,
    meta_key,
    raw,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.limits import lining_up, taking


def meta_for(
    definition: Definition,
    input: Any,
    id: str,
    now: int,
    *,
    priority: int = 0,
    parent: str = "",
    parent_path: str = "",
    detached: bool = False,
) -> Meta:
    """What an execution is, checked."""
    priority_element(priority)
    if definition.state is not None and not isinstance(definition.state, type):
        raise InvalidInput(f"state of workflow {definition.name!r} is a type, not {definition.state!r:.60}")
    return Meta(
        check_execution(id),
        definition.name,
        definition.version,
        now,
        raw(input, f"the input of execution {id!r}"),
        definition.config,
        priority,
        None if definition.concurrency is None else definition.slot_key(input) or "-",
        parent,
        parent_path,
        detached,
    )


def starting(queue: Queue, meta: Meta, limit: int | None, *, in_line: bool = False) -> Parts:
    """Make it, and let it run: at once, or when it is its turn. Refused (`meta`) when there is one of this id."""
    waits: tuple[Wait, ...] = ()
    rests = ""
    conditions: list[Condition] = [Absent(meta_key(meta.id))]
    operations: list[Operation] = [Put(meta_key(meta.id), encode(meta))]
    if limit is not None and in_line:
        rests, (placing, needed) = lining_up(meta, limit, meta.created_at)
        waits = (Wait("slot", name=meta.slot or ""),)
    else:
        placing, needed = taking(meta, limit) if limit is not None else ([], [])
        put, absent = split(queue.putting({"execution": meta.id}, priority=meta.priority))
        placing, needed = [*placing, *put], [*needed, *absent]
    execution = Execution(meta.id, meta.name, PENDING, meta.created_at, waits=waits, rests=rests)
    operations += [
        Put(execution_key(meta.id), encode(execution), tag=tag_of(PENDING)),
        Put(live_key(meta.name, meta.id), b"null"),
        Increment(tally_key(meta.name, PENDING), 1),
        *placing,
    ]
    return operations, [*conditions, *needed]
