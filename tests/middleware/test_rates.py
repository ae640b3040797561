"""How often: no sequence of requests gets more than the burst and the rate, and a refusal says exactly when to come back."""

from __future__ import annotations

import asyncio
import gc
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine import Absent, Delete, Increment, Put
from holdfast.errors import AccessDenied, RateLimitExceeded
from holdfast.middleware.rates import KEPT_MIN, Rates
from holdfast.middleware.rules import AccessRule, RateLimit, Rules
from tests.middleware.keeper import SPACE, Keeper, batch, refusal
from tests.soak import examples


def limited(per_second: float, burst: int, pattern: str = "*") -> Rules:
    return Rules(None, (RateLimit(pattern, per_second, burst),), ())


async def test_a_batch_is_charged_by_its_operations() -> None:
    keeper = Keeper(limited(10, 20))
    engine = keeper.engine_of("a")
    await engine.commit(SPACE, batch("a", *(Increment(f"records/{i}", 1) for i in range(15))))
    with pytest.raises(RateLimitExceeded) as caught:
        await engine.commit(SPACE, batch("a", *(Increment(f"records/{i}", 1) for i in range(6))))
    assert caught.value.retry_after == 0.1
    await engine.commit(SPACE, batch("a", *(Increment(f"records/{i}", 1) for i in range(5))))
    assert {entry.value for entry in (await keeper.entries()).values()} == {b"1", b"2"}


async def test_conditions_are_charged_where_they_are_more() -> None:
    keeper = Keeper(limited(10, 20))
    engine = keeper.engine_of("a")
    probes = tuple(Absent(f"records/{i}") for i in range(15))
    await engine.commit(SPACE, batch("a", Put("records/x", b"1"), when=probes))
    with pytest.raises(RateLimitExceeded):
        await engine.commit(SPACE, batch("a", when=probes[:6]))


async def test_every_kind_of_request_is_charged() -> None:
    keeper = Keeper(limited(1, 7))
    engine = keeper.engine_of("a")
    await engine.get(SPACE, ["records/1", "records/2"])
    await engine.scan(SPACE, "records/")
    assert [commit async for commit in engine.watch(SPACE, "records/", live=False)] == []
    await engine.spaces()
    await engine.create(SPACE)
    await engine.commit(SPACE, batch("a"))
    for attempt in (
        engine.get(SPACE, ["records/1"]),
        engine.scan(SPACE, "records/"),
        anext(aiter(engine.watch(SPACE, "records/", live=False)), None),
        engine.spaces(),
        engine.create(SPACE),
        engine.commit(SPACE, batch("a")),
        engine.commit(SPACE, batch("a", Put("records/k", b"1"))),
        engine.commit(SPACE, batch("a", Delete("records/k"))),
    ):
        with pytest.raises(RateLimitExceeded):
            await attempt
    assert {denial.code for denial in keeper.denials} == {"rate_limit_exceeded"}


async def test_a_batch_that_is_larger_than_the_burst_is_told_so() -> None:
    keeper = Keeper(limited(10, 3))
    with pytest.raises(RateLimitExceeded, match="burst of 3"):
        await keeper.engine_of("a").get(SPACE, [f"records/{i}" for i in range(4)])


async def test_connections_of_an_agent_share_its_rate_and_agents_do_not() -> None:
    keeper = Keeper(limited(1, 2))
    first, second = keeper.engine_of("a"), keeper.engine_of("a")
    await first.get(SPACE, ["records/1"])
    await second.get(SPACE, ["records/1"])
    for engine in (first, second, keeper.engine_of("a")):
        with pytest.raises(RateLimitExceeded):
            await engine.get(SPACE, ["records/1"])
    await keeper.engine_of("b").get(SPACE, ["records/1"])
    await keeper.engine_of("a", space="fabrikam").get("fabrikam", ["records/1"])


async def test_who_comes_back_finds_the_rate_as_it_left_it() -> None:
    keeper = Keeper(limited(1, 2))
    for _ in range(2):
        await keeper.engine_of("a").get(SPACE, ["records/1"])
        gc.collect()
    with pytest.raises(RateLimitExceeded):
        await keeper.engine_of("a").get(SPACE, ["records/1"])


async def test_the_first_rule_that_matches_counts_and_without_one_there_is_no_limit() -> None:
    keeper = Keeper(Rules(None, (RateLimit("a*", 1, 1), RateLimit("ab", 1, 100)), ()))
    await keeper.engine_of("ab").get(SPACE, ["records/1"])
    with pytest.raises(RateLimitExceeded):
        await keeper.engine_of("ab").get(SPACE, ["records/1"])
    for _ in range(1000):
        await keeper.engine_of("x").get(SPACE, ["records/1"])


