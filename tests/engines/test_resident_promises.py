"""Who gives up what is its own hears of it before it is in the file; nobody else can tell the difference, unless all power is lost."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Absent, Batch, Delete, Empty, Present, Push, Put, Receipt, cursor_at
from holdfast.engines import grouping, resident_promises
from holdfast.engines.grouping import CommitQueue, Turns
from holdfast.engines.resident import ResidentEngine
from holdfast.engines.resident_promises import Promises
from holdfast.errors import Conflict
from holdfast.ids import new_id

SPACE = "s"
LINE = "locks/lock/x/"


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ResidentEngine]:
    opened = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    yield opened
    await opened.close()


@pytest.fixture
def commits(engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each COMMIT."""
    counted: list[None] = []
    commit = engine._commits._commit_rows

    def counting() -> BaseException | None:
        counted.append(None)
        return commit()

    monkeypatch.setattr(engine._commits, "_commit_rows", counting)
    return counted


async def take(engine: ResidentEngine, ttl_ms: int = 60_000, space: str = SPACE) -> str:
    push = Batch("a", (Push(LINE, b"1", ttl_ms),), (Empty(LINE),), new_id(), True)
    return str((await engine.commit(space, push)).results[0])


def giving_up(*keys: str, **said: Any) -> Batch:
    deletes = tuple(Delete(key) for key in keys)
    return Batch("a", deletes, (), **({"request_id": new_id(), "fresh": True, "early": True} | said))


async def test_taking_and_giving_up_again_and_again_is_one_commit_each_time(
    engine: ResidentEngine, commits: list[None]
) -> None:
    for _ in range(10):
        key = await take(engine)
        assert (await engine.commit(SPACE, giving_up(key))).results == [True]
    assert len(commits) == 10


async def test_what_is_given_up_is_written_soon_also_when_nothing_else_comes(
    engine: ResidentEngine, commits: list[None]
) -> None:
    key = await take(engine)
    await engine.commit(SPACE, giving_up(key))
    assert len(commits) == 1
    async with asyncio.timeout(10):
        while len(commits) < 2:
            await asyncio.sleep(0.001)
    assert await engine.get(SPACE, [key]) == [None]
    assert len(commits) == 2, "it is written once"


@pytest.mark.parametrize("look", ["get", "read", "scan", "feed", "watch", "usage", "backup", "condition"])
async def test_whoever_looks_after_it_was_told_sees_that_it_is_gone(
    engine: ResidentEngine, tmp_path: Path, look: str
) -> None:
    key = await take(engine)
    [before] = await engine.spaces(SPACE)
    receipt = await engine.commit(SPACE, giving_up(key))
    assert receipt.version == before.revision, "its own version may never come to be"
    if look == "get":
        assert await engine.get(SPACE, [key]) == [None]
    elif look == "read":
        assert engine.read(SPACE, [key]) is None, "this needs `get`, which waits"
    elif look == "scan":
        assert (await engine.scan(SPACE, LINE)).entries == []
    elif look == "feed":
        told = [commit async for commit in engine.watch(SPACE, cursor=cursor_at(before.revision), live=False)]
        assert [(change.op, change.key) for commit in told for change in commit.changes] == [("delete", key)]
    elif look == "watch":
        watched = engine.watch(SPACE, LINE)
        following = asyncio.ensure_future(anext(watched))
        await engine.get(SPACE, [key])
        for _ in range(3):
            await asyncio.sleep(0)
        later = await engine.commit(SPACE, Batch("a", (Put(f"{LINE}z", b"1"),)))
        assert (await following).version == later.version, "a watch begins after what was told before it"
    elif look == "usage":
        assert [usage.keys for usage in (await engine.spaces(SPACE))[0].usage if usage.keys] == []
    elif look == "backup":
        await engine.backup(tmp_path / "copy.db")
        copy = await ResidentEngine.open(tmp_path / "copy.db", clock=ManualClock())
        assert await copy.get(SPACE, [key]) == [None]
        await copy.close()
    else:
        await engine.commit(SPACE, Batch("a", (Put("records/a", b"1"),), (Absent(key), Empty(LINE)), new_id(), True))


