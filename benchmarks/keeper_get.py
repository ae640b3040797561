"""How many linearizable gets of 256 bytes does a keeper answer, beside etcd's, and beside Redis and PostgreSQL?

etcd's are ranges without `serializable`. A get of the keeper shows nothing that is not on the disk; one server answers alone,
so the others' gets are linearizable as well, but Redis may show what is not on the disk yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from benchmarks.keeper_sides import LABELS, Sides
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns

IN_FLIGHT: Final = (1, 32, 256)
GOAL: Final = Goal("ratio", "at least", 3.0)
"""For etcd, with many in flight."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with Sides(plan.folder, "get") as sides:
        turns = {f"{name} {count}": side.turn(count) for count in IN_FLIGHT for name, side in sides.sides.items()}
        rates = await take_turns(plan, turns)
    for count in IN_FLIGHT:
        for name in sides.present:
            goal = GOAL if name == "etcd" and count > 1 else None
            pair = rates[f"ours {count}"], rates[f"{name} {count}"]
            more = sides.told(name, count)
            yield compare(f"keeper_get_{count}", *pair, LABELS[name], goal, "gets/s", **more)
