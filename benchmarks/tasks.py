"""How soon does a task run, how fast does its output flow, what does a manager cost, and do finished tasks cost anything?

A manager serves a SQLite file. `task_…_first` is from the call of `submit` until the target's first instruction, by the clock that
processes share: two commits of the manager's and one of ours are in between, each durable. `task_output` is a command that prints
a gigabyte, kept as a blob, with what the manager's memory grew by. `task_idle` is the CPU time of a manager that has nothing to do.

`task_flat_…` are microseconds with a million finished tasks in the store and with none: lower is better.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

import holdfast
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, take_turns, timed_async
from holdfast import ManagerInfo, Space, Store, TaskSpec
from holdfast.clock import as_datetime
from holdfast.codec import encode
from holdfast.engine import Entry
from holdfast.layers.task_states import TaskState, event, index_key, log_prefix, spec_key, state_key, tag_of

OUTPUT_BYTES: Final = 1 << 30
FIRSTS: Final = 40
"""Tasks whose first instruction is timed."""
LOADED: Final = 1_000
"""Tasks loaded per step while a store is filled."""
ROUNDS: Final = 11
KEPT_MS: Final = 7 * 86_400_000
IDLE: Final = Goal("ours", "at most", 0.5)
FLAT: Final = Goal("ratio", "at most", 1.5)


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with holdfast.open(str(plan.folder / "tasks.db")) as store:
        space = store.space("bench", agent="bench")
        began = time.perf_counter()
        info = await holdfast.ensure_manager(space, idle=120)
        ready_ms = (time.perf_counter() - began) * 1000
        try:
            yield Line("task_manager_ready", ready_ms, "ms", goal=Goal("ours", "at most", 1000))
            yield await first_instruction(space, "function", Goal("ours", "at most", 20))
            yield await first_instruction(space, "command", Goal("ours", "at most", 50))
            yield await whole(space)
            yield await output(space, info, OUTPUT_BYTES if plan.rounds > 3 else OUTPUT_BYTES // 64)
            yield await idle(info, plan.idle_s)
        finally:
            await (await space.tasks.get(info.tid)).kill()
    async for line in flat(plan):
        yield line


async def first_instruction(space: Space, kind: str, goal: Goal) -> Line:
    taken = []
    for _ in range(FIRSTS):
        command = ("date", "+%s.%N")
        spec = TaskSpec(function="time:time") if kind == "function" else TaskSpec(command=command)
        began = time.time()
        handle = await space.tasks.submit(spec)
        then = float(await handle.result("30s"))
        taken.append((then - began) * 1000)
    more = {"p95_ms": sorted(taken)[int(len(taken) * 0.95)], "min_ms": min(taken)}
    return Line(f"task_{kind}_first", statistics.median(taken), "ms", goal=goal, runs=FIRSTS, more=more)


async def whole(space: Space) -> Line:
    """`true`, from submit until its end is known here."""
    taken = []
    for _ in range(FIRSTS):
        began = time.perf_counter()
        await (await space.tasks.submit(TaskSpec(command=("true",)))).wait("30s")
        taken.append((time.perf_counter() - began) * 1000)
    return Line("task_true", statistics.median(taken), "ms", runs=FIRSTS)


async def output(space: Space, info: ManagerInfo, size: int) -> Line:
    """A command that prints a gigabyte."""
    process = psutil.Process(info.pid)
    before = most = process.memory_info().rss
    began = time.perf_counter()
    handle = await space.tasks.submit(TaskSpec(command=("head", "-c", str(size), "/dev/zero")))
    ended = asyncio.ensure_future(handle.wait("10m"))
    while not ended.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.02)
    state = await ended
    if state.status != "completed" or state.output is None or state.output.size != size:
        raise RuntimeError(f"the output was not kept: {state}")
    rate = size / (time.perf_counter() - began) / 1e6
    more = {"grew_mb": (most - before) / 2**20, "bytes": size}
    return Line("task_output", rate, "MB/s", goal=Goal("ours", "at least", 100), more=more)


async def idle(info: ManagerInfo, seconds: float) -> Line:
    root = psutil.Process(info.pid)
    await asyncio.sleep(3)  # what came before is sealed, and the receivers have come to rest
    processes = [root, *root.children(recursive=True)]
    before = _cpu_s(processes)
    await asyncio.sleep(seconds)
    used = (_cpu_s(processes) - before) / seconds * 100
    return Line("task_idle", max(used, 0.001), "%", goal=IDLE, more={"seconds": seconds})


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def flat(plan: Plan) -> AsyncIterator[Line]:
    """The same with many finished tasks and with none. No manager: its part is done here, by hand."""
    paths: dict[str, Path] = {name: plan.folder / f"{name}.db" for name in ("large", "small")}
    async with holdfast.open(str(paths["large"])) as large, holdfast.open(str(paths["small"])) as small:
        await fill(large, plan.keys)
        await small.engine.create("bench")
        steps = {"large": Steps(large), "small": Steps(small)}
        plan = replace(plan, rounds=min(plan.rounds, ROUNDS))
        for name in ("submit", "status", "reserve"):
            for each in steps.values():
                await each.prepare()
            turns = {which: timed_async(each.steps[name]) for which, each in steps.items()}
            rates = await take_turns(plan, turns)
            yield Line(
                f"task_flat_{name}",
                1e6 / rates["large"].median,
                "us",
                1e6 / rates["small"].median,
                "the same with none",
                rates["small"].ratio(rates["large"]),
                FLAT,
                runs=len(rates["large"].values),
                more={"finished": plan.keys},
            )


async def fill(store: Store, count: int) -> None:
    """Finished tasks, each with its spec, its state, its place in the index and four events."""
    await store.engine.create("bench")
    now, spec = 1_790_000_000_000, TaskSpec(command=("true",))
    raw = encode(spec)
    for start in range(0, count, LOADED):
        entries: list[Entry] = []
        for number in range(start, min(start + LOADED, count)):
            at = now + number
            tid, when = f"{at << 20:019d}", as_datetime(at)
            state = TaskState(
                tid=tid,
                status="completed",
                owner="bench",
                title="true",
                created_at=when,
                attempt=1,
                manager="1" * 19,
                host="host",
                pid=1,
                started_at=when,
                completed_at=when,
                return_code=0,
            )
            tag, value = tag_of("completed"), encode(state)
            due = at + KEPT_MS * 100
            rows = [
                (spec_key(tid), raw, "", None),
                (state_key(tid), value, tag, due),
                (index_key(state, due), b'"true"', tag, None),
            ]
            told = event(tid, "state_update", at, {"status": "completed", "state": state}, "completed").value
            rows += [(f"{log_prefix(tid)}{(at << 20) + step:019d}", told, tag, None) for step in range(4)]
            entries += [
                Entry(key, data, number + 1, "bench", at, at, expires_at=end, tag=label)
                for key, data, label, end in rows
            ]
        await store.engine.load("bench", entries, count)


class Steps:
    """What is measured on a store."""

    def __init__(self, store: Store) -> None:
        self._space = store.space("bench", agent="bench")
        self._waiting: list[str] = []
        self.steps: dict[str, Callable[[], Awaitable[object]]] = {
            "submit": self._submit,
            "status": self._status,
            "reserve": self._reserve,
        }

    async def prepare(self) -> None:
        """Enough that wait."""
        for _ in range(50):
            await self._submit()

    async def _submit(self) -> None:
        self._waiting.append((await self._space.tasks.submit(TaskSpec(command=("true",)))).tid)

    async def _status(self) -> None:
        await (await self._space.tasks.get(self._waiting[-1])).status()

    async def _reserve(self) -> None:
        message = await self._space.queue("holdfast.spawn.requests").take(wait=5)
        await message.release()
