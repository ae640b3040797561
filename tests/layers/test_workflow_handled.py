"""Trying again what failed: failures that the code has handled stay as they were, and what it did after them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, ExecutionHandle, ManualClock, Space, StepFailed, TimedOut, step, workflow
from tests.layers.hosting import Hosts, soon, waits_for
from tests.layers.resuming import RUNS, fails_behind, forget, gate, hosts, note, two

__all__ = ["forget", "hosts"]
pytestmark = two


async def fails(text: str) -> None:
    RUNS.append(text)
    raise ValueError(text)


async def fails_once(text: str) -> str:
    RUNS.append(text)
    if RUNS.count(text) == 1:
        raise ValueError(text)
    return text


async def tried_again(space: Space, hosts: Hosts, code: Any) -> tuple[ExecutionHandle, Any]:
    """One that failed, and how it ended when it was tried again."""
    await hosts.start(code)
    return await again(await space.workflows.start(code))


async def again(handle: ExecutionHandle) -> tuple[ExecutionHandle, Any]:
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())
    await handle.retry()
    return handle, await soon(handle.result())


async def test_a_failure_that_was_handled_is_not_tried_again(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def falls_back(ctx: Context) -> str:
        try:
            await ctx.step("first", fails_once, "first")
        except StepFailed:
            await ctx.step("instead", note, "instead")
        return str(await ctx.step("last", fails_once, "last"))

    handle, result = await tried_again(boss, hosts, falls_back)
    assert result == "last"
    assert RUNS == ["first", "instead", "last", "last"]
    assert (await handle.steps())["first#0"]["status"] == "failed"


async def test_what_the_code_did_before_it_failed_for_good_is_done_again(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def cleans_up(ctx: Context) -> str:
        await ctx.step("before", note, "before")
        try:
            return str(await ctx.step("use", fails_once, "use"))
        except StepFailed:
            await ctx.step("release", note, "release")
            raise

    handle, result = await tried_again(boss, hosts, cleans_up)
    assert result == "use"
    assert RUNS == ["before", "use", "release", "use"]
    assert "release#0" not in await handle.steps()


async def test_the_error_of_an_execution_names_the_step(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def breaks(ctx: Context) -> None:
        await ctx.gather(ctx.step("good", note, "good"), ctx.step("bad", fails, "bad"))

    await hosts.start(breaks)
    handle = await boss.workflows.start(breaks)
    with pytest.raises(ExecutionFailed) as failed:
        await soon(handle.result())
    assert failed.value.step == "bad#0"


async def test_what_ran_beside_a_failure_remains(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def beside(ctx: Context) -> list[Any]:
        async def slow() -> str:
            await ctx.step("one", note, "one")
            return str(await ctx.step("two", note, "two"))

        done = await ctx.gather(slow(), ctx.step("other", note, "other"), return_exceptions=True)
        return [*done, await ctx.gather(ctx.step("bad", fails_once, "bad"), ctx.step("good", note, "good"))]

    _, result = await tried_again(boss, hosts, beside)
    assert result == ["two", "other", ["bad", "good"]]
    assert (RUNS.count("one"), RUNS.count("two"), RUNS.count("other"), RUNS.count("bad")) == (1, 1, 1, 2)


@pytest.mark.parametrize("handled", ["map", "gather", "branch", "wait"])
async def test_failures_that_were_tolerated_remain(boss: Space, hosts: Hosts, clock: ManualClock, handled: str) -> None:
    @workflow
    async def tolerates(ctx: Context) -> str:
        async def branch() -> None:
            try:
                await ctx.step("bad", fails_once, "bad")
            except StepFailed:
                await ctx.step("instead", note, "instead")

        if handled == "map":
            await ctx.map("bad", fails_once, ["bad"], min_success_rate=0)
        elif handled == "gather":
            await ctx.gather(ctx.step("bad", fails_once, "bad"), return_exceptions=True)
        elif handled == "branch":
            await ctx.gather(branch(), ctx.step("good", note, "good"))
        else:
            await ctx.wait_for("bad", timeout="1m", default=None)
        return str(await ctx.step("last", fails_once, "last"))

    await hosts.start(tolerates)
    handle = await boss.workflows.start(tolerates)
    if handled == "wait":
        await waits_for(handle, "signal")
        clock.advance("1m")
    _, result = await again(handle)
    assert result == "last"
    assert RUNS.count("bad") == (handled != "wait")


async def test_a_failure_that_a_step_has_handled_within_itself_remains(boss: Space, hosts: Hosts) -> None:
    async def falls_back_within(ctx: Context) -> str:
        try:
            return str(await ctx.step("first", fails_once, "first"))
        except StepFailed:
            return "instead"

    @workflow
    async def handles_within(ctx: Context) -> list[str]:
        return [await ctx.step("outer", falls_back_within), await ctx.step("last", fails_once, "last")]

    handle, result = await tried_again(boss, hosts, handles_within)
    assert result == ["instead", "last"]
    assert RUNS == ["first", "last", "last"]
    assert (await handle.steps())["outer#0/first#0"]["status"] == "failed"


async def test_steps_of_a_class_that_ran_beside_a_failed_one_remain(boss: Space, hosts: Hosts) -> None:
    @workflow(name="beside_each_other")
    class Steps:
        @step
        async def bad(self, ctx: Context) -> str:
            return await fails_once("bad")

        @step
        async def good(self, ctx: Context) -> str:
            return await note("good")

        @step(after=["bad", "good"])
        async def last(self, ctx: Context, one: str, other: str) -> list[str]:
            return [one, other]

    _, result = await tried_again(boss, hosts, Steps)
    assert result == ["bad", "good"]
    assert RUNS.count("good") == 1


async def test_a_result_that_is_waited_for_after_a_retry_is_that_of_the_retry(boss: Space, hosts: Hosts) -> None:
    """The feed may still show how it ended before."""

    @workflow
    async def second_time(ctx: Context) -> str:
        return str(await ctx.step("only", fails_once, "only"))

    await hosts.start(second_time)
    for _ in range(10):
        RUNS.clear()
        _, result = await again(await boss.workflows.start(second_time))
        assert result == "only"


async def test_where_a_step_and_a_workflow_failed_is_told(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def astray(ctx: Context) -> None:
        await ctx.step("bad", fails, "bad")

    await hosts.start(astray)
    handle = await boss.workflows.start(astray)
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())
    [raised] = (await handle.steps())["bad#0"]["error"]["trace"].splitlines()
    assert raised.startswith(__file__)
    assert raised.endswith("in fails: raise ValueError(text)")
    error = (await handle.status()).error
    assert error is not None
    assert error["trace"].endswith('in astray: await ctx.step("bad", fails, "bad")')


@pytest.mark.parametrize("at_once", ["map", "gather"])
async def test_all_that_failed_before_it_cleaned_up_is_tried_again(boss: Space, hosts: Hosts, at_once: str) -> None:
    @workflow
    async def cleans_up_after_two(ctx: Context) -> list[Any]:
        try:
            if at_once == "map":
                return await ctx.map("use", fails_once, ["one", "two"], min_success_rate=0.9)
            steps = (ctx.step(text, fails_once, text) for text in ("one", "two"))
            found = await ctx.gather(*steps, return_exceptions=True)
            for each in found:
                if isinstance(each, Exception):
                    raise each
            return found
        except StepFailed:
            await ctx.step("release", note, "release")
            raise

    _, result = await tried_again(boss, hosts, cleans_up_after_two)
    assert result == ["one", "two"]


async def test_an_error_that_was_caused_by_a_step_ends_it_with_that_step(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def raises_its_own(ctx: Context) -> str:
        try:
            return str(await ctx.step("use", fails_once, "use"))
        except StepFailed as exc:
            await ctx.step("release", note, "release")
            raise RuntimeError("no use") from exc

    _, result = await tried_again(boss, hosts, raises_its_own)
    assert result == "use"


async def test_a_wait_that_ended_it_is_waited_for_again(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    @workflow
    async def waits(ctx: Context) -> str:
        try:
            return str(await ctx.wait_for("go", timeout="1m"))
        except TimedOut:
            await ctx.step("release", note, "release")
            raise

    await hosts.start(waits)
    handle = await boss.workflows.start(waits)
    await waits_for(handle, "signal")
    clock.advance("1m")
    with pytest.raises(ExecutionFailed) as failed:
        await soon(handle.result())
    assert failed.value.step == "wait:go#0"
    await handle.retry()
    await waits_for(handle, "signal")
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"


async def test_what_came_before_a_branch_that_writes_remains(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def writes_in_a_branch(ctx: Context) -> dict[str, Any]:
        async def branch() -> None:
            ctx.state["in"] = 1
            await ctx.step("last", fails_once, "last")

        try:
            await ctx.step("first", fails_once, "first")
        except StepFailed:
            await ctx.step("instead", note, "instead")
        await ctx.gather(branch())
        return ctx.state.all()

    _, result = await tried_again(boss, hosts, writes_in_a_branch)
    assert result == {"in": 1}
    assert RUNS == ["first", "instead", "last", "last"]


async def fails_when_cancelled() -> None:
    gate("fail").set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("cancelled") from None


async def test_what_came_before_a_failure_remains_although_fewer_are_told_when_it_runs_again(
    boss: Space, hosts: Hosts
) -> None:
    @workflow
    async def two_fail(ctx: Context) -> str:
        try:
            await ctx.gather(ctx.step("one", fails_behind, "fail"), ctx.step("other", fails_when_cancelled))
        except StepFailed:
            await ctx.step("instead", note, "instead")
        await ctx.wait_for("go")
        return str(await ctx.step("last", fails_once, "last"))

    await hosts.start(two_fail)
    handle = await boss.workflows.start(two_fail)
    await waits_for(handle, "signal")
    await handle.signal("go")
    _, result = await again(handle)
    assert result == "last"
    assert RUNS == ["instead", "last", "last"]


async def test_items_that_failed_beside_one_that_was_under_way_are_tried_again(boss: Space, hosts: Hosts) -> None:
    async def item(ctx: Context, n: int) -> int:
        await ctx.step("in", fails_once if n == 0 else note, f"in {n}")
        if n == 1 and RUNS.count("other") == 0:
            gate("fail").set()
            await asyncio.Event().wait()
        return n

    async def other() -> str:
        await gate("fail").wait()
        return await fails_once("other")

    @workflow
    async def cancels_items(ctx: Context) -> list[Any]:
        try:
            await ctx.step("first", fails, "first")
        except StepFailed:
            await ctx.step("instead", note, "instead")
        return await ctx.gather(ctx.map("items", item, [0, 1], min_success_rate=0.9), ctx.step("other", other))

    _, result = await tried_again(boss, hosts, cancels_items)
    assert result == [[0, 1], "other"]
    assert RUNS.count("first") == RUNS.count("instead") == RUNS.count("in 1") == 1
