"""How an execution comes to its worker: handed over by its start where the worker is at hand, left to others where there is no room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Context, ExecutionFailed, ManualClock, Space, Store, Unavailable, workflow
from holdfast.engine import Batch, ChangeSet, Engine, Entry, Page, Put, Receipt, cursor_at
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.workflows.entries import mail_prefixes, meta_key
from holdfast.middleware.wrapper import Wrapper
from tests.layers.hosting import until
from tests.layers.test_workflows import Hosts, hosts, soon, three_steps

__all__ = ["hosts"]

META = meta_key("x")[:-1]
SIGNALS = mail_prefixes("x")[-1]


async def commits_after(space: Space, revision: int) -> list[ChangeSet]:
    upto, found = (await space.info()).revision, list[ChangeSet]()
    async with aclosing(
        space._scope.engine.watch(space.name, "workflows/", "reserved/", cursor=cursor_at(revision))
    ) as commits:  # type: ignore[type-var]
        async for commit in commits:
            found.append(commit)
            if commit.version >= upto:
                return found
    return found


async def test_a_start_hands_its_execution_over_to_a_worker_at_hand_in_the_same_commit(boss: Space) -> None:
    async with boss.workflows.worker([three_steps]):
        await soon((await boss.workflows.start(three_steps, 1)).result())
        await asyncio.sleep(0.05)  # the worker has seen that there is nothing more, and sleeps
        before = (await boss.info()).revision
        assert await soon((await boss.workflows.start(three_steps, 1, id="x")).result()) == 4
        commits = await commits_after(boss, before)
    first = [change.key for change in commits[0].changes]
    assert "workflows/meta/x" in first
    assert any(key.startswith("reserved/workflows.three_steps/") for key in first)
    assert len(commits) == 2, "its start, from which on it runs, and its end; what its steps write is elsewhere"
    assert commits[0].changes[first.index("workflows/executions/x")].tag.endswith(":running")


class Beside(Wrapper):
    """An engine that tells what is read, and does something when an execution was just started, before anybody here knows."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.read: list[str] = []
        self.first: Callable[[], Awaitable[object]] | None = None
        self.then: Callable[[], Awaitable[object]] | None = None
        self.slow: asyncio.Event | None = None
        """What starts wait for before they are answered."""
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        """What happens while a worker looks at what was sent to an execution, and has seen that nobody cancels it."""
        self.started = 0
        self.scanned: list[str] = []

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.read += keys
        return await super().get(space, keys)

    async def commit(self, space: str, batch: Batch) -> Receipt:
        starts = any(isinstance(op, Put) and op.key == meta_key("x") for op in batch.operations)
        if starts and self.first is not None:
            await self.first()
        receipt = await super().commit(space, batch)
        if starts and self.then is not None:
            then, self.then = self.then, None
            await then()
        if self.slow is not None and any(isinstance(op, Put) and op.key.startswith(META) for op in batch.operations):
            self.started += 1
            await self.slow.wait()
        return receipt

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        page = await super().scan(space, prefix, **options)
        self.scanned.append(prefix)
        if self.meanwhile is not None and prefix == SIGNALS:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return page


@asynccontextmanager
async def at_hand(boss: Space, *workflows: Any) -> AsyncIterator[tuple[Space, Beside]]:
    """A space with a worker that waits, and its engine."""
    engine = Beside(boss._scope.engine)
    space = Space(replace(boss._scope, engine=engine), boss._blob_folder, boss._coordination)
    async with space.workflows.worker([three_steps, *workflows]):
        await soon((await space.workflows.start(three_steps, 1)).result())
        await asyncio.sleep(0.05)  # the worker has seen that there is nothing more, and sleeps
        engine.read.clear()
        yield space, engine


async def test_what_was_just_started_here_is_not_read_again(boss: Space) -> None:
    async with at_hand(boss) as (space, engine):
        assert await soon((await space.workflows.start(three_steps, 1, id="x")).result()) == 4
        assert [key for key in engine.read if key.endswith("/x")] == []


