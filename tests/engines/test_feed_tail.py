"""The newest commits of a space, shared by the watchers of a process: no gap, nothing twice, no more readings than needed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine import Change, ChangeSet, cursor_at
from holdfast.engines import feed_tail
from holdfast.engines.bells import Bells
from holdfast.engines.feed import READ_MAX, follow
from holdfast.engines.feed_tail import Tail, Tails
from holdfast.errors import Compacted, Unavailable


def key_of(version: int) -> str:
    return f"{'rare' if version % 4 == 0 else 'often'}/{version}"


class Store:
    """A feed in memory that counts who reads it, and gives at most a few commits at a time."""

    def __init__(self, at_most: int = READ_MAX) -> None:
        self.commits: list[ChangeSet] = []
        self.readings = 0
        self.floor = 0
        self.failure: Exception | None = None
        self.is_late = False
        """Whether a reading that was held up gives what there is then."""
        self.open = asyncio.Event()
        self.open.set()
        self._at_most = at_most

    def commit(self, count: int = 1) -> list[ChangeSet]:
        first = len(self.commits) + 1
        made = [ChangeSet(n, n, "a", [Change("put", key_of(n), value=b"v")]) for n in range(first, first + count)]
        self.commits += made
        return made

    async def bounds(self) -> tuple[int, int]:
        return self.floor, len(self.commits)

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        self.readings += 1
        found = self.commits[after : after + min(limit, self._at_most)]
        await self.open.wait()
        if self.is_late:
            found = self.commits[after : after + min(limit, self._at_most)]
        if self.failure is not None:
            raise self.failure
        if after < self.floor:
            raise Compacted("it begins later")
        return found


async def seen(tail: Tail, count: int, cursor: int = 0) -> list[int]:
    """The versions of so many commits, as a watcher gets them."""
    versions: list[int] = []
    with tail.watching(()) as feed:
        async for commit in follow(feed, (), cursor_at(cursor)):
            versions.append(commit.version)
            if len(versions) == count:
                break
    return versions


async def steps(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_this_process_commits_is_not_read_at_all() -> None:
    store = Store()
    tail = Tail(store)
    watching = [asyncio.ensure_future(seen(tail, 30)) for _ in range(3)]
    await steps()
    before = store.readings
    for _ in range(30):
        after = len(store.commits)
        tail.made(after, store.commit())
        await steps(3)
    assert await asyncio.gather(*watching) == [list(range(1, 31))] * 3
    assert store.readings == before


async def test_what_others_commit_is_read_once_for_all_who_watch() -> None:
    store = Store()
    tail = Tail(store)
    watching = [asyncio.ensure_future(seen(tail, 10)) for _ in range(5)]
    await steps()
    before = store.readings
    for _ in range(10):
        store.commit()
        tail.look(len(store.commits))
        await steps()
    assert await asyncio.gather(*watching) == [list(range(1, 11))] * 5
    assert store.readings == before + 10


async def test_a_reading_that_gives_only_a_part_is_followed_by_another() -> None:
    store = Store(at_most=2)
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 9))
    await steps()
    store.commit(9)
    tail.look(9)
    assert await asyncio.wait_for(watching, 5) == list(range(1, 10))


async def test_a_commit_that_is_told_of_during_a_reading_is_not_missed() -> None:
    store = Store()
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 2))
    await steps()
    store.commit()
    store.open.clear()
    tail.look(1)
    await steps()  # the reading has its answer, and is held up
    store.commit()
    tail.look(2)
    store.open.set()
    assert await asyncio.wait_for(watching, 5) == [1, 2]


async def all_there_is(tail: Tail) -> list[int]:
    with tail.watching(()) as feed:
        return [commit.version async for commit in follow(feed, (), cursor_at(0), live=False)]


async def test_who_reads_to_the_end_does_not_take_the_middle_of_anothers_reading_for_it() -> None:
    store = Store(at_most=10)
    tail = Tail(store)
    store.commit(30)
    await tail.read(0, 10)
    store.open.clear()
    readers = [asyncio.ensure_future(tail.read(10, 10))]
    await steps()
    readers += [asyncio.ensure_future(tail.read(10, 10))]
    await steps()
    store.open.set()
    assert [[commit.version for commit in found] for found in await asyncio.gather(*readers)] == [[*range(11, 21)]] * 2
    assert await all_there_is(tail) == [*range(1, 31)]


async def test_who_reads_to_the_end_is_shown_what_nobody_told_this_process_of() -> None:
    store = Store()
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 2))
    store.commit()
    await steps()
    store.commit()  # by another process, and the bell has not been heard yet
    assert await all_there_is(tail) == [1, 2]
    assert await watching == [1, 2]


async def test_a_commit_of_our_own_that_a_reading_finds_too_is_seen_once() -> None:
    store = Store()
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 3))
    await steps()
    store.open.clear()
    store.is_late = True
    tail.look()
    await steps()
    tail.made(0, store.commit())
    store.commit()
    store.open.set()
    await steps()
    tail.made(2, store.commit())
    assert await asyncio.wait_for(watching, 5) == [1, 2, 3]


async def test_our_own_commit_after_others_that_we_have_not_read_waits_for_theirs() -> None:
    store = Store()
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 3))
    await steps()
    store.commit(2)
    tail.made(2, store.commit())
    assert await asyncio.wait_for(watching, 5) == [1, 2, 3]


async def test_a_watcher_that_leaves_in_the_middle_of_a_reading_takes_nothing_from_the_others() -> None:
    store = Store()
    tail = Tail(store)
    leaving, staying = (asyncio.ensure_future(seen(tail, 1)) for _ in range(2))
    await steps()
    store.open.clear()
    store.commit()
    tail.look(1)
    await steps()
    leaving.cancel()
    store.open.set()
    assert await asyncio.wait_for(staying, 5) == [1]


async def test_a_failure_reaches_everybody_and_each_goes_on_from_where_it_was() -> None:
    store = Store()
    tail = Tail(store)
    watching = [asyncio.ensure_future(seen(tail, 2)) for _ in range(2)]
    await steps()
    store.failure = Unavailable("gone")
    store.commit()
    tail.look(1)
    for failed in watching:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(failed, 5)
    store.failure = None
    store.commit()
    assert await asyncio.wait_for(seen(tail, 2), 5) == [1, 2]


async def test_who_fell_behind_what_the_store_keeps_is_told_so() -> None:
    store = Store()
    tail = Tail(store)
    watching = asyncio.ensure_future(seen(tail, 5))
    await steps()
    store.commit(4)
    store.floor = 3
    tail.look(4)
    with pytest.raises(Compacted):
        await asyncio.wait_for(watching, 5)


async def test_a_position_that_the_tail_does_not_know_is_the_stores_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tail, "KEPT_MAX", 8)
    store = Store()
    tail = Tail(store)
    ahead = asyncio.ensure_future(seen(tail, 100))
    await steps()
    for _ in range(100):
        tail.made(len(store.commits), store.commit())
    assert await asyncio.wait_for(ahead, 5) == list(range(1, 101))
    assert len(tail._commits) <= 8
    before = store.readings
    assert await seen(tail, 50, cursor=50) == list(range(51, 101))
    assert store.readings > before


async def test_one_that_stands_further_than_the_tail_does_not_keep_the_loop_busy() -> None:
    store = Store()
    tail = Tail(store)
    store.commit()
    assert await seen(tail, 1) == [1]
    store.commit(3)
    ahead = asyncio.ensure_future(seen(tail, 1, cursor=4))
    await steps(50)
    before = store.readings
    await steps(50)
    assert store.readings == before
    tail.made(4, store.commit())
    assert await asyncio.wait_for(ahead, 5) == [5]


async def test_who_watches_something_else_is_not_woken_and_need_not_read_what_it_was_not_woken_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_tail, "KEPT_MAX", 8)
    store = Store()
    tail = Tail(store)
    prefixes = ("never/", "rare/100")
    with tail.watching(prefixes) as feed:
        watching = asyncio.ensure_future(anext(follow(feed, prefixes, cursor_at(0))))
        await steps()
        before = store.readings
        for _ in range(99):
            tail.made(len(store.commits), store.commit())
            await steps(3)
        tail.made(99, store.commit())
        assert (await asyncio.wait_for(watching, 5)).version == 100
        assert store.readings == before


async def test_one_that_leaves_and_one_that_was_woken_keep_nobody_from_being_woken() -> None:
    store, bells = Store(), Bells()

    async def wait(prefix: str) -> int | None:
        with bells.listening((prefix,)) as listener:
            return await listener.wait()

    def waits(prefix: str) -> asyncio.Task[int | None]:
        return asyncio.ensure_future(wait(prefix))

    leaves, often, rare = waits("often/"), waits("often/"), waits("rare/")
    await steps(1)
    leaves.cancel()
    bells.ring(0, store.commit(3))
    assert await often == 0
    assert not rare.done()
    again = waits("often/")
    await steps(1)
    bells.ring(3, store.commit(2))
    assert (await rare, await again) == (3, 4)


async def test_a_space_that_nobody_watches_has_no_tail() -> None:
    tails = Tails(lambda space: Store())
    with tails.watching("a", ()) as one, tails.watching("a", ("k/",)) as two:
        assert one._tail is two._tail
        assert list(tails) == ["a"]
    assert not tails


HAPPENINGS = st.lists(
    st.sampled_from(["ours", "theirs", "theirs, told", "told", "anew", "step", "new watcher"]), max_size=60
)


@given(happenings=HAPPENINGS, at_most=st.integers(1, 4), kept=st.integers(2, 20))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_everybody_sees_every_commit_once_and_in_order(
    happenings: list[str], at_most: int, kept: int
) -> None:
    async def run() -> None:
        store = Store(at_most)
        tail = Tail(store)
        watching: list[tuple[int, str, list[int], asyncio.Task[None]]] = []

        def watch() -> None:
            start, versions = len(store.commits), list[int]()
            prefix = ("", "rare/", "often/")[len(watching) % 3]

            async def go() -> None:
                with tail.watching((prefix,)) as feed:
                    async for commit in follow(feed, (prefix,), cursor_at(start)):
                        versions.append(commit.version)

            watching.append((start, prefix, versions, asyncio.ensure_future(go())))

        watch()

        watch()
        for what in happenings:
            if what == "ours":
                tail.made(len(store.commits), store.commit())
            elif what.startswith("theirs"):
                store.commit()
            elif what == "anew":
                tail.begin_anew()
            elif what == "new watcher":
                watch()
            else:
                await asyncio.sleep(0)
            if what.endswith("told"):
                tail.look(len(store.commits))
        tail.look(len(store.commits))
        for _ in range(400):
            await asyncio.sleep(0)
        for start, prefix, versions, task in watching:
            task.cancel()
            expected = range(start + 1, len(store.commits) + 1)
            assert versions == [version for version in expected if key_of(version).startswith(prefix)]
        await asyncio.gather(*(task for *_, task in watching), return_exceptions=True)

    before, feed_tail.KEPT_MAX = feed_tail.KEPT_MAX, kept  # type: ignore[misc]
    try:
        asyncio.run(run())
    finally:
        feed_tail.KEPT_MAX = before  # type: ignore[misc]
