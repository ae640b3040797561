"""Managers themselves: started once, registered, controlled, idle, killed, and what becomes of what they had."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast import (
    InvalidInput,
    Manager,
    ManagerOptions,
    Pipelines,
    TaskLedger,
    TaskOutcome,
    TaskRetry,
    TaskSpec,
    ensure_manager,
)
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Delete
from holdfast.identity import Role
from holdfast.layers import task_managers
from holdfast.layers.tid import check_tid
from holdfast.layers.tokens import Tokens
from holdfast.manager.place import Place
from holdfast.testing.servers.keeper import KeeperServer
from tests.manager.conftest import SPACE, end, inside, running, serving, until
from tests.processes.conftest import is_alive, living
from tests.stopping import stop

HERE = "tests.manager.targets"


async def killed(pid: int) -> None:
    """kill -9, and wait for the death."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert await until(lambda: not is_alive(pid))


SLEEP = TaskSpec(function=f"{HERE}:sleep", args=[60], retry=TaskRetry(attempts=3, backoff="20ms"))


async def test_44_to_46_a_manager_is_a_task_without_timeout_registered_with_heartbeats_before_it_serves(
    path: str,
) -> None:
    async with serving(path, lease="500ms") as served:
        check_tid(served.info.tid)
        handle = await served.space.tasks.get(served.info.tid)
        state = await handle.state()
        assert (state.status, state.pid) == ("running", served.info.pid)
        assert (await handle.spec()).timeout is None
        task = await served.space.tasks.submit(TaskSpec(command=("true",)))
        await task.wait("20s")
        registered = [event.timestamp async for event in handle.events()]
        taken = [event.timestamp async for event in task.events() if event.status == "spawning"]
        assert registered[-1] <= taken[0]
        await asyncio.sleep(1.0)  # two leases: without heartbeats it would be gone
        assert [info.tid for info in await served.space.tasks.managers()] == [served.info.tid]


async def test_49_the_first_command_starts_a_manager_and_two_at_once_start_one(path: str) -> None:
    async with holdfast.open(path) as store, holdfast.open(path) as other:
        views = [store.space(SPACE, agent="a"), other.space(SPACE, agent="b")]
        try:
            found = await asyncio.gather(*(ensure_manager(view, idle=60) for view in views for _ in range(2)))
            assert len({info.tid for info in found}) == 1
            assert len(await views[0].tasks.managers()) == 1
            assert await ensure_manager(views[0]) == found[0]
        finally:
            for info in await views[0].tasks.managers():
                end(info.pid)


async def test_a_second_manager_of_the_same_host_ends_quietly(path: str) -> None:
    async with serving(path) as served:
        command = [sys.executable, "-m", "holdfast.manager", "--store", path, "--space", SPACE]
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=30, check=False)
        assert (second.returncode, second.stdout, second.stderr) == (0, b"", b"")
        assert len(await served.space.tasks.managers()) == 1


async def test_an_idle_manager_leaves_and_the_next_task_gets_another(path: str) -> None:
    async with serving(path, idle="150ms") as served:
        first = await served.space.tasks.get(served.info.tid)
        assert (await first.wait("20s")).status == "completed"
        assert await until(lambda: not is_alive(served.info.pid))
        handle = await served.space.tasks.submit(TaskSpec(command=("true",)))
        second = await ensure_manager(served.space, idle=60)
        assert second.tid != served.info.tid
        assert (await handle.wait("20s")).status == "completed"


async def test_a_manager_is_not_idle_while_children_live(path: str) -> None:
    async with serving(path, idle="200ms") as served:
        handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "0.6")))
        assert (await handle.wait("20s")).status == "completed"
        assert (await handle.state()).manager == served.info.tid


