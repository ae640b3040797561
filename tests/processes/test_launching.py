"""What is started, what it finds, and what comes back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.clock import ManualClock, as_datetime
from holdfast.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotRunnable,
    OutcomeUnknown,
    TargetMissing,
    Unavailable,
)
from holdfast.processes import Allowed, Launcher
from tests.processes.conftest import MakeOrder, below, first_line, is_alive, printed, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = "tests.processes.targets"


async def run(launcher: Launcher, order: MakeOrder, function: str, *args: object, **kwargs: object):
    child = await launcher.start(order(function=f"{HERE}:{function}", args=args, kwargs=kwargs))
    texts = await printed(child)
    return await child.wait(), texts


# --- commands ---


async def test_a_command_passes_its_exit_code_and_both_streams_through(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sh", "-c", "echo out; echo err >&2; exit 3"))
    assert await printed(child) == {"stdout": b"out\n", "stderr": b"err\n"}
    ended = await child.wait()
    assert (ended.reason, ended.code, ended.exit_code, ended.signal) == ("exited", 3, 3, None)


async def test_a_signal_is_told_as_shells_tell_it_and_raw(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sh", "-c", "kill -SEGV $$"))
    ended = await child.wait()
    assert (ended.reason, ended.code, ended.exit_code, ended.signal) == ("exited", 139, None, signal.SIGSEGV)


@pytest.mark.parametrize(
    ("argv", "error", "code", "words"),
    [
        (["no-such-command-anywhere"], TargetMissing, 127, "no command"),
        (["/no/such/file"], TargetMissing, 127, "no command"),
        (["/etc/passwd"], NotRunnable, 126, "Permission denied"),
        (["/tmp"], NotRunnable, 126, "cannot be executed"),
    ],
)
async def test_what_cannot_be_executed_is_refused_as_shells_do(
    launcher: Launcher, order: MakeOrder, argv: list[str], error: type[NotRunnable], code: int, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        await launcher.start(order(*argv))
    assert type(caught.value) is error
    assert caught.value.exit_code == code
    assert not launcher.children


async def test_a_file_that_is_no_program_is_refused(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo no interpreter is named\n")
    script.chmod(0o755)
    with pytest.raises(NotRunnable, match="Exec format"):
        await launcher.start(order(str(script)))


async def test_a_missing_working_directory_is_refused(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    with pytest.raises(NotRunnable, match=r"working directory .*nowhere"):
        await launcher.start(order("true", cwd=tmp_path / "nowhere"))
    with pytest.raises(NotRunnable, match="working directory"):
        await launcher.start(order(function=f"{HERE}:echo", cwd=tmp_path / "nowhere"))


async def test_a_command_runs_where_it_is_told_to(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    child = await launcher.start(order("pwd", cwd=tmp_path))
    assert (await printed(child))["stdout"].decode().strip() == str(tmp_path.resolve())


async def test_a_command_has_three_descriptors_and_default_signals(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"))
    masks = [int(word, 16) for word in (await printed(child))["stdout"].split()[1::2]]
    assert [mask & 0x7FFFFFFF for mask in masks] == [0, 0]  # signals 32 and 33 are the C library's own
    child = await launcher.start(order("sh", "-c", "ls /proc/$$/fd"))
    assert (await printed(child))["stdout"].split() == [b"0", b"1", b"2"]


async def test_a_command_has_default_signals_also_where_it_was_started_from_the_background(order: MakeOrder) -> None:
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGQUIT, signal.SIGTSTP)]
    try:
        async with Launcher() as launcher:
            child = await launcher.start(order("grep", "SigIgn", "/proc/self/status"))
            [_, ignored] = (await printed(child))["stdout"].split()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert int(ignored, 16) & 0x7FFFFFFF == 0


async def test_the_bytes_come_back_as_they_were(launcher: Launcher, order: MakeOrder, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "data").write_bytes(data)
    child = await launcher.start(order("cat", str(tmp_path / "data")))
    assert hashlib.sha256((await printed(child))["stdout"]).digest() == hashlib.sha256(data).digest()


async def test_output_can_be_read_after_the_end(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("echo", "late"))
    await child.wait()
    assert (await printed(child))["stdout"] == b"late\n"


async def test_a_reader_that_stops_reading_stops_the_child(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sh", "-c", "head -c 4000000 /dev/zero; echo done >&2"))
    await asyncio.sleep(0.2)
    assert not child.has_ended
    texts = await printed(child)
    assert (len(texts["stdout"]), texts["stderr"]) == (4_000_000, b"done\n")
    assert (await child.wait()).code == 0


async def test_a_quiet_child_needs_no_reader(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("head", "-c", "4000000", "/dev/zero", quiet=True))
    assert (await child.wait()).code == 0
    assert await printed(child) == {"stdout": b"", "stderr": b""}


async def test_an_interactive_child_is_talked_to(launcher: Launcher, order: MakeOrder) -> None:
    script = "while read line; do echo you said $line; done; echo bye >&2"
    child = await launcher.start(order("sh", "-c", script, interactive=True))
    await child.write(b"hello\n")
    assert await first_line(child) == "you said hello"
    await child.write(b"again\n")
    assert await first_line(child) == "you said again"
    child.close_stdin()
    assert (await printed(child))["stderr"] == b"bye\n"
    with pytest.raises(InvalidInput, match="closed"):
        await child.write(b"more")


async def test_what_is_written_waits_for_a_slow_reader(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sh", "-c", "sleep 0.1; wc -c", interactive=True))
    await child.write(bytes(1_000_000))
    child.close_stdin()
    assert (await printed(child))["stdout"].split() == [b"1000000"]


async def test_writing_to_a_child_that_is_gone_is_refused(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("true", interactive=True))
    await child.wait()
    with pytest.raises(InvalidInput):
        await child.write(bytes(1_000_000))
    child = await launcher.start(order("true"))
    with pytest.raises(InvalidInput, match="not interactive"):
        await child.write(b"x")


# --- functions ---


async def test_a_function_gets_its_arguments_and_returns_json(launcher: Launcher, order: MakeOrder) -> None:
    ended, _ = await run(launcher, order, "echo", 1, "é", [None, 2.5], name={"deep": True})
    assert (ended.reason, ended.code) == ("exited", 0)
    assert ended.result == {"args": [1, "é", [None, 2.5]], "kwargs": {"name": {"deep": True}}}


async def test_an_async_function_and_one_of_a_class_are_called(launcher: Launcher, order: MakeOrder) -> None:
    assert (await run(launcher, order, "double", 21))[0].result == 42
    assert (await run(launcher, order, "Sums.add", 1, 2))[0].result == 3


async def test_what_a_function_prints_is_not_its_result(launcher: Launcher, order: MakeOrder) -> None:
    ended, texts = await run(launcher, order, "talk")
    assert ended.result == "result"
    assert texts["stdout"] == "not the result: é \\udc80\n".encode() + b"\x00\xff raw\n"
    assert texts["stderr"] == b"nor this\n"


async def test_an_exception_comes_back_as_type_message_and_traceback(launcher: Launcher, order: MakeOrder) -> None:
    ended, _ = await run(launcher, order, "fail")
    assert ended.code == 1
    assert ended.failure is not None
    assert (ended.failure.type, ended.failure.message) == ("ValueError", "wrong number")
    assert "targets.py" in ended.failure.traceback
    assert "processes/target.py" not in ended.failure.traceback
    with pytest.raises(Conflict, match="failure"):
        _ = ended.result


async def test_a_huge_exception_is_cut(launcher: Launcher, order: MakeOrder) -> None:
    ended, _ = await run(launcher, order, "fail", 10_000_000)
    assert ended.failure is not None
    assert len(ended.failure.message) + len(ended.failure.traceback) < 40_000


@pytest.mark.parametrize(("said", "code"), [(None, 0), (5, 5), ("no more", 1)])
async def test_a_function_may_exit(launcher: Launcher, order: MakeOrder, said: object, code: int) -> None:
    ended, texts = await run(launcher, order, "leave", said)
    assert ended.code == code
    assert texts["stderr"] == (b"no more\n" if said == "no more" else b"")


async def test_a_result_that_is_no_json_is_a_failure(launcher: Launcher, order: MakeOrder) -> None:
    ended, _ = await run(launcher, order, "give_an_object")
    assert ended.failure is not None
    assert ended.failure.type == "InvalidInput"
    assert ended.code == 1


@pytest.mark.parametrize(
    ("function", "code", "type", "words"),
    [
        ("no.such.module:f", 127, "TargetMissing", "no module"),
        (f"{HERE}:nothing", 127, "TargetMissing", "no 'nothing'"),
        (f"{HERE}:Sums.nothing", 127, "TargetMissing", "no 'nothing'"),
        (f"{HERE}:NUMBER", 126, "NotRunnable", "cannot be called"),
        (f"{HERE}:shout", 126, "NotRunnable", "lambda"),
        (f"{HERE}:os.system", 126, "NotRunnable", "another module"),
    ],
)
async def test_a_function_that_cannot_be_called_is_told_apart(
    launcher: Launcher, order: MakeOrder, function: str, code: int, type: str, words: str
) -> None:
    child = await launcher.start(order(function=function))
    ended = await child.wait()
    assert ended.code == code
    assert ended.failure is not None
    assert ended.failure.type == type
    assert words in ended.failure.message


async def test_a_function_finds_modules_in_its_working_directory(
    launcher: Launcher, order: MakeOrder, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def f():\n    return __file__\n")
    child = await launcher.start(order(function="mine:f", cwd=tmp_path))
    assert (await child.wait()).result == str(tmp_path / "mine.py")


async def test_threads_of_a_function_are_waited_for(launcher: Launcher, order: MakeOrder) -> None:
    ended, texts = await run(launcher, order, "threads_finish")
    assert ended.result == "returned"
    assert texts["stdout"] == b"the thread was waited for\n"


async def test_a_function_has_its_own_session_its_environment_and_nothing_of_the_launcher(
    launcher: Launcher, order: MakeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    monkeypatch.setenv("SOMETHING_ELSE", "seen")
    wanted = order(
        function=f"{HERE}:surroundings", env={"A": "b"}, name="my \x1b[31m\tname\n", marker="s/1234567890123456789"
    )
    child = await launcher.start(wanted)
    found = (await child.wait()).result
    assert found["pid"] == found["sid"] == found["pgid"] == child.pid
    assert found["ppid"] not in (os.getpid(), launcher.zygote_pid)
    assert found["fds"] == [0, 1, 2, found["fds"][3]]
    assert found["env"]["A"] == "b"
    assert found["env"]["SOMETHING_ELSE"] == "seen"
    assert {name for name in found["env"] if name.startswith("HOLDFAST_")} == {"HOLDFAST_TASK"}
    assert found["title"] == "holdfast: 0123456789 running my_31m_name_"
    assert (found["stdin"], found["threads"], found["cwd"]) == ("", 1, os.getcwd())


async def test_a_clean_environment_has_only_what_is_named(
    launcher: Launcher, order: MakeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOMETHING_ELSE", "unseen")
    child = await launcher.start(order("env", env={"A": "b"}, inherit=False))
    names = {line.partition(b"=")[0].decode() for line in (await printed(child))["stdout"].splitlines()}
    assert {"A", "PATH", "HOLDFAST_TASK"} <= names
    assert "SOMETHING_ELSE" not in names


# --- what is known about it ---


async def test_the_wardens_title_carries_the_short_tid_and_the_state(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sleep", "600", marker="s/1837025672140161024", name="n"))
    warden = psutil.Process(child.pid).parent()
    assert warden is not None
    assert await until(lambda: "".join(warden.cmdline()) == "holdfast: 2140161024 running n")
    await child.pause()
    assert "".join(warden.cmdline()) == "holdfast: 2140161024 paused n"
    await child.kill()


async def test_usage_is_that_of_the_tree_and_never_above_its_peak(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order(function=f"{HERE}:spin_in_children", args=[2]))
    await first_line(child)
    async with asyncio.timeout(30):
        while (usage := await child.usage()).processes < 3 or usage.cpu_seconds <= 0.1:
            await asyncio.sleep(0.05)
    assert usage.processes == 3
    assert usage.fds >= 9
    assert 0 < usage.memory <= usage.peak_memory
    assert usage.fds <= usage.max_fds
    ended = await child.kill()
    later = await child.usage()
    assert (later.memory, later.processes) == (0, 0)
    assert later.peak_memory == ended.peak_memory >= usage.peak_memory
    assert later.cpu_seconds == ended.cpu_seconds >= usage.cpu_seconds - 0.02


async def test_cpu_of_members_that_ended_is_counted(launcher: Launcher, order: MakeOrder) -> None:
    ended, _ = await run(launcher, order, "burn_in_children", 0.1, 4)
    assert 0.4 <= ended.cpu_seconds < 0.8


async def test_the_start_is_told_by_the_launchers_clock(order: MakeOrder) -> None:
    clock = ManualClock()
    async with Launcher(clock=clock) as launcher:
        child = await launcher.start(order("true"))
        assert child.started_at == as_datetime(clock.now_ms())
        await child.wait()


# --- ends ---


async def test_a_timeout_ends_it_within_a_second_with_124(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sleep", "600", timeout="200ms"))
    ended = await child.wait()
    assert (ended.reason, ended.code, ended.signal) == ("timeout", 124, signal.SIGTERM)
    assert 0.2 <= ended.duration < 1.2


async def test_a_stop_lets_it_clean_up(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order(function=f"{HERE}:term_with_grace"))
    await first_line(child)
    ended = await child.stop(grace="10s")
    assert (ended.reason, ended.code) == ("stopped", 7)
    assert (await printed(child))["stdout"] == b"cleaned up\n"


async def test_the_first_accepted_stop_reason_is_final(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order(function=f"{HERE}:ignore_term", timeout="10s"))
    await first_line(child)
    first, second, third = await asyncio.gather(child.stop(grace="300ms"), child.kill(), child.stop("timeout"))
    assert first == second == third
    assert first.reason == "stopped"
    assert await child.kill() == first


async def test_a_stop_that_comes_too_late_does_not_change_the_reason(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("true"))
    ended = await child.wait()
    assert ended.reason == "exited"
    assert await child.stop() == ended


async def test_a_kill_that_is_reported_done_leaves_nobody(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order(function=f"{HERE}:spin_in_children", args=[5], kwargs={"sessions": True}))
    await first_line(child)
    pids = [process.pid for process in below(launcher.zygote_pid or 0)]
    ended = await child.kill()
    assert (ended.reason, ended.code) == ("killed", 137)
    assert len(pids) == 7
    # The warden has said so, and goes now; the others are gone.
    assert not [pid for pid in pids[1:] if psutil.pid_exists(pid)]


async def test_an_ended_child_can_not_be_paused(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("true"))
    await child.wait()
    with pytest.raises(Conflict, match="ended"):
        await child.pause()


async def test_a_launch_that_is_cancelled_leaves_nothing(launcher: Launcher, order: MakeOrder) -> None:
    for delay in (0, 0.001, 0.003, 0.006, 0.01):
        launch = asyncio.ensure_future(launcher.start(order("sleep", "600")))
        await asyncio.sleep(delay)
        launch.cancel()
        try:
            child = await launch
        except asyncio.CancelledError:
            continue
        await child.kill()
    assert await until(lambda: not below(launcher.zygote_pid or 0))


async def test_many_launches_at_once_keep_their_outputs_apart(launcher: Launcher, order: MakeOrder) -> None:
    async def one(number: int) -> None:
        child = await launcher.start(order(function=f"{HERE}:echo", args=[number]))
        assert (await child.wait()).result["args"] == [number]

    await asyncio.gather(*(one(number) for number in range(20)))


async def test_a_launcher_that_ends_takes_its_children_along(order: MakeOrder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with Launcher() as launcher:
        children = [await launcher.start(order("sleep", "600", interactive=True)) for _ in range(3)]
        zygote = launcher.zygote_pid or 0
    assert [child.has_ended for child in children] == [True] * 3
    assert not is_alive(zygote)
    assert not any(is_alive(child.pid) for child in children)
    with pytest.raises(InvalidInput, match="closed"):
        await launcher.start(order("true"))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_launch_that_meets_the_end_of_its_launcher_leaves_nothing(order: MakeOrder) -> None:
    for delay in (0.0, 0.004, 0.008):
        launcher = Launcher()
        await launcher.open()
        launch = asyncio.ensure_future(launcher.start(order("sleep", "600")))
        await asyncio.sleep(delay)
        await launcher.close()
        try:
            child = await launch
            assert child.has_ended
        except (InvalidInput, OutcomeUnknown, Unavailable):
            continue


async def test_children_that_ended_leave_no_descriptors_open(launcher: Launcher, order: MakeOrder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        child = await launcher.start(order("echo", "x", interactive=True))
        await child.wait()
        del child
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# --- what may be run ---


async def test_only_what_is_allowed_is_run(order: MakeOrder, tmp_path: Path) -> None:
    allowed = Allowed(commands=frozenset({"/bin/echo"}), modules=frozenset({"json", "tests.*"}), env=frozenset({"A"}))
    (tmp_path / "json.py").write_text("def dumps(x):\n    return 'not json'\n")
    async with Launcher(allowed=allowed) as launcher:
        child = await launcher.start(order("/bin/echo", "x", env={"A": "b"}))
        assert (await child.wait()).code == 0
        for refused in (
            order("echo", "x"),
            order("/bin/echo", "x", env={"LD_PRELOAD": "/tmp/x.so"}),
            order(function="os:system", args=["true"]),
            order(function="jsonx:dumps"),
        ):
            with pytest.raises(AccessDenied):
                await launcher.start(refused)
        child = await launcher.start(order(function="json:dumps", args=[[1]], cwd=tmp_path))
        assert (await child.wait()).result == "[1]"
        # An allowed module may have another's function under a name of its own.
        child = await launcher.start(order(function="json:JSONEncoder"))
        ended = await child.wait()
        assert ended.failure is not None
        assert (ended.code, ended.failure.type) == (126, "AccessDenied")


async def test_modules_imported_beforehand_are_there_and_bad_ones_are_told(order: MakeOrder) -> None:
    async with Launcher(preload=["fractions"]) as launcher:
        child = await launcher.start(order(function=f"{HERE}:echo"))
        assert (await child.wait()).code == 0
    with pytest.raises(InvalidInput, match=r"no\.such\.module"):
        async with Launcher(preload=["no.such.module"]):
            pass


async def test_without_descriptors_nothing_is_started_and_the_next_launch_works(
    launcher: Launcher, order: MakeOrder
) -> None:
    script = (
        "import asyncio, json, os, resource\n"
        "from holdfast.errors import Unavailable\n"
        "from holdfast.processes import Launcher, Order\n"
        "async def main():\n"
        "    async with Launcher() as launcher:\n"
        "        kept = []\n"
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "        try:\n"
        "            while True: kept.append(os.open('/dev/null', 0))\n"
        "        except OSError: pass\n"
        "        os.close(kept.pop()); os.close(kept.pop()); os.close(kept.pop())\n"
        "        try: await launcher.start(Order(argv=('true',)))\n"
        "        except Unavailable as exc: print(exc)\n"
        "        for fd in kept: os.close(fd)\n"
        "        child = await launcher.start(Order(argv=('true',)))\n"
        "        print((await child.wait()).code)\n"
        "asyncio.run(main())\n"
    )
    child = await launcher.start(order(sys.executable, "-c", script))
    texts = await printed(child)
    assert texts["stdout"].decode().splitlines()[-1] == "0", texts
    assert b"Too many open files" in texts["stdout"]