async def test_it_is_given_up_once(engine: ResidentEngine) -> None:
    key = await take(engine)
    outcomes = [await engine.commit(SPACE, giving_up(key)) for _ in range(3)]
    assert [outcome.results for outcome in outcomes] == [[True], [False], [False]]
    deletes = [
        change.op
        async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False)
        for change in commit.changes
        if not change.exists
    ]
    assert deletes == ["delete"]


async def test_a_write_under_the_lock_that_is_still_under_way_comes_first(engine: ResidentEngine) -> None:
    key = await take(engine)
    write = Batch("a", (Put("records/a", b"1"),), (Present(key),), new_id(), True)
    written, given_up = await asyncio.gather(engine.commit(SPACE, write), engine.commit(SPACE, giving_up(key)))
    assert (written.results, given_up.results) == ([None], [True])
    assert written.version < given_up.version


@pytest.mark.parametrize(
    "why", ["not fresh", "no request id", "not early", "it writes", "async", "two at once", "a condition", "of another"]
)
async def test_otherwise_it_is_told_when_it_is_written(engine: ResidentEngine, commits: list[None], why: str) -> None:
    space = SPACE
    if why == "async":
        space = "relaxed"
        await engine.create(space, "async")
    key = await take(engine, space=space)
    batch = giving_up(key)
    if why == "not fresh":
        batch = giving_up(key, request_id="mine", fresh=False)
    elif why == "no request id":
        batch = giving_up(key, request_id=None, fresh=False)
    elif why == "not early":
        batch = giving_up(key, early=False)
    elif why == "it writes":
        batch = Batch("a", (Delete(key), Put("records/a", b"1")), (), new_id(), True, early=True)
    elif why == "two at once":
        batch = giving_up(key, f"{LINE}nobody")
    elif why == "a condition":
        batch = Batch("a", (Delete(key),), (Present(key),), new_id(), True, early=True)
    elif why == "of another":
        batch = Batch("b", (Delete(key),), (), new_id(), True, early=True)
    before = len(commits)
    receipt = await engine.commit(space, batch)
    assert receipt.results[0] is True
    assert len(commits) == before + 1
    assert receipt.version == (await engine.spaces(space))[0].revision


async def test_a_lease_that_has_ended_is_not_given_up(engine: ResidentEngine) -> None:
    key = await take(engine, ttl_ms=100)
    engine._clock.advance(100)  # type: ignore[attr-defined]
    assert (await engine.commit(SPACE, giving_up(key))).results == [False]


async def test_one_that_ends_between_being_told_and_written_is_gone_and_told_of_once(engine: ResidentEngine) -> None:
    key = await take(engine, ttl_ms=100)
    assert (await engine.commit(SPACE, giving_up(key))).results == [True]
    engine._clock.advance(100)  # type: ignore[attr-defined]
    assert await engine.get(SPACE, [key]) == [None]
    told = [c async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False) for c in commit.changes]
    assert [change.op for change in told] == ["push", "expire"]


async def test_who_watches_the_line_is_told_without_delay(engine: ResidentEngine) -> None:
    key = await take(engine)
    following = asyncio.ensure_future(anext(engine.watch(SPACE, LINE)))
    for _ in range(3):
        await asyncio.sleep(0)
    await engine.commit(SPACE, giving_up(key))
    turns = engine._commits._turns
    assert (turns._asked, turns._later) == (True, None)
    assert [change.key for change in (await following).changes] == [key]


async def test_many_are_told_early_and_the_rest_waits(engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_promises, "PROMISES_MAX", 3)
    puts = tuple(Put(f"locks/lock/{n}/1", b"1", 1000) for n in range(5))
    await engine.commit(SPACE, Batch("a", puts))
    receipts = [await engine.commit(SPACE, giving_up(put.key)) for put in puts]
    assert [receipt.results for receipt in receipts] == [[True]] * 5
    assert (await engine.scan(SPACE, "locks/")).entries == []


async def test_among_many_it_goes_with_the_next_commit_like_everybody(
    engine: ResidentEngine, commits: list[None]
) -> None:
    key = await take(engine)
    writes = [Batch("a", (Put(f"records/{n}", b"1"),), (), new_id(), True) for n in range(grouping.FEW + 1)]
    await asyncio.gather(*(engine.commit(SPACE, write) for write in writes))
    before = len(commits)
    await engine.commit(SPACE, giving_up(key))
    assert len(commits) == before + 1


