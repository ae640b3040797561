"""Random programs on real stores: their worker is killed with -9 at a commit, and what another makes of them is as if nothing had happened.

The programs, and what must be equal, are those of `tests/layers/test_workflow_crashes.py`, whose undisturbed run in memory says what to
expect. HOLDFAST_SOAK=1 takes hundreds of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.layers.workflows import running
from holdfast.testing.dying import Life
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.workflows import ended
from tests.faults.driver import ROOT
from tests.faults.dying_worker import HOLD_MS, LEASE, SPEED
from tests.layers import test_workflow_crashes as programs

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
CRASHES = 100 if SOAK else 3
"""On each store."""
DEADLINE_S = 60
KINDS = ("sqlite", "redis", "postgres", "keeper")


Place = tuple[str, str | None]
"""A store's URL, and the token for it."""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store of each kind; every program has a space of its own."""
    if request.param == "keeper":
        with KeeperServer.temporary() as keeper:
            yield keeper.url, keeper.admin
    elif request.param == "redis":
        yield f"{request.getfixturevalue('redis_server').url}?prefix=crashes{tmp_path.name}", None
    elif request.param == "postgres":
        yield f"{request.getfixturevalue('postgres_server').url}?schema=crashes_{os.getpid()}", None
    else:
        yield str(tmp_path / "team.db"), None


class Killers:
    """The process whose children die."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "workers.log").open("ab")
        command = [sys.executable, "-m", "tests.faults.dying_worker"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    async def tell(self, given: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return int((await self._answer())["pid"])

    async def died(self) -> int | None:
        answer: int | None = (await self._answer())["signal"]
        return answer

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


@pytest.fixture(scope="module")
def killers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killers]:
    made = Killers(tmp_path_factory.mktemp("killers"))
    yield made
    made.close()


async def test_a_program_whose_worker_is_killed_at_a_commit_ends_as_if_nothing_had_happened(
    place: Place, killers: Killers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{place[0][:5]}{random.randrange(10**9) if SOAK else 7}")
    killed = 0
    for number in range(CRASHES):
        seed = rng.randrange(2_000 if SOAK else 20)
        monkeypatch.setattr(programs, "SPEED", 1.0)
        expected, commits = await programs.lived(seed, tmp_path, None)
        at, after = rng.randrange(max(1, commits - 1)), rng.random() < 0.5
        monkeypatch.setattr(programs, "SPEED", SPEED)
        monkeypatch.setattr(running, "HOLD_MS", HOLD_MS)
        found, died = await _crashed(place, f"crashes{number}", seed, at, after, killers, tmp_path)
        killed += died
        assert found == expected, f"seed {seed}, killed {'after' if after else 'before'} commit {at}"
    assert killed * 2 > CRASHES, "hardly anybody was killed"


async def _crashed(
    place: Place, name: str, seed: int, at: int, after: bool, killers: Killers, folder: Path
) -> tuple[dict[str, Any], bool]:
    """Let a worker die at a commit, and another one go on; gives what came of it, and whether it died before the end."""
    url, token = place
    async with holdfast.open(url, token=token, background=False) as store:
        space = store.space(name, agent="boss")
        handle = await space.workflows.start(programs.interpret, programs.program(random.Random(seed)), id="x")
        for number in range(12):
            await handle.signal("go", number)
        pid = await killers.tell({"url": url, "token": token, "space": name, "at": at, "after": after})
        ending = asyncio.ensure_future(ended(store, space))
        dying = asyncio.ensure_future(killers.died())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():  # it never came so far
                os.kill(pid, signal.SIGKILL)
            assert await dying == signal.SIGKILL
            early = not ending.done()
            life = Life(space, folder, [programs.interpret], lease=LEASE, queues=["q"])
            try:
                await ending
                return await programs.outcome_of(space, "x"), early
            finally:
                await life.end()
