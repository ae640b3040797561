"""Steps that have a timeout and wait: they hold no process meanwhile, and their time passes all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, ExecutionHandle, ManualClock, Retry, Space, StepFailed, step, workflow
from holdfast.engine import Batch, Delete
from holdfast.layers.workflows.entries import steps_prefix
from holdfast.layers.workflows.waiting import Waiting
from holdfast.testing.replaying import assert_replays, record_history
from holdfast.testing.workflows import crash_everywhere, run_workflow
from tests.layers.hosting import Hosts, soon, until, waits_for
from tests.layers.resuming import RUNS, double, forget, hosts, note, two

__all__ = ["forget", "hosts"]
LATE = "step 'waits#0' took longer than 60 s"


async def sleeps(ctx: Context) -> str:
    RUNS.append(f"begun {ctx.attempt}")
    await ctx.sleep("1h")
    return "slept"


async def asks(ctx: Context) -> Any:
    RUNS.append(f"begun {ctx.attempt}")
    return await ctx.wait_for("go")


async def asks_both(ctx: Context) -> list[Any]:
    RUNS.append(f"begun {ctx.attempt}")
    return await ctx.gather(ctx.wait_for("go"), ctx.sleep("1h"), ctx.map("each", naps, [1, 2]))


async def naps(ctx: Context, n: int) -> int:
    await ctx.sleep("20s")
    return n


async def bears(ctx: Context) -> Any:
    RUNS.append(f"begun {ctx.attempt}")
    return await ctx.child(forever)


async def asks_inside(ctx: Context) -> Any:
    RUNS.append(f"begun {ctx.attempt}")
    return await ctx.step("inner", asks_in_it)


async def asks_in_it(ctx: Context) -> Any:
    return await ctx.wait_for("go")


@workflow
async def forever(ctx: Context) -> None:
    await ctx.wait_for("the end")


KINDS: dict[str, Any] = {"sleep": sleeps, "signal": asks, "gather": asks_both, "child": bears, "step": asks_inside}


def waiting_in(function: Any, **options: Any) -> Any:
    @workflow(name="waiting_in_a_step")
    async def code(ctx: Context) -> Any:
        try:
            return await ctx.step("waits", function, timeout="1m", **options)
        except StepFailed as exc:
            return await ctx.step("after", note, f"{exc.kind}: {exc.reason}")

    return code


async def aside(handle: ExecutionHandle) -> None:
    """Return when nobody has it."""

    async def lies() -> bool:
        return bool((await handle.status()).waits)

    await until(lies)


async def begun(space: Space, hosts: Hosts, code: Any) -> ExecutionHandle:
    await hosts.start(code, forever)
    handle = await space.workflows.start(code, id="x")
    await aside(handle)
    return handle


async def record_of(handle: ExecutionHandle, path: str) -> dict[str, Any]:
    return (await handle.steps())[path]


# --- it is put aside ---


@two
@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_with_a_timeout_that_waits_holds_nothing(
    boss: Space, hosts: Hosts, clock: ManualClock, kind: str
) -> None:
    """A worker that does one at a time does another one meanwhile, and the time of the first passes."""
    code = waiting_in(KINDS[kind])
    await hosts.start(code, concurrency=1)
    await hosts.start(forever)
    first = await boss.workflows.start(code)
    await aside(first)
    second = await boss.workflows.start(code)
    await aside(second)
    assert (await record_of(first, "waits#0"))["status"] == "begun"
    clock.advance("20s")
    if kind == "gather":
        await until(lambda: _completed(first, "waits#0/each#0/1"))
        await aside(first)
    clock.advance("39s")
    assert not (await first.status()).ended_at
    clock.advance("1s")
    for handle in (first, second):
        assert await soon(handle.result()) == f"TimedOut: {LATE}"
    found = await record_of(first, "waits#0")
    assert (found["status"], found["error"]["type"], found["error"]["message"]) == ("failed", "TimedOut", LATE)
    assert (
        found["completed_at"] - found["started_at"]
        >= (await first.status()).started_at - (await first.status()).started_at
    )
    assert RUNS.count("begun 1") >= 2


async def _completed(handle: ExecutionHandle, path: str) -> bool:
    return (await handle.steps()).get(path, {}).get("status") == "completed"


@two
async def test_what_comes_in_time_ends_the_step_as_if_it_had_run_through(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await begun(boss, hosts, waiting_in(asks))
    clock.advance("59s")
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"
    assert RUNS == ["begun 1", "begun 1"]
    assert (await record_of(handle, "waits#0"))["status"] == "completed"
    [event] = [event for event in await handle.log() if event.path == "waits#0"]
    assert event.event == "completed"


async def test_a_step_that_does_not_wait_writes_nothing_more() -> None:
    """The commits are those of a step without a timeout."""

    async def commits(longest: str | None) -> int:
        @workflow(name=f"timed_{longest}")
        async def timed(ctx: Context) -> None:
            for n in range(3):
                await ctx.step("plain", double, n, timeout=longest)

        return (await run_workflow(timed)).commits

    assert await commits("1m") == await commits(None)


@two
@pytest.mark.parametrize("style", ["class", "item", "map"])
async def test_steps_of_a_class_and_items_of_a_map_have_their_time(
    boss: Space, hosts: Hosts, clock: ManualClock, style: str
) -> None:
    @workflow(name="timed_class")
    class Timed:
        @step
        async def first(self, ctx: Context) -> list[int]:
            return [0, 1]

        @step(timeout="1m", on_error="skip")
        async def waits(self, ctx: Context) -> Any:
            return await asks(ctx)

        @step(each="first", timeout="2m", min_success_rate=0)
        async def items(self, ctx: Context, n: int) -> int:
            await ctx.sleep("90s" if n == 0 else "1h")
            return n

        @step(after=["waits", "items"])
        async def last(self, ctx: Context, one: Any, others: list[Any]) -> list[Any]:
            return [one, *others]

    @workflow
    async def timed_map(ctx: Context) -> list[Any]:
        async def item(ctx: Context, n: int) -> int:
            await ctx.sleep("90s" if n == 0 else "1h")
            return n

        found = await ctx.map("items", item, [0, 1], timeout="2m", min_success_rate=0, max_workers=2)
        return [None, *found]

    handle = await begun(boss, hosts, timed_map if style == "map" else Timed)
    clock.advance("90s")
    await until(lambda: _completed(handle, "items#0/0"))
    clock.advance("30s")
    assert await soon(handle.result()) == [None, 0, None]
    statuses = {path: each["status"] for path, each in (await handle.steps()).items()}
    assert (statuses["items#0/0"], statuses["items#0/1"]) == ("completed", "failed")


# --- attempts ---


@two
async def test_each_attempt_has_its_time(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    """The pause between them is nobody's time."""
    retry = Retry(3, initial="30s", backoff="constant", jitter=0)
    handle = await begun(boss, hosts, waiting_in(asks, retry=retry))
    for attempt in (1, 2):
        clock.advance("1m")
        await waits_for(handle, "retry")
        assert (await record_of(handle, "waits#0"))["attempts"] == attempt
        clock.advance("30s")
        await waits_for(handle, "signal")
        found = await record_of(handle, "waits#0")
        assert (found["status"], found["attempts"], found["error"]["type"]) == ("begun", attempt, "TimedOut")
    clock.advance("59s")
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"
    assert [event.event for event in await handle.log() if event.path == "waits#0"] == ["retrying"] * 2 + ["completed"]
    assert sorted(set(RUNS)) == ["begun 1", "begun 2", "begun 3"]
    assert (await record_of(handle, "waits#0"))["attempts"] == 3


