"""What is in the feed only, so far: it is never lost, everybody reads it, and it becomes rows in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from pathlib import Path

import apsw
import pytest
from tests.engines.test_resident_file import everything, put

from holdfast.clock import ManualClock
from holdfast.engine import (
    Absent,
    Batch,
    Delete,
    Engine,
    Entry,
    Increment,
    Operation,
    Push,
    Put,
    Receipt,
    Take,
    Touch,
)
from holdfast.engines import resident_folding
from holdfast.engines.resident import ResidentEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.errors import Conflict, InvalidInput, StorageFull
from holdfast.offers import Submits

HUGE = b'"' + b"h" * 70_000 + b'"'
LARGE = b'"' + b"l" * 1_000 + b'"'


def killed(path: Path, name: str) -> Path:
    """The file as kill -9 would leave it at this moment."""
    folder = path.parent / name
    folder.mkdir()
    for suffix in ("", "-wal", "-lock"):
        shutil.copy(f"{path}{suffix}", folder / f"{path.name}{suffix}")
    return folder / path.name


def behind(path: Path) -> list[tuple[int, int]]:
    return query(path, "SELECT space, revision FROM folds")


def query(path: Path, sql: str) -> list[tuple[int, int]]:
    """By the same library that the engines use: two in one process would not see each other's locks."""
    shell = apsw.Connection(str(path))
    try:
        return shell.execute(sql).fetchall()  # type: ignore[return-value]
    finally:
        shell.close()


def some_operation(chance: random.Random) -> Operation:
    key, ttl = f"records/{chance.randrange(12)}", chance.choice((None, None, 500, 5_000))
    value = chance.choice((b"1", b"22", b"1", LARGE, HUGE))
    return chance.choice(
        (
            Put(key, value, ttl_ms=ttl, tag=chance.choice(("", "t"))),
            Put(key, b"%d" % chance.randrange(99)),
            Delete(key),
            Increment("counts/n", 1),
            Push("queues/q/", value, ttl_ms=ttl),
            Take("queues/q/", f"queues/{chance.randrange(2)}/", 2, None, "counts/q", None),
            Take("queues/0/", "queues/q/", 1),
            Touch(key, 60_000),
        )
    )


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_opens_the_file_after_a_kill_finds_everything_however_much_was_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, clock, path = random.Random(seed), ManualClock(), tmp_path / "team.db"
    monkeypatch.setattr(resident_folding, "FOLD_COMMITS", chance.choice((5, 25, 10_000)))
    monkeypatch.setattr(resident_folding, "SLICE_ROWS", 1)
    engine = await ResidentEngine.open(path, clock=clock)
    for round in range(8):
        for number in range(12):
            operations = tuple(some_operation(chance) for _ in range(chance.randrange(1, 4)))
            with contextlib.suppress(Conflict):  # it touched what was not there
                await engine.commit("s", Batch(f"a{number % 2}", operations, request_id=f"{round}/{number}"))
            clock.advance(f"{chance.randrange(1, 400)}ms")
        if round == 4:
            revision = (await engine.spaces("s"))[0].revision
            await engine.load("s", [Entry("records/loaded", LARGE, 3, "a0", 1, 2)], revision)
        if round == 6:
            await engine.compact("s", (await engine.spaces("s"))[0].revision - 3)
        held = await everything(engine)
        for kind in (SqliteEngine, ResidentEngine):
            left = killed(path, f"{round}-{kind.__name__}")
            again: Engine = await kind.open(left, clock=clock)
            assert await everything(again) == held
            receipt = await again.commit("s", Batch("a0", (Delete("records/3"),)))
            after = await everything(again)
            await again.close()
            assert behind(left) == []
            last = await ResidentEngine.open(left, clock=clock)
            assert await everything(last) == after
            assert (await last.spaces("s"))[0].revision == receipt.version
            assert [finding for finding in await last.inspect() if finding.level == "error"] == []
            await last.close()
    await engine.close()
    beside = await SqliteEngine.open(path, clock=clock)
    assert await everything(beside) == held
    await beside.close()


async def test_a_reader_beside_the_owner_sees_what_is_in_the_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    early = await SqliteEngine.open(path)
    await early.commit("s", put(b"0", "records/b"))
    await early.commit("s", put(b"0", "records/c"))
    assert (await early.get("s", ["records/b"]))[0] is not None
    owner = await ResidentEngine.open(path)
    await owner.commit("s", put(b"1", "records/a"))
    await owner.commit("s", Batch("a", (Put("records/b", b"2"), Delete("records/c"), Put("records/d", LARGE))))
    assert behind(path) == [(1, 2)]
    late = await SqliteEngine.open(path)
    for reader in (early, late):
        for key in ("records/a", "records/b", "records/c", "records/d"):
            assert await reader.get("s", [key]) == await owner.get("s", [key])
        for reverse in (False, True):
            for after in (None, "records/b"):
                page = await reader.scan("s", "records/", after=after, limit=2, reverse=reverse)
                assert page == await owner.scan("s", "records/", after=after, limit=2, reverse=reverse)
        assert (await reader.spaces("s"))[0].usage == (await owner.spaces("s"))[0].usage
    left = killed(path, "dead")
    await owner.close()
    assert behind(path) == []
    assert (await early.get("s", ["records/b"]))[0].value == b"2"  # type: ignore[union-attr]
    await early.close()
    await late.close()
    heir = await SqliteEngine.open(left)
    assert behind(left) == []
    assert (await heir.get("s", ["records/b"]))[0].value == b"2"  # type: ignore[union-attr]
    await heir.close()


