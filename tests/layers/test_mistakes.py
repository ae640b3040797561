"""Mistakes this kind of software makes, each with the test that keeps it from being made here.

The numbers are those of the list the project keeps of them (docs/guarantees.md). What belongs to locks, documents, queues
and workflows is tested with those capabilities.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

import holdfast
from holdfast import (
    ABSENT,
    Conflict,
    Damaged,
    InvalidInput,
    LeaseLost,
    ManualClock,
    RecordTransaction,
    Space,
    Store,
    increment,
    set_,
)
from holdfast.engine import Batch, Put
from holdfast.engines.evaluation import Group
from holdfast.engines.memory import MemoryEngine
from tests.layers.conftest import everything

pytestmark = pytest.mark.every_engine


async def test_1_a_leader_by_compare_and_swap_ends_with_its_ttl(space: Space, clock: ManualClock) -> None:
    await space.records.compare_and_swap("leader", "a", expect=ABSENT, ttl="5s")
    with pytest.raises(Conflict):
        await space.records.compare_and_swap("leader", "b", expect=ABSENT, ttl="5s")
    clock.advance("5s")
    await space.records.compare_and_swap("leader", "b", expect=ABSENT, ttl="5s")
    assert await space.records.get("leader") == "b"


async def test_1_the_timer_of_an_old_entry_does_not_end_its_successor(
    store: Store, space: Space, clock: ManualClock
) -> None:
    await space.records.set("k", "old", ttl="5s")
    clock.advance("4s")
    await space.records.delete("k")
    await space.records.set("k", "new", ttl="60s")
    clock.advance("2s")
    await store.tidy()
    assert await space.records.get("k") == "new"


async def test_1_a_lock_is_released_by_its_holder_alone_and_fences_by_itself(
    store: Store, space: Space, clock: ManualClock
) -> None:
    late = await space.lock("l", ttl="2s").acquire()
    clock.advance("2s")
    async with store.space("contoso", agent="market", instance="2").lock("l") as guard:  # the same agent, another lease
        with pytest.raises(LeaseLost):
            await late.release()
        with pytest.raises(LeaseLost):
            await late.space.records.set("k", 1)
        await guard.space.records.set("k", 2)
    assert await space.records.get("k") == 2


async def test_2_a_change_of_one_field_keeps_its_siblings(space: Space) -> None:
    await space.records.set("doc", {"a": {"x": 1, "y": 2}})

    async def change(tx: RecordTransaction, field: str) -> None:
        doc = await tx.get("doc")
        doc["a"][field] = 10
        tx.set("doc", doc)

    await asyncio.gather(space.transact(lambda tx: change(tx, "x")), space.transact(lambda tx: change(tx, "y")))
    assert await space.records.get("doc") == {"a": {"x": 10, "y": 10}}


async def test_2_a_retried_reduce_counts_once(space: Space) -> None:
    for _ in range(3):
        await space.commit(increment("total", 7), set_("last", 1), request_id="task-1/attempt")
    assert await space.records.get("total") == 7


async def test_3_value_and_ttl_are_one_change(space: Space, clock: ManualClock) -> None:
    start = await space.cursor()
    await space.records.set("k", 1, ttl="5s")
    await space.records.increment("n", 1, ttl="5s")
    for _ in range(2):
        commit = await anext(space.watch(cursor=start))
        start = commit.cursor
        assert [change.expires_at is not None for change in commit] == [True]


async def test_3_a_typed_write_after_expiry_has_its_ttl_again(space: Space, clock: ManualClock) -> None:
    for _ in range(2):
        await space.records.set("c", {}, type="correlation_state", state="completed")
        entry = await space.records.entry("c")
        assert entry is not None
        assert entry.expires_at is not None
        assert (entry.expires_at - entry.updated_at).total_seconds() == 3600
        clock.advance("2h")
        assert await space.records.get("c") is None


async def test_3_a_ttl_of_zero_is_an_error_not_a_default(space: Space) -> None:
    with pytest.raises(InvalidInput):
        await space.records.set("k", 1, ttl=0, type="correlation_state")
    assert await space.records.get("k") is None


async def test_4_what_was_handed_out_is_not_the_stored_thing(space: Space) -> None:
    mine = {"signals": [1]}
    await space.records.set("k", mine)
    mine["signals"].append(2)
    (await space.records.get("k"))["signals"].append(3)
    assert await space.records.get("k") == {"signals": [1]}


async def test_4_every_time_is_aware_and_utc(space: Space) -> None:
    await space.records.set("k", 1, ttl="1h")
    entry = await space.records.entry("k")
    assert entry is not None
    for at in (entry.created_at, entry.updated_at, entry.expires_at):
        assert at is not None
        assert at.utcoffset() is not None
        assert at.utcoffset().total_seconds() == 0  # type: ignore[union-attr]


async def test_4_nothing_is_written_into_an_expired_list(space: Space, clock: ManualClock) -> None:
    await space.records.append_to_list("bucket", "early", ttl="5s")
    clock.advance("5s")
    await space.records.append_to_list("bucket", "late", ttl="5s")
    assert await space.records.list("bucket") == ["late"]


async def test_5_a_batch_refused_at_its_last_operation_did_none(space: Space) -> None:
    await space.records.set("text", "x")
    before = await everything(space)
    with pytest.raises(InvalidInput):
        await space.commit(set_("a", 1), increment("n"), increment("text"))
    assert await everything(space) == before


async def test_5_wildcards_in_names_are_letters_like_others(space: Space) -> None:
    for key in ["a*", "ab", "a_", "a%", "a?", "a[b]", "{a}"]:
        await space.records.set(key, key)
    for key in ["a*", "a_", "a%", "a?", "a[b]", "{a}"]:
        assert await space.records.keys(key) == [key]
        await space.records.delete(key)
    assert await space.records.keys() == ["ab"]


async def test_6_every_change_has_owner_time_and_sequence(store: Store, space: Space) -> None:
    start = await space.cursor()
    for agent in ("market", "risk"):
        await store.space("contoso", agent=agent).commit(set_(agent, 1), set_("shared", agent))
    watch = space.watch(cursor=start)
    commits = [await anext(watch), await anext(watch)]
    assert [commit.actor for commit in commits] == ["market", "risk"]
    assert commits[0].version < commits[1].version
    assert commits[0].at <= commits[1].at
    assert [change.owner for commit in commits for change in commit] == ["market", "market", "risk", "risk"]


def test_6_the_evaluation_consults_no_clock_of_its_own() -> None:
    """The same batches at the same `now` give the same bytes, whenever they are evaluated."""

    async def run() -> list[object]:
        clock = ManualClock()
        engine = MemoryEngine(clock=clock)
        for number in range(20):
            await engine.commit("s", Batch("a", (Put(f"records/{number % 5}", b"1", ttl_ms=3000),)))
            clock.advance("1s")
        return [*(await engine.scan("s", "")).entries, *await engine.spaces()]

    assert asyncio.run(run()) == asyncio.run(run())
    source = Path(Group.__init__.__code__.co_filename).read_text()
    assert "clock" not in source.split('"""', 2)[2].lower().replace("clock(s)", "")


async def test_7_a_replaced_value_is_credited(store: Store, space: Space) -> None:
    await space.records.set("k", "x" * 1000)
    await store.space("contoso", agent="risk").records.set("k", "y" * 10)
    usage = {each.owner: (each.keys, each.bytes) for each in (await space.info()).usage}
    assert usage == {"risk": (1, len("records/k") + 12)}


async def test_9_a_refusal_raises_it_is_never_none_or_false(space: Space) -> None:
    await space.records.set("k", 1)
    with pytest.raises(Conflict) as caught:
        await space.records.compare_and_swap("k", 2, expect=3)
    assert caught.value.condition == "value"


async def test_9_a_value_that_cannot_be_decoded_is_damage_not_absence(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with holdfast.open(str(path)) as store:
        await store.space("s").records.set("k", {"a": 1})
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE entries SET value = CAST('{\"a\":' AS BLOB) WHERE key = 'records/k'")
    raw.close()
    async with holdfast.open(str(path)) as store:
        with pytest.raises(Damaged):
            await store.space("s").records.get("k")


async def test_9_a_retry_increments_once_also_after_reopening(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    for _ in range(3):
        async with holdfast.open(path) as store:
            assert await store.space("s").records.increment("n", request_id="r") == 1
