"""A queue seen through what somebody holds: who has lost it gets no message, settles none, and keeps none from others."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import LeaseLost, ManualClock, Space, Store
from tests.layers.test_locks import soon


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk", instance="2")


async def test_who_holds_takes_and_settles(space: Space) -> None:
    await space.queue("q").put({"n": 1})
    async with space.election("leader") as term, term.space.queue("q").reserve() as message:
        assert message.body == {"n": 1}
    assert (await space.queue("q").stats()).message_count == 0


async def test_a_leader_that_was_deposed_gets_no_message_and_keeps_none_from_others(
    space: Space, other: Space, clock: ManualClock
) -> None:
    term = await space.election("leader", ttl=1).acquire()
    queue = term.space.queue("q")
    await space.queue("q").put({"n": 1})
    async with queue.reserve() as message:  # so there is a consumer, with a lease that goes on
        assert message.body == {"n": 1}
    term._wanted.coordination.leases.release(term._lease)
    clock.advance("2s")
    await space.queue("q").put({"n": 2})
    with pytest.raises(LeaseLost, match="nothing was taken from queue 'q'"):
        await queue.take()
    async with asyncio.timeout(20), other.queue("q").reserve(wait=None) as message:
        assert message.body == {"n": 2}


async def test_what_was_taken_before_the_loss_is_somebody_elses_at_once(
    space: Space, other: Space, clock: ManualClock
) -> None:
    term = await space.election("leader", ttl=1).acquire()
    await space.queue("q").put({"n": 1})
    message = await term.space.queue("q").take()
    term._wanted.coordination.leases.release(term._lease)
    clock.advance("2s")
    with pytest.raises(LeaseLost):
        await message.ack()
    assert message.settled
    again = await soon(other.queue("q").take(wait=None))
    assert (again.body, again.id) == ({"n": 1}, message.id)
    await again.ack()
    assert (await space.queue("q").stats()).message_count == 0
