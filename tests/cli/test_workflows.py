"""worker, workflow, schedule: what people run, see and operate from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Context, ExecutionView, step, workflow
from holdfast.cli import timeline
from holdfast.cli import workflows as commands
from holdfast.cli.session import Session
from holdfast.cli.worker import workflows_in
from holdfast.errors import InvalidInput
from tests.cli.conftest import COMMAND, Cli

DEADLINE_S = 60


async def double(n: int) -> int:
    return n * 2


broken = False


@workflow(name="research", version="2")
class Research:
    @step
    async def fetch(self, ctx: Context) -> list[int]:
        ctx.state["symbol"] = ctx.input["symbol"]
        return [1, 2, 3]

    @step(each="fetch")
    async def analyse(self, ctx: Context, item: int) -> int:
        await ctx.state.increment("total", item)
        return item

    @step(after="analyse")
    async def report(self, ctx: Context, results: list[int]) -> dict[str, Any]:
        if broken:
            raise ValueError("the printer is \x1b[31m on fire")
        return ctx.state.all()


@workflow
async def approve(ctx: Context, order: Any) -> Any:
    await ctx.step("quote", double, 2)
    return await ctx.wait_for("approval")


@pytest.fixture
def serving(folder: Path) -> Iterator[None]:
    """A worker in this process, on the project's store."""
    (folder / ".holdfast").mkdir()
    with holdfast.blocking.open(str(folder / ".holdfast" / "store.db")) as store:
        space = store.space("default", agent="worker")
        with space.workflows.worker([Research, approve]):
            yield


def until(holds: Callable[[], bool]) -> None:
    moved = threading.Event()
    for _ in range(DEADLINE_S * 50):
        if holds():
            return
        moved.wait(0.02)
    raise AssertionError("it did not happen")


def status_is(cli: Cli, id: str, status: str) -> Callable[[], bool]:
    return lambda: cli("workflow", "show", id, "--json").json["status"] == status


def waits(cli: Cli, id: str) -> Callable[[], bool]:
    return lambda: bool(cli("workflow", "show", id, "--json").json.get("waits"))


@pytest.mark.usefixtures("serving")
def test_an_execution_from_its_start_to_its_archive(cli: Cli) -> None:
    started = cli("workflow", "start", "research", '{"symbol": "MSFT"}', "--id", "r-1", "--wait", "30s", "--json")
    assert started.json == {"symbol": "MSFT", "total": 6}
    assert started.err == ""
    assert cli("workflow", "start", "research", '{"symbol": "MSFT"}', "--id", "r-1").out == "r-1\n"
    lines = cli("workflow", "show", "r-1").out.splitlines()
    assert lines[0].startswith("✓ r-1: research 2, completed, ")
    assert [line.split()[:2] for line in lines[1:4]] == [["✓", "fetch"], ["✓", "analyse"], ["✓", "report"]]
    assert "3 tasks: 3 completed" in lines[2]
    assert lines[4:] == ['state: {"symbol":"MSFT","total":6}', 'result: {"symbol":"MSFT","total":6}']
    shown = cli("workflow", "show", "r-1", "--json").json
    assert shown["result"] == shown["state"] == {"symbol": "MSFT", "total": 6}
    assert shown["steps"]["analyse#0/2"]["result"] == 3
    assert [row["name"] for row in shown["timeline"]] == ["fetch", "analyse", "report"]
    assert shown["timeline"][1]["tasks"] == {"completed": 3}
    history = cli("workflow", "history", "r-1", "--json").json_lines
    assert (history[0]["path"], history[0]["state"]) == ("fetch#0", {"symbol": "MSFT"})
    assert history[-1]["state"] == {"symbol": "MSFT", "total": 6}
    assert cli("workflow", "history", "r-1", "-n", "1").out.split("\t")[2:4] == ["completed", "fetch#0"]
    assert cli("workflow", "diff", "r-1", "fetch", "report").out == "+ total: 6\n"
    assert cli("workflow", "diff", "r-1", "0", "1", "--json").json[0]["path"] == "symbol"
    fork = cli(
        "workflow", "fork", "r-1", "--from", "report", "--id", "r-2", "--state", '{"total": 7}', "--without", "symbol"
    )
    assert fork.out == "r-2\n"
    until(status_is(cli, "r-2", "completed"))
    assert cli("workflow", "show", "r-2", "--json").json["result"] == {"total": 7}
    assert cli("workflow", "retry", "r-2", "--from", "report").out == "r-2: pending\n"
    until(status_is(cli, "r-2", "completed"))
    listed = [row.split("\t")[:3] for row in cli("workflow", "list", "--status", "completed").out.splitlines()]
    assert sorted(listed) == [["r-1", "research", "completed"], ["r-2", "research", "completed"]]
    ended = cli("workflow", "list", "--name", "research")
    assert (ended.out, "--status completed" in ended.err) == ("", True)
    assert cli("workflow", "list", "--name", "research", "--json").err == ""
    assert cli("workflow", "archive", "r-1", "--keep", "7d", "--json").json["entries"] > 5
    assert cli("workflow", "cleanup", "--older-than", "1ms").out == "removed 2, archived 2\n"
    cli("workflow", "show", "r-1", code=4)
    assert [row.split("\t")[0] for row in cli("workflow", "archives").out.splitlines()] == ["r-1", "r-2"]
    assert cli("workflow", "restore", "r-1").out == "r-1: restored\n"
    assert cli("workflow", "show", "r-1", "--json").json["result"] == {"symbol": "MSFT", "total": 6}


