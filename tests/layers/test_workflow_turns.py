"""Signals of one name, and several branches that wait for them: who began to wait first gets the first, whoever runs the code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Context, ExecutionHandle, ManualClock, Space, workflow
from holdfast.engine import Engine, Page
from holdfast.layers.workflows.turns import Turns
from holdfast.middleware.wrapper import Wrapper
from tests.layers.hosting import Hosts, soon, until


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


async def after(ctx: Context, hours: int) -> int:
    if hours:
        await ctx.sleep(f"{hours}h")
    answer: int = await ctx.wait_for("go")
    return answer


@workflow
async def in_line(ctx: Context, hours: list[int]) -> list[int]:
    return await ctx.gather(*(after(ctx, each) for each in hours))


async def fails_after_an_hour(ctx: Context) -> None:
    await ctx.sleep("1h")
    raise ValueError("no")


@workflow
async def left_behind(ctx: Context) -> int:
    with contextlib.suppress(ValueError):
        await ctx.gather(fails_after_an_hour(ctx), after(ctx, 0))
    return await after(ctx, 0)


async def waiting(handle: ExecutionHandle, kinds: list[str]) -> None:
    """Return when it was put aside to wait for these."""

    async def waits() -> bool:
        return sorted(wait["kind"] for wait in (await handle.status()).waits) == kinds

    await until(waits)


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("hours", [[1, 0], [2, 1, 0], [0, 2, 1]])
async def test_who_waited_first_gets_the_first_signal(
    boss: Space, hosts: Hosts, clock: ManualClock, hours: list[int], served: bool
) -> None:
    worker = await hosts.start(in_line)
    handle = await boss.workflows.start(in_line, hours)
    for waits in range(1, len(hours)):
        await waiting(handle, ["signal"] * waits + ["sleep"] * (len(hours) - waits))
        clock.advance("1h")
    await waiting(handle, ["signal"] * len(hours))
    if not served:
        await worker.stop()
    for number in range(len(hours)):
        await handle.signal("go", number)
    if not served:
        await hosts.start(in_line)
    assert await soon(handle.result()) == hours


async def test_a_wait_whose_branch_is_gone_holds_up_nobody(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(left_behind)
    handle = await boss.workflows.start(left_behind)
    await waiting(handle, ["signal", "sleep"])
    clock.advance("1h")
    await waiting(handle, ["signal"])
    await handle.signal("go", 1)
    assert await soon(handle.result()) == 1


class Gates:
    """Of one test: what its steps wait for, and tell."""

    held: asyncio.Event
    entered: asyncio.Event
    busy: asyncio.Event


@pytest.fixture(autouse=True)
async def gates() -> type[Gates]:
    Gates.held, Gates.entered, Gates.busy = asyncio.Event(), asyncio.Event(), asyncio.Event()
    return Gates


async def holds() -> None:
    Gates.entered.set()
    await Gates.held.wait()


async def is_busy() -> None:
    await Gates.busy.wait()


async def fails_when_told(ctx: Context) -> None:
    await ctx.step("told", holds)
    raise ValueError("no")


async def notes(ctx: Context, got: list[int]) -> None:
    got.append(await after(ctx, 0))
    Gates.entered.set()


@workflow
async def left_behind_and_busy(ctx: Context) -> list[int]:
    with contextlib.suppress(ValueError):
        await ctx.gather(fails_when_told(ctx), after(ctx, 0))
    got: list[int] = []
    await ctx.gather(notes(ctx, got), ctx.step("busy", is_busy))
    return got


async def test_a_wait_whose_branch_is_gone_does_not_hold_up_others_while_something_goes_on(
    boss: Space, hosts: Hosts
) -> None:
    worker = await hosts.start(left_behind_and_busy)
    handle = await boss.workflows.start(left_behind_and_busy)
    await soon(Gates.entered.wait())
    Gates.held.set()
    await until(lambda: _is_busy(handle))
    Gates.entered.clear()
    await worker.stop()
    await hosts.start(left_behind_and_busy)
    await handle.signal("go", 1)
    await soon(Gates.entered.wait())  # although the step is still busy
    Gates.busy.set()
    assert await soon(handle.result()) == [1]


async def _is_busy(handle: ExecutionHandle) -> bool:
    """It waits behind the gather that failed."""
    return "gather#1/0/wait:go#0" in await handle.steps()


async def raises(ctx: Context) -> None:
    raise ValueError(await after(ctx, 0))


async def both(ctx: Context) -> list[int]:
    try:
        await ctx.gather(raises(ctx), after(ctx, 0))
    except ValueError as exc:
        return [exc.args[0], await after(ctx, 0)]
    return []


@workflow
async def cancels_one(ctx: Context) -> list[int]:
    found: list[list[int]] = await ctx.gather(both(ctx), ctx.step("busy", holds))
    return found[0]


async def test_a_signal_for_a_branch_that_is_cancelled_in_the_same_moment_is_somebody_else_s(
    boss: Space, hosts: Hosts
) -> None:
    """Both signals are found at once: the first lets a branch fail, which cancels the other when it has just got the second."""
    engine = Holding(boss._scope.engine)
    view = Space(replace(boss._scope, engine=engine), boss._blob_folder, boss._coordination)
    async with view.workflows.worker([cancels_one]):
        handle = await boss.workflows.start(cancels_one)
        await soon(Gates.entered.wait())
        await until(lambda: _both_wait(handle))
        engine.open.clear()  # what comes is not read before both have
        for number in (1, 2):
            await handle.signal("go", number)
        engine.open.set()
        Gates.held.set()
        assert await soon(handle.result()) == [1, 2]


async def _both_wait(handle: ExecutionHandle) -> bool:
    return {f"gather#0/0/gather#0/{branch}/wait:go#0" for branch in (0, 1)} <= (await handle.steps()).keys()


class Holding(Wrapper):
    """An engine whose feed can be held up."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.open = asyncio.Event()
        self.open.set()

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        if prefix.startswith("signals/"):
            await self.open.wait()
        return await super().scan(space, prefix, **options)


async def test_without_turns_the_first_branch_is_served_first(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that must be caught."""
    monkeypatch.setattr(Turns, "before", lambda *_: 0)
    await hosts.start(in_line)
    handle = await boss.workflows.start(in_line, [1, 0])
    await waiting(handle, ["signal", "sleep"])
    clock.advance("1h")
    await waiting(handle, ["signal", "signal"])
    for number in range(2):
        await handle.signal("go", number)
    assert await soon(handle.result()) == [0, 1]
