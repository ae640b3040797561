"""Tasks over HTTP: submit, see, wait for the result, read output and log page by page, control.

A keeper runs nothing: managers take what is submitted here as they take everything (`holdfast manager start`, with the token of an
orchestrator). Results and outputs that are too large to be inline are blobs, in the folder of whoever ran the task: they are told by
name and hash, and not sent.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.engine import SCAN_MAX
from holdfast.errors import Conflict, InvalidInput, NotFound, TaskFailed, TaskPending
from holdfast.layers.task_control import Command, ControlAnswer
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import STATUSES, TaskState, TaskStatus
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.limits import PAGE_BYTES_MAX
from holdfast.server.http.queues import patience
from holdfast.server.http.shapes import InSpace, PageSize, Repeatable, WaitText, Wire

Tid = Annotated[str, Meta(pattern="^[0-9]{19}$", description="The task.", examples=["1889012345678901234"])]
EventId = Annotated[str, Meta(pattern="^[0-9]{19}$", description="Go on behind this event.")]
Chunk = Annotated[int, Meta(ge=-1, le=10**9, description="Go on behind this chunk; -1 is before the first.")]
Fitting = Annotated[str, Meta(max_length=256, pattern="^[^\\x00]*$", description="Of names or tids, such as etl*.")]


class TaskAt(InSpace, frozen=True):
    """A path that names a task."""

    tid: Tid


class Submission(Wire, frozen=True):
    """What to do, and what it is told: a function's first argument, a command's standard input."""

    spec: dict[str, Any]
    message: Any = None


class SubmissionShown(Wire, frozen=True):
    """What to do, and what it is told: a function's first argument, a command's standard input."""

    spec: TaskSpec
    message: Any = None


class TasksQuery(Wire, frozen=True):
    """Which tasks to list."""

    status: TaskStatus | None = None
    pattern: Fitting | None = None
    limit: PageSize = 100


class TaskWait(Wire, frozen=True):
    """How long to wait for its end: at most 30 s, not at all unless told."""

    wait: WaitText = "0"


class EventsQuery(Wire, frozen=True):
    """Where to go on."""

    after: EventId | None = None
    limit: PageSize = 100


class OutputQuery(Wire, frozen=True):
    """Where to go on."""

    after: Chunk = -1


class ControlTask(Wire, frozen=True):
    """A command, and how long to wait for the answer: at most 30 s."""

    command: Command
    wait: WaitText = "10s"
    data: Annotated[str, Meta(max_length=350_000)] | None = None
    """Of a WRITE: text for its standard input."""
    eof: bool = False
    """Of a WRITE: nothing more is going to be written."""


class TaskList(msgspec.Struct, frozen=True):
    """Tasks, those that live first, then the newest; and how many there are of each status."""

    tasks: list[TaskState]
    counts: dict[str, int]


class TaskResult(msgspec.Struct, frozen=True):
    """What it gave: a function's result; of a command null, its output is read as such."""

    tid: str
    status: TaskStatus
    return_code: int | None
    result: Any


class TaskEventShown(msgspec.Struct, frozen=True):
    """One line of a task's log."""

    id: str
    event: str
    at: datetime
    status: TaskStatus | None
    fields: dict[str, Any]


class TaskEvents(msgspec.Struct, frozen=True):
    """Its log, in order; `after` the last id goes on."""

    events: list[TaskEventShown]
    more: bool


class TaskOutput(msgspec.Struct, frozen=True):
    """What it printed: envelopes in order, data as text or base64; `after` the last chunk goes on. `done` when nothing follows."""

    envelopes: list[dict[str, Any]]
    done: bool


@endpoint("POST", "/v1/spaces/{space}/tasks", errors=(Conflict,), body_shown=SubmissionShown)
async def submit_task(call: Call, path: InSpace, headers: Repeatable, body: Submission) -> TaskState:
    """Submit a task. Managers run it; the answer is its first state."""
    tasks = call.space(path.space).tasks
    handle = await tasks.submit(TaskSpec.of(body.spec), body.message, request_id=headers.request_id)
    return await handle.state()


