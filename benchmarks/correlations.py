"""What do 5,000 correlations a minute cost, with five agents each, and how soon after the last signal is one decided?

One process on one SQLite file has it all: what makes the correlations, the agents that find them and signal, the orchestrator
that decides and publishes, and the store's background work. Correlations come at an even pace. The time of a decision is from
the call of the last `signal` to `on_decision`, all commits and their fsyncs included.

CPU is that of the process, less what the benchmark itself costs: its timer, and the tasks and events that stand for agents. That is
measured before and after, with no store open: the same tasks come at the same pace and call nothing (`alone`). `whole` is with it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from typing import Final

import holdfast
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan

PER_MINUTE: Final = 5_000
AGENTS: Final = ("momentum", "risk", "news", "flows", "macro")
WARM_S: Final = 1.0
"""Not counted."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    alone = [(await Pace().go_on_for(plan.idle_s / 4))[1]]
    async with holdfast.open(str(plan.folder / "desk.db")) as store:
        desk = Desk(store)
        running = asyncio.ensure_future(desk.orchestrator.run())
        await desk.go_on_for(WARM_S)
        desk.latencies_ms.clear()
        count, whole = await desk.go_on_for(plan.idle_s)
        await desk.orchestrator.stop()
        await running
    alone.append((await Pace().go_on_for(plan.idle_s / 4))[1])
    latencies = sorted(desk.latencies_ms)
    assert len(latencies) == count, "not every correlation was decided"
    cpu = whole - statistics.mean(alone)
    yield Line(
        "correlations_cpu",
        cpu,
        "% of a core",
        goal=Goal("ours", "at most", 30),
        runs=count,
        more={
            "per_minute": PER_MINUTE,
            "ms_per_correlation": cpu / 100 * 60_000 / PER_MINUTE,
            "whole": whole,
            "alone": statistics.mean(alone),
        },
    )
    yield Line(
        "correlations_p95",
        latencies[int(len(latencies) * 0.95)],
        "ms",
        goal=Goal("ours", "at most", 50),
        runs=count,
        more={"p50": statistics.median(latencies), "max": latencies[-1]},
    )


class Pace:
    """Tasks at an even pace, five agents in each, that call nothing."""

    async def go_on_for(self, seconds: float) -> tuple[int, float]:
        """So many as the pace gives in this time; their number when all are done, and the share of a core they took."""
        began, used, tasks = time.monotonic(), time.process_time(), []
        count = max(int(seconds * PER_MINUTE / 60), 1)
        for number in range(count):
            await asyncio.sleep(max(began + number * 60 / PER_MINUTE - time.monotonic(), 0))
            tasks.append(asyncio.ensure_future(self.correlate()))
        await asyncio.gather(*tasks)
        return count, 100 * (time.process_time() - used) / (time.monotonic() - began)

    async def correlate(self) -> None:
        decided = asyncio.Event()
        await asyncio.gather(*(self._nothing() for _ in AGENTS))
        asyncio.get_running_loop().call_soon(decided.set)
        await decided.wait()

    async def _nothing(self) -> None:
        pass


class Desk(Pace):
    """Agents, an orchestrator, and correlations at an even pace."""

    def __init__(self, store: holdfast.Store) -> None:
        self.latencies_ms: list[float] = []
        self._maker = store.space("bench", agent="orchestrator")
        self._agents = [store.space("bench", agent=agent) for agent in AGENTS]
        self._numbers = iter(range(10**9))
        self._last: dict[str, float] = {}
        self._decided: dict[str, asyncio.Event] = {}
        self.orchestrator = self._maker.orchestrator(merge="momentum_risk_fusion", on_decision=self._note)

    def _note(self, decision: holdfast.Decision) -> None:
        self.latencies_ms.append((time.monotonic() - self._last.pop(decision.corr_id)) * 1000)
        self._decided.pop(decision.corr_id).set()

    async def correlate(self) -> None:
        corr_id = f"c-{next(self._numbers)}"
        decided = self._decided[corr_id] = asyncio.Event()
        await self._maker.correlation(corr_id, expect=AGENTS, timeout="5m")
        await asyncio.gather(*(self._signal(space, corr_id) for space in self._agents))
        await decided.wait()

    async def _signal(self, space: holdfast.Space, corr_id: str) -> None:
        correlation = await space.correlation(corr_id)
        self._last[corr_id] = time.monotonic()
        await correlation.signal({"agent_version": "1.0.0", "analysis": ANALYSES[space.agent]})


_SIZES: Final = {"recommended_size": 10_000}
ANALYSES: Final = {
    "momentum": {"trend_direction": "bullish", "momentum_strength": 0.75, "confidence": 0.82},
    "risk": {"risk_level": "medium", "overall_score": 0.65, "position_sizing": _SIZES},
    "news": {"sentiment": 0.4},
    "flows": {"net": 120_000},
    "macro": {"regime": "risk-on"},
}
