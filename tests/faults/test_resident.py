"""The resident engine where it hurts: kill -9 again and again, at every write and fsync, and disks that fail or are full.

The script, the faults and the judgement are those of `test_syscalls.py` and `driver.py`. HOLDFAST_SOAK=1 takes longer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from holdfast.engines.resident import ResidentEngine
from holdfast.errors import StorageFull
from holdfast.testing.history import load
from tests.faults.driver import all_entries, fleet, judge
from tests.faults.scripted import STEPS
from tests.faults.test_disk import DISK_BYTES, SPACE, Disk, batch, disk, fill, integrity
from tests.faults.test_syscalls import (
    FSYNCS,
    OTHERS,
    PROMISES,
    READS,
    WRITES,
    Fault,
    count_calls,
    strace,
    sweep,
)
from tests.soak import SOAK, sample

__all__ = ["disk", "strace"]

TIMEOUT_S = 3600 if SOAK else 240


async def test_an_owner_that_is_killed_again_and_again_is_linearizable(tmp_path: Path) -> None:
    """What was left without an answer is asked again under its request id, by the owner's next life."""
    operations, url = 400_000 if SOAK else 8_000, f"resident:{tmp_path / 'store.db'}"
    with fleet(tmp_path, workers=1, clients=16, operations=operations, keys=16, timeout=TIMEOUT_S, url=url) as running:
        running.run(kill_every=0.3 if SOAK else 0.1, kills_max=None if SOAK else 12)
        outcomes = await judge(load(running.files()), url)
    assert running.kills >= (50 if SOAK else 2)
    assert outcomes["failed"] == 0
    assert sum(outcomes.values()) >= operations


@pytest.fixture(scope="module")
def calls(strace: str, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    return count_calls(tmp_path_factory.mktemp("undisturbed"), "resident")


@pytest.mark.parametrize("call", [WRITES, FSYNCS, *OTHERS])
def test_an_owner_killed_at_any_write_or_fsync_leaves_what_it_acknowledged(
    tmp_path: Path, calls: Counter[str], call: str
) -> None:
    faults = [
        Fault(call, "signal=SIGKILL", n, engine="resident") for n in sample(calls[call], 48 if call == WRITES else 8)
    ]
    runs = sweep(tmp_path, faults)
    assert {code for code, _ in runs} == {137}
    if call in (WRITES, FSYNCS):
        assert len({seen.acknowledged for _, seen in runs}) >= (len(STEPS) if SOAK else 2)


@pytest.mark.parametrize("mode", ["recover", "die"])
@pytest.mark.parametrize(("call", "error"), [(WRITES, "EIO"), (WRITES, "ENOSPC"), (FSYNCS, "EIO"), (READS, "EIO")])
def test_an_error_of_the_disk_is_told_as_it_is(
    tmp_path: Path, calls: Counter[str], call: str, error: str, mode: str
) -> None:
    chosen = sample(calls[call], {FSYNCS: 12, READS: 13}.get(call, 72))
    runs = sweep(tmp_path, [Fault(call, f"error={error}", n, mode=mode, engine="resident") for n in chosen])
    errors = Counter(name for _, seen in runs for name in seen.errors)
    assert set(errors) <= PROMISES | {"Damaged" if call == READS else "OutcomeUnknown"}
    assert errors, "no fault was noticed by anybody"
    if (call, error) == (WRITES, "ENOSPC"):
        assert errors["StorageFull"], errors
        assert not errors["OutcomeUnknown"], errors
    if mode == "recover":
        assert all(seen.acknowledged == len(STEPS) for _, seen in runs)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", [WRITES, FSYNCS])
def test_a_disk_that_stays_broken_never_acknowledges_and_never_lies(
    tmp_path: Path, calls: Counter[str], call: str, error: str
) -> None:
    chosen = sample(calls[call], 160 if call == WRITES else 20)
    runs = sweep(tmp_path, [Fault(call, f"error={error}", n, lasting=True, engine="resident") for n in chosen])
    assert all(code == 0 for code, _ in runs)
    assert any(seen.errors for _, seen in runs)
    assert {name for _, seen in runs for name in seen.errors} <= PROMISES | {"OutcomeUnknown"}


async def test_a_full_disk_refuses_writes_changes_nothing_and_works_again_once_there_is_space(disk: Disk) -> None:
    path = disk.folder / "store.db"
    disk.load(DISK_BYTES // 2)
    engine = await ResidentEngine.open(path)
    refused, refusals = await fill(engine), 0
    while refusals < 20:
        before = await all_entries(engine, SPACE)
        try:
            await engine.commit(SPACE, batch(refused))
        except StorageFull:
            refusals += 1
            assert await all_entries(engine, SPACE) == before
        else:  # folding the log has made some room
            refused = await fill(engine)
    assert before["records/count"].value == b"%d" % refused
    disk.free()
    receipt = await engine.commit(SPACE, batch(refused))
    assert receipt.results[1] == refused + 1
    assert await engine.commit(SPACE, batch(refused)) == receipt
    assert engine.failure is None
    after = await all_entries(engine, SPACE)
    await engine.close()
    assert integrity(path) == [("ok",)]
    again = await ResidentEngine.open(path)
    assert await all_entries(again, SPACE) == after
    await again.close()
