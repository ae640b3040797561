"""Guarantee 9, one evaluator: random histories end on the engine under test as they end in the memory engine.

A Hypothesis state machine sends the same batches, at the same times of one ManualClock, to a MemoryEngine and to the engine
under test: every operation and condition, ttls and moves of the clock, repeated requests, groups of concurrent commits,
compaction, drop, load, reopening, and a second engine on the same storage where the engine has these. After every step
the outcome (the receipt, or the error with its attributes) and everything the spaces show are compared; at the end the
whole feed.

Concurrent commits may be ordered as the engine likes, so they are repeated on the memory engine in the order of the
versions they were given, and must then give the same receipts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from holdfast.engine import (
    FEED_VALUE_BYTES_MAX,
    REQUEST_WINDOW_MS,
    Absent,
    AtLeast,
    Batch,
    ChangeSet,
    Condition,
    Delete,
    Empty,
    Engine,
    Entry,
    Increment,
    Mine,
    Present,
    Push,
    Put,
    Receipt,
    SpaceInfo,
    Take,
    Touch,
    ValueIs,
    VersionIs,
    cursor_at,
)
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Conflict, Error
from holdfast.testing.conformance.subject import EngineFactory, Subject

T = TypeVar("T")

STEPS: Final = 30
SOAK_FACTOR: Final = 100
SOAK_STEPS: Final = 80

SPACES: Final = ("one", "two")
PREFIXES: Final = ("q/", "r/", "r0/", "a/")
KEYS: Final = ("a/1", "a/2", "a/\u00e9", "n/1", "n/2", "q/1", "q/2", "r/1", "r0/1", "\U0010ffff/z")
NUMBERS: Final = (0, 1, -7, 41, 2**53 + 1, 2**63 - 1, -(2**63))
VALUES: Final = (
    *(b"%d" % number for number in NUMBERS),
    b"1.0",
    b'"x"',
    b'"a\\u0000b"',
    b'{"a":[1,2]}',
    b'"LARGE"',
)
LARGE: Final = b'"' + b"y" * FEED_VALUE_BYTES_MAX + b'"'
"""What stands for "LARGE" when a batch is sent: too long to be printed with a failing history."""

TTLS: Final = (1, 500, 1000, 10_000)
GROUP: Final = "group-"
"""What the request ids of concurrent commits begin with."""

keys = st.sampled_from(KEYS)
values = st.sampled_from(VALUES)
ttls = st.sampled_from((None, *TTLS))
tags = st.sampled_from(("", "job"))
ranges = st.sampled_from([(a, b) for a in PREFIXES for b in PREFIXES if a != b])
counters = st.sampled_from((None, "n/1", "n/2", "a/1"))

puts = st.builds(Put, keys, values, ttls, tags, st.sampled_from((None, "carol")))
pushes = st.builds(Push, st.sampled_from(PREFIXES), values, ttls, tags)
increments = st.builds(Increment, st.sampled_from(("n/1", "n/2", "a/1")), st.sampled_from(NUMBERS), ttls)
takes = st.builds(
    lambda pair, n, upto, source, target: Take(pair[0], pair[1], n, upto and pair[0] + upto, source, target),
    ranges,
    st.integers(1, 4),
    st.sampled_from((None, "1", "2", "5")),
    counters,
    counters,
)
operations = st.one_of(
    puts, puts, pushes, increments, takes, st.builds(Delete, keys), st.builds(Touch, keys, st.sampled_from(TTLS))
)
conditions = st.one_of(
    st.builds(Absent, keys),
    st.builds(Present, keys),
    st.builds(ValueIs, keys, values),
    st.builds(AtLeast, st.sampled_from(("n/1", "n/2", "a/2")), st.sampled_from(NUMBERS)),
    st.builds(VersionIs, keys, st.integers(-1, 1)),
    st.builds(Mine, keys),
    st.builds(Empty, st.sampled_from(PREFIXES)),
)
"""A VersionIs is drawn with its distance from the key's present version, and gets the version when it is sent."""

actors = st.sampled_from(("alice", "bob"))
batches = st.builds(
    lambda actor, ops, when, request_id: Batch(actor, tuple(ops), tuple(when), request_id),
    actors,
    st.lists(operations, max_size=5),
    st.one_of(st.just([]), st.just([]), st.lists(conditions, max_size=2)),
    st.sampled_from((None, None, None, *(f"r{i}" for i in range(8)))),
)
writes = st.builds(
    lambda actor, put, push, n: Batch(actor, (put, push, Increment("w/n", n))),
    actors,
    puts,
    pushes,
    st.integers(-5, 5),
)
"""Batches that nothing can refuse."""

spaces = st.sampled_from((*SPACES, SPACES[0]))


@dataclass(frozen=True)
class Refusal:
    """An error as far as engines must agree on it; its words are their own."""

    kind: type[Error]
    key: str | None = None
    condition: str | None = None
    actual: Entry | None = None


