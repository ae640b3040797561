"""A disk that is really full, and a folder that is really read-only: a small file system of their own for each test.

Mounting one needs root; without it these tests skip, and fail in CI.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from holdfast.engine import Batch, Engine, Increment, Put
from holdfast.engines.sqlite import SqliteEngine
from holdfast.errors import StorageFull, Unavailable
from tests.faults.driver import all_entries

SPACE = "disk"
DISK_BYTES = 2 * 1024 * 1024
LARGE = b'"' + b"x" * 30_000 + b'"'


class Disk:
    """A mounted file system with a ballast file that can be removed to make room."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ballast = folder / "ballast"

    def load(self, size: int | None = None) -> None:
        """Write the ballast: of this size, or whatever still fits."""
        with self.ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(DISK_BYTES // 512 if size is None else size // 512):
                file.write(b"\0" * 512)

    def free(self) -> None:
        self.ballast.unlink()

    def make_read_only(self) -> None:
        _mount("-o", "remount,ro", self.folder)


def _mount(*arguments: object) -> str:
    """Mount something; what went wrong, or an empty text."""
    ran = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    return ran.stderr.strip() or f"mount ended with {ran.returncode}" if ran.returncode else ""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    problem = "only root can mount a small disk" if os.geteuid() else ""
    problem = problem or _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0755", "holdfast-test", folder)
    if problem:
        if os.environ.get("CI") == "true":
            pytest.fail(problem)
        pytest.skip(problem)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def batch(number: int, value: bytes = LARGE) -> Batch:
    operations = (
        Put(f"records/{number}", value),
        Increment("records/count", 1),
        Put("records/ttl", b"1", ttl_ms=60_000),
    )
    return Batch("writer", operations, request_id=f"request-{number}")


def integrity(path: Path) -> list[object]:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall()


async def fill(engine: Engine) -> int:
    """Commit until the disk is full; gives the number of the batch that was refused."""
    for number in range(DISK_BYTES // len(LARGE) + 10):
        before = await all_entries(engine, SPACE)
        try:
            await engine.commit(SPACE, batch(number))
        except StorageFull:
            assert await all_entries(engine, SPACE) == before
            return number
    raise AssertionError("the disk was never full")


async def test_a_full_disk_refuses_writes_changes_nothing_and_works_again_once_there_is_space(disk: Disk) -> None:
    path = disk.folder / "store.db"
    disk.load(DISK_BYTES // 2)
    engine = await SqliteEngine.open(path)
    refused = await fill(engine)
    assert refused > 3
    before = await all_entries(engine, SPACE)
    for _ in range(20):
        with pytest.raises(StorageFull):
            await engine.commit(SPACE, batch(refused))
    assert await all_entries(engine, SPACE) == before
    assert before["records/count"].value == b"%d" % refused

    disk.free()
    receipt = await engine.commit(SPACE, batch(refused))
    assert receipt.results[1] == refused + 1
    assert await engine.commit(SPACE, batch(refused)) == receipt
    await engine.close()
    assert integrity(path) == [("ok",)]

    again = await SqliteEngine.open(path)
    entries = await all_entries(again, SPACE)
    assert entries["records/count"].value == b"%d" % (refused + 1)
    assert {f"records/{number}" for number in range(refused + 1)} <= entries.keys()
    await again.close()


async def test_what_a_full_disk_refused_does_not_come_back_after_the_next_opening(disk: Disk) -> None:
    path = disk.folder / "store.db"
    engine = await SqliteEngine.open(path)
    refused = await fill(engine)
    before = await all_entries(engine, SPACE)
    await engine.close()
    again = await SqliteEngine.open(path)
    assert await all_entries(again, SPACE) == before
    assert f"records/{refused}" not in before
    await again.close()
    assert integrity(path) == [("ok",)]


async def test_a_full_disk_still_reads_and_another_process_can_open_it(disk: Disk) -> None:
    path = disk.folder / "store.db"
    engine = await SqliteEngine.open(path)
    await fill(engine)
    disk.load()
    second = await SqliteEngine.open(path)
    assert await all_entries(second, SPACE) == await all_entries(engine, SPACE)
    with pytest.raises(StorageFull):
        await second.commit(SPACE, batch(10_000))
    await second.close()
    await engine.close()


async def test_a_store_that_nobody_has_open_is_told_as_being_on_a_full_disk_and_opens_once_there_is_space(
    disk: Disk,
) -> None:
    path = disk.folder / "store.db"
    engine = await SqliteEngine.open(path)
    await engine.commit(SPACE, batch(1))
    before = await all_entries(engine, SPACE)
    await engine.close()
    disk.load()
    with pytest.raises(StorageFull, match="also to read it"):
        await SqliteEngine.open(path)
    disk.free()
    again = await SqliteEngine.open(path)
    assert await all_entries(again, SPACE) == before
    await again.close()


async def test_a_store_cannot_be_created_on_a_full_disk_and_can_once_there_is_space(disk: Disk) -> None:
    path = disk.folder / "store.db"
    disk.load()
    with pytest.raises(StorageFull):
        await SqliteEngine.open(path)
    disk.free()
    engine = await SqliteEngine.open(path)
    await engine.commit(SPACE, batch(1))
    await engine.close()


async def test_a_read_only_folder_is_told_as_such_and_nothing_is_created(disk: Disk) -> None:
    disk.make_read_only()
    with pytest.raises(Unavailable, match="cannot be opened for writing"):
        await SqliteEngine.open(disk.folder / "store.db")
    assert list(disk.folder.iterdir()) == []


async def test_a_store_on_a_disk_that_became_read_only_is_told_as_such(disk: Disk) -> None:
    path = disk.folder / "store.db"
    engine = await SqliteEngine.open(path)
    await engine.commit(SPACE, batch(1))
    await engine.close()
    before = {file.name: file.read_bytes() for file in disk.folder.iterdir()}
    disk.make_read_only()
    with pytest.raises(Unavailable, match="cannot be opened for writing"):
        await SqliteEngine.open(path)
    assert {file.name: file.read_bytes() for file in disk.folder.iterdir()} == before
