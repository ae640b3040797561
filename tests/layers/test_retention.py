"""Retention: the table, and that it is applied in the same commit as the write."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import ManualClock, RecordTransaction, Retention, Space, Store, set_

S, M, H, D = 1, 60, 3600, 86_400

DURABLE = [
    ("correlation_state", None, 24 * H),
    ("correlation_state", "collecting", 24 * H),
    ("correlation_state", "completed", 1 * H),
    ("correlation_state", "failed", 7 * D),
    ("audit_logs", None, 30 * D),
    ("audit_logs", "compliance", 365 * D),
    ("performance_metrics", None, 7 * D),
    ("performance_metrics", "aggregated", 30 * D),
    ("task", "completed", 7 * D),
    ("task", "killed", 7 * D),
    ("task", "running", None),
    ("spilled_output", None, 24 * H),
    ("workflow_execution", "completed", 24 * H),
    ("workflow_execution", "running", None),
    ("message", None, None),
    ("feed", None, 24 * H),
    ("anything_else", None, 1 * H),
    ("anything_else", "some_state", 1 * H),
]
VOLATILE = [
    ("correlation", None, 300 * S),
    ("correlation", "completed", 60 * S),
    ("correlation", "failed", 600 * S),
    ("workflow_state", None, 180 * S),
    ("performance_counters", None, 1 * H),
    ("task", "running", None),
    ("task", "killed", 300 * S),
    ("workflow_execution", "running", None),
    ("workflow_execution", "completed", 300 * S),
    ("message", None, None),
    ("anything_else", None, 300 * S),
]


async def lifetime(space: Space, key: str) -> float | None:
    entry = await space.records.entry(key)
    assert entry is not None
    return None if entry.expires_at is None else (entry.expires_at - entry.updated_at).total_seconds()


@pytest.mark.parametrize(("type", "state", "seconds"), DURABLE)
async def test_a_durable_value_lives_as_long_as_the_table_says(
    space: Space, type: str, state: str | None, seconds: float | None
) -> None:
    await space.records.set("k", 1, type=type, state=state)
    assert await lifetime(space, "k") == seconds
    entry = await space.records.entry("k")
    assert entry is not None
    assert (entry.type, entry.state) == (type, state)


@pytest.mark.parametrize(("type", "state", "seconds"), VOLATILE)
async def test_a_volatile_value_lives_as_long_as_the_table_says(
    store: Store, type: str, state: str | None, seconds: float | None
) -> None:
    space = store.space("scratch", durability="volatile")
    await space.records.set("k", 1, type=type, state=state)
    assert await lifetime(space, "k") == seconds


async def test_every_way_to_write_applies_it_in_the_same_commit(space: Space) -> None:
    async def work(tx: RecordTransaction) -> None:
        tx.set("transacted", 1, type="correlation_state", state="completed")

    await space.commit(set_("batched", 1, type="correlation_state", state="completed"))
    await space.transact(work)
    await space.records.compare_and_swap(
        "swapped", 1, expect=holdfast.ABSENT, type="correlation_state", state="completed"
    )
    for key in ("batched", "transacted", "swapped"):
        assert await lifetime(space, key) == H
    assert (await space.info()).revision == 3


async def test_a_change_of_state_changes_the_lifetime_with_it(space: Space, clock: ManualClock) -> None:
    await space.records.set("c", "collecting", type="correlation_state")
    clock.advance("23h")
    await space.records.set("c", "failed", type="correlation_state", state="failed")
    clock.advance("6d")
    assert await space.records.get("c") == "failed"
    await space.records.set("c", "completed", type="correlation_state", state="completed")
    clock.advance("1h")
    assert await space.records.get("c") is None


async def test_an_explicit_ttl_wins_and_no_type_means_for_ever(space: Space) -> None:
    await space.records.set("a", 1, type="correlation_state", ttl="5s")
    await space.records.set("b", 1)
    assert await lifetime(space, "a") == 5
    assert await lifetime(space, "b") is None


async def test_the_table_can_be_changed_and_extended(url: str, clock: ManualClock) -> None:
    retention = Retention(durable={"correlation_state": {"failed": "1d"}, "mine": {"default": "2h", "done": None}})
    async with holdfast.open(url, clock=clock, retention=retention, background=False) as store:
        space = store.space("s")
        for key, type, state, seconds in [
            ("a", "correlation_state", "failed", D),
            ("b", "correlation_state", "completed", H),
            ("c", "mine", None, 2 * H),
            ("d", "mine", "done", None),
        ]:
            await space.records.set(key, 1, type=type, state=state)
            assert await lifetime(space, key) == seconds
