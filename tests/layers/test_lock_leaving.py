"""Who leaves a line leaves nothing behind: cancelled at any await, with blocks that share one object, under a lock that was lost."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast import InvalidInput, LeaseLost, LockAcquisitionError, ManualClock, Space, Store, blocking
from holdfast.engine import OPERATIONS_MAX, SCAN_MAX, Batch, Delete, Push, Put, Receipt
from holdfast.errors import OutcomeUnknown
from holdfast.layers import lines
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.lines import PERMITS
from holdfast.layers.locks import Wanted
from holdfast.middleware.wrapper import Wrapper

STEPS = 16
"""Steps of the event loop after which somebody is cancelled, one after the other."""
DEADLINE_S = 20


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk", instance="2")


async def cancelled_after(steps: int, work: asyncio.Task[object]) -> bool:
    """Cancel it; False if it was over before."""
    for _ in range(steps):
        await asyncio.sleep(0)
    if work.done():
        return False
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    return True


@pytest.mark.parametrize("wait", [0, None])
async def test_who_is_cancelled_while_it_acquires_something_free_holds_nothing(space: Space, wait: int | None) -> None:
    for steps in range(1, STEPS):
        task = asyncio.create_task(space.lock("book", wait=wait).acquire())
        if not await cancelled_after(steps, task):
            await (await task).release()
        assert await space.locks.list() == []


async def test_who_is_cancelled_while_it_waits_leaves_the_line(space: Space, other: Space) -> None:
    async with space.lock("book"):
        for steps in range(1, STEPS):
            task = asyncio.create_task(other.lock("book", wait=None).acquire())
            assert await cancelled_after(steps, task)
            [state] = await space.locks.list()
            assert state.waiters == []


async def test_who_is_cancelled_while_it_releases_has_released(space: Space) -> None:
    for steps in range(1, STEPS):
        guard = await space.lock("book").acquire()
        task = asyncio.create_task(guard.release())
        await cancelled_after(steps, task)
        assert await space.locks.list() == []


async def test_who_never_hears_whether_it_stands_in_line_does_not(space: Space) -> None:
    class Unheard(Wrapper):
        """The first commit takes effect, and nobody is told."""

        done = False

        async def commit(self, space: str, batch: Batch) -> Receipt:
            receipt = await super().commit(space, batch)
            if not self.done and type(batch.operations[0]) is Push:
                self.done = True
                raise OutcomeUnknown("the connection ended", request_id=batch.request_id)
            return receipt

    unheard = Space(replace(space._scope, engine=Unheard(space._scope.engine)), space._blob_folder, space._coordination)
    with pytest.raises(OutcomeUnknown):
        await unheard.lock("book").acquire()
    async with asyncio.timeout(DEADLINE_S):
        while await space.locks.list():
            await asyncio.sleep(0)


async def test_who_never_hears_that_its_turn_was_noted_holds_all_the_same(space: Space, store: Store) -> None:
    class Unheard(Wrapper):
        """The first note of a turn takes effect, and nobody is told."""

        noted = 0

        async def commit(self, space: str, batch: Batch) -> Receipt:
            receipt = await super().commit(space, batch)
            if type(batch.operations[0]) is Put and batch.operations[0].key.startswith("locks/"):
                self.noted += 1
                if self.noted == 1:
                    raise OutcomeUnknown("the connection ended", request_id=batch.request_id)
            return receipt

    engine = Unheard(space._scope.engine)
    unheard = Space(replace(space._scope, engine=engine), space._blob_folder, space._coordination)
    held = await store.space("contoso", agent="risk").lock("book").acquire()
    waiter = asyncio.create_task(unheard.lock("book", wait=None).acquire())
    async with asyncio.timeout(DEADLINE_S):
        while not (await space.locks.list())[0].waiters:
            await asyncio.sleep(0)
        [place] = (await space.locks.list())[0].waiters
        await held.release()
        while not waiter.done():
            space._scope.clock.advance("10ms")  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        guard = await waiter
    assert (guard.id, engine.noted) == (place.id, 2)  # the place it had, and no other
    await guard.space.records.set("cash", 1)
    [state] = await space.locks.list()
    assert [stand.token for stand in state.holders] == [guard.token]
    await guard.release()


async def test_blocks_that_share_one_object_end_their_own(space: Space) -> None:
    permits = space.semaphore("gpu", permits=2)
    entered, go_on = [asyncio.Event() for _ in range(2)], [asyncio.Event() for _ in range(2)]

    async def use(number: int) -> None:
        async with permits as guard:
            entered[number].set()
            await go_on[number].wait()
            await guard.space.records.set(f"used/{number}", True)

    tasks = []
    for number in range(2):
        tasks.append(asyncio.create_task(use(number)))
        await entered[number].wait()
    for number in range(2):
        go_on[number].set()
        await tasks[number]
    assert await space.records.keys("used/") == ["used/0", "used/1"]
    assert await space.locks.list() == []


async def test_a_block_whose_lease_was_lost_does_not_end_the_block_of_its_successor(space: Space, admin: Space) -> None:
    lock = space.lock("book", ttl=30)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def succeed() -> None:
        async with lock as guard:
            entered.set()
            await go_on.wait()
            await guard.space.records.set("theirs", 1)

    await lock.__aenter__()
    await admin.locks.break_("book")
    task = asyncio.create_task(succeed())
    await entered.wait()
    with pytest.raises(LeaseLost):
        await lock.__aexit__(None, None, None)
    go_on.set()
    await task
    assert await space.locks.list() == []


def test_blocks_of_threads_that_share_one_object_end_their_own(tmp_path: Path) -> None:
    with blocking.open(f"sqlite:{tmp_path}/store.db") as store:
        space = store.space("contoso", agent="market")
        permits = space.semaphore("gpu", permits=2)
        entered, go_on = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

        def use(number: int) -> None:
            with permits as guard:
                entered[number].set()
                go_on[number].wait(DEADLINE_S)
                guard.space.records.set(f"used/{number}", True)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
        for number in range(2):
            threads[number].start()
            assert entered[number].wait(DEADLINE_S)
        for number in range(2):
            go_on[number].set()
            threads[number].join()
        assert space.records.keys("used/") == ["used/0", "used/1"]
        assert space.locks.list() == []


async def test_a_block_that_another_task_ends_is_ended(space: Space) -> None:
    lock = space.lock("book")
    await asyncio.create_task(lock.__aenter__())
    await asyncio.create_task(lock.__aexit__(None, None, None))
    assert await space.locks.list() == []


async def test_what_was_acquired_under_a_lock_is_released_also_when_that_lock_was_lost(
    space: Space, admin: Space
) -> None:
    outer = await space.lock("outer").acquire()
    async with outer.space.lock("inner") as inner:
        await admin.locks.break_("outer")
        await inner.renew()
    assert await space.locks.list() == []
    with pytest.raises(LeaseLost, match="outer"):
        await outer.space.lock("inner").acquire()
    assert await space.locks.list() == []


async def test_a_waiter_whose_clock_ran_ahead_does_not_stand_behind_itself(space: Space, clock: ManualClock) -> None:
    ahead = ManualClock(clock.now_ms())
    coordination = Coordination(Leases(ahead), space._scope.engine)
    waiter = Space(replace(space._scope, clock=ahead, actor="risk"), space._blob_folder, coordination)
    holder = await space.lock("book", ttl=60).acquire()
    task = asyncio.create_task(waiter.lock("book", wait=None).acquire())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (await space.locks.list())[0].waiters:
                await asyncio.sleep(0)
            first = (await space.locks.list())[0].waiters[0].id
            ahead.advance("45s")
            while [stand.id for stand in (await space.locks.list())[0].waiters] == [first]:
                await asyncio.sleep(0)
            while first in {stand.id for stand in (await space.locks.list())[0].waiters}:
                await asyncio.sleep(0)
            await holder.release()
            await (await task).release()
    finally:
        task.cancel()
        await coordination.close()


async def test_a_lock_that_is_known_to_be_lost_cannot_be_renewed(space: Space, clock: ManualClock) -> None:
    guard = await space.lock("book", ttl=30).acquire()
    space._coordination.leases.lose(guard._lease)
    with pytest.raises(LeaseLost):
        await guard.renew()


async def test_a_semaphore_with_many_holders_can_be_broken(space: Space, admin: Space) -> None:
    guards = [await space.semaphore("gpu", permits=200).acquire() for _ in range(OPERATIONS_MAX + 1)]
    assert len(await admin.locks.break_("gpu", "semaphore")) == len(guards)
    assert await space.locks.list() == []


async def test_more_may_hold_something_than_one_page_shows(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCAN_MAX > 8
    monkeypatch.setattr(lines, "SCAN_MAX", 8)
    guards = [await space.semaphore("gpu", permits=20).acquire() for _ in range(20)]
    readers = [await space.read_lock("book").acquire() for _ in range(20)]
    pool = space.pool("licences", size=20)
    guards += [await pool.allocate(1).acquire() for _ in range(15)]
    assert await pool.available() == 5
    with pytest.raises(LockAcquisitionError):
        await space.semaphore("gpu", permits=20).acquire()
    task = asyncio.create_task(space.semaphore("gpu", permits=20, wait=None).acquire())
    while (await space.locks.list("gpu"))[0].waiters == []:
        await asyncio.sleep(0)
    await guards[3].release()
    async with asyncio.timeout(DEADLINE_S):
        guards[3] = await task
    for guard in (*guards, *readers):
        await guard.release()


async def test_a_refusal_names_who_holds_and_not_who_asked(space: Space, other: Space, clock: ManualClock) -> None:
    licences = space.pool("licences", size=10), other.pool("licences", size=10)
    async with licences[0].allocate(8):
        with pytest.raises(LockAcquisitionError, match="held by market; name a time") as refused:
            await licences[1].allocate(3).acquire()
        assert "risk" not in str(refused.value)
        task = asyncio.create_task(licences[1].allocate(3, wait="1s").acquire())
        while (await space.locks.list())[0].waiters == []:
            await asyncio.sleep(0)
        clock.advance("1s")
        with pytest.raises(LockAcquisitionError, match="after 1 s: it is held by market; wait longer"):
            await task


@pytest.mark.parametrize("kind", ["semaphore", "pool"])
async def test_a_size_that_was_deleted_is_agreed_on_anew_also_by_who_remembers_it(
    space: Space, admin: Space, kind: str
) -> None:
    coordination = Coordination(Leases(space._scope.clock), space._scope.engine)
    elsewhere = Space(replace(space._scope, actor="risk"), space._blob_folder, coordination)

    def wanted(where: Space, size: int) -> Wanted:
        if kind == "pool":
            return where.pool("gpu", size=size).allocate(1)
        return where.semaphore("gpu", permits=size)

    async with wanted(space, 5):
        pass
    await admin._scope.commit((Delete(PERMITS.key(kind, "gpu")),))
    held = [await wanted(elsewhere, 2).acquire() for _ in range(2)]
    with pytest.raises(InvalidInput, match="has 2 permits"):
        await wanted(space, 5).acquire()
    for guard in held:
        await guard.release()
    await admin._scope.commit((Delete(PERMITS.key(kind, "gpu")),))
    async with wanted(space, 1):  # alone, and so in one commit
        with pytest.raises(InvalidInput, match="has 1 permits"):
            await wanted(elsewhere, 2).acquire()
    await coordination.close()
