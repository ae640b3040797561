"""What the command line says about itself, and how little it loads to do so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import TOPICS
from tests.cli.conftest import COMMAND, Cli

COMMANDS = [
    *([name] for names in TOPICS.values() for name in names),
    ["audit", "verify"],
    ["audit", "seal"],
    ["schema", "list"],
    ["schema", "show"],
    ["schema", "register"],
    ["schema", "validate"],
    ["schema", "migrate"],
    *(["doc", name] for name in ("show", "contribute", "replace", "history", "diff", "conflicts", "escalations")),
    *(["doc", name] for name in ("resolutions", "resolve")),
    *(["queue", name] for name in ("list", "put", "peek", "reserve", "ack", "release", "fail", "move", "delete")),
    *(["queue", name] for name in ("stats", "watch")),
    *(["dlq", name] for name in ("list", "retry", "clear")),
    *(["task", name] for name in ("list", "stop", "kill", "pause", "resume", "ping", "write", "retry")),
    *(["manager", name] for name in ("start", "list", "status", "stop")),
    *(["pipeline", name] for name in ("run", "list", "status", "cancel")),
    *(["workflow", name] for name in ("list", "show", "start", "signal", "pause", "resume", "cancel", "retry", "fork")),
    *(["workflow", name] for name in ("history", "diff", "archive", "archives", "restore", "cleanup")),
    *(["schedule", name] for name in ("add", "list", "remove", "pause", "resume")),
    ["spaces", "create"],
    ["spaces", "drop"],
    ["token", "create"],
    ["token", "list"],
    ["token", "revoke"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_teaches_with_an_example_and_knows_the_common_options(cli: Cli, words: list[str]) -> None:
    told = cli(*words, "--help").out
    assert f"holdfast {words[0]}" in told.split("Example:")[1]
    for option in ("--store", "--space", "--agent", "--json", "--token"):
        assert option in told
    for variable in ("HOLDFAST_STORE", "HOLDFAST_SPACE", "HOLDFAST_AGENT", "HOLDFAST_TOKEN"):
        assert variable in told


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_help_shows_types_of_python(cli: Cli, words: list[str]) -> None:
    usage, _, rest = cli(*words, "--help").out.partition("\n")
    assert not re.search(r"[{]|\[\[", usage)
    assert not re.search(r"<(str|int|bool|list|class)\b|\| None|list\[|NoneType", rest)


def test_the_help_lists_every_command_in_one_line_each(cli: Cli) -> None:
    told = cli("--help").out
    listed = re.findall(r"^  ([a-z]+) +(\S.*)$", told.split("Commands:")[1], re.MULTILINE)
    assert [name for name, _ in listed] == [name for names in TOPICS.values() for name in names]
    assert all(text.endswith(".") and not text.endswith("...") for _, text in listed)
    assert cli().out == told


def test_the_version_is_the_packages(cli: Cli) -> None:
    assert cli("--version").out == f"holdfast {holdfast.__version__}\n"
    assert cli("--version", "--json").json == {"version": holdfast.__version__}


NEVER = ("rich", "pydantic", "unittest", "email")
NOT_FOR_A_PLAIN_CALL = ("typer", "random", "tempfile", "shutil", "difflib", "uvloop", "redis", "asyncpg")


def loaded_by(words: list[str], names: tuple[str, ...], folder: Path) -> list[str]:
    code = (
        "import sys; from holdfast.cli import main; code = main(sys.argv[1:]); "
        f"print([name for name in {names!r} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=folder, check=True)
    return json.loads(done.stdout.splitlines()[-1].replace("'", '"'))  # type: ignore[no-any-return]


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_what_is_slow_to_load_is_not_loaded(folder: Path, words: list[str]) -> None:
    assert loaded_by(words, NEVER, folder) == []


@pytest.mark.parametrize(
    "words", [["get", "k"], ["set", "k", "1"], ["keys"], ["status"], ["run", "--", "true"]], ids=" ".join
)
def test_a_plain_call_loads_neither_typer_nor_what_only_others_need(cli: Cli, folder: Path, words: list[str]) -> None:
    cli("set", "k", "1")
    try:
        assert loaded_by(words, NEVER + NOT_FOR_A_PLAIN_CALL, folder) == []
    finally:
        if "run" in words:
            cli("manager", "stop", "--kill")


def test_the_command_is_installed(folder: Path) -> None:
    done = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout == f"holdfast {holdfast.__version__}\n"
