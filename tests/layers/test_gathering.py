"""Batches that are gathered: fewer commits, and for each caller the same outcome as if it had gone alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Conflict, InvalidInput, ManualClock, OutcomeUnknown, Space
from holdfast.engine import Absent, AtLeast, Batch, Delete, Engine, Increment, Present, Push, Put, Receipt
from holdfast.layers.coordination import Coordination
from holdfast.layers.gathering import ALONE_BYTES_MIN, Gathering
from holdfast.layers.leases import Leases
from holdfast.middleware.wrapper import Wrapper

DEPTH = "depths/q/ready"


class Sent(Wrapper):
    """Remembers the batches, and fails as it is told."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.batches: list[Batch] = []
        self.failing: list[BaseException] = []

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.batches.append(batch)
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing.pop(0)
        return await self.inner.commit(space, batch)


@pytest.fixture
def sent(space: Space) -> Sent:
    return Sent(space._scope.engine)


@pytest.fixture
def gathering(space: Space, sent: Sent) -> Gathering:
    return Gathering(replace(space._scope, engine=sent))


def put(number: int) -> tuple[Any, ...]:
    return Push("queues/ready/q/499/", b"%d" % number), Increment(DEPTH, 1)


async def test_what_comes_together_goes_together_and_each_gets_its_own_results(
    space: Space, sent: Sent, gathering: Gathering
) -> None:
    receipts = await asyncio.gather(*(gathering.commit(put(number)) for number in range(200)))
    assert len(sent.batches) <= 4
    assert all(len(batch.operations) <= 128 for batch in sent.batches)
    assert [sum(type(op) is Increment for op in batch.operations) for batch in sent.batches] == [1] * len(sent.batches)
    keys = [str(receipt.results[0]) for receipt in receipts]
    entries = await space._scope.engine.get("contoso", keys)
    assert [entry.value for entry in entries if entry is not None] == [b"%d" % number for number in range(200)]
    [depth] = await space._scope.engine.get("contoso", [DEPTH])
    assert depth is not None
    assert depth.value == b"200"


async def test_whoever_comes_alone_goes_at_once_and_alone(sent: Sent, gathering: Gathering) -> None:
    for number in range(3):
        await gathering.commit(put(number))
    assert [len(batch.operations) for batch in sent.batches] == [2, 2, 2]


async def test_only_who_is_to_blame_is_refused(space: Space, sent: Sent, gathering: Gathering) -> None:
    async def one(number: int) -> Receipt:
        conditions = (Present("records/nowhere"),) if number == 3 else ()
        return await gathering.commit(put(number), conditions)

    outcomes = await asyncio.gather(*(one(number) for number in range(6)), return_exceptions=True)
    assert [isinstance(each, Conflict) for each in outcomes] == [number == 3 for number in range(6)]
    assert {type(each) for each in outcomes} == {Conflict, Receipt}
    assert (await space.queue("q").stats()).ready == 5
    assert len(await space.queue("q").peek()) == 5


