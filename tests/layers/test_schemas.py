"""Schemas: what is written is checked, what is older is migrated when it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast
from holdfast import (
    ABSENT,
    AccessDenied,
    InvalidInput,
    ManualClock,
    MigrationFailed,
    RecordTransaction,
    SchemaViolation,
    Space,
    Store,
    set_,
)
from holdfast.engine import Batch, Entry, Page, Put
from holdfast.engines.memory import MemoryEngine
from holdfast.layers import catalogue as catalogue_module
from holdfast.layers.catalogue import REFRESH_MS, SCHEMAS, Catalogue
from holdfast.layers.transfer import copy_space
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything
from tests.layers.orders import ORDER_1, ORDER_2, ORDER_3, elsewhere, old_order, stored, to_2, to_3

ONE_ENGINE = pytest.mark.parametrize("url", ["memory:"])
"""For what has nothing to do with where it is kept."""


# --- writing ---


async def write_by_set(space: Space, value: Any) -> None:
    await space.records.set("k", value, type="order", state="open")


async def write_by_swap(space: Space, value: Any) -> None:
    await space.records.compare_and_swap("k", value, expect=ABSENT, type="order", state="open")


async def write_by_commit(space: Space, value: Any) -> None:
    await space.commit(set_("other", 1), set_("k", value, type="order", state="open"))


async def write_by_transact(space: Space, value: Any) -> None:
    async def work(tx: RecordTransaction) -> None:
        tx.set("other", 1)
        tx.set("k", value, type="order", state="open")

    await space.transact(work)


WRITES = [write_by_set, write_by_swap, write_by_commit, write_by_transact]


@pytest.mark.parametrize("write", WRITES)
async def test_every_way_to_write_checks_the_value_and_remembers_the_version(
    boss: Space, space: Space, write: Callable[[Space, Any], Any]
) -> None:
    await boss.schemas.register("order", "v1.0.0", ORDER_1)
    before = await everything(space)
    for value, path, keyword in [({"qty": 0}, "/qty", "minimum"), ({}, "", "required"), ("text", "", "type")]:
        with pytest.raises(SchemaViolation, match=r"order 1\.0\.0") as caught:
            await write(space, value)
        assert (caught.value.type, caught.value.version) == ("order", "1.0.0")
        assert (caught.value.path, caught.value.keyword) == (path, keyword)
        assert await everything(space) == before
    await write(space, {"qty": 1})
    record = await space.records.entry("k")
    assert record is not None
    assert (record.type, record.state, record.schema_version) == ("order", "open", "1.0.0")
    assert record.expires_at is not None  # its type's retention


async def test_what_has_no_type_or_no_schema_is_as_it_was(boss: Space, space: Space) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    await space.records.set("untyped", {"qty": 0})
    await space.records.set("other", {"qty": 0}, type="trade", state="open")
    await space.records.increment("number")
    assert [(await stored(space, key)).tag for key in ("untyped", "other", "number")] == ["", ":trade:open", ""]
    assert await space.records.get_many(["untyped", "other"]) == {"untyped": {"qty": 0}, "other": {"qty": 0}}


@ONE_ENGINE
async def test_a_violation_tells_several_things_at_once_and_no_values(boss: Space, space: Space) -> None:
    text = {"type": "string", "maxLength": 3}
    await boss.schemas.register("t", "1.0.0", {"properties": {"a": text, "b/c": text}, "required": ["d"]})
    with pytest.raises(SchemaViolation, match="and 2 more") as caught:
        await space.records.set("k", {"a": "hunter2", "b/c": "hunter2"}, type="t")
    assert {each.path for each in caught.value.violations} == {"/a", "/b~1c", ""}
    assert "hunter2" not in str(caught.value) + str(caught.value.violations)


@ONE_ENGINE
async def test_the_newest_version_is_the_highest_and_not_the_last(boss: Space, space: Space) -> None:
    await boss.schemas.register("order", "1.10.0", ORDER_2)
    await boss.schemas.register("order", "1.9.0", ORDER_1)
    await space.records.set("k", {"amount": 1}, type="order")
    assert (await stored(space, "k")).tag == ":order::1.10.0"
    assert (await boss.schemas.of_type("order")).versions == ["1.9.0", "1.10.0"]


# --- reading ---


async def read_by_get(space: Space) -> Any:
    return await space.records.get("o")


async def read_by_entry(space: Space) -> Any:
    record = await space.records.entry("o")
    assert record is not None
    assert record.schema_version == "2.0.0"
    return record.value


async def read_by_get_many(space: Space) -> Any:
    return (await space.records.get_many(["o", "absent"]))["o"]


async def read_in_transaction(space: Space) -> Any:
    return await space.transact(lambda tx: tx.get("o"))


async def read_entry_in_transaction(space: Space) -> Any:
    record = await space.transact(lambda tx: tx.entry("o"))
    assert record is not None
    return record.value


READS = [read_by_get, read_by_entry, read_by_get_many, read_in_transaction, read_entry_in_transaction]


@pytest.mark.parametrize("read", READS)
async def test_every_way_to_read_gives_the_newest_version_and_leaves_what_is_stored(
    boss: Space, space: Space, read: Callable[[Space], Any]
) -> None:
    await old_order(boss, space, state="open")
    before = await everything(space)
    assert await read(space) == {"amount": 3}
    assert await everything(space) == before
    raw = await space.records.entry("o", as_stored=True)
    assert raw is not None
    assert (raw.value, raw.state, raw.schema_version) == ({"qty": 3}, "open", "1.0.0")
    [scanned] = [record async for record in space.records.scan()]
    assert (scanned.value, scanned.schema_version) == ({"qty": 3}, "1.0.0")


async def test_a_transaction_reads_old_and_writes_new_and_is_run_again_when_it_was_changed(
    boss: Space, space: Space
) -> None:
    await old_order(boss, space)
    seen = []

    async def work(tx: RecordTransaction) -> None:
        order = await tx.get("o")
        seen.append(order)
        if len(seen) == 1:
            await space.records.set("o", {"amount": 7}, type="order")
        tx.set("o", {"amount": order["amount"] + 1}, type="order")
        assert await tx.get("o") == {"amount": order["amount"] + 1}

    await space.transact(work)
    assert seen == [{"amount": 3}, {"amount": 7}]
    assert (await stored(space, "o")).tag == ":order::2.0.0"
    assert await space.records.get("o") == {"amount": 8}


async def test_the_shortest_chain_is_taken(boss: Space, space: Space) -> None:
    await old_order(boss, space)
    await boss.schemas.register("order", "3.0.0", ORDER_3, migrate_from={"2.0.0": to_3})
    assert await space.records.get("o") == {"amount": 3, "unit": "piece"}
    boss.schemas.add_step("order", "1.0.0", "3.0.0", lambda order: {"amount": order["qty"], "unit": "box"})
    assert await space.records.get("o") == {"amount": 3, "unit": "box"}


async def test_what_was_written_before_there_was_a_schema_is_given_as_it_is(boss: Space, space: Space) -> None:
    await space.records.set("early", "anything", type="order")
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    assert await space.records.get("early") == "anything"


async def test_an_unknown_version_is_told(boss: Space, space: Space) -> None:
    await boss.schemas.register("order", "2.0.0", ORDER_2)
    await space._scope.commit((Put("records/alien", b"{}", tag=":order::9.9.9"),))
    with pytest.raises(MigrationFailed, match=r"version 9\.9\.9 is unknown") as caught:
        await space.records.get("alien")
    told = caught.value
    assert (told.reason, told.type, told.from_version, told.key) == (
        "unknown_version",
        "order",
        "9.9.9",
        "records/alien",
    )


async def test_a_process_without_the_step_says_so_and_writes_and_lists_all_the_same(
    boss: Space, space: Space, clock: ManualClock
) -> None:
    await old_order(boss, space)
    other = elsewhere(space)
    for read in READS:
        with pytest.raises(MigrationFailed, match=r"knows no step that leads from 1\.0\.0 to 2\.0\.0") as caught:
            await read(other)
        assert caught.value.reason == "missing_step"
    assert await other.records.keys() == ["o"]
    await other.records.set("new", {"amount": 1}, type="order")
    assert await other.records.get("new") == {"amount": 1}
    other.schemas.add_step("order", "v1.0.0", "v2.0.0", to_2)
    assert await other.records.get("o") == {"amount": 3}


# --- steps that go wrong ---


def change_and_forget(order: dict[str, Any]) -> None:
    order["amount"] = order.pop("qty")


@ONE_ENGINE
@pytest.mark.parametrize(
    ("step", "reason", "told"),
    [
        (lambda order: order["missing"], "step_raised", "KeyError"),
        (lambda order: {"amount": "many"}, "invalid_result", "/amount"),
        (lambda order: {"amount": object()}, "invalid_result", "no JSON"),
        (change_and_forget, "invalid_result", "return what it changed"),
    ],
)
async def test_a_step_that_fails_is_named_and_changes_nothing(
    boss: Space, space: Space, admin: Space, step: Any, reason: str, told: str
) -> None:
    await old_order(boss, space)
    boss.schemas.add_step("order", "1.0.0", "2.0.0", step)
    before = await everything(space)
    with pytest.raises(MigrationFailed, match=told) as caught:
        await space.records.get("o")
    assert (caught.value.reason, caught.value.from_version, caught.value.to_version) == (reason, "1.0.0", "2.0.0")
    for dry_run in (True, False):
        report = await admin.schemas.migrate("order", dry_run=dry_run)
        assert (report.migrated, report.failed) == (0, 1)
        assert [(each.key, each.version, each.reason) for each in report.failures] == [("o", "1.0.0", reason)]
    assert await everything(space) == before


@ONE_ENGINE
async def test_steps_in_a_circle_end(boss: Space, space: Space) -> None:
    await old_order(boss, space)
    await boss.schemas.register("order", "9.0.0", ORDER_3)
    boss.schemas.add_step("order", "2.0.0", "1.0.0", lambda order: {"qty": 1})
    with pytest.raises(MigrationFailed, match=r"from 1\.0\.0 to 9\.0\.0"):
        await space.records.get("o")
    with pytest.raises(InvalidInput, match="stays at"):
        boss.schemas.add_step("order", "1.0.0", "v1.0.0", to_2)

    async def slow(order: Any) -> Any:
        return order

    for step in (None, slow):
        with pytest.raises(InvalidInput, match="plain function"):
            await boss.schemas.register("order", "10.0.0", ORDER_3, migrate_from={"9.0.0": step})  # type: ignore[dict-item]


# --- other processes ---


class Counting(Wrapper):
    """Counts what is read."""

    reads = 0

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.reads += 1
        await asyncio.sleep(0)  # as an engine behind a network does
        return await super().get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        self.reads += 1
        await asyncio.sleep(0)
        return await super().scan(space, prefix, after=after, limit=limit, reverse=reverse)


def counted(space: Space) -> tuple[Space, Counting]:
    scope = space._scope
    engine = Counting(scope.engine)
    return space._view(replace(scope, engine=engine, catalogue=Catalogue(engine, scope.clock))), engine


async def test_a_process_that_registered_nothing_checks_as_well_and_reads_no_more_for_it(
    boss: Space, space: Space, clock: ManualClock
) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    other, engine = counted(space)
    await other.records.set("untyped", 1)
    assert engine.reads == 0
    await asyncio.gather(*(other.records.set(f"k{n}", {"qty": 1}, type="order") for n in range(20)))
    await asyncio.gather(*(other.records.set(f"t{n}", 1, type="trade") for n in range(20)))
    with pytest.raises(SchemaViolation):
        await other.records.set("k", {"qty": 0}, type="order")
    assert engine.reads == 2  # once for each type
    clock.advance(REFRESH_MS / 1000)
    await asyncio.gather(*(other.records.set(f"k{n}", {"qty": 1}, type="order") for n in range(20)))
    assert engine.reads == 3


async def test_a_version_registered_elsewhere_is_noticed(boss: Space, space: Space, clock: ManualClock) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    other = elsewhere(space)
    await other.records.set("a", {"qty": 1}, type="order")
    await boss.schemas.register("order", "2.0.0", ORDER_2, migrate_from={"1.0.0": to_2})
    await other.records.set("b", {"qty": 2}, type="order")  # for a moment, as an older process does
    assert await space.records.get("b") == {"amount": 2}
    clock.advance(REFRESH_MS / 1000)
    with pytest.raises(SchemaViolation, match=r"2\.0\.0"):
        await other.records.set("c", {"qty": 3}, type="order")


async def test_data_of_a_version_that_is_not_known_yet_is_looked_up_at_once(boss: Space, space: Space) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    other = elsewhere(space)
    await other.records.set("a", {"qty": 1}, type="order")
    await boss.schemas.register("order", "2.0.0", ORDER_2)
    await space.records.set("b", {"amount": 2}, type="order")
    assert await other.records.get("b") == {"amount": 2}


@ONE_ENGINE
async def test_a_failed_look_is_repeated_by_the_next_write(boss: Space, space: Space, clock: ManualClock) -> None:
    class Failing(Wrapper):
        broken = False

        async def scan(self, *args: Any, **kwargs: Any) -> Page:
            if self.broken:
                raise holdfast.Unavailable("not now")
            return await super().scan(*args, **kwargs)

    scope = space._scope
    engine = Failing(scope.engine)
    other = space._view(replace(scope, catalogue=Catalogue(engine, scope.clock)))
    await other.records.set("a", {"qty": 0}, type="order")
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    clock.advance(REFRESH_MS / 1000)
    engine.broken = True
    with pytest.raises(holdfast.Unavailable):
        await other.records.set("a", {"qty": 0}, type="order")
    engine.broken = False
    with pytest.raises(SchemaViolation):
        await other.records.set("a", {"qty": 0}, type="order")


@ONE_ENGINE
async def test_who_may_not_read_schemas_writes_unchecked(boss: Space, space: Space) -> None:
    class Denying(Wrapper):
        async def scan(self, *args: Any, **kwargs: Any) -> Page:
            raise AccessDenied("no Get")

    await boss.schemas.register("order", "1.0.0", ORDER_1)
    scope = space._scope
    other = space._view(replace(scope, catalogue=Catalogue(Denying(scope.engine), scope.clock)))
    await other.records.set("k", {"qty": 0}, type="order")
    assert (await stored(space, "k")).tag == ":order:"


@ONE_ENGINE
async def test_what_is_remembered_is_bounded(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "KNOWN_MAX", 5)
    for number in range(12):
        await space.records.set("k", 1, type=f"type{number}")
    known = space._scope.catalogue
    assert known is not None
    assert len(known._known) == 5
    assert not known._steps


async def test_something_else_under_schemas_harms_nobody(store: Store, boss: Space, space: Space) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    odd = [Put(SCHEMAS.key("order", "latest"), b"{}"), Put(SCHEMAS.key("order", "2.0.0"), b'"text"')]
    await store.engine.commit("contoso", Batch("holdfast", tuple(odd)))
    await space.records.set("k", {"qty": 1}, type="order")
    assert [each.version for each in await boss.schemas.list("order")] == ["1.0.0"]


@ONE_ENGINE
@pytest.mark.parametrize("tag", [":", "::", ":a", ":order:s:1.0.0:more", "::s:1.0.0", ":order::", ":order::zzz", "x:y"])
async def test_a_tag_that_no_library_made_ends_no_scan_and_no_watch(boss: Space, space: Space, tag: str) -> None:
    await boss.schemas.register("order", "1.0.0", ORDER_1)
    cursor = await space.cursor()
    await space._scope.commit((Put("records/odd", b"1", tag=tag),))
    assert [record.key async for record in space.records.scan()] == ["odd"]
    assert [len(changes) async for changes in space.watch(cursor=cursor, live=False)] == [1]
    if tag == ":order::zzz":
        with pytest.raises(MigrationFailed, match="zzz is unknown"):
            await space.records.get("odd")
    else:
        assert await space.records.get("odd") == 1


async def test_a_watcher_is_told_what_is_stored_and_of_which_version(boss: Space, space: Space) -> None:
    await old_order(boss, space)
    await space.records.set("o", {"amount": 1}, type="order")
    told = [change async for changes in space.watch(cursor="r0", live=False) for change in changes]
    assert [(change.value, change.schema_version) for change in told] == [
        ({"qty": 3}, "1.0.0"),
        ({"amount": 1}, "2.0.0"),
    ]


async def test_a_copy_has_schemas_and_versions(store: Store, boss: Space, space: Space, clock: ManualClock) -> None:
    await old_order(boss, space)
    target = MemoryEngine(clock=clock)
    await copy_space(store.engine, target, (await space.info()))
    scope = replace(space._scope, engine=target, catalogue=Catalogue(target, clock))
    copy = space._view(scope)
    assert [each.version for each in await copy.schemas.list("order")] == ["1.0.0", "2.0.0"]
    with pytest.raises(MigrationFailed, match=r"1\.0\.0"):
        await copy.records.get("o")
