"""Reads: get of many keys from one snapshot, and scans by prefix, page and direction, in the order of UTF-8 bytes."""

from __future__ import annotations

import pytest

from holdfast.engine import SCAN_MAX, Delete, Put
from holdfast.errors import InvalidInput
from holdfast.testing.conformance.subject import SPACE, Subject

ODD_KEYS = sorted(
    [
        "a/",
        "a/ ",
        "a/%",
        "a/%25",
        "a/*",
        "a//",
        "a/0",
        "a/A",
        "a/B",
        "a/[b]",
        "a/\\",
        "a/_",
        "a/a",
        "a/a\n",
        "a/a'",
        'a/a"',
        "a/b",
        "a/e\u0301",
        "a/\u00e9",
        "a/{b}",
        "a/\u07ff",
        "a/\u0800",
        "a/\ud7ff",
        "a/\ud7ff\U0010ffff",
        "a/\ue000",
        "a/\uffff",
        "a/\U00010000",
        "a/\U0001f9ff",
        "a/\U0010ffff",
        "a/\U0010ffff/x",
        "a/\U0010ffff\U0010ffff",
        "a0/x",
        "A/x",
        "b/x",
        "\u00e9/x",
        "\U0010ffff/x",
        "\U0010ffff\U0010ffff/x",
    ],
    key=str.encode,
)

PREFIXES = [
    "",
    "a",
    "a/",
    "a/a",
    "a/%",
    "a/_",
    "a/*",
    "a/?",
    "a/[",
    "a/{",
    "a/\\",
    "a/a'",
    "a/\ud7ff",
    "a/\ue000",
    "a/\uffff",
    "a/\U00010000",
    "a/\U0010ffff",
    "a/\U0010ffff\U0010ffff",
    "\U0010ffff",
    "\U0010ffff\U0010ffff",
    "A",
    "nothing/",
]


