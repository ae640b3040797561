"""Queues against a model: whatever two consumers do, and whenever one dies, what comes next is what the model says."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Empty, LeaseLost, ManualClock, Message, Requeue, Space
from holdfast.layers import receiving
from holdfast.layers.leases import Leases
from holdfast.layers.locks import Coordination
from holdfast.layers.queue_entries import position_at

LEASE_MS = 5_000
ATTEMPTS = 3
POLICY = Requeue(attempts=ATTEMPTS, backoff="1s", factor=2, jitter=0)
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"

step = st.one_of(
    st.tuples(st.just("put"), st.integers(-1, 1), st.sampled_from([0, 0, 500, 2000])),
    st.tuples(st.just("take"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("take"), st.integers(0, 1), st.just(0)),
    st.tuples(st.sampled_from(["complete", "fail", "release", "delay"]), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("pass"), st.sampled_from([100, 1000, 3000]), st.just(0)),
    st.tuples(st.just("die"), st.integers(0, 1), st.just(0)),
)
steps = st.lists(step, max_size=40)


@dataclass
class Modelled:
    """A message as the model has it. Its place is what its key sorts by."""

    id: str
    body: int
    priority: int
    position: str
    due_ms: int = 0
    failures: int = 0
    state: str = "waiting"

    @property
    def order(self) -> tuple[int, str, str]:
        return -self.priority, self.position, "" if self.position == self.id else self.id


@dataclass
class Consumer:
    """A process: it has leases of its own, and can die."""

    space: Space
    clock: ManualClock
    held: list[tuple[Message, Modelled]] = field(default_factory=list)
    lives_until: int | None = None
    """When its lease is over that nobody keeps alive any more."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.coordination = Coordination(Leases(self.clock))
        self.view = Space(self.space._scope, self.space._blob_folder, self.coordination)
        self.queue = self.view.queue("q", lease="5s", on_error=POLICY, on_death=POLICY)

    async def die(self) -> None:
        """Everything of it stops at once, and nothing is given back."""
        for name in list(self.coordination._shared.values()):
            task = getattr(name, "_task", None)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if isinstance(name, receiving.Receiver):
                name._stop_watching()
        await self.coordination.leases.close()


