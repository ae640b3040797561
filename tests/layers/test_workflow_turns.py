"""Signals of one name, and several branches that wait for them: who began to wait first gets the first, whoever runs the code."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast import Context, ExecutionHandle, ManualClock, Space, workflow
from holdfast.layers.workflows.turns import Turns
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
