"""What does a durable `set` cost one writer, beside a bare loop that upserts one changing row per FULL commit?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing

import holdfast
from benchmarks import ours, peers
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns, timed


async def run(plan: Plan) -> AsyncIterator[Line]:
    path = plan.folder / "ours.db"
    with (
        closing(peers.with_apsw(plan.folder / "apsw.db")) as apsw,
        closing(peers.with_stdlib(plan.folder / "stdlib.db")) as stdlib,
    ):
        async with holdfast.open(str(path)) as store:
            space = store.space("bench", agent="writer")
            await ours.grow(space, path)
            for bare in (apsw, stdlib):
                bare.grow(ours.next_bare_row)
            rates = await take_turns(
                plan,
                {
                    "ours": ours.writers(space, 1),
                    "apsw": timed(lambda: apsw.upsert(*ours.next_bare_row())),
                    "stdlib": timed(lambda: stdlib.upsert(*ours.next_bare_row())),
                },
            )
            sealed = await space.audit.sealed_upto()
    name = "sqlite_set_sequential"
    goal = Goal("ratio", "at least", 0.65)
    yield compare(name, rates["ours"], rates["apsw"], f"upsert loop ({peers.APSW})", None, sealed_upto=sealed)
    yield compare(name, rates["ours"], rates["stdlib"], f"upsert loop ({peers.STDLIB})", goal)
