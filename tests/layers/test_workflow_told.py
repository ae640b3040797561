"""How a step ended is one line of the log; it has an entry of its own only where the log would not do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, ExecutionHandle, ManualClock, Retry, Space, step, workflow
from holdfast.layers.workflows.journal import TOLD_BYTES_MAX
from holdfast.testing.replaying import assert_replays, record_history
from tests.layers.hosting import Hosts, soon, waits_for
from tests.layers.resuming import RUNS, forget, hosts, note

__all__ = ["forget", "hosts"]


async def fails_once(text: str) -> str:
    RUNS.append(text)
    if RUNS.count(text) == 1:
        raise ValueError("no")
    return text


async def fails(text: str) -> str:
    RUNS.append(text)
    raise ValueError(text)


async def large(ctx: Context) -> str:
    RUNS.append("large")
    return "." * TOLD_BYTES_MAX


async def counts(ctx: Context) -> int:
    RUNS.append("counts")
    return int(await ctx.state.increment("n"))


@workflow
async def mixed(ctx: Context) -> Any:
    await ctx.step("plain", note, "plain")
    await ctx.step("counts", counts)
    await ctx.step("again", fails_once, "again", retry=Retry(2, initial="1m", jitter=0))
    await ctx.step("large", large)
    try:
        await ctx.step("broken", fails, "broken")
    except Exception as exc:
        ctx.state["broken"] = str(exc)
    answer = await ctx.wait_for("go")
    if answer == "fail":
        await ctx.step("fatal", fails, "fatal")
    return ctx.state.all()


async def started(space: Space, hosts: Hosts, clock: ManualClock) -> ExecutionHandle:
    """One that waits for what it is told."""
    await hosts.start(mixed)
    handle = await space.workflows.start(mixed)
    await waits_for(handle, "retry")
    clock.advance("1m")
    await waits_for(handle, "signal")
    return handle


async def stored(space: Space, id: str) -> list[str]:
    """The steps that have entries of their own."""
    prefix = f"journal/steps/{id}/"
    page = await space._scope.engine.scan(space.name, prefix)
    return [entry.key[len(prefix) :] for entry in page.entries]


async def test_only_what_waits_was_tried_before_or_is_large_has_an_entry(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await started(boss, hosts, clock)
    await handle.signal("go", "end")
    result = await soon(handle.result())
    own = {"again#0", "large#0", "wait:go#0", "~body"}
    assert set(await stored(boss, handle.id)) <= own
    steps = await handle.steps()
    assert list(steps) == sorted(steps)
    assert {path: each["status"] for path, each in steps.items() if path[0] != "~"} == {
        "plain#0": "completed",
        "counts#0": "completed",
        "again#0": "completed",
        "large#0": "completed",
        "broken#0": "failed",
        "wait:go#0": "completed",
    }
    assert (steps["counts#0"]["result"], steps["again#0"]["attempts"], steps["broken#0"]["error"]["message"]) == (
        1,
        2,
        "broken",
    )
    await assert_replays(mixed, await record_history(handle))
    assert RUNS == ["plain", "counts", "again", "again", "large", "broken"]
    assert result == {"n": 1, "broken": "step 'broken#0' failed: ValueError: broken"}


async def test_what_only_the_log_tells_is_taken_back_and_done_again(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await started(boss, hosts, clock)
    await handle.signal("go", "fail")
    with pytest.raises(ExecutionFailed, match="fatal"):
        await soon(handle.result())
    assert (await handle.steps())["fatal#0"]["status"] == "failed"
    await handle.retry(from_step="counts")
    await waits_for(handle, "signal")
    await handle.signal("go", "end")
    assert (await soon(handle.result()))["n"] == 1
    assert RUNS.count("plain") == 1
    assert RUNS.count("counts") == RUNS.count("broken") == 2
    assert "fatal#0" not in await handle.steps()


async def test_a_fork_has_what_only_the_log_told(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handle = await started(boss, hosts, clock)
    await handle.signal("go", "end")
    await soon(handle.result())
    fork = await handle.fork("large")
    await fork.signal("go", "end")
    assert (await soon(fork.result()))["n"] == 1
    assert RUNS.count("plain") == RUNS.count("counts") == 1
    assert RUNS.count("large") == RUNS.count("broken") == 2
    assert "plain#0" not in await stored(boss, fork.id)
    assert (await fork.steps())["plain#0"]["result"] == "plain"


async def test_whoever_watches_sees_each_step(boss: Space, hosts: Hosts) -> None:
    @workflow(name="short")
    class Short:
        @step
        async def first(self, ctx: Context) -> int:
            return 1

        @step(after="first")
        async def second(self, ctx: Context, n: int) -> int:
            return n + 1

    handle = await boss.workflows.start(Short)
    seen: list[int] = []

    async def look() -> None:
        async for _ in handle.watch():
            seen.append(len(await handle.steps()))

    await hosts.start(Short)
    await soon(look())
    assert seen[-1] == 2
    assert await handle.result() == 2


@dataclass
class Adds:
    """One that has no hash."""

    n: int

    async def __call__(self, ctx: Context, to: int) -> int:
        return to + self.n


async def test_a_step_may_be_an_object_that_is_called(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def adds(ctx: Context) -> int:
        return int(await ctx.step("add", Adds(2), 3))

    await hosts.start(adds)
    assert await soon((await boss.workflows.start(adds)).result()) == 5
