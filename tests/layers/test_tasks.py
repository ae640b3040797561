"""Tasks as those see them who submit them: one commit, results, control, lists, counts, and what is left in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import (
    Conflict,
    InvalidInput,
    LeaseLost,
    ManualClock,
    NotFound,
    Space,
    Store,
    TaskFailed,
    TaskOutcome,
    TaskPending,
    TaskSpec,
)
from holdfast.codec import encode
from holdfast.engine import Batch, Engine, Page, Push, Put
from holdfast.layers.task_collector import collect_tasks
from holdfast.layers.task_states import FINISHED, STATUSES, replay
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything
from tests.layers.works import (
    ADD,
    BROKEN,
    DONE,
    TRUE,
    begun,
    die,
    done,
    log_of,
    mortal,
    request,
    request_in_time,
    soon,
    taken,
)


async def keys_of(space: Space) -> list[str]:
    """Every key but those of audit and of the store itself."""
    engine = getattr(space._scope.engine, "inner", space._scope.engine)
    page = await engine.scan(space.name, "", limit=10_000)
    return [entry.key for entry in page.entries if not entry.key.startswith(("audit/", "system/"))]


# --- submitting ---


async def test_a_task_is_submitted_in_one_commit(space: Space) -> None:
    before = (await space.info()).revision if await space._scope.engine.spaces(space.name) else 0
    handle = await space.tasks.submit(ADD, {"x": 1})
    assert (await space.info()).revision == before + 1
    tid = handle.tid
    assert sorted(await keys_of(space)) == sorted(
        [
            f"specs/{tid}",
            f"tasks/states/{tid}",
            f"tasks/waiting/{tid}",
            "tasks/counts/created",
            f"queues/ready/holdfast.spawn.requests/499/{tid}/@market",
            "depths/holdfast.spawn.requests/ready",
            f"queues/ready/T{tid}.inbox/499/{tid}/@market",
            *[key for key in await keys_of(space) if key.startswith(f"tasks/log/{tid}/")],
        ]
    )
    assert await log_of(handle) == ["created"]


async def test_what_cannot_be_submitted_changes_nothing(space: Space) -> None:
    await space.tasks.submit(ADD)
    before = await everything(space)
    for spec, message, words in (
        ({"function": "a:b"}, None, "TaskSpec.of"),
        (ADD, "x" * (4 * 1024 * 1024), "4,194,304 bytes"),
        (ADD, object(), "cannot be stored as JSON"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await space.tasks.submit(spec, message)  # type: ignore[arg-type]
    assert await everything(space) == before


class Meanwhile(Wrapper):
    """An engine on which something happens between the pages of a list."""

    def __init__(self, inner: Engine, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._happens: Callable[[], Awaitable[object]] | None = happens

    async def scan(self, space: str, prefix: str, **how: Any) -> Page:
        if prefix == FINISHED and self._happens is not None:
            happens, self._happens = self._happens, None
            await happens()
        return await self.inner.scan(space, prefix, **how)


async def test_a_task_that_ends_while_a_list_is_read_is_listed_once(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("true",)))
    engine = Meanwhile(boss._scope.engine, handle.stop)
    listing = Space(replace(boss._scope, engine=engine), boss._blob_folder, boss._coordination)
    assert [(state.tid, state.status) for state in await listing.tasks.list()] == [(handle.tid, "cancelled")]


async def test_higher_priority_is_spawned_first(space: Space, boss: Space) -> None:
    low = await space.tasks.submit(TRUE)
    high = await space.tasks.submit(TaskSpec(command=("true",), priority=10))
    async with mortal(boss) as (ledger, view, _):
        assert [(await taken(view, ledger)).tid for _ in range(2)] == [high.tid, low.tid]


# --- results ---


async def test_a_result_is_waited_for_and_arrives_with_the_commit_that_ends_the_task(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD)
    waiting = asyncio.ensure_future(handle.result())
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await asyncio.sleep(0)
        assert not waiting.done()
        await ledger.finished(launch, TaskOutcome("completed", return_code=0, result={"sum": 3}))
        assert await soon(waiting) == {"sum": 3}
    assert await handle.result(wait=0) == {"sum": 3}


async def test_a_result_of_none_is_a_result(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD)
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, TaskOutcome("completed", result=None), output=b"printed")
    assert await handle.result() is None
    assert await handle.output() == b"printed"


async def test_what_a_command_printed_is_its_result(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, output=b"\x00\xff\n")
    assert await handle.result() == b"\x00\xff\n"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (BROKEN, "failed: it broke"),
        (TaskOutcome("timeout", return_code=124), "took too long: timeout"),
        (TaskOutcome("killed", return_code=137, reason="memory"), "was killed: memory"),
    ],
)
async def test_a_task_that_did_not_complete_raises_with_its_reason(
    space: Space, boss: Space, outcome: TaskOutcome, words: str
) -> None:
    handle = await space.tasks.submit(ADD)
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, outcome)
    with pytest.raises(TaskFailed, match=words) as failed:
        await handle.result()
    assert failed.value.state == await handle.state()
    assert failed.value.state.return_code == outcome.return_code


async def test_a_wait_that_is_over_leaves_the_task_alone(space: Space, clock: ManualClock) -> None:
    handle = await space.tasks.submit(ADD)
    with pytest.raises(TaskPending, match="is created and goes on"):
        await handle.result(wait=0)
    waiting = asyncio.ensure_future(handle.result(wait="5s"))
    for _ in range(20):
        await asyncio.sleep(0.01)
        clock.advance("1s")
    with pytest.raises(TaskPending):
        await soon(waiting)
    assert await handle.status() == "created"


async def test_a_task_that_never_was_is_not_found(space: Space) -> None:
    for call in (space.tasks.get("1" * 19), space.tasks.get("2" * 10), space.tasks._handle("1" * 19).stop()):
        with pytest.raises(NotFound, match="there is no task"):
            await call
    with pytest.raises(InvalidInput, match="19 digits"):
        await space.tasks.get("wrong")


async def test_what_is_recorded_of_a_run(space: Space, boss: Space, clock: ManualClock) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss, host="node-7") as (ledger, view, _):
        launch = await begun(view, ledger)
        clock.advance("2s")
        await ledger.finished(
            launch, TaskOutcome("completed", return_code=0, peak_memory_mb=12.5, cpu_seconds=1.25, max_fds=9)
        )
        manager = ledger.tid
    state = await handle.state()
    assert (state.host, state.pid, state.manager, state.attempt) == ("node-7", 4711, manager, 1)
    assert (state.peak_memory_mb, state.cpu_seconds, state.max_fds, state.return_code) == (12.5, 1.25, 9, 0)
    assert state.started_at is not None
    assert state.completed_at is not None
    assert (state.completed_at - state.started_at).total_seconds() == 2


# --- begun again ---


async def test_a_task_whose_policy_is_requeue_is_begun_again_and_does_not_go_back(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    spec = TaskSpec(command=("x",), reserved_policy_on_error="requeue", retry={"attempts": 2, "backoff": "5s"})  # type: ignore[arg-type]
    handle = await space.tasks.submit(spec, {"x": 1})
    async with mortal(boss, lease="60s") as (ledger, view, _):
        await done(view, ledger, BROKEN)
        assert ((await handle.state()).status, (await handle.state()).manager) == ("running", None)
        assert [state.tid for state in await space.tasks.list(status="running", pattern=handle.tid)] == [handle.tid]
        [message] = await space.queue(f"T{handle.tid}.inbox").peek()
        assert message.attempts == 1
        clock.advance("6s")
        ended = await done(view, ledger, TaskOutcome("failed", return_code=2, reason="again"), wait="1s")
        assert (ended.status, ended.attempt, ended.reason) == ("failed", 2, "again")
    assert (await handle.state()) == replay([event async for event in handle.events()])
    [letter] = await space.queue(f"T{handle.tid}.reserved").peek()
    assert (letter.state, letter.body) == ("dead", {"x": 1})


async def test_a_task_that_waits_to_be_begun_again_is_stopped_by_whoever_takes_it(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    spec = TaskSpec(command=("x",), reserved_policy_on_error="requeue", retry={"backoff": "5s"})  # type: ignore[arg-type]
    handle = await space.tasks.submit(spec)
    async with mortal(boss, lease="60s") as (ledger, view, _):
        await done(view, ledger, BROKEN)
        with pytest.raises(TaskPending, match="no manager has answered"):
            await handle.stop(wait=0)
        clock.advance("6s")
        assert await ledger.spawning(await request(view, wait="1s")) is None
    assert ((await handle.state()).status, (await handle.state()).reason) == ("cancelled", "stop")
    assert (await space.queue("holdfast.spawn.requests").stats()).reserved == 0


async def test_a_task_spawned_by_a_manager_that_died_is_taken_over_and_its_request_dropped(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, leases):
        await taken(view, ledger)  # launched perhaps, and nobody knows
        first = ledger.tid
        await die(leases, clock)
    async with mortal(boss) as (ledger, view, _):
        launch = await ledger.adopt(handle.tid, first)
        assert launch is not None
        assert (launch.state.status, launch.state.attempt) == ("spawning", 2)
        await ledger.running(launch, 12)
        ended = await ledger.finished(launch, DONE)
        assert (ended.status, ended.pid) == ("completed", 12)
        assert await ledger.spawning(await request_in_time(view, clock)) is None
    assert (await space.queue("holdfast.spawn.requests").stats()).reserved == 0


async def test_a_manager_that_was_paused_past_its_lease_writes_nothing(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    await space.tasks.submit(TaskSpec(command=("x",), stream_output=True))
    async with mortal(boss) as (ledger, view, leases):
        launch = await begun(view, ledger)
        await die(leases, clock)
        before = await everything(boss)
        for step in (
            ledger.output(launch, [("stdout", b"late")]),
            ledger.stopping(launch, "kill"),
            ledger.finished(launch, DONE),
        ):
            with pytest.raises(LeaseLost):
                await step
        after = await everything(boss)
        assert [entry.key for entry in after[0] if entry not in before[0]] == []  # type: ignore[attr-defined, operator]


# --- control ---


@pytest.mark.parametrize("command", ["STOP", "CANCEL", "KILL"])
async def test_a_task_that_no_manager_has_taken_is_cancelled_by_the_store_alone(space: Space, command: Any) -> None:
    handle = await space.tasks.submit(ADD)
    answer = await soon(handle.control(command))
    assert (answer.command, answer.status) == (command, "ok")
    state = await handle.state()
    assert (state.status, state.started_at, state.reason) == ("cancelled", None, command.lower())
    assert await space.queue("holdfast.spawn.requests").peek() == []
    assert await space.queue(f"T{handle.tid}.inbox").peek() == []
    assert (await space.queue("holdfast.spawn.requests").stats()).message_count == 0
    assert await log_of(handle) == ["created", "cancelled"]
    assert await space.tasks.counts() == {**dict.fromkeys(STATUSES, 0), "cancelled": 1}
    with pytest.raises(Conflict, match="final"):
        await handle.stop()


async def test_a_task_cancelled_while_a_manager_takes_it_is_not_launched(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(ADD)
    async with mortal(boss) as (ledger, view, _):
        reserved = await request(view)
        await soon(handle.stop())
        assert await ledger.spawning(reserved) is None
    assert await handle.status() == "cancelled"
    assert (await space.queue("holdfast.spawn.requests").stats()).reserved == 0


async def test_commands_are_answered_by_the_manager(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("cat",), interactive=True))
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)

        async def serve() -> list[Any]:
            served = []
            async for control in ledger.controls("r0"):
                served.append(control)
                if control.command == "PAUSE":
                    await ledger.pausing(launch, True)
                if control.command == "STOP":
                    await ledger.stopping(launch, "stop", control.by)
                await ledger.answer(control, "ok", pid=launch.state.pid)
                if control.command == "STOP":
                    break
            return served

        serving = asyncio.ensure_future(serve())
        assert (await soon(handle.ping())).details == {"pid": 4711}
        await soon(handle.write("hello\n", eof=True))
        await soon(handle.pause())
        assert (await handle.state()).paused
        answer = await soon(handle.stop())
        served = await soon(serving)
        assert (answer.command, answer.status) == ("STOP", "ok")
        assert [control.command for control in served] == ["PING", "WRITE", "PAUSE", "STOP"]
        assert (served[1].data, served[1].closes, served[1].by) == (b"hello\n", True, "market")
        assert await ledger.pending(handle.tid) == []
        await ledger.finished(launch, TaskOutcome("killed", return_code=143))
    assert ((await handle.state()).status, (await handle.state()).paused) == ("cancelled", False)


async def test_a_command_that_nobody_answers_waits_for_the_next_manager(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        with pytest.raises(TaskPending, match="told to PING"):
            await handle.ping(wait=0)
        waiting = asyncio.ensure_future(handle.kill())
        while len(pending := await ledger.pending(handle.tid)) < 2:
            await asyncio.sleep(0.01)
        assert [control.command for control in pending] == ["PING", "KILL"]
        await ledger.stopping(launch, "kill")
        await ledger.finished(launch, TaskOutcome("killed", return_code=137))
        answer = await soon(waiting)  # the end of the task is an answer
        assert (answer.status, answer.message) == ("ok", "the task is killed")


MALFORMED: list[Any] = [5, [], {"command": 7}, {"command": "DANCE"}, {"command": "WRITE", "data": "%%%"}]


async def test_a_malformed_control_message_is_answered_with_an_error(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    async with mortal(boss) as (ledger, view, _):
        await begun(view, ledger)
        for number, body in enumerate(MALFORMED, 1):
            await space._scope.commit((Push(f"tasks/ctrl_in/{handle.tid}/", encode(body)),))
            [control] = await ledger.pending(handle.tid)
            assert control.error is not None
            await ledger.answer(control, "error", control.error)
            answers = await space.tasks.peek(f"T{handle.tid}.ctrl_out")
            assert [answer["status"] for answer in answers] == ["error"] * number
            with pytest.raises(Conflict):
                await ledger.answer(control, "ok")


# --- lists and counts ---


async def test_lists_show_the_living_first_and_the_newest_of_those_that_ended(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    async with mortal(boss, lease="1h") as (ledger, view, _):
        handles = []
        for name in ("a-1", "b-1", "a-2", "b-2"):
            handles.append(await space.tasks.submit(TaskSpec(command=("x",), name=name)))
            clock.advance("1s")
        for outcome in (DONE, BROKEN):
            await done(view, ledger, outcome)
            clock.advance("1s")
        await begun(view, ledger)
        titles = [state.title for state in await space.tasks.list()]
        assert titles[0] == "b-2"
        assert set(titles[1:3]) == {"a-2", "holdfast.manager"}
        assert titles[3:] == ["b-1", "a-1"]
        assert [state.title for state in await space.tasks.list(status="failed")] == ["b-1"]
        assert [state.title for state in await space.tasks.list(status=["created", "completed"])] == ["b-2", "a-1"]
        assert [state.title for state in await space.tasks.list(pattern="a-*")] == ["a-2", "a-1"]
        assert len(await space.tasks.list(limit=2)) == 2
        assert await space.tasks.counts() == {
            **dict.fromkeys(STATUSES, 0), "created": 1, "running": 2, "completed": 1, "failed": 1
        }  # fmt: skip
        short = await space.tasks.get(handles[0].tid[-10:])
        assert short.tid == handles[0].tid
    with pytest.raises(InvalidInput, match="no status 'done'"):
        await space.tasks.list(status="done")  # type: ignore[arg-type]


async def test_a_retry_is_a_new_task_that_is_linked(space: Space, boss: Space) -> None:
    plain = await space.tasks.submit(ADD)
    with pytest.raises(Conflict, match="when it has ended"):
        await space.tasks.retry(plain.tid)
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, BROKEN)
        again = await space.tasks.retry(plain.tid)
        assert again.tid != plain.tid
        assert (await again.state()).retry_of == plain.tid
        assert (await taken(view, ledger)).spec == ADD


# --- what is left ---


async def test_nothing_is_left_when_a_tasks_record_may_go(
    store: Store, space: Space, boss: Space, clock: ManualClock
) -> None:
    async with mortal(boss) as (ledger, view, _):
        for outcome in (TaskOutcome("completed", result={"x": 1}), BROKEN):
            handle = await space.tasks.submit(TaskSpec(function="a:b", stream_output=True), {"x": 1})
            launch = await begun(view, ledger)
            await ledger.output(launch, [("stdout", b"x" * 10)])
            with pytest.raises(TaskPending):
                await handle.ping(wait=0)
            [control] = await ledger.pending(handle.tid)
            await ledger.answer(control, "ok")
            with pytest.raises(TaskPending):
                await handle.ping(wait=0)
            await ledger.finished(launch, outcome)
        cancelled = await space.tasks.submit(ADD)
        await cancelled.stop()
        living = await space.tasks.submit(ADD)
    engine = getattr(space._scope.engine, "inner", space._scope.engine)
    clock.advance("6d")
    assert await collect_tasks(engine, space.name, clock.now_ms()) == 0
    assert await cancelled.status() == "cancelled"
    clock.advance("1d")
    with pytest.raises(NotFound, match="not kept any more"):
        await cancelled.state()
    before = await keys_of(space)
    assert [key for key in before if cancelled.tid in key] != []
    assert await collect_tasks(engine, space.name, clock.now_ms()) == 4  # the manager, too
    assert await collect_tasks(engine, space.name, clock.now_ms()) == 0
    await engine.commit(space.name, Batch("holdfast"))  # sweeps what has expired
    left = [key for key in await keys_of(space) if key not in ("tasks/counts/created",)]
    tasks = [
        key for key in left if living.tid not in key and not key.startswith(("tasks/counts/", "depths/", "consumers/"))
    ]
    assert tasks == []
    assert await space.tasks.counts() == {**dict.fromkeys(STATUSES, 0), "created": 1}
    assert await living.status() == "created"


async def test_rule_56_an_index_entry_that_lies_removes_no_task(space: Space, boss: Space, clock: ManualClock) -> None:
    handle = await space.tasks.submit(ADD)
    lie = Put(f"tasks/finished/{1:013d}/{handle.tid}", encode("x"), tag=":task:completed")
    await boss._scope.commit((lie,))
    engine = getattr(space._scope.engine, "inner", space._scope.engine)
    assert await collect_tasks(engine, space.name, clock.now_ms()) == 0
    assert await handle.status() == "created"
    assert await log_of(handle) == ["created"]


async def test_the_caretaker_collects(store: Store, space: Space, clock: ManualClock) -> None:
    handle = await space.tasks.submit(ADD)
    await handle.stop()
    clock.advance("8d")
    await store.tidy()
    await store.tidy()
    assert [key for key in await keys_of(space) if handle.tid in key] == []
