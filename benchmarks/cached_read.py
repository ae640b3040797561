"""What does a session read cost that the hot tier answers: from memory, and from Redis beside the PostgreSQL it stands for?

A page is ten entries under one prefix; a document is a body, its head, and ten contributions, read as users do. The memory's reads
are told in microseconds, the median of the turns, with what the same read costs without a tier beside it. Redis is asked each
time, with nothing kept in memory (`entries=0`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import holdfast
from benchmarks.keeper_sides import cpu_s
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Rates, Turn, take_turns, timed_async
from holdfast.layers.consistency import read_prefix
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer

PER_STEP: Final = 64
CPU_TURNS: Final = 10
"""How many turns the CPU is counted for, at once."""
SECTIONS: Final = 10
SECTION: Final = {"outlook": "growth", "confidence": 0.8, "reasons": ["x" * 40] * 10}
PAGE: Final = "records/research/MSFT/"
DOCUMENT: Final = "research/MSFT"


async def run(plan: Plan) -> AsyncIterator[Line]:
    path = str(plan.folder / "store.db")
    async with (
        holdfast.open(path, cache="memory", background=False) as cached,
        holdfast.open(path, background=False) as bare,
    ):
        ours, theirs = cached.space("bench"), bare.space("bench")
        await _write(ours)
        for name, reading, peer in (
            ("record", _get(ours), _get(theirs, "strong")),
            ("page", _scan(ours), _scan(theirs, "strong")),
        ):
            rates = await take_turns(plan, {"ours": _turn(reading), "bare": _turn(peer)})
            yield _microseconds(f"cached_read_{name}", rates["ours"], rates["bare"])
        assert cached.cache is not None
        assert cached.cache.stats.misses <= 2
    with PostgresServer.temporary() as postgres, RedisServer.temporary(appendonly="no") as redis:
        async with (
            holdfast.open(postgres.url, cache=holdfast.Cache(redis.url, entries=0), background=False) as cached,
            holdfast.open(postgres.url, background=False) as bare,
        ):
            ours, theirs = cached.space("bench"), bare.space("bench")
            await _write(ours)
            await _contribute(cached)
            for what, reading, peer_reading, count, goal in (
                ("document", _read(ours), _read(theirs, "strong"), 1, Goal("ratio", "at least", 1.5)),
                ("document", _read(ours), _read(theirs, "strong"), 16, None),
                ("page", _scan(ours), _scan(theirs, "strong"), 1, None),
            ):
                mine, bares = _turn(reading, count), _turn(peer_reading, count)
                rates = await take_turns(plan, {"ours": mine, "bare": bares})
                name, peer = f"cached_read_postgres_{what}_{count}", f"the same {what} from PostgreSQL"
                cpu = {
                    "cpu_us": await _cpu_us(mine, plan, redis.pid),
                    "peer_cpu_us": await _cpu_us(bares, plan, postgres.pid),
                }
                yield compare(name, rates["ours"], rates["bare"], peer, goal, "reads/s", **cpu)
            assert cached.cache is not None
            assert cached.cache.stats.hit_rate > 0.9


async def _write(space: holdfast.Space) -> None:
    await space.records.set("regime", "risk-on")
    for number in range(SECTIONS):
        await space.records.set(f"research/MSFT/agent-{number}", SECTION)


async def _contribute(store: holdfast.Store) -> None:
    await store.space("bench").document(DOCUMENT).update(lambda body: {"round": 1, "summary": "x" * 400})
    for number in range(SECTIONS):
        await store.space("bench", agent=f"agent-{number}").document(DOCUMENT).contribute(SECTION)


def _read(space: holdfast.Space, consistency: holdfast.Consistency = "session") -> Callable[[], Awaitable[object]]:
    document = space.document(DOCUMENT)
    return lambda: document.read(consistency=consistency)


def _get(space: holdfast.Space, consistency: holdfast.Consistency = "session") -> Callable[[], Awaitable[object]]:
    return lambda: space.records.get("regime", consistency=consistency)


def _scan(space: holdfast.Space, consistency: holdfast.Consistency = "session") -> Callable[[], Awaitable[object]]:
    return lambda: read_prefix(space._scope, PAGE, consistency)


def _turn(reading: Callable[[], Awaitable[object]], count: int = 1) -> Turn:
    async def one() -> None:
        for _ in range(PER_STEP):
            await reading()

    async def step() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    return timed_async(one if count == 1 else step, PER_STEP * count)


async def _cpu_us(turn: Turn, plan: Plan, server: int) -> float:
    """CPU of a read, the client's and the server's, which tells more than time on a machine that others use."""
    before, began = time.process_time() + cpu_s(server), time.perf_counter()
    rate = await turn(plan.seconds * CPU_TURNS)
    spent = time.process_time() + cpu_s(server) - before
    return 1e6 * spent / (rate * (time.perf_counter() - began))


def _microseconds(name: str, ours: Rates, bare: Rates) -> Line:
    more = {"without_us": 1e6 / bare.median}
    return Line(name, 1e6 / ours.median, "us", goal=Goal("ours", "at most", 15), runs=len(ours.values), more=more)
