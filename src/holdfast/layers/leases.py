"""Leases: entries of one's own that end by themselves unless they are kept alive.

Whatever is held (a lock, a permit, a leadership; later a message or a running workflow) is held by an entry with a ttl.
While its holder lives, `Leases` touches it three times within the ttl, all leases of a space in one batch. When the holder
dies, is paused or cut off, the entry expires, and from that instant the store refuses what is conditional on it: a view of
the space made with `Lease.guarding` writes nothing more. There is no other notion of liveness: no process ids, no timers
that outlive what they were set for.

How it fails. A lease that could not be touched in time is lost: `lost` is set, and nobody tries to revive it. Until when a
lease is good is reckoned on the local clock from before the touch was sent, so a holder never believes longer than the
store does; also while a touch is under way that nobody answers. When that clock is set back, all are touched at once. Whoever is
over its rate with all of them touches fewer at a time from then on; where one of them may not be touched, the others are
touched without it. To give up a lease is to delete its entry, and that is tried until the store has answered or the lease is
over (`insist`), whether whoever gives it up stays or goes (`see_to`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from holdfast.clock import Clock, sleep_or
from holdfast.engine import OPERATIONS_MAX, Batch, Present, Touch
from holdfast.errors import AccessDenied, Conflict, Error, OutcomeUnknown, RateLimitExceeded, Unavailable
from holdfast.layers.scope import Scope

RENEWALS: Final = 3
"""Touches within a ttl: two may fail."""
LEAVING_S: Final = 1.0
"""How long one waits to hear that what one gives up is gone, and a store that is closed for those who do not."""
AGAIN_MS: Final = 50
"""The pause before what did not reach the store is tried again; twice as long each time, up to AGAIN_MS_MAX."""
AGAIN_MS_MAX: Final = 2_000
EARLY_MS: Final = 100
"""How much too early a timer may be, by the clock, before that is taken for a clock that was set back."""

T = TypeVar("T")

log = logging.getLogger("holdfast.leases")


class Lease:
    """One entry that is kept alive; made by `Leases.keep`."""

    def __init__(self, scope: Scope, key: str, ttl_ms: int, good_until: int) -> None:
        self.scope = scope
        self.key = key
        self.ttl_ms = ttl_ms
        """By how much the next touch extends it."""
        self.turn_ms: int | None = None
        """Of one who waits: the ttl it is to have from its turn on. None where that is the ttl it has."""
        self.good_until = good_until
        """By the local clock."""
        self.renew_at = good_until - ttl_ms + ttl_ms // RENEWALS
        self.renewing = False
        self.value = b""
        """What its entry says, if it was written anew since it was made."""
        self.lost = asyncio.Event()
        self._told: list[asyncio.Event] = []

    def tell(self, event: asyncio.Event) -> None:
        """Set this event too when the lease is lost."""
        self._told.append(event)
        if self.lost.is_set():
            event.set()

    def lose(self) -> None:
        """It is over."""
        for event in (self.lost, *self._told):
            event.set()

    def guarding(self) -> Scope:
        """The scope in which every write needs this lease."""
        return self.scope.guarded(Present(self.key))

    def renewed(self, sent_at: int, ttl_ms: int) -> None:
        """It was touched. Whether that was before or after it was written with another ttl is not known, and a touch never shortens."""
        sent_at = min(sent_at, self.scope.clock.now_ms())  # it may have been set back meanwhile
        self.good_until = max(self.good_until, sent_at + min(ttl_ms, self.ttl_ms))
        self.renew_at = sent_at + ttl_ms // RENEWALS

    def begun(self, sent_at: int) -> None:
        """Its turn has come, and whoever was before it has touched it with the whole ttl."""
        if self.turn_ms is not None:
            self.ttl_ms, self.turn_ms = self.turn_ms, None
            self.renewed(sent_at, self.ttl_ms)

    def written(self, sent_at: int, ttl_ms: int) -> None:
        """Its entry was written, with this ttl."""
        sent_at = min(sent_at, self.scope.clock.now_ms())
        self.ttl_ms = ttl_ms
        self.good_until = sent_at + ttl_ms
        self.renew_at = sent_at + ttl_ms // RENEWALS


class Leases:
    """Keeps the leases of a store alive, as long as there are any."""

    def __init__(self, clock: Clock, *, renew: bool = True) -> None:
        """With `renew=False` a place is kept alive while it waits, and what is held ends with its ttl: for whoever acquires on
        behalf of a holder whose life it cannot see."""
        self._clock = clock
        self.renews = renew
        self._kept: set[Lease] = set()
        self._changed = asyncio.Event()
        self._look_at = 0
        """When the task looks next; until it has looked for the first time it sees whatever comes."""
        self._seen = 0
        """The latest time the clock has shown."""
        self._together = OPERATIONS_MAX
        """How many are touched by one batch."""
        self._task: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        """Those aside that give something up."""

    def keep(self, scope: Scope, key: str, ttl_ms: int, sent_at: int) -> Lease:
        """Keep this entry alive from now on; its ttl was set by a batch sent at `sent_at`."""
        sent_at = min(sent_at, self._clock.now_ms())  # it may have been set back meanwhile
        lease = Lease(scope, key, ttl_ms, sent_at + ttl_ms)
        self._seen = max(self._seen, sent_at)
        self._keep(lease)
        return lease

    def _keep(self, lease: Lease) -> None:
        self._kept.add(lease)
        if lease.renew_at < self._look_at:
            self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def written(self, lease: Lease, sent_at: int, ttl_ms: int) -> None:
        """Its entry was written by a batch sent at `sent_at`: it has this ttl from then on."""
        lease.written(sent_at, ttl_ms)
        if lease.renew_at < self._look_at:
            self._changed.set()

    def keeps(self, lease: Lease) -> bool:
        """Whether it is still kept alive."""
        return lease in self._kept

    def regained(self, lease: Lease) -> None:
        """Its turn was written in time, and the answer came when it was believed to be over: it is kept alive again.

        Only before anybody was given it: whoever was told that it is lost is not told otherwise.
        """
        if lease.lost.is_set() and lease.good_until > self._clock.now_ms():
            lease.lost.clear()
            self._keep(lease)

    def granted(self, lease: Lease) -> None:
        """What was waited for is held from now on."""
        if not self.renews:
            self.release(lease)

    def release(self, lease: Lease) -> None:
        """Keep it alive no longer; whoever holds it deletes its entry."""
        self._kept.discard(lease)

    async def close(self) -> None:
        """Stop. What is still held ends when its ttl is over; what was given up has a moment to be gone."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVING_S)
        ending = [*self._aside, *([] if self._task is None else [self._task])]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        self._task = None

    async def _run(self) -> None:
        called = True
        while self._kept:
            self._changed.clear()
            now = self._clock.now_ms()
            # Whom nobody called has slept until then, whatever the clock says now.
            passed, early_ms = (self._seen, 0) if called else (max(self._seen, self._look_at), EARLY_MS)
            if passed - now > early_ms:
                self._set_back(passed - now, now)
            self._seen = now
            for lease in [lease for lease in self._kept if lease.good_until <= now]:
                self.lose(lease)
            due = (lease for lease in self._kept if lease.renew_at <= now and not lease.renewing)
            for group in _alike(due, self._together):
                for lease in group:
                    lease.renewing = True
                self.aside(self._renew(group))
            if self._kept:
                ends = (lease.good_until if lease.renewing else lease.renew_at for lease in self._kept)
                self._look_at = min(ends)
                called = await sleep_or(self._clock, self._look_at, self._changed)
        self._task = None

    def _set_back(self, by: int, now: int) -> None:
        """The clock was set back: what was reckoned by it would be believed, and not touched, for longer by that."""
        for lease in self._kept:
            lease.good_until -= by
            lease.renew_at = now

    def aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this about a lease while its holder goes on; it ends when this is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task

    def give_up(self, leaving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this about something that nobody wants any more, whether whoever had it stays or goes."""
        task = self.aside(leaving)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def see_to(self, leaving: Coroutine[Any, Any, None]) -> None:
        """The same, and wait a moment for it."""
        await asyncio.wait((self.give_up(leaving),), timeout=LEAVING_S)

    async def insist(self, commit: Callable[[], Awaitable[T]], until: int) -> T:
        """Try this until the store has answered, or the time has come; what more tries do not mend is raised at once."""
        pause_ms = AGAIN_MS
        while True:
            try:
                return await commit()
            except (Unavailable, OutcomeUnknown, RateLimitExceeded) as exc:
                if isinstance(exc, RateLimitExceeded):
                    pause_ms = max(pause_ms, int(exc.retry_after * 1000) + 1)
                now = self._clock.now_ms()
                if now + pause_ms >= until:
                    raise
            await self._clock.sleep_until(now + pause_ms)
            pause_ms = min(2 * pause_ms, AGAIN_MS_MAX)

    async def _renew(self, leases: list[Lease]) -> None:
        try:
            await self._touch(leases)
        finally:
            for lease in leases:
                lease.renewing = False
            self._changed.set()

    async def _touch(self, leases: list[Lease]) -> None:
        """Touch them in one batch. One that has ended is taken out, and the others are touched again; so are those that may be."""
        scope = leases[0].scope
        while leases:
            sent_at = self._clock.now_ms()
            touches = {lease: Touch(lease.key, lease.ttl_ms) for lease in leases}
            batch = Batch(scope.actor, tuple(touches.values()))
            try:
                await scope.engine.commit(scope.space, batch)
            except Conflict as conflict:
                ended = [lease for lease in leases if lease.key == conflict.key]
                for lease in ended:
                    self.lose(lease)
                leases = [lease for lease in leases if lease not in ended and lease in self._kept]
                continue
            except Error as exc:
                if isinstance(exc, AccessDenied) and len(leases) > 1:
                    half = len(leases) // 2
                    await self._touch(leases[:half])
                    leases = leases[half:]
                    continue
                soon = [lease.ttl_ms // RENEWALS // 4 + 1 for lease in leases]
                if isinstance(exc, RateLimitExceeded):
                    self._together = max(1, len(leases) // 2)
                    soon = [min(each, int(exc.retry_after * 1000) + 1) for each in soon]
                log.warning(
                    "%d leases in %s could not be renewed and are tried again: %s", len(leases), scope.space, exc
                )
                for lease, pause_ms in zip(leases, soon, strict=True):  # not at once
                    lease.renew_at = sent_at + pause_ms
                return
            for lease, touch in touches.items():
                lease.renewed(sent_at, touch.ttl_ms)
            return

    def lose(self, lease: Lease) -> None:
        """It was found to be over."""
        self._kept.discard(lease)
        lease.lose()


def _alike(leases: Iterable[Lease], together: int) -> list[list[Lease]]:
    """Leases that one batch can touch: of one space and one actor, on one engine, not too many."""
    groups: dict[tuple[int, str, str], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((id(lease.scope.engine), lease.scope.space, lease.scope.actor), []).append(lease)
    return [group[start : start + together] for group in groups.values() for start in range(0, len(group), together)]
