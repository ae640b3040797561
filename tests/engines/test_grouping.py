"""Group commit: how those are told who wait for their batch."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from holdfast.engine import Batch, Put, Receipt
from holdfast.engines.grouping import Turns, Waiting, answer
from holdfast.errors import Conflict

RECEIPT = Receipt(1, 1)
_who: contextvars.ContextVar[int] = contextvars.ContextVar("who")


def _waiting(durability: str = "sync", patience_ms: int = 0) -> Waiting:
    return Waiting("s", durability, Batch("a", (Put("a/k", b"1"),), patience_ms=patience_ms), 4)


class Desk:
    """Commits whatever is queued, each group in one step of the loop."""

    def __init__(self, outcome: Callable[[int], Receipt | BaseException] = lambda _: RECEIPT) -> None:
        self.groups: list[int] = []
        self._outcome = outcome
        self.turns = Turns("desk", self._begin, lambda _: False)

    def _begin(self) -> None:
        items = self.turns.queue.take_group()
        self.groups.append(len(items))
        for number, item in enumerate(items):
            item.outcome = self._outcome(number)
        answer(items)

    async def commit(self, durability: str = "sync", patience_ms: int = 0) -> Receipt:
        item = _waiting(durability, patience_ms)
        if not self.turns.enter(item):
            await item
        return item.told()


async def test_all_of_a_group_are_told_in_its_step_in_order_and_each_in_its_context() -> None:
    desk, told = Desk(), list[int]()

    async def writer(number: int) -> None:
        _who.set(number)
        assert await desk.commit() == RECEIPT
        told.append(_who.get())
        assert asyncio.current_task() is tasks[number]

    tasks = [asyncio.create_task(writer(number)) for number in range(5)]
    await asyncio.gather(*tasks)
    assert (told, desk.groups) == ([0, 1, 2, 3, 4], [5])


async def test_who_is_patient_goes_with_the_next_that_is_not() -> None:
    desk = Desk()
    patient = [asyncio.create_task(desk.commit(patience_ms=50)) for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert (desk.groups, len(desk.turns.queue)) == ([], 2)
    await desk.commit()
    assert desk.groups == [3]
    assert [task.result() for task in patient] == [RECEIPT] * 2
    assert desk.turns._later is None, "nobody is woken for nothing"


async def test_who_is_patient_does_not_wait_longer_than_it_said_nor_than_the_least_patient() -> None:
    desk, loop = Desk(), asyncio.get_running_loop()
    tasks = []
    for patience_ms, longest_s in ((10**9, 0.05), (20, 0.02), (30, 0.02)):
        tasks.append(asyncio.create_task(desk.commit(patience_ms=patience_ms)))
        await asyncio.sleep(0)
        assert desk.turns._later is not None
        assert desk.turns._later_at <= loop.time() + longest_s
    await asyncio.gather(*tasks)
    assert desk.groups == [3]


async def test_what_did_not_fit_into_a_group_does_not_wait_with_the_patient() -> None:
    desk, loop = Desk(), asyncio.get_running_loop()

    async def then_patient() -> None:
        await desk.commit("sync")
        await desk.commit("sync", patience_ms=50)

    began = loop.time()
    later = asyncio.create_task(then_patient())
    await asyncio.gather(*[asyncio.create_task(desk.commit(durability)) for durability in ("sync", "async")])
    await later
    assert (desk.groups, loop.time() - began < 0.04) == ([2, 1, 1], True)


async def test_who_closes_waits_for_no_company() -> None:
    desk = Desk()
    patient = asyncio.create_task(desk.commit(patience_ms=50))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    await desk.turns.close()
    assert patient.done() or await patient == RECEIPT
    assert asyncio.get_running_loop().time() - began < 0.04


async def test_whoever_goes_on_at_once_is_in_the_next_group() -> None:
    desk = Desk()

    async def writer() -> None:
        for _ in range(3):
            await desk.commit()

    await asyncio.gather(*(writer() for _ in range(4)))
    assert desk.groups == [4, 4, 4]


async def test_a_refusal_is_raised_where_the_batch_was_awaited_and_only_there() -> None:
    desk = Desk(lambda number: Conflict("taken") if number == 1 else RECEIPT)
    outcomes = await asyncio.gather(*(desk.commit() for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Receipt, Conflict, Receipt]


async def test_who_is_cancelled_before_the_group_was_taken_is_left_out() -> None:
    desk = Desk()
    tasks = [asyncio.create_task(desk.commit()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Receipt, asyncio.CancelledError, Receipt]
    assert desk.groups == [2]


async def test_who_is_cancelled_twice_is_left_out_too() -> None:
    desk = Desk()
    tasks = [asyncio.create_task(desk.commit()) for _ in range(3)]
    await asyncio.sleep(0)
    assert tasks[1].cancel()
    assert tasks[1].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Receipt, asyncio.CancelledError, Receipt]
    assert desk.groups == [2]


async def test_who_is_cancelled_is_told_why() -> None:
    """The scopes of AnyIO know by it whether it was them, and let it through if it was not."""
    desk = Desk()
    task = asyncio.create_task(desk.commit())
    await asyncio.sleep(0)
    task.cancel("it is late")
    with pytest.raises(asyncio.CancelledError, match="it is late"):
        await task


async def test_who_is_cancelled_before_it_waits_or_by_one_of_its_group_is_cancelled_once() -> None:
    desk, cancelled = Desk(), list[int]()

    async def writer(number: int) -> None:
        if number == 3:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        try:
            await desk.commit()
        except asyncio.CancelledError:
            cancelled.append(number)
            await asyncio.sleep(0)  # it is not cancelled again
            raise
        if number == 0:
            tasks[1].cancel()

    tasks = [asyncio.create_task(writer(number)) for number in range(4)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert (sorted(cancelled), [type(each) for each in done[::2]]) == ([1, 3], [type(None)] * 2)


async def test_what_asyncio_shows_of_a_task_that_waits_has_no_value_in_it() -> None:
    desk = Desk()
    task = asyncio.create_task(desk.commit())
    await asyncio.sleep(0)
    assert "a batch that waits in 's'" in repr(task)
    assert await task == RECEIPT


async def test_a_time_limit_ends_the_waiting() -> None:
    desk = Desk()
    desk.turns.in_thread = asyncio.get_running_loop().create_future()  # nobody's turn comes
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await desk.commit()
    desk.turns.in_thread = None


def test_who_ends_the_program_keeps_nobody_from_their_answer() -> None:
    async def writer(desk: Desk, number: int) -> Receipt:
        receipt = await desk.commit()
        if number == 1:
            raise KeyboardInterrupt
        return receipt

    async def begin() -> list[asyncio.Task[Receipt]]:
        desk = Desk()
        return [asyncio.create_task(writer(desk, number)) for number in range(4)]

    loop = asyncio.new_event_loop()
    try:
        tasks = loop.run_until_complete(begin())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(asyncio.wait_for(asyncio.wait([tasks[0], *tasks[2:]]), 5))
        assert [task.result() for task in (tasks[0], *tasks[2:])] == [RECEIPT] * 3
        assert isinstance(tasks[1].exception(), KeyboardInterrupt)
    finally:
        loop.close()


def test_who_ends_the_program_keeps_nobody_from_their_turn() -> None:
    """Whoever is told has time to clean up, and whoever is not is told."""

    async def ends(desk: Desk) -> None:
        await desk.commit()
        raise SystemExit(3)

    async def is_told(desk: Desk) -> Receipt:
        item = _waiting()
        item.reply = told = asyncio.get_running_loop().create_future()
        desk.turns.submit(item)
        return await told

    async def begin() -> list[asyncio.Task[Any]]:
        desk = Desk()
        return [asyncio.create_task(each) for each in (ends(desk), is_told(desk), desk.commit("async"))]

    loop = asyncio.new_event_loop()
    try:
        ending, *others = loop.run_until_complete(begin())
        with pytest.raises(SystemExit):
            loop.run_until_complete(ending)
        assert loop.run_until_complete(asyncio.wait_for(asyncio.gather(*others), 5)) == [RECEIPT] * 2
    finally:
        loop.close()


def test_who_is_patient_for_less_than_a_tick_of_uvloop_does_not_trouble_the_next() -> None:
    """What is due within half a millisecond is no timer there, and cannot be asked when it is due."""

    async def both() -> list[int]:
        desk = Desk()
        first, second = _waiting(), _waiting()
        desk.turns.queue.add(first)
        desk.turns._ask_for(1e-6)
        desk.turns.queue.add(second)
        desk.turns._ask_for(1e-6)
        async with asyncio.timeout(10):
            while not desk.groups:
                await asyncio.sleep(0)
        return desk.groups

    assert uvloop.run(both()) == [2]