@two
async def test_the_handler_gets_the_timeout_and_may_wait_itself(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    async def handler(ctx: Context, error: Exception) -> str:
        RUNS.append(f"handling {type(error).__name__}")
        await ctx.sleep("1h")
        return str(error)

    handle = await begun(boss, hosts, waiting_in(asks, on_error=handler))
    clock.advance("1m")
    await waits_for(handle, "sleep")
    clock.advance("1h")
    assert await soon(handle.result()) == LATE
    assert set(RUNS) == {"begun 1", "handling TimedOut"}
    assert RUNS.count("begun 1") == 1  # it is not run again to find that its time has passed


@two
async def test_a_handler_that_waits_gets_the_same_error_when_it_is_resumed(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def breaks(ctx: Context) -> None:
        await ctx.sleep("50s")
        raise ValueError("broken")

    async def handler(ctx: Context, error: Exception) -> str:
        RUNS.append(type(error).__name__)
        await ctx.sleep("1h")
        return str(error)

    handle = await begun(boss, hosts, waiting_in(breaks, on_error=handler))
    clock.advance("50s")
    await until(lambda: _is_there(handle, "waits#0/~error/sleep#0"))
    await aside(handle)
    clock.advance("1h")
    assert await soon(handle.result()) == "broken"
    assert set(RUNS) == {"ValueError"}


async def _is_there(handle: ExecutionHandle, path: str) -> bool:
    return path in await handle.steps()


@two
async def test_a_step_within_a_step_has_its_own_time_in_each_attempt_of_that(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def outer(ctx: Context) -> Any:
        RUNS.append(f"outer {ctx.attempt}")
        return await ctx.step("inner", asks, timeout="50s")

    @workflow
    async def both(ctx: Context) -> Any:
        await ctx.step("first", note, "first")
        return await ctx.step("waits", outer, timeout="40s", retry=Retry(2, initial="30s", jitter=0))

    handle = await begun(boss, hosts, both)
    assert (await record_of(handle, "waits#0/inner#0"))["status"] == "begun"
    clock.advance("40s")
    await waits_for(handle, "retry")
    assert "waits#0/inner#0" not in await handle.steps()
    clock.advance("30s")
    await waits_for(handle, "signal")
    clock.advance("39s")
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"


@two
async def test_of_two_deadlines_the_earlier_counts(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    async def outer(ctx: Context) -> Any:
        try:
            return await ctx.step("inner", asks, timeout="20s")
        except StepFailed as exc:
            return [exc.reason, await ctx.wait_for("more")]

    handle = await begun(boss, hosts, waiting_in(outer))
    clock.advance("20s")
    await until(lambda: _failed(handle, "waits#0/inner#0"))
    await waits_for(handle, "signal")
    clock.advance("39s")
    await handle.signal("more", 1)
    assert await soon(handle.result()) == ["step 'waits#0/inner#0' took longer than 20 s", 1]


async def _failed(handle: ExecutionHandle, path: str) -> bool:
    return (await handle.steps()).get(path, {}).get("status") == "failed"


# --- what was done within it ---


@two
async def test_what_was_written_within_it_is_seen_when_its_time_passed_meanwhile(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def write(ctx: Context) -> None:
        ctx.state["inner"] = 1

    async def writes(ctx: Context) -> None:
        await ctx.step("write", write)
        ctx.state["own"] = 1
        await ctx.wait_for("go")

    @workflow
    async def writing(ctx: Context) -> Any:
        ctx.state["before"] = 1
        try:
            await ctx.step("waits", writes, timeout="1m")
        except StepFailed:
            seen = ctx.state.all()
            await ctx.step("after", note, "after")
            return seen

    handle = await begun(boss, hosts, writing)
    clock.advance("1m")
    assert await soon(handle.result()) == {"before": 1, "inner": 1}
    assert await handle.state() == {"before": 1, "inner": 1}
    await assert_replays(writing, await record_history(handle))


@two
async def test_a_signal_that_the_step_waited_for_is_the_next_ones(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    @workflow
    async def two_wait(ctx: Context) -> Any:
        async def second() -> Any:
            return await ctx.wait_for("go")

        return await ctx.gather(ctx.step("waits", asks, timeout="1m", on_error="skip"), second())

    handle = await begun(boss, hosts, two_wait)
    clock.advance("1m")
    await until(lambda: _completed(handle, "waits#0"))
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == [None, "gone"]


@two
async def test_a_step_that_goes_on_when_it_is_cancelled_waits_no_more(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def stubborn(ctx: Context) -> str:
        while True:
            try:
                await ctx.wait_for("go")
            except asyncio.CancelledError:
                RUNS.append("cancelled")
                if len(RUNS) == 3:
                    return "done"

    @workflow
    async def ends_in_time(ctx: Context) -> Any:
        return await ctx.step("waits", stubborn, timeout="400ms", on_error=lambda ctx, error: str(error))

    await hosts.start(ends_in_time)
    handle = await boss.workflows.start(ends_in_time)
    await until(lambda: _is_there(handle, "waits#0"))
    clock.advance("400ms")
    assert await soon(handle.result()) == "step 'waits#0' took longer than 0.4 s"
    assert len(RUNS) == 3


@two
async def test_a_step_that_takes_long_to_end_when_its_time_is_over_is_not_looked_at_all_the_while(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tidies_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)

    @workflow
    async def tidy(ctx: Context) -> Any:
        return await ctx.step("waits", tidies_up, timeout="400ms", on_error=lambda ctx, error: str(error))

    def tick(waiting: Waiting) -> None:
        RUNS.append("looked")
        looked(waiting)

    looked = Waiting.tick
    monkeypatch.setattr(Waiting, "tick", tick)
    await hosts.start(tidy)
    handle = await boss.workflows.start(tidy)
    await until(lambda: _looked(1))
    await asyncio.sleep(0.05)
    clock.advance("400ms")
    assert await soon(handle.result()) == "step 'waits#0' took longer than 0.4 s"
    assert len(RUNS) < 10


async def _looked(times: int) -> bool:
    return len(RUNS) >= times


# --- from outside ---


@two
async def test_time_passes_while_it_is_paused(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handle = await begun(boss, hosts, waiting_in(asks))
    await handle.pause()
    clock.advance("30s")
    await handle.resume()
    await waits_for(handle, "signal")
    await handle.pause()
    clock.advance("30s")
    assert (await handle.status()).status == "paused"
    await handle.resume()
    assert await soon(handle.result()) == f"TimedOut: {LATE}"


@two
async def test_it_is_cancelled_while_it_lies_aside(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handle = await begun(boss, hosts, waiting_in(asks))
    await handle.cancel()
    clock.advance("1h")
    assert (await handle.status()).status == "cancelled"


@two
@pytest.mark.parametrize("how", ["retry", "from_step", "fork"])
async def test_what_goes_on_from_an_end_has_its_time_anew(
    boss: Space, hosts: Hosts, clock: ManualClock, how: str
) -> None:
    handle = await begun(boss, hosts, waiting_in(asks))
    await handle.cancel()
    clock.advance("1h")
    if how == "fork":
        handle = await handle.fork("waits#0/wait:go#0", id="y")
    else:
        await handle.retry("waits" if how == "from_step" else None)
    await waits_for(handle, "signal")
    clock.advance("59s")
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"


@two
async def test_a_retry_keeps_what_a_step_under_way_had_flushed(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    async def flushes(ctx: Context) -> Any:
        seen = ctx.state.get("n", 0)
        ctx.state["n"] = seen + 1
        await ctx.state.flush()
        return [seen, await ctx.wait_for("go")]

    handle = await begun(boss, hosts, waiting_in(flushes))
    await handle.cancel()
    clock.advance("1h")
    await handle.retry()
    await waits_for(handle, "signal")
    assert await handle.state() == {"n": 2}


@two
async def test_another_worker_keeps_to_the_time(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    code = waiting_in(asks)
    worker = await hosts.start(code)
    handle = await boss.workflows.start(code)
    await aside(handle)
    await worker.stop()
    clock.advance("10m")
    await hosts.start(code)
    assert await soon(handle.result()) == f"TimedOut: {LATE}"
    assert RUNS.count("begun 1") == 1


@two
async def test_one_that_was_handed_over_while_another_branch_runs_keeps_to_its_time(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    """It was never put aside: what it waits for, and until when, was written down all the same."""

    @workflow
    async def beside(ctx: Context) -> Any:
        async def works() -> str:
            RUNS.append("works")
            if RUNS.count("works") == 1:
                await asyncio.Event().wait()
            return "worked"

        skipped = ctx.step("waits", asks, timeout="1m", on_error="skip")
        return await ctx.gather(skipped, ctx.step("works", works))

    worker = await hosts.start(beside)
    handle = await boss.workflows.start(beside)
    await until(lambda: _is_there(handle, "waits#0"))
    await worker.stop()
    clock.advance("1m")
    await hosts.start(beside)
    assert await soon(handle.result()) == [None, "worked"]
    assert RUNS.count("begun 1") == 1


@two
async def test_one_that_was_recorded_without_a_deadline_is_resumed(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    """As workers of before left it, who were stopped while the step waited."""
    code = waiting_in(asks)
    worker = await hosts.start(code)
    handle = await boss.workflows.start(code)
    await aside(handle)
    await worker.stop()
    scope = boss._scope
    await scope.engine.commit(boss.name, Batch(scope.actor, (Delete(steps_prefix(handle.id) + "waits#0"),)))
    clock.advance("10m")
    await hosts.start(code)
    await until(lambda: _is_there(handle, "waits#0"))
    clock.advance("1m")
    assert await soon(handle.result()) == f"TimedOut: {LATE}"


@two
async def test_code_without_the_timeout_takes_its_time(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    worker = await hosts.start(code := waiting_in(asks))
    handle = await boss.workflows.start(code)
    await aside(handle)
    await worker.stop()

    @workflow(name="waiting_in_a_step")
    async def patient(ctx: Context) -> Any:
        return await ctx.step("waits", asks)

    clock.advance("1h")
    await hosts.start(patient)
    await handle.signal("go", "gone")
    assert await soon(handle.result()) == "gone"


# --- replay ---


@two
async def test_a_history_with_a_step_that_waits_replays(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    code = waiting_in(asks, retry=Retry(2, initial="30s", jitter=0))
    handle = await begun(boss, hosts, code)
    await assert_replays(code, await record_history(handle))
    clock.advance("1m")
    await waits_for(handle, "retry")
    await assert_replays(code, await record_history(handle))
    clock.advance("30s")
    await waits_for(handle, "signal")
    await assert_replays(code, await record_history(handle))
    clock.advance("1m")
    await soon(handle.result())
    await assert_replays(code, await record_history(handle))


@pytest.mark.parametrize("kind", ["sleep", "signal", "gather", "step"])
async def test_a_crash_at_any_commit_changes_nothing(kind: str) -> None:
    code = waiting_in(KINDS[kind], retry=Retry(2, initial="30s", jitter=0))
    outcome = await run_workflow(code)
    assert outcome.steps["waits#0"]["attempts"] == 2
    assert outcome.took.total_seconds() == pytest.approx(150, abs=1)
    await crash_everywhere(code)


async def test_a_crash_at_any_commit_changes_nothing_when_it_ends_in_time() -> None:
    async def naps_twice(ctx: Context) -> int:
        first: int = await ctx.step("inner", double, 1)
        await ctx.sleep("20s")
        second: int = await ctx.step("inner", double, first)
        await ctx.sleep("100ms")
        return second

    code = waiting_in(naps_twice)
    assert (await run_workflow(code)).result == 4
    await crash_everywhere(code)
