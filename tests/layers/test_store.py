"""Stores: durability per space, sharing a file, dropping, backup, copy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import holdfast
from holdfast import InvalidInput, ManualClock, NotFound, Space, Store, Unavailable
from holdfast.engine import SpaceInfo, cursor_at

pytestmark = pytest.mark.every_engine


async def test_a_file_is_shared_by_several_stores(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path) as one, holdfast.open(f"sqlite:{path}") as two:
        await one.space("s").records.set("k", 1)
        assert await two.space("s").records.get("k") == 1
        await asyncio.gather(*(store.space("s").records.increment("n") for store in (one, two) for _ in range(50)))
        assert await one.space("s").records.get("n") == 100
        assert (await one.space("s").info()).revision == 101


async def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path) as store:
        version = await store.space("s").records.set("k", 1)
        await store.space("s").records.append_to_list("l", 1, 2)
    async with holdfast.open(path) as store:
        entry = await store.space("s").records.entry("k")
        assert entry is not None
        assert (entry.value, entry.version) == (1, version)
        assert await store.space("s").records.list("l") == [1, 2]
        assert await store.space("s").records.set("k", 2) > version + 1


async def test_durability_is_fixed_when_a_space_is_made(store: Store) -> None:
    await store.space("a", durability="async").records.set("k", 1)
    await store.space("v", durability="volatile").records.set("k", 1)
    await store.space("s").records.set("k", 1)
    assert {info.name: info.durability for info in await store.spaces()} == {"a": "async", "v": "volatile", "s": "sync"}
    assert await store.space("a").records.get("k") == 1
    assert await store.space("v", durability="volatile").records.get("k") == 1
    with pytest.raises(InvalidInput, match="exists with durability 'async'"):
        await store.space("a", durability="sync").records.get("k")


async def test_volatile_spaces_live_in_the_process_and_never_reuse_a_version(
    tmp_path: Path, clock: ManualClock
) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path, clock=clock) as store:
        space = store.space("scratch", durability="volatile")
        await space.records.set("k", 1)
        entry = await space.records.entry("k")
        assert entry is not None
    clock.advance("1s")
    async with holdfast.open(path, clock=clock) as store:
        space = store.space("scratch")
        assert (await space.info()).durability == "volatile"
        assert await space.records.get("k") is None
        assert await space.records.set("k", 2) > entry.version


async def test_a_dropped_space_is_gone_and_noted_and_its_versions_do_not_come_back(store: Store) -> None:
    space = store.space("s", agent="market")
    for number in range(5):
        last = await space.records.set("k", number)
    await store.drop_space("s", agent="admin")
    assert await store.spaces() == []
    assert await space.records.get("k") is None
    with pytest.raises(NotFound):
        await space.info()
    with pytest.raises(NotFound):
        await store.drop_space("s")
    assert await space.records.set("k", 1) > last
    [noted] = [info for info in await store.engine.spaces() if info.name == "_holdfast"]
    assert isinstance(noted, SpaceInfo)


async def test_a_backup_is_a_store_of_its_own(store: Store, space: Space, tmp_path: Path) -> None:
    for number in range(50):
        await space.records.set(f"k{number}", number)
    await space.records.append_to_list("l", 1)
    target = tmp_path / "backup.db"
    await store.backup(target)
    await space.records.set("later", 1)
    async with holdfast.open(str(target)) as copy:
        there = copy.space("contoso")
        assert await there.records.size() == 51
        assert await there.records.list("l") == [1]
        assert await there.records.get("later") is None
        assert (await there.records.entry("k7")).version == 8  # type: ignore[union-attr]
        assert all(finding.level != "error" for finding in await copy.doctor())
    with pytest.raises(InvalidInput, match="exists already"):
        await store.backup(target)


async def test_a_backup_is_consistent_while_others_write(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "team.db")) as store:
        space = store.space("s")

        async def write() -> None:
            for _ in range(100):
                await space.commit(holdfast.increment("a"), holdfast.increment("b", -1))

        async def back_up() -> None:
            for number in range(3):
                await store.backup(tmp_path / f"{number}.db")

        await asyncio.gather(write(), back_up())
        for number in range(3):
            async with holdfast.open(str(tmp_path / f"{number}.db")) as copy:
                values = await copy.space("s").records.get_many(["a", "b"])
                assert values.get("a", 0) == -values.get("b", 0)


async def test_a_backup_of_any_store_is_one_moment_of_it_while_others_write(
    store: Store, space: Space, clock: ManualClock, tmp_path: Path
) -> None:
    for number in range(200):
        await space.records.set(f"old/{number}", number)
    large, ended = "x" * 70_000, False

    async def write(start: int) -> None:
        number = start
        while not ended:
            number += 2
            clock.advance("1ms")
            await space.commit(
                holdfast.increment("a"),
                holdfast.increment("z", -1),
                holdfast.delete_(f"old/{number % 200}"),
                holdfast.set_(f"new/{number}", number, ttl="1h"),
                holdfast.delete_(f"new/{number - 20}"),
                holdfast.set_(f"large/{number % 4}", f"{number}{large}", type="report"),
            )
            await space.records.append_to_list("l", number)
            await asyncio.sleep(0)

    writing = [asyncio.ensure_future(write(start)) for start in (0, 1)]
    while await space.records.get("a", 0) < 10:
        await asyncio.sleep(0)
    await store.backup(tmp_path / "backup.db")
    ended = True
    await asyncio.gather(*writing)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".backup-")] == []
    told = {}
    async for commit in space.watch("", cursor=cursor_at(0), live=False):
        told[commit.version] = [(change.op, change.key) for change in commit]
    async with holdfast.open(str(tmp_path / "backup.db"), clock=clock, background=False) as copy:
        there, revision = copy.space("contoso"), (await copy.space("contoso").info()).revision
        assert revision >= 210
        expected: dict[str, int] = {}
        for version in sorted(told):
            for op, key in told[version] if version <= revision else ():
                if op == "delete":
                    expected.pop(key, None)
                elif op != "append":
                    expected[key] = version
        records = {record.key: record async for record in there.records.scan() if record.key != "l"}
        assert {key: record.version for key, record in records.items()} == expected
        assert records["a"].value == -records["z"].value
        truth = {record.key: record async for record in space.records.scan()}
        for key, record in records.items():
            if key in truth and truth[key].version == record.version:
                assert record == truth[key]
        items = await space.records.list("l")
        assert await there.records.list("l") == items[: len(await there.records.list("l"))]
        appended = sum(op == "append" for version, ops in told.items() if version <= revision for op, _ in ops)
        assert len(await there.records.list("l")) == appended
        assert all(finding.level != "error" for finding in await copy.doctor())


async def test_the_doctor_finds_a_healthy_store_healthy(on_disk: Path) -> None:
    async with holdfast.open(str(on_disk / "team.db")) as store:
        await store.space("s").records.set("k", 1)
        findings = {finding.subject: finding for finding in await store.doctor()}
        assert {finding.level for finding in findings.values()} <= {"ok", "note"}
        assert "fsync" in findings["durability sync"].message


async def test_a_store_used_after_a_fork_says_so(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "team.db"), background=False) as store:
        space = store.space("s")
        await space.records.set("k", 1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # no event loop may run here: step the coroutine by hand
            try:
                space.records.get("k").send(None)
                answer = b"served"
            except Unavailable as exc:
                answer = str(exc).encode()
            except BaseException as exc:
                answer = repr(exc).encode()
            os.write(write, answer)
            os._exit(0)
        os.close(write)
        assert b"before a fork" in os.read(read, 1000)
        os.close(read)
        await asyncio.to_thread(os.waitpid, child, 0)


async def test_a_store_that_was_awaited_may_be_entered_once(tmp_path: Path) -> None:
    async with await holdfast.open(str(tmp_path / "awaited.db")) as store:
        await store.space("contoso", agent="market").records.set("k", 1)
        with pytest.raises(InvalidInput, match="open already"):
            await store.__aenter__()
    with pytest.raises(Unavailable):
        store.engine  # noqa: B018 - it is closed


async def test_whoever_waits_when_the_store_is_closed_is_told(url: str) -> None:
    store = await holdfast.open(url, background=False)
    boss, space = store.space("contoso", agent="boss"), store.space("contoso", agent="market")
    correlation = await boss.correlation("c1", expect=["market"])
    await boss.lock("portfolio").__aenter__()
    waits = [
        asyncio.ensure_future(space.lock("portfolio", wait=None).__aenter__()),
        asyncio.ensure_future(correlation.decision(wait=None)),
    ]
    while not [held for held in await boss.locks.list() if held.waiters]:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    await store.close()
    for outcome in await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 10):
        assert isinstance(outcome, Unavailable)
        assert "closed" in str(outcome)


async def test_a_store_that_is_closed_by_several_is_closed_once(url: str) -> None:
    store = await holdfast.open(url)
    await store.space("contoso", agent="market").records.set("a", 1)
    await asyncio.gather(store.close(), store.close())
    await store.close()
    with pytest.raises(Unavailable, match="not open"):
        store.space("contoso")


async def test_a_memory_store_that_is_opened_again_leaves_no_folder_of_blobs() -> None:
    store = holdfast.open("memory:")
    for _ in range(2):
        async with store:
            blobs = store.space("contoso").blobs
            path = Path(blobs.path(await blobs.put(b"report")))
            assert path.exists()
        assert not path.exists()


def test_the_home_of_somebody_unknown_is_told() -> None:
    with pytest.raises(InvalidInput, match="user that is not known"):
        holdfast.open("~nobody-at-all/team.db")


async def test_blobs_that_end_with_the_process_are_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with holdfast.open(url, background=False) as store:
        await store.space("contoso", agent="market").blobs.put(b"report")
    warned = [record for record in caplog.records if "told no folder for blobs" in record.getMessage()]
    assert bool(warned) == url.startswith(("redis:", "postgresql:", "policed:"))


async def test_a_view_of_a_space_that_was_dropped_makes_it_again_as_it_was_asked_to(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "team.db"), durability="async", background=False) as store:
        quick, plain = store.space("quick", durability="volatile"), store.space("plain")
        noted = store.space("noted", audit_reads=True)
        for _ in range(2):
            for space in (quick, plain, noted):
                await space.records.set("k", 1)
            made = {info.name: (info.durability, info.audit_reads) for info in await store.spaces()}
            assert made == {"quick": ("volatile", False), "plain": ("async", False), "noted": ("async", True)}
            for name in made:
                await store.drop_space(name)
