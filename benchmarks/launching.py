"""How soon does a process that is controlled run, and how fast does its output flow, beside Python's own ways?

Launches go through a warm zygote and a warden (`holdfast.processes`). Beside a command stands `subprocess.run`, which neither
limits nor can end what the command starts; beside a function a process of `multiprocessing` made by fork server, which is as
warm as ours, and one made by spawn, which is not. All wait for the end.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import statistics
import subprocess
import time
from collections.abc import AsyncIterator

import psutil

from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns, timed, timed_async
from holdfast.processes import Launcher, Order

OUTPUT_BYTES = 1 << 30
FIRSTS = 40
"""Launches whose first instruction is timed."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    yield await ready(plan)
    async with Launcher() as launcher:
        yield await first_instruction(launcher, "function", Goal("ours", "at most", 20))
        yield await first_instruction(launcher, "command", Goal("ours", "at most", 50))
        for line in await commands(launcher, plan):
            yield line
        for line in await functions(launcher, plan):
            yield line
        for line in await output(launcher, plan):
            yield line
        yield await idle(launcher, plan)


async def ready(plan: Plan) -> Line:
    """Until a launcher can launch."""
    taken = []
    for _ in range(plan.rounds):
        began = time.perf_counter()
        async with Launcher():
            taken.append((time.perf_counter() - began) * 1000)
    return Line("launcher_ready", statistics.median(taken), "ms", goal=Goal("ours", "at most", 300), runs=len(taken))


async def first_instruction(launcher: Launcher, kind: str, goal: Goal) -> Line:
    """From the request until the target's first instruction, by the clock that processes share."""
    taken = []
    for _ in range(FIRSTS):
        began = time.time()
        if kind == "function":
            child = await launcher.start(Order(function="time:time"))
            then = (await child.wait()).result
        else:
            child = await launcher.start(Order(argv=("date", "+%s.%N")))
            text = b"".join([data async for _, data in child.output()])
            then = float(text)
        taken.append((then - began) * 1000)
    more = {"p95_ms": sorted(taken)[int(len(taken) * 0.95)]}
    return Line(f"launch_{kind}_first", statistics.median(taken), "ms", goal=goal, runs=FIRSTS, more=more)


async def commands(launcher: Launcher, plan: Plan) -> list[Line]:
    async def ours() -> None:
        child = await launcher.start(Order(argv=("true",), quiet=True))
        await child.wait()

    turns = {"ours": timed_async(ours), "subprocess": timed(lambda: subprocess.run(["true"], check=True))}
    rates = await take_turns(plan, turns)
    ms = 1000 / rates["ours"].median
    beside = compare("launch_true", rates["ours"], rates["subprocess"], "subprocess.run", None, unit="launches/s")
    return [Line("launch_true_ms", ms, "ms", goal=Goal("ours", "at most", 30), runs=plan.rounds), beside]


async def functions(launcher: Launcher, plan: Plan) -> list[Line]:
    async def ours() -> None:
        child = await launcher.start(Order(function="math:sqrt", args=[9], quiet=True))
        await child.wait()

    def peer(method: str) -> None:
        process = multiprocessing.get_context(method).Process(target=os.getpid)
        process.start()
        process.join()

    turns = {"ours": timed_async(ours)}
    for method in ("forkserver", "spawn"):
        turns[method] = timed(lambda method=method: peer(method))
    rates = await take_turns(plan, turns)
    return [
        compare("launch_function", rates["ours"], rates[method], f"multiprocessing, {method}", None, unit="launches/s")
        for method in ("forkserver", "spawn")
    ]


async def output(launcher: Launcher, plan: Plan) -> list[Line]:
    """A command that prints a gigabyte, beside a bare pipe that is read in a loop."""
    size = OUTPUT_BYTES if plan.rounds > 3 else OUTPUT_BYTES // 16
    command = ("head", "-c", str(size), "/dev/zero")
    ours, peers = [], []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        began, count = time.perf_counter(), 0
        child = await launcher.start(Order(argv=command))
        async for _, data in child.output():
            count += len(data)
        await child.wait()
        assert count == size
        ours.append(size / (time.perf_counter() - began) / 1e6)
        began = time.perf_counter()
        with await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while os.read(process.stdout.fileno(), 256 * 1024):
                pass
        peers.append(size / (time.perf_counter() - began) / 1e6)
    grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    mine, theirs = statistics.median(ours), statistics.median(peers)
    ratio = statistics.median(one / other for one, other in zip(ours, peers, strict=True))
    goal = Goal("ours", "at least", 100)
    more = {"grew_mb": grew}
    return [Line("launch_output", mine, "MB/s", theirs, "a bare pipe", ratio, goal, runs=3, more=more)]


async def idle(launcher: Launcher, plan: Plan) -> Line:
    """CPU of ten sleeping children's wardens, in per cent of a core."""
    children = [await launcher.start(Order(argv=("sleep", "600"))) for _ in range(10)]
    await asyncio.sleep(1.0)
    assert launcher.zygote_pid is not None
    before = _cpu_s(launcher.zygote_pid)
    await asyncio.sleep(plan.idle_s)
    used = (_cpu_s(launcher.zygote_pid) - before) / plan.idle_s * 100
    for child in children:
        await child.kill()
    return Line("launch_idle_10", max(used, 0.001), "%", goal=Goal("ours", "at most", 0.5))


def _cpu_s(zygote: int) -> float:
    """Of a zygote and the wardens below it."""
    root = psutil.Process(zygote)
    return sum(sum(process.cpu_times()[:2]) for process in [root, *root.children()])
