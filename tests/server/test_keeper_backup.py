"""A backup of a keeper that is being written to, and what a restored one holds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import AccessDenied, Compacted, Conflict, InvalidInput
from holdfast.engine import LOSS_JUMP, Batch, Increment, Put, cursor_at
from holdfast.engines.remote import RemoteEngine
from holdfast.ids import new_id
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, client, command


async def test_a_backup_of_a_keeper_in_use_is_one_moments_state_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path / "keeper")
    keeper.start()
    copy = tmp_path / "monday.db"
    try:
        engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
        acknowledged: set[str] = set()
        end = asyncio.Event()

        async def write(writer: int) -> None:
            number = 0
            while not end.is_set():
                key, number = f"records/{writer}-{number}", number + 1
                operations = (Put(key, b'"' + b"x" * 500 + b'"'), Increment("records/count", 1))
                await engine.commit(SPACE, Batch("admin", operations, (), new_id(), True))
                acknowledged.add(key)

        writers = [asyncio.create_task(write(number)) for number in range(16)]
        while len(acknowledged) < 3000:
            await asyncio.sleep(0.01)
        before = set(acknowledged)
        told = await asyncio.to_thread(command, keeper, "backup", str(copy), "--json")
        assert told.json["bytes"] == copy.stat().st_size > 1_000_000
        meanwhile = len(acknowledged) - len(before)
        end.set()
        await asyncio.gather(*writers)
        await engine.close()
        assert meanwhile > 0, "nobody wrote while the copy was made"
        again = await asyncio.to_thread(command, keeper, "backup", str(copy), code=2)
        assert "exists already" in again.err
        async with client(keeper, "nosy") as (store, _):
            with pytest.raises(AccessDenied, match="only an administrator"):
                await store.backup(tmp_path / "stolen.db")
        assert not list(tmp_path.glob("stolen*"))
        assert not list(keeper.folder.glob(".backup-*"))
    finally:
        keeper.stop()

    restored = KeeperServer(tmp_path / "restored", f"resident:{copy}")
    restored.start()
    try:
        async with holdfast.open(restored.url, token=keeper.admin) as store:  # tokens are part of it
            space = store.space(SPACE)
            names = {f"records/{name}" for name in await space.records.keys() if name != "count"}
            assert before <= names
            assert await space.records.get("count") == len(names), "the copy is not one moment's"
            await space.records.set("after", 1)
            assert (await space.audit.verify()).sound
    finally:
        restored.stop()


async def test_a_backup_that_is_named_wrongly_leaves_nothing(tmp_path: Path) -> None:
    with KeeperServer.temporary() as keeper:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            with pytest.raises(holdfast.Unavailable, match="cannot be written"):
                await store.backup(tmp_path / "no" / "folder.db")
            (tmp_path / "there").write_text("mine")
            with pytest.raises(InvalidInput):
                await store.backup(tmp_path / "there")
            for _ in range(6):
                with pytest.raises(holdfast.Unavailable):
                    await store.backup(tmp_path / "no" / "folder.db")
        assert [path.name for path in tmp_path.iterdir()] == ["there"]


async def test_a_backup_leaves_alone_what_another_one_is_writing(tmp_path: Path) -> None:
    with KeeperServer.temporary() as keeper:
        engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
        copy, part = tmp_path / "monday.db", tmp_path / "monday.db.part"
        part.write_bytes(b"another one's")
        with pytest.raises(InvalidInput, match="another backup is being written"):
            await engine.backup(copy)
        assert (part.read_bytes(), copy.exists()) == (b"another one's", False)
        await engine.close()


async def test_a_keeper_that_was_killed_is_restored_in_place_and_old_cursors_and_etags_are_told(tmp_path: Path) -> None:
    keeper = KeeperServer(tmp_path / "keeper")
    store_file, copy = keeper.folder / "store.db", tmp_path / "monday.db"
    keeper.start()
    try:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            space = store.space(SPACE)
            await space.records.set("a", 1)
            await space.records.set("short", 1, ttl="1h")
            await asyncio.to_thread(command, keeper, "backup", str(copy))
            etag = await space.records.set("a", 99)
            await store.space("late").records.set("k", 1)
        refused = await asyncio.to_thread(_restore, copy, store_file)
        assert refused.returncode == 14
        assert f"is in use by process {keeper.pid}" in refused.stderr
        keeper.kill()
        done = await asyncio.to_thread(_restore, copy, store_file)
        assert done.returncode == 0, done.stderr
        keeper.start()
        async with holdfast.open(keeper.url, token=keeper.admin) as store:  # tokens are part of it
            space = store.space(SPACE)
            assert await space.records.get("a") == 1
            entry = await space.records.entry("short")
            assert entry is not None
            assert entry.expires_at is not None
            with pytest.raises(Compacted):
                await anext(store.engine.watch(SPACE, cursor=cursor_at(etag), live=False))
            with pytest.raises(Conflict):
                await space.records.compare_and_swap("a", 5, expect_version=etag)
            assert await space.records.set("a", 2) > etag + LOSS_JUMP
            assert await store.space("late").records.set("k", 1) > LOSS_JUMP
            assert await store.space("new").records.set("k", 1) > LOSS_JUMP
            assert (await space.audit.verify()).sound
    finally:
        keeper.stop()


def _restore(backup: Path, store: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "holdfast", "restore", str(backup), "--store", str(store), "--replace"]
    return subprocess.run(words, capture_output=True, text=True)


async def test_a_watch_of_a_space_that_a_restored_store_does_not_have_yet_sees_its_first_commit(tmp_path: Path) -> None:
    backup, path = tmp_path / "monday.db", tmp_path / "store.db"
    async with holdfast.open(tmp_path / "old.db", background=False) as store:
        await store.space("contoso").records.set("a", 1)
        await store.backup(backup)
    assert (await asyncio.to_thread(_restore, backup, path)).returncode == 0
    for number, url in enumerate((f"resident:{path}", f"sqlite:{path}")):
        async with holdfast.open(url, background=False) as store:
            watch = store.engine.watch(f"new-{number}")
            seen = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.05)
            version = await store.space(f"new-{number}").records.set("k", 1)
            assert (await asyncio.wait_for(seen, 5)).version == version > LOSS_JUMP
            with pytest.raises(Compacted):
                await anext(store.engine.watch(f"absent-{number}", cursor=cursor_at(7), live=False))
            with pytest.raises(Compacted):
                await anext(store.engine.watch(f"new-{number}", cursor=cursor_at(7), live=False))
