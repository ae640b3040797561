"""The real command, as a process: pipes, signals, other processes, terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import INTERRUPTED, PIPE_CLOSED
from holdfast.cli.output import OUTPUT_FAILED
from tests.cli.conftest import COMMAND, DEADLINE_S, Cli, Outcome, files

Shell = Callable[[str], Outcome]


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of a running command; it must come before the deadline."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, "nothing came"
    return process.stdout.readline()


def test_the_main_path_works_across_processes(command: Cli) -> None:
    assert command("set", "regime", "risk-on", "--ttl", "1h").out == "1\n"
    assert command("get", "regime").out == "risk-on\n"
    assert command("increment", "orders", "-3").out == "-3\n"
    assert command("delete", "regime").out == "1\n"
    assert command("get", "regime", code=4).err == "holdfast: there is no record 'regime' in space 'default'\n"
    assert command("set", "orders", "1", "--if-absent", "--json", code=3).error["error"] == "conflict"
    assert command("audit", "seal").out == "3\n"
    assert command("audit", "verify").out.startswith("sound")
    assert command("spaces", "--json").json[0]["keys"] == 1


def test_pipes_carry_values_keys_and_exports(shell: Shell) -> None:
    piped = shell(
        """set -e -o pipefail
        echo '{"a":1}' | holdfast set cfg -
        echo text | holdfast set note
        holdfast get cfg | cat
        seq 3 | holdfast append numbers - >/dev/null
        holdfast export | holdfast --store other.db import
        holdfast --store other.db list numbers
        """
    )
    assert (piped.code, piped.err) == (0, "")
    assert piped.out.splitlines()[:3] == ["1", "2", '{"a":1}']
    assert piped.out.splitlines()[-3:] == ["1", "2", "3"]


def test_a_reader_that_goes_away_ends_a_stream_quietly(cli: Cli, shell: Shell) -> None:
    header = '{"kind":"space","format":1,"space":"default","durability":"sync","revision":1}'
    entry = '{"kind":"entry","key":"records/%06d","value":1,"version":1,"owner":"cli","created_at":1,"updated_at":1}'
    lines = [header, *(entry % number for number in range(20_000)), '{"kind":"end","space":"default","entries":20000}']
    cli("import", stdin="\n".join(lines))
    for words in ("keys --json", "export"):
        left = shell(f"holdfast {words} | head -1; echo ${{PIPESTATUS[0]}}")
        assert left.err == ""
        assert len(left.out.splitlines()) == 2
    assert shell("holdfast keys | head -1; exit ${PIPESTATUS[0]}").code == 141
    full = shell("holdfast keys >/dev/full")
    assert full.code == 74
    assert "could not be written (No space left on device)" in full.err
    assert "look before you repeat it" in full.err
    assert shell("holdfast set k 1 <&- 2>&-").code == 0
    assert shell("holdfast keys 2>&-").code == 0


def test_a_command_that_prints_fails_where_stdout_is_closed(cli: Cli, shell: Shell) -> None:
    cli("set", "k", "1")
    closed = shell("holdfast keys >&-")
    assert closed.code == 74
    assert "could not be written" in closed.err
    assert shell("holdfast keys --json <&- >&- 2>&-").code == 74
    assert shell("holdfast --help >&-").code == 74
    set_ = shell("holdfast set k 2 <&- >&-")
    assert set_.code == 74
    assert "the command itself was done" in set_.err
    assert cli("get", "k").out == "2\n"
    assert cli("doctor").code == 0


@pytest.mark.parametrize("environment", ["", "PYTHONUNBUFFERED=1 "])
def test_a_write_whose_answer_cannot_be_printed_is_not_told_as_one_to_retry(shell: Shell, environment: str) -> None:
    shell("holdfast set n 1")
    full = shell(f"{environment}holdfast increment n >/dev/full")
    assert full.code == 74
    assert full.err == (
        "holdfast: the output could not be written (No space left on device); the command itself was done, and need not be "
        "repeated for that\n"
    )
    told = shell(f"{environment}holdfast increment n --json >/dev/full")
    assert (told.code, told.error["error"]) == (74, "output_failed")
    assert shell("holdfast get n").out == "3\n"


def test_codes_that_only_the_command_line_has_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    for code in (OUTPUT_FAILED, INTERRUPTED, PIPE_CLOSED):
        assert f"{code} (" in page.replace("\n", " ")


def test_a_note_that_nobody_can_hear_does_not_keep_a_command_from_its_work(shell: Shell) -> None:
    heard = shell("holdfast --store memory: set k 1 2>/dev/full")
    assert (heard.code, heard.err) == (0, "")


def test_a_watcher_sees_what_another_process_writes_and_ends_on_ctrl_c(command: Cli) -> None:
    command("set", "first", "1")
    watcher = subprocess.Popen(
        [COMMAND, "watch", "--from-start", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert json.loads(next_line(watcher))["key"] == "first"
        command("set", "second", "2", "--agent", "market")
        told = json.loads(next_line(watcher))
        assert (told["key"], told["value"], told["actor"]) == ("second", 2, "market")
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=DEADLINE_S)
    finally:
        watcher.kill()
        watcher.wait()
    assert (watcher.returncode, out, err) == (130, b"", b"")


def test_following_the_audit_sees_what_another_process_does(command: Cli) -> None:
    command("set", "first", "1")
    follower = subprocess.Popen([COMMAND, "audit", "--follow", "-n", "2", "--json"], stdout=subprocess.PIPE)
    try:
        assert json.loads(next_line(follower))["key"] == "records/first"
        command("set", "second", "2")
        assert json.loads(next_line(follower))["key"] == "records/second"
        assert follower.wait(timeout=DEADLINE_S) == 0
    finally:
        follower.kill()
        follower.communicate()


def test_many_processes_count_together(command: Cli) -> None:
    command("set", "n", "0")
    counters = [subprocess.Popen([COMMAND, "increment", "n"], stdout=subprocess.PIPE) for _ in range(4)]
    sums = sorted(int(counter.communicate(timeout=DEADLINE_S)[0]) for counter in counters)
    assert sums == [1, 2, 3, 4]


def test_an_export_is_one_moment_while_others_write(cli: Cli, command: Cli, folder: Path) -> None:
    cli("set", "a", "0")
    script = "while :; do holdfast set a 1 >/dev/null; done"
    environment = {**os.environ, "PATH": f"{Path(COMMAND).parent}{os.pathsep}{os.environ['PATH']}"}
    writer = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        for number in range(2):
            exported = command("export")
            assert exported.json_lines[-1]["kind"] == "end"
            command("--store", f"copy{number}.db", "import", stdin=exported.out)
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()
    assert not [name for name in files(folder) if "export" in name]


def test_text_is_utf8_whatever_the_locale(command: Cli) -> None:
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    command("set", "grüße", "🌊", "--text")
    assert command("keys", env=environment).out == "grüße\n"
    assert command("get", "grüße", env={**os.environ, "PYTHONIOENCODING": "ascii"}).out == "🌊\n"


def on_a_terminal(*args: str, columns: int = 200) -> str:
    """What a command shows on a terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen([COMMAND, *args], stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the command has ended
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    process.wait(timeout=DEADLINE_S)
    return shown.decode()


def test_a_terminal_gets_tables_and_is_not_obeyed_by_values(command: Cli) -> None:
    command("set", "k", "\x1b]0;owned\x07 two\nlines")
    shown = on_a_terminal("get", "k")
    assert "\x1b" not in shown
    assert shown == "\\u001b]0;owned\\u0007 two\r\nlines\r\n"
    assert "durability" in on_a_terminal("spaces")
    assert "level" in on_a_terminal("doctor")
    assert "give a value" in on_a_terminal("set", "k")
    assert "entries" in on_a_terminal("copy", ".holdfast/store.db", "copy.db")


def test_an_id_is_not_folded_on_a_narrow_terminal(command: Cli) -> None:
    id = command("queue", "put", "orders", "a body that is long enough to need more than one line here").out.strip()
    shown = on_a_terminal("queue", "peek", "orders", columns=60)
    assert id in shown
    assert len(shown.splitlines()) > 2, "what has no room is the body"


def test_each_mistake_in_a_file_has_a_line(command: Cli, tmp_path: Path) -> None:
    (tmp_path / "keeper.yaml").write_text("polices: {}\nlisten:\n  htp: 1\n")
    told = command("serve", "--config", str(tmp_path / "keeper.yaml"), code=2).err.splitlines()
    assert ["keeper.yaml:1:1" in told[0], "keeper.yaml:3:3" in told[1], len(told)] == [True, True, 2]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked_before_a_space_is_dropped(command: Cli, answer: str) -> None:
    command("--space", "scratch", "set", "k", "1")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "spaces", "drop", "scratch"], stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(follower)
    os.write(leader, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=DEADLINE_S)
    os.close(leader)
    names = [each["name"] for each in command("spaces", "--json").json]
    if answer == "y":
        assert (process.returncode, out, names) == (0, b"scratch\n", [])
    else:
        assert (process.returncode, out, names) == (1, b"", ["scratch"])
