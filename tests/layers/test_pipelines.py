"""Pipelines: stages that are tasks, whose results flow by commit; whoever moves them on may die at any point."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import (
    Conflict,
    InvalidInput,
    ManualClock,
    NotFound,
    Space,
    Store,
    TaskFailed,
    TaskOutcome,
    TaskPending,
)
from holdfast.codec import decode
from holdfast.layers import pipelines as pipelines_module
from holdfast.layers.pipeline_states import PipelineSpec, Stage
from holdfast.layers.task_collector import collect_tasks
from holdfast.layers.task_ledger import TaskLedger
from tests.layers.works import begun, mortal, request, soon

MIB = 1024 * 1024

THREE = {
    "name": "nightly",
    "stages": [
        {"name": "fetch", "spec": {"function": "jobs:fetch"}},
        {"name": "parse", "spec": {"function": "jobs:parse"}, "each": "fetch", "retries": 1},
        {"name": "report", "spec": {"function": "jobs:report"}},
    ],
}


def work(title: str, message: Any) -> Any:
    """What the functions of the stages do."""
    if title.endswith(".fetch"):
        return [1, 2, 3]
    if title.endswith(".parse"):
        return message * 10
    return {"total": sum(message)}


async def run_one(view: Space, ledger: TaskLedger, *, fails: bool = False) -> str:
    """Run the next task to its end; gives its title."""
    launch = await begun(view, ledger)
    title, message = launch.state.title, launch.message
    outcome = (
        TaskOutcome("failed", reason="it broke") if fails else TaskOutcome("completed", result=work(title, message))
    )
    await ledger.finished(launch, outcome)
    return title


async def waiting(space: Space) -> list[str]:
    return [state.title for state in await space.tasks.list(status="created")]


async def test_results_flow_from_stage_to_stage_and_fan_out_over_items(space: Space, boss: Space) -> None:
    handle = await space.tasks.pipelines.start(THREE)
    pipelines = boss.tasks.pipelines
    async with mortal(boss) as (ledger, view, _):
        assert await pipelines.advance() == 1
        assert await waiting(space) == ["nightly.fetch"]
        await run_one(view, ledger)
        await pipelines.advance(handle.id)
        assert await waiting(space) == ["nightly.parse"] * 3
        state = await handle.state()
        assert {name: stage.status for name, stage in state.stages.items()} == {
            "fetch": "completed", "parse": "running", "report": "waiting"
        }  # fmt: skip
        for _ in range(3):
            await run_one(view, ledger)
        await pipelines.advance()
        await run_one(view, ledger)
        with pytest.raises(TaskPending):
            await handle.result(wait=0)
        await pipelines.advance()
    assert await soon(handle.result()) == {"total": 60}
    assert (await handle.state()).status == "completed"
    assert await pipelines.advance() == 0
    assert [state.id for state in await space.tasks.pipelines.list()] == [handle.id]


TWO = {
    "name": "large",
    "stages": [{"name": "make", "spec": {"function": "jobs:make"}}, {"name": "use", "spec": {"function": "jobs:use"}}],
}


async def test_a_result_of_ten_mib_flows_to_the_next_stage_through_a_blob(
    store: Store, space: Space, boss: Space, clock: ManualClock
) -> None:
    large = ["x" * MIB] * 10
    handle = await space.tasks.pipelines.start(TWO)
    pipelines = boss.tasks.pipelines
    async with mortal(boss) as (ledger, view, _):
        await pipelines.advance()
        await ledger.finished(await begun(view, ledger), TaskOutcome("completed", result=large))
        await pipelines.advance()
        [waits] = await space.tasks.list(status="created")
        launch = await begun(view, ledger)
        assert launch.message == large
        assert (launch.raw, launch.tid) == (b"null", waits.tid)
        await ledger.finished(launch, TaskOutcome("completed", result=len(launch.message)))
        await pipelines.advance()
    assert await handle.result(wait=0) == 10
    assert waits.link is not None
    assert waits.link.input is not None
    await boss.blobs.sweep(grace="1ms")
    assert decode(await space.blobs.read(waits.link.input)) == large
    clock.advance("9d")
    assert await collect_tasks(boss._scope.engine, "contoso", clock.now_ms()) > 0
    left = await boss._scope.engine.scan("contoso", f"blobs/{waits.link.input.sha256}/")
    assert left.entries == []


async def test_a_task_whose_large_input_is_gone_fails_and_says_so(space: Space, boss: Space) -> None:
    handle = await space.tasks.pipelines.start(TWO)
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        await ledger.finished(await begun(view, ledger), TaskOutcome("completed", result="x" * (5 * MIB)))
        await boss.tasks.pipelines.advance()
        [waits] = await space.tasks.list(status="created")
        assert waits.link is not None
        assert waits.link.input is not None
        Path(space.blobs.path(waits.link.input)).unlink()
        assert await ledger.spawning(await request(view)) is None
        await boss.tasks.pipelines.advance()
    assert "its input cannot be read" in str((await (await space.tasks.get(waits.tid)).state()).reason)
    assert (await handle.state()).status == "failed"


async def test_what_is_too_much_to_flow_fails_the_pipeline(
    space: Space, boss: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines_module, "FLOW_BYTES_MAX", 100)
    handle = await space.tasks.pipelines.start(TWO)
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        await ledger.finished(await begun(view, ledger), TaskOutcome("completed", result="x" * 200))
        await boss.tasks.pipelines.advance()
    with pytest.raises(TaskFailed, match="'make' gave 202 bytes; 100 can flow to the next"):
        await handle.result(wait=0)


async def test_many_large_items_are_submitted_in_several_steps(space: Space, boss: Space) -> None:
    spec = {**TWO, "stages": [TWO["stages"][0], {**TWO["stages"][1], "each": "make"}]}  # type: ignore[index,dict-item]
    handle = await space.tasks.pipelines.start(spec)
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        await ledger.finished(await begun(view, ledger), TaskOutcome("completed", result=["x" * (3 * MIB)] * 7))
        assert await boss.tasks.pipelines.advance() == 3
    assert len((await handle.state()).stages["use"].parts) == 7


async def test_a_pipeline_runs_by_itself_where_managers_follow_it(space: Space, boss: Space) -> None:
    running = asyncio.ensure_future(boss.tasks.pipelines.run())
    try:
        async with mortal(boss) as (ledger, view, _):
            handle = await space.tasks.pipelines.start(THREE, id="n-1")
            result = asyncio.ensure_future(handle.result())
            while not result.done():
                if await waiting(space):
                    await run_one(view, ledger)
                await asyncio.sleep(0.01)
            assert await soon(result) == {"total": 60}
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_task_that_fails_is_tried_again_and_then_fails_the_pipeline(space: Space, boss: Space) -> None:
    pipelines = boss.tasks.pipelines
    async with mortal(boss) as (ledger, view, _):
        good = await boss.tasks.pipelines.start(THREE)
        await pipelines.advance()
        await run_one(view, ledger)
        await pipelines.advance()
        await run_one(view, ledger, fails=True)
        await pipelines.advance()
        parts = (await good.state()).stages["parse"].parts
        assert [part.try_ for part in parts] == [2, 1, 1]
        for _ in range(3):
            await run_one(view, ledger)
        await pipelines.advance()
        await run_one(view, ledger)
        await pipelines.advance()
        assert await good.result(wait=0) == {"total": 60}

        bad = await boss.tasks.pipelines.start(THREE)
        await pipelines.advance()
        await run_one(view, ledger, fails=True)
        await pipelines.advance()
        with pytest.raises(TaskFailed, match=r"stage 'fetch': task \d+ .* is failed, after 1 tries"):
            await bad.result(wait=0)
        assert await waiting(space) == []


async def test_several_who_move_it_on_at_once_submit_nothing_twice(space: Space, boss: Space) -> None:
    await boss.tasks.pipelines.start(THREE)
    async with mortal(boss) as (ledger, view, _):
        await asyncio.gather(*(boss.tasks.pipelines.advance() for _ in range(5)))
        assert await waiting(space) == ["nightly.fetch"]
        await run_one(view, ledger)
        await asyncio.gather(*(boss.tasks.pipelines.advance() for _ in range(5)))
        assert await waiting(space) == ["nightly.parse"] * 3


async def test_a_step_that_another_has_taken_meanwhile_is_not_taken_again(
    boss: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    await boss.tasks.pipelines.start(THREE)
    engine, real = boss._scope.engine, boss._scope.engine.commit

    async def overtaken(space: str, batch: Any) -> Any:
        monkeypatch.setattr(engine, "commit", real)
        await boss.tasks.pipelines.advance()
        return await real(space, batch)

    monkeypatch.setattr(engine, "commit", overtaken)
    await boss.tasks.pipelines.advance()
    assert await waiting(boss) == ["nightly.fetch"]


@pytest.mark.parametrize("dies_at", range(8))
async def test_whoever_moves_it_on_may_die_before_or_after_any_commit(
    boss: Space, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that happens and is not heard of, and one that never happens; the next one goes on from there."""
    handle = await boss.tasks.pipelines.start(THREE)
    engine, real, number = boss._scope.engine, boss._scope.engine.commit, 0

    async def mortal_commit(space: str, batch: Any) -> Any:
        nonlocal number
        number += 1
        if number == dies_at // 2 + 1:
            if dies_at % 2:
                await real(space, batch)
            raise asyncio.CancelledError
        return await real(space, batch)

    async def advance() -> None:
        monkeypatch.setattr(engine, "commit", mortal_commit)
        try:
            await boss.tasks.pipelines.advance()
        except asyncio.CancelledError:
            monkeypatch.setattr(engine, "commit", real)
            await boss.tasks.pipelines.advance()
        monkeypatch.setattr(engine, "commit", real)

    async with mortal(boss) as (ledger, view, _):
        ran = []
        while not (await handle.state()).ended:
            await advance()
            for _ in await waiting(boss):
                ran.append(await run_one(view, ledger))
    assert sorted(ran) == ["nightly.fetch", *["nightly.parse"] * 3, "nightly.report"]
    assert await handle.result(wait=0) == {"total": 60}


