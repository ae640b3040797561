"""Steps that are tasks of their own process, with a manager that the test plays: submitted once, told of their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, InvalidInput, ManualClock, Retry, Space, TaskSpec, step, workflow
from holdfast.layers.task_launch import TaskOutcome
from tests.layers.hosting import Hosts, soon, until, waits_for


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


two = pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)
"""For what no engine can make a difference to."""


async def manage(boss: Space, outcome: TaskOutcome) -> str:
    """Take one task, run it in no time, and end it so. Gives its tid."""
    async with boss.tasks.ledger() as ledger, boss.queue("holdfast.spawn.requests").reserve(wait="30s") as request:
        launch = await ledger.spawning(request)
        assert launch is not None
        await ledger.running(launch, pid=1)
        await ledger.finished(launch, outcome)
        return launch.tid


@workflow(retry=Retry(2, initial="10ms", jitter=0))
async def training(ctx: Context, command: list[str]) -> Any:
    ctx.state["begun"] = True
    return await ctx.task("train", TaskSpec(command=command), {"rows": 3})


async def test_a_task_s_end_wakes_the_execution_that_waits_for_it_with_its_result(boss: Space, hosts: Hosts) -> None:
    worker = await hosts.start(training)
    handle = await boss.workflows.start(training, ["train.sh"])
    await waits_for(handle, "task")
    tid = (await handle.steps())["train#0"]["task"]
    await worker.stop()
    assert await soon(manage(boss, TaskOutcome("completed", result={"accuracy": 0.9}))) == tid
    assert (await handle.status()).waits[0]["kind"] == "task"
    await hosts.start(training)  # the end that nobody saw is found
    assert await soon(handle.result()) == {"accuracy": 0.9}
    assert (await boss.queue("holdfast.spawn.requests").stats()).message_count == 0
    assert not (await boss._scope.engine.scan("contoso", "journal/errands/")).entries


async def test_a_command_gives_where_its_output_is_and_a_failed_task_is_tried_again_as_a_new_one(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(training)
    handle = await boss.workflows.start(training, ["train.sh"])
    first = await soon(manage(boss, TaskOutcome("failed", return_code=3, reason="out of disk")))

    async def is_retried() -> bool:
        clock.advance("20ms")
        return (await handle.steps())["train#0"].get("task") not in (None, first)

    await until(is_retried)
    second = await soon(manage(boss, TaskOutcome("completed", return_code=0)))
    assert await soon(handle.result()) == {"task": second, "return_code": 0, "output_bytes": 0}
    assert (await handle.steps())["train#0"]["attempts"] == 2


@two
async def test_a_task_that_failed_for_good_fails_the_step_with_its_reason(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(training)
    handle = await boss.workflows.start(training, ["train.sh"])
    await soon(manage(boss, TaskOutcome("failed", return_code=3, reason="out of disk")))

    async def is_retried() -> bool:
        clock.advance("20ms")
        return (await boss.tasks.counts())["created"] == 1

    await until(is_retried)
    await soon(manage(boss, TaskOutcome("killed", reason="memory limit")))
    with pytest.raises(ExecutionFailed, match="memory limit"):
        await soon(handle.result())


@pytest.mark.parametrize("there", ["a worker", "nobody"])
async def test_cancelling_the_execution_stops_its_task(boss: Space, hosts: Hosts, there: str) -> None:
    worker = await hosts.start(training)
    handle = await boss.workflows.start(training, ["train.sh"])
    await waits_for(handle, "task")
    tid = (await handle.steps())["train#0"]["task"]
    if there == "nobody":
        await worker.stop()
    await handle.cancel()
    with pytest.raises(ExecutionFailed, match="was cancelled"):
        await soon(handle.result())
    assert (await (await boss.tasks.get(tid)).state()).status == "cancelled"


@workflow(name="lab")
class Lab:
    @step(name="seeds")
    async def seeds(self, ctx: Context) -> list[int]:
        return [1, 2]

    @step(name="train", each="seeds", task=True)
    async def train(self, ctx: Context, seed: int) -> Any:
        await ctx.state.increment("made")
        return TaskSpec(function="pkg.mod:train", args=[seed]) if ctx.input is None else "no spec"

    @step(name="best", after="train")
    async def best(self, ctx: Context, scores: list[int]) -> int:
        return max(scores)


async def test_a_step_of_a_class_makes_the_task_it_is(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Lab)
    handle = await boss.workflows.start(Lab)
    for score in (5, 7):
        await soon(manage(boss, TaskOutcome("completed", result=score)))
    assert await soon(handle.result()) == 7
    assert (await handle.state())["made"] == 2
    with pytest.raises(ExecutionFailed, match="returns a TaskSpec, not str"):
        await soon((await boss.workflows.start(Lab, "bad")).result())


@two
async def test_what_is_no_spec_is_refused_at_the_call(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def bad(ctx: Context) -> Any:
        return await ctx.task("train", ["train.sh"])  # type: ignore[arg-type]

    await hosts.start(bad)
    with pytest.raises(ExecutionFailed, match="wants a TaskSpec"):
        await soon((await boss.workflows.start(bad)).result())
    with pytest.raises(InvalidInput, match="its timeout is the TaskSpec's"):
        step(name="x", timeout="1s", task=True)(Lab.train)
