"""The states of tasks: which follow each other, what each must have, and the log from which a state can be made again.

    created → spawning → running → completed | failed | timeout | cancelled | killed

A task's state is one entry, `tasks/states/<tid>`, so asking for it is one look-up. It changes by compare-and-set alone, and every
change is logged in the same batch, `tasks/log/<tid>/<19 digits>`, with the whole state and the redacted spec: the log is what
happened, and folding it (`replay`) gives the entry. `advance` is the only way from one state to the next and refuses what the
rules forbid: a step back, a change after the end, a pid before there is a process, a return code before there is an end.

A task that is begun again, because its manager died or its policy says so, does not go back: `attempt` grows.

Each task is in exactly one index, moved in the same batch: `tasks/waiting/<tid>` when no manager has it, `tasks/running/<manager>/<tid>`,
and `tasks/finished/<13 digits>/<tid>`, where the digits are when its record may go. `tasks/counts/<status>` are counters.

The status is also the entry's tag, and the tag is what counts: the policy looks at it (`middleware/task_claims.py`), so an agent
that bypasses the library cannot write a state that only a manager may.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import Condition, Delete, Entry, Increment, Operation, Push, Put, VersionIs
from holdfast.errors import Conflict, Damaged, Error, InvalidInput
from holdfast.keys import Subspace
from holdfast.layers.batch import split_tag, type_tag
from holdfast.layers.blobs import BlobRef

TaskStatus: TypeAlias = Literal[
    "created", "spawning", "running", "completed", "failed", "timeout", "cancelled", "killed"
]
STATUSES: Final[tuple[TaskStatus, ...]] = get_args(TaskStatus)
ENDED: Final[frozenset[TaskStatus]] = frozenset({"completed", "failed", "timeout", "cancelled", "killed"})
TRANSITIONS: Final[dict[TaskStatus, frozenset[TaskStatus]]] = {
    "created": frozenset({"spawning", "failed", "cancelled"}),
    "spawning": frozenset({"running", "completed", "failed", "timeout", "cancelled", "killed"}),
    "running": ENDED,
}

TASKS: Final = Subspace("tasks")
SPECS: Final = "specs/"
STATES: Final = "tasks/states/"
LOG: Final = "tasks/log/"
WAITING: Final = "tasks/waiting/"
RUNNING: Final = "tasks/running/"
FINISHED: Final = "tasks/finished/"
COUNTS: Final = "tasks/counts/"
MANAGERS: Final = "tasks/managers/"
OUTBOX: Final = "tasks/outbox/"
RESULTS: Final = "tasks/results/"
CTRL_IN: Final = "tasks/ctrl_in/"
CTRL_OUT: Final = "tasks/ctrl_out/"

TYPE: Final = "task"
FOR_EVER: Final = 10**13 - 1
ERROR_CHARS_MAX: Final = 8_000

StopReason: TypeAlias = Literal["stop", "cancel", "kill", "timeout", "memory", "fds", "cpu", "shutdown"]
STOP_STATUS: Final[dict[StopReason, TaskStatus]] = {
    "stop": "cancelled",
    "cancel": "cancelled",
    "shutdown": "cancelled",
    "kill": "killed",
    "memory": "killed",
    "fds": "killed",
    "cpu": "killed",
    "timeout": "timeout",
}


class TaskStop(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a task is being ended; the first one that was accepted stays."""

    reason: StopReason
    at: datetime
    by: str | None = None


