"""The four patterns and the three profiles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import InvalidInput, ManualClock, Route, Stop, Unavailable, fan_in, fan_out, route, sequence
from holdfast.layers.patterns import AGENTS_MAX, PROFILES


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return number * 2


def triple(number: int) -> int:
    return number * 3


def fail(number: Any) -> Any:
    raise ValueError("no data")


async def hang(number: Any) -> Any:
    await asyncio.Event().wait()


async def advance_when_waiting(clock: ManualClock, by: str) -> None:
    while not clock._sleepers:
        await asyncio.sleep(0)
    clock.advance(by)


async def test_an_agent_whose_own_task_is_cancelled_takes_nobody_with_it() -> None:
    async def gives_up(number: int) -> None:
        task = asyncio.ensure_future(hang(number))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    outcomes = await fan_out({"a": double, "b": gives_up}, 7)
    assert outcomes["a"].value == 14
    assert isinstance(outcomes["b"].error, Unavailable)
    asking = asyncio.ensure_future(fan_out({"a": double, "b": hang}, 7))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_fan_out_gives_every_answer_and_every_failure() -> None:
    outcomes = await fan_out({"a": double, "b": triple, "c": fail}, 7)
    assert {name: outcome.value for name, outcome in outcomes.items() if outcome.ok} == {"a": 14, "b": 21}
    assert isinstance(outcomes["c"].error, ValueError)


async def test_an_agent_that_does_not_answer_costs_the_others_nothing() -> None:
    clock = ManualClock()
    asking = asyncio.ensure_future(fan_out({"a": double, "slow": hang}, 1, timeout="5s", clock=clock))
    await advance_when_waiting(clock, "5s")
    outcomes = await asking
    assert outcomes["a"].value == 2
    assert isinstance(outcomes["slow"].error, Unavailable)


async def test_who_gives_up_a_fan_out_leaves_no_agent_running() -> None:
    ended = asyncio.Event()

    async def agent(payload: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asking = asyncio.ensure_future(fan_out({"a": agent}, 1))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    assert ended.is_set()


async def test_a_fan_out_has_a_limit() -> None:
    with pytest.raises(InvalidInput):
        await fan_out({}, 1)
    with pytest.raises(InvalidInput):
        await fan_out({f"a{number}": double for number in range(AGENTS_MAX + 1)}, 1)


def wants(action: str) -> Any:
    return lambda payload: {"action": action, "confidence": 0.8}


async def test_fan_in_merges_what_agents_answer() -> None:
    agents = {"a": wants("trade"), "b": wants("trade"), "c": wants("monitor")}
    assert (await fan_in(agents, {}, merge="majority"))["action"] == "trade"


async def test_fan_in_with_too_few_answers_is_a_timeout_and_with_enough_a_partial_decision() -> None:
    agents = {"a": wants("trade"), "b": fail}
    assert await fan_in(agents, {}, merge="majority") == {
        "action": "timeout",
        "reason": "workflow_timeout",
        "partial_signals": ["a"],
        "missing_signals": ["b"],
        "missing_count": 1,
    }
    assert (await fan_in(agents, {}, merge="majority", min_agents=1))["action"] == "trade"


async def test_the_first_rule_that_matches_says_who_does_it() -> None:
    rules = [Route(lambda n: n > 10, double, "large"), Route(lambda n: n > 5, triple, "middle")]
    assert [await route(rules, number, default=lambda n: n) for number in (20, 7, 1)] == [40, 21, 1]


async def test_what_no_rule_matches_needs_a_default() -> None:
    with pytest.raises(InvalidInput, match="no default"):
        await route([Route(lambda n: False, double)], 1)


async def test_a_sequence_hands_on_what_each_stage_gives() -> None:
    ran = await sequence({"double": double, "triple": triple}, 2)
    assert (ran.value, ran.done, ran.reason) == (12, ("double", "triple"), None)


async def test_a_stage_may_stop_the_sequence_with_a_reason() -> None:
    ran = await sequence({"double": double, "check": lambda n: Stop("too large", n), "never": fail}, 2)
    assert (ran.value, ran.done, ran.stopped_by, ran.reason) == (4, ("double", "check"), "check", "too large")


async def test_an_error_in_a_stage_is_raised() -> None:
    with pytest.raises(ValueError, match="no data"):
        await sequence({"a": fail}, 1)


def test_the_profiles_say_how_many_and_how_long() -> None:
    assert {name: (profile.agents, profile.timeout_ms) for name, profile in PROFILES.items()} == {
        "simple": (2, 60_000),
        "workflow": (3, 300_000),
        "high_frequency": (1, 10_000),
    }
