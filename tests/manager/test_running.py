"""Tasks that a manager really runs: what they get, what they give, and what is written of them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import Limits, TaskFailed, TaskRetry, TaskSpec, blocking
from holdfast.layers.task_states import replay
from tests.manager.conftest import Served, running, until
from tests.processes.conftest import is_alive

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = "tests.manager.targets"


async def test_a_command_runs_and_its_output_is_its_result(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("sh", "-c", "printf 'a\\0b'; printf c >&2")))
    result = await handle.result("20s")
    assert sorted(result) == sorted(b"a\0bc")
    state = await handle.state()
    assert (state.status, state.return_code, state.host) == ("completed", 0, served.info.host)
    assert state.manager == served.info.tid
    assert state.peak_memory_mb
    assert state.cpu_seconds is not None


async def test_a_function_gets_its_arguments_and_gives_its_result(served: Served) -> None:
    spec = TaskSpec(function=f"{HERE}:echo", args=[1, "two"], kwargs={"three": [3]})
    handle = await served.space.tasks.submit(spec)
    assert await handle.result("20s") == {"args": [1, "two"], "kwargs": {"three": [3]}}


async def test_the_message_is_a_functions_first_argument_and_a_commands_input(served: Served) -> None:
    called = await served.space.tasks.submit(TaskSpec(function=f"{HERE}:echo", args=[2]), {"x": 1})
    assert (await called.result("20s"))["args"] == [{"x": 1}, 2]
    read = await served.space.tasks.submit(TaskSpec(command=("cat",)), {"x": 1})
    assert json.loads(await read.result("20s")) == {"x": 1}


async def test_what_a_function_raises_is_the_reason_of_the_failure(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(function=f"{HERE}:fail", args=["no such luck"]))
    with pytest.raises(TaskFailed, match="no such luck"):
        await handle.result("20s")
    state = await handle.state()
    assert state.error is not None
    assert state.error.type == "ValueError"
    assert "targets.py" in (state.error.traceback or "")


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ({"command": ["holdfast-no-such-program"]}, 127, "there is no command"),
        ({"command": [__file__]}, 126, "cannot be executed|permission|not executable"),
        ({"function": f"{HERE}:nothing"}, 127, "there is no 'nothing'"),
        ({"function": "no_such_module:f"}, 127, "no_such_module"),
        ({"command": ["true"], "working_dir": "/no/such/folder"}, 126, "/no/such/folder"),
        ({"command": ["sh", "-c", "exit 7"]}, 7, "exited with 7"),
    ],
)
async def test_what_cannot_run_says_why_and_has_the_code_that_shells_have(
    served: Served, spec: dict[str, object], code: int, words: str
) -> None:
    handle = await served.space.tasks.submit(TaskSpec.of(spec))
    with pytest.raises(TaskFailed, match=words):
        await handle.result("20s")
    assert (await handle.state()).return_code == code


async def test_25_and_43_a_timeout_is_enforced_within_a_second_and_exits_with_124(served: Served) -> None:
    began = time.monotonic()
    handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "60"), timeout=0.2))
    state = await handle.wait("20s")
    assert (state.status, state.return_code) == ("timeout", 124)
    assert state.stop is not None
    assert (state.stop.reason, state.stop.by) == ("timeout", None)
    assert time.monotonic() - began < 5  # a second, on a machine that has nothing else to do


async def test_22_memory_above_the_limit_ends_the_tree_as_killed(served: Served) -> None:
    program = "import time; x = bytearray(120 * 2**20); time.sleep(30)"
    spec = TaskSpec(command=(sys.executable, "-c", program), limits=Limits(memory_mb=60))
    state = await (await served.space.tasks.submit(spec)).wait("30s")
    assert state.status == "killed"
    assert "memory" in (state.reason or "")
    assert state.stop is not None
    assert state.stop.reason == "memory"
    assert (state.peak_memory_mb or 0) > 60


async def test_22_files_above_the_limit_end_the_tree_as_killed_and_the_state_says_why(served: Served) -> None:
    program = "import time; x = [open('/dev/null') for _ in range(60)]; time.sleep(30)"
    spec = TaskSpec(command=(sys.executable, "-c", program), limits=Limits(max_fds=30))
    handle = await served.space.tasks.submit(spec)
    state = await handle.wait("30s")
    assert state.stop is not None
    assert (state.status, state.stop.reason) == ("killed", "fds")
    assert replay([event async for event in handle.events()]) == state


async def test_21_and_23_usage_is_measured_on_the_tree_and_is_never_above_its_peak(served: Served) -> None:
    """The child of a wrapper that waits for it has the memory; the wrapper has next to none."""
    program = "import time; x = bytearray(60 * 2**20); print('ready', flush=True); time.sleep(60)"
    spec = TaskSpec(command=("sh", "-c", f'{sys.executable} -c "{program}"; true'), stream_output=True)
    handle = await served.space.tasks.submit(spec)
    async for chunk in handle.stream():
        if b"ready" in chunk.data:
            break
    told = (await handle.control("STATUS")).details
    assert told["processes"] >= 2
    assert 50 < told["memory_mb"] <= told["peak_memory_mb"]
    await handle.kill()
    state = await handle.state()
    assert (state.peak_memory_mb or 0) >= told["memory_mb"]


async def test_a_manager_is_ensured_without_await_too(served: Served) -> None:
    def program() -> None:
        with blocking.open(served.url) as store:
            space = store.space(served.space.name, agent="waiter")
            assert blocking.ensure_manager(space, idle="1m") == served.info
            assert space.tasks.submit(TaskSpec(function="math:sqrt", args=[9])).result("20s") == 3

    await asyncio.to_thread(program)


async def test_a_result_of_ten_mib_flows_to_the_next_stage(served: Served) -> None:
    stages = [
        {"name": "make", "spec": {"function": f"{HERE}:letters"}},
        {"name": "count", "spec": {"function": f"{HERE}:length"}},
        {"name": "read", "after": "make", "spec": {"command": ["wc", "-c"]}},
    ]
    handle = await served.space.tasks.pipelines.start({"name": "large", "stages": stages}, 10 * 2**20)
    assert await handle.result("60s") == 10 * 2**20 + len('""\n')
    state = await handle.state()
    assert await handle.stage_result("count", state.stages["count"]) == 10 * 2**20


async def test_24_the_target_runs_once_per_delivery(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    handles = [
        await served.space.tasks.submit(TaskSpec(function=f"{HERE}:append", args=[str(file), str(number)]))
        for number in range(10)
    ]
    await asyncio.gather(*(handle.result("30s") for handle in handles))
    assert sorted(file.read_text().split()) == sorted(str(number) for number in range(10))
    requests = await served.space.queue("holdfast.spawn.requests").stats()
    assert requests.ready == requests.reserved == 0


async def test_28_a_failed_message_is_recoverable_from_reserved(served: Served, tmp_path: Path) -> None:
    file = str(tmp_path / "ran")
    handle = await served.space.tasks.submit(TaskSpec(function=f"{HERE}:fail_until", kwargs={"times": 1}), file)
    assert (await handle.wait("20s")).status == "failed"
    kept = await served.space.queue(f"T{handle.tid}.reserved").peek()
    assert [message.body for message in kept] == [file]
    again = await served.space.tasks.retry(handle.tid)
    assert await again.result("20s") == 2


async def test_a_policy_of_requeue_begins_it_again_until_it_completes(served: Served, tmp_path: Path) -> None:
    file = str(tmp_path / "ran")
    spec = TaskSpec(
        function=f"{HERE}:fail_until",
        args=[file, 2],
        reserved_policy_on_error="requeue",
        retry=TaskRetry(attempts=3, backoff="20ms"),
    )
    handle = await served.space.tasks.submit(spec)
    assert await handle.result("20s") == 3
    assert (await handle.state()).attempt == 3


async def test_31_to_33_all_transitions_are_logged_and_the_lookup_equals_the_replay(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("true",)))
    state = await handle.wait("20s")
    events = [event async for event in handle.events()]
    assert [event.status for event in events] == ["created", "spawning", "running", "completed"]
    assert replay(events) == state


async def test_34_process_titles_carry_the_short_tid_and_the_state(served: Served) -> None:
    spec = TaskSpec(function=f"{HERE}:sleep", args=[30], name="a; name with é")
    handle = await served.space.tasks.submit(spec)
    state = await running(handle)
    title = Path(f"/proc/{state.pid}/cmdline").read_bytes().replace(b"\0", b" ").strip().decode()
    assert title.startswith(f"holdfast: {handle.tid[-10:]} running a")
    assert title.isascii()
    assert ";" not in title
    manager = Path(f"/proc/{served.info.pid}/cmdline").read_bytes().replace(b"\0", b" ").strip().decode()
    assert manager == f"holdfast: {served.info.tid[-10:]} running manager"
    await handle.kill()


async def test_40_a_task_has_a_session_and_a_group_of_its_own(served: Served) -> None:
    found = await (await served.space.tasks.submit(TaskSpec(function=f"{HERE}:surroundings"))).result("20s")
    assert found["session"] == found["group"] == found["pid"]
    assert found["environment"]["HOLDFAST_SPACE"] == served.space.name


async def test_41_and_48_tasks_submit_tasks_through_connections_of_their_own(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(function=f"{HERE}:submit_another", args=[7]))
    assert await handle.result("30s") == "7"


async def test_47_the_id_of_the_message_is_the_tid_of_the_task(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(function=f"{HERE}:sleep", args=[30]), None)
    await running(handle)
    [message] = await served.space.queue(f"T{handle.tid}.reserved").peek()
    assert message.id == handle.tid
    await handle.kill()


async def test_output_is_streamed_while_it_is_produced(served: Served, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo first; while [ ! -e {gate} ]; do sleep 0.02; done; echo second"
    handle = await served.space.tasks.submit(TaskSpec(command=("sh", "-c", script), stream_output=True))
    chunks = []
    async for chunk in handle.stream():
        chunks.append(chunk)
        if chunk.data == b"first\n":
            assert (await handle.state()).status == "running"
            gate.touch()
    assert b"".join(chunk.data for chunk in chunks) == b"first\nsecond\n"
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_an_interactive_task_is_talked_to_in_both_directions(served: Served) -> None:
    program = "import sys\nfor line in sys.stdin: print('you said', line.strip()); print('!', file=sys.stderr)"
    handle = await served.space.tasks.submit(TaskSpec(command=(sys.executable, "-c", program), interactive=True))
    assert (await handle.write("one\n")).status == "ok"
    said: dict[str, str] = {"stdout": "", "stderr": ""}
    async for chunk in handle.stream():
        said[chunk.stream or "stdout"] += chunk.data.decode()
        if said["stdout"] == "you said one\n" and said["stderr"] == "!\n":
            await handle.write("two\n", eof=True)
    assert said == {"stdout": "you said one\nyou said two\n", "stderr": "!\n!\n"}
    assert (await handle.wait("20s")).status == "completed"


async def test_writing_to_a_task_that_is_not_interactive_is_rejected(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "30")))
    await running(handle)
    answer = await handle.write("x")
    assert answer.status == "rejected"
    assert "not interactive" in (answer.message or "")
    await handle.kill()


async def test_output_above_the_limit_comes_back_whole_from_its_blob(served: Served) -> None:
    spec = TaskSpec(command=("head", "-c", "3000000", "/dev/urandom"), output_size_limit_mb=1)
    handle = await served.space.tasks.submit(spec)
    data = await handle.result("30s")
    assert len(data) == 3_000_000
    state = await handle.state()
    assert state.output is not None
    assert state.output.spilled is not None


async def test_29_the_first_accepted_stop_reason_is_final(served: Served) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    handle = await served.space.tasks.submit(TaskSpec(command=(sys.executable, "-c", program), stream_output=True))
    async for chunk in handle.stream():
        if b"deaf" in chunk.data:
            break
    stop = asyncio.ensure_future(handle.stop())
    while (await handle.state()).stop is None:
        await asyncio.sleep(0.01)
    await handle.kill()
    await stop
    state = await handle.state()
    assert state.status == "cancelled"
    assert state.stop is not None
    assert state.stop.reason == "stop"


async def test_30_an_acknowledged_kill_is_followed_by_proof_of_death(served: Served) -> None:
    script = "sleep 60 & setsid sleep 60 & sleep 60"
    handle = await served.space.tasks.submit(TaskSpec(command=("sh", "-c", script)))
    state = await running(handle)
    assert state.pid is not None
    await asyncio.sleep(0.1)
    answer = await handle.kill()
    assert answer.status == "ok"
    assert not is_alive(state.pid)
    assert (await handle.state()).status == "killed"


async def test_a_stop_is_done_within_a_second_by_one_that_ignores_term(served: Served) -> None:
    handle = await served.space.tasks.submit(
        TaskSpec(command=("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"))
    )
    await running(handle)
    began = time.monotonic()
    assert (await handle.stop()).status == "ok"
    assert (await handle.state()).status == "cancelled"
    assert time.monotonic() - began < 5


async def test_pause_stops_the_cpu_of_the_tree_and_resume_lets_it_go_on(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("sh", "-c", "while :; do :; done")))
    state = await running(handle)
    assert (await handle.pause()).status == "ok"
    assert (await handle.state()).paused
    assert (await handle.status()) == "running"
    before = _cpu(state.pid)
    await asyncio.sleep(0.15)
    assert _cpu(state.pid) == before
    assert (await handle.resume()).status == "ok"
    assert await until(lambda: _cpu(state.pid) > before)
    await handle.kill()


def _cpu(pid: int | None) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_status_and_ping_are_answered(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "30")))
    state = await running(handle)
    assert (await handle.ping()).message == "PONG"
    answer = await handle.control("STATUS")
    assert answer.details["pid"] == state.pid
    assert answer.details["processes"] >= 1
    await handle.kill()


async def test_a_malformed_command_is_answered_with_an_error_and_nothing_else_happens(served: Served) -> None:
    from holdfast.codec import encode
    from holdfast.engine import Batch, Push

    handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "30")))
    await running(handle)
    for body in (encode("STOP"), encode({"command": "EXPLODE"}), encode({"command": "WRITE", "data": 3})):
        push = Batch("tester", (Push(f"tasks/ctrl_in/{handle.tid}/", body),))
        [key] = (await served.store.engine.commit(served.space.name, push)).results
        answered = str(key).replace("ctrl_in", "ctrl_out")
        while (found := (await served.store.engine.get(served.space.name, [answered]))[0]) is None:
            await asyncio.sleep(0.01)
        assert json.loads(found.value)["status"] == "error"
    assert (await handle.status()) == "running"
    await handle.kill()


async def test_a_command_to_a_task_that_is_not_there_is_answered(served: Served) -> None:
    from holdfast.codec import encode
    from holdfast.engine import Batch, Push

    push = Batch("tester", (Push(f"tasks/ctrl_in/{'7' * 19}/", encode({"command": "PING"})),))
    [key] = (await served.store.engine.commit(served.space.name, push)).results
    answered = str(key).replace("ctrl_in", "ctrl_out")
    while (found := (await served.store.engine.get(served.space.name, [answered]))[0]) is None:
        await asyncio.sleep(0.01)
    assert "there is no task" in json.loads(found.value)["message"]
    with pytest.raises(holdfast.NotFound):
        await served.space.tasks.get("7" * 19)


async def test_a_pipeline_is_moved_on_by_the_manager(served: Served) -> None:
    stages = [
        {"name": "list", "spec": {"function": f"{HERE}:numbers"}},
        {"name": "work", "each": "list", "spec": {"function": f"{HERE}:double"}},
        {"name": "sum", "after": ["work"], "spec": {"function": f"{HERE}:total"}},
    ]
    handle = await served.space.tasks.pipelines.start({"name": "sums", "stages": stages}, 4)
    assert await handle.result("40s") == 12
