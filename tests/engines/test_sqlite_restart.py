"""What only the SQLite engine has: a machine that was restarted, a lock that is not let go, a file beside the file."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import apsw
import pytest

from holdfast.engine import Batch, Put, cursor_at
from holdfast.engines import sqlite as sqlite_engine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.engines.sqlite_file import ASYNC_JUMP, FileLock
from holdfast.errors import Compacted, Unavailable


async def put(engine: SqliteEngine, space: str, value: bytes) -> int:
    return (await engine.commit(space, Batch("a", (Put("records/k", value),)))).version


async def test_versions_lost_with_the_power_are_not_given_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the file from before the last commits, under another boot id, is what a power failure leaves."""
    path = tmp_path / "team.db"
    engine = await SqliteEngine.open(path)
    await engine.create("relaxed", "async")
    await put(engine, "relaxed", b"1")
    await put(engine, "strict", b"1")
    await engine.close()
    left = tmp_path / "left.db"
    shutil.copy(path, left)
    engine = await SqliteEngine.open(path)
    lost = [await put(engine, "relaxed", b"2") for _ in range(5)]
    await engine.close()
    monkeypatch.setattr(sqlite_engine, "boot_id", lambda: "another boot")
    engine = await SqliteEngine.open(left)
    version = await put(engine, "relaxed", b"3")
    assert version > max(lost)
    assert version == 1 + ASYNC_JUMP + 1
    assert await put(engine, "strict", b"2") == 2
    with pytest.raises(Compacted):
        await anext(engine.watch("relaxed", cursor=cursor_at(lost[-1])))
    await engine.close()
    again = await SqliteEngine.open(left)
    assert await put(again, "relaxed", b"4") == version + 1
    await again.close()


async def test_a_lock_that_is_not_let_go_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_engine, "LOCK_WAIT_S", 0.05)
    engine = await SqliteEngine.open(tmp_path / "team.db")
    first = await put(engine, "s", b"1")
    stuck = FileLock(tmp_path / "team.db")
    with stuck:
        with pytest.raises(Unavailable, match="nothing was changed"):
            await put(engine, "s", b"2")
        assert (await engine.get("s", ["records/k"]))[0].value == b"1"  # type: ignore[union-attr]
        late = asyncio.ensure_future(put(engine, "s", b"3"))
        await asyncio.sleep(0)
    assert await late == first + 1
    stuck.close()
    await engine.close()


async def test_an_open_store_is_opened_again_while_its_lock_is_held(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await put(engine, "s", b"1")
    busy = FileLock(tmp_path / "team.db")
    with busy:
        other = await asyncio.wait_for(SqliteEngine.open(tmp_path / "team.db"), 10)
        assert (await other.get("s", ["records/k"]))[0].value == b"1"  # type: ignore[union-attr]
        await other.close()
    busy.close()
    await engine.close()


async def test_people_can_read_the_file(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    await put(engine, "s", b'{"a":1}')
    await engine.close()
    with sqlite3.connect(tmp_path / "team.db") as shell:
        rows = shell.execute("SELECT space, key, value, version, owner FROM readable").fetchall()
    shell.close()
    assert rows == [("s", "records/k", '{"a":1}', 1, "a")]


async def test_the_write_ahead_log_does_not_grow_without_end(tmp_path: Path) -> None:
    engine = await SqliteEngine.open(tmp_path / "team.db")
    value = b'"' + b"x" * 20_000 + b'"'
    for _ in range(30):
        await asyncio.gather(*(engine.commit("s", Batch("a", (Put(f"records/{n}", value),))) for n in range(40)))
        await engine.scan("s", "records/", limit=5)
    assert (tmp_path / "team.db-wal").stat().st_size < 40_000_000
    await engine.close()


async def test_a_file_of_schema_1_is_brought_up_to_date_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    engine = await SqliteEngine.open(path)
    values = {"records/small": b"1", "records/large": b'"' + b"x" * 5_000 + b'"', "records/edge": b"9" * 320}
    await engine.commit("space", Batch("alice", tuple(Put(key, value) for key, value in values.items())))
    before = (await engine.scan("space", "")).entries
    await engine.close()
    with contextlib.closing(apsw.Connection(str(path))) as old:
        old.execute(
            "DROP VIEW readable; ALTER TABLE entries RENAME TO new; DROP INDEX expiries;"
            "CREATE TABLE entries (space INTEGER NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL, "
            "owner TEXT NOT NULL, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL, expires_at INTEGER, "
            "tag TEXT NOT NULL, UNIQUE (space, key)) STRICT;"
            "INSERT INTO entries SELECT space, key, ifnull(value, (SELECT value FROM large WHERE large.key = new.key)), "
            "version, owner, created_at, updated_at, expires_at, tag FROM new; DROP TABLE new; DROP TABLE large;"
            "CREATE INDEX expiries ON entries (space, expires_at, key) WHERE expires_at IS NOT NULL;"
            "CREATE VIEW readable AS SELECT key FROM entries; DROP TABLE folds; PRAGMA user_version = 1"
        )
    engine = await SqliteEngine.open(path)
    assert (await engine.scan("space", "")).entries == before
    await engine.commit("space", Batch("alice", (Put("records/large", b"2"), Put("records/small", b"3" * 400))))
    assert [finding for finding in await engine.inspect() if finding.level == "error"] == []
    await engine.close()


def test_who_waits_for_the_lock_comes_before_who_asks_and_one_that_died_waiting_before_nobody(tmp_path: Path) -> None:
    held, waits, asks = (FileLock(tmp_path / "team.db") for _ in range(3))
    assert held.try_acquire()
    waiting = threading.Thread(target=waits.acquire)
    waiting.start()
    deadline = time.monotonic() + 10
    while not asks._waits[0]:
        assert time.monotonic() < deadline, "it does not wait"
    held.release()
    while waiting.is_alive():
        assert not asks.try_acquire(), "it was overtaken"
    waits.release()
    asks._waits[0] = 1  # what a process leaves that was killed while it waited
    assert asks.try_acquire()
    assert asks._waits[0] == 0
    asks.release()
    for lock in (held, waits, asks):
        lock.close()
