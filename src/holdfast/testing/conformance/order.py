"""Guarantee 1, total order: commits one after the other, all or nothing, and reads that know of every commit before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from holdfast.engine import (
    Absent,
    AtLeast,
    Condition,
    Delete,
    Increment,
    Mine,
    Present,
    Put,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.testing.conformance.subject import ALICE, BOB, Subject

WRITERS = 64

STATES = ("present", "absent", "expired")

CONDITIONS: dict[str, tuple[Callable[[int], Condition], frozenset[str]]] = {
    "absent": (lambda version: Absent("a/k"), frozenset({"absent", "expired"})),
    "present": (lambda version: Present("a/k"), frozenset({"present"})),
    "its version": (lambda version: VersionIs("a/k", version), frozenset({"present"})),
    "another version": (lambda version: VersionIs("a/k", version - 1), frozenset()),
    "version zero": (lambda version: VersionIs("a/k", 0), frozenset()),
    "its value": (lambda version: ValueIs("a/k", b"5"), frozenset({"present"})),
    "another value": (lambda version: ValueIs("a/k", b"5.0"), frozenset()),
    "at least its number": (lambda version: AtLeast("a/k", 5), frozenset({"present"})),
    "at least one more": (lambda version: AtLeast("a/k", 6), frozenset()),
    "at least zero": (lambda version: AtLeast("a/k", 0), frozenset(STATES)),
    "at least minus one": (lambda version: AtLeast("a/k", -1), frozenset(STATES)),
    "mine": (lambda version: Mine("a/k"), frozenset(STATES)),
}
"""By name: the condition on a key whose value is 5, given its version, and the states of the key in which it holds."""

CONDITION_NAMES = {
    Absent: "absent",
    Present: "present",
    VersionIs: "version",
    ValueIs: "value",
    AtLeast: "at_least",
    Mine: "mine",
}


async def key_in_state(subject: Subject, state: str) -> int:
    """Bring a/k, with the value 5, into a state; gives its version."""
    version = 1
    if state != "absent":
        version = (await subject.commit(Put("a/k", b"5", ttl_ms=1000 if state == "expired" else None))).version
    if state == "expired":
        subject.advance_ms(1000)
    return version


class TestConditions:
    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("name", CONDITIONS)
    async def test_a_batch_is_committed_exactly_if_its_condition_holds(
        self, subject: Subject, name: str, state: str
    ) -> None:
        await subject.commit(Put("a/other", b"0"))
        version = await key_in_state(subject, state)
        make, holds_in = CONDITIONS[name]
        condition = make(version)
        if state in holds_in:
            await subject.commit(Put("a/written", b"1"), when=[condition])
            assert await subject.value("a/written") == b"1"
        else:
            there = await subject.get("a/k")
            async with subject.refused(Conflict) as caught:
                await subject.commit(Put("a/written", b"1"), when=[condition])
            assert isinstance(caught.value, Conflict)
            assert caught.value.key == "a/k"
            assert caught.value.condition == CONDITION_NAMES[type(condition)]
            assert caught.value.actual == there

    async def test_commit_refused_by_a_stale_condition_changes_nothing(self, subject: Subject) -> None:
        old = await subject.commit(Put("a/k", b"1"))
        new = await subject.commit(Put("a/k", b"2"))
        async with subject.refused(Conflict) as caught:
            await subject.commit(
                Put("a/k", b"3"), Delete("a/k"), Increment("a/n", 1), when=[VersionIs("a/k", old.version)]
            )
        assert isinstance(caught.value, Conflict)
        assert caught.value.actual is not None
        assert caught.value.actual.version == new.version

    async def test_one_false_condition_among_true_ones_refuses_the_batch(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b"1"), Put("a/2", b"2"))
        async with subject.refused(Conflict) as caught:
            await subject.commit(
                Put("a/3", b"3"), when=[Present("a/1"), AtLeast("a/2", 2), Absent("a/2"), Absent("a/4")]
            )
        assert isinstance(caught.value, Conflict)
        assert (caught.value.key, caught.value.condition) == ("a/2", "absent")

    async def test_conditions_see_the_state_before_the_batch(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/k", b"1"), when=[Absent("a/k")])
        assert (await subject.entry("a/k")).version == receipt.version
        async with subject.refused(Conflict):
            await subject.commit(Delete("a/k"), Put("a/k", b"2"), when=[Absent("a/k")])

    async def test_conditions_without_operations_answer_and_write_nothing(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        before = await subject.snapshot()
        receipt = await subject.commit(when=[Present("a/k"), Absent("a/none")])
        assert receipt.results == []
        assert receipt.version == await subject.revision()
        assert await subject.snapshot() == before
        async with subject.refused(Conflict):
            await subject.commit(when=[Absent("a/k")])

    @pytest.mark.parametrize("value", [b'"5"', b"5.0", b"01", b"-0", b"9223372036854775808", b"null", b"[1]"])
    async def test_at_least_on_what_is_no_integer_is_invalid(self, subject: Subject, value: bytes) -> None:
        await subject.commit(Put("a/k", value))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/written", b"1"), when=[AtLeast("a/k", 0)])

    async def test_at_least_compares_exactly_beyond_the_precision_of_floats(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"9007199254740993"))
        await subject.commit(Put("a/written", b"1"), when=[AtLeast("a/k", 2**53 + 1)])
        async with subject.refused(Conflict):
            await subject.commit(Put("a/written", b"2"), when=[AtLeast("a/k", 2**53 + 2)])

    async def test_at_least_compares_at_the_edges_of_64_bits(self, subject: Subject) -> None:
        await subject.commit(Put("a/low", b"-9223372036854775808"), Put("a/high", b"9223372036854775807"))
        await subject.commit(Put("a/w", b"1"), when=[AtLeast("a/low", -(2**63)), AtLeast("a/high", 2**63 - 1)])
        async with subject.refused(Conflict):
            await subject.commit(Put("a/w", b"2"), when=[AtLeast("a/low", -(2**63) + 1)])


class TestOwnership:
    async def test_mine_holds_for_the_owner_and_for_nobody_else(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"), Put("a/given", b"1", owner=BOB), actor=ALICE)
        await subject.commit(Put("a/k", b"2"), when=[Mine("a/k")], actor=ALICE)
        await subject.commit(Put("a/given", b"2"), when=[Mine("a/given")], actor=BOB)
        for operation in (Put("a/k", b"3"), Delete("a/k"), Increment("a/k", 1), Touch("a/k", 1000)):
            async with subject.refused(Conflict) as caught:
                await subject.commit(operation, when=[Mine("a/k")], actor=BOB)
            conflict = caught.value
            assert isinstance(conflict, Conflict)
            assert (conflict.key, conflict.condition) == ("a/k", "mine")
            assert conflict.actual == await subject.get("a/k")

    async def test_mine_holds_for_everybody_once_the_entry_is_gone(self, subject: Subject) -> None:
        await subject.commit(Put("a/deleted", b"1"), Put("a/expired", b"1", ttl_ms=1000), actor=ALICE)
        async with subject.refused(Conflict):
            await subject.commit(Put("a/expired", b"2"), when=[Mine("a/expired")], actor=BOB)
        await subject.commit(Delete("a/deleted"), actor=ALICE)
        subject.advance_ms(1000)
        mine = [Mine("a/deleted"), Mine("a/expired"), Mine("a/never")]
        await subject.commit(Put("a/expired", b"2"), when=mine, actor=BOB)
        async with subject.refused(Conflict):
            await subject.commit(when=mine, actor=ALICE)

    async def test_mine_follows_the_owner_through_increments_and_takes(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b"1"), Put("a/n", b"1"), actor=ALICE)
        await subject.commit(Increment("a/n", 1), Take("q/", "r/"), actor=BOB)
        await subject.commit(when=[Mine("a/n"), Mine("q/1")], actor=ALICE)
        await subject.commit(when=[Mine("r/1")], actor=BOB)
        async with subject.refused(Conflict):
            await subject.commit(when=[Mine("r/1")], actor=ALICE)
        async with subject.refused(Conflict):
            await subject.commit(when=[Mine("a/n")], actor=BOB)

    async def test_a_key_that_many_claim_at_once_has_one_owner(self, subject: Subject) -> None:
        names = [f"agent-{i % 8}" for i in range(WRITERS)]
        outcomes = await asyncio.gather(
            *(subject.commit(Put("a/k", b"1"), when=[Mine("a/k")], actor=name) for name in names),
            return_exceptions=True,
        )
        assert all(not isinstance(each, BaseException) or isinstance(each, Conflict) for each in outcomes)
        winners = {name for name, each in zip(names, outcomes, strict=True) if not isinstance(each, BaseException)}
        assert winners == {(await subject.entry("a/k")).owner}


class TestTotalOrder:
    async def test_every_commit_gets_a_higher_version_and_gives_it_to_what_it_wrote(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/1", b"1"), Put("a/2", b"2"))
        second = await subject.commit(Put("a/2", b"3"), Increment("a/3", 1))
        assert second.version > first.version > 0
        versions = {entry.key: entry.version for entry in await subject.entries()}
        assert versions == {"a/1": first.version, "a/2": second.version, "a/3": second.version}
        assert await subject.revision() == second.version

    async def test_operations_of_a_batch_see_those_before_them(self, subject: Subject) -> None:
        receipt = await subject.commit(
            Put("a/n", b"5"),
            Increment("a/n", 2),
            Delete("a/n"),
            Delete("a/n"),
            Increment("a/n", 1),
            Put("a/t", b"1", ttl_ms=1000),
            Touch("a/t", 5000),
        )
        assert receipt.results == [None, 7, True, False, 1, None, receipt.at + 5000]
        assert await subject.value("a/n") == b"1"
        assert (await subject.entry("a/t")).expires_at == receipt.at + 5000

    async def test_an_operation_that_fails_undoes_those_before_it(self, subject: Subject) -> None:
        await subject.commit(Put("a/text", b'"x"'), Put("a/gone", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/new", b"1"), Delete("a/gone"), Increment("a/n", 1), Increment("a/text", 1))
        async with subject.refused(Conflict):
            await subject.commit(Put("a/new", b"1"), Delete("a/gone"), Touch("a/never", 1000))

    async def test_what_one_batch_was_refused_is_no_part_of_the_next(self, subject: Subject) -> None:
        await subject.commit(Put("a/text", b'"x"'))
        refused, done = await asyncio.gather(
            subject.commit(Put("a/n", b"100"), Increment("a/text", 1)),
            subject.commit(Increment("a/n", 1)),
            return_exceptions=True,
        )
        assert isinstance(refused, InvalidInput)
        assert not isinstance(done, BaseException)
        assert done.results == [1]
        assert await subject.value("a/n") == b"1"

    async def test_concurrent_increments_are_all_counted(self, subject: Subject) -> None:
        receipts = await asyncio.gather(*(subject.commit(Increment("a/n", 1)) for _ in range(WRITERS)))
        assert sorted(receipt.results[0] for receipt in receipts) == list(range(1, WRITERS + 1))  # type: ignore[type-var]
        assert await subject.value("a/n") == b"%d" % WRITERS
        by_version = sorted(receipts, key=lambda receipt: receipt.version)
        assert len({receipt.version for receipt in receipts}) == WRITERS
        assert [receipt.results[0] for receipt in by_version] == list(range(1, WRITERS + 1))

    async def test_increments_through_two_engines_are_all_counted(self, subject: Subject) -> None:
        other = await subject.another()
        receipts = await asyncio.gather(
            *(subject.commit(Increment("a/n", 1), engine=(subject.engine, other)[i % 2]) for i in range(WRITERS))
        )
        by_version = sorted(receipts, key=lambda receipt: receipt.version)
        assert [receipt.results[0] for receipt in by_version] == list(range(1, WRITERS + 1))
        assert await subject.value("a/n") == b"%d" % WRITERS

    async def test_concurrent_compare_and_swap_has_exactly_one_winner(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/leader", b"0"))
        outcomes = await asyncio.gather(
            *(
                subject.commit(Put("a/leader", b"%d" % i), when=[VersionIs("a/leader", first.version)], actor=f"w{i}")
                for i in range(1, WRITERS)
            ),
            return_exceptions=True,
        )
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
        [winner] = [(i, outcome) for i, outcome in enumerate(outcomes, 1) if not isinstance(outcome, BaseException)]
        assert len(refusals) == WRITERS - 2
        leader = await subject.entry("a/leader")
        assert (leader.value, leader.owner) == (b"%d" % winner[0], f"w{winner[0]}")
        assert all(refusal.actual == leader for refusal in refusals)

    async def test_compare_and_swap_through_two_engines_has_exactly_one_winner(self, subject: Subject) -> None:
        other = await subject.another()
        for turn in range(8):
            outcomes = await asyncio.gather(
                *(
                    subject.commit(
                        Put(f"a/{turn}", b"%d" % i), when=[Absent(f"a/{turn}")], engine=(subject.engine, other)[i % 2]
                    )
                    for i in range(8)
                ),
                return_exceptions=True,
            )
            assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1
            assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 7

    async def test_a_resource_is_never_given_out_more_often_than_it_exists(self, subject: Subject) -> None:
        await subject.commit(Put("a/available", b"5"))
        outcomes = await asyncio.gather(
            *(
                subject.commit(Increment("a/available", -1), Put(f"b/{i}", b"1"), when=[AtLeast("a/available", 1)])
                for i in range(WRITERS)
            ),
            return_exceptions=True,
        )
        assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 5
        assert await subject.value("a/available") == b"0"
        assert len(await subject.keys("b/")) == 5

    async def test_a_read_shows_every_commit_acknowledged_before_it(self, subject: Subject) -> None:
        for i in range(20):
            receipt = await subject.commit(Put("a/k", b"%d" % i), Increment("a/n", 1))
            [k, n] = await subject.engine.get("conformance", ["a/k", "a/n"])
            assert k is not None
            assert n is not None
            assert (k.value, k.version) == (b"%d" % i, receipt.version)
            assert (n.value, n.version) == (b"%d" % (i + 1), receipt.version)
            page = await subject.engine.scan("conformance", "a/")
            assert [entry.version for entry in page.entries] == [receipt.version] * 2
            assert page.revision == receipt.version
        await subject.commit(Delete("a/k"))
        assert await subject.get("a/k") is None
        assert await subject.keys("a/") == ["a/n"]

    async def test_a_read_shows_every_commit_acknowledged_by_another_engine(self, subject: Subject) -> None:
        other = await subject.another()
        for i in range(20):
            writer, reader = (subject.engine, other) if i % 2 else (other, subject.engine)
            receipt = await subject.commit(Put("a/k", b"%d" % i), engine=writer)
            entry = await subject.get("a/k", engine=reader)
            assert entry is not None
            assert (entry.value, entry.version) == (b"%d" % i, receipt.version)
            assert (await reader.scan("conformance", "a/")).revision == receipt.version
        await subject.commit(Delete("a/k"), engine=other)
        assert await subject.get("a/k") is None

    async def test_readers_never_see_half_a_batch(self, subject: Subject) -> None:
        pair = ["a/left", "b/right"]
        done = asyncio.Event()

        async def write() -> None:
            for i in range(50):
                await subject.commit(Put(pair[0], b"%d" % i), Put(pair[1], b"%d" % i), actor=(ALICE, BOB)[i % 2])
                await asyncio.sleep(0)
            done.set()

        async def read() -> None:
            while not done.is_set():
                left, right = await subject.engine.get("conformance", pair)
                assert (left and (left.value, left.version)) == (right and (right.value, right.version))
                entries = (await subject.engine.scan("conformance", "")).entries
                assert len({(entry.value, entry.version) for entry in entries}) <= 1
                await asyncio.sleep(0)

        await asyncio.wait_for(asyncio.gather(write(), read(), read()), subject.deadline_s)