class TaskError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong, in words."""

    type: str
    message: str
    traceback: str | None = None


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of an output or a result: how many envelopes, how many bytes, and the blob if it was too large."""

    size: int
    chunks: int = 0
    spilled: BlobRef | None = None


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pipeline a task is a part of."""

    pipeline: str
    stage: str
    item: int = 0
    try_: int = msgspec.field(default=1, name="try")
    input: BlobRef | None = None
    """Its message, where that is too large to be one."""


class TaskState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A task as it is now."""

    tid: str
    status: TaskStatus
    owner: str
    title: str
    created_at: datetime
    tags: tuple[str, ...] = ()
    priority: int = 0
    secrets: bool = False
    """Whether something of its spec is not shown."""
    attempt: int = 0
    manager: str | None = None
    host: str | None = None
    pid: int | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    paused: bool = False
    stop: TaskStop | None = None
    return_code: int | None = None
    reason: str | None = None
    error: TaskError | None = None
    peak_memory_mb: float | None = None
    cpu_seconds: float | None = None
    max_fds: int | None = None
    output: Kept | None = None
    result: Kept | None = None
    retry_of: str | None = None
    link: Link | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over; that is final."""
        return self.status in ENDED


FIXED: Final = ("tid", "owner", "title", "created_at", "tags", "priority", "secrets", "retry_of", "link")
"""What a task has from its beginning to its end."""


class Parts(NamedTuple):
    """A part of a batch."""

    conditions: tuple[Condition, ...]
    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, parts: Iterable[Condition | Operation]) -> Parts:
        """Conditions and operations, as they come."""
        mixed = tuple(parts)
        operations = tuple(part for part in mixed if isinstance(part, Operation))
        return cls(tuple(part for part in mixed if isinstance(part, Condition)), operations)

    def __or__(self, other: tuple[tuple[Condition, ...], tuple[Operation, ...]]) -> Parts:
        """Both, as one; a condition that both have is asked once."""
        return Parts(tuple(dict.fromkeys(self.conditions + other[0])), self.operations + other[1])


def tag_of(status: TaskStatus) -> str:
    return type_tag(TYPE, status)


def state_key(tid: str) -> str:
    return STATES + tid


def spec_key(tid: str) -> str:
    return SPECS + tid


def log_prefix(tid: str) -> str:
    return f"{LOG}{tid}/"


def status_in(tag: str) -> TaskStatus:
    type, status = split_tag(tag)
    if type != TYPE or status not in STATUSES:
        raise Damaged(f"{tag!r:.60} is not the tag of a task's state")
    return status


def state_of(entry: Entry) -> TaskState:
    """The state that an entry holds. What its tag says counts, whatever the value says."""
    state = decode(entry.value, TaskState)
    status = status_in(entry.tag)
    return state if state.status == status else msgspec.structs.replace(state, status=status)


def readable_state(entry: Entry | None) -> TaskState | None:
    """The state, or None: clients that bypass the library write what they like, and must not break a list for others."""
    try:
        return None if entry is None else state_of(entry)
    except Error:
        return None


def index_key(state: TaskState, due_ms: int = FOR_EVER) -> str:
    """Where a task in this state is listed."""
    if state.ended:
        return f"{FINISHED}{due_ms:013d}/{state.tid}"
    return WAITING + state.tid if state.manager is None else f"{RUNNING}{state.manager}/{state.tid}"


def check_step(before: TaskState, after: TaskState) -> None:
    """Refuse a step that the rules forbid."""
    tid = before.tid
    if before.ended:
        raise Conflict(f"task {tid} is {before.status} already, and that is final", key=state_key(tid))
    if after.status != before.status and after.status not in TRANSITIONS[before.status]:
        raise Conflict(f"task {tid} is {before.status} and cannot become {after.status}", key=state_key(tid))
    for name in FIXED:
        if getattr(before, name) != getattr(after, name):
            raise InvalidInput(f"task {tid}: {name} never changes")
    if after.attempt < before.attempt:
        raise InvalidInput(f"task {tid}: attempt only grows")
    if before.stop is not None and after.stop != before.stop:
        raise Conflict(
            f"task {tid} is being ended already: {before.stop.reason}; the first reason stays", key=state_key(tid)
        )
    check_state(after)


def check_state(state: TaskState) -> None:
    """Refuse a state that lacks what it must have, or has what it cannot."""
    tid = state.tid
    if state.status == "running" and state.started_at is None:
        raise InvalidInput(f"task {tid}: running has started_at")
    if state.pid is not None and state.status == "created":
        raise InvalidInput(f"task {tid}: there is a pid only once it is spawned")
    if state.return_code is not None and not state.ended:
        raise InvalidInput(f"task {tid}: there is a return code only when it has ended")
    if state.completed_at is not None and not state.ended:
        raise InvalidInput(f"task {tid}: completed_at is of a task that has ended")
    if state.ended and state.completed_at is None:
        raise InvalidInput(f"task {tid}: {state.status} has completed_at")
    if state.started_at is not None and state.completed_at is not None and state.completed_at < state.started_at:
        raise InvalidInput(f"task {tid}: it cannot end before it started")


def ending(state: TaskState, status: TaskStatus, now_ms: int, **changes: Any) -> TaskState:
    """The state with which a task ends. Where a clock went backwards it ends when it started."""
    at = as_datetime(now_ms)
    if state.started_at is not None:
        at = max(at, state.started_at)
    return msgspec.structs.replace(state, status=status, completed_at=at, paused=False, **changes)


def event(tid: str, name: str, now_ms: int, fields: dict[str, Any], status: TaskStatus | None = None) -> Push:
    """One line of a task's log."""
    value = {"event": name, "tid": tid, "timestamp": as_datetime(now_ms), **fields}
    return Push(log_prefix(tid), encode(value), tag=tag_of(status) if status else type_tag("task_event", name))


