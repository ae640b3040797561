"""Locks, semaphores, read and write locks, elections, pools: one mechanism."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, TypeVar

import pytest
from msgspec.structs import replace

from holdfast import InvalidInput, LeaseLost, LockAcquisitionError, ManualClock, NotFound, Space, Stand, Store
from holdfast.engine import Batch, Change, ChangeSet, Engine, Entry, Page, Receipt
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.lines import Line, Place, in_turn
from holdfast.middleware.wrapper import Wrapper

T = TypeVar("T")
DEADLINE_S = 20


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


@pytest.fixture
def other(store: Store) -> Space:
    return store.space("contoso", agent="risk", instance="2")


async def waiting(space: Space, name: str, count: int) -> None:
    """Return when so many stand in the line, holders not counted."""
    while True:
        states = await space.locks.list(name)
        if states and len(states[0].waiters) == count:
            return
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def shown_since(space: Space, at_ms: int) -> Stand:
    """The holder, when it is shown to hold since then: that is written while it goes on."""
    while True:
        [state] = await space.locks.list()
        [holder] = state.holders
        if holder.since.timestamp() * 1000 == at_ms:
            return holder
        await asyncio.sleep(0)


class Counted(Wrapper):
    """What the engine is asked."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.asked: Counter[str] = Counter()
        self.heard: list[str] = []
        """The keys that the feed told of."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.asked["commit"] += 1
        return await self.inner.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.asked["read"] += 1
        return await self.inner.get(space, keys)

    async def scan(self, space: str, prefix: str, **how: Any) -> Page:  # type: ignore[override]
        self.asked["read"] += 1
        return await self.inner.scan(space, prefix, **how)

    async def watch(self, *args: Any, **how: Any) -> AsyncIterator[ChangeSet]:
        async for commit in self.inner.watch(*args, **how):
            self.heard += [change.key for change in commit.changes]
            yield commit


Counting = Callable[[Space], tuple[Counted, Space]]


@pytest.fixture
async def counting(clock: ManualClock) -> AsyncIterator[Counting]:
    """The same space through an engine that counts, with nothing known of any line."""
    coordination = Coordination(Leases(clock))

    def made(space: Space) -> tuple[Counted, Space]:
        counted = Counted(space._scope.engine)
        return counted, Space(replace(space._scope, engine=counted), space._blob_folder, coordination)

    yield made
    await coordination.close()


# --- one holder ---


async def test_a_lock_has_one_holder_and_is_free_afterwards(space: Space, other: Space) -> None:
    async with space.lock("portfolio/MSFT", ttl="5s") as guard:
        assert (guard.name, guard.holder, guard.lost) == ("portfolio/MSFT", "market", False)
        with pytest.raises(LockAcquisitionError, match="held by market"):
            await other.lock("portfolio/MSFT").acquire()
        async with other.lock("portfolio/AAPL"):
            pass
    async with other.lock("portfolio/MSFT") as second:
        assert second.token > guard.token
    assert await space.locks.list() == []


async def test_a_lock_is_not_shared_by_two_of_the_same_agent(store: Store, space: Space) -> None:
    again = store.space("contoso", agent="market", instance="2")
    async with space.lock("l"):
        with pytest.raises(LockAcquisitionError):
            await again.lock("l").acquire()


async def test_a_refused_acquisition_leaves_nothing_behind(space: Space, other: Space) -> None:
    async with space.lock("l"):
        before = await space.locks.list()
        with pytest.raises(LockAcquisitionError):
            await other.lock("l").acquire()
        assert await space.locks.list() == before


async def test_waiting_is_bounded(space: Space, other: Space, clock: ManualClock) -> None:
    async with space.lock("l", ttl="60s"):
        trying = asyncio.create_task(other.lock("l", wait="2s").acquire())
        await soon(waiting(space, "l", 1))
        clock.advance("1999ms")
        await asyncio.sleep(0.01)
        assert not trying.done()
        clock.advance("1ms")
        with pytest.raises(LockAcquisitionError, match="after 2 s"):
            await soon(trying)
        assert (await space.locks.list())[0].waiters == []


async def test_waiters_have_their_turn_in_the_order_in_which_they_came(space: Space, other: Space) -> None:
    order: list[int] = []

    async def wait(number: int) -> None:
        async with other.lock("l", wait=None) as guard:
            order.append(number)
            tokens.append(guard.token)

    tokens: list[int] = []
    guard = await space.lock("l").acquire()
    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(wait(number)))
        await soon(waiting(space, "l", number + 1))
    await guard.release()
    await soon(asyncio.gather(*tasks))
    assert order == [0, 1, 2, 3, 4]
    assert tokens == sorted(tokens)
    assert tokens[0] > guard.token


async def test_a_waiter_that_goes_away_is_skipped(space: Space, other: Space, store: Store) -> None:
    third = store.space("contoso", agent="third")
    guard = await space.lock("l").acquire()
    leaving = asyncio.create_task(other.lock("l", wait=None).acquire())
    await soon(waiting(space, "l", 1))
    staying = asyncio.create_task(third.lock("l", wait=None).acquire())
    await soon(waiting(space, "l", 2))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await soon(waiting(space, "l", 1))
    await guard.release()
    assert (await soon(staying)).holder == "third"


async def test_one_release_wakes_one_waiter(space: Space, other: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = await space.lock("l").acquire()
    tasks = []
    for number in range(20):
        tasks.append(asyncio.create_task(other.lock("l", wait=None).acquire()))
        await soon(waiting(space, "l", number + 1))
    woken: list[object] = []
    real = asyncio.Event.set

    def counted(event: asyncio.Event) -> None:
        if event._waiters and not event.is_set():  # type: ignore[attr-defined]
            woken.append(event)
        real(event)

    line = other._coordination.lines(other._scope)._lines["locks/lock/l/"]
    events = set(line.turns.values())
    monkeypatch.setattr(asyncio.Event, "set", counted)
    await guard.release()
    first = await soon(tasks[0])
    await asyncio.sleep(0.02)
    monkeypatch.undo()
    assert len([event for event in woken if event in events]) == 1
    assert not any(task.done() for task in tasks[1:])
    await first.release()
    for task in tasks[1:]:
        await (await soon(task)).release()


async def test_a_free_lock_is_two_commits_and_no_read(space: Space, counting: Counting) -> None:
    counted, view = counting(space)
    for name in ("a", "b", "a"):
        for wanted in (view.lock(name), view.lock(name, wait="1s"), view.write_lock(name), view.election(name)):
            async with wanted:
                pass
            assert counted.asked == {"commit": 2}
            counted.asked.clear()


async def test_a_refusal_is_one_question_and_writes_nothing(space: Space, other: Space, counting: Counting) -> None:
    counted, view = counting(other)
    async with space.lock("l"):
        before = (await space.info()).revision
        with pytest.raises(LockAcquisitionError, match="held by market") as caught:
            await view.lock("l").acquire()
        assert caught.value.actual is not None
        assert caught.value.actual.owner == "market"
        assert (counted.asked, (await space.info()).revision) == ({"commit": 1}, before)


async def test_a_lock_that_goes_from_hand_to_hand_is_two_commits_a_turn_and_no_read(
    space: Space, counting: Counting
) -> None:
    counted, view = counting(space)
    turns, tasks = 10, 6
    inside: list[int] = []

    async def work(number: int) -> None:
        for _ in range(turns):
            async with view.lock("l", wait=None):
                inside.append(number)
                assert inside == [number]
                inside.clear()

    await soon(asyncio.gather(*(work(number) for number in range(tasks))))
    assert counted.asked["commit"] <= 2 * turns * tasks + 3 * tasks  # at the ends one may find nobody there, in vain
    assert counted.asked["read"] <= 2 * tasks  # to know the line


async def test_a_turn_is_not_begun_on_a_lease_that_has_ended(space: Space, other: Space, clock: ManualClock) -> None:
    async with space.lock("l", ttl="100s"):
        trying = asyncio.create_task(other.lock("l", ttl="2s", wait=None).acquire())
        await soon(waiting(space, "l", 1))
        lines = other._coordination.lines(other._scope)
        await soon(until(lambda: lines.follows("locks/lock/l/")))
        line = lines._lines["locks/lock/l/"]
        [(key, turn)] = line.turns.items()
        await soon(until(lambda: bool(turn._waiters)))  # type: ignore[attr-defined]
        turn.set()  # it hears that it is its turn, and time goes by before it gets to run
        clock.advance("2s")
        await soon(until(lambda: trying.done() or (bool(line.turns) and key not in line.turns)))
        assert not trying.done()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)


# --- leases and fencing ---


async def test_a_lease_is_kept_alive_as_long_as_its_holder_lives(
    space: Space, other: Space, clock: ManualClock
) -> None:
    async with space.lock("l", ttl="3s") as guard:
        for _ in range(10):
            clock.advance("1s")
            await asyncio.sleep(0.01)
            await guard.space.records.increment("n")
        assert not guard.lost
        with pytest.raises(LockAcquisitionError):
            await other.lock("l").acquire()
    assert await space.records.get("n") == 10


async def test_a_holder_paused_past_its_ttl_can_write_nothing_any_more(
    space: Space, other: Space, clock: ManualClock
) -> None:
    with pytest.raises(LeaseLost, match="lock 'l' was lost"):  # noqa: PT012 - the end of the block raises
        async with space.lock("l", ttl="5s") as guard:
            await guard.space.records.set("cash", 1)
            clock.advance("5s")  # no chance to renew in between
            async with other.lock("l") as successor:
                assert successor.token > guard.token
                await successor.space.records.set("cash", 2)
                with pytest.raises(LeaseLost, match="nothing was written"):
                    await guard.space.records.set("cash", 3)

                async def add(tx: object) -> None:
                    tx.set("cash", await tx.get("cash") + 1)  # type: ignore[attr-defined]

                with pytest.raises(LeaseLost):
                    await guard.space.transact(add)
            await soon(guard.until_lost())
            assert guard.lost
    assert await space.records.get("cash") == 2
    assert await other.locks.list() == []


async def test_the_end_of_an_old_lease_does_not_end_its_successors(
    space: Space, other: Space, clock: ManualClock
) -> None:
    old = await space.lock("l", ttl="2s").acquire()
    clock.advance("2s")
    new = await other.lock("l", ttl="60s").acquire()
    with pytest.raises(LeaseLost):
        await old.release()
    with pytest.raises(LeaseLost):
        await old.renew()
    clock.advance("10s")
    await new.space.records.set("mine", 1)
    await new.release()


async def test_an_exception_in_the_block_is_not_hidden_by_a_lost_lease(space: Space, clock: ManualClock) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block raises
        async with space.lock("l", ttl="1s"):
            clock.advance("1s")
            raise ZeroDivisionError


async def test_a_dead_holder_is_followed_by_the_next_in_line(space: Space, other: Space, clock: ManualClock) -> None:
    guard = await space.lock("l", ttl="5s").acquire()
    next_one = asyncio.create_task(other.lock("l", ttl="60s", wait=None).acquire())
    await soon(waiting(space, "l", 1))
    space._coordination.leases.release(guard._lease)  # it is kept alive no longer, as if its process had died
    clock.advance("4999ms")
    await asyncio.sleep(0.02)
    assert not next_one.done()
    clock.advance("200ms")
    held = await soon(next_one)
    assert held.token > guard.token
    [state] = await space.locks.list()
    assert [stand.agent for stand in state.holders] == ["risk"]


async def test_a_waiter_that_was_paused_stands_in_line_again(space: Space, other: Space, clock: ManualClock) -> None:
    guard = await space.lock("l", ttl="100s").acquire()
    trying = asyncio.create_task(other.lock("l", ttl="2s", wait=None).acquire())
    await soon(waiting(space, "l", 1))
    clock.advance("2s")
    await soon(waiting(space, "l", 1))
    await guard.release()
    held = await soon(trying)
    await held.space.records.set("k", 1)


async def test_a_turn_begins_with_a_whole_ttl(space: Space, other: Space, clock: ManualClock) -> None:
    guard = await space.lock("l", ttl="100s").acquire()
    trying = asyncio.create_task(other.lock("l", ttl="9s", wait=None).acquire())
    await soon(waiting(space, "l", 1))
    clock.advance("2s")
    await guard.release()
    held = await soon(trying)
    holder = await soon(shown_since(space, clock.now_ms()))
    assert holder.expires_at is not None
    assert holder.expires_at.timestamp() * 1000 == clock.now_ms() + 9000
    assert holder.token == held.token


async def test_a_lock_is_seen_with_holder_token_and_waiters_in_order(space: Space, other: Space, store: Store) -> None:
    third = store.space("contoso", agent="third", instance="7")
    async with space.lock("portfolio/MSFT") as guard:
        tasks = [asyncio.create_task(each.lock("portfolio/MSFT", wait=None).acquire()) for each in (other,)]
        await soon(waiting(space, "portfolio", 1))
        tasks.append(asyncio.create_task(third.lock("portfolio/MSFT", wait=None).acquire()))
        await soon(waiting(space, "portfolio", 2))
        [state] = await space.locks.list()
        [holder] = state.holders
        assert (state.kind, state.name, state.size) == ("lock", "portfolio/MSFT", 1)
        assert (holder.agent, holder.token, holder.since) == ("market", guard.token, guard.acquired_at)
        assert [(each.agent, each.instance, each.token) for each in state.waiters] == [
            ("risk", "2", None),
            ("third", "7", None),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lock_can_be_broken_and_the_audit_tells_by_whom(space: Space, other: Space, store: Store) -> None:
    admin = store.space("contoso", agent="admin")
    with pytest.raises(NotFound):
        await admin.locks.break_("l")
    guard = await space.lock("l").acquire()
    trying = asyncio.create_task(other.lock("l", wait=None).acquire())
    await soon(waiting(space, "l", 1))
    [broken] = await admin.locks.break_("l")
    assert broken.agent == "market"
    await soon(trying)
    with pytest.raises(LeaseLost):
        await guard.space.records.set("k", 1)
    await admin.audit.seal()
    told = [record async for record in admin.audit.records()]
    assert any(record.actor == "admin" and record.operation == "delete" for record in told)


# --- many holders ---


async def test_a_semaphore_has_so_many_holders(space: Space, other: Space) -> None:
    held = [await space.semaphore("gpu", permits=4).acquire() for _ in range(4)]
    with pytest.raises(LockAcquisitionError):
        await other.semaphore("gpu", permits=4).acquire()
    trying = [asyncio.create_task(other.semaphore("gpu", permits=4, wait=None).acquire()) for _ in range(2)]
    await soon(waiting(space, "gpu", 2))
    await held[2].release()
    done, pending = await asyncio.wait(trying, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(pending)) == (1, 1)
    await held[0].release()
    await soon(asyncio.gather(*trying))


async def test_the_number_of_permits_is_stored_at_first_use(space: Space, other: Space) -> None:
    async with space.semaphore("gpu", permits=4):
        pass
    with pytest.raises(InvalidInput, match="4 permits since its first use"):
        await other.semaphore("gpu", permits=5).acquire()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput):
            space.semaphore("gpu", permits=wrong)  # type: ignore[arg-type]


async def test_readers_share_and_a_writer_is_alone(space: Space, other: Space) -> None:
    first, second = await space.read_lock("book").acquire(), await other.read_lock("book").acquire()
    with pytest.raises(LockAcquisitionError):
        await space.write_lock("book").acquire()
    writing = asyncio.create_task(space.write_lock("book", wait=None).acquire())
    await soon(waiting(space, "book", 1))
    with pytest.raises(LockAcquisitionError):  # a reader does not overtake a writer
        await other.read_lock("book").acquire()
    reading = [asyncio.create_task(other.read_lock("book", wait=None).acquire()) for _ in range(2)]
    await soon(waiting(space, "book", 3))
    await first.release()
    await second.release()
    writer = await soon(writing)
    assert not any(task.done() for task in reading)
    await writer.release()
    await soon(asyncio.gather(*reading))


async def test_an_election_has_one_leader_with_a_growing_epoch(space: Space, other: Space, clock: ManualClock) -> None:
    term = await space.election("leader", ttl="5s").acquire()
    candidate = asyncio.create_task(other.election("leader").acquire())
    await soon(waiting(space, "leader", 1))
    await term.space.records.set("plan", "a")
    space._coordination.leases.release(term._lease)
    clock.advance("5s")
    successor = await soon(candidate)
    assert successor.epoch > term.epoch
    await successor.space.records.set("plan", "b")
    with pytest.raises(LeaseLost):
        await term.space.records.set("plan", "c")
    assert await space.records.get("plan") == "b"


async def test_a_pool_never_gives_more_than_it_has(space: Space, other: Space) -> None:
    pool = space.pool("licences", size=3)
    assert await pool.available() == 3
    async with pool.allocate(), other.pool("licences", size=3).allocate(2) as two:
        assert await pool.available() == 0
        with pytest.raises(LockAcquisitionError):
            await pool.allocate().acquire()
        await two.space.records.set("used", 3)
        [state] = await space.locks.list()
        assert [(each.agent, each.units) for each in state.holders] == [("market", 1), ("risk", 2)]
    assert await pool.available() == 3
    with pytest.raises(InvalidInput):
        pool.allocate(4)
    with pytest.raises(InvalidInput):
        await space.pool("licences", size=4).allocate().acquire()


async def test_different_kinds_of_the_same_name_have_nothing_to_do_with_each_other(space: Space) -> None:
    async with space.lock("n"), space.write_lock("n"), space.semaphore("n", permits=1), space.election("n"):
        assert {state.kind for state in await space.locks.list()} == {"lock", "rw", "semaphore", "election"}


@pytest.mark.parametrize("ttl", [0, -1, "0s", "soon", True])
async def test_a_wrong_ttl_is_refused(space: Space, ttl: object) -> None:
    with pytest.raises(InvalidInput):
        space.lock("l", ttl=ttl)  # type: ignore[arg-type]


async def test_profiles_and_names_are_checked(space: Space) -> None:
    assert space.lock("l").ttl_ms == 30_000
    assert space.lock("l", profile="locks").ttl_ms == 60_000
    assert space.lock("l", profile="long_running").ttl_ms == 300_000
    with pytest.raises(InvalidInput):
        space.lock("l", profile="odd")
    for name in ("", "a\0b", 3):
        with pytest.raises(InvalidInput):
            space.lock(name)  # type: ignore[arg-type]


# --- whose turn it is ---


@pytest.mark.parametrize(
    ("line", "size", "expected"),
    [
        ("", 1, ""),
        ("w", 1, "0"),
        ("ww", 1, "0"),
        ("www", 2, "01"),
        ("rrwr", 1, "01"),
        ("wrr", 1, "0"),
        ("rwr", 1, "0"),
        ("rrr", 1, "012"),
        ("213", 3, "01"),
        ("31", 3, "0"),
        ("23", 4, "0"),
        ("231", 4, "0"),  # nobody overtakes
    ],
)
def test_whose_turn_it_is(line: str, size: int, expected: str) -> None:
    places = [
        (str(number), Place("1", 1 if letter in "rw" else int(letter), letter == "r"))
        for number, letter in enumerate(line)
    ]
    assert "".join(in_turn(iter(places), size)) == expected


async def test_a_store_that_does_not_answer_keeps_nobody_believing_in_a_lease(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal hangs, as while a server is away: the holder hears in time that it cannot rely on the lock."""
    space = store.space("contoso", agent="market")
    guard = await space.lock("l", ttl="3s").acquire()

    async def never(*_: object) -> Receipt:
        return await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as patch:
        patch.setattr(type(store.engine), "commit", never)
        for _ in range(30):
            clock.advance("100ms")
            await asyncio.sleep(0.001)
        await soon(guard.until_lost())
    with pytest.raises(LeaseLost):
        await guard.space.records.set("k", 1)


