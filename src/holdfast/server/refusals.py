"""Who was refused beside the rules: strangers who did not get in, and requests that ended before or after the rules.

The rules tell of their own refusals (`middleware/denials.py`). An HTTP request may be refused without them: a token of
another space, what only administrators may ask for, a guard of somebody else. `told` is what the rules have said while a
request was under way; when that is nothing, the port tells itself, so that each refusal is told once.

`Strangers` counts those who showed no good token, and logs them: one at once, and then at most a line a second that says how
many there were, so that whoever knocks without end cannot fill the log.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Literal

from holdfast.clock import Clock
from holdfast.errors import AccessDenied, AuthenticationFailed, Error, QuotaExceeded, RateLimitExceeded
from holdfast.middleware.denials import Denial

DENIALS: Final = (AccessDenied, RateLimitExceeded, QuotaExceeded)
"""What the audit hears of."""
PACE_MS: Final = 1_000

PortName = Literal["binary", "http"]
PORTS: Final[tuple[PortName, ...]] = ("binary", "http")

told: ContextVar[list[Denial] | None] = ContextVar("holdfast.told", default=None)
"""What the rules refused of the request under way; None where nobody asks."""

log = logging.getLogger("holdfast.refusals")


def operation_of(verb: str) -> str:
    """A verb as metrics name it: CompareAndSwap is compare_and_swap."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", verb).lower()


class Strangers:
    """Those who did not get in."""

    def __init__(self, clock: Clock, count: Callable[[PortName], None]) -> None:
        self._clock = clock
        self._count = count
        self._untold = 0
        self._last = ("", "", "")
        self._task: asyncio.Task[None] | None = None

    def note(self, port: PortName, error: Error, peer: str) -> None:
        """One was turned away, with this error."""
        if isinstance(error, AuthenticationFailed):
            self._count(port)
        self._untold += 1
        self._last = (str(error), port, peer)
        if self._task is None:
            self._tell()
            self._task = asyncio.get_running_loop().create_task(self._pace())

    async def close(self) -> None:
        """Tell the rest, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self._tell()

    def _tell(self) -> None:
        if self._untold:
            reason, port, peer = self._last
            log.warning("turned away: %s", reason, extra={"port": port, "peer": peer, "count": self._untold})
            self._untold = 0

    async def _pace(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_ms() + PACE_MS)
            if not self._untold:
                self._task = None
                return
            self._tell()