async def test_50_a_draining_manager_launches_nothing_and_leaves_when_its_children_are_done(
    path: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    async with serving(path) as served:
        script = f"while [ ! -e {gate} ]; do sleep 0.02; done"
        handle = await served.space.tasks.submit(TaskSpec(command=("sh", "-c", script)))
        await running(handle)
        manager = await served.space.tasks.get(served.info.tid)
        stopping = asyncio.ensure_future(manager.stop())
        while not (await served.space.tasks.managers())[0].draining:
            await asyncio.sleep(0.01)
        late = await served.space.tasks.submit(TaskSpec(command=("true",)))
        await asyncio.sleep(0.3)
        assert (await late.status()) == "created"
        gate.touch()
        assert (await handle.wait("20s")).status == "completed"
        assert (await stopping).status == "ok"
        assert (await manager.wait("20s")).status == "cancelled"
        assert (await late.status()) == "created"
        await ensure_manager(served.space, idle=60)
        assert (await late.wait("20s")).status == "completed"


async def test_a_manager_that_is_stopped_ends_its_children_after_the_grace(path: str) -> None:
    async with serving(path, grace="100ms") as served:
        handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "60")))
        state = await running(handle)
        await (await served.space.tasks.get(served.info.tid)).stop()
        ended = await handle.wait("20s")
        assert (ended.status, ended.reason) == ("cancelled", "stop")
        assert ended.stop is not None
        assert ended.stop.reason == "shutdown"
        assert state.pid is not None
        assert not is_alive(state.pid)
        assert await until(lambda: not is_alive(served.info.pid))


async def test_sigterm_stops_a_manager_in_order(path: str) -> None:
    async with serving(path, grace="50ms") as served:
        handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "60")))
        await running(handle)
        os.kill(served.info.pid, signal.SIGTERM)
        assert (await handle.wait("20s")).status == "cancelled"
        manager = await served.space.tasks.get(served.info.tid)
        assert (await manager.wait("20s")).status == "cancelled"


async def test_52_a_manager_has_the_same_controls_as_tasks(path: str) -> None:
    async with serving(path) as served:
        manager = await served.space.tasks.get(served.info.tid)
        assert (await manager.ping()).message == "PONG"
        assert (await manager.pause()).status == "ok"
        handle = await served.space.tasks.submit(TaskSpec(command=("true",)))
        await asyncio.sleep(0.2)
        assert (await handle.status()) == "created"
        status = await manager.control("STATUS")
        assert status.details["paused"] is True
        assert (await manager.resume()).status == "ok"
        assert (await handle.wait("20s")).status == "completed"
        assert (await manager.write("x")).status == "rejected"
        sleeping = await served.space.tasks.submit(TaskSpec(command=("sleep", "60")))
        await running(sleeping)
        assert (await manager.kill()).status == "ok"
        assert (await sleeping.wait("20s")).status == "killed"
        assert (await manager.wait("20s")).status == "killed"


async def test_42_and_53_what_a_killed_manager_had_runs_no_more_and_is_begun_again_when_its_lease_has_ended(
    path: str, tmp_path: Path
) -> None:
    file = tmp_path / "pids"
    async with serving(path, lease="700ms") as served:
        spec = TaskSpec(function=f"{HERE}:sleep", args=[60, str(file)])
        handle = await served.space.tasks.submit(spec)
        state = await running(handle)
        assert await until(lambda: file.exists() and file.read_text().endswith("\n"))
        await killed(served.info.pid)
        assert state.pid is not None
        assert await until(lambda: not is_alive(state.pid or 0))
        assert (await handle.status()) == "running"  # nobody invents an end
        second = await ensure_manager(served.space, idle=60, lease="700ms", concurrency=1)
        assert second.tid != served.info.tid
        assert await until(lambda: len(file.read_text().split()) == 2)
        again = await running(handle)
        assert (again.attempt, again.manager) == (2, second.tid)
        dead = await (await served.space.tasks.get(served.info.tid)).wait("20s")
        assert (dead.status, dead.reason) == ("failed", "the manager was lost: its lease ended")


async def test_what_survived_its_manager_on_this_host_is_ended_before_it_is_begun_again(
    path: str, tmp_path: Path
) -> None:
    """Its warden and its zygote killed too, and the target deaf to the death of its parent: as much as can go wrong."""
    file = tmp_path / "pids"
    async with serving(path, lease="700ms") as served:
        handle = await served.space.tasks.submit(
            TaskSpec(command=("sh", "-c", f"setsid sh -c 'echo $$ >> {file}; sleep 60' & wait"))
        )
        await running(handle)
        assert await until(lambda: file.exists() and file.read_text().endswith("\n"))
        manager = psutil.Process(served.info.pid)
        chain = [
            manager,
            *[
                each
                for each in manager.children(recursive=True)
                if "python" in each.name() or "holdfast" in " ".join(each.cmdline())
            ],
        ]
        for each in chain:
            each.suspend()
        for each in chain:
            each.kill()
        await killed(served.info.pid)
        await ensure_manager(served.space, idle=60, lease="700ms")
        assert await until(lambda: len(file.read_text().split()) == 2)
        first, second = map(int, file.read_text().split())
        assert not is_alive(first)
        assert is_alive(second)
        assert len(living(f"{served.marker}")) >= 1


