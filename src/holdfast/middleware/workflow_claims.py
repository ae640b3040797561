"""What must hold for a batch to do with workflows only what its sender may: the claims of `verbs.py` for `workflows/` and `tallies/`.

Workers are orchestrators, and write everything. An agent does two things, and each is recognised in the batch as a whole:

    start     what it is, how it stands, its place among those that live, its count; and either the message that lets a worker run it,
              with a slot if there is a limit, or a place in line for one. All new, and all about the same execution
    signal    what is sent, and the count of what was sent

Counts are added to by what happens and by nothing else. So nobody takes slots without an execution that is going to run, and that
gives its slot back when it ends; nobody gives back what was not taken; and nobody stands in line for an execution that is none.

For the same reason agents do not take messages out of the queues of workflows: they put them there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from holdfast.codec import decode
from holdfast.engine import Absent, Batch, Condition, Delete, Increment, Operation, Push, Put, Take
from holdfast.errors import Error
from holdfast.keys import Subspace, escape
from holdfast.middleware.messages import Misplaced

_WORKFLOWS: Final = Subspace("workflows")
_TALLIES: Final = Subspace("tallies")
_META: Final = "workflows/meta/"
_EXECUTIONS: Final = "workflows/executions/"
_LINE: Final = "workflows/line/"
_INBOX: Final = "tallies/inbox/"
_PENDING: Final = ":workflow_execution:pending"
_STANDING: Final = frozenset({"id", "name", "status", "updated_at", "waits", "rests"})
"""What may be said of one that has not begun."""
_QUEUES: Final = (f"queues/ready/{escape('workflows.')}", f"queues/delayed/{escape('workflows.')}")


class Start(NamedTuple):
    """An execution that a batch makes."""

    id: str
    name: str
    slot: str | None


def workflow_claims(op: Operation, batch: Batch) -> list[Condition]:
    """What one operation of an agent on `workflows/` adds to its batch."""
    key = op.prefix if isinstance(op, Push) else op.key  # type: ignore[union-attr]
    starts = _starts(batch)
    if isinstance(op, Put) and op.ttl_ms is None and any(key in _keys(start, batch) for start in starts):
        for start in starts:
            _check_whole(start, batch)
        return [Absent(key)]
    raise Misplaced(key, "agents start executions, each in one batch, and workers write the rest")


def tally_claims(op: Operation, batch: Batch) -> list[Condition]:
    """What one operation of an agent on `tallies/` adds to its batch."""
    key = op.prefix if isinstance(op, Push) else op.key  # type: ignore[union-attr]
    if isinstance(op, Increment) and op.ttl_ms is None:
        added = sum(each.delta for each in batch.operations if isinstance(each, Increment) and each.key == key)
        if added == _happens(key, batch):
            return []
    raise Misplaced(key, "it is counted by what happens to executions")


def check_line(op: Operation) -> None:
    """Refuse an agent that takes the messages of workflows, or removes its own."""
    place = op.source if isinstance(op, Take) else op.key if isinstance(op, Delete) else ""
    if place.startswith(_QUEUES) and not (isinstance(op, Take) and op.target.startswith(_QUEUES)):
        raise Misplaced(place, "the messages of workflows are taken by their workers, which are orchestrators")


def _happens(key: str, batch: Batch) -> int | None:
    """What a batch adds to a count by what it does; None when nothing does."""
    if key.startswith(_INBOX):
        prefix = f"signals/{escape(key[len(_INBOX) :])}/"
        sent = sum(1 for each in batch.operations if isinstance(each, Push) and each.prefix.startswith(prefix))
        return sent or None
    starts = _starts(batch)
    begun = sum(1 for start in starts if key == _TALLIES.key("status", start.name, "pending"))
    taken = sum(1 for start in starts if key == _slots(start) and not _places(start, batch))
    return begun or -taken or None


def _slots(start: Start) -> str:
    return "" if start.slot is None else _TALLIES.key("slots", start.name, start.slot or "-")


def _starts(batch: Batch) -> list[Start]:
    found = []
    for op in batch.operations:
        if isinstance(op, Put) and op.key.startswith(_META):
            told, id = _read(op.value), op.key[len(_META) :]
            name, slot = told.get("name"), told.get("slot")
            if told.get("id") == id and isinstance(name, str) and name and (slot is None or isinstance(slot, str)):
                found.append(Start(id, name, slot))
    return found


def _keys(start: Start, batch: Batch) -> set[str]:
    """Where a start writes in `workflows/`."""
    return {
        _META + start.id,
        _EXECUTIONS + start.id,
        _WORKFLOWS.key("live", start.name, start.id),
        *_places(start, batch),
    }


def _places(start: Start, batch: Batch) -> list[str]:
    """Its places in line."""
    prefix = _WORKFLOWS.prefix("line", start.name, start.slot or "-")
    return [
        op.key
        for op in batch.operations
        if isinstance(op, Put) and op.key.startswith(prefix) and _read(op.value).get("id") == start.id
    ]


def _messages(start: Start, batch: Batch) -> int:
    prefix = Subspace("queues").prefix("ready", f"workflows.{start.name}")
    return sum(
        1
        for op in batch.operations
        if isinstance(op, Put | Push)
        and (op.prefix if isinstance(op, Push) else op.key).startswith(prefix)
        and _read(op.value) == {"execution": start.id}
    )


def _check_whole(start: Start, batch: Batch) -> None:
    """A start is whole: with a message or a place, never both, a slot where there is a limit, and its count."""
    places, messages = _places(start, batch), _messages(start, batch)
    standing = next((op for op in batch.operations if isinstance(op, Put) and op.key == _EXECUTIONS + start.id), None)
    told = {} if standing is None else _read(standing.value)
    added = {op.key for op in batch.operations if isinstance(op, Increment)}
    live = _WORKFLOWS.key("live", start.name, start.id)
    if (
        standing is None
        or not any(isinstance(op, Put) and op.key == live for op in batch.operations)
        or standing.tag != _PENDING
        or not told.keys() <= _STANDING
        or (told.get("id"), told.get("name"), told.get("status")) != (start.id, start.name, "pending")
        or told.get("rests", "") != (places[0] if places else "")
        or bool(told.get("waits")) != bool(places)
        or len(places) + messages != 1
        or (bool(places) and start.slot is None)
        or _TALLIES.key("status", start.name, "pending") not in added
        or (start.slot is not None and not places and _slots(start) not in added)
    ):
        raise Misplaced(
            _META + start.id,
            "an execution is started whole: how it stands, its count, and a message or a place in line, in one batch",
        )


def _read(value: bytes) -> dict[str, Any]:
    try:
        told: Any = decode(value)
    except Error:
        return {}
    return told if isinstance(told, dict) else {}
