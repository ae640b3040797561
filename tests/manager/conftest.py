"""A store with a manager of its own, and the proof afterwards that the machine is clean."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio

import holdfast
from holdfast import Manager, ManagerInfo, ManagerOptions, Space, Store
from holdfast.manager.place import store_id
from tests.processes.conftest import living

SPACE = "desk"


class Served(NamedTuple):
    """A space and its manager."""

    url: str
    store: Store
    space: Space
    info: ManagerInfo

    @property
    def marker(self) -> str:
        return store_id(self.url, self.space.name)


@asynccontextmanager
async def serving(url: str, space: str = SPACE, **options: Any) -> AsyncIterator[Served]:
    """As long as this lasts; afterwards neither the manager nor anything it started is there."""
    options.setdefault("idle", 60)
    async with holdfast.open(url) as store:
        view = store.space(space, agent="tester")
        info = await holdfast.ensure_manager(view, **options)
        served = Served(url, store, view, info)
        try:
            yield served
        finally:
            for each in await view.tasks.managers():
                end(each.pid)
            assert await until(lambda: not living(served.marker)), living(served.marker)


@asynccontextmanager
async def inside(store: Store, **options: Any) -> AsyncIterator[Space]:
    """A manager that is part of this program, as long as this lasts."""
    manager = Manager(store, SPACE, ManagerOptions(**{"concurrency": 2, "grace": "50ms", **options}))
    task = asyncio.create_task(manager.run())
    try:
        yield store.space(SPACE, agent="tester")
    finally:
        manager.stop("kill")
        await asyncio.wait_for(task, 20)


def end(pid: int) -> None:
    """Kill a manager, whatever state it is in; its zygote and wardens go with it."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if "holdfast" in " ".join(psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One manager for the tests of a module."""
    async with serving(str(tmp_path_factory.mktemp("manager") / "team.db"), concurrency=8) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The file of a store that is not there yet."""
    return str(tmp_path / "team.db")


async def until(holds: Callable[[], Any], seconds: float = 15.0) -> bool:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def running(handle: holdfast.TaskHandle) -> holdfast.TaskState:
    """Its state, as soon as it runs."""
    deadline = time.monotonic() + 15
    while (state := await handle.state()).status in ("created", "spawning"):
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.01)
    return state
