"""The place of a store's file: links that lead to it, what is no file, and a file that is taken away while it is open."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Engine, Put
from holdfast.engines.private import make_folder
from holdfast.engines.registry import open_engine
from holdfast.engines.sqlite_restore import Place
from holdfast.errors import Damaged, InvalidInput, Unavailable

SCHEMES = ("sqlite", "resident")


async def opened(scheme: str, path: Path) -> Engine:
    return await open_engine(f"{scheme}:{path}", SystemClock())


async def put(engine: Engine, value: bytes, key: str = "records/k") -> int:
    return (await engine.commit("s", Batch("a", (Put(key, value),)))).version


async def value(engine: Engine) -> bytes | None:
    [entry] = await engine.get("s", ["records/k"])
    return None if entry is None else entry.value


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# --- links ---


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_store_that_is_reached_through_a_link_is_the_store_it_leads_to(
    tmp_path: Path, scheme: str, exists: bool
) -> None:
    for name in ("real", "links"):
        (tmp_path / name).mkdir()
    file, link = tmp_path / "real" / "team.db", tmp_path / "links" / "link.db"
    link.symlink_to(file)
    if exists:
        async with holdfast.open(file):
            pass
    async with holdfast.open(f"{scheme}:{link}") as store:
        ref = await store.space("s", agent="a").blobs.put(b"large")
    assert names(tmp_path / "links") == {"link.db"}
    assert link.is_symlink()
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    async with holdfast.open(tmp_path / "folder" / "team.db") as store:
        assert await store.space("s", agent="a").blobs.read(ref) == b"large"


async def test_writers_of_two_links_to_one_store_take_turns_at_one_lock(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("team.db")
    mine, others = await opened("sqlite", tmp_path / "team.db"), await opened("sqlite", tmp_path / "link.db")
    assert await put(mine, b"1") == 1
    assert await put(others, b"2") == 2
    assert await value(mine) == b"2"
    assert not {"link.db-lock", "link.db-turn", "link.db-wal"} & names(tmp_path)
    await mine.close()
    await others.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_file_with_two_names_is_refused_in_words_and_nothing_is_made_beside_either(
    tmp_path: Path, scheme: str
) -> None:
    engine = await opened("sqlite", tmp_path / "team.db")
    await put(engine, b"1")
    await engine.close()
    other = tmp_path / "other.db"
    os.link(tmp_path / "team.db", other)
    before = names(tmp_path)
    for path in (other, tmp_path / "team.db"):
        with pytest.raises(InvalidInput, match="2 names") as refused:
            await opened(scheme, path)
        assert f"-samefile {path}" in str(refused.value)
    assert names(tmp_path) == before
    other.unlink()
    engine = await opened(scheme, tmp_path / "team.db")
    assert await value(engine) == b"1"
    await engine.close()


# --- what is no file ---


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a pipe", "folder"])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_is_no_file_is_refused_before_anything_is_made(tmp_path: Path, scheme: str, kind: str) -> None:
    path = tmp_path / "team.db"
    with contextlib.ExitStack() as closing:
        if kind == "socket":
            closing.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path if kind == "pipe" else tmp_path / "pipe")
            if kind != "pipe":
                path.symlink_to("pipe")
        before = names(tmp_path)
        with pytest.raises(InvalidInput, match="is a folder" if kind == "folder" else "a regular file"):
            await opened(scheme, path)
        with pytest.raises(InvalidInput):
            Place(path)
        assert names(tmp_path) == before


# --- a file that is taken away ---


def remove(path: Path) -> None:
    for name in (path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm"))):
        name.unlink(missing_ok=True)


def replace(path: Path) -> None:
    made = path.with_name("new.db")
    shutil.copy(path, made)
    made.replace(path)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


@pytest.mark.parametrize("take_away", [remove, replace, rename])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_write_to_a_file_that_was_taken_away_is_refused_until_the_store_is_opened_again(
    tmp_path: Path, scheme: str, take_away: Callable[[Path], None]
) -> None:
    path = tmp_path / "team.db"
    engine = await opened(scheme, path)
    await put(engine, b"1")
    take_away(path)
    for _ in range(2):
        with pytest.raises(Unavailable, match="removed, renamed or replaced"):
            await put(engine, b"2")
    with pytest.raises(Unavailable, match="nothing was changed"):
        await engine.create("other")
    await engine.close()
    again = await opened(scheme, path)
    assert await value(again) != b"2"
    await put(again, b"3")
    assert await value(again) == b"3"
    await again.close()


async def test_who_has_a_file_that_was_replaced_writes_nothing_into_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    old, made = await opened("sqlite", path), await opened("sqlite", tmp_path / "made.db")
    await put(old, b'"old"')
    await put(made, b'"new"', "records/new")
    await made.close()
    remove(path)
    (tmp_path / "made.db").replace(path)
    new = await opened("sqlite", path)
    with pytest.raises(Unavailable):
        await put(old, b'"late"')
    assert await put(new, b'"mine"') == 2
    await old.close()
    assert await put(new, b'"still mine"') == 3
    await new.close()
    again = await opened("sqlite", path)
    assert [entry.key for entry in (await again.scan("s", "")).entries] == ["records/k", "records/new"]
    assert await value(again) == b'"still mine"'
    assert [each for each in await again.inspect() if each.level == "error"] == []
    await again.close()


# --- a feed that is behind its entries ---


async def made(path: Path, commits: int) -> None:
    engine = await opened("sqlite", path)
    for number in range(commits):
        await put(engine, b"1", f"records/{number}")
    await engine.close()


def damage(path: Path, sql: str) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute(sql)


async def test_the_doctor_sees_a_feed_that_is_behind_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    await made(path, 5)
    damage(path, "DELETE FROM feed WHERE id IN (SELECT id FROM feed ORDER BY id DESC LIMIT 2)")
    engine = await opened("sqlite", path)
    [found] = [each for each in await engine.inspect() if each.level == "error"]
    await engine.close()
    assert found.subject == "feed"
    assert "'s' ends at version 3, and its entries are at 5" in found.message
    with pytest.raises(Damaged, match="newer than the feed"):
        await opened("resident", path)


async def test_a_space_whose_feed_is_missing_is_damaged_and_gives_no_version_a_second_time(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    await made(path, 5)
    damage(path, "DELETE FROM feed")
    engine = await opened("sqlite", path)
    with pytest.raises(Damaged, match="feed of space 's'"):
        await put(engine, b"2")
    assert [each.subject for each in await engine.inspect() if each.level == "error"] == ["feed"]
    await engine.close()
    with pytest.raises(Damaged):
        await opened("resident", path)
    with pytest.raises(Damaged):
        async with holdfast.open(path):
            pass
    with Place(path) as place:  # a backup may take its place
        assert place.replaced is None


# --- copies ---


async def test_a_backup_of_a_damaged_store_names_the_store_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    await made(path, 300)
    engine = await opened("sqlite", path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(Damaged, match=r"team\.db is damaged"):
        await engine.backup(tmp_path / "copy.db")  # type: ignore[attr-defined]
    assert "copy.db" not in names(tmp_path)
    await engine.close()


async def test_a_backup_that_cannot_be_written_names_the_copy(tmp_path: Path) -> None:
    engine = await opened("sqlite", tmp_path / "team.db")
    with pytest.raises(InvalidInput, match=r"nowhere/copy\.db"):
        await engine.backup(tmp_path / "nowhere" / "copy.db")  # type: ignore[attr-defined]
    await engine.close()


# --- names that are on the disk ---


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[Path, set[str]]:
    """The folders that were fsynced so far, and what was in each then."""
    seen: dict[Path, set[str]] = {}
    fsync = os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            seen[path] = names(path)

    monkeypatch.setattr(os, "fsync", note)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what a descriptor is")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_names_of_a_store_of_its_folder_and_of_its_backup_are_on_the_disk_when_one_is_told_of_them(
    tmp_path: Path, synced: dict[Path, set[str]], scheme: str
) -> None:
    folder, copies = tmp_path / "above" / "folder", tmp_path / "copies"
    copies.mkdir()
    make_folder(folder)
    assert "above" in synced[tmp_path]
    assert "folder" in synced[tmp_path / "above"]
    engine = await opened(scheme, folder / "team.db")
    assert "team.db" in synced[folder]
    await put(engine, b"1")
    await engine.backup(copies / "copy.db")  # type: ignore[attr-defined]
    assert "copy.db" in synced[copies]
    await engine.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what a descriptor is")
async def test_the_name_of_a_backup_of_what_is_no_file_is_on_the_disk_too(
    tmp_path: Path, synced: dict[Path, set[str]]
) -> None:
    async with holdfast.open("memory:") as store:
        await store.space("s", agent="a").records.set("k", 1)
        await store.backup(tmp_path / "copy.db")
    assert "copy.db" in synced[tmp_path]
