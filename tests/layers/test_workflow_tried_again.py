"""Random programs that fail at random and are tried again: in the end they give what they give when nothing fails.

Steps fail some of the times, in branches, maps and steps of steps; code handles failures, cleans up after them, and raises others. What has failed
is tried again as a whole or from a step that is chosen at random, ended executions are archived and forked. Each step counts in the state
how often it counts: once. HOLDFAST_SOAK=1 takes hundreds of programs.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from holdfast import Context, ExecutionFailed, ExecutionHandle, Space, StepFailed, workflow
from holdfast.layers.workflows.journal import TOLD_BYTES_MAX
from holdfast.testing.replaying import assert_replays, record_history
from tests.layers.hosting import Hosts, soon
from tests.layers.resuming import forget, hosts, two

__all__ = ["forget", "hosts"]
pytestmark = two

SEEDS = 400 if os.environ.get("HOLDFAST_SOAK") == "1" else 3
TRIES_MAX = 60
DEEPEST = 3
SIMPLE = ("small", "small", "large", "changing", "increments", "sets", "handled", "within")
COMPOSED = ("gather", "tolerant", "beside", "map", "cleaning")
Node = list[Any]
"""Kind, name, and what is below: programs, or how many items."""

LEFT: dict[str, int] = {}
"""By step: how often it fails yet."""
RUN: dict[str, int] = {}


def program(rng: random.Random, depth: int, name: str) -> list[Node]:
    nodes = []
    for number in range(rng.randint(1, 4)):
        kind, here = rng.choice(SIMPLE if depth == DEEPEST else SIMPLE + COMPOSED), f"{name}{number}"
        below: Any = None
        if kind in ("gather", "tolerant", "beside"):
            below = [program(rng, depth + 1, f"{here}{branch}") for branch in "abc"[: rng.randint(1, 3)]]
        elif kind == "cleaning":
            below = program(rng, depth + 1, f"{here}n")
        elif kind == "map":
            below = rng.randint(1, 4)
        nodes.append([kind, here, below])
    return nodes


def names_in(nodes: list[Node]) -> list[str]:
    """The steps that may fail."""
    found = []
    for kind, name, below in nodes:
        if kind in ("small", "large", "changing", "within"):
            found.append(name)
        elif kind == "handled":
            found.append(f"{name}i")
        elif kind == "map":
            found += [f"{name}.{number}" for number in range(below)]
        elif kind == "cleaning":
            found += names_in(below)
        elif kind in COMPOSED:
            found += [each for branch in below for each in names_in(branch)]
            found += [f"{name}m"] if kind == "beside" else []
    return found


async def work(ctx: Context, name: str, size: int = 1) -> str:
    await asyncio.sleep(0)
    RUN[name] = RUN.get(name, 0) + 1
    if LEFT.get(name, 0) > 0:
        LEFT[name] -= 1
        raise ValueError(name)
    await ctx.state.increment(f"n:{name}")
    return name * size


async def changing(ctx: Context, name: str) -> str:
    """Large every other time: once the step has an entry of its own, and once not."""
    return await work(ctx, name, TOLD_BYTES_MAX if RUN.get(name, 0) % 2 else 1)


async def within(ctx: Context, name: str) -> str:
    return str(await ctx.step("inner", work, name))


async def fails(name: str) -> None:
    raise ValueError(name)


async def does(name: str) -> str:
    return name


async def interpret(ctx: Context, nodes: list[Node]) -> list[Any]:
    return [await one(ctx, *node) for node in nodes]


async def one(ctx: Context, kind: str, name: str, below: Any) -> Any:
    if kind == "small":
        return await ctx.step(name, work, name)
    if kind == "large":
        return len(await ctx.step(name, work, name, TOLD_BYTES_MAX))
    if kind == "changing":
        return (await ctx.step(name, changing, name))[: len(name)]
    if kind == "within":
        return await ctx.step(name, within, name)
    if kind == "increments":
        return await ctx.state.increment("body") and None
    if kind == "sets":
        ctx.state[name] = True
        return None
    if kind == "map":
        return await ctx.map(name, work, [f"{name}.{number}" for number in range(below)], max_workers=2)
    return await FAILING[kind](ctx, name, below)


async def handled(ctx: Context, name: str, below: Any) -> Any:
    try:
        await ctx.step(name, fails, name)
    except StepFailed:
        return await ctx.step(f"{name}i", work, f"{name}i")


async def gather(ctx: Context, name: str, below: Any) -> Any:
    return await ctx.gather(*(interpret(ctx, branch) for branch in below))


async def beside(ctx: Context, name: str, below: Any) -> Any:
    called = ctx.step(f"{name}m", work, f"{name}m")
    return await ctx.gather(*(interpret(ctx, branch) for branch in below), called)


async def tolerant(ctx: Context, name: str, below: Any) -> Any:
    results = await ctx.gather(*(interpret(ctx, branch) for branch in below), return_exceptions=True)
    for each in results:
        if isinstance(each, Exception):
            await ctx.step(f"{name}r", does, name)
            raise each
    return results


async def cleaning(ctx: Context, name: str, below: Any) -> Any:
    try:
        return await interpret(ctx, below)
    except StepFailed as exc:
        await ctx.step(f"{name}c", does, name)
        if len(name) % 2:
            raise
        raise RuntimeError("an error of its own") from exc


FAILING: dict[str, Any] = {
    "handled": handled,
    "gather": gather,
    "beside": beside,
    "tolerant": tolerant,
    "cleaning": cleaning,
}


@workflow
async def tried(ctx: Context, nodes: list[Node]) -> list[Any]:
    return [await interpret(ctx, nodes), await ctx.step("last", work, "last")]


async def finished(handle: ExecutionHandle, rng: random.Random, *, anyhow: bool) -> tuple[Any, int]:
    """What it gives in the end, and how often it was tried again; `anyhow`: from anywhere."""
    for tries in range(TRIES_MAX):
        try:
            return await soon(handle.result()), tries
        except ExecutionFailed:
            steps = [path for path in await handle.steps(results=False) if "~" not in path]
            if anyhow and rng.random() < 0.2:
                await handle.archive()
            if anyhow and steps and rng.random() < 0.3:
                await handle.retry(from_step=rng.choice(steps))
            else:
                await handle.retry()
    raise AssertionError("it does not come to its end")


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_what_is_tried_again_gives_what_it_gives_when_nothing_fails(boss: Space, hosts: Hosts, seed: int) -> None:
    rng = random.Random(seed)
    nodes = program(rng, 0, "t")
    names = [*names_in(nodes), "last"]

    def fail(share: float, most: int) -> None:
        RUN.clear()
        LEFT.clear()
        LEFT.update((name, rng.randint(1, most)) for name in names if rng.random() < share)

    fail(0, 1)
    for _ in range(2):
        await hosts.start(tried)
    undisturbed = await boss.workflows.start(tried, nodes)
    expected = await soon(undisturbed.result()), await undisturbed.state()
    for anyhow in (False, False, True, True):
        fail(0.4, 2)
        total = sum(LEFT.values())
        handle = await boss.workflows.start(tried, nodes)
        result, tries = await finished(handle, rng, anyhow=anyhow)
        assert (result, await handle.state()) == expected
        if not anyhow:
            assert tries <= total
            continue
        await assert_replays(tried, await record_history(handle))
        fail(0.2, 1)
        step = rng.choice([path for path in await handle.steps(results=False) if "~" not in path])
        fork = await handle.fork(step)
        result, _ = await finished(fork, rng, anyhow=anyhow)
        assert (result, await fork.state()) == expected, f"forked from {step}"
