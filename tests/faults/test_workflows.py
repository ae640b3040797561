"""Workers killed with -9 and paused past their lease, at random: every execution ends once, with what it counted counted once.

HOLDFAST_SOAK=1 makes the runs longer, not different.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.servers.keeper import KeeperServer
from tests.faults import nursery
from tests.faults.nursery import Child
from tests.faults.working import SPACE, expected, journey

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
WORKERS = 4 if SOAK else 2
EXECUTIONS = 1_000 if SOAK else 16
HITS = 200 if SOAK else 3
HIT_S = 0.4
LEASE = "1s"
DEADLINE_S = 1800 if SOAK else 90


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"] if SOAK else ["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "keeper":
            keeper = stack.enter_context(KeeperServer.temporary())
            monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
            yield keeper.url
        elif request.param == "redis":
            yield f"{request.getfixturevalue('redis_server').url}?prefix=flows{tmp_path.name}"
        elif request.param == "postgres":
            yield f"{request.getfixturevalue('postgres_server').url}?schema=flow_faults"
        else:
            yield str(tmp_path / "team.db")


class Workers:
    """Worker processes that are killed, and paused for longer than their lease; none outlives this."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._log = folder / "workers.log"
        self._running = [self._spawn() for _ in range(WORKERS)]

    def _spawn(self) -> Child:
        return nursery.start("tests.faults.working", {"url": self._url, "lease": LEASE}, self._log)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    async def hit(self, rng: random.Random) -> None:
        place = rng.randrange(WORKERS)
        process = self._running[place]
        if rng.random() < 0.5:
            process.kill()
            process.wait()
            self._running[place] = self._spawn()
        else:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.3)
            process.send_signal(signal.SIGCONT)


async def test_every_execution_ends_once_whatever_happens_to_its_workers(url: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    deadline = time.monotonic() + DEADLINE_S
    async with holdfast.open(url, token=os.environ.get("HOLDFAST_TOKEN")) as store:
        workflows = store.space(SPACE, agent="boss").workflows
        with Workers(url, tmp_path) as workers:
            handles = [await workflows.start(journey, n, id=f"j{n}") for n in range(EXECUTIONS)]
            for n, handle in enumerate(handles):
                await handle.signal("answer", f"yes {n}")
            for _ in range(HITS):
                await asyncio.sleep(HIT_S)
                await workers.hit(rng)
            for n, handle in enumerate(handles):
                left = max(1.0, deadline - time.monotonic())
                assert await handle.result(left) == expected(n), (tmp_path / "workers.log").read_text()[-4000:]
                state = await handle.state()
                assert (state["count"], sorted(state["seen"])) == (n + 10, sorted([n, 0, 1, 2, 3, 4]))
        counts = await workflows.counts()
        assert {name: each["completed"] for name, each in counts.items()} == {
            "child": EXECUTIONS,
            "journey": EXECUTIONS,
        }
        assert {each.get("running", 0) + each["pending"] for each in counts.values()} == {0}
