"""The rules of tasks that concern the store, each by its words. Those of processes and of managers are tested where they are."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    Conflict,
    InvalidInput,
    LeaseLost,
    Limits,
    ManualClock,
    NotFound,
    Space,
    Store,
    TaskFailed,
    TaskOutcome,
    TaskSpec,
)
from holdfast.clock import as_datetime
from holdfast.engine import Batch, Present, Put, VersionIs
from holdfast.layers.task_collector import collect_tasks
from holdfast.layers.task_states import (
    ENDED,
    STATUSES,
    TRANSITIONS,
    TaskState,
    TaskStatus,
    check_step,
    replay,
    spec_key,
    state_key,
)
from tests.layers.conftest import everything
from tests.layers.works import ADD, BROKEN, DONE, TRUE, begun, die, done, log_of, mortal, request, soon, taken

RULES = 56
TESTS = Path(__file__).resolve().parents[1]


def test_every_rule_of_tasks_has_a_test_by_its_number() -> None:
    named: set[int] = set()
    for file in TESTS.rglob("test_*.py"):
        for words in re.findall(r"def test_(?:rule_)?(\d+(?:_(?:and_|to_)?\d+)*)_", file.read_text()):
            for first, last in re.findall(r"(\d+)(?:_to_(\d+))?", words):
                named |= set(range(int(first), int(last or first) + 1))
    assert sorted(set(range(1, RULES + 1)) - named) == []


def state(status: TaskStatus, **fields: Any) -> TaskState:
    at = as_datetime(1_750_000_000_000)
    told: dict[str, Any] = {}
    if status == "running":
        told["started_at"] = at
    if status in ENDED:
        told |= {"started_at": at, "completed_at": at + timedelta(seconds=1)}
    told |= {"tid": "1" * 19, "owner": "a", "title": "t", "created_at": at, "status": status}
    return TaskState(**{**told, **fields})


# --- immutable ---


async def test_rule_1_and_4_spec_never_changes_and_only_state_and_metadata_do(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD)
    before = await boss._scope.engine.get(boss.name, [spec_key(handle.tid)])
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, TaskOutcome("completed", result=3))
    assert await boss._scope.engine.get(boss.name, [spec_key(handle.tid)]) == before
    assert await boss.tasks._handle(handle.tid).spec() == ADD
    for name, value in (("owner", "b"), ("title", "u"), ("tid", "2" * 19), ("tags", ("x",))):
        with pytest.raises(InvalidInput, match="never changes"):
            check_step(state("created"), state("spawning", **{name: value}))


async def test_rule_2_what_was_put_out_is_not_written_again(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("x",), stream_output=True))
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await ledger.output(launch, [("stdout", b"one")])
        [first] = (await boss._scope.engine.scan(boss.name, f"tasks/outbox/{handle.tid}/")).entries
        await ledger.output(launch, [("stdout", b"two")])
        await ledger.finished(launch, DONE)
    entries = (await boss._scope.engine.scan(boss.name, f"tasks/outbox/{handle.tid}/")).entries
    assert entries[0] == first
    assert await handle.output() == b"onetwo"


async def test_rule_3_and_45_a_tid_is_unique_and_managers_have_the_same_format(
    space: Space, boss: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await space.tasks.submit(ADD)
    tids = iter([first.tid, first.tid, str(int(first.tid) + 1000)])
    monkeypatch.setattr("holdfast.layers.tasks.new_tid", lambda _: next(tids))
    second = await space.tasks.submit(ADD)
    assert int(second.tid) == int(first.tid) + 1000
    async with mortal(boss) as (ledger, _, _):
        assert len(ledger.tid) == len(first.tid) == 19


# --- states ---


@pytest.mark.parametrize("before", STATUSES)
def test_rule_5_and_6_transitions_go_forward_only_and_terminal_is_final(before: TaskStatus) -> None:
    allowed = {
        "created": {"spawning", "failed", "cancelled"},
        "spawning": {"running", "completed", "failed", "timeout", "cancelled", "killed"},
        "running": {"completed", "failed", "timeout", "cancelled", "killed"},
    }
    assert {name: set(after) for name, after in TRANSITIONS.items()} == allowed
    for after in STATUSES:
        if after in allowed.get(before, ()) or (after == before and before not in ENDED):
            check_step(state(before), state(after))
        else:
            with pytest.raises(Conflict, match="final" if before in ENDED else "cannot become"):
                check_step(state(before), state(after))


async def test_rule_6_a_task_that_has_ended_is_not_moved_by_anybody(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD)
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await ledger.finished(launch, DONE)
        before = await everything(boss)
        for step in (ledger.running(launch, 5), ledger.finished(launch, BROKEN), ledger.stopping(launch, "kill")):
            with pytest.raises(Conflict, match="final"):
                await step
        with pytest.raises(Conflict, match="completed already"):
            await handle.stop()
        assert await everything(boss) == before


def test_rule_7_running_has_started_at() -> None:
    with pytest.raises(InvalidInput, match="running has started_at"):
        check_step(state("spawning"), state("running", started_at=None))


def test_rule_8_terminal_has_completed_at() -> None:
    with pytest.raises(InvalidInput, match="completed has completed_at"):
        check_step(state("running"), state("completed", completed_at=None))


async def test_rule_9_completed_at_is_not_before_started_at_whatever_clocks_do(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    handle = await space.tasks.submit(ADD)
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        clock.set_back("5s")
        ended = await ledger.finished(launch, DONE)
    assert ended.started_at is not None
    assert ended.completed_at == ended.started_at
    assert (await handle.state()) == ended
    with pytest.raises(InvalidInput, match="before it started"):
        check_step(state("running"), state("completed", completed_at=as_datetime(0)))


async def test_rule_10_and_31_every_change_is_logged_with_the_redacted_taskspec(space: Space, boss: Space) -> None:
    spec = TaskSpec(command=("train",), env={"API_KEY": "k-1", "HOME": "/h"}, metadata={"password": "p-1"})
    handle = await space.tasks.submit(spec)
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger)
    events = [event async for event in handle.events()]
    assert [event.status for event in events] == ["created", "spawning", "running", "completed"]
    for event in events:
        assert event.fields["taskspec"]["env"] == {"API_KEY": "[redacted]", "HOME": "/h"}
        assert event.fields["taskspec"]["metadata"] == {"password": "[redacted]"}
    stored = (await boss._scope.engine.scan(boss.name, "tasks/", limit=1000)).entries
    assert not [entry.key for entry in stored if b"k-1" in entry.value or b"p-1" in entry.value]


# --- queues ---


async def test_rule_11_to_13_a_task_has_one_of_each_queue_and_their_names_begin_with_its_tid(
    space: Space, boss: Space
) -> None:
    handle = await space.tasks.submit(TRUE, {"x": 1})
    name = f"T{handle.tid}"
    [message] = await space.queue(f"{name}.inbox").peek()
    assert (message.id, message.body) == (handle.tid, {"x": 1})
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        assert await space.queue(f"{name}.inbox").peek() == []
        [reserved] = await space.queue(f"{name}.reserved").peek()
        assert (reserved.id, reserved.body) == (handle.tid, {"x": 1})
        await ledger.output(launch, [("stdout", b"out")])
        await ledger.finished(launch, DONE)
    assert await space.queue(f"{name}.reserved").peek() == []
    [envelope] = await space.tasks.peek(f"{name}.outbox")
    assert (envelope["type"], envelope["final"]) == ("stream", True)
    assert await space.tasks.peek(f"{name}.ctrl_in") == await space.tasks.peek(f"{name}.ctrl_out") == []
    assert len(await space.tasks.peek("holdfast.tasks.log", 100)) >= 4
    with pytest.raises(InvalidInput, match="no view of tasks"):
        await space.tasks.peek("T5.outbox")


async def test_rule_14_15_and_47_a_request_has_the_tid_and_is_in_one_managers_hands(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (one, view, _), mortal(boss) as (two, _, _):
        first = await request(view)
        assert first.id == handle.tid
        assert await one.spawning(first) is not None
        assert await two.spawning(first) is None  # the same request again: a manager that lives has the task
        assert (await handle.state()).manager == one.tid
        assert (await handle.state()).attempt == 1


@pytest.mark.parametrize(("policy", "left"), [("keep", "dead"), ("clear", None)])
async def test_rule_16_and_28_a_failed_message_stays_reserved_unless_the_policy_says_otherwise(
    space: Space, boss: Space, policy: Any, left: str | None
) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("x",), reserved_policy_on_error=policy), {"x": 1})
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, BROKEN)
    found = await space.queue(f"T{handle.tid}.reserved").peek()
    assert [(each.state, each.body) for each in found] == ([] if left is None else [(left, {"x": 1})])
    events = [event async for event in handle.events() if event.event == "message_failed"]
    assert [event.fields for event in events] == [{"message_id": handle.tid, "error": "it broke"}]


async def test_rule_28_what_failed_is_recovered_from_reserved(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD, {"x": 1})
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, BROKEN)
        again = await boss.tasks.retry(handle.tid)
        assert (await again.state()).retry_of == handle.tid
        launch = await begun(view, ledger)
        assert (launch.tid, launch.message, launch.spec) == (again.tid, {"x": 1}, ADD)


# --- limits ---


def test_rule_17_to_20_limits_live_under_spec_limits_and_are_possible() -> None:
    assert TaskSpec(command=("x",), limits=Limits(memory_mb=1, cpu_percent=250, max_fds=1)).limits.cpu_percent == 250
    for limits in ({"memory_mb": 0}, {"cpu_percent": 0.9}, {"max_fds": 0}):
        with pytest.raises(InvalidInput, match=f"limits.{next(iter(limits))}"):
            Limits(**limits)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no field 'memory_mb'"):
        TaskSpec.of({"command": ["x"], "memory_mb": 5})


# --- execution ---


async def test_rule_24_the_target_runs_once_per_delivery(space: Space, boss: Space, clock: ManualClock) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (one, first, leases):
        await begun(first, one)
        async with mortal(boss) as (two, _, _):
            assert await two.adopt(handle.tid, one.tid) is None  # it lives
        await die(leases, clock)
    async with mortal(boss) as (two, _, _):
        launch = await two.adopt(handle.tid, one.tid)
        assert launch is not None
        assert (launch.state.attempt, launch.state.status) == (2, "running")
        assert await two.adopt(handle.tid, one.tid) is None


def test_rule_26_there_is_a_pid_only_once_it_is_spawned() -> None:
    with pytest.raises(InvalidInput, match="only once it is spawned"):
        check_step(state("created"), state("created", pid=5))


def test_rule_27_there_is_a_return_code_only_when_it_has_ended() -> None:
    with pytest.raises(InvalidInput, match="only when it has ended"):
        check_step(state("running"), state("running", return_code=0))


async def test_rule_29_the_first_accepted_stop_reason_is_final(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await ledger.stopping(launch, "timeout")
        with pytest.raises(Conflict, match="the first reason stays"):
            await ledger.stopping(launch, "kill")
        await ledger.finished(launch, TaskOutcome("killed", return_code=124))
    ended = await handle.state()
    assert (ended.status, ended.return_code) == ("timeout", 124)
    assert ended.stop is not None
    assert ended.stop.reason == "timeout"


# --- observability ---


async def test_rule_32_the_state_is_visible_without_asking_the_task(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    assert await handle.status() == "created"
    async with mortal(boss) as (ledger, view, _):
        launch = await taken(view, ledger)
        assert await handle.status() == "spawning"
        await ledger.running(launch, 5)
        assert (await handle.state()).pid == 5
        assert await space.tasks.counts() == {**dict.fromkeys(STATUSES, 0), "running": 2}  # the manager is a task, too
        await ledger.pausing(launch, True)
        assert ((await handle.state()).status, (await handle.state()).paused) == ("running", True)


async def test_rule_33_lookup_equals_replay(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(function="a:b", stream_output=True))
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await ledger.pausing(launch, True)
        await ledger.pausing(launch, False)
        await ledger.output(launch, [("stdout", b"x")])
        assert replay([event async for event in handle.events()]) == await handle.state()
        await ledger.stopping(launch, "stop", by="market")
        await ledger.finished(launch, TaskOutcome("cancelled", return_code=143, peak_memory_mb=5.5, cpu_seconds=0.1))
    assert replay([event async for event in handle.events()]) == await handle.state()
    assert await log_of(handle) == [
        "created", "spawning", "running", "control", "control", "control", "message_failed", "cancelled"
    ]  # fmt: skip


# --- managers ---


async def test_rule_44_and_46_a_manager_is_itself_a_task_and_registered_before_it_serves(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    async with mortal(boss, capacity=3, pid=77) as (ledger, _, _):
        [info] = await space.tasks.managers()
        assert (info.tid, info.capacity, info.pid, info.draining) == (ledger.tid, 3, 77, False)
        own = await space.tasks.get(ledger.tid)
        assert (await own.state()).status == "running"
        assert (await own.state()).title == "holdfast.manager"
        assert (await boss.tasks._handle(ledger.tid).spec()).timeout is None
        await ledger.drain()
        assert (await space.tasks.managers())[0].draining
        [shown] = await space.tasks.peek("holdfast.workers.registry")
        assert shown["tid"] == ledger.tid
    assert await space.tasks.managers() == []
    assert await own.status() == "completed"
    assert await log_of(own) == ["created", "spawning", "running", "completed"]


async def test_rule_48_tasks_may_submit_tasks(space: Space, boss: Space) -> None:
    async with mortal(boss) as (ledger, view, _):
        await space.tasks.submit(TRUE)
        launch = await begun(view, ledger)
        child = await space.tasks.submit(ADD)  # what the target does while it runs
        assert (await begun(view, ledger)).tid == child.tid
        await ledger.finished(launch, DONE)


async def test_rule_51_a_spawn_request_is_acknowledged_only_after_the_launch(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    queue = space.queue("holdfast.spawn.requests")
    await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, _):
        launch = await taken(view, ledger)
        assert (await queue.stats()).reserved == 1
        await ledger.running(launch, 5)
        assert (await queue.stats()).reserved == 0
        assert (await queue.stats()).message_count == 0


async def test_rule_53_missing_liveness_never_invents_a_terminal_state_it_is_settled_by_lease(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("x",), retry={"attempts": 2}), {"x": 1})  # type: ignore[arg-type]
    for attempt in (1, 2):
        async with mortal(boss) as (ledger, view, leases):
            if attempt == 1:
                launch = await begun(view, ledger)
            else:
                [dead] = await ledger.dead()
                assert sorted([tid async for tid in ledger.left_by(dead)]) == sorted([handle.tid, dead])
                found = await ledger.adopt(handle.tid, dead)
                assert found is not None
                assert await ledger.adopt(dead, dead) is None
                launch = found
            await die(leases, clock)
            assert ((await handle.state()).status, (await handle.state()).attempt) == ("running", attempt)
            with pytest.raises(LeaseLost):
                await ledger.finished(launch, DONE)
    async with mortal(boss) as (ledger, _, _):
        [dead] = await ledger.dead()
        assert await ledger.adopt(handle.tid, dead) is None
    ended = await handle.state()
    assert (ended.status, ended.attempt) == ("failed", 2)
    assert "attempts are used up" in (ended.reason or "")
    [letter] = await space.queue(f"T{handle.tid}.reserved").peek()
    assert (letter.state, letter.body) == ("dead", {"x": 1})
    with pytest.raises(TaskFailed, match="attempts are used up"):
        await soon(handle.result())


# --- stores ---


async def test_rule_55_spaces_are_isolated(store: Store, space: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    other = store.space("fabrikam", agent="market")
    with pytest.raises(NotFound):
        await other.tasks.get(handle.tid)
    assert await other.tasks.list() == []


async def test_rule_56_cleanup_removes_only_what_is_named(
    store: Store, space: Space, boss: Space, clock: ManualClock
) -> None:
    ended, living = await space.tasks.submit(TRUE), await space.tasks.submit(TRUE)
    other = await store.space("fabrikam", agent="market").tasks.submit(TRUE)
    await ended.stop()
    await other.stop()
    await space.records.set("kept", 1)
    await space.queue("orders").put("kept")
    clock.advance("8d")
    engine = getattr(space._scope.engine, "inner", space._scope.engine)
    before = {entry.key for entry in (await engine.scan(space.name, "")).entries}
    assert await collect_tasks(engine, space.name, clock.now_ms()) == 1
    await engine.commit(space.name, Batch("holdfast"))
    after = {entry.key for entry in (await engine.scan(space.name, "")).entries}
    assert all(ended.tid in key for key in before - after)
    assert not any(ended.tid in key for key in after)
    assert await living.status() == "created"
    assert await space.records.get("kept") == 1
    assert [each.body for each in await space.queue("orders").peek()] == ["kept"]
    theirs = (await engine.scan("fabrikam", "tasks/finished/")).entries
    assert [entry.key.rpartition("/")[2] for entry in theirs] == [other.tid]


async def test_rule_4_a_state_is_written_by_compare_and_set_alone(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    committed: list[Any] = []
    async with mortal(boss) as (ledger, view, _):
        scope, real = ledger._scope, ledger._scope.engine.commit

        async def watched(name: str, batch: Any) -> Any:
            committed.append(batch)
            return await real(name, batch)

        scope.engine.commit = watched  # type: ignore[method-assign]
        await done(view, ledger)
        scope.engine.commit = real  # type: ignore[method-assign]
    moved = [
        each
        for each in committed
        if any(isinstance(op, Put) and op.key == state_key(handle.tid) for op in each.operations)
    ]
    assert len(moved) == 3
    for batch in moved:
        assert any(isinstance(each, VersionIs) and each.key == state_key(handle.tid) for each in batch.conditions)
        assert Present(f"tasks/managers/{ledger.tid}") in batch.conditions


# --- every rule has a test ---

RULES = 56
NUMBERED = re.compile(r"def test_(?:rule_)?((?:\d+_(?:and_|to_)?)+)")


def rules_in(source: str) -> set[int]:
    """The rules that the names of tests begin with: test_7_…, test_14_15_and_47_…, test_rule_11_to_13_…"""
    found: set[int] = set()
    for named in NUMBERED.findall(source):
        parts = re.findall(r"\d+|to", named)
        for place, part in enumerate(parts):
            if part == "to":
                found.update(range(int(parts[place - 1]), int(parts[place + 1])))
            else:
                found.add(int(part))
    return found


def test_every_rule_has_a_test_by_its_number() -> None:
    folders = (Path(__file__).parent, Path(__file__).parent.parent / "manager", Path(__file__).parent.parent / "cli")
    found = [rules_in(path.read_text()) for folder in folders for path in folder.glob("test_*.py")]
    assert set(range(1, RULES + 1)) - set().union(*found) == set()


def test_a_rule_without_a_test_is_seen() -> None:
    assert rules_in("def test_rule_11_to_13_a(): ...\nasync def test_14_15_and_47_b(): ...\ndef test_4x(): ...") == {
        *(11, 12, 13, 14, 15, 47)
    }