# --- a line as a process knows it ---


def told(op: Literal["push", "delete"], key: str) -> Change:
    return Change(op, key, op == "push", b'{"instance":"1"}' if op == "push" else b"")


def stands(key: str, version: int) -> Entry:
    return Entry(key, b'{"instance":"1"}', version, "market", 0, 0, 30_000)


def test_an_answer_that_is_older_than_the_feed_takes_nothing_back() -> None:
    """The line is read at revision 3; before the answer is there the feed tells of 4 and 5."""
    line = Line("l/", 1)
    line.replace([stands("l/1", 1)], 1, 0)
    line.readings += 1
    for version, change in ((3, told("push", "l/2")), (4, told("delete", "l/1")), (5, told("push", "l/3"))):
        line.apply(version, change)
    line.turns["l/2"] = turn = asyncio.Event()
    line.replace([stands("l/1", 1), stands("l/2", 3)], 3, 0)
    line.read()
    assert list(line.places) == ["l/2", "l/3"]
    assert turn.is_set()
    line.replace([stands("l/1", 1)], 2, 0)  # a reading that was overtaken by another
    assert list(line.places) == ["l/2", "l/3"]


def test_a_line_that_is_read_for_the_first_time_is_as_the_feed_tells_since() -> None:
    line = Line("l/", 1)
    line.readings += 1
    line.apply(2, told("delete", "l/1"))
    line.apply(3, told("push", "l/2"))
    line.replace([stands("l/1", 1)], 1, 0)
    line.read()
    line.apply(4, told("push", "l/3"))
    assert list(line.places) == ["l/2", "l/3"]


async def test_who_waits_in_one_line_hears_nothing_of_others(space: Space, other: Space, counting: Counting) -> None:
    counted, view = counting(space)
    async with other.lock("a"):
        first = asyncio.ensure_future(view.lock("a", wait=None).acquire())
        await soon(waiting(space, "a", 1))
        for _ in range(3):
            async with other.lock("b"):
                pass
    guard = await soon(first)
    assert {key.split("/")[2] for key in counted.heard} == {"a"}
    await guard.release()


async def test_a_line_that_nobody_waits_in_is_forgotten_after_a_while(
    space: Space, other: Space, clock: ManualClock
) -> None:
    lines = other._coordination.lines(other._scope)
    for _ in range(2):
        guard = await space.lock("l").acquire()
        trying = asyncio.create_task(other.lock("l", wait=None).acquire())
        await soon(waiting(space, "l", 1))
        await soon(until(lambda: lines.follows("locks/lock/l/")))
        await guard.release()
        await (await soon(trying)).release()
    assert lines.follows("locks/lock/l/")
    for _ in range(4):
        clock.advance("6s")
        await asyncio.sleep(0.01)
    assert lines._lines == {}
    assert lines._looking is None
