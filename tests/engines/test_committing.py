"""Group commit: what is taken together, who leaves with whom, and how it ends over a network."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine import Batch, Put, Receipt
from holdfast.engines.committing import Committer, Over
from holdfast.engines.grouping import GROUP_BYTES_MAX, CommitQueue, Waiting, answer
from holdfast.errors import Unavailable


class Slow:
    """Writes groups when it is told to."""

    def __init__(self, *, by_task: bool) -> None:
        self.by_task = by_task
        self.go = asyncio.Event()
        self.committer = Committer(self._begin)

    def _begin(self, space: str, items: list[Waiting], over: Over) -> None:
        if self.by_task:
            return over(self._write(items))
        written = asyncio.ensure_future(self._write(items))
        written.add_done_callback(lambda _: over(None))
        return None

    async def _write(self, items: list[Waiting]) -> None:
        await self.go.wait()
        for item in items:
            item.outcome = Receipt(1, 1)

    def commit(self) -> asyncio.Task[Receipt]:
        return asyncio.ensure_future(self.commit_here())

    async def commit_here(self) -> Receipt:
        return await self.committer.commit("s", "sync", Batch("a", (Put("a/k", b"1"),)), 1)


@pytest.mark.parametrize("by_task", [False, True])
async def test_it_may_be_closed_by_several_at_once_and_by_one_who_is_cancelled(by_task: bool) -> None:
    slow = Slow(by_task=by_task)
    commits = [slow.commit() for _ in range(3)]
    await asyncio.sleep(0)
    closes = [asyncio.ensure_future(slow.committer.close()) for _ in range(3)]
    await asyncio.sleep(0)
    closes[1].cancel()
    with pytest.raises(Unavailable):
        await slow.commit()
    slow.go.set()
    async with asyncio.timeout(5):
        await asyncio.gather(closes[0], closes[2])
        assert [await each for each in commits] == [Receipt(1, 1)] * 3
    await slow.committer.close()


def test_who_ends_the_program_keeps_nobody_from_cleaning_up() -> None:
    async def ends(slow: Slow) -> None:
        await slow.commit_here()
        raise SystemExit(3)

    async def begin() -> tuple[Slow, asyncio.Task[None]]:
        slow = Slow(by_task=False)
        slow.go.set()
        return slow, asyncio.create_task(ends(slow))

    loop = asyncio.new_event_loop()
    try:
        slow, ending = loop.run_until_complete(begin())
        with pytest.raises(SystemExit):
            loop.run_until_complete(ending)
        assert loop.run_until_complete(asyncio.wait_for(slow.commit_here(), 5)) == Receipt(1, 1)
        loop.run_until_complete(asyncio.wait_for(slow.committer.close(), 5))
    finally:
        loop.close()


async def test_a_group_that_is_cancelled_tells_its_callers_and_holds_up_no_close() -> None:
    slow = Slow(by_task=True)
    commit = slow.commit()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [task] = slow.committer._tasks
    closing = asyncio.ensure_future(slow.committer.close())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await closing
        with pytest.raises(asyncio.CancelledError):
            await commit


class Counted(Slow):
    """Tells how large the groups were."""

    def __init__(self) -> None:
        super().__init__(by_task=False)
        self.groups: list[int] = []
        self.go.set()

    def _begin(self, space: str, items: list[Waiting], over: Over) -> None:
        self.groups.append(len(items))
        super()._begin(space, items, over)


async def test_who_is_alone_leaves_at_once_and_those_who_come_together_leave_together() -> None:
    counted = Counted()
    alone = counted.committer.commit("s", "sync", Batch("a", (Put("a/k", b"1"),)), 1)
    alone.send(None)  # as far as it goes without a step of the loop
    assert counted.groups == [1]
    alone.close()
    await asyncio.sleep(0.01)
    for _ in range(2):
        await asyncio.gather(*(counted.commit() for _ in range(5)))
        await counted.commit()
    assert counted.groups == [1, 5, 1, 5, 1]


def queued(*items: Waiting) -> CommitQueue:
    queue = CommitQueue()
    for item in items:
        queue.add(item)
    return queue


def waiting(name: str, durability: str = "sync", size: int = 1) -> Waiting:
    return Waiting(name, durability, Batch("market", ()), size)


def test_a_group_has_one_durability_and_the_order_in_which_they_came() -> None:
    queue = queued(waiting("a"), waiting("b"), waiting("c", "async"), waiting("d"))
    assert [item.space for item in queue.take_group()] == ["a", "b"]
    assert [item.space for item in queue.take_group()] == ["c"]
    assert [item.space for item in queue.take_group()] == ["d"]
    assert (len(queue), queue.bytes) == (0, 0)


def test_a_group_ends_before_the_batch_that_makes_it_too_large() -> None:
    half = GROUP_BYTES_MAX // 2
    queue = queued(
        waiting("a", size=half), waiting("b", size=half), waiting("c"), waiting("d", size=2 * GROUP_BYTES_MAX)
    )
    assert [item.space for item in queue.take_group()] == ["a", "b"]
    assert [item.space for item in queue.take_group()] == ["c"]
    assert queue.bytes == 2 * GROUP_BYTES_MAX
    assert [item.space for item in queue.take_group()] == ["d"], "one that is too large for any group goes alone"


async def test_a_group_leaves_out_those_who_went_away() -> None:
    gone, there = waiting("gone"), waiting("there")

    async def wait(item: Waiting) -> Receipt:
        item._loop = asyncio.get_running_loop()
        await item
        return item.told()

    tasks = [asyncio.ensure_future(wait(item)) for item in (gone, there)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    queue = queued(gone, there)
    assert queue.take_group() == [there]
    assert queue.bytes == 0
    there.outcome = Receipt(1, 1)
    answer([there])  # within a task
    assert await tasks[1] == Receipt(1, 1)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    await there  # who comes too late to be woken need not wait
