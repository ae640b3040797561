"""Code that runs again, or is left: it sees what it saw before, and what it does on its way out does not count.

First the code that a worker leaves; then what replay shows of the state; then what steps write, beside each other and in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from typing import Any

import pytest

from holdfast import Context, ExecutionHandle, ManualClock, Space, StepFailed, TaskSpec, Worker, step, workflow
from holdfast.layers.workflows.state import Buffer, Cell, View
from tests.layers.hosting import Hosts, soon, until
from tests.layers.resuming import RUNS, double, fails_behind, forget, gate, hosts, look, note, noted, passes, two
from tests.layers.test_workflow_turns import waiting
from tests.layers.tills import New, Old, renamed, waits_for_signal

__all__ = ["forget", "hosts"]


async def stuck_once(text: str) -> str:
    RUNS.append(text)
    if RUNS.count(text) == 1:
        await asyncio.Event().wait()
    return text


async def add(ctx: Context, n: int) -> None:
    await ctx.state.increment("n", n)


async def put(ctx: Context, key: str, value: Any) -> None:
    ctx.state[key] = value


async def remove(ctx: Context, *keys: str) -> None:
    for key in keys:
        del ctx.state[key]


async def status_of(handle: ExecutionHandle) -> str:
    """How it ends, or is paused."""

    async def stopped() -> bool:
        return (await handle.status()).status in ("completed", "failed", "paused")

    await until(stopped)
    return (await handle.status()).status


async def started(boss: Space, hosts: Hosts, work: Any) -> tuple[ExecutionHandle, Worker]:
    worker = await hosts.start(work)
    return await boss.workflows.start(work), worker


async def rested(boss: Space, hosts: Hosts, clock: ManualClock, work: Any) -> ExecutionHandle:
    """One that was put aside for an hour, and goes on."""
    handle, _ = await started(boss, hosts, work)
    await waiting(handle, ["sleep"])
    clock.advance("1h")
    return handle


async def signalled(boss: Space, hosts: Hosts, work: Any) -> ExecutionHandle:
    """One that was put aside until a signal, and goes on."""
    handle, _ = await started(boss, hosts, work)
    await waiting(handle, ["signal"])
    await handle.signal("go")
    return handle


# --- code that is left ---


async def test_code_that_is_put_aside_does_not_clean_up(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    @workflow
    async def using(ctx: Context) -> None:
        await ctx.step("take", note, "take")
        try:
            await ctx.sleep("1h")
            await ctx.step("use", note, "use")
        finally:
            await ctx.step("release", note, "release")

    handle = await rested(boss, hosts, clock, using)
    await soon(handle.result())
    assert RUNS == ["take", "use", "release"]


@workflow
async def cleaning(ctx: Context) -> None:
    await ctx.step("first", note, "first")
    try:
        await ctx.step("use", stuck_once, "use")
    finally:
        await ctx.step("release", note, "release")
    await ctx.step("last", note, "last")


@pytest.mark.parametrize("paused", [False, True])
async def test_code_that_is_handed_over_or_paused_does_not_clean_up(boss: Space, hosts: Hosts, paused: bool) -> None:
    handle, worker = await started(boss, hosts, cleaning)
    await noted("use")
    if paused:
        await handle.pause()
        assert await status_of(handle) == "paused"
        await handle.resume()
    else:
        await worker.stop()
        await hosts.start(cleaning)
    await soon(handle.result())
    assert RUNS == ["first", "use", "use", "release", "last"]


async def test_what_code_writes_while_it_is_left_is_not_in_the_state(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def noticing(ctx: Context) -> dict[str, Any]:
        try:
            await ctx.step("use", stuck_once, "use")
        except BaseException:
            ctx.state["broken"] = True
            raise
        ctx.state["whole"] = True
        await ctx.step("last", note, "last")
        return ctx.state.all()

    handle, worker = await started(boss, hosts, noticing)
    await noted("use")
    await worker.stop()
    await hosts.start(noticing)
    assert await soon(handle.result()) == {"whole": True}
    assert await handle.state() == {"whole": True}


async def test_what_code_wrote_before_its_first_step_was_handed_over_is_written_once(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def early(ctx: Context) -> Any:
        await ctx.state.increment("n")
        await ctx.step("use", stuck_once, "use")
        return ctx.state["n"]

    handle, worker = await started(boss, hosts, early)
    await noted("use")
    await worker.stop()
    await hosts.start(early)
    assert await soon(handle.result()) == 1
    assert await handle.state() == {"n": 1}


# --- what replay shows ---


async def test_a_key_is_seen_where_it_was_although_the_state_is_empty_now(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    @workflow
    async def emptied(ctx: Context) -> Any:
        await ctx.step("put", put, "k", 1)
        seen = ctx.state["k"]
        await ctx.step("remove", remove, "k")
        await ctx.sleep("1h")
        return [seen, ctx.state.all()]

    handle = await rested(boss, hosts, clock, emptied)
    assert await soon(handle.result()) == [1, {}]


async def test_what_a_cancelled_branch_wrote_is_seen_after_it(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    @workflow
    async def cancelling(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            await ctx.step("add", add, 2)
            gate("added").set()
            await ctx.wait_for("never")

        with contextlib.suppress(StepFailed):
            await ctx.gather(one(), ctx.step("fails", fails_behind, "added"))
        seen = ctx.state.get("n", 0)
        await ctx.sleep("1h")
        return seen

    handle = await rested(boss, hosts, clock, cancelling)
    assert await soon(handle.result()) == 2


async def test_what_was_written_inside_a_completed_step_is_seen_after_it(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    async def outer(ctx: Context) -> None:
        await ctx.step("inner", add, 1)
        await ctx.gather(add(ctx, 10))

    async def raise_it(ctx: Context) -> None:
        ctx.state["n"] = ctx.state["n"] + 100

    @workflow
    async def nesting(ctx: Context) -> Any:
        await ctx.step("outer", outer)
        seen = ctx.state.get("n", 0)
        await ctx.sleep("1h")
        await ctx.step("raise", raise_it)
        return [seen, ctx.state["n"]]

    handle = await rested(boss, hosts, clock, nesting)
    assert await soon(handle.result()) == [11, 111]
    assert await handle.state() == {"n": 111}


async def test_what_was_added_after_a_removal_stays_when_the_removal_is_replayed_last(
    boss: Space, hosts: Hosts
) -> None:
    async def more(ctx: Context, n: int) -> None:
        await ctx.state.increment("n", n)
        await ctx.state.append_to_list("l", n)

    @workflow
    async def clearing(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            await ctx.step("remove", remove, "n", "l")
            gate("removed").set()

        async def other() -> Any:
            await ctx.step("passes", passes, "removed")
            await ctx.step("more", more, 7)
            await ctx.wait_for("go")
            return await ctx.step("look", look)

        await ctx.step("more", more, 1)
        _, seen = await ctx.gather(one(), other())
        return [seen, ctx.state.all()]

    handle = await signalled(boss, hosts, clearing)
    assert await soon(handle.result()) == [{"n": 7, "l": [7]}] * 2
    assert await handle.state() == {"n": 7, "l": [7]}


async def test_many_additions_replayed_before_what_they_were_added_to_are_not_lost(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def counting(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            await ctx.step("put", put, "n", 100)
            gate("put").set()

        async def other() -> Any:
            await ctx.step("passes", passes, "put")
            for _ in range(70):
                await ctx.state.increment("n")
            await ctx.wait_for("go")
            return await ctx.step("look", look)

        _, seen = await ctx.gather(one(), other())
        return [seen, ctx.state.all()]

    handle = await signalled(boss, hosts, counting)
    assert await soon(handle.result()) == [{"n": 170}] * 2


@two
async def test_many_additions_to_what_a_cancelled_branch_wrote_are_not_lost(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    @workflow
    async def counting(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            await ctx.step("put", put, "n", 100)
            gate("put").set()
            await ctx.wait_for("never")

        with contextlib.suppress(StepFailed):
            await ctx.gather(one(), ctx.step("fails", fails_behind, "put"))
        await ctx.sleep("1h")
        for _ in range(70):
            await ctx.step("add", add, 1)
        return await ctx.step("look", look)

    handle = await rested(boss, hosts, clock, counting)
    assert await soon(handle.result()) == {"n": 170}
    assert await handle.state() == {"n": 170}


async def test_a_step_with_steps_sees_a_migrated_key_before_its_own_steps_changed_it(boss: Space, hosts: Hosts) -> None:
    async def raise_it(ctx: Context, key: str) -> None:
        ctx.state[key] = ctx.state[key] + 1

    async def outer(ctx: Context, key: str) -> Any:
        before = ctx.state.get(key, "missing")
        await ctx.step("inner", raise_it, key)
        await ctx.wait_for("second")
        return before

    def made(key: str, **version: Any) -> Any:
        @workflow(name="earning", **version)
        async def earning(ctx: Context) -> Any:
            await ctx.step("raise", raise_it, key)
            await ctx.wait_for("first")
            return await ctx.step("outer", outer, key)

        return earning

    worker = await hosts.start(made("n", state=Old))
    handle = await boss.workflows.start("earning")
    await waits_for_signal(handle, "first")
    await worker.stop()
    await hosts.start(made("m", state=New, state_version="1.1.0", state_migrations={"1.0.0": renamed}))
    await handle.signal("first")
    await waits_for_signal(handle, "second")
    await handle.signal("second")
    assert await soon(handle.result()) == 10
    assert (await handle.state())["m"] == 11


async def test_a_step_is_not_done_again_for_writes_that_are_only_replayed(boss: Space, hosts: Hosts) -> None:
    async def slowly(ctx: Context) -> None:
        RUNS.append("slowly")
        seen = ctx.state.get("n", 0)
        for _ in range(50):
            await asyncio.sleep(0)  # the other branch is replayed meanwhile
        ctx.state["n"] = seen + 1

    @workflow
    async def replaying(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            await ctx.state.increment("n")
            await ctx.state.increment("n")
            await ctx.step("double", double, 1)

        async def other() -> None:
            await ctx.wait_for("go")
            await ctx.step("slowly", slowly)

        await ctx.gather(one(), other())
        return ctx.state["n"]

    handle = await signalled(boss, hosts, replaying)
    assert await soon(handle.result()) == 3
    assert RUNS == ["slowly"]


async def test_a_step_sees_all_keys_of_a_commit_of_which_the_code_has_come_to_one(boss: Space, hosts: Hosts) -> None:
    async def raise_it(ctx: Context) -> None:
        ctx.state["b"] = ctx.state.get("b", 0) + 1

    @workflow
    async def torn(ctx: Context) -> Any:
        async def one() -> None:
            await ctx.map("each", double, range(3))
            ctx.state["a"] = 1
            RUNS.append("a")
            if RUNS.count("a") > 1:  # replayed: the step of the other branch comes in between
                gate("a").set()
                await gate("raised").wait()
            await ctx.state.increment("b", 10)
            await ctx.step("double", double, 1)

        async def other() -> None:
            await ctx.wait_for("go")
            await gate("a").wait()
            await ctx.step("raise", raise_it)
            gate("raised").set()

        await ctx.gather(one(), other())
        return ctx.state["b"]

    handle = await signalled(boss, hosts, torn)
    assert await soon(handle.result()) == 11
    assert await handle.state() == {"a": 1, "b": 11}


async def test_a_version_asked_for_before_a_map_that_had_begun_is_the_old_one(boss: Space, hosts: Hosts) -> None:
    async def item(n: int) -> int:
        await (stuck_once if n == 1 else note)(f"item {n}")
        return n

    def made(*, changed: bool) -> Any:
        @workflow(name="changing")
        async def changing(ctx: Context) -> Any:
            await ctx.step("first", note, "first")
            new = ctx.version("more") if changed else None
            if new:
                await ctx.step("more", note, "more")
            await ctx.map("each", item, range(3), max_workers=1)
            return new

        return changing

    worker = await hosts.start(made(changed=False))
    handle = await boss.workflows.start("changing")
    await noted("item 1")
    await worker.stop()
    await hosts.start(made(changed=True))
    assert await soon(handle.result()) is False
    assert "more" not in RUNS


async def test_changed_code_in_a_gather_that_returns_exceptions_pauses_the_execution(boss: Space, hosts: Hosts) -> None:
    def made(name: str) -> Any:
        @workflow(name="changing")
        async def changing(ctx: Context) -> None:
            async def one() -> None:
                await ctx.step(name, note, name)

            await ctx.gather(one(), return_exceptions=True)
            await ctx.wait_for("go")

        return changing

    worker = await hosts.start(made("a"))
    handle = await boss.workflows.start("changing")
    await waiting(handle, ["signal"])
    await worker.stop()
    await hosts.start(made("b"))
    await handle.signal("go")
    assert await status_of(handle) == "paused"
    error = (await handle.status()).error
    assert error is not None
    assert error["type"] == "NonDeterminism"
    assert RUNS == ["a"]


# --- what steps write ---


async def test_a_set_that_was_removed_in_the_same_step_has_its_members_once(boss: Space, hosts: Hosts) -> None:
    async def first(ctx: Context) -> None:
        await ctx.state.add_to_set("s", 9)

    async def anew(ctx: Context) -> Any:
        del ctx.state["s"]
        await ctx.state.add_to_set("s", 2, 1, 2)
        return ctx.state["s"]

    @workflow
    async def renewing(ctx: Context) -> Any:
        await ctx.step("first", first)
        return [await ctx.step("anew", anew), ctx.state["s"]]

    handle, _ = await started(boss, hosts, renewing)
    assert await soon(handle.result()) == [[1, 2], [1, 2]]


def meeting(adds: Any, value: Any) -> Any:
    """One step adds to a key while another sets it."""

    @workflow
    async def meets(ctx: Context) -> Any:
        async def other() -> None:
            await ctx.step("put", put, "k", value)
            gate("put").set()

        await ctx.gather(ctx.step("adds", adds), other())
        return ctx.state["k"]

    return meets


async def test_a_step_appends_to_a_list_that_was_set_meanwhile(boss: Space, hosts: Hosts) -> None:
    async def appends(ctx: Context) -> None:
        await ctx.state.append_to_list("k", 1)
        await gate("put").wait()

    handle, _ = await started(boss, hosts, meeting(appends, [9]))
    assert await soon(handle.result()) == [9, 1]


async def test_a_step_that_counts_fails_if_the_key_was_set_to_a_text_meanwhile(boss: Space, hosts: Hosts) -> None:
    async def counts(ctx: Context) -> None:
        await ctx.state.increment("k", 1)
        await gate("put").wait()

    handle, _ = await started(boss, hosts, meeting(counts, "x"))
    assert await status_of(handle) == "failed"
    assert await handle.state() == {"k": "x"}


@workflow
class Training:
    @step(name="train", task=True)
    async def train(self, ctx: Context) -> TaskSpec:
        await ctx.shared_state.set("who", "train")
        return TaskSpec(command=("x",))


async def test_what_a_step_shares_that_becomes_a_task_is_committed_with_it(boss: Space, hosts: Hosts) -> None:
    @workflow
    async def reading(ctx: Context) -> Any:
        return await ctx.shared_state.get("who")

    await hosts.start(Training, reading)
    await waiting(await boss.workflows.start(Training), ["task"])
    assert await soon((await boss.workflows.start(reading)).result()) == "train"


def test_a_step_in_a_thread_reads_while_the_code_is_replayed() -> None:
    view, stop, failed = View(), threading.Event(), list[str]()
    view.apply("k", ["set", 0], view.next())
    buffer, was = Buffer(view, "s#0"), sys.getswitchinterval()

    def replays() -> None:
        while not stop.is_set():
            many: list[dict[str, Any]] = [{"k": ["add", 1]} for _ in range(4)]
            for writes in many:
                view.expect("o#0", writes, view.next())
            for writes in many:
                view.replay(writes, view.number)

    thread, end = threading.Thread(target=replays), time.monotonic() + 0.5
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while time.monotonic() < end and not failed:
            try:
                buffer.read.clear()
                buffer.value("k")
            except Exception as exc:
                failed.append(repr(exc))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(was)
    assert not failed


def test_a_change_made_while_a_thread_reads_is_seen_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View()
    view.apply("k", ["set", 1], view.next())
    buffer, was = Buffer(view, "s#0"), view.cell

    def interrupted(key: str, beside: str | None = None) -> Cell | None:
        found = (was(key, beside) or Cell()).copy()
        view.apply("k", ["set", 2], view.next())  # by the loop's thread, in between
        return found

    with monkeypatch.context() as patch:
        patch.setattr(view, "cell", interrupted)
        seen = buffer.value("k")
    buffer.put("k", ["set", seen + 1])
    assert buffer.stale() == "k"
