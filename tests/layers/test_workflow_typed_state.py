"""Typed states of workflows: what is written is checked, what fields are from the beginning, how older executions get newer states."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

import holdfast
from holdfast import (
    Conflict,
    Context,
    ExecutionFailed,
    ExecutionHandle,
    InvalidInput,
    ManualClock,
    MigrationFailed,
    Space,
    step,
    workflow,
)
from holdfast.layers.workflows.definitions import definition_of
from holdfast.layers.workflows.state import ADD, APPEND, SET, View
from holdfast.testing.dying import Life
from holdfast.testing.replaying import assert_replays, record_history
from holdfast.testing.timeline import Timeline
from holdfast.testing.workflows import ended, run_workflow
from tests.layers import test_workflow_crashes as programs
from tests.layers.hosting import Hosts, soon, until, waits_for

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


@dataclass
class Leg:
    symbol: str
    size: int = 1


@dataclass
class Order:
    note: str = "none"
    total: int = 5
    legs: list[Leg] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)


# --- what is written ---


async def fill(ctx: Context, n: int) -> None:
    await ctx.state.increment("total", n)
    await ctx.state.append_to_list("legs", Leg(f"S{n}"))
    await ctx.state.add_to_set("tags", "a", f"t{n % 2}")


@workflow(state=Order)
async def ordering(ctx: Context) -> Any:
    assert ctx.state["total"] == 5
    await ctx.map("fill", fill, [1, 2, 3])
    ctx.state.update({"note": "done"})
    found = ctx.state.typed()
    return [found.note, found.total, sorted(leg.symbol for leg in found.legs), sorted(found.tags)]


async def test_a_state_begins_with_the_defaults_of_its_type_and_is_read_back_as_that(boss: Space, hosts: Hosts) -> None:
    await hosts.start(ordering)
    handle = await boss.workflows.start(ordering)
    assert await soon(handle.result()) == ["done", 11, ["S1", "S2", "S3"], ["a", "t0", "t1"]]
    found = await handle.state(Order)
    assert (found.note, found.total, len(found.legs), found.tags) == ("done", 11, 3, {"a", "t0", "t1"})
    assert (await handle.status()).config["state_version"] == "1.0.0"
    first = (await handle.history())[0]
    assert (first.event, first.state) == ("typed", {"note": "none", "total": 5, "legs": [], "tags": []})
    assert (await boss.schemas.get("workflow.ordering")).schema["title"] == "Order"


WRONG = {
    "unknown": "has no field 'unknown'",
    "total": "'total' of the state",
    "legs": "/0",
    "tags": "'tags' of the state",
}


@workflow(state=Order)
async def refused(ctx: Context, key: str) -> str:
    async def wrong(ctx: Context) -> None:
        ctx.state["note"] = "written before the mistake"
        if key == "unknown":
            ctx.state["unknown"] = 1
        elif key == "total":
            ctx.state.update({"note": "fine", "total": "many"})
        elif key == "legs":
            await ctx.state.append_to_list("legs", {"symbol": 7})
        else:
            await ctx.state.add_to_set("tags", 3)

    await ctx.step("wrong", wrong)
    return "not reached"


@pytest.mark.parametrize("key", WRONG)
async def test_a_write_that_its_type_refuses_names_the_field_and_changes_nothing(
    boss: Space, hosts: Hosts, key: str
) -> None:
    await hosts.start(refused)
    handle = await boss.workflows.start(refused, key)
    with pytest.raises(ExecutionFailed, match=WRONG[key]):
        await soon(handle.result())
    assert await handle.state() == {"note": "none", "total": 5, "legs": [], "tags": []}


class Loose(TypedDict, total=False):
    n: int


class Strict(msgspec.Struct):
    n: int = 2


class Modelled(pydantic.BaseModel):
    n: int = pydantic.Field(default=3, ge=0)


@pytest.mark.parametrize(("model", "first"), [(Loose, {}), (Strict, {"n": 2}), (Modelled, {"n": 3})])
async def test_every_kind_of_type_can_be_declared_also_by_a_class(model: type, first: dict[str, int]) -> None:
    @workflow(name="any", state=model)
    class Any_:
        @step
        async def look(self, ctx: Context) -> Any:
            seen = ctx.state.all()
            with pytest.raises(InvalidInput, match="'n' of the state"):
                ctx.state["n"] = "text"
            ctx.state["n"] = 7
            return [seen, msgspec.to_builtins(ctx.state.typed(), enc_hook=lambda it: it.model_dump())]

    outcome = await run_workflow(Any_)
    assert outcome.result == [first, {"n": 7}]


def test_declarations_that_make_no_sense_are_refused_when_they_are_made() -> None:
    async def code(ctx: Context) -> None: ...

    crowded = msgspec.defstruct("Crowded", [(f"f{n}", int, 0) for n in range(41)])
    for options, told in (
        ({"state": 7}, "dataclass, TypedDict"),
        ({"state": dict}, "dataclass, TypedDict"),
        ({"state": int}, "has none"),
        ({"state": Order, "state_version": "two"}, "three numbers"),
        ({"state": Order, "state_migrations": {"1.0.0": lambda s: s}}, "earlier versions"),
        ({"state": Order, "state_version": "1.1.0", "state_migrations": {"1.2.0": lambda s: s}}, "earlier versions"),
        ({"state": Order, "state_version": "1.1.0", "state_migrations": {"1.0.0": 7}}, "plain function"),
        ({"state": Order, "name": "a:b"}, "no ':'"),
        ({"state": crowded}, "at most 40 fields"),
        ({"state_version": "1.1.0"}, "no state="),
        ({"state_migrations": {"1.0.0": lambda s: s}}, "no state="),
    ):
        with pytest.raises(InvalidInput, match=told):
            workflow(**options)(code)  # type: ignore[call-overload]


async def test_two_types_do_not_go_under_one_version(boss: Space, hosts: Hosts) -> None:
    await hosts.start(ordering)

    @workflow(name="ordering", state=Strict)
    async def another(ctx: Context) -> None: ...

    with pytest.raises(Conflict, match="higher version"):
        await boss.workflows.worker([another]).run()


async def test_a_list_that_was_set_keeps_what_parallel_tasks_add(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def adding(ctx: Context) -> list[int]:
        async def add(ctx: Context, n: int) -> None:
            await ctx.state.append_to_list("seen", n)

        ctx.state["seen"] = [0]
        await ctx.map("add", add, [1, 2, 3, 4])
        return sorted(ctx.state["seen"])

    await hosts.start(adding)
    assert await soon((await boss.workflows.start(adding)).result()) == [0, 1, 2, 3, 4]


async def test_what_code_writes_is_seen_by_what_it_begins_next(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def handing(ctx: Context) -> list[int]:
        async def look(ctx: Context, n: int) -> int:
            return int(ctx.state["n"]) + n

        async def branch(n: int) -> int:
            return int(ctx.state["n"]) + n

        ctx.state["n"] = 1
        found = [await ctx.step("look", look, 0)]
        ctx.state["n"] = 10
        found += await ctx.map("map", look, [1, 2])
        ctx.state["n"] = 100
        return found + await ctx.gather(branch(3), branch(4))

    await hosts.start(handing)
    assert await soon((await boss.workflows.start(handing)).result()) == [1, 11, 12, 103, 104]


def test_what_was_added_to_a_list_is_in_order_however_branches_come_to_it() -> None:
    view = View()
    view.apply("seen", [APPEND, [2]], 7)
    view.apply("seen", [APPEND, [1]], 5)
    assert view.state() == {"seen": [1, 2]}


# --- newer versions ---


@dataclass
class Euros:
    euros: int = 0
    items: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Cents:
    cents: int = 0
    items: list[str] = field(default_factory=list)
    note: str = ""
    currency: str = "EUR"


@dataclass
class Money:
    amount: dict[str, int] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)
    note: str = ""


async def earn(ctx: Context, n: int) -> int:
    await ctx.state.increment("euros", n)
    await ctx.state.append_to_list("items", f"e{n}")
    return n


async def earn_cents(ctx: Context, n: int) -> int:
    await ctx.state.increment("cents", n * 100)
    await ctx.state.append_to_list("items", f"c{n}")
    return n


@workflow(name="till", state=Euros)
async def till_1(ctx: Context) -> Any:
    ctx.state["note"] = "begun"
    await ctx.step("one", earn, 1)
    if ctx.state["euros"] == 1:
        await ctx.step("two", earn, 2)
    ctx.state["note"] = "two"
    await ctx.wait_for("go")
    await ctx.step("three", earn, 3)
    await ctx.wait_for("end")
    return ctx.state.all()


def to_cents(state: dict[str, Any]) -> dict[str, Any]:
    state["cents"] = state.pop("euros") * 100
    return state


@workflow(name="till", state=Cents, state_version="1.1.0", state_migrations={"1.0.0": to_cents})
async def till_2(ctx: Context) -> Any:
    ctx.state["note"] = "begun"
    ctx.state["currency"] = "USD"  # where the old code has been: what is committed stays
    await ctx.step("one", earn_cents, 1)
    if ctx.state["cents"] == 100:
        await ctx.step("two", earn_cents, 2)
    ctx.state["note"] = "two"
    await ctx.wait_for("go")
    await ctx.step("three", earn_cents, 3)
    ctx.state["note"] = "three"
    await ctx.wait_for("end")
    return ctx.state.all()


@workflow(
    name="till",
    state=Money,
    state_version="2.0.0",
    state_migrations={
        "1.0.0": to_cents,
        "1.1.0": lambda s: {"items": s["items"], "note": s["note"], "amount": {s["currency"]: s["cents"]}},
    },
)
async def till_3(ctx: Context) -> Any:
    await ctx.step("one", earn_cents, 1)
    if ctx.state["amount"] == {"EUR": 100}:
        await ctx.step("two", earn_cents, 2)
    await ctx.wait_for("go")
    await ctx.step("three", earn_cents, 3)
    assert ctx.state["amount"] == {"EUR": 600}
    await ctx.wait_for("end")
    ctx.state["amount"] = {**ctx.state["amount"], "SEK": 1}
    return ctx.state.all()


MIGRATED = {"cents": 300, "items": ["e1", "e2"], "note": "two", "currency": "EUR"}
ENDED = {"cents": 600, "items": ["e1", "e2", "c3"], "note": "three", "currency": "EUR"}


async def begun(boss: Space, hosts: Hosts) -> ExecutionHandle:
    """One that waits, begun by the first version."""
    worker = await hosts.start(till_1)
    handle = await boss.workflows.start(till_1, id="t")
    await waits_for(handle, "signal")
    await worker.stop()
    return handle


async def events(handle: ExecutionHandle, name: str) -> int:
    return sum(event.event == name for event in await handle.log())


async def test_newer_code_goes_on_with_an_older_state_that_it_has_migrated(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}
    worker = await hosts.start(till_2)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    assert await handle.state() == ENDED
    await worker.stop()
    await hosts.start(till_2)  # replays what both versions wrote
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED
    assert await events(handle, "migrated") == 1
    states = {(point.event, point.path): point.state for point in await handle.history()}
    assert states["completed", "two#0"] == {"euros": 3, "items": ["e1", "e2"], "note": "begun"}
    assert states["migrated", ""] == MIGRATED
    assert states["completed", ""] == ENDED
    assert [str(each) for each in await handle.diff("two", "three")] == [
        "+ cents: 600",
        '+ currency: "EUR"',
        "- euros: 3",
        '+ items[2]: "c3"',
        '~ note: "begun" → "two"',
    ]


async def waits_for_signal(handle: ExecutionHandle, name: str) -> None:
    async def waits() -> bool:
        return [wait.get("name") for wait in (await handle.status()).waits] == [name]

    await until(waits)


async def test_a_state_goes_through_several_versions_and_all_are_replayed(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    worker = await hosts.start(till_2)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    await worker.stop()
    await hosts.start(till_3)
    await handle.signal("end")
    ended = {"amount": {"EUR": 600, "SEK": 1}, "items": ["e1", "e2", "c3"], "note": "three"}
    assert await soon(handle.result()) == ended
    assert await handle.state() == ended
    assert await events(handle, "migrated") == 2


async def test_a_state_that_nobody_can_migrate_pauses_its_execution_until_somebody_can(
    boss: Space, hosts: Hosts
) -> None:
    handle = await begun(boss, hosts)
    missing = workflow(name="till", state=Cents, state_version="1.1.0")(definition_of(till_2).target)
    worker = await hosts.start(missing)
    await handle.signal("go")
    await until(lambda: is_paused(handle))
    found = await handle.status()
    assert found.error is not None
    assert (found.error["type"], "1.0.0 to 1.1.0" in found.error["message"]) == ("MigrationFailed", True)
    assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}, "nothing was changed"
    await worker.stop()
    # The decorator has set the definition of the function; the module's own is wanted again.
    mended = workflow(name="till", state=Cents, state_version="1.1.0", state_migrations={"1.0.0": to_cents})(
        definition_of(till_2).target
    )
    await hosts.start(mended)
    await handle.resume()
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED


async def is_paused(handle: ExecutionHandle) -> bool:
    return (await handle.status()).status == "paused"


@pytest.mark.parametrize(
    ("migration", "told"),
    [
        (lambda state: state, "gave is refused"),
        (lambda state: {"cents": "many"}, "/cents"),
        (lambda state: 1 // 0, "ZeroDivisionError"),
        (lambda state: None, "does it return"),
    ],
)
async def test_a_faulty_migration_pauses_with_what_is_wrong(
    boss: Space, hosts: Hosts, migration: Any, told: str
) -> None:
    handle = await begun(boss, hosts)

    @workflow(name="till", state=Cents, state_version="1.1.0", state_migrations={"1.0.0": migration})
    async def faulty(ctx: Context) -> None: ...

    await hosts.start(faulty)
    await handle.signal("go")
    await until(lambda: is_paused(handle))
    assert told in (await handle.status()).error["message"]  # type: ignore[index]
    assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}


async def test_older_code_puts_off_what_has_a_newer_state(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    worker = await hosts.start(till_2)
    handle = await boss.workflows.start(till_2, id="newer")
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    await worker.stop()
    old = await hosts.start(till_1)
    await handle.signal("end")
    await waits_for(handle, "code")
    [wait] = (await handle.status()).waits
    assert "state 1.0.0" in wait["name"]
    fresh = await boss.workflows.start(till_2, id="fresh")  # nothing of it has run, and it was started by newer code
    await waits_for(fresh, "code")
    await old.stop()
    await hosts.start(till_2)
    clock.advance("6s")
    assert (await soon(handle.result()))["cents"] == 600


async def test_state_without_a_type_is_of_version_zero(boss: Space, hosts: Hosts) -> None:
    @workflow(name="till")
    async def untyped(ctx: Context) -> None:
        ctx.state["euros"] = 4
        await ctx.wait_for("go")

    @workflow(name="till", state=Cents, state_migrations={"0.0.0": lambda s: {"cents": s["euros"] * 100}})
    async def typed(ctx: Context) -> Any:
        ctx.state["cents"] = 400
        await ctx.wait_for("go")
        return ctx.state.all()

    worker = await hosts.start(untyped)
    handle = await boss.workflows.start(untyped)
    await waits_for(handle, "signal")
    await worker.stop()
    await hosts.start(typed)
    await handle.signal("go")
    assert await soon(handle.result()) == {"cents": 400, "items": [], "note": "", "currency": "EUR"}


# --- going back ---


async def migrated_and_ended(boss: Space, hosts: Hosts) -> ExecutionHandle:
    handle = await begun(boss, hosts)
    await hosts.start(till_2)
    await handle.signal("go")
    await handle.signal("end")
    await soon(handle.result())
    return handle


async def test_a_retry_from_after_a_migration_leaves_it(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    await handle.retry("three")
    await waits_for_signal(handle, "end")
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED
    assert await events(handle, "migrated") == 1


async def test_a_retry_from_before_a_migration_takes_it_back_and_it_is_made_anew(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    await handle.retry("two")
    await handle.signal("go")
    await handle.signal("end")
    # "two" and "three" were done again, by the newer code; "one" was not
    ended = {"cents": 600, "items": ["e1", "c2", "c3"], "note": "three", "currency": "EUR"}
    assert await soon(handle.result()) == ended
    assert await handle.state() == ended
    assert await events(handle, "migrated") == 2
    states = [(point.event, point.state) for point in await handle.history()]
    assert ("retried", {"euros": 1, "items": ["e1"], "note": "begun"}) in states
    assert ("migrated", {"cents": 100, "items": ["e1"], "note": "begun", "currency": "EUR"}) in states
    assert states[-1] == ("completed", ended)


async def test_forks_from_before_and_after_a_migration_have_the_state_of_then(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    after = await handle.fork("three", id="after", state={"cents": 1000})
    await waits_for_signal(after, "end")
    await after.signal("end")
    assert (await soon(after.result()))["cents"] == 1300
    before = await handle.fork("two", id="before", state={"euros": 1})
    await before.signal("go")
    await before.signal("end")
    found = await soon(before.result())
    assert (found["cents"], found["items"]) == (600, ["e1", "c2", "c3"])
    assert [await events(each, "migrated") for each in (handle, after, before)] == [1, 1, 1]


async def test_what_is_archived_after_a_migration_comes_back_whole(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await migrated_and_ended(boss, hosts)
    clock.advance("1s")
    history = await handle.history()
    await boss.workflows.cleanup("1ms", name="till")
    restored = await boss.workflows.restore("t")
    assert (await restored.history(), await restored.state()) == (history, ENDED)


async def test_recorded_histories_are_replayed_by_code_with_a_newer_state(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    history = await record_history(handle)
    await assert_replays(till_2, history)
    missing = workflow(name="till", state=Cents, state_version="1.2.0")(definition_of(till_3).target)
    with pytest.raises(MigrationFailed, match=r"1\.0\.0"):
        await assert_replays(missing, history)


# --- a closer look at what is replayed ---


@dataclass
class Old:
    n: int = 0
    seen: list[int] = field(default_factory=list)


@dataclass
class New:
    m: int = 0
    seen: list[int] = field(default_factory=list)


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {"m": state["n"] * 10, "seen": state["seen"]}


@pytest.mark.parametrize("fewer", [False, True])
async def test_code_between_steps_may_write_more_or_less_than_it_did(boss: Space, hosts: Hosts, fewer: bool) -> None:
    async def nothing() -> None: ...

    @workflow(name="between", state=Old)
    async def first(ctx: Context) -> Any:
        await ctx.state.increment("n")
        await ctx.state.increment("n")
        await ctx.step("a", nothing)
        await ctx.state.increment("n")
        await ctx.state.flush()
        await ctx.step("b", nothing)
        await ctx.state.append_to_list("seen", 1)
        await ctx.state.flush()
        await ctx.wait_for("go")

    @workflow(name="between", state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed})
    async def second(ctx: Context) -> Any:
        for _ in range(1 if fewer else 5):
            await ctx.state.increment("m", 7)
        await ctx.step("a", nothing)
        assert ctx.state["m"] == 20
        if not fewer:
            await ctx.state.increment("m", 10)
            assert ctx.state["m"] == 30
            await ctx.state.flush()
        await ctx.step("b", nothing)
        assert ctx.state["m"] == 30
        await ctx.state.append_to_list("seen", 1)
        await ctx.state.flush()
        await ctx.wait_for("go")
        await ctx.state.append_to_list("seen", 2)
        await ctx.state.increment("m")
        await ctx.step("c", nothing)
        await ctx.wait_for("end")
        await ctx.state.increment("m")
        return ctx.state.all()

    worker = await hosts.start(first)
    handle = await boss.workflows.start(first)
    await waits_for(handle, "signal")
    await worker.stop()
    worker = await hosts.start(second)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    assert await handle.state() == {"m": 31, "seen": [1, 2]}
    await worker.stop()
    await hosts.start(second)
    await handle.signal("end")
    assert await soon(handle.result()) == {"m": 32, "seen": [1, 2]}
    assert await handle.state() == {"m": 32, "seen": [1, 2]}


async def test_branches_see_their_own_state_of_then_in_the_newer_shape(boss: Space, hosts: Hosts) -> None:
    @dataclass
    class Two:
        a: int = 0
        b: int = 0

    @dataclass
    class Three:
        a: str = ""
        b: str = ""

    async def put(ctx: Context, key: str, value: Any) -> None:
        ctx.state[key] = value

    def made(shape: type, version: str, migrations: Any, of: Any) -> Any:
        @workflow(name="pair", state=shape, state_version=version, state_migrations=migrations)
        async def pair(ctx: Context) -> Any:
            async def side(key: str) -> Any:
                await ctx.step(f"{key}1", put, key, of(1))
                first = ctx.state[key]
                await ctx.step(f"{key}2", put, key, of(2))
                second = ctx.state[key]
                await ctx.wait_for(key)
                await ctx.step(f"{key}3", put, key, of(3))
                return [first, second, ctx.state[key]]

            return await ctx.gather(side("a"), side("b"))

        return pair

    worker = await hosts.start(made(Two, "1.0.0", {}, int))
    handle = await boss.workflows.start("pair")

    async def both() -> bool:
        return len((await handle.status()).waits) == 2

    await until(both)
    await worker.stop()
    later = made(Three, "1.1.0", {"1.0.0": lambda s: {key: str(value) for key, value in s.items()}}, str)
    worker = await hosts.start(later)
    await handle.signal("b")
    await waits_for_signal(handle, "a")
    assert await handle.state() == {"a": "2", "b": "3"}
    await worker.stop()
    await hosts.start(later)
    await handle.signal("a")
    assert await soon(handle.result()) == [["1", "2", "3"], ["1", "2", "3"]]


def test_numbers_and_lists_are_added_to_what_an_earlier_version_had() -> None:
    from holdfast.layers.workflows.earlier import Earlier

    old, view = View(), View()
    view.earlier = Earlier(old, renamed, {"m": [SET, 0]})
    view.apply("m", [ADD, 1], 10)
    view.apply("seen", [APPEND, [3]], 11)
    old.apply("n", [SET, 2], 1)
    old.apply("seen", [APPEND, [1]], 2)
    assert view.state() == {"m": 21, "seen": [1, 3]}
    old.apply("seen", [APPEND, [2]], 3)
    old.apply("n", [ADD, 1], 4)
    assert view.state() == {"m": 31, "seen": [1, 2, 3]}
    view.apply("m", [SET, 5], 12)
    assert view.state()["m"] == 5


# --- crashes, and steps that are done elsewhere ---


async def test_a_worker_that_dies_at_any_commit_of_a_migration_leaves_one_outcome(
    url: str, boss: Space, hosts: Hosts, tmp_path: Path
) -> None:
    if url == "policed:":
        pytest.skip("only the store's own end the leases of the dead")
    kills = [(at, after) for at in range(5) for after in (False, True)]
    worker = await hosts.start(till_1)
    handles = [await boss.workflows.start(till_1, id=f"t{at}{after}") for at, after in kills]
    for handle in handles:
        await waits_for(handle, "signal")
    await worker.stop()
    died = 0
    for handle, (at, after) in zip(handles, kills, strict=True):
        await handle.signal("go")
        await handle.signal("end")
        life = Life(boss, tmp_path, [till_2], at, after=after, lease="1d")
        ending = asyncio.ensure_future(handle.result())
        dying = asyncio.ensure_future(life.engine.dead.wait())
        await soon(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED))
        if not ending.done():
            died += 1
            while life.engine.dying:
                await asyncio.sleep(0.001)
            await life.end()
            await life.bury()
            life = Life(boss, tmp_path, [till_2], lease="1d")
        assert await soon(ending) == ENDED, (at, after)
        await life.end()
        await life.bury()
        assert await handle.state() == ENDED
        assert await events(handle, "migrated") == 1
        assert [point.state for point in await handle.history() if point.event == "migrated"] == [MIGRATED]
    assert died >= 6


class Anything(pydantic.BaseModel, extra="allow"):
    pass


class Later(pydantic.BaseModel, extra="allow"):
    epoch: int = 2


@workflow(name="interpret", state=Anything)
async def interpret_1(ctx: Context, given: programs.Program) -> list[Any]:
    return [await programs.perform(ctx, call) for call in given]


@workflow(name="interpret", state=Later, state_version="1.1.0", state_migrations={"1.0.0": lambda state: state})
async def interpret_2(ctx: Context, given: programs.Program) -> list[Any]:
    return [await programs.perform(ctx, call) for call in given]


async def lived(seed: int, folder: Path, kill_at: int | None, *, after: bool = False) -> tuple[dict[str, Any], int]:
    """Run a program under the first version until its worker dies at a commit, then under the second; gives the outcome, and the commits."""
    clock = Timeline()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = store.space("s", agent="boss")
        given = programs.program(random.Random(seed))
        handle = await space.workflows.start(programs.interpret, given, id="x")
        for number in range(12):
            await handle.signal("go", number)
        life = Life(space, folder, [interpret_1], kill_at, after=after, queues=["q"])
        ending = asyncio.ensure_future(ended(store, space))
        dying = asyncio.ensure_future(life.engine.dead.wait())
        try:
            await clock.run(asyncio.ensure_future(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED)))
            if not ending.done():
                await life.end()
                life = Life(space, folder, [interpret_2], queues=["q"])
                await clock.run(ending)
            return await settled(space), life.engine.commits
        finally:
            dying.cancel()
            ending.cancel()
            await life.end()


async def settled(space: Space) -> dict[str, Any]:
    """What must not depend on when the state was migrated."""
    found = await programs.outcome_of(space, "x")
    for id, outcome in found.items():
        if id != "counts":
            status, result, state, steps, log, most = outcome
            state.pop("epoch", None)
            steps.pop("~state", None)
            log = [each for each in log if each[0] not in ("typed", "migrated")]
            found[id] = (status, result, state, steps, log, most)
    return found


@pytest.mark.parametrize("seed", range(400) if SOAK else range(8))
async def test_programs_that_are_migrated_at_any_commit_end_as_if_they_had_not_been(seed: int, tmp_path: Path) -> None:
    undisturbed, commits = await lived(seed, tmp_path, None)
    for at in range(1, commits, 1 if SOAK else 4):
        for after in (False, True):
            found, _ = await lived(seed, tmp_path, at, after=after)
            assert found == undisturbed, (at, after)


async def doubled(ctx: Context, n: int) -> int:
    """One that is done on a queue, by either version."""
    if "euros" in ctx.state:
        seen = int(ctx.state["euros"])
        await BLOCKED[0].wait()
        ctx.state["euros"] = seen + n
    else:
        ctx.state["cents"] = ctx.state["cents"] + n * 100
    return n


async def hanging(ctx: Context) -> None:
    if "euros" in ctx.state:
        await asyncio.sleep(3600)


BLOCKED: list[asyncio.Event] = []


def sending(shape: type, options: dict[str, Any], *, also: bool) -> Any:
    @workflow(name="sending", state=shape, **options)
    async def sends(ctx: Context) -> Any:
        parts = [ctx.step("doubled", doubled, 2, queue="q")]
        if also:
            parts.append(ctx.step("hanging", hanging))
        await ctx.gather(*parts)
        return ctx.state.all()

    return sends


@pytest.mark.parametrize("also", [False, True], ids=["aside", "running"])
async def test_what_a_step_on_a_queue_wrote_to_an_earlier_version_is_done_again(
    boss: Space, hosts: Hosts, clock: ManualClock, also: bool
) -> None:
    BLOCKED[:] = [asyncio.Event()]  # each test has a loop of its own
    old = sending(Euros, {}, also=also)
    new = sending(Cents, {"state_version": "1.1.0", "state_migrations": {"1.0.0": to_cents}}, also=also)
    runs = await hosts.start(old)
    serves = await hosts.start(old, queues=["q"], steps_only=True)
    handle = await boss.workflows.start(old)

    async def has_begun() -> bool:
        return serves._service.doing(handle.id) and (also or bool((await handle.status()).waits))

    await until(has_begun)
    if also:  # it is told by a letter, which is read after the migration
        await hosts.kill(runs)
        BLOCKED[0].set()
        await until(lambda: told(handle))
        clock.advance("11s")
        await hosts.start(new)
    else:  # it was migrated while it lay aside, and finds that out
        await runs.stop()
        await hosts.start(new)
        async with asyncio.timeout(30):  # somebody with newer code asks for the step: that wakes the execution
            newer = await hosts.start(new, queues=["other"], steps_only=True)
            entry = await boss._scope.engine.get("contoso", [f"workflows/executions/{handle.id}"])
            assert entry[0] is not None
            await newer._service._wake(entry[0])
            while not await events(handle, "migrated"):
                await asyncio.sleep(0.001)
        await waits_for(handle, "queue")
        BLOCKED[0].set()
        await until(lambda: is_false(serves._service.doing(handle.id)))
    await serves.stop()
    await hosts.start(new, queues=["q"], steps_only=True)
    ending = asyncio.ensure_future(handle.result())

    async def has_ended() -> bool:
        clock.advance("1s")  # whoever cannot do a step puts it off
        await asyncio.wait([ending], timeout=0.02)
        return ending.done()

    await until(has_ended)
    assert (await ending)["cents"] == 200
    assert (await handle.state())["cents"] == 200


async def told(handle: ExecutionHandle) -> bool:
    page = await handle._scope.engine.scan("contoso", f"journal/mail/{handle.id}/", limit=1)
    return bool(page.entries)


async def is_false(value: bool) -> bool:
    return not value


@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_what_was_flushed_before_a_step_that_did_not_end_is_counted_once(
    boss: Space, hosts: Hosts, clock: ManualClock, writes: int
) -> None:
    async def nothing() -> None: ...

    async def never() -> None:
        await asyncio.sleep(3600)

    @workflow(name="flushing", state=Old)
    async def first(ctx: Context) -> None:
        await ctx.step("a", nothing)
        await ctx.state.increment("n")
        await ctx.state.flush()
        await ctx.step("b", never)

    @workflow(name="flushing", state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed})
    async def second(ctx: Context) -> Any:
        await ctx.step("a", nothing)
        for _ in range(writes):
            await ctx.state.increment("m", 10)
        await ctx.state.flush()
        await ctx.step("b", nothing)
        seen = ctx.state["m"]
        await ctx.state.increment("m")
        await ctx.state.flush()
        await ctx.wait_for("go")
        return [seen, ctx.state["m"]]

    worker = await hosts.start(first)
    handle = await boss.workflows.start(first)

    async def flushed() -> bool:
        return (await handle.state()).get("n") == 1

    await until(flushed)
    await hosts.kill(worker)
    clock.advance("11s")
    worker = await hosts.start(second)
    expected = 20 if writes == 2 else 10  # what was written before counts, and what is new does
    await waits_for(handle, "signal")
    assert (await handle.state())["m"] == expected + 1
    await worker.stop()
    await hosts.start(second)
    await handle.signal("go")
    assert await soon(handle.result()) == [expected, expected + 1]


async def test_a_retry_of_one_branch_from_before_a_migration_takes_back_what_others_did_after_it(
    boss: Space, hosts: Hosts
) -> None:
    def made(shape: type, options: dict[str, Any], work: Any) -> Any:
        @workflow(name="sides", state=shape, **options)
        async def sides(ctx: Context) -> Any:
            async def left() -> None:
                await ctx.step("l1", work, 1)
                await ctx.wait_for("go")
                await ctx.step("l2", work, 2)

            async def right() -> None:
                await ctx.step("r1", work, 4)

            await ctx.gather(left(), right())
            return ctx.state.all()

        return sides

    worker = await hosts.start(made(Euros, {}, earn))
    handle = await boss.workflows.start("sides")
    await waits_for(handle, "signal")
    await worker.stop()
    later = {"state_version": "1.1.0", "state_migrations": {"1.0.0": to_cents}}
    await hosts.start(made(Cents, later, earn_cents))
    await handle.signal("go")
    assert (await soon(handle.result()))["items"][-1] == "c2"
    await handle.retry("gather#0/1/r1#0")
    await waits_for(handle, "signal")
    found = await handle.state()
    assert (found["cents"], found.get("euros"), sorted(found["items"])) == (500, None, ["c1", "c4"])
    await handle.signal("go")
    found = await soon(handle.result())
    assert (found["cents"], sorted(found["items"])) == (700, ["c1", "c2", "c4"])
