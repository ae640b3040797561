"""How a task comes into being, and the two messages it is made of, as parts of a batch.

A new task is one commit: its spec (`specs/<tid>`, for managers), its state with event, index and count (`task_states.py`), a
request in the queue `holdfast.spawn.requests`, whose id is the tid, and its message in the queue `T<tid>.inbox`, with the same id.
Either all of that is there or nothing.

The inbox of a task has one message, and nobody but its manager takes it, so it needs no consumer's lease of its own: it is
moved under its manager's tid, `reserved/T<tid>.inbox/<manager>/…`, in the commit in which the manager takes the task. What
becomes of it is in the commit that ends the task: it is acknowledged, or kept among the dead letters (`…/-/…`) with its
reason, or back in the inbox, or cleared. Inboxes are not counted in `depths/`: a million tasks would be a million queues there.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from holdfast.clock import as_datetime
from holdfast.codec import encode
from holdfast.engine import Absent, Delete, Increment, Operation, Present, Put
from holdfast.errors import InvalidInput
from holdfast.layers.queue_entries import (
    NO_LEASE,
    REASON_CHARS_MAX,
    REASONS,
    RESERVED,
    Failure,
    Place,
    delayed_prefix,
    depth_key,
    failures_tag,
    position_at,
    priority_element,
    ready_prefix,
)
from holdfast.layers.redaction import Redaction
from holdfast.layers.task_spec import TaskSpec, is_redacted, shown
from holdfast.layers.task_states import Link, Parts, TaskState, beginning, spec_key, state_key

SPAWN_REQUESTS: Final = "holdfast.spawn.requests"
TASKS_LOG: Final = "holdfast.tasks.log"
WORKERS_REGISTRY: Final = "holdfast.workers.registry"
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024

Settling: TypeAlias = Literal["ack", "keep", "requeue", "clear"]


def inbox(tid: str) -> str:
    return f"T{tid}.inbox"


def _place(state: TaskState) -> Place:
    """Both messages of a task stand here: their id was chosen by whoever submitted it."""
    return Place(priority_element(state.priority), state.tid, state.tid, state.owner)


def request_key(state: TaskState) -> str:
    """The request to spawn it, as long as nobody has taken it."""
    return ready_prefix(SPAWN_REQUESTS) + _place(state).rest


def ready_key(state: TaskState) -> str:
    """Its message in the inbox."""
    return ready_prefix(inbox(state.tid)) + _place(state).rest


def reserved_key(state: TaskState, manager: str) -> str:
    """Its message in a manager's hands."""
    return RESERVED.prefix(inbox(state.tid), manager) + _place(state).rest


def message_key(state: TaskState) -> str:
    """Where its message is."""
    return ready_key(state) if state.manager is None else reserved_key(state, state.manager)


def reasons_key(tid: str) -> str:
    return REASONS.key(inbox(tid), tid)


def requesting(state: TaskState, *, now_ms: int = 0, delay_ms: int = 0, by: str | None = None) -> Parts:
    """What asks managers to spawn it, at once or after a while."""
    place, what, prefix = _place(state), "ready", ready_prefix(SPAWN_REQUESTS)
    if by is not None:
        place = Place(place.pp, place.position, place.id, by)
    if delay_ms:
        place, what, prefix = place.at(position_at(now_ms + delay_ms)), "delayed", delayed_prefix(SPAWN_REQUESTS)
    put = Put(prefix + place.rest, encode({"tid": state.tid}))
    return Parts((), (put, Increment(depth_key(SPAWN_REQUESTS, what), 1)))


def reserving(before: TaskState, message: bytes, manager: str) -> Parts:
    """What moves the message into a manager's hands, from the inbox or from a manager that is dead."""
    was = message_key(before)
    put = Put(reserved_key(before, manager), message, tag=failures_tag(before.attempt))
    return Parts((Present(was),), (Delete(was), put))


def settling(state: TaskState, message: bytes, how: Settling, *, now_ms: int, actor: str, reason: str | None) -> Parts:
    """What becomes of the message when its task has ended, or is to be begun again; `state` is the one before."""
    name, key = inbox(state.tid), message_key(state)
    if how == "requeue" and state.manager is None:
        return Parts((), ())
    operations: list[Operation] = [Delete(key)]
    if how == "keep":
        dead = RESERVED.prefix(name, NO_LEASE) + _place(state).rest
        operations.append(Put(dead, message, tag=failures_tag(max(state.attempt, 1))))
        if state.manager is not None:  # whoever has a message writes why it failed
            why = Failure(state.attempt, now_ms, actor, (reason or "?")[:REASON_CHARS_MAX])
            operations.append(Put(reasons_key(state.tid), encode([why])))
    elif how == "requeue":
        operations.append(Put(ready_key(state), message, tag=failures_tag(state.attempt)))
    return Parts((Present(key),), tuple(operations))


def submission(
    tid: str,
    spec: TaskSpec,
    message: Any,
    *,
    owner: str,
    now_ms: int,
    redaction: Redaction,
    retry_of: str | None = None,
    link: Link | None = None,
) -> Parts:
    """Everything a new task writes."""
    if not isinstance(spec, TaskSpec):
        raise InvalidInput(f"a task is made of a TaskSpec, not {type(spec).__name__}; TaskSpec.of reads one from JSON")
    body = encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise InvalidInput(
            f"the message of a task has at most {MESSAGE_BYTES_MAX:,} bytes, not {len(body):,}; send a blob's reference"
        )
    state = TaskState(
        tid=tid,
        status="created",
        owner=owner,
        title=spec.title,
        created_at=as_datetime(now_ms),
        tags=spec.tags,
        priority=spec.priority,
        secrets=is_redacted(spec, redaction),
        retry_of=retry_of,
        link=link,
    )
    made = Parts(
        (Absent(state_key(tid)),),
        (
            Put(spec_key(tid), encode(spec)),
            Put(ready_key(state), body),
        ),
    )
    return made | beginning(state, shown(spec, redaction), now_ms) | requesting(state)
