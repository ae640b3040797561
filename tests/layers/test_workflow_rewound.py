"""What fails or is taken back: attempts of steps leave nothing behind; retries and forks do again what came after, and only that."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from holdfast import Context, ExecutionHandle, ManualClock, Retry, Space, StepFailed, workflow
from holdfast.layers.workflows import reading
from holdfast.layers.workflows.journal import TOLD_BYTES_MAX
from holdfast.layers.workflows.reading import log_of
from tests.layers.hosting import Hosts, soon, until
from tests.layers.resuming import RUNS, double, fails_behind, forget, gate, hosts, look, note, noted, passes, two
from tests.layers.test_workflow_turns import waiting

__all__ = ["forget", "hosts"]


async def fails_once(text: str) -> None:
    RUNS.append(text)
    if RUNS.count(text) == 1:
        raise ValueError("no")


async def add_much(ctx: Context, n: int) -> str:
    """A step that has an entry of its own."""
    await ctx.state.increment("n", n)
    return "." * (TOLD_BYTES_MAX + 1)


async def add(ctx: Context, n: int) -> None:
    await ctx.state.increment("n", n)


async def put(ctx: Context, key: str, value: Any) -> None:
    ctx.state[key] = value


async def recorded(handle: ExecutionHandle, path: str) -> None:
    """Return when it is known how this step ended."""

    async def found() -> bool:
        return path in await handle.steps()

    await until(found)


async def status_of(handle: ExecutionHandle, clock: ManualClock | None = None) -> str:
    """How it ends, or is paused. With a clock, a little time passes until then."""

    async def stopped() -> bool:
        if clock is not None:
            clock.advance("1ms")
        return (await handle.status()).status in ("completed", "failed", "paused")

    await until(stopped)
    return (await handle.status()).status


async def started(boss: Space, hosts: Hosts, work: Any) -> ExecutionHandle:
    await hosts.start(work)
    return await boss.workflows.start(work)


# --- attempts ---


async def test_what_branches_of_a_failed_attempt_wrote_is_not_counted(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def outer(ctx: Context) -> Any:
        await ctx.gather(add(ctx, 1), add(ctx, 1))
        if ctx.attempt == 1:
            raise ValueError("no")
        return ctx.state["n"]

    @workflow
    async def trying(ctx: Context) -> Any:
        return await ctx.step("outer", outer, retry=Retry(3, initial="1ms"))

    handle = await started(boss, hosts, trying)
    assert await status_of(handle, clock) == "completed"
    assert await handle.result() == 2
    assert await handle.state() == {"n": 2}


async def test_branches_of_a_step_write_what_this_attempt_came_to(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def outer(ctx: Context) -> int:
        await note("attempt")
        number = len(RUNS)

        async def part() -> None:
            ctx.state["seen"] = [number, ctx.attempt]

        await ctx.gather(part())
        if number == 1:
            raise ValueError("no")
        return number

    @workflow
    async def trying(ctx: Context) -> Any:
        return await ctx.step("outer", outer, retry=Retry(3, initial="10s", jitter=0))

    handle = await started(boss, hosts, trying)
    await waiting(handle, ["retry"])
    clock.advance("10s")
    assert await soon(handle.result()) == 2
    assert await handle.state() == {"seen": [2, 2]}


async def test_branches_of_a_step_that_fails_write_nothing(boss: Space, hosts: Hosts) -> None:
    async def fails(ctx: Context) -> None:
        await ctx.gather(put(ctx, "k", 1))
        raise ValueError("no")

    @workflow
    async def failing(ctx: Context) -> dict[str, Any]:
        with contextlib.suppress(StepFailed):
            await ctx.step("fails", fails)
        return ctx.state.all()

    handle = await started(boss, hosts, failing)
    assert await soon(handle.result()) == {}
    assert await handle.state() == {}


async def test_an_error_handler_may_have_steps_of_its_own(boss: Space, hosts: Hosts) -> None:
    async def fails(ctx: Context) -> None:
        await ctx.step("take", note, "take")
        raise ValueError("no")

    async def handler(ctx: Context, error: Exception) -> str:
        await ctx.step("undo", note, "undo")
        return "handled"

    @workflow
    async def handling(ctx: Context) -> Any:
        return await ctx.step("fails", fails, on_error=handler)

    handle = await started(boss, hosts, handling)
    assert await soon(handle.result()) == "handled"
    assert RUNS == ["take", "undo"]


@two
async def test_the_time_of_a_step_runs_out_while_it_waits(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    async def waits(ctx: Context) -> None:
        RUNS.append("waits")
        await ctx.wait_for("never")

    @workflow
    async def timing(ctx: Context) -> None:
        await ctx.step("waits", waits, timeout="1s")

    handle = await started(boss, hosts, timing)
    await noted("waits")
    clock.advance("1s")
    assert await status_of(handle) == "failed"


async def test_a_map_that_will_fail_begins_no_more_items(boss: Space, hosts: Hosts) -> None:
    async def item(n: int) -> None:
        RUNS.append(f"item {n}")
        await (fails_behind if n == 0 else passes)("0" if n == 0 else "others")

    @workflow
    async def mapping(ctx: Context) -> None:
        await ctx.map("each", item, range(20), max_workers=2)

    handle = await started(boss, hosts, mapping)
    await noted("item 1")
    gate("0").set()
    await recorded(handle, "each#0/0")
    gate("others").set()
    assert await status_of(handle) == "failed"
    assert RUNS == ["item 0", "item 1"]


# --- retries ---


async def test_a_retry_leaves_what_other_items_of_the_map_wrote(boss: Space, hosts: Hosts) -> None:
    async def item(ctx: Context, n: int) -> None:
        if n == 2:
            await fails_once("item 2")
        await add(ctx, 1)

    @workflow
    async def counting(ctx: Context) -> Any:
        ctx.state["n"] = 0
        await ctx.map("each", item, range(3))
        return ctx.state["n"]

    handle = await started(boss, hosts, counting)
    assert await status_of(handle) == "failed"
    assert await handle.state() == {"n": 2}
    await handle.retry()
    assert await soon(handle.result()) == 3
    assert await handle.state() == {"n": 3}


async def test_a_retry_leaves_what_a_step_beside_the_failed_one_wrote(boss: Space, hosts: Hosts) -> None:
    async def fails(name: str) -> None:
        await gate(name).wait()
        await fails_once("fails")

    @workflow
    async def beside(ctx: Context) -> Any:
        ctx.state["k"] = "begun"
        await ctx.gather(ctx.step("fails", fails, "go"), ctx.step("put", put, "k", "done"))
        return ctx.state["k"]

    handle = await started(boss, hosts, beside)
    await recorded(handle, "put#0")
    gate("go").set()
    assert await status_of(handle) == "failed"
    await handle.retry()
    assert await soon(handle.result()) == "done"
    assert await handle.state() == {"k": "done"}


async def test_a_retry_from_a_step_in_a_step_does_the_rest_of_both_again(boss: Space, hosts: Hosts) -> None:
    async def outer(ctx: Context) -> None:
        await ctx.step("inner", add, 1)
        await ctx.step("more", note, "more")

    @workflow
    async def nesting(ctx: Context) -> dict[str, Any]:
        await ctx.step("outer", outer)
        await ctx.step("fails", fails_once, "fails")
        return ctx.state.all()

    handle = await started(boss, hosts, nesting)
    assert await status_of(handle) == "failed"
    await handle.retry(from_step="outer#0/inner#0")
    assert await soon(handle.result()) == {"n": 1}
    assert RUNS == ["more", "fails", "more", "fails"]


async def test_a_retry_leaves_the_branches_that_came_before_its_step(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def placing(ctx: Context) -> Any:
        async def early() -> None:
            await ctx.step("early", note, "early")

        await ctx.step("first", note, "first")
        await ctx.gather(early(), early())
        await ctx.step("a", note, "a")
        await ctx.gather(add(ctx, 1), add(ctx, 1))
        await ctx.step("fails", fails_once, "fails")
        return ctx.state["n"]

    handle = await started(boss, hosts, placing)
    assert await status_of(handle) == "failed"
    await handle.retry(from_step="a")
    assert await soon(handle.result()) == 2
    assert RUNS == ["first", "early", "early", "a", "fails", "a", "fails"]


async def test_a_retry_takes_back_what_a_branch_without_steps_wrote(boss: Space, hosts: Hosts) -> None:
    async def number() -> int:
        await note("number")
        return len(RUNS)

    @workflow
    async def bodies(ctx: Context) -> Any:
        found = await ctx.step("number", number)
        await ctx.gather(put(ctx, "k", found))
        await ctx.step("double", double, 1)
        return ctx.state["k"]

    handle = await started(boss, hosts, bodies)
    assert await soon(handle.result()) == 1
    await handle.retry(from_step="number")
    assert await soon(handle.result()) == 2
    assert await handle.state() == {"k": 2}


# --- forks ---


async def test_a_fork_without_keys_has_what_its_own_code_writes_there(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def adding(ctx: Context) -> Any:
        await ctx.step("begin", add, 1)
        await ctx.state.append_to_list("l", 5)
        await ctx.state.increment("n", 5)
        await ctx.state.flush()
        return await ctx.step("look", look)

    handle = await started(boss, hosts, adding)
    assert await soon(handle.result()) == {"l": [5], "n": 6}
    fork = await handle.fork("look", without=["l", "n"])
    assert await soon(fork.result()) == {"l": [5], "n": 5}
    assert await fork.state() == {"l": [5], "n": 5}


async def test_what_a_fork_edits_is_not_seen_by_a_map_before_it(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def mapping(ctx: Context) -> Any:
        await ctx.step("begin", put, "items", [1, 2])
        doubled = await ctx.map("each", double, ctx.state["items"])
        return [doubled, await ctx.step("look", look)]

    handle = await started(boss, hosts, mapping)
    await soon(handle.result())
    fork = await handle.fork("look", state={"items": []})
    assert await status_of(fork) == "completed"
    assert await fork.result() == [[2, 4], {"items": []}]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
async def test_a_fork_of_one_that_runs_is_of_one_moment(
    boss: Space, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def running(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.wait_for("go")
            await ctx.step("add", add_much, 1)

        async def other() -> None:
            await ctx.step("note", note, "note")
            await ctx.wait_for("end")

        await ctx.gather(one(), other())
        return ctx.state.get("n")

    handle = await started(boss, hosts, running)
    await waiting(handle, ["signal", "signal"])

    async def meanwhile(*given: Any) -> Any:
        """It goes on between the reading of its log and that of its steps."""
        found = await log_of(*given)
        monkeypatch.undo()
        await handle.signal("go")
        await recorded(handle, "gather#0/0/add#0")
        return found

    monkeypatch.setattr(reading, "log_of", meanwhile)
    fork = await handle.fork("gather#0/1/note#0")
    await fork.signal("end")
    assert await soon(fork.result()) == 1
    assert await fork.state() == {"n": 1}


async def test_going_back_into_a_gather_in_a_gather_takes_back_what_came_after_that(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def in_each_other(ctx: Context) -> list[Any]:
        async def branch() -> Any:
            inner = await ctx.gather(two("a"), two("b"))
            return [inner, await ctx.step("then", note, "then")]

        async def two(text: str) -> Any:
            return [await ctx.step(text, note, text), await ctx.step(f"{text}2", note, f"{text}2")]

        return await ctx.gather(branch(), ctx.step("beside", note, "beside"))

    await hosts.start(in_each_other)
    handle = await boss.workflows.start(in_each_other)
    result = await soon(handle.result())
    RUNS.clear()
    await handle.retry(from_step="gather#0/0/gather#0/1/b#0")
    assert await soon(handle.result()) == result
    assert RUNS == ["b", "b2", "then"]
