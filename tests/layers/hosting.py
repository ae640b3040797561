"""Workers for the tests of workflows, as if each had a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast import ExecutionHandle, Space, Worker
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases

T = TypeVar("T")
DEADLINE_S = 90


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():
            await asyncio.sleep(0.001)


async def waits_for(handle: ExecutionHandle, kind: str) -> None:
    """Return when it was put aside to wait for this."""

    async def waits() -> bool:
        return [wait["kind"] for wait in (await handle.status()).waits] == [kind]

    await until(waits)


class Hosts:
    """Workers that have nothing in common but the store, as if each had a process of its own."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._made: list[tuple[Worker, Coordination]] = []

    async def start(self, *workflows: Any, **options: Any) -> Worker:
        scope = self._space._scope
        coordination = Coordination(Leases(scope.clock))
        made = Space(replace(scope), self._space._blob_folder, coordination).workflows.worker(workflows, **options)
        self._made.append((made, coordination))
        return await made.__aenter__()

    async def kill(self, worker: Worker) -> None:
        """Nothing is said, nothing is given back; its leases are kept alive no longer."""
        coordination = next(other for made, other in self._made if made is worker)
        self._made.remove((worker, coordination))
        worker.abandon()
        for part in coordination._shared.values():
            for task in (part._task, getattr(part, "_watch", None)):
                if task is not None:
                    task.cancel()
        await coordination.leases.close()
        await asyncio.sleep(0)

    async def close(self) -> None:
        for worker, coordination in self._made:
            await worker.stop()
            await coordination.close()
