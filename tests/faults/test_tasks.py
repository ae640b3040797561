"""Managers, wardens, zygotes and the store's server, killed at random: no task is lost or stuck, and the machine is clean.

Three managers, as three hosts, run short tasks of one store. Every task ends completed, once, whatever is killed; what a task does
to the store carries its idempotency key, and happens once, however often the task was begun. Afterwards nothing is left: no
process, no request, no reservation. HOLDFAST_SOAK=1 makes the runs longer, not different.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil
import pytest

import holdfast
from holdfast import Space, TaskHandle, TaskRetry, TaskSpec
from holdfast.layers.task_states import replay
from holdfast.manager.place import store_id
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer
from tests.faults.driver import ROOT
from tests.processes.conftest import living
from tests.servers import started
from tests.soak import SEED, SOAK

TASKS = 2_000 if SOAK else 60
EFFECTS = 400 if SOAK else 12
"""Of them: tasks that open the store and do something in it."""
KILLS = 150 if SOAK else 7
KILL_S = 0.5 if SOAK else 0.2
HOSTS = 3
LEASE = "1s"
DEADLINE_S = 1800 if SOAK else 90
SPACE = "desk"
RETRY = TaskRetry(attempts=100, backoff="10ms", factor=1)


class Server(Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Target(NamedTuple):
    """A store, and the server that is killed, if it has one."""

    url: str
    server: Server | None
    token: str | None = None
    engine: str = "sqlite"


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with ExitStack() as stack:
        if request.param == "keeper":
            keeper = stack.enter_context(KeeperServer.temporary())
            yield Target(keeper.url, keeper, keeper.admin, "remote")
        elif request.param == "redis":
            redis = stack.enter_context(started(RedisServer.temporary()))
            yield Target(redis.url, redis, engine="redis_engine")
        elif request.param == "postgres":
            postgres = stack.enter_context(started(PostgresServer.temporary()))
            yield Target(postgres.url, postgres, engine="postgres")
        else:
            yield Target(str(tmp_path / "team.db"), None)


class Hosts:
    """Managers, each as a host of its own; whoever is killed, or could not reach the store, is started again."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.kills = 0
        self._target = target
        self._folder = folder
        self._managers = [self._spawn(number) for number in range(HOSTS)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._managers:
            process.kill()
            process.wait()

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        options = {"space": SPACE, "host": f"host{number}", "concurrency": "2", "lease": LEASE, "idle": "300"}
        command = [sys.executable, "-m", "holdfast.manager", *(f"--{name}={value}" for name, value in options.items())]
        env = {**os.environ, "HOLDFAST_STORE": self._target.url, "HOLDFAST_TOKEN": self._target.token or ""}
        env["PYTHONPATH"] = str(ROOT)
        # Imported once: otherwise most of the time is that of imports.
        command += ["--preload=tests.manager.targets", f"--preload=holdfast.engines.{self._target.engine}"]
        with (self._folder / f"host{number}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def revive(self) -> None:
        for number, process in enumerate(self._managers):
            if process.poll() is not None:
                self._managers[number] = self._spawn(number)

    def kill_manager(self, rng: random.Random) -> bool:
        process = rng.choice(self._managers)
        process.kill()
        process.wait()
        return True

    def kill_below(self, rng: random.Random) -> bool:
        """A zygote or a warden. A target that is killed has failed, and that is another matter."""
        with suppress(psutil.Error):
            zygotes = psutil.Process(rng.choice(self._managers).pid).children()
            found = [*zygotes, *(warden for zygote in zygotes for warden in zygote.children())]
            if found:
                rng.choice(found).kill()
                return True
        return False

    def kill_server(self, rng: random.Random) -> bool:
        server = self._target.server
        if server is None:
            return self.kill_manager(rng)
        server.kill()
        time.sleep(rng.uniform(0, 0.3))
        server.start()
        return True

    async def rage(self, rng: random.Random, over: Callable[[], bool]) -> None:
        """Kill whatever, until there was enough of it or nothing is left to do."""
        ways = [self.kill_manager, self.kill_below, self.kill_below, self.kill_server]
        while self.kills < KILLS and not over():
            await asyncio.sleep(rng.uniform(0, 2 * KILL_S))
            if await asyncio.to_thread(ways[self.kills % len(ways)], rng):
                self.kills += 1
            self.revive()

    def logs(self) -> str:
        return "\n".join(f"{path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("host*.log")))


async def insist(work: Callable[[], object], deadline: float) -> object:
    """The observer too must wait for a server that is being started."""
    while True:
        try:
            return await work()  # type: ignore[misc]
        except (holdfast.Unavailable, holdfast.OutcomeUnknown, holdfast.NotFound):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_no_task_is_lost_or_stuck_whoever_is_killed(target: Target, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    deadline = time.monotonic() + DEADLINE_S
    async with holdfast.open(target.url, background=False, durability=None, token=target.token) as store:
        space = store.space(SPACE, agent=None if target.token else "observer")
        handles = await submitted(space, target, tmp_path)
        with Hosts(target, tmp_path) as hosts:
            ended = asyncio.Event()
            raging: asyncio.Task[None] | None = None
            while True:
                counts = await insist(space.tasks.counts, deadline)
                assert isinstance(counts, dict)
                live = counts["created"] + counts["spawning"] + counts["running"]
                if raging is None and counts["completed"]:
                    raging = asyncio.create_task(hosts.rage(rng, ended.is_set))
                if counts["completed"] >= TASKS or (raging is not None and raging.done() and live <= HOSTS):
                    break
                if time.monotonic() > deadline:
                    left = await space.tasks.list(status=("created", "spawning", "running"))
                    pytest.fail(f"{counts} {left[:3]}\n{hosts.logs()}")
                hosts.revive()
                await asyncio.sleep(0.05)
            ended.set()
            assert raging is not None
            await raging
            hosts.revive()
            await check(space, handles, hosts, deadline)
    marker = store_id(target.url, SPACE)
    end = time.monotonic() + 15
    while left := living(marker):
        assert time.monotonic() < end, left
        await asyncio.sleep(0.05)


async def submitted(space: Space, target: Target, folder: Path) -> list[TaskHandle]:
    env = {} if target.token is None else {"HOLDFAST_TOKEN": target.token}
    kinds = [
        {"command": ("true",)},
        {"function": "tests.manager.targets:append", "args": [str(folder / "ran")]},
        {"command": ("sh", "-c", "sleep 0.02 & setsid sleep 0.02; echo done"), "stream_output": True},
    ]
    specs = [
        TaskSpec.of({**kinds[number % len(kinds)], "working_dir": str(ROOT), "retry": _plain(RETRY)})
        for number in range(TASKS - EFFECTS)
    ]
    for number in range(EFFECTS):
        spec = TaskSpec(
            function="tests.manager.targets:effect", args=[str(number)], env=env, working_dir=str(ROOT), retry=RETRY
        )
        specs.insert(number * TASKS // EFFECTS, spec)
    return [await space.tasks.submit(spec) for spec in specs]


def _plain(retry: TaskRetry) -> dict[str, object]:
    return {"attempts": retry.attempts, "backoff": retry.backoff, "factor": retry.factor}


async def check(space: Space, handles: list[TaskHandle], hosts: Hosts, deadline: float) -> None:
    """Each ended once, as its log tells; nothing waits; what happened happened once."""
    for handle in handles:
        try:
            state = await handle.wait(max(0.1, deadline - time.monotonic()))
        except holdfast.TaskPending as exc:
            pytest.fail(f"{exc.state}\n{hosts.logs()}")
        assert state.status == "completed", f"{hosts.logs()}\n{state}"
        events = [event async for event in handle.events()]
        assert replay(events) == state
        assert sum(event.status == "completed" for event in events) == 1
    assert (await space.tasks.counts())["completed"] >= len(handles)
    while (depth := await space.queue("holdfast.spawn.requests").stats()).message_count or depth.reserved or depth.dead:
        assert time.monotonic() < deadline, depth
        assert not depth.dead, depth
        await asyncio.sleep(0.05)
    for number in range(EFFECTS):
        assert await space.records.get(f"effects/{number}") == 1
        assert await space.records.get(f"runs/{number}") >= 1
    assert hosts.kills > 0
