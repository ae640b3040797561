"""How many times a second is a durable lock taken and given back, beside the best recipes of etcd, Redis and PostgreSQL?

By one task; by 32, each on a name of its own; and by 32 on one name, where it is about handing over. Ours is `async with
space.lock(name)`: first come first served, fenced, in the feed and the audit. The recipes: etcd's lock service with a lease
for each task, made once; redis-py's Lock, which asks again every millisecond; PostgreSQL's advisory lock with a row that
says who has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from benchmarks.keeper_sides import LABELS, Sides
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns

CASES: Final = {"1": (1, False), "32": (32, False), "32_one_name": (32, True)}
GOAL: Final = Goal("ratio", "at least", 1.0)
"""Beside the fastest of the recipes, so beside each of them."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with Sides(plan.folder, "lock") as sides:
        turns = {
            f"{name} {case}": side.turn(count, one_name=one_name)
            for case, (count, one_name) in CASES.items()
            for name, side in sides.sides.items()
        }
        rates = await take_turns(plan, turns)
    for case, (count, one_name) in CASES.items():
        for name in sides.present:
            pair = rates[f"ours {case}"], rates[f"{name} {case}"]
            more = sides.told(name, count, one_name=one_name)
            yield compare(f"keeper_lock_{case}", *pair, LABELS[name], GOAL, "cycles/s", **more)
