"""What is done about an execution that no worker has: in the store alone, at once; and what agents cannot do about its slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import (
    AccessDenied,
    Conflict,
    Context,
    ExecutionFailed,
    ExecutionHandle,
    ManualClock,
    Space,
    Store,
    Unavailable,
    workflow,
)
from holdfast.engine import AtLeast, Batch, ChangeSet, Delete, Increment, Operation, Push, Put, Receipt, Take
from holdfast.layers.workflows.definitions import definition_of
from holdfast.layers.workflows.journal import TOLD_BYTES_MAX
from holdfast.layers.workflows.starting import meta_for, starting
from holdfast.middleware.wrapper import Wrapper
from tests.layers.hosting import Hosts, soon, until, waits_for


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


two = pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)
"""For what no engine can make a difference to."""


async def add(ctx: Context, n: int) -> int:
    await ctx.state.increment("sum", n)
    return n


@workflow
async def waiter(ctx: Context, how: str) -> Any:
    await ctx.step("first", add, 1)
    if how == "sleep":
        await ctx.sleep("1h")
    elif how == "child":
        return await ctx.child(waiter, "signal", id="grandchild")
    elif how == "queue":
        return await ctx.step("away", add, 5, queue="gpu")
    elif how == "signal":
        return await ctx.wait_for("go")
    return "done"


async def left_waiting(boss: Space, hosts: Hosts, *kinds: str) -> dict[str, ExecutionHandle]:
    """Executions that wait for these, and no worker."""
    handles = {how: await boss.workflows.start(waiter, how, id=how) for how in kinds}
    worker = await hosts.start(waiter)
    for how, handle in handles.items():
        await waits_for(handle, how)
    if "child" in kinds:
        await waits_for(await boss.workflows.get("grandchild"), "signal")
    await soon(worker.stop())
    return handles


async def test_what_no_worker_has_is_cancelled_at_once(boss: Space, hosts: Hosts) -> None:
    handles = await left_waiting(boss, hosts, "sleep", "signal", "child", "queue")
    handles["pending"] = await boss.workflows.start(waiter, "pending", id="pending")
    for handle in handles.values():
        await handle.cancel()
        with pytest.raises(ExecutionFailed, match="was cancelled"):
            await handle.result(0)
        with pytest.raises(Conflict):
            await handle.cancel()
    counts = (await boss.workflows.counts())["waiter"]
    assert (counts["pending"], counts["running"], counts["cancelled"]) == (0, 0, 6)
    assert await boss.workflows.list() == []
    assert (await boss.queue("workflows.waiter").stats()).delayed == 0
    await hosts.start(waiter, queues=["gpu"])

    async def is_empty() -> bool:  # what was left in the line is dropped, and runs nothing
        left = [await boss.queue(name).stats() for name in ("workflows.waiter", "gpu")]
        return not any(each.message_count or each.reserved for each in left)

    await until(is_empty)
    assert {(await handle.status()).status for handle in handles.values()} == {"cancelled"}
    await handles["sleep"].retry(from_step="first")
    await waits_for(handles["sleep"], "sleep")
    assert (await handles["sleep"].state())["sum"] == 1


async def test_what_no_worker_has_is_paused_and_resumed_at_once(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    handles = await left_waiting(boss, hosts, "sleep", "signal", "queue")
    handles["pending"] = await boss.workflows.start(waiter, "pending", id="pending")
    for handle in handles.values():
        await handle.pause()
        await handle.pause()
        view = await handle.status()
        assert (view.status, view.waits) == ("paused", ())
    await handles["signal"].signal("go", "done")
    await hosts.start(waiter, queues=["gpu"])
    clock.advance("2h")
    await asyncio.sleep(0.05)
    assert {(await handle.status()).status for handle in handles.values()} == {"paused"}
    for how, handle in handles.items():
        await handle.resume()
        await handle.resume()
        assert await soon(handle.result()) == (5 if how == "queue" else "done")
        assert (await handle.state())["sum"] == (6 if how == "queue" else 1)
    counts = (await boss.workflows.counts())["waiter"]
    assert (counts["pending"], counts["running"], counts["paused"]) == (0, 0, 0)


@workflow(name="limited", concurrency=1)
async def limited(ctx: Context, how: str) -> str:
    if how == "wait":
        await ctx.wait_for("go")
    return how


async def test_one_in_line_is_paused_resumed_and_cancelled_and_no_slot_is_lost(boss: Space, hosts: Hosts) -> None:
    workflows = boss.workflows
    one, two, three, four = [await workflows.start(limited, "x", id=id) for id in ("1", "2", "3", "4")]
    await two.cancel()
    await three.pause()
    await hosts.start(limited)
    assert await soon(one.result()) == "x"  # and three, which is paused, has its slot now
    await asyncio.sleep(0.05)
    assert (await four.status()).status == "pending"
    await three.resume()
    assert (await soon(three.result()), await soon(four.result())) == ("x", "x")
    [slots] = await boss._scope.engine.get("contoso", ["tallies/slots/limited/-"])
    assert slots is not None
    assert slots.value == b"0"


async def test_cancelling_one_that_begins_in_the_same_moment_leaves_one_outcome(boss: Space, hosts: Hosts) -> None:
    await hosts.start(waiter)
    for n in range(10):
        handle = await boss.workflows.start(waiter, "done", id=f"race{n}")
        try:
            await handle.cancel()
        except Conflict:
            assert (await handle.status()).status == "completed"
            continue
        await asyncio.wait([asyncio.ensure_future(soon(handle.result()))])
        assert (await handle.status()).status in ("completed", "cancelled")
    counts = (await boss.workflows.counts())["waiter"]
    assert counts.get("completed", 0) + counts.get("cancelled", 0) == 10
    assert (counts["pending"], counts.get("running", 0)) == (0, 0)


# --- going back over many steps ---


async def check(ctx: Context, n: int) -> str:
    await ctx.state.increment("checked")
    if ctx.state.get(f"k{n}") is None and n < 60:
        ctx.state[f"k{n}"] = n
    return "." * (TOLD_BYTES_MAX + n - 20)  # most have an entry of their own


@workflow
async def many(ctx: Context, n: int) -> int:
    await ctx.step("first", add, 1)
    await ctx.map("check", check, list(range(n)))
    answer = await ctx.wait_for("go")
    if answer == "fail":
        raise ValueError("no")
    return int(ctx.state["checked"])


class Cut(Wrapper):
    """An engine whose so-manieth commit from here on is the last."""

    left = 1_000_000

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.left -= 1
        if self.left < 0:
            raise Unavailable("cut off")
        return await self.inner.commit(space, batch)

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return self.inner.watch(space, *prefixes, cursor=cursor, live=live)


async def test_going_back_over_more_steps_than_a_commit_holds(boss: Space, hosts: Hosts) -> None:
    worker = await hosts.start(many)
    handle = await boss.workflows.start(many, 300)
    await handle.signal("go", "fail")
    with pytest.raises(ExecutionFailed):
        await soon(handle.result())
    await worker.stop()
    cut = Cut(boss._scope.engine)
    dying = Space(replace(boss._scope, engine=cut), boss._blob_folder, boss._coordination)
    cut.left = 2
    with pytest.raises(Unavailable):
        await (await dying.workflows.get(handle.id)).retry(from_step="check")
    view = await handle.status()
    assert (view.status, view.waits[0]["kind"]) == ("paused", "rewind")
    await hosts.start(many)
    await handle.pause()  # it is
    assert (await handle.status()).status == "paused"
    await handle.resume()  # goes on with what was begun
    await handle.signal("go", "fine")
    assert await soon(handle.result()) == 300
    state = await handle.state()
    assert (state["checked"], state["sum"], len(state)) == (300, 1, 62)
    assert len(await handle.steps()) == 302


@two
async def test_what_was_taken_back_before_does_not_count_when_going_back_again(boss: Space, hosts: Hosts) -> None:
    await hosts.start(many)
    handle = await boss.workflows.start(many, 5)
    for _ in range(2):
        await handle.signal("go", "fail")
        with pytest.raises(ExecutionFailed):
            await soon(handle.result())
        await handle.retry(from_step="check")
    await handle.signal("go", "fine")
    assert await soon(handle.result()) == 5
    assert (await handle.state())["checked"] == 5


@workflow
async def steady(ctx: Context) -> int:
    for name, n in (("a", 1), ("b", 10), ("c", 100)):
        await ctx.step(name, add, n)
    if await ctx.wait_for("go") == "fail":
        raise ValueError("no")
    return int(ctx.state["sum"])


@two
async def test_what_was_done_again_counts_once_when_going_back_to_another_step(boss: Space, hosts: Hosts) -> None:
    await hosts.start(steady)
    handle = await boss.workflows.start(steady)
    for name in ("b", "c"):
        await handle.signal("go", "fail")
        with pytest.raises(ExecutionFailed):
            await soon(handle.result())
        await handle.retry(from_step=name)
    await handle.signal("go", "fine")
    assert await soon(handle.result()) == 111
    assert (await handle.state())["sum"] == 111


# --- slots ---


@pytest.mark.parametrize("url", ["policed"], indirect=True)
async def test_agents_cannot_take_slots_without_an_execution_that_runs(
    store: Store, boss: Space, space: Space, hosts: Hosts
) -> None:
    engine = store.engine
    await space.workflows.start(limited, "wait", id="first")

    async def refused(*operations: Operation, conditions: tuple[Any, ...] = ()) -> None:
        with pytest.raises(AccessDenied):
            await engine.commit("contoso", Batch("market", operations, conditions))

    slots = "tallies/slots/limited/-"
    for op in (
        Increment(slots, -1_000),
        Increment(slots, 1_000),
        Increment(slots, -1),
        Increment("tallies/status/limited/pending", 1),
        Increment("tallies/status/limited/running", 1),
        Increment("tallies/inbox/first", 1),
        Increment("tallies/whatever", 1),
        Put("workflows/line/limited/-/000/0000000000000000001", b'{"id":"nobody","priority":0}'),
        Put("workflows/live/limited/nobody", b"null"),
        Put("workflows/ended/limited/0000000000001/first", b'"failed"'),
    ):
        await refused(op)
    meta = meta_for(definition_of(limited), "x", "forged", boss._scope.clock.now_ms())
    whole, needed = starting(space.workflows._queue_of("limited"), meta, 1)
    in_line, _ = starting(space.workflows._queue_of("limited"), meta, 1, in_line=True)
    message = next(op for op in whole if isinstance(op, Push))
    for made in (whole, in_line):
        for left_out in made:
            if not (isinstance(left_out, Increment) and left_out.key.startswith("depths/")):  # those are the queue's
                await refused(*(op for op in made if op is not left_out))
    await refused(*whole, Increment(slots, -1))
    await refused(*whole, *(op for op in in_line if isinstance(op, Put) and op.key.startswith("workflows/line/")))
    wrong = Push(message.prefix, b'{"execution":"nobody"}')
    await refused(*(wrong if op is message else op for op in whole))
    page = await engine.scan("contoso", "queues/ready/workflows.limited/")
    await refused(Delete(page.entries[0].key))
    lease = "consumers/workflows.limited/" + "a" * 30
    await engine.commit("contoso", Batch("market", (Put(lease, b"{}", 60_000),)))
    target = "reserved/workflows.limited/" + "a" * 30 + "/"
    await refused(Take("queues/ready/workflows.limited/", target, 1, None))
    await hosts.start(limited)
    await (await boss.workflows.get("first")).signal("go")
    assert await soon((await space.workflows.start(limited, "x", id="last")).result()) == "x"
    assert [each for each in needed if isinstance(each, AtLeast)]
