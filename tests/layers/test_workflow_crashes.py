"""The heart of workflows: random programs, killed at every commit in turn, end as if nothing had happened.

A program is a tree of calls of ctx, made from a seed. It is run once undisturbed; then, for each commit that its worker made, once
more, with the worker killed there: before the commit, or after it and before the answer. Another worker goes on when the lease has
ended. Outcome, state, children and log must be those of the undisturbed run. HOLDFAST_SOAK=1 takes thousands of programs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Context, Retry, Space, StepFailed, TimedOut, workflow
from holdfast.layers.workflows import journal as journal_module
from holdfast.layers.workflows.branches import Branch
from holdfast.layers.workflows.journal import Journal
from holdfast.testing.dying import Life
from holdfast.testing.timeline import Timeline
from holdfast.testing.workflows import ended

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
SEEDS = range(2_000) if SOAK else range(24)
Program = list[dict[str, Any]]
TAKES_TIME = {
    "queued", "spread", "sent", "child", "flaky", "failing", "sleep", "nap", "timeout", "nested", "breaks", "timed", "late",
}  # fmt: skip
SEEN: Counter[str] = Counter()
"""Which calls the programs made: all of them must occur."""


SPEED = 1.0
"""How much faster time goes: programs that are run in real time have little of it."""


def span(seconds: float) -> float:
    return seconds / SPEED


# --- programs ---


def program(rng: random.Random, depth: int = 0, prefix: str = "") -> Program:
    """A few calls; those of branches write keys of their own, or such as add up."""
    calls = [
        "step",
        "state",
        "task",
        "map",
        "flaky",
        "failing",
        "sleep",
        "nap",
        "wait",
        "timeout",
        "now",
        "random",
        "version",
    ]
    calls += ["shared", "flush", "delete", "batch", "checkpoint", "queued", "spread", "sent"]
    if depth < 2:
        calls += ["gather", "child", "detached", "nested"]
    made: Program = []
    for number in range(rng.randint(1, 4 if depth else 6)):
        kind = rng.choice(calls)
        call: dict[str, Any] = {"call": kind, "n": rng.randint(0, 5), "key": f"{prefix}{kind}{number}"}
        if kind == "nested" and call["n"] % 2:
            kind = call["call"] = "breaks"
        elif kind in ("timeout", "nap") and call["n"] > 2:
            kind = call["call"] = "late" if kind == "timeout" else "timed"
        if kind == "gather":
            call["parts"] = [program(rng, depth + 1, f"{prefix}{number}.{part}.") for part in range(rng.randint(1, 3))]
            if sum(waits(part) for part in call["parts"]) > 1:
                call["parts"] = [prompt(part) for part in call["parts"]]
        elif kind in ("child", "detached"):
            call["program"] = program(rng, depth + 1)
        made.append(call)
    return made


def waits(given: Program) -> bool:
    """Whether it takes signals."""
    return any(call["call"] == "wait" or any(map(waits, call.get("parts", ()))) for call in given)


def prompt(given: Program) -> Program:
    """The same without what takes time: which of several branches comes first to a signal that has come must not depend on how
    long others served it, nor on naps, which are over when the next worker goes on."""
    for call in given:
        call["call"] = "step" if call["call"] in TAKES_TIME else call["call"]
        for part in call.get("parts", ()):
            prompt(part)
    return given


@workflow(retry=Retry(1))
async def interpret(ctx: Context, given: Program) -> list[Any]:
    return [await perform(ctx, call) for call in given]


async def branch(ctx: Context, given: Program) -> list[Any]:
    return [await perform(ctx, call) for call in given]


async def double(n: int) -> int:
    await asyncio.sleep(0)
    return n * 2


async def counted(ctx: Context, n: int) -> int:
    """A task that counts, appends and sets, and reads what it sets."""
    await ctx.state.increment("par.count", n)
    await ctx.state.append_to_list("par.list", n)
    await asyncio.sleep(0)
    await ctx.state.add_to_set("par.set", n % 3)
    ctx.state["par.total"] = ctx.state.get("par.total", 0) + n
    return n


async def away(ctx: Context, n: int, key: str = "") -> int:
    """One that is done on a queue."""
    await ctx.state.increment("par.count", n)
    await ctx.state.append_to_list("par.list", n)
    if key:
        ctx.state[key] = ctx.state.get(key, 0) + n
        await ctx.shared_state.set(key, n)
    return n


async def fails_at_first(ctx: Context, times: int) -> str:
    await ctx.state.increment("par.tries")
    if ctx.attempt <= times:
        raise ValueError(f"attempt {ctx.attempt}")
    return ctx.idempotency_key


async def always_fails(ctx: Context) -> None:
    ctx.state["never"] = "written"
    raise RuntimeError("no")


async def checkpointed(ctx: Context, key: str, n: int) -> int:
    for done in range(ctx.state.get(key, 0), n):
        ctx.state[key] = done + 1
        await ctx.state.flush()
    return int(ctx.state.get(key, 0))


async def naps_inside(ctx: Context, n: int) -> int:
    first: int = await ctx.step("inner", double, n)
    await ctx.sleep(span(2))
    second: int = await ctx.step("inner", double, first)
    return second


async def waits_inside(ctx: Context, n: int) -> None:
    """It counts, in a step of its own and by itself, and waits in vain."""
    await ctx.state.increment("par.waits")
    await ctx.gather(
        ctx.step("inner", counted, n),
        ctx.wait_for("nobody"),
        ctx.map("each", naps_inside, range(n % 3), max_workers=2, timeout="1h"),
        ctx.step("longer", waits_longer, timeout="1h"),
    )


async def waits_longer(ctx: Context) -> None:
    await ctx.sleep("1h")


async def breaks(ctx: Context) -> None:
    raise ValueError(f"{ctx.id} breaks")


async def naps_and_breaks(ctx: Context) -> None:
    await ctx.sleep(span(3))  # long enough for the others to begin, also where time goes fast
    await breaks(ctx)


async def perform(ctx: Context, call: dict[str, Any]) -> Any:
    kind, n, key = call["call"], call["n"], call["key"]
    SEEN[kind] += 1
    match kind:
        case "step":
            return await ctx.step("double", double, n)
        case "task":
            return await ctx.step("counted", counted, n)
        case "map":
            return await ctx.map("each", counted, range(n), max_workers=2)
        case "flaky":
            return await ctx.step("flaky", fails_at_first, n % 3, retry=Retry(3, initial=span(3)))
        case "failing":
            if n % 2:
                return await ctx.step("failing", always_fails, on_error=lambda ctx, error: str(error))
            try:
                await ctx.step("failing", always_fails, retry=Retry(2, initial=span(0.1)))
            except StepFailed as exc:
                return [exc.step, exc.kind, exc.reason]
        case "queued":
            ctx.state[key] = 1
            return [await ctx.step("away", away, n, key, queue="q"), ctx.state[key]]
        case "spread":
            return await ctx.map("spread", away, range(n), max_workers=2, queue="q")
        case "sent":
            return await ctx.step("sent", fails_at_first, n % 3, retry=Retry(3, initial="3s"), queue="q")
        case "sleep":
            await ctx.sleep(span(20))
        case "nap":
            await ctx.sleep(span(0.1))
        case "wait":
            return await ctx.wait_for("go", timeout=span(20), default="never")
        case "timeout":
            try:
                return await ctx.wait_for("nobody", timeout=span(5 if n % 2 else 0.1))
            except TimedOut:
                return await ctx.wait_for("nobody", timeout=span(20), default="late")
        case "now":
            return ctx.now() <= ctx.now()
        case "random":
            return ctx.random()
        case "version":
            return ctx.version(f"change-{n}")
        case "shared":
            await ctx.shared_state.set(key, n, ttl="300d")
            found = await ctx.shared_state.get(key)
            if n % 2:
                await ctx.shared_state.delete(key)
            return [found, await ctx.shared_state.get(key, "gone")]
        case "state":
            ctx.state[key] = ctx.state.get(key, 0) + n
            before = await ctx.state.increment(f"{key}.n", n)
            await ctx.state.append_to_list(f"{key}.list", n, n + 1)
            await ctx.state.add_to_set(f"{key}.set", n)
            if n % 2:
                await ctx.step("double", double, n)
            ctx.state[key] += 1
            return [before, ctx.state[key], ctx.state[f"{key}.list"], key in ctx.state]
        case "flush":
            ctx.state[key] = n
            await ctx.state.flush()
            await ctx.state.increment(key)
            return ctx.state[key]
        case "delete":
            ctx.state[key] = n
            if n % 2:
                await ctx.step("double", double, n)
            del ctx.state[key]
            return key in ctx.state
        case "batch":
            ctx.state.update({f"{key}.a": n, f"{key}.b": [n]})
            await ctx.step("double", double, n)
            return [
                ctx.state.get_many([f"{key}.a", f"{key}.b", "none"]),
                ctx.state.get("none", "default"),
                len(ctx.state.all()) >= 2,
            ]
        case "checkpoint":
            return await ctx.step("checkpoint", checkpointed, key, n)
        case "breaks":
            first = breaks if n == 1 else naps_and_breaks
            try:
                await ctx.gather(
                    first(ctx), branch(ctx, [{"call": "sleep", "n": 0, "key": key}]), ctx.wait_for("nobody")
                )
            except ValueError as exc:
                return str(exc)
        case "nested":
            return await ctx.step("nested", naps_inside, n)
        case "timed":
            return await ctx.step("timed", naps_inside, n, timeout="1h")
        case "late":
            return await ctx.step(
                "late",
                waits_inside,
                n,
                timeout=max(span(5), 2),  # enough for all else, also where time goes fast
                retry=Retry(2, initial=span(3)),
                on_error=lambda ctx, error: type(error).__name__,
            )
        case "gather":
            return await ctx.gather(*(branch(ctx, part) for part in call["parts"]), ctx.step("double", double, n))
        case "child":
            return await ctx.child(interpret, call["program"])
        case "detached":
            return await ctx.child(interpret, call["program"], detached=True)
    return None


CALLS = {
    "step", "state", "task", "map", "flaky", "failing", "sleep", "nap", "wait", "timeout", "now", "random", "version",
    "shared", "flush", "delete", "batch", "checkpoint", "queued", "spread", "sent", "gather", "child", "detached", "nested",
    "breaks", "timed", "late",
}  # fmt: skip


# --- killing ---


async def outcome_of(space: Space, id: str) -> dict[str, Any]:
    """Everything that must not depend on what happened on the way."""
    found: dict[str, Any] = {}
    for status in ("completed", "failed", None):
        for view in await space.workflows.list(status=status):
            handle = await space.workflows.get(view.id)
            state = {
                key: sorted(value) if key.startswith("par.l") else value
                for key, value in (await handle.state()).items()
            }
            result = await handle.result(0) if view.status == "completed" else view.error
            steps = {
                path: (step["status"], step.get("attempts", 1), step.get("result"))
                for path, step in (await handle.steps()).items()
                if step["kind"] not in ("now", "body")
            }
            log = sorted({(event.event, event.path) for event in await handle.log() if event.event != "flushed"})
            events = Counter((event.event, event.path) for event in await handle.log() if event.event != "flushed")
            found[view.id] = (view.status, result, state, steps, log, max(events.values(), default=0))
    assert await space.queue("workflows.interpret").peek() == []
    counted = await space.workflows.counts()  # one that has come to its end at once was never shown to run
    found["counts"] = {name: {status: n for status, n in each.items() if n} for name, each in counted.items()}
    return found


async def lived(seed: int, folder: Path, kill_at: int | None, *, after: bool = False) -> tuple[dict[str, Any], int]:
    """Run the program of a seed, killing its first worker at a commit; gives the outcome, and how many commits there were."""
    clock = Timeline()
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = store.space("s", agent="boss")
        handle = await space.workflows.start(interpret, program(random.Random(seed)), id="x")
        for number in range(12):
            await handle.signal("go", number)
        life = Life(space, folder, [interpret], kill_at, after=after, queues=["q"])
        ending = asyncio.ensure_future(ended(store, space))
        dying = asyncio.ensure_future(life.engine.dead.wait())
        try:
            await clock.run(asyncio.ensure_future(asyncio.wait([ending, dying], return_when=asyncio.FIRST_COMPLETED)))
            if not ending.done():
                await life.end()
                life = Life(space, folder, [interpret], queues=["q"])
                await clock.run(ending)
            return await outcome_of(space, "x"), life.engine.commits
        finally:
            dying.cancel()
            ending.cancel()
            await life.end()


async def disturbed(seed: int, folder: Path, step: int = 1 if SOAK else 3) -> int:
    """Kill at every commit in turn; gives how many outcomes were not the undisturbed one."""
    expected, commits = await lived(seed, folder, None)
    wrong = 0
    for at in range(seed % step, commits, step):
        for after in (False, True) if SOAK else (bool((at // step + seed) % 2),):
            found, _ = await lived(seed, folder, at, after=after)
            wrong += found != expected
            if wrong and not STRICT:
                return wrong
            assert found == expected, f"seed {seed}, killed {'after' if after else 'before'} commit {at}"
    return wrong


STRICT = True


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_program_killed_at_any_commit_ends_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    await disturbed(seed, tmp_path)


@pytest.mark.parametrize(("seed", "at", "after"), [(210, 25, False), (210, 68, True), (210, 69, False)])
async def test_programs_that_once_came_to_another_end_do_not_any_more(
    seed: int, at: int, after: bool, tmp_path: Path
) -> None:
    """All messages of an execution dropped; a list begun anew by a branch that was ahead of the one that had begun it."""
    expected, _ = await lived(seed, tmp_path, None)
    assert (await lived(seed, tmp_path, at, after=after))[0] == expected


def test_the_programs_make_every_call_there_is() -> None:
    def calls(given: Program) -> set[str]:
        found = {call["call"] for call in given}
        for call in given:
            for part in call.get("parts", [call.get("program", [])]):
                found |= calls(part)
        return found

    assert set().union(*(calls(program(random.Random(seed))) for seed in SEEDS)) == CALLS


async def test_state_that_is_committed_apart_from_its_step_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Journal.stage

    def apart(self: Journal, operations: Any, conditions: Any = ()) -> None:
        operations = list(operations)
        state = [
            op
            for op in operations
            if getattr(op, "key", getattr(op, "prefix", "")).startswith(("journal/data", "journal/items"))
        ]
        if state:
            stage(self, state)
        stage(self, [op for op in operations if op not in state], conditions)

    monkeypatch.setattr(Journal, "stage", apart)
    monkeypatch.setattr(journal_module, "GATHERED_MAX", 1)
    monkeypatch.setattr("tests.layers.test_workflow_crashes.STRICT", False)
    for seed in range(10):
        if await disturbed(seed, tmp_path, 1):
            return
    pytest.fail("nobody noticed")


async def test_steps_that_are_not_told_apart_by_their_ordinals_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [(await lived(seed, tmp_path, None))[0] for seed in range(6)]
    begin = Branch.__init__

    def forgetful(self: Branch, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.ordinals = AlwaysTheFirst()

    class AlwaysTheFirst(dict[str, int]):
        def get(self, name: str, default: Any = None) -> int:
            return 0

    monkeypatch.setattr(Branch, "__init__", forgetful)
    found = [await _or_stuck(seed, tmp_path) for seed in range(6)]
    assert found != expected


async def _or_stuck(seed: int, folder: Path) -> Any:
    try:
        return (await lived(seed, folder, None))[0]
    except AssertionError as stuck:
        return str(stuck)
