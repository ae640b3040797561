"""Transactions: functions that read, compute and write, all or nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast import Conflict, InvalidInput, ManualClock, RecordTransaction, Space, at_least
from holdfast.engine import Entry
from holdfast.layers.records import Records
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything


async def test_a_transaction_sees_its_own_writes(space: Space) -> None:
    await space.records.set("n", 5)

    async def work(tx: RecordTransaction) -> list[object]:
        seen = [await tx.get("n")]
        tx.increment("n", 2)
        seen.append(await tx.get("n"))
        tx.set("n", 10)
        tx.increment("n")
        seen.append(await tx.get("n"))
        tx.delete("n")
        seen.append(await tx.get("n", "gone"))
        tx.increment("n")
        seen.append(await tx.get("n"))
        return seen

    assert await space.transact(work) == [5, 7, 11, "gone", 1]
    assert await space.records.get("n") == 1


async def test_concurrent_transactions_lose_no_update(space: Space) -> None:
    async def add(tx: RecordTransaction) -> None:
        tx.set("n", await tx.get("n", 0) + 1)

    await asyncio.gather(*(space.transact(add) for _ in range(20)))
    assert await space.records.get("n") == 20


async def test_money_is_neither_made_nor_lost(space: Space) -> None:
    for account in range(5):
        await space.records.set(f"account/{account}", 100)

    async def move(source: int, target: int, amount: int) -> None:
        async def work(tx: RecordTransaction) -> None:
            have = await tx.get(f"account/{source}")
            if have >= amount and source != target:
                tx.set(f"account/{source}", have - amount)
                tx.set(f"account/{target}", await tx.get(f"account/{target}") + amount)

        await space.transact(work)

    await asyncio.gather(*(move(i % 5, (i * 3 + 1) % 5, i % 40) for i in range(40)))
    values = await space.records.get_many(f"account/{number}" for number in range(5))
    assert sum(values.values()) == 500
    assert min(values.values()) >= 0


async def test_an_exception_leaves_no_trace(space: Space) -> None:
    await space.records.set("n", 1)
    before = await everything(space)

    async def work(tx: RecordTransaction) -> None:
        tx.set("n", await tx.get("n") + 1)
        await tx.append_to_list("l", 1)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        await space.transact(work)
    assert await everything(space) == before


async def test_exhausted_attempts_raise_the_conflict(space: Space) -> None:
    runs = 0

    async def work(tx: RecordTransaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("n")
        await space.records.increment("n")  # somebody else, every time
        tx.set("other", 1)

    with pytest.raises(Conflict):
        await space.transact(work, attempts=3)
    assert runs == 3
    assert await space.records.get("other") is None
    with pytest.raises(InvalidInput):
        await space.transact(work, attempts=0)


async def test_a_required_condition_that_fails_is_not_retried(space: Space) -> None:
    runs = 0

    async def work(tx: RecordTransaction) -> None:
        nonlocal runs
        runs += 1
        tx.require(at_least("available", 1))
        tx.increment("available", -1)

    with pytest.raises(Conflict):
        await space.transact(work)
    assert runs == 1


async def test_a_required_condition_that_fails_ends_the_transaction_although_its_key_was_read(space: Space) -> None:
    runs = 0
    await space.records.set("available", 0)

    async def work(tx: RecordTransaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("available")
        tx.require(at_least("available", 1))
        tx.increment("available", -1)

    with pytest.raises(Conflict, match="at least 1"):
        await space.transact(work)
    assert runs == 1


async def test_increments_alone_never_conflict(space: Space) -> None:
    runs = 0

    async def work(tx: RecordTransaction) -> None:
        nonlocal runs
        runs += 1
        tx.increment("n")

    await asyncio.gather(*(space.transact(work) for _ in range(50)))
    assert (runs, await space.records.get("n")) == (50, 50)


async def test_reads_of_one_transaction_belong_together(space: Space) -> None:
    """A reader that saw `a` before and `b` after another commit is run again."""
    await space.commit()
    await space.records.set("a", 0)
    await space.records.set("b", 0)
    runs = 0

    async def work(tx: RecordTransaction) -> tuple[int, int]:
        nonlocal runs
        runs += 1
        a = await tx.get("a")
        if runs == 1:
            await space.records.set("a", 1)
            await space.records.set("b", 1)
        return a, await tx.get("b")

    assert await space.transact(work) == (1, 1)
    assert runs == 2


async def test_lists_and_sets_take_part(space: Space) -> None:
    async def work(tx: RecordTransaction) -> int:
        await tx.append_to_list("l", 1)
        await tx.append_to_list("l", 2)
        tx.set("k", 1)
        await tx.add_to_set("s", 1)
        return await tx.add_to_set("s", 1, 2) + await tx.remove_from_set("s", 9)

    assert await space.transact(work) == 1
    assert await space.records.list("l") == [1, 2]
    assert await space.records.members("s") == [1, 2]


async def test_a_transaction_sees_the_sets_and_lists_it_made(space: Space, clock: ManualClock) -> None:
    await space.records.add_to_set("old", 1, 2)

    async def work(tx: RecordTransaction) -> list[object]:
        await tx.add_to_set("s", 1, 2)
        told: list[object] = [await tx.remove_from_set("s", 1, 3)]
        tx.delete("old")
        told.append(await tx.remove_from_set("old", 1))
        tx.set("other", 5)
        with pytest.raises(InvalidInput, match="not as a set"):
            await tx.remove_from_set("other", 5)
        await tx.append_to_list("l", 1, ttl="1s")
        await tx.append_to_list("l", 2, ttl="1h")
        with pytest.raises(InvalidInput, match="as a list"):
            await tx.get("l")
        tx.increment("counted")
        for call in (tx.add_to_set("counted", 1), tx.remove_from_set("counted", 1), tx.append_to_list("counted", 1)):
            with pytest.raises(InvalidInput, match="not as a"):
                await call
        return told

    assert await space.transact(work) == [1, 0]
    assert await space.records.members("s") == [2]
    assert await space.records.get("counted") == 1
    assert not await space.records.exists("old")
    clock.advance("30m")
    assert await space.records.list("l") == [1, 2]


async def test_what_a_transaction_appends_at_once_is_one_list(space: Space) -> None:
    class Slow(Wrapper):
        """As an engine on another machine is."""

        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            await asyncio.sleep(0)
            return await self.inner.get(space, keys)

    async def work(tx: RecordTransaction) -> None:
        await asyncio.gather(tx.append_to_list("l", 1), tx.append_to_list("l", 2), tx.add_to_set("s", 1))

    slow = Records(msgspec.structs.replace(space._scope, engine=Slow(space._scope.engine)))
    await slow.transact(work)
    assert await space.records.list("l") == [1, 2]


async def test_a_record_written_in_a_transaction_is_no_list_in_it(space: Space) -> None:
    async def work(tx: RecordTransaction) -> None:
        tx.set("k", 1)
        await tx.append_to_list("k", 2)

    with pytest.raises(InvalidInput, match="not as a list"):
        await space.transact(work)


async def test_what_is_written_to_a_transaction_that_is_over_is_refused(space: Space) -> None:
    kept: list[RecordTransaction] = []

    async def work(tx: RecordTransaction) -> None:
        kept.append(tx)
        tx.set("paid", True)

    await space.transact(work)
    for late in (lambda: kept[0].set("noted", True), lambda: kept[0].delete("paid"), lambda: kept[0].increment("n")):
        with pytest.raises(InvalidInput, match="is over"):
            late()
    for call in (kept[0].append_to_list("l", 1), kept[0].add_to_set("s", 1)):
        with pytest.raises(InvalidInput, match="is over"):
            await call
    with pytest.raises(InvalidInput, match="is over"):
        kept[0].require(at_least("n", 1))
    assert await space.records.get_many(["paid", "noted", "n"]) == {"paid": True}


async def test_a_function_that_is_not_async_is_refused(space: Space) -> None:
    with pytest.raises(InvalidInput, match="takes an async function"):
        await space.transact(lambda tx: tx.set("paid", True))  # type: ignore[arg-type, return-value]
    assert not await space.records.exists("paid")
