"""A backup of a keeper that is being written to, and what a restored one holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from holdfast import AccessDenied, InvalidInput
from holdfast.engine import Batch, Increment, Put
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