async def test_a_crash_before_it_is_written_leaves_it_to_end_by_itself_and_no_version_is_given_twice(
    engine: ResidentEngine, tmp_path: Path
) -> None:
    key = await take(engine)
    receipt = await engine.commit(SPACE, giving_up(key))
    for file in tmp_path.glob("k.db*"):  # what a crash at this moment leaves
        shutil.copy(file, tmp_path / file.name.replace("k.db", "crashed.db"))
    clock = ManualClock()
    crashed = await ResidentEngine.open(tmp_path / "crashed.db", clock=clock)
    try:
        assert await crashed.get(SPACE, [key]) != [None]
        with pytest.raises(Conflict):
            await take(crashed)
        clock.advance(60_000)
        again = await crashed.commit(SPACE, Batch("b", (Push(LINE, b"2"),), (Empty(LINE),), new_id(), True))
        assert again.version > receipt.version
    finally:
        await crashed.close()


async def test_the_same_request_again_finds_what_was_done(engine: ResidentEngine) -> None:
    """Its sender has lost the connection before it heard of it."""
    key = await take(engine)
    batch = giving_up(key)
    await engine.commit(SPACE, batch)
    again = Batch(batch.actor, batch.operations, batch.conditions, batch.request_id)
    assert (await engine.commit(SPACE, again)).results == [True]
    assert (await engine.commit(SPACE, again)).results == [True]


async def test_with_no_room_on_the_disk_it_ends_by_itself_and_reads_go_on(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = await take(engine)
    with monkeypatch.context() as full:
        full.setattr(engine._commits, "_commit_rows", lambda: apsw.FullError("full"))
        assert (await engine.commit(SPACE, giving_up(key))).results == [True]
        with caplog.at_level(logging.WARNING, "holdfast.resident"):
            [entry] = await engine.get(SPACE, [key])
        assert entry is not None
        assert "until it ends by itself" in caplog.text
    assert (await engine.commit(SPACE, giving_up(key))).results == [True]
    assert await engine.get(SPACE, [key]) == [None]


async def test_who_waits_to_read_is_not_left_when_the_engine_stops(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await take(engine)
    await engine.commit(SPACE, giving_up(key))
    monkeypatch.setattr(engine._commits, "_commit_rows", lambda: apsw.IOError("broken"))
    async with asyncio.timeout(10):
        with pytest.raises(Exception, match="commit to"):
            await engine.get(SPACE, [key])


async def test_a_space_that_is_dropped_next_does_not_come_back(engine: ResidentEngine) -> None:
    key = await take(engine)
    await engine.commit(SPACE, giving_up(key))
    await engine.drop(SPACE)
    assert await engine.spaces(SPACE) == []


async def test_closing_writes_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "closing.db"
    engine = await ResidentEngine.open(path)
    key = await take(engine)
    await engine.commit(SPACE, giving_up(key))
    await engine.close()
    engine = await ResidentEngine.open(path)
    assert await engine.get(SPACE, [key]) == [None]
    await engine.close()


# --- the tests above see it when one of these is missing ---


async def test_without_waiting_a_read_shows_what_was_given_up(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_owed", lambda space: False)
    key = await take(engine)
    await engine.commit(SPACE, giving_up(key))
    assert await engine.get(SPACE, [key]) != [None]


async def test_without_looking_at_the_queue_a_write_under_the_lock_is_overtaken(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turns, "may_promise", property(lambda turns: True))
    monkeypatch.setattr(CommitQueue, "add", lambda queue, item: queue._items.appendleft(item))
    with pytest.raises(Conflict):
        await test_a_write_under_the_lock_that_is_still_under_way_comes_first(engine)


async def test_without_remembering_promises_two_give_up_the_same(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Promises.make

    def forgetful(self: Promises, *args: Any) -> Receipt | None:
        self._gone.clear()
        return make(self, *args)

    monkeypatch.setattr(Promises, "make", forgetful)
    with pytest.raises(AssertionError):
        await test_it_is_given_up_once(engine)
