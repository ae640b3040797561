"""Where a COMMIT of the resident engine runs: on the loop as long as it is quick, measured by a clock that tells microseconds apart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.engine import Batch, Put
from holdfast.engines import resident_commit
from holdfast.engines.resident import ResidentEngine


class SlowDisk:
    """A clock on which every COMMIT takes as long as we say, and which threads they were."""

    def __init__(self, commit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[bool] = []
        self._now_s = 0.0
        commit_rows = resident_commit.GroupCommit._commit_rows

        def committed(commits: resident_commit.GroupCommit) -> BaseException | None:
            self._now_s += commit_s
            self.threads.append(threading.current_thread() is not threading.main_thread())
            return commit_rows(commits)

        monkeypatch.setattr(resident_commit.GroupCommit, "_commit_rows", committed)
        monkeypatch.setattr(resident_commit, "elapsed_s", lambda: self._now_s)


async def _commit(engine: ResidentEngine, count: int) -> None:
    for number in range(count):
        await engine.commit("s", Batch("a", (Put("records/k", b"%d" % number),)))


async def test_commits_of_half_a_millisecond_stay_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's own time is one of whole milliseconds: by it these took one as often as none, and most were handed to a thread."""
    disk = SlowDisk(0.0006, monkeypatch)
    engine = await ResidentEngine.open(tmp_path / "k.db")
    await _commit(engine, 200)
    assert not any(disk.threads)
    assert engine._commits._commit_s == pytest.approx(0.0006, rel=0.2)
    await engine.close()


async def test_commits_of_two_milliseconds_go_to_the_thread_until_they_are_quick_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(0.002, monkeypatch)
    engine = await ResidentEngine.open(tmp_path / "k.db")
    await _commit(engine, 200)
    assert sum(disk.threads[-100:]) >= 98  # but for one that is measured
    monkeypatch.setattr(resident_commit, "PROBE_EVERY", 2)
    SlowDisk(0.0001, monkeypatch)
    engine._commits._until_probe = 1
    await _commit(engine, 50)
    disk.threads.clear()
    await _commit(engine, 10)
    assert not any(disk.threads)
    await engine.close()
