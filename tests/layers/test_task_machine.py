"""Random sequences of what managers and owners do: states go forward only, and looking up equals replaying the log.

Managers take, run, stop, finish, die and adopt in any order, also what they have no right to any more; whatever the store refuses
has changed nothing. After every step: each task is in one index, the counts are what is counted, and the log tells the state.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Conflict, Error, LeaseLost, ManualClock, Space, TaskOutcome, TaskPending, TaskSpec
from holdfast.clock import as_datetime
from holdfast.engine import Batch, Delete
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.task_launch import Launch
from holdfast.layers.task_states import FINISHED, RUNNING, STATUSES, WAITING, TaskState, check_step, replay
from holdfast.layers.task_submission import SPAWN_REQUESTS

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
STEPS = st.sampled_from(
    [
        "submit",
        "submit",
        "take",
        "take",
        "run",
        "run",
        "print",
        "pause",
        "stop",
        "kill",
        "cancel",
        "ping",
        "complete",
        "complete",
        "fail",
        "die",
        "adopt",
        "adopt",
        "pass",
    ]
)
SPECS = [
    TaskSpec(command=("a",)),
    TaskSpec(command=("b",), stream_output=True, retry={"attempts": 2}),  # type: ignore[arg-type]
    TaskSpec(
        command=("c",),
        reserved_policy_on_error="requeue",
        reserved_policy_on_stop="clear",
        retry={"attempts": 2, "backoff": "1s"},  # type: ignore[arg-type]
    ),
]


class Manager:
    """One that can die."""

    def __init__(self, space: Space) -> None:
        self.leases = Leases(space._scope.clock)
        self.view = Space(space._scope, space._blob_folder, Coordination(self.leases))
        self.entered = self.view.tasks.ledger(host="h", capacity=9, lease="10m")
        self.launches: list[Launch] = []

    async def begin(self) -> None:
        self.ledger = await self.entered.__aenter__()

    async def end(self) -> None:
        await self.entered.__aexit__(None, None, None)
        await self.view._coordination.close()


class World:
    """Two managers at a time, and those that died."""

    def __init__(self, space: Space, clock: ManualClock) -> None:
        self.space = space
        self.clock = clock
        self.managers: list[Manager] = []
        self.dead: list[Manager] = []
        self.tids: list[str] = []
        self.seen: dict[str, TaskState] = {}

    async def step(self, name: str, which: int) -> None:
        while len(self.managers) < 2:
            manager = Manager(self.space)
            await manager.begin()
            self.managers.append(manager)
        with suppress(Conflict, LeaseLost, TaskPending, holdfast.Empty):
            await getattr(self, name if name != "pass" else "pass_time")(which)
        await self.check()

    def manager(self, which: int) -> Manager:
        """Any, a dead one included: it must be refused."""
        everybody = self.managers + self.dead[-1:]
        return everybody[which % len(everybody)]

    def launch(self, which: int) -> tuple[Manager, Launch]:
        manager = self.manager(which)
        if not manager.launches:
            raise holdfast.Empty("none")
        return manager, manager.launches[which % len(manager.launches)]

    async def submit(self, which: int) -> None:
        self.tids.append((await self.space.tasks.submit(SPECS[which % 3], {"n": which})).tid)

    async def take(self, which: int) -> None:
        manager = self.managers[which % 2]
        launch = await manager.ledger.spawning(await manager.view.queue(SPAWN_REQUESTS).take(wait=0))
        if launch is not None:
            manager.launches.append(launch)

    async def run(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.running(launch, pid=which + 1)

    async def print(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.output(launch, [("stdout", b"x" * which)])

    async def pause(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.pausing(launch, bool(which % 2))

    async def stop(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.stopping(launch, "stop")

    async def kill(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.stopping(launch, "kill")

    async def cancel(self, which: int) -> None:
        if self.tids:
            await (await self.space.tasks.get(self.tids[which % len(self.tids)])).stop(wait=0)

    async def ping(self, which: int) -> None:
        if self.tids:
            await (await self.space.tasks.get(self.tids[which % len(self.tids)])).ping(wait=0)

    async def complete(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.finished(launch, TaskOutcome("completed", return_code=0))

    async def fail(self, which: int) -> None:
        manager, launch = self.launch(which)
        await manager.ledger.finished(launch, TaskOutcome("failed", return_code=1, reason="it broke"))

    async def die(self, which: int) -> None:
        manager = self.managers.pop(which % 2)
        await manager.leases.close()
        key = f"tasks/managers/{manager.ledger.tid}"  # as if it had expired, without making the others wait
        await self.space._scope.engine.commit(self.space.name, Batch("holdfast", (Delete(key),)))
        self.dead.append(manager)

    async def adopt(self, which: int) -> None:
        manager = self.managers[which % 2]
        for dead in await manager.ledger.dead():
            for tid in [tid async for tid in manager.ledger.left_by(dead)]:
                launch = await manager.ledger.adopt(tid, dead)
                if launch is not None:
                    manager.launches.append(launch)

    async def pass_time(self, which: int) -> None:
        self.clock.advance("2s")

    async def check(self) -> None:
        """What holds at all times."""
        engine, name = self.space._scope.engine, self.space.name
        everybody = self.tids + [each.ledger.tid for each in self.managers + self.dead]
        counted: Counter[str] = Counter()
        for tid in everybody:
            handle = self.space.tasks._handle(tid)
            state = await handle.state()
            counted[state.status] += 1
            assert replay([event async for event in handle.events()]) == state
            if tid in self.seen and self.seen[tid] != state:
                before = self.seen[tid]
                assert not before.ended
                assert before.status == state.status or STATUSES.index(before.status) < STATUSES.index(state.status)
                assert state.attempt >= before.attempt
            self.seen[tid] = state
        listed: list[str] = []
        for prefix in (WAITING, RUNNING, FINISHED):
            listed += [e.key.rpartition("/")[2] for e in (await engine.scan(name, prefix, limit=1000)).entries]
        assert sorted(listed) == sorted(everybody)
        counts = await self.space.tasks.counts()
        assert {status: count for status, count in counts.items() if count} == dict(counted)

    async def close(self) -> None:
        for manager in self.managers:
            await manager.end()
        for manager in self.dead:
            await manager.end()


async def play(url: str, steps: list[tuple[str, int]], **options: Any) -> None:
    clock = ManualClock()
    async with holdfast.open(url, clock=clock, background=False, **options) as store:
        world = World(store.space("contoso", agent="market"), clock)
        try:
            for name, which in steps:
                await world.step(name, which)
        finally:
            await world.close()


SEQUENCES = st.lists(st.tuples(STEPS, st.integers(0, 11)), min_size=10, max_size=40)


@settings(max_examples=300 if SOAK else 40, deadline=None, suppress_health_check=list(HealthCheck))
@given(SEQUENCES)
async def test_random_steps_keep_every_rule_in_memory(steps: list[tuple[str, int]]) -> None:
    await play("memory:", steps)


STORY = """submit submit submit take run take run print die adopt take run fail pass pass take run complete cancel
submit cancel take stop complete submit take pause kill fail die adopt run complete adopt"""


@pytest.mark.parametrize("engine", ["sqlite", "redis", "postgres"])
async def test_a_long_story_keeps_every_rule_on_real_engines(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "team.db")
    if engine == "redis":
        url = f"{request.getfixturevalue('redis_server').url}?prefix=machine"
    elif engine == "postgres":
        url = f"{request.getfixturevalue('postgres_server').url}?schema=machine"
    await play(url, [(name, number) for number, name in enumerate(STORY.split())])


def test_a_broken_transition_would_be_seen() -> None:
    at = as_datetime(0)
    ended = TaskState(tid="1" * 19, status="failed", owner="a", title="t", created_at=at, completed_at=at)
    with pytest.raises(Error):
        check_step(ended, ended)