def with_large_values(batch: Batch) -> Batch:
    def enlarged(each: T) -> T:
        if isinstance(each, Put | Push | ValueIs) and each.value == b'"LARGE"':
            return msgspec.structs.replace(each, value=LARGE)
        return each

    return Batch(
        batch.actor, tuple(map(enlarged, batch.operations)), tuple(map(enlarged, batch.conditions)), batch.request_id
    )


async def outcome(engine: Engine, space: str, batch: Batch) -> Receipt | Refusal:
    try:
        return await engine.commit(space, batch)
    except Conflict as conflict:
        return Refusal(Conflict, conflict.key, conflict.condition, conflict.actual)
    except Error as error:
        return Refusal(type(error))


class Comparison(RuleBasedStateMachine):
    """The memory engine and the engine under test, side by side."""

    def __init__(self, factory: EngineFactory, runner: asyncio.Runner) -> None:
        super().__init__()
        self._runner = runner
        self._subject = Subject(factory)
        self._clock = self._subject.clock
        self._model = MemoryEngine(clock=self._clock)
        self._sent: list[tuple[str, Batch]] = []
        self._groups = 0
        self._other: Engine | None = None
        self._differs = False
        """A step has failed: there is nothing to learn from comparing the feeds."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._differs = True
        answer = self._runner.run(work)
        self._differs = False
        return answer

    # --- steps ---

    @initialize(durability=st.sampled_from((None, "async", "async", "async")))
    def open(self, durability: Any) -> None:
        """Spaces made by the first commit are sync; most histories are run on others, which cost no fsync."""

        async def work() -> None:
            await self._subject.__aenter__()
            if self._subject.capabilities.shared:
                self._other = await self._subject.another()
            for space in SPACES if durability else ():
                for engine in (self._model, self._subject.engine):
                    await engine.create(space, durability)

        self._run(work())

    @rule(space=spaces, history=st.lists(st.tuples(batches, st.booleans()), min_size=1, max_size=8))
    def commit(self, space: str, history: list[tuple[Batch, bool]]) -> None:
        """One after the other, through the one engine or the other."""

        async def work() -> None:
            for batch, elsewhere in history:
                await self._commit(space, batch, elsewhere)

        self._run(work())

    @rule(ago=st.integers(0, 7), elsewhere=st.booleans())
    def repeat(self, ago: int, elsewhere: bool) -> None:
        """Send one of the last requests again, as it was."""
        self._run(self._repeat(ago, elsewhere))

    @rule(space=spaces, group=st.lists(writes, min_size=2, max_size=8), repeated=st.booleans())
    def commit_together(self, space: str, group: list[Batch], repeated: bool) -> None:
        group = [with_large_values(batch) for batch in group]
        if repeated:
            self._groups += 1
            first = msgspec.structs.replace(group[0], request_id=f"{GROUP}{self._groups}")
            group = [first, *group[1:], first]
            self._sent.append((space, first))

        async def work() -> None:
            engines = [self._subject.engine, self._other or self._subject.engine]
            receipts = await asyncio.gather(*(engines[i % 2].commit(space, batch) for i, batch in enumerate(group)))
            for receipt, batch in sorted(zip(receipts, group, strict=True), key=lambda pair: pair[0].version):
                assert await self._model.commit(space, batch) == receipt
            await self._compare()

        self._run(work())

    @rule(
        ms=st.sampled_from((-60_000, -1, 1, 499, 500, 1000, 10_000, 600_000, REQUEST_WINDOW_MS)), ago=st.integers(0, 3)
    )
    def move_clock(self, ms: int, ago: int) -> None:
        """Forwards or backwards; then a request comes again."""
        if ms > 0:
            self._clock.advance(ms / 1000)
        else:
            self._clock.set_back(-ms / 1000)
        self._run(self._compare())
        self._run(self._repeat(ago, elsewhere=False))

    @rule(space=spaces, percent=st.sampled_from((0, 10, 50, 100, 150)), ago=st.integers(0, 3))
    def compact(self, space: str, percent: int, ago: int) -> None:
        """Forget a part of the feed; then a request comes again."""

        async def work() -> None:
            for info in await self._model.spaces(space):
                upto = info.feed_floor + (info.revision - info.feed_floor) * percent // 100
                await self._model.compact(space, upto)
                await self._subject.engine.compact(space, upto)
            # An engine that stores a group as one may remember its requests until all of it is compacted.
            self._sent = [(where, batch) for where, batch in self._sent if where != space or not _of_group(batch)]
            await self._compare()
            await self._repeat(ago, elsewhere=False)

        self._run(work())

    @rule(space=spaces, chance=st.integers(0, 3))
    def drop(self, space: str, chance: int) -> None:
        async def work() -> None:
            await self._model.drop(space)
            await self._subject.engine.drop(space)
            await self._compare()

        if chance == 0:
            self._run(work())

    @rule(space=spaces, durability=st.sampled_from(("sync", "async")), audit_reads=st.booleans())
    def create(self, space: str, durability: Any, audit_reads: bool) -> None:
        async def made(engine: Engine) -> object:
            try:
                return await engine.create(space, durability, audit_reads=audit_reads)
            except Error as error:
                return type(error)

        async def work() -> None:
            assert await made(self._subject.engine) == await made(self._model)
            await self._compare()

        self._run(work())

    @rule(space=spaces, found=st.lists(st.tuples(keys, values, ttls, tags), max_size=4), gap=st.integers(0, 5))
    def load(self, space: str, found: list[tuple[str, bytes, int | None, str]], gap: int) -> None:
        """Copy entries into the space; only into one that does not exist, as the contract has it."""

        async def work() -> None:
            if await self._model.spaces(space):
                return
            now = self._clock.now_ms()
            entries = {
                key: Entry(key, value, i, "dora", now - 5, now - i, ttl and now + ttl, tag)
                for i, (key, value, ttl, tag) in enumerate(found, 1)
            }
            for engine in (self._model, self._subject.engine):
                await engine.load(space, list(entries.values()), len(found) + gap)
            await self._compare()

        self._run(work())

    @rule(chance=st.integers(0, 3))
    def reopen(self, chance: int) -> None:
        async def work() -> None:
            await self._subject.reopen()
            self._other = await self._subject.another() if self._subject.capabilities.shared else None
            await self._compare()

        if chance == 0 and self._subject.capabilities.survives_reopen:
            self._run(work())

    def teardown(self) -> None:
        differs = self._differs

        async def work() -> None:
            try:
                for space in () if differs else SPACES:
                    await self._compare_feed(space)
            finally:
                await self._subject.__aexit__()

        if hasattr(self._subject, "engine"):
            self._run(work())

    # --- comparing ---

    async def _commit(self, space: str, drawn: Batch, elsewhere: bool) -> None:
        batch = await self._resolved(space, drawn)
        if batch.request_id is not None:
            self._sent.append((space, batch))
        engine = self._other if elsewhere and self._other is not None else self._subject.engine
        assert await outcome(engine, space, batch) == await outcome(self._model, space, batch)
        await self._compare()

    async def _repeat(self, ago: int, elsewhere: bool) -> None:
        if self._sent:
            await self._commit(*self._sent[-1 - ago % len(self._sent)], elsewhere)

    async def _resolved(self, space: str, batch: Batch) -> Batch:
        """The batch with its VersionIs conditions turned from distances into versions, unless it was sent before."""
        if (space, batch) in self._sent:
            return batch
        conditions: list[Condition] = []
        for condition in batch.conditions:
            if isinstance(condition, VersionIs):
                [entry] = await self._model.get(space, [condition.key])
                version = (entry.version if entry is not None else 0) + condition.version
                conditions.append(VersionIs(condition.key, version))
            else:
                conditions.append(condition)
        return with_large_values(msgspec.structs.replace(batch, conditions=tuple(conditions)))

    async def _compare(self) -> None:
        """Everything the spaces show, but for the feed."""
        subject = self._subject
        assert await _by_name(subject.engine) == await _by_name(self._model)
        for space in SPACES:
            pages = [await engine.scan(space, "") for engine in (self._model, subject.engine, self._other) if engine]
            assert all(page.entries == pages[0].entries for page in pages)
            if await self._model.spaces(space):
                assert all(page == pages[0] for page in pages)
            assert await subject.engine.get(space, list(KEYS)) == await self._model.get(space, list(KEYS))

    async def _compare_feed(self, space: str) -> None:
        last = Batch("the end", (Put("z/end", b"1"),))
        receipts = [await engine.commit(space, last) for engine in (self._model, self._subject.engine)]
        assert receipts[0] == receipts[1]
        feeds = [await self._feed(engine, space) for engine in (self._model, self._subject.engine)]
        assert feeds[0] == feeds[1]
        versions = [commit.version for commit in feeds[0]]
        assert versions == sorted(set(versions))

    async def _feed(self, engine: Engine, space: str) -> list[ChangeSet]:
        [info] = await engine.spaces(space)
        async with asyncio.timeout(self._subject.deadline_s):
            return [commit async for commit in engine.watch(space, cursor=cursor_at(info.feed_floor), live=False)]


def _of_group(batch: Batch) -> bool:
    return batch.request_id is not None and batch.request_id.startswith(GROUP)


async def _by_name(engine: Engine) -> list[SpaceInfo]:
    return sorted(await engine.spaces(), key=lambda info: info.name)


class TestOneEvaluator:
    def test_random_histories_end_as_in_the_memory_engine(self, engine_factory: EngineFactory) -> None:
        soak = os.environ.get("HOLDFAST_SOAK") == "1"
        with asyncio.Runner() as runner:
            run_state_machine_as_test(
                lambda: Comparison(engine_factory, runner),  # type: ignore[arg-type]
                settings=settings(
                    max_examples=engine_factory.histories * (SOAK_FACTOR if soak else 1),
                    stateful_step_count=SOAK_STEPS if soak else STEPS,
                    deadline=None,
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
