"""What is lost is known to be lost: nothing is given that is over, and nothing is believed to be over that is held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast
from holdfast import LeaseLost, ManualClock, Space
from holdfast.engine import Batch, Delete, Push, Put
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Unavailable
from holdfast.identity import Identity
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import RateLimit, Rules
from tests.layers.test_leases import MachineClock
from tests.layers.test_leases import steps as pass_time
from tests.layers.test_lock_turns import LONG, Way, known, way
from tests.layers.test_lock_waiting import entries
from tests.layers.test_locks import soon

__all__ = ["way"]


async def let_run() -> None:
    """What is due by the clock is done."""
    for _ in range(50):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("request_id", [None, "r1"])
async def test_a_turn_whose_answer_comes_late_is_held_and_kept_alive(
    way: tuple[Way, Space], space: Space, clock: ManualClock, request_id: str | None
) -> None:
    """Its short lease was over here by then. The guard was given as one that is lost, and nobody renewed it."""
    made, there = way
    holder = await space.lock("book").acquire()
    trying = asyncio.create_task(there.lock("book", ttl=30, wait=None).acquire(request_id=request_id))
    await soon(known(there, 2))

    async def late(batch: Batch) -> None:
        if type(batch.operations[0]) is Put:
            made.after = None
            clock.advance("6s")
            await let_run()

    made.after = late
    await holder.release()
    guard = await soon(trying)
    assert not guard.lost
    for _ in range(40):
        clock.advance("1s")
        await asyncio.sleep(0.003)
    assert not guard.lost
    await guard.release()
    assert await entries(space) == []


async def test_a_place_that_is_broken_while_the_line_is_read_is_not_given(
    way: tuple[Way, Space], admin: Space, clock: ManualClock
) -> None:
    made, there = way
    async with there.semaphore("gpu", permits=2):
        pass
    scan = made.scan

    async def slow(*args: Any, **how: Any) -> Any:
        page = await scan(*args, **how)
        if how.get("limit") == 3:
            made.scan = scan  # type: ignore[method-assign]
            await admin.locks.break_("gpu", "semaphore")
            clock.advance("11s")
            await let_run()
        return page

    made.scan = slow  # type: ignore[method-assign]
    guard = await soon(there.semaphore("gpu", permits=2, wait=60).acquire())
    assert not guard.lost
    assert [each.key.endswith(guard.id) for each in await entries(there)] == [True]
    await guard.release()


async def test_a_renewal_that_is_answered_too_late_is_a_loss(way: tuple[Way, Space], clock: ManualClock) -> None:
    made, there = way
    guard = await there.lock("book", ttl=30).acquire()

    async def late(batch: Batch) -> None:
        clock.advance("31s")
        await let_run()

    made.after = late
    with pytest.raises(LeaseLost):
        await guard.renew()


async def test_two_who_release_one_guard_at_once_have_released_it(way: tuple[Way, Space], space: Space) -> None:
    made, there = way
    guard = await there.lock("book").acquire()
    answer = asyncio.Event()

    async def slow(batch: Batch) -> None:
        await answer.wait()

    made.after = slow
    releasing = [asyncio.create_task(guard.release()) for _ in range(3)]
    await let_run()
    assert not any(each.done() for each in releasing), "nobody is told before it is gone"
    answer.set()
    assert await asyncio.gather(*releasing) == [None, None, None]
    assert await entries(space) == []


async def test_all_who_release_what_was_lost_are_told_so(way: tuple[Way, Space], admin: Space) -> None:
    guard = await way[1].lock("book").acquire()
    await admin.locks.break_("book")
    releasing = asyncio.gather(*(guard.release() for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in await soon(releasing)] == [LeaseLost] * 3


async def test_what_is_waited_for_under_a_lock_is_not_given_when_that_lock_was_lost(
    way: tuple[Way, Space], admin: Space
) -> None:
    there = way[1]
    outer = await there.lock("outer").acquire()
    holder = await there.lock("inner").acquire()
    trying = asyncio.create_task(outer.space.lock("inner", wait=None).acquire())
    await soon(known(there, 2))
    await admin.locks.break_("outer")
    await holder.release()
    with pytest.raises(LeaseLost, match="outer"):
        await soon(trying)


async def test_who_comes_to_the_line_of_a_store_that_is_being_closed_is_told_so(
    way: tuple[Way, Space], space: Space
) -> None:
    made, there = way
    await space.lock("book", ttl=LONG).acquire()
    first = asyncio.create_task(there.lock("book", wait=None).acquire())
    await soon(known(there, 2))
    answer, pushed = asyncio.Event(), asyncio.Event()

    async def slow(batch: Batch) -> None:
        if type(batch.operations[0]) is Push:
            pushed.set()
            await answer.wait()

    made.after = slow
    second = asyncio.create_task(there.lock("book", wait=None).acquire())
    await soon(pushed.wait())
    await there._coordination.close()
    answer.set()
    for each in (first, second):
        with pytest.raises(Unavailable, match="was closed"):
            await soon(each)


async def test_handing_over_costs_nobody_a_release_that_its_rate_allows() -> None:
    clock, limit = ManualClock(), RateLimit("*", 1, 16)
    policy = Policy(MemoryEngine(clock=clock), clock, Rules(rate_limits=(limit,)))
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        engine = policy.engine_for(Identity("market", "agent", "contoso"))
        coordination = Coordination(Leases(clock), engine)
        space = store.seen_through(engine, "contoso", "market", coordination)
        holder = await space.lock("book").acquire()
        trying = asyncio.create_task(space.lock("book", wait=None).acquire())
        await soon(known(space, 2))
        bucket = policy.rates.bucket("contoso", "market", "agent", limit)
        while bucket._owed < 13_000:  # one is left of the 14 that are not kept for renewals
            await engine.get("contoso", ["records/x"])
        await holder.release()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await coordination.close()


class Elsewhere:
    """A process with a clock of its own, and its way to the store."""

    def __init__(self, space: Space) -> None:
        self.clock, self.way = MachineClock(), Way(space._scope.engine)
        self.leases = Leases(self.clock)
        scope = replace(space._scope, clock=self.clock, engine=self.way)
        self.space = Space(scope, space._blob_folder, Coordination(self.leases, self.way))
        self._true = space._scope.clock

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            await pass_time(self.clock, 1)
            await pass_time(self._true, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ttl", "before"), [(30, 11), (5, 0)])
async def test_a_clock_that_is_set_back_while_something_is_acquired_costs_no_lease(ttl: int, before: int) -> None:
    async with holdfast.open("memory:", clock=ManualClock(), background=False) as store:
        true = store.space("contoso", agent="market")
        here = Elsewhere(true)
        kept = await here.space.lock("kept", ttl=30 if before else LONG).acquire()
        answer = asyncio.Event()

        async def slow(batch: Batch) -> None:
            if type(batch.operations[0]) is Push:
                await answer.wait()

        here.way.after = slow
        trying = asyncio.create_task(here.space.lock("other", ttl=ttl).acquire())
        await pass_time(here.clock, 1)
        here.clock.offset_ms = -3_600_000
        here.leases._changed.set()  # as any answer to a renewal does
        await here.seconds(before or 1)
        assert not kept.lost
        answer.set()
        other = await trying
        await here.seconds(25)
        assert (kept.lost, other.lost) == (False, False)
        assert len(await entries(true)) == 2
        await kept.release()
        await other.release()
        await here.leases.close()


@pytest.mark.parametrize("back_s", [8, 3600])
async def test_who_is_cut_off_and_whose_clock_is_set_back_believes_no_longer_than_the_store(back_s: int) -> None:
    async with holdfast.open("memory:", clock=ManualClock(), background=False) as store:
        here = Elsewhere(store.space("contoso", agent="market"))
        guard = await here.space.lock("book", ttl=30).acquire()

        async def silent(batch: Batch) -> None:
            await asyncio.Event().wait()

        here.way.before = silent
        await pass_time(here.clock, 9)
        here.clock.offset_ms = -1000 * back_s
        await pass_time(here.clock, 22)  # 31 s have passed, and the entry is gone
        assert guard.lost
        await here.leases.close()


async def test_a_lock_that_was_taken_back_leaves_no_wrong_word_to_who_was_next(way: tuple[Way, Space]) -> None:
    """Who is next and hears of no touch begins by a commit of its own."""
    made, there = way
    holder = await there.lock("book").acquire()
    trying = asyncio.create_task(there.lock("book", ttl=LONG, wait=None).acquire())
    await soon(known(there, 2))

    async def lost(batch: Batch) -> None:
        if type(batch.operations[0]) is Delete:
            made.after = None
            raise Unavailable("the connection ended")

    made.after = lost
    with pytest.raises(Unavailable):
        await holder.release()
    guard = await soon(trying)
    assert [Put] in made.sent
    assert not guard.lost
    await guard.release()
