"""Going back in an execution: its history, what differs between two points, forks, and retries from a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Conflict, Context, ExecutionHandle, InvalidInput, NotFound, Space, step, workflow
from tests.layers.test_workflows import Hosts, hosts, soon, until, waits_for

__all__ = ["hosts"]

factor = 1
calls: list[str] = []


@workflow
class Research:
    """Counts what its steps do, in the state and in `calls`."""

    @step
    async def fetch(self, ctx: Context) -> list[int]:
        calls.append("fetch")
        ctx.state["source"] = ctx.input
        return [1, 2, 3]

    @step(each="fetch")
    async def analyse(self, ctx: Context, item: int) -> int:
        calls.append(f"analyse {item}")
        await ctx.state.increment("total", item * factor)
        return item * factor

    @step(after="analyse")
    async def report(self, ctx: Context, results: list[int]) -> dict[str, Any]:
        calls.append("report")
        await ctx.state.append_to_list("reports", sum(results))
        return ctx.state.all()


@pytest.fixture(autouse=True)
def untouched() -> None:
    global factor
    factor = 1
    calls.clear()


async def test_the_history_tells_the_state_after_each_step(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a")
    await soon(handle.result())
    points = await handle.history()
    assert [point.number for point in points] == list(range(1, len(points) + 1))
    told = [(point.path, point.event, point.state) for point in points]
    assert told[0] == ("fetch#0", "completed", {"source": "a"})
    assert [state["total"] for path, _, state in told if path.startswith("analyse")][-1] == 6
    assert told[-2] == ("report#0", "completed", {"source": "a", "total": 6, "reports": [6]})
    assert told[-1][:2] == ("", "completed")
    assert points[0].changed == ("source",)
    assert points[0].by == "boss"
    assert await handle.state() == told[-1][2] == await handle.state_at(len(points))
    assert await handle.history(after=1, limit=2) == points[1:3]
    assert await handle.state_at(0) == {}
    assert await handle.state_at("analyse") == {"source": "a", "total": 6}


async def test_any_two_points_can_be_compared(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a")
    await soon(handle.result())
    found = await handle.diff("fetch", "report")
    assert [str(difference) for difference in found] == ["+ reports: [6]", "+ total: 6"]
    assert [str(each) for each in await handle.diff("report", 0)] == [
        "- reports: [6]",
        '- source: "a"',
        "- total: 6",
    ]
    assert list(await handle.diff("report", "report")) == []
    for wrong in (99, -1, "nothing", True):
        with pytest.raises(InvalidInput):
            await handle.diff(0, wrong)
    with pytest.raises(InvalidInput):
        await handle.history(limit=0)


async def test_a_retry_from_a_step_takes_back_the_tasks_of_later_maps(boss: Space, hosts: Hosts) -> None:
    global factor
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a")
    await soon(handle.result())
    factor = 10
    calls.clear()
    await handle.retry(from_step="analyse")
    assert await soon(handle.result()) == {"source": "a", "total": 60, "reports": [60]}
    assert sorted(calls) == ["analyse 1", "analyse 2", "analyse 3", "report"]
    await handle.retry(from_step="fetch")
    assert await soon(handle.result()) == {"source": "a", "total": 60, "reports": [60]}
    assert "fetch" in calls
    points = await handle.history()
    [first, _] = [point.number for point in points if point.event == "retried"]
    assert points[first - 2].state == {"source": "a", "total": 6, "reports": [6]}
    assert points[first - 1].state == {"source": "a"}, "what was taken back is in the state no longer"
    assert points[-1].state == await handle.state() == {"source": "a", "total": 60, "reports": [60]}


async def test_a_retry_of_one_task_of_a_map_does_that_one_again_and_what_comes_after(boss: Space, hosts: Hosts) -> None:
    global factor
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a")
    await soon(handle.result())
    factor = 10
    calls.clear()
    await handle.retry(from_step="analyse#0/1")
    assert (await soon(handle.result()))["total"] == 1 + 20 + 3
    assert calls == ["analyse 2", "report"]


looks: Callable[[int], int] = lambda n: n  # noqa: E731


async def look(n: int) -> int:
    return looks(n)


@workflow
async def writes_between(ctx: Context, n: int) -> dict[str, Any]:
    """Its own code, between the steps, writes what the step before it gave."""
    a = await ctx.step("a", look, n)
    ctx.state["a"] = a
    await ctx.state.increment("sum", a)
    b = await ctx.step("b", look, a + 1)
    ctx.state["b"] = b
    await ctx.state.increment("sum", b)
    await ctx.state.flush()
    ctx.state["c"] = await ctx.step("c", look, b + 1)
    await ctx.state.flush()
    return ctx.state.all()


async def test_what_code_between_steps_wrote_is_taken_back_and_made_again(boss: Space, hosts: Hosts) -> None:
    global looks
    looks = lambda n: n  # noqa: E731
    await hosts.start(writes_between)
    handle = await boss.workflows.start(writes_between, 1)
    assert await soon(handle.result()) == {"a": 1, "b": 2, "c": 3, "sum": 3}
    for times in (10, 100):
        looks = lambda n, times=times: n * times  # type: ignore[misc]  # noqa: E731
        await handle.retry(from_step="b")
        expected = {"a": 1, "b": 2 * times, "c": (2 * times + 1) * times, "sum": 1 + 2 * times}
        assert await soon(handle.result()) == expected
        assert await handle.state() == expected
        assert (await handle.history())[-1].state == expected


async def test_a_fork_goes_on_from_a_step_and_leaves_the_other_alone(boss: Space, hosts: Hosts) -> None:
    global factor
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a", id="msft")
    result = await soon(handle.result())
    before = (await handle.status(), await handle.steps(), await handle.log())
    factor = 10
    calls.clear()
    fork = await handle.fork("analyse", id="msft-2", state={"total": 1000, "why": ["what", "if"]}, without=["source"])
    assert fork.id == "msft-2"
    assert await soon(fork.result()) == {"total": 1060, "why": ["what", "if"], "reports": [60]}
    assert await fork.state() == {"total": 1060, "why": ["what", "if"], "reports": [60]}
    assert "fetch" not in calls
    assert (await handle.status(), await handle.steps(), await handle.log()) == before
    assert await handle.state() == result
    status = await fork.status()
    assert (status.config["forked_from"], status.config["forked_at"]) == ("msft", "analyse#0")
    points = {point.event: point for point in await fork.history()}
    assert points["forked"].state == {"total": 1000, "why": ["what", "if"]}
    assert points["forked"].by == "boss"


async def test_a_fork_may_have_another_input(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a")
    await soon(handle.result())
    fork = await handle.fork("fetch", input="b")
    assert await soon(fork.result()) == {"source": "b", "total": 6, "reports": [6]}
    assert (await fork.status()).input == "b"
    again = await fork.fork("report")
    assert await soon(again.result()) == {"source": "b", "total": 6, "reports": [6]}


@workflow
async def decides(ctx: Context, n: int) -> Any:
    """Looks at its state between steps, and waits after each."""
    await ctx.step("prepare", look, n)
    large = ctx.state.get("limit", 0) > 10
    await ctx.step("large" if large else "small", look, n)
    answer = await ctx.wait_for("go")
    return [large, answer, await ctx.step("sum", add_limit)]


async def add_limit(ctx: Context) -> int:
    return await ctx.state.increment("limit", 1)


async def test_code_after_the_steps_taken_over_sees_the_edited_state_also_when_resumed(
    boss: Space, hosts: Hosts
) -> None:
    global looks
    looks = lambda n: n  # noqa: E731
    first = await hosts.start(decides)
    handle = await boss.workflows.start(decides, 1)
    await waits_for(handle, "signal")
    fork = await handle.fork("small", state={"limit": 20})
    await waits_for(fork, "signal")
    assert list(await fork.steps()) == ["large#0", "prepare#0", "wait:go#0"]
    await hosts.kill(first)
    boss._scope.clock.advance("11s")  # type: ignore[attr-defined]
    await hosts.start(decides)
    await fork.signal("go", "yes")
    assert await soon(fork.result()) == [True, "yes", 21]
    await handle.signal("go", "no")
    assert await soon(handle.result()) == [False, "no", 1]
    from_the_start = await handle.fork("prepare", state={"limit": 11})
    await from_the_start.signal("go", 1)
    assert await soon(from_the_start.result()) == [True, 1, 12]


@workflow
async def child(ctx: Context, n: int) -> int:
    return int(await ctx.wait_for("n", timeout="1h", default=n))


@workflow
async def parent(ctx: Context, n: int) -> list[int]:
    first = await ctx.child(child, n)
    return [first, await ctx.child(child, n + 1, id=f"second-of-{ctx.id}")]


async def test_a_step_that_starts_a_child_starts_another_when_it_is_done_again(boss: Space, hosts: Hosts) -> None:
    await hosts.start(parent, child)
    handle = await boss.workflows.start(parent, 1, id="p")
    await waits_for(handle, "child")
    [wait] = (await handle.status()).waits
    await (await boss.workflows.get(wait["name"])).signal("n", 10)
    await until(lambda: _is_there(boss, "second-of-p"))
    await handle.cancel()

    await until(lambda: _is(handle, "cancelled"))
    await handle.retry(from_step="child:child#0")
    await until(lambda: _is_there(boss, "p.child:child#0~1"))
    await (await boss.workflows.get("p.child:child#0~1")).signal("n", 20)

    await until(lambda: _is(handle, "failed"))  # the second one has an id of its own, which is taken
    assert "needs an id of its own" in (await handle.status()).error["message"]  # type: ignore[index]


@workflow
async def asks(ctx: Context, n: int) -> list[int]:
    return await ctx.gather(ctx.child(child, n), ctx.step("look", look, n))


async def test_a_child_that_is_still_waited_for_is_started_anew_by_forks_and_retries(boss: Space, hosts: Hosts) -> None:
    global looks
    looks = lambda n: n  # noqa: E731
    await hosts.start(asks)
    children = await hosts.start(child)
    handle = await boss.workflows.start(asks, 1, id="p")
    await waits_for(await boss.workflows.get("p"), "child")
    fork = await handle.fork("look", id="q")
    await waits_for(fork, "child")
    await (await boss.workflows.get("q.child:child#0")).signal("n", 5)
    assert await soon(fork.result()) == [5, 1]
    old = await boss.workflows.get("p.child:child#0")
    await waits_for(old, "signal")
    await children.stop()
    await handle.cancel()
    await until(lambda: _is(handle, "cancelled"))
    await handle.retry()
    await until(lambda: _is_there(boss, "p.child:child#0~1"))
    await hosts.start(child)
    await until(lambda: _is(old, "cancelled"))  # it tells its parent, which does not mean that one any more
    await (await boss.workflows.get("p.child:child#0~1")).signal("n", 6)
    assert await soon(handle.result()) == [6, 1]


async def _is(handle: ExecutionHandle, status: str) -> bool:
    return (await handle.status()).status == status


async def _is_there(space: Space, id: str) -> bool:
    try:
        await space.workflows.get(id)
    except NotFound:
        return False
    return True


@workflow
async def keeps_much(ctx: Context, n: int) -> int:
    large = await ctx.step("large", look, "x" * 100_000)
    return await ctx.step("size", look, len(large))


async def test_a_fork_has_its_own_reference_to_what_is_large(boss: Space, hosts: Hosts) -> None:
    global looks
    looks = lambda n: n  # noqa: E731
    await hosts.start(keeps_much)
    handle = await boss.workflows.start(keeps_much, 1)
    assert await soon(handle.result()) == 100_000
    fork = await handle.fork("size")
    assert await soon(fork.result()) == 100_000
    blobs = await boss._scope.engine.scan(boss.name, "blobs/", limit=100)
    assert sum(f"journal/steps/{fork.id}/large#0" in entry.key for entry in blobs.entries) == 1


async def test_bad_forks_and_retries_are_refused_and_change_nothing(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Research)
    handle = await boss.workflows.start(Research, "a", id="one")
    await soon(handle.result())
    before = await boss._scope.engine.spaces(boss.name)
    for refused in (
        lambda: handle.fork("nothing"),
        lambda: handle.fork("report#1"),
        lambda: handle.retry(from_step="nothing"),
        lambda: handle.fork("report", state={"x": object()}),
        lambda: handle.fork("report", state={"": 1}),
        lambda: handle.fork("report", id=""),
        lambda: handle.fork("report", state={str(n): n for n in range(41)}),
    ):
        with pytest.raises(InvalidInput):
            await refused()
    with pytest.raises(InvalidInput, match="recorded are analyse#0, fetch#0, report#0"):
        await handle.fork("nothing")
    with pytest.raises(Conflict, match="an id of its own"):
        await handle.fork("report", id="one")
    assert await boss._scope.engine.spaces(boss.name) == before
