"""Help, and what is wrong with a call: the whole command line as typer's, made of the same declarations.

Only what `calling.py` does not understand comes here, so it may take its time; still it builds just the topics it is asked for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from holdfast.cli import output
from holdfast.cli.app import TOPICS, find
from holdfast.cli.command import COMMON, Argument, Command, Topic
from holdfast.cli.session import Session
from holdfast.errors import InvalidInput

NUMBER: Final = re.compile(r"-\.?[0-9][0-9.eE+-]*")
_LOOKS: Final[dict[str, Any]] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


def root() -> Any:
    """The whole command line, as typer's."""
    app = typer.Typer(cls=Commands, **_LOOKS)
    app.callback(invoke_without_command=True)(_spelt(_holdfast, (*_common(), ("version", _Version, False))))
    return get_group(app)


def _holdfast(ctx: typer.Context, version: bool, **common: Any) -> None:
    """The shared state of multi-agent systems, from the command line.

    \b
    Example:
      holdfast set regime risk-on --ttl 1h
      holdfast get regime
      holdfast watch orders/ --json | jq .value

    The options below may also stand after the command. Exit codes: 0 done, 2 wrong call, 3 conflict, 4 not found,
    14 unavailable, 18 damaged, 74 done but not printed, 130 interrupted; docs/errors.md has them all.
    """
    ctx.obj = Session().refined(*(common[name] for name in COMMON))
    if version:
        from holdfast import __version__

        json = ctx.obj.json
        with output.piping():
            output.value({"version": __version__} if json else f"holdfast {__version__}", json)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        with output.piping():
            output.line(ctx.get_help())


_Version = Annotated[bool, typer.Option("--version", help="Print the version and end.")]


# --- declarations as typer has them ---


def _built(name: str, found: Command | Topic) -> Any:
    """A command, or a group with its commands, for typer."""
    app = typer.Typer(cls=WordGroup, **_LOOKS)
    if isinstance(found, Command):
        settings = {"ignore_unknown_options": True} if found.dashes else {}
        settings |= {"allow_interspersed_args": False} if found.rest else {}
        kind = DashCommand if found.dashes else WordCommand
        app.command(name, cls=kind, context_settings=settings)(_runner(found))
        return get_command(app)
    if found.alone is not None:
        app.callback(invoke_without_command=True)(_runner(found.alone))
    built: Any = get_group(app)
    built.name = name
    built.commands = {sub: _built(sub, each) for sub, each in found.commands.items()}
    return built


def _runner(command: Command) -> Callable[..., None]:
    """The function typer calls: the command's own parameters, then the common ones."""

    def run(ctx: typer.Context, **given: Any) -> None:
        session = (ctx.obj or Session()).refined(*(given.pop(name) for name in COMMON))
        ctx.obj = session
        if ctx.invoked_subcommand is None:
            command.run(session, given)

    run.__name__, run.__doc__ = command.work.__name__, command.work.__doc__
    own = [(each.name, _annotation(each.annotation), each.default) for each in command.own]
    return _spelt(run, (*own, *_common()))


def _spelt(run: Callable[..., None], parameters: Iterable[tuple[str, Any, Any]]) -> Callable[..., None]:
    """The function with a signature for typer to read."""
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    found = [context] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in parameters
    ]
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in found}
    return run


def _common() -> list[tuple[str, Any, Any]]:
    return [(name, _annotation(annotation), default) for name, (annotation, default) in COMMON.items()]


def _annotation(annotation: Any) -> Any:
    plain, declared = get_args(annotation)
    told = {"help": declared.help, "metavar": declared.metavar, "show_default": declared.show_default}
    kind = typer.Argument if isinstance(declared, Argument) else typer.Option
    return Annotated[plain, kind(*declared.names, **told)]


# --- what typer does otherwise here ---


class Words:
    """Leaves parameters as they are. Here all are text or flags, and newer versions of typer import pydantic to convert
    them, which would take longer than the command."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _as_words(params: Iterable[Any]) -> list[Any]:
    found = list(params)
    for param in found:
        param.get_runtime_param = Words
        if param.param_type_name == "argument":
            param.get_usage_pieces = partial(_usage, param)
            param.get_help_record = partial(_help, param)
    return found


def word(argument: Any) -> str:
    """How an argument stands in a call: KEY, [VALUE], KEY..."""
    name = f"{argument.metavar}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def _usage(argument: Any, ctx: Any) -> list[str]:
    return [word(argument)]


def _help(argument: Any, ctx: Any) -> tuple[str, str] | None:
    """An argument's line without its type: newer versions of typer write <str> behind the name."""
    record = type(argument).get_help_record(argument, ctx)
    return None if record is None else (argument.metavar, record[1])


class WordCommand(TyperCommand):
    """A command whose parameters are words."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_words(super().get_params(ctx))


class WordGroup(TyperGroup):
    """A group whose parameters are words."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_words(super().get_params(ctx))


class Commands(WordGroup):
    """All commands, each built when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in TOPICS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            found = find(cmd_name)
            if found is not None:
                self.commands[cmd_name] = _built(cmd_name, found)
            elif not cmd_name.startswith("-"):
                for name in self.list_commands(ctx):  # so that a similar one can be suggested
                    self.get_command(ctx, name)
        return self.commands.get(cmd_name)


class DashCommand(WordCommand):
    """A command whose arguments may be negative numbers; anything else that begins with a dash is still an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        literal = "--" in args
        rest: list[str] = super().parse_args(ctx, args)
        for param in self.params:
            if param.param_type_name == "argument" and not literal and param.name:
                value = ctx.params.get(param.name)
                for text in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(text, str) and len(text) > 1 and text[0] == "-" and not NUMBER.fullmatch(text):
                        raise InvalidInput(f"there is no option {text}; put -- before a value that begins with a dash")
        return rest
