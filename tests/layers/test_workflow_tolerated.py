"""Trying again what failed: what a map has tolerated stays as it was, unless it is asked for by name."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, ExecutionHandle, Space, StepFailed, step, workflow
from holdfast.testing.replaying import assert_replays, record_history
from tests.layers.hosting import Hosts, soon
from tests.layers.resuming import RUNS, forget, hosts, note, two

__all__ = ["forget", "hosts"]
pytestmark = two
ITEMS = ["a", "b", "c", "d"]


async def b_fails_once(text: str) -> str:
    RUNS.append(text)
    if text == "b" and RUNS.count("b") == 1:
        raise ValueError(text)
    return text


async def fails_once(text: str) -> str:
    RUNS.append(text)
    if RUNS.count(text) == 1:
        raise ValueError(text)
    return text


@workflow(name="tolerant_chain")
class Chain:
    @step
    async def first(self, ctx: Context) -> list[str]:
        return ITEMS

    @step(each="first", min_success_rate=0.5)
    async def items(self, ctx: Context, item: str) -> str:
        return await b_fails_once(item)

    @step(after="items")
    async def between(self, ctx: Context, found: list[Any]) -> list[Any]:
        return [await note("between"), found]

    @step(after="between")
    async def last(self, ctx: Context, found: list[Any]) -> list[Any]:
        return [*found, await fails_once("last")]


@workflow(name="tolerant_beside")
class Beside:
    """What ends it needs nothing of what was tolerated, and nothing comes after that."""

    @step
    async def first(self, ctx: Context) -> list[str]:
        return ITEMS

    @step(each="first", min_success_rate=0.5)
    async def items(self, ctx: Context, item: str) -> str:
        return await b_fails_once(item)

    @step(after="items")
    async def after(self, ctx: Context, found: list[Any]) -> list[Any]:
        return [await note("between"), found]

    @step
    async def last(self, ctx: Context) -> str:
        await ctx.wait_for("go")
        return await fails_once("last")


@workflow(name="tolerant_end")
class End:
    """What was tolerated is the last of its kind."""

    @step
    async def first(self, ctx: Context) -> list[str]:
        return ITEMS

    @step(each="first", min_success_rate=0.5)
    async def items(self, ctx: Context, item: str) -> str:
        return await b_fails_once(item)

    @step
    async def last(self, ctx: Context) -> str:
        await ctx.wait_for("go")
        return await fails_once("last")


@workflow(name="tolerant_queue")
class Queued:
    @step
    async def first(self, ctx: Context) -> list[str]:
        return ITEMS

    @step(each="first", min_success_rate=0.5, queue="gpu")
    async def items(self, ctx: Context, item: str) -> str:
        return await b_fails_once(item)

    @step(after="items")
    async def last(self, ctx: Context, found: list[Any]) -> list[Any]:
        return [found, await fails_once("last")]


@workflow
async def mapped(ctx: Context) -> list[Any]:
    found = await ctx.map("items", b_fails_once, ITEMS, min_success_rate=0.5)
    return [found, await ctx.step("last", fails_once, "last")]


@workflow
async def in_a_branch(ctx: Context) -> list[Any]:
    async def waits() -> str:
        await ctx.wait_for("go")
        return str(await ctx.step("last", fails_once, "last"))

    return await ctx.gather(ctx.map("items", b_fails_once, ITEMS, min_success_rate=0.5), waits())


@workflow
async def in_a_step(ctx: Context) -> list[Any]:
    async def nested(ctx: Context) -> list[Any]:
        return await ctx.map("items", b_fails_once, ITEMS, min_success_rate=0.5)

    return [await ctx.step("nested", nested), await ctx.step("last", fails_once, "last")]


@workflow
async def raises_itself(ctx: Context) -> list[Any]:
    """Nothing is called after what was tolerated."""
    found = await ctx.map("items", b_fails_once, ITEMS, min_success_rate=0.5)
    RUNS.append("last")
    if RUNS.count("last") == 1:
        raise ValueError("last")
    return found


STYLES: dict[str, Any] = {
    "chain": Chain,
    "beside": Beside,
    "end": End,
    "queue": Queued,
    "map": mapped,
    "branch": in_a_branch,
    "nested": in_a_step,
    "itself": raises_itself,
}
WITH_SIGNAL = (Beside, End, in_a_branch)


async def failed(space: Space, hosts: Hosts, code: Any) -> ExecutionHandle:
    await hosts.start(code, queues=["gpu"])
    handle = await space.workflows.start(code)
    if code in WITH_SIGNAL:
        await handle.signal("go")
    await ended_badly(handle)
    return handle


async def ended_badly(handle: ExecutionHandle) -> None:
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())


async def statuses(handle: ExecutionHandle) -> list[str]:
    return [each["status"] for each in (await handle.steps()).values() if each["kind"] == "item"]


@pytest.mark.parametrize("style", STYLES)
async def test_what_was_tolerated_is_not_tried_again(boss: Space, hosts: Hosts, style: str) -> None:
    code = STYLES[style]
    await hosts.start(code, queues=["gpu"])
    handle = await boss.workflows.start(code)
    if code in WITH_SIGNAL:
        while len(await statuses(handle)) < len(ITEMS) or (code is Beside and "between" not in RUNS):
            await soon(boss.workflows.get(handle.id))
        await handle.signal("go")
    await ended_badly(handle)
    await handle.retry()
    if code in (Beside, End):
        await handle.signal("go")  # the first one was taken by the step that is done again
    await soon(handle.result())
    assert sorted(RUNS) == sorted([*ITEMS, "last", "last", *(["between"] if code in (Chain, Beside) else [])])
    assert await statuses(handle) == ["completed", "failed", "completed", "completed"]
    await assert_replays(code, await record_history(handle))


@pytest.mark.parametrize("style", ["chain", "map", "queue"])
async def test_it_is_when_its_step_is_asked_for(boss: Space, hosts: Hosts, style: str) -> None:
    handle = await failed(boss, hosts, STYLES[style])
    await handle.retry(from_step="items")
    await soon(handle.result())
    assert [RUNS.count(item) for item in ITEMS] == [2, 2, 2, 2]
    assert await statuses(handle) == ["completed"] * 4


@pytest.mark.parametrize("style", ["chain", "map"])
async def test_one_item_that_is_asked_for_is_done_again_alone(boss: Space, hosts: Hosts, style: str) -> None:
    handle = await failed(boss, hosts, STYLES[style])
    await handle.retry(from_step="items#0/1")
    await soon(handle.result())
    assert [RUNS.count(item) for item in ITEMS] == [1, 2, 1, 1]
    assert await statuses(handle) == ["completed"] * 4


async def test_a_map_that_was_taken_back_and_fails_then_is_tried_again(boss: Space, hosts: Hosts) -> None:
    """What it had tolerated before does not count any more."""
    broken = {"b"}

    async def breaks(text: str) -> str:
        RUNS.append(text)
        if text in broken:
            raise ValueError(text)
        return text

    @workflow
    async def fails_later(ctx: Context) -> list[Any]:
        found = await ctx.map("items", breaks, ITEMS, min_success_rate=0.7)
        return [found, await ctx.step("last", fails_once, "last")]

    await hosts.start(fails_later)
    handle = await boss.workflows.start(fails_later)
    await ended_badly(handle)
    broken.add("a")
    await handle.retry(from_step="items#0/0")
    await ended_badly(handle)
    assert (await handle.status()).error["step"] == "items#0/0"  # type: ignore[index]
    broken.clear()
    await handle.retry()
    assert await soon(handle.result()) == [ITEMS, "last"]
    assert [RUNS.count(item) for item in ITEMS] == [3, 2, 1, 1]


@pytest.mark.parametrize("style", ["class", "map"])
async def test_a_map_that_too_many_failed_of_is_tried_again(boss: Space, hosts: Hosts, style: str) -> None:
    @workflow(name="too_many")
    class TooMany:
        @step
        async def first(self, ctx: Context) -> list[str]:
            return ITEMS

        @step(each="first", min_success_rate=0.5)
        async def items(self, ctx: Context, item: str) -> str:
            return await fails_once(item)

    @workflow
    async def too_many_mapped(ctx: Context) -> list[Any]:
        return await ctx.map("items", fails_once, ITEMS, min_success_rate=0.5)

    handle = await failed(boss, hosts, TooMany if style == "class" else too_many_mapped)
    await handle.retry()
    assert await soon(handle.result()) == ITEMS
    assert [RUNS.count(item) for item in ITEMS] == [2, 2, 2, 2]


async def test_what_a_map_in_a_step_tolerated_goes_with_the_step(boss: Space, hosts: Hosts) -> None:
    async def nested(ctx: Context) -> list[Any]:
        found = await ctx.map("items", b_fails_once, ITEMS, min_success_rate=0.5)
        await fails_once("in the step")
        return found

    @workflow
    async def breaks_in_a_step(ctx: Context) -> Any:
        try:
            return await ctx.step("nested", nested)
        except StepFailed:
            await ctx.step("release", note, "release")
            raise

    handle = await failed(boss, hosts, breaks_in_a_step)
    await handle.retry()
    assert await soon(handle.result()) == ITEMS
    assert [RUNS.count(item) for item in ITEMS] == [2, 2, 2, 2]
