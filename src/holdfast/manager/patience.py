"""A store that cannot be reached for a while: the same request again, until it is answered or nobody wants it any more.

A manager writes what happened to processes, and that has happened whether the store is there or not. So a commit that was not
answered is sent again under its request id, which makes it happen once; a read is asked again. That ends when the manager gives
up, which it does when its lease is over by its own clock: from then on what it had is others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from holdfast.clock import Clock, sleep_or
from holdfast.engine import Batch, Engine, Entry, Page, Receipt, SpaceInfo
from holdfast.errors import OutcomeUnknown, RateLimitExceeded, Unavailable
from holdfast.middleware.wrapper import Wrapper

PAUSE_MS: Final = 50
"""Before the first repetition; each further one waits twice as long, up to PAUSE_MS_MAX."""
PAUSE_MS_MAX: Final = 500

T = TypeVar("T")


class PatientEngine(Wrapper):
    """Repeats what was not answered, until it is told to give up."""

    def __init__(self, inner: Engine, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self.given_up = asyncio.Event()
        """Set it, and what is not answered from then on fails at once."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        sent = batch

        async def send() -> Receipt:
            nonlocal sent
            trying, sent = sent, msgspec.structs.replace(batch, fresh=False) if batch.fresh else batch
            return await self.inner.commit(space, trying)

        return await self._insist(send, repeatable=batch.request_id is not None)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return await self._insist(lambda: self.inner.get(space, keys))

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        return await self._insist(lambda: self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse))

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        return await self._insist(lambda: self.inner.spaces(name))

    async def _insist(self, ask: Callable[[], Awaitable[T]], *, repeatable: bool = True) -> T:
        pause_ms = PAUSE_MS
        while True:
            try:
                return await ask()
            except (Unavailable, RateLimitExceeded):
                if self.given_up.is_set():
                    raise
            except OutcomeUnknown:
                if self.given_up.is_set() or not repeatable:
                    raise
            await sleep_or(self._clock, self._clock.now_ms() + pause_ms, self.given_up)
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)
