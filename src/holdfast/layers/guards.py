"""What is held: a lock, a permit, a leadership, units of a pool. `locks.py` tells how one comes by it.

A guard is given to who holds, with a lease that is kept alive (`leases.py`) until it is released or lost. `space` is a view of
the space in which every write needs that lease, so who has lost it writes nothing, whether it knows or not. `lost`,
`until_lost` and `expires_at` are what this process knows, which is never more than the store does.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from holdfast.clock import as_datetime
from holdfast.engine import Touch
from holdfast.errors import Conflict, Error, LeaseLost
from holdfast.layers.leases import Lease

if TYPE_CHECKING:
    from holdfast.layers.locks import Wanted
    from holdfast.space import Space


class Guard:
    """Something that is held. `space` writes only as long as it is."""

    def __init__(self, wanted: Wanted, lease: Lease, token: int, acquired_at: int) -> None:
        self._wanted = wanted
        self._lease = lease
        self.name = wanted.name
        self.id = lease.key[lease.key.rindex("/") + 1 :]
        self.holder = lease.scope.actor
        self.token = token
        self._acquired_at = acquired_at
        self._beginning: asyncio.Handle | None = None
        self._released = self._releasing = False
        self._tried: asyncio.Event | None = None
        """Of those who give it up while somebody is at it."""

    @cached_property
    def space(self) -> Space:
        """The space, in which every write needs what is held."""
        return self._wanted.view(self._lease.guarding())

    @property
    def acquired_at(self) -> datetime:
        """Since when it is held; by the store's clock, or by the local one if it had to be waited for."""
        return as_datetime(self._acquired_at)

    @property
    def epoch(self) -> int:
        """The token, as elections call it: higher than that of every leader before."""
        return self.token

    @property
    def expires_at(self) -> datetime:
        """Until when it is held if it is not renewed; by the local clock, and never later than the store thinks."""
        return as_datetime(self._lease.good_until)

    @property
    def lost(self) -> bool:
        """Whether it is known to have been lost."""
        return self._lease.lost.is_set() and not self._released

    async def until_lost(self) -> None:
        """Return when it is lost, or was released."""
        await self._lease.lost.wait()

    async def renew(self) -> None:
        """Extend it by its ttl, now; LeaseLost if it is over. It is renewed in the background all the same."""
        lease = self._lease
        if lease.lost.is_set():  # nobody keeps it alive any more
            raise self._lost()
        sent_at, ttl_ms = lease.scope.clock.now_ms(), lease.ttl_ms
        try:
            await lease.scope.unguarded().commit((Touch(lease.key, ttl_ms),))
        except Conflict as conflict:
            self._wanted.coordination.leases.lose(lease)
            raise self._lost() from conflict
        lease.renewed(sent_at, ttl_ms)
        if lease.lost.is_set() and not self._released:  # the answer came too late
            raise self._lost()

    def begin(self) -> None:
        """Write that one's turn has begun, unless it is over before the event loop gets to it."""
        lease, leases = self._lease, self._wanted.coordination.leases
        note = self._wanted.note_turn
        self._beginning = asyncio.get_running_loop().call_soon(lambda: leases.aside(note(lease, self.token)))

    async def release(self) -> None:
        """Give it up; LeaseLost if it was over already. What was given up once is not given up again."""
        while self._releasing:
            self._tried = self._tried or asyncio.Event()
            await self._tried.wait()
        if self._released:
            return
        self._releasing = True
        try:
            await self._release()
        finally:
            self._releasing = False
            if self._tried is not None:
                self._tried.set()
                self._tried = None

    async def _release(self) -> None:
        lease, wanted = self._lease, self._wanted
        if self._beginning is not None:
            self._beginning.cancel()
        wanted.coordination.leases.release(lease)
        try:
            receipt = await wanted.hand_over(lease)
        except asyncio.CancelledError:  # it may not have been sent yet
            self._over()
            await wanted.leave(lease)
            raise
        except Error:
            self._over()
            wanted.coordination.leases.give_up(wanted.step_out(lease))
            raise
        wanted.left(lease, receipt.version)
        if receipt.results[0] is not True:
            lease.lose()
            raise self._lost()
        self._over()

    def _over(self) -> None:
        """It was given up, and that is seen to, whatever else happens."""
        self._released = True
        self._lease.lose()

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"{self._wanted.called} was lost: its lease of {self._lease.ttl_ms / 1000:g} s ended, or somebody broke it. "
            "Nothing was written through guard.space since; what was written otherwise may have met another holder's writes"
        )
