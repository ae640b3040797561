"""What the operations on single keys do and answer, which numbers count as numbers, and that values stay what they are."""

from __future__ import annotations

import pytest

from holdfast import codec
from holdfast.engine import (
    FEED_VALUE_BYTES_MAX,
    VALUE_BYTES_MAX,
    Absent,
    Delete,
    Entry,
    Increment,
    Put,
    ValueIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.testing.conformance.subject import ALICE, BOB, Subject

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


class TestOperations:
    async def test_put_creates_an_entry_with_all_its_fields(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/k", b'{"x":1}', ttl_ms=5000, tag="kind", owner=BOB))
        now = subject.clock.now_ms() if subject.capabilities.manual_time else receipt.at
        assert (receipt.at, receipt.results) == (now, [None])
        assert await subject.get("a/k") == Entry(
            key="a/k",
            value=b'{"x":1}',
            version=receipt.version,
            owner=BOB,
            created_at=now,
            updated_at=now,
            expires_at=now + 5000,
            tag="kind",
        )

    async def test_put_replaces_everything_but_the_time_of_creation(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=60_000, tag="old", owner=BOB))
        subject.advance("1s")
        second = await subject.commit(Put("a/k", b"2"))
        assert await subject.get("a/k") == Entry("a/k", b"2", second.version, ALICE, first.at, first.at + 1000)

    async def test_put_of_the_same_value_is_a_write(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        second = await subject.commit(Put("a/k", b"1"))
        assert second.version > first.version
        assert (await subject.entry("a/k")).version == second.version
        assert len(await subject.changes(after=first.version)) == 1

    async def test_put_belongs_to_the_actor_unless_an_owner_is_named(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b"1"), Put("a/2", b"1", owner=BOB), actor=ALICE)
        await subject.commit(Put("a/1", b"2"), actor=BOB)
        assert [(entry.key, entry.owner) for entry in await subject.entries()] == [("a/1", BOB), ("a/2", BOB)]

    async def test_delete_removes_the_entry_and_says_that_it_was_there(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        receipt = await subject.commit(Delete("a/k"))
        assert receipt.results == [True]
        assert receipt.version == await subject.revision()
        assert await subject.get("a/k") is None
        assert await subject.keys() == []

    async def test_delete_of_what_is_absent_says_so_and_is_no_write(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        before = await subject.snapshot()
        receipt = await subject.commit(Delete("a/none"))
        assert (receipt.version, receipt.results) == (await subject.revision(), [False])
        assert await subject.snapshot() == before

    async def test_an_entry_made_again_after_its_delete_is_a_new_one(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", tag="old"), actor=BOB)
        subject.advance("1s")
        receipt = await subject.commit(Delete("a/k"), Put("a/k", b"2"))
        assert receipt.results == [True, None]
        assert await subject.get("a/k") == Entry("a/k", b"2", receipt.version, ALICE, first.at + 1000, first.at + 1000)

    async def test_an_entry_written_and_deleted_in_one_batch_is_not_there(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/k", b"1"), Delete("a/k"))
        assert receipt.results == [None, True]
        assert await subject.keys() == []
        assert [(change.op, change.exists) for change in await subject.changes()] == [("put", True), ("delete", False)]

    async def test_increment_creates_a_number_for_the_actor(self, subject: Subject) -> None:
        receipt = await subject.commit(Increment("a/n", -3, ttl_ms=1000), actor=BOB)
        assert receipt.results == [-3]
        assert await subject.get("a/n") == Entry(
            "a/n", b"-3", receipt.version, BOB, receipt.at, receipt.at, receipt.at + 1000
        )

    async def test_increment_keeps_owner_tag_creation_and_expiry(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/n", b"40", ttl_ms=60_000, tag="count"), actor=BOB)
        subject.advance("1s")
        second = await subject.commit(Increment("a/n", 2))
        assert second.results == [42]
        assert await subject.get("a/n") == Entry(
            "a/n", b"42", second.version, BOB, first.at, first.at + 1000, first.at + 60_000, "count"
        )

    async def test_increment_with_a_ttl_sets_the_expiry(self, subject: Subject) -> None:
        await subject.commit(Put("a/n", b"1"), Put("a/m", b"1", ttl_ms=60_000))
        receipt = await subject.commit(Increment("a/n", 1, ttl_ms=500), Increment("a/m", 1, ttl_ms=500))
        assert [entry.expires_at for entry in await subject.entries()] == [receipt.at + 500] * 2

    async def test_increment_by_nothing_is_a_write(self, subject: Subject) -> None:
        first = await subject.commit(Increment("a/n", 0))
        second = await subject.commit(Increment("a/n", 0))
        assert (first.results, second.results) == ([0], [0])
        assert (await subject.entry("a/n")).version == second.version > first.version

    async def test_an_empty_batch_answers_with_the_present_revision(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        before = await subject.snapshot()
        receipt = await subject.commit()
        assert (receipt.version, receipt.results) == (first.version, [])
        assert await subject.snapshot() == before

    async def test_there_is_one_result_for_each_operation(self, subject: Subject) -> None:
        receipt = await subject.commit(*(Increment("a/n", i) for i in range(128)))
        assert receipt.results == [i * (i + 1) // 2 for i in range(128)]


class TestNumbers:
    @pytest.mark.parametrize(
        ("start", "delta"),
        [(INT64_MAX - 1, 1), (INT64_MIN + 1, -1), (INT64_MIN, INT64_MAX), (INT64_MAX, INT64_MIN), (2**53, 1), (-1, 1)],
    )
    async def test_sums_within_64_bits_are_exact(self, subject: Subject, start: int, delta: int) -> None:
        await subject.commit(Put("a/n", b"%d" % start))
        receipt = await subject.commit(Increment("a/n", delta))
        assert receipt.results == [start + delta]
        assert await subject.value("a/n") == b"%d" % (start + delta)

    @pytest.mark.parametrize(("start", "delta"), [(INT64_MAX, 1), (INT64_MIN, -1), (1, INT64_MAX), (-1, INT64_MIN)])
    async def test_a_sum_beyond_64_bits_is_invalid(self, subject: Subject, start: int, delta: int) -> None:
        await subject.commit(Put("a/n", b"%d" % start))
        async with subject.refused(InvalidInput):
            await subject.commit(Increment("a/before", 1), Increment("a/n", delta))

    @pytest.mark.parametrize("delta", [2**63, -(2**63) - 1, 1.0, True, "1", None])
    async def test_a_delta_that_is_no_64_bit_integer_is_invalid(self, subject: Subject, delta: int) -> None:
        await subject.commit(Put("a/n", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Increment("a/n", delta))

    @pytest.mark.parametrize(
        "value",
        [
            b"01",
            b"-0",
            b"+1",
            b"1.0",
            b"1e3",
            b" 1",
            b"1 ",
            b"1\n",
            b'"1"',
            b"null",
            b"true",
            b"[1]",
            b"{}",
            b"9223372036854775808",
            b"-9223372036854775809",
            b"100000000000000000000",
            "\u0661".encode(),
        ],
    )
    async def test_only_a_canonical_64_bit_decimal_can_be_incremented(self, subject: Subject, value: bytes) -> None:
        await subject.commit(Put("a/n", value), Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), Increment("a/n", 1))
        assert await subject.value("a/n") == value

    @pytest.mark.parametrize(
        ("value", "tag", "kind"),
        [
            (b'"hunter2"', "", "text"),
            (b'["hunter2"]', "", "a list"),
            (b'{"a":"hunter2"}', "", "an object"),
            (b"true", "", "true"),
            (b"null", "", "null"),
            (b"-4711.5", "", "a number"),
            (b"4711000000000000000000", "", "a number"),
            (b'"hunter2"', "list", "a list"),
            (b'"hunter2"', "set", "a set"),
            (b'"hunter2"', ":order:done", "text"),
        ],
    )
    async def test_what_cannot_be_incremented_is_told_by_its_kind_and_never_by_its_value(
        self, subject: Subject, value: bytes, tag: str, kind: str
    ) -> None:
        await subject.commit(Put("records/é", value, tag=tag))
        with pytest.raises(InvalidInput) as caught:
            await subject.commit(Increment("records/é", 1))
        assert str(caught.value) == f"'é' holds {kind}, which is no 64-bit integer: it cannot be incremented"


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            0,
            -0.0,
            1e308,
            2**53 + 1,
            2**64 - 1,
            "",
            "a\0b",
            "\u2028 \U0001f9ff \ud7ff \ue000 \uffff",
            "%_*?[]{}'\"\\;--",
            [],
            {},
            [[], {}, [{}], None],
            {"": {"": []}, "a\0b": [1, 1.0], "\U0010ffff": "z"},
        ],
    )
    async def test_values_come_back_byte_for_byte(self, subject: Subject, value: object) -> None:
        data = codec.encode(value)
        receipt = await subject.commit(Put("a/k", data))
        assert await subject.value("a/k") == data
        assert codec.decode(data) == value
        [change] = (await subject.feed(after=receipt.version - 1))[0].changes
        assert (change.value, change.size) == (data, len(data))
        await subject.commit(Put("a/other", b"1"), when=[ValueIs("a/k", data)])

    async def test_values_are_compared_as_bytes(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b'{"a":1}'))
        for other in (b'{"a": 1}', b'{"a":1.0}', b'{"A":1}', b"", b"null"):
            async with subject.refused(Conflict):
                await subject.commit(Put("a/k", b"2"), when=[ValueIs("a/k", other)])

    async def test_a_value_may_grow_and_shrink(self, subject: Subject) -> None:
        sizes = (3, 400, 3, 5_000, 320, 321, 100_000, 2, 400)
        for size in sizes:
            data = b'"' + b"v" * (size - 2) + b'"'
            await subject.commit(Put("a/k", data), Put("a/next", data[:2]))
            assert await subject.value("a/k") == data
            assert [entry.value for entry in await subject.entries("a/")] == [data, data[:2]]
            assert (await subject.usage())[ALICE, "a"] == (2, len("a/ka/next") + size + 2)
        await subject.commit(Delete("a/k"))
        assert await subject.keys() == ["a/next"]
        await subject.commit(Put("a/k", b"1"))
        assert await subject.value("a/k") == b"1"

    @pytest.mark.parametrize("size", [FEED_VALUE_BYTES_MAX, FEED_VALUE_BYTES_MAX + 1, 1024 * 1024, VALUE_BYTES_MAX])
    async def test_large_values_come_back_whole(self, subject: Subject, size: int) -> None:
        letters = bytes(range(65, 91)) * (size // 26 + 1)
        data = b'"' + letters[: size - 2] + b'"'
        await subject.commit(Put("a/k", data), when=[Absent("a/k")])
        assert await subject.value("a/k") == data
        assert (await subject.entries())[0].value == data
        await subject.commit(Put("a/other", b"1"), when=[ValueIs("a/k", data)])
