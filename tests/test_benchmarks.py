"""The benchmarks run, and what they print has the shape that its readers expect. How fast anything is, is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import NAMES  # noqa: E402
from benchmarks.places import file_system, real_disk  # noqa: E402
from benchmarks.report import Goal, Line  # noqa: E402
from benchmarks.rounds import Rates  # noqa: E402

MANDATORY = {"bench", "ours", "peer", "peer_name", "ratio", "unit", "goal", "ok", "runs", "load"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def check_line(line: dict[str, Any]) -> None:
    assert set(line) >= MANDATORY
    assert line["ours"] > 0
    assert line["runs"] >= 1
    assert (line["peer"] is None) == (line["peer_name"] is None) == (line["ratio"] is None)
    assert (line["goal"] is None) == (line["ok"] is None)
    assert line["ok"] in (True, False, None)


def test_each_comparison_is_a_json_line_and_a_row_of_the_table(tmp_path: Path) -> None:
    done = bench("--quick", "--folder", str(tmp_path), "sqlite_get", "sqlite_set_processes")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        check_line(line)
    assert [line["bench"] for line in lines] == [
        "sqlite_get",
        "sqlite_get",
        "sqlite_set_processes",
        "sqlite_set_processes",
        "sqlite_set_processes_share",
    ]
    rows = [row for row in done.stderr.splitlines() if row.startswith("sqlite_")]
    assert len(rows) == len(lines)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = bench("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert done.stdout == ""


def test_every_named_benchmark_is_a_module_with_a_question() -> None:
    for name in NAMES:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert "async def run(plan: Plan) -> AsyncIterator[Line]:" in text
        assert "?" in text.split('"""')[1]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory here")
def test_a_folder_in_memory_is_refused() -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is on a disk here")
    with pytest.raises(OSError, match="on a disk"):
        real_disk(Path("/dev/shm"))


def test_a_ratio_is_the_median_of_the_rounds_and_overall_is_that_of_the_sums() -> None:
    ours, peer = Rates([10.0, 1.0, 40.0]), Rates([10.0, 10.0, 20.0])
    assert ours.ratio(peer) == 1.0
    assert ours.overall(peer) == pytest.approx(51 / 40)


def test_a_goal_is_judged_on_what_it_names() -> None:
    assert Line("b", 5.0, "x", 10.0, "p", 0.5, Goal("ratio", "at least", 0.5)).ok is True
    assert Line("b", 5.0, "x", 10.0, "p", 0.5, Goal("ratio", "at most", 0.4)).ok is False
    assert Line("b", 5.0, "ms", goal=Goal("ours", "at most", 20)).ok is True
    assert Line("b", 5.0, "x").ok is None
