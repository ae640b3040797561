"""What the tests of correlations share: a desk of agents, and signals as they send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from holdfast import Correlation, Orchestrator, Space, Store
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases

T = TypeVar("T")
DEADLINE_S = 90

MOMENTUM: dict[str, Any] = {
    "agent_version": "1.2.1",
    "analysis": {"trend_direction": "bullish", "momentum_strength": 0.75, "confidence": 0.82},
}
RISK: dict[str, Any] = {
    "agent_version": "2.0.0",
    "analysis": {"risk_level": "medium", "overall_score": 0.65, "position_sizing": {"recommended_size": 10_000}},
}
BOTH = ["momentum", "risk"]


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


def seen_by(store: Store, agent: str) -> Space:
    return store.space("contoso", agent=agent)


async def signal(store: Store, corr_id: str, agent: str, fields: dict[str, Any]) -> str:
    """What becomes of an agent's signal."""
    correlation: Correlation = await seen_by(store, agent).correlation(corr_id)
    return (await correlation.signal(fields)).outcome


@asynccontextmanager
async def running(*orchestrators: Orchestrator) -> AsyncIterator[None]:
    """Orchestrators at work, and stopped in the end."""
    tasks = [asyncio.ensure_future(each.run()) for each in orchestrators]
    try:
        yield
        for each in orchestrators:
            await soon(each.stop())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def mortal(space: Space, **options: Any) -> AsyncIterator[tuple[Orchestrator, Leases]]:
    """An orchestrator at work that can be made to die as a process does: its lease is not kept alive when `Leases` is closed."""
    leases = Leases(space._scope.clock)
    view = Space(space._scope, space._blob_folder, Coordination(leases))
    orchestrator = view.orchestrator(**options)
    task = asyncio.ensure_future(orchestrator.run())
    try:
        yield orchestrator, leases
    finally:
        task.cancel()
        await asyncio.wait([task])
        await leases.close()
