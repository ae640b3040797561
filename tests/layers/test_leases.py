"""Leases are kept alive whatever the clock and the rules do; and a line is followed whatever its feed does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

import holdfast
from holdfast import ManualClock, Space
from holdfast.engine import ChangeSet, Engine, Page
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Compacted, RateLimitExceeded
from holdfast.identity import Identity
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import AccessRule, RateLimit, Rules
from holdfast.middleware.wrapper import Wrapper

DEADLINE_S = 20
SPACE = "contoso"


class MachineClock(ManualClock):
    """Shows another time when it is set; who sleeps is woken after the time that has passed, as by a machine's."""

    offset_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.offset_ms

    async def sleep_until(self, at_ms: int) -> None:
        await super().sleep_until(at_ms - self.offset_ms)


@pytest.fixture
async def space() -> AsyncIterator[Space]:
    async with holdfast.open("memory:", clock=ManualClock(), background=False) as store:
        yield store.space(SPACE, agent="market")


async def steps(clock: ManualClock, seconds: int, *, each: float = 1) -> None:
    for _ in range(int(seconds / each)):
        clock.advance(each)
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_lease_is_kept_alive_by_one_whose_clock_is_set_back(space: Space) -> None:
    local, true = MachineClock(), space._scope.clock
    assert isinstance(true, ManualClock)
    leases = Leases(local)
    here = Space(replace(space._scope, clock=local), space._blob_folder, Coordination(leases, space._scope.engine))
    guard = await here.lock("book", ttl=30).acquire()
    local.offset_ms = -3_600_000
    for _ in range(60):
        await steps(local, 1)
        await steps(true, 1)
    assert not guard.lost
    assert len((await space.locks.list())[0].holders) == 1
    believed = guard._lease.good_until - local.now_ms()
    assert believed <= 30_000
    await guard.release()
    await leases.close()


async def test_what_nobody_renews_is_lost_also_by_one_whose_clock_was_set_back(space: Space) -> None:
    class Silent(Wrapper):
        """Commits that are never answered, from some moment on."""

        is_silent = False

        async def commit(self, *args: object) -> object:  # type: ignore[override]
            if self.is_silent:
                await asyncio.Event().wait()
            return await super().commit(*args)  # type: ignore[arg-type]

    local, engine = MachineClock(), Silent(space._scope.engine)
    leases = Leases(local)
    here = Space(replace(space._scope, clock=local, engine=engine), space._blob_folder, Coordination(leases, engine))
    guard = await here.lock("book", ttl=30).acquire()
    engine.is_silent = True
    local.offset_ms = -3_600_000
    await steps(local, 45)
    assert guard.lost
    await leases.close()


async def test_more_leases_than_a_burst_are_kept_alive() -> None:
    clock = ManualClock()
    policy = Policy(MemoryEngine(clock=clock), clock, Rules(rate_limits=(RateLimit("*", 20, 10),)))
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        leases = Leases(clock)
        engine: Engine = policy.engine_for(Identity("market", "agent", SPACE))
        space = store.seen_through(engine, SPACE, "market", Coordination(leases, engine))
        guards = []
        for number in range(15):
            guards.append(await space.lock(f"book/{number}", ttl=30).acquire())
            clock.advance("50ms")
        clock.advance("10s")  # all are due
        await steps(clock, 90, each=0.25)
        assert [guard.name for guard in guards if guard.lost] == []
        await leases.close()


async def test_a_feed_that_was_compacted_while_the_store_refuses_is_followed_again(space: Space) -> None:
    class Compacting(Wrapper):
        """The first watch is behind what is kept, and what is read then is over the rate."""

        watched = refused = 0

        async def watch(self, *args: object, **options: object) -> AsyncIterator[ChangeSet]:  # type: ignore[override]
            self.watched += 1
            if self.watched == 1:
                raise Compacted("the feed begins later")
            async for commit in super().watch(*args, **options):  # type: ignore[arg-type]
                yield commit

        async def scan(self, *args: object, **options: object) -> Page:  # type: ignore[override]
            if self.watched == 1 and not self.refused:
                self.refused += 1
                raise RateLimitExceeded("over its rate", retry_after=0.01)
            return await super().scan(*args, **options)  # type: ignore[arg-type]

    engine, clock = Compacting(space._scope.engine), space._scope.clock
    assert isinstance(clock, ManualClock)
    leases = Leases(clock)
    coordination = Coordination(leases, engine)
    other = Space(replace(space._scope, engine=engine, actor="risk"), space._blob_folder, coordination)
    async with space.lock("book"):
        task = asyncio.create_task(other.lock("book", wait=None).acquire())
        async with asyncio.timeout(DEADLINE_S):
            while not engine.refused:
                await asyncio.sleep(0)
            while engine.watched < 2:
                clock.advance("20ms")
                await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        await (await task).release()
    await coordination.close()


async def test_who_may_lock_and_not_watch_gets_its_turn_and_is_not_refused_all_the_time() -> None:
    clock, denials = ManualClock(), list[Denial]()
    rules = Rules(access_control=(AccessRule("*", allow=("Lock", "Unlock")),), rate_limits=())
    policy = Policy(MemoryEngine(clock=clock), clock, rules, denied=denials.append)
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        leases = Leases(clock)
        engine: Engine = policy.engine_for(Identity("market", "agent", SPACE))
        coordination = Coordination(leases, engine)
        space = store.seen_through(engine, SPACE, "market", coordination)
        holder = await space.lock("book", ttl=30).acquire()
        task = asyncio.create_task(space.lock("book", wait=None).acquire())
        await steps(clock, 12, each=0.05)
        assert 1 <= len(denials) <= 4
        await holder.release()
        await steps(clock, 6, each=0.05)
        await (await task).release()
        await coordination.close()