async def test_the_limits_of_the_role_count_where_there_are_no_rules() -> None:
    keeper = Keeper(Rules())
    agent, boss = keeper.engine_of("a"), keeper.engine_of("b", "orchestrator")
    await agent.get(SPACE, [f"records/{i}" for i in range(200)])
    with pytest.raises(RateLimitExceeded) as caught:
        await agent.get(SPACE, ["records/1"])
    assert caught.value.retry_after == 0.01
    await boss.get(SPACE, [f"records/{i}" for i in range(2000)])
    with pytest.raises(RateLimitExceeded):
        await boss.get(SPACE, ["records/1"])
    for _ in range(30):
        await keeper.admin.get(SPACE, [f"records/{i}" for i in range(1000)])


async def test_what_was_used_counts_under_new_rules() -> None:
    keeper = Keeper(limited(1, 10))
    engine = keeper.engine_of("a")
    await engine.get(SPACE, [f"records/{i}" for i in range(10)])
    keeper.policy.reload(limited(7, 12))
    with pytest.raises(RateLimitExceeded):
        await engine.get(SPACE, [f"records/{i}" for i in range(3)])
    await engine.get(SPACE, [f"records/{i}" for i in range(2)])


async def test_access_comes_before_rate_and_a_denied_request_costs_nothing() -> None:
    keeper = Keeper(Rules((AccessRule("*", ("Get",)),), (RateLimit("*", 1, 1),), ()))
    engine = keeper.engine_of("a")
    for _ in range(3):
        with pytest.raises(AccessDenied):
            await engine.commit(SPACE, batch("a", Put("records/k", b"1")))
    await engine.get(SPACE, ["records/k"])


async def test_a_clock_that_is_set_back_gives_nobody_more_and_blocks_nobody() -> None:
    keeper = Keeper(limited(1, 2))
    engine = keeper.engine_of("a")
    await engine.get(SPACE, ["records/1", "records/2"])
    keeper.clock.set_back("1h")
    with pytest.raises(RateLimitExceeded) as caught:
        await engine.get(SPACE, ["records/1"])
    assert caught.value.retry_after == 1
    keeper.clock.advance("1s")
    await engine.get(SPACE, ["records/1"])


def test_buckets_that_are_full_again_are_forgotten_and_others_are_not() -> None:
    rates, limit = Rates(), RateLimit("*", 1, 1)
    for i in range(10 * KEPT_MIN):
        assert rates.bucket(SPACE, f"agent-{i}", limit).charge(1, i * 2) == 0
    assert len(rates._known) <= 2 * KEPT_MIN + 1
    last = 10 * KEPT_MIN - 1
    assert rates.bucket(SPACE, f"agent-{last}", limit).charge(1, last * 2) > 0


rate = st.one_of(st.integers(1, 500), st.sampled_from((0.1, 0.3, 1.7, 33.3, 999.99)))
requests = st.lists(
    st.tuples(st.sampled_from((0, 0, 0, 1, 7, 100, 1500)), st.integers(1, 12), st.sampled_from("gbs"), st.booleans()),
    max_size=60,
)


@settings(max_examples=examples(60), deadline=None)
@given(rate, st.integers(1, 30), requests)
def test_no_sequence_gets_more_than_the_burst_and_the_rate(
    per_second: float, burst: int, requests: list[tuple[int, int, str, bool]]
) -> None:
    async def work() -> None:
        keeper = Keeper(limited(per_second, burst))
        engines = (keeper.engine_of("a"), keeper.engine_of("a"))
        granted: list[tuple[int, int]] = []
        exact = Fraction(str(per_second))
        for pause_ms, count, kind, second in requests:
            if pause_ms:
                keeper.clock.advance(pause_ms / 1000)
            engine, now = engines[second], keeper.clock.now_ms()
            keys = [f"records/{i}" for i in range(count)]
            if kind == "g":
                refused = await refusal(engine.get(SPACE, keys))
            elif kind == "b":
                refused = await refusal(engine.commit(SPACE, batch("a", *(Put(key, b"1") for key in keys))))
            else:
                count, refused = 1, await refusal(engine.scan(SPACE, "records/"))
            if refused is None:
                granted.append((now, count))
                used = 0
                for at, tokens in reversed(granted):  # every window that ends here
                    used += tokens
                    assert used <= burst + exact * (now - at) / 1000
            else:
                assert isinstance(refused, RateLimitExceeded)
                wait_ms = round(refused.retry_after * 1000)
                assert wait_ms > 0
                if count <= burst:
                    # At that moment it would pass, and a millisecond before it would not: by the buckets' own rule.
                    spent = Fraction(0)
                    last = granted[0][0] if granted else now
                    for at, tokens in granted:
                        spent = max(Fraction(0), spent - exact * (at - last) / 1000) + tokens
                        last = at

                    def room(after_ms: int, spent: Fraction = spent, last: int = last, now: int = now) -> Fraction:
                        return burst - max(Fraction(0), spent - exact * (now + after_ms - last) / 1000)

                    assert room(wait_ms) >= count > room(wait_ms - 1)

    asyncio.run(work())
