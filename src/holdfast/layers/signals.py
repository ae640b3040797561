"""Signals: what one agent says about what a correlation is about, checked when it is sent and again when it is read.

A signal has agent_name, corr_id and enriched_at, which are filled in where they are absent, and may have agent_version,
analysis, schema_version and source_signal. It is kept as `sections/correlations/<id>/<agent>/-` (`correlation_entries.py`).
Times are aware, and kept in UTC. Whoever bypasses the library writes what it likes into its own section: what is no
signal, or is of another run, is passed over. Its agent is missing then, and the decision says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.clock import as_datetime, as_text
from holdfast.codec import NESTING_MAX, decode, is_deeper
from holdfast.engine import Entry
from holdfast.errors import Error, InvalidInput
from holdfast.identity import check_agent
from holdfast.layers.correlation_entries import SIGNALS, Of, Sent, State
from holdfast.layers.scope import Scope
from holdfast.layers.sections import PAGE, SECTIONS, SOLE, Sections

SIGNAL_BYTES_MAX: Final = 60_000
"""The feed shows it whole, and a hundred of them fit into the state."""
SIGNAL_FIELDS: Final = (
    "agent_name",
    "corr_id",
    "enriched_at",
    "agent_version",
    "analysis",
    "schema_version",
    "source_signal",
)
REQUIRED: Final = frozenset({"agent_name", "corr_id", "enriched_at"})
COMPARED: Final = ("agent_version", "analysis", "schema_version", "source_signal")
"""What makes two signals the same; the time at which one was made does not."""


class Gathered:
    """The signals that one correlation has, as they were read."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, str, dict[str, Any]]] = []
        self.updated_at = 0
        """When the last of them came; milliseconds since 1970, UTC."""

    def add(self, entry: Entry, whose: str, state: State) -> None:
        """What an entry under the correlation's own prefix says, if it is a signal; `whose` is what follows the prefix."""
        agent, _, instance = whose.partition("/")
        if instance == SOLE and state.expects(agent) and (signal := signal_of(entry.value, agent, state)) is not None:
            self._sent.append((entry.version, agent, signal))
            self.updated_at = max(self.updated_at, entry.updated_at)

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def signals(self) -> dict[str, dict[str, Any]]:
        """By agent, in the order in which they came."""
        return {agent: signal for _, agent, signal in sorted(self._sent, key=lambda each: each[:2])}

    def shown(self, state: State) -> State:
        """The state as everybody sees it: ready when all signals are there, and as new as the last of them."""
        metadata = state.metadata
        at = max(metadata.last_updated, as_datetime(self.updated_at))
        is_ready = state.status == "collecting" and len(self) >= metadata.needed
        return msgspec.structs.replace(
            state,
            status="ready" if is_ready else state.status,
            metadata=msgspec.structs.replace(metadata, last_updated=at),
        )


async def gather(scope: Scope, states: Iterable[State], group: str = SIGNALS) -> dict[str, Gathered]:
    """What agents sent to these, by id. Their ranges are read as one, for a read each would be many where many are listed; only
    those that are not decided have signals, so that is no more than there are of these."""
    by_prefix = {Sections(scope, group, state.corr_id).prefix: state for state in states}
    found = {state.corr_id: Gathered() for state in by_prefix.values()}
    if not found:
        return found
    everybodys, first, last = SECTIONS.prefix(group), min(by_prefix), max(by_prefix)
    prefix = first if first == last else everybodys
    after: str | None = first
    while after is not None:
        page = await scope.engine.scan(scope.space, prefix, after=after, limit=PAGE)
        for entry in page.entries:
            name, slash, whose = entry.key[len(everybodys) :].partition("/")
            own = everybodys + name + slash
            if own > last:
                return found
            if (state := by_prefix.get(own)) is not None:
                found[state.corr_id].add(entry, whose, state)
        after = page.entries[-1].key if page.more else None
    return found


def signal_of(value: bytes, agent: str, state: State) -> dict[str, Any] | None:
    """What is kept as an agent's signal to this run of a correlation; None when it is none."""
    if is_deeper(value, NESTING_MAX):
        return None  # it would be too deep for the state and the decision that tell of it
    try:
        sent = decode(value, Sent)
        if sent.run != state.run or not sent.signal.keys() >= REQUIRED:
            return None
        _check(sent.signal, agent, state.corr_id)
    except Error:
        return None
    return sent.signal


def is_of(value: bytes, run: str) -> bool:
    """Whether it was meant for this run, be it a signal or not."""
    try:
        return decode(value, Of).run == run
    except Error:
        return False


def same_signal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two signals say the same."""
    return all(one.get(name) == other.get(name) for name in COMPARED)


def checked_signal(signal: Mapping[str, Any], agent: str, corr_id: str, now_ms: int) -> dict[str, Any]:
    """A signal with all it needs: what is missing is filled in, what is wrong is InvalidInput. What it is made of is not copied."""
    at = _check(signal, agent, corr_id)
    told = as_text(now_ms) if at is None else at.isoformat()
    return {**signal, "agent_name": agent, "corr_id": corr_id, "enriched_at": told}


def _check(signal: Mapping[str, Any], agent: str, corr_id: str) -> datetime | None:
    """Refuse what is no signal of this agent to this correlation; gives its time, if it has one."""
    check_agent(agent)
    if type(signal) is not dict and not isinstance(signal, Mapping):
        raise InvalidInput(f"a signal is an object, not {type(signal).__name__}")
    at = None
    for name, value in signal.items():
        if name == "analysis":
            if type(value) is not dict and not isinstance(value, Mapping):
                raise InvalidInput(f"analysis must be an object, not {value!r:.60}")
        elif name in ("agent_version", "schema_version"):
            if not isinstance(value, str):
                raise InvalidInput(f"{name} must be text, not {value!r:.60}")
        elif name in ("agent_name", "corr_id"):
            must = agent if name == "agent_name" else corr_id
            if value != must:
                raise InvalidInput(f"the signal's {name} is {value!r:.60}, and it is sent as {must!r}")
        elif name == "enriched_at":
            at = aware(value, "enriched_at")
        elif name not in SIGNAL_FIELDS:
            raise InvalidInput(
                f"a signal has no field {name!r:.60}; put it into analysis. It has {', '.join(SIGNAL_FIELDS)}"
            )
    return at


def aware(value: Any, name: str) -> datetime:
    """An instant in UTC; InvalidInput for one without a time zone, which means another one to everybody."""
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be a time such as 2025-06-15T15:06:40+00:00, not {value!r:.60}") from None
    if at.tzinfo is None:
        raise InvalidInput(f"{name} {value!r:.60} names no time zone; write 2025-06-15T15:06:40+00:00")
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"{name} {value!r:.60} is beyond the years 1 to 9999") from None
