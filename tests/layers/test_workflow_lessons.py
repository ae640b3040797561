"""Mistakes in the samples that workflows come from, each as a test that it is not made here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Conflict, Context, ExecutionFailed, ManualClock, NotFound, Retry, Space, Store, step, workflow
from tests.layers.hosting import Hosts, soon, until, waits_for
from tests.layers.test_workflows import hosts, three_steps

__all__ = ["hosts"]


async def adds(ctx: Context, n: int) -> None:
    """The accumulator of the sample, `+=` on what other tasks write too, with something to wait for in between."""
    before = ctx.state.get("total", 0)
    await asyncio.sleep(0)
    ctx.state["total"] = before + n


@workflow
async def accumulates(ctx: Context, n: int) -> int:
    await ctx.map("add", adds, range(n), max_workers=8)
    total: int = ctx.state["total"]
    return total


async def test_reading_and_setting_in_parallel_tasks_loses_no_update(boss: Space, hosts: Hosts) -> None:
    await hosts.start(accumulates)
    handle = await boss.workflows.start(accumulates, 40)
    assert await soon(handle.result()) == sum(range(40))
    assert await handle.state() == {"total": sum(range(40))}


@workflow
async def updates(ctx: Context) -> Any:
    ctx.state["profile"] = {"name": "a", "limits": {"day": 1}}
    ctx.state["other"] = 1
    ctx.state.update({"profile": {"name": "b"}})
    handed_out = ctx.state["profile"]
    handed_out["name"] = "changed by accident"
    return ctx.state.all()


async def test_an_update_replaces_what_it_names_and_nothing_is_handed_out_alive(boss: Space, hosts: Hosts) -> None:
    await hosts.start(updates)
    assert await soon((await boss.workflows.start(updates)).result()) == {"profile": {"name": "b"}, "other": 1}


attempts: list[int] = []


@workflow
class Reduces:
    @step
    async def parts(self, ctx: Context) -> list[int]:
        return [1, 2, 3]

    @step(after="parts", retry=Retry(3, initial="1ms", jitter=0))
    async def reduce(self, ctx: Context, parts: list[int]) -> int:
        attempts.append(ctx.attempt)
        for part in parts:
            await ctx.state.increment("count", part)
            await ctx.state.append_to_list("parts", part)
        if ctx.attempt < 3:
            raise RuntimeError("after all was counted")
        return ctx.state.get("count", 0)


async def test_a_reduce_that_is_tried_again_counts_once(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    attempts.clear()
    await hosts.start(Reduces)
    handle = await boss.workflows.start(Reduces)
    async with asyncio.timeout(30):
        while len(attempts) < 3:
            clock.advance("1ms")
            await asyncio.sleep(0.001)
    assert await soon(handle.result()) == 6
    assert await handle.state() == {"count": 6, "parts": [1, 2, 3]}


@workflow
async def shares(ctx: Context) -> Any:
    await ctx.step("share", share)
    await ctx.sleep("2h")
    return await ctx.shared_state.get("dataset:latest", "expired")


async def share(ctx: Context) -> None:
    await ctx.shared_state.set("dataset:latest", [1, 2], ttl="1h")


async def test_a_shared_value_and_its_ttl_come_together_and_end_together(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(shares)
    handle = await boss.workflows.start(shares)
    await waits_for(handle, "sleep")
    assert await boss.workflows.shared("dataset:latest") == [1, 2]
    clock.advance("61m")
    assert await boss.workflows.shared("dataset:latest", "gone") == "gone"
    clock.advance("1h")
    assert await soon(handle.result()) == "expired"


async def test_no_ttl_removes_an_execution_that_lives_however_long_it_waits(
    store: Store, boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    @workflow(name="patient")
    async def patient(ctx: Context) -> Any:
        ctx.state["kept"] = True
        await ctx.step("first", nothing)
        return [await ctx.wait_for("go"), ctx.state["kept"]]

    await hosts.start(patient)
    handle = await boss.workflows.start(patient)
    await waits_for(handle, "signal")
    for _ in range(3):
        clock.advance("30d")
        await store.tidy()
    await handle.signal("go", "late")
    assert await soon(handle.result()) == ["late", True]


async def nothing() -> None: ...


async def test_ids_with_wildcards_and_slashes_reach_no_other_execution(
    store: Store, boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(three_steps)
    ids = ["a", "a*", "a/b", "%2F", "a%2Fb", "[a]", "ä?"]
    for number, id in enumerate(ids):
        await boss.workflows.start(three_steps, number, id=id)
    results = {id: await soon((await boss.workflows.get(id)).result()) for id in ids}
    assert results == {id: number + 3 for number, id in enumerate(ids)}
    assert {len(await (await boss.workflows.get(id)).steps()) for id in ids} == {3}
    listed = {view.id for view in await boss.workflows.list(status="completed")}
    assert listed == set(ids)


async def test_metadata_is_written_once_and_the_input_is_in_it(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handle = await boss.workflows.start(three_steps, 5, id="m")
    before = await handle.status()
    clock.advance("1m")
    await boss.workflows.start(three_steps, 99, id="m")
    await hosts.start(three_steps)
    await soon(handle.result())
    after = await handle.status()
    assert (before.input, after.input, after.created_at) == (5, 5, before.created_at)


async def test_an_execution_that_has_ended_is_refused_and_not_recovered(boss: Space, hosts: Hosts) -> None:
    await hosts.start(three_steps)
    handle = await boss.workflows.start(three_steps, 1, id="done")
    await soon(handle.result())
    for act in (handle.cancel, handle.pause, handle.resume, handle.retry):
        with pytest.raises(Conflict):
            await act()
    await boss.queue("workflows.three_steps").put({"execution": "done"})
    await until(lambda: _empty(boss))
    assert len(await handle.log()) == 4, "nothing was done again"
    with pytest.raises(NotFound):
        await boss.workflows.get("never")


async def _empty(space: Space) -> bool:
    stats = await space.queue("workflows.three_steps").stats()
    return (stats.ready, stats.reserved) == (0, 0)


async def test_every_event_of_the_log_has_its_time_and_its_place(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    @workflow(name="logged")
    async def logged(ctx: Context) -> None:
        await ctx.step("a", nothing)
        await ctx.step("b", fails, retry=1)

    await hosts.start(logged)
    handle = await boss.workflows.start(logged)
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())
    log = await handle.log()
    assert [(event.event, event.path, event.at) for event in log] == [
        ("completed", "a#0", clock.now_ms()),
        ("failed", "b#0", clock.now_ms()),
        ("failed", "", clock.now_ms()),
    ]
    assert log[1].error is not None
    assert log[1].error.message == "no"


async def fails() -> None:
    raise RuntimeError("no")


moments: list[Any] = []


@workflow
async def looks_at_the_clock(ctx: Context) -> bool:
    moments.append((ctx.now(), ctx.random()))
    await ctx.sleep("1d")
    return ctx.now() > moments[0][0]


async def test_a_replay_sees_the_time_that_it_saw_and_not_the_present(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    moments.clear()
    await hosts.start(looks_at_the_clock)
    handle = await boss.workflows.start(looks_at_the_clock)
    await waits_for(handle, "sleep")
    clock.advance("1d")
    assert await soon(handle.result()) is True
    assert len(moments) == 2
    assert moments[0] == moments[1]


@workflow
async def counts_and_sleeps(ctx: Context) -> Any:
    await ctx.step("count", counts_one)
    await ctx.state.increment("between", 5)
    await ctx.step("again", counts_one)
    await ctx.sleep("1h")
    return ctx.state.all()


async def counts_one(ctx: Context) -> None:
    await ctx.state.increment("count")


async def test_what_is_in_the_state_is_not_added_to_it_again_by_a_replay(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    worker = await hosts.start(counts_and_sleeps)
    handle = await boss.workflows.start(counts_and_sleeps)
    await waits_for(handle, "sleep")
    await hosts.kill(worker)
    assert await handle.state() == {"between": 5, "count": 2}
    await hosts.start(counts_and_sleeps)
    clock.advance("1h")
    assert await soon(handle.result()) == {"between": 5, "count": 2}
    assert await handle.state() == {"between": 5, "count": 2}


async def test_an_execution_is_not_resumed_by_two_who_find_it(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handle = await boss.workflows.start(three_steps, 1, id="one")
    queue = boss.queue("workflows.three_steps")
    for _ in range(5):  # whoever may put messages can wake, and cannot run anything twice
        await queue.put({"execution": "one"})
    for _ in range(3):
        await hosts.start(three_steps)
    assert await soon(handle.result()) == 4
    await until(lambda: _empty(boss))
    assert [event.event for event in await handle.log()].count("completed") == 4, "three steps and the end, each once"
