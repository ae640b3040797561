"""Queues: put, reserve, settle; order, delays, dedup; policies and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from holdfast import (
    Conflict,
    Empty,
    InvalidInput,
    LeaseLost,
    ManualClock,
    Message,
    NotFound,
    OutcomeUnknown,
    Queue,
    Requeue,
    Space,
    Store,
    Unavailable,
    present,
    set_,
)
from holdfast.engines.memory import MemoryEngine
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.queues import split
from holdfast.layers.receiving import LINGER_MS
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.scope import Scope
from tests.layers.conftest import everything

T = TypeVar("T")
DEADLINE_S = 20


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():
            await asyncio.sleep(0)


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk")


async def bodies(queue: Queue, limit: int = 100) -> list[Any]:
    return [message.body for message in await queue.peek(limit)]


async def take(queue: Queue) -> Any:
    async with queue.reserve() as message:
        return message.body


async def depths(queue: Queue) -> tuple[int, int, int, int]:
    stats = await queue.stats()
    return stats.ready, stats.delayed, stats.reserved, stats.dead


def die(space: Space) -> None:
    """As if the processes of this view had died: its leases are kept alive no longer, and nothing is given back."""
    leases = space._coordination.leases
    for lease in list(leases._kept):
        if lease.key.startswith("consumers/") and lease.scope.actor == space.agent:
            leases.release(lease)


# --- put and take ---


async def test_messages_come_in_the_order_in_which_they_were_put(space: Space) -> None:
    queue = space.queue("orders")
    ids = [await queue.put({"n": number}) for number in range(5)]
    assert ids == sorted(ids)
    assert [len(id) for id in ids] == [19] * 5
    assert [await take(queue) for _ in range(5)] == [{"n": number} for number in range(5)]
    assert await depths(queue) == (0, 0, 0, 0)


async def test_a_higher_priority_comes_first_and_within_it_who_came_first(space: Space) -> None:
    queue = space.queue("orders")
    for body, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 5), ("e", 499), ("f", -500)):
        await queue.put(body, priority=priority)
    assert await bodies(queue) == ["e", "b", "d", "a", "c", "f"]
    assert [await take(queue) for _ in range(6)] == ["e", "b", "d", "a", "c", "f"]


async def test_a_delayed_message_comes_when_it_is_due_and_stands_where_it_would_have_come_then(
    space: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders")
    await queue.put("late", delay="10s")
    await queue.put("urgent", delay="10s", priority=9)
    await queue.put("now")
    assert await depths(queue) == (1, 2, 0, 0)
    assert await take(queue) == "now"
    with pytest.raises(Empty):
        await take(queue)
    clock.advance("9999ms")
    with pytest.raises(Empty):
        await take(queue)
    clock.advance("1ms")
    clock.advance("1ms")
    await queue.put("after")
    assert [await take(queue) for _ in range(3)] == ["urgent", "late", "after"]
    assert await depths(queue) == (0, 0, 0, 0)


async def test_a_waiter_is_woken_when_a_delayed_message_is_due(space: Space, clock: ManualClock) -> None:
    queue = space.queue("orders")
    await queue.put("late", delay="10s")
    waiter = asyncio.create_task(queue.take(wait="60s"))
    await asyncio.sleep(0.02)
    clock.advance("5s")
    await asyncio.sleep(0.01)
    assert not waiter.done()
    clock.advance("5s")
    message = await soon(waiter)
    assert message.body == "late"
    await message.ack()


async def test_a_waiter_is_woken_by_what_another_process_puts_delayed_or_not(
    space: Space, store: Store, clock: ManualClock
) -> None:
    other = store.space("contoso", agent="risk")
    queue = space.queue("orders")
    waiter = asyncio.create_task(queue.take(wait=None))
    await asyncio.sleep(0.02)
    await other.queue("orders").put("late", delay="3s")
    await asyncio.sleep(0.02)
    assert not waiter.done()
    clock.advance("3s")
    message = await soon(waiter)
    assert message.body == "late"
    waiter = asyncio.create_task(queue.take(wait=None))
    await asyncio.sleep(0.02)
    await other.queue("orders").put("now")
    second = await soon(waiter)
    assert second.body == "now"
    await message.ack()
    await second.ack()


async def test_waiting_is_bounded(space: Space, clock: ManualClock) -> None:
    queue = space.queue("orders")
    with pytest.raises(Empty, match="nothing came"):
        await queue.take()
    waiter = asyncio.create_task(queue.take(wait="2s"))
    await asyncio.sleep(0.02)
    assert not waiter.done()
    clock.advance("2s")
    with pytest.raises(Empty):
        await soon(waiter)
    await queue.put(1)
    assert await take(queue) == 1


async def test_who_does_not_wait_is_told_by_a_look_that_began_after_it_came(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = space.queue("orders")
    receiver = queue._receiver()
    fetch, looked, put = receiver._fetch, asyncio.Event(), asyncio.Event()

    async def fetch_slowly() -> tuple[int, int]:
        found = await fetch()
        looked.set()
        await put.wait()
        return found

    monkeypatch.setattr(receiver, "_fetch", fetch_slowly)
    first = asyncio.create_task(queue.take())
    await soon(looked.wait())
    await put_elsewhere(space, "orders", "a")
    second = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    put.set()
    with pytest.raises(Empty):
        await soon(first)
    assert (await soon(second)).body == "a"


async def put_elsewhere(space: Space, name: str, body: str) -> None:
    """A message put by another process: nobody here is told of it."""
    operations, conditions = split(space.queue(name).putting(body))
    await space._scope.commit(operations, conditions)


async def test_who_stops_waiting_takes_no_message_with_it(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = space.queue("orders")
    waiter = asyncio.create_task(queue.take(wait=None))
    await asyncio.sleep(0.02)
    receiver = queue._receiver()
    deliver = receiver._deliver

    def deliver_and_cancel() -> None:
        deliver()
        if receiver.held:
            waiter.cancel()  # it has been given the message, and has not run since

    monkeypatch.setattr(receiver, "_deliver", deliver_and_cancel)
    await queue.put("only")
    with pytest.raises(asyncio.CancelledError):
        await soon(waiter)
    monkeypatch.undo()
    message = await soon(queue.take(wait=None))
    assert (message.body, message.attempts) == ("only", 0)
    await message.ack()
    assert await depths(queue) == (0, 0, 0, 0)


async def test_the_same_dedup_key_puts_one_message_within_its_window(space: Space, clock: ManualClock) -> None:
    queue = space.queue("orders", dedup_window="1m")
    first = await queue.put("a", dedup="order/1")
    assert await queue.put("b", dedup="order/1") == first
    assert await queue.put("c", dedup="order/2") != first
    assert await bodies(queue) == ["a", "c"]
    assert await take(queue) == "a"
    assert await queue.put("d", dedup="order/1") == first  # also when the first is done
    clock.advance("1m")
    assert await queue.put("e", dedup="order/1") != first
    assert await bodies(queue) == ["c", "e"]


async def test_two_that_put_the_same_dedup_key_at_once_put_one(space: Space) -> None:
    queue = space.queue("orders")
    ids = await asyncio.gather(*(queue.put(number, dedup="x") for number in range(10)))
    assert len(set(ids)) == 1
    assert len(await bodies(queue)) == 1


async def test_many_are_put_in_order_and_counted(space: Space) -> None:
    queue = space.queue("orders")
    ids = await queue.put_many(range(600))
    assert len(ids) == len(set(ids)) == 600
    assert ids == sorted(ids)
    assert await bodies(queue, 1000) == list(range(600))
    assert [each.id for each in await queue.peek(600)] == ids
    assert (await queue.stats()).ready == 600
    await queue.put_many(["x", "y"], delay="1s", priority=3)
    assert await depths(queue) == (600, 2, 0, 0)


async def test_an_id_that_was_chosen_is_the_message_s(space: Space) -> None:
    queue = space.queue("orders")
    id = queue.new_id()
    assert await queue.put("a", id=id) == id
    with pytest.raises(Conflict):
        await queue.put("b", id=id)
    assert len({queue.new_id() for _ in range(1000)}) == 1000
    async with queue.reserve() as message:
        assert message.id == id


async def test_message_and_anything_else_are_one_commit(space: Space) -> None:
    queue = space.queue("orders")
    before = await everything(space)
    with pytest.raises(Conflict):
        await space.commit(*queue.putting("a", id=queue.new_id()), present("nowhere"))
    assert await everything(space) == before
    await space.commit(*queue.putting("a"), set_("placed", 1))
    assert await bodies(queue) == ["a"]


# --- reservations ---


async def test_a_message_is_delivered_to_one_consumer_at_a_time(space: Space, other: Space) -> None:
    """Rule 14."""
    await space.queue("orders").put_many(range(60))
    seen: list[int] = []

    async def work(view: Space) -> None:
        queue = view.queue("orders")
        while True:
            try:
                async with queue.reserve() as message:
                    seen.append(message.body)
                    await asyncio.sleep(0)
            except Empty:
                return

    await soon(asyncio.gather(*(work(view) for view in (space, other) for _ in range(5))))
    assert sorted(seen) == list(range(60))
    assert await depths(space.queue("orders")) == (0, 0, 0, 0)


async def test_there_is_at_most_one_reservation_of_a_message(space: Space, other: Space) -> None:
    """Rule 15."""
    await space.queue("orders").put("a")
    async with space.queue("orders").reserve() as message:
        with pytest.raises(Empty):
            await other.queue("orders").take()
        shown = await other.queue("orders.reserved").peek()
        assert [(each.id, each.state, each.owner) for each in shown] == [(message.id, "reserved", "market")]


async def test_a_failed_message_stays_reserved_unless_the_policy_says_otherwise(
    space: Space, clock: ManualClock
) -> None:
    """Rule 16."""
    for policy, expected in (("keep", (0, 0, 0, 1)), ("clear", (0, 0, 0, 0)), ("release", (1, 0, 0, 0))):
        queue = space.queue(f"orders-{policy}", on_error=policy)
        await queue.put("a")
        with pytest.raises(ZeroDivisionError):
            async with queue.reserve():
                raise ZeroDivisionError("of a share")
        assert await depths(queue) == expected
    queue = space.queue("orders-requeue", on_error=Requeue(attempts=2, backoff="1s", jitter=0))
    await queue.put("a")
    with pytest.raises(ZeroDivisionError):
        async with queue.reserve():
            raise ZeroDivisionError
    assert await depths(queue) == (0, 1, 0, 0)


async def test_failures_are_recoverable_from_reserved(space: Space) -> None:
    """Rule 28."""
    queue = space.queue("T1.inbox")
    for body in ("a", "b", "c"):
        await queue.put(body)
        with pytest.raises(ValueError, match=body):
            async with queue.reserve() as message:
                raise ValueError(message.body)
    reserved = space.queue("T1.reserved")
    assert [(each.body, each.state, each.attempts) for each in await reserved.peek()] == [
        ("a", "dead", 1), ("b", "dead", 1), ("c", "dead", 1),
    ]  # fmt: skip
    assert (await reserved.stats()).message_count == 3
    ids = [each.id for each in await queue.dead.list()]
    assert await queue.dead.retry(ids[0]) == 1
    async with queue.reserve() as message:
        assert (message.id, message.body, message.attempts) == (ids[0], "a", 1)
    assert await queue.dead.clear(ids[1]) == 1
    assert await queue.dead.move_back() == 1
    async with queue.reserve() as message:
        assert (message.id, message.attempts) == (ids[2], 0)
    assert await depths(queue) == (0, 0, 0, 0)
    assert [entry.key for entry in (await space._scope.engine.scan("contoso", "reasons/")).entries] == []


async def test_a_dead_letter_tells_why(space: Space, clock: ManualClock) -> None:
    queue = space.queue("orders", on_error=Requeue(attempts=3, backoff="1s", jitter=0))
    await queue.put("a")
    for attempt in range(3):
        message = await queue.take()
        assert message.attempts == attempt
        with pytest.raises(ValueError, match="no"):
            async with message:
                raise ValueError(f"no {attempt}")
        clock.advance("10s")
    [dead] = await queue.dead.list()
    assert [(each.attempt, each.agent, each.reason) for each in dead.reasons] == [
        (1, "market", "ValueError: no 0"), (2, "market", "ValueError: no 1"), (3, "market", "ValueError: no 2"),
    ]  # fmt: skip
    with pytest.raises(NotFound, match="nothing was changed"):
        await queue.dead.retry(dead.id, "1" * 19)
    assert await depths(queue) == (0, 0, 0, 1)


async def test_backoff_grows_and_is_bounded(space: Space, clock: ManualClock) -> None:
    policy = Requeue(attempts=10, backoff="1s", factor=3, max="20s", jitter=0)
    assert [policy.delay_ms(failures) for failures in range(1, 6)] == [1000, 3000, 9000, 20_000, 20_000]
    spread = Requeue(backoff="10s", jitter=0.5)
    assert all(5000 <= spread.delay_ms(1) <= 15_000 for _ in range(100))
    queue = space.queue("orders", on_error=policy)
    await queue.put("a")
    for wait_ms in (1000, 3000, 9000):
        await (await queue.take()).fail("not yet")
        clock.advance(f"{wait_ms - 1}ms")
        with pytest.raises(Empty):
            await queue.take()
        clock.advance("1ms")
    await (await queue.take()).ack()


async def test_result_and_acknowledgement_are_one_commit(space: Space) -> None:
    queue, done = space.queue("orders"), space.queue("done")
    await queue.put("a")
    async with queue.reserve() as message:
        revision = (await space.info()).revision
        await message.complete({"ok": True}, set_("seen", message.id), to="done")
        assert (await space.info()).revision == revision + 1
    assert await bodies(done) == [{"ok": True}]
    assert await space.records.get("seen") == message.id
    with pytest.raises(InvalidInput, match="settled before"):
        await message.ack()


async def test_a_result_whose_commit_is_refused_leaves_the_message_where_it_is(space: Space) -> None:
    queue = space.queue("orders")
    await queue.put("a")
    message = await queue.take()
    before = await everything(space)
    with pytest.raises(Conflict):
        await message.complete(1, present("nowhere"), to="done")
    assert await everything(space) == before
    await message.complete(1, to="done")
    assert await depths(queue) == (0, 0, 0, 0)


async def test_a_released_message_comes_again_from_its_old_place_and_has_not_failed(
    space: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders")
    await queue.put("a")
    await queue.put("b")
    message = await queue.take()
    await message.release()
    assert await bodies(queue) == ["a", "b"]
    async with queue.reserve() as again:
        assert (again.id, again.attempts) == (message.id, 0)
        await again.release(delay="5s")
    assert await take(queue) == "b"
    clock.advance("5s")
    assert await take(queue) == "a"


async def test_being_cancelled_applies_the_policy_for_a_stop(space: Space) -> None:
    for policy, expected in (("keep", (0, 0, 0, 1)), ("release", (1, 0, 0, 0)), ("clear", (0, 0, 0, 0))):
        queue = space.queue(f"orders-{policy}", on_stop=policy)
        await queue.put("a")
        begun = asyncio.Event()

        async def work(queue: Queue = queue, begun: asyncio.Event = begun) -> None:
            async with queue.reserve():
                begun.set()
                await asyncio.sleep(DEADLINE_S)

        task = asyncio.create_task(work())
        await soon(begun.wait())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await depths(queue) == expected


# --- leases ---


class Away:
    """The store cannot be reached by what a queue commits, as long as this lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_done: bool = False) -> None:
        self._patch = monkeypatch
        self._is_done = is_done

    def __enter__(self) -> None:
        commit = Queue.commit

        async def fails(queue: Queue, *parts: Any) -> Any:
            if self._is_done:
                await commit(queue, *parts)
                raise OutcomeUnknown("the connection broke")
            raise Unavailable("the server cannot be reached")

        self._patch.setattr(Queue, "commit", fails)

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()


