"""Steps that are sent to a queue: done by whoever serves it, once as far as anybody can see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import (
    Context,
    ExecutionFailed,
    InvalidInput,
    ManualClock,
    Retry,
    Space,
    StepFailed,
    Store,
    step,
    workflow,
)
from holdfast.engine import SYSTEM_ACTOR, Batch, Delete
from tests.layers.hosting import Hosts, soon, until, waits_for


@pytest.fixture
async def hosts(boss: Space) -> AsyncIterator[Hosts]:
    made = Hosts(boss)
    yield made
    await soon(made.close())


two = pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)
"""For what no engine can make a difference to."""
DONE: list[Any] = []
GATE: list[asyncio.Event] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    DONE.clear()
    GATE[:] = [asyncio.Event(), asyncio.Event()]


async def render(ctx: Context, scene: int) -> int:
    DONE.append((scene, ctx.attempt))
    await ctx.state.increment("rendered", scene)
    await ctx.state.append_to_list("scenes", scene)
    ctx.state["last"] = ctx.state.get("last", 0) + scene
    await ctx.shared_state.set("newest", scene)
    return scene * 10


@workflow
async def film(ctx: Context, scene: int) -> dict[str, Any]:
    ctx.state["last"] = 100
    frames = await ctx.step("render", render, scene, queue="gpu")
    return {"frames": frames, "last": ctx.state["last"], "rendered": ctx.state["rendered"]}


async def test_a_step_on_a_queue_is_done_by_who_serves_it_and_recorded_without_a_worker_of_its_execution(
    boss: Space, hosts: Hosts
) -> None:
    first = await hosts.start(film)
    handle = await boss.workflows.start(film, 7, id="f")
    await waits_for(handle, "queue")
    assert (await handle.steps())["render#0"]["queue"] == "gpu"
    assert DONE == []
    await first.stop()
    await hosts.start(film, queues=["gpu"], steps_only=True)

    async def recorded() -> bool:
        return (await handle.steps())["render#0"]["status"] == "completed"

    await soon(until(recorded))
    assert (await handle.status()).status == "running"
    assert await handle.state() == {"last": 107, "rendered": 7, "scenes": [7]}
    assert await boss.workflows.shared("newest") == 7
    assert (await boss.queue("gpu").stats()).reserved == 0
    await hosts.start(film)
    assert await soon(handle.result()) == {"frames": 70, "last": 107, "rendered": 7}
    assert DONE == [(7, 1)]
    assert [event.event for event in await handle.log()] == ["dispatched", "completed", "completed"]


@workflow(name="studio")
class Studio:
    @step(name="scenes")
    async def scenes(self, ctx: Context) -> list[int]:
        return list(range(1, 7))

    @step(name="render", each="scenes", queue="gpu", max_workers=3)
    async def render(self, ctx: Context, scene: int) -> int:
        return await render(ctx, scene)

    @step(name="cut", after="render", queue="cpu")
    def cut(self, ctx: Context, frames: list[int]) -> int:
        return sum(frames) + int(ctx.state["rendered"])


async def test_items_and_steps_of_a_class_are_spread_over_those_who_serve(boss: Space, hosts: Hosts) -> None:
    await hosts.start(Studio, queues=["gpu"])
    await hosts.start(Studio, queues=["gpu", "cpu"], steps_only=True)
    handle = await boss.workflows.start(Studio)
    assert await soon(handle.result()) == 210 + 21
    state = await handle.state()
    assert (state["rendered"], sorted(state["scenes"]), state["last"]) == (21, [1, 2, 3, 4, 5, 6], 21)


async def adds(ctx: Context, n: int) -> int:
    before = ctx.state.get("total", 0)
    DONE.append(("read", n))
    await GATE[0].wait()
    ctx.state["total"] = before + n
    return n


async def holds() -> None:
    await GATE[1].wait()


@workflow
async def pair(ctx: Context, awake: bool) -> int:
    away = [ctx.step(f"add{n}", adds, n, queue="gpu") for n in (1, 2)]
    await ctx.gather(*away, *([ctx.step("holds", holds)] if awake else []))
    return int(ctx.state["total"])


@pytest.mark.parametrize("awake", [False, True])
async def test_of_two_steps_that_read_and_set_the_same_neither_is_lost(boss: Space, hosts: Hosts, awake: bool) -> None:
    desk = await hosts.start(pair)
    handle = await boss.workflows.start(pair, awake)
    if not awake:

        async def is_aside() -> bool:
            return [wait["kind"] for wait in (await handle.status()).waits] == ["queue", "queue"]

        await until(is_aside)
        await desk.stop()
    await hosts.start(pair, queues=["gpu"], steps_only=True)

    async def both_read() -> bool:
        return len(DONE) == 2

    await until(both_read)
    GATE[0].set()

    async def both_done() -> bool:
        steps = await handle.steps()
        return {steps[f"add{n}#0"]["status"] for n in (1, 2)} == {"completed"}

    await until(both_done)
    assert (await handle.status()).waits == () if awake else (await handle.state())["total"] == 3
    GATE[1].set()
    await hosts.start(pair)
    assert await soon(handle.result()) == 3
    assert len(DONE) == 3  # the later one was done again


# --- what goes wrong ---


class Glitch(Exception):
    pass


async def glitch(ctx: Context, times: int) -> int:
    await ctx.state.increment("tries")
    DONE.append(ctx.attempt)
    if ctx.attempt <= times:
        raise Glitch(f"no {ctx.attempt}")
    return ctx.attempt


@workflow
async def flaky(ctx: Context, how: dict[str, Any]) -> Any:
    retry = Retry(3, initial="1h", jitter=0, on=(Glitch,) if how.get("on", True) else (OSError,))
    return await ctx.step("glitch", glitch, how["times"], retry=retry, queue="gpu", on_error=how.get("on_error"))


async def test_a_step_that_fails_on_a_queue_is_tried_again_after_its_pause_and_counts_once(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(flaky, queues=["gpu"])
    handle = await boss.workflows.start(flaky, {"times": 2})
    for expected in ([1], [1, 2]):

        async def has_failed(expected: list[int] = expected) -> bool:
            return expected == DONE

        await until(has_failed)
        await waits_for(handle, "retry")
        clock.advance("1h")
    assert await soon(handle.result()) == 3
    assert (await handle.state())["tries"] == 1
    assert (await handle.steps())["glitch#0"]["attempts"] == 3


@two
async def test_a_step_that_failed_for_good_on_a_queue_fails_as_one_here_would(boss: Space, hosts: Hosts) -> None:
    await hosts.start(flaky, queues=["gpu"])
    handle = await boss.workflows.start(flaky, {"times": 1, "on": False})
    with pytest.raises(ExecutionFailed) as failed:
        await soon(handle.result())
    assert (failed.value.kind, "Glitch: no 1" in failed.value.reason) == ("StepFailed", True)
    assert (
        await soon((await boss.workflows.start(flaky, {"times": 1, "on": False, "on_error": "skip"})).result()) is None
    )


async def slow(ctx: Context, scene: int) -> int:
    DONE.append("begun")
    try:
        await GATE[0].wait()
    except asyncio.CancelledError:
        DONE.append("cancelled")
        raise
    return scene


@workflow
async def long_film(ctx: Context, longest: str | None) -> int:
    return int(await ctx.step("slow", slow, 1, queue="gpu", timeout=longest))


async def begun(n: int = 1) -> None:
    async def is_begun() -> bool:
        return DONE.count("begun") >= n

    await until(is_begun)


@two
async def test_a_step_on_a_queue_has_its_timeout(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(long_film, queues=["gpu"])
    handle = await boss.workflows.start(long_film, "5s")
    await begun()
    clock.advance("6s")
    with pytest.raises(ExecutionFailed, match="took longer than 5 s"):
        await soon(handle.result())


async def test_the_message_of_a_dead_worker_is_another_s_when_the_lease_has_ended(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(long_film)
    dead = await hosts.start(long_film, queues=["gpu"], steps_only=True)
    handle = await boss.workflows.start(long_film, None)
    await begun()
    await hosts.kill(dead)
    await hosts.start(long_film, queues=["gpu"], steps_only=True)
    assert DONE.count("begun") == 1
    clock.advance("11s")
    await begun(2)
    GATE[0].set()
    assert await soon(handle.result()) == 1


@two
async def test_a_worker_that_stops_gives_the_step_back_at_once(boss: Space, hosts: Hosts) -> None:
    await hosts.start(long_film)
    leaving = await hosts.start(long_film, queues=["gpu"], steps_only=True)
    handle = await boss.workflows.start(long_film, None)
    await begun()
    await leaving.stop()
    assert DONE == ["begun", "cancelled"]
    await hosts.start(long_film, queues=["gpu"], steps_only=True)
    await begun(2)
    GATE[0].set()
    assert await soon(handle.result()) == 1
    assert (await handle.steps())["slow#0"]["attempts"] == 1


async def test_cancelling_the_execution_reaches_the_step_on_the_queue(boss: Space, hosts: Hosts) -> None:
    await hosts.start(long_film)
    await hosts.start(long_film, queues=["gpu"], steps_only=True)
    handle = await boss.workflows.start(long_film, None)
    await begun()
    await handle.cancel()
    with pytest.raises(ExecutionFailed, match="was cancelled"):
        await soon(handle.result())

    async def is_cancelled() -> bool:
        return DONE == ["begun", "cancelled"] and (await boss.queue("gpu").stats()).reserved == 0

    await until(is_cancelled)
    await handle.retry()
    await begun(2)
    GATE[0].set()
    assert await soon(handle.result()) == 1


@pytest.mark.parametrize("url", ["memory", "policed"], indirect=True)
async def test_messages_that_no_step_waits_for_make_nobody_do_anything(boss: Space, space: Space, hosts: Hosts) -> None:
    await hosts.start(film)
    handle = await boss.workflows.start(film, 7, id="f")
    await waits_for(handle, "queue")
    queue = space.queue("gpu")
    for body in (
        "what?",
        {},
        {"execution": "f"},
        {"execution": "f", "step": "render#0"},
        {"execution": "f", "step": "x"},
    ):
        await queue.put(body, priority=10)
    await hosts.start(film, queues=["gpu"])
    assert (await soon(handle.result()))["rendered"] == 7
    assert DONE == [(7, 1)]


@two
async def test_a_step_of_a_workflow_that_the_worker_does_not_know_waits_for_one_that_does(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(film)
    await hosts.start(long_film, queues=["gpu"])
    handle = await boss.workflows.start(film, 7)

    async def is_put_off() -> bool:
        return (await boss.queue("gpu").stats()).delayed == 1

    await until(is_put_off)
    await hosts.start(film, queues=["gpu"])

    async def ends() -> bool:
        await asyncio.sleep(0.02)  # so that leases are renewed in between
        clock.advance("2s")
        return (await handle.status()).status == "completed"

    await until(ends)


async def nested(ctx: Context) -> int:
    return int(await ctx.step("inner", render, 1))


async def checkpointing(ctx: Context) -> None:
    await ctx.state.flush()


async def large(ctx: Context) -> str:
    ctx.state["kept"] = True
    return "x" * 100_000


def threaded(n: int) -> int:
    return n + 1


@workflow
async def several(ctx: Context) -> list[Any]:
    answers: list[Any] = [
        len(await ctx.step("large", large, queue="gpu")),
        await ctx.step("threaded", threaded, 1, queue="gpu"),
    ]
    for function in (nested, checkpointing):
        try:
            await ctx.step("refused", function, queue="gpu")
        except StepFailed as exc:
            answers.append(exc.kind)
    return [*answers, *await ctx.gather(*(ctx.step("t", threaded, n, queue="gpu") for n in range(3)))]


async def test_what_a_step_on_a_queue_may_be_and_do(boss: Space, hosts: Hosts) -> None:
    await hosts.start(several, queues=["gpu"])
    handle = await boss.workflows.start(several)
    assert await soon(handle.result()) == [100_000, 2, "InvalidInput", "InvalidInput", 1, 2, 3]
    assert await handle.state() == {"kept": True}


@two
async def test_what_no_other_process_could_find_is_refused_before_anything_is_sent(boss: Space, hosts: Hosts) -> None:
    def inner() -> None: ...

    @workflow
    async def bad(ctx: Context, how: str) -> Any:
        return await ctx.step("bad", {"lambda": lambda: 1, "closure": inner}[how], queue="gpu")

    await hosts.start(bad)
    for how in ("lambda", "closure"):
        with pytest.raises(ExecutionFailed, match="at the top of a module"):
            await soon((await boss.workflows.start(bad, how)).result())
    assert (await boss.queue("gpu").stats()).message_count == 0
    with pytest.raises(InvalidInput, match="serves queues"):
        boss.workflows.worker([film], steps_only=True)
    with pytest.raises(InvalidInput, match="task"):
        step(name="x", queue="gpu", task=True)(render)


# --- a lease that is known to be lost ---


@workflow
async def here(ctx: Context) -> int:
    return int(await ctx.step("slow", slow, 1))


@two
@pytest.mark.parametrize("where", ["here", "on a queue"])
async def test_a_running_step_is_cancelled_when_the_lease_is_known_to_be_lost(
    store: Store, boss: Space, hosts: Hosts, clock: ManualClock, where: str
) -> None:
    flow: Any = here if where == "here" else long_film
    await hosts.start(flow, queues=["gpu"])
    handle = await boss.workflows.start(flow)
    await begun()
    queue = "workflows.here" if where == "here" else "gpu"
    page = await store.engine.scan("contoso", f"consumers/{queue}/")
    await store.engine.commit("contoso", Batch(SYSTEM_ACTOR, tuple(Delete(entry.key) for entry in page.entries)))
    clock.advance("4s")  # the next touch finds that the lease is gone

    async def is_cancelled() -> bool:
        return "cancelled" in DONE

    await until(is_cancelled)
    GATE[0].set()

    async def ends() -> bool:
        await asyncio.sleep(0.02)  # so that leases are renewed in between
        clock.advance("1s")
        return (await handle.status()).status == "completed"

    await until(ends)
