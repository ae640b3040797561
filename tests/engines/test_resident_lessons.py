"""Lessons of the resident engine: what is told is what is in the file, whatever else happens to the group, the space or the thread."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import apsw
import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Delete, Engine, Entry, Increment, Put
from holdfast.engines import resident_folding
from holdfast.engines.resident import ResidentEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.errors import StorageFull
from holdfast.ids import new_id

OPEN = {"resident": ResidentEngine.open, "sqlite": SqliteEngine.open}


def counting(id: str | None = None, *, fresh: bool = True) -> Batch:
    return Batch("a", (Increment("records/n", 3),), (), id or new_id(), fresh)


def loaded(key: str, value: bytes, version: int) -> Entry:
    return Entry(key, value, version, "x", 1, 1, None, "")


def crashed(path: Path) -> Path:
    """The file as kill -9 would leave it now."""
    shutil.copytree(path.parent, path.parent / "crashed")
    return path.parent / "crashed" / path.name


async def test_what_went_to_no_file_is_not_told_to_have_failed_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    for space in ("s", "other"):
        await engine.commit(space, counting())
    dropping = asyncio.ensure_future(engine.drop("s"))
    making = asyncio.ensure_future(engine.create("s", "volatile"))
    await asyncio.sleep(0)
    passing, commit_rows = [dropping, making], engine._commits._commit_rows

    def no_room_for_the_group() -> BaseException | None:
        if passing:
            passing.pop()
            return commit_rows()
        return apsw.FullError("no room")

    monkeypatch.setattr(engine._commits, "_commit_rows", no_room_for_the_group)
    volatile, other = (asyncio.get_running_loop().create_future() for _ in range(2))
    engine.submit("s", counting(), volatile)
    engine.submit("other", counting(), other)
    outcomes = await asyncio.gather(volatile, other, dropping, making, return_exceptions=True)
    assert isinstance(outcomes[1], StorageFull)
    [entry] = await engine.get("s", ["records/n"])
    assert (entry is None) is isinstance(outcomes[0], StorageFull), "which says that nothing was changed"
    monkeypatch.undo()
    await engine.close()


@pytest.mark.parametrize("kind", list(OPEN))
async def test_entries_newer_than_the_revision_they_are_loaded_with_do_not_outlive_what_is_committed_over_them(
    tmp_path: Path, kind: str
) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    await engine.load("s", [loaded("records/a", b"1", 7), loaded("records/b", b"1", 7)], 0)
    await engine.commit("s", Batch("a", (Delete("records/a"), Put("records/b", b"2"))))
    held = (await engine.scan("s", "")).entries
    left = crashed(tmp_path / "k.db")
    await engine.close()
    again: Engine = await OPEN[kind](left, clock=ManualClock())
    assert (await again.scan("s", "")).entries == held
    await again.close()


async def test_a_store_into_which_newer_entries_were_loaded_is_not_damaged(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    await engine.commit("other", counting())
    await engine.load("s", [loaded("records/a", b"1", 7)], 0)
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    assert (await again.get("other", ["records/n"]))[0] is not None
    await again.close()


async def test_an_entry_that_is_loaded_twice_at_once_is_counted_once(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    await engine.load("s", [loaded("records/a", b"1", 1), loaded("records/a", b"22", 2)], 5)
    [before] = await engine.spaces("s")
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    assert await again.spaces("s") == [before]
    await again.close()


async def test_closing_in_the_middle_of_a_pass_folds_what_came_since_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_folding, "SLICE_ROWS", 2)
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    for number in range(43):
        if number == 40:
            engine._commits._fold_what_is_old()
        await engine.commit("s", Batch("a", (Put(f"records/{number % 40:02}", b"1"),)))
    await engine.close()
    assert apsw.Connection(str(tmp_path / "k.db")).execute("SELECT * FROM folds").fetchall() == []


async def test_a_close_that_was_cancelled_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engines.resident_commit.INLINE_COMMIT_S", -1.0)
    monkeypatch.setattr("holdfast.engines.resident_file.CLAIM_WAIT_S", 0.0)
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    go, commit_rows = threading.Event(), engine._commits._commit_rows
    monkeypatch.setattr(engine._commits, "_commit_rows", lambda: commit_rows() if go.wait(10) else None)
    committing = asyncio.ensure_future(engine.commit("s", counting()))
    while engine._commits._turns.in_thread is None:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    go.set()
    await committing
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    assert (await again.get("s", ["records/n"]))[0] is not None
    await again.close()


async def test_where_no_thread_can_be_had_a_commit_is_answered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("holdfast.engines.resident_commit.INLINE_COMMIT_S", -1.0)
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    with monkeypatch.context() as none_left:
        none_left.setattr(threading.Thread, "start", refuse)
        async with asyncio.timeout(5):
            await engine.commit("s", counting())
    await asyncio.gather(*(engine.commit("s", counting()) for _ in range(4)))  # there are threads again
    [entry] = await engine.get("s", ["records/n"])
    assert entry is not None
    assert entry.value == b"15", "each once"
    await engine.close()
