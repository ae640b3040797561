"""Many processes on one space in PostgreSQL: the order of commits, what they cost, and what others' transactions do to them.

Run as a program with a URL this file is one of the processes: its writers commit, and it prints what they were given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from holdfast.clock import Clock, ManualClock, SystemClock
from holdfast.engine import (
    Absent,
    AtLeast,
    Batch,
    ChangeSet,
    Condition,
    Delete,
    Empty,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Receipt,
    Take,
    Touch,
    cursor_at,
)
from holdfast.engines import postgres_commit, postgres_schema
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.postgres import PostgresEngine
from holdfast.engines.postgres_commit import Writer
from holdfast.engines.postgres_functions import REBASED
from holdfast.engines.postgres_link import Call, Link, statement
from holdfast.engines.postgres_rows import Reply
from holdfast.errors import Error, Unavailable
from holdfast.testing import conformance
from holdfast.testing.conformance import Capabilities, EngineFactory, Subject
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.servers.postgres import PostgresServer

SPACE = "shared"
PROCESSES, WRITERS, COMMITS = 4, 8, 40
READ = ("begin_snapshot", "head", "fetch", "due")
"""What is asked of a space of which nothing is remembered."""


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return f"{postgres_server.url}?schema=s_{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def engine(url: str) -> AsyncIterator[PostgresEngine]:
    """An engine that knows the space already."""
    engine = await PostgresEngine.open(url)
    await engine.create(SPACE)
    await engine.get(SPACE, [])
    yield engine
    await engine.close()


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@contextlib.asynccontextmanager
async def opened(url: str, clock: Clock | None = None) -> AsyncIterator[PostgresEngine]:
    engine = await PostgresEngine.open(url, clock=clock)
    try:
        yield engine
    finally:
        await engine.close()


def put(key: str, value: bytes = b"1", **more: Any) -> Batch:
    return Batch("a", (Put(key, value, **more),))


# --- one round trip ---

WRITTEN = [["plain"]], [["write_one"]], [["write_group"]]
"""By a function now and then: when usage is summed up, or no connection is idle at once."""


class Trips:
    """What an engine sends: the names of the statements of each round trip, but for the bell's and its connection's.

    "plain" is any form of the statement that writes, with the lock before it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[list[str]] = []
        send = Link.send

        def counted(link: Link, *calls: Call, **options: Any) -> Any:
            names = [statement.name.decode() for statement, _ in calls]
            if names[-1].startswith("plain_"):
                assert names[:-1] == ["lock"]
                names = ["plain"]
            if names not in (["ring"], ["greet"]):
                self.sent.append(names)
            return send(link, *calls, **options)

        monkeypatch.setattr(Link, "send", counted)

    async def of(self, work: Awaitable[object]) -> list[list[str]]:
        self.sent = []
        await work
        return self.sent


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    return Trips(monkeypatch)


async def test_a_commit_is_one_round_trip(engine: PostgresEngine, trips: Trips) -> None:
    await engine.commit(SPACE, put("a/k"))
    for value in (b"2", b"333"):
        assert await trips.of(engine.commit(SPACE, put("a/k", value))) in WRITTEN
    assert await trips.of(engine.commit(SPACE, put("a/new"))) in WRITTEN, "a new key costs no read"
    both = Batch("a", (Increment("a/k", 1), Put("a/new", b"2", ttl_ms=60_000)), (Present("a/k"),), "request")
    assert await trips.of(engine.commit(SPACE, both)) == [["write_group"]]


async def test_a_group_of_many_writers_is_one_round_trip(engine: PostgresEngine, trips: Trips) -> None:
    await engine.commit(SPACE, put("a/k"))
    writers = asyncio.gather(*(engine.commit(SPACE, put(f"a/{n}")) for n in range(64)))
    assert await trips.of(writers) in WRITTEN


async def test_a_space_this_process_has_not_seen_costs_one_more(url: str, engine: PostgresEngine, trips: Trips) -> None:
    await engine.commit(SPACE, Batch("a", tuple(Put(f"a/{n}", b"1") for n in range(4))))
    other = await PostgresEngine.open(url)
    await other.get(SPACE, [])
    assert await trips.of(other.commit(SPACE, put("a/0"))) == [[*READ, "commit"], ["write_one"]]
    for _ in range(2):
        await other.commit(SPACE, put("a/2"))
    assert await trips.of(other.commit(SPACE, put("a/1"))) in ([["plain"], ["write_one"]], [["write_one"]])
    assert await trips.of(other.commit(SPACE, put("a/1"))) in WRITTEN
    await other.close()


