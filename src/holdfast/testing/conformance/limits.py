"""Limits: what is just within them works, what is beyond is InvalidInput, and nothing changed."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.clock import TTL_MS_MAX
from holdfast.engine import (
    BATCH_BYTES_MAX,
    CONDITIONS_MAX,
    NAME_BYTES_MAX,
    OPERATIONS_MAX,
    REQUEST_ID_BYTES_MAX,
    TAG_BYTES_MAX,
    VALUE_BYTES_MAX,
    Absent,
    AtLeast,
    Batch,
    Condition,
    Delete,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import InvalidInput
from holdfast.keys import KEY_BYTES_MAX
from holdfast.testing.conformance.subject import ALICE, SPACE, Subject

BAD_KEYS = [
    "",
    "no-subspace",
    "/no-subspace",
    "a/\0",
    "a\0/k",
    "a/\ud800",
    "a/\udfff",
    "a/" + "x" * (KEY_BYTES_MAX - 1),
    "a/" + "\u00e9" * (KEY_BYTES_MAX // 2),
    "a/" + "x" * 1024 * 1024,
    5,
    b"a/k",
    None,
]

BAD_PREFIXES = [*BAD_KEYS, "a/k", "a/" + "x" * (KEY_BYTES_MAX - 10) + "/"]

BAD_LABELS = {
    "control character": "a\nb",
    "nul": "a\0b",
    "lone surrogate": "a\ud800",
    "too long": "x" * 257,
    "too long in bytes": "\u00e9" * 129,
    "bytes": b"a",
    "number": 5,
}

LONG_KEYS = ["a/" + "x" * (KEY_BYTES_MAX - 2), "a/" + "\u00e9" * ((KEY_BYTES_MAX - 2) // 2)]


def operations_on(key: str) -> list[Operation]:
    return [Put(key, b"1"), Delete(key), Increment(key, 1), Touch(key, 1000)]


def conditions_on(key: str) -> list[Condition]:
    return [Absent(key), Present(key), VersionIs(key, 1), ValueIs(key, b"1"), AtLeast(key, 1), Mine(key)]


class TestLimits:
    async def test_a_batch_has_at_most_the_named_number_of_operations(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"a/{i}", b"1") for i in range(OPERATIONS_MAX)))
        assert len(await subject.keys()) == OPERATIONS_MAX
        async with subject.refused(InvalidInput):
            await subject.commit(*(Put(f"a/{i}", b"2") for i in range(OPERATIONS_MAX + 1)))

    async def test_a_batch_has_at_most_the_named_number_of_conditions(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"), when=[Absent(f"a/{i}") for i in range(CONDITIONS_MAX)])
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), when=[Absent(f"a/{i}") for i in range(CONDITIONS_MAX + 1)])

    async def test_a_value_has_at_most_the_named_size(self, subject: Subject) -> None:
        largest = b'"' + b"x" * (VALUE_BYTES_MAX - 2) + b'"'
        await subject.commit(Put("a/k", largest))
        assert await subject.value("a/k") == largest
        await subject.commit(Put("a/k", b"1"))
        for operation in (Put("a/k", largest + b" "), Push("q/", largest + b" ")):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"1"), operation)

    async def test_a_batch_has_at_most_the_named_size(self, subject: Subject) -> None:
        half = b'"' + b"x" * (BATCH_BYTES_MAX // 2 - 100) + b'"'
        await subject.commit(Put("a/1", half), Put("a/2", half))
        await subject.commit(Delete("a/1"), Delete("a/2"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/1", half), Put("a/2", half), Put("a/3", b'"' + b"x" * 1000 + b'"'))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/1", half), Push("q/", half), when=[ValueIs("a/2", half)])

    @pytest.mark.parametrize("key", LONG_KEYS, ids=["ascii", "two bytes a character"])
    async def test_the_longest_key_is_a_key_like_others(self, subject: Subject, key: str) -> None:
        await subject.commit(Put(key, b"1"), when=[Absent(key)])
        receipt = await subject.commit(Increment(key, 1), when=[AtLeast(key, 1)])
        assert receipt.results == [2]
        assert await subject.keys(key) == [key]
        assert (await subject.engine.scan(SPACE, "a/", after=key)).entries == []
        await subject.commit(Delete(key))
        assert await subject.keys() == []

    @pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: ascii(key)[:30])
    async def test_what_cannot_be_a_key_is_invalid_everywhere(self, subject: Subject, key: str) -> None:
        await subject.commit(Put("a/other", b"1"))
        for operation in operations_on(key):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"2"), operation)
        for condition in conditions_on(key):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"2"), when=[condition])
        async with subject.refused(InvalidInput):
            await subject.engine.get(SPACE, ["a/other", key])

    @pytest.mark.parametrize("prefix", BAD_PREFIXES, ids=lambda prefix: ascii(prefix)[:30])
    async def test_what_cannot_be_a_range_is_invalid(self, subject: Subject, prefix: str) -> None:
        await subject.commit(Put("q/1", b"1"))
        for operation in (Push(prefix, b"1"), Take(prefix, "r/"), Take("q/", prefix)):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"2"), operation)

    @pytest.mark.parametrize("key", BAD_KEYS[:-1], ids=lambda key: ascii(key)[:30])
    async def test_take_with_what_cannot_be_a_key_is_invalid(self, subject: Subject, key: str) -> None:
        await subject.commit(Put("q/1", b"1"))
        for take in (
            Take("q/", "r/", upto=key),
            Take("q/", "r/", source_counter=key),
            Take("q/", "r/", target_counter=key),
        ):
            async with subject.refused(InvalidInput):
                await subject.commit(take)

    @pytest.mark.parametrize("label", BAD_LABELS.values(), ids=BAD_LABELS)
    async def test_labels_that_are_no_short_printable_text_are_invalid(self, subject: Subject, label: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), actor=label)
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), request_id=label)
        for operation in (Put("a/k", b"2", owner=label), Put("a/k", b"2", tag=label), Push("q/", b"2", tag=label)):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"1"), operation)

    async def test_labels_have_at_most_the_named_sizes(self, subject: Subject) -> None:
        name, request_id, tag = "n" * NAME_BYTES_MAX, "r" * REQUEST_ID_BYTES_MAX, "t" * TAG_BYTES_MAX
        await subject.commit(Put("a/k", b"1", tag=tag, owner=name), actor=name, request_id=request_id)
        entry = await subject.entry("a/k")
        assert (entry.owner, entry.tag) == (name, tag)
        [commit] = await subject.feed()
        assert (commit.actor, commit.request_id) == (name, request_id)
        for batch in (
            Batch(name + "x", (Put("a/k", b"2"),)),
            Batch(ALICE, (Put("a/k", b"2"),), (), request_id + "x"),
            Batch(ALICE, (Put("a/k", b"2", tag=tag + "x"),)),
            Batch(ALICE, (Put("a/k", b"2", owner=name + "x"),)),
        ):
            async with subject.refused(InvalidInput):
                await subject.engine.commit(SPACE, batch)

    async def test_labels_may_be_any_printable_text(self, subject: Subject) -> None:
        label = 'Zoë\'s %_*?[x] {agent} \U0001f9ff "quoted" \\ /'
        await subject.commit(Put("a/k", b"1", tag=label), actor=label, request_id=label)
        assert (await subject.entry("a/k")).owner == label
        assert await subject.usage() == {(label, "a"): (1, 4)}
        assert (await subject.feed())[0].request_id == label

    @pytest.mark.parametrize("value", ["1", None, 1, bytearray(b"1"), memoryview(b"1"), msgspec.Raw(b"1"), {"a": 1}])
    async def test_a_value_that_is_not_bytes_is_invalid(self, subject: Subject, value: bytes) -> None:
        await subject.commit(Put("a/k", b"1"))
        for operation in (Put("a/k", value), Push("q/", value)):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"1"), operation)

    @pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 1.0, True, "1", None])
    async def test_a_condition_on_what_is_no_64_bit_integer_is_invalid(self, subject: Subject, number: int) -> None:
        await subject.commit(Put("a/k", b"1"))
        for condition in (AtLeast("a/k", number), VersionIs("a/k", number)):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/k", b"2"), when=[condition])

    @pytest.mark.parametrize("operation", [None, "put", Absent("a/k"), {"key": "a/k"}])
    async def test_what_is_no_operation_is_invalid(self, subject: Subject, operation: Operation) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), operation)

    @pytest.mark.parametrize("condition", [None, "absent", Put("a/k", b"1"), {"key": "a/k"}])
    async def test_what_is_no_condition_is_invalid(self, subject: Subject, condition: Condition) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), when=[condition])

    @pytest.mark.parametrize("value", ["1", None, 1, bytearray(b"1")])
    async def test_a_condition_on_a_value_that_is_not_bytes_is_invalid(self, subject: Subject, value: bytes) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2"), when=[ValueIs("a/k", value)])

    @pytest.mark.parametrize("ttl_ms", [TTL_MS_MAX + 1, 2**63, 10**30])
    async def test_a_ttl_of_more_than_a_hundred_years_is_invalid(self, subject: Subject, ttl_ms: int) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        for operation in (Put("a/k", b"2", ttl_ms=ttl_ms), Touch("a/k", ttl_ms), Push("q/", b"1", ttl_ms=ttl_ms)):
            async with subject.refused(InvalidInput):
                await subject.commit(operation)

    async def test_a_prefix_that_leaves_no_room_for_an_id_is_invalid(self, subject: Subject) -> None:
        prefix = "q/" + "\u00e9" * ((KEY_BYTES_MAX - 10) // 2) + "/"
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Push(prefix, b"1"))

    @pytest.mark.parametrize("tag", [None, 0, b""])
    async def test_a_tag_that_is_no_text_is_invalid(self, subject: Subject, tag: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.commit(Put("a/k", b"2", tag=tag))

    @pytest.mark.parametrize("prefix", [5, b"a/", None])
    async def test_a_scanned_prefix_that_is_no_text_is_invalid(self, subject: Subject, prefix: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.engine.scan(SPACE, prefix)
