"""One process of the crash tests, started from the nursery.

It opens the shared store, repeats what its former lives left without an answer, and then does its share of random
operations. It records everything in `<folder>/<name>.<life>.jsonl` and may be killed at any instant.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast.engine import Engine
from holdfast.errors import Unavailable
from holdfast.testing.history import Recorder, events
from holdfast.testing.workload import Clients
from tests.faults.driver import opened


async def main(
    url: str, folder: str, name: str, life: int, space: str, keys: list[str], clients: int, operations: int
) -> None:
    former = [event for past in range(life) for event in events(Path(folder, f"{name}.{past}.jsonl"))]
    engine = await soon_opened(url)
    recorder = Recorder(Path(folder, f"{name}.{life}.jsonl"), time.monotonic_ns)
    fleet = Clients(engine, space, recorder, name, life, keys)
    await fleet.resolve(former)
    await fleet.run(clients, operations)
    await engine.close()
    recorder.close()


async def soon_opened(url: str) -> Engine:
    """The store, as soon as its server is there."""
    while True:
        try:
            return await opened(url)
        except Unavailable:
            await asyncio.sleep(0.02)
