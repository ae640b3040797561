"""What newer code sees of a state that older code wrote: between steps, in branches, on queues, and after a crash anywhere."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

import holdfast
from holdfast import (
    Context,
    ExecutionHandle,
    ManualClock,
    Space,
    workflow,
)
from holdfast.layers.workflows.earlier import Earlier
from holdfast.layers.workflows.state import ADD, APPEND, SET, View
from holdfast.testing.dying import Life
from holdfast.testing.timeline import Timeline
from holdfast.testing.workflows import ended
from tests.layers import test_workflow_crashes as programs
from tests.layers.hosting import Hosts, soon, until, waits_for
from tests.layers.tills import (
    ENDED,
    MIGRATED,
    Cents,
    Euros,
    New,
    Old,
    earn,
    earn_cents,
    events,
    hosts,
    renamed,
    till_1,
    till_2,
    to_cents,
    waits_for_signal,
)

__all__ = ["hosts"]

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))


# --- a closer look at what is replayed ---


@pytest.mark.parametrize("fewer", [False, True])
async def test_code_between_steps_may_write_more_or_less_than_it_did(boss: Space, hosts: Hosts, fewer: bool) -> None:
    async def nothing() -> None: ...

    @workflow(name="between", state=Old)
    async def first(ctx: Context) -> Any:
        await ctx.state.increment("n")
        await ctx.state.increment("n")
        await ctx.step("a", nothing)
        await ctx.state.increment("n")
        await ctx.state.flush()
        await ctx.step("b", nothing)
        await ctx.state.append_to_list("seen", 1)
        await ctx.state.flush()
        await ctx.wait_for("go")

    @workflow(name="between", state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed})
    async def second(ctx: Context) -> Any:
        for _ in range(1 if fewer else 5):
            await ctx.state.increment("m", 7)
        await ctx.step("a", nothing)
        assert ctx.state["m"] == 20
        if not fewer:
            await ctx.state.increment("m", 10)
            assert ctx.state["m"] == 30
            await ctx.state.flush()
        await ctx.step("b", nothing)
        assert ctx.state["m"] == 30
        await ctx.state.append_to_list("seen", 1)
        await ctx.state.flush()
        await ctx.wait_for("go")
        await ctx.state.append_to_list("seen", 2)
        await ctx.state.increment("m")
        await ctx.step("c", nothing)
        await ctx.wait_for("end")
        await ctx.state.increment("m")
        return ctx.state.all()

    worker = await hosts.start(first)
    handle = await boss.workflows.start(first)
    await waits_for(handle, "signal")
    await worker.stop()
    worker = await hosts.start(second)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    assert await handle.state() == {"m": 31, "seen": [1, 2]}
    await worker.stop()
    await hosts.start(second)
    await handle.signal("end")
    assert await soon(handle.result()) == {"m": 32, "seen": [1, 2]}
    assert await handle.state() == {"m": 32, "seen": [1, 2]}


async def test_branches_see_their_own_state_of_then_in_the_newer_shape(boss: Space, hosts: Hosts) -> None:
    @dataclass
    class Two:
        a: int = 0
        b: int = 0

    @dataclass
    class Three:
        a: str = ""
        b: str = ""

    async def put(ctx: Context, key: str, value: Any) -> None:
        ctx.state[key] = value

    def made(shape: type, version: str, migrations: Any, of: Any) -> Any:
        @workflow(name="pair", state=shape, state_version=version, state_migrations=migrations)
        async def pair(ctx: Context) -> Any:
            async def side(key: str) -> Any:
                await ctx.step(f"{key}1", put, key, of(1))
                first = ctx.state[key]
                await ctx.step(f"{key}2", put, key, of(2))
                second = ctx.state[key]
                await ctx.wait_for(key)
                await ctx.step(f"{key}3", put, key, of(3))
                return [first, second, ctx.state[key]]

            return await ctx.gather(side("a"), side("b"))

        return pair

    worker = await hosts.start(made(Two, "1.0.0", {}, int))
    handle = await boss.workflows.start("pair")

    async def both() -> bool:
        return len((await handle.status()).waits) == 2

    await until(both)
    await worker.stop()
    later = made(Three, "1.1.0", {"1.0.0": lambda s: {key: str(value) for key, value in s.items()}}, str)
    worker = await hosts.start(later)
    await handle.signal("b")
    await waits_for_signal(handle, "a")
    assert await handle.state() == {"a": "2", "b": "3"}
    await worker.stop()
    await hosts.start(later)
    await handle.signal("a")
    assert await soon(handle.result()) == [["1", "2", "3"], ["1", "2", "3"]]


def test_numbers_and_lists_are_added_to_what_an_earlier_version_had() -> None:
    old, view = View(), View()
    view.earlier = Earlier(old, renamed, {"m": [SET, 0]})
    view.apply("m", [ADD, 1], 10)
    view.apply("seen", [APPEND, [3]], 11)
    old.apply("n", [SET, 2], 1)
    old.apply("seen", [APPEND, [1]], 2)
    assert view.state() == {"m": 21, "seen": [1, 3]}
    old.apply("seen", [APPEND, [2]], 3)
    old.apply("n", [ADD, 1], 4)
    assert view.state() == {"m": 31, "seen": [1, 2, 3]}
    view.apply("m", [SET, 5], 12)
    assert view.state()["m"] == 5


# --- crashes, and steps that are done elsewhere ---


async def test_a_worker_that_dies_at_any_commit_of_a_migration_leaves_one_outcome(
    url: str, boss: Space, hosts: Hosts, tmp_path: Path
) -> None:
    if url == "policed:":
        pytest.skip("only the store's own end the leases of the dead")
    kills = [(at, after) for at in range(1, 5) for after in (False, True)]
    worker = await hosts.start(till_1)
    handles = [await boss.workflows.start(till_1, id=f"t{at}{after}") for at, after in kills]
    for handle in handles:
        await waits_for(handle, "signal")
    await worker.stop()
    died = 0
    for handle, (at, after) in zip(handles, kills, strict=True):
        await handle.signal("go")
        await handle.signal("end")
        life = Life(boss, tmp_path, [till_2], at, after=after, lease="1d")
        ending = asyncio.ensure_future(handle.result())
        dying = asyncio.ensure_future(life.engine.dead.wait())
        await soon(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED))
        if not ending.done():
            died += 1
            while life.engine.dying:
                await asyncio.sleep(0.001)
            await life.end()
            await life.bury()
            life = Life(boss, tmp_path, [till_2], lease="1d")
        assert await soon(ending) == ENDED, (at, after)
        await life.end()
        await life.bury()
        assert await handle.state() == ENDED
        assert await events(handle, "migrated") == 1
        assert [point.state for point in await handle.history() if point.event == "migrated"] == [MIGRATED]
    assert died >= 4


class Anything(pydantic.BaseModel, extra="allow"):
    pass


class Later(pydantic.BaseModel, extra="allow"):
    epoch: int = 2


@workflow(name="interpret", state=Anything)
async def interpret_1(ctx: Context, given: programs.Program) -> list[Any]:
    return [await programs.perform(ctx, call) for call in given]


@workflow(name="interpret", state=Later, state_version="1.1.0", state_migrations={"1.0.0": lambda state: state})
async def interpret_2(ctx: Context, given: programs.Program) -> list[Any]:
    return [await programs.perform(ctx, call) for call in given]


async def lived(seed: int, folder: Path, kill_at: int | None, *, after: bool = False) -> tuple[dict[str, Any], int]:
    """Run a program under the first version until its worker dies at a commit, then under the second; gives the outcome, and the commits."""
    clock = Timeline()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = store.space("s", agent="boss")
        given = programs.program(random.Random(seed))
        handle = await space.workflows.start(programs.interpret, given, id="x")
        for number in range(12):
            await handle.signal("go", number)
        life = Life(space, folder, [interpret_1], kill_at, after=after, queues=["q"])
        ending = asyncio.ensure_future(ended(store, space))
        dying = asyncio.ensure_future(life.engine.dead.wait())
        try:
            await clock.run(asyncio.ensure_future(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED)))
            if not ending.done():
                await life.end()
                life = Life(space, folder, [interpret_2], queues=["q"])
                await clock.run(ending)
            return await settled(space), life.engine.commits
        finally:
            dying.cancel()
            ending.cancel()
            await life.end()


async def settled(space: Space) -> dict[str, Any]:
    """What must not depend on when the state was migrated."""
    found = await programs.outcome_of(space, "x")
    for id, outcome in found.items():
        if id != "counts":
            status, result, state, steps, log, most = outcome
            state.pop("epoch", None)
            steps.pop("~state", None)
            log = [each for each in log if each[0] not in ("typed", "migrated")]
            found[id] = (status, result, state, steps, log, most)
    return found


@pytest.mark.parametrize("seed", range(400) if SOAK else range(8))
async def test_programs_that_are_migrated_at_any_commit_end_as_if_they_had_not_been(seed: int, tmp_path: Path) -> None:
    undisturbed, commits = await lived(seed, tmp_path, None)
    for at in range(1, commits, 1 if SOAK else 4):
        for after in (False, True):
            found, _ = await lived(seed, tmp_path, at, after=after)
            assert found == undisturbed, (at, after)


async def doubled(ctx: Context, n: int) -> int:
    """One that is done on a queue, by either version."""
    if "euros" in ctx.state:
        seen = int(ctx.state["euros"])
        await BLOCKED[0].wait()
        ctx.state["euros"] = seen + n
    else:
        ctx.state["cents"] = ctx.state["cents"] + n * 100
    return n


async def hanging(ctx: Context) -> None:
    if "euros" in ctx.state:
        await asyncio.sleep(3600)


BLOCKED: list[asyncio.Event] = []


def sending(shape: type, options: dict[str, Any], *, also: bool) -> Any:
    @workflow(name="sending", state=shape, **options)
    async def sends(ctx: Context) -> Any:
        parts = [ctx.step("doubled", doubled, 2, queue="q")]
        if also:
            parts.append(ctx.step("hanging", hanging))
        await ctx.gather(*parts)
        return ctx.state.all()

    return sends


@pytest.mark.parametrize("also", [False, True], ids=["aside", "running"])
async def test_what_a_step_on_a_queue_wrote_to_an_earlier_version_is_done_again(
    boss: Space, hosts: Hosts, clock: ManualClock, also: bool
) -> None:
    BLOCKED[:] = [asyncio.Event()]  # each test has a loop of its own
    old = sending(Euros, {}, also=also)
    new = sending(Cents, {"state_version": "1.1.0", "state_migrations": {"1.0.0": to_cents}}, also=also)
    runs = await hosts.start(old)
    serves = await hosts.start(old, queues=["q"], steps_only=True)
    handle = await boss.workflows.start(old)

    async def has_begun() -> bool:
        return serves._service.doing(handle.id) and (also or bool((await handle.status()).waits))

    await until(has_begun)
    if also:  # it is told by a letter, which is read after the migration
        await hosts.kill(runs)
        BLOCKED[0].set()
        await until(lambda: told(handle))
        clock.advance("11s")
        await hosts.start(new)
    else:  # it was migrated while it lay aside, and finds that out
        await runs.stop()
        await hosts.start(new)
        async with asyncio.timeout(30):  # somebody with newer code asks for the step: that wakes the execution
            newer = await hosts.start(new, queues=["other"], steps_only=True)
            entry = await boss._scope.engine.get("contoso", [f"workflows/executions/{handle.id}"])
            assert entry[0] is not None
            await newer._service._wake(entry[0])
            while not await events(handle, "migrated"):
                await asyncio.sleep(0.001)
        await waits_for(handle, "queue")
        BLOCKED[0].set()
        await until(lambda: is_false(serves._service.doing(handle.id)))
    await serves.stop()
    await hosts.start(new, queues=["q"], steps_only=True)
    ending = asyncio.ensure_future(handle.result())

    async def has_ended() -> bool:
        clock.advance("1s")  # whoever cannot do a step puts it off
        await asyncio.wait([ending], timeout=0.02)
        return ending.done()

    await until(has_ended)
    assert (await ending)["cents"] == 200
    assert (await handle.state())["cents"] == 200


async def told(handle: ExecutionHandle) -> bool:
    page = await handle._scope.engine.scan("contoso", f"journal/mail/{handle.id}/", limit=1)
    return bool(page.entries)


async def is_false(value: bool) -> bool:
    return not value


@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_what_was_flushed_before_a_step_that_did_not_end_is_counted_once(
    boss: Space, hosts: Hosts, clock: ManualClock, writes: int
) -> None:
    async def nothing() -> None: ...

    async def never() -> None:
        await asyncio.sleep(3600)

    @workflow(name="flushing", state=Old)
    async def first(ctx: Context) -> None:
        await ctx.step("a", nothing)
        await ctx.state.increment("n")
        await ctx.state.flush()
        await ctx.step("b", never)

    @workflow(name="flushing", state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed})
    async def second(ctx: Context) -> Any:
        await ctx.step("a", nothing)
        for _ in range(writes):
            await ctx.state.increment("m", 10)
        await ctx.state.flush()
        await ctx.step("b", nothing)
        seen = ctx.state["m"]
        await ctx.state.increment("m")
        await ctx.state.flush()
        await ctx.wait_for("go")
        return [seen, ctx.state["m"]]

    worker = await hosts.start(first)
    handle = await boss.workflows.start(first)

    async def flushed() -> bool:
        return (await handle.state()).get("n") == 1

    await until(flushed)
    await hosts.kill(worker)
    clock.advance("11s")
    worker = await hosts.start(second)
    expected = 20 if writes == 2 else 10  # what was written before counts, and what is new does
    await waits_for(handle, "signal")
    assert (await handle.state())["m"] == expected + 1
    await worker.stop()
    await hosts.start(second)
    await handle.signal("go")
    assert await soon(handle.result()) == [expected, expected + 1]


async def test_a_retry_of_one_branch_from_before_a_migration_takes_back_what_others_did_after_it(
    boss: Space, hosts: Hosts
) -> None:
    def made(shape: type, options: dict[str, Any], work: Any) -> Any:
        @workflow(name="sides", state=shape, **options)
        async def sides(ctx: Context) -> Any:
            async def left() -> None:
                await ctx.step("l1", work, 1)
                await ctx.wait_for("go")
                await ctx.step("l2", work, 2)

            async def right() -> None:
                await ctx.step("r1", work, 4)

            await ctx.gather(left(), right())
            return ctx.state.all()

        return sides

    worker = await hosts.start(made(Euros, {}, earn))
    handle = await boss.workflows.start("sides")
    await waits_for(handle, "signal")
    await worker.stop()
    later = {"state_version": "1.1.0", "state_migrations": {"1.0.0": to_cents}}
    await hosts.start(made(Cents, later, earn_cents))
    await handle.signal("go")
    assert (await soon(handle.result()))["items"][-1] == "c2"
    await handle.retry("gather#0/1/r1#0")
    await waits_for(handle, "signal")
    found = await handle.state()
    assert (found["cents"], found.get("euros"), sorted(found["items"])) == (500, None, ["c1", "c4"])
    await handle.signal("go")
    found = await soon(handle.result())
    assert (found["cents"], sorted(found["items"])) == (700, ["c1", "c2", "c4"])
