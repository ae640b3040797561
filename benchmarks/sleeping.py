"""What do 100,000 sleeping executions cost those who are awake, and how exact are their timers?

One execution is run until it sleeps, and what the store then has of it is multiplied, so nothing is made up. Beside a store without them: the
time of an execution of three no-op steps, one after the other, and the CPU of a worker with nothing to do. Then some that sleep for a moment
among all the others: how late their code goes on, on one of two cores that has nothing else to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

import holdfast
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, Turn, take_turns, timed_async
from benchmarks.stores import stores
from benchmarks.workflows import LOADED, three
from holdfast import Context, Space, Store, workflow
from holdfast.engine import SCAN_MAX, Entry
from holdfast.layers.caretaker import SEAL_MS
from holdfast.layers.workflows.entries import execution_key, execution_of

ONE: Final = "sleeper00000000"
LONG: Final = "3650d"
TIMERS: Final = 50

woken: list[float] = []


@workflow(name="sleeps")
async def sleeps(ctx: Context, span: str) -> None:
    await ctx.sleep(span)


@workflow(name="dozes")
async def dozes(ctx: Context, until: float) -> None:
    await ctx.sleep(until - ctx.now().timestamp())
    woken.append((time.time() - until) * 1000)


async def run(plan: Plan) -> AsyncIterator[Line]:
    count = plan.keys // 10
    with stores("sqlite", plan.folder) as new_url:
        async with holdfast.open(new_url()) as full, holdfast.open(new_url()) as empty:
            await _fall_asleep(full, count)
            spaces = {"full": full.space("bench", agent="worker"), "empty": empty.space("bench", agent="worker")}
            async with _worker(spaces["full"]), _worker(spaces["empty"]):
                turns: dict[str, Turn] = {name: timed_async(_one(space)) for name, space in spaces.items()}
                rates = await take_turns(plan, turns)
            yield Line(
                "sleeping_executions",
                1e3 / rates["full"].median,
                "ms",
                1e3 / rates["empty"].median,
                "the same without them",
                rates["empty"].ratio(rates["full"]),
                Goal("ratio", "at most", 1.5),
                runs=len(rates["full"].values),
                more={"sleeping": count},
            )
            for space in spaces.values():  # what was just run is not what an idle worker has to do
                await space.audit.seal()
            async with _worker(spaces["full"]):
                await asyncio.sleep(2 * SEAL_MS / 1000)
                used = time.process_time()
                await asyncio.sleep(plan.idle_s)
                cpu = 100 * (time.process_time() - used) / plan.idle_s
                yield Line("sleeping_idle_cpu", cpu, "% of a core", goal=Goal("ours", "at most", 0.5))
                yield await _timers(spaces["full"])


async def _timers(space: Space) -> Line:
    woken.clear()
    start = time.time() + 2.0
    handles = [await space.workflows.start(dozes, start + n * 0.04) for n in range(TIMERS)]
    for handle in handles:
        await handle.result("60s")
    late = sorted(woken)
    more = {"p50": late[len(late) // 2], "worst": late[-1], "early": min(0.0, late[0])}
    return Line("sleeping_late", late[int(len(late) * 0.95)], "ms", goal=Goal("ours", "at most", 100), more=more)


def _worker(space: Space) -> holdfast.Worker:
    return space.workflows.worker([three, sleeps, dozes])


def _one(space: Space) -> Callable[[], Awaitable[object]]:
    async def one() -> object:
        return await (await space.workflows.start(three, 1)).result()

    return one


async def _fall_asleep(store: Store, count: int) -> None:
    """Multiply one that sleeps."""
    space = store.space("bench", agent="worker")
    engine = store.engine
    async with space.workflows.worker([sleeps]):
        handle = await space.workflows.start(sleeps, LONG, id=ONE)
        async for view in handle.watch():
            if view.waits:
                break
    [entry] = await engine.get("bench", [execution_key(ONE)])
    assert entry is not None
    message = execution_of(entry).message
    page = await engine.scan("bench", "", limit=SCAN_MAX)
    own = [each for each in page.entries if ONE in each.key or message in each.key]
    [info] = await engine.spaces("bench")
    version = info.revision
    for start in range(1, count, LOADED):
        copies: list[Entry] = []
        for n in range(start, min(start + LOADED, count)):
            id, other = f"sleeper{n:08d}", f"{int(message) - n:019d}"
            for each in own:
                version += 1
                value = each.value.replace(ONE.encode(), id.encode()).replace(message.encode(), other.encode())
                key = each.key.replace(ONE, id).replace(message, other)
                copies.append(msgspec.structs.replace(each, key=key, value=value, version=version))
        await engine.load("bench", copies, version)