@pytest.mark.usefixtures("serving")
def test_an_execution_is_paused_resumed_signalled_and_cancelled(cli: Cli) -> None:
    for id in ("a-1", "a-2"):
        cli("workflow", "start", "approve", "--id", id)
        until(waits(cli, id))
    told = cli("workflow", "show", "a-1").out.splitlines()
    assert told[0].startswith("▸ a-1: approve 1, running, ")
    assert told[1] == "  waits for signal approval"
    assert told[3].split()[:2] == ["…", "wait:approval"]
    assert "░" in told[3]
    assert cli("workflow", "pause", "a-1").out == "a-1: pausing\n"
    until(status_is(cli, "a-1", "paused"))
    assert cli("workflow", "list", "--status", "paused", "--json").json[0]["id"] == "a-1"
    cli("workflow", "resume", "a-1")
    cli("workflow", "signal", "a-1", "approval", '{"by": "ann"}')
    until(status_is(cli, "a-1", "completed"))
    assert cli("workflow", "show", "a-1", "--json").json["result"] == {"by": "ann"}
    assert cli("workflow", "cancel", "a-2", "--json").json == {"id": "a-2", "status": "cancelling"}
    until(status_is(cli, "a-2", "cancelled"))
    for words in (("signal", "a-1", "approval"), ("cancel", "a-2"), ("pause", "a-1"), ("resume", "a-1")):
        refused = cli("workflow", *words, code=3)
        assert "takes nothing more" in refused.err


@pytest.mark.usefixtures("serving")
def test_a_failure_is_shown_and_tried_again(cli: Cli) -> None:
    global broken
    broken = True
    failed = cli("workflow", "start", "research", '{"symbol": "A"}', "--id", "r", "--wait", "30s", code=None)
    broken = False
    assert failed.code not in (0, 2)
    assert "on fire" in failed.err
    shown = cli("workflow", "show", "r").out
    assert "✗ report" in shown
    assert "ValueError: the printer is" in shown
    assert "\x1b" not in shown, "what steps say is shown, not obeyed"
    cli("workflow", "retry", "r")
    until(status_is(cli, "r", "completed"))


def test_what_no_worker_serves_waits_and_is_said_to(cli: Cli) -> None:
    started = cli("workflow", "start", "unknown", "7", "--id", "u")
    assert started.out == "u\n"
    assert "no worker serves 'unknown'" in started.err
    told = cli("workflow", "show", "u").out.splitlines()
    assert told[0].startswith("· u: unknown, pending, since ")
    assert told[1] == "  no worker serves unknown: it waits until one does (holdfast worker MODULE)"
    assert cli("workflow", "show", "u", "--json").json["served"] is False
    assert cli("workflow").out.split("\t")[:3] == ["u", "unknown", "pending"]


