"""Every example runs, and the demo would notice what it claims not to happen."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

ARGUMENTS: dict[str, list[str]] = {
    "audit.py": [],
    "blobs.py": [],
    "blocking.py": [],
    "cache.py": [],
    "correlation_lifecycle.py": [],
    "demo.py": ["--seconds", "2", "--kills", "3"],
    "demo_keeper.py": ["--seconds", "3", "--agents", "3"],
    "orchestration_patterns.py": [],
    "queues.py": [],
    "records.py": [],
    "research_desk.py": [],
    "tasks.py": [],
    "transactions.py": [],
    "watching.py": [],
    "workflows.py": [],
}
"""Every example by name; with what makes a long one short."""


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "an example writes plain text where there is no terminal"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdfast_demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def verdict_on(demo: ModuleType, **changed: object) -> set[str]:
    """The lines of the demo's verdict that do not hold, for a day of three orders with this changed."""
    requests = ["a-1", "b-1", "a-2"]
    day = {
        "notes": {
            "a": demo.Notes(asked=["a-1", "a-2"], told={"a-1": 1, "a-2": 3}, journalled=["a-1", "a-2"]),
            "b": demo.Notes(asked=["b-1"], told={"b-1": 2}, journalled=["b-1"]),
        },
        "cuts": [demo.Cut("a-2", committed=True)],
        "counter": 3,
        "orders": requests,
        "journal": requests,
        "feed": list(enumerate(requests, 7)),
    }
    verdict = demo.Verdict()
    verdict.compare(**(day | changed))
    return {subject for holds, subject, _ in verdict.lines if not holds}


def test_the_demo_is_content_with_a_day_without_loss(demo: ModuleType) -> None:
    assert verdict_on(demo) == set()


def test_the_demo_notices_a_lost_order(demo: ModuleType) -> None:
    assert {"orders", "cut off"} <= verdict_on(demo, orders=["a-1", "b-1"])


def test_the_demo_notices_an_order_nobody_asked_for(demo: ModuleType) -> None:
    assert "orders" in verdict_on(demo, orders=["a-1", "b-1", "a-2", "a-3"])


def test_the_demo_notices_a_counter_that_counted_twice_or_not_at_all(demo: ModuleType) -> None:
    assert verdict_on(demo, counter=4) == {"counter"}
    assert verdict_on(demo, counter=2) == {"counter"}


def test_the_demo_notices_one_sum_told_to_two_agents(demo: ModuleType) -> None:
    notes = {
        "a": demo.Notes(told={"a-1": 1, "a-2": 2}, journalled=["a-1", "a-2"]),
        "b": demo.Notes(told={"b-1": 2}, journalled=["b-1"]),
    }
    assert "answers" in verdict_on(demo, notes=notes)


@pytest.mark.parametrize(
    "journal",
    [["a-1", "b-1"], ["a-1", "b-1", "a-2", "a-2"], ["a-2", "b-1", "a-1"], ["a-1", "b-1", "a-2", "c-1"]],
    ids=["lost", "doubled", "out of order", "unknown"],
)
def test_the_demo_notices_a_wrong_journal(demo: ModuleType, journal: list[str]) -> None:
    assert verdict_on(demo, journal=journal) == {"journal"}


def test_the_demo_notices_a_feed_that_misses_doubles_or_falls(demo: ModuleType) -> None:
    assert "feed" in verdict_on(demo, feed=[(7, "a-1"), (8, "b-1")])
    assert "feed" in verdict_on(demo, feed=[(7, "a-1"), (8, "b-1"), (9, "a-2"), (10, "a-2")])
    assert "feed" in verdict_on(demo, feed=[(8, "a-1"), (7, "b-1"), (9, "a-2")])
