"""A trading desk: two agents signal, two orchestrators run, one decides, the decision is published once.

    python examples/correlation_lifecycle.py [URL]

Shows the whole life of a correlation: made with what it expects, signals in any order and twice, the context that agents read, the
fused decision, a late signal that revives nothing, and one that nobody answers in time.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import holdfast

MOMENTUM: dict[str, Any] = {
    "agent_version": "1.2.1",
    "analysis": {"trend_direction": "bullish", "momentum_strength": 0.75, "confidence": 0.82},
}
RISK: dict[str, Any] = {
    "agent_version": "2.0.0",
    "analysis": {"risk_level": "medium", "overall_score": 0.65, "position_sizing": {"recommended_size": 10_000}},
}


async def main(url: str = "memory:") -> None:
    async with holdfast.open(url) as store:
        desk = store.space("contoso", agent="orchestrator")
        momentum, risk = store.space("contoso", agent="momentum"), store.space("contoso", agent="risk")
        published: list[holdfast.Decision] = []

        # Any number of orchestrators; each correlation is decided by one of them.
        orchestrators = [
            desk.orchestrator(merge="momentum_risk_fusion", on_decision=published.append) for _ in range(2)
        ]
        running = [asyncio.ensure_future(orchestrator.run()) for orchestrator in orchestrators]

        # 1. What is expected, and for how long. 2. What agents may know.
        correlation = await desk.correlation("example_correlation_123", expect=["momentum", "risk"], timeout="5m")
        await correlation.context.publish({"market_regime": "risk-on", "recent_decisions": []})

        # 3. Agents find it, read the context and each other's signals, and send their own; one of them twice.
        found = await momentum.correlation("example_correlation_123", wait="5s")
        print("regime:", (await found.context.read())["market_regime"])
        print("momentum:", (await found.signal(MOMENTUM)).outcome)
        print("momentum again:", (await found.signal(MOMENTUM)).outcome)
        theirs = await risk.correlation("example_correlation_123")
        print("risk sees:", list(await theirs.signals()))
        print("risk:", (await theirs.signal(RISK)).outcome)

        # 4. The decision, as soon as it is made.
        decision = await correlation.decision(wait="30s")
        assert decision is not None
        print("decision:", decision.action, decision.direction, decision.size, decision.confidence)
        assert (decision.action, decision.direction, decision.size, decision.confidence) == (
            "trade",
            "buy",
            8750,
            0.632,
        )
        print("audit:", decision.audit.input_signals, "by", decision.audit.merge)

        # 5. What comes too late is kept beside it, and changes nothing.
        print("risk, revised:", (await theirs.signal({"analysis": {"risk_level": "blocked"}})).outcome)
        view = await correlation.view()
        print("status:", view.status, "late:", list(view.late))

        # 6. Nobody answers: a decision too.
        silent = await desk.correlation("silence", expect=["momentum", "risk"], timeout="200ms")
        timeout = await silent.decision(wait="30s")
        assert timeout is not None
        print("silence:", timeout.details["reason"], timeout.details["missing_signals"])

        for orchestrator in orchestrators:
            await orchestrator.stop()
        await asyncio.gather(*running)
        assert sorted(each.corr_id for each in published) == ["example_correlation_123", "silence"]
        print("published:", len(published), "decisions, each once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
