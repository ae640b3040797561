"""Waiting for an instant or for an event, whichever comes first."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.clock import ManualClock, sleep_or


async def some_steps() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_event_ends_it_and_leaves_nobody_asleep() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, event))
    await some_steps()
    assert not waiting.done()
    event.set()
    assert await waiting is True
    await some_steps()
    assert not clock._sleepers


async def test_the_instant_ends_it() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, event))
    await some_steps()
    clock.advance(0.5)
    await some_steps()
    assert not waiting.done()
    clock.advance(0.5)
    assert await waiting is False


async def test_an_instant_that_is_past_ends_it_at_once() -> None:
    clock = ManualClock()
    assert await sleep_or(clock, clock.now_ms() - 1, asyncio.Event()) is False


async def test_the_event_counts_when_both_come_together() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, event))
    await some_steps()
    clock.advance(1)
    event.set()
    assert await waiting is True


async def test_an_event_that_is_set_already_lets_others_run_first() -> None:
    clock, event, ran = ManualClock(), asyncio.Event(), asyncio.Event()
    event.set()
    asyncio.get_running_loop().call_soon(ran.set)
    assert await sleep_or(clock, clock.now_ms() + 1000, event) is True
    assert ran.is_set()


async def test_who_is_cancelled_meanwhile_leaves_nobody_asleep() -> None:
    clock = ManualClock()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, asyncio.Event()))
    await some_steps()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await some_steps()
    assert not clock._sleepers


async def test_an_event_wakes_whoever_waits_within_two_steps_of_the_loop() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, event))
    await some_steps()
    event.set()
    for _ in range(2):
        await asyncio.sleep(0)
    assert waiting.done(), "a handover of a lock waits for every step"


@pytest.mark.parametrize("steps", range(6))
async def test_an_event_and_the_time_may_come_in_the_same_step(steps: int) -> None:
    loop, complaints = asyncio.get_running_loop(), list[dict[str, object]]()
    loop.set_exception_handler(lambda _, told: complaints.append(told))
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(sleep_or(clock, clock.now_ms() + 1000, event))
    for _ in range(3):
        await asyncio.sleep(0)
    if steps % 2:
        clock.advance(2)
    for _ in range(steps // 2):
        await asyncio.sleep(0)
    loop.call_soon(event.set)
    if not steps % 2:
        clock.advance(2)
    await waiting
    for _ in range(3):
        await asyncio.sleep(0)
    assert complaints == []
