"""Typed states of workflows: what is written is checked, and what fields are from the beginning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from holdfast import (
    Conflict,
    Context,
    ExecutionFailed,
    InvalidInput,
    Space,
    step,
    workflow,
)
from holdfast.layers.workflows.state import APPEND, View
from holdfast.testing.workflows import run_workflow
from tests.layers.hosting import Hosts, soon
from tests.layers.tills import (
    hosts,
)

__all__ = ["hosts"]


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


async def test_a_write_that_its_type_refuses_names_the_field_and_changes_nothing(boss: Space, hosts: Hosts) -> None:
    await hosts.start(refused)
    for key, told in WRONG.items():
        handle = await boss.workflows.start(refused, key)
        with pytest.raises(ExecutionFailed, match=told):
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
