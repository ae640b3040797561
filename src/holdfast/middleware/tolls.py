"""What a request pays before anybody knows what it is: its body has yet to come.

The rules charge for what a request does (`policy.py`), and that is not known before its body is read. Until then it only has to
be one that could pass: `look` refuses whoever has no token left at all, not even one that is kept for renewals. A request that
comes to nothing, because its body does not arrive or is no good, pays 1 for the trouble (`charge`).

How it fails. RateLimitExceeded, with `retry_after`; nothing was done, nothing was taken. Whoever catches it tells of it.
"""

from __future__ import annotations

from holdfast.errors import RateLimitExceeded
from holdfast.identity import Identity
from holdfast.middleware.grants import grant_of
from holdfast.middleware.policy import Policy
from holdfast.middleware.rates import Bucket


class Tolls:
    """The rates of a policy, for requests that it does not see."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def look(self, identity: Identity) -> None:
        """RateLimitExceeded if nothing this identity asks for would pass now."""
        bucket = self._bucket(identity)
        if bucket is None:
            return
        if wait_ms := bucket.charge(1, self._policy.clock.now_ms(), renewal=True):
            raise RateLimitExceeded(
                f"{identity.agent!r} is over its rate; the body was not read, and nothing was done. "
                f"Try again in {wait_ms / 1000:g} s",
                retry_after=wait_ms / 1000,
            )
        bucket.give_back(1)

    def charge(self, identity: Identity) -> None:
        """A request came to nothing."""
        bucket = self._bucket(identity)
        if bucket is not None:
            bucket.charge(1, self._policy.clock.now_ms(), renewal=True)

    def _bucket(self, identity: Identity) -> Bucket | None:
        rate = grant_of(self._policy.rules, identity).rate
        if rate is None:
            return None
        return self._policy.rates.bucket(identity.space, identity.agent, identity.role, rate)
