"""How many executions of three no-op steps are run, beside other durable executions on the same store? What do many steps cost?

Durable, one after the other, each started and awaited in the process whose worker runs it; the peers (`workflow_peers.py`) in turns of the same
run. `ours` beside `at_50`: the same with 50 at a time. The others: items of a map; from the call of `start` to the first instruction
of the first step; from a worker's beginning to the first new step of an execution that has 10,000 behind it; starting and listing
beside very many executions that have ended.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, Final

import holdfast
from benchmarks import workflow_peers
from benchmarks.queue_peers import environment
from benchmarks.queues import peer
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Turn, take_turns, timed_async
from benchmarks.stores import stores
from holdfast import Context, Space, workflow
from holdfast.codec import encode
from holdfast.engine import ID_DIGITS, Entry
from holdfast.layers.workflows.entries import (
    COMPLETED,
    PENDING,
    Execution,
    LogEvent,
    Meta,
    StepRecord,
    ended_key,
    execution_key,
    live_key,
    log_prefix,
    meta_key,
    raw,
    tag_of,
)
from holdfast.testing.servers.process import MissingServer

GOALS: Final = {"sqlite": {"dbos": 5.0, "dbos-wal": 3.0}, "postgres": {"dbos": 4.0, "absurd": 1.5}, "redis": {}}
AT_ONCE: Final = 50
LONGER: Final = 4
"""Turns of many at once: beginning and end, when there are not so many, should not count."""
ITEMS: Final = 10_000
STEPS: Final = 10_000
LOADED: Final = 5_000
FIRSTS: Final = 60
KEPT_MS: Final = 10 * 86_400_000

begun: list[float] = []


async def nothing(number: int) -> int:
    return number


async def notes_the_time(number: int) -> int:
    begun.append(time.perf_counter())
    return number


@workflow(name="three")
async def three(ctx: Context, number: int) -> int:
    for _ in range(3):
        await ctx.step("step", nothing, number)
    return number


@workflow(name="timed")
async def timed(ctx: Context, number: int) -> int:
    first: int = await ctx.step("first", notes_the_time, number)
    return first


@workflow(name="maps")
async def maps(ctx: Context, number: int) -> int:
    return len(await ctx.map("each", nothing, range(number), max_workers=64))


@workflow(name="long")
async def long(ctx: Context, number: int) -> None:
    for _ in range(number):
        await ctx.step("step", nothing, 1)
    await ctx.step("new", notes_the_time, 1)


async def run(plan: Plan) -> AsyncIterator[Line]:
    for kind, goals in GOALS.items():
        with ExitStack() as stack:
            try:
                new_url = stack.enter_context(stores(kind, plan.folder))
            except MissingServer as missing:
                print(f"# {kind} is left out: {missing}", file=sys.stderr)
                continue
            url = new_url()
            contenders: dict[str, Turn] = {}
            for name in goals:
                place = url.partition("?")[0] if kind == "postgres" else str(plan.folder / f"{name}.db")
                try:
                    python = environment(workflow_peers.PACKAGES, workflow_peers.ENVIRONMENT)
                    contenders[name] = stack.enter_context(
                        peer(name, [str(python), workflow_peers.__file__, name, place])
                    )
                except (OSError, subprocess.SubprocessError) as exc:
                    print(f"# {name} is left out: {exc}", file=sys.stderr)
            async for line in _three(plan, kind, url, contenders):
                yield line
            async with holdfast.open(new_url()) as store:
                space = store.space("bench", agent="worker")
                if kind == "sqlite":
                    yield await _map(plan, space)
                yield await _first_step(kind, space)
                yield await _resume(kind, store)
    async for line in _finished(plan):
        yield line


async def _three(plan: Plan, kind: str, url: str, contenders: dict[str, Turn]) -> AsyncIterator[Line]:
    async with holdfast.open(url) as store:
        workflows = store.space("bench", agent="worker").workflows
        async with workflows.worker([three], concurrency=AT_ONCE):

            async def one() -> None:
                await (await workflows.start(three, 1)).result()

            async def at_once(seconds: float) -> float:
                seconds *= LONGER
                began, count = time.perf_counter(), 0

                async def work() -> None:
                    nonlocal count
                    while time.perf_counter() < began + seconds:
                        await one()
                        count += 1

                await asyncio.gather(*(work() for _ in range(AT_ONCE)))
                return count / (time.perf_counter() - began)

            name = f"workflows_{kind}"
            rates = await take_turns(plan, {"ours": timed_async(one), **contenders})
            for other, least in GOALS[kind].items():
                if other in rates:
                    goal = Goal("ratio", "at least", least)
                    yield compare(name, rates["ours"], rates[other], other, goal, "executions/s")
            # By themselves, because the audit of so many is sealed in the seconds that follow.
            rates = await take_turns(plan, {"ours": timed_async(one), "at once": at_once})
            goal = Goal("ratio", "at least", 3.0)
            yield compare(
                f"{name}_at_{AT_ONCE}", rates["at once"], rates["ours"], "one at a time", goal, "executions/s"
            )


async def _map(plan: Plan, space: Space) -> Line:
    rates: list[float] = []
    async with space.workflows.worker([maps]):
        for _ in range(min(plan.rounds, 5)):
            began = time.perf_counter()
            await (await space.workflows.start(maps, ITEMS)).result()
            rates.append(ITEMS / (time.perf_counter() - began))
    goal = Goal("ours", "at least", 3_000)
    return Line(
        "workflows_map", statistics.median(rates), "items/s", goal=goal, runs=len(rates), more={"best": max(rates)}
    )


async def _first_step(kind: str, space: Space) -> Line:
    taken: list[float] = []
    async with space.workflows.worker([timed]):
        for number in range(FIRSTS):
            begun.clear()
            began = time.perf_counter()
            await (await space.workflows.start(timed, number)).result()
            taken.append((begun[0] - began) * 1000)
            await asyncio.sleep(0.002)
    goal = Goal("ours", "at most", 10)
    more = {"worst": max(taken)}
    return Line(f"workflows_{kind}_first_step", statistics.median(taken), "ms", goal=goal, runs=FIRSTS, more=more)


async def _resume(kind: str, store: holdfast.Store) -> Line:
    space = store.space("resume", agent="worker")
    await store.engine.create("resume")
    now = int(time.time() * 1000)
    meta = Meta("x", "long", "1", now, raw(STEPS, ""))
    entries = [
        (meta_key("x"), encode(meta), ""),
        (execution_key("x"), encode(Execution("x", "long", PENDING, now, now)), tag_of(PENDING)),
        (live_key("long", "x"), b"null", ""),
        *((f"{log_prefix('x')}{n + 1:0{ID_DIGITS}}", encode(_told(n, now)), "") for n in range(STEPS)),
    ]
    for start in range(0, len(entries), LOADED):
        some = sorted(entries)[start : start + LOADED]
        loaded = [
            Entry(key, value, n + 1, "worker", now, now, None, tag) for n, (key, value, tag) in enumerate(some, start)
        ]
        await store.engine.load("resume", loaded, len(entries))
    await space.queue("workflows.long").put({"execution": "x"})
    begun.clear()
    began = time.perf_counter()
    async with space.workflows.worker([long]):
        await (await space.workflows.get("x")).result("60s")
    more = {"steps": STEPS}
    return Line(f"workflows_{kind}_resume", begun[0] - began, "s", goal=Goal("ours", "at most", 1.0), more=more)


def _told(n: int, now: int) -> LogEvent:
    record = StepRecord("completed", n, "step", now, now, result=raw(1, ""))
    return LogEvent(now, "completed", f"step#{n}", record=record)


async def _finished(plan: Plan) -> AsyncIterator[Line]:
    with stores("sqlite", plan.folder) as new_url:
        async with holdfast.open(new_url()) as full, holdfast.open(new_url()) as empty:
            await _load_finished(full, plan.keys)
            spaces = {"full": full.space("bench", agent="worker"), "empty": empty.space("bench", agent="worker")}
            for what in ("start", "list"):
                turns: dict[str, Turn] = {name: timed_async(_act(what, space)) for name, space in spaces.items()}
                rates = await take_turns(plan, turns)
                yield Line(
                    f"workflows_finished_{what}",
                    1e6 / rates["full"].median,
                    "us",
                    1e6 / rates["empty"].median,
                    "the same in an empty store",
                    rates["empty"].ratio(rates["full"]),
                    Goal("ratio", "at most", 1.5),
                    runs=len(rates["full"].values),
                    more={"finished": plan.keys},
                )


def _act(what: str, space: Space) -> Any:
    async def start() -> None:
        await space.workflows.start(three, 1)

    async def list_() -> None:
        await space.workflows.list(name="timed")

    return start if what == "start" else list_


async def _load_finished(store: holdfast.Store, count: int) -> None:
    await store.engine.create("bench")
    now = int(time.time() * 1000)
    version = 0
    for start in range(0, count, LOADED):
        entries: list[Entry] = []
        for n in range(start, min(start + LOADED, count)):
            id = f"done{n:08d}"
            meta = encode(Meta(id, "three", "1", now, raw(1, "")))
            execution = encode(Execution(id, "three", COMPLETED, now, now, now, result=raw(1, "")))
            for key, value, tag in (
                (meta_key(id), meta, ""),
                (execution_key(id), execution, tag_of(COMPLETED)),
                (ended_key("three", now, id), encode(COMPLETED), ""),
            ):
                version += 1
                expires = None if key.startswith(meta_key("")) else now + KEPT_MS
                entries.append(Entry(key, value, version, "worker", now, now, expires, tag))
        await store.engine.load("bench", entries, 3 * count)
