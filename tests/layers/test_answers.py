"""A transaction that reads, repeated under its request id."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import InvalidInput, ManualClock, Space
from holdfast.layers.answers import transact_once
from holdfast.layers.records import RecordTransaction


async def withdraw(tx: RecordTransaction) -> Any:
    balance = await tx.get("balance")
    tx.set("balance", balance - 100)
    return {"was": balance}


async def test_a_transaction_that_is_repeated_gives_the_same_answer_and_has_one_effect(space: Space) -> None:
    await space.records.set("balance", 500)
    first = await transact_once(space.records, withdraw, request_id="r1", asked="withdraw")
    await space.records.set("balance", 1000)
    again = await transact_once(space.records, withdraw, request_id="r1", asked="withdraw")
    assert first == again == {"was": 500}
    assert await space.records.get("balance") == 1000


async def test_ten_at_once_under_one_id_have_one_effect(space: Space) -> None:
    await space.records.set("balance", 500)
    answers = await asyncio.gather(
        *(transact_once(space.records, withdraw, request_id="r1", asked="withdraw") for _ in range(10))
    )
    assert answers == [{"was": 500}] * 10
    assert await space.records.get("balance") == 400


async def test_an_id_that_was_used_for_something_else_is_refused(space: Space) -> None:
    await space.records.set("balance", 500)
    await transact_once(space.records, withdraw, request_id="r1", asked="withdraw")
    with pytest.raises(InvalidInput, match="something else"):
        await transact_once(space.records, withdraw, request_id="r1", asked="withdraw twice")
    assert await space.records.get("balance") == 400


async def test_another_agents_ids_are_its_own(store: holdfast.Store, space: Space) -> None:
    await space.records.set("balance", 500)
    other = store.space("contoso", agent="risk")
    await transact_once(space.records, withdraw, request_id="r1", asked="withdraw")
    assert await transact_once(other.records, withdraw, request_id="r1", asked="withdraw") == {"was": 400}


async def test_an_answer_ends_after_an_hour_and_is_not_in_the_audit(space: Space, clock: ManualClock) -> None:
    await space.records.set("vault/key", "s3cret")

    async def reveal(tx: RecordTransaction) -> Any:
        tx.set("seen", True)
        return await tx.get("vault/key")

    assert await transact_once(space.records, reveal, request_id="r1", asked="reveal") == "s3cret"
    assert [record.key async for record in space.audit.records()] == ["records/vault/key", "records/seen"]
    clock.advance("61m")
    await space.records.set("vault/key", "other")
    assert await transact_once(space.records, reveal, request_id="r1", asked="reveal") == "other"


async def test_a_transaction_that_only_reads_leaves_nothing(space: Space) -> None:
    await space.records.set("a", 1)
    revision = (await space.info()).revision

    async def look(tx: RecordTransaction) -> Any:
        return await tx.get("a")

    assert await transact_once(space.records, look, request_id="r1", asked="look") == 1
    assert (await space.info()).revision == revision
