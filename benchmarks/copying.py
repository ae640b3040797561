"""How many entries a second does `copy` move from one engine to another, both sides compared at the end?

Each engine is once the source and once the target, in a ring.
"""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import holdfast
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan
from benchmarks.stores import stores
from holdfast.engine import Engine, Entry
from holdfast.layers.transfer import copy_space

RING = ("sqlite", "redis", "postgres", "sqlite")
LOADED = 10_000


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        engines = []
        for kind in RING:
            url = stack.enter_context(stores(kind, plan.folder))()
            store = await stack.enter_async_context(holdfast.open(url, background=False))
            engines.append(store.engine)
        await fill(engines[0], plan.keys)
        for number in range(len(RING) - 1):
            source, target = engines[number], engines[number + 1]
            [info] = await source.spaces("bench")
            began, before = time.perf_counter(), _memory_mb()
            copied = await copy_space(source, target, info)
            rate = copied / (time.perf_counter() - began)
            name = f"copy_{RING[number]}_to_{RING[number + 1]}"
            more = {"entries": copied, "grew_mb": _memory_mb() - before}
            yield Line(name, rate, "entries/s", goal=Goal("ours", "at least", 20_000), more=more)


async def fill(engine: Engine, count: int) -> None:
    """So many entries of about a hundred bytes."""
    await engine.create("bench")
    for start in range(0, count, LOADED):
        numbers = range(start, min(start + LOADED, count))
        entries = [Entry(f"records/{n:08d}", b'{"state":"' + b"x" * 80 + b'"}', n + 1, "writer", 1, 1) for n in numbers]
        await engine.load("bench", entries, count)


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
