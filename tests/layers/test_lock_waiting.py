"""Who waits has a short lease, and so is skipped soon after it was killed; who holds has its whole ttl, from its turn on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace as but
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import ManualClock, Space, Store
from holdfast.clock import as_datetime
from holdfast.engine import Batch, ChangeSet, Empty, Entry, Page, Push, Put, Receipt, SpaceInfo, Touch
from holdfast.errors import Unavailable
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Lease, Leases
from holdfast.layers.lines import KINDS, LOOK_MS_MIN, Kind
from holdfast.layers.locks import WAITING_MS, Wanted
from holdfast.middleware.wrapper import Wrapper
from tests.layers.test_lock_requests import passed_on
from tests.layers.test_locks import Counting, counting, soon, until, waiting

__all__ = ["counting"]

LONG_MS = 300_000
STEP_MS = 250


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk", instance="2")


class Mortal(Wrapper):
    """The way of one process to the store, until it dies; and what happens to batches on it."""

    dead = False
    before: Callable[[Batch], Awaitable[None]] | None = None

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self._check()
        if self.before is not None:
            await self.before(batch)
        return await super().commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self._check()
        return await super().get(space, keys)

    async def scan(self, space: str, prefix: str, **how: Any) -> Page:  # type: ignore[override]
        self._check()
        return await super().scan(space, prefix, **how)

    async def watch(self, *args: Any, **how: Any) -> AsyncIterator[ChangeSet]:
        self._check()
        async for commit in super().watch(*args, **how):
            yield commit

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self._check()
        return await super().spaces(name)

    def _check(self) -> None:
        if self.dead:
            raise Unavailable("this process is dead")


@pytest.fixture
async def process(store: Store, clock: ManualClock) -> AsyncIterator[tuple[Mortal, Space]]:
    """Another process at the same store."""
    space = store.space("contoso", agent="third", instance="3")
    engine = Mortal(space._scope.engine)
    coordination = Coordination(Leases(clock), engine)
    yield engine, Space(replace(space._scope, engine=engine), space._blob_folder, coordination)
    engine.dead = True
    await coordination.close()


def wanted(space: Space, kind: Kind, *, wait: int | None, first: bool = False) -> Wanted:
    if kind == "lock":
        return space.lock("book", ttl=LONG_MS / 1000, wait=wait)
    if kind == "semaphore":
        return space.semaphore("book", permits=2, ttl=LONG_MS / 1000, wait=wait)
    if kind == "rw":
        return (space.write_lock if first else space.read_lock)("book", ttl=LONG_MS / 1000, wait=wait)
    if kind == "election":
        return space.election("book", ttl=LONG_MS / 1000, wait=wait)
    return space.pool("book", size=3).allocate(3 if first else 2, ttl=LONG_MS / 1000, wait=wait)


async def entries(space: Space) -> list[Entry]:
    return (await space._scope.engine.scan(space.name, "locks/")).entries


async def brief(space: Space, clock: ManualClock, count: int) -> None:
    """Return when so many stand in line with the lease of who waits."""
    while len([each for each in await entries(space) if (each.expires_at or 0) <= clock.now_ms() + WAITING_MS]) < count:
        await asyncio.sleep(0)


async def passed(clock: ManualClock, task: asyncio.Task[Any]) -> int:
    """How long it takes until it is done; everybody who lives can renew meanwhile."""
    began_at = clock.now_ms()
    while not task.done() and clock.now_ms() - began_at < 3 * WAITING_MS:
        clock.advance(timedelta(milliseconds=STEP_MS))
        await asyncio.sleep(0.01)
    return clock.now_ms() - began_at


@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiter_that_was_killed_is_skipped_after_a_short_time_and_not_after_its_ttl(
    space: Space, other: Space, process: tuple[Mortal, Space], clock: ManualClock, kind: Kind
) -> None:
    engine, dying = process
    holders = [await wanted(space, kind, wait=0, first=True).acquire() for _ in range(2 if kind == "semaphore" else 1)]
    killed = asyncio.create_task(wanted(dying, kind, wait=None, first=True).acquire())
    await soon(waiting(space, "book", 1))
    second = asyncio.create_task(wanted(dying, kind, wait=None, first=True).acquire())
    await soon(waiting(space, "book", 2))
    staying = asyncio.create_task(wanted(other, kind, wait=None).acquire())
    await soon(waiting(space, "book", 3))
    await soon(brief(space, clock, 3))
    engine.dead = True
    for holder in holders:
        await holder.release()
    assert WAITING_MS - STEP_MS <= await passed(clock, staying) <= WAITING_MS + LOOK_MS_MIN + 2 * STEP_MS
    assert (await soon(staying)).holder == "risk"
    killed.cancel()
    second.cancel()
    await asyncio.gather(killed, second, return_exceptions=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiter_that_lives_keeps_its_place_for_as_long_as_it_takes(
    space: Space, other: Space, clock: ManualClock, kind: Kind
) -> None:
    holders = [await wanted(space, kind, wait=0, first=True).acquire() for _ in range(2 if kind == "semaphore" else 1)]
    trying = asyncio.create_task(wanted(other, kind, wait=None).acquire())
    await soon(waiting(space, "book", 1))
    await soon(brief(space, clock, 1))
    [before] = (await space.locks.list())[0].waiters
    await passed(clock, trying)
    [after] = (await space.locks.list())[0].waiters
    assert (before.id, trying.done()) == (after.id, False)
    for holder in holders:
        await holder.release()
    guard = await soon(trying)
    assert guard.id == before.id
    [state] = await space.locks.list()
    assert [stand.token for stand in state.holders if stand.id == guard.id] == [guard.token]
    await guard.release()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_waited_for_is_held_for_its_whole_ttl_also_when_its_holder_is_paused_then(
    space: Space, other: Space, clock: ManualClock, kind: Kind
) -> None:
    holders = [await wanted(space, kind, wait=0, first=True).acquire() for _ in range(2 if kind == "semaphore" else 1)]
    trying = asyncio.create_task(wanted(other, kind, wait=None).acquire())
    await soon(waiting(space, "book", 1))
    await soon(brief(space, clock, 1))
    for holder in holders:
        await holder.release()
    guard = await soon(trying)
    believed = guard.expires_at
    [entry] = [each for each in await entries(space) if each.key.endswith(guard.id)]
    assert believed <= as_datetime(entry.expires_at or 0)  # at every moment
    whole = as_datetime(clock.now_ms() + LONG_MS)
    await soon(until(lambda: guard.expires_at == whole))
    [entry] = [each for each in await entries(space) if each.key.endswith(guard.id)]
    assert as_datetime(entry.expires_at or 0) == whole
    clock.advance(timedelta(milliseconds=LONG_MS - 1))
    await guard.space.records.set("cash", 1)
    await guard.release()


async def test_a_turn_whose_beginning_is_not_written_at_once_begins_with_the_whole_ttl_when_it_is(
    space: Space, process: tuple[Mortal, Space], clock: ManualClock
) -> None:
    engine, waiter = process
    refused = 0

    async def refuse(batch: Batch) -> None:
        nonlocal refused
        if type(batch.operations[0]) is Put and refused < 3:
            refused += 1
            raise Unavailable("not now")

    engine.before = refuse
    holder = await space.lock("book").acquire()
    trying = asyncio.create_task(waiter.lock("book", ttl=30, wait=None).acquire())
    await soon(waiting(space, "book", 1))
    await holder.release()
    while not trying.done():
        clock.advance(timedelta(milliseconds=10))
        await asyncio.sleep(0.001)
    guard = trying.result()
    assert refused == 3
    assert guard.expires_at >= as_datetime(clock.now_ms() + 29_000)
    [entry] = await entries(space)
    assert (entry.expires_at or 0) >= clock.now_ms() + 29_000
    await guard.release()


async def test_a_lock_that_became_free_while_one_joined_the_line_is_held_for_its_whole_ttl(
    space: Space, process: tuple[Mortal, Space], clock: ManualClock
) -> None:
    """Refused because somebody is there; who is gone when the place behind it is made."""
    engine, late = process
    holder = await space.lock("book").acquire()

    async def free(batch: Batch) -> None:
        if type(batch.operations[0]) is Push and not any(type(each) is Empty for each in batch.conditions):
            await holder.release()

    engine.before = free
    guard = await soon(late.lock("book", ttl=30, wait=None).acquire())
    assert guard.expires_at == as_datetime(clock.now_ms() + 30_000)
    [entry] = await entries(space)
    assert entry.expires_at == clock.now_ms() + 30_000
    await guard.release()


async def test_what_can_be_shared_is_held_at_once_with_its_whole_ttl_and_no_further_commit(
    space: Space, counting: Counting, clock: ManualClock
) -> None:
    counted, view = counting(space)
    for shared in (view.semaphore("gpu", permits=2), view.pool("licences", size=2).allocate(), view.read_lock("book")):
        async with shared:  # the size is stored
            pass
        for each in (shared, but(shared, wait_ms=None)):
            counted.asked.clear()
            async with each as guard:
                [entry] = await entries(space)
                assert entry.expires_at == clock.now_ms() + 30_000
                assert guard.expires_at == as_datetime(clock.now_ms() + 30_000)
            assert counted.asked["commit"] == 2


async def test_who_waits_under_a_request_id_has_a_short_lease_and_then_its_whole_ttl(
    space: Space, other: Space, clock: ManualClock
) -> None:
    holder = await other.lock("book").acquire()
    here = passed_on(space)
    trying = asyncio.create_task(here.lock("book", ttl=60, wait=30).acquire(request_id="r1"))
    await soon(waiting(space, "book", 1))
    await soon(brief(space, clock, 1))
    clock.advance("1s")
    await holder.release()
    guard = await soon(trying)
    assert guard.expires_at == as_datetime(clock.now_ms() + 60_000)
    clock.advance("50s")
    again = await here.lock("book", ttl=60, wait=30).acquire(request_id="r1")
    assert (again.id, again.token, again.expires_at) == (guard.id, guard.token, guard.expires_at)
    await guard.space.records.set("cash", 1)


async def test_a_touch_that_is_answered_late_makes_nobody_believe_too_long(space: Space, clock: ManualClock) -> None:
    now = clock.now_ms()
    lease = Lease(space._scope, "locks/lock/book/1", 5_000, now + 5_000)
    lease.written(now, 30_000)
    lease.renewed(now + 1, 5_000)  # sent before, with the ttl of who waits
    assert lease.good_until == now + 30_000
    lease.ttl_ms = 5_000
    lease.written(now, 5_000)
    lease.renewed(now, 30_000)  # it may have come before what shortened it
    assert lease.good_until == now + 5_000


async def test_renewals_of_a_turn_carry_the_ttl_that_counts_when_they_are_sent(
    space: Space, process: tuple[Mortal, Space], clock: ManualClock
) -> None:
    engine, waiter = process
    touched: list[int] = []

    async def note(batch: Batch) -> None:
        touched.extend(op.ttl_ms for op in batch.operations if type(op) is Touch)

    engine.before = note
    holder = await space.lock("book", ttl=100).acquire()
    trying = asyncio.create_task(waiter.lock("book", ttl=30, wait=None).acquire())
    await soon(waiting(space, "book", 1))
    clock.advance("2s")
    await soon(until(lambda: touched == [WAITING_MS]))
    await holder.release()
    guard = await soon(trying)
    await soon(until(lambda: guard.expires_at == as_datetime(clock.now_ms() + 30_000)))
    clock.advance("10s")
    await soon(until(lambda: touched == [WAITING_MS, 30_000]))
    await guard.release()


class Deaf(Wrapper):
    """A way to the store on which no watch tells anything."""

    async def watch(self, *args: Any, **how: Any) -> AsyncIterator[ChangeSet]:
        await asyncio.Event().wait()
        yield ChangeSet(0, 0, "nobody", [])


@pytest.fixture
async def deaf(space: Space, clock: ManualClock) -> AsyncIterator[Space]:
    """The space for tasks that share what they know, and hear nothing of others."""
    coordination = Coordination(Leases(clock))
    scope = replace(space._scope, engine=Deaf(space._scope.engine))
    yield Space(scope, space._blob_folder, coordination)
    await coordination.close()


async def test_who_waits_in_the_same_process_begins_with_the_answer_to_the_release(space: Space, deaf: Space) -> None:
    holder = await deaf.lock("x").acquire()
    next_one = asyncio.create_task(deaf.lock("x", wait=None).acquire())
    await soon(waiting(space, "x", 1))
    lines = deaf._coordination.lines(deaf._scope)
    await soon(until(lambda: any(len(line.places) == 2 for line in lines._lines.values())))
    await holder.release()
    assert (await soon(next_one)).token > holder.token


async def test_who_leaves_the_middle_of_a_line_wakes_nobody(space: Space) -> None:
    holder = await space.lock("x").acquire()
    leaving = asyncio.create_task(space.lock("x", wait=None).acquire())
    await soon(waiting(space, "x", 1))
    staying = asyncio.create_task(space.lock("x", wait=None).acquire())
    await soon(waiting(space, "x", 2))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await soon(waiting(space, "x", 1))
    assert not staying.done()
    await holder.release()
    assert (await soon(staying)).token > holder.token
