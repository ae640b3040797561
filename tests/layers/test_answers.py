"""A transaction that reads, repeated under its request id."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import InvalidInput, ManualClock, Space
from holdfast.layers.records import RecordTransaction


async def withdraw(tx: RecordTransaction) -> Any:
    balance = await tx.get("balance")
    tx.set("balance", balance - 100)
    return {"was": balance}


async def test_a_transaction_that_is_repeated_gives_the_same_answer_and_has_one_effect(space: Space) -> None:
    await space.records.set("balance", 500)
    first = await space.records.transact(withdraw, request_id="r1", asked="withdraw")
    await space.records.set("balance", 1000)
    again = await space.records.transact(withdraw, request_id="r1", asked="withdraw")
    assert first == again == {"was": 500}
    assert await space.records.get("balance") == 1000


async def test_ten_at_once_under_one_id_have_one_effect(space: Space) -> None:
    await space.records.set("balance", 500)
    answers = await asyncio.gather(
        *(space.records.transact(withdraw, request_id="r1", asked="withdraw") for _ in range(10))
    )
    assert answers == [{"was": 500}] * 10
    assert await space.records.get("balance") == 400


async def test_an_id_that_was_used_for_something_else_is_refused(space: Space) -> None:
    await space.records.set("balance", 500)
    await space.records.transact(withdraw, request_id="r1", asked="withdraw")
    with pytest.raises(InvalidInput, match="something else"):
        await space.records.transact(withdraw, request_id="r1", asked="withdraw twice")
    assert await space.records.get("balance") == 400


async def test_another_agents_ids_are_its_own(store: holdfast.Store, space: Space) -> None:
    await space.records.set("balance", 500)
    other = store.space("contoso", agent="risk")
    await space.records.transact(withdraw, request_id="r1", asked="withdraw")
    assert await other.records.transact(withdraw, request_id="r1", asked="withdraw") == {"was": 400}


async def test_an_answer_ends_after_an_hour_and_is_not_in_the_audit(space: Space, clock: ManualClock) -> None:
    await space.records.set("vault/key", "s3cret")

    async def reveal(tx: RecordTransaction) -> Any:
        tx.set("seen", True)
        return await tx.get("vault/key")

    assert await space.records.transact(reveal, request_id="r1", asked="reveal") == "s3cret"
    assert [record.key async for record in space.audit.records()] == ["records/vault/key", "records/seen"]
    clock.advance("61m")
    await space.records.set("vault/key", "other")
    assert await space.records.transact(reveal, request_id="r1", asked="reveal") == "other"


async def test_a_transaction_that_only_reads_leaves_nothing(space: Space) -> None:
    await space.records.set("a", 1)
    revision = (await space.info()).revision

    async def look(tx: RecordTransaction) -> Any:
        return await tx.get("a")

    assert await space.records.transact(look, request_id="r1", asked="look") == 1
    assert (await space.info()).revision == revision


async def test_what_is_appended_or_added_under_a_request_id_is_so_once(space: Space) -> None:
    records = space.records
    for _ in range(2):
        await records.append_to_list("files", "a.csv", "b.csv", request_id="r1")
        assert await records.add_to_set("errors", "E1", "E2", request_id="r2") == 2
        assert await records.remove_from_set("errors", "E1", request_id="r3") == 1
        assert await space.transact(withdraw_from_nothing, request_id="r4") == -100
    assert await records.list("files") == ["a.csv", "b.csv"]
    assert await records.members("errors") == ["E2"]
    assert await records.get("balance") == -100


async def withdraw_from_nothing(tx: RecordTransaction) -> Any:
    tx.set("balance", await tx.get("balance", 0) - 100)
    return await tx.get("balance")


async def test_a_request_id_of_a_list_is_not_used_for_other_items(space: Space) -> None:
    await space.records.append_to_list("files", "a.csv", request_id="r1")
    with pytest.raises(InvalidInput, match="something else"):
        await space.records.append_to_list("files", "b.csv", request_id="r1")
    assert await space.records.list("files") == ["a.csv"]


@pytest.mark.parametrize("work", [None, 5, lambda tx: 1])
async def test_what_is_no_async_function_is_refused(space: Space, work: Any) -> None:
    with pytest.raises(InvalidInput, match="async function"):
        await space.transact(work)
