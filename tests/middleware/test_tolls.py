"""What a request pays whose body has yet to come, and what it pays if that comes to nothing."""

from __future__ import annotations

import pytest

from holdfast import ManualClock
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import RateLimitExceeded
from holdfast.identity import Identity
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import RateLimit, Rules
from holdfast.middleware.tolls import Tolls

AGENT = Identity("market", "agent", "contoso", "1")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def policy(clock: ManualClock) -> Policy:
    return Policy(MemoryEngine(clock=clock), clock, Rules(rate_limits=(RateLimit("*", 1, 4),)))


async def test_looking_takes_nothing(policy: Policy) -> None:
    tolls = Tolls(policy)
    for _ in range(20):
        tolls.look(AGENT)
    for _ in range(3):  # of four one is kept for renewals
        await policy.engine_for(AGENT).get("contoso", ["records/a"])


async def test_who_has_nothing_left_is_refused_until_there_is_something(policy: Policy, clock: ManualClock) -> None:
    tolls = Tolls(policy)
    for _ in range(4):
        tolls.look(AGENT)
        tolls.charge(AGENT)
    with pytest.raises(RateLimitExceeded, match="the body was not read") as refused:
        tolls.look(AGENT)
    assert refused.value.retry_after == 1
    with pytest.raises(RateLimitExceeded):
        await policy.engine_for(AGENT).get("contoso", ["records/a"])
    clock.advance(1)
    tolls.look(AGENT)


async def test_what_is_kept_for_renewals_lets_a_body_in(policy: Policy) -> None:
    engine, tolls = policy.engine_for(AGENT), Tolls(policy)
    for _ in range(3):
        await engine.get("contoso", ["records/a"])
    with pytest.raises(RateLimitExceeded):
        await engine.get("contoso", ["records/a"])
    tolls.look(AGENT)


def test_who_has_no_rate_is_never_refused(policy: Policy) -> None:
    tolls = Tolls(policy)
    for _ in range(20):
        tolls.look(Identity("root", "admin", "*", "2"))
        tolls.charge(Identity("root", "admin", "*", "2"))
