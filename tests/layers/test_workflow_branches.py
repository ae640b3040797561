"""Branches of which one fails before the others have begun: they do nothing, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, Space, workflow
from tests.layers.hosting import Hosts, soon, waits_for
from tests.layers.resuming import two

DONE: list[str] = []


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    DONE.clear()
    yield made
    await soon(made.close())


async def fails() -> None:
    raise ValueError("no")


async def does(name: str) -> None:
    DONE.append(name)


async def two_steps(ctx: Context) -> None:
    await ctx.step("first", does, "first")
    await ctx.step("second", does, "second")


async def two_calls(ctx: Context) -> None:
    first, second = ctx.step("first", does, "first"), ctx.step("second", does, "second")
    try:
        await first
    finally:
        second.close()


async def nobody_comes(ctx: Context) -> None:
    await ctx.wait_for("nothing")


OTHERS: dict[str, Callable[[Context], list[Awaitable[Any]]]] = {
    "a call": lambda ctx: [ctx.step("other", does, "other")],
    "code": lambda ctx: [two_steps(ctx)],
    "code that makes two calls before it awaits one": lambda ctx: [two_calls(ctx)],
    "several": lambda ctx: [two_steps(ctx), ctx.sleep("1h"), ctx.step("other", does, "other")],
    "a wait": lambda ctx: [ctx.wait_for("nothing")],
    "a map": lambda ctx: [ctx.map("each", does, ["a", "b"])],
    "a gather": lambda ctx: [ctx.gather(ctx.step("other", does, "other"), nobody_comes(ctx), ctx.sleep("1h"))],
    "gathers of gathers": lambda ctx: [ctx.gather(two_steps(ctx), ctx.gather(two_steps(ctx), ctx.sleep("1h")))],
    "one that failed as well": lambda ctx: [ctx.gather(fails(), two_steps(ctx))],
}


@workflow
async def gathers(ctx: Context, others: str) -> str:
    try:
        await ctx.gather(fails(), *OTHERS[others](ctx))
    except ValueError as exc:
        found = str(exc)
    await ctx.step("after", does, "after")
    await ctx.wait_for("go")
    return found


@workflow
async def gathers_within(ctx: Context, others: str) -> str:
    """The same, one branch further down, beside a branch that has begun."""
    try:
        await ctx.gather(nobody_comes(ctx), ctx.gather(fails(), *OTHERS[others](ctx)))
    except ValueError as exc:
        found = str(exc)
    await ctx.step("after", does, "after")
    await ctx.wait_for("go")
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("code", [gathers, gathers_within])
@pytest.mark.parametrize("others", OTHERS)
async def test_what_has_not_begun_when_another_fails_does_nothing_and_holds_up_nothing(
    boss: Space, hosts: Hosts, code: Any, others: str
) -> None:
    await hosts.start(code)
    handle = await boss.workflows.start(code, others)
    await waits_for(handle, "signal")  # it was put aside: nothing counts that does not go on
    await handle.signal("go")
    assert await soon(handle.result()) == "no"
    assert DONE == ["after"]


@two
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("others", OTHERS)
async def test_code_that_cleans_up_while_it_is_put_aside_begins_nothing(boss: Space, hosts: Hosts, others: str) -> None:
    @workflow
    async def cleans(ctx: Context, others: str) -> str:
        try:
            await ctx.wait_for("go")
        finally:
            await ctx.gather(two_steps(ctx), *OTHERS[others](ctx), ctx.step("last", does, "last"))
        return "done"

    await hosts.start(cleans)
    handle = await boss.workflows.start(cleans, others)
    await waits_for(handle, "signal")
    assert DONE == []
    await handle.cancel()
    with pytest.raises(ExecutionFailed, match="was cancelled"):
        await soon(handle.result())


# --- calls that nobody awaits, or not yet ---


async def does_in_a_while(name: str) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    DONE.append(name)


async def drops_one(ctx: Context) -> None:
    """Made, never awaited, and left by a branch that is cancelled."""
    forgotten = ctx.step("forgotten", does, "forgotten")
    try:
        await ctx.wait_for("nothing")
    finally:
        forgotten.close()


@workflow
async def cancelled_with_one(ctx: Context) -> str:
    async def breaks() -> None:
        await ctx.step("first", does_in_a_while, "first")
        await fails()

    try:
        await ctx.gather(breaks(), drops_one(ctx))
    except ValueError as exc:
        found = str(exc)
    await ctx.wait_for("go")
    return found


@workflow
async def forgets_one(ctx: Context) -> str:
    ctx.step("forgotten", does, "forgotten").close()
    await ctx.wait_for("go")
    return "no"


@workflow
async def awaits_one_later(ctx: Context) -> str:
    later = ctx.step("first", does, "first")
    try:
        await ctx.wait_for("go")
        await later
    finally:
        later.close()
    return "no"


@two
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("code", [cancelled_with_one, forgets_one, awaits_one_later])
async def test_a_call_that_nobody_awaits_holds_up_nothing(boss: Space, hosts: Hosts, code: Any) -> None:
    await hosts.start(code)
    handle = await boss.workflows.start(code)
    await waits_for(handle, "signal")  # it was put aside
    assert (["first"] if code is cancelled_with_one else []) == DONE
    await handle.signal("go")
    assert await soon(handle.result()) == "no"
    assert ([] if code is forgets_one else ["first"]) == DONE


@two
async def test_a_call_that_a_task_of_the_code_awaits_is_done_before_it_is_put_aside(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def starts_a_task(ctx: Context) -> str:
        task = asyncio.ensure_future(ctx.step("first", does, "first"))
        await ctx.wait_for("go")
        await task
        return "no"

    await hosts.start(starts_a_task)
    handle = await boss.workflows.start(starts_a_task)
    await waits_for(handle, "signal")
    assert DONE == ["first"]
    await handle.signal("go")
    assert await soon(handle.result()) == "no"
    assert DONE == ["first"]
