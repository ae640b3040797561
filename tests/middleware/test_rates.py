"""How often: no sequence of requests gets more than the burst and the rate, and a refusal says exactly when to come back."""

from __future__ import annotations

import asyncio
import gc
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import ManualClock
from holdfast.engine import Absent, Delete, Engine, Increment, Push, Put, Touch
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import AccessDenied, RateLimitExceeded
from holdfast.identity import Identity
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.middleware.policy import Policy
from holdfast.middleware.rates import KEPT_MIN, Bucket, Rates, reserve_of
from holdfast.middleware.rules import AccessRule, RateLimit, Rules
from tests.middleware.keeper import SPACE, Keeper, batch, refusal
from tests.soak import examples


def limited(per_second: float, burst: int, pattern: str = "*") -> Rules:
    return Rules(None, (RateLimit(pattern, per_second, burst),), ())


async def test_a_batch_is_charged_by_its_operations() -> None:
    keeper = Keeper(limited(10, 20))  # two of them are for renewals
    engine = keeper.engine_of("a")
    await engine.commit(SPACE, batch("a", *(Increment(f"records/{i}", 1) for i in range(13))))
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
    keeper = Keeper(limited(1, 8))
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
    keeper = Keeper(limited(1, 3))
    first, second = keeper.engine_of("a"), keeper.engine_of("a")
    await first.get(SPACE, ["records/1"])
    await second.get(SPACE, ["records/1"])
    for engine in (first, second, keeper.engine_of("a")):
        with pytest.raises(RateLimitExceeded):
            await engine.get(SPACE, ["records/1"])
    await keeper.engine_of("b").get(SPACE, ["records/1"])
    await keeper.engine_of("a", space="fabrikam").get("fabrikam", ["records/1"])


async def test_who_comes_back_finds_the_rate_as_it_left_it() -> None:
    keeper = Keeper(limited(1, 3))
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
    await agent.get(SPACE, [f"records/{i}" for i in range(175)])
    with pytest.raises(RateLimitExceeded) as caught:
        await agent.get(SPACE, ["records/1"])
    assert caught.value.retry_after == 0.01
    await boss.get(SPACE, [f"records/{i}" for i in range(1750)])
    with pytest.raises(RateLimitExceeded):
        await boss.get(SPACE, ["records/1"])
    for _ in range(30):
        await keeper.admin.get(SPACE, [f"records/{i}" for i in range(1000)])


async def test_what_was_used_counts_under_new_rules() -> None:
    keeper = Keeper(limited(1, 10))
    engine = keeper.engine_of("a")
    await engine.get(SPACE, [f"records/{i}" for i in range(9)])
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


async def test_a_name_with_tokens_of_two_roles_has_in_each_what_that_role_may() -> None:
    keeper = Keeper(Rules(quotas=()))  # as it ships
    agent, boss = keeper.engine_of("alice"), keeper.engine_of("alice", "orchestrator")
    await boss.get(SPACE, ["records/k"])
    used = 0
    while await refusal(agent.commit(SPACE, batch("alice", Increment("records/n", 1)))) is None:
        used += 1
        keeper.engine_of("alice", "orchestrator")  # one more connection
    assert used == 175  # the burst, but for renewals
    await boss.get(SPACE, [f"records/{i}" for i in range(1000)])
    assert isinstance(await refusal(agent.get(SPACE, ["records/k"])), RateLimitExceeded)


async def test_a_clock_that_is_set_back_gives_nobody_more_and_blocks_nobody() -> None:
    keeper = Keeper(limited(1, 3))
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
        assert rates.bucket(SPACE, f"agent-{i}", "agent", limit).charge(1, i * 2) == 0
    assert len(rates._known) <= 2 * KEPT_MIN + 1
    last = 10 * KEPT_MIN - 1
    assert rates.bucket(SPACE, f"agent-{last}", "agent", limit).charge(1, last * 2) > 0


# --- renewals ---


async def test_who_used_up_its_rate_can_still_renew_and_no_more_than_its_burst() -> None:
    keeper = Keeper(limited(1, 24))
    engine = keeper.engine_of("a")
    line = [Push("locks/lock/l/", b"{}", 60_000) for _ in range(3)]
    places = [str(key) for key in (await engine.commit(SPACE, batch("a", *line))).results]
    await engine.get(SPACE, [f"records/{i}" for i in range(18)])
    for ordinary in (engine.get(SPACE, ["records/1"]), engine.commit(SPACE, batch("a", Delete(places[0])))):
        with pytest.raises(RateLimitExceeded):
            await ordinary
    with pytest.raises(RateLimitExceeded):  # it does more than to renew
        await engine.commit(SPACE, batch("a", Touch(places[0], 60_000), Put("records/k", b"1")))
    await engine.commit(SPACE, batch("a", *(Touch(key, 60_000) for key in places)))
    with pytest.raises(RateLimitExceeded) as caught:
        await engine.commit(SPACE, batch("a", Touch(places[0], 60_000)))
    assert caught.value.retry_after == 1
    keeper.clock.advance("1s")
    with pytest.raises(RateLimitExceeded):  # the next tokens are for renewals
        await engine.get(SPACE, ["records/1"])
    await engine.commit(SPACE, batch("a", Touch(places[0], 60_000)))


