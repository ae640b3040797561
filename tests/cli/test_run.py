"""run, manager, pipeline: real processes under one manager, which the whole file shares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.engine import Push
from holdfast.layers.task_states import CTRL_IN
from tests.cli.conftest import COMMAND, DEADLINE_S, Cli, Outcome, gone

PYTHON = sys.executable
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with a manager; two were told to start at once."""
    store = tmp_path_factory.mktemp("tasks") / "team.db"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    env |= {"HOLDFAST_STORE": str(store), "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    starting = [
        subprocess.Popen([COMMAND, "manager", "start", "--json"], env=env, stdout=subprocess.PIPE) for _ in range(2)
    ]
    told = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in starting]
    (store.parent / "started.json").write_text(json.dumps(told))
    try:
        yield store
    finally:
        subprocess.run([COMMAND, "manager", "stop", "--kill", "--all"], env=env, check=True, timeout=DEADLINE_S)
        for each in told:
            gone(each["pid"])


@pytest.fixture(autouse=True)
def store(folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_STORE", str(shared))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return shared


def counts(cli: Cli) -> dict[str, int]:
    told: dict[str, int] = cli("status", "--json").json["counts"]
    return told


def test_of_two_managers_that_are_started_at_once_one_serves(cli: Cli, shared: Path) -> None:
    first, second = json.loads((shared.parent / "started.json").read_text())
    assert first["tid"] == second["tid"]
    [told] = cli("manager", "list", "--json").json
    assert (told["tid"], told["pid"], told["draining"]) == (first["tid"], first["pid"], False)
    assert cli("manager", "start").out.strip() == first["tid"]
    assert cli("manager").out.startswith(f"{first['tid']}\t")
    assert cli("manager", "status", "--json").json["status"] == "running"
    assert first["tid"] in cli("status").out


def test_a_command_streams_to_the_streams_it_used_and_its_exit_code_is_passed_on(command: Cli) -> None:
    ended = command(
        "run", "--", PYTHON, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", code=3
    )
    assert (ended.out, ended.err) == ("out\n", "err\n")
    piped = subprocess.run(
        [COMMAND, "run", "--", "cat"], input=b"\0raw\xff" * 100_000, capture_output=True, timeout=DEADLINE_S
    )
    assert (piped.returncode, piped.stdout == b"\0raw\xff" * 100_000) == (0, True)


def test_a_function_gets_its_arguments_and_its_result_is_json(cli: Cli) -> None:
    ended = cli("run", "--function", "tests.cli.jobs:add", "--arg", "3", "--kw", "second=4")
    assert ended.out == "adding\n7\n"
    told = cli("run", "--function", "tests.cli.jobs:echo", "--kw", "a=b", "--json", stdin='{"x": [1]}').json
    assert (told["status"], told["result"], told["output"]) == ("completed", [{"x": [1]}, {"a": "b"}], "")
    failed = cli("run", "--function", "tests.cli.jobs:fail", code=1)
    assert "Traceback" in failed.err
    assert failed.err.endswith("failed: ValueError: out of stock\n")


def test_a_spec_and_its_message_come_from_a_file_and_a_pipe_and_options_override(cli: Cli, folder: Path) -> None:
    spec = {"command": ["sh", "-c", "cat; echo $A $B; pwd"], "env": {"A": "1", "B": "2"}, "name": "n", "tags": ["t"]}
    (folder / "task.json").write_text(json.dumps(spec))
    told = cli("run", "--spec", "task.json", "--env", "B=3", "--name", "N", "--json", stdin='{"x": 1}').json
    assert told["output"] == f'{{"x":1}}\n1 3\n{folder}\n'
    assert (told["title"], told["tags"], told["return_code"]) == ("N", ["t"], 0)


def test_a_timeout_is_124_and_a_limit_that_is_passed_is_told(cli: Cli) -> None:
    late = cli("run", "--timeout", "300ms", "--", "sleep", "60", code=124)
    assert "took too long: it ran longer than 0.3 s" in late.err
    hungry = f'{PYTHON} -c "x = bytearray(200 << 20); import time; time.sleep(60)"'
    fat = cli("run", "--memory", "64", "--", "sh", "-c", hungry, code=137)
    assert "was killed: memory: it used more than 64 MiB" in fat.err


def test_a_detached_task_is_found_by_the_end_of_its_tid_controlled_and_retried(cli: Cli) -> None:
    tid = cli("run", "--detach", "--name", "nap", "--stream", "--", "sh", "-c", "echo begun; sleep 60").out.strip()
    while cli("status", tid, "--json").json["status"] != "running" or not cli("logs", tid).out:
        pass
    assert cli("logs", tid[-10:]).out == "begun\n"
    assert cli("status", tid[-6:], "--json").json["tid"] == tid
    assert tid in cli("task", "list", "--status", "running", "--pattern", "na*").out
    assert cli("task", "ping", tid).out == f"{tid}\tok\tPONG\n"
    assert cli("task", "pause", "--pattern", "nap", "--json").json["status"] == "ok"
    assert cli("status", tid, "--json").json["paused"] is True
    assert cli("task", "resume", tid).out.startswith(f"{tid}\tok")
    assert cli("result", tid, "--wait", "0", code=26).err.endswith("wait longer, or ask again\n")
    assert cli("task", "stop", "--all").out.startswith(f"{tid}\tok")
    assert cli("manager", "list").out, "managers are not meant by --all"
    told = cli("status", tid, "--json").json
    assert (told["status"], told["reason"]) == ("cancelled", "stop")
    assert cli("task", "stop", tid, code=3).err.endswith("is cancelled already, and that is final\n")
    again = cli("task", "retry", tid).out.strip()
    assert cli("status", again, "--json").json["retry_of"] == tid
    assert cli("task", "kill", again).out.startswith(f"{again}\tok")
    assert cli("result", again, code=25).err != ""
    events = [each["event"] for each in cli("logs", again, "--events", "--json", "-f").json_lines]
    assert events[0] == events[-1] == "state_update"
    assert cli("status", again, "--watch").out.splitlines()[-1].split()[3] in ("killed", "cancelled")


def test_ctrl_c_stops_the_task_and_what_it_printed_stays(cli: Cli) -> None:
    running = subprocess.Popen(
        [COMMAND, "run", "--name", "stoppable", "--", "sh", "-c", "echo begun; sleep 60"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    try:
        assert running.stdout.readline() == b"begun\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert b"stopping task" in err
    [told] = cli("task", "list", "--pattern", "stoppable", "--json").json
    assert told["status"] == "cancelled"
    assert cli("logs", told["tid"]).out == "begun\n"


def test_a_reader_that_goes_away_stops_the_task(cli: Cli, shell: Callable[[str], Outcome]) -> None:
    ended = shell("holdfast run --timeout 30s --name endless -- yes </dev/null | head -1; exit ${PIPESTATUS[0]}")
    assert (ended.code, ended.out, ended.err) == (141, "y\n", "")
    [told] = cli("task", "list", "--pattern", "endless", "--json").json
    try:
        assert cli("result", told["tid"], "--wait", "20s", "--json", code=None).code == 25  # it may take a moment
    finally:
        cli("task", "kill", told["tid"], code=None)  # nobody else would
    assert cli("status", told["tid"], "--json").json["status"] == "cancelled"


def test_ctrl_c_twice_kills_a_task_that_does_not_want_to_end(cli: Cli) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
    )
    running = subprocess.Popen(
        [COMMAND, "run", "--name", "stubborn", "--", PYTHON, "-c", stubborn],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    try:
        assert running.stdout.readline() == b"begun\n"
        running.send_signal(signal.SIGTERM)
        assert b"once more kills it" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 128 + signal.SIGTERM
    [told] = cli("task", "list", "--pattern", "stubborn", "--json").json
    assert told["status"] in ("cancelled", "killed")


def test_an_interactive_task_is_typed_into_from_another_command(cli: Cli) -> None:
    tid = cli(
        "run", "--detach", "--interactive", "--", "sh", "-c", "read a; echo got $a; read b; echo got $b"
    ).out.strip()
    assert cli("task", "write", tid, "one").out.startswith(f"{tid}\tok")
    cli("task", "write", tid, "-", "--eof", stdin="two")
    told = cli("logs", tid, "-f", "--json").json_lines
    assert "".join(each["data"] for each in told) == "got one\ngot two\n"
    assert cli("result", tid).out == "got one\ngot two\n"
    assert cli("result", tid, "--stream").out == "got one\ngot two\n"


def test_a_pipeline_runs_to_its_result_and_is_found_again_under_its_id(cli: Cli, folder: Path) -> None:
    double = "import json, sys; print(2 * json.load(sys.stdin))"
    stages: list[dict[str, Any]] = [
        {"name": "items", "spec": {"command": [PYTHON, "-c", "print([1, 2, 3])"]}},
        {"name": "doubled", "spec": {"command": [PYTHON, "-c", double]}, "each": "items"},
    ]
    (folder / "pipeline.json").write_text(json.dumps({"name": "nightly", "stages": stages}))
    assert cli("pipeline", "run", "pipeline.json", "--id", "n1").out == "[2,4,6]\n"
    assert cli("pipeline", "run", "pipeline.json", "--id", "n1", "--json").json["status"] == "completed"
    assert cli("pipeline", "status", "n1").out == "n1: completed\nitems\tcompleted\t1/1\ndoubled\tcompleted\t3/3\n"
    assert cli("pipeline", "list").out.startswith("n1\tnightly\tcompleted\t")
    cli("pipeline", "cancel", "n1", code=3)
    cli("pipeline", "status", "n2", code=4)
    (folder / "pipeline.json").write_text(json.dumps({"name": "nightly", "stages": [{"name": "a", "spec": {}}]}))
    assert "stage 'a'" in cli("pipeline", "run", "pipeline.json", code=2).err


# --- bad input ---


def test_what_cannot_be_run_is_126_or_127_and_says_why(cli: Cli, folder: Path) -> None:
    (folder / "plain.txt").write_text("text")
    for words, code, said in (
        (["--", "./plain.txt"], 126, "cannot be executed: Permission denied"),
        (["--", "no-such-program"], 127, "there is no command 'no-such-program'"),
        (["--cwd", "/no/such/folder", "--", "true"], 126, "/no/such/folder"),
        (["--function", "tests.cli.jobs:missing"], 127, "there is no 'missing'"),
        (["--function", "no_such_module:run"], 127, "there is no module 'no_such_module'"),
        (["--function", "tests.cli.jobs:LIMIT"], 126, "LIMIT"),
    ):
        ended = cli("run", *words, code=code)
        assert said in ended.err, words
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to run"),
        (["--function", "not a function"], "package.module:function"),
        (["--function", "jobs:f", "--", "true"], "exactly one of them"),
        (["--arg", "1", "--", "true"], "args and kwargs are a function's"),
        (["--kw", "name", "--function", "jobs:f"], "--kw reads NAME=VALUE"),
        (["--env", "A B=c", "--", "true"], "no variable's name"),
        (["--env", "NO_SUCH_VARIABLE", "--", "true"], "no such variable here"),
        (["--env", "HOLDFAST_TASK=x", "--", "true"], "must not set HOLDFAST_TASK"),
        (["--memory", "0", "--", "true"], "limits.memory_mb must be more than 0"),
        (["--memory", "much", "--", "true"], "limits.memory_mb must be a number"),
        (["--cpu", "0.5", "--", "true"], "limits.cpu_percent must be at least 1"),
        (["--fds", "0", "--", "true"], "limits.max_fds must be at least 1"),
        (["--timeout", "soon", "--", "true"], "timeout"),
        (["--timeout", "0", "--", "true"], "timeout"),
        (["--priority", "9999", "--", "true"], "priority must be"),
        (["--attempts", "0", "--", "true"], "retry.attempts must be"),
        (["--interactive", "--function", "jobs:f"], "interactive is for commands"),
        (["--name", "a\nb", "--", "true"], "a name is printable text"),
        (["--spec", "unknown.json"], "no field 'comand'; did you mean command?"),
        (["--spec", "limits.json"], "limits.memory"),
        (["--spec", "broken.json"], "broken.json is no JSON"),
        (["--spec", "list.json"], "holds no JSON object"),
        (["--no-such-option", "--", "true"], "No such option"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_bad_input_is_refused_before_anything_is_submitted(cli: Cli, folder: Path, words: list[str], said: str) -> None:
    (folder / "unknown.json").write_text('{"comand": ["true"]}')
    (folder / "limits.json").write_text('{"command": ["true"], "limits": {"memory": 5}}')
    (folder / "broken.json").write_text('{"command": ')
    (folder / "list.json").write_text("[]")
    before = counts(cli)
    ended = cli("run", *words, code=2)
    assert said in ended.err
    assert ended.out == ""
    assert counts(cli) == before


def test_a_missing_spec_and_a_message_that_is_no_json_are_told(cli: Cli, folder: Path) -> None:
    (folder / "task.json").write_text('{"command": ["cat"]}')
    assert cli("run", "--spec", "gone.json", code=4).err == "holdfast: there is no file gone.json\n"
    assert "no JSON" in cli("run", "--spec", "task.json", stdin="{", code=2).err
    assert "memory:" in cli("run", "--store", "memory:", "--", "true", code=2).err
    cli("spaces", "create", "scratch", "--durability", "volatile")
    assert "volatile" in cli("run", "--space", "scratch", "--", "true", code=2).err


def test_a_malformed_control_message_is_answered_with_an_error_and_the_task_goes_on(cli: Cli, store: Path) -> None:
    tid = cli("run", "--detach", "--", "sleep", "60").out.strip()
    with holdfast.blocking.open(str(store), background=False) as opened:
        scope = opened.space("default", agent="cli")._inner._scope
        pushes = tuple(Push(f"{CTRL_IN}{tid}/", value) for value in (b'{"command":"DANCE"}', b"[1]"))
        opened._loop.run(scope.commit(pushes))
    deadline = time.monotonic() + DEADLINE_S
    while len(answers := cli("queue", "peek", f"T{tid}.ctrl_out").json_lines) < 2 and time.monotonic() < deadline:
        pass
    assert [answer["status"] for answer in answers] == ["error", "error"]
    assert "there is no command 'DANCE'" in answers[0]["message"]
    assert cli("queue", "peek", f"T{tid}.ctrl_in").out == ""
    assert cli("status", tid, "--json").json["status"] == "running"
    cli("task", "kill", tid)


def test_a_message_that_always_fails_stays_reserved_with_its_reasons(cli: Cli, folder: Path) -> None:
    spec = {"command": ["sh", "-c", "cat >/dev/null; exit 7"], "retry": {"backoff": "10ms"}}
    (folder / "task.json").write_text(json.dumps(spec))
    told = json.loads(cli("run", "--spec", "task.json", "--attempts", "2", "--json", stdin='{"order": 1}', code=7).out)
    assert (told["status"], told["attempt"]) == ("failed", 2)
    [message] = cli("queue", "peek", f"T{told['tid']}.reserved", "--json").json
    assert (message["body"], message["state"]) == ({"order": 1}, "dead")
    [letter] = cli("dlq", "list", f"T{told['tid']}.inbox", "--json").json
    assert letter["reasons"], letter


def test_an_output_whose_blob_was_altered_or_removed_is_refused_and_the_rest_is_told(
    cli: Cli, folder: Path, store: Path
) -> None:
    (folder / "task.json").write_text('{"command": ["seq", "20000"], "output_size_limit_mb": 0.01}')
    told = cli("run", "--spec", "task.json", "--json").json
    kept = told["output"]["spilled"]
    tid, path = told["tid"], next(Path(f"{store}-blobs").rglob(f"*{kept['sha256'][2:]}*"))
    assert cli("result", tid).out.split() == [str(number) for number in range(1, 20001)]
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-5] + b"xxxx\n")
    assert kept["sha256"] in cli("result", tid, code=18).err
    assert kept["sha256"] in cli("logs", tid, code=18).err
    path.unlink()
    assert "is gone" in cli("result", tid, code=4).err
    assert cli("status", tid, "--json").json["status"] == "completed"
