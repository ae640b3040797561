"""A process that runs executions until it is told to stop; killed and paused by `test_workflows.py`. Started from the nursery."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Context, Message, Retry, workflow
from holdfast.engine import Empty
from holdfast.layers.workflows import journal
from holdfast.layers.workflows.standing import Standing

SPACE = "flows"


async def counts(ctx: Context, n: int) -> int:
    await ctx.state.increment("count", n)
    await ctx.state.append_to_list("seen", n)
    await asyncio.sleep(0.002)
    return n


@workflow(name="child")
async def child(ctx: Context, n: int) -> int:
    return int(await ctx.step("double", counts, n)) * 2


@workflow(name="journey", retry=Retry(2, initial="10ms"))
async def journey(ctx: Context, n: int) -> dict[str, Any]:
    first = await ctx.step("first", counts, n)
    items = await ctx.map("each", counts, range(5), max_workers=3)
    await ctx.sleep("600ms")
    doubled, answer = await ctx.gather(ctx.child(child, n), ctx.wait_for("answer", timeout="10m"))
    return {"first": first, "items": items, "doubled": doubled, "answer": answer, "count": ctx.state["count"]}


def expected(n: int) -> dict[str, Any]:
    return {"first": n, "items": [0, 1, 2, 3, 4], "doubled": 2 * n, "answer": f"yes {n}", "count": n + 10}


@workflow(name="paused")
async def paused(ctx: Context, folder: str) -> str:
    await ctx.step("before", counts, 1)
    where: str = await ctx.step("slow", waits_for_a_file, folder)
    await ctx.step("after", counts, 2)
    return where


async def waits_for_a_file(ctx: Context, folder: str) -> str:
    """In one worker: until it is told to go on. In the other: at once."""
    await ctx.state.increment("count", 10)
    if os.environ.get("HOLDFAST_SLOW"):
        Path(folder, "begun").touch()
        while not Path(folder, "go").exists():
            await asyncio.sleep(0.01)
        Path(folder, "woken").touch()
        return "the one that was paused"
    return "the other one"


def write_without_asking() -> None:
    """A worker that neither looks whether it still has its message nor listens when it is told."""
    anything = Empty("records/nothing/")
    moving = Standing._moving
    journal.Present = lambda key: anything  # type: ignore[attr-defined]
    Standing._moving = lambda self, to, ttl_ms=None: (moving(self, to, ttl_ms)[0], [])  # type: ignore[method-assign]
    Message.lost = False  # type: ignore[assignment]  # nor is told before it writes


async def main(url: str, lease: str, broken: bool = False) -> None:
    if broken:
        write_without_asking()
    token = os.environ.get("HOLDFAST_TOKEN")
    async with holdfast.open(url, token=token) as store:
        space = store.space(SPACE, agent="boss")
        async with space.workflows.worker([journey, child, paused], concurrency=20, lease=lease):
            print("running", flush=True)
            await asyncio.get_running_loop().create_future()
