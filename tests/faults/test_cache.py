"""The hot tier among concurrent writers, while connections are cut, feeds break and Redis is restarted.

Several stores are open on one storage, each with connections and a tier of its own, as processes have them. Sessions write,
read, and move from store to store with their token. What each is told is noted, and judged:

    read your writes    a session is never shown a record older than what it wrote
    monotonic reads     nor than what it was shown before, deletions included
    causality           a record that names another's version is never seen without it
    bounded staleness   an eventual read is never older than the ttl: what was replaced before that is not shown

Strong reads, and session reads of one who has seen everything, are judged by the linearizability checker.

HOLDFAST_SOAK=1 makes the runs longer, not different.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast import Cache, Error, Store
from holdfast.clock import SystemClock
from holdfast.engines.memory import MemoryEngine
from holdfast.layers.consistency import read_prefix
from holdfast.layers.records import _record
from holdfast.middleware.cache import CachedEngine
from holdfast.testing.history import Recorder, load
from holdfast.testing.linearizability import check
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.proxy import Cut, Proxy
from holdfast.testing.servers.redis import RedisServer
from holdfast.testing.workload import Clients
from tests.middleware.caching import Durable, ReadsThroughTheTier
from tests.middleware.test_broken_caches import TrustsThatNoNewsIsGoodNews
from tests.servers import started

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
SECONDS = 120.0 if SOAK else 1.5
STORES = 3
SESSIONS = 8
KEYS = [f"desk/{letter}" for letter in "abcd"]
TTL_S = 0.2
SHARED_TTL_S = 0.4
SLACK_S = 0.1
"""Between the clocks of the tier and of the judge."""
SPACE = "contoso"


class Judge:
    """What was written when, and what may be shown to whom."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.reads = 0
        self._replaced: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def wrote(self, key: str, version: int) -> None:
        self._replaced[key].append((time.monotonic(), version))

    def eventual(self, key: str, began: float, shown: int) -> None:
        self.reads += 1
        limit = began - max(TTL_S, SHARED_TTL_S) - SLACK_S
        old = max((version for at, version in self._replaced[key] if at < limit), default=0)
        if shown and shown < old:
            self.violations.append(f"{key}@{shown} was shown after the ttl, although {old} had replaced it")


class Reader:
    """One session, wherever it goes."""

    def __init__(self, name: str, judge: Judge) -> None:
        self.name = name
        self.token: str | None = None
        self._judge = judge
        self._known: dict[str, int] = {}
        """Of each key the newest version that the session knows of, or of a deletion."""
        self._gone: set[str] = set()
        """Those that are gone, or replaced by something newer."""

    def knows(self, key: str, version: int) -> None:
        if version > self._known.get(key, 0):
            self._known[key] = version
            self._gone.discard(key)

    def shown(self, key: str, version: int | None, how: str) -> None:
        self._judge.reads += 1
        least = self._known.get(key, 0) + (key in self._gone)
        if version is None:
            self._gone.add(key)
        elif version < least:
            self._judge.violations.append(f"{self.name} was shown {key}@{version} by {how} after it knew of {least}")
        else:
            self.knows(key, version)

    async def step(self, store: Store, chance: random.Random) -> None:
        space = store.space(SPACE, agent=self.name, session=self.token)
        try:
            await self._act(space, chance)
        finally:
            self.token = space.session.token

    async def _act(self, space: holdfast.Space, chance: random.Random) -> None:
        key, records, kind = chance.choice(KEYS), space.records, chance.random()
        if kind < 0.25:
            other = chance.choice(KEYS)
            record = await records.entry(other, consistency="session")
            told = {"other": other, "version": 0 if record is None else record.version}
            version = await records.set(key, told)
            self._judge.wrote(key, version)
            self.knows(key, version)
        elif kind < 0.3:
            await records.delete(key)
            self._judge.wrote(key, space.session.seen)
            self.knows(key, space.session.seen)
            self._gone.add(key)
        elif kind < 0.4:
            began = time.monotonic()
            record = await records.entry(key, consistency="eventual")
            self._judge.eventual(key, began, 0 if record is None else record.version)
        else:
            await self._read(space, key, chance)

    async def _read(self, space: holdfast.Space, key: str, chance: random.Random) -> None:
        if chance.random() < 0.5:
            record = await space.records.entry(key, consistency="session")
            self._saw(key, record, "entry")
        else:
            for name, entry in (await page_of(space, KEYS)).items():
                self._saw(name, entry, "page")

    def _saw(self, key: str, record: holdfast.Record | None, how: str) -> None:
        self.shown(key, None if record is None else record.version, how)
        if record is not None:
            self.knows(record.value["other"], record.value["version"])


async def page_of(space: holdfast.Space, keys: list[str]) -> dict[str, holdfast.Record | None]:
    """The records, through a page of all of them."""
    page = await read_prefix(space._scope, "records/desk/", "session")
    found = {entry.key.removeprefix("records/"): _record(entry, None) for entry in page.entries}
    return {key: found.get(key) for key in keys}


async def run(stores: list[Store], judge: Judge, until: float) -> int:
    """Sessions that go from store to store; gives how many steps were done."""
    steps = itertools.count()

    async def session(number: int) -> None:
        chance, reader = random.Random(number), Reader(f"agent-{number}", judge)
        while time.monotonic() < until:
            with contextlib.suppress(Error):  # a server that is away is told; nothing that is told is wrong
                await reader.step(chance.choice(stores), chance)
            next(steps)
            await asyncio.sleep(0)

    await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    return next(steps)


