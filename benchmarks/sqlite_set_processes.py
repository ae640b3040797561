"""What do four processes with sixteen writers each reach on one file, and does each of them get its share?

`python -m benchmarks.sqlite_set_processes FILE` is one of the four: told `{"at", "seconds"}` (`at` on the machine's
monotonic clock, which processes share), it writes from then on and answers with what it finished and its slowest `set`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import holdfast
from benchmarks import ours, peers
from benchmarks.children import Child, children, orders, say
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Turn, take_turns, timed

PROCESSES: Final = 4
WRITERS: Final = 16
ROUNDS: Final = 11
LONGER: Final = 3
"""Fewer and longer turns than elsewhere: processes need some time to take turns at all."""
LEAD_S: Final = 0.02
"""From the order to the start, so that all have read it."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    path = plan.folder / "ours.db"
    async with holdfast.open(str(path)) as store:
        await ours.grow(store.space("bench", agent="writer"), path)
    done, slowest = [0] * PROCESSES, 0.0

    def all_of(workers: list[Child]) -> Turn:
        async def turn(seconds: float) -> float:
            nonlocal slowest
            at = time.monotonic() + LEAD_S
            for worker in workers:
                worker.tell(at=at, seconds=seconds)
            answers = [worker.answer() for worker in workers]
            for number, answer in enumerate(answers):
                done[number] += answer["done"]
            slowest = max(slowest, *(answer["slowest_s"] for answer in answers))
            return float(sum(answer["done"] for answer in answers) / max(answer["took_s"] for answer in answers))

        return turn

    with (
        closing(peers.with_apsw(plan.folder / "apsw.db")) as apsw,
        closing(peers.with_stdlib(plan.folder / "stdlib.db")) as stdlib,
        children(PROCESSES, "benchmarks.sqlite_set_processes", str(path)) as workers,
    ):
        for bare in (apsw, stdlib):
            bare.grow(ours.next_bare_row)
        rates = await take_turns(
            replace(plan, rounds=min(plan.rounds, ROUNDS), seconds=plan.seconds * LONGER),
            {
                "ours": all_of(workers),
                "loop": timed(lambda: apsw.upsert(*ours.next_bare_row())),
                "stdlib": timed(lambda: stdlib.upsert(*ours.next_bare_row())),
            },
        )
    name, mine = "sqlite_set_processes", rates["ours"]
    suffix = f"{PROCESSES} x {WRITERS} of ours"
    goal = Goal("ratio", "at least", 2)
    more: dict[str, Any] = {"slowest_set_ms": slowest * 1000, "done": done}
    yield compare(name, mine, rates["loop"], f"upsert loop ({peers.APSW}), {suffix}", goal, **more)
    yield compare(name, mine, rates["stdlib"], f"upsert loop ({peers.STDLIB}), {suffix}", None)
    fair, least = sum(done) / PROCESSES, float(min(done))
    yield Line(
        "sqlite_set_processes_share",
        least,
        "sets",
        fair,
        "the fair share of one process",
        least / fair,
        Goal("ratio", "at least", 0.5),
        runs=len(mine.values),
        more=more,
    )


async def work(path: str) -> None:
    """One of the processes."""
    async with holdfast.open(path) as store:
        space = store.space("bench", agent="writer")
        await space.records.get("warm")
        say(ready=True)
        for order in orders():
            slowest = 0.0

            async def write(end: float) -> int:
                nonlocal slowest
                done, clock, set_ = 0, time.monotonic, space.records.set
                began = clock()
                while began < end:
                    key, value = ours.next_row()
                    await set_(key, value)
                    done += 1
                    now = clock()
                    slowest = max(slowest, now - began)
                    began = now
                return done

            time.sleep(max(0.0, order["at"] - time.monotonic()))  # noqa: ASYNC251 - the start signal; nothing else runs yet
            end = order["at"] + order["seconds"]
            done = await asyncio.gather(*(write(end) for _ in range(WRITERS)))
            say(done=sum(done), took_s=time.monotonic() - order["at"], slowest_s=slowest)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
