"""A keeper whose disk is full, and one whose disk fails: read-only until there is room, and an end that says why."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import Error, StorageFull, Unavailable
from holdfast.testing.servers.keeper import KeeperServer
from tests.faults.test_disk import DISK_BYTES, Disk, disk, integrity
from tests.faults.test_syscalls import FSYNCS, strace

__all__ = ["disk", "strace"]

LARGE = "x" * 30_000
ROOT = Path(__file__).resolve().parents[2]


async def test_a_full_disk_makes_it_read_only_until_there_is_room(disk: Disk, tmp_path: Path) -> None:
    disk.load(DISK_BYTES // 2)
    keeper = KeeperServer(tmp_path / "keeper", f"resident:{disk.folder}/store.db")
    keeper.start()
    try:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            records = store.space("contoso").records
            await records.set("first", 1)
            kept = 0
            with pytest.raises(StorageFull):  # noqa: PT012 - which one is refused depends on the disk
                for kept in range(DISK_BYTES // len(LARGE) + 10):
                    await records.set(f"k{kept}", LARGE)
            for _ in range(5):
                with pytest.raises(StorageFull, match=r"(?i)nothing was") as refused:
                    await records.set(f"k{kept}", LARGE)
                assert str(disk.folder) not in str(refused.value)
            assert await records.get("first") == 1
            assert len(await records.keys("k")) == kept
            disk.free()
            async with asyncio.timeout(20):
                while True:
                    try:
                        await records.set("after", 1)
                        break
                    except StorageFull:
                        await asyncio.sleep(0.05)
            assert keeper.running
    finally:
        keeper.stop()
    assert integrity(disk.folder / "store.db") == [("ok",)]
    keeper.start()
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        assert len(await store.space("contoso").records.keys("k")) == kept
        assert await store.space("contoso").records.get("after") == 1
    keeper.stop()


async def test_a_failed_fsync_ends_it_and_a_restart_finds_everything_acknowledged(tmp_path: Path, strace: str) -> None:
    keeper = KeeperServer(tmp_path)
    keeper.start()  # undisturbed: makes the store and the token
    keeper.stop()
    seen = keeper.log.stat().st_size
    traced = [strace, "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={FSYNCS}"]
    for name in ("store.db", "store.db-wal"):
        traced += ["-P", str(tmp_path / name)]
    command = [sys.executable, "-m", "holdfast", "serve", "--config", str(keeper.config), "--json"]
    with keeper.log.open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            [*traced, "-e", f"inject={FSYNCS}:error=EIO:when=12+", *command],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ,
        )
    try:
        async with asyncio.timeout(60):
            while b'{"store"' not in keeper.log.read_bytes()[seen:]:
                assert process.poll() is None, keeper.log.read_text()
                await asyncio.sleep(0.05)
        acknowledged = []
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            try:
                async with asyncio.timeout(60):
                    for number in range(1000):
                        await store.space("contoso").records.set(f"k{number}", number)
                        acknowledged.append(f"k{number}")
            except (Error, TimeoutError) as exc:
                told = exc
            assert await asyncio.to_thread(process.wait, 60) == Unavailable.exit_code
    finally:
        process.kill()
        process.wait()
    assert isinstance(told, Error), told
    text = keeper.log.read_text()
    assert "the store cannot go on" in text
    assert "the keeper had to stop" in text
    keeper.start()
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        kept = await store.space("contoso").records.keys()
        assert set(acknowledged) <= set(kept)
        assert len(kept) <= len(acknowledged) + 1
        await store.space("contoso").records.set("after", 1)
    keeper.stop()
