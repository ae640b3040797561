"""Locks acquired for somebody else: by request id, released and renewed by the guard's id, not kept alive."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import AccessDenied, LeaseLost, LockAcquisitionError, ManualClock, Space, Store
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.locks import ATTEMPTS_MAX
from tests.layers.test_locks import soon, waiting


def passed_on(space: Space) -> Space:
    """The same space for whoever keeps no lease alive, as a server does for those who ask it."""
    return Space(space._scope, space._blob_folder, Coordination(Leases(space._scope.clock, renew=False)))


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk", instance="2")


async def test_a_repeated_request_holds_the_same_lock_once(space: Space) -> None:
    lock = passed_on(space).lock("l", ttl="5s")
    guard = await lock.acquire(request_id="r1")
    again = await lock.acquire(request_id="r1")
    assert (again.id, again.token, again.acquired_at) == (guard.id, guard.token, guard.acquired_at)
    [state] = await space.locks.list()
    assert ([stand.id for stand in state.holders], state.waiters) == ([guard.id], [])


async def test_a_request_that_was_granted_is_answered_the_same_after_its_release(space: Space, other: Space) -> None:
    lock = passed_on(space).lock("l", ttl="5s")
    guard = await lock.acquire(request_id="r1")
    await space.locks.release("lock", "l", guard.id)
    async with other.lock("l"):
        again = await lock.acquire(request_id="r1")
        assert (again.id, again.token, again.acquired_at) == (guard.id, guard.token, guard.acquired_at)
        [state] = await space.locks.list()
        assert [stand.agent for stand in state.holders] == ["risk"]
        with pytest.raises(LeaseLost):
            await again.space.records.set("cash", 1)


async def test_a_request_that_was_refused_stands_in_line_anew_when_it_is_repeated(space: Space, other: Space) -> None:
    lock = passed_on(space).lock("l", ttl="5s")
    async with other.lock("l"):
        with pytest.raises(LockAcquisitionError):
            await lock.acquire(request_id="r1")
    guard = await lock.acquire(request_id="r1")
    assert (await lock.acquire(request_id="r1")).id == guard.id


async def test_a_request_id_is_refused_only_so_often(space: Space, other: Space) -> None:
    lock = passed_on(space).lock("l", ttl="5s")
    async with other.lock("l"):
        for _ in range(ATTEMPTS_MAX):
            with pytest.raises(LockAcquisitionError, match="held by risk"):
                await lock.acquire(request_id="r1")
        with pytest.raises(LockAcquisitionError, match="an id of its own"):
            await lock.acquire(request_id="r1")


async def test_what_is_not_renewed_ends_with_its_ttl(space: Space, other: Space, clock: ManualClock) -> None:
    await passed_on(space).lock("l", ttl="5s").acquire()
    for _ in range(6):
        clock.advance("1s")
        await asyncio.sleep(0.01)
    async with other.lock("l"):
        pass


async def renewed(space: Space, until_ms: int) -> None:
    """Return when the one that waits is alive until then."""
    while True:
        [stand] = (await space.locks.list())[0].waiters
        if stand.expires_at is not None and stand.expires_at.timestamp() * 1000 >= until_ms - 1:
            return
        await asyncio.sleep(0.01)


async def test_a_waiter_is_kept_alive_until_its_turn_and_not_afterwards(
    space: Space, other: Space, clock: ManualClock
) -> None:
    async with other.lock("l", ttl="60s"):
        wait = asyncio.create_task(passed_on(space).lock("l", ttl="3s", wait="30s").acquire(request_id="r1"))
        await soon(waiting(space, "l", 1))
        for _ in range(8):
            clock.advance("1s")
            await soon(renewed(space, clock.now_ms() + 3000))
    guard = await soon(wait)
    assert [stand.id for stand in (await space.locks.list())[0].holders] == [guard.id]
    clock.advance("4s")
    assert await space.locks.list() == []


async def test_a_guard_is_renewed_and_released_by_its_id_by_its_owner_alone(
    space: Space, other: Space, clock: ManualClock
) -> None:
    guard = await passed_on(space).lock("l", ttl="5s").acquire()
    for refused in (other.locks.release("lock", "l", guard.id), other.locks.renew("lock", "l", guard.id, "9s")):
        with pytest.raises(AccessDenied):
            await refused
    until = await space.locks.renew("lock", "l", guard.id, "20s")
    assert (until - guard.acquired_at).total_seconds() == pytest.approx(20, abs=0.5)
    clock.advance("10s")
    assert len(await space.locks.list()) == 1
    await space.locks.release("lock", "l", guard.id, request_id="u1")
    await space.locks.release("lock", "l", guard.id, request_id="u1")  # repeated: the same answer
    for over in (space.locks.release("lock", "l", guard.id), space.locks.renew("lock", "l", guard.id, "5s")):
        with pytest.raises(LeaseLost):
            await over


async def test_a_space_guarded_by_an_id_writes_only_as_long_as_it_is_held(space: Space) -> None:
    guard = await passed_on(space).lock("l", ttl="5s").acquire()
    view = space.guarded_by("lock", "l", guard.id)
    await view.records.set("cash", 10)
    await space.locks.release("lock", "l", guard.id)
    with pytest.raises(LeaseLost):
        await view.records.set("cash", 20)
    assert await space.records.get("cash") == 10


async def test_a_granted_request_is_remembered_by_a_store_that_was_opened_again(tmp_path: object) -> None:
    clock = ManualClock()
    async with holdfast.open(f"{tmp_path}/team.db", clock=clock, background=False) as store:
        guard = await passed_on(store.space("contoso", agent="market")).lock("l", ttl="5s").acquire(request_id="r1")
    async with holdfast.open(f"{tmp_path}/team.db", clock=clock, background=False) as store:
        space = store.space("contoso", agent="market")
        again = await passed_on(space).lock("l", ttl="5s").acquire(request_id="r1")
        assert (again.id, again.token, again.acquired_at) == (guard.id, guard.token, guard.acquired_at)
