"""A guard is given to who holds it, with its whole ttl; and who gives something up is rid of it, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import InvalidInput, LockAcquisitionError, ManualClock, Space, Store
from holdfast.clock import as_datetime
from holdfast.engine import Batch, Delete, Page, Push, Receipt, Touch
from holdfast.errors import AccessDenied, LeaseLost, RateLimitExceeded, Unavailable
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.lines import PERMITS
from holdfast.middleware.wrapper import Wrapper
from tests.layers.test_lock_waiting import entries
from tests.layers.test_locks import soon, waiting

LONG = 300


class Way(Wrapper):
    """The way of one process to the store, and what happens on it."""

    before: Callable[[Batch], Awaitable[None]] | None = None
    after: Callable[[Batch], Awaitable[None]] | None = None

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.sent: list[list[type]] = []
        self.silent = False

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.sent.append([type(each) for each in batch.operations])
        if self.before is not None:
            await self.before(batch)
        receipt = await super().commit(space, batch)
        if self.after is not None:
            await self.after(batch)
        if self.silent:
            await asyncio.Event().wait()
        return receipt

    async def scan(self, space: str, prefix: str, **how: Any) -> Page:  # type: ignore[override]
        if self.silent:
            await asyncio.Event().wait()
        return await super().scan(space, prefix, **how)


@pytest.fixture
async def way(store: Store, clock: ManualClock) -> Any:
    """Another process of the same agent, and its way to the store."""
    space = store.space("contoso", agent="third", instance="3")
    made = Way(space._scope.engine)
    coordination = Coordination(Leases(clock), made)
    yield made, Space(replace(space._scope, engine=made), space._blob_folder, coordination)
    made.before = made.after = None
    await coordination.close()


async def known(space: Space, count: int) -> None:
    """Return when so many are known to stand in line, by who waits there."""
    lines = space._coordination.lines(space._scope)
    while not any(len(line.places) == count and line.turns for line in lines._lines.values()):
        await asyncio.sleep(0)


async def steps(clock: ManualClock, task: asyncio.Task[Any], by_ms: int = 50) -> None:
    while not task.done():
        clock.advance(timedelta(milliseconds=by_ms))
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("ttl", [2, 30, LONG])
async def test_who_is_next_here_is_given_its_whole_ttl_by_the_commit_that_leaves(
    way: tuple[Way, Space], clock: ManualClock, ttl: int
) -> None:
    sent, space = way[0].sent, way[1]
    holder = await space.lock("book", ttl=ttl).acquire()
    trying = asyncio.create_task(space.lock("book", ttl=ttl, wait=None).acquire())
    await soon(known(space, 2))
    clock.advance("1s")
    sent.clear()
    await holder.release()
    guard = await soon(trying)
    assert sent[0] == [Delete, Touch]
    assert guard.expires_at == as_datetime(clock.now_ms() + 1000 * ttl)
    [entry] = await entries(space)
    assert entry.expires_at == clock.now_ms() + 1000 * ttl
    await guard.release()
    assert await entries(space) == []


async def test_who_waited_for_another_process_begins_with_its_whole_ttl(
    space: Space, way: tuple[Way, Space], clock: ManualClock
) -> None:
    holder = await space.lock("book").acquire()
    trying = asyncio.create_task(way[1].lock("book", ttl=LONG, wait=None).acquire())
    await soon(waiting(space, "book", 1))
    clock.advance("1s")
    await holder.release()
    guard = await soon(trying)
    assert guard.expires_at == as_datetime(clock.now_ms() + 1000 * LONG)
    [entry] = await entries(space)
    assert entry.expires_at == clock.now_ms() + 1000 * LONG
    await guard.release()


async def test_a_waiter_that_has_just_gone_keeps_nobody_from_leaving(
    way: tuple[Way, Space], clock: ManualClock
) -> None:
    made, space = way
    holder = await space.lock("book", ttl=LONG).acquire()
    trying = asyncio.create_task(space.lock("book", ttl=LONG, wait=None).acquire())
    await soon(known(space, 2))
    [mine, waits] = await entries(space)
    assert mine.key.endswith(holder.id)

    async def gone(batch: Batch) -> None:
        made.before = None
        await made.inner.commit(space.name, Batch("third", (Delete(waits.key),)))

    made.before = gone
    await holder.release()
    await steps(clock, trying)  # it stands in line anew
    guard = trying.result()
    assert guard.id not in waits.key
    await guard.release()
    assert await entries(space) == []


@pytest.mark.parametrize("wait", [0, 60])
async def test_what_was_over_when_the_answer_came_is_not_granted(
    way: tuple[Way, Space], space: Space, clock: ManualClock, wait: int
) -> None:
    made, paused = way

    async def pause(batch: Batch) -> None:
        made.after = None
        clock.advance("2s")  # another one takes it meanwhile
        holders.append(await space.lock("book", ttl=30).acquire())

    holders: list[Any] = []
    made.after = pause
    trying = asyncio.create_task(paused.lock("book", ttl=1, wait=wait).acquire())
    if not wait:
        with pytest.raises(LockAcquisitionError, match="was over when the answer came"):
            await soon(trying)
    else:
        await soon(waiting(space, "book", 1))
        await holders[0].release()
        guard = await soon(trying)
        assert guard.expires_at > as_datetime(clock.now_ms())
        assert guard.token > holders[0].token
        await guard.release()


@pytest.mark.parametrize("refusal", [Unavailable("away"), RateLimitExceeded("too many", retry_after=0.3)])
async def test_a_release_that_does_not_get_through_is_tried_until_it_does(
    way: tuple[Way, Space], space: Space, clock: ManualClock, refusal: Exception
) -> None:
    made, there = way
    tries = 0

    async def refuse(batch: Batch) -> None:
        nonlocal tries
        if type(batch.operations[0]) is Delete and tries < 6:
            tries += 1
            raise refusal

    made.before = refuse
    async with there.lock("book", ttl=LONG):
        pass
    taking = asyncio.create_task(space.lock("book", wait=20).acquire())
    await steps(clock, taking)
    assert (taking.result().holder, tries) == ("market", 6)


async def test_who_is_cancelled_twice_leaves_nothing(way: tuple[Way, Space], space: Space) -> None:
    made, there = way

    async def slow(batch: Batch) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    made.before = slow
    for count in range(1, 12):
        for releasing in (False, True):
            if releasing:
                task = asyncio.create_task((await there.lock("book", ttl=LONG).acquire()).release())
            else:
                task = asyncio.create_task(there.lock("book", ttl=LONG).acquire())  # type: ignore[arg-type]
            for _ in range(count):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
                await outcome.release()  # type: ignore[union-attr]

            async def nobody() -> None:
                while there._coordination.leases._leaving or await entries(space):
                    await asyncio.sleep(0)

            await soon(nobody())


async def test_who_gives_up_waits_no_longer_than_a_moment_for_a_store_that_is_silent(
    way: tuple[Way, Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.layers.leases.LEAVING_S", 0.05)
    monkeypatch.setattr("holdfast.layers.locks.LEAVING_S", 0.05)
    made, there = way
    made.silent = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.lock("book").acquire(), 0.05)
    made.silent = False


async def test_whoever_waits_in_vain_for_a_silent_store_is_refused_in_time(
    way: tuple[Way, Space], space: Space, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.layers.leases.LEAVING_S", 0.05)
    monkeypatch.setattr("holdfast.layers.locks.LEAVING_S", 0.05)
    made, there = way
    await space.lock("book", ttl=LONG).acquire()
    trying = asyncio.create_task(there.lock("book", wait=1).acquire())
    await soon(known(there, 2))
    made.silent = True
    clock.advance("2s")
    with pytest.raises(LockAcquisitionError, match="after 1 s: it is held by somebody, and the store does not answer"):
        await soon(trying)
    made.silent = False


async def test_a_lease_that_may_not_be_renewed_takes_no_other_with_it(
    way: tuple[Way, Space], clock: ManualClock
) -> None:
    made, there = way
    guards = [await there.lock(name, ttl=30).acquire() for name in ("a", "b", "c")]

    async def deny(batch: Batch) -> None:
        if any(type(each) is Touch and each.key.startswith("locks/lock/b/") for each in batch.operations):
            raise AccessDenied("b may not be touched")

    made.before = deny
    for _ in range(60):
        clock.advance("1s")
        for _ in range(5):
            await asyncio.sleep(0)
        while any(guard._lease.renewing for guard in guards):  # a server takes its time
            await asyncio.sleep(0.001)
    assert [guard.lost for guard in guards] == [False, True, False]
    made.before = None
    for guard in (guards[0], guards[2]):
        await guard.release()


async def test_who_does_not_wait_and_finds_no_room_is_in_nobodys_way(way: tuple[Way, Space]) -> None:
    made, there = way
    pool = there.pool("licences", size=2)
    async with pool.allocate(1):
        made.sent.clear()
        with pytest.raises(LockAcquisitionError):
            await pool.allocate(2).acquire()
        assert [Push] not in made.sent
        async with pool.allocate(1):
            assert await pool.available() == 0


async def test_a_size_that_somebody_deleted_is_agreed_on_anew_by_however_many_come(
    way: tuple[Way, Space], admin: Space
) -> None:
    there = way[1]
    async with there.semaphore("gpu", permits=4):
        pass
    await admin._scope.commit((Delete(PERMITS.key("semaphore", "gpu")),))
    guards = await asyncio.gather(*(there.semaphore("gpu", permits=4).acquire() for _ in range(4)))
    assert len({guard.id for guard in guards}) == 4
    for guard in guards:
        await guard.release()


async def test_who_waits_counts_with_the_size_that_was_agreed_on_last(
    way: tuple[Way, Space], admin: Space, clock: ManualClock
) -> None:
    there = way[1]
    first = await there.semaphore("gpu", permits=2, ttl=LONG).acquire()
    second = await there.semaphore("gpu", permits=2, ttl=LONG).acquire()
    trying = asyncio.create_task(there.semaphore("gpu", permits=2, wait=1).acquire())
    await soon(waiting(there, "gpu", 1))
    clock.advance("2s")
    with pytest.raises(LockAcquisitionError):
        await soon(trying)
    await admin._scope.commit((Delete(PERMITS.key("semaphore", "gpu")),))
    waits = [asyncio.create_task(there.semaphore("gpu", permits=4, wait=60).acquire()) for _ in range(2)]
    for guard in await soon(asyncio.gather(*waits)):
        await guard.release()
    await first.release()
    await second.release()


async def test_a_pool_that_is_named_with_another_size_does_not_tell_what_is_left(space: Space) -> None:
    async with space.pool("licences", size=5).allocate(2):
        assert await space.pool("licences", size=5).available() == 3
        with pytest.raises(InvalidInput, match="5 permits"):
            await space.pool("licences", size=10).available()


async def test_a_block_that_another_task_ends_is_not_guessed(space: Space) -> None:
    shared = space.semaphore("gpu", permits=4)
    stacks = [AsyncExitStack(), AsyncExitStack()]
    guards = [await asyncio.create_task(stack.enter_async_context(shared)) for stack in stacks]  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="entered by 2 tasks"):
        await stacks[0].aclose()
    for guard in guards:
        await guard.space.records.set("cash", 1)
        await guard.release()


async def test_what_was_released_early_is_no_loss(space: Space) -> None:
    async with space.lock("book") as guard:
        await guard.release()
        await soon(guard.until_lost())
        assert not guard.lost
        await guard.release()
        with pytest.raises(LeaseLost):
            await guard.space.records.set("cash", 1)


async def test_an_error_of_the_block_tells_that_its_lock_was_lost_too(space: Space, clock: ManualClock) -> None:
    async def fails() -> None:
        async with space.lock("book", ttl=1):
            clock.advance("2s")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await fails()
    assert "was lost" in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("wait", [0, 0.0, "0", "0s", "0.0ms", timedelta(0)])
async def test_no_time_at_all_is_written_in_many_ways(space: Space, wait: Any) -> None:
    async with space.lock("book"):
        with pytest.raises(LockAcquisitionError):
            await space.lock("book", wait=wait).acquire()


async def test_a_place_that_was_made_before_its_taker_was_cut_off_is_taken_back_later(
    way: tuple[Way, Space], space: Space, clock: ManualClock
) -> None:
    made, there = way
    tries = 0

    async def away(batch: Batch) -> None:
        nonlocal tries
        if tries and tries < 5:
            tries += 1
            raise Unavailable("away")

    async def cut(batch: Batch) -> None:
        nonlocal tries
        if type(batch.operations[0]) is Push and not tries:
            tries = 1
            await asyncio.Event().wait()

    made.before, made.after = away, cut
    task = asyncio.create_task(there.lock("book", ttl=LONG).acquire())
    while not tries:
        await asyncio.sleep(0)
    task.cancel()
    taking = asyncio.create_task(space.lock("book", wait=20).acquire())
    await steps(clock, taking)
    assert taking.result().holder == "market"
    await asyncio.gather(task, return_exceptions=True)