@contextlib.asynccontextmanager
async def opened(url: str, cache: Cache) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(holdfast.open(url, cache=cache, background=False)) for _ in range(STORES)
        ]


async def test_sessions_keep_their_promises_on_a_file_that_others_write(tmp_path: Path) -> None:
    judge = Judge()
    async with opened(str(tmp_path / "team.db"), Cache(ttl=TTL_S)) as stores:
        steps = await run(stores, judge, time.monotonic() + SECONDS)
        stats = [store.cache.stats for store in stores if store.cache is not None]
    assert judge.violations == []
    assert judge.reads > steps / 2 > 100
    assert sum(each.hits for each in stats) > 50, stats


async def test_a_tier_that_trusts_its_feed_is_seen_by_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.middleware.cache.CachedEngine", TrustsThatNoNewsIsGoodNews)
    judge = Judge()
    async with opened(str(tmp_path / "team.db"), Cache(ttl=TTL_S)) as stores:
        deadline = time.monotonic() + 20
        while not judge.violations and time.monotonic() < deadline:
            await run(stores, judge, time.monotonic() + 0.2)
    assert judge.violations


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, RedisServer]]:
    with ExitStack() as stack:
        postgres = stack.enter_context(started(PostgresServer.temporary()))
        redis = stack.enter_context(started(RedisServer.temporary(appendonly="no")))
        yield postgres, redis


async def test_sessions_keep_their_promises_while_connections_are_cut_and_redis_is_restarted(
    servers: tuple[PostgresServer, RedisServer],
) -> None:
    postgres, redis = servers
    chance, judge = random.Random(5), Judge()
    cuts: tuple[Cut, ...] = ("before", "after")
    with Proxy.running(postgres.port) as proxy:
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        cache = Cache(redis.url, entries=50, ttl=TTL_S, shared_ttl=SHARED_TTL_S)
        async with opened(url, cache) as stores:
            until = time.monotonic() + SECONDS + 1
            running = asyncio.ensure_future(run(stores, judge, until))
            proxy.choose = lambda: chance.choice(cuts) if chance.random() < 0.01 else None
            while time.monotonic() < until - 0.5:
                await asyncio.sleep(0.4)
                await asyncio.to_thread(redis.restart)
                proxy.part()  # every feed, too
                await asyncio.sleep(0.05)
                proxy.heal()
            proxy.choose = lambda: None
            steps = await running
            stats = [store.cache.stats for store in stores if store.cache is not None]
    assert judge.violations == []
    assert judge.reads > steps / 4 > 20
    assert sum(each.hits + each.shared_hits for each in stats) > 20, stats
    assert sum(each.shared_errors for each in stats) > 0, stats


async def test_a_token_is_honoured_by_another_process(tmp_path: Path) -> None:
    url = str(tmp_path / "team.db")
    reader = (
        "import sys, json\n"
        "from holdfast import blocking\n"
        "with blocking.open(sys.argv[1], background=False, cache='memory') as store:\n"
        "    space = store.space('contoso')\n"
        "    for line in sys.stdin:\n"
        "        space.session.join(line.strip())\n"
        "        print(json.dumps([space.records.get('n', consistency='session'), store.cache.stats.hits]), flush=True)\n"
    )
    async with holdfast.open(url, background=False) as store:
        space = store.space(SPACE)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", reader, url, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        hits = 0
        for number in range(200):
            if number % 4 == 0:
                await space.records.set("n", number)
            process.stdin.write(f"{space.session.token}\n".encode())
            shown, hits = json.loads(await process.stdout.readline())
            assert shown == number - number % 4
        process.stdin.close()
        assert await process.wait() == 0
        assert hits > 50


@pytest.mark.parametrize("kind", [CachedEngine, ReadsThroughTheTier], ids=["strong", "having seen everything"])
async def test_reads_are_linearizable(kind: type[CachedEngine], tmp_path: Path) -> None:
    """On engines that share a store, whose feeds break again and again and come late."""
    chance, store, clock = random.Random(3), MemoryEngine(), SystemClock()
    durables = [Durable(store) for _ in range(STORES)]
    engines = [kind(durable, clock, Cache(ttl="50ms")) for durable in durables]
    keys = [f"records/{number}" for number in range(4)]
    recorders = [Recorder(tmp_path / f"{number}.jsonl", time.monotonic_ns) for number in range(STORES)]
    operations = 20_000 if SOAK else 600
    clients = [
        Clients(engine, SPACE, recorder, f"w{number}", 0, keys)
        for number, (engine, recorder) in enumerate(zip(engines, recorders, strict=True))
    ]
    done = asyncio.gather(*(each.run(4, operations) for each in clients))
    while not done.done():
        durable = chance.choice(durables)
        durable.cut, held = chance.random() < 0.3, chance.random() < 0.3
        durable.flowing.clear() if held else durable.flowing.set()
        for key in keys * 10:  # others keep the tiers warm
            with contextlib.suppress(Error):
                await chance.choice(engines).get_seen(SPACE, [key], 0)
        await asyncio.sleep(0.001)
    await done
    hits = sum(engine.stats.hits for engine in engines)
    for durable, engine, recorder in zip(durables, engines, recorders, strict=True):
        durable.flowing.set()
        await engine.close()
        recorder.close()
    assert check(load(tmp_path.glob("*.jsonl"))) == []
    assert hits > 10
