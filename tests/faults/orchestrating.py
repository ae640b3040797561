"""An orchestrator that may be killed at any instant. Started from the nursery.

It notes each call of `on_decision` in a file of its own. A `broken` one claims and decides without comparing, and does not wait
for those before it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import holdfast
from holdfast.engine import Batch, Condition, Operation, VersionIs
from holdfast.layers import agenda
from holdfast.layers.scope import Scope

SPACE = "desk"


async def main(url: str, folder: str, name: str, lease: str, broken: bool) -> None:
    if broken:
        claim_without_comparing()
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    notes = os.open(Path(folder, f"{name}.published"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with holdfast.open(url, background=False, token=token) as store:

        async def publish(decision: holdfast.Decision) -> None:
            await asyncio.sleep(0.001)
            os.write(notes, f"{decision.corr_id} {decision.id}\n".encode())

        space = store.space(SPACE, agent="orchestrator", instance=name)
        print("running", flush=True)
        await space.orchestrator(merge="majority", on_decision=publish, lease=lease).run()


def claim_without_comparing() -> None:
    agenda.STEP_MS = 0  # type: ignore[misc]
    batch = Scope.batch

    def blind(
        self: Scope,
        operations: tuple[Operation, ...],
        conditions: tuple[Condition, ...] = (),
        request_id: str | None = None,
    ) -> Batch:
        seen = tuple(condition for condition in conditions if not isinstance(condition, VersionIs))
        return batch(self, operations, seen, request_id)

    Scope.batch = blind  # type: ignore[method-assign]
