"""What a store does by itself: sweeping, collecting, sealing, forgetting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import holdfast
from holdfast import ManualClock, Redaction, Retention, Space, Store
from holdfast.engine import Batch, ChangeSet, Durability, Entry, Push, Put, cursor_at
from holdfast.errors import Damaged, Error
from holdfast.layers import caretaker
from holdfast.layers.audit import Audit
from holdfast.layers.caretaker import LEASE, PRUNE_MS, SEAL_MS
from holdfast.layers.collector import collect
from holdfast.layers.records import LISTS, SETS
from holdfast.layers.workflows.collecting import remove_execution
from holdfast.layers.workflows.entries import execution_key, steps_prefix
from holdfast.middleware.wrapper import Wrapper


async def count(space: Space, prefix: str) -> int:
    return len((await space._scope.engine.scan(space.name, prefix)).entries)


async def settle(space: Space, reached: object) -> None:
    """Let the background task run until something holds; bounded."""
    for _ in range(2000):
        if await reached():  # type: ignore[operator]
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the caretaker did not get there")


async def test_the_background_task_sweeps_what_expired(url: str, clock: ManualClock) -> None:
    async with holdfast.open(url, clock=clock) as store:
        space = store.space("s")
        start = await space.cursor()
        await space.records.set("k", 1, ttl="5s")
        watch = space.watch(cursor=start)
        await anext(watch)
        expiry = asyncio.ensure_future(anext(watch))
        for _ in range(3):
            await asyncio.sleep(0)
        clock.advance("6s")
        assert [change.op for change in await asyncio.wait_for(expiry, 10)] == ["expire"]


async def test_the_background_task_seals(url: str, clock: ManualClock) -> None:
    async with holdfast.open(url, clock=clock) as store:
        space = store.space("s")
        await space.records.set("k", 1)
        for _ in range(3):
            await asyncio.sleep(0)
        clock.advance("5s")

        async def sealed() -> bool:
            return await space.audit.sealed_upto() >= 1

        await settle(space, sealed)
        assert (await space.audit.verify()).sound


async def test_items_of_ended_lists_and_sets_are_collected(store: Store, space: Space, clock: ManualClock) -> None:
    await space.records.append_to_list("deleted", *range(100))
    await space.records.append_to_list("deleted", *range(100))
    await space.records.add_to_set("expired", *range(50), ttl="10s")
    await space.records.append_to_list("replaced", 1)
    await space.records.append_to_list("kept", 1)
    await space.records.append_to_list("again", 1)
    await space.records.delete("deleted")
    await space.records.delete("again")
    await space.records.append_to_list("again", 2)
    await space.records.set("replaced", "now a record")
    clock.advance("11s")
    await store.tidy()
    await store.tidy()
    assert await count(space, LISTS.root) == 2
    assert await count(space, SETS.root) == 0
    assert await space.records.list("kept") == [1]
    assert await space.records.list("again") == [2]
    usage = {(each.subspace): each.keys for each in (await space.info()).usage}
    assert usage["lists"] == 2


@pytest.mark.parametrize("after", ["there", "deleted", "replaced", "never"])
async def test_items_that_were_written_by_hand_under_no_list_are_collected(
    store: Store, space: Space, after: str
) -> None:
    await space.records.append_to_list("kept", 1, 2)
    await space.records.add_to_set("kept too", 1)
    by_hand = [Push("lists/plain/1/", b"1"), Put("sets/plain/1/x", b"1"), Push("lists/kept/other/", b"1")]
    if after != "never":
        await space.records.set("plain", "1")  # a record that says what a list's would say, and is none
    await space._scope.engine.commit(space.name, Batch("intruder", tuple(by_hand)))
    if after == "deleted":
        await space.records.delete("plain")
    elif after == "replaced":
        await space.records.set("plain", "2")
    assert await collect(store.engine, space.name) == 3
    assert (await space.records.list("kept"), await space.records.members("kept too")) == ([1, 2], [1])
    assert await collect(store.engine, space.name) == 0


async def test_nothing_is_left_behind_when_the_feed_was_forgotten_first(store: Store, space: Space) -> None:
    await space.records.append_to_list("a", *range(10))
    await space.records.append_to_list("b", 1)
    await space.records.delete("a")
    await space._scope.engine.compact(space.name, (await space.info()).revision)
    await store.tidy()
    assert await count(space, LISTS.root) == 1


async def test_the_feed_is_forgotten_after_its_retention_and_never_unsealed(
    store: Store, space: Space, clock: ManualClock
) -> None:
    caretaker = store._caretaker
    await space.records.set("old", 1)
    clock.advance("23h")
    await space.records.set("young", 1)
    await caretaker.round(space.name)
    assert (await space.info()).feed_floor == 0
    clock.advance("2h")
    await caretaker.round(space.name)
    floor = (await space.info()).feed_floor
    assert floor >= 1
    told = [c async for c in space._scope.engine.watch(space.name, "records/", cursor=cursor_at(floor), live=False)]
    assert [change.key for commit in told for change in commit.changes] == ["records/young"]
    assert await space.audit.sealed_upto() >= floor
    assert (await space.audit.verify()).sound


async def test_a_step_that_fails_keeps_no_other_from_being_done(
    store: Store, space: Space, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swept: list[str] = []
    caretaker = store._caretaker

    async def fail(*_: object, **__: object) -> None:
        raise Damaged("cannot be sealed")

    async def prune(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async def sweep(name: str) -> None:
        swept.append(name)

    await space.records.set("old", 1)
    await space.audit.seal()
    clock.advance("25h")
    await space.records.set("young", 1)
    monkeypatch.setattr(Audit, "seal", fail)
    monkeypatch.setattr(Audit, "prune", prune)
    monkeypatch.setattr(caretaker, "_sweep_blobs", sweep)
    with pytest.raises(Damaged, match="cannot be sealed"):
        await caretaker.round(space.name)
    assert (await space.info()).feed_floor >= 1
    assert swept == [space.name]
    assert "another step failed too: a fault of ours" in caplog.text


async def test_what_is_wrong_in_one_space_keeps_no_other_from_being_tidied(
    store: Store,
) -> None:
    for name in ("a", "b"):
        await store.space(name).records.set("k", 1)
    await store.engine.commit("a", Batch("intruder", (Put("audit/head", b"[]"),)))
    with pytest.raises(Error):
        await store.tidy()
    assert await store.space("b").audit.sealed_upto() == 1


async def test_audit_is_pruned_after_its_retention(url: str, clock: ManualClock) -> None:
    retention = Retention(durable={"audit_logs": {"default": "2d"}})
    async with holdfast.open(url, clock=clock, retention=retention, background=False) as store:
        space = store.space("s")
        for _ in range(4):
            await space.records.set("k", 1)
            await store.tidy()
            clock.advance("1d")
        clock.advance(PRUNE_MS / 1000)
        await store._caretaker.round("s")
        verification = await space.audit.verify()
        assert verification.sound
        assert verification.segments == 1


async def test_one_caretaker_at_a_time_and_another_takes_over(store: Store, space: Space, clock: ManualClock) -> None:
    one = store._caretaker
    other = type(one)(store.engine, clock, Retention(), Redaction(), lambda name: space.audit, store._sweep_blobs)
    await space.records.set("k", 1)
    await one.round(space.name)
    clock.advance(SEAL_MS / 1000)
    await space.records.set("k", 2)
    await other.round(space.name)
    [held] = await store.engine.get(space.name, [LEASE])
    assert held is not None
    assert held.value == one._me
    clock.advance("16s")
    await space.records.set("k", 3)
    await other.round(space.name)
    [held] = await store.engine.get(space.name, [LEASE])
    assert held is not None
    assert held.value == other._me


async def test_closing_lets_go_of_the_lease(tmp_path: object, clock: ManualClock) -> None:
    path = f"{tmp_path}/team.db"
    async with holdfast.open(path, clock=clock, background=False) as store:
        await store.space("s").records.set("k", 1)
        await store._caretaker.round("s")
        [held] = await store.engine.get("s", [LEASE])
        assert held is not None
    async with holdfast.open(path, clock=clock, background=False) as store:
        [held] = await store.engine.get("s", [LEASE])
        assert held is None


async def test_a_feed_is_not_read_for_lists_where_there_are_none(store: Store, space: Space) -> None:
    for number in range(3):
        await space.records.set("a", number)
    watched: list[tuple[str, ...]] = []

    class Seen(Wrapper):
        def watch(self, space: str, *prefixes: str, **how: Any) -> AsyncIterator[ChangeSet]:
            watched.append(prefixes)
            return self.inner.watch(space, *prefixes, **how)

    assert await collect(Seen(store.engine), space.name) == 0
    assert watched == []
    await space.records.append_to_list("b", 1, 2)
    await space.records.delete("b")
    assert await collect(Seen(store.engine), space.name) == 2
    assert len(watched) == 1


@pytest.mark.parametrize("before", ["deleted", "replaced"])
async def test_a_list_that_begins_while_the_one_before_is_collected_keeps_its_items(
    store: Store, space: Space, before: str
) -> None:
    records = space.records
    await records.append_to_list("a", 1, 2)
    await records.delete("a")
    if before == "replaced":
        await records.append_to_list("a", 3)

    class Overtaken(Wrapper):
        """Somebody begins the list anew after the collector has read its record, and before it reads the items."""

        done = False

        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            entries = await self.inner.get(space, keys)
            if keys == ["records/a"] and not self.done:
                self.done = True
                await records.delete("a")
                await records.append_to_list("a", 4)
            return entries

    await collect(Overtaken(store.engine), space.name)
    assert await records.list("a") == [4]
    await collect(store.engine, space.name)
    assert await records.list("a") == [4]
    assert await count(space, LISTS.root) == 1


async def test_an_execution_that_comes_back_while_it_is_collected_keeps_its_journal(store: Store, space: Space) -> None:
    record, step = execution_key("e1"), steps_prefix("e1") + "a"
    await store.engine.commit(space.name, Batch("holdfast", (Put(step, b"1"),)))

    class Overtaken(Wrapper):
        """It comes back after the collector has seen that it is gone."""

        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            entries = await self.inner.get(space, keys)
            await self.inner.commit(space, Batch("holdfast", (Put(record, b"{}"),)))
            return entries

    await remove_execution(Overtaken(store.engine), space.name, "e1")
    assert None not in await store.engine.get(space.name, [record, step])


async def test_items_of_ended_lists_are_collected_in_a_volatile_space_too(store: Store, clock: ManualClock) -> None:
    space = store.space("quick", durability="volatile")
    for _ in range(2):
        await space.records.append_to_list("deleted", *range(50))
        await space.records.delete("deleted")
        await space.records.add_to_set("expired", *range(50), ttl="10s")
        clock.advance(PRUNE_MS / 1000)
        await store._caretaker.round(space.name)
        assert await count(space, LISTS.root) + await count(space, SETS.root) == 0
    await space.records.append_to_list("deleted", 1)
    await space.records.delete("deleted")
    await store.tidy()
    assert await count(space, LISTS.root) == 0


@pytest.mark.parametrize("durability", ["sync", "volatile"])
async def test_a_feed_that_grows_faster_than_a_round_forgets_is_forgotten_by_the_next_ones(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    monkeypatch.setattr(caretaker, "FORGET_MAX", 10)
    space = store.space("busy", durability=durability)
    for number in range(25):
        await space.records.set("k", number)
    await store._caretaker.round(space.name)
    await space.audit.seal()
    clock.advance("25h")
    for _ in range(4):
        await store._caretaker.round(space.name)
        clock.advance("1s")
    assert (await space.info()).feed_floor >= 25


async def test_a_feed_that_somebody_forgets_meanwhile_is_looked_at_again(
    store: Store, space: Space, clock: ManualClock
) -> None:
    for number in range(5):
        await space.records.set("k", number)
    before = await space.info()
    await space._scope.engine.compact(space.name, 3)
    assert await store._caretaker._forget(before, 5, clock.now_ms())
    assert not await store._caretaker._forget(await space.info(), 5, clock.now_ms())