async def test_a_refusal_is_one_round_trip_too(engine: PostgresEngine, trips: Trips) -> None:
    await engine.commit(SPACE, put("a/k"))

    async def refused() -> None:
        with pytest.raises(Error):
            await engine.commit(SPACE, Batch("a", (Put("a/k", b"2"),), (Absent("a/k"),)))

    assert await trips.of(refused()) == [["write_group"]]


async def test_taking_from_a_range_reads_ahead(engine: PostgresEngine, trips: Trips) -> None:
    await engine.commit(SPACE, Batch("a", tuple(Push("q/", b"%d" % n) for n in range(100))))
    take = [Batch("a", (Take("q/", f"r/{n}/", n=2),)) for n in range(20)]
    first = await trips.of(engine.commit(SPACE, take[0]))
    assert [names[-1] for names in first] == ["commit", "write_group"]
    for batch in take[1:]:
        assert await trips.of(engine.commit(SPACE, batch)) in WRITTEN
    assert len((await engine.scan(SPACE, "q/")).entries) == 60


async def test_a_writer_among_others_needs_one_round_trip_as_well(
    url: str, engine: PostgresEngine, trips: Trips
) -> None:
    """Two processes that write keys of their own in turn: each finds the head moved by the other, every time."""
    other = await PostgresEngine.open(url)
    for value in (b"1", b"2", b"3"):
        await engine.commit(SPACE, put("a/mine", value))
        await other.commit(SPACE, put("a/yours", value))
    for n in range(10):
        assert await trips.of(engine.commit(SPACE, put("a/mine", b"%d" % n))) == [["write_one"]]
        assert await trips.of(other.commit(SPACE, put("a/yours", b"%d" % n))) == [["write_one"]]
    assert [commit.version for commit in await feed_of(engine)] == list(range(1, 27))
    await other.close()


@pytest.mark.parametrize(
    "batch",
    [
        put("a/mine", b"2", ttl_ms=1000),
        Batch("a", (Put("a/mine", b"2", ttl_ms=1000), Put("a/new", b"1", ttl_ms=2000), Put("a/other", b"1"))),
        Batch("a", (Increment("a/count", 1, ttl_ms=1000),)),
        Batch("a", (Touch("a/lease", 100_000),)),
        Batch("a", (Touch("a/lease", 100_000), Put("a/mine", b"2"))),
    ],
    ids=["put", "puts", "increment", "touch", "touch and put"],
)
async def test_what_expires_lives_from_the_moment_it_is_written_although_others_wrote_since(
    url: str, batch: Batch, trips: Trips, stack: contextlib.AsyncExitStack
) -> None:
    """In one round trip: the other's clock, and so the time of the space, is ahead of what this writer evaluates with."""
    clock, ahead = ManualClock(), ManualClock()
    engine, other = [await stack.enter_async_context(opened(url, each)) for each in (clock, ahead)]
    model = MemoryEngine(clock=clock)
    before = [put("a/mine"), put("a/count"), put("a/lease", ttl_ms=10_000)]
    for each in before:
        assert await engine.commit(SPACE, each) == await model.commit(SPACE, each)
    for n in range(3):  # each knows that there is another
        for each, name in ((engine, "a/mine"), (other, "a/yours")):
            await each.commit(SPACE, put(name, b"%d" % n))
            await model.commit(SPACE, put(name, b"%d" % n))
    clock.advance("1ms")
    ahead.advance("501ms")
    await other.commit(SPACE, put("a/yours", b"late"))
    written: list[Receipt] = []

    async def write() -> None:
        written.append(await engine.commit(SPACE, batch))

    assert len(await trips.of(write())) == 1
    clock.advance("500ms")
    await model.commit(SPACE, put("a/yours", b"late"))
    assert written == [await model.commit(SPACE, batch)]
    assert await feed_of(other) == await feed_of(model)
    expected = await model.scan(SPACE, "a/")
    assert [await each.scan(SPACE, "a/") for each in (engine, other)] == [expected, expected]
    again = Batch("a", tuple(Touch(entry.key, 1000) for entry in expected.entries))  # as this writer remembers it
    assert await engine.commit(SPACE, again) == await model.commit(SPACE, again)


# --- total order ---


async def feed_of(engine: PostgresEngine | MemoryEngine, after: int = 0) -> list[ChangeSet]:
    return [commit async for commit in engine.watch(SPACE, cursor=cursor_at(after), live=False)]


