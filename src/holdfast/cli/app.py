"""The root of the command line: its options, and which topic holds which command.

A topic's module is imported, and its commands are built, when one of them is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.main import get_group

from holdfast.cli import output
from holdfast.cli.command import Agent, Json, SpaceName, Store, Token, WordGroup
from holdfast.cli.session import Session

TOPICS: Final = {
    "holdfast.cli.records": ("get", "entry", "set", "delete", "increment", "keys"),
    "holdfast.cli.collections": ("append", "list", "add", "remove", "members"),
    "holdfast.cli.feed": ("watch",),
    "holdfast.cli.audit": ("audit",),
    "holdfast.cli.locks": ("locks",),
    "holdfast.cli.schemas": ("schema",),
    "holdfast.cli.documents": ("doc",),
    "holdfast.cli.correlations": ("correlation",),
    "holdfast.cli.queues": ("queue", "dlq"),
    "holdfast.cli.run": ("run",),
    "holdfast.cli.tasks": ("status", "result", "logs", "task"),
    "holdfast.cli.managers": ("manager",),
    "holdfast.cli.pipelines": ("pipeline",),
    "holdfast.cli.workflows": ("workflow",),
    "holdfast.cli.schedules": ("schedule",),
    "holdfast.cli.worker": ("worker",),
    "holdfast.cli.spaces": ("spaces",),
    "holdfast.cli.serve": ("serve",),
    "holdfast.cli.tokens": ("token",),
    "holdfast.cli.moving": ("export", "import", "copy", "backup"),
    "holdfast.cli.care": ("doctor", "tidy"),
}


class Commands(WordGroup):
    """All commands, each built when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in TOPICS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for module, names in TOPICS.items():
            if cmd_name in names and cmd_name not in self.commands:
                self.commands.update(get_group(import_module(module).app).commands)
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            for name in self.list_commands(ctx):  # so that a similar one can be suggested
                if name not in self.commands:
                    self.get_command(ctx, name)
        return self.commands.get(cmd_name)


app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def holdfast(
    ctx: typer.Context,
    store: Store = None,
    space: SpaceName = None,
    agent: Agent = None,
    json: Json = False,
    token: Token = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """The shared state of multi-agent systems, from the command line.

    \b
    Example:
      holdfast set regime risk-on --ttl 1h
      holdfast get regime
      holdfast watch orders/ --json | jq .value

    The options below may also stand after the command. Exit codes: 0 done, 2 wrong call, 3 conflict, 4 not found,
    14 unavailable, 18 damaged, 130 interrupted; docs/errors.md has them all.
    """
    ctx.obj = Session(store, space, agent, json, token)
    if version:
        from holdfast import __version__

        with output.piping():
            output.value({"version": __version__} if json else f"holdfast {__version__}", json)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        with output.piping():
            output.line(ctx.get_help())


def root() -> Any:
    """The command that `main` runs."""
    return get_group(app)
