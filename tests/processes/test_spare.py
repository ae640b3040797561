"""A warden that is forked ahead: used once, by an order that it fits, and not if it was killed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from holdfast.processes import Launcher
from tests.processes.conftest import MakeOrder, below, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ECHO = "tests.processes.targets:echo"


@pytest_asyncio.fixture(loop_scope="module")
async def ahead() -> AsyncIterator[Launcher]:
    """A launcher with a warden ahead."""
    async with Launcher(spare=True) as running:
        assert await until(lambda: len(wardens(running)) == 1)
        yield running


def wardens(launcher: Launcher) -> list[psutil.Process]:
    assert launcher.zygote_pid is not None
    return below(launcher.zygote_pid)


async def test_a_launch_uses_the_warden_ahead_and_another_is_forked(ahead: Launcher, order: MakeOrder) -> None:
    for number in range(3):
        assert await until(lambda: len(wardens(ahead)) == 1 and ahead._spare is not None)
        [waiting] = wardens(ahead)
        child = await ahead.start(order(function="tests.processes.targets:surroundings"))
        found = (await child.wait()).result
        assert found["ppid"] == waiting.pid, number


async def test_two_launches_at_once_are_two_trees(ahead: Launcher, order: MakeOrder) -> None:
    children = [await ahead.start(order(function=ECHO, args=[number])) for number in range(4)]
    assert [(await child.wait()).result["args"] for child in children] == [[number] for number in range(4)]


async def test_a_warden_ahead_that_was_killed_is_not_used(ahead: Launcher, order: MakeOrder) -> None:
    assert await until(lambda: ahead._spare is not None)
    for warden in wardens(ahead):
        warden.kill()
    assert await until(lambda: not wardens(ahead))
    child = await ahead.start(order(function=ECHO, args=[1]))
    assert (await child.wait()).result["args"] == [1]


async def test_an_interactive_order_leaves_the_warden_ahead_where_it_is(ahead: Launcher, order: MakeOrder) -> None:
    assert await until(lambda: ahead._spare is not None)
    before = ahead._spare
    child = await ahead.start(order("cat", interactive=True))
    await child.write(b"x")
    child.close_stdin()
    assert [data async for _, data in child.output()] == [b"x"]
    await child.wait()
    assert ahead._spare is before


async def test_the_warden_ahead_ends_with_its_launcher(order: MakeOrder) -> None:
    launcher = Launcher(spare=True)
    await launcher.open()
    assert await until(lambda: len(wardens(launcher)) == 1)
    [waiting] = wardens(launcher)
    await launcher.close()
    assert await until(lambda: not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE)