def random_batch(chance: random.Random, n: int) -> Batch:
    keys = [f"a/{i}" for i in range(12)]
    choices: list[Callable[[], Operation]] = [
        lambda: Put(chance.choice(keys), b"%d" % chance.choice((1, 22)), tag=chance.choice(("", "t"))),
        lambda: Put(chance.choice(keys), b"1", owner=chance.choice(("a", "b"))),
        lambda: Put(chance.choice(keys), b"5", ttl_ms=chance.choice((1000, 50_000))),
        lambda: Delete(chance.choice(keys)),
        lambda: Increment(chance.choice(keys), 1),
        lambda: Increment(chance.choice(keys), 1, ttl_ms=30_000),
        lambda: Push("q/", b"1"),
        lambda: Push("l/", b"1"),
        lambda: Take("l/", f"r/{n}/", 9),
        lambda: Take("q/", f"r/{n}/"),
        lambda: Touch("t/lease", chance.choice((60_000, 70_000))),
    ]
    weights = (8, 3, 4, 2, 2, 1, 1, 1, 1, 1, 2)
    operations = [make() for make in chance.choices(choices, weights, k=chance.randint(1, 2))]
    chosen: list[tuple[Condition, ...]] = [
        (),
        (),
        (),
        (),
        (Present(keys[0]),),
        (Absent(keys[1]),),
        (AtLeast(keys[2], 2),),
    ]
    chosen += [(Mine(keys[0]),), (Empty("l/"),), (Empty(f"r/{n}/"),)]
    conditions = chance.choice(chosen)
    request = f"r{n}" if chance.random() < 0.2 else None
    return Batch(chance.choice(("a", "b")), (*operations, Put(f"u/{n}", b"1")), conditions, request)


async def one_after_the_other(engine: PostgresEngine, batches: list[Batch]) -> list[tuple[Receipt, Batch]]:
    """Commit them; gives those that were not refused."""
    done = []
    for batch in batches:
        with contextlib.suppress(Error):
            done.append((await engine.commit(SPACE, batch), batch))
    return done


@pytest.mark.parametrize("apart_ms", [0, 7])
@pytest.mark.parametrize("seed", range(30 if os.environ.get("HOLDFAST_SOAK") else 2))
async def test_what_is_written_after_others_is_what_an_evaluation_there_gives(
    url: str, seed: int, apart_ms: int, monkeypatch: pytest.MonkeyPatch, stack: contextlib.AsyncExitStack
) -> None:
    """Random batches through three engines at once, whose clocks differ; repeated in the order of their versions they give the same."""
    outcomes: list[int] = []
    answered = Writer._answered

    def counted(writer: Writer, rows: Any) -> Reply:
        reply = answered(writer, rows)
        outcomes.append(reply.outcome)
        return reply

    monkeypatch.setattr(Writer, "_answered", counted)
    chance = random.Random(seed)
    clocks = [ManualClock(1_750_000_000_000 + i * apart_ms) for i in range(3)]
    engines = [await stack.enter_async_context(opened(url, clock)) for clock in clocks]
    when = AsTold(clocks[0])
    model = MemoryEngine(clock=when)
    for each in (model, engines[0]):
        await each.commit(SPACE, Batch("a", (Put("t/lease", b"1", ttl_ms=60_000),)))
    number = 0
    for _ in range(12):
        batches = [random_batch(chance, number + i) for i in range(30)]
        number += len(batches)
        parts = await asyncio.gather(*(one_after_the_other(each, batches[i::3]) for i, each in enumerate(engines)))
        done = [(*each, clock) for part, clock in zip(parts, clocks, strict=True) for each in part]
        for receipt, batch, when.clock in sorted(done, key=lambda each: each[0].version):
            assert await model.commit(SPACE, batch) == receipt
        ahead = chance.choice((0.001, 0.4, 2))
        for each, when.clock in zip(engines, clocks, strict=True):
            when.clock.advance(ahead)
            assert await each.scan(SPACE, "") == await model.scan(SPACE, "")
        assert await engines[2].spaces(SPACE) == await model.spaces(SPACE)
    assert await feed_of(engines[2]) == await feed_of(model)
    assert outcomes.count(REBASED) > 5, "nothing was written after others"