def test_schedules_from_the_command_line(cli: Cli) -> None:
    added = cli("schedule", "add", "0 7 * * 1-5", "research", '{"symbol": "A"}', "--timezone", "America/New_York")
    assert added.out.startswith("research: next at ")
    assert "no worker serves 'research'" in added.err
    made = cli("schedule", "add", "*/5 * * * *", "research", "--id", "often", "--catch-up", "none", "--json").json
    assert (made["id"], made["catch_up"]) == ("often", "none")
    rows = [row.split("\t")[:4] for row in cli("schedule").out.splitlines()]
    assert rows == [
        ["often", "research", "*/5 * * * *", "UTC"],
        ["research", "research", "0 7 * * 1-5", "America/New_York"],
    ]
    assert cli("schedule", "pause", "often").out == "often: paused\n"
    assert [each.get("paused", False) for each in cli("schedule", "list", "--json").json] == [True, False]
    assert cli("schedule", "resume", "often").out.startswith("often: next at ")
    assert cli("schedule", "remove", "often").out == "often: removed\n"
    assert [each["id"] for each in cli("schedule", "list", "--json").json] == ["research"]


def test_what_is_wrong_is_refused_with_a_sentence(cli: Cli) -> None:
    cli("set", "k", "1")
    for code, *words in (
        (2, "schedule", "add", "0 7 * *", "research"),
        (2, "schedule", "add", "0 7 * * *", "research", "--timezone", "Europe/Zurych"),
        (2, "schedule", "add", "0 7 * * *", "research", "--catch-up", "some"),
        (4, "schedule", "remove", "none"),
        (4, "workflow", "show", "none"),
        (4, "workflow", "signal", "none", "go"),
        (4, "workflow", "restore", "none"),
        (2, "workflow", "cleanup"),
        (2, "workflow", "fork", "none"),
        (2, "workflow", "list", "--status", "odd"),
        (2, "workflow", "start", "a/b"),
        (2, "worker", "no.such.module"),
        (2, "worker", "json"),
        (2, "worker", "tests.cli.test_workflows", "--only", "nothing"),
        (2, "worker", "tests.cli.test_workflows", "--concurrency", "0"),
    ):
        told = cli(*words, code=code)  # type: ignore[arg-type]
        assert told.out == ""
        assert told.err.startswith("holdfast: ")
        assert told.err.count("\n") == 1


