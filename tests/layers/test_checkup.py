"""The doctor: what this store guarantees with the spaces it has, and what was lost or changed behind its back."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import ManualClock, Space, Store
from holdfast.codec import decode, encode
from holdfast.engine import Batch, Delete, Finding, Put
from holdfast.layers import checkup
from holdfast.layers.audit import LOG
from holdfast.layers.blobs import BlobRef
from holdfast.layers.checkup import with_spaces

pytestmark = pytest.mark.every_engine

FOR_ADMINISTRATORS = True


@pytest.fixture
async def store(url: str, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    async with holdfast.open(url, clock=clock, background=False, blobs=tmp_path / "blobs") as opened:
        yield opened


async def about(store: Store, subject: str, **options: bool) -> Finding | None:
    found = [finding for finding in await store.doctor(**options) if finding.subject == subject]
    assert len(found) <= 1
    return found[0] if found else None


async def errors(store: Store) -> list[str]:
    return [finding.subject for finding in await store.doctor() if finding.level == "error"]


async def sealed(space: Space, segments: int = 3) -> list[str]:
    for number in range(segments):
        await space.records.set("k", number)
        await space.audit.seal()
    return [entry.key for entry in (await space._scope.engine.scan(space.name, LOG)).entries]


async def kept(space: Space, content: bytes, holder: str = "reports/q1") -> BlobRef:
    ref = await space.blobs.put(content)
    conditions, operations = space.blobs.attach(ref, holder)
    await space.commit(*conditions, *operations)
    return ref


async def intrude(space: Space, *operations: Any) -> None:
    await space._scope.engine.commit(space.name, Batch("intruder", operations))


# --- durability ---


async def test_it_names_the_spaces_that_are_less_than_sync_and_what_that_means(store: Store) -> None:
    await store.space("ledger").records.set("k", 1)
    await store.space("metrics", durability="async").records.set("k", 1)
    await store.space("scratch", durability="volatile").records.set("k", 1)
    told = {finding.subject: finding for finding in await store.doctor()}
    for kind, name in (("async", "metrics"), ("volatile", "scratch")):
        finding = told[f"durability {kind}"]
        assert finding.level != "ok"
        assert finding.message.endswith(f": space {name}")
        assert "los" in finding.message
    others = " ".join(finding.message for finding in told.values() if finding.subject != "durability async")
    assert "metrics" not in others


async def test_it_does_not_speak_of_a_durability_that_no_space_has(store: Store) -> None:
    await store.space("ledger").records.set("k", 1)
    told = {finding.subject: finding.message for finding in await store.doctor()}
    assert "durability async" not in told
    assert "durability volatile" not in told
    if "durability sync" in told:
        assert told["durability sync"].endswith(": space ledger")


def test_a_warning_of_an_engine_is_told_with_and_without_spaces() -> None:
    warning = Finding("warning", "durability async", "a restart loses everything", "append to a file")
    assert with_spaces([warning], []) == [warning]


# --- the audit ---


async def test_a_sound_store_is_told_as_one(store: Store, space: Space) -> None:
    await sealed(space)
    found = await about(store, "audit")
    assert found is not None
    assert found.level == "ok"
    assert "--full" in found.message
    assert "--full" not in str(await about(store, "audit", full=True))
    assert await errors(store) == []


async def test_an_audit_that_was_changed_is_found(store: Store, space: Space) -> None:
    keys = await sealed(space)
    [entry] = await space._scope.engine.get(space.name, [keys[1]])
    assert entry is not None
    segment = decode(entry.value)
    segment["records"][0]["actor"] = "nobody"
    await intrude(space, Put(keys[1], encode(segment)))
    found = await about(store, "audit of contoso")
    assert found is not None
    assert found.level == "error"
    assert "was changed after it was sealed" in found.message
    assert "holdfast audit verify --space contoso" in found.advice


async def test_an_audit_with_a_gap_is_found(store: Store, space: Space) -> None:
    keys = await sealed(space)
    await intrude(space, Delete(keys[1]))
    assert await errors(store) == ["audit of contoso"]


async def test_a_segment_that_is_none_any_more_is_found(store: Store, space: Space) -> None:
    keys = await sealed(space)
    await intrude(space, Put(keys[0], b"{}"))
    assert await errors(store) == ["audit of contoso"]


async def test_an_old_change_is_found_by_a_full_look(
    store: Store, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "SEGMENTS_MAX", 2)
    keys = await sealed(space, 5)
    await intrude(space, Delete(keys[0]))
    assert await errors(store) == []
    assert "newest 2 segments" in str(await about(store, "audit"))
    assert await about(store, "audit of contoso", full=True) is not None


async def test_a_long_tail_that_is_not_sealed_is_told_with_what_seals_it(
    store: Store, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "UNSEALED_MAX", 20)
    for number in range(19):
        await space.records.set("k", number)
    assert await about(store, "audit of contoso") is None
    await space.records.set("k", 20)
    found = await about(store, "audit of contoso")
    assert found is not None
    assert (found.level, "holdfast tidy" in found.advice) == ("warning", True)
    assert "20 records are not sealed" in found.message
    await store.tidy()
    assert await about(store, "audit of contoso") is None


# --- blobs ---


async def test_blobs_that_are_there_are_told_as_such(store: Store, space: Space) -> None:
    await kept(space, b"report")
    await kept(space, b"report", "reports/q2")
    await kept(space, b"", "empty")
    await space.blobs.put(b"nobody wants it")
    found = await about(store, "blobs of contoso")
    assert found is not None
    assert found.level == "ok"
    assert found.message.startswith("2 that are referenced are there, 2 were read")


async def test_a_store_without_blobs_says_nothing_of_them(store: Store, space: Space) -> None:
    await space.records.set("k", 1)
    assert await about(store, "blobs of contoso") is None


async def test_a_blob_that_is_missing_or_altered_is_found(store: Store, space: Space) -> None:
    one, two = await kept(space, b"one"), await kept(space, b"two")
    Path(space.blobs.path(one)).unlink()
    found = await about(store, "blobs of contoso")
    assert found is not None
    assert (found.level, f"there is no blob {one.sha256}" in found.message) == ("error", True)
    Path(space.blobs.path(two)).write_bytes(b"TWO")
    assert "2 of 2" in str(await about(store, "blobs of contoso"))
    for content in (b"one", b"two"):
        await space.blobs.put(content)
    assert await errors(store) == []


async def test_a_large_blob_is_read_by_a_full_look_alone(
    store: Store, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "HASHED_BYTES_MAX", 2)
    ref = await kept(space, b"one")
    Path(space.blobs.path(ref)).write_bytes(b"ONE")
    assert "0 were read" in str(await about(store, "blobs of contoso"))
    assert "was altered" in str(await about(store, "blobs of contoso", full=True))
    Path(space.blobs.path(ref)).write_bytes(b"longer")
    assert await errors(store) == ["blobs of contoso"]


async def test_a_folder_of_blobs_that_is_gone_is_found(store: Store, space: Space, tmp_path: Path) -> None:
    ref = await kept(space, b"one")
    shutil.rmtree(tmp_path / "blobs")
    found = await about(store, "blobs of contoso")
    assert found is not None
    assert found.level == "error"
    assert f"{tmp_path / 'blobs'} is not there" in found.message
    conditions, operations = space.blobs.detach(ref, "reports/q1")
    await space.commit(*conditions, *operations)
    assert await errors(store) == []


async def test_many_references_of_one_blob_are_one_blob(
    store: Store, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "PAGE", 2)
    for number in range(5):
        await kept(space, b"one", f"holders/{number}")
    await kept(space, b"two")
    await kept(space, b"three")
    assert str(await about(store, "blobs of contoso")).count("3 that are referenced are there, 3 were read") == 1
    monkeypatch.setattr(checkup, "BLOBS_MAX", 2)
    assert "2 that are referenced" in str(await about(store, "blobs of contoso"))
    assert "3 that are referenced" in str(await about(store, "blobs of contoso", full=True))


async def test_where_nobody_said_where_blobs_are_that_is_told(store: Store, space: Space, url: str) -> None:
    await kept(space, b"one")
    store._blobs = None
    found = await about(store, "blobs of contoso")
    assert found is not None
    assert (found.level, "--blobs" in found.advice) == ("note", True)


async def test_a_key_that_is_no_blob_does_not_keep_the_doctor_from_its_work(store: Store, space: Space) -> None:
    await kept(space, b"one")
    await intrude(space, Put("blobs/zz/holder", b"1"), Put("blobs/" + "a" * 64 + "/holder", b'"x"'))
    found = await about(store, "blobs of contoso")
    assert found is not None
    assert found.message.startswith("1 that are referenced")


async def test_a_backup_without_its_blobs_is_found(tmp_path: Path) -> None:
    async with holdfast.open(tmp_path / "team.db") as store:
        await kept(store.space("contoso"), b"one")
        await store.backup(tmp_path / "monday.db")
    async with holdfast.open(tmp_path / "monday.db", background=False) as copy:
        assert await errors(copy) == ["blobs of contoso"]
    shutil.copytree(tmp_path / "team.db-blobs", tmp_path / "monday.db-blobs")
    async with holdfast.open(tmp_path / "monday.db", background=False) as copy:
        assert await errors(copy) == []