async def test_attempts_that_are_used_up_are_settled_as_failed_with_the_message_kept(path: str) -> None:
    async with serving(path, lease="500ms") as served:
        spec = TaskSpec(function=f"{HERE}:sleep", args=[60], retry=TaskRetry(attempts=1))
        handle = await served.space.tasks.submit(spec, None)
        await running(handle)
        await killed(served.info.pid)
        await ensure_manager(served.space, idle=60, lease="500ms")
        state = await handle.wait("20s")
        assert state.status == "failed"
        assert "used up" in (state.reason or "")
        assert len(await served.space.queue(f"T{handle.tid}.reserved").peek()) == 1


async def test_a_killed_warden_means_another_attempt(path: str) -> None:
    async with serving(path) as served:
        handle = await served.space.tasks.submit(SLEEP)
        state = await running(handle)
        psutil.Process(state.pid).parent().kill()
        while (again := await handle.state()).attempt < 2 or again.pid in (None, state.pid):
            await asyncio.sleep(0.01)
        assert again.status == "running"
        await handle.kill()


async def test_a_manager_paused_past_its_lease_ends_its_children_and_registers_anew(path: str) -> None:
    async with serving(path, lease="500ms") as served, serving(path, host="elsewhere", lease="500ms") as other:
        manager = await served.space.tasks.get(other.info.tid)
        await manager.pause()
        handle = await served.space.tasks.submit(SLEEP)
        state = await running(handle)
        assert state.manager == served.info.tid
        await manager.resume()
        stop(served.info.pid, path)
        while (taken := await handle.state()).manager != other.info.tid or taken.pid is None:
            await asyncio.sleep(0.02)
        os.kill(served.info.pid, signal.SIGCONT)
        assert state.pid is not None
        assert await until(lambda: not is_alive(state.pid or 0))
        while not [info for info in await served.space.tasks.managers() if info.pid == served.info.pid]:
            await asyncio.sleep(0.02)
        assert (await handle.state()).manager == other.info.tid
        assert (await handle.state()).attempt == 2


async def test_several_hosts_share_the_queue_of_one_store(path: str) -> None:
    async with serving(path, host="one", concurrency=1), serving(path, host="two", concurrency=1) as served:
        handles = [await served.space.tasks.submit(TaskSpec(command=("sleep", "0.3"))) for _ in range(4)]
        states = [await handle.wait("30s") for handle in handles]
        assert {state.status for state in states} == {"completed"}
        assert {state.host for state in states} == {"one", "two"}


async def test_a_manager_runs_as_many_tasks_at_once_as_it_may_and_higher_priorities_first(
    path: str, tmp_path: Path
) -> None:
    file = tmp_path / "order"
    async with serving(path, concurrency=1) as served:
        first = await served.space.tasks.submit(TaskSpec(command=("sleep", "0.4")))
        await running(first)
        for priority in (1, 9, 5):
            spec = TaskSpec(function=f"{HERE}:append", args=[str(file), str(priority)], priority=priority)
            await served.space.tasks.submit(spec)
        assert (await served.space.tasks.counts())["created"] == 3
        assert await until(lambda: file.exists() and len(file.read_text().split()) == 3)
        assert file.read_text().split() == ["9", "5", "1"]


async def test_only_what_is_allowed_is_run(path: str) -> None:
    async with serving(path, allow_modules=("math",), allow_commands=("/bin/echo",)) as served:
        submit = served.space.tasks.submit
        assert await (await submit(TaskSpec(function="math:sqrt", args=[9]))).result("20s") == 3
        assert await (await submit(TaskSpec(command=("/bin/echo", "x")))).result("20s") == b"x\n"
        for spec, words in (
            (TaskSpec(command=("sh", "-c", "true")), "the command 'sh' is not among those allowed here"),
            (TaskSpec(function="subprocess:run"), "the function 'subprocess:run' is of no module that is allowed here"),
            (TaskSpec(command=("/bin/echo",), env={"LD_PRELOAD": "x"}), "the variable 'LD_PRELOAD' is not among those"),
        ):
            state = await (await submit(spec)).wait("20s")
            assert (state.status, state.return_code) == ("failed", 126)
            assert f"AccessDenied: {words}" in (state.reason or "")


