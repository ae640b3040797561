"""The commit that makes an execution: what it is, how it stands, and the message that lets a worker run it."""

from __future__ import annotations

from typing import Any

from holdfast.codec import encode
from holdfast.engine import Absent, Condition, Increment, Operation, Put, Receipt
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import check_name
from holdfast.layers.queue_entries import priority_element
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.definitions import Definition, check_label
from holdfast.layers.workflows.entries import (
    PENDING,
    RUNNING,
    TALLIES,
    Execution,
    Meta,
    Wait,
    check_execution,
    execution_key,
    live_key,
    meta_key,
    meta_of,
    raw,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.known import Known
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


def meta_by_name(
    name: str, known: Known | None, input: Any, id: str, now: int, *, priority: int = 0, key: str | None = None
) -> Meta:
    """The same where the code is not at hand: by what its workers said of it, if there were any."""
    priority_element(priority)
    check_label(name, "workflow's name")
    limited = known is not None and known.concurrency is not None
    if known is not None and known.keyed and key is None:
        raise InvalidInput(
            f"workflow {name!r} is limited by a key that its code makes of the input; name the key, or start it where the code is"
        )
    if key is not None and (known is None or not known.keyed):
        raise InvalidInput(f"workflow {name!r} is not known to have a key")
    return Meta(
        check_execution(id),
        name,
        "" if known is None else known.version,
        now,
        raw(input, f"the input of execution {id!r}"),
        {} if known is None else known.config,
        priority,
        (check_name(key, "workflow's key") if key else "-") if limited else None,
    )


async def start_execution(
    scope: Scope,
    queue: Queue,
    meta: Meta,
    limit: int | None,
    also: Parts | None = None,
    *,
    begun: int | None = None,
    hands_over: bool = False,
) -> Receipt | None:
    """Commit it, with whatever else is to be done in the same moment. None when there is one of this id: nothing was changed.

    If it `hands_over`, a worker of this process that has room has it in the same commit, and is told what it is.
    """
    in_line = False
    more, needed = also or ([], [])
    while True:
        try:
            if (
                hands_over
                and also is None
                and begun is None
                and not in_line
                and (receipt := await _handed_over(scope, queue, meta, limit))
            ):
                return receipt
            operations, conditions = starting(queue, meta, limit, in_line=in_line, begun=begun)
            return await scope.commit((*operations, *more), (*conditions, *needed))
        except Conflict as conflict:
            if conflict.key == meta_key(meta.id) and conflict.actual is not None:
                before = meta_of(conflict.actual)
                if before.name != meta.name:
                    raise InvalidInput(f"execution {meta.id!r} is one of workflow {before.name!r}") from conflict
                return None
            if conflict.key is None or not conflict.key.startswith(TALLIES.prefix("slots")):
                raise
            in_line = not in_line  # all slots are taken, or one has come free


async def _handed_over(scope: Scope, queue: Queue, meta: Meta, limit: int | None) -> Receipt | None:
    """Start it in the hands of a worker of this process, so that it runs from the beginning; None where none has room."""
    found = queue.handing({"execution": meta.id}, priority=meta.priority)
    if found is None:
        return None
    id, handing = found
    placing, needed = taking(meta, limit) if limit is not None else ([], [])
    execution = Execution(meta.id, meta.name, RUNNING, meta.created_at, meta.created_at, message=id)
    operations = _making(meta, encode(meta), encode(execution), RUNNING)
    conditions = Absent(meta_key(meta.id)), *needed
    return await handing.commit(scope, (*operations, *placing), conditions, (meta, execution))


def _making(meta: Meta, of_meta: bytes, of_execution: bytes, status: str) -> list[Operation]:
    return [
        Put(meta_key(meta.id), of_meta),
        Put(execution_key(meta.id), of_execution, tag=tag_of(status)),
        Put(live_key(meta.name, meta.id), b"null"),
        Increment(tally_key(meta.name, status), 1),
    ]


def starting(queue: Queue, meta: Meta, limit: int | None, *, in_line: bool = False, begun: int | None = None) -> Parts:
    """Make it, and let it run: at once, or when it is its turn. Refused (`meta`) when there is one of this id.

    One that was `begun` already has a journal.
    """
    waits: tuple[Wait, ...] = ()
    rests = ""
    conditions: list[Condition] = [Absent(meta_key(meta.id))]
    if limit is not None and in_line:
        rests, (placing, needed) = lining_up(meta, limit, meta.created_at)
        waits = (Wait("slot", name=meta.slot or ""),)
    else:
        placing, needed = taking(meta, limit) if limit is not None else ([], [])
        put, absent = split(queue.putting({"execution": meta.id}, priority=meta.priority))
        placing, needed = [*placing, *put], [*needed, *absent]
    execution = Execution(meta.id, meta.name, PENDING, meta.created_at, begun, waits=waits, rests=rests)
    return [*_making(meta, encode(meta), encode(execution), PENDING), *placing], [*conditions, *needed]