class TestReading:
    async def test_get_answers_in_the_order_of_the_keys_asked_for(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b"1"), Put("a/2", b"2"))
        found = await subject.engine.get(SPACE, ["a/2", "a/none", "a/1", "a/2"])
        assert [entry and entry.value for entry in found] == [b"2", None, b"1", b"2"]
        assert await subject.engine.get(SPACE, []) == []

    async def test_get_of_many_keys_is_one_snapshot(self, subject: Subject) -> None:
        keys = [f"a/{i:04d}" for i in range(1000)]
        for start in range(0, 1000, 100):
            await subject.commit(*(Put(key, b"1") for key in keys[start : start + 100]))
        await subject.commit(Delete(keys[500]))
        found = await subject.engine.get(SPACE, keys[::-1])
        assert [entry.key if entry else None for entry in found] == [
            None if key == keys[500] else key for key in keys[::-1]
        ]

    async def test_reads_of_an_unknown_space_find_nothing_and_do_not_make_it(self, subject: Subject) -> None:
        assert await subject.engine.get(SPACE, ["a/k"]) == [None]
        page = await subject.engine.scan(SPACE, "")
        assert (page.entries, page.more) == ([], False)
        assert await subject.engine.spaces() == []

    async def test_keys_are_ordered_by_their_utf_8_bytes(self, subject: Subject) -> None:
        await subject.commit(*(Put(key, b"1") for key in reversed(ODD_KEYS)))
        assert await subject.keys() == ODD_KEYS
        backwards = await subject.engine.scan(SPACE, "", reverse=True)
        assert [entry.key for entry in backwards.entries] == ODD_KEYS[::-1]

    @pytest.mark.parametrize("prefix", PREFIXES, ids=ascii)
    async def test_a_scan_finds_exactly_the_keys_that_begin_with_the_prefix(
        self, subject: Subject, prefix: str
    ) -> None:
        await subject.commit(*(Put(key, b"1") for key in ODD_KEYS))
        expected = [key for key in ODD_KEYS if key.startswith(prefix)]
        assert await subject.keys(prefix) == expected
        backwards = await subject.engine.scan(SPACE, prefix, reverse=True)
        assert [entry.key for entry in backwards.entries] == expected[::-1]

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("limit", [1, 2, 7, len(ODD_KEYS), 1000])
    async def test_pages_continue_after_the_last_key_seen(self, subject: Subject, limit: int, reverse: bool) -> None:
        await subject.commit(*(Put(key, b"1") for key in ODD_KEYS))
        for prefix in ("", "a/"):
            expected = [key for key in ODD_KEYS if key.startswith(prefix)]
            found: list[str] = []
            more = True
            while more:
                after = found[-1] if found else None
                page = await subject.engine.scan(SPACE, prefix, after=after, limit=limit, reverse=reverse)
                assert 0 < len(page.entries) <= limit
                found += [entry.key for entry in page.entries]
                more = page.more
                assert more == (len(found) < len(expected))
            assert found == (expected[::-1] if reverse else expected)

    async def test_after_may_be_a_key_that_is_not_there(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"b/{i}", b"1") for i in range(5)))

        async def found(after: str, reverse: bool = False) -> list[str]:
            page = await subject.engine.scan(SPACE, "b/", after=after, reverse=reverse)
            return [entry.key[-1] for entry in page.entries]

        assert await found("b/2x") == ["3", "4"]
        assert await found("b/2x", reverse=True) == ["2", "1", "0"]
        assert await found("a/zzz") == ["0", "1", "2", "3", "4"]
        assert await found("a/zzz", reverse=True) == []
        assert await found("c/") == []
        assert await found("c/", reverse=True) == ["4", "3", "2", "1", "0"]

    async def test_expired_and_deleted_entries_take_no_place_in_a_page(self, subject: Subject) -> None:
        await subject.commit(*(Put(f"a/{i:02d}", b"1", ttl_ms=1000 if i % 3 else None) for i in range(60)))
        await subject.commit(Delete("a/00"))
        subject.advance_ms(1000)
        page = await subject.engine.scan(SPACE, "a/", limit=19)
        assert [entry.key for entry in page.entries] == [f"a/{i:02d}" for i in range(3, 60, 3)]
        assert not page.more
        page = await subject.engine.scan(SPACE, "a/", limit=18, reverse=True)
        assert len(page.entries) == 18
        assert page.more

    async def test_a_page_names_the_revision_it_shows(self, subject: Subject) -> None:
        await subject.commit(Put("a/1", b"1"))
        receipt = await subject.commit(Put("b/1", b"1"))
        assert (await subject.engine.scan(SPACE, "a/")).revision == receipt.version
        assert (await subject.engine.scan(SPACE, "none/")).revision == receipt.version

    async def test_a_page_may_be_as_large_as_the_limit(self, subject: Subject) -> None:
        for start in range(0, 1280, 128):
            await subject.commit(*(Put(f"a/{i:05d}", b"1") for i in range(start, start + 128)))
        page = await subject.engine.scan(SPACE, "a/")
        assert (len(page.entries), page.more) == (1000, True)
        page = await subject.engine.scan(SPACE, "a/", limit=SCAN_MAX)
        assert (len(page.entries), page.more) == (1280, False)

    @pytest.mark.parametrize("limit", [0, -1, SCAN_MAX + 1, 1.5, True, "10", None])
    async def test_a_page_of_an_impossible_size_is_invalid(self, subject: Subject, limit: int) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.engine.scan(SPACE, "a/", limit=limit)

    @pytest.mark.parametrize("prefix", ["/", "/a", "a\0", "a/\0", "\ud800", "a/\udfff", "a/" + "x" * 1100])
    async def test_a_prefix_that_no_key_can_have_is_invalid(self, subject: Subject, prefix: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.engine.scan(SPACE, prefix)

    async def test_keys_that_differ_only_in_case_or_normalization_are_different(self, subject: Subject) -> None:
        keys = ["a/K", "a/k", "A/k", "a/\u00e9", "a/e\u0301", "a/k ", "a/ k"]
        await subject.commit(*(Put(key, b"%d" % i) for i, key in enumerate(keys)))
        found = await subject.engine.get(SPACE, keys)
        assert [entry and entry.value for entry in found] == [b"%d" % i for i in range(len(keys))]
