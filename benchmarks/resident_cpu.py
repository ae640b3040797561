"""How much CPU does a durable set cost in the resident engine, how much memory a key, and how long does opening take?

Batches with 256-byte values on 10,000 keys are submitted the way a server does it, with 256 in flight and no task per
batch, in a process of its own, on uvloop where that is installed. They are made outside of the time that counts. `ours` is
microseconds of CPU, user and system, all threads included, per set: folding and the write-ahead log too. `fresh` is what
a client sends first, `asked` what has to be looked up. `check`, `evaluate` and `apply` are parts of it, measured alone on
the same batches; the rest is the queue, the futures, the row of the feed and COMMIT.

`idle_python` tells how much slower than its best round plain Python was meanwhile: where somebody else uses the machine,
CPU time grows with that.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.children import children, orders, say
from benchmarks.report import Goal, Line
from benchmarks.rounds import FULL, Plan
from holdfast.checking import check_batch
from holdfast.engine import Batch, Entry, Put, Receipt
from holdfast.engines.evaluation import Group
from holdfast.engines.resident import ResidentEngine

KEYS: Final = 10_000
IN_FLIGHT: Final = 256
ROUND: Final = 10 * IN_FLIGHT
ROUNDS: Final = 100
"""Enough for several folds."""
LOADED: Final = 10_000
SPACE: Final = "bench"

_numbers = itertools.count(1)
_random = random.Random(7)


async def run(plan: Plan) -> AsyncIterator[Line]:
    quick = plan.rounds < FULL.rounds
    with children(1, "benchmarks.resident_cpu", str(plan.folder)) as [child]:
        for kind in ("fresh", "asked"):
            child.tell(kind=kind, rounds=5 if quick else ROUNDS)
            told = child.answer()
            used = told.pop("used")
            goal = Goal("ours", "at most", 9.0)
            yield Line(f"resident_cpu_{kind}", statistics.mean(used), "us", goal=goal, runs=len(used), more=told)
    with children(1, "benchmarks.resident_cpu", str(plan.folder)) as [child]:
        child.tell(kind="memory", keys=plan.keys)
        told = child.answer()
        goal = Goal("ours", "at most", 1_500 * plan.keys / 1_000_000)
        yield Line("resident_memory", told["megabytes"], "MB", goal=None if quick else goal, more={"keys": plan.keys})
        yield Line("resident_open", told["seconds"], "s", goal=Goal("ours", "at most", 5.0), more={"keys": plan.keys})


def _batches(count: int, *, fresh: bool) -> list[Batch]:
    made: list[Batch] = []
    for number in itertools.islice(_numbers, count):
        key, value = f"records/agents/{_random.randrange(KEYS):05d}/state", b'"%012d%s"' % (number, b"x" * 242)
        made.append(Batch("agent-1", (Put(key, value),), request_id=f"{number:08x}-{number:020x}", fresh=fresh))
    return made


class _Settled:
    """Whom to answer, as a server has it: one that sends the next batch."""

    def __init__(self, engine: ResidentEngine, batches: list[Batch]) -> None:
        self._engine = engine
        self._left = iter(batches)
        self._waiting = len(batches)
        self.all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, count: int) -> None:
        for batch in itertools.islice(self._left, count):
            self._engine.submit(SPACE, batch, self)

    def set_result(self, receipt: Receipt) -> None:
        self._waiting -= 1
        self.send(1)
        if not self._waiting:
            self.all_done.set_result(None)

    def set_exception(self, error: BaseException) -> None:
        self.all_done.set_exception(error)


async def _submitted(engine: ResidentEngine, batches: list[Batch]) -> None:
    """All of them, with IN_FLIGHT under way."""
    settled = _Settled(engine, batches)
    settled.send(IN_FLIGHT)
    await settled.all_done


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _python() -> float:
    """A piece of plain Python, in seconds of CPU."""
    began, held = _cpu(), {}
    for number in range(6_000):
        key = f"k{number % 997}"
        held[key] = Put(key, b"x")
    return _cpu() - began


def _parts(engine: ResidentEngine, batches: list[Batch]) -> dict[str, float]:
    """Microseconds a batch, of the best of several tries: check_batch, evaluation, and applying it to memory."""
    home, groups = engine._spaces[SPACE], []

    def evaluate() -> None:
        group = Group(home, home.time)
        for batch in batches[:IN_FLIGHT]:
            group.evaluate(batch, known_new=True)
        groups.append(group)

    def best(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(50):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        return min(taken) / IN_FLIGHT * 1e6

    figures = {"check": best(lambda: [check_batch(batch) for batch in batches[:IN_FLIGHT]]), "evaluate": best(evaluate)}
    revision, at, last_id = home.revision, home.time, home.last_id
    kept = {key: home.entries[key] for key in groups[0].writes}
    figures["apply"] = best(lambda: home.apply(groups[0]))
    home.entries.update(kept)
    home.revision, home.time, home.last_id = revision, at, last_id
    return figures


async def _sets(path: Path, kind: str, rounds: int) -> dict[str, Any]:
    engine, fresh = await ResidentEngine.open(path), kind == "fresh"
    values = [Put(f"records/agents/{number:05d}/state", b"1" * 256) for number in range(KEYS)]
    await asyncio.gather(*(engine.commit(SPACE, Batch("agent-1", (value,))) for value in values))
    await _submitted(engine, _batches(ROUND, fresh=fresh))
    parts = _parts(engine, _batches(IN_FLIGHT, fresh=fresh))
    gc.collect()
    gc.freeze()
    used, python = [], []
    for _ in range(rounds):
        batches = _batches(ROUND, fresh=fresh)
        python.append(_python())
        began = _cpu()
        await _submitted(engine, batches)
        used.append((_cpu() - began) / ROUND * 1e6)
    await engine.close()
    best = {"median": statistics.median(used), "best": min(used), "idle_python": statistics.mean(python) / min(python)}
    return {"used": used, **best, **parts}


async def _memory(path: Path, keys: int) -> dict[str, Any]:
    """An owner with so many keys, and how long the next one takes to open them."""
    engine = await ResidentEngine.open(path)
    for start in range(0, keys, LOADED):
        numbers = range(start, min(start + LOADED, keys))
        entries = [Entry(f"records/k/{n:07d}", b'"%0254d"' % n, n + 1, "agent-1", n, n) for n in numbers]
        await engine.load(SPACE, entries, keys)
    del entries
    await engine.close()
    del engine
    began = time.perf_counter()
    engine = await ResidentEngine.open(path)
    seconds = time.perf_counter() - began
    await _submitted(engine, _batches(ROUND, fresh=True))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            megabytes = int(line.split()[1]) / 1024
    await engine.close()
    return {"megabytes": megabytes, "seconds": seconds}


def main(folder: Path) -> None:
    try:
        import uvloop

        start: Callable[..., Any] = uvloop.run
    except ImportError:
        start = asyncio.run
    say(ready=True)
    for number, order in enumerate(orders()):
        path = folder / f"{number}-{order['kind']}.db"
        if order["kind"] == "memory":
            say(**start(_memory(path, order["keys"])))
        else:
            say(**start(_sets(path, order["kind"], order["rounds"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
