"""The life of spaces: made, listed, isolated from each other, dropped, loaded with a copy."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.engine import (
    DURABILITIES,
    ID_DIGITS,
    ID_SHIFT,
    Absent,
    Delete,
    Durability,
    Entry,
    Increment,
    Present,
    Push,
    Put,
    Take,
    Touch,
    cursor_at,
)
from holdfast.errors import Compacted, Conflict, InvalidInput
from holdfast.testing.conformance.subject import ALICE, BOB, ELSEWHERE, SPACE, Subject

ODD_NAMES = ["a", "A", "a%", "a_", "a*", "a/b", "a:b", "{a}", "a'b", 'a"b', "a b", "\u00e9", "e\u0301", "\U0001f9ff"]

COPY = [
    Entry("a/1", b'{"x":1}', 700, BOB, 1_600_000_000_000, 1_600_000_000_500, None, "kind"),
    Entry("a/2", b"42", 650, ALICE, 1_600_000_000_000, 1_600_000_000_000, 4_000_000_000_000, ""),
    Entry("b/\U0001f9ff", b"1", 712, BOB, 1_600_000_000_000, 1_600_000_000_000),
]


class TestSpaces:
    async def test_a_commit_to_an_unknown_space_makes_it_sync(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/k", b"1"))
        info = await subject.info()
        assert (info.name, info.durability, info.revision) == (SPACE, "sync", receipt.version)
        assert (info.created_at, info.audit_reads) == (receipt.at, False)

    async def test_a_refused_commit_to_an_unknown_space_does_not_make_it(self, subject: Subject) -> None:
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"1"), when=[Present("a/k")])
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"1"), Touch("a/none", 1000))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b'"x"'), Increment("a/k", 1))
        assert await subject.engine.spaces() == []

    async def test_a_commit_that_writes_nothing_to_an_unknown_space_does_not_make_it(self, subject: Subject) -> None:
        for receipt in (
            await subject.commit(),
            await subject.commit(Delete("a/k"), Take("q/", "r/")),
            await subject.commit(when=[Absent("a/k")], request_id="r"),
        ):
            assert not any(receipt.results)
        assert await subject.engine.spaces() == []

    @pytest.mark.parametrize("durability", DURABILITIES)
    async def test_a_space_is_created_with_its_durability_and_found_again(
        self, subject: Subject, durability: Durability
    ) -> None:
        made = await subject.engine.create(SPACE, durability)
        assert (made.name, made.durability, made.usage) == (SPACE, durability, [])
        await subject.commit(Put("a/k", b"1"))
        found = await subject.engine.create(SPACE, durability)
        assert found == await subject.info()
        assert (found.durability, found.created_at) == (durability, made.created_at)
        assert await subject.value("a/k") == b"1"

    @pytest.mark.parametrize("durability", DURABILITIES)
    async def test_spaces_of_every_durability_do_the_same(self, subject: Subject, durability: Durability) -> None:
        await subject.engine.create(SPACE, durability)
        watching = await subject.watch_from_now()
        first = await subject.commit(Increment("a/n", 1), Put("a/t", b"1", ttl_ms=1000), request_id="r")
        assert await subject.commit(Increment("a/n", 1), Put("a/t", b"1", ttl_ms=1000), request_id="r") == first
        assert (await watching.next()).version == first.version
        subject.advance_ms(1000)
        assert await subject.keys() == ["a/n"]
        async with subject.refused(Conflict):
            await subject.commit(Put("a/n", b"1"), when=[Absent("a/n")])
        await subject.commit()
        assert [change.op for change in await subject.changes(after=first.version)] == ["expire"]
        assert await subject.usage() == {(ALICE, "a"): (1, 4)}

    async def test_a_space_asked_for_with_another_durability_is_invalid(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        await subject.engine.create(ELSEWHERE, "volatile")
        for durability in ("sync", "volatile"):
            async with subject.refused(InvalidInput):
                await subject.engine.create(SPACE, durability)
        async with subject.refused(InvalidInput):
            await subject.engine.create(ELSEWHERE)

    @pytest.mark.parametrize("durability", ["", "SYNC", "eventual", None, 1])
    async def test_an_unknown_durability_is_invalid(self, subject: Subject, durability: Durability) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.engine.create(ELSEWHERE, durability)

    async def test_audit_of_reads_is_remembered_once_asked_for(self, subject: Subject) -> None:
        assert (await subject.engine.create(SPACE)).audit_reads is False
        assert (await subject.engine.create(SPACE, audit_reads=True)).audit_reads is True
        assert (await subject.engine.create(SPACE)).audit_reads is True
        assert (await subject.info()).audit_reads is True

    async def test_spaces_are_listed_or_found_by_name(self, subject: Subject) -> None:
        assert await subject.engine.spaces() == []
        await subject.engine.create(ELSEWHERE, "async")
        await subject.commit(Put("a/k", b"1"))
        listed = {info.name: info for info in await subject.engine.spaces()}
        assert sorted(listed) == sorted([SPACE, ELSEWHERE])
        assert await subject.engine.spaces(SPACE) == [listed[SPACE]]
        assert await subject.engine.spaces("unknown") == []

    async def test_a_space_tells_when_the_next_entry_expires(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/1", b"1", ttl_ms=2000), Put("a/2", b"1", ttl_ms=1000), Put("a/3", b"1"))
        assert (await subject.info()).next_expiry == receipt.at + 1000
        await subject.commit(Delete("a/2"))
        assert (await subject.info()).next_expiry == receipt.at + 2000
        await subject.commit(Touch("a/1", 9000))
        assert (await subject.info()).next_expiry == receipt.at + 9000
        await subject.commit(Put("a/1", b"1"))
        assert (await subject.info()).next_expiry is None

    async def test_spaces_do_not_see_each_other(self, subject: Subject) -> None:
        for i, name in enumerate(ODD_NAMES):
            for _ in range(i + 1):
                receipt = await subject.commit(Increment("a/n", 1), space=name, request_id=None)
            assert receipt.results == [i + 1]
        assert sorted(info.name for info in await subject.engine.spaces()) == sorted(ODD_NAMES)
        for i, name in enumerate(ODD_NAMES):
            assert await subject.value("a/n", space=name) == b"%d" % (i + 1)
            assert await subject.keys(space=name) == ["a/n"]
            assert len(await subject.feed(space=name)) == i + 1

    async def test_a_commit_to_one_space_moves_no_other(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        before = (await subject.snapshot())[SPACE]
        await subject.commit(Put("a/k", b"2"), space=ELSEWHERE)
        await subject.commit(Delete("a/k"), space=ELSEWHERE)
        await subject.engine.compact(ELSEWHERE, 100)
        await subject.engine.drop(ELSEWHERE)
        assert (await subject.snapshot())[SPACE] == before

    async def test_a_dropped_space_is_gone_with_all_it_held(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async", audit_reads=True)
        await subject.commit(Put("a/k", b"1", ttl_ms=1000), Push("q/", b"1"), request_id="r")
        await subject.engine.drop(SPACE)
        assert await subject.engine.spaces() == []
        assert await subject.get("a/k") is None
        assert await subject.keys() == []
        subject.advance("1h")
        receipt = await subject.commit(Put("a/new", b"1"))
        info = await subject.info()
        assert (info.durability, info.audit_reads, info.created_at) == ("sync", False, receipt.at)
        assert await subject.keys() == ["a/new"]
        assert [change.op for change in await subject.changes()] == ["put"]

    async def test_dropping_what_is_not_there_does_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        before = await subject.snapshot()
        await subject.engine.drop(ELSEWHERE)
        await subject.engine.compact(ELSEWHERE, 5)
        assert await subject.snapshot() == before

    async def test_a_dropped_space_may_come_back_with_another_durability(self, subject: Subject) -> None:
        for durability in DURABILITIES:
            await subject.engine.create(SPACE, durability)
            await subject.commit(Put("a/k", b"1"))
            await subject.engine.drop(SPACE)

    @pytest.mark.parametrize("before", DURABILITIES)
    async def test_every_engine_follows_when_another_makes_a_space_anew(
        self, subject: Subject, before: Durability
    ) -> None:
        other = await subject.another()
        await subject.engine.create(SPACE, before)
        await subject.commit(Put("a/old", b"1"), engine=other)
        await subject.commit(Put("a/old", b"1"))
        for after in ("sync", "async"):
            await subject.engine.drop(SPACE)
            assert await subject.get("a/old", engine=other) is None
            await subject.engine.create(SPACE, after)
            assert await subject.get("a/new", engine=other) is None
            receipt = await subject.commit(Put("a/new", b"1"), engine=other)
            assert (await subject.entry("a/new")).version == receipt.version
            assert (await other.spaces(SPACE)) == [await subject.info()]

    async def test_loaded_entries_are_exactly_as_given(self, subject: Subject) -> None:
        await subject.engine.load(SPACE, COPY, 712)
        assert await subject.entries() == COPY
        info = await subject.info()
        assert (info.revision, info.feed_floor, info.next_expiry) == (712, 712, 4_000_000_000_000)
        assert await subject.usage() == {
            (BOB, "a"): (1, len("a/1") + 7),
            (ALICE, "a"): (1, len("a/2") + 2),
            (BOB, "b"): (1, 2 + 4 + 1),
        }
        assert await subject.feed() == []

    async def test_work_goes_on_after_a_load(self, subject: Subject) -> None:
        await subject.engine.load(SPACE, COPY, 712)
        receipt = await subject.commit(Increment("a/2", 1), Delete("a/1"), Push("q/", b"1"))
        assert (receipt.version, receipt.results[:2]) == (713, [43, True])
        counted = await subject.entry("a/2")
        assert (counted.created_at, counted.owner, counted.expires_at) == (COPY[1].created_at, ALICE, 4_000_000_000_000)
        assert [commit.version for commit in await subject.feed()] == [713]
        with pytest.raises(Compacted):
            await subject.watch(cursor=cursor_at(711)).next()

    async def test_a_load_in_parts_adds_up(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        for entry in COPY:
            await subject.engine.load(SPACE, [entry], 712)
        assert await subject.entries() == COPY
        assert await subject.revision() == 712
        assert (await subject.info()).durability == "async"

    async def test_a_load_over_an_entry_replaces_it_in_the_usage_too(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b'"a long value that goes"', ttl_ms=1000), Put("a/2", b"1"))
        await subject.engine.load(SPACE, COPY, 712)
        assert await subject.entries() == COPY
        assert (await subject.usage())[BOB, "a"] == (1, len("a/1") + 7)
        assert (await subject.usage())[ALICE, "a"] == (1, len("a/2") + 2)

    async def test_a_load_never_lowers_the_revision(self, subject: Subject) -> None:
        receipts = [await subject.commit(Put("z/k", b"1")) for _ in range(5)]
        await subject.engine.load(SPACE, [Entry("a/k", b"1", 1, BOB, 1, 1)], 1)
        assert await subject.revision() == receipts[-1].version
        assert (await subject.commit(Put("a/k", b"2"))).version > receipts[-1].version

    async def test_of_an_entry_that_is_loaded_twice_at_once_the_last_counts_once(self, subject: Subject) -> None:
        last = Entry("a/k", b"22", 2, BOB, 1, 1)
        await subject.engine.load(SPACE, [Entry("a/k", b"1", 1, ALICE, 1, 1), last], 5)
        assert await subject.entries() == [last]
        assert await subject.usage() == {(BOB, "a"): (1, len("a/k") + 2)}

    @pytest.mark.parametrize("ahead_ms", [0, 3_600_000])
    async def test_what_is_pushed_after_a_load_comes_behind_what_was_loaded(
        self, subject: Subject, ahead_ms: int
    ) -> None:
        """Also if it is loaded in the same millisecond, or was written by a clock that is ahead."""
        receipt = await subject.commit(Push("q/", b"1"), Push("q/", b"2"))
        first, second = await subject.entries()
        id, at = int(second.key.removeprefix("q/")) + (ahead_ms << ID_SHIFT), second.updated_at + ahead_ms
        second = msgspec.structs.replace(second, key=f"q/{id:0{ID_DIGITS}d}", updated_at=at)
        await subject.engine.load(ELSEWHERE, [first, second], receipt.version)
        pushed = await subject.commit(Push("q/", b"3"), space=ELSEWHERE)
        assert await subject.keys(space=ELSEWHERE) == [first.key, second.key, pushed.results[0]]

    async def test_an_inspection_has_something_to_say(self, subject: Subject) -> None:
        findings = await subject.engine.inspect()
        assert findings
        assert all(finding.subject and finding.message for finding in findings)
        assert not [finding for finding in findings if finding.level == "error"]
