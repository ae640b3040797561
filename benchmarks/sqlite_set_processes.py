"""What do four processes with sixteen writers each reach on one file, and does each of them get its share?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import holdfast
from benchmarks import ours, peers
from benchmarks.processes import processes
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns, timed

PROCESSES: Final = 4
WRITERS: Final = 16
ROUNDS: Final = 11
LONGER: Final = 3
"""Fewer and longer turns than elsewhere: processes need some time to take turns at all."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    path = plan.folder / "ours.db"
    async with holdfast.open(str(path)) as store:
        await ours.grow(store.space("bench", agent="writer"), path)
    with (
        closing(peers.with_apsw(plan.folder / "apsw.db")) as apsw,
        closing(peers.with_stdlib(plan.folder / "stdlib.db")) as stdlib,
        processes(PROCESSES, "ours", str(path), WRITERS) as workers,
    ):
        for bare in (apsw, stdlib):
            bare.grow(ours.next_bare_row)
        rates = await take_turns(
            replace(plan, rounds=min(plan.rounds, ROUNDS), seconds=plan.seconds * LONGER),
            {
                "ours": workers.turn,
                "loop": timed(lambda: apsw.upsert(*ours.next_bare_row())),
                "stdlib": timed(lambda: stdlib.upsert(*ours.next_bare_row())),
            },
        )
    name, mine = "sqlite_set_processes", rates["ours"]
    suffix = f"{PROCESSES} x {WRITERS} of ours"
    goal = Goal("ratio", "at least", 2)
    done = workers.done
    more: dict[str, Any] = {"slowest_set_ms": workers.slowest_s * 1000, "done": done}
    yield compare(name, mine, rates["loop"], f"upsert loop ({peers.APSW}), {suffix}", goal, **more)
    yield compare(name, mine, rates["stdlib"], f"upsert loop ({peers.STDLIB}), {suffix}", goal)
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