def test_modules_are_looked_through_for_workflows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "flows_one.py").write_text(
        "from holdfast import workflow\n@workflow\nasync def one(ctx): ...\nclass Other: ...\nthing = 7\n"
    )
    (folder / "flows_two.py").write_text(
        "from flows_one import one\nfrom holdfast import workflow\n@workflow\nasync def two(ctx): ...\n"
    )
    (folder / "flows_clash.py").write_text(
        "from holdfast import workflow\n@workflow(name='one')\nasync def another(ctx): ...\n"
    )
    (folder / "flows_broken.py").write_text("import no_such_thing_at_all\n")
    (folder / "flows_worse.py").write_text("raise RuntimeError('worse')\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert [each.name for each in workflows_in(["flows_one", "flows_two"], [])] == ["one", "two"]
    assert [each.name for each in workflows_in(["flows_two"], ["two"])] == ["two"]
    for names, words in (
        (["flows_one", "flows_clash"], "two workflows are named 'one'"),
        (["flows_broken"], "cannot be imported: No module named 'no_such_thing_at_all'"),
        (["flows_worse"], "RuntimeError: worse"),
        (["flows_none"], "there is no module 'flows_none'"),
        (["./desk/flows_one.py"], "is a file; name the module as import does: 'desk.flows_one'"),
    ):
        with pytest.raises(InvalidInput, match=words):
            workflows_in(names, [])


FLOWS = """
import asyncio
from holdfast import workflow

async def slow(n):
    await asyncio.sleep(60 if n else 0)
    return n

@workflow
async def flow(ctx, n):
    return await ctx.step("slow", slow, n)
"""


@contextlib.contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    started = subprocess.Popen(
        [COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=DEADLINE_S)


def test_a_worker_that_is_told_to_stop_hands_over_at_once(cli: Cli, folder: Path) -> None:
    (folder / "flows_handed.py").write_text(FLOWS)
    with process("worker", "flows_handed", "--json", "--lease", "1h") as first:
        assert first.stdout is not None
        serving = json.loads(first.stdout.readline())
        assert serving["workflows"] == [{"workflow": "flow", "version": "1"}]
        cli("workflow", "start", "flow", "0", "--id", "quick", "--wait", "60s")
        cli("workflow", "start", "flow", "1", "--id", "slow")
        until(status_is(cli, "slow", "running"))
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0
    assert json.loads(out.splitlines()[-1]) == {"event": "stopped"}
    told = [json.loads(line) for line in err.splitlines()]
    assert any(line["message"] == "execution quick of flow has completed" for line in told)
    assert not cli("workflow", "show", "slow", "--json").json["served"]
    handed = asyncio.run(_ready(folder))
    assert handed == 1, "it waits for the next worker, whatever the lease"


async def _ready(folder: Path) -> int:
    async with holdfast.open(str(folder / ".holdfast" / "store.db"), background=False) as store:
        space = store.space("default", agent="cli")
        return len((await space._scope.engine.scan(space.name, "queues/ready/workflows.flow/", limit=10)).entries)


@pytest.mark.usefixtures("serving")
def test_watching_tells_of_each_change_until_the_end(cli: Cli) -> None:
    cli("workflow", "start", "approve", "--id", "w")
    until(waits(cli, "w"))
    with process("workflow", "show", "w", "--watch", "--json") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        cli("workflow", "signal", "w", "approval", "1")
        out, _ = watching.communicate(timeout=DEADLINE_S)
    last = json.loads(out.splitlines()[-1])
    assert first["status"] == "running"
    assert (watching.returncode, last["status"], last["result"]) == (0, "completed", 1)
    assert "completed" in cli("workflow", "show", "w", "--follow").out


# --- the drawing ---

NOW = datetime(2026, 11, 16, 7, tzinfo=UTC)


def shown(kind: str, status: str, start: float, end: float | None, **more: Any) -> dict[str, Any]:
    told = {"kind": kind, "status": status, "attempts": 1, "started_at": NOW + timedelta(seconds=start), **more}
    return told if end is None else {**told, "completed_at": NOW + timedelta(seconds=end)}


def test_a_timeline_shows_when_each_step_ran_and_folds_many_tasks() -> None:
    view = ExecutionView("x", "research", "2", "running", NOW, NOW, NOW)
    steps = {
        "fetch#0": shown("step", "completed", 0, 3, attempts=3),
        **{f"check#0/{n}": shown("item", "completed", 3, 6 + n / 10_000) for n in range(10_000)},
        "check#0/10000": shown("item", "failed", 3, 4, error={"type": "E", "message": "no"}),
        "fetch#1": shown("step", "skipped", 7, 7),
        "gather#0/1/pay#0": shown("step", "completed", 7, 8),
        "sleep#0": shown("sleep", "waiting", 8, None, until=NOW + timedelta(seconds=9)),
        "child:b#0": shown("child", "waiting", 9, None, child="x.b"),
        "ask#0": shown("step", "begun", 9.5, None, over_at=NOW + timedelta(seconds=60)),
        "~when:fetch": shown("when", "completed", 0, 0),
        "check#0/~tolerated": shown("tolerated", "completed", 6, 6),
    }
    lines = list(timeline.lines_of(view, steps, {}, None, served=True, now=NOW + timedelta(seconds=10)))
    assert lines[0] == "▸ x: research 2, running, 10.0 s, from 2026-11-16T07:00:00.000Z"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["✓", "fetch"],
        ["✗", "check"],
        ["-", "fetch#1"],
        ["✓", "pay"],
        ["✓", "sleep"],
        ["…", "child:b"],
        ["▸", "ask"],
    ]
    assert "10,001 tasks: 10,000 completed, 1 failed, the first error: E: no" in lines[2]
    bars = [line[line.index("s  ") + 3 :][:30] for line in lines[1:]]
    assert bars[0].startswith("█████████ ")
    assert lines[1].endswith("3 attempts")
    assert bars[5].strip() == "░░░"
    assert lines[6].endswith("child x.b")
    assert lines[7].endswith("has until 2026-11-16T07:01:00.000Z")


async def test_steps_that_began_in_the_same_millisecond_are_drawn_in_the_order_of_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("holdfast.cli.output.json_line", told.append)
    store = await holdfast.open("memory:", clock=holdfast.ManualClock())
    workflows = store.space("default", agent="desk").workflows
    async with workflows.worker([Research]):
        handle = await workflows.start(Research, {"symbol": "MSFT"})
        await handle.result("30s")
    await commands._show(Session(json=True), workflows, handle, await handle.status())
    await store.close()
    rows = told[0]["timeline"]
    assert len({row["started_at"] for row in rows}) == 1
    assert [row["name"] for row in rows] == ["fetch", "analyse", "report"]


def test_durations_are_short() -> None:
    told = [timeline.took(timedelta(seconds=each)) for each in (0, 0.25, 2.34, 61, 3_725, 100_000)]
    assert told == ["0 ms", "250 ms", "2.3 s", "1m 01s", "1h 02m", "1d 3h"]
