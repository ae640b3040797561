"""Redis, a Redis cluster and PostgreSQL: eight processes, servers killed with -9 under load, and connections that are cut.

Clients record what they were told; `judge` compares it with the feed and with what is there in the end. Nothing that was
acknowledged may be missing, nothing may be there twice, and whoever follows the feed sees each commit once, in order.

HOLDFAST_SOAK=1 makes the runs longer, not different.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from holdfast.engine import ChangeSet, Engine
from holdfast.errors import Unavailable
from holdfast.testing.history import Recorder, load
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.proxy import CUTS, Cut, Proxy
from holdfast.testing.servers.redis import RedisCluster, RedisServer
from holdfast.testing.workload import Clients
from tests.faults.driver import SPACE, Fleet, fleet, judge, opened, whole_feed
from tests.servers import started

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
WORKERS = 8
OPERATIONS = 300_000 if SOAK else 1_600
TIMEOUT_S = 3600 if SOAK else 240
CRASHES = 30 if SOAK else 2
CUTS_MIN = 6
PROGRESS_BYTES = 200_000 if SOAK else 60_000
"""Of recorded history between two crashes."""


class Server(Protocol):
    """What the tests need of a server, whichever it is."""

    @property
    def url(self) -> str: ...

    @property
    def port(self) -> int: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...


class OneOfCluster:
    """A cluster seen as a server: what is killed is the primary that has the tests' space."""

    def __init__(self, cluster: RedisCluster) -> None:
        self.cluster = cluster
        self.url = cluster.url

    @property
    def port(self) -> int:
        raise NotImplementedError("a cluster has many")

    def start(self) -> None:
        self._victim().start()

    def kill(self) -> None:
        self._victim().kill()

    def _victim(self) -> RedisServer:
        slot = int(self._running().command("CLUSTER", "KEYSLOT", "{" + SPACE + "}").removeprefix(":"))
        return self.cluster.primaries[slot // -(-16384 // len(self.cluster.primaries))]

    def _running(self) -> RedisServer:
        return next(server for server in self.cluster.primaries if server.running)


KINDS: dict[str, Callable[[ExitStack], Server]] = {
    "redis": lambda stack: stack.enter_context(started(RedisServer.temporary())),
    "cluster": lambda stack: OneOfCluster(stack.enter_context(started(RedisCluster.temporary()))),
    "postgres": lambda stack: stack.enter_context(started(PostgresServer.temporary())),
}


@pytest.fixture(params=list(KINDS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with ExitStack() as stack:
        yield KINDS[request.param](stack)


@pytest.fixture
def operations() -> int:
    """How many the eight processes do together."""
    return OPERATIONS


async def test_eight_processes_are_linearizable(server: Server, tmp_path: Path, operations: int) -> None:
    share = operations // WORKERS
    settings = {"workers": WORKERS, "clients": 4, "operations": share, "keys": 16, "timeout": TIMEOUT_S}
    with fleet(tmp_path, url=server.url, **settings) as running:
        await asyncio.to_thread(running.run, kill_every=0.5 if SOAK else 0.2, kills_max=None if SOAK else 5)
        outcomes = await judge(load(running.files()), running.url)
    assert outcomes["failed"] == 0
    assert sum(outcomes.values()) >= operations
    assert running.kills >= (10 if SOAK else 1)


async def test_a_server_killed_under_load_loses_nothing_and_watches_go_on(server: Server, tmp_path: Path) -> None:
    settings = {"workers": 4, "clients": 4, "operations": 10**9, "keys": 8, "timeout": TIMEOUT_S}
    rng = random.Random(1)
    engine = await opened(server.url)
    seen: list[ChangeSet] = []
    watching = asyncio.create_task(follow(engine, seen))
    with fleet(tmp_path, url=server.url, **settings) as running:
        for _ in range(CRASHES):
            await asyncio.wait_for(progress(running), TIMEOUT_S)
            server.kill()
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            server.start()
        await asyncio.wait_for(progress(running), TIMEOUT_S)
        running.stop()
        outcomes = await judge(load(running.files()), running.url)
    feed = await whole_feed(engine)
    await asyncio.wait_for(told_of(seen, feed[-1]), TIMEOUT_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.close()
    assert outcomes["ok"] > 500
    noticed = outcomes["unknown"] + outcomes["failed"]
    assert noticed > 0 or getattr(server, "heals", False), "nobody noticed that the server was killed"
    seen = [commit for commit in seen if commit.version <= feed[-1].version]  # the store goes on sealing meanwhile
    assert [commit.version for commit in seen] == [commit.version for commit in feed]
    assert seen == feed


async def progress(running: Fleet) -> None:
    """Return when the workers have been answered some hundred times more, and then at some moment."""
    before = sum(path.stat().st_size for path in running.files())
    while sum(path.stat().st_size for path in running.files()) < before + PROGRESS_BYTES:
        running.check()
        await asyncio.sleep(0.01)


async def told_of(seen: list[ChangeSet], commit: ChangeSet) -> None:
    while not seen or seen[-1].version < commit.version:
        await asyncio.sleep(0.01)


async def follow(engine: Engine, seen: list[ChangeSet]) -> None:
    """Every commit from the beginning on; when the store cannot be reached, from where it was."""
    while True:
        with contextlib.suppress(Unavailable):
            async for commit in engine.watch(SPACE, cursor=seen[-1].cursor if seen else "r0"):
                seen.append(commit)
        await asyncio.sleep(0.02)


@pytest.fixture(params=["redis", "postgres"])
def proxied(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Proxy]]:
    with ExitStack() as stack:
        server = KINDS[request.param](stack)
        yield server, stack.enter_context(Proxy.running(server.port))


@pytest.mark.parametrize("cut", CUTS)
async def test_a_connection_that_is_cut_leaves_no_doubt_that_is_not_told(
    proxied: tuple[Server, Proxy], tmp_path: Path, cut: Cut
) -> None:
    server, proxy = proxied
    rng = random.Random(cut)
    recorder = Recorder(tmp_path / "w.0.jsonl", time.monotonic_ns)
    engine = await opened(server.url.replace(str(server.port), str(proxy.port)))
    clients = Clients(engine, SPACE, recorder, "w", 0, [f"records/{number}" for number in range(6)])
    proxy.choose = lambda: cut if rng.random() < 0.02 else None
    async with asyncio.timeout(TIMEOUT_S):
        await clients.run(16, 20_000 if SOAK else 1_000)
        while proxy.cuts[cut] < CUTS_MIN:  # a busy machine sends more at once, and there is less to cut
            await clients.run(16, 200)
    proxy.choose = lambda: None
    await asyncio.sleep(0.3)  # what the proxy still holds back arrives now
    await engine.close()
    recorder.close()
    history = load([tmp_path / "w.0.jsonl"])
    outcomes = await judge(history, server.url)
    assert outcomes["ok"] > 700
    # A read that got no answer is unknown too, and of no consequence.
    in_doubt = [op for op in history if op.outcome == "unknown" and op.kind != "read"]
    assert not in_doubt, "every batch here has a request id: what happened could have been found out"