async def test_no_more_run_at_once_than_a_stage_allows(space: Space, boss: Space) -> None:
    stages = [
        {"name": "fetch", "spec": {"function": "jobs:fetch"}},
        {"name": "parse", "spec": {"function": "jobs:parse"}, "each": "fetch", "max_workers": 2},
    ]
    handle = await boss.tasks.pipelines.start({"name": "n", "stages": stages})
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        await run_one(view, ledger)
        await boss.tasks.pipelines.advance()
        assert len(await waiting(space)) == 2
        await run_one(view, ledger)
        await boss.tasks.pipelines.advance()
        assert len(await waiting(space)) == 2
        for _ in range(2):
            await run_one(view, ledger)
        await boss.tasks.pipelines.advance()
    assert await handle.result(wait=0) == [10, 20, 30]


async def test_an_empty_fan_out_completes_and_input_and_several_results_arrive(space: Space, boss: Space) -> None:
    stages: list[dict[str, Any]] = [
        {"name": "a", "spec": {"function": "jobs:a"}},
        {"name": "none", "spec": {"function": "jobs:n"}, "each": "a"},
        {"name": "b", "spec": {"command": ["b"]}, "after": "a"},
        {"name": "c", "spec": {"function": "jobs:c"}, "after": ["none", "b"]},
    ]
    await boss.tasks.pipelines.start({"name": "n", "stages": stages}, {"day": 5})
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        launch = await begun(view, ledger)
        assert launch.message == {"day": 5}
        await ledger.finished(launch, TaskOutcome("completed", result=[]))
        await boss.tasks.pipelines.advance()
        launch = await begun(view, ledger)
        assert (launch.state.title, launch.message) == ("n.b", [])
        await ledger.output(launch, [("stdout", b'{"x":1}')])
        await ledger.finished(launch, TaskOutcome("completed"))
        await boss.tasks.pipelines.advance()
        launch = await begun(view, ledger)
        assert launch.message == {"none": [], "b": {"x": 1}}