@endpoint("GET", "/v1/spaces/{space}/tasks")
async def list_tasks(call: Call, path: InSpace, query: TasksQuery) -> TaskList:
    """Tasks, those that live first, and those that have ended as long as they are kept."""
    tasks = call.space(path.space).tasks
    found = await tasks.list(status=query.status, pattern=query.pattern, limit=min(query.limit, SCAN_MAX))
    counts = await tasks.counts()
    return TaskList(found, {status: counts[status] for status in STATUSES})


@endpoint("GET", "/v1/spaces/{space}/tasks/{tid}", errors=(NotFound,))
async def show_task(call: Call, path: TaskAt) -> TaskState:
    """How it stands: one look-up."""
    return await (await call.space(path.space).tasks.get(path.tid)).state()


@endpoint("GET", "/v1/spaces/{space}/tasks/{tid}/result", errors=(NotFound, TaskFailed, TaskPending))
async def task_result(call: Call, path: TaskAt, query: TaskWait) -> TaskResult:
    """What it gave, when it has completed."""
    wait = patience(call, 0 if query.wait == "0" else query.wait)
    handle = await call.space(path.space).tasks.get(path.tid)
    state = await call.unless_stopped(handle.wait(wait))
    given = None
    if state.status != "completed" or state.result is not None:
        if state.result is not None and state.result.spilled is not None:
            raise InvalidInput(
                f"the result has {state.result.size:,} bytes and is blob {state.result.spilled.sha256}; read it where the task ran"
            )
        given = await handle.result(wait=0)
    return TaskResult(state.tid, state.status, state.return_code, given)


@endpoint("GET", "/v1/spaces/{space}/tasks/{tid}/logs", errors=(NotFound,))
async def task_events(call: Call, path: TaskAt, query: EventsQuery) -> TaskEvents:
    """What happened to it: states, failures, commands; a page at a time."""
    handle = await call.space(path.space).tasks.get(path.tid)
    found: list[TaskEventShown] = []
    async for event in handle.events(after=query.after):
        if len(found) == query.limit:
            return TaskEvents(found, True)
        found.append(TaskEventShown(event.id, event.event, event.timestamp, event.status, event.fields))
    return TaskEvents(found, False)


@endpoint("GET", "/v1/spaces/{space}/tasks/{tid}/output", errors=(NotFound,))
async def task_output(call: Call, path: TaskAt, query: OutputQuery) -> TaskOutput:
    """What it has printed so far, behind a chunk; a page at a time. Too large an output is told by its blob."""
    handle = await call.space(path.space).tasks.get(path.tid)
    ended = (await handle.state()).ended
    found: list[dict[str, Any]] = []
    size = 0
    async for told in handle.envelopes(after=query.after):
        if size >= PAGE_BYTES_MAX:
            return TaskOutput(found, False)
        found.append(told)
        size += int(told.get("size", 0)) if told.get("type") == "stream" else 0
    return TaskOutput(found, ended)


@endpoint("POST", "/v1/spaces/{space}/tasks/{tid}/control", errors=(NotFound, Conflict, TaskPending))
async def control_task(call: Call, path: TaskAt, body: ControlTask) -> ControlAnswer:
    """Stop, kill, pause, resume, ping it, or write to it. For its owner and orchestrators."""
    wait = patience(call, 0 if body.wait == "0" else body.wait)
    handle = await call.space(path.space).tasks.get(path.tid)
    if body.command == "WRITE":
        return await call.unless_stopped(handle.write(body.data or "", eof=body.eof, wait=wait))
    return await call.unless_stopped(handle.control(body.command, wait=wait))


ENDPOINTS = (
    submit_task,
    list_tasks,
    show_task,
    task_result,
    task_events,
    task_output,
    control_task,
)