async def test_a_writer_that_was_open_before_the_owner_died_folds_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    owner = await ResidentEngine.open(path)
    await owner.commit("s", Batch("a", (Increment("counts/n", 5),)))
    writer = await SqliteEngine.open(path)
    owner._lock.release()  # as the kernel does it when a process dies
    receipt = await writer.commit("s", Batch("a", (Increment("counts/n", 1),), (Absent("records/k"),)))
    assert receipt.results == [6]
    assert behind(path) == []
    assert not writer._lock.is_signed
    await writer.close()


async def test_a_store_that_nobody_writes_to_is_folded_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engines.resident_commit.FOLD_PAUSE_S", 0.001)
    monkeypatch.setattr(resident_folding, "SLICE_ROWS", 3)
    engine = await ResidentEngine.open(tmp_path / "team.db")
    engine.fold_every(0.01)
    await asyncio.gather(*(engine.commit(f"s{n % 2}", put(b"1", f"records/{n}")) for n in range(40)))
    for _ in range(1_000):
        if not behind(tmp_path / "team.db"):
            break
        await asyncio.sleep(0.01)
    left = killed(tmp_path / "team.db", "dead")
    assert query(left, "SELECT count(*), count(DISTINCT space) FROM entries") == [(40, 2)]
    await engine.close()


async def test_a_slice_that_the_disk_had_no_room_for_is_folded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_folding, "FOLD_COMMITS", 10)
    monkeypatch.setattr(resident_folding, "SLICE_ROWS", 4)
    path = tmp_path / "team.db"
    engine = await ResidentEngine.open(path)
    for number in range(10):
        await engine.commit("s", put(LARGE, f"records/{number}"))
    [(pages,)] = engine._link.execute("PRAGMA page_count").fetchall()
    engine._link.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull):
        await engine.commit("s", put(HUGE))
    engine._link.execute("PRAGMA max_page_count = 1000000")
    for number in range(10):
        await engine.commit("s", put(b"2", f"records/{number}"))
    held = await everything(engine)
    again = await SqliteEngine.open(killed(path, "dead"))
    assert await everything(again) == held
    await again.close()
    await engine.close()


# --- submitting ---


async def test_a_refused_batch_fails_its_own_reply_and_one_that_cannot_be_told_hurts_nobody(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    assert isinstance(engine, Submits)
    good = [submitted(engine, "s", put(b"%d" % number, f"records/{number}")) for number in range(5)]
    refused = submitted(engine, "s", Batch("a", (Put("records/no", b"1"),), (Absent("records/1"),)))
    deaf = submitted(engine, "s", put(b"1", "records/deaf"))
    deaf.cancel()  # who submits cannot take it back
    last = submitted(engine, "s", put(b"9", "records/last"))
    assert [(await reply).version for reply in good] == [1, 2, 3, 4, 5]
    with pytest.raises(Conflict):
        await refused
    assert (await last).version == 7
    [no, done] = await engine.get("s", ["records/no", "records/deaf"])
    assert no is None
    assert done is not None
    with pytest.raises(InvalidInput):
        submitted(engine, "s", Batch("a", (Put("nonsense", b"1"),)))
    await engine.create("passing", "volatile")
    assert (await submitted(engine, "passing", put(b"1"))).results == [None]
    await engine.close()


async def test_a_batch_that_waited_while_its_space_was_made_anew_is_kept_as_the_new_one_asks(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    await engine.commit("s", put(b"1"))
    dropping = asyncio.ensure_future(engine.drop("s"))
    making = asyncio.ensure_future(engine.create("s", "volatile"))
    await asyncio.sleep(0)
    waiting = [submitted(engine, "s", put(b"%d" % number)) for number in range(3)]
    receipts = await asyncio.gather(*waiting)
    await asyncio.gather(dropping, making, return_exceptions=True)
    assert len({receipt.version for receipt in receipts}) == 3
    [info] = await engine.spaces("s")
    assert (await engine.get("s", ["records/k"]))[0].value == b"2"  # type: ignore[union-attr]
    assert info.revision == receipts[-1].version
    await engine.close()


def submitted(engine: ResidentEngine, space: str, batch: Batch) -> asyncio.Future[Receipt]:
    reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    engine.submit(space, batch, reply)
    return reply


async def test_who_goes_away_before_its_batch_is_taken_leaves_nothing(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "team.db")
    submitted(engine, "s", put(b"1", "records/before"))
    gone = asyncio.ensure_future(engine.commit("s", put(b"1", "records/gone")))
    await asyncio.sleep(0)
    gone.cancel()
    last = submitted(engine, "s", put(b"9", "records/last"))
    assert (await last).version == 2
    assert await engine.get("s", ["records/gone"]) == [None]
    await engine.close()


async def test_large_values_are_folded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an owner after a crash would have to read all that was written since."""
    monkeypatch.setattr(resident_folding, "FOLD_BYTES", 200_000)
    monkeypatch.setattr(resident_folding, "SLICE_BYTES", 50_000)
    engine = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    value = b'"' + b"x" * 9_998 + b'"'
    for number in range(100):
        await engine.commit("s", put(value, f"records/{number % 30}"))
        assert engine._spaces["s"].unfolded.bytes < 400_000
    assert engine._spaces["s"].unfolded.folded is not None
    before = (await engine.scan("s", "")).entries
    shutil.copytree(tmp_path, tmp_path / "crashed")
    await engine.close()
    again = await ResidentEngine.open(tmp_path / "crashed" / "k.db", clock=ManualClock())
    assert (await again.scan("s", "")).entries == before
    await again.close()
