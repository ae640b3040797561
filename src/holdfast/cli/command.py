"""How a command is made: an async function over a Session becomes a typer command with the common options.

    @command(app)
    async def get(session: Session, key: Key) -> None:
        "Print a value."

The function's own parameters come first in its --help, then --store, --space, --agent, --json and --token. These stand at the
root too, so both `holdfast --json get a` and `holdfast get a --json` are understood; the one nearer to the command wins.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.cli import output
from holdfast.cli.session import Session
from holdfast.errors import InvalidInput

Work = Callable[..., Coroutine[Any, Any, None]]

NUMBER: Final = re.compile(r"-\.?[0-9][0-9.eE+-]*")

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="The store: a file's path or a URL. Default: .holdfast/store.db in the project. [env: HOLDFAST_STORE]",
    ),
]
SpaceName = Annotated[
    str | None, typer.Option("--space", metavar="NAME", help="The space. Default: default. [env: HOLDFAST_SPACE]")
]
Agent = Annotated[
    str | None,
    typer.Option("--agent", metavar="NAME", help="On whose behalf to write. Default: cli. [env: HOLDFAST_AGENT]"),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", help="What a keeper knows you by. Better in the environment. [env: HOLDFAST_TOKEN]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; a stream has one document a line.")]

_COMMON: Final = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, annotation, default in (
        ("store", Store, None),
        ("space", SpaceName, None),
        ("agent", Agent, None),
        ("json", Json, False),
        ("token", Token, None),
    )
}


def topic() -> typer.Typer:
    """Where the commands of one topic are registered."""
    return typer.Typer(cls=WordGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def command(
    app: typer.Typer, name: str | None = None, *, dashes: bool = False, quick: bool = False, rest: bool = False
) -> Callable[[Work], Work]:
    """Register a command. With `dashes` its arguments may be negative numbers; a `quick` one runs on uvloop, if it is there.

    With `rest` everything behind its first argument is an argument, as it is for `env` and `nice`.
    """

    def register(work: Work) -> Work:
        settings = {"ignore_unknown_options": True} if dashes else {"allow_interspersed_args": False} if rest else {}
        app.command(name, cls=DashCommand if dashes else WordCommand, context_settings=settings)(_runner(work, quick))
        return work

    return register


def group(app: typer.Typer) -> Callable[[Work], Work]:
    """Register what a group of commands does when it is called without one of them."""

    def register(work: Work) -> Work:
        app.callback(invoke_without_command=True)(_runner(work))
        return work

    return register


def _runner(work: Work, quick: bool = False) -> Callable[..., None]:
    """The function typer sees: the work's own parameters but the session, and the common ones."""
    own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]

    def run(ctx: typer.Context, **given: Any) -> None:
        common = [given.pop(name) for name in _COMMON]
        session = (ctx.obj or Session()).refined(*common)
        ctx.obj = session
        if ctx.invoked_subcommand is None:
            with output.piping(), asyncio.Runner(loop_factory=_quick_loop() if quick else None) as runner:
                runner.run(work(session, **given))

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *own, *_COMMON.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = work.__name__, work.__doc__
    return run


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


class Words:
    """Leaves parameters as they are. Here all are text or flags, and newer versions of typer import pydantic to convert
    them, which would take longer than the command."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _as_words(params: Iterable[Any]) -> list[Any]:
    found = list(params)
    for param in found:
        param.get_runtime_param = Words
    return found


class WordCommand(TyperCommand):
    """A command whose parameters are words."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_words(super().get_params(ctx))


class WordGroup(TyperGroup):
    """A group whose parameters are words."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_words(super().get_params(ctx))


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
