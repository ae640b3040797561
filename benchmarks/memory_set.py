"""How many sets per second does a `memory:` store take in one process, feed, audit and request ids included?

A memory store answers without waiting for anything, so a writer that never pauses would keep the background work from
its turn, and sealing would not be counted. Both kinds of writers here let the event loop go round every now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import holdfast
from benchmarks import ours
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, Turn, take_turns, timed_async

PER_STEP: Final = 64
"""Sets between two rounds of the event loop."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with holdfast.open("memory:") as store:
        space = store.space("bench", agent="writer")
        rates = await take_turns(plan, {"one": _one(space), "64": _concurrent(space)})
        sealed = await space.audit.sealed_upto()
    for name, writers, goal in (("memory_set", "one", Goal("ours", "at least", 50_000)), ("memory_set_64", "64", None)):
        rate = rates[writers]
        more = {"mean": sum(rate.values) / len(rate.values), "sealed_upto": sealed}
        yield Line(name, rate.median, "sets/s", goal=goal, runs=len(rate.values), more=more)


def _one(space: holdfast.Space) -> Turn:
    async def step() -> None:
        for _ in range(PER_STEP):
            await space.records.set(*ours.next_row())
        await asyncio.sleep(0)

    return timed_async(step, PER_STEP)


def _concurrent(space: holdfast.Space) -> Turn:
    async def step() -> None:
        await asyncio.gather(*(space.records.set(*ours.next_row()) for _ in range(PER_STEP)))

    return timed_async(step, PER_STEP)
