"""Guarantee 2, versions: a version never falls and is never given twice, whatever happens to entries and spaces."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import Absent, Delete, Increment, Put, VersionIs
from holdfast.errors import Conflict, InvalidInput
from holdfast.testing.conformance.subject import SPACE, Subject


class TestVersions:
    async def test_versions_only_ascend(self, subject: Subject) -> None:
        versions = [(await subject.commit(Put("a/k", b"%d" % i))).version for i in range(50)]
        assert versions == sorted(set(versions))

    async def test_a_version_is_not_reused_after_a_delete(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        deleted = await subject.commit(Delete("a/k"))
        second = await subject.commit(Put("a/k", b"1"))
        assert first.version < deleted.version < second.version
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"2"), when=[VersionIs("a/k", first.version)])

    async def test_a_version_is_not_reused_after_an_expiry(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(1000)
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"2"), when=[VersionIs("a/k", first.version)])
        second = await subject.commit(Put("a/k", b"1"), when=[Absent("a/k")])
        expiry, written = (await subject.feed(after=first.version))[:2]
        assert first.version < expiry.version < written.version == second.version

    async def test_a_version_is_not_reused_after_compaction(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        await subject.engine.compact(SPACE, first.version)
        assert (await subject.entry("a/k")).version == first.version == await subject.revision()
        second = await subject.commit(Put("a/k", b"2"))
        assert second.version > first.version

    async def test_a_version_is_not_reused_after_everything_is_deleted_and_compacted(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        deleted = await subject.commit(Delete("a/k"))
        await subject.engine.compact(SPACE, deleted.version + 1000)
        assert await subject.revision() == deleted.version
        assert (await subject.commit(Put("a/k", b"1"))).version == deleted.version + 1

    async def test_a_version_is_not_reused_when_a_dropped_space_comes_back(self, subject: Subject) -> None:
        versions: list[int] = []
        for _ in range(3):
            for _ in range(3):
                receipt = await subject.commit(Put("a/k", b"1"))
                versions.append(receipt.version)
            await subject.engine.drop(SPACE)
        assert versions == sorted(set(versions))

    async def test_a_version_is_not_reused_when_a_dropped_space_is_created_again(self, subject: Subject) -> None:
        last = await subject.commit(Put("a/k", b"1"))
        await subject.engine.drop(SPACE)
        info = await subject.engine.create(SPACE, "async")
        assert info.revision > last.version
        assert (await subject.commit(Put("a/k", b"1"))).version > last.version
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"2"), when=[VersionIs("a/k", last.version)])

    async def test_a_space_dropped_empty_after_a_drop_still_moves_on(self, subject: Subject) -> None:
        last = await subject.commit(Put("a/k", b"1"))
        for _ in range(3):
            await subject.engine.drop(SPACE)
            revision = (await subject.engine.create(SPACE)).revision
            assert revision >= last.version
        assert (await subject.commit(Put("a/k", b"1"))).version > last.version

    async def test_a_version_is_not_reused_after_a_reopen(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        deleted = await subject.commit(Delete("a/k"))
        await subject.engine.compact(SPACE, deleted.version)
        await subject.reopen()
        assert await subject.revision() == deleted.version
        assert (await subject.commit(Put("a/k", b"1"))).version > deleted.version

    async def test_a_version_is_not_reused_after_drop_and_reopen(self, subject: Subject) -> None:
        last = await subject.commit(Put("a/k", b"1"))
        await subject.engine.drop(SPACE)
        await subject.reopen()
        assert (await subject.commit(Put("a/k", b"1"))).version > last.version

    async def test_a_refused_commit_takes_no_version(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b'"x"'))
        with pytest.raises(Conflict):
            await subject.commit(Put("a/k", b"1"), when=[Absent("a/k")])
        with pytest.raises(InvalidInput):
            await subject.commit(Increment("a/k", 1))
        assert await subject.revision() == first.version
        assert (await subject.commit(Put("a/k", b"1"))).version == first.version + 1

    async def test_concurrent_commits_never_share_a_version(self, subject: Subject) -> None:
        receipts = await asyncio.gather(*(subject.commit(Put(f"a/{i}", b"1")) for i in range(50)))
        assert len({receipt.version for receipt in receipts}) == 50
        assert {entry.key: entry.version for entry in await subject.entries()} == {
            f"a/{i}": receipt.version for i, receipt in enumerate(receipts)
        }

    async def test_engines_on_one_storage_never_share_a_version(self, subject: Subject) -> None:
        other = await subject.another()
        receipts = await asyncio.gather(
            *(subject.commit(Put(f"a/{i}", b"1"), engine=(subject.engine, other)[i % 2]) for i in range(50))
        )
        assert len({receipt.version for receipt in receipts}) == 50

    async def test_another_engine_that_drops_a_space_does_not_bring_versions_back(self, subject: Subject) -> None:
        other = await subject.another()
        last = await subject.commit(Put("a/k", b"1"))
        await other.drop(SPACE)
        assert await subject.get("a/k") is None
        assert (await subject.commit(Put("a/k", b"1"))).version > last.version
