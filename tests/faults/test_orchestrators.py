"""Many orchestrators, killed at random; signals shuffled, doubled, late and missing: each correlation is decided once.

What is judged is the feed, which has every step in order, and what `on_decision` noted. HOLDFAST_SOAK=1 makes the runs longer,
not different. A fleet of orchestrators that do not compare before they write must be caught.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.codec import decode
from holdfast.engine import ChangeSet
from holdfast.layers.correlation_entries import FINISHED, OPEN, OUTBOX, STATES, Decision, State, status_in
from holdfast.layers.correlation_entries import ORCHESTRATORS as ORCHESTRATING
from holdfast.layers.sections import SECTIONS
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer
from tests.faults import nursery
from tests.faults.nursery import Child
from tests.faults.orchestrating import SPACE
from tests.servers import started

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
ORCHESTRATORS = 50 if SOAK else 4
CORRELATIONS = 5_000 if SOAK else 40
KILL_S = 0.25
LEASE = "10s" if SOAK else "1s"
TIMEOUT = "20s" if SOAK else "900ms"
DEADLINE_S = 3600 if SOAK else 60
AGENTS = ["news", "momentum", "risk"]


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "keeper":
            keeper = stack.enter_context(KeeperServer.temporary())
            monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
            yield keeper.url
        elif request.param == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            yield f"{server.url}?prefix=orchestrators{tmp_path.name}"
        elif request.param == "postgres":
            many = {"max_connections": "800"}  # up to nine for each orchestrator
            postgres = stack.enter_context(started(PostgresServer.temporary(**many)))
            yield f"{postgres.url}?schema=orchestrators"
        else:
            yield str(tmp_path / "team.db")


class Orchestrators:
    """Processes, some of which are killed and started again; none outlives this."""

    def __init__(self, url: str, folder: Path, count: int, *, broken: bool = False) -> None:
        self.folder = folder
        self.kills = 0
        self._url = url
        self._broken = broken
        self._numbers = iter(range(100_000))
        self._running = [self._spawn() for _ in range(count)]

    def __enter__(self) -> Orchestrators:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _spawn(self) -> Child:
        name = f"o{next(self._numbers)}"
        settings = {"url": self._url, "folder": str(self.folder), "name": name, "lease": LEASE, "broken": self._broken}
        return nursery.start("tests.faults.orchestrating", settings, self.folder / f"{name}.log")

    def kill_one(self, rng: random.Random) -> None:
        place = rng.randrange(len(self._running))
        assert self._running[place].poll() is None, self.logs()
        self._running[place].kill()
        self._running[place].wait()
        self.kills += 1
        self._running[place] = self._spawn()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))

    async def until_running(self) -> None:
        while sum("running" in path.read_text() for path in self.folder.glob("*.log")) < len(self._running):
            await asyncio.sleep(0.02)

    def calls(self) -> dict[str, list[str]]:
        """Who gave each decision to `on_decision`, as often as it did."""
        callers: defaultdict[str, list[str]] = defaultdict(list)
        for path in self.folder.glob("*.published"):
            for line in path.read_text().splitlines():
                if len(line.split()) == 2:
                    callers[line.split()[1]].append(path.stem)
        return callers


class Round:
    """What was sent, and what was answered."""

    def __init__(self) -> None:
        self.accepted: defaultdict[str, set[str]] = defaultdict(set)
        self.sent: defaultdict[str, set[str]] = defaultdict(set)


async def send(store: holdfast.Store, rng: random.Random, done: Round, number: int) -> None:
    """One correlation: some agents signal, in any order, some twice, some not at all."""
    corr_id = f"c-{number}"
    await asyncio.sleep(rng.uniform(0, 30 if SOAK else 0.8))
    maker = store.space(SPACE, agent="maker")
    await maker.correlation(corr_id, expect=AGENTS, timeout=TIMEOUT, min_agents=rng.choice([None, 1, 2]))
    agents = rng.sample(AGENTS, rng.choice([3, 3, 3, 2, 1]))
    for agent in [*agents, *rng.sample(agents, rng.randint(0, len(agents)))]:
        await asyncio.sleep(rng.uniform(0, 0.05))
        correlation = await store.space(SPACE, agent=agent).correlation(corr_id)
        signalled = await correlation.signal({"analysis": {"action": "trade", "confidence": 0.5}})
        done.sent[corr_id].add(agent)
        if signalled.outcome == "accepted":
            done.accepted[corr_id].add(agent)


async def all_decided(store: holdfast.Store, count: int) -> None:
    engine = store.engine
    while True:
        states = (await engine.scan(SPACE, STATES, limit=10_000)).entries
        finished = sum(status_in(entry.tag) in FINISHED for entry in states)
        outbox = (await engine.scan(SPACE, OUTBOX, limit=1)).entries
        if finished == count and not outbox:
            return
        await asyncio.sleep(0.05)


async def whole_feed(store: holdfast.Store) -> list[ChangeSet]:
    return [commit async for commit in store.engine.watch(SPACE, cursor="r0", live=False)]


def faults(feed: list[ChangeSet], done: Round, calls: dict[str, list[str]], count: int) -> Iterator[str]:
    """Whatever shows that a correlation was decided or published twice, or not, or came back."""
    decided: dict[str, State] = {}
    decisions: defaultdict[str, set[str]] = defaultdict(set)
    names: dict[str, str] = {}
    ended: set[str] = set()
    for commit in feed:
        for change in commit.changes:
            if change.key.startswith(STATES) and change.exists:
                corr_id = change.key.removeprefix(STATES)
                if corr_id in decided:
                    yield f"{corr_id} was written again, as {status_in(change.tag)}, after it was {decided[corr_id].status}"
                if status_in(change.tag) in FINISHED:
                    decided[corr_id] = decode(change.value, State)
            elif change.key.startswith(ORCHESTRATING) and change.exists:
                names[change.key] = decode(change.value, dict)["instance"]
            elif change.key.startswith(ORCHESTRATING) and change.op == "expire":
                ended.add(names[change.key])
            elif change.key.startswith(OUTBOX) and change.exists:
                decisions[change.key.removeprefix(OUTBOX)].add(decode(change.value, Decision).id)
    if len(decided) != count or len(decisions) != count:
        yield f"{len(decided)} were decided and {len(decisions)} put into the outbox, of {count}"
    for corr_id, state in decided.items():
        if len(decisions[corr_id]) != 1:
            yield f"{corr_id} was in the outbox with {len(decisions[corr_id])} decisions"
        if set(state.signals) != done.accepted[corr_id]:
            yield f"{corr_id} was decided by {sorted(state.signals)}; accepted were {sorted(done.accepted[corr_id])}"
        if state.status == "completed" and not state.signals:
            yield f"{corr_id} was completed without any signal"
    made = {id for ids in decisions.values() for id in ids}
    if set(calls) != made:
        yield f"{len(made - set(calls))} decisions were not published, {len(set(calls) - made)} were nobody's"
    for id, callers in calls.items():
        # Whoever published it before somebody else did has died, or was paused past its lease, before that was noted.
        lasting = [name for name in callers if name not in ended]
        if len(lasting) > 1 or max(Counter(callers).values()) > 1:
            yield f"decision {id} was published by {callers}; of these {sorted(ended & set(callers))} had ended"


async def run(url: str, folder: Path, *, kill: bool, broken: bool = False, seed: int = 1) -> tuple[list[str], int]:
    """A round of correlations; what is wrong with it, and how many orchestrators were killed."""
    rng, done = random.Random(seed), Round()
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    async with holdfast.open(url, token=token) as store:
        await store.space(SPACE).records.set("begun", True)
        with Orchestrators(url, folder, ORCHESTRATORS, broken=broken) as fleet:
            async with asyncio.timeout(DEADLINE_S):
                await fleet.until_running()
                sending = asyncio.gather(*(send(store, rng, done, number) for number in range(CORRELATIONS)))
                while kill and not sending.done():
                    await asyncio.sleep(rng.uniform(0, 2 * KILL_S))
                    fleet.kill_one(rng)
                await sending
                waiting = all_decided(store, CORRELATIONS)
                if broken:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(waiting, 5)
                else:
                    await waiting
            await asyncio.sleep(0.1)
            calls = fleet.calls()
        found = list(faults(await whole_feed(store), done, calls, CORRELATIONS))
        engine = store.engine
        for prefix in (OPEN, SECTIONS.prefix("correlations")):
            if left := (await engine.scan(SPACE, prefix)).entries:
                found.append(f"{len(left)} entries are left under {prefix}, such as {left[0].key}")
    return found, fleet.kills


async def test_each_correlation_is_decided_once_while_orchestrators_are_killed(url: str, tmp_path: Path) -> None:
    began = time.monotonic()
    found, kills = await run(url, tmp_path, kill=True)
    assert not found, "\n".join(found[:20])
    assert kills >= 2
    assert time.monotonic() - began < DEADLINE_S


async def test_orchestrators_that_do_not_compare_are_caught(tmp_path: Path) -> None:
    found, _ = await run(str(tmp_path / "team.db"), tmp_path, kill=False, broken=True)
    assert any("was written again" in fault for fault in found), found
