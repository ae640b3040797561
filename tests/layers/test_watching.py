"""Watching records: live, resumed, in order, together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Compacted, InvalidInput, ManualClock, RecordChanges, Space, Store, increment, set_
from holdfast.engines import feed_tail

DEADLINE_S = 10


async def take(changes: AsyncIterator[RecordChanges], count: int) -> list[RecordChanges]:
    """The next few commits; fails rather than waits for ever."""
    return [await asyncio.wait_for(anext(changes), DEADLINE_S) for _ in range(count)]


def told(commits: list[RecordChanges]) -> list[tuple[str, str, object]]:
    return [(change.op, change.key, change.value) for commit in commits for change in commit]


async def test_a_waiting_watcher_is_woken_by_a_commit(space: Space) -> None:
    watch = space.watch("orders/")
    waiting = asyncio.ensure_future(take(watch, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await space.records.set("other", 1)
    await space.records.set("orders/1", {"qty": 2})
    [commit] = await asyncio.wait_for(waiting, DEADLINE_S)
    assert told([commit]) == [("put", "orders/1", {"qty": 2})]
    assert (commit.actor, commit.version) == ("market", 2)
    assert commit.at.tzinfo is not None
    assert commit.request_id


async def test_a_batch_arrives_together(space: Space) -> None:
    start = await space.cursor()
    await space.commit(set_("a", 1), increment("b", 2), set_("c", 3))
    [commit] = await take(space.watch(cursor=start), 1)
    assert told([commit]) == [("put", "a", 1), ("increment", "b", 2), ("put", "c", 3)]
    assert len(commit) == 3


async def test_a_saved_cursor_resumes_exactly(space: Space) -> None:
    start = await space.cursor()
    for number in range(10):
        await space.records.set("k", number)
    first = await take(space.watch("k", cursor=start), 4)
    rest = await take(space.watch("k", cursor=first[-1].cursor), 6)
    assert [change.value for commit in first + rest for change in commit] == list(range(10))


async def test_lists_and_sets_tell_of_their_items(space: Space) -> None:
    start = await space.cursor()
    await space.records.append_to_list("x/files", "a", "b")
    await space.records.add_to_set("x/errors", "E1", "E2")
    await space.records.remove_from_set("x/errors", "E1")
    await space.records.delete("x/files")
    await space.records.append_to_list("y/files", "c")
    commits = await take(space.watch("x/", cursor=start), 4)
    assert told(commits) == [
        ("append", "x/files", "a"),
        ("append", "x/files", "b"),
        ("add", "x/errors", "E1"),
        ("add", "x/errors", "E2"),
        ("remove", "x/errors", "E1"),
        ("delete", "x/files", None),
    ]


async def test_an_expiry_is_told_once_by_the_store_itself(store: Store, space: Space, clock: ManualClock) -> None:
    start = await space.cursor()
    await space.records.set("k", 1, ttl="5s")
    clock.advance("6s")
    await store.tidy()
    await store.tidy()
    await space.records.set("k", 2)
    commits = await take(space.watch(cursor=start), 3)
    assert told(commits) == [("put", "k", 1), ("expire", "k", None), ("put", "k", 2)]
    assert commits[1].actor == "holdfast"
    assert not commits[1].changes[0].exists


async def test_a_large_value_is_told_by_name_only(space: Space) -> None:
    start = await space.cursor()
    await space.records.set("big", "x" * 70_000)
    await space.records.set("small", "y")
    [big, small] = await take(space.watch(cursor=start), 2)
    assert (big.changes[0].large, big.changes[0].value) == (True, None)
    assert (small.changes[0].large, small.changes[0].value) == (False, "y")


async def test_a_cursor_the_feed_no_longer_reaches_is_compacted(space: Space) -> None:
    start = await space.cursor()
    for number in range(5):
        await space.records.set("k", number)
    await space._scope.engine.compact(space.name, 3)
    with pytest.raises(Compacted, match="watch from now"):
        await take(space.watch(cursor=start), 1)


async def test_a_slow_watcher_is_cut_off_not_skipped(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tail, "KEPT_MAX", 0)  # what was committed here is in memory for a while
    watch = space.watch(cursor=await space.cursor())
    await space.records.set("k", 0)
    await take(watch, 1)
    for number in range(5):
        await space.records.set("k", number)
    await space._scope.engine.compact(space.name, 4)
    with pytest.raises(Compacted):
        await take(watch, 1)


@pytest.mark.parametrize("cursor", ["", "r", "x7", "r-1", "7", "r1.5", "r99999999999999999999"])
async def test_a_malformed_cursor_is_invalid(space: Space, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="not a cursor"):
        await take(space.watch(cursor=cursor), 1)


async def test_a_cursor_of_the_future_is_compacted(space: Space) -> None:
    with pytest.raises(Compacted, match="restored from a backup"):
        await take(space.watch(cursor="r1000"), 1)


async def test_a_watcher_of_another_connection_is_woken(tmp_path: Path) -> None:
    """Two stores on one file stand for two processes: nothing but the file connects them."""
    path = str(tmp_path / "team.db")
    async with holdfast.open(path) as one, holdfast.open(path) as two:
        watching, writing = one.space("s"), two.space("s")
        await writing.records.set("before", 1)
        watch = watching.watch(cursor=await watching.cursor())
        waiting = asyncio.ensure_future(take(watch, 1))
        await asyncio.sleep(0)
        await writing.records.set("k", 1)
        assert told(await asyncio.wait_for(waiting, DEADLINE_S)) == [("put", "k", 1)]
