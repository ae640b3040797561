"""Four ways for agents to work together: fan-out, fan-in, conditional routing, sequential stages.

python examples/orchestration_patterns.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import holdfast
from holdfast import Route, Stop, fan_in, fan_out, route, sequence

ORDER = {"symbol": "MSFT", "notional": 250_000}


async def trend(order: dict[str, Any]) -> dict[str, Any]:
    return {"action": "trade", "direction": "buy", "size": 120, "confidence": 0.8}


async def flows(order: dict[str, Any]) -> dict[str, Any]:
    return {"action": "trade", "direction": "buy", "size": 100, "confidence": 0.6}


def news(order: dict[str, Any]) -> dict[str, Any]:
    raise ConnectionError("the news feed is down")


async def main() -> None:
    # Fan-out: one payload to all at once; who fails, fails alone.
    outcomes = await fan_out({"trend": trend, "flows": flows, "news": news}, ORDER, timeout="5s")
    for agent, outcome in outcomes.items():
        print(f"fan-out {agent}:", outcome.value["action"] if outcome.ok else f"failed, {outcome.error}")

    # Fan-in: the same, merged into one decision as soon as two of three have answered.
    decision = await fan_in({"trend": trend, "flows": flows, "news": news}, ORDER, merge="majority", min_agents=2)
    print("fan-in:", decision["action"], decision["direction"], decision["size"])

    # Fan-in across processes is a correlation: signals are stored, and any orchestrator decides.
    async with holdfast.open("memory:") as store:
        desk = store.space("contoso", agent="orchestrator")
        correlation = await desk.correlation("order-1", expect=["trend", "flows"], pattern="fan_in")
        for agent, work in (("trend", trend), ("flows", flows)):
            found = await store.space("contoso", agent=agent).correlation("order-1")
            await found.signal({"analysis": await work(ORDER)})
        decided = await desk.orchestrator(merge="majority").decide("order-1")
        print("correlation:", decided.action, decided.direction, decided.size, await correlation.status())

    # Conditional: the first rule that matches says who does it.
    rules = [
        Route(lambda order: order["notional"] > 1_000_000, lambda order: "committee"),
        Route(lambda order: order["notional"] > 100_000, lambda order: "senior trader"),
    ]
    print("route:", await route(rules, ORDER, default=lambda order: "algorithm"))

    # Sequential: one stage after the other, and a stage may stop with a reason.
    stages = {
        "enrich": lambda order: {**order, "price": 412.5},
        "check": lambda order: order if order["notional"] < 200_000 else Stop("over the limit of the day", order),
        "execute": lambda order: {**order, "executed": True},
    }
    ran = await sequence(stages, ORDER)
    print("sequence:", " → ".join(ran.done), "| stopped:", ran.reason)
    assert ran.stopped_by == "check"


if __name__ == "__main__":
    asyncio.run(main())