async def test_55_a_manager_sees_nothing_of_another_space(path: str) -> None:
    async with serving(path) as served:
        other = served.store.space("elsewhere", agent="tester")
        handle = await other.tasks.submit(TaskSpec(command=("true",)))
        await (await served.space.tasks.submit(TaskSpec(command=("true",)))).wait("20s")
        assert (await handle.status()) == "created"
        assert await other.tasks.managers() == []


async def test_a_manager_that_cannot_start_says_why(path: str) -> None:
    async with holdfast.open(path) as store:
        with pytest.raises(InvalidInput, match="no_such_module"):
            await ensure_manager(store.space(SPACE), preload=("no_such_module",))
        with pytest.raises(InvalidInput, match="concurrency"):
            await ensure_manager(store.space(SPACE), concurrency=0)
    async with holdfast.open("memory:") as store:
        with pytest.raises(InvalidInput, match="memory:"):
            await ensure_manager(store.space(SPACE))


async def test_a_manager_can_be_part_of_another_program() -> None:
    async with holdfast.open("memory:") as store, inside(store) as space:
        handle = await space.tasks.submit(TaskSpec(command=("echo", "here")))
        assert await handle.result("20s") == b"here\n"


async def test_the_log_is_beside_the_store_and_the_place_is_free_as_soon_as_its_holder_is_dead(path: str) -> None:
    async with serving(path, host="here") as served:
        place = Place.of(path, SPACE, "here")
        assert place.is_held()
        assert f"manager {served.info.tid} serves" in place.log.read_text()
        await killed(served.info.pid)
        assert await until(lambda: not place.is_held())


async def test_a_manager_is_ready_within_a_second(path: str) -> None:
    async with holdfast.open(path) as store:
        space, began = store.space(SPACE), time.monotonic()
        info = await ensure_manager(space, idle=60)
        taken = time.monotonic() - began
        end(info.pid)
        assert taken < 5  # a second, on a machine that has nothing else to do


async def test_a_task_whose_message_somebody_removed_has_an_end() -> None:
    async with holdfast.open("memory:") as store, inside(store) as space:
        handle = await space.tasks.submit(TaskSpec(command=("sleep", "0.3")))
        await running(handle)
        page = await store.engine.scan(SPACE, f"reserved/T{handle.tid}.inbox/")
        await store.engine.commit(SPACE, Batch("tester", tuple(Delete(entry.key) for entry in page.entries)))
        state = await handle.wait("20s")
        assert state.status == "failed"


async def test_a_keepers_manager_is_an_orchestrator_and_agents_submit_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with KeeperServer.temporary() as keeper:
        async with holdfast.open(keeper.url, token=keeper.admin) as admin:
            made = Tokens(admin.engine, SystemClock(), "tester")
            roles: tuple[Role, ...] = ("agent", "orchestrator")
            tokens = {role: str((await made.create(f"the-{role}", SPACE, role))[0]) for role in roles}
        async with (
            holdfast.open(keeper.url, token=tokens["agent"]) as mine,
            holdfast.open(keeper.url, token=tokens["orchestrator"]) as theirs,
        ):
            space = mine.space(SPACE)
            handle = await space.tasks.submit(
                TaskSpec(command=("sh", "-c", "cat; sleep 60"), stream_output=True), {"x": 1}
            )
            with pytest.raises(holdfast.AccessDenied, match="the-agent"):
                await ensure_manager(space, idle=60)
            info = await ensure_manager(theirs.space(SPACE), idle=60)
            try:
                async for chunk in handle.stream():
                    if chunk.data:
                        assert chunk.data == b'{"x":1}\n'
                        break
                assert (await handle.ping()).message == "PONG"
                assert (await handle.stop()).status == "ok"
                assert (await handle.state()).status == "cancelled"
                with pytest.raises(holdfast.AccessDenied):
                    await (await space.tasks.get(info.tid)).stop()
            finally:
                end(info.pid)


async def test_a_store_that_is_away_for_longer_than_the_lease_ends_the_children_and_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with KeeperServer.temporary() as keeper:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            space = store.space(SPACE, agent="tester")
            handle = await space.tasks.submit(SLEEP)
            info = await ensure_manager(space, idle=60, lease="700ms")
            try:
                state = await running(handle)
                keeper.kill()
                assert await until(lambda: not is_alive(state.pid or 0))
                assert is_alive(info.pid)
                await asyncio.to_thread(keeper.start)
                while (again := await handle.state()).attempt < 2 or again.pid is None:
                    await asyncio.sleep(0.02)
                assert again.manager not in (None, info.tid)
                assert is_alive(again.pid)
            finally:
                end(info.pid)


