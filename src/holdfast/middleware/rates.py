"""How often: a bucket of tokens per agent and role in a space, charged by the operation.

A bucket holds `burst` tokens and gets `max_ops_per_second` new ones a second. It is kept as what is owed, in whole numbers
(the rate is taken as the decimal fraction that was written), so nothing is rounded: no sequence of requests gets more than
burst + rate x time, and a refusal names the very millisecond at which the same request would pass.

A part of the burst (RESERVE) is kept for renewals, which only touch what is there: who sends all that its rate allows would
otherwise lose what it holds. Everything else is refused when only that part is left; but for a request that is so large that
it would never pass, and needs almost the whole burst: after that one, too, the next tokens are for renewals. A burst of 1 has
no such part.

All connections of an agent in one role share its bucket; a name that has tokens of two roles has two, for its limits are two. A bucket that owes nothing is forgotten when nobody holds it; one that owes
something is kept, so that coming back does not fill it. When the clock is set back nobody gets tokens for it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final
from weakref import WeakValueDictionary

from holdfast.identity import Role
from holdfast.middleware.rules import RateLimit

KEPT_MIN: Final = 1024
"""Buckets that are kept before the first look at which of them owe nothing any more."""
RESERVE: Final = 8
"""One token of so many is kept for renewals, and at least one of two."""


class Bucket:
    """What one agent of a space may still do in one role at the moment."""

    __slots__ = (
        "__weakref__",
        "_kept",
        "_open",
        "_owed",
        "_rates",
        "at_ms",
        "burst",
        "capacity",
        "open",
        "per_ms",
        "unit",
    )

    def __init__(self, rates: Rates, limit: RateLimit) -> None:
        self._rates = rates
        self._owed = 0
        self._kept = False
        self.at_ms = 0
        self.unit = 1
        self.limit_to(limit)

    def limit_to(self, limit: RateLimit) -> None:
        """Apply this limit from now on; what is owed stays owed."""
        rate = Fraction(str(limit.max_ops_per_second))
        before, self.unit, self.per_ms = self.unit, 1000 * rate.denominator, rate.numerator
        self._owed = -(-self._owed * self.unit // before)
        self.burst = limit.burst
        self.capacity = limit.burst * self.unit
        self.open = limit.burst - reserve_of(limit.burst)
        """What is not kept for renewals."""
        self._open = self.open * self.unit

    def charge(self, tokens: int, now_ms: int, *, renewal: bool = False) -> int:
        """Take so many tokens, or none and tell in how many milliseconds there will be enough; 0 when they were taken."""
        past = now_ms - self.at_ms
        self.at_ms = now_ms
        owed = self._owed
        if past > 0:
            owed -= past * self.per_ms
            if owed < 0:
                owed = 0
        after = owed + tokens * self.unit
        if after > self._open:
            limit = self.capacity if renewal or tokens > self.open else self._open
            if after > limit:
                self._owed = owed
                return -((limit - after) // self.per_ms)
        self._owed = after
        if not self._kept:
            self._kept = True
            self._rates.keep(self)
        return 0

    def charge_all(self, requests: int, now_ms: int) -> bool:
        """Take the tokens of so many requests of one each, or none; whether they were taken."""
        return requests <= self.open and not self.charge(requests, now_ms)

    def give_back(self, tokens: int) -> None:
        """They were taken, and what they were for was not done."""
        self._owed = max(self._owed - tokens * self.unit, 0)

    def settled(self, now_ms: int) -> bool:
        """Whether it is full again."""
        return self._owed <= (now_ms - self.at_ms) * self.per_ms

    def let_go(self) -> None:
        self._kept = False


def reserve_of(burst: int) -> int:
    """How many tokens of a burst are kept for renewals."""
    return max(1, burst // RESERVE) if burst > 1 else 0


class Rates:
    """The buckets of all agents."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, str, Role], Bucket] = WeakValueDictionary()
        self._kept: list[Bucket] = []
        self._look_at = KEPT_MIN

    def bucket(self, space: str, agent: str, role: Role, limit: RateLimit) -> Bucket:
        """The bucket that all connections of this agent in this role share, under this limit."""
        bucket = self._known.get((space, agent, role))
        if bucket is None:
            bucket = self._known[space, agent, role] = Bucket(self, limit)
        else:
            bucket.limit_to(limit)
        return bucket

    def keep(self, bucket: Bucket) -> None:
        """It owes something: remember it until it does not."""
        self._kept.append(bucket)
        if len(self._kept) > self._look_at:
            owing = []
            for each in self._kept:
                if each.settled(bucket.at_ms):
                    each.let_go()
                else:
                    owing.append(each)
            self._kept = owing
            self._look_at = max(KEPT_MIN, 2 * len(owing))
