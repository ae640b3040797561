"""How an execution comes to its worker: handed over by its start where the worker is at hand, left to others where there is no room."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from holdfast import Context, ManualClock, Space, workflow
from holdfast.engine import ChangeSet, cursor_at
from tests.layers.test_workflows import Hosts, hosts, soon, three_steps

__all__ = ["hosts"]


async def commits_after(space: Space, revision: int) -> list[ChangeSet]:
    upto, found = (await space.info()).revision, list[ChangeSet]()
    async with aclosing(
        space._scope.engine.watch(space.name, "workflows/", "reserved/", cursor=cursor_at(revision))
    ) as commits:  # type: ignore[type-var]
        async for commit in commits:
            found.append(commit)
            if commit.version >= upto:
                return found
    return found


async def test_a_start_hands_its_execution_over_to_a_worker_at_hand_in_the_same_commit(boss: Space) -> None:
    async with boss.workflows.worker([three_steps]):
        await soon((await boss.workflows.start(three_steps, 1)).result())
        await asyncio.sleep(0.05)  # the worker has seen that there is nothing more, and sleeps
        before = (await boss.info()).revision
        assert await soon((await boss.workflows.start(three_steps, 1, id="x")).result()) == 4
        commits = await commits_after(boss, before)
    first = [change.key for change in commits[0].changes]
    assert "workflows/meta/x" in first
    assert any(key.startswith("reserved/workflows.three_steps/") for key in first)
    assert len(commits) <= 5, "start, three steps with the end in the last; that it runs, if it took long"


async def test_what_cannot_be_handed_over_is_put_in_line(boss: Space, clock: ManualClock) -> None:
    async with boss.workflows.worker([three_steps]):
        await soon((await boss.workflows.start(three_steps, 1)).result())
        await asyncio.sleep(0.05)
        clock.advance("1h")  # the lease under which it would be handed over has ended, and nobody knows yet
        handle = await boss.workflows.start(three_steps, 5)
        assert await soon(handle.result()) == 8


async def test_a_worker_that_has_no_room_leaves_what_waits_to_others(boss: Space, hosts: Hosts) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def stays() -> None:
        entered.set()
        await leave.wait()

    @workflow(name="busy")
    async def busy(ctx: Context, stay: bool) -> str:
        if stay:
            await ctx.step("stay", stays)
        return "done"

    await hosts.start(busy, concurrency=1)
    first = await boss.workflows.start(busy, True)
    await soon(entered.wait())
    second = await boss.workflows.start(busy, False)
    await hosts.start(busy, concurrency=1)
    assert await soon(second.result()) == "done"
    leave.set()
    assert await soon(first.result()) == "done"
