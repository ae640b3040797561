"""Guarantee 4, time: what has expired is gone from that instant and is told of once; touch only extends; time never falls."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast.engine import (
    Absent,
    Delete,
    Entry,
    Increment,
    Present,
    Push,
    Put,
    Touch,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.testing.conformance.subject import ALICE, BOB, SPACE, Subject

MANY = 700
"""More than any engine sweeps in one commit."""

BAD_TTLS = [0, -1, 1.5, True, "1s"]


async def put_many(subject: Subject, count: int, ttl_ms: int) -> list[str]:
    """Put entries with a ttl, a hundred in a batch; gives their keys."""
    keys = [f"m/{i:05d}" for i in range(count)]
    for start in range(0, count, 100):
        await subject.commit(*(Put(key, b"1", ttl_ms=ttl_ms) for key in keys[start : start + 100]))
    return keys


async def sweep(subject: Subject) -> None:
    """Commit empty batches until there is nothing left to tell of."""
    before = -1
    while (receipt := await subject.commit()).version != before:
        before = receipt.version


async def expiries(subject: Subject) -> list[str]:
    """The keys of all expiries in the feed."""
    return [change.key for change in await subject.changes() if change.op == "expire"]


class TestExpiry:
    async def test_an_entry_is_visible_until_the_instant_it_expires_and_not_from_then_on(
        self, subject: Subject
    ) -> None:
        receipt = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(999)
        assert (await subject.entry("a/k")).expires_at == receipt.at + 1000
        assert await subject.keys() == ["a/k"]
        subject.advance_ms(1)
        assert await subject.get("a/k") is None
        assert await subject.engine.get(SPACE, ["a/k", "a/k"]) == [None, None]
        assert await subject.keys() == []
        assert (await subject.engine.scan(SPACE, "a/", reverse=True)).entries == []

    async def test_an_expired_entry_is_absent_to_every_operation(self, subject: Subject) -> None:
        first = await subject.commit(
            *(Put(f"a/{name}", b"41", ttl_ms=1000, tag="old", owner=BOB) for name in ("put", "delete", "increment"))
        )
        subject.advance_ms(1000)
        second = await subject.commit(
            Put("a/put", b"1"), Delete("a/delete"), Increment("a/increment", 1), when=[Absent("a/put")]
        )
        now = first.at + 1000
        assert second.results == [None, False, 1]
        assert await subject.entries() == [
            Entry("a/increment", b"1", second.version, ALICE, now, now),
            Entry("a/put", b"1", second.version, ALICE, now, now),
        ]

    async def test_value_and_ttl_are_set_together(self, subject: Subject) -> None:
        await subject.commit(Put("a/before", b"0"))
        watching = await subject.watch_from_now()
        writing = asyncio.ensure_future(
            subject.commit(
                Put("a/put", b"1", ttl_ms=1000), Increment("a/n", 1, ttl_ms=1000), Push("a/", b"1", ttl_ms=1000)
            )
        )
        while not writing.done():
            for entry in await subject.entries():
                assert entry.key == "a/before" or entry.expires_at is not None, "seen without its ttl"
            await asyncio.sleep(0)
        receipt = await writing
        commit = await watching.next()
        assert commit.version == receipt.version
        assert [change.expires_at for change in commit.changes] == [receipt.at + 1000] * 3
        assert await subject.revision() == receipt.version
        written = [entry for entry in await subject.entries() if entry.key != "a/before"]
        assert [(entry.version, entry.expires_at) for entry in written] == [(receipt.version, receipt.at + 1000)] * 3

    async def test_an_expiry_is_in_the_feed_exactly_once(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000, tag="kind", owner=BOB), Put("a/stays", b"1"))
        subject.advance_ms(1000)
        for _ in range(3):
            await subject.commit()
            await subject.get("a/k")
        await subject.commit(Put("a/other", b"1"))
        assert await expiries(subject) == ["a/k"]
        [expiry] = [change for change in await subject.changes() if change.op == "expire"]
        assert (expiry.exists, expiry.value, expiry.was, expiry.owner) == (False, b"", "kind", BOB)

    async def test_an_empty_batch_tells_of_what_has_expired(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/1", b"1", ttl_ms=1000), Put("a/2", b"1", ttl_ms=2000))
        subject.advance_ms(1000)
        second = await subject.commit()
        assert second.version > first.version
        assert [change.key for change in await subject.changes(after=first.version)] == ["a/1"]
        subject.advance_ms(1000)
        third = await subject.commit()
        assert [change.key for change in await subject.changes(after=second.version)] == ["a/2"]
        assert (await subject.commit()).version == third.version

    async def test_an_expiry_comes_before_what_replaced_the_entry(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000, tag="old"))
        subject.advance_ms(1000)
        receipt = await subject.commit(Put("a/k", b"2", tag="new"))
        changes = [
            (commit.version, change.op, change.exists, change.was)
            for commit in await subject.feed()
            for change in commit.changes
        ]
        assert [change[1:] for change in changes] == [("put", True, ""), ("expire", False, "old"), ("put", True, "")]
        assert changes[0][0] < changes[1][0] < changes[2][0] == receipt.version == await subject.revision()

    async def test_expiries_are_told_in_the_order_of_their_instants(self, subject: Subject) -> None:
        await subject.commit(
            *(Put(f"a/{ttl}", b"1", ttl_ms=ttl) for ttl in (300, 100, 200)), Put("a/0", b"1", ttl_ms=300)
        )
        subject.advance_ms(300)
        await subject.commit()
        assert await expiries(subject) == ["a/100", "a/200", "a/0", "a/300"]

    async def test_a_refused_batch_does_not_tell_of_expiries(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(1000)
        async with subject.refused(Conflict):
            await subject.commit(Put("a/k", b"2"), when=[Present("a/k")])
        await subject.commit(Put("a/k", b"2"))
        assert await expiries(subject) == ["a/k"]

    async def test_a_put_without_ttl_ends_the_old_expiry(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        await subject.commit(Put("a/k", b"2"))
        subject.advance("1h")
        await subject.commit(Put("a/other", b"1"))
        assert (await subject.entry("a/k")).expires_at is None
        assert await expiries(subject) == []

    async def test_a_put_with_a_ttl_replaces_the_old_expiry(self, subject: Subject) -> None:
        await subject.commit(Put("a/shorter", b"1", ttl_ms=9000), Put("a/longer", b"1", ttl_ms=1000))
        await subject.commit(Put("a/shorter", b"2", ttl_ms=1000), Put("a/longer", b"2", ttl_ms=9000))
        subject.advance_ms(1000)
        assert await subject.keys() == ["a/longer"]

    async def test_a_deleted_entry_does_not_expire(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000), Put("a/again", b"1", ttl_ms=1000))
        await subject.commit(Delete("a/k"), Delete("a/again"))
        await subject.commit(Put("a/again", b"2"))
        subject.advance_ms(1000)
        await subject.commit(Put("a/other", b"1"))
        assert await expiries(subject) == []
        assert await subject.keys() == ["a/again", "a/other"]

    async def test_a_write_after_expiry_has_the_ttl_it_asks_for_and_no_other(self, subject: Subject) -> None:
        await subject.commit(Put("a/put", b"1", ttl_ms=1000), Put("a/n", b"41", ttl_ms=1000))
        subject.advance_ms(1000)
        receipt = await subject.commit(Put("a/put", b"2", ttl_ms=500), Increment("a/n", 1, ttl_ms=500))
        assert [entry.expires_at for entry in await subject.entries()] == [receipt.at + 500] * 2
        subject.advance_ms(500)
        assert await subject.keys() == []

    async def test_a_mass_expiry_is_invisible_at_once_and_told_of_once_each(self, subject: Subject) -> None:
        keys = await put_many(subject, MANY, 1000)
        subject.advance_ms(1000)
        assert await subject.keys() == []
        assert await subject.engine.get(SPACE, [keys[0], keys[-1]]) == [None, None]
        await sweep(subject)
        assert sorted(await expiries(subject)) == keys
        assert await subject.usage() == {}

    async def test_what_replaces_one_of_many_expired_entries_comes_after_its_expiry(self, subject: Subject) -> None:
        keys = await put_many(subject, MANY, 1000)
        subject.advance_ms(1000)
        replaced = [keys[-1], keys[MANY // 2], keys[0]]
        for key in replaced:
            await subject.commit(Put(key, b'"new"'))
        await sweep(subject)
        told = Counter(await expiries(subject))
        assert told == Counter(keys)
        ops = {key: [change.op for change in await subject.changes() if change.key == key] for key in replaced}
        assert ops == {key: ["put", "expire", "put"] for key in replaced}
        assert await subject.keys() == sorted(replaced)

    async def test_concurrent_writes_to_many_expired_entries_each_come_after_the_expiry(self, subject: Subject) -> None:
        keys = await put_many(subject, MANY, 1000)
        subject.advance_ms(1000)
        chosen = keys[::25]
        await asyncio.gather(*(subject.commit(Increment(key, 7)) for key in chosen))
        await sweep(subject)
        assert Counter(await expiries(subject)) == Counter(keys)
        changes = await subject.changes()
        for key in chosen:
            assert [change.op for change in changes if change.key == key] == ["put", "expire", "increment"]
        assert [entry.value for entry in await subject.entries()] == [b"7"] * len(chosen)

    async def test_keys_at_the_end_of_the_keyspace_expire_like_others(self, subject: Subject) -> None:
        keys = ["\U0010ffff/k", "\U0010ffff\U0010ffff/k", "\ud7ff/k", "\ue000/k"]
        for key in keys:
            await subject.commit(Put(key, b"1", ttl_ms=1000))
            subject.advance_ms(1000)
            await subject.commit(Put(key, b"2"))
        assert await expiries(subject) == keys

    @pytest.mark.parametrize("ttl_ms", BAD_TTLS)
    async def test_a_ttl_that_is_no_positive_number_of_milliseconds_is_invalid(
        self, subject: Subject, ttl_ms: int
    ) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=5000))
        for operation in (
            Put("a/k", b"2", ttl_ms=ttl_ms),
            Increment("a/k", 1, ttl_ms=ttl_ms),
            Push("a/", b"1", ttl_ms=ttl_ms),
            Touch("a/k", ttl_ms),
        ):
            async with subject.refused(InvalidInput):
                await subject.commit(Put("a/other", b"1"), operation)


class TestTouch:
    async def test_touch_extends_the_life_of_an_entry_from_now(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(600)
        receipt = await subject.commit(Touch("a/k", 1000))
        assert receipt.results == [first.at + 1600]
        subject.advance_ms(999)
        assert (await subject.entry("a/k")).expires_at == first.at + 1600
        subject.advance_ms(1)
        assert await subject.get("a/k") is None

    async def test_touch_never_shortens_a_life(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=10_000))
        before = await subject.snapshot()
        receipt = await subject.commit(Touch("a/k", 1000))
        assert receipt.results == [first.at + 10_000]
        assert await subject.snapshot() == before

    async def test_touch_leaves_what_never_expires_as_it_is(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        before = await subject.snapshot()
        assert (await subject.commit(Touch("a/k", 1000))).results == [None]
        assert await subject.snapshot() == before

    async def test_touch_is_no_write_and_not_in_the_feed(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000, tag="kind"))
        before = await subject.entry("a/k")
        subject.advance_ms(500)
        receipt = await subject.commit(Touch("a/k", 5000), actor=BOB)
        after = await subject.entry("a/k")
        assert receipt.version == first.version == await subject.revision()
        assert after == Entry(
            "a/k", b"1", before.version, before.owner, before.created_at, before.updated_at, first.at + 5500, "kind"
        )
        assert [commit.version for commit in await subject.feed()] == [first.version]
        await subject.commit(Put("a/next", b"1"))
        assert [change.key for change in await subject.changes(after=first.version)] == ["a/next"]

    async def test_touch_with_a_request_id_is_not_in_the_feed_either(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        receipt = await subject.commit(Touch("a/k", 5000), request_id="r")
        subject.advance_ms(500)
        assert await subject.commit(Touch("a/k", 5000), request_id="r") == receipt
        assert (await subject.entry("a/k")).version == first.version
        assert (await subject.entry("a/k")).expires_at == first.at + 5000
        await subject.commit(Put("a/next", b"1"))
        assert [change.key for change in await subject.changes(after=first.version)] == ["a/next"]

    @pytest.mark.parametrize("state", ["absent", "deleted", "expired"])
    async def test_touch_is_refused_on_what_is_gone(self, subject: Subject, state: str) -> None:
        await subject.commit(Put("a/other", b"1"))
        if state != "absent":
            await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        if state == "deleted":
            await subject.commit(Delete("a/k"))
        if state == "expired":
            subject.advance_ms(1000)
        async with subject.refused(Conflict) as caught:
            await subject.commit(Put("a/other", b"2"), Touch("a/k", 1000))
        assert isinstance(caught.value, Conflict)
        assert (caught.value.key, caught.value.condition, caught.value.actual) == ("a/k", "touch", None)
        assert await subject.get("a/k") is None

    async def test_a_touched_entry_expires_once_at_its_new_instant(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        await subject.commit(Touch("a/k", 2000))
        subject.advance_ms(1000)
        await subject.commit(Put("a/other", b"1"))
        assert await expiries(subject) == []
        subject.advance_ms(1000)
        await sweep(subject)
        assert await expiries(subject) == ["a/k"]
        assert await subject.keys() == ["a/other"]

    async def test_touch_and_writes_of_one_batch_count_together(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/lease", b"1", ttl_ms=1000))
        receipt = await subject.commit(Touch("a/lease", 3000), Put("a/work", b"1"), when=[Present("a/lease")])
        assert receipt.results == [first.at + 3000, None]
        lease = await subject.entry("a/lease")
        assert (lease.version, lease.expires_at) == (first.version, first.at + 3000)
        assert [change.key for change in await subject.changes(after=first.version)] == ["a/work"]

    async def test_touch_is_seen_by_other_engines(self, subject: Subject) -> None:
        other = await subject.another()
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        await subject.commit(Touch("a/k", 5000))
        subject.advance_ms(1000)
        assert await subject.value("a/k", engine=other) == b"1"
        await subject.commit(engine=other)
        assert await subject.value("a/k") == b"1"

    async def test_touch_survives_a_reopen(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        await subject.commit(Touch("a/k", 5000))
        await subject.reopen()
        subject.advance_ms(4999)
        assert (await subject.entry("a/k")).expires_at == first.at + 5000


class TestTime:
    async def test_a_commit_carries_the_time_of_the_clock(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/1", b"1"))
        subject.advance_ms(1234)
        second = await subject.commit(Put("a/2", b"1"))
        assert second.at - first.at == 1234
        assert second.at == subject.clock.now_ms()
        assert [commit.at for commit in await subject.feed()] == [first.at, second.at]

    async def test_time_never_falls_although_the_clock_does(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/1", b"1"))
        subject.set_back("1h")
        second = await subject.commit(Put("a/2", b"1", ttl_ms=1000), Put("a/1", b"2"))
        assert second.at == first.at
        entry = await subject.entry("a/2")
        assert (entry.created_at, entry.expires_at) == (first.at, first.at + 1000)
        assert (await subject.entry("a/1")).updated_at == first.at
        assert [commit.at for commit in await subject.feed()] == [first.at, first.at]
        subject.advance("1h")
        subject.advance_ms(1)
        assert (await subject.commit(Put("a/3", b"1"))).at == first.at + 1

    async def test_an_expired_entry_does_not_come_back_when_the_clock_falls(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(1000)
        await subject.commit(Put("a/other", b"1"))
        subject.set_back("1h")
        assert await subject.get("a/k") is None
        assert await subject.keys() == ["a/other"]
        async with subject.refused(Conflict):
            await subject.commit(Touch("a/k", 1000))
        await subject.commit(Put("a/other", b"2"), when=[Absent("a/k")])
        assert await expiries(subject) == ["a/k"]

    async def test_an_unswept_entry_does_not_come_back_when_the_clock_falls(self, subject: Subject) -> None:
        keys = await put_many(subject, MANY, 1000)
        subject.advance_ms(1000)
        await subject.commit(Put("a/other", b"1"))
        subject.set_back("1h")
        assert await subject.keys() == ["a/other"]
        assert await subject.engine.get(SPACE, keys[-3:]) == [None] * 3

    async def test_reads_do_not_show_an_entry_longer_when_the_clock_falls(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(900)
        await subject.commit(Put("a/other", b"1"))
        subject.set_back("1h")
        assert (await subject.entry("a/k")).expires_at == first.at + 1000
        subject.advance("1h")
        subject.advance_ms(100)
        assert await subject.get("a/k") is None

    async def test_a_touch_also_holds_the_time(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000), Put("a/short", b"1", ttl_ms=500))
        subject.advance_ms(600)
        receipt = await subject.commit(Touch("a/k", 5000))
        subject.set_back("1h")
        assert (await subject.commit(Put("a/next", b"1"))).at == receipt.at
        assert await subject.get("a/short") is None

    async def test_every_engine_of_a_storage_has_the_same_time(self, subject: Subject) -> None:
        other = await subject.another()
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(1000)
        receipt = await subject.commit(Put("a/other", b"1"))
        subject.set_back("1h")
        assert await subject.get("a/k", engine=other) is None
        assert (await subject.commit(Put("a/other", b"2"), engine=other)).at == receipt.at

    async def test_time_does_not_fall_when_a_dropped_space_comes_back(self, subject: Subject) -> None:
        last = await subject.commit(Push("q/", b"1"))
        subject.set_back("1h")
        await subject.engine.drop(SPACE)
        assert (await subject.engine.create(SPACE)).created_at == last.at
        again = await subject.commit(Push("q/", b"2"))
        assert again.at == last.at
        assert str(again.results[0]) > str(last.results[0])
        await subject.engine.drop(SPACE)
        await subject.commit(Put("a/k", b"1"))
        assert (await subject.info()).created_at == last.at
        await subject.engine.drop(SPACE)
        await subject.engine.load(SPACE, [], 1)
        assert (await subject.info()).created_at == last.at

    async def test_time_does_not_fall_across_a_reopen(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        subject.advance_ms(1000)
        receipt = await subject.commit(Put("a/other", b"1"))
        subject.set_back("1h")
        await subject.reopen()
        assert await subject.get("a/k") is None
        assert (await subject.commit(Put("a/other", b"2"))).at == receipt.at
        assert await expiries(subject) == ["a/k"]
