"""Signals: what one agent says about what a correlation is about, checked when it is sent and again when it is read.

A signal has agent_name, corr_id and enriched_at, which are filled in where they are absent, and may have agent_version,
analysis, schema_version and source_signal. It is kept as `sections/correlations/<id>/<agent>/-` (`correlation_entries.py`).
Times are aware, and kept in UTC. Whoever bypasses the library writes what it likes into its own section: what is no
signal, or is of another run, is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.clock import as_text
from holdfast.codec import decode
from holdfast.engine import Entry
from holdfast.errors import Error, InvalidInput
from holdfast.identity import check_agent
from holdfast.layers.correlation_entries import Sent, State
from holdfast.layers.sections import SOLE, Sections

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
COMPARED: Final = ("agent_version", "analysis", "schema_version", "source_signal")
"""What makes two signals the same; the time at which one was made does not."""


async def read_signals(sections: Sections, state: State) -> dict[str, dict[str, Any]]:
    """What agents sent to this run, in the order in which it came."""
    found = []
    for section in await sections.read():
        sent = sent_of(section.value)
        if section.instance == SOLE and sent is not None and sent.run == state.run and state.expects(section.agent):
            found.append((section.version, section.agent, sent.signal))
    return {agent: signal for _, agent, signal in sorted(found, key=lambda each: each[:2])}


def sent_of(value: Any) -> Sent | None:
    """A section as a signal; None for what no library wrote."""
    try:
        return msgspec.convert(value, Sent)
    except msgspec.ValidationError:
        return None


def signal_of(entry: Entry | None, run: str) -> dict[str, Any] | None:
    """What an entry says as a signal to this run; None when it is none."""
    if entry is None:
        return None
    try:
        sent = decode(entry.value, Sent)
    except Error:
        return None
    return sent.signal if sent.run == run else None


def same_signal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two signals say the same."""
    return all(one.get(name) == other.get(name) for name in COMPARED)


def checked_signal(signal: Mapping[str, Any], agent: str, corr_id: str, now_ms: int) -> dict[str, Any]:
    """A signal with all it needs: what is missing is filled in, what is wrong is InvalidInput. What it is made of is not copied."""
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
            at = aware(value, "enriched_at").isoformat()
        elif name not in SIGNAL_FIELDS:
            raise InvalidInput(
                f"a signal has no field {name!r:.60}; put it into analysis. It has {', '.join(SIGNAL_FIELDS)}"
            )
    return {**signal, "agent_name": agent, "corr_id": corr_id, "enriched_at": at or as_text(now_ms)}


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
