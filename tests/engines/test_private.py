"""Files of a store are their user's alone, unless somebody has made them others'."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.server.live import command

import holdfast
from holdfast.testing.servers.keeper import KeeperServer


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The permissions of every file there."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("scheme", ["sqlite", "resident"])
async def test_a_new_store_and_its_backup_are_their_users_alone(tmp_path: Path, scheme: str) -> None:
    with umask(0o022):
        async with holdfast.open(f"{scheme}:{tmp_path}/team.db") as store:
            await store.space("contoso").records.set("k", 1)
            await store.backup(tmp_path / "copy.db")
            found = modes(tmp_path)
            assert [each.message for each in await store.doctor() if each.subject == "permissions"] == ["-rw-------"]
    assert {"team.db", "team.db-wal", "team.db-shm", "team.db-lock", "team.db-turn", "copy.db"} <= set(found)
    assert set(found.values()) == {0o600}


async def test_a_backup_of_a_store_that_is_no_file_is_its_users_alone_too(tmp_path: Path) -> None:
    with umask(0o022):
        async with holdfast.open("memory:") as store:
            await store.space("contoso").records.set("k", 1)
            await store.backup(tmp_path / "copy.db")
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_keepers_files_and_the_backup_of_its_client_are_their_users_alone(tmp_path: Path) -> None:
    with umask(0o022), KeeperServer.temporary() as keeper:
        command(keeper, "--space", "contoso", "set", "k", "1")
        command(keeper, "backup", str(tmp_path / "copy.db"))
        ours = {name: mode for name, mode in modes(keeper.folder).items() if name.startswith("store.db")}
        assert len(ours) >= 4
        assert set(ours.values()) == {0o600}
        assert modes(tmp_path) == {"copy.db": 0o600}


async def test_a_file_that_is_shared_stays_so_and_what_is_made_beside_it_is_shared_as_well(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with holdfast.open(str(path)) as store:
        await store.space("contoso").records.set("k", 1)
    path.chmod(0o664)
    for name in ("team.db-lock", "team.db-turn"):
        (tmp_path / name).unlink()
    with umask(0o077):
        async with holdfast.open(str(path)) as store:
            await store.space("contoso").records.set("k", 2)
            assert modes(tmp_path) == dict.fromkeys(modes(tmp_path), 0o664)
            [note] = [each for each in await store.doctor() if each.subject == "permissions"]
            assert (note.level, "every user may read" in note.message) == ("note", True)


async def test_a_backup_that_fails_leaves_no_file_and_touches_none_that_is_there(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "team.db")) as store:
        (tmp_path / "taken").write_text("somebody's")
        with pytest.raises(holdfast.InvalidInput, match="exists already"):
            await store.backup(tmp_path / "taken")
        with pytest.raises(holdfast.InvalidInput, match="the folder of"):
            await store.backup(tmp_path / "none" / "copy.db")
    assert (tmp_path / "taken").read_text() == "somebody's"


@pytest.mark.parametrize(("file", "folder"), [(0o600, 0o700), (0o660, 0o755)])
async def test_blobs_are_for_those_who_may_use_the_store(tmp_path: Path, file: int, folder: int) -> None:
    with umask(0o022):
        async with holdfast.open(tmp_path / "team.db") as store:
            (tmp_path / "team.db").chmod(file)
            blobs = store.space("contoso").blobs
            assert await blobs.read(await blobs.put(b"secret")) == b"secret"
            assert stat.S_IMODE((tmp_path / "team.db-blobs").stat().st_mode) == folder
            (tmp_path / "team.db-blobs").chmod(0o750)
            await blobs.put(b"another")
            assert stat.S_IMODE((tmp_path / "team.db-blobs").stat().st_mode) == 0o750, "it is no longer ours to decide"
