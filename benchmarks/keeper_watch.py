"""How soon does a watcher of a keeper see a change, and what do 1,000 watchers cost that have nothing to see?

Two keepers take turns: one has 1,000 idle watchers, on 8 connections, each on a prefix nobody writes to. A third process
watches for real. The writer puts the moment it calls `set` into the value, and `python -m benchmarks.keeper_watch` notes
when it has it: that is the whole commit, its fsync and two trips over the network included; `after_reply` is from the
moment the writer has its answer. The commit itself lies between the two.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any, Final

import uvloop

import holdfast
from benchmarks.children import Child, children, orders, say
from benchmarks.keeper_sides import SPACE, Side, agent_token, cpu_s, new_keeper, rss_bytes, serving
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, take_turns
from holdfast import Space
from holdfast.testing.servers.keeper import KeeperServer

WATCHERS: Final = 1_000
CONNECTIONS: Final = 8
IN_FLIGHT: Final = 64
PAUSE_S: Final = 0.03
SETTLE_S: Final = 2.0
LATENCY: Final = Goal("ours", "at most", 2.0)
FREE: Final = Goal("ratio", "at least", 0.95)
IDLE: Final = Goal("ours", "at most", 0.5)


async def run(plan: Plan) -> AsyncIterator[Line]:
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        keepers: dict[str, tuple[KeeperServer, dict[str, str]]] = {}
        for name in ("watched", "alone"):
            keeper = stack.enter_context(serving(new_keeper(plan.folder / name)))
            target = {"url": keeper.url, "token": await agent_token(keeper)}
            keepers[name] = keeper, target
            [clients] = stack.enter_context(children(1, "benchmarks.keeper_clients"))
            clients.tell(kind="ours", job="set", **target)
            clients.answer()
            sides[name] = Side(keeper, clients)
        keeper, target = keepers["watched"]
        yield await _latency(plan, stack, target)
        await asyncio.sleep(SETTLE_S)
        before = rss_bytes(keeper.pid)
        _watching(stack, target, idle=WATCHERS)
        grown = rss_bytes(keeper.pid) - before
        used = {name: cpu_s(each.pid) for name, (each, _) in keepers.items()}
        await asyncio.sleep(plan.idle_s)
        used = {name: 100 * (cpu_s(each.pid) - used[name]) / plan.idle_s for name, (each, _) in keepers.items()}
        more: dict[str, Any] = {
            "watchers": WATCHERS,
            "kib_per_watcher": grown / 1024 / WATCHERS,
            "alone": used["alone"],
        }
        yield Line("keeper_watch_idle_cpu", used["watched"], "% of a core", goal=IDLE, more=more)
        for each, _ in keepers.values():
            each.pause()
        rates = await take_turns(plan, {name: side.turn(IN_FLIGHT) for name, side in sides.items()})
        for each, _ in keepers.values():
            each.resume()
    ours, bare = (sides[name].spent[IN_FLIGHT, False] for name in ("watched", "alone"))
    yield Line(
        "keeper_watch_idle_sets",
        rates["watched"].median,
        "sets/s",
        rates["alone"].median,
        "the same keeper without watchers",
        rates["watched"].ratio(rates["alone"]),
        FREE,
        runs=len(rates["alone"].values),
        more=ours.told() | bare.told("peer_"),
    )


async def _latency(plan: Plan, stack: ExitStack, target: dict[str, str]) -> Line:
    watcher = _watching(stack, target, pings=plan.pings)
    pauses, acknowledged = random.Random(7), []
    async with holdfast.open(target["url"], token=target["token"]) as store:
        records = store.space(SPACE).records
        for _ in range(plan.pings):
            await records.set("ping", time.monotonic_ns())
            acknowledged.append(time.monotonic_ns())
            await asyncio.sleep(pauses.uniform(0, PAUSE_S))
    seen: list[list[int]] = watcher.answer()["seen"]
    called_ms = [(at - called) / 1e6 for called, at in seen]
    after_ms = [(at - ack) / 1e6 for (_, at), ack in zip(seen, acknowledged, strict=True)]
    replied_ms = [(ack - called) / 1e6 for (called, _), ack in zip(seen, acknowledged, strict=True)]
    more = {"p99": sorted(called_ms)[int(len(called_ms) * 0.99)], "after_reply": statistics.median(after_ms)}
    more["reply"] = statistics.median(replied_ms)
    return Line("keeper_watch", statistics.median(called_ms), "ms", goal=LATENCY, runs=plan.pings, more=more)


def _watching(stack: ExitStack, target: dict[str, str], **what: int) -> Child:
    """A process that watches already."""
    [child] = stack.enter_context(children(1, "benchmarks.keeper_watch"))
    child.tell(**target, **what)
    child.answer()
    return child


async def watch() -> None:
    """The watcher's process."""
    say(ready=True)
    incoming = orders()
    order = next(incoming)
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(holdfast.open(order["url"], token=order["token"]))
            for _ in range(CONNECTIONS)
        ]
        spaces = [store.space(SPACE) for store in stores]
        if "idle" in order:
            waiting = [asyncio.ensure_future(_wait(spaces[n % CONNECTIONS], n)) for n in range(order["idle"])]
            await asyncio.sleep(SETTLE_S)
            say(watching=True)
            await asyncio.to_thread(next, incoming, None)  # until it is told nothing more
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
        else:
            await _see(spaces[0], order["pings"])


async def _wait(space: Space, number: int) -> None:
    async with aclosing(space.watch(f"nobody/{number:04d}/")) as commits:  # type: ignore[type-var]
        async for _ in commits:
            raise RuntimeError("somebody wrote where nobody writes")


async def _see(space: Space, pings: int) -> None:
    seen: list[tuple[int, int]] = []
    async with aclosing(space.watch("ping")) as commits:  # type: ignore[type-var]
        waiting = asyncio.ensure_future(anext(commits))
        await asyncio.sleep(0.1)  # the watch begins from now, with its first step
        say(watching=True)
        while True:
            commit = await waiting
            at = time.monotonic_ns()
            seen.extend((change.value, at) for change in commit)
            if len(seen) >= pings:
                break
            waiting = asyncio.ensure_future(anext(commits))
    say(seen=seen)


if __name__ == "__main__":
    uvloop.run(watch())
