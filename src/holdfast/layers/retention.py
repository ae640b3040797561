"""How long things are kept, by what they are and the state they are in.

A value written with a type (`set(key, value, type="correlation_state", state="failed")`) gets the ttl of its type and
state in the same commit. An explicit ttl wins; a value with neither never expires. The table below is the default; pass
`retention=Retention(durable={"correlation_state": {"default": "2d"}})` to `open` to change or add rows.

`None` means: kept until it is deleted. A ttl never removes something that still runs: tasks, messages and executions get
one only in a state that is their end. Request ids are kept for an hour, by the engines themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.clock import Duration, duration_ms
from holdfast.errors import InvalidInput

Table = Mapping[str, Mapping[str, Duration | None]]

TASK_ENDS: Final = ("completed", "failed", "timeout", "cancelled", "killed")
EXECUTION_ENDS: Final = ("completed", "failed", "cancelled")

VOLATILE: Final[Table] = {
    "correlation": {"default": "300s", "completed": "60s", "failed": "600s"},
    "workflow_state": {"default": "180s"},
    "performance_counters": {"default": "1h"},
    "task": {"default": None, **dict.fromkeys(TASK_ENDS, "300s")},
    "workflow_execution": {"default": None, **dict.fromkeys(EXECUTION_ENDS, "300s")},
    "message": {"default": None},
    "other": {"default": "300s"},
}
DURABLE: Final[Table] = {
    "correlation_state": {"default": "24h", "completed": "1h", "failed": "7d"},
    "audit_logs": {"default": "30d", "compliance": "365d"},
    "performance_metrics": {"default": "7d", "aggregated": "30d"},
    "task": {"default": None, **dict.fromkeys(TASK_ENDS, "7d")},
    "spilled_output": {"default": "24h"},
    "workflow_execution": {"default": None, **dict.fromkeys(EXECUTION_ENDS, "24h")},
    "message": {"default": None},
    "document_history": {"default": "7d", "resolved": "365d"},
    "feed": {"default": "24h"},
    "other": {"default": "1h"},
}
_EXAMPLE: Final = "{'report': {'default': '7d'}}"
SHARED: Final = ("feed", "audit_logs")
"""Types whose lifetime is applied by whichever process looks after the store (`settings.py`)."""


class Retention:
    """The table of lifetimes, defaults and changes together."""

    def __init__(self, *, durable: Table | None = None, volatile: Table | None = None) -> None:
        self._durable = _merged(DURABLE, durable)
        self._volatile = _merged(VOLATILE, volatile)
        self.told = {
            type: self._durable[type]["default"] for type in SHARED if "default" in (durable or {}).get(type, {})
        }
        """What was given for the types that the whole store must agree on."""

    def adopt(self, kept_ms: Mapping[str, int | None]) -> None:
        """Take over what other processes were told, except where this one was told itself."""
        for type, ttl_ms in kept_ms.items():
            if type in SHARED and type not in self.told:
                self._durable[type]["default"] = ttl_ms

    def ttl_ms(self, type: str, state: str | None = None, *, volatile: bool = False) -> int | None:
        """The lifetime of a value of this type in this state; None when it is kept."""
        table = self._volatile if volatile else self._durable
        row = table.get(type, table["other"])
        return row.get(state or "default", row["default"])


def _merged(table: Table, changes: Table | None) -> dict[str, dict[str, int | None]]:
    merged: dict[str, dict[str, Duration | None]] = {type: dict(row) for type, row in table.items()}
    if changes is not None and not isinstance(changes, Mapping):
        raise InvalidInput(f"a retention is a table such as {_EXAMPLE}, not {changes!r:.60}")
    for type, row in (changes or {}).items():
        if not isinstance(type, str):
            raise InvalidInput(f"a type of a retention is text, as in {_EXAMPLE}, not {type!r:.60}")
        if not isinstance(row, Mapping) or not all(isinstance(state, str) for state in row):
            raise InvalidInput(f"the retention of type {type!r} is told by state, as in {_EXAMPLE}, not {row!r:.60}")
        merged.setdefault(type, {}).update(row)
        if "default" not in merged[type]:
            raise InvalidInput(f"the retention of type {type!r} needs a 'default'")
    return {
        type: {
            state: None if ttl is None else duration_ms(ttl, name=f"retention of {type}/{state}")
            for state, ttl in row.items()
        }
        for type, row in merged.items()
    }
