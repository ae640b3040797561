"""Guarantee 6, requests: a repeated request gives the identical receipt and has no second effect."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast.engine import (
    REQUEST_WINDOW_MS,
    Absent,
    Batch,
    Delete,
    Increment,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.ids import new_id
from holdfast.testing.conformance.subject import ALICE, BOB, ELSEWHERE, SPACE, Subject

EVERY_OPERATION: tuple[Operation, ...] = (
    Put("a/put", b"1", ttl_ms=1000, tag="t"),
    Delete("a/there"),
    Delete("a/absent"),
    Increment("a/n", 2**53 + 1),
    Touch("a/put", 5000),
    Touch("a/forever", 5000),
    Push("p/", b'"pushed"'),
    Take("q/", "r/", n=2, source_counter="n/in", target_counter="n/out"),
    Take("none/", "r/"),
)


async def prepare(subject: Subject) -> None:
    """What EVERY_OPERATION works on."""
    await subject.commit(
        Put("a/there", b"1"),
        Put("a/forever", b"1"),
        Put("q/1", b'"a\\u0000b"', ttl_ms=9000, tag="job"),
        Put("q/2", b'{"big":18446744073709551615}', owner=BOB),
    )


class TestRequests:
    async def test_a_repeated_request_gives_the_identical_receipt_and_has_no_second_effect(
        self, subject: Subject
    ) -> None:
        await prepare(subject)
        first = await subject.commit(*EVERY_OPERATION, request_id="r-1")
        after_first = await subject.snapshot()
        for _ in range(3):
            assert await subject.commit(*EVERY_OPERATION, request_id="r-1") == first
        assert await subject.snapshot() == after_first
        assert [type(result) for result in first.results] == [
            type(None), bool, bool, int, int, type(None), str, list, list
        ]  # fmt: skip

    async def test_a_repeated_increment_counts_once(self, subject: Subject) -> None:
        receipts = [await subject.commit(Increment("a/n", 1), request_id="r") for _ in range(5)]
        assert receipts == [receipts[0]] * 5
        assert await subject.value("a/n") == b"1"

    async def test_a_repeated_request_is_answered_although_the_world_moved_on(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"), Increment("a/n", 1), when=[Absent("a/k")], request_id="r")
        await subject.commit(Put("a/k", b"2"), Delete("a/n"))
        subject.advance("10m")
        after = await subject.snapshot()
        assert (
            await subject.commit(Put("a/k", b"1"), Increment("a/n", 1), when=[Absent("a/k")], request_id="r") == first
        )
        assert await subject.snapshot() == after

    async def test_a_request_is_known_throughout_its_window_and_new_after_it(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 1), request_id="r")
        subject.advance_ms(REQUEST_WINDOW_MS - 1)
        assert await subject.commit(Increment("a/n", 1), request_id="r") == first
        subject.advance_ms(1)
        second = await subject.commit(Increment("a/n", 1), request_id="r")
        assert second.results == [2]
        assert second.version > first.version
        assert await subject.commit(Increment("a/n", 1), request_id="r") == second
        subject.advance_ms(REQUEST_WINDOW_MS)
        third = await subject.commit(Put("a/n", b"0"), request_id="r")
        assert third.version > second.version

    async def test_a_repeated_request_does_not_prolong_its_window(self, subject: Subject) -> None:
        await subject.commit(Increment("a/n", 1), request_id="r")
        subject.advance_ms(REQUEST_WINDOW_MS - 1)
        await subject.commit(Increment("a/n", 1), request_id="r")
        subject.advance_ms(1)
        assert (await subject.commit(Increment("a/n", 1), request_id="r")).results == [2]

    async def test_the_same_id_with_other_content_is_invalid(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"), when=[Absent("a/k")], request_id="r")
        others: list[tuple[tuple[Operation, ...], tuple[Absent | Present, ...]]] = [
            ((Put("a/k", b"2"),), (Absent("a/k"),)),
            ((Put("a/l", b"1"),), (Absent("a/k"),)),
            ((Put("a/k", b"1", ttl_ms=1000),), (Absent("a/k"),)),
            ((Put("a/k", b"1", tag="t"),), (Absent("a/k"),)),
            ((Put("a/k", b"1", owner=BOB),), (Absent("a/k"),)),
            ((Put("a/k", b"1"),), ()),
            ((Put("a/k", b"1"),), (Present("a/k"),)),
            ((Put("a/k", b"1"), Put("a/k", b"1")), (Absent("a/k"),)),
            ((Delete("a/k"),), (Absent("a/k"),)),
        ]
        for operations, conditions in others:
            async with subject.refused(InvalidInput):
                await subject.commit(*operations, when=conditions, request_id="r")
        assert await subject.commit(Put("a/k", b"1"), when=[Absent("a/k")], request_id="r") == first

    async def test_operations_that_look_alike_are_told_apart(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        await subject.commit(Touch("a/k", 5000), request_id="r")
        await subject.commit(Put("a/last", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Increment("a/k", 5000), request_id="r")

    async def test_a_request_id_belongs_to_its_actor(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 1), actor=ALICE, request_id="r")
        second = await subject.commit(Increment("a/n", 1), actor=BOB, request_id="r")
        third = await subject.commit(Put("a/k", b"1"), actor="carol", request_id="r")
        assert (first.results, second.results, third.results) == ([1], [2], [None])
        assert await subject.commit(Increment("a/n", 1), actor=BOB, request_id="r") == second
        assert await subject.commit(Increment("a/n", 1), actor=ALICE, request_id="r") == first

    async def test_actor_and_request_id_are_not_run_together(self, subject: Subject) -> None:
        await subject.commit(Increment("a/n", 1), actor="ab", request_id="c")
        assert (await subject.commit(Increment("a/n", 1), actor="a", request_id="bc")).results == [2]
        await subject.commit(Increment("a/n", 1), actor="a:b", request_id="c")
        assert (await subject.commit(Increment("a/n", 1), actor="a", request_id="b:c")).results == [4]

    async def test_a_request_id_belongs_to_its_space(self, subject: Subject) -> None:
        here = await subject.commit(Increment("a/n", 1), request_id="r")
        await subject.commit(Put("a/k", b"1"), space=ELSEWHERE)
        there = await subject.commit(Increment("a/n", 5), request_id="r", space=ELSEWHERE)
        assert (here.results, there.results) == ([1], [5])
        assert await subject.commit(Increment("a/n", 1), request_id="r") == here

    async def test_a_refused_request_is_not_remembered(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b'"x"'))
        async with subject.refused(Conflict):
            await subject.commit(Put("a/new", b"1"), when=[Absent("a/k")], request_id="r")
        async with subject.refused(InvalidInput):
            await subject.commit(Increment("a/k", 1), request_id="s")
        await subject.commit(Delete("a/k"))
        await subject.commit(Put("a/new", b"1"), when=[Absent("a/k")], request_id="r")
        assert (await subject.commit(Increment("a/k", 1), request_id="s")).results == [1]
        assert await subject.value("a/new") == b"1"

    async def test_a_request_that_changed_nothing_is_remembered_too(self, subject: Subject) -> None:
        first = await subject.commit(Delete("a/k"), request_id="delete")
        second = await subject.commit(Take("q/", "r/"), request_id="take")
        assert (first.results, second.results) == ([False], [[]])
        await subject.commit(Put("a/k", b"1"), Put("q/1", b"1"))
        assert await subject.commit(Delete("a/k"), request_id="delete") == first
        assert await subject.commit(Take("q/", "r/"), request_id="take") == second
        assert await subject.keys() == ["a/k", "q/1"]

    async def test_a_request_repeated_while_the_first_is_under_way_has_one_effect(self, subject: Subject) -> None:
        receipts = await asyncio.gather(
            *(subject.commit(Increment("a/n", 1), Push("p/", b"1"), request_id="r") for _ in range(10)),
            *(subject.commit(Increment("a/other", 1)) for _ in range(10)),
        )
        assert receipts[:10] == [receipts[0]] * 10
        assert await subject.value("a/n") == b"1"
        assert await subject.value("a/other") == b"10"
        assert len(await subject.keys("p/")) == 1

    async def test_of_two_batches_under_way_with_one_id_one_is_invalid(self, subject: Subject) -> None:
        outcomes = await asyncio.gather(
            subject.commit(Increment("a/n", 1), request_id="r"),
            subject.commit(Increment("a/n", 2), request_id="r"),
            return_exceptions=True,
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["InvalidInput", "Receipt"]
        [receipt] = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert await subject.value("a/n") == b"%d" % int(str(receipt.results[0]))

    async def test_a_request_repeated_in_the_group_that_refused_it_is_evaluated_again(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        outcomes = await asyncio.gather(
            subject.commit(Increment("a/n", 1), when=[Absent("a/k")], request_id="r"),
            subject.commit(Delete("a/k")),
            subject.commit(Increment("a/n", 1), when=[Absent("a/k")], request_id="r"),
            return_exceptions=True,
        )
        done = [outcome for outcome in (outcomes[0], outcomes[2]) if not isinstance(outcome, BaseException)]
        assert all(isinstance(outcome, Conflict) for outcome in outcomes if isinstance(outcome, BaseException))
        assert await subject.value("a/n") == (b"1" if done else None)
        final = await subject.commit(Increment("a/n", 1), when=[Absent("a/k")], request_id="r")
        assert final.results == [1]
        assert await subject.value("a/n") == b"1"

    async def test_a_repeat_through_another_engine_has_no_second_effect(self, subject: Subject) -> None:
        other = await subject.another()
        await prepare(subject)
        first = await subject.commit(*EVERY_OPERATION, request_id="r")
        assert await subject.commit(*EVERY_OPERATION, request_id="r", engine=other) == first
        with pytest.raises(InvalidInput):
            await subject.commit(Put("a/k", b"1"), request_id="r", engine=other)
        outcomes = await asyncio.gather(
            *(
                subject.commit(Increment("n/1", 1), request_id="s", engine=(subject.engine, other)[i % 2])
                for i in range(8)
            )
        )
        assert outcomes == [outcomes[0]] * 8
        assert await subject.value("n/1", engine=other) == b"1"

    async def test_a_repeat_after_a_reopen_has_no_second_effect(self, subject: Subject) -> None:
        await prepare(subject)
        first = await subject.commit(*EVERY_OPERATION, request_id="r")
        nothing = await subject.commit(Delete("a/absent"), request_id="no-op")
        await subject.commit(Put("a/last", b"1"))
        await subject.reopen()
        before = await subject.snapshot()
        assert await subject.commit(*EVERY_OPERATION, request_id="r") == first
        assert await subject.commit(Delete("a/absent"), request_id="no-op") == nothing
        assert await subject.snapshot() == before

    async def test_compaction_forgets_the_requests_it_removes_and_no_others(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 1), request_id="first")
        second = await subject.commit(Increment("a/n", 1), request_id="second")
        await subject.engine.compact(SPACE, first.version)
        assert await subject.commit(Increment("a/n", 1), request_id="second") == second
        assert (await subject.commit(Increment("a/n", 1), request_id="first")).results == [3]

    async def test_compaction_of_an_id_used_in_an_earlier_window_keeps_the_later_use(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 1), request_id="r")
        subject.advance_ms(REQUEST_WINDOW_MS)
        second = await subject.commit(Increment("a/n", 1), request_id="r")
        await subject.engine.compact(SPACE, first.version)
        assert await subject.commit(Increment("a/n", 1), request_id="r") == second
        assert await subject.value("a/n") == b"2"

    async def test_a_dropped_space_forgets_its_requests(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 1), request_id="r")
        await subject.engine.drop(SPACE)
        second = await subject.commit(Increment("a/n", 5), request_id="r")
        assert second.results == [5]
        assert second.version > first.version

    async def test_a_stale_holder_who_repeats_a_conditional_request_learns_that_it_was_done(
        self, subject: Subject
    ) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        swap = (Put("a/k", b"2"),)
        done = await subject.commit(*swap, when=[VersionIs("a/k", first.version)], request_id="swap")
        await subject.commit(Put("a/k", b"3"))
        assert await subject.commit(*swap, when=[VersionIs("a/k", first.version)], request_id="swap") == done
        assert await subject.value("a/k") == b"3"

    async def test_a_receipt_changed_by_its_reader_stays_what_it_was(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b"1"))
        batch = (Increment("a/n", 1), Take("q/", "r/"))
        first = await subject.commit(*batch, request_id="r")
        expected = list(first.results)
        moved = first.results[1]
        assert isinstance(moved, list)
        expected[1] = list(moved)
        for _ in range(2):
            careless = await subject.commit(*batch, request_id="r")
            assert careless.results == expected
            inner = careless.results[1]
            assert isinstance(inner, list)
            inner.clear()
            careless.results.clear()
        moved.clear()
        first.results.clear()
        assert (await subject.commit(*batch, request_id="r")).results == expected

    async def test_a_fresh_request_is_known_when_it_is_repeated(self, subject: Subject) -> None:
        await prepare(subject)
        batch = Batch(ALICE, EVERY_OPERATION, (), new_id(), fresh=True)
        first = await subject.engine.commit(SPACE, batch)
        for number in range(5):
            await subject.commit(Put(f"a/later-{number}", b"1"))
        after = await subject.snapshot()
        again = msgspec.structs.replace(batch, fresh=False)
        for _ in range(3):
            assert await subject.engine.commit(SPACE, again) == first
        assert await subject.snapshot() == after
        with pytest.raises(InvalidInput):
            await subject.engine.commit(SPACE, msgspec.structs.replace(again, operations=(Put("a/other", b"1"),)))
        assert await subject.snapshot() == after

    @pytest.mark.parametrize("commits", [0, 2])
    async def test_a_fresh_request_repeated_while_the_first_is_under_way_has_one_effect(
        self, subject: Subject, commits: int
    ) -> None:
        """Also in a space that is new: an engine that looks for it first must keep the order in which batches came."""
        for _ in range(commits):
            await subject.commit(Put("a/k", b"1"))
        for turns in range(4):
            batches = [
                Batch(ALICE, (Increment("a/n", 1), Push("p/", b"1")), (), new_id(), fresh=True),
                Batch(ALICE, (Put(f"a/{turns}", b"1"),), (), new_id(), fresh=True),
            ]
            first = [asyncio.ensure_future(subject.engine.commit(SPACE, batch)) for batch in batches]
            others = [asyncio.ensure_future(subject.commit(Increment("a/other", 1))) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            again = [msgspec.structs.replace(batch, fresh=False) for batch in batches * 2]
            answers = await asyncio.gather(*(subject.engine.commit(SPACE, batch) for batch in again))
            assert answers == [await each for each in first] * 2
            await asyncio.gather(*others)
            for batch, answer in zip(again, answers, strict=True):
                assert await subject.engine.commit(SPACE, batch) == answer, "nor when it comes once more, alone"
            assert await subject.value("a/n") == b"%d" % (turns + 1)
            assert len(await subject.keys("p/")) == turns + 1

    async def test_a_fresh_request_belongs_to_its_actor_and_space(self, subject: Subject) -> None:
        batch = Batch(ALICE, (Increment("a/n", 1),), (), new_id(), fresh=True)
        await subject.engine.commit(SPACE, batch)
        again = msgspec.structs.replace(batch, fresh=False)
        assert (await subject.engine.commit(SPACE, msgspec.structs.replace(again, actor=BOB))).results == [2]
        assert (await subject.engine.commit(ELSEWHERE, again)).results == [1]
        assert (await subject.engine.commit(SPACE, again)).results == [1]

    async def test_a_generated_id_that_was_never_sent_is_new(self, subject: Subject) -> None:
        batch = Batch(ALICE, (Increment("a/n", 1),), (), new_id())
        receipt = await subject.engine.commit(SPACE, batch)
        assert receipt.results == [1]
        assert await subject.engine.commit(SPACE, batch) == receipt

    @pytest.mark.parametrize("patience_ms", [1, 10**9, -1])
    async def test_a_patient_batch_has_the_same_outcome(self, subject: Subject, patience_ms: int) -> None:
        """Alone and in company, however long it says it would wait; what a request id stands for does not tell of it."""
        batch = Batch(ALICE, (Increment("a/n", 1),), (), "r", patience_ms=patience_ms)
        alone = await subject.engine.commit(SPACE, batch)
        assert (alone.version, alone.results) == (await subject.revision(), [1])
        assert await subject.engine.commit(SPACE, msgspec.structs.replace(batch, patience_ms=0)) == alone
        others = msgspec.structs.replace(batch, request_id=None)
        hasty = msgspec.structs.replace(others, patience_ms=0)
        receipts = await asyncio.gather(
            *(subject.engine.commit(SPACE, each) for each in (others, others, hasty, others))
        )
        assert sorted(receipt.results[0] for receipt in receipts) == [2, 3, 4, 5]  # type: ignore[type-var]
        refused = msgspec.structs.replace(others, conditions=(Absent("a/n"),))
        async with subject.refused(Conflict):
            await subject.engine.commit(SPACE, refused)
