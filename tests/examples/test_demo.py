"""The demo would notice what it claims not to happen: each line of its verdict fails when its promise is broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import holdfast
from holdfast import Decision, Resolution, TaskState, Verification

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from desk import books, flows, report, verdict  # noqa: E402
from desk.cast import Kill  # noqa: E402
from desk.roles import Notes  # noqa: E402

NOW = datetime(2026, 11, 16, tzinfo=UTC).isoformat()


def resolution(**changed: Any) -> Resolution:
    told = {
        "conflict": {
            "kind": "output-inconsistency",
            "rule": "opposite-recommendation",
            "subject": "MSFT",
            "parties": ["market/2", "risk/1"],
            "values": {},
        },
        "method": "priority",
        "winner": "risk/1",
        "reason": "risk/1 ranks highest, with 75",
        "outputs": {"market/2": {}, "risk/1": {}},
        "approvals": {},
        "justification": None,
        "by": "grace",
        "at": NOW,
        "document": "research/MSFT",
    }
    return msgspec.convert(told | changed, Resolution)


def decision(**changed: Any) -> Decision:
    told = {
        "id": "d-1",
        "corr_id": "c",
        "run": "1",
        "status": "completed",
        "action": "trade",
        "direction": "sell",
        "size": 2750,
        "confidence": 0.8,
        "details": {},
        "merged": {},
        "audit": {
            "input_signals": ["market", "risk", "compliance"],
            "missing_signals": [],
            "processing_ms": 1,
            "pattern": "fan_in",
            "merge": "WeightedAverage",
            "timed_out": False,
            "error_count": 0,
            "orchestrator": "o-1",
            "agent": "ada",
        },
        "decided_at": NOW,
    }
    return msgspec.convert(told | changed, Decision)


def task(status: str, **changed: Any) -> TaskState:
    told = {
        "tid": "1837025672140161024",
        "status": status,
        "owner": "risk",
        "title": "t",
        "created_at": NOW,
        "attempt": 1,
    }
    return msgspec.convert(told | changed, TaskState)


def a_good_day() -> books.Day:
    """Three orders, two leaders, a workflow of two symbols that a worker died in, and the rest as it should be."""
    return books.Day(
        notes={
            "market": Notes(asked=["m-1", "m-2"], told={"m-1": 1, "m-2": 3}),
            "risk": Notes(asked=["r-1"], told={"r-1": 2}),
        },
        counter=3,
        orders={"m-1": "market", "r-1": "risk", "m-2": "market"},
        cuts=[books.Cut("m-2", committed=True)],
        beats=[books.Beat(1, "ada", 7), books.Beat(2, "ada", 7), books.Beat(3, "grace", 9)],
        told_beats={1: 7, 3: 9},
        kills=[Kill("ada", "leading", "grace leads")],
        symbols=["AAPL", "MSFT"],
        status="completed",
        note={"best": "AAPL"},
        state={"analysed": 2, "symbols": ["AAPL", "MSFT"]},
        starts=[
            books.Start("fetch", 10, "worker-1", 1),
            books.Start("AAPL", 20, "worker-1", 1),
            books.Start("MSFT", 20, "worker-1", 1),
            books.Start("MSFT", 50, "worker-2", 1),
            books.Start("report", 60, "worker-2", 1),
        ],
        finishes=[
            books.Finish("fetch", 10, 11, "worker-1", 1),
            books.Finish("AAPL", 20, 30, "worker-1", 1),
            books.Finish("MSFT", 50, 59, "worker-2", 1),
            books.Finish("report", 60, 61, "worker-2", 1),
        ],
        opinions=dict.fromkeys(["market", "risk", "compliance", "reporting"], None),
        seen_by="ada",
        resolutions=[resolution()],
        decision=decision(),
        trades=["d-1"],
        tasks={
            "backtest": task("completed", peak_memory_mb=44.0),
            "runaway": task("killed", peak_memory_mb=180.0, reason="memory: it used more than 160 MiB"),
        },
        refused="market may not",
        audited=Counter({("market", "m-1"): 1, ("risk", "r-1"): 1, ("market", "m-2"): 1}),
        denials=1,
        chain=Verification(segments=2, records=9, upto=9, hash="00", problems=[]),
    )


def broken(**changed: Any) -> set[str]:
    """The lines that do not hold, for a good day with this changed."""
    return {line.subject for line in verdict.verdict(replace(a_good_day(), **changed)) if not line.holds}


def test_the_demo_is_content_with_a_good_day() -> None:
    assert broken() == set()


def test_the_demo_notices_a_lost_order() -> None:
    assert "orders" in broken(orders={"m-1": "market", "r-1": "risk"})


def test_the_demo_notices_an_order_nobody_asked_for() -> None:
    assert "orders" in broken(orders={**a_good_day().orders, "m-9": "market"})


@pytest.mark.parametrize("counter", [2, 4])
def test_the_demo_notices_a_counter_that_counted_twice_or_not_at_all(counter: int) -> None:
    assert broken(counter=counter) == {"orders"}


def test_the_demo_notices_one_sum_told_twice() -> None:
    notes = {"market": Notes(told={"m-1": 1, "m-2": 2}), "risk": Notes(told={"r-1": 2})}
    assert broken(notes=notes) == {"orders"}


def test_the_demo_notices_an_order_that_a_second_life_did_again() -> None:
    twice = a_good_day().audited + Counter({("market", "m-2"): 1})
    assert {"cut off", "audit"} <= broken(audited=twice)


def test_the_demo_notices_when_no_order_was_cut_off_after_its_commit() -> None:
    assert broken(cuts=[]) == {"cut off"}
    assert broken(cuts=[books.Cut("m-2", committed=False)]) == {"cut off"}


@pytest.mark.parametrize(
    "beats",
    [
        [(1, "ada", 7), (2, "ada", 7), (3, "ada", 7)],
        [(1, "ada", 9), (2, "ada", 9), (3, "grace", 7)],
        [(1, "ada", 7), (2, "grace", 7), (3, "grace", 9)],
        [(1, "ada", 7), (3, "grace", 9)],
        [(1, "ada", 7), (2, "ada", 7), (2, "ada", 7), (3, "grace", 9)],
    ],
    ids=["nobody took over", "epochs fall", "two leaders in one epoch", "a beat is lost", "a beat is doubled"],
)
def test_the_demo_notices_wrong_leaders(beats: list[tuple[int, str, int]]) -> None:
    assert broken(beats=[books.Beat(*each) for each in beats], told_beats={}) == {"leaders"}


def test_the_demo_notices_an_acknowledged_beat_of_another_epoch() -> None:
    assert broken(told_beats={3: 7}) == {"leaders"}


def test_the_demo_notices_a_finished_step_that_ran_again() -> None:
    again = books.Start("AAPL", 40, "worker-2", 1)
    assert broken(starts=[*a_good_day().starts, again]) == {"workflow"}


def test_the_demo_notices_a_workflow_that_did_not_survive() -> None:
    assert broken(status="failed") == {"workflow"}
    assert broken(state={"analysed": 3, "symbols": ["AAPL", "MSFT"]}) == {"workflow"}
    assert broken(state={"analysed": 2, "symbols": ["AAPL", "AAPL"]}) == {"workflow"}
    assert broken(finishes=a_good_day().finishes[:-1]) == {"workflow"}
    by_one = [finish._replace(worker="worker-1") for finish in a_good_day().finishes]
    assert broken(finishes=by_one) == {"workflow"}, "nobody took over"


@pytest.mark.parametrize(
    "changed",
    [
        {"resolutions": []},
        {"open_conflicts": 1},
        {"resolutions": [resolution(winner="market/2")]},
        {"resolutions": [resolution(by="ada")]},
        {"resolutions": [resolution(outputs={"risk/1": {}})]},
        {"opinions": {"risk": 0}},
    ],
    ids=["never settled", "still open", "wrong winner", "nobody took over", "one output gone", "one section gone"],
)
def test_the_demo_notices_a_conflict_that_was_settled_wrongly(changed: dict[str, Any]) -> None:
    assert broken(**changed) == {"conflict"}


@pytest.mark.parametrize(
    "changed",
    [
        {"decision": None},
        {"decision": decision(action="timeout")},
        {"decision": decision(audit=msgspec.to_builtins(decision().audit) | {"input_signals": ["risk"]})},
        {"trades": []},
        {"trades": ["d-1", "d-1"]},
        {"trades": ["d-2"]},
    ],
    ids=["none", "timed out", "not all signals", "never acted on", "acted on twice", "another one acted on"],
)
def test_the_demo_notices_a_decision_that_was_not_made_once(changed: dict[str, Any]) -> None:
    assert broken(**changed) == {"decision"}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("backtest", task("failed")),
        ("backtest", task("completed", peak_memory_mb=300.0)),
        ("backtest", task("completed")),
        ("runaway", task("completed", peak_memory_mb=900.0)),
        ("runaway", task("killed", reason="kill")),
    ],
    ids=["failed", "over its limit", "not measured", "not stopped", "stopped by somebody else"],
)
def test_the_demo_notices_limits_that_do_not_limit(name: str, state: TaskState) -> None:
    assert broken(tasks={**a_good_day().tasks, name: state}) == {"limits"}


def test_the_demo_notices_a_task_that_is_missing() -> None:
    assert broken(tasks={}) == {"limits"}


def test_the_demo_notices_an_agent_that_wrote_what_is_not_its_own() -> None:
    assert broken(refused="") == {"ownership"}
    assert broken(denials=0) == {"ownership"}
    forged = Counter({("risk", "m-1"): 1, ("risk", "r-1"): 1, ("market", "m-2"): 1})
    assert "ownership" in broken(audited=forged)


def test_the_demo_notices_an_audit_that_is_not_sound_or_not_whole() -> None:
    chain = a_good_day().chain
    assert broken(chain=None) == {"audit"}
    assert broken(chain=msgspec.structs.replace(chain, problems=["segment 1 was changed"])) == {"audit"}
    assert broken(chain=msgspec.structs.replace(chain, records=0)) == {"audit"}
    assert "audit" in broken(audited=Counter({("market", "m-1"): 1, ("market", "m-2"): 1}))


async def test_every_day_of_the_demo_is_the_same_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flows.FOLDER, str(tmp_path))
    monkeypatch.setenv(flows.STEP_S, "0")
    async with holdfast.open("memory:") as store:
        workflows = store.space("desk", agent="worker").workflows
        async with workflows.worker([flows.Research]):
            handle = await workflows.start(flows.Research, {"symbols": flows.SYMBOLS})
            assert await handle.result("30s") == {"best": "AAPL", "mean": 0.024}
        finishes = await books.read_finishes(handle, flows.SYMBOLS)
    assert sorted(each.step for each in finishes) == sorted(["fetch", *flows.SYMBOLS, "report"])
    assert {each.step for each in finishes if each.attempts == 2} == {flows.UNLUCKY}
    starts = books.read_starts(tmp_path / "starts", {os.getpid(): "worker"})
    assert sorted(each.step for each in starts) == sorted(["fetch", *flows.SYMBOLS, flows.UNLUCKY, "report"])
    assert {each.process for each in starts} == {"worker"}


def test_one_line_that_does_not_hold_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    lines = verdict.verdict(a_good_day())
    assert report.Teller().verdict(lines)
    assert not report.Teller().verdict([*lines[1:], lines[0]._replace(holds=False)])
    told = capsys.readouterr().out
    assert "nothing was lost" in told
    assert "did NOT go as promised" in told


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C reaches it alone here: what it started must be ended by it."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--fast"]
    demo = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if "leads, in epoch" in line:
                break
        started = working_in(tmp_path)
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(60) == 1, rest
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
    assert len(started) > 5, "agents, leads, workers and a manager were at work"
    assert "stopped" in rest
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 10
    while (left := [each for each in started if psutil.pid_exists(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def working_in(folder: Path) -> list[int]:
    """The processes that work in this folder or below it."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found
