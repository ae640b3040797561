"""The tools for testing workflows, tested: time is skipped, steps are replaced, crashes are found, changed code is found out."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Context, InvalidInput, NonDeterminism, Retry, Space, Store, step, workflow
from holdfast.engine import Absent, Batch, Put
from holdfast.engines.memory import MemoryEngine
from holdfast.testing.dying import Dying, Life
from holdfast.testing.replaying import assert_replays, record_history
from holdfast.testing.timeline import Timeline
from holdfast.testing.workflows import LEASE, crash_everywhere, ended, run_workflow


def quoted(order: dict[str, Any]) -> int:
    raise AssertionError("the market is not there in a test")


async def pay(ctx: Context, price: int) -> str:
    await ctx.state.increment("paid", price)
    return ctx.idempotency_key


@workflow(name="settle")
async def settle(ctx: Context, price: int) -> str:
    paid: str = await ctx.step("pay", pay, price)
    return paid


@workflow(name="buy")
async def buy(ctx: Context, order: dict[str, Any]) -> Any:
    price = await ctx.step("quote", quoted, order)
    await ctx.sleep("1d")
    if not await ctx.wait_for("approval", timeout="2d", default=False):
        return "not approved"
    ctx.state["price"] = price
    return await ctx.child(settle, price)


async def test_sleeps_and_timeouts_take_no_time_and_steps_are_replaced() -> None:
    outcome = await run_workflow(buy, {"n": 1}, steps={"quote": lambda order: order["n"] + 6}, workflows=[settle])
    assert (outcome.status, outcome.result) == ("completed", "not approved")
    assert timedelta(days=3) <= outcome.took < timedelta(days=3, hours=1)
    approved = await run_workflow(buy, {"n": 1}, steps={"quote": 7}, signals=[("approval", True)], workflows=[settle])
    assert approved.state == {"price": 7}
    assert [child.state for child in approved.children.values()] == [{"paid": 7}]
    assert approved.steps["quote#0"]["result"] == 7


@workflow
class Research:
    @step
    async def fetch(self, ctx: Context) -> list[int]:
        raise AssertionError("replaced")

    @step(each="fetch", retry=Retry(3, initial="1h", longest="2h"))
    def analyse(self, ctx: Context, item: int) -> int:
        return item * 2

    @step(after="analyse")
    async def report(self, ctx: Context, results: list[int]) -> int:
        return sum(results)


async def test_steps_of_classes_and_items_of_maps_are_replaced_and_fail_where_they_are_told_to() -> None:
    assert (await run_workflow(Research, steps={"fetch": [1, 2, 3]})).result == 12
    seen: list[int] = []

    async def flaky(ctx: Context, item: int) -> int:
        seen.append(item)
        if ctx.attempt < 3:
            raise OSError("not yet")
        return item

    outcome = await run_workflow(Research, steps={"fetch": [5], "analyse": flaky})
    assert (outcome.result, seen) == (5, [5, 5, 5])
    assert outcome.took > timedelta(hours=2)
    failed = await run_workflow(Research, steps={"fetch": RuntimeError("no market")})
    assert (failed.status, failed.result) == ("failed", None)
    assert failed.error is not None
    assert "no market" in failed.error["message"]


@workflow
async def waits_for_nobody(ctx: Context) -> Any:
    return await ctx.wait_for("never")


async def test_what_never_ends_says_what_it_waits_for() -> None:
    with pytest.raises(AssertionError, match=r"does not end.*never"):
        await run_workflow(waits_for_nobody)


async def test_a_workflow_that_is_right_survives_a_crash_at_every_commit() -> None:
    crashes = await crash_everywhere(buy, {"n": 1}, steps={"quote": 7}, signals=[("approval", 1)], workflows=[settle])
    assert crashes >= 12


async def test_code_that_does_not_repeat_itself_is_found_by_crashes() -> None:
    runs: list[int] = []

    @workflow(name="forgetful")
    async def forgetful(ctx: Context) -> int:
        runs.append(1)
        await ctx.step("a", lambda: None)
        await ctx.step("b", lambda: None)
        return len(runs)  # how often it ran is no business of its result

    async def crash() -> None:
        runs.clear()
        await crash_everywhere(forgetful, compare=lambda outcome: [runs.clear(), outcome.result][1])

    with pytest.raises(AssertionError, match="killed before commit"):
        await crash()


async def history_of(target: Any, *, until: str | None = None, signals: tuple[str, ...] = ()) -> dict[str, Any]:
    """Recorded from a store, as JSON; with `until`, while it waits for a signal."""
    clock = Timeline()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = store.space("s", agent="boss")
        handle = await space.workflows.start(target, {"n": 1}, id="x")
        for name in signals:
            await handle.signal(name, True)

        life = Life(space, Path(), [target, settle], replaced={"quote": _seven}, lease=LEASE)
        wait = ended(store, space) if until is None else _parked(store, space)
        await clock.run(asyncio.ensure_future(wait))
        history = await record_history(handle)
        await life.end()
    recorded: dict[str, Any] = json.loads(json.dumps(history))
    return recorded


async def _seven(order: Any) -> int:
    return 7


async def _parked(store: Store, space: Space) -> None:
    async for _ in store.engine.watch(space.name, "workflows/executions/", cursor="r0"):
        views = await space.workflows.list()
        if views and any(wait["kind"] == "signal" for wait in views[0].waits):
            return


def variant(code: Any) -> Any:
    return workflow(name="buy")(code)


async def test_unchanged_code_replays_its_histories_without_doing_anything() -> None:
    for history in (
        await history_of(buy, signals=("approval",)),
        await history_of(buy, until="approval"),
        await history_of(buy),
    ):
        await assert_replays(buy, history)


async def test_a_good_replay_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    await assert_replays(buy, await history_of(buy, signals=("approval",)))
    await assert_replays(buy, await history_of(buy, until="approval"))
    assert [record.getMessage() for record in caplog.records if "cannot" in record.getMessage()] == []


async def test_a_step_that_was_renamed_is_named_with_the_recorded_one() -> None:
    @variant
    async def renamed(ctx: Context, order: Any) -> Any:
        return await ctx.step("price", quoted, order)

    with pytest.raises(NonDeterminism) as found:
        await assert_replays(renamed, await history_of(buy, signals=("approval",)))
    assert (found.value.recorded, found.value.called) == ("quote#0", "price#0")


async def test_a_step_that_is_not_called_any_more_and_one_that_was_added_are_found() -> None:
    @variant
    async def shorter(ctx: Context, order: Any) -> Any:
        await ctx.step("quote", quoted, order)
        await ctx.sleep("1d")

    @variant
    async def longer(ctx: Context, order: Any) -> Any:
        paid = await original(ctx, order)
        await ctx.step("thank", pay, 1)
        return paid

    original: Any = buy
    history = await history_of(buy, signals=("approval",))
    with pytest.raises(NonDeterminism) as found:
        await assert_replays(shorter, history)
    assert (found.value.recorded, found.value.called) == ("wait:approval#0", "its end")
    with pytest.raises(NonDeterminism) as found:
        await assert_replays(longer, history)
    assert (found.value.recorded, found.value.called) == ("its end", "thank")
    await assert_replays(longer, await history_of(buy, until="approval"))  # it had not come so far


async def test_a_failure_where_there_was_a_result_is_found() -> None:
    @variant
    async def broken(ctx: Context, order: Any) -> Any:
        await original(ctx, order)
        return order["no such thing"]

    original: Any = buy
    with pytest.raises(NonDeterminism) as found:
        await assert_replays(broken, await history_of(buy, signals=("approval",)))
    assert found.value.recorded == "its end, completed"
    assert found.value.called == "its end, failed with KeyError: 'no such thing'"
    await assert_replays(broken, await history_of(buy, until="approval"))  # it had not come so far


async def test_a_change_behind_a_version_goes_the_old_way_for_old_executions() -> None:
    @variant
    async def versioned(ctx: Context, order: Any) -> Any:
        if ctx.version("price-twice"):
            await ctx.step("check", quoted, order)
        return await original(ctx, order)

    original: Any = buy
    await assert_replays(versioned, await history_of(buy, signals=("approval",)))


async def test_a_history_of_another_workflow_is_refused() -> None:
    history = await history_of(buy)
    with pytest.raises(InvalidInput, match="'buy', and not of 'settle'"):
        await assert_replays(settle, history)
    with pytest.raises(InvalidInput, match="no history"):
        await assert_replays(buy, {"format": 9})


async def test_who_dies_after_a_commit_that_is_refused_is_dead_as_well() -> None:
    engine = Dying(MemoryEngine(), 1, after=True)
    await engine.commit("s", Batch("agent", (Put("records/a", b"1"),)))
    refused = Batch("agent", (Put("records/a", b"2"),), (Absent("records/a"),))
    last = asyncio.ensure_future(engine.commit("s", refused))
    await engine.dead.wait()
    while engine.dying:
        await asyncio.sleep(0)
    assert not last.done(), "nobody hears of it"
    last.cancel()