async def test_a_cancelled_pipeline_submits_nothing_more_and_stops_what_waits(space: Space, boss: Space) -> None:
    handle = await boss.tasks.pipelines.start(THREE)
    await boss.tasks.pipelines.advance()
    await handle.cancel()
    assert await waiting(space) == []
    assert await boss.tasks.pipelines.advance() == 0
    assert (await handle.state()).status == "cancelled"
    with pytest.raises(Conflict, match="ended already"):
        await handle.cancel()


async def test_a_pipeline_is_found_again_by_its_id(space: Space) -> None:
    await space.tasks.pipelines.start(THREE, {"x": 1}, id="n-1")
    assert (await space.tasks.pipelines.start(THREE, {"x": 1}, id="n-1")).id == "n-1"
    with pytest.raises(Conflict, match="is another one"):
        await space.tasks.pipelines.start(THREE, {"x": 2}, id="n-1")
    with pytest.raises(NotFound):
        await space.tasks.pipelines.get("n-2")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "n", "stages": []}, "between 1 and 100 stages"),
        ({"name": "n"}, "the pipeline has no stages"),
        ({"name": "n", "stages": [], "stagse": []}, "a pipeline has no field 'stagse'; did you mean stages?"),
        ({"name": "n", "stages": "a"}, "a pipeline's stages are a list, not str"),
        ({"name": "n", "stages": ["a"]}, "stage 1 must be an object with its fields, not str"),
        ({"name": "n", "stages": [{"name": "a"}]}, "stage 'a': spec is missing"),
        ([], "a pipeline is an object with name and stages, not list"),
        ({"name": "n", "stages": [{"name": "a", "spec": {}}]}, "stage 'a': a task has either"),
        ({"name": "n", "stages": [{"name": "a", "spec": {"function": "a:b"}, "after": "b"}]}, "no stage before it"),
        ({"name": "n", "stages": [{"name": "a", "spec": {"function": "a:b"}}] * 2}, "two stages 'a'"),
        (
            {"name": "n", "stages": [{"name": "a", "spec": {"function": "a:b"}, "retry": 1}]},
            "stage 'a' has no field 'retry'; did you mean retries?",
        ),
        (
            {"name": "n", "stages": [{"name": "a", "spec": {"function": "a:b"}, "retries": "x"}]},
            "retries must be a whole",
        ),
        ({"name": "n", "stages": [{"name": "a", "spec": {"command": "ls -l"}}]}, "stage 'a': command is a list"),
        ({"name": "n", "stages": [{"name": "a", "spec": {"function": "a:b"}, "retries": -1}]}, "retries are up to"),
    ],
)
def test_a_wrong_pipeline_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PipelineSpec.of(fields)
    assert words in str(refused.value)


def test_a_pipeline_is_made_in_python_of_stages_or_of_objects() -> None:
    stage = Stage(name="a", spec={"function": "a:b"})
    one = PipelineSpec(name="n", stages=[stage])  # type: ignore[arg-type]
    assert one == PipelineSpec(name="n", stages=({"name": "a", "spec": {"function": "a:b"}},))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="stage 'a': retries must be a whole number, not text"):
        PipelineSpec(name="n", stages=(msgspec.structs.replace(stage, retries="3"),))


async def test_a_result_that_is_no_list_cannot_be_fanned_out(boss: Space) -> None:
    stages = [{"name": "a", "spec": {"function": "j:a"}}, {"name": "b", "spec": {"function": "j:b"}, "each": "a"}]
    handle = await boss.tasks.pipelines.start({"name": "n", "stages": stages})
    async with mortal(boss) as (ledger, view, _):
        await boss.tasks.pipelines.advance()
        await ledger.finished(await begun(view, ledger), TaskOutcome("completed", result=5))
        await boss.tasks.pipelines.advance()
    with pytest.raises(TaskFailed, match="whose result is no list"):
        await handle.result(wait=0)
