"""What do 64 concurrent writers of one process reach, beside one upsert per commit, and beside 64 upserts per commit?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from typing import Final

import holdfast
from benchmarks import ours, peers
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Turn, take_turns, timed

WRITERS: Final = 64


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
                    "ours": ours.writers(space, WRITERS),
                    "loop": timed(lambda: apsw.upsert(*ours.next_bare_row())),
                    "rows": _rows(apsw),
                    "stdlib loop": timed(lambda: stdlib.upsert(*ours.next_bare_row())),
                    "stdlib rows": _rows(stdlib),
                },
            )
            sealed = await space.audit.sealed_upto()
    name, mine = "sqlite_set_64", rates["ours"]
    one, many = f"upsert loop ({{}}), {WRITERS} of ours", f"{WRITERS} upserts per commit ({{}})"
    loop_goal, rows_goal = Goal("ratio", "at least", 4), Goal("ratio", "at least", 0.35)
    yield compare(name, mine, rates["loop"], one.format(peers.APSW), loop_goal, sealed_upto=sealed)
    yield compare(name, mine, rates["rows"], many.format(peers.APSW), None)
    yield compare(name, mine, rates["stdlib loop"], one.format(peers.STDLIB), loop_goal)
    yield compare(name, mine, rates["stdlib rows"], many.format(peers.STDLIB), rows_goal)


def _rows(bare: peers.Bare) -> Turn:
    """The row rate of transactions with as many rows as we have writers."""
    return timed(lambda: bare.upsert_many([ours.next_bare_row() for _ in range(WRITERS)]), WRITERS)
