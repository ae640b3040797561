"""How many durable sets of 256 bytes does a keeper take, beside etcd, Redis and PostgreSQL, and what CPU does one cost it?

With 1, 32 and 256 in flight, from one process of clients each (`keeper_clients.py`), everything of the keeper's on. On a
machine that is shared, the CPU per operation is the figure to look at: rates also tell how many threads a server has to
compete with for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from benchmarks.keeper_sides import LABELS, Sides
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns

IN_FLIGHT: Final = (1, 32, 256)
GOALS: Final = {"etcd": 3.0, "redis": 1.0, "postgres": 1.0}
"""At the largest number in flight."""
P99: Final = Goal("ours", "at most", 10.0)
CPU: Final = Goal("ours", "at most", 15.0)


async def run(plan: Plan) -> AsyncIterator[Line]:
    async with Sides(plan.folder, "set") as sides:
        turns = {f"{name} {count}": side.turn(count) for count in IN_FLIGHT for name, side in sides.sides.items()}
        rates = await take_turns(plan, turns)
    for count in IN_FLIGHT:
        for name in sides.present:
            goal = Goal("ratio", "at least", GOALS[name]) if count == max(IN_FLIGHT) else None
            pair = rates[f"ours {count}"], rates[f"{name} {count}"]
            yield compare(f"keeper_set_{count}", *pair, LABELS[name], goal, **sides.told(name, count))
    spent = sides.sides["ours"].spent[32, False]
    yield Line("keeper_set_32_p99", spent.quantile_ms(0.99), "ms", goal=P99, runs=len(spent.took_us))
    spent = sides.sides["ours"].spent[256, False]
    yield Line("keeper_set_256_cpu", spent.server_us, "us", goal=CPU, runs=len(spent.took_us), more=spent.told())
