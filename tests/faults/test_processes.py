"""Eight processes on one SQLite file, in peace and under kill -9: one history, nothing lost, nothing twice.

HOLDFAST_SOAK=1 makes the runs longer, not different.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.testing.history import events, load
from tests.faults.driver import ROOT, fleet, judge

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
WORKERS = 8
OPERATIONS = 1_000_000 if SOAK else 40_000
OPERATIONS_IN_PEACE = 250_000 if SOAK else 2_000
TIMEOUT_S = 3600 if SOAK else 240


async def test_eight_processes_on_one_file_are_linearizable(tmp_path: Path) -> None:
    share = OPERATIONS_IN_PEACE // WORKERS
    with fleet(tmp_path, workers=WORKERS, clients=4, operations=share, keys=16, timeout=TIMEOUT_S) as running:
        running.run(kill_every=None)
        outcomes = await judge(load(running.files()), running.url)
    assert outcomes["unknown"] == outcomes["failed"] == 0
    assert sum(outcomes.values()) >= OPERATIONS_IN_PEACE


async def test_eight_processes_on_one_file_are_linearizable_while_some_are_killed(tmp_path: Path) -> None:
    share = OPERATIONS // WORKERS
    with fleet(tmp_path, workers=WORKERS, clients=4, operations=share, keys=16, timeout=TIMEOUT_S) as running:
        running.run(kill_every=0.3, kills_max=None if SOAK else 24)
        outcomes = await judge(load(running.files()), running.url)
        hanging = sum(_hanging(path) for path in running.files())
    assert running.kills >= (100 if SOAK else 8)
    assert outcomes["failed"] == 0
    assert hanging > 0, "no operation was left without an answer: the kills were too tame"
    assert sum(outcomes.values()) >= OPERATIONS


def _hanging(path: Path) -> int:
    """How many operations a life left without an answer; the next one asked again."""
    ids = [event.id for event in events(path)]
    return len([id for id, count in Counter(ids).items() if count == 1])


@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
async def test_a_fleet_that_is_killed_all_at_once_again_and_again_loses_nothing(tmp_path: Path, seed: int) -> None:
    """No process survives to keep the shared memory of the file alive, so that every opening recovers."""
    with fleet(tmp_path, workers=4, clients=8, operations=10**9, keys=6, timeout=TIMEOUT_S) as running:
        for _ in range(6 if SOAK else 3):
            running.work_then_kill_all(seed)
            seed += 100
        outcomes = await judge(load(running.files()), running.url)
    assert outcomes["ok"] > 500


def test_processes_that_create_a_store_at_the_same_instant_all_open_it(tmp_path: Path) -> None:
    rounds = 1000 if SOAK else 12
    command = [sys.executable, "-m", "tests.faults.openers", str(tmp_path), str(rounds)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("", "", 0)