async def test_a_message_whose_end_could_not_be_committed_is_handed_out_again_while_its_consumer_lives(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        queue = space.queue("orders")
        await queue.put(1)
        with Away(monkeypatch), pytest.raises(Unavailable):
            async with queue.reserve():
                pass
        with Away(monkeypatch), pytest.raises(ValueError, match="odd"):
            async with queue.reserve(wait=None):
                raise ValueError("odd")
        message = await queue.take(wait=None)
        with Away(monkeypatch):
            await message.give_back()
        loop = queue.consume(wait=None)
        await anext(loop)
        with Away(monkeypatch), pytest.raises(Unavailable):
            await anext(loop)
        assert await depths(queue) == (0, 0, 1, 0)
        async with queue.reserve(wait=None) as message:
            assert (message.body, message.attempts) == (1, 0)
        assert await depths(queue) == (0, 0, 0, 0)


async def test_a_message_whose_end_was_committed_without_an_answer_is_not_handed_out_again(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = space.queue("orders")
    await queue.put_many([1, 2])
    with Away(monkeypatch, is_done=True), pytest.raises(OutcomeUnknown):
        async with queue.reserve():
            pass
    assert await soon(take(queue)) == 2
    with pytest.raises(Empty):
        await take(queue)


async def test_a_dead_consumer_s_message_comes_back_after_its_lease_with_an_attempt_more(
    space: Space, other: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders", lease="10s")
    await queue.put("a")
    message = await queue.take()
    die(space)
    theirs = other.queue("orders", on_death=Requeue(attempts=3, backoff="1s", jitter=0))
    waiter = asyncio.create_task(theirs.take(wait=None))
    await asyncio.sleep(0.02)
    clock.advance("9s")
    await asyncio.sleep(0.02)
    assert not waiter.done()
    clock.advance("1s")
    await until(lambda: _is(depths(queue), (0, 1, 0, 0)))
    clock.advance("1s")
    again = await soon(waiter)
    assert (again.id, again.body, again.attempts) == (message.id, "a", 1)
    with pytest.raises(LeaseLost, match="Nothing was written"):
        await message.complete("late", to="done")
    assert await bodies(space.queue("done")) == []
    await again.complete("in time", to="done")
    assert await bodies(space.queue("done")) == ["in time"]
    assert await depths(queue) == (0, 0, 0, 0)


async def _is(found: Awaitable[T], expected: T) -> bool:
    return await found == expected


async def test_a_message_whose_consumers_all_die_becomes_a_dead_letter_with_its_reasons(
    store: Store, clock: ManualClock
) -> None:
    policy = Requeue(attempts=3, backoff="1s", jitter=0)
    await store.space("contoso", agent="sender").queue("orders").put("poison")
    for number in range(3):
        view = store.space("contoso", agent=f"consumer{number}")
        message = await soon(view.queue("orders", lease="5s", on_death=policy).take(wait=0))
        assert message.attempts == number
        die(view)
        clock.advance("5s")
        survivor = store.space("contoso", agent=f"survivor{number}").queue("orders", on_death=policy)
        with pytest.raises(Empty):
            await survivor.take()
        clock.advance("10s")
    [dead] = await survivor.dead.list()
    assert [each.reason for each in dead.reasons] == ["its consumer died"] * 3
    assert (dead.attempts, await depths(survivor)) == (3, (0, 0, 0, 1))


DEATH = Requeue(attempts=2, backoff="1s", jitter=0)


async def taking_ahead(store: Store, number: int, *, begin: bool) -> Message | None:
    """One more consumer dies. It worked on another message and had taken ahead what waits; with `begin` it began the first of it."""
    view = store.space("contoso", agent=f"consumer{number}")
    queue = view.queue("orders", lease="2s", on_death=DEATH, prefetch=8)
    await queue.put("another", priority=5)
    assert await take(queue) == "another"
    begun = await soon(queue.take(wait=0)) if begin else None
    die(view)
    task = queue._receiver()._task
    if task is not None:  # a dead process fetches nothing more
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return begun


async def bury(store: Store, clock: ManualClock, number: int) -> None:
    """Somebody finds what the dead one left; what was put off for that is due again."""
    clock.advance(
        "2s"
    )  # its lease has ended; a receiver that only rests would give back no earlier than after LINGER_MS
    receiver = store.space("contoso", agent=f"survivor{number}").queue("orders", on_death=DEATH)._receiver()
    lease = await receiver._hold()
    await receiver._leavings.search(lease.key.rpartition("/")[2], set())
    clock.advance("5s")


async def test_a_message_that_was_only_taken_ahead_never_fails_however_many_consumers_die(
    store: Store, clock: ManualClock
) -> None:
    queue = store.space("contoso", agent="sender").queue("orders")
    await queue.put_many(["a", "b"])
    for number in range(5):
        await taking_ahead(store, number, begin=False)
        assert await depths(queue) == (0, 0, 2, 0)
        await bury(store, clock, number)
        assert [(each.body, each.attempts, each.state) for each in await queue.peek()] == [
            ("a", 0, "ready"),
            ("b", 0, "ready"),
        ]
        assert await depths(queue) == (2, 0, 0, 0)
    async with queue.reserve() as message:
        assert (message.body, message.attempts, message.is_redelivered) == ("a", 0, True)


async def test_a_message_that_was_taken_ahead_and_kills_its_consumers_becomes_a_dead_letter_alone(
    store: Store, clock: ManualClock
) -> None:
    queue = store.space("contoso", agent="sender").queue("orders")
    await queue.put("poison", priority=1)
    await queue.put("innocent")
    for number in range(3):
        begun = await taking_ahead(store, number, begin=True)
        assert begun is not None
        assert (begun.body, begun.attempts) == ("poison", max(0, number - 1))
        await bury(store, clock, number)
    [dead] = await queue.dead.list()
    assert (dead.body, dead.attempts) == ("poison", 2)
    assert [each.reason for each in dead.reasons] == ["its consumer died"] * 2
    assert [(each.body, each.attempts) for each in await queue.peek()] == [("innocent", 0)]
    assert await depths(queue) == (1, 0, 0, 1)


async def test_a_message_that_failed_is_acknowledged_and_given_back_also_when_it_was_taken_ahead(space: Space) -> None:
    queue = space.queue("orders", prefetch=8, on_error="release")
    await queue.put_many(["a", "b"])
    for body in ("a", "b"):
        message = await queue.take()
        assert message.body == body
        await message.fail("not now")
    first, second = await queue.take(), await queue.take()
    assert [(each.body, each.attempts) for each in (first, second)] == [("a", 1), ("b", 1)]
    await first.ack()
    await second.release()
    assert [(each.body, each.attempts) for each in await queue.peek()] == [("b", 1)]
    assert await depths(queue) == (1, 0, 0, 0)


async def test_a_paused_consumer_whose_message_nobody_took_may_still_finish_it(
    space: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders", lease="5s")
    await queue.put("a")
    message = await queue.take()
    die(space)
    clock.advance("1h")
    await message.complete("done after all", to="done")
    assert await depths(queue) == (0, 0, 0, 0)


async def test_nothing_is_taken_from_a_consumer_that_lives_although_it_seemed_dead(space: Space, other: Space) -> None:
    await space.queue("orders").put("a")
    message = await space.queue("orders").take()
    receiver = other.queue("orders")._receiver()
    lease = await receiver._hold()
    before = await everything(space)
    mine = lease.key.rpartition("/")[2]
    await receiver._leavings.reclaim(mine, message.key.split("/")[2])  # who looked before it came would believe so
    assert await everything(space) == before
    await message.ack()


async def test_a_lease_is_kept_alive_as_long_as_a_message_is_worked_on(
    space: Space, other: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders", lease="3s")
    await queue.put("a")
    async with queue.reserve() as message:
        for _ in range(10):
            clock.advance("1s")
            await asyncio.sleep(0.01)
            with pytest.raises(Empty):
                await other.queue("orders").take()
        assert not message.lost


async def test_a_receiver_that_nobody_needs_lets_go_of_its_lease_and_of_what_it_took_ahead(
    space: Space, clock: ManualClock
) -> None:
    queue = space.queue("orders", prefetch=4)
    await queue.put_many(range(5))
    assert await take(queue) == 0
    assert await depths(queue) == (0, 0, 4, 0)
    await asyncio.sleep(0.01)
    clock.advance(LINGER_MS / 1000)
    await until(lambda: _is(depths(queue), (4, 0, 0, 0)))

    async def released() -> bool:
        return not (await space._scope.engine.scan("contoso", "consumers/")).entries

    await until(released)
    assert await bodies(queue) == [1, 2, 3, 4]
    assert await take(queue) == 1


async def test_closing_gives_back_what_was_not_begun_and_applies_the_policy_to_what_was(
    store: Store, space: Space
) -> None:
    await space.queue("orders").put_many(range(4))
    queue = store.space("contoso", agent="worker").queue("orders", prefetch=2, on_stop="release")
    begun = await queue.take()
    assert begun.body == 0
    assert await depths(queue) == (1, 0, 3, 0)
    await store._coordination.close()
    assert await bodies(space.queue("orders")) == [0, 1, 2, 3]
    assert await depths(queue) == (4, 0, 0, 0)
    assert (await space._scope.engine.scan("contoso", "consumers/")).entries == []


async def test_a_message_that_was_left_is_acknowledged_by_its_id(store: Store, space: Space) -> None:
    queue = space.queue("orders")
    await queue.put("a")
    message = await queue.take()
    message.leave()
    await store._coordination.close()
    assert await depths(queue) == (0, 0, 1, 0)
    again = Space(space._scope, space._blob_folder, Coordination(Leases(space._scope.clock)))
    await again.queue("orders").ack(message.id)
    assert await depths(queue) == (0, 0, 0, 0)
    with pytest.raises(NotFound):
        await again.queue("orders").ack(message.id)


# --- consuming ---


async def test_consuming_one_at_a_time_acknowledges_as_it_goes_on(space: Space) -> None:
    queue = space.queue("orders")
    await queue.put_many(range(5))
    seen = [message.body async for message in queue.consume(wait=0)]
    assert seen == list(range(5))
    assert await depths(queue) == (0, 0, 0, 0)


async def test_consuming_many_at_once_never_has_more_than_that(space: Space) -> None:
    queue = space.queue("orders")
    await queue.put_many(range(40))
    working: set[str] = set()
    most = 0

    async def work(message: Message) -> None:
        nonlocal most
        async with message:
            working.add(message.id)
            most = max(most, len(working))
            await asyncio.sleep(0)
            working.discard(message.id)

    async with asyncio.TaskGroup() as tasks:
        async for message in queue.consume(concurrency=10, wait=0):
            tasks.create_task(work(message))
    assert 1 < most <= 10
    assert await depths(queue) == (0, 0, 0, 0)


async def test_a_loop_that_is_left_stops_the_message_it_was_at(space: Space) -> None:
    queue = space.queue("orders", on_stop="release")
    await queue.put_many(range(3))
    consuming = queue.consume()
    async for message in consuming:
        if message.body == 1:
            break
    await consuming.aclose()  # type: ignore[attr-defined]
    assert await bodies(queue) == [1, 2]


# --- operators ---


async def test_messages_are_moved_and_deleted_by_their_id(space: Space) -> None:
    queue, target = space.queue("orders"), space.queue("elsewhere")
    ids = [await queue.put("a", priority=2), await queue.put("b", delay="1h"), await queue.put("c")]
    await queue.move(ids[0], to="elsewhere")
    await queue.move(ids[1], to="elsewhere")
    await queue.delete(ids[2])
    assert [(each.id, each.body, each.priority) for each in await target.peek()] == [(ids[0], "a", 2), (ids[1], "b", 0)]
    assert (await depths(queue), await depths(target)) == ((0, 0, 0, 0), (2, 0, 0, 0))
    with pytest.raises(NotFound):
        await queue.delete(ids[0])


async def test_a_reserved_message_is_its_consumer_s_and_cannot_be_moved(space: Space) -> None:
    queue = space.queue("orders")
    id = await queue.put("a")
    async with queue.reserve():
        for work in (queue.delete(id), queue.move(id, to="elsewhere")):
            with pytest.raises(NotFound, match="its consumer's"):
                await work


async def test_stats_tell_how_many_there_are_and_when_something_happened_last(space: Space, clock: ManualClock) -> None:
    queue = space.queue("orders")
    stats = await queue.stats()
    assert (stats.message_count, stats.has_pending, stats.last_activity) == (0, False, None)
    await queue.put("a")
    await queue.put("b", delay="1h")
    stats = await queue.stats()
    assert (stats.message_count, stats.has_pending, stats.ready, stats.delayed) == (2, True, 1, 1)
    clock.advance("5s")
    await take(queue)
    stats = await queue.stats()
    assert stats.message_count == 1
    assert stats.last_activity is not None
    assert stats.last_activity.timestamp() * 1000 == clock.now_ms()


async def test_queues_are_listed_and_dropped_when_they_are_empty(space: Space) -> None:
    await space.queue("a/b").put(1)
    await space.queue("orders").put(1)
    assert [(stats.name, stats.ready) for stats in await space.queues.list()] == [("a/b", 1), ("orders", 1)]
    assert [stats.name for stats in await space.queues.list("ord*")] == ["orders"]
    with pytest.raises(Conflict):
        await space.queue("orders").drop()
    await take(space.queue("orders"))
    await space.queue("orders").drop()
    assert [stats.name for stats in await space.queues.list()] == ["a/b"]


async def test_a_broadcast_reaches_every_queue_that_is_named_or_fits(space: Space) -> None:
    ids = await space.queues.broadcast([f"T{number}.ctrl_in" for number in range(70)], "STOP")
    assert len(ids) == len(set(ids.values())) == 70
    ids = await space.queues.broadcast("T1*.ctrl_in", "PING", priority=1)
    assert sorted(ids) == sorted(["T1.ctrl_in", *(f"T1{number}.ctrl_in" for number in range(10))])
    assert await bodies(space.queue("T13.ctrl_in")) == ["PING", "STOP"]
    assert await bodies(space.queue("T2.ctrl_in")) == ["STOP"]


async def test_a_watch_tells_what_becomes_of_each_message(space: Space) -> None:
    queue = space.queue("orders")
    id = await queue.put("a")
    async with queue.reserve():
        pass
    await queue.put("b", delay="1h")
    await queue.put("c")
    with pytest.raises(ValueError, match="x"):
        async with queue.reserve():
            raise ValueError("x")
    told = [(change.body, change.state) async for item in queue.watch(cursor="r0", live=False) for change in item]
    assert told == [
        ("a", "ready"), ("a", "reserved"), (None, "done"), ("b", "delayed"), ("c", "ready"), ("c", "reserved"), ("c", "dead"),
    ]  # fmt: skip
    commits = [item async for item in queue.watch(cursor="r0", live=False)]
    assert (commits[0].actor, [change.id for change in commits[0]]) == ("market", [id])
    rest = [item.version async for item in queue.watch(cursor=commits[2].cursor, live=False)]
    assert rest == [item.version for item in commits[3:]]


# --- bad input ---


@pytest.mark.parametrize(
    "use",
    [
        lambda space: space.queue(""),
        lambda space: space.queue("x" * 300),
        lambda space: space.queue("q", on_error="explode"),
        lambda space: space.queue("q", prefetch=-1),
        lambda space: space.queue("q", lease="0s"),
        lambda space: space.queue("q").putting("x", priority=500),
        lambda space: space.queue("q").putting("x", priority=1.5),
        lambda space: space.queue("q").putting("x", delay="-1s"),
        lambda space: space.queue("q").putting(float("nan")),
        lambda space: space.queue("q").putting("x", id="7"),
        lambda space: space.queue("q").putting("x", id="0" * 19, dedup="y" * 300),
        lambda space: space.queue("q.reserved").putting("x"),
        lambda space: Requeue(attempts=0),
        lambda space: Requeue(factor=0.5),
        lambda space: Requeue(backoff="soon"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(use: Callable[[Space], object]) -> None:
    clock = ManualClock()
    scope = Scope(MemoryEngine(clock=clock), "contoso", "market", "1", clock, Retention(), Redaction())
    with pytest.raises(InvalidInput):
        use(Space(scope, lambda: None, Coordination(Leases(clock))))  # type: ignore[arg-type,return-value]
