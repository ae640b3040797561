"""Guarantee 5, the feed: every change once, in order, whole; cursors that resume exactly; watchers that always wake."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import (
    FEED_VALUE_BYTES_MAX,
    Absent,
    Batch,
    Change,
    ChangeSet,
    Delete,
    Increment,
    Push,
    Put,
    Take,
    Touch,
    cursor_at,
)
from holdfast.errors import Compacted, Conflict, Error, InvalidInput
from holdfast.testing.conformance.subject import ALICE, BOB, ELSEWHERE, SPACE, Subject

LONG = 600
"""More commits than any engine reads of its feed at once."""


async def varied_history(subject: Subject) -> None:
    """A history with every kind of change, with refusals, no-ops, expiries and batches in between."""
    await subject.commit(Put("a/1", b"1"), Put("b/1", b"1"), Push("q/", b"1"), actor=BOB)
    await subject.commit(Put("a/2", b"1", ttl_ms=1000, tag="t"), request_id="first")
    await subject.commit(Delete("a/none"), request_id="no-op")
    await subject.commit(Increment("n/1", 5), Increment("n/1", -2), Delete("b/1"))
    await subject.commit(Touch("a/2", 1500))
    with pytest.raises(Conflict):
        await subject.commit(Put("a/1", b"2"), when=[Absent("a/1")])
    await subject.commit(Take("q/", "r/", target_counter="n/1"), Put("a/1", b"3"), actor=BOB, request_id="take")
    subject.advance_ms(1500)
    await subject.commit(Put("a/2", b"2"))
    await subject.commit(Put("a/3", b"1"), Delete("a/3"))
    await subject.commit(Delete("a/1"))
    await subject.commit(*(Put(f"c/{i}", b"%d" % i) for i in range(10)))


def replayed(commits: list[ChangeSet]) -> dict[str, bytes]:
    """What a reader of the feed who applies every change ends up with."""
    state: dict[str, bytes] = {}
    for commit in commits:
        for change in commit.changes:
            if change.exists:
                state[change.key] = change.value
            else:
                del state[change.key]
    return state


class TestFeed:
    async def test_a_commit_says_who_when_what_and_which_request(self, subject: Subject) -> None:
        receipt = await subject.commit(Put("a/k", b'{"x":1}', ttl_ms=1000, tag="kind"), actor=BOB, request_id="r-1")
        [commit] = await subject.feed()
        assert (commit.version, commit.at, commit.actor, commit.request_id) == (receipt.version, receipt.at, BOB, "r-1")
        [change] = commit.changes
        assert (change.op, change.key, change.exists) == ("put", "a/k", True)
        assert (change.value, change.size) == (b'{"x":1}', 7)
        assert (change.owner, change.tag, change.was, change.expires_at) == (BOB, "kind", "", receipt.at + 1000)
        assert commit.cursor == cursor_at(receipt.version)

    async def test_every_operation_has_its_change(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", tag="old"), Put("q/1", b'"m"', tag="mail", owner=BOB), Put("n/1", b"1"))
        before = await subject.revision()
        receipt = await subject.commit(
            Put("a/k", b"2", tag="new"),
            Delete("a/k"),
            Increment("n/1", 41),
            Push("p/", b'"x"'),
            Take("q/", "r/", source_counter="n/in"),
        )
        changes = await subject.changes(after=before)
        assert [(c.op, c.key, c.exists, c.value, c.size, c.owner, c.tag, c.was) for c in changes] == [
            ("put", "a/k", True, b"2", 1, ALICE, "new", "old"),
            ("delete", "a/k", False, b"", 0, ALICE, "", "new"),
            ("increment", "n/1", True, b"42", 2, ALICE, "", ""),
            ("push", receipt.results[3], True, b'"x"', 3, ALICE, "", ""),
            ("take", "q/1", False, b"", 0, BOB, "", "mail"),
            ("take", "r/1", True, b'"m"', 3, ALICE, "mail", ""),
            ("increment", "n/in", True, b"-1", 2, ALICE, "", ""),
        ]

    async def test_the_feed_is_complete_and_in_order(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        receipts = [await subject.commit(Put("a/k", b"%d" % i)) for i in range(LONG)]
        feed = await subject.feed()
        assert [commit.version for commit in feed] == [receipt.version for receipt in receipts]
        assert [commit.changes[0].value for commit in feed] == [b"%d" % i for i in range(LONG)]

    async def test_a_batch_is_never_split(self, subject: Subject) -> None:
        receipt = await subject.commit(*(Put(f"{'ab'[i % 2]}/{i:03d}", b"%d" % i) for i in range(128)))
        feed = await subject.feed()
        assert [commit.version for commit in feed] == [receipt.version]
        assert [change.key for change in feed[0].changes] == [f"{'ab'[i % 2]}/{i:03d}" for i in range(128)]

    async def test_concurrent_batches_are_never_split_or_mixed(self, subject: Subject) -> None:
        batches = [[Put(f"a/{writer}-{i}", b"1") for i in range(5)] for writer in range(40)]
        receipts = await asyncio.gather(*(subject.commit(*batch) for batch in batches))
        by_version = {
            receipt.version: [put.key for put in batch] for receipt, batch in zip(receipts, batches, strict=True)
        }
        feed = await subject.feed()
        assert [commit.version for commit in feed] == sorted(by_version)
        for commit in feed:
            assert [change.key for change in commit.changes] == by_version[commit.version]

    async def test_replaying_the_feed_gives_the_state(self, subject: Subject) -> None:
        await varied_history(subject)
        assert replayed(await subject.feed()) == {entry.key: entry.value for entry in await subject.entries()}

    async def test_refusals_and_batches_that_change_nothing_are_not_in_the_feed(self, subject: Subject) -> None:
        first = await subject.commit(Put("a/k", b"1"))
        with pytest.raises(Conflict):
            await subject.commit(Put("a/k", b"2"), when=[Absent("a/k")])
        await subject.commit()
        await subject.commit(Delete("a/none"))
        await subject.commit(Delete("a/none"), request_id="r")
        await subject.commit(Take("q/", "r/"), request_id="s")
        last = await subject.commit(Put("a/k", b"3"))
        assert [commit.version for commit in await subject.feed()] == [first.version, last.version]

    async def test_a_cursor_resumes_exactly_at_every_position(self, subject: Subject) -> None:
        await varied_history(subject)
        feed = await subject.feed()
        for position, commit in enumerate(feed[:-1], 1):
            watching = subject.watch(cursor=commit.cursor)
            assert await watching.several(len(feed) - position) == feed[position:]
        floor, revision = (await subject.info()).feed_floor, await subject.revision()
        for start in range(floor, revision):
            expected = next(commit for commit in feed if commit.version > start)
            assert await subject.watch(cursor=cursor_at(start)).next() == expected

    async def test_a_cursor_resumes_after_a_filtered_commit(self, subject: Subject) -> None:
        for i in range(10):
            await subject.commit(Put(f"{'ab'[i % 2]}/{i}", b"1"))
        filtered = await subject.watch("a/", cursor=cursor_at((await subject.info()).feed_floor)).several(5)
        assert [commit.changes[0].key for commit in filtered] == [f"a/{i}" for i in range(0, 10, 2)]
        resumed = await subject.watch(cursor=filtered[1].cursor).several(7)
        assert [commit.changes[0].key for commit in resumed] == [f"{'ab'[i % 2]}/{i}" for i in range(3, 10)]

    async def test_prefixes_select_changes_and_keep_those_of_a_batch_together(self, subject: Subject) -> None:
        start = cursor_at((await subject.engine.create(SPACE)).revision)
        await subject.commit(Put("a/x/1", b"1"), Put("b/1", b"1"), Put("a/y/1", b"1"), Put("c/1", b"1"))
        await subject.commit(Put("b/2", b"1"))
        await subject.commit(Put("a/x/2", b"1"), Put("a/xx", b"1"))
        await subject.commit(Put("c/2", b"1"))

        async def selected(*prefixes: str, count: int) -> list[list[str]]:
            commits = await subject.watch(*prefixes, cursor=start).several(count)
            return [[change.key for change in commit.changes] for commit in commits]

        assert await selected("a/", count=2) == [["a/x/1", "a/y/1"], ["a/x/2", "a/xx"]]
        assert await selected("a/x/", count=2) == [["a/x/1"], ["a/x/2"]]
        assert await selected("a/x", count=2) == [["a/x/1"], ["a/x/2", "a/xx"]]
        assert await selected("b/", "c/", count=3) == [["b/1", "c/1"], ["b/2"], ["c/2"]]
        assert await selected("c/2", "a/y/", count=2) == [["a/y/1"], ["c/2"]]
        assert await selected("a/", "a/x/", "a", count=2) == [["a/x/1", "a/y/1"], ["a/x/2", "a/xx"]]
        assert len(await selected(count=4)) == 4

    @pytest.mark.parametrize("prefix", ["a%", "a_", "a*", "a?", "a[b]", "a\\", "a'"])
    async def test_wildcards_in_a_watched_prefix_are_ordinary_characters(self, subject: Subject, prefix: str) -> None:
        start = cursor_at((await subject.engine.create(SPACE)).revision)
        await subject.commit(Put("ab/1", b"1"), Put("abc/1", b"1"))
        await subject.commit(Put(f"{prefix}/1", b"1"))
        assert [change.key for change in (await subject.watch(prefix, cursor=start).next()).changes] == [f"{prefix}/1"]

    async def test_values_up_to_the_limit_are_in_the_feed_and_larger_ones_as_key_and_size(
        self, subject: Subject
    ) -> None:
        within = b'"' + b"x" * (FEED_VALUE_BYTES_MAX - 2) + b'"'
        beyond = b'"' + b"x" * (FEED_VALUE_BYTES_MAX - 1) + b'"'
        receipt = await subject.commit(Put("a/within", within), Put("a/beyond", beyond), Push("q/", beyond))
        [commit] = await subject.feed()
        assert commit.version == receipt.version
        assert [(change.value, change.size) for change in commit.changes] == [
            (within, len(within)),
            (b"", len(beyond)),
            (b"", len(beyond)),
        ]
        assert all(change.exists for change in commit.changes)
        await subject.commit(Take("q/", "r/"))
        assert [(c.value, c.size) for c in await subject.changes(after=receipt.version)] == [
            (b"", 0),
            (b"", len(beyond)),
        ]

    async def test_a_removed_cursor_raises_compacted(self, subject: Subject) -> None:
        receipts = [await subject.commit(Put("a/k", b"%d" % i)) for i in range(10)]
        floor = receipts[5].version
        await subject.engine.compact(SPACE, floor)
        assert (await subject.info()).feed_floor == floor
        for receipt in receipts[:5]:
            async with subject.refused(Compacted):
                await subject.watch(cursor=cursor_at(receipt.version)).next()
        for position, receipt in enumerate(receipts[5:-1], 6):
            commits = await subject.watch(cursor=cursor_at(receipt.version)).several(10 - position)
            assert [commit.version for commit in commits] == [later.version for later in receipts[position:]]

    async def test_compaction_removes_history_and_nothing_else(self, subject: Subject) -> None:
        await varied_history(subject)
        before = (await subject.snapshot())[SPACE]
        await subject.engine.compact(SPACE, before.info.revision)
        after = (await subject.snapshot())[SPACE]
        assert after.entries == before.entries
        assert (after.info.revision, after.info.usage) == (before.info.revision, before.info.usage)
        assert (after.info.feed_floor, after.feed) == (before.info.revision, [])
        receipt = await subject.commit(Put("a/new", b"1"))
        assert [commit.version for commit in await subject.feed()] == [receipt.version]

    async def test_compaction_never_lowers_the_floor_and_never_passes_the_revision(self, subject: Subject) -> None:
        receipts = [await subject.commit(Put("a/k", b"%d" % i)) for i in range(4)]
        await subject.engine.compact(SPACE, receipts[2].version)
        await subject.engine.compact(SPACE, receipts[0].version)
        assert (await subject.info()).feed_floor == receipts[2].version
        await subject.engine.compact(SPACE, receipts[3].version + 100)
        assert (await subject.info()).feed_floor == receipts[3].version
        later = await subject.commit(Put("a/k", b"9"))
        assert (await subject.watch(cursor=cursor_at(receipts[3].version)).next()).version == later.version

    async def test_a_cursor_ahead_of_the_space_raises_compacted(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1"))
        for ahead in (1, 1000, 2**62, 10**19 - 1 - await subject.revision()):
            async with subject.refused(Compacted):
                await subject.watch(cursor=cursor_at(await subject.revision() + ahead)).next()

    @pytest.mark.parametrize(
        "cursor",
        ["", "r", "1", "x1", "R1", "r-1", "r+1", "r1.0", "r 1", "r1 ", "r\u0661", "r" + "9" * 20, "rr1", 1, b"r1"],
    )
    async def test_a_malformed_cursor_is_invalid(self, subject: Subject, cursor: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.watch(cursor=cursor).next()

    @pytest.mark.parametrize("prefix", ["/", "/a", "a\0", "a/\0", "\ud800", "a/" + "x" * 1100])
    async def test_a_prefix_that_no_key_can_have_is_invalid(self, subject: Subject, prefix: str) -> None:
        await subject.commit(Put("a/k", b"1"))
        async with subject.refused(InvalidInput):
            await subject.watch("a/", prefix).next()

    async def test_a_cursor_of_a_dropped_space_raises_compacted_when_the_name_comes_back(
        self, subject: Subject
    ) -> None:
        old = await subject.commit(Put("a/k", b"1"))
        await subject.engine.drop(SPACE)
        with pytest.raises(Compacted):
            await subject.watch(cursor=cursor_at(old.version)).next()
        new = await subject.commit(Put("a/k", b"2"))
        async with subject.refused(Compacted):
            await subject.watch(cursor=cursor_at(old.version)).next()
        assert [commit.version for commit in await subject.feed()] == [new.version]

    async def test_feeds_of_spaces_are_separate(self, subject: Subject) -> None:
        await subject.commit(Put("a/here", b"1"))
        await subject.commit(Put("a/there", b"1"), space=ELSEWHERE)
        assert [change.key for change in await subject.changes()] == ["a/here"]
        assert [change.key for change in await subject.changes(space=ELSEWHERE)] == ["a/there"]

    async def test_a_watch_that_is_not_live_ends_when_everything_is_told(self, subject: Subject) -> None:
        await varied_history(subject)
        await subject.commit(Delete("a/none"), request_id="a last no-op")
        start = cursor_at((await subject.info()).feed_floor)
        told = [commit async for commit in subject.engine.watch(SPACE, cursor=start, live=False)]
        assert told == await subject.watch(cursor=start).several(len(told))
        selected = [commit async for commit in subject.engine.watch(SPACE, "q/", cursor=start, live=False)]
        assert [change.key[:2] for commit in selected for change in commit.changes] == ["q/"] * 2
        for prefix in ("a/", "none/"):
            assert [commit async for commit in subject.engine.watch(SPACE, prefix, live=False)] == []
        assert [commit async for commit in subject.engine.watch("unknown", live=False)] == []

    async def test_a_feed_survives_a_reopen(self, subject: Subject) -> None:
        await varied_history(subject)
        before = await subject.feed()
        await subject.reopen()
        assert await subject.feed() == before


class TestWatching:
    async def test_a_waiting_watcher_is_woken_by_a_commit(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        for i in range(1, 20):
            receipt = await subject.commit(Put("a/k", b"%d" % i))
            assert (await watching.next()).version == receipt.version
            watching.begin()
            await subject.settle()

    async def test_a_commit_at_any_moment_of_a_watcher_wakes_it(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now(begun=False)
        for turns in range(30):
            watching.begin()
            for _ in range(turns):
                await asyncio.sleep(0)
            receipt = await subject.commit(Put("a/k", b"%d" % turns))
            assert (await watching.next()).version == receipt.version

    async def test_a_watch_without_cursor_begins_with_its_iteration_and_misses_nothing_after(
        self, subject: Subject
    ) -> None:
        before = [(await subject.commit(Put("a/k", b"0"))).version for _ in range(3)]
        watching = subject.watch()
        before.append((await subject.commit(Put("a/k", b"0"))).version)
        waiting = watching.begin()
        after: list[int] = []
        async with asyncio.timeout(subject.deadline_s):
            while not waiting.done():
                after.append((await subject.commit(Put("a/k", b"1"))).version)
                await asyncio.wait({waiting}, timeout=0.01)
        first = await watching.next()
        assert first.version in after
        rest = after[after.index(first.version) + 1 :]
        assert [commit.version for commit in await watching.several(len(rest))] == rest

    async def test_a_watcher_may_come_before_its_space(self, subject: Subject) -> None:
        [*none] = await subject.engine.spaces(SPACE)
        assert none == []
        watching = subject.watch("a/")
        waiting = watching.begin()
        await subject.settle()
        async with asyncio.timeout(subject.deadline_s):
            while not waiting.done():
                await subject.commit(Put("a/k", b"1"))
                await asyncio.wait({waiting}, timeout=0.01)
        assert [change.key for change in (await watching.next()).changes] == ["a/k"]

    async def test_a_watcher_sleeps_through_changes_of_other_prefixes(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now("b/")
        for i in range(LONG):
            await subject.commit(Put("a/k", b"%d" % i))
        receipt = await subject.commit(Put("b/k", b"1"), Put("a/k", b"1"))
        commit = await watching.next()
        assert (commit.version, [change.key for change in commit.changes]) == (receipt.version, ["b/k"])

    async def test_every_watcher_gets_every_change(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watchers = [await subject.watch_from_now() for _ in range(10)]
        receipts = await asyncio.gather(*(subject.commit(Put(f"a/{i}", b"1")) for i in range(20)))
        expected = sorted(receipt.version for receipt in receipts)
        for watching in watchers:
            assert [commit.version for commit in await watching.several(20)] == expected

    async def test_a_watcher_in_another_engine_is_woken(self, subject: Subject) -> None:
        other = await subject.another()
        await subject.commit(Put("a/k", b"0"))
        here, there = await subject.watch_from_now(), await subject.watch_from_now(engine=other)
        for i in range(6):
            receipt = await subject.commit(Put("a/k", b"%d" % i), engine=(subject.engine, other)[i % 2])
            assert (await here.next()).version == receipt.version
            assert (await there.next()).version == receipt.version
            here.begin()
            there.begin()
            await subject.settle()

    async def test_an_expiry_wakes_a_watcher_once_it_is_told(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"1", ttl_ms=1000))
        watching = await subject.watch_from_now("a/")
        subject.advance_ms(1000)
        await subject.commit()
        commit = await watching.next()
        assert [(change.op, change.key) for change in commit.changes] == [("expire", "a/k")]

    async def test_a_cancelled_watcher_disturbs_nobody(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        doomed, staying = await subject.watch_from_now(), await subject.watch_from_now()
        await doomed.close()
        receipt = await subject.commit(Put("a/k", b"1"))
        assert (await staying.next()).version == receipt.version
        assert (await subject.commit(Put("a/k", b"2"))).version > receipt.version

    async def test_a_watcher_that_was_cancelled_is_resumed_by_its_cursor(self, subject: Subject) -> None:
        start = await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        second = await subject.commit(Put("a/k", b"1"))
        seen = await watching.next()
        assert seen.version == second.version > start.version
        await watching.close()
        missed = await subject.commit(Put("a/k", b"2"))
        assert (await subject.watch(cursor=seen.cursor).next()).version == missed.version

    async def test_a_watcher_left_behind_by_compaction_gets_an_error_and_never_a_gap(self, subject: Subject) -> None:
        await subject.engine.create(SPACE, "async")
        first = await subject.commit(Put("a/k", b"0"))
        watching = subject.watch(cursor=cursor_at(first.version - 1))
        position = (await watching.next()).version
        for i in range(LONG):
            last = await subject.commit(Put("a/k", b"%d" % i))
        await subject.engine.compact(SPACE, last.version - 1)
        try:
            while position < last.version:  # an engine may have read ahead
                commit = await watching.next()
                assert commit.version == position + 1
                position = commit.version
        except Compacted:
            assert position < last.version

    async def test_a_waiting_watcher_that_is_up_to_date_outlives_compaction(self, subject: Subject) -> None:
        last = await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        await subject.engine.compact(SPACE, last.version)
        receipt = await subject.commit(Put("a/k", b"1"))
        assert (await watching.next()).version == receipt.version

    async def test_a_watcher_of_a_dropped_space_gets_compacted(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        await subject.engine.drop(SPACE)
        with pytest.raises(Compacted):
            await watching.next()

    async def test_a_waiting_watcher_ends_when_its_engine_closes(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()
        await subject.engine.close()
        with pytest.raises((Error, StopAsyncIteration)):
            await watching.next()

    async def test_changes_handed_to_one_watcher_are_not_those_of_another(self, subject: Subject) -> None:
        start = cursor_at((await subject.engine.create(SPACE)).revision)
        await subject.commit(Put("a/1", b"1"), Put("a/2", b"2"))
        careless = await subject.watch(cursor=start).next()
        careless.changes.clear()
        careful = await subject.watch(cursor=start).next()
        assert [change.key for change in careful.changes] == ["a/1", "a/2"]

    async def test_a_watcher_follows_concurrent_writers_without_loss(self, subject: Subject) -> None:
        await subject.commit(Put("a/k", b"0"))
        watching = await subject.watch_from_now()

        async def write(writer: int) -> list[int]:
            batches = (Batch(f"w{writer}", (Increment("n/1", 1), Put(f"w/{writer}", b"%d" % i))) for i in range(20))
            return [(await subject.engine.commit(SPACE, batch)).version for batch in batches]

        written, commits = await asyncio.gather(
            asyncio.gather(*(write(writer) for writer in range(8))), watching.several(160)
        )
        assert [commit.version for commit in commits] == sorted(version for each in written for version in each)
        counts: list[Change] = [commit.changes[0] for commit in commits]
        assert [int(change.value) for change in counts] == list(range(1, 161))
