"""The schemas that come with Holdfast: correlation_state, workflow_state, audit_state.

They count in a space once they are registered there, with `space.schemas.register_shipped()`: a type of the same name that
somebody uses for something else stays what it is. The step from correlation_state 1.0.0 to 1.1.0 comes with them and is known
to every process, wherever the registered schema is the one below.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.layers.versions import Step

_TEXT: Final = {"type": "string"}
_INSTANT: Final = {"type": "string", "format": "date-time"}
_INSTANT_OR_NONE: Final = {"type": ["string", "null"], "format": "date-time"}
_NAME_PATTERN: Final = "^[A-Za-z0-9_][A-Za-z0-9_-]{0,127}$"
PATTERN_DEFAULT: Final = "fan_in"
"""What a correlation without a named pattern does: it collects the signals of its agents."""

_SIGNAL: Final = {
    "type": "object",
    "required": ["agent_name", "corr_id", "enriched_at"],
    "properties": {
        "agent_name": _TEXT,
        "agent_version": _TEXT,
        "corr_id": _TEXT,
        "enriched_at": _INSTANT,
        "analysis": {"type": "object"},
        "schema_version": _TEXT,
        "source_signal": {},
    },
}


def _correlation(**metadata: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["corr_id", "status", "signals", "metadata"],
        "properties": {
            "corr_id": _TEXT,
            "status": {"enum": ["collecting", "ready", "orchestrating", "completed", "failed"]},
            "signals": {
                "type": "object",
                "patternProperties": {_NAME_PATTERN: _SIGNAL},
                "additionalProperties": False,
            },
            "metadata": {
                "type": "object",
                "properties": {
                    "created_at": _INSTANT,
                    "last_updated": _INSTANT,
                    "expected_agents": {"type": "array", "items": _TEXT},
                    "timeout_at": _INSTANT,
                    **metadata,
                },
            },
        },
    }


_PROGRESS: Final = {
    "status": {"enum": ["pending", "running", "completed", "failed", "paused", "cancelled"]},
    "started_at": _INSTANT_OR_NONE,
    "updated_at": _INSTANT_OR_NONE,
    "completed_at": _INSTANT_OR_NONE,
    "result": {},
    "error": {"type": ["string", "object", "null"]},
}

SHIPPED: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "correlation_state": {
        "1.0.0": _correlation(),
        "1.1.0": _correlation(orchestration_pattern=_TEXT),
    },
    "workflow_state": {
        "1.0.0": {
            "type": "object",
            "required": ["workflow_id", "status"],
            "properties": {
                "workflow_id": _TEXT,
                "name": _TEXT,
                "version": _TEXT,
                "created_at": _INSTANT,
                "config": {"type": "object"},
                "input": {},
                "data": {"type": "object"},
                "steps": {
                    "type": "object",
                    "additionalProperties": {"type": "object", "required": ["status"], "properties": _PROGRESS},
                },
                **_PROGRESS,
            },
        },
    },
    "audit_state": {
        "1.0.0": {
            "type": "object",
            "required": ["actor", "operation", "key", "at", "outcome"],
            "properties": {
                "actor": _TEXT,
                "operation": _TEXT,
                "key": _TEXT,
                "version": {"type": "integer", "minimum": 0},
                "at": _INSTANT,
                "outcome": _TEXT,
                "request_id": {"type": ["string", "null"]},
                "reason": _TEXT,
                "details": {"type": "object"},
            },
        },
    },
}
"""Type → version → schema."""


def _name_the_pattern(state: dict[str, Any]) -> dict[str, Any]:
    metadata = {"orchestration_pattern": PATTERN_DEFAULT, **state["metadata"]}
    return {**state, "metadata": metadata}


SHIPPED_STEPS: Final[dict[str, dict[tuple[str, str], Step]]] = {
    "correlation_state": {("1.0.0", "1.1.0"): _name_the_pattern},
}
"""Type → (from, to) → step."""
