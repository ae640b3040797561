"""What a correlation is in the store: its keys and values.

    correlations/states/<id>           State: status, metadata, claim; when it is finished also all signals and the context
    correlations/open/<due>/<id>       the run, as long as it is not finished; <due> is its timeout, 13 digits of milliseconds
    correlations/context/<id>          what orchestrators publish to the agents, until it is finished
    correlations/orchestrators/<id>    an orchestrator that lives: a lease; what it claimed is free when this is gone
    correlations/publishing            agent: decisions of this space are published, since an orchestrator ran that does; for ever
    sections/correlations/<id>/<agent>/-   Sent: one agent's signal, until the decision takes it into the state
    sections/late/<id>/<agent>/-           Sent: what came after the end
    decisions/made/<id>                Decision: what was decided, the merged context, how it came about
    decisions/outbox/<id>              Decision: to be published by the orchestrator that its tag names, or by any

Agents write their sections and read `correlations/`. Orchestrators write everything, and alone read `decisions/`. A state has a
ttl from the commit that finishes it on, and never before; all that belongs to it ends with it. `run` tells one life of an
id from the next, so that what is left of an earlier one counts for nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.codec import decode
from holdfast.engine import Entry
from holdfast.errors import AccessDenied, Damaged, Error, InvalidInput
from holdfast.keys import Subspace, check_name
from holdfast.layers.batch import split_tag, type_tag
from holdfast.layers.scope import Scope

CORRELATIONS: Final = Subspace("correlations")
DECISIONS: Final = Subspace("decisions")
STATES: Final = CORRELATIONS.prefix("states")
OPEN: Final = CORRELATIONS.prefix("open")
CONTEXTS: Final = CORRELATIONS.prefix("context")
ORCHESTRATORS: Final = CORRELATIONS.prefix("orchestrators")
PUBLISHING: Final = CORRELATIONS.key("publishing")
MADE: Final = DECISIONS.prefix("made")
OUTBOX: Final = DECISIONS.prefix("outbox")
SIGNALS: Final = "correlations"
"""The group of sections that signals are."""
LATE: Final = "late"
SCHEMA_VERSION: Final = "1.1.0"
DUE_DIGITS: Final = 13
ID_BYTES_MAX: Final = 256

Status: TypeAlias = Literal["collecting", "ready", "orchestrating", "completed", "failed"]
STATUSES: Final[tuple[Status, ...]] = ("collecting", "ready", "orchestrating", "completed", "failed")
FINISHED: Final = frozenset({"completed", "failed"})


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was agreed when it was made, but for `last_updated`."""

    created_at: datetime
    last_updated: datetime
    expected_agents: list[str]
    """Empty where any agents will do."""
    timeout_at: datetime
    orchestration_pattern: str
    needed: int
    """How many signals make it ready."""
    min_agents: int | None = None
    """How many are enough when the time is over; None: all."""


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who decides it, and for the how-manieth time somebody tries."""

    orchestrator: str
    attempt: int
    at: datetime
    timed_out: bool = False
    forced: bool = False
    """Somebody asked to decide it with what is there."""


class State(msgspec.Struct, frozen=True):
    """A correlation, stored as the shipped schema of correlation_state has it, empty signals included.

    `ready` is never stored: it is collecting, with all signals there.
    """

    corr_id: str
    status: Status
    run: str
    metadata: Metadata
    signals: dict[str, dict[str, Any]] = {}
    claim: Claim | None = None
    context: dict[str, Any] | None = None
    schema_version: str = SCHEMA_VERSION

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    def collects(self, now_ms: int) -> bool:
        return self.status == "collecting" and now_ms < millis(self.metadata.timeout_at)

    def expects(self, agent: str) -> bool:
        expected = self.metadata.expected_agents
        return not expected or agent in expected


class Sent(msgspec.Struct, frozen=True):
    """A signal as it is kept."""

    run: str
    signal: dict[str, Any]


class Of(msgspec.Struct, frozen=True):
    """Of which run a signal is, without reading it."""

    run: str


class Living(msgspec.Struct, frozen=True):
    """Of an orchestrator that lives, what the others need to know."""

    publishes: bool = True
    """Whether it has an `on_decision`; one of an earlier version does not say."""


class Audit(msgspec.Struct, frozen=True):
    """How a decision came about."""

    input_signals: list[str]
    missing_signals: list[str]
    processing_ms: int
    """From the claim to the decision."""
    pattern: str
    merge: str
    timed_out: bool
    error_count: int
    orchestrator: str
    agent: str
    invalid_signals: list[str] = []
    """Agents that wrote something that is no signal; they are missing, and each counts as an error."""


class Decision(msgspec.Struct, frozen=True):
    """What was decided. `id` is the same however often it is published: use it to do its work once."""

    id: str
    corr_id: str
    run: str
    """Which life of the id it belongs to."""
    status: Status
    action: str
    direction: str | None
    size: float
    confidence: float
    details: dict[str, Any]
    """All the strategy gave; of a timeout reason, partial_signals and missing_signals."""
    merged: dict[str, Any]
    """The merged context."""
    audit: Audit
    decided_at: datetime
    to_publish: bool | None = None
    """Whether it went into the outbox, for `on_decision`; None in what an earlier version decided."""


def check_id(corr_id: str) -> str:
    """Refuse what cannot be a correlation's id."""
    check_name(corr_id, "correlation's id")
    if len(corr_id.encode()) > ID_BYTES_MAX:
        raise InvalidInput(f"a correlation's id has at most {ID_BYTES_MAX} bytes, not {len(corr_id.encode()):,}")
    return corr_id


def due_key(state: State) -> str:
    """Where the index has it."""
    return CORRELATIONS.key("open", f"{millis(state.metadata.timeout_at):0{DUE_DIGITS}d}", state.corr_id)


def millis(at: datetime) -> int:
    """An instant as engines and clocks have it."""
    return round(at.timestamp() * 1000)


def state_of(entry: Entry) -> State:
    """The state an entry holds; Damaged when somebody wrote something else there."""
    try:
        return decode(entry.value, State)
    except Error as exc:
        raise Damaged(f"{entry.key!r} holds no correlation: {exc}; an administrator has to delete it") from exc


_TAGS: Final = {status: type_tag("correlation_state", status) for status in STATUSES}


def tag_of(status: Status) -> str:
    return _TAGS[status]


def status_in(tag: str) -> str | None:
    """The status that an entry's tag tells, without reading its value."""
    return split_tag(tag)[1]


def not_for_agents(actor: str, what: str) -> AccessDenied:
    """Why an agent was refused, in words that do not need the keyspace."""
    return AccessDenied(
        f"{actor!r} may not {what}: that is for orchestrators; agents find correlations, signal, and see signals and the "
        "context. Use an orchestrator's token, or ask whoever keeps the rules"
    )


async def kept_ms(scope: Scope, status: str | None) -> int | None:
    """How long a correlation in this state is kept, from now on."""
    volatile = await scope.durability() == "volatile"
    return scope.retention.ttl_ms("correlation" if volatile else "correlation_state", status, volatile=volatile)
