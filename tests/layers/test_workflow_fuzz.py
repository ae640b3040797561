"""Random branches that write the state, put aside and handed over at random: all of those who look at it see the same.

A program is made from a seed: two gathers of branches, whose steps, own code, maps, and steps with steps and branches set, count,
append, join and remove. Three must agree: what the code sees at its end, which is a replay of all it did; what `handle.state()` reads
from the store; and what a run without pauses and hand-overs gives. Keys that several branches set or remove depend on who comes
first: of these, the last has nothing to say. HOLDFAST_SOAK=1 takes thousands of programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import Any

import pytest

import holdfast
from holdfast import Context, ManualClock, Space, workflow
from tests.layers.hosting import Hosts, soon, until

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
SEEDS = range(3_000) if SOAK else range(16)
Op = tuple[str, str, int]
"""What is done, to which key, with which number."""
Call = tuple[str, list[Op]]
Branch = list[Call]
ADDING = ("add", "append", "join")
STEPS = ("set", "raise", "add", "append", "join", "remove")
CALLS = ("step",) * 4 + ("code", "nest", "map", "large", "sleep", "sleep")
WITHOUT_ORDER = {"sum": "raise", "count": "add", "list": "append", "set": "join"}
"""Keys of all branches, and the one thing that is done to them: whoever comes first, the outcome is the same."""


# --- programs ---


def program(rng: random.Random) -> list[list[Branch]]:
    return [[branch(rng, f"{part}{number}") for number in range(rng.randint(1, 4))] for part in "ab"]


def branch(rng: random.Random, name: str) -> Branch:
    return [(call, ops(rng, name, call)) for call in (rng.choice(CALLS) for _ in range(rng.randint(1, 5)))]


def ops(rng: random.Random, name: str, call: str) -> list[Op]:
    if call in ("large", "sleep"):
        return []
    return [op(rng, name, call) for _ in range(1 if call in ("step", "code") else 2)]


def op(rng: random.Random, name: str, call: str) -> Op:
    """To a key that is the branch's own, to one that is raced for, or to one where order does not matter."""
    n, whose = rng.randint(1, 99), rng.choice(["own", "raced", "all"])
    if whose == "all" or (whose == "own" and call == "map"):  # the items of a map have no order
        keys = [key for key, what in WITHOUT_ORDER.items() if call == "step" or what in ADDING]
        key = rng.choice(keys)
        return WITHOUT_ORDER[key], key, n
    reads = call == "step" or (call == "code" and whose == "own")  # code reads nothing that other branches write
    what = rng.choice(STEPS if reads else ("set", *ADDING))
    kind = what if what in ("append", "join") else rng.choice(["append", "join", "add"]) if what == "remove" else "add"
    return what, f"{name if whose == 'own' else 'raced'}-{kind}", n


async def do(ctx: Context, done: Op) -> None:
    what, key, n = done
    state = ctx.state
    if what == "set":
        state[key] = n * 1000
    elif what == "raise":
        state[key] = state.get(key, 0) + n
    elif what == "add":
        await state.increment(key, n)
    elif what == "append":
        await state.append_to_list(key, n)
    elif what == "join":
        await state.add_to_set(key, n % 3)
    elif key in state:
        del state[key]


async def one(ctx: Context, done: Op) -> None:
    await asyncio.sleep(0)
    await do(ctx, done)


async def nest(ctx: Context, many: list[Op]) -> None:
    """A step of steps, and of branches."""
    await asyncio.sleep(0)
    for each in many:
        await ctx.step("inner", one, each)
    await ctx.gather(*(do(ctx, each) for each in many))


async def large() -> str:
    """What it gives is not kept with the others: its replay takes longer."""
    return "x" * 70_000


async def run_branch(ctx: Context, calls: Branch, *, rests: bool) -> None:
    for call, many in calls:
        if call == "step":
            await ctx.step("one", one, many[0])
        elif call == "code":
            await do(ctx, many[0])
        elif call == "nest":
            await ctx.step("nest", nest, many)
        elif call == "map":
            await ctx.map("each", one, many)
        elif call == "large":
            await ctx.step("large", large)
        elif rests:
            await ctx.sleep("1h")


@workflow
async def interpret(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    for branches in program(random.Random(given["seed"])):
        await ctx.gather(*(run_branch(ctx, each, rests=given["rests"]) for each in branches))
    return ctx.state.all()


# --- runs ---


async def outcome_of(seed: int, *, rests: bool, stops: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the code saw at its end, and what the store has."""
    clock, rng, last = ManualClock(), random.Random(seed), None
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        boss = store.space("contoso", agent="boss")
        hosts = Hosts(boss)
        worker = await hosts.start(interpret)
        handle = await boss.workflows.start(interpret, {"seed": seed, "rests": rests})

        async def over() -> bool:
            nonlocal worker, last
            view = await handle.status()
            if view.waits and view.updated_at != last:
                last = view.updated_at
                clock.advance("1h")
            if stops and rng.random() < 0.25:
                await worker.stop()
                worker = await hosts.start(interpret)
            return view.status in ("completed", "failed", "paused")

        try:
            await until(over)
            return await handle.result(0), await handle.state()
        finally:
            await soon(hosts.close())


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on which branch came first."""
    found = {key: value for key, value in state.items() if not key.startswith("raced-")}
    return {**found, "list": sorted(found.get("list", []))}


@pytest.mark.parametrize("seed", SEEDS)
async def test_code_and_store_and_an_undisturbed_run_agree_on_the_state(seed: int) -> None:
    expected, _ = await outcome_of(seed, rests=False)
    for stops in (False, True):
        seen, stored = await outcome_of(seed, rests=True, stops=stops)
        assert seen == stored, f"seed {seed}, {'handed over' if stops else 'put aside'}"
        assert comparable(seen) == comparable(expected), f"seed {seed}, {'handed over' if stops else 'put aside'}"


@pytest.mark.parametrize("url", ["memory"], indirect=True)
async def test_a_step_that_ends_while_it_is_handed_over_is_there_with_all_that_it_wrote(boss: Space) -> None:
    begun, tries, hosts = asyncio.Event(), list[int](), Hosts(boss)

    async def ends_when_told(ctx: Context) -> None:
        tries.append(ctx.attempt)
        begun.set()
        if len(tries) == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await ctx.state.increment("n")

    @workflow
    async def ending(ctx: Context) -> Any:
        await ctx.step("ends", ends_when_told)
        return ctx.state.get("n")

    worker = await hosts.start(ending)
    handle = await boss.workflows.start(ending)
    await soon(begun.wait())
    await worker.stop()
    await hosts.start(ending)
    try:
        assert await soon(handle.result()) == 1
        assert await handle.state() == {"n": 1}
    finally:
        await soon(hosts.close())