async def test_a_store_that_is_away_for_less_than_the_lease_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with KeeperServer.temporary() as keeper:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            space = store.space(SPACE, agent="tester")
            handle = await space.tasks.submit(TaskSpec(command=("sh", "-c", "sleep 0.3; echo done")))
            info = await ensure_manager(space, idle=60, lease="30s")
            try:
                await running(handle)
                keeper.kill()
                await asyncio.sleep(0.6)  # the task ends while the store is away
                await asyncio.to_thread(keeper.start)
                assert await handle.result("20s") == b"done\n"
                state = await handle.state()
                assert (state.attempt, state.manager) == (1, info.tid)
            finally:
                end(info.pid)


@pytest.mark.parametrize("moment", ["it leaves", "something runs", "it registers"])
async def test_a_manager_that_is_told_to_end_while_its_store_is_away_ends_nonetheless(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeeperServer.temporary() as keeper:
        async with holdfast.open(keeper.url, token=keeper.admin) as store:
            gone = task_managers._gone

            async def when_the_store_is_gone(*given: Any, **named: Any) -> None:
                keeper.kill()
                await gone(*given, **named)

            if moment == "it leaves":
                monkeypatch.setattr(task_managers, "_gone", when_the_store_is_gone)
            elif moment == "it registers":
                keeper.kill()
            manager = Manager(store, SPACE, ManagerOptions(lease="400ms", grace="50ms", idle="10m"))
            registered = asyncio.Event()
            serves = asyncio.create_task(manager.run(lambda _: registered.set()))
            if moment == "it registers":
                await asyncio.sleep(0.1)
            else:
                await asyncio.wait_for(registered.wait(), 20)
            if moment == "something runs":
                handle = await store.space(SPACE, agent="tester").tasks.submit(SLEEP)
                pid = (await running(handle)).pid
                keeper.kill()
            manager.stop("shutdown")
            await asyncio.wait([serves], timeout=20)
            assert serves.done(), "it would wait for as long as a manager may be idle"
            if moment == "it registers":
                assert isinstance(serves.exception(), holdfast.Unavailable)
            else:
                serves.result()
            if moment == "something runs":
                assert not is_alive(pid or 0)


async def test_a_task_goes_on_when_its_request_was_given_to_somebody_else() -> None:
    async with holdfast.open("memory:") as store:
        space = store.space(SPACE, agent="tester")
        handle = await space.tasks.submit(TaskSpec(command=("true",)))
        request = await space.queue("holdfast.spawn.requests").take()
        async with space.tasks.ledger(host="here") as ledger:
            launch = await ledger.spawning(request)
            assert launch is not None
            await store.engine.commit(SPACE, Batch("tester", (Delete(request.key),)))
            await ledger.running(launch, 4711)
            assert (await handle.status()) == "running"
            await ledger.finished(launch, TaskOutcome("completed", return_code=0))
        assert (await handle.status()) == "completed"


async def test_a_request_that_a_manager_could_not_take_goes_back_to_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    take, refused = TaskLedger.spawning, iter([holdfast.LeaseLost("not now"), holdfast.Conflict("nor now")])

    async def spawning(ledger: TaskLedger, request: Any) -> Any:
        if (exc := next(refused, None)) is not None:
            raise exc
        return await take(ledger, request)

    monkeypatch.setattr(TaskLedger, "spawning", spawning)
    async with holdfast.open("memory:") as store, inside(store) as space:
        handle = await space.tasks.submit(TaskSpec(command=("true",)))
        assert (await handle.wait("20s")).status == "completed"
        stats = await space.queue("holdfast.spawn.requests").stats()
        assert (stats.ready, stats.delayed, stats.reserved) == (0, 0, 0)


async def test_a_defect_in_one_of_its_duties_does_not_end_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Pipelines, "run", run)
    async with holdfast.open("memory:") as store, inside(store) as space:
        for _ in range(2):
            assert (await (await space.tasks.submit(TaskSpec(command=("true",)))).wait("20s")).status == "completed"
            await asyncio.sleep(0.1)
