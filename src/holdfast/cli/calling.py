"""The short way from words to a command: what is plain is read here, all else is left to typer.

`read` follows the words to one command, whose topic alone is imported, and reads its options and arguments. Where it is not
sure, it says None, and `guidance.py` reads the same words with typer, which knows help, suggestions and every way to be wrong.
So this module never refuses anything, and a call that both understand must mean the same to both; a test compares them. To
import typer takes as long as everything else that a small command does.

Plain are `--name value`, `--name=value`, flags in full or as one letter, and arguments that begin with no dash, or stand
behind --.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.cli.app import find
from holdfast.cli.command import COMMON, COMMON_PARAMETERS, Argument, Command, Parameter, Topic
from holdfast.cli.session import Session


class Call:
    """A command, and what it is called with."""

    __slots__ = ("command", "given", "session")

    def __init__(self, command: Command, session: Session, given: dict[str, Any]) -> None:
        self.command = command
        self.session = session
        self.given = given

    def run(self) -> None:
        self.command.run(self.session, self.given)


def read(words: Sequence[str]) -> Call | None:
    """The call that these words are, or None where that is not plain."""
    session, found, rest = Session(), None, list(words)
    parameters: list[Parameter] = []
    while True:
        taken = _take(parameters, rest, found)
        if taken is None:
            return None
        given, rest = taken
        session = session.refined(*(given.pop(name) for name in COMMON))
        if isinstance(found, Command):
            return Call(found, session, given)
        if not rest:
            return Call(found.alone, session, given) if found is not None and found.alone is not None else None
        name = rest.pop(0)
        found = find(name) if found is None else found.commands.get(name)
        if found is None:
            return None
        called = found.alone if isinstance(found, Topic) else found
        parameters = [] if called is None else called.own


def _take(
    own: list[Parameter], words: list[str], found: Command | Topic | None
) -> tuple[dict[str, Any], list[str]] | None:
    """The values of parameters, and the words that are left: for a group those behind its options, the next command's."""
    is_group = not isinstance(found, Command)
    stops_early = not isinstance(found, Command) or found.rest
    parameters = [*own, *COMMON_PARAMETERS]
    arguments = [each for each in parameters if isinstance(each.declared, Argument)]
    options = {name: each for each in parameters if each not in arguments for name in each.names}
    given = {each.name: each.default for each in parameters}
    placed: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            if is_group:
                return None
            placed += left
        elif word[:1] != "-" or word == "-":
            placed.append(word)
            if stops_early:
                placed += left
        else:
            name, is_joined, value = word.partition("=")
            option = options.get(name)
            if option is None or (is_joined and (option.kind == "flag" or not name.startswith("--"))):
                return None
            if option.kind == "flag":
                given[option.name] = True
                continue
            if not is_joined:
                value = next(left, "-")
                if value[:1] == "-":
                    return None
            given[option.name] = [*(given[option.name] or ()), value] if option.kind == "words" else value
    if is_group:
        return None if arguments else (given, placed)
    return (given, []) if _place(arguments, placed, given) else None


def _place(arguments: list[Parameter], placed: list[str], given: dict[str, Any]) -> bool:
    """Give arguments their words; whether that is plain."""
    for argument in arguments:
        if argument.kind == "words":
            if argument is not arguments[-1] or (argument.is_required and not placed):
                return False
            given[argument.name] = list(placed) if placed else argument.default
            return True
        if placed:
            given[argument.name] = placed.pop(0)
        elif argument.is_required:
            return False
    return not placed
