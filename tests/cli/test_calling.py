"""Words that are plain mean the same to the short way as to typer, and what is not plain is left to typer."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from holdfast.cli.app import TOPICS, find
from holdfast.cli.calling import read
from holdfast.cli.command import Argument, Command, Parameter, Topic
from holdfast.cli.guidance import root
from holdfast.cli.session import Session

CALLS_PER_COMMAND = 16
VALUES = ["a", "b c", "", "5", "x=y", "1h", "-", "é"]

Called = tuple[Session, dict[str, Any]]


def every_command() -> list[tuple[list[str], Command]]:
    found: list[tuple[list[str], Command]] = []

    def walk(words: list[str], each: Command | Topic | None) -> None:
        if isinstance(each, Command):
            found.append((words, each))
        elif each is not None:
            if each.alone is not None:
                found.append((words, each.alone))
            for name, sub in each.commands.items():
                walk([*words, name], sub)

    for names in TOPICS.values():
        for name in names:
            walk([name], find(name))
    return found


@cache
def whole() -> Any:
    return root()


def as_typer_reads(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Called | str:
    """What a command would be called with, or what is wrong."""
    called: list[Called] = []
    monkeypatch.setattr(Command, "run", lambda self, session, given: called.append((session, given)))
    try:
        whole().main(args=list(words), prog_name="holdfast", standalone_mode=False)
    except Exception as exc:
        return str(exc) or type(exc).__name__
    return called[0] if called else "help"


def invented(chance: random.Random, words: list[str], command: Command) -> list[str]:
    """A call of the command: mostly a right one."""
    parts: list[list[str]] = []
    placed: list[str] = []
    for parameter in command.own:
        for _ in range(chance.choice([1, 1, 2]) if parameter.kind == "words" else 1):
            if isinstance(parameter.declared, Argument):
                placed += [chance.choice(VALUES)] if chance.random() < 0.9 else []
            elif chance.random() < 0.3:
                parts.append(option(chance, parameter))
    if chance.random() < 0.5:
        parts.append(chance.choice([["--json"], ["--space", "desk"], ["--agent=me"], ["--token", ""]]))
    if chance.random() < 0.1:
        parts.append([chance.choice(["--nothing", "-3", "-zz", "--json=1", "--space"])])
    chance.shuffle(parts)
    options = [word for part in parts for word in part]
    behind = [*options, "--", *placed] if chance.random() < 0.3 else [*placed, *options]
    if chance.random() < 0.3:
        behind = [*options, *placed]
    return [*(["--json"] if chance.random() < 0.2 else []), *words, *behind]


def option(chance: random.Random, parameter: Parameter) -> list[str]:
    name = chance.choice(parameter.names)
    if parameter.kind == "flag":
        return [name]
    value = chance.choice(VALUES)
    return [f"{name}={value}"] if chance.random() < 0.3 else [name, value]


@pytest.mark.parametrize(("words", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in every_command()])
def test_a_call_that_is_plain_means_the_same_to_both(
    words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, plain = random.Random(" ".join(words)), 0
    for _ in range(CALLS_PER_COMMAND):
        given = invented(chance, words, command)
        call = read(given)
        if call is not None:
            plain += 1
            assert (call.session, call.given) == as_typer_reads(given, monkeypatch), given
    assert plain > CALLS_PER_COMMAND / 4 or words == ["audit"]  # a group with an argument is typer's


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["status", "--help"],
        ["--version"],
        ["stauts"],
        ["get"],
        ["get", "a", "b"],
        ["task", "stap"],
        ["increment", "a", "-3"],
        ["run", "--timeout"],
        ["task", "list", "-n", "-1"],
    ],
    ids=" ".join,
)
def test_what_is_not_plain_is_left_to_typer(words: list[str]) -> None:
    assert read(words) is None


def test_the_calls_that_are_made_most_are_plain() -> None:
    for words in ("status", "status 5678901234 --json", "run -- true", "run --timeout 5s -d -- a -b -- c", "get a"):
        assert read(words.split()) is not None, words
    call = read(["run", "--env", "A=b", "--env", "C=d", "python", "-c", "--", "pass"])
    assert call is not None
    assert (call.given["env"], call.given["words"]) == (["A=b", "C=d"], ["python", "-c", "--", "pass"])
