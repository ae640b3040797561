"""Lessons of the SQLite engine: spaces that come and go in other processes, duties beside commits, locks that nobody lets go of."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import apsw
import pytest

from holdfast import ManualClock
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Increment, Put
from holdfast.engines import sqlite as sqlite_engine
from holdfast.engines import sqlite_file
from holdfast.engines.registry import open_engine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.engines.sqlite_file import ASYNC_JUMP, FileLock
from holdfast.errors import Unavailable
from holdfast.ids import new_id


async def put(engine: SqliteEngine, space: str, value: bytes) -> int:
    return (await engine.commit(space, Batch("a", (Put("records/k", value),)))).version


async def test_spaces_of_one_file_are_each_as_durable_as_they_ask_for(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await engine.create("relaxed", "async")
    for _ in range(3):
        await put(engine, "relaxed", b"1")
        assert engine._writer.pragma("synchronous") == 1
        await put(engine, "strict", b"1")
        assert engine._writer.pragma("synchronous") == 2
    await engine.close()


async def test_the_first_commit_to_an_async_space_that_another_dropped_is_as_durable_as_the_space_it_makes(
    tmp_path: Path,
) -> None:
    ours, theirs = [await SqliteEngine.open(tmp_path / "team.db") for _ in range(2)]
    await ours.create("s", "async")
    await put(ours, "s", b"1")
    await theirs.drop("s")
    await put(ours, "s", b"2")
    [info] = await ours.spaces("s")
    assert info.durability == "sync"
    assert ours._writer.pragma("synchronous") == 2, "a commit to a sync space was not fsynced"
    await ours.close()
    await theirs.close()


async def test_versions_are_not_given_again_although_all_commits_of_an_async_space_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "team.db", tmp_path / "left.db"
    engine = await SqliteEngine.open(path)
    await engine.create("relaxed", "async")
    await engine.close()
    shutil.copy(path, left)
    engine = await SqliteEngine.open(path)
    lost = [await put(engine, "relaxed", b"2") for _ in range(5)]
    await engine.close()
    monkeypatch.setattr(sqlite_engine, "boot_id", lambda: "another boot")
    engine = await SqliteEngine.open(left)
    assert await put(engine, "relaxed", b"3") > max(lost)
    assert (await engine.spaces("relaxed"))[0].feed_floor == ASYNC_JUMP
    await engine.close()


async def test_everybody_hears_of_a_lock_that_is_not_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_engine, "LOCK_WAIT_S", 0.05)
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await put(engine, "s", b"1")
    stuck = FileLock(tmp_path / "team.db")
    try:
        with stuck:
            for _ in range(3):
                with pytest.raises(Unavailable, match="nothing was changed"):
                    await asyncio.wait_for(put(engine, "s", b"2"), 5)
    finally:
        stuck.close()
        await engine.close()


@pytest.mark.parametrize("what", ["create", "drop", "compact", "load"])
async def test_who_administers_hears_of_a_lock_that_is_not_let_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(sqlite_engine, "LOCK_WAIT_S", 0.05)
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await put(engine, "s", b"1")
    work = {
        "create": lambda: engine.create("new"),
        "drop": lambda: engine.drop("s"),
        "compact": lambda: engine.compact("s", 1),
        "load": lambda: engine.load("s", [], 9),
    }[what]
    stuck = FileLock(tmp_path / "team.db")
    try:
        with stuck:
            with pytest.raises(Unavailable, match="nothing was changed"):
                await asyncio.wait_for(work(), 5)
            with pytest.raises(Unavailable, match="nothing was changed"):
                await asyncio.wait_for(put(engine, "s", b"2"), 5)
    finally:
        stuck.close()
    assert await put(engine, "s", b"3") == 2
    assert [each.name for each in await engine.spaces()] == ["s"]
    await engine.close()


async def test_who_administers_a_file_that_a_keeper_has_is_told(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await put(engine, "s", b"1")
    keeper = FileLock(tmp_path / "team.db")
    try:
        with keeper:
            keeper.sign()
            with pytest.raises(Unavailable, match="for itself"):
                await asyncio.wait_for(engine.create("new"), 2)
            with pytest.raises(Unavailable, match="for itself"):
                await asyncio.wait_for(put(engine, "s", b"2"), 2)
            keeper.unsign()
    finally:
        keeper.close()
        await engine.close()


async def test_who_administers_is_not_starved_by_those_who_commit_in_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_engine, "INLINE_BYTES_MAX", 0)
    engine = await SqliteEngine.open(tmp_path / "team.db")
    over = False

    async def write(name: str) -> None:
        while not over:
            await engine.commit("s", Batch("a", (Put(f"records/{name}", b"1"),)))

    writers = [asyncio.create_task(write(str(n))) for n in range(3)]
    try:
        while engine._turns.in_thread is None:
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.create("new"), 5)
    finally:
        over = True
        await asyncio.gather(*writers)
        await engine.close()


@pytest.mark.parametrize("scheme", ["sqlite", "resident"])
async def test_a_request_whose_first_attempt_was_in_the_same_group_has_no_second_effect_later(
    tmp_path: Path, scheme: str
) -> None:
    engine = await open_engine(f"{scheme}:{tmp_path}/team.db", SystemClock())
    await engine.commit("s", Batch("a", (Put("records/x", b"1"),)))
    id, other = new_id(), new_id()
    await engine.commit("s", Batch("a", (Put("records/x", b"1"),)))
    add = (Increment("records/n", 1),)
    first, again, _ = await asyncio.gather(
        engine.commit("s", Batch("a", add, request_id=id, fresh=True)),
        engine.commit("s", Batch("a", add, request_id=id)),
        engine.commit("s", Batch("a", (Put("records/y", b"1"),), request_id=other)),
    )
    assert first == again
    assert await engine.commit("s", Batch("a", add, request_id=id)) == first
    [entry] = await engine.get("s", ["records/n"])
    assert entry is not None
    assert entry.value == b"1"
    await engine.close()


async def test_what_a_dropped_volatile_space_held_does_not_come_back(tmp_path: Path) -> None:
    clock = ManualClock()
    ours, theirs = [await SqliteEngine.open(tmp_path / "team.db", clock=clock) for _ in range(2)]
    await ours.create("v", "volatile")
    await put(ours, "v", b"1")
    await theirs.drop("v")
    clock.advance(1000)
    await ours.create("v", "volatile")
    assert await ours.get("v", ["records/k"]) == [None]
    await ours.close()
    await theirs.close()


async def test_a_store_that_is_closed_twice_at_once_lets_go_of_its_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_engine, "INLINE_BYTES_MAX", 0)
    engine = await SqliteEngine.open(tmp_path / "team.db")
    writing = asyncio.create_task(put(engine, "s", b"1"))
    await asyncio.sleep(0)
    await asyncio.gather(engine.close(), engine.close())
    await writing


async def test_an_error_of_one_look_does_not_end_the_safety_net_of_watchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "POLL_S", 0.01)
    monkeypatch.setattr(sqlite_file.Bell, "_listen", lambda self: None)
    ours, theirs = [await SqliteEngine.open(tmp_path / "team.db") for _ in range(2)]
    await put(ours, "s", b"1")
    look, fails = ours._bell._data_version, True

    def failing() -> int:
        nonlocal fails
        if fails and ours._bell._poller is not None and looks > 2:
            fails = False
            raise apsw.IOError("a moment")
        return look()

    looks = 0

    def counting() -> int:
        nonlocal looks
        looks += 1
        return failing()

    ours._bell._data_version = counting
    watcher = asyncio.ensure_future(anext(ours.watch("s")))
    while fails:
        await asyncio.sleep(0.01)
    await put(theirs, "s", b"2")
    assert (await asyncio.wait_for(watcher, 3)).version == 2
    await ours.close()
    await theirs.close()


async def test_a_duty_that_is_cancelled_before_its_turn_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    held = FileLock(tmp_path / "team.db")
    with held:
        first = asyncio.ensure_future(engine.create("first"))
        second = asyncio.ensure_future(engine.create("second"))
        while len(engine._duties) < 2:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
    held.close()
    assert (await asyncio.wait_for(second, 5)).name == "second"
    assert [each.name for each in await engine.spaces()] == ["second"]
    assert await put(engine, "second", b"1") == 1
    await engine.close()


async def test_duties_and_batches_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    made = 0
    over = False

    async def create() -> None:
        nonlocal made
        while not over:
            await engine.create(f"s{made}")
            made += 1

    creating = asyncio.ensure_future(create())
    for n in range(1, 20):
        assert await asyncio.wait_for(put(engine, "s", b"1"), 5) == n
    over = True
    await creating
    assert made >= 10
    await engine.close()
