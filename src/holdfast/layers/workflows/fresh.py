"""Executions that were started in this process a moment ago: whoever runs them here need not read what was just written.

It is as good as read as long as nothing has been sent to the execution since, which its worker knows from the feed (`worker.py`). If its
state has changed otherwise, the first commit of the run is refused, as it is when the state changes after it was read.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.layers.coordination import Coordination
from holdfast.layers.scope import Scope

FRESH_MAX: Final = 256
BYTES_MAX: Final = 16 * 1024
"""Of one of them; others are read."""


class Started(NamedTuple):
    """What was written of an execution, and the version of both entries."""

    version: int
    meta: bytes
    execution: bytes


class Fresh:
    """Those of one space, the oldest first."""

    def __init__(self) -> None:
        self._started: dict[str, Started] = {}

    @classmethod
    def of(cls, coordination: Coordination, scope: Scope) -> Fresh:
        found: Fresh = coordination.fresh.setdefault(scope.space, cls())
        return found

    def put(self, id: str, started: Started) -> None:
        if len(started.meta) <= BYTES_MAX:
            self._started[id] = started
            if len(self._started) > FRESH_MAX:
                del self._started[next(iter(self._started))]

    def take(self, id: str) -> Started | None:
        return self._started.pop(id, None)