def beginning(state: TaskState, spec: dict[str, Any], now_ms: int) -> Parts:
    """What a new task writes: its state, its first event, its place in the index, its count."""
    check_state(state)
    tag = tag_of(state.status)
    operations = (
        Put(state_key(state.tid), encode(state), tag=tag),
        event(
            state.tid, "state_update", now_ms, {"status": state.status, "state": state, "taskspec": spec}, state.status
        ),
        Put(index_key(state), encode(state.title), tag=tag),
        Increment(COUNTS + state.status, 1),
    )
    return Parts((), operations)


def advance(
    before: TaskState,
    version: int,
    after: TaskState,
    spec: dict[str, Any],
    now_ms: int,
    *,
    kept_ms: int | None = None,
    name: str = "state_update",
    **fields: Any,
) -> Parts:
    """What the step from one state to the next writes; `kept_ms` is for how long a task that has ended is kept."""
    check_step(before, after)
    told = {"status": after.status, "state": after, **({"taskspec": spec} if name == "state_update" else {}), **fields}
    tag = tag_of(after.status)
    operations: list[Operation] = [
        Put(state_key(after.tid), encode(after), kept_ms if after.ended else None, tag),
        event(after.tid, name, now_ms, told, after.status),
    ]
    if after.status != before.status:
        operations += [Increment(COUNTS + before.status, -1), Increment(COUNTS + after.status, 1)]
    was, listed = index_key(before), index_key(after, FOR_EVER if kept_ms is None else now_ms + kept_ms)
    if was != listed:
        operations.append(Delete(was))
    if was != listed or after.status != before.status:
        operations.append(Put(listed, encode(after.title), tag=tag))
    return Parts((VersionIs(state_key(after.tid), version),), tuple(operations))


class TaskEvent(NamedTuple):
    """One line of a task's log, as it is read."""

    id: str
    """19 digits: where it stands in the log."""
    tid: str
    event: str
    timestamp: datetime
    fields: dict[str, Any]
    """Everything else it says: status, taskspec, message_id, error, size, path, command, …"""
    state: TaskState | None
    """The state after it, if it changed something."""

    @property
    def status(self) -> TaskStatus | None:
        return None if self.state is None else self.state.status


def event_of(key: str, value: bytes, tag: str) -> TaskEvent:
    """Read a line of a log. What its tag says counts here too."""
    tid, _, id = key[len(LOG) :].partition("/")
    told = decode(value, dict)
    told.pop("tid", None)  # the key says whose it is
    raw = told.pop("state", None)
    try:
        state = None if raw is None else msgspec.convert(raw, TaskState)
        timestamp = msgspec.convert(told.pop("timestamp", None), datetime)
    except msgspec.ValidationError as exc:
        raise Damaged(f"event {key!r} cannot be read: {exc}") from exc
    if state is not None and state.status != (status := status_in(tag)):
        state = msgspec.structs.replace(state, status=status)
    return TaskEvent(id, tid, str(told.pop("event", "")), timestamp, told, state)


def replay(events: Iterable[TaskEvent]) -> TaskState | None:
    """The state that a task's log tells; Conflict or InvalidInput where it tells what cannot have been."""
    state: TaskState | None = None
    for each in events:
        if each.state is None:
            continue
        if state is not None:
            check_step(state, each.state)
        else:
            check_state(each.state)
        state = each.state
    return state


def error_of(exc: BaseException | TaskError | str) -> TaskError:
    """An error as it is kept: bounded."""
    if isinstance(exc, TaskError):
        cut = None if exc.traceback is None else exc.traceback[-ERROR_CHARS_MAX:]
        return TaskError(exc.type[:200], exc.message[:ERROR_CHARS_MAX], cut)
    if isinstance(exc, str):
        return TaskError("Error", exc[:ERROR_CHARS_MAX])
    return TaskError(type(exc).__name__, str(exc)[:ERROR_CHARS_MAX])
