"""status, result, logs, task: what the store tells of tasks. No process is started: a ledger does what a manager would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Space, TaskOutcome, TaskSpec
from holdfast.engine import Put
from holdfast.layers.task_ledger import TaskLedger
from holdfast.layers.task_states import index_key
from tests.cli.conftest import Cli
from tests.layers.works import done, taken

STRANGE = "9" * 19


@pytest.fixture
def managed(folder: Path) -> Callable[..., Any]:
    """Do something as a manager of the project's store."""

    def run(work: Callable[[Space, TaskLedger], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            (folder / ".holdfast").mkdir(exist_ok=True)
            async with holdfast.open(str(folder / ".holdfast" / "store.db"), background=False) as store:
                space = store.space("default", agent="cli")
                async with space.tasks.ledger(capacity=2, host="h") as ledger:
                    return await work(space, ledger)

        return asyncio.run(whole())

    return run


def test_a_task_is_seen_from_its_submission_to_its_result(cli: Cli, managed: Callable[..., Any]) -> None:
    async def work(space: Space, ledger: TaskLedger) -> list[str]:
        first = await space.tasks.submit(TaskSpec(function="jobs:add", name="sum", tags=("t",)))
        await done(space, ledger, TaskOutcome("completed", return_code=0, result={"sum": 3}), output=b"adding\n")
        second = await space.tasks.submit(TaskSpec(command=("seq", "2"), env={"API_KEY": "hunter2"}))
        await done(space, ledger, TaskOutcome("completed", return_code=0), output=b"1\n\xff2\n")
        third = await space.tasks.submit(TaskSpec(command=("false",)))
        await done(space, ledger, TaskOutcome("failed", return_code=1, reason="it exited with 1"))
        fourth = await space.tasks.submit(TaskSpec(command=("sleep", "9")))
        return [first.tid, second.tid, third.tid, fourth.tid]

    first, second, third, fourth = managed(work)
    told = cli("status", "--json").json
    assert [told["counts"][name] for name in ("created", "completed", "failed")] == [1, 3, 1]
    assert [each["tid"] for each in told["tasks"]] == [fourth]
    assert cli("status").out.splitlines()[0].startswith("created 1  spawning 0  running 0  completed 3  failed 1")
    assert cli("result", first).out == '{"sum":3}\n'
    assert cli("result", first, "--stream").out == 'adding\n{"sum":3}\n'
    assert cli("result", first, "--json").json["result"] == {"sum": 3}
    assert cli("logs", first).out == "adding\n"
    [chunk] = cli("logs", second, "--json").json_lines
    assert (chunk["encoding"], chunk["data"], chunk["final"]) == ("base64", "MQr/Mgo=", True)
    assert "it exited with 1" in cli("result", third, code=25).err
    assert cli("result", fourth, "--wait", "0", "--json", code=26).error["error"] == "task_pending"
    assert cli("status", first[-10:]).out.splitlines()[:2] == [f"tid             {first}", "status          completed"]
    events = cli("logs", second, "--events", "--json").json_lines
    assert [each["state"]["status"] for each in events if each["state"]] == [
        "created",
        "spawning",
        "running",
        "completed",
    ]
    assert events[0]["taskspec"]["env"] == {"API_KEY": "[redacted]"}
    assert "hunter2" not in cli("logs", second, "--events").out
    assert cli("task", "list").out.startswith(f"{fourth}\tcreated\tsleep\t")
    assert [each["title"] for each in cli("task", "list", "--pattern", "s*", "--json").json] == ["sleep", "seq", "sum"]
    assert [each["tid"] for each in cli("task", "list", "--status", "failed", "--json").json] == [third]
    assert len(cli("task", "list", "-n", "2", "--json").json) == 2


def test_a_task_that_no_manager_has_is_stopped_by_the_store_alone(cli: Cli, managed: Callable[..., Any]) -> None:
    async def work(space: Space, ledger: TaskLedger) -> list[str]:
        return [(await space.tasks.submit(TaskSpec(command=("true",), name=name))).tid for name in ("a1", "a2", "b")]

    first, second, third = managed(work)
    assert cli("task", "ping", third, "--wait", "0", code=26).err
    assert cli("task", "stop", "--pattern", "a*").out == "".join(
        f"{tid}\tok\tthe task is cancelled\n" for tid in (first, second)
    )
    assert cli("task", "kill", third, "--json").json["message"] == "the task is cancelled"
    assert cli("task", "stop", "--all").out == ""
    assert cli("queue", "stats", "holdfast.spawn.requests", "--json").json["message_count"] == 0


def test_several_are_controlled_and_the_first_error_is_the_exit_code(cli: Cli, managed: Callable[..., Any]) -> None:
    async def work(space: Space, ledger: TaskLedger) -> list[str]:
        first = await space.tasks.submit(TaskSpec(command=("true",)))
        await done(space, ledger)
        return [first.tid, (await space.tasks.submit(TaskSpec(command=("true",)))).tid]

    ended, waiting = managed(work)
    outcome = cli("task", "stop", ended, waiting, code=3)
    assert [row.split("\t")[1] for row in outcome.out.splitlines()] == ["conflict", "ok"]
    assert "1 of 2 tasks were not told to STOP" in outcome.err


def test_a_tid_may_be_shortened_as_long_as_it_means_one_task(cli: Cli, managed: Callable[..., Any]) -> None:
    async def work(space: Space, ledger: TaskLedger) -> list[str]:
        made = await space.tasks.submit(TaskSpec(command=("true",)))
        state = await made.state()
        twin = f"{int(made.tid) - 10**12:019d}"  # ends in the same digits
        entry = await space._scope.engine.get(space.name, [index_key(state)])
        assert entry[0] is not None
        copy = index_key(state).replace(made.tid, twin)
        await space._scope.commit((Put(copy, entry[0].value, tag=entry[0].tag),))
        return [made.tid, twin]

    tid, twin = managed(work)
    outcome = cli("status", tid[-5:], code=2)
    assert "2 tasks end in" in outcome.err
    assert twin in outcome.err
    assert cli("status", tid, "--json").json["tid"] == tid


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["status", STRANGE], 4, "there is no task"),
        (["status", "9999999999"], 4, "no task whose tid ends in 9999999999"),
        (["status", "12"], 2, "is not a tid"),
        (["result", "nightly"], 2, "is not a tid"),
        (["logs", STRANGE], 4, "there is no task"),
        (["task", "stop", STRANGE], 4, "there is no task"),
        (["task", "stop"], 2, "name tasks by their tids"),
        (["task", "stop", STRANGE, "--all"], 2, "name tasks by their tids"),
        (["task", "kill", "--pattern", "no*"], 4, "no task that goes on"),
        (["task", "ping", STRANGE, "--wait", "soon"], 2, "wait"),
        (["task", "retry", STRANGE], 4, "there is no task"),
        (["task", "list", "--status", "odd"], 2, "there is no status 'odd'"),
        (["task", "list", "-n", "0"], 2, "between 1 and"),
        (["task", "write", STRANGE, "x"], 4, "there is no task"),
        (["manager", "stop"], 4, "no manager serves this space"),
        (["manager", "status"], 4, "no manager serves this space"),
        (["manager", "start", "--concurrency", "0"], 2, "concurrency is between 1"),
        (["manager", "start", "--idle", "soon"], 2, "idle"),
        (["pipeline", "run", "gone.json"], 4, "there is no file gone.json"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_wrong_call_is_told_with_its_exit_code(cli: Cli, words: list[str], code: int, said: str) -> None:
    cli("set", "k", "1")
    outcome = cli(*words, code=code)
    assert said in outcome.err
    assert outcome.out == ""


def test_a_task_that_is_in_nobodys_hands_is_not_lost(cli: Cli, managed: Callable[..., Any]) -> None:
    async def work(space: Space, ledger: TaskLedger) -> str:
        handle = await space.tasks.submit(TaskSpec(command=("true",)))
        await taken(space, ledger)
        return handle.tid

    tid = managed(work)
    assert cli("status", tid, "--json").json["status"] == "spawning"