class AsTold:
    """The clock of one or the other."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def now_ms(self) -> int:
        return self.clock.now_ms()

    async def sleep_until(self, at_ms: int) -> None:
        await self.clock.sleep_until(at_ms)


def without_the_lock() -> tuple[str, ...]:
    *tables, functions = postgres_schema.STEPS
    assert functions.count("PERFORM pg_advisory_xact_lock(_class, _space);") == 2
    return *tables, functions.replace("PERFORM pg_advisory_xact_lock(_class, _space);", "")


@pytest.mark.parametrize("locked", [True, False])
async def test_the_order_is_the_locks_doing(
    postgres_server: PostgresServer, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite's test of the order passes, and on the same engine without its lock it fails.

    The feed's primary key is a second guard: a commit that comes to the same place as another is refused, not lost.
    """
    if not locked:
        monkeypatch.setattr(postgres_schema, "STEPS", without_the_lock())
        monkeypatch.setattr(postgres_commit, "LOCK", statement("lock", "SELECT $1::int4, $2::int4"))
    schema = f"lock_{uuid.uuid4().hex[:12]}"

    def new_storage() -> OpenEngine:
        return lambda clock: PostgresEngine.open(f"{postgres_server.url}?schema={schema}", clock=clock)

    factory = EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True))
    async with Subject(factory) as subject:
        test = conformance.TestTotalOrder().test_increments_through_two_engines_are_all_counted
        if locked:
            await test(subject)
        else:
            with pytest.raises((AssertionError, Unavailable)):
                await again_and_again(test, subject)


async def again_and_again(test: Callable[[Subject], Awaitable[None]], subject: Subject) -> None:
    for _ in range(200):
        await test(subject)
        await subject.commit(Delete("a/n"))


async def test_the_feed_of_many_processes_is_complete_and_in_order_although_a_foreign_transaction_is_open(
    url: str, engine: PostgresEngine
) -> None:
    """32 writers in 4 processes, a hot counter among what they write, and a snapshot that keeps every dead row alive."""
    start = (await engine.commit(SPACE, put("n/all", b"0"))).version
    foreign = await psycopg.AsyncConnection.connect(url.partition("?")[0])
    await foreign.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    await foreign.execute("SELECT 1")
    seen: list[ChangeSet] = []
    gaps: list[float] = []

    async def follow(count: int) -> None:
        last = time.monotonic()
        async for commit in engine.watch(SPACE, cursor=cursor_at(start)):
            seen.append(commit)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if len(seen) == count:
                return

    expected = PROCESSES * WRITERS * COMMITS
    watching = asyncio.create_task(follow(expected))
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, __file__, url, str(n), stdout=subprocess.PIPE)
        for n in range(PROCESSES)
    ]
    given: list[tuple[int, str]] = []
    for process in processes:
        out, _ = await process.communicate()
        assert process.returncode == 0
        given += [(version, key) for version, key in json.loads(out)]
    await asyncio.wait_for(watching, 60)
    await foreign.close()
    assert [commit.version for commit in seen] == list(range(start + 1, start + 1 + expected))
    assert sorted(given) == [(commit.version, commit.changes[1].key) for commit in seen]
    assert [int(commit.changes[0].value) for commit in seen] == list(range(1, expected + 1))
    assert max(gaps[1:]) < 10, "it stalled"


async def one_of_the_processes(url: str, number: str) -> None:
    engine = await PostgresEngine.open(url, clock=SystemClock())

    async def write(writer: int) -> list[tuple[int, str]]:
        given = []
        for i in range(COMMITS):
            key = f"w/{number}/{writer}/{i % 4}"
            receipt = await engine.commit(SPACE, Batch("a", (Increment("n/all", 1), Put(key, b"%d" % i))))
            given.append((receipt.version, key))
        return given

    given = await asyncio.gather(*(write(writer) for writer in range(WRITERS)))
    await engine.close()
    sys.stdout.write(json.dumps([each for part in given for each in part]))


# --- a foreign transaction ---


async def test_a_hot_entry_does_not_get_slower_while_a_foreign_transaction_is_open(
    url: str, engine: PostgresEngine
) -> None:
    """Every dead version of the entry stays while the foreign snapshot lives; finding the newest must not walk over them."""
    await engine.commit(SPACE, put("n/hot", b"0"))
    foreign = await psycopg.AsyncConnection.connect(url.partition("?")[0])
    await foreign.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    await foreign.execute("SELECT 1")
    for _ in range(1500):
        await engine.commit(SPACE, Batch("a", (Increment("n/hot", 1),)))
    async with await psycopg.AsyncConnection.connect(url.partition("?")[0], autocommit=True) as shell:
        await shell.execute(f"SET search_path = {url.partition('schema=')[2]}; SET enable_seqscan = off")
        plan = await shell.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT value FROM entries WHERE space = 1 AND key = 'n/hot' "
            "ORDER BY version DESC LIMIT 1"
        )
        [(found,)] = await plan.fetchall()
    await foreign.close()
    assert found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"] < 20


if __name__ == "__main__":
    asyncio.run(one_of_the_processes(*sys.argv[1:]))
