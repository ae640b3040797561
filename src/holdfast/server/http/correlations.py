"""Correlations over HTTP: make one, signal, see it, wait for its decision, decide it now.

Who may do what the store decides, as it does for everybody: agents signal in their own name, read states and contexts; orchestrators
make correlations, publish contexts, read and make decisions. A signal may be repeated: the same again is a duplicate. Whatever
changes something, repeated with its Idempotency-Key, gets the same answer. A strategy is named, and is one that ships with the
product: no code comes over the wire.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.clock import wait_ms
from holdfast.errors import AccessDenied, Conflict, InvalidInput, NotFound
from holdfast.identity import AGENT
from holdfast.layers.correlation_entries import ID_BYTES_MAX, Decision, Status
from holdfast.layers.correlations import Correlation, CorrelationView, SignalOutcome
from holdfast.layers.patterns import AGENTS_MAX
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.shapes import InSpace, Lifetime, PageSize, Prefix, Repeatable, WaitText, Wire

CorrelationId = Annotated[
    str,
    Meta(
        min_length=1, max_length=ID_BYTES_MAX, pattern="^[^\\x00]+$", description="The correlation.", examples=["c-123"]
    ),
]
AgentName = Annotated[str, Meta(pattern=f"^{AGENT.pattern}$", description="An agent.", examples=["momentum"])]
Names = Annotated[list[AgentName], Meta(min_length=1, max_length=AGENTS_MAX)]
Number = Annotated[int, Meta(ge=1, le=AGENTS_MAX)]


class CorrelationAt(InSpace, frozen=True):
    """A path that names a correlation."""

    name: CorrelationId


class Expectations(Wire, frozen=True):
    """Whom it waits for, by name or how many, and how long (5 minutes unless told)."""

    expect: Names | Number | None = None
    timeout: Lifetime | None = None
    min_agents: Number | None = None
    """So many are enough for a decision when the time is over."""
    profile: str | None = None
    """simple, workflow or high_frequency: how many, and how long."""
    pattern: str = "fan_in"


class SignalBody(Wire, frozen=True, omit_defaults=True):
    """An agent's signal. What is absent of the first three is filled in."""

    agent_name: str | None = None
    corr_id: str | None = None
    enriched_at: str | None = None
    agent_version: str | None = None
    analysis: dict[str, Any] | None = None
    schema_version: str | None = None
    source_signal: Any = None


class Revising(Wire, frozen=True):
    """Whether another signal of the same agent replaces the first."""

    replace: bool = False


class CorrelationQuery(Wire, frozen=True):
    """Which correlations to list."""

    status: Status | None = None
    prefix: Prefix = ""
    after: CorrelationId | None = None
    limit: PageSize = 100


class WaitQuery(Wire, frozen=True):
    """How long to wait for the decision: at most 30 s, not at all unless told."""

    wait: WaitText = "0"


class DecideNow(Wire, frozen=True):
    """By which strategy, and whether an orchestrator that runs elsewhere publishes it: unless told, if one has ever run that publishes."""

    merge: str = "all"
    publish: bool | None = None


class Outline(msgspec.Struct, frozen=True):
    """A correlation of a list."""

    id: str
    status: Status
    expected_agents: list[str]
    created_at: datetime
    timeout_at: datetime


class Outlines(msgspec.Struct, frozen=True):
    """Correlations, by id."""

    correlations: list[Outline]


class Shown(msgspec.Struct, frozen=True):
    """A correlation."""

    id: str
    status: Status
    signals: dict[str, dict[str, Any]]
    missing: list[str]
    missing_count: int
    late: dict[str, dict[str, Any]]
    metadata: dict[str, Any]
    version: int
    expires_at: datetime | None


class Received(msgspec.Struct, frozen=True):
    """What became of a signal: accepted, duplicate or late."""

    outcome: SignalOutcome
    version: int


class Decided(msgspec.Struct, frozen=True):
    """What was decided; null as long as it is not."""

    decision: Decision | None


class Context(msgspec.Struct, frozen=True):
    """What orchestrators published."""

    context: dict[str, Any]


def _shown(view: CorrelationView) -> Shown:
    metadata = msgspec.to_builtins(view.metadata)
    return Shown(
        view.corr_id,
        view.status,
        view.signals,
        list(view.missing),
        view.missing_count,
        view.late,
        metadata,
        view.version,
        view.expires_at,
    )


async def _found(call: Call, path: CorrelationAt) -> Correlation:
    return await call.space(path.space).correlation(path.name)


