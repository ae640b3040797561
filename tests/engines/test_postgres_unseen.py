"""Keys a process does not remember, in PostgreSQL: a put replaces what is there unseen, exactly as if it had been seen."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.soak import SOAK

from holdfast.clock import Clock, ManualClock
from holdfast.engine import (
    Absent,
    Batch,
    ChangeSet,
    Condition,
    Delete,
    Entry,
    Increment,
    Operation,
    Present,
    Put,
    Receipt,
    Take,
    Touch,
    Usage,
    cursor_at,
)
from holdfast.engines import postgres_state
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.postgres import PostgresEngine
from holdfast.engines.postgres_commit import Writer
from holdfast.engines.postgres_link import SEPARATOR, Call, Link
from holdfast.engines.postgres_rows import Reply
from holdfast.errors import Conflict, Error
from holdfast.testing.servers.postgres import PostgresServer

SPACE = "large"
KNOWN = 3
"""So few keys are remembered, so that almost every key is unknown."""
ROUNDS, PER_ROUND = 20, 24


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return f"{postgres_server.url}?schema=u_{uuid.uuid4().hex[:12]}"


@contextlib.asynccontextmanager
async def opened(url: str, clock: Clock | None = None) -> AsyncIterator[PostgresEngine]:
    engine = await PostgresEngine.open(url, clock=clock)
    try:
        yield engine
    finally:
        await engine.close()


def put(key: str, value: bytes = b"1", actor: str = "a", **more: Any) -> Batch:
    return Batch(actor, (Put(key, value, **more),))


async def feed_of(engine: PostgresEngine | MemoryEngine) -> list[ChangeSet]:
    return [commit async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False)]


@contextlib.asynccontextmanager
async def unknowing(url: str, clock: Clock, *before: Batch) -> AsyncIterator[PostgresEngine]:
    """An engine that has just begun to write to a space, into which others have put something before."""
    async with opened(url, clock) as other:
        for batch in before:
            await other.commit(SPACE, batch)
    async with opened(url, clock) as engine:
        await engine.commit(SPACE, put("a/mine"))
        yield engine


class Calls:
    """What writes, as it is sent: the names of functions, and "plain"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        send = Link.send

        def counted(link: Link, *calls: Call, **options: Any) -> Any:
            names = [statement.name.decode() for statement, _ in calls]
            self.sent += [
                name if name.startswith("write_") else "plain" for name in names if name[:6] in ("write_", "plain_")
            ]
            return send(link, *calls, **options)

        monkeypatch.setattr(Link, "send", counted)

    def taken(self) -> list[str]:
        sent, self.sent = self.sent, []
        return sent

    def by_functions(self) -> list[str]:
        """Only what plain SQL could not do."""
        return [name for name in self.taken() if name != "plain"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# --- what it is worth ---


async def test_an_unknown_key_is_replaced_without_a_read_and_known_from_then_on(url: str, calls: Calls) -> None:
    clock = ManualClock()
    async with unknowing(url, clock, put("a/k", b"10")) as engine:
        calls.taken()
        clock.advance(1)
        await engine.commit(SPACE, put("a/k", b"200"))
        assert calls.taken() in (["plain", "write_one"], ["write_one"])
        assert (await engine.commit(SPACE, Batch("a", (Increment("a/k", 1),)))).results == [201]
        assert len(calls.taken()) == 1


async def test_who_finds_unknown_keys_there_soon_takes_them_for_absent_no_more(url: str, calls: Calls) -> None:
    count = 200
    async with unknowing(url, ManualClock(), *(put(f"a/{n}") for n in range(count))) as engine:
        calls.taken()
        for n in range(count):
            await engine.commit(SPACE, put(f"a/{n}", b"2"))
        taken = calls.taken()
        assert taken.count("write_one") == count
        assert taken.count("plain") <= 12
        for n in range(count):
            await engine.commit(SPACE, put(f"a/new{n}"))
        assert calls.taken().count("plain") >= count - 40


async def test_a_group_of_unknown_keys_is_replaced_in_one_call(url: str, calls: Calls) -> None:
    before = [put(f"a/{n}", b"1" * n) for n in range(1, 20)]
    async with unknowing(url, ManualClock(), *before) as engine:
        calls.taken()
        await asyncio.gather(*(engine.commit(SPACE, put(f"a/{n}", b"22")) for n in range(40)))
        assert calls.taken() in (["plain", "write_group"], ["write_group"])
        [info] = await engine.spaces(SPACE)
        assert info.usage == [Usage("a", "a", 41, sum(len(f"a/{n}") + 2 for n in range(40)) + len("a/mine") + 1)]


async def test_a_group_may_have_any_character_in_its_keys(url: str) -> None:
    keys = [f"records/{chr(each)}{SEPARATOR}{chr(each)}/" for each in (*range(1, 40), 0xD7FF, 0xE000, 0x10FFFF)]
    async with opened(url) as engine:
        for value in (b"1", b"2"):
            await engine.commit(SPACE, Batch("a", tuple(Put(key, value, tag=":x:y") for key in keys)))
            assert [entry and entry.value for entry in await engine.get(SPACE, keys)] == [value] * len(keys)
        await engine.commit(SPACE, Batch("a", tuple(Delete(key) for key in keys)))
        assert await engine.get(SPACE, keys) == [None] * len(keys)


async def test_one_entry_needs_no_comparison_whatever_else_it_is_conditional_on(url: str, calls: Calls) -> None:
    """As long as nobody else writes: then what was seen is as it was."""
    async with opened(url) as engine, opened(url) as other:
        await engine.commit(SPACE, Batch("a", (Put("k/right", b"1"), Put("k/other", b"1"))))
        conditional = Batch("a", (Put("k/new", b"2"),), (Present("k/right"),))
        calls.taken()
        await engine.commit(SPACE, conditional)
        assert calls.taken() in (["plain"], ["write_one"])
        await other.commit(SPACE, Batch("b", (Delete("k/right"),)))
        with pytest.raises(Conflict):
            await engine.commit(SPACE, conditional)
        await other.commit(SPACE, Batch("b", (Put("k/right", b"3"),)))
        calls.taken()
        await engine.commit(SPACE, conditional)
        assert calls.taken()[-1] == "write_group"  # others write: what it is conditional on is compared


async def test_what_depends_on_the_entry_is_evaluated_again(url: str, calls: Calls) -> None:
    """A condition, a sum, a tag that the feed must tell: the key comes back with the answer."""
    before = [put("a/n", b"41"), put("a/there"), put("a/tagged", tag="list")]
    async with unknowing(url, ManualClock(), *before) as engine:
        calls.taken()
        assert (await engine.commit(SPACE, Batch("a", (Increment("a/n", 1),)))).results == [42]
        assert calls.by_functions() == ["write_one", "write_one"]
        with pytest.raises(Conflict):
            await engine.commit(SPACE, Batch("a", (Put("a/there", b"2"),), (Absent("a/there"),)))
        assert calls.by_functions() == ["write_one", "write_group"]
        await engine.commit(SPACE, put("a/tagged"))
        assert calls.by_functions() == ["write_one", "write_one"]
        assert (await feed_of(engine))[-1].changes[0].was == "list"


# --- that it is exact ---


async def test_what_is_replaced_unseen_keeps_its_birth_and_its_owner_is_credited(url: str) -> None:
    clock = ManualClock()
    born = clock.now_ms()
    before = [put("a/one", b"12345", "b"), put("a/two", b"12", "b"), put("a/three", b"123", "c")]
    async with unknowing(url, clock, *before) as engine:
        clock.advance(5)
        first = await engine.commit(SPACE, put("a/one", b"1"))
        pair = await engine.commit(SPACE, Batch("a", (Put("a/two", b"1"), Put("a/three", b"1", owner="c"))))
        later = clock.now_ms()
        expected = [
            Entry("a/one", b"1", first.version, "a", born, later),
            Entry("a/two", b"1", pair.version, "a", born, later),
            Entry("a/three", b"1", pair.version, "c", born, later),
        ]
        assert await engine.get(SPACE, ["a/one", "a/two", "a/three"]) == expected
        [info] = await engine.spaces(SPACE)
        assert info.usage == [Usage("a", "a", 3, 19), Usage("c", "a", 1, 8)]


async def test_a_take_onto_an_unknown_entry_keeps_the_birth_of_what_is_taken(url: str) -> None:
    clock = ManualClock()
    async with unknowing(url, clock, put("r/x", b"old", "b")) as engine:
        clock.advance(1)
        born = clock.now_ms()
        await engine.commit(SPACE, put("q/x", b"new"))
        clock.advance(1)
        taken = await engine.commit(SPACE, Batch("a", (Take("q/", "r/"),)))
        moved = Entry("r/x", b"new", taken.version, "a", born, clock.now_ms())
        assert taken.results == [[moved]]
        assert await engine.get(SPACE, ["r/x"]) == [moved]
        [info] = await engine.spaces(SPACE)
        assert info.usage == [Usage("a", "a", 1, 7), Usage("a", "r", 1, 6)]


class LeapingClock(ManualClock):
    """Leaps once, right after it was looked at: time passes between an evaluation and its arrival at the server."""

    leap_s = 0

    def now_ms(self) -> int:
        now = super().now_ms()
        leap, self.leap_s = self.leap_s, 0
        if leap:
            self.advance(leap)
        return now


@pytest.mark.parametrize("count", [1, 2])
async def test_an_unknown_entry_that_expires_on_the_way_is_told_before_what_replaces_it(url: str, count: int) -> None:
    clock = LeapingClock()
    before = Batch("b", tuple(Put(f"a/{n}", b"old", ttl_ms=10_000) for n in range(count)))
    async with unknowing(url, clock, before) as engine:
        clock.leap_s = 10
        await engine.commit(SPACE, Batch("a", tuple(Put(f"a/{n}", b"new") for n in range(count))))
        assert clock.leap_s == 0
        *_, expiry, replaced = await feed_of(engine)
        assert [(change.op, change.key) for change in expiry.changes] == [("expire", f"a/{n}") for n in range(count)]
        assert [(change.op, change.key) for change in replaced.changes] == [("put", f"a/{n}") for n in range(count)]
        entries = await engine.get(SPACE, [f"a/{n}" for n in range(count)])
        assert [entry.created_at for entry in entries if entry is not None] == [clock.now_ms()] * count


def random_batch(chance: random.Random, n: int) -> Batch:
    """Mostly one put, of one of twenty keys, so that groups put the same key several times."""
    keys = [f"{subspace}/{i}" for subspace in ("a", "b") for i in range(10)]
    actor, key = chance.choice(("a", "b")), chance.choice(keys)
    puts: list[Callable[[], Operation]] = [
        lambda: Put(key, b"1" * chance.randint(1, 3)),
        lambda: Put(key, b"1", owner=chance.choice(("b", "c"))),
        lambda: Put(key, b"1", tag="t"),
        lambda: Put(key, b"1", ttl_ms=chance.choice((1, 1000, 50_000))),
    ]
    [first] = chance.choices(puts, (10, 3, 1, 1))
    operations: tuple[Operation, ...] = (first(),)
    conditions: tuple[Condition, ...] = ()
    if chance.random() < 0.3:
        other = chance.choice(keys)
        operations += (chance.choice((Put(other, b"22"), Delete(other), Increment(other, 1), Touch(other, 60_000))),)
    if chance.random() < 0.1:
        conditions = (chance.choice((Absent, Present))(chance.choice(keys)),)
    return Batch(actor, operations, conditions, f"r{n}" if chance.random() < 0.1 else None)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
async def test_random_histories_of_a_forgetful_process_are_those_of_the_memory_engine(
    url: str, processes: int, at_once: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and among others, batch by batch and in groups; repeated in the order of their versions they give the same."""
    monkeypatch.setattr(postgres_state, "KNOWN_MAX", KNOWN)
    unseen = 0
    answered = Writer._answered

    def counted(writer: Writer, rows: Any) -> Reply:
        nonlocal unseen
        reply = answered(writer, rows)
        unseen += len(reply.created)
        return reply

    monkeypatch.setattr(Writer, "_answered", counted)
    chance, clock = random.Random(seed), ManualClock()
    model, number = MemoryEngine(clock=clock), 0

    async def commit(engine: PostgresEngine, batches: list[Batch]) -> list[tuple[Receipt, Batch]]:
        done = []
        for batch in batches:
            with contextlib.suppress(Error):
                done.append((await engine.commit(SPACE, batch), batch))
        return done

    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened(url, clock)) for _ in range(processes)]
        writers = engines * at_once
        for _ in range(ROUNDS):
            batches = [random_batch(chance, number + i) for i in range(PER_ROUND)]
            number += PER_ROUND
            parts = await asyncio.gather(
                *(commit(engine, batches[i :: len(writers)]) for i, engine in enumerate(writers))
            )
            for receipt, batch in sorted((each for part in parts for each in part), key=lambda each: each[0].version):
                assert await model.commit(SPACE, batch) == receipt
            clock.advance(chance.choice((0.001, 0.4, 2)))
            assert await engines[-1].scan(SPACE, "") == await model.scan(SPACE, "")
            assert await engines[-1].spaces(SPACE) == await model.spaces(SPACE)
        assert await feed_of(engines[0]) == await feed_of(model)
    assert unseen > 5, "hardly anything was replaced unseen"