class Comparison:
    """Does a step to the queue and to the model, and compares."""

    def __init__(self, store: holdfast.Store, clock: ManualClock) -> None:
        self.clock = clock
        self.space = store.space("contoso", agent="model")
        self.messages: list[Modelled] = []
        self.consumers = [Consumer(store.space("contoso", agent=name), clock) for name in ("one", "two")]
        self.left: list[tuple[int, list[tuple[Message, Modelled]]]] = []
        """What dead consumers have, and until when."""
        self.done: list[int] = []
        self.bodies = iter(range(10_000))

    async def put(self, priority: int, delay_ms: int) -> None:
        body = next(self.bodies)
        delay = None if delay_ms == 0 else delay_ms / 1000
        due = self.clock.now_ms() + delay_ms
        id = await self.space.queue("q").put(body, priority=priority, delay=delay)
        self.messages.append(Modelled(id, body, priority, position_at(due) if delay_ms else id, due))

    async def take(self, who: int, _: int) -> None:
        consumer, now = self.consumers[who], self.clock.now_ms()
        try:
            message = await asyncio.wait_for(consumer.queue.take(), 20)
        except Empty:
            message = None
        self.reclaim(now)
        waiting = sorted(
            (each for each in self.messages if each.state == "waiting" and each.due_ms <= now),
            key=lambda each: each.order,
        )
        expected = waiting[0] if waiting else None
        if expected is None or message is None:
            assert (expected is None, message is None) == (True, True), (expected, message)
            return
        assert (message.id, message.body, message.attempts) == (expected.id, expected.body, expected.failures)
        expected.state = "held"
        consumer.held.append((message, expected))

    def reclaim(self, now: int) -> None:
        """Who takes finds what the dead have left, if their time is over."""
        for lives_until, held in [each for each in self.left if each[0] <= now]:
            self.left.remove((lives_until, held))
            for _, modelled in held:
                self.fail(modelled, now)

    def fail(self, modelled: Modelled, now: int) -> None:
        modelled.failures += 1
        if modelled.failures >= ATTEMPTS:
            modelled.state = "dead"
        else:
            modelled.state = "waiting"
            modelled.due_ms = now + POLICY.delay_ms(modelled.failures)
            modelled.position = position_at(modelled.due_ms)

    async def complete(self, who: int, which: int) -> None:
        if (found := self.chosen(who, which)) is not None:
            await found[0].complete(found[1].body, to="done")
            found[1].state = "done"
            self.done.append(found[1].body)

    async def release(self, who: int, which: int) -> None:
        if (found := self.chosen(who, which)) is not None:
            await found[0].release()
            found[1].state = "waiting"

    async def delay(self, who: int, which: int) -> None:
        if (found := self.chosen(who, which)) is not None:
            await found[0].release(delay=1)
            found[1].state, found[1].due_ms = "waiting", self.clock.now_ms() + 1000
            found[1].position = position_at(found[1].due_ms)

    async def fails(self, who: int, which: int) -> None:
        if (found := self.chosen(who, which)) is not None:
            await found[0].fail("as the model says")
            self.fail(found[1], self.clock.now_ms())

    def chosen(self, who: int, which: int) -> tuple[Message, Modelled] | None:
        held = self.consumers[who].held
        return held.pop(which % len(held)) if held else None

    async def passes(self, ms: int, _: int) -> None:
        """Time goes by in small steps, so that leases of the living are renewed."""
        while ms > 0:
            self.clock.advance(min(ms, 1000) / 1000)
            ms -= 1000
            for consumer in self.consumers:
                leases = consumer.coordination.leases
                while leases._aside or any(lease.renew_at <= self.clock.now_ms() for lease in leases._kept):
                    await asyncio.sleep(0)

    async def die(self, who: int, _: int) -> None:
        consumer = self.consumers[who]
        ends = [lease.good_until for lease in consumer.coordination.leases._kept]
        await consumer.die()
        if consumer.held:
            self.left.append((max(ends), consumer.held))
        consumer.held = []
        consumer.start()

    async def compare(self) -> None:
        now, queue = self.clock.now_ms(), self.space.queue("q")
        stats = await queue.stats()
        count = {state: sum(each.state == state for each in self.messages) for state in ("waiting", "held", "dead")}
        assert stats.message_count == stats.ready + stats.delayed == count["waiting"], (stats, now)
        assert (stats.reserved, stats.dead) == (count["held"], count["dead"])
        assert sorted(each.body for each in await self.space.queue("done").peek(1000)) == sorted(self.done)
        dead = {each.id: len(each.reasons) for each in await queue.dead.list()}
        assert dead == {each.id: ATTEMPTS for each in self.messages if each.state == "dead"}

    async def end(self) -> None:
        """The dead come back, and can write nothing about what is not theirs."""
        await self.passes(LEASE_MS, 0)
        before = list(self.left)
        await self.take(0, 0)
        for _, held in before:
            for message, _ in held:
                with pytest.raises(LeaseLost):
                    await message.complete("twice", to="done")
        await self.compare()
        for consumer in self.consumers:
            await consumer.die()


async def compared(url: str, drawn: list[tuple[str, int, int]]) -> None:
    clock = ManualClock()
    async with holdfast.open(url, clock=clock, background=False) as store:
        comparison = Comparison(store, clock)
        names = {"pass": comparison.passes, "fail": comparison.fails}
        for name, first, second in drawn:
            await names.get(name, getattr(comparison, name, None))(first, second)  # type: ignore[misc]
            if name != "pass":
                await comparison.compare()
        await comparison.end()


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look each time: in between, what is due may come up to LOOK_MS later, and the model knows no such thing."""
    monkeypatch.setattr(receiving, "LOOK_MS", 0)


HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=1500 if SOAK else 80, deadline=None, suppress_health_check=HEALTH)
@given(steps)
def test_a_queue_does_what_its_model_does(drawn: list[tuple[str, int, int]]) -> None:
    asyncio.run(compared("memory:", drawn))


@settings(max_examples=60 if SOAK else 6, deadline=None, suppress_health_check=HEALTH)
@given(steps)
def test_a_queue_does_what_its_model_does_on_sqlite(drawn: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compared(str(Path(folder) / "team.db"), drawn))


_numbers = iter(range(1_000_000))


@pytest.mark.parametrize("server", ["redis", "postgres"])
def test_a_queue_does_what_its_model_does_on_servers(server: str, request: pytest.FixtureRequest) -> None:
    running = request.getfixturevalue(f"{server}_server").url

    @settings(max_examples=60 if SOAK else 5, deadline=None, suppress_health_check=HEALTH)
    @given(steps)
    def check(drawn: list[tuple[str, int, int]]) -> None:
        name = "prefix" if server == "redis" else "schema"
        asyncio.run(compared(f"{running}?{name}=model{next(_numbers)}", drawn))

    check()
