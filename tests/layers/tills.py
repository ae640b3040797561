"""A workflow in three versions, whose state is migrated from one to the next; and helpers for the tests of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast import Context, ExecutionHandle, Space, workflow
from holdfast.layers.workflows.definitions import definition_of
from tests.layers.hosting import Hosts, soon, until, waits_for


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


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


def redefined(till: Any, **options: Any) -> Any:
    """The same code under another definition; the one it has stays its own."""
    code = definition_of(till).target

    async def same(ctx: Context) -> Any:
        return await code(ctx)

    return workflow(name="till", **options)(same)


MIGRATED = {"cents": 300, "items": ["e1", "e2"], "note": "two", "currency": "EUR"}
ENDED = {"cents": 600, "items": ["e1", "e2", "c3"], "note": "three", "currency": "EUR"}


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


async def begun(boss: Space, hosts: Hosts) -> ExecutionHandle:
    """One that waits, begun by the first version."""
    worker = await hosts.start(till_1)
    handle = await boss.workflows.start(till_1, id="t")
    await waits_for(handle, "signal")
    await worker.stop()
    return handle


async def events(handle: ExecutionHandle, name: str) -> int:
    return sum(event.event == name for event in await handle.log())


async def waits_for_signal(handle: ExecutionHandle, name: str) -> None:
    async def waits() -> bool:
        return [wait.get("name") for wait in (await handle.status()).waits] == [name]

    await until(waits)


async def is_paused(handle: ExecutionHandle) -> bool:
    return (await handle.status()).status == "paused"


async def migrated_and_ended(boss: Space, hosts: Hosts) -> ExecutionHandle:
    handle = await begun(boss, hosts)
    await hosts.start(till_2)
    await handle.signal("go")
    await handle.signal("end")
    await soon(handle.result())
    return handle