async def test_as_many_are_handed_over_as_there_is_room_for_also_when_others_are_about_to_end(boss: Space) -> None:
    async with at_hand(boss) as (space, engine):

        async def in_a_row(number: int) -> None:
            for _ in range(3):
                handle = await space.workflows.start(three_steps, number)
                assert await soon(handle.result()) == number + 3

        await asyncio.gather(*(in_a_row(number) for number in range(20)))
        assert [key for key in engine.read if "/meta/" in key] == []
        assert (await space.queue("workflows.three_steps").stats()).ready == 0


async def test_what_lay_there_before_is_taken_first_and_both_are_run(boss: Space) -> None:
    async with at_hand(boss) as (space, engine):
        elsewhere = Space(boss._scope, boss._blob_folder, Coordination(Leases(boss._scope.clock)))

        async def start_another() -> None:
            await elsewhere.workflows.start(three_steps, 10, id="w")

        engine.first = start_another
        handle = await space.workflows.start(three_steps, 1, id="x")
        assert await soon(handle.result()) == 4
        assert await soon((await space.workflows.get("w")).result()) == 13


async def test_one_that_somebody_else_starts_while_it_is_made_ready_here_runs_once(boss: Space) -> None:
    """The other's message comes here before it is known that ours is refused."""
    counted = Counter[str]()

    @workflow(name="contested")
    async def contested(ctx: Context, n: int) -> int:
        counted[ctx.id] += 1
        return n

    async with at_hand(boss, contested) as (space, engine):
        elsewhere = Space(boss._scope, boss._blob_folder, Coordination(Leases(boss._scope.clock)))
        await soon((await space.workflows.start(contested, 1)).result())

        async def is_taken() -> bool:
            stats = await boss.queue("workflows.contested").stats()
            return stats.ready == 0 and stats.reserved == 1

        async def start_the_same() -> None:
            engine.first = None
            await elsewhere.workflows.start(contested, 7, id="x")
            await until(is_taken)
            for _ in range(30):
                await asyncio.sleep(0)

        engine.first = start_the_same
        handle = await space.workflows.start(contested, 1, id="x")
        assert await soon(handle.result()) == 7
        await asyncio.sleep(0.05)
        assert counted["x"] == 1
        assert (await space.workflows.counts())["contested"] == {"completed": 2, "pending": 0, "running": 0}
        stats = await space.queue("workflows.contested").stats()
        assert (stats.ready, stats.reserved) == (0, 0)


async def test_a_start_that_is_refused_leaves_nothing_behind(boss: Space) -> None:
    async with at_hand(boss) as (space, _):
        await soon((await space.workflows.start(three_steps, 1, id="x")).result())
        for _ in range(60):  # more than there is room for
            assert (await (await space.workflows.start(three_steps, 5, id="x")).result()) == 4
        [worker] = [room.__self__ for room in space.queue("workflows.three_steps").served.rooms]

        async def is_idle() -> bool:
            return bool(worker._free == worker.concurrency and not worker._runs)

        await soon(until(is_idle))


async def test_a_worker_that_is_filled_by_what_is_handed_over_takes_nothing_from_others(boss: Space) -> None:
    leave = asyncio.Event()

    @workflow(name="holds")
    async def holds(ctx: Context) -> None:
        await ctx.step("stay", leave.wait)

    async with at_hand(boss, holds) as (space, _), space.workflows.worker([holds], concurrency=2):
        await asyncio.sleep(0.05)
        handles = [await space.workflows.start(holds) for _ in range(53)]  # 50 of the one, 2 of the other
        await asyncio.sleep(0.05)
        stats = await boss.queue("workflows.holds").stats()
        assert (stats.ready, stats.reserved) == (1, 52)
        leave.set()
        for handle in handles:
            await soon(handle.result())