@endpoint("POST", "/v1/spaces/{space}/correlations/{name}", errors=(Conflict, AccessDenied))
async def make_correlation(call: Call, path: CorrelationAt, headers: Repeatable, body: Expectations) -> Shown:
    """Make a correlation, or find the one that was made with the same expectations. For orchestrators."""
    if body.expect is None and body.profile is None:
        raise InvalidInput("name whom it expects, with expect or profile")
    view = await call.space(path.space).correlations.make_once(
        path.name,
        headers.request_id,
        expect=body.expect,
        timeout=body.timeout,
        min_agents=body.min_agents,
        profile=body.profile,
        pattern=body.pattern,
    )
    return _shown(view)


@endpoint("GET", "/v1/spaces/{space}/correlations")
async def list_correlations(call: Call, path: InSpace, query: CorrelationQuery) -> Outlines:
    """Correlations by id, those that ended and are kept included."""
    found = await call.space(path.space).correlations.list(
        status=query.status, prefix=query.prefix, after=query.after, limit=query.limit
    )
    return Outlines(
        [
            Outline(
                state.corr_id,
                state.status,
                state.metadata.expected_agents,
                state.metadata.created_at,
                state.metadata.timeout_at,
            )
            for state in found
        ]
    )


@endpoint("GET", "/v1/spaces/{space}/correlations/{name}", errors=(NotFound,))
async def show_correlation(call: Call, path: CorrelationAt) -> Shown:
    """Its status and signals, who is missing, what came late."""
    return _shown(await (await _found(call, path)).view())


@endpoint("PUT", "/v1/spaces/{space}/signals/{name}", errors=(NotFound, Conflict, AccessDenied))
async def send_signal(
    call: Call, path: CorrelationAt, query: Revising, headers: Repeatable, body: SignalBody
) -> Received:
    """Send a signal in one's own name; orchestrators in anybody's that agent_name names."""
    fields = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
    # With a key the answer to it comes first: what it was about may be gone since.
    correlation = call.space(path.space).correlations.at(path.name) if headers.request_id else await _found(call, path)
    signalled = await correlation.signal(
        fields, agent=body.agent_name, replace=query.replace, request_id=headers.request_id
    )
    return Received(signalled.outcome, signalled.version)


@endpoint("GET", "/v1/spaces/{space}/contexts/{name}", errors=(NotFound,))
async def read_context(call: Call, path: CorrelationAt) -> Context:
    """What orchestrators let the agents of a correlation know."""
    return Context(await (await _found(call, path)).context.read())


@endpoint("PUT", "/v1/spaces/{space}/contexts/{name}", errors=(NotFound, Conflict, AccessDenied))
async def publish_context(call: Call, path: CorrelationAt, headers: Repeatable, body: dict[str, Any]) -> Context:
    """Add or replace fields of the context, as long as it is collecting. For orchestrators."""
    correlation = call.space(path.space).correlations.at(path.name)
    return Context(await correlation.context.publish(body, request_id=headers.request_id))


@endpoint("GET", "/v1/spaces/{space}/decisions/{name}", errors=(NotFound, AccessDenied))
async def read_decision(call: Call, path: CorrelationAt, query: WaitQuery) -> Decided:
    """What was decided, as soon as it is, or null. For orchestrators."""
    wait = 0 if query.wait == "0" else query.wait
    if (wait_ms(wait) or 0) > call.port.limits.lock_wait_ms_max:
        limit_s = call.port.limits.lock_wait_ms_max / 1000
        raise InvalidInput(f"wait is at most {limit_s:g} s over HTTP; repeat the request to wait longer")
    correlation = await _found(call, path)
    return Decided(await call.unless_stopped(correlation.decision(wait=wait)))


@endpoint("POST", "/v1/spaces/{space}/decisions/{name}", errors=(NotFound, Conflict, AccessDenied))
async def decide_now(call: Call, path: CorrelationAt, headers: Repeatable, body: DecideNow) -> Decided:
    """Decide it now, with the signals that are there. For orchestrators."""
    space = call.space(path.space)
    orchestrator = space.orchestrator(merge=body.merge, publish=body.publish)
    if headers.request_id is None:
        return Decided(await orchestrator.decide(path.name))
    async with call.port.one_at_a_time(space.name, space.agent, headers.request_id):
        return Decided(await orchestrator.decide(path.name, request_id=headers.request_id))


ENDPOINTS = (
    make_correlation,
    list_correlations,
    show_correlation,
    send_signal,
    read_context,
    publish_context,
    read_decision,
    decide_now,
)
