"""A worker that was paused past its lease writes nothing when it wakes; a server that is killed under executions loses none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Space
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer
from tests.faults import nursery
from tests.faults.working import SPACE, child, expected, journey, paused
from tests.servers import started
from tests.stopping import stop

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
EXECUTIONS = 1_000 if SOAK else 60
RESTARTS = 10 if SOAK else 1
DEADLINE_S = 900 if SOAK else 90
LEASE = "700ms"
SETTLE_S = 0.5
"""What a worker that wakes would write, it would write within this time."""
OURS = ("workflows/", "journal/", "signals/", "tallies/", "shared/", "queues/", "reserved/", "depths/")


class PausedWorker:
    """A worker in a process of its own, which stands still in the middle of a step until it is let go."""

    def __init__(self, url: str, token: str | None, folder: Path, *, broken: bool) -> None:
        self._folder = folder
        self._url = url
        environment = {"HOLDFAST_SLOW": "1"} | ({} if token is None else {"HOLDFAST_TOKEN": token})
        settings = {"url": url, "lease": LEASE, "broken": broken}
        self._process = nursery.start("tests.faults.working", settings, folder / "paused.log", **environment)

    async def pause(self) -> None:
        await self._seen("begun")
        stop(self._process.pid, self._url)

    async def wake(self) -> None:
        """Let it end its step, and try to write what came of it."""
        Path(self._folder, "go").touch()
        self._process.send_signal(signal.SIGCONT)
        await self._seen("woken")
        await asyncio.sleep(SETTLE_S)

    async def _seen(self, name: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not Path(self._folder, name).exists():
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"] if SOAK else ["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str | None]]:
    if request.param == "keeper":
        with KeeperServer.temporary() as keeper:
            yield keeper.url, keeper.admin
    elif request.param == "redis":
        yield f"{request.getfixturevalue('redis_server').url}?prefix=fencing{tmp_path.name}", None
    elif request.param == "postgres":
        yield f"{request.getfixturevalue('postgres_server').url}?schema=fencing_{os.getpid()}", None
    else:
        yield str(tmp_path / "team.db"), None


async def _taken_over(
    url: str, token: str | None, folder: Path, *, broken: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Pause a worker in a step, let another one take over, wake it; gives what was there before and after, and the log."""
    worker = PausedWorker(url, token, folder, broken=broken)
    try:
        async with holdfast.open(url, token=token, background=False) as store:
            space = store.space(SPACE, agent="boss")
            handle = await space.workflows.start(paused, str(folder), id="p")
            await worker.pause()
            async with space.workflows.worker([paused], lease=LEASE):
                assert await handle.result(DEADLINE_S) == "the other one"
                before = await _ours(space)
                await worker.wake()
                after = await _ours(space)
            assert await handle.result(0) == "the other one"
            assert await handle.state() == {"count": 13, "seen": [1, 2]}
            return before, after, [f"{event.event} {event.path}" for event in await handle.log()]
    finally:
        worker.close()


async def _ours(space: Space) -> dict[str, Any]:
    page = await space._scope.engine.scan(space.name, "", limit=10_000)
    return {entry.key: (entry.value, entry.version) for entry in page.entries if entry.key.startswith(OURS)}


ONCE = ["completed before#0", "completed slow#0", "completed after#0", "completed "]


async def test_a_worker_that_was_paused_past_its_lease_writes_nothing_when_it_wakes(
    place: tuple[str, str | None], tmp_path: Path
) -> None:
    before, after, log = await _taken_over(*place, tmp_path)
    assert after == before
    assert log == ONCE


async def test_a_commit_without_the_lease_in_its_conditions_would_be_found_out(tmp_path: Path) -> None:
    """The same with a worker that does not ask whether it still has its message."""
    try:
        before, after, log = await _taken_over(str(tmp_path / "team.db"), None, tmp_path, broken=True)
    except AssertionError:
        return  # the outcome was doubled
    assert after != before or log != ONCE


@pytest.fixture(params=["redis", "postgres", "keeper"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    kinds: dict[str, Any] = {"redis": RedisServer, "postgres": PostgresServer, "keeper": KeeperServer}
    with started(kinds[request.param].temporary()) as running:
        yield running


async def test_executions_outlive_the_death_of_the_stores_server_and_end_once(server: Any) -> None:
    token = getattr(server, "admin", None)
    url = server.url if token is not None else f"{server.url}?{'prefix' if 'redis' in server.url else 'schema'}=outlive"
    async with asyncio.timeout(DEADLINE_S), holdfast.open(url, token=token) as store:
        workflows = store.space(SPACE, agent="boss").workflows
        handles = await asyncio.gather(*(workflows.start(journey, n, id=f"j{n}") for n in range(EXECUTIONS)))
        await asyncio.gather(*(handle.signal("answer", f"yes {n}") for n, handle in enumerate(handles)))
        async with workflows.worker([journey, child], concurrency=EXECUTIONS, lease="2s"):
            for _ in range(RESTARTS):
                await asyncio.sleep(0.5)
                server.kill()
                await asyncio.to_thread(server.start)
            found = [await _result(handle) for handle in handles]
        assert found == [expected(n) for n in range(EXECUTIONS)]
        counts = await workflows.counts()
        assert {name: each["completed"] for name, each in counts.items()} == {
            "child": EXECUTIONS,
            "journey": EXECUTIONS,
        }
        assert {each.get("running", 0) + each["pending"] for each in counts.values()} == {0}
        for n, handle in enumerate(handles):
            state = await handle.state()
            assert (state["count"], sorted(state["seen"])) == (n + 10, sorted([n, 0, 1, 2, 3, 4]))


async def _result(handle: holdfast.ExecutionHandle) -> Any:
    """Its result, asked for again where the store could not be reached."""
    while True:
        try:
            return await handle.result(DEADLINE_S)
        except holdfast.Unavailable:
            await asyncio.sleep(0.1)
