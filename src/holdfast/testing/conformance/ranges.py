"""The two operations on ordered ranges: push, which assigns ids, and take, which moves the first entries of a prefix."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import (
    TAKE_MAX,
    Delete,
    Entry,
    Increment,
    Push,
    Put,
    Receipt,
    Take,
)
from holdfast.errors import InvalidInput
from holdfast.keys import KEY_BYTES_MAX
from holdfast.testing.conformance.subject import ALICE, BOB, Subject

ID_DIGITS = 19


def pushed(receipt: Receipt) -> list[str]:
    """The keys a batch of pushes was given."""
    keys = [result for result in receipt.results if isinstance(result, str)]
    assert len(keys) == len(receipt.results)
    return keys


def taken(receipt: Receipt) -> list[Entry]:
    """What the only operation of a batch, a take, moved."""
    [entries] = receipt.results
    assert isinstance(entries, list)
    return entries


class TestPush:
    async def test_push_writes_under_an_id_of_19_digits_and_gives_the_key(self, subject: Subject) -> None:
        receipt = await subject.commit(Push("q/in/", b'"m"', ttl_ms=1000, tag="mail"), actor=BOB)
        [key] = pushed(receipt)
        assert key.startswith("q/in/")
        digits = key.removeprefix("q/in/")
        assert len(digits) == ID_DIGITS
        assert digits.isdecimal()
        assert await subject.get(key) == Entry(
            key, b'"m"', receipt.version, BOB, receipt.at, receipt.at, receipt.at + 1000, "mail"
        )

    async def test_ids_ascend_within_a_batch_and_from_batch_to_batch(self, subject: Subject) -> None:
        keys: list[str] = []
        for turn in range(5):
            keys += pushed(await subject.commit(*(Push("q/", b"%d" % i) for i in range(20))))
            if turn == 2:
                subject.advance("1s")
        assert keys == sorted(set(keys))
        assert await subject.keys("q/") == keys

    async def test_ids_are_unique_in_the_space_whatever_their_prefix(self, subject: Subject) -> None:
        keys = pushed(await subject.commit(*(Push(f"{'qrs'[i % 3]}/", b"1") for i in range(30))))
        ids = [key[2:] for key in keys]
        assert ids == sorted(set(ids))

    async def test_ids_ascend_although_the_clock_goes_back(self, subject: Subject) -> None:
        keys: list[str] = []
        for _ in range(5):
            keys += pushed(await subject.commit(Push("q/", b"1"), Push("q/", b"2")))
            subject.set_back("1h")
        assert keys == sorted(set(keys))

    async def test_an_id_is_not_given_again_after_its_entry_is_gone(self, subject: Subject) -> None:
        keys: list[str] = []
        for _ in range(4):
            [key] = pushed(await subject.commit(Push("q/", b"1")))
            await subject.commit(Delete(key))
            keys.append(key)
        [expiring] = pushed(await subject.commit(Push("q/", b"1", ttl_ms=1)))
        subject.advance_ms(1)
        keys += [expiring, *pushed(await subject.commit(Push("q/", b"1")))]
        assert keys == sorted(set(keys))

    async def test_a_refused_push_leaves_nothing(self, subject: Subject) -> None:
        [first] = pushed(await subject.commit(Push("q/", b"1")))
        async with subject.refused(InvalidInput):
            await subject.commit(Push("q/", b"2"), Increment(first, 2**63 - 1))
        [second] = pushed(await subject.commit(Push("q/", b"3")))
        assert await subject.keys("q/") == [first, second]

    async def test_concurrent_pushes_are_ordered_as_their_versions(self, subject: Subject) -> None:
        receipts = await asyncio.gather(*(subject.commit(Push("q/", b"%d" % i)) for i in range(40)))
        by_version = sorted(receipts, key=lambda receipt: receipt.version)
        assert [receipt.results[0] for receipt in by_version] == await subject.keys("q/")
        assert len(await subject.keys("q/")) == 40

    async def test_ids_ascend_across_two_engines(self, subject: Subject) -> None:
        other = await subject.another()
        keys: list[str] = []
        for i in range(20):
            keys += pushed(await subject.commit(Push("q/", b"1"), engine=(subject.engine, other)[i % 2]))
        assert keys == sorted(set(keys))

    async def test_ids_ascend_across_a_reopen_with_the_clock_set_back(self, subject: Subject) -> None:
        before = pushed(await subject.commit(Push("q/", b"1"), Push("q/", b"2")))
        await subject.reopen()
        subject.set_back("1h")
        after = pushed(await subject.commit(Push("q/", b"3")))
        assert before[-1] < after[0]


class TestTake:
    async def test_take_moves_the_first_entries_in_key_order(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"q/{i}", b"%d" % i) for i in (3, 1, 4, 2)))
        receipt = await subject.commit(Take("q/", "r/bob/", n=2), actor=BOB)
        assert [(entry.key, entry.value) for entry in taken(receipt)] == [("r/bob/1", b"1"), ("r/bob/2", b"2")]
        assert await subject.keys() == ["q/3", "q/4", "r/bob/1", "r/bob/2"]
        assert await subject.entries("r/") == taken(receipt)

    async def test_a_taken_entry_has_a_new_version_and_owner_and_keeps_the_rest(self, subject: Subject) -> None:
        first = await subject.commit(Put("q/1", b'{"job":1}', ttl_ms=60_000, tag="job"), actor=ALICE)
        subject.advance("1s")
        receipt = await subject.commit(Take("q/", "r/"), actor=BOB)
        expected = Entry("r/1", b'{"job":1}', receipt.version, BOB, first.at, first.at + 1000, first.at + 60_000, "job")
        assert receipt.version > first.version
        assert taken(receipt) == [expected]
        assert await subject.entries() == [expected]

    async def test_take_gives_what_there_is(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b"1"), Put("q/2", b"2"))
        receipt = await subject.commit(Take("q/", "r/", n=TAKE_MAX))
        assert [entry.key for entry in taken(receipt)] == ["r/1", "r/2"]

    async def test_take_from_nothing_gives_nothing_and_is_no_write(self, subject: Subject) -> None:
        await subject.commit(Put("n/in", b"0"), Put("p/1", b"1"), Put("r/1", b"1"))
        before = await subject.snapshot()
        receipt = await subject.commit(Take("q/", "r/", source_counter="n/in", target_counter="n/out"))
        assert (receipt.version, taken(receipt)) == (await subject.revision(), [])
        assert await subject.snapshot() == before

    async def test_take_stops_below_upto(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"q/{i}", b"%d" % i) for i in range(1, 6)))
        first = await subject.commit(Take("q/", "r/", n=10, upto="q/3"))
        assert [entry.key for entry in taken(first)] == ["r/1", "r/2"]
        assert taken(await subject.commit(Take("q/", "r/", n=10, upto="q/3"))) == []
        third = await subject.commit(Take("q/", "r/", n=1, upto="q/9"))
        assert [entry.key for entry in taken(third)] == ["r/3"]
        assert await subject.keys("q/") == ["q/4", "q/5"]

    async def test_take_adjusts_its_counters_by_what_it_moved(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"q/{i}", b"1") for i in range(3)), Put("n/in", b"3", tag="count"), actor=BOB)
        counters = {"source_counter": "n/in", "target_counter": "n/out"}
        receipt = await subject.commit(Take("q/", "r/", n=2, **counters))
        assert len(taken(receipt)) == 2
        assert (await subject.value("n/in"), await subject.value("n/out")) == (b"1", b"2")
        counter = await subject.entry("n/in")
        assert (counter.owner, counter.tag, counter.version) == (BOB, "count", receipt.version)
        await subject.commit(Take("q/", "r/", n=2, **counters))
        assert (await subject.value("n/in"), await subject.value("n/out")) == (b"0", b"3")

    @pytest.mark.parametrize("field", ["source_counter", "target_counter"])
    async def test_take_with_a_counter_that_is_no_number_is_invalid(self, subject: Subject, field: str) -> None:
        await subject.commit(Put("q/1", b"1"), Put("n/x", b'"x"'))
        async with subject.refused(InvalidInput):
            await subject.commit(Take("q/", "r/", **{field: "n/x"}))  # type: ignore[arg-type]

    async def test_expired_entries_are_not_taken(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"q/{i}", b"%d" % i, ttl_ms=1000 if i % 2 else None) for i in range(6)))
        subject.advance_ms(1000)
        receipt = await subject.commit(Take("q/", "r/", n=2))
        assert [entry.key for entry in taken(receipt)] == ["r/0", "r/2"]
        assert await subject.keys() == ["q/4", "r/0", "r/2"]

    async def test_take_finds_live_entries_behind_many_expired_ones(self, subject: Subject) -> None:
        for start in range(0, 600, 100):
            await subject.commit(*(Put(f"q/{i:04d}", b"1", ttl_ms=1000) for i in range(start, start + 100)))
        await subject.commit(Put("q/9999", b'"live"'))
        subject.advance_ms(1000)
        receipt = await subject.commit(Take("q/", "r/", n=3))
        assert [entry.key for entry in taken(receipt)] == ["r/9999"]

    async def test_an_entry_taken_with_a_ttl_still_expires(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b"1", ttl_ms=1000))
        await subject.commit(Take("q/", "r/"))
        subject.advance_ms(1000)
        assert await subject.get("r/1") is None

    async def test_take_sees_what_its_own_batch_wrote_before(self, subject: Subject) -> None:
        await subject.commit(Put("q/2", b"2"), Put("q/3", b"3"), Put("q/5", b"5"))
        receipt = await subject.commit(
            Delete("q/2"),
            Put("q/4", b"4"),
            Put("q/1", b"1"),
            Take("q/", "r/", n=2),
            Take("q/", "s/", n=2),
            Take("r/", "q/", n=1),
            Take("q/", "t/", n=9),
        )
        moved = [[entry.key for entry in result] for result in receipt.results if isinstance(result, list)]
        assert moved == [["r/1", "r/3"], ["s/4", "s/5"], ["q/1"], ["t/1"]]
        assert await subject.keys() == ["r/3", "s/4", "s/5", "t/1"]

    async def test_take_sees_what_its_own_batch_pushed(self, subject: Subject) -> None:
        receipt = await subject.commit(Push("q/", b"1"), Push("q/", b"2"), Take("q/", "r/", n=1), Take("q/", "r/", n=9))
        assert await subject.keys("q/") == []
        assert [entry.value for entry in await subject.entries("r/")] == [b"1", b"2"]
        assert [len(result) for result in receipt.results if isinstance(result, list)] == [1, 1]

    async def test_take_onto_an_entry_replaces_it(self, subject: Subject) -> None:
        await subject.commit(Put("q/1", b'"moved"', tag="new"), actor=ALICE)
        await subject.commit(Put("r/1", b'"old value"', tag="old"), actor=BOB)
        receipt = await subject.commit(Take("q/", "r/"), actor="carol")
        assert await subject.entries() == taken(receipt)
        assert taken(receipt)[0].value == b'"moved"'
        assert await subject.usage() == {("carol", "r"): (1, len("r/1") + len('"moved"'))}

    async def test_a_taken_key_that_would_grow_too_long_is_invalid(self, subject: Subject) -> None:
        long = "x" * (KEY_BYTES_MAX - len("q/"))
        await subject.commit(Put("q/" + long, b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"1"), Take("q/", "rr/"))
        await subject.commit(Take("q/", "r/"))
        assert await subject.keys() == ["r/" + long]

    @pytest.mark.parametrize("source", ["q%/", "q_/", "q*/", "q?/", "q[a-z]/", "q{1}/", "q\\/", "q'/", "q:/"])
    async def test_wildcards_in_a_prefix_are_ordinary_characters(self, subject: Subject, source: str) -> None:
        await subject.commit(Put("qa/1", b"1"), Put("qab/1", b"1"), Put("Q%/1", b"1"), Put(source + "1", b'"this"'))
        receipt = await subject.commit(Take(source, "r/", n=9))
        assert [entry.value for entry in taken(receipt)] == [b'"this"']
        assert len(await subject.keys()) == 4

    async def test_take_does_not_reach_into_a_longer_name(self, subject: Subject) -> None:
        await subject.commit(Put("q/a", b"1"), Put("q0/a", b"1"), Put("q-/a", b"1"), Put("q//a", b"1"))
        receipt = await subject.commit(Take("q/", "r/", n=9))
        assert [entry.key for entry in taken(receipt)] == ["r//a", "r/a"]
        assert await subject.keys("q") == ["q-/a", "q0/a"]

    @pytest.mark.parametrize(("source", "target"), [("q/", "q/"), ("q/", "q/done/"), ("q/done/", "q/")])
    async def test_take_between_overlapping_prefixes_is_invalid(
        self, subject: Subject, source: str, target: str
    ) -> None:
        await subject.commit(Put("q/1", b"1"), Put("q/done/1", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Take(source, target))

    @pytest.mark.parametrize("n", [0, -1, TAKE_MAX + 1, 1.0, True, "1"])
    async def test_take_of_an_impossible_number_is_invalid(self, subject: Subject, n: int) -> None:
        await subject.commit(Put("q/1", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Take("q/", "r/", n=n))

    async def test_concurrent_takers_share_the_entries_without_loss_or_double(self, subject: Subject) -> None:
        await subject.commit(*(Push("q/", b"%d" % i) for i in range(100)))
        receipts = await asyncio.gather(
            *(subject.commit(Take("q/", f"r/{i:02d}/", n=3, target_counter="n/out"), actor=f"w{i}") for i in range(40))
        )
        values = [entry.value for receipt in receipts for entry in taken(receipt)]
        assert sorted(map(int, values)) == list(range(100))
        assert await subject.keys("q/") == []
        assert await subject.value("n/out") == b"100"
        in_order = sorted((receipt for receipt in receipts if taken(receipt)), key=lambda receipt: receipt.version)
        assert [int(entry.value) for receipt in in_order for entry in taken(receipt)] == list(range(100))
