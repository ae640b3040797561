"""How soon does a watcher in another process see a change, and what does it cost while nothing happens?

The writer puts the moment it calls `set` into the value; the watcher, `python -m benchmarks.watch_latency URL`, notes
when it has it. The time between them holds the whole commit, its fsync included. Then nobody writes, and the watcher
counts the CPU time of its process, in which a store is open with its background work and one watch is waiting.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import holdfast
from benchmarks.children import children, orders, say
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan
from benchmarks.stores import stores

PAUSE_S: Final = 0.03
"""Between two changes, at most: each is seen on its own."""
LIMITS_MS: Final = {"sqlite": 20, "redis": 5, "postgres": 5}
SETTLE_S: Final = 4.0
"""Sealing follows the last change within this time."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    for kind, limit_ms in LIMITS_MS.items():
        with stores(kind, plan.folder) as new_url:
            async for line in _measure(plan, kind, new_url(), limit_ms):
                yield line


async def _measure(plan: Plan, kind: str, url: str, limit_ms: float) -> AsyncIterator[Line]:
    pauses = random.Random(7)
    async with holdfast.open(url) as store:
        space = store.space("bench", agent="writer")
        await space.records.set("other", 0)
        with children(1, "benchmarks.watch_latency", url) as [watcher]:
            watcher.tell(pings=plan.pings)
            watcher.answer()  # it is watching
            acknowledged = []
            for _ in range(plan.pings):
                await space.records.set("ping", time.monotonic_ns())
                acknowledged.append(time.monotonic_ns())
                await asyncio.sleep(pauses.uniform(0, PAUSE_S))
            seen: list[list[int]] = (await asyncio.to_thread(watcher.answer))["seen"]
            called_ms = [(at - called) / 1e6 for called, at in seen]
            after_ms = [(at - ack) / 1e6 for (_, at), ack in zip(seen, acknowledged, strict=True)]
            yield Line(
                f"watch_latency_{kind}",
                statistics.median(called_ms),
                "ms",
                goal=Goal("ours", "at most", limit_ms),
                runs=plan.pings,
                more={
                    "p99": _p99(called_ms),
                    "after_reply": statistics.median(after_ms),
                    "after_reply_p99": _p99(after_ms),
                },
            )
            await store.tidy()
            await asyncio.sleep(SETTLE_S)
            watcher.tell(idle_s=plan.idle_s)
            used: dict[str, float] = await asyncio.to_thread(watcher.answer)
            percent = 100 * used["cpu_s"] / used["took_s"]
            goal = Goal("ours", "at most", 0.5)
            yield Line(f"watch_idle_cpu_{kind}", percent, "% of a core", goal=goal, more={"idle_s": used["took_s"]})


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def watch(url: str) -> None:
    """The watcher's process."""
    incoming = orders()
    async with holdfast.open(url) as store:
        space = store.space("bench", agent="watcher")
        seen: list[tuple[int, int]] = []
        say(ready=True)
        pings = (await asyncio.to_thread(next, incoming))["pings"]
        async with aclosing(space.watch("ping")) as commits:  # type: ignore[type-var]
            waiting = asyncio.ensure_future(anext(commits))
            await asyncio.sleep(0.1)  # the watch begins from now, with its first step
            say(watching=True)
            while True:
                commit = await waiting
                at = time.monotonic_ns()
                seen.extend((change.value, at) for change in commit)
                waiting = asyncio.ensure_future(anext(commits))
                if len(seen) >= pings:
                    break
            say(seen=seen)
            idle_s = (await asyncio.to_thread(next, incoming))["idle_s"]
            began, used = time.monotonic(), time.process_time()
            await asyncio.sleep(idle_s)
            say(cpu_s=time.process_time() - used, took_s=time.monotonic() - began)
            waiting.cancel()
            await asyncio.wait([waiting])


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1]))