async def test_conditions_see_what_others_wrote_before_them(space: Space, gathering: Gathering) -> None:
    """All conditions of a batch are judged first: two that depend on each other are never in one."""

    async def claim(number: int) -> Receipt:
        return await gathering.commit((Put("records/one", b"%d" % number),), (Absent("records/one"),))

    outcomes = await asyncio.gather(*(claim(number) for number in range(5)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [Receipt, *[Conflict] * 4]
    assert await space.records.get("one") == 0

    async def spend() -> Receipt:
        return await gathering.commit((Increment("records/cash", -1),), (AtLeast("records/cash", 1),))

    await space.records.set("cash", 2)
    outcomes = await asyncio.gather(*(spend() for _ in range(5)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["Conflict"] * 3 + ["Receipt"] * 2
    assert await space.records.get("cash") == 0


async def test_a_condition_on_what_the_one_before_writes_is_judged_after_it(space: Space, gathering: Gathering) -> None:
    await space.records.set("cash", 1)
    outcomes = await asyncio.gather(
        gathering.commit((Increment("records/cash", -1),)),
        gathering.commit((Put("records/bought", b"1"),), (AtLeast("records/cash", 1),)),
        return_exceptions=True,
    )
    outcomes += await asyncio.gather(
        gathering.commit((Put("records/leader", b"1"),)),
        gathering.commit((Put("records/won", b"2"),), (Absent("records/leader"),)),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [Receipt, Conflict, Receipt, Conflict]
    assert await space.records.keys() == ["cash", "leader"]


async def test_the_order_of_writes_to_one_key_is_kept(space: Space, gathering: Gathering) -> None:
    await asyncio.gather(
        gathering.commit((Increment("records/n", 1),)),
        gathering.commit((Put("records/n", b"1"),)),
        gathering.commit((Increment("records/n", 1),)),
        gathering.commit((Increment("records/n", 1),)),
    )
    assert await space.records.get("n") == 3
    alone = (Increment("records/n", 1), Put("records/n", b"10"), Increment("records/n", 5))
    await asyncio.gather(gathering.commit(alone), gathering.commit(alone))
    assert await space.records.get("n") == 15
    await asyncio.gather(*(gathering.commit((Put("records/m", b"%d" % number),)) for number in range(9)))
    assert await space.records.get("m") == 8
    results = await asyncio.gather(*(gathering.commit((Delete("records/m"),)) for _ in range(3)))
    assert [receipt.results for receipt in results] == [[True], [False], [False]]


async def test_an_unknown_outcome_is_told_to_all_who_went_together(sent: Sent, gathering: Gathering) -> None:
    sent.failing = [OutcomeUnknown("cut off")]
    first = asyncio.gather(*(gathering.commit(put(number)) for number in range(5)), return_exceptions=True)
    outcomes = await first
    assert [type(each) for each in outcomes] == [OutcomeUnknown] * 5
    assert len(sent.batches) == 1
    await gathering.commit(put(7))


async def test_a_caller_that_is_cancelled_breaks_nobody_else_s_answer(space: Space, gathering: Gathering) -> None:
    tasks = [asyncio.create_task(gathering.commit(put(number))) for number in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.sleep(0)
    tasks[5].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(each, Receipt) for each in outcomes) == 8
    assert 8 <= (await space.queue("q").stats()).ready <= 10
    assert (await space.queue("q").stats()).ready == len(await space.queue("q").peek(20))


async def test_what_is_wrong_or_large_goes_alone(space: Space, sent: Sent, gathering: Gathering) -> None:
    large = Push("queues/ready/q/499/", b'"' + b"x" * ALONE_BYTES_MIN + b'"')
    wrong = Push("queues/ready/q/499/", "text")  # type: ignore[arg-type]
    outcomes = await asyncio.gather(
        gathering.commit(put(1)),
        gathering.commit((large, Increment(DEPTH, 1))),
        gathering.commit((wrong,)),
        gathering.commit(put(2)),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [Receipt, Receipt, InvalidInput, Receipt]
    assert len(await space.queue("q").peek()) == 3


async def test_puts_and_acknowledgements_that_come_together_are_few_commits(space: Space, clock: ManualClock) -> None:
    sent = Sent(space._scope.engine)
    coordination = Coordination(Leases(clock))
    view = Space(replace(space._scope, engine=sent), space._blob_folder, coordination)
    queue = view.queue("orders", prefetch=32)
    await asyncio.gather(*(queue.put(number) for number in range(32)))
    assert len(sent.batches) == 1
    messages = await asyncio.gather(*(queue.take() for _ in range(32)))
    assert len(sent.batches) <= 4  # the lease, and one Take
    before = len(sent.batches)
    await asyncio.gather(*(message.complete(message.body, to="done") for message in messages))
    assert len(sent.batches) - before <= 2
    assert [each.body for each in await view.queue("done").peek(40)] == list(range(32))
    await coordination.close()
