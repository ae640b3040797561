"""Executions that a worker of this process got in the commit of their start: it need not read what was just written.

Whoever has the message has the execution, so nobody else has changed it since. What may have come is a letter, which the worker knows from
the feed (`worker.py`). That holds for the very message that came with the start, and as long as its worker has it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.layers.coordination import Coordination
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import Execution, Meta

FRESH_MAX: Final = 256
BYTES_MAX: Final = 16 * 1024
"""Of the input of one of them; others are read."""


class Started(NamedTuple):
    """What was written of an execution, the version of all of it, and under which key its message stands."""

    key: str
    version: int
    meta: Meta
    execution: Execution


class Fresh:
    """Those of one space, the oldest first."""

    def __init__(self) -> None:
        self._started: dict[str, Started] = {}

    @classmethod
    def of(cls, coordination: Coordination, scope: Scope) -> Fresh:
        found: Fresh = coordination.fresh.setdefault(scope.space, cls())
        return found

    def put(self, id: str, started: Started) -> None:
        if len(bytes(started.meta.input)) <= BYTES_MAX:
            self._started[id] = started
            if len(self._started) > FRESH_MAX:
                del self._started[next(iter(self._started))]

    def take(self, id: str, key: str, version: int) -> Started | None:
        """What was written of it, if this is the message that came with it, and was not given back in the meantime."""
        started = self._started.pop(id, None)
        return started if started is not None and (started.key, started.version) == (key, version) else None

    def clear(self) -> None:
        self._started.clear()
