"""What must hold for a batch to do with tasks only what its sender may: the claims of `verbs.py` for `tasks/` and inboxes.

Managers are orchestrators, and write states, logs, outputs, indexes and counts. An agent does three things with tasks, and each is
recognised in the batch as a whole:

    submit    the spec, a state tagged created, its event, its place among those that wait, its count: all new, for one tid
    cancel    a state tagged cancelled in place of one that is still its own, which a task's is until a manager takes it
    control   a command appended for a task whose spec it owns; a spec is written once, so that never changes

Whatever else an agent writes here is refused: a state with another tag, an event of another kind, a count that does not go with
what the batch does. What a value says does not matter, because readers believe the tag.

The message in a task's inbox is moved by Put into the hands of a manager, `reserved/T<tid>.inbox/<manager>/…`, on condition that this
manager's entry in the registry is there and the sender's own, and taken out of the hands of another only when that one's entry is gone.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.engine import Absent, Batch, Condition, Delete, Increment, Mine, Operation, Present, Push, Put
from holdfast.middleware.messages import Misplaced

_TID: Final = "([0-9]{19})"
_STATE: Final = re.compile(f"tasks/states/{_TID}")
_WAITING: Final = re.compile(f"tasks/waiting/{_TID}")
_FINISHED: Final = re.compile(f"tasks/finished/[0-9]{{13}}/{_TID}")
_LOG: Final = re.compile(f"tasks/log/{_TID}/")
_CTRL: Final = re.compile(f"tasks/ctrl_in/{_TID}/")
_SPEC: Final = re.compile(f"specs/{_TID}")
_MANAGER: Final = re.compile(f"tasks/managers/{_TID}")
_PIPELINE: Final = re.compile(r"tasks/pipelines(?:_open)?/.+", re.S)
_HANDS: Final = re.compile(f"reserved/T{_TID}\\.inbox/{_TID}/.+")

CREATED: Final = ":task:created"
CANCELLED: Final = ":task:cancelled"
STARTED: Final = ":pipeline:running"


def task_claims(op: Operation, batch: Batch, *, orchestrator: bool) -> list[Condition]:
    """What one operation on tasks adds to its batch."""
    key = op.prefix if isinstance(op, Push) else op.key  # type: ignore[union-attr]
    if orchestrator:
        return [Mine(key)] if _MANAGER.fullmatch(key) is not None else []
    if isinstance(op, Push):
        return _appended(op, batch)
    if isinstance(op, Increment):
        return _counted(op, batch)
    if isinstance(op, Put):
        return _written(op, batch)
    if isinstance(op, Delete) and (match := _WAITING.fullmatch(key)) is not None and match[1] in _cancelled(batch):
        return [Mine(key)]
    raise _refused(key)


def _written(op: Put, batch: Batch) -> list[Condition]:
    if op.ttl_ms is not None and op.tag != CANCELLED:
        raise _refused(op.key)
    if (match := _STATE.fullmatch(op.key)) is not None:
        if op.tag in (CREATED, CANCELLED):
            _check_whole(op.key, match[1], op.tag, batch)
        if op.tag == CREATED and match[1] in _submitted(batch):
            return [Absent(op.key)]
        if op.tag == CANCELLED:
            return [Present(op.key), Mine(op.key)]
    elif (match := _WAITING.fullmatch(op.key)) is not None:
        if op.tag == CREATED and match[1] in _submitted(batch):
            return [Absent(op.key)]
    elif (match := _FINISHED.fullmatch(op.key)) is not None:
        if op.tag == CANCELLED and match[1] in _cancelled(batch):
            return [Absent(op.key)]
    elif _PIPELINE.fullmatch(op.key) is not None and op.tag == STARTED:
        return [Absent(op.key)]
    raise _refused(op.key)


def _appended(op: Push, batch: Batch) -> list[Condition]:
    if (match := _CTRL.fullmatch(op.prefix)) is not None:
        spec = f"specs/{match[1]}"
        return [Present(spec), Mine(spec)]
    match = _LOG.fullmatch(op.prefix)
    if match is not None and op.ttl_ms is None:
        tids = _submitted(batch) if op.tag == CREATED else _cancelled(batch) if op.tag == CANCELLED else ()
        if match[1] in tids:
            return []
    raise _refused(op.prefix)


def _counted(op: Increment, batch: Batch) -> list[Condition]:
    """What a batch adds to a count is what it does."""
    cancelled = len(_cancelled(batch))
    created = sum(
        1 for each in batch.operations if isinstance(each, Put) and each.tag == CREATED and _STATE.fullmatch(each.key)
    )
    right = {"tasks/counts/created": created - cancelled, "tasks/counts/cancelled": cancelled}
    added = sum(each.delta for each in batch.operations if isinstance(each, Increment) and each.key == op.key)
    if op.key not in right or added != right[op.key] or op.ttl_ms is not None:
        raise Misplaced(op.key, "it is counted by what happens to tasks")
    return []


def _check_whole(key: str, tid: str, tag: str, batch: Batch) -> None:
    """A change of a task is whole: with its event, its place in the index, and its count."""
    counts = {"tasks/counts/created"} if tag == CREATED else {"tasks/counts/created", "tasks/counts/cancelled"}
    index, ops = _WAITING if tag == CREATED else _FINISHED, batch.operations
    if (
        not any(isinstance(op, Push) and op.prefix == f"tasks/log/{tid}/" and op.tag == tag for op in ops)
        or not any(isinstance(op, Put) and (match := index.fullmatch(op.key)) and match[1] == tid for op in ops)
        or not counts <= {op.key for op in ops if isinstance(op, Increment)}
        or (tag == CANCELLED and Delete(f"tasks/waiting/{tid}") not in ops)
    ):
        raise Misplaced(key, "a task changes with its event, its place in the index and its count, in one batch")


def _submitted(batch: Batch) -> set[str]:
    """The tids whose specs the batch writes."""
    return {match[1] for op in batch.operations if isinstance(op, Put) and (match := _SPEC.fullmatch(op.key))}


def _cancelled(batch: Batch) -> set[str]:
    """The tids that the batch cancels."""
    return {
        match[1]
        for op in batch.operations
        if isinstance(op, Put) and op.tag == CANCELLED and (match := _STATE.fullmatch(op.key))
    }


def _refused(key: str) -> Misplaced:
    return Misplaced(key, "agents submit tasks, cancel and control their own, and managers write the rest")


def inbox_claims(op: Operation, batch: Batch, *, orchestrator: bool) -> list[Condition] | None:
    """For the message of a task in a manager's hands; None when it is something else, with rules of its own."""
    if not isinstance(op, Put | Delete) or (match := _HANDS.fullmatch(op.key)) is None:
        return None
    manager = f"tasks/managers/{match[2]}"
    if not orchestrator:
        raise Misplaced(op.key, "it is in the hands of a manager")
    if isinstance(op, Put):
        return [Present(manager), Mine(manager), *_moved(op, batch)]
    if any(_is_mine(each, match[2]) for each in batch.conditions):
        return [Mine(op.key)]
    return [Absent(manager)]


def _is_mine(condition: Condition, manager: str) -> bool:
    """Whether the batch is that manager's own: each of them is conditional on its entry in the registry."""
    return isinstance(condition, Present) and condition.key == f"tasks/managers/{manager}"


def _moved(op: Put, batch: Batch) -> list[Condition]:
    """A message comes from somewhere: the batch removes it there."""
    tail = op.key.split("/", 3)[3]
    for each in batch.operations:
        if isinstance(each, Delete) and each.key != op.key and each.key.endswith("/" + tail):
            return [Present(each.key)]
    raise Misplaced(op.key, "a message is moved here, and not made")
