"""What a step sees that runs while other branches are still replayed: everything that was written, whether or not they have come to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, Space, workflow
from tests.layers.hosting import Hosts, soon
from tests.layers.resuming import RUNS, double, forget, hosts
from tests.layers.test_workflow_turns import waiting
from tests.layers.tills import New, Old, renamed

__all__ = ["forget", "hosts"]


async def add(ctx: Context, n: int) -> int:
    """Reads a key and sets it, and adds to three of other kinds."""
    RUNS.append(f"add {n}")
    ctx.state["total"] = ctx.state.get("total", 0) + n
    await ctx.state.increment("count", n)
    await ctx.state.append_to_list("list", n)
    await ctx.state.add_to_set("set", n)
    return n


async def look(ctx: Context) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"keys": sorted(ctx.state), **ctx.state.all()}


async def at_once(ctx: Context) -> int:
    """Its replay takes a while: the items of a map are tasks."""
    await ctx.map("each", double, range(3))
    ctx.state["own"] = "code"
    total: int = await ctx.step("add", add, 2)
    return total


async def after_a_signal(ctx: Context, step: Any, *args: Any) -> Any:
    await ctx.wait_for("go")
    return await ctx.step("later", step, *args)


@workflow
async def adding(ctx: Context) -> dict[str, Any]:
    await ctx.gather(at_once(ctx), after_a_signal(ctx, add, 3))
    return ctx.state.all()


@workflow
async def looking(ctx: Context) -> Any:
    return (await ctx.gather(at_once(ctx), after_a_signal(ctx, look)))[1]


async def inside(ctx: Context) -> None:
    ctx.state["inside"] = True


async def twice(ctx: Context) -> list[Any]:
    """A step of steps: it is replayed too."""
    before = ctx.state.all()
    await ctx.step("inside", inside)
    if "first" not in RUNS:
        RUNS.append("first")
        await ctx.sleep("1h")
    return [before, ctx.state.get("inside")]


@workflow
async def nesting(ctx: Context) -> Any:
    return (await ctx.gather(at_once(ctx), ctx.step("twice", twice)))[1]


@workflow
async def deleting(ctx: Context) -> dict[str, Any]:
    async def removes(ctx: Context) -> None:
        await ctx.map("each", double, range(3))
        await ctx.step("remove", remove)

    ctx.state["gone"] = 1
    await ctx.step("double", double, 1)
    await ctx.gather(removes(ctx), after_a_signal(ctx, look))
    return ctx.state.all()


async def remove(ctx: Context) -> None:
    del ctx.state["gone"]
    ctx.state["instead"] = 1


@pytest.mark.parametrize("moved", [False, True])
async def test_no_update_is_lost(boss: Space, hosts: Hosts, moved: bool) -> None:
    first = await hosts.start(adding)
    handle = await boss.workflows.start(adding)
    await waiting(handle, ["signal"])
    if moved:
        await first.stop()
        await hosts.start(adding)
    await handle.signal("go")
    assert await soon(handle.result()) == {"count": 5, "list": [2, 3], "own": "code", "set": [2, 3], "total": 5}
    assert await handle.state() == await handle.result()
    assert sorted(RUNS) == ["add 2", "add 3"], "and no step is done again for what was only replayed"


async def test_a_step_sees_all_that_was_written(boss: Space, hosts: Hosts) -> None:
    await hosts.start(looking)
    handle = await boss.workflows.start(looking)
    await waiting(handle, ["signal"])
    await handle.signal("go")
    written = {"count": 2, "list": [2], "own": "code", "set": [2], "total": 2}
    assert await soon(handle.result()) == {"keys": sorted(written), **written}


async def test_a_step_does_not_see_what_was_removed(boss: Space, hosts: Hosts) -> None:
    await hosts.start(deleting)
    handle = await boss.workflows.start(deleting)
    await waiting(handle, ["signal"])
    await handle.signal("go")
    assert await soon(handle.result()) == {"instead": 1}
    [step] = [step for path, step in (await handle.steps()).items() if path.endswith("later#0")]
    assert step["result"] == {"keys": ["instead"], "instead": 1}


async def test_the_code_of_a_step_with_steps_comes_to_theirs_when_it_did(boss: Space, hosts: Hosts, clock: Any) -> None:
    await hosts.start(nesting)
    handle = await boss.workflows.start(nesting)
    await waiting(handle, ["sleep"])
    clock.advance("1h")
    before, done = await soon(handle.result())
    assert before == {"count": 2, "list": [2], "own": "code", "set": [2], "total": 2}, (
        "what others wrote, and not its own"
    )
    assert done


async def test_nor_is_one_lost_that_was_made_under_an_earlier_version_of_the_state(boss: Space, hosts: Hosts) -> None:
    async def earn(ctx: Context, key: str, n: int) -> None:
        ctx.state[key] = ctx.state.get(key, 0) + n

    def made(key: str, unit: int, **version: Any) -> Any:
        @workflow(name="earning", **version)
        async def earning(ctx: Context) -> int:
            async def early() -> None:
                await ctx.map("each", double, range(3))
                await ctx.step("early", earn, key, 2 * unit)

            await ctx.gather(early(), after_a_signal(ctx, earn, key, 3 * unit))
            found: int = ctx.state[key]
            return found

        return earning

    first = await hosts.start(made("n", 1, state=Old))
    handle = await boss.workflows.start("earning")
    await waiting(handle, ["signal"])
    await first.stop()
    await hosts.start(made("m", 10, state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed}))
    await handle.signal("go")
    assert await soon(handle.result()) == 50
    assert (await handle.state())["m"] == 50
