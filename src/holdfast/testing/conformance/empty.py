"""The condition on a range: Empty, which holds when no live entry is under its prefix."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import Batch, Delete, Empty, Engine, Present, Push, Put, Receipt, Take, Touch
from holdfast.errors import Conflict, InvalidInput
from holdfast.testing.conformance.subject import BOB, SPACE, Subject

PLACE = Push("q/x/", b"1", ttl_ms=1000)


class TestEmpty:
    async def test_a_batch_that_needs_an_empty_range_is_committed_when_it_is_empty(self, subject: Subject) -> None:
        receipt = await subject.commit(PLACE, when=[Empty("q/x/")])
        assert await subject.keys("q/") == receipt.results

    async def test_it_is_refused_by_any_entry_and_shows_the_first(self, subject: Subject) -> None:
        await subject.commit(Put("q/x/2", b"2"), Put("q/x/1", b"1"), Put("q/x/3", b"3"), actor=BOB)
        async with subject.refused(Conflict) as caught:
            await subject.commit(PLACE, Delete("q/x/1"), when=[Empty("q/x/")])
        assert isinstance(caught.value, Conflict)
        assert (caught.value.key, caught.value.condition) == ("q/x/1", "empty")
        assert caught.value.actual == await subject.entry("q/x/1")

    @pytest.mark.parametrize("key", ["q/x/a/b/c", "q/x//", "q/x/\U0010ffff", "q/x/\x01"])
    async def test_an_entry_anywhere_below_counts(self, subject: Subject, key: str) -> None:
        await subject.commit(Put(key, b"1"))
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Empty("q/x/")])
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Empty("q/")])

    async def test_an_entry_elsewhere_does_not_count(self, subject: Subject) -> None:
        await subject.commit(*(Put(key, b"1") for key in ("q/x", "q/x0", "q/x.", "q/xx/1", "q/y/1", "qx/1", "p/x/1")))
        await subject.commit(Put("q/x/1", b"1"), space="another")
        await subject.commit(PLACE, when=[Empty("q/x/")])

    async def test_an_entry_that_is_gone_does_not_count(self, subject: Subject) -> None:
        await subject.commit(Put("q/x/1", b"1"), Put("q/x/2", b"1"))
        await subject.commit(Delete("q/x/1"), Take("q/x/", "r/"))
        await subject.commit(PLACE, when=[Empty("q/x/")])

    async def test_an_expired_entry_does_not_count_and_its_expiry_is_told_once_and_before(
        self, subject: Subject
    ) -> None:
        [first] = (await subject.commit(PLACE, when=[Empty("q/x/")])).results
        subject.advance_ms(999)
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Empty("q/x/")])
        subject.advance_ms(1)
        [second] = (await subject.commit(PLACE, when=[Empty("q/x/")])).results
        told = [(change.op, change.key) for change in await subject.changes()]
        assert told == [("push", first), ("expire", first), ("push", second)]

    async def test_an_entry_that_was_touched_still_counts(self, subject: Subject) -> None:
        [key] = (await subject.commit(PLACE)).results
        assert isinstance(key, str)
        subject.advance_ms(600)
        await subject.commit(Touch(key, 1000))
        subject.advance_ms(600)
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Empty("q/x/")])

    async def test_it_looks_behind_many_expired_entries(self, subject: Subject) -> None:
        for start in range(0, 300, 100):
            await subject.commit(*(Put(f"q/x/{i:03d}", b"1", ttl_ms=1000) for i in range(start, start + 100)))
        await subject.commit(Put("q/x/999", b"1", ttl_ms=2000))
        subject.advance_ms(1000)
        with pytest.raises(Conflict) as caught:
            await subject.commit(PLACE, when=[Empty("q/x/")])
        assert caught.value.key == "q/x/999"
        subject.advance_ms(1000)
        await subject.commit(PLACE, when=[Empty("q/x/")])
        assert len(await subject.keys("q/")) == 1

    async def test_it_is_about_the_state_before_its_own_batch(self, subject: Subject) -> None:
        await subject.commit(PLACE, PLACE, when=[Empty("q/x/"), Empty("q/")])
        async with subject.refused(Conflict):
            await subject.commit(Take("q/x/", "r/", n=9), PLACE, when=[Empty("q/x/")])

    async def test_it_is_one_condition_among_others(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        await subject.commit(PLACE, when=[Present("a/k"), Empty("q/x/")])
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Present("a/none"), Empty("q/y/")])
        async with subject.refused(Conflict):
            await subject.commit(PLACE, when=[Empty("q/y/"), Empty("q/x/"), Present("a/k")])

    async def test_of_many_at_once_one_is_first(self, subject: Subject) -> None:
        """They meet in groups, so each sees what was committed just before it, and so do those that give up."""
        engines = [subject.engine, await subject.another() if subject.capabilities.shared else subject.engine]
        for round_ in range(3):
            asked = (_first(engines[i % 2], f"agent-{i}") for i in range(40))
            receipts = [receipt for receipt in await asyncio.gather(*asked) if receipt is not None]
            [entry] = await subject.entries("q/")
            assert [receipt.results for receipt in receipts] == [[entry.key]], round_
            again = Batch(BOB, (PLACE,), (Empty("q/x/"),))
            left, came, late = await asyncio.gather(
                subject.commit(Delete(entry.key)),
                *(engines[i].commit(SPACE, again) for i in (0, 1)),
                return_exceptions=True,
            )
            assert isinstance(left, Receipt)
            for each in (came, late):
                assert isinstance(each, Receipt | Conflict)
            there = await subject.keys("q/")
            assert there == [each.results[0] for each in (came, late) if isinstance(each, Receipt)]
            await subject.commit(*map(Delete, there))

    async def test_ranges_of_many_names_are_told_apart_in_one_group(self, subject: Subject) -> None:
        names = [f"q/{i:03d}/" for i in range(60)]

        async def taken(name: str) -> bool:
            try:
                await subject.commit(Push(name, b"1"), when=[Empty(name)])
            except Conflict:
                return False
            return True

        assert sum(await asyncio.gather(*(taken(name) for name in names * 2))) == len(names)
        assert len(await subject.keys("q/")) == len(names)

    async def test_a_repeated_request_is_not_judged_by_what_it_did_itself(self, subject: Subject) -> None:
        first = await subject.commit(PLACE, when=[Empty("q/x/")], request_id="once")
        assert await subject.commit(PLACE, when=[Empty("q/x/")], request_id="once") == first
        async with subject.refused(InvalidInput):
            await subject.commit(PLACE, when=[Empty("q/y/")], request_id="once")

    @pytest.mark.parametrize("prefix", ["", "/", "q", "q/x", "/x/", "q/\0/", "q/" + "x" * 1024 + "/", 7, None])
    async def test_what_is_no_prefix_of_whole_elements_is_invalid(self, subject: Subject, prefix: str) -> None:
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"1"), when=[Empty(prefix)])


async def _first(engine: Engine, actor: str) -> Receipt | None:
    try:
        return await engine.commit(SPACE, Batch(actor, (PLACE,), (Empty("q/x/"),)))
    except Conflict:
        return None
