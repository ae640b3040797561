"""What the tests of tasks share: managers without processes, which do what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from holdfast import ManualClock, Message, Space, TaskOutcome, TaskSpec
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_launch import Launch
from holdfast.layers.task_ledger import TaskLedger
from holdfast.layers.task_states import TaskState
from holdfast.layers.task_submission import SPAWN_REQUESTS

T = TypeVar("T")
DEADLINE_S = 20
ADD = TaskSpec(function="jobs:add", args=(1, 2))
TRUE = TaskSpec(command=("true",))
DONE = TaskOutcome("completed", return_code=0)
BROKEN = TaskOutcome("failed", return_code=1, reason="it broke")


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


async def request(space: Space, wait: Any = 0) -> Message:
    """The next request to spawn a task, reserved."""
    return await soon(space.queue(SPAWN_REQUESTS).take(wait=wait))


async def request_in_time(space: Space, clock: ManualClock) -> Message:
    """The next request, while time passes."""
    taking = asyncio.ensure_future(space.queue(SPAWN_REQUESTS).take(wait="1h"))
    for _ in range(DEADLINE_S * 50):
        if taking.done():
            break
        await asyncio.sleep(0.02)
        clock.advance("1s")
    return await soon(taking)


async def taken(space: Space, ledger: TaskLedger, wait: Any = 0) -> Launch:
    """The next task, in the manager's hands."""
    launch = await ledger.spawning(await request(space, wait))
    assert launch is not None
    return launch


async def begun(space: Space, ledger: TaskLedger, wait: Any = 0) -> Launch:
    """The next task, running."""
    launch = await taken(space, ledger, wait)
    await ledger.running(launch, pid=4711)
    return launch


async def done(
    space: Space, ledger: TaskLedger, outcome: TaskOutcome = DONE, *, output: bytes = b"", wait: Any = 0
) -> TaskState:
    """The next task, run to its end."""
    launch = await begun(space, ledger, wait)
    if output:
        await ledger.output(launch, [("stdout", output)])
    return await ledger.finished(launch, outcome)


@asynccontextmanager
async def mortal(space: Space, **options: Any) -> AsyncIterator[tuple[TaskLedger, Space, Leases]]:
    """A manager, and the space as it sees it, that can be made to die as a process does: when `Leases` is closed."""
    leases = Leases(space._scope.clock)
    view = Space(space._scope, space._blob_folder, Coordination(leases))
    async with view.tasks.ledger(**{"capacity": 4, "host": "h", **options}) as ledger:
        try:
            yield ledger, view, leases
        finally:
            await leases.close()


async def die(leases: Leases, clock: ManualClock) -> None:
    """No heartbeats any more, and so long that every lease is over."""
    await leases.close()
    clock.advance("31s")


async def log_of(handle: TaskHandle) -> list[str]:
    return [event.event if event.event != "state_update" else str(event.status) async for event in handle.events()]