@pytest.mark.parametrize("burst", [1, 2, 3])
async def test_of_a_tiny_burst_something_is_left_for_everybody(burst: int) -> None:
    keeper = Keeper(limited(1, burst))
    engine = keeper.engine_of("a")
    for _ in range(3):
        await engine.commit(SPACE, batch("a", Put("records/k", b"1")))
        keeper.clock.advance(burst)
        await engine.get(SPACE, [f"records/{i}" for i in range(burst)])  # as much as there is
        keeper.clock.advance(burst)


async def test_what_needs_almost_the_whole_burst_passes_when_it_is_there_and_then_renewals_are_first() -> None:
    keeper = Keeper(limited(10, 16))
    engine = keeper.engine_of("a")
    await keeper.admin.commit(SPACE, batch("root", Put("records/k", b"1")))
    await engine.get(SPACE, [f"records/{i}" for i in range(16)])
    keeper.clock.advance("200ms")
    with pytest.raises(RateLimitExceeded) as caught:
        await engine.get(SPACE, ["records/k"])
    assert caught.value.retry_after == 0.1
    await engine.commit(SPACE, batch("a", Touch("records/k", 1000), Touch("records/k", 1000)))


@given(
    st.integers(2, 60), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 60)), max_size=30)
)
def test_whatever_else_was_sent_the_reserve_is_there_for_renewals(
    burst: int, rate: int, drawn: list[tuple[int, int]]
) -> None:
    bucket, now, kept = Bucket(Rates(), RateLimit("*", rate, burst)), 0, reserve_of(burst)
    for pause, tokens in drawn:
        now += pause
        bucket.charge(min(tokens, burst - kept), now)
        assert bucket.charge(kept, now, renewal=True) == 0
        bucket.give_back(kept)


async def test_an_agent_that_floods_keeps_its_lock() -> None:
    clock = ManualClock()
    policy = Policy(MemoryEngine(clock=clock), clock, limited(10, 20))
    engine: Engine = policy.engine_for(Identity("a", "agent", SPACE))
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        coordination = Coordination(Leases(clock), engine)
        space = store.seen_through(engine, SPACE, "a", coordination)
        guard = await space.lock("book", ttl=6).acquire()
        refused = 0
        for _ in range(600):  # a minute
            clock.advance("100ms")
            for _ in range(5):
                refused += await refusal(engine.get(SPACE, ["records/k"])) is not None
            for _ in range(5):
                await asyncio.sleep(0)
        assert refused > 2000
        assert not guard.lost
        [held] = (await policy.engine.scan(SPACE, "locks/")).entries
        assert held.key.endswith(guard.id)
        await coordination.close()


async def test_a_lock_that_is_renewed_by_its_id_is_kept_by_an_agent_that_floods() -> None:
    """As over HTTP, where nobody renews it in the background."""
    clock = ManualClock()
    policy = Policy(MemoryEngine(clock=clock), clock, limited(10, 20))
    engine: Engine = policy.engine_for(Identity("a", "agent", SPACE))
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        coordination = Coordination(Leases(clock, renew=False), engine)
        space = store.seen_through(engine, SPACE, "a", coordination)
        guard = await space.lock("book", ttl=6).acquire()
        for _ in range(20):
            while await refusal(engine.get(SPACE, ["records/k"])) is None:
                pass
            clock.advance("2s")
            while await refusal(engine.get(SPACE, ["records/k"])) is None:
                pass
            await space.locks.renew("lock", "book", guard.id, 6)
        await coordination.close()


rate = st.one_of(st.integers(1, 500), st.sampled_from((0.1, 0.3, 1.7, 33.3, 999.99)))
requests = st.lists(
    st.tuples(st.sampled_from((0, 0, 0, 1, 7, 100, 1500)), st.integers(1, 12), st.sampled_from("gbst"), st.booleans()),
    max_size=60,
)


@settings(max_examples=examples(60), deadline=None)
@given(rate, st.integers(1, 30), requests)
def test_no_sequence_gets_more_than_the_burst_and_the_rate(
    per_second: float, burst: int, requests: list[tuple[int, int, str, bool]]
) -> None:
    async def work() -> None:
        keeper = Keeper(limited(per_second, burst))
        await keeper.admin.commit(SPACE, batch("root", *(Put(f"records/{i}", b"1") for i in range(12))))
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
            elif kind == "t":
                refused = await refusal(engine.commit(SPACE, batch("a", *(Touch(key, 1000) for key in keys))))
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
                kept = reserve_of(burst)
                limit = burst if kind == "t" or count > burst - kept else burst - kept
                if count <= limit:
                    # At that moment it would pass, and a millisecond before it would not: by the buckets' own rule.
                    spent = Fraction(0)
                    last = granted[0][0] if granted else now
                    for at, tokens in granted:
                        spent = max(Fraction(0), spent - exact * (at - last) / 1000) + tokens
                        last = at

                    def room(after_ms: int, spent: Fraction = spent, last: int = last, now: int = now) -> Fraction:
                        return -max(Fraction(0), spent - exact * (now + after_ms - last) / 1000)

                    assert limit + room(wait_ms) >= count > limit + room(wait_ms - 1)

    asyncio.run(work())
