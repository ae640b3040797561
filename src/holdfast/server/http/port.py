"""What the requests of one port share: the keeper behind it, its limits, and what is going on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from holdfast.errors import Unavailable
from holdfast.server.admission import Admission
from holdfast.server.http.limits import Limits
from holdfast.server.http.shares import Shares
from holdfast.server.served import Served

T = TypeVar("T")


class Port:
    """One HTTP port of a keeper."""

    def __init__(
        self, keeper: Served, metrics: Callable[[], bytes] | None, limits: Limits, *, metrics_open: bool
    ) -> None:
        self.keeper = keeper
        self.metrics = metrics
        self.metrics_open = metrics_open
        self.shares = Shares(limits)
        self.admission = Admission(self, "shown a token")
        self.feeds: Counter[str] = Counter()
        """Open feeds by token."""
        self._asked: dict[tuple[str, ...], tuple[asyncio.Lock, int]] = {}

    @property
    def limits(self) -> Limits:
        return self.shares.limits

    @property
    def stopping(self) -> asyncio.Event:
        return self.shares.stopping

    def observe(self, op: str, outcome: str, seconds: float) -> None:
        """What does not get in is told to the keeper by its connection, with its peer."""

    @asynccontextmanager
    async def one_at_a_time(self, *name: str) -> AsyncIterator[None]:
        """Requests of the same name wait for each other; for those that must not be repeated while they run."""
        lock, users = self._asked.get(name, (asyncio.Lock(), 0))
        self._asked[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._asked[name][1] - 1
            if users:
                self._asked[name] = (lock, users)
            else:
                del self._asked[name]

    async def unless_stopped(self, work: Coroutine[Any, Any, T], leaving: Coroutine[Any, Any, None]) -> T:
        """Something that may wait for long. When the server stops, or the client leaves, it is given up, and nothing is held."""
        task = asyncio.ensure_future(work)
        stopped, left = asyncio.ensure_future(self.stopping.wait()), asyncio.ensure_future(leaving)
        try:
            await asyncio.wait((task, stopped, left), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if stopped.done():
                raise Unavailable("the server is stopping; repeat the request when it is back")
            left.result()
            raise Unavailable("the client went away; what it waited for was given up")
        finally:
            for each in (task, stopped, left):
                each.cancel()
            await asyncio.gather(task, stopped, left, return_exceptions=True)
