"""Executions of workflows over HTTP: start one by its name, see it, wait for its end, send it a signal, cancel it.

Who may do what the store decides, as it does for everybody: agents start and signal, orchestrators cancel. Starting may be repeated:
under the same id it starts nothing again; so may signalling, with an Idempotency-Key, also when the server was restarted. Workers run elsewhere; no code comes over the wire.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.clock import wait_ms
from holdfast.errors import AccessDenied, Conflict, ExecutionFailed, InvalidInput, NotFound, TimedOut
from holdfast.layers.workflows.definitions import NAME_BYTES_MAX
from holdfast.layers.workflows.entries import COMPLETED, ID_BYTES_MAX, check_execution
from holdfast.layers.workflows.handles import ExecutionHandle, ExecutionView, Workflows
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.shapes import DurationText, InSpace, PageSize, Repeatable, Wire

ExecutionId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=ID_BYTES_MAX,
        pattern="^[^\\x00]+$",
        description="The execution.",
        examples=["msft-2026-11-15"],
    ),
]
Label = Annotated[
    str,
    Meta(
        pattern=f"^[^~/#\\x00-\\x1f\\x7f][^/#\\x00-\\x1f\\x7f]{{0,{NAME_BYTES_MAX - 1}}}$",
        description="A name.",
        examples=["research"],
    ),
]
ExecutionStatus = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]
WaitText = Annotated[str, Meta(pattern="^0$", description="Not at all.")]


class ExecutionAt(InSpace, frozen=True):
    """A path that names an execution."""

    name: ExecutionId


class ExecutionStart(Wire, frozen=True):
    """What is started, and under which id; one that is there is not started again."""

    workflow: Label
    input: Any = None
    id: ExecutionId | None = None
    priority: int = 0
    key: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Of its limit, where its code makes one of the input."""


class ExecutionSignal(Wire, frozen=True):
    """What its code waits for."""

    signal: Label
    value: Any = None


class ExecutionQuery(Wire, frozen=True):
    """Which executions to list: those that have not ended, or of one status."""

    workflow: Label | None = None
    status: ExecutionStatus | None = None
    limit: PageSize = 100


class EndQuery(Wire, frozen=True):
    """How long to wait for its end: at most 30 s, not at all unless told."""

    wait: WaitText | DurationText = "0"


class ExecutionShown(msgspec.Struct, frozen=True):
    """An execution. It has a result when it has completed, and an error when it failed."""

    id: str
    workflow: str
    version: str
    status: ExecutionStatus
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    waits: list[dict[str, Any]]
    error: dict[str, str] | None
    result: Any
    served: bool
    """Whether a worker is there that knows its workflow; without one it waits."""


class ExecutionOutline(msgspec.Struct, frozen=True):
    """An execution of a list."""

    id: str
    workflow: str
    status: ExecutionStatus
    created_at: datetime
    ended_at: datetime | None


class ExecutionList(msgspec.Struct, frozen=True):
    """Executions."""

    executions: list[ExecutionOutline]


class ExecutionSent(msgspec.Struct, frozen=True):
    """What was sent is on its way."""

    id: str


async def _shown(workflows: Workflows, handle: ExecutionHandle) -> ExecutionShown:
    view: ExecutionView = await handle.status()
    result = await handle.result(0) if view.status == COMPLETED else None
    served = view.ended_at is None and await workflows.is_served(view.name)
    return ExecutionShown(
        view.id,
        view.name,
        view.version,
        view.status,  # type: ignore[arg-type]
        view.created_at,
        view.updated_at,
        view.started_at,
        view.ended_at,
        list(view.waits),
        view.error,
        result,
        served,
    )


@endpoint("POST", "/v1/spaces/{space}/executions", errors=(AccessDenied,))
async def start_execution(call: Call, path: InSpace, body: ExecutionStart) -> ExecutionShown:
    """Start a workflow by its name. One that no worker serves waits, as pending, until one does."""
    workflows = call.space(path.space).workflows
    handle = await workflows.start(body.workflow, body.input, id=body.id, priority=body.priority, key=body.key)
    return await _shown(workflows, handle)


@endpoint("GET", "/v1/spaces/{space}/executions")
async def list_executions(call: Call, path: InSpace, query: ExecutionQuery) -> ExecutionList:
    """Those that have not ended; of a status that is an end, those that ended so, the last ones first."""
    found = await call.space(path.space).workflows.list(name=query.workflow, status=query.status, limit=query.limit)
    return ExecutionList(
        [ExecutionOutline(view.id, view.name, view.status, view.created_at, view.ended_at) for view in found]  # type: ignore[arg-type]
    )


@endpoint("GET", "/v1/spaces/{space}/executions/{name}", errors=(NotFound,))
async def show_execution(call: Call, path: ExecutionAt, query: EndQuery) -> ExecutionShown:
    """How it stands, what it waits for, its result or error; with `wait` as soon as it has ended."""
    wait = 0 if query.wait == "0" else query.wait
    if (wait_ms(wait) or 0) > call.port.limits.lock_wait_ms_max:
        limit_s = call.port.limits.lock_wait_ms_max / 1000
        raise InvalidInput(f"wait is at most {limit_s:g} s over HTTP; repeat the request to wait longer")
    workflows = call.space(path.space).workflows
    handle = await workflows.get(path.name)
    if wait != 0:
        with suppress(TimedOut, ExecutionFailed):  # how it stands tells
            await call.unless_stopped(handle.result(wait))
    return await _shown(workflows, handle)


@endpoint("POST", "/v1/spaces/{space}/executions/{name}", errors=(NotFound, Conflict, AccessDenied))
async def signal_execution(call: Call, path: ExecutionAt, headers: Repeatable, body: ExecutionSignal) -> ExecutionSent:
    """Send it a signal: once, however often the request is repeated with its Idempotency-Key. Conflict if it has ended."""
    handle = ExecutionHandle(call.space(path.space).workflows, check_execution(path.name))
    await handle.signal(body.signal, body.value, request_id=headers.request_id)
    return ExecutionSent(handle.id)


@endpoint("DELETE", "/v1/spaces/{space}/executions/{name}", errors=(NotFound, Conflict, AccessDenied))
async def cancel_execution(call: Call, path: ExecutionAt) -> ExecutionSent:
    """Ask for its end; a worker sees to it. Conflict if it has ended. For orchestrators."""
    handle = await call.space(path.space).workflows.get(path.name)
    await handle.cancel()
    return ExecutionSent(handle.id)


ENDPOINTS = (start_execution, list_executions, show_execution, signal_execution, cancel_execution)