async def test_one_that_was_handed_over_is_run_by_another_when_its_worker_dies(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async with at_hand(boss) as (space, engine):

        async def die() -> None:
            raise Unavailable("it was written, and its worker does not know")

        engine.then = die
        with pytest.raises(Unavailable):
            await space.workflows.start(three_steps, 1, id="x")
        handle = await boss.workflows.get("x")
        assert (await handle.status()).status == "running"
        assert (await space.workflows.counts())["three_steps"]["running"] == 1
        assert await soon(handle.result()) == 4, "what may be under its lease is looked for"
    assert (await boss.workflows.counts())["three_steps"]["completed"] == 2


async def test_what_is_being_handed_over_is_not_taken_for_left_behind(boss: Space) -> None:
    """One start is cancelled: what may be under the lease is looked for, and others are under way."""
    async with at_hand(boss) as (space, engine):
        counted = Counter[str]()
        answers = asyncio.Event()

        @workflow(name="counts")
        async def counts(ctx: Context, n: int) -> int:
            counted[ctx.id] += 1
            return n

        engine.slow = answers
        async with space.workflows.worker([counts]):
            await asyncio.sleep(0.05)
            starts = [asyncio.ensure_future(space.workflows.start(counts, n, id=f"e{n}")) for n in range(8)]

            async def all_are_written() -> bool:
                return engine.started == 8

            async def was_looked() -> bool:
                return any(
                    prefix.startswith("reserved/workflows.counts/") and "~" in prefix for prefix in engine.scanned
                )

            async def one_has_run() -> bool:
                return counted["e0"] > 0

            await until(all_are_written)
            starts[0].cancel()
            await until(was_looked)
            await until(one_has_run)  # the one whose start was cancelled; others that were found would have as well
            answers.set()
            for n, handle in enumerate(await asyncio.gather(*starts[1:]), 1):
                assert await soon(handle.result()) == n
            await asyncio.sleep(0.05)
        assert set(counted.values()) == {1}


@workflow(name="quick")
async def quick(ctx: Context) -> str:
    return "done"


async def test_a_worker_without_room_hands_what_comes_for_another_workflow_to_others(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    inside, leave = list[int](), asyncio.Event()

    async def stays() -> None:
        inside.append(1)
        await leave.wait()

    @workflow(name="long")
    async def long(ctx: Context) -> None:
        await ctx.step("stay", stays)

    async def is_full() -> bool:
        return len(inside) == 2

    async with boss.workflows.worker([long, quick], concurrency=2):
        await soon((await boss.workflows.start(quick)).result())
        running = [await boss.workflows.start(long) for _ in range(2)]
        await until(is_full)
        await hosts.start(quick)
        handles = [await boss.workflows.start(quick) for _ in range(5)]
        held = asyncio.ensure_future(asyncio.gather(*(handle.result() for handle in handles)))
        for _ in range(100):
            await asyncio.sleep(0.01)
            clock.advance("10ms")
            if held.done():
                break
        assert await soon(held) == ["done"] * 5
        leave.set()
        for handle in running:
            await soon(handle.result())


@workflow
async def obedient(ctx: Context, _: None) -> Any:
    return await ctx.wait_for("order", timeout="1h")


@pytest.mark.parametrize("turns", [0, 1, 3, 30])
async def test_what_is_sent_to_an_execution_between_its_start_and_its_run_arrives(
    store: Store, boss: Space, turns: int
) -> None:
    """The feed tells of it before the run has begun, or while it begins."""
    async with at_hand(boss, obedient) as (space, engine):
        await soon((await space.workflows.start(obedient, None)).cancel())
        await asyncio.sleep(0.05)

        async def send() -> None:
            await (await boss.workflows.get("x")).signal("order", "sit")
            for _ in range(turns):
                await asyncio.sleep(0)

        engine.then = send
        handle = await space.workflows.start(obedient, None, id="x")
        assert engine.then is None
        assert await soon(handle.result()) == "sit"


async def test_one_that_was_cancelled_between_its_start_and_its_run_is_cancelled(boss: Space) -> None:
    """It runs from its start on, so it is its worker that has to be reached."""
    async with at_hand(boss, obedient) as (space, engine):
        await soon((await space.workflows.start(obedient, None)).cancel())
        await asyncio.sleep(0.05)

        async def cancel() -> None:
            await (await boss.workflows.get("x")).cancel()

        engine.then = cancel
        handle = await space.workflows.start(obedient, None, id="x")
        assert engine.then is None
        with pytest.raises(ExecutionFailed):
            await soon(handle.result())
        assert (await handle.status()).status == "cancelled"


@workflow(name="busy")
async def busy(ctx: Context) -> None:
    await ctx.step("work", asyncio.Event().wait)


async def test_one_that_is_busy_is_cancelled_also_right_after_its_start(boss: Space) -> None:
    """Where a commit takes no step of the loop, that is before its worker has it."""
    async with boss.workflows.worker([busy]):
        await asyncio.sleep(0.05)
        for _ in range(5):
            handle = await boss.workflows.start(busy)
            await handle.cancel()
            with pytest.raises(ExecutionFailed):
                await soon(handle.result())
            assert (await handle.status()).status == "cancelled"


@workflow(name="busy_later")
async def busy_later(ctx: Context) -> None:
    await ctx.wait_for("begin")
    await ctx.step("work", asyncio.Event().wait)


async def test_one_that_is_cancelled_while_its_next_worker_reads_what_was_sent_is_cancelled(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    first = await hosts.start(busy_later)
    handle = await boss.workflows.start(busy_later, id="x")
    await handle.signal("begin", None)

    async def works() -> bool:
        return "begin" in str(await handle.steps()) and (await handle.status()).status == "running"

    await until(works)
    await hosts.kill(first)
    engine = Beside(boss._scope.engine)

    async def cancel() -> None:
        await handle.cancel()
        await asyncio.sleep(0.05)  # the feed has told the worker

    engine.meanwhile = cancel
    clock.advance("1m")
    space = Space(replace(boss._scope, engine=engine), boss._blob_folder, Coordination(Leases(clock)))
    async with space.workflows.worker([busy_later]):
        with pytest.raises(ExecutionFailed):
            await soon(handle.result())
    assert engine.meanwhile is None


async def test_an_end_that_came_before_anybody_waited_is_seen(boss: Space) -> None:
    async with at_hand(boss) as (space, _):
        handle = await space.workflows.start(three_steps, 1, id="x")

        async def ended() -> bool:
            return (await handle.status()).status == "completed"

        await soon(until(ended))
        assert await soon(handle.result()) == 4


async def test_what_cannot_be_handed_over_is_put_in_line(boss: Space, clock: ManualClock) -> None:
    async with boss.workflows.worker([three_steps]):
        await soon((await boss.workflows.start(three_steps, 1)).result())
        await asyncio.sleep(0.05)
        clock.advance("1h")  # the lease under which it would be handed over has ended, and nobody knows yet
        handle = await boss.workflows.start(three_steps, 5)
        assert await soon(handle.result()) == 8


async def test_a_worker_that_has_no_room_leaves_what_waits_to_others(boss: Space, hosts: Hosts) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def stays() -> None:
        entered.set()
        await leave.wait()

    @workflow(name="busy")
    async def busy(ctx: Context, stay: bool) -> str:
        if stay:
            await ctx.step("stay", stays)
        return "done"

    await hosts.start(busy, concurrency=1)
    first = await boss.workflows.start(busy, True)
    await soon(entered.wait())
    second = await boss.workflows.start(busy, False)
    await hosts.start(busy, concurrency=1)
    assert await soon(second.result()) == "done"
    leave.set()
    assert await soon(first.result()) == "done"
