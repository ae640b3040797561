"""Workflows: steps, waits, state, children, limits, what workers do when others die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    AccessDenied,
    Conflict,
    Context,
    ExecutionFailed,
    ExecutionHandle,
    InvalidInput,
    ManualClock,
    NotFound,
    Retry,
    Space,
    StepFailed,
    Store,
    TimedOut,
    Worker,
    blocking,
    step,
    workflow,
)
from holdfast.engine import Batch, Delete, Push, Put
from tests.layers.hosting import DEADLINE_S, Hosts, soon, until, waits_for


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


async def add_one(n: int) -> int:
    return n + 1


@workflow
async def three_steps(ctx: Context, n: int) -> int:
    for name in ("a", "b", "c"):
        n = await ctx.step(name, add_one, n)
    return n


@workflow(name="research", version="2")
class Research:
    @step(name="fetch", retry=Retry(3))
    async def fetch(self, ctx: Context) -> list[str]:
        return [f"{ctx.input['symbol']}-{n}" for n in range(5)]

    @step(name="analyse", each="fetch", max_workers=2)
    async def analyse(self, ctx: Context, item: str) -> str:
        await ctx.state.append_to_list("processed_files", item)
        await ctx.state.increment("total_processed")
        return item.lower()

    @step(name="note", after="fetch")
    def note(self, ctx: Context, files: list[str]) -> int:
        ctx.state["noted"] = len(files)
        return len(files)

    @step(name="report", after=("analyse", "note"))
    async def report(self, ctx: Context, results: list[str], noted: int) -> dict[str, Any]:
        return {"results": results, "noted": noted}


# --- both styles ---


async def test_a_function_of_steps_gives_its_result(boss: Space, hosts: Hosts) -> None:
    await hosts.start(three_steps)
    handle = await boss.workflows.start(three_steps, 1, id="one")
    assert await soon(handle.result()) == 4
    view = await handle.status()
    assert (view.status, view.input, view.version, view.error) == ("completed", 1, "1", None)
    steps = await handle.steps()
    assert {path: (each["status"], each["result"]) for path, each in steps.items()} == {
        "a#0": ("completed", 2),
        "b#0": ("completed", 3),
        "c#0": ("completed", 4),
    }
    assert [(event.event, event.path) for event in await handle.log()] == [
        ("completed", "a#0"),
        ("completed", "b#0"),
        ("completed", "c#0"),
        ("completed", ""),
    ]


async def test_a_class_of_steps_runs_each_after_those_it_needs(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, {"symbol": "MSFT"})
    assert await soon(handle.result()) == {"results": [f"msft-{n}" for n in range(5)], "noted": 5}
    state = await handle.state()
    assert (state["total_processed"], state["noted"]) == (5, 5)
    assert sorted(state["processed_files"]) == [f"MSFT-{n}" for n in range(5)]


async def test_steps_are_told_by_path_or_in_the_order_of_the_calls(boss: Space, hosts: Hosts) -> None:
    async def branch(ctx: Context, name: str) -> None:
        await ctx.step(f"{name}-first", add_one, 1)
        await ctx.step("again", add_one, 1)

    @workflow
    async def many(ctx: Context) -> None:
        await ctx.step("z", add_one, 1)
        await ctx.map("m", add_one, range(11))
        await ctx.gather(branch(ctx, "y"), branch(ctx, "x"))
        await ctx.step("a", add_one, 1)

    await hosts.start(many)
    handle = await boss.workflows.start(many)
    await soon(handle.result())
    items = [f"m#0/{number}" for number in range(11)]
    branches = [f"gather#0/{path}#0" for path in ("0/y-first", "0/again", "1/x-first", "1/again")]
    called = ["z#0", *items, *branches, "a#0"]
    assert list(await handle.steps(as_called=True)) == called
    assert list(await handle.steps()) == sorted(called)


async def test_starting_again_under_the_same_id_gives_the_same_execution(boss: Space, hosts: Hosts) -> None:
    first = await boss.workflows.start(three_steps, 1, id="same")
    second = await boss.workflows.start(three_steps, 100, id="same")
    await hosts.start(three_steps)
    assert await soon(first.result()) == await soon(second.result()) == 4
    third = await boss.workflows.start(three_steps, 7, id="same")
    assert await third.result(0) == 4, "one that has ended is not run again"
    with pytest.raises(InvalidInput, match="three_steps"):
        await boss.workflows.start(Research, {}, id="same")
    assert (await boss.workflows.counts())["three_steps"] == {"pending": 0, "running": 0, "completed": 1}


async def test_an_execution_of_a_workflow_that_no_worker_knows_waits_and_is_seen(boss: Space, hosts: Hosts) -> None:
    await hosts.start(three_steps)
    handle = await boss.workflows.start(Research, {"symbol": "X"}, id="r")
    await soon((await boss.workflows.start(three_steps, 1)).result())
    assert (await handle.status()).status == "pending"
    assert [(view.id, view.status) for view in await boss.workflows.list(name="research")] == [("r", "pending")]
    assert (await boss.queue("workflows.research").stats()).ready == 1
    await hosts.start(Research)
    assert (await soon(handle.result()))["noted"] == 5


# --- waiting ---


@workflow
async def sleeper(ctx: Context, n: int) -> int:
    before = await ctx.step("before", add_one, n)
    await ctx.sleep("1h")
    return await ctx.step("after", add_one, before)


async def test_a_sleeping_execution_holds_nothing_and_goes_on_in_time(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    worker = await hosts.start(sleeper)
    handle = await boss.workflows.start(sleeper, 1)
    await waits_for(handle, "sleep")
    stats = await boss.queue("workflows.sleeper").stats()
    assert (stats.reserved, stats.delayed) == (0, 1)
    await until(lambda: _over(worker))
    for _ in range(59):
        clock.advance("1m")
    await asyncio.sleep(0.02)
    assert (await handle.status()).status == "running"
    clock.advance("61s")
    assert await soon(handle.result()) == 3


@workflow
async def asks(ctx: Context, default: Any) -> Any:
    return await ctx.wait_for("approval", timeout="2d", default=default)


async def test_a_signal_wakes_the_execution_that_waits_for_it(boss: Space, space: Space, hosts: Hosts) -> None:
    await hosts.start(asks)
    handle = await boss.workflows.start(asks, "nobody")
    await waits_for(handle, "signal")
    agents = await space.workflows.get(handle.id)
    await agents.signal("other", 1)
    await agents.signal("approval", {"by": "ann"})
    assert await soon(handle.result()) == {"by": "ann"}
    with pytest.raises(Conflict, match="is completed"):
        await agents.signal("approval", "again")
    with pytest.raises(NotFound):
        await space.workflows.get("nobody")
    await until(lambda: _empty(boss, "workflows.asks", 0))


async def test_a_signal_that_came_before_is_not_lost_and_a_timeout_gives_the_default(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    early = await boss.workflows.start(asks, "late", id="early")
    await early.signal("approval", "first")
    late = await boss.workflows.start(asks, "late", id="late")
    await hosts.start(asks)
    assert await soon(early.result()) == "first"
    await waits_for(late, "signal")
    clock.advance("2d")
    assert await soon(late.result()) == "late"


@workflow
async def parent(ctx: Context, n: int) -> Any:
    return await ctx.gather(ctx.child(three_steps, n), ctx.child(sleeper, n), return_exceptions=True)


async def test_a_parent_is_woken_by_the_end_of_its_child(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(parent, three_steps, sleeper)
    handle = await boss.workflows.start(parent, 1, id="p")
    await until(lambda: _slept(boss, "sleeper"))
    await until(lambda: _waits_for_one(handle))  # whoever runs when an hour passes at once has lost its lease
    clock.advance("1h")
    assert await soon(handle.result()) == [4, 3]
    child = await boss.workflows.get("p.child:three_steps#0")
    assert (await child.status()).parent == "p"


async def _waits_for_one(handle: ExecutionHandle) -> bool:
    return len((await handle.status()).waits) == 1


async def _slept(space: Space, name: str) -> bool:
    return bool([view for view in await space.workflows.list(name=name) if view.waits])


async def _finished(space: Space, name: str) -> bool:
    return bool(await space.workflows.list(name=name, status="completed"))


async def test_cancelling_ends_the_execution_and_its_children(boss: Space, hosts: Hosts) -> None:
    await hosts.start(parent, three_steps, sleeper)
    handle = await boss.workflows.start(parent, 1, id="p")
    await until(lambda: _slept(boss, "sleeper"))
    await until(lambda: _slept(boss, "parent"))
    await handle.cancel()
    with pytest.raises(ExecutionFailed, match="was cancelled") as failure:
        await soon(handle.result())
    assert failure.value.status == "cancelled"
    with pytest.raises(ExecutionFailed):
        await soon((await boss.workflows.get("p.child:sleeper#0")).result())
    assert await boss.workflows.list() == []


# --- failing ---

tries: list[int] = []


async def fails_twice(ctx: Context) -> str:
    tries.append(ctx.attempt)
    await ctx.state.increment("tried")
    if ctx.attempt < 3:
        raise ValueError("not yet")
    return ctx.idempotency_key


@workflow
async def tenacious(ctx: Context) -> str:
    key: str = await ctx.step("try", fails_twice, retry=Retry(3, initial="10s", jitter=0))
    return key


async def test_a_long_pause_between_attempts_holds_no_process_and_what_failed_has_counted_nothing(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    tries.clear()
    await hosts.start(tenacious)
    handle = await boss.workflows.start(tenacious, id="t")
    await waits_for(handle, "retry")
    clock.advance("10s")
    await until(lambda: _attempts(handle, 2))
    clock.advance("20s")
    assert await soon(handle.result()) == "t:try#0"
    assert (tries, await handle.state()) == ([1, 2, 3], {"tried": 1})


async def _attempts(handle: ExecutionHandle, n: int) -> bool:
    view, steps = await handle.status(), await handle.steps()
    return bool(view.waits) and steps.get("try#0", {}).get("attempts") == n


async def fails() -> None:
    raise RuntimeError("the market is closed")


@workflow
async def failing(ctx: Context, how: str) -> Any:
    if how == "handled":
        return await ctx.step("sell", fails, on_error=lambda ctx, error: f"handled {error}")
    if how == "caught":
        try:
            await ctx.step("sell", fails)
        except StepFailed as exc:
            return [exc.step, exc.kind, exc.reason]
    if how == "mostly":
        return await ctx.map("each", odd, range(4), min_success_rate=0.5)
    if how == "too few":
        return await ctx.map("each", odd, range(4), min_success_rate=0.75)
    return await ctx.step("sell", fails)


async def odd(n: int) -> int:
    if n % 2 == 0:
        raise ValueError(f"{n} is even")
    return n


async def test_what_becomes_of_a_step_that_fails(boss: Space, hosts: Hosts) -> None:
    await hosts.start(failing)
    assert await soon((await boss.workflows.start(failing, "handled")).result()) == "handled the market is closed"
    assert await soon((await boss.workflows.start(failing, "caught")).result()) == [
        "sell#0",
        "RuntimeError",
        "the market is closed",
    ]
    assert await soon((await boss.workflows.start(failing, "mostly")).result()) == [None, 1, None, 3]
    for how, words in (("raised", "the market is closed"), ("too few", "2 of 4 items")):
        handle = await boss.workflows.start(failing, how)
        with pytest.raises(ExecutionFailed, match=words) as failure:
            await soon(handle.result())
        assert failure.value.kind == "StepFailed"
        assert (await handle.status()).status == "failed"


mended = False


async def breaks_until_mended(ctx: Context, n: int) -> int:
    await ctx.state.increment("done")
    if not mended:
        raise RuntimeError("broken")
    return n


@workflow
async def mendable(ctx: Context, n: int) -> int:
    n = await ctx.step("first", add_one, n)
    await ctx.state.append_to_list("seen", n)
    n = await ctx.step("second", breaks_until_mended, n)
    return await ctx.step("third", add_one, n)


async def test_what_failed_is_tried_again_from_where_it_failed(boss: Space, hosts: Hosts) -> None:
    global mended
    mended = False
    await hosts.start(mendable)
    handle = await boss.workflows.start(mendable, 1)
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())
    mended = True
    await handle.retry()
    assert await soon(handle.result()) == 3
    assert await handle.state() == {"done": 1, "seen": [2]}
    await handle.retry(from_step="second")
    assert await soon(handle.result()) == 3
    assert await handle.state() == {"done": 1, "seen": [2]}, "what is taken back takes its state with it"
    with pytest.raises(InvalidInput, match="no step 'fourth'"):
        await handle.retry(from_step="fourth")


@workflow(timeout="1m")
async def limited(ctx: Context, how: str) -> Any:
    if how == "step":
        return await ctx.step("slow", asyncio.sleep, 3600, timeout="5s")
    return await ctx.wait_for("never")


async def test_a_step_and_an_execution_end_when_their_time_is_over(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(limited)
    stuck = await boss.workflows.start(limited, "wait")
    await waits_for(stuck, "signal")
    slow = await boss.workflows.start(limited, "step")
    await until(lambda: _has_sleepers(clock, 5_000))
    clock.advance("5s")
    with pytest.raises(ExecutionFailed, match="took longer than 5 s"):
        await soon(slow.result())
    clock.advance("1m")
    with pytest.raises(ExecutionFailed, match="took longer than 60 s"):
        await soon(stuck.result())


async def _has_sleepers(clock: ManualClock, _: int) -> bool:
    await asyncio.sleep(0.02)
    return True


# --- being interrupted ---

gates: dict[str, asyncio.Event] = {}
begun: list[str] = []


async def passes_gate(ctx: Context, name: str) -> str:
    begun.append(name)
    await ctx.state.increment("passed")
    await gates[name].wait()
    return name


@workflow
async def gated(ctx: Context, name: str) -> list[str]:
    first = await ctx.step("first", passes_gate, name)
    return [first, await ctx.step("second", passes_gate, "open")]


@pytest.fixture(autouse=True)
def closed_gates() -> None:
    begun.clear()
    gates.clear()
    gates.update(gate=asyncio.Event(), open=asyncio.Event())
    gates["open"].set()


async def has_begun(times: int) -> bool:
    return begun.count("gate") == times


async def test_a_dead_worker_s_execution_goes_on_elsewhere_when_its_lease_has_ended(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    first = await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    await hosts.kill(first)
    await hosts.start(gated)
    gates["gate"].set()
    clock.advance("11s")
    assert await soon(handle.result()) == ["gate", "open"]
    assert (begun, await handle.state()) == (["gate", "gate", "open"], {"passed": 2})


async def test_a_worker_paused_past_its_lease_writes_nothing_and_there_is_one_outcome(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    first = await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    [run] = first._runs.values()
    coordination = hosts._made[0][1]
    await coordination.leases.close()  # it does not come to keeping its lease alive: it stands still
    clock.advance("11s")
    await hosts.start(gated)
    await until(lambda: has_begun(2))
    gates["gate"].set()
    assert await soon(handle.result()) == ["gate", "open"]
    await until(lambda: _over(first))
    assert type(run.journal.failure).__name__ == "LeaseLost"
    assert (await handle.state(), begun.count("open")) == ({"passed": 2}, 1)


async def _over(worker: Worker) -> bool:
    return not worker._runs


async def test_a_worker_that_stops_hands_over_at_once(boss: Space, hosts: Hosts) -> None:
    first = await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    await first.stop()
    assert (await boss.queue("workflows.gated").stats()).reserved == 0
    gates["gate"].set()
    await hosts.start(gated)
    assert await soon(handle.result()) == ["gate", "open"]
    assert await handle.state() == {"passed": 2}


async def test_an_execution_is_paused_in_the_middle_of_a_step_and_resumed(boss: Space, hosts: Hosts) -> None:
    await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    await handle.pause()
    await until(lambda: _is(handle, "paused"))
    assert (await boss.workflows.counts())["gated"]["paused"] == 1
    gates["gate"].set()
    await handle.signal("anything", 1)
    await asyncio.sleep(0.02)
    assert (await handle.status()).status == "paused"
    await handle.resume()
    assert await soon(handle.result()) == ["gate", "open"]
    assert await handle.state() == {"passed": 2}


async def _is(handle: ExecutionHandle, status: str) -> bool:
    return (await handle.status()).status == status


async def test_cancelling_reaches_a_running_step(boss: Space, hosts: Hosts) -> None:
    await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    await handle.cancel()
    with pytest.raises(ExecutionFailed, match="cancelled"):
        await soon(handle.result())
    assert await handle.state() == {}


# --- code that changes ---


@workflow(name="changing")
async def old_code(ctx: Context) -> list[Any]:
    return [await ctx.step("quote", add_one, 1), await ctx.wait_for("go")]


@workflow(name="changing")
async def other_code(ctx: Context) -> list[Any]:
    return [await ctx.step("price", add_one, 1), await ctx.wait_for("go")]


@workflow(name="changing")
async def new_code(ctx: Context) -> list[Any]:
    if ctx.version("no-quotes"):
        return ["new", await ctx.wait_for("go")]
    return [await ctx.step("quote", add_one, 1), await ctx.wait_for("go")]


async def test_code_that_calls_something_else_than_before_pauses_the_execution_and_names_both(
    boss: Space, hosts: Hosts
) -> None:
    first = await hosts.start(old_code)
    handle = await boss.workflows.start(old_code, id="c")
    await waits_for(handle, "signal")
    await first.stop()
    second = await hosts.start(other_code)
    await handle.signal("go", 1)
    await until(lambda: _is(handle, "paused"))
    error = (await handle.status()).error or {}
    assert error["type"] == "NonDeterminism"
    assert "'quote#0'" in error["message"]
    assert "'price#0'" in error["message"]
    await second.stop()
    await hosts.start(new_code)
    await handle.resume()
    assert await soon(handle.result()) == [2, 1], "an old execution goes the old way"
    fresh = await boss.workflows.start(new_code)
    await fresh.signal("go", 2)
    assert await soon(fresh.result()) == ["new", 2]


async def test_an_execution_of_a_newer_version_waits_for_a_worker_that_has_it(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def body(ctx: Context) -> str:
        return "done"

    await hosts.start(workflow(name="versioned", version="1.9")(body))
    newer = workflow(name="versioned", version="1.10")(replace_function(body))
    handle = await boss.workflows.start(newer)
    await waits_for(handle, "code")
    await hosts.start(newer)
    async with asyncio.timeout(DEADLINE_S):
        while (await handle.status()).status != "completed":
            clock.advance("5s")
            await asyncio.sleep(0.01)


def replace_function(function: Callable[..., Any]) -> Callable[..., Any]:
    async def copied(ctx: Context) -> Any:
        return await function(ctx)

    return copied


# --- limits ---

inside: list[int] = []


async def counts_inside() -> int:
    inside.append(1)
    most = len(inside)
    try:
        await asyncio.sleep(0.005)
    finally:
        inside.pop()
    return most


@workflow(concurrency=2, key=lambda given: given["desk"])
async def narrow(ctx: Context, given: dict[str, str]) -> int:
    most: int = await ctx.step("inside", counts_inside)
    await ctx.sleep("100ms")
    return most


async def test_no_more_than_allowed_are_begun_at_a_time_of_each_key(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handles = [await boss.workflows.start(narrow, {"desk": "a"}, id=f"n{n}") for n in range(6)]
    other = await boss.workflows.start(narrow, {"desk": "b"}, id="other")
    assert [wait["kind"] for wait in (await handles[5].status()).waits] == ["slot"]
    await handles[5].cancel()
    await hosts.start(narrow)
    async with asyncio.timeout(DEADLINE_S):
        while await boss.workflows.list():
            clock.advance("100ms")
            await asyncio.sleep(0.002)
    results = [await handle.result(0) for handle in (*handles[:5], other)]
    assert max(results) <= 3
    with pytest.raises(ExecutionFailed, match="cancelled"):
        await handles[5].result(0)
    again = await boss.workflows.start(narrow, {"desk": "a"})
    assert (await again.status()).waits == (), "every slot has come back"


async def test_of_higher_priority_comes_first(boss: Space, hosts: Hosts) -> None:
    for n, priority in enumerate((0, 5, 9)):
        await boss.workflows.start(gated, "open", id=f"p{n}", priority=priority)
    ends: list[str] = []
    await hosts.start(gated, concurrency=1)
    for n in (2, 1, 0):
        await soon((await boss.workflows.get(f"p{n}")).result())
        ends.append(f"p{n}")
    views = await boss.workflows.list(status="completed")
    assert [view.id for view in sorted(views, key=lambda view: view.updated_at)] == ends or len(
        {v.updated_at for v in views}
    ) < 3


# --- results ---


async def large(n: int) -> str:
    return "x" * n


@workflow
async def results(ctx: Context, how: str) -> Any:
    if how == "large":
        text = await ctx.step("large", large, 200_000)
        await ctx.wait_for("go")
        return text
    if how == "too large":
        return await ctx.step("large", large, 10_000_001)
    return await ctx.step("odd", object)


async def test_a_large_result_is_kept_as_a_blob_and_one_that_cannot_be_kept_is_a_clear_failure(
    boss: Space, hosts: Hosts
) -> None:
    await hosts.start(results)
    handle = await boss.workflows.start(results, "large")
    await waits_for(handle, "signal")
    await handle.signal("go")
    assert await soon(handle.result()) == "x" * 200_000
    for how, words in (("too large", "10,000,003 bytes"), ("odd", "cannot be kept")):
        with pytest.raises(ExecutionFailed, match=words):
            await soon((await boss.workflows.start(results, how)).result())
    with pytest.raises(InvalidInput, match="the input of execution"):
        await boss.workflows.start(results, object())


@workflow
async def refused(ctx: Context) -> None:
    ctx.state["k"] = "x" * 11_000_000
    await ctx.step("a", add_one, 1)


async def test_what_the_store_refuses_for_good_pauses_the_execution_with_the_reason(boss: Space, hosts: Hosts) -> None:
    await hosts.start(refused)
    handle = await boss.workflows.start(refused)
    await until(lambda: _is(handle, "paused"))
    error = (await handle.status()).error or {}
    assert "11,000," in error["message"]


@workflow
async def digs(ctx: Context, depth: int) -> int:
    return 0 if depth == 0 else 1 + await ctx.child(digs, depth - 1)


async def test_children_of_children_have_ids_that_fit(boss: Space, hosts: Hosts) -> None:
    await hosts.start(digs)
    assert await soon((await boss.workflows.start(digs, 20, id="x" * 100)).result()) == 20


# --- who may do what ---


async def test_agents_start_and_signal_and_cannot_forge_what_was_done(
    store: Store, url: str, boss: Space, space: Space, hosts: Hosts
) -> None:
    handle = await space.workflows.start(asks, "nobody", id="mine")
    await hosts.start(asks)
    await waits_for(handle, "signal")
    if url == "policed:":
        [execution] = await store.engine.get("contoso", ["workflows/executions/mine"])
        assert execution is not None
        forged = (
            Put("journal/steps/mine/wait:approval#0", b'{"status":"completed","kind":"signal","result":"forged"}'),
            Push("journal/log/mine/", b"{}"),
            Put("journal/data/mine/limit", b"1"),
            Put("workflows/executions/mine", execution.value),
            Delete("workflows/executions/mine"),
            Delete("workflows/live/asks/mine"),
            Put("workflows/meta/mine", b"{}"),
            Delete("workflows/meta/mine"),
            Put("signals/mine/approval/0000000000000000001", b"1"),
            Delete("tallies/inbox/mine"),
            Put("shared/dataset", b"1"),
            Push("journal/mail/mine/~cancel/", b"null"),
            Push("journal/mail/mine/~child:pay#0/", b'{"status":"completed"}'),
        )
        for op in forged:
            with pytest.raises(AccessDenied):
                await store.engine.commit("contoso", Batch("market", (op,)))
        for act in (handle.cancel, handle.pause, handle.retry):
            with pytest.raises((AccessDenied, Conflict)):
                await act()
        [after] = await store.engine.get("contoso", ["workflows/executions/mine"])
        assert after == execution
    await handle.signal("approval", "yes")
    assert await soon(handle.result()) == "yes"


async def test_a_message_that_names_nothing_or_wakes_nobody_is_dropped(boss: Space, space: Space, hosts: Hosts) -> None:
    queue = space.queue("workflows.gated")
    for body in ({"execution": "nobody"}, {"execution": 3}, "what?", {}):
        await queue.put(body)
    await hosts.start(gated)
    handle = await boss.workflows.start(gated, "gate")
    await until(lambda: has_begun(1))
    for _ in range(3):
        await queue.put({"execution": handle.id})
    await until(lambda: _empty(boss, "workflows.gated"))
    gates["gate"].set()
    assert await soon(handle.result()) == ["gate", "open"]
    assert begun.count("gate") == 1, "one at a time, whoever puts what"


async def _empty(space: Space, name: str, reserved: int = 1) -> bool:
    stats = await space.queue(name).stats()
    return (stats.ready, stats.reserved) == (0, reserved)


# --- what is left ---


async def test_an_execution_that_has_expired_leaves_nothing_behind(
    store: Store, boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    worker = await hosts.start(Research)
    handle = await boss.workflows.start(Research, {"symbol": "X"}, id="gone")
    await soon(handle.result())
    live = await boss.workflows.start(asks, "x", id="lives")
    await worker.stop()
    clock.advance("23h")
    await store.tidy()
    assert (await handle.status()).status == "completed"
    clock.advance("2h")
    await store.tidy()
    with pytest.raises(NotFound):
        await handle.status()
    page = await store.engine.scan("contoso", "", limit=10_000)
    kept = [entry.key for entry in page.entries if "gone" in entry.key and not entry.key.startswith("audit/")]
    assert kept == []
    assert (await live.status()).status == "pending", "a ttl never removes what still lives"


@dataclass
class Progress:
    items: int = 0
    name: str = ""


@workflow(state=Progress)
async def typed(ctx: Context) -> Any:
    ctx.state["items"] = 3
    ctx.state["name"] = "n"
    found = ctx.state.typed()
    assert found == ctx.state.typed(Progress)
    return [found.items, found.name]


async def test_the_state_can_be_read_as_a_type(boss: Space, hosts: Hosts) -> None:
    await hosts.start(typed)
    assert await soon((await boss.workflows.start(typed)).result()) == [3, "n"]


async def test_waiting_for_a_result_ends_when_one_has_waited_long_enough(boss: Space, clock: ManualClock) -> None:
    handle = await boss.workflows.start(three_steps, 1)
    with pytest.raises(TimedOut, match="is pending"):
        await handle.result(0)
    waiting = asyncio.ensure_future(handle.result("5s"))
    await asyncio.sleep(0.02)
    clock.advance("6s")
    with pytest.raises(TimedOut):
        await soon(waiting)


def test_workflows_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False) as store:
        workflows = store.space("contoso", agent="boss").workflows
        with workflows.worker([three_steps]):
            handle = workflows.start(three_steps, 1)
            assert handle.result("20s") == 4
            assert handle.status().status == "completed"
