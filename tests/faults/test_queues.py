"""Senders and consumers, killed at random: every message is done exactly once, and none is lost.

The result of a message and its acknowledgement are one commit, so the queue of results is the proof. HOLDFAST_SOAK=1 makes the
runs longer, not different. Consumers that need two commits for it must be caught.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer
from tests.faults import nursery
from tests.faults.consuming import SPACE
from tests.faults.nursery import Child

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
CONSUMERS = 6 if SOAK else 2
MESSAGES = 20_000 if SOAK else 80
KILLS = 200 if SOAK else 3
KILL_S = 0.3 if SOAK else 0.15
LEASE = "1s" if SOAK else "500ms"
DEADLINE_S = 1800 if SOAK else 60


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "keeper":
            keeper = stack.enter_context(KeeperServer.temporary())
            monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
            yield keeper.url
        elif request.param == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            yield f"{server.url}?prefix=queues{tmp_path.name}"
        elif request.param == "postgres":
            postgres: PostgresServer = request.getfixturevalue("postgres_server")
            yield f"{postgres.url}?schema=queue_faults"
        else:
            yield str(tmp_path / "team.db")


class Crowd:
    """A sender and consumers, some of which are killed and started again; none outlives this."""

    def __init__(self, url: str, folder: Path, role: str) -> None:
        self.kills = 0
        self._folder = folder
        self._url = url
        self._numbers = iter(range(100_000))
        self._roles = ["sender", *[role] * CONSUMERS]
        self._running = [self._spawn(role) for role in self._roles]

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _spawn(self, role: str) -> Child:
        name = f"{role}{next(self._numbers)}"
        settings = {"url": self._url, "role": role, "count": MESSAGES, "lease": LEASE, "name": name}
        return nursery.start("tests.faults.consuming", settings, self._folder / f"{name}.log")

    def kill_one(self, rng: random.Random) -> None:
        place = rng.randrange(len(self._running))
        process = self._running[place]
        assert process.poll() in (None, 0), self.logs()
        if process.poll() is None or not self.all_sent():
            process.kill()
            process.wait()
            self.kills += 1
            self._running[place] = self._spawn(self._roles[place])

    def all_sent(self) -> bool:
        return any("sent" in path.read_text() for path in self._folder.glob("sender*.log"))

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("*.log")))

    async def until_running(self) -> None:
        while sum("running" in path.read_text() for path in self._folder.glob("*.log")) < len(self._running):
            await asyncio.sleep(0.02)


async def drained(space: holdfast.Space, crowd: Crowd, deadline: float) -> Counter[int]:
    """What is done, when nothing is left to do."""
    while True:
        left = [await space.queue(name).stats() for name in ("first", "second")]
        done = await space.queue("done").stats()
        if crowd.all_sent() and not any(each.ready + each.delayed + each.reserved for each in left):
            assert not any(each.dead for each in left), left
            break
        assert time.monotonic() < deadline, f"{left} {done}\n{crowd.logs()}"
        await asyncio.sleep(0.05)
    bodies: Counter[int] = Counter()
    async for entry in space.queue("done").entries("ready"):
        bodies[int(entry.value)] += 1
    assert done.ready == sum(bodies.values())
    return bodies


async def killed_at_random(url: str, folder: Path, role: str, seed: int) -> Counter[int]:
    rng = random.Random(seed)
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    deadline = time.monotonic() + DEADLINE_S
    async with holdfast.open(url, background=False, token=token) as store:
        space = store.space(SPACE, agent="observer")
        await space.records.set("begun", True)
        with Crowd(url, folder, role) as crowd:
            await crowd.until_running()
            while crowd.kills < KILLS:
                await asyncio.sleep(rng.uniform(0, 2 * KILL_S))
                crowd.kill_one(rng)
            return await drained(space, crowd, deadline)


async def test_every_message_is_done_exactly_once_whoever_is_killed(url: str, tmp_path: Path) -> None:
    done = await killed_at_random(url, tmp_path, "consumer", seed=7)
    assert done == Counter(range(MESSAGES))


async def test_consumers_that_acknowledge_with_a_commit_of_its_own_are_caught(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        done = await killed_at_random(str(folder / "team.db"), folder, "broken", seed)
        assert set(done) == set(range(MESSAGES))
        if max(done.values()) > 1:
            return
    pytest.fail("nothing was done twice, although that should happen")
