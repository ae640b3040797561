"""How a command is declared: an async function over a Session, its parameters as annotations, and a topic to put it in.

    @command(app)
    async def get(session: Session, key: Annotated[str, Argument(metavar="KEY", help="…")]) -> None:
        "Print a value."

A parameter is a word (`str`), a flag (`bool`) or several words (`list[str]`); commands make of words what they need. Beside its
own a command has --store, --space, --agent, --json and --token. These stand at the root too, so both `holdfast --json get a`
and `holdfast get a --json` are understood; the one nearer to the command wins.

Nothing is done with a declaration before it is needed: `calling.py` reads the one command that is called, `guidance.py` makes
the whole tree that typer shows and judges.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, get_args

from holdfast.cli import output
from holdfast.cli.session import Session

Work = Callable[..., Coroutine[Any, Any, None]]


class Ended(Exception):
    """The command has done its work and ends with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Declared:
    """What is said of a parameter: its names on the command line, and what its help says."""

    __slots__ = ("help", "metavar", "names", "show_default")

    def __init__(
        self, *names: str, help: str | None = None, metavar: str | None = None, show_default: bool = True
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = metavar
        self.show_default = show_default


class Option(Declared):
    """A parameter that has a name: --name VALUE, or --name alone where it is a flag."""


class Argument(Declared):
    """A parameter that has a place."""


Store = Annotated[
    str | None,
    Option(
        "--store",
        metavar="URL",
        help="The store: a file's path or a URL. Default: .holdfast/store.db in the project. [env: HOLDFAST_STORE]",
    ),
]
SpaceName = Annotated[
    str | None, Option("--space", metavar="NAME", help="The space. Default: default. [env: HOLDFAST_SPACE]")
]
Agent = Annotated[
    str | None, Option("--agent", metavar="NAME", help="On whose behalf to write. Default: cli. [env: HOLDFAST_AGENT]")
]
Token = Annotated[
    str | None,
    Option(
        "--token", metavar="TOKEN", help="What a keeper knows you by. Better in the environment. [env: HOLDFAST_TOKEN]"
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON, for programs; a stream has one document a line.")]

COMMON: Final[Mapping[str, tuple[Any, Any]]] = {
    "store": (Store, None),
    "space": (SpaceName, None),
    "agent": (Agent, None),
    "json": (Json, False),
    "token": (Token, None),
}
"""The options every command has, with what they are when nobody gives them."""


class Parameter:
    """One parameter of one command."""

    __slots__ = ("annotation", "declared", "default", "is_required", "kind", "name", "names")

    def __init__(self, name: str, annotation: Any, default: Any, *, is_required: bool = False) -> None:
        self.name = name
        self.annotation = annotation
        self.default = default
        self.is_required = is_required
        plain, self.declared = get_args(annotation)
        self.kind: Literal["word", "flag", "words"] = _KINDS[plain]
        self.names: tuple[str, ...] = self.declared.names or (f"--{name.replace('_', '-')}",)


_KINDS: Final[dict[Any, Any]] = {str: "word", str | None: "word", bool: "flag"} | dict.fromkeys(
    (list[str], list[str] | None), "words"
)

COMMON_PARAMETERS: Final = tuple(Parameter(name, *each) for name, each in COMMON.items())


class Command:
    """A function that a person calls by words."""

    def __init__(self, work: Work, *, dashes: bool = False, quick: bool = False, rest: bool = False) -> None:
        self.work = work
        self.dashes = dashes
        self.quick = quick
        self.rest = rest

    @cached_property
    def own(self) -> list[Parameter]:
        """Its parameters, but the session and the common ones."""
        empty = inspect.Parameter.empty
        found = list(inspect.signature(self.work, eval_str=True).parameters.values())[1:]
        return [Parameter(p.name, p.annotation, p.default, is_required=p.default is empty) for p in found]

    def run(self, session: Session, given: dict[str, Any]) -> None:
        """Do it. What is printed has left when this returns."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        factory = _quick_loop() if self.quick else None
        with output.piping(), asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self.work(session, **given))


class Topic:
    """Commands of one topic, or of one word: `holdfast task list`."""

    def __init__(self) -> None:
        self.alone: Command | None = None
        """What is done when none of them is named."""
        self.commands: dict[str, Command | Topic] = {}

    def add(self, topic: Topic, name: str) -> None:
        """Put a topic of its own under a word."""
        self.commands[name] = topic


def topic() -> Topic:
    """Where the commands of one topic are registered."""
    return Topic()


def command(
    topic: Topic, name: str | None = None, *, dashes: bool = False, quick: bool = False, rest: bool = False
) -> Callable[[Work], Work]:
    """Register a command. With `dashes` its arguments may be negative numbers; a `quick` one runs on uvloop, if it is there.

    With `rest` everything behind its first argument is an argument, as it is for `env` and `nice`.
    """

    def register(work: Work) -> Work:
        topic.commands[name or work.__name__] = Command(work, dashes=dashes, quick=quick, rest=rest)
        return work

    return register


def group(topic: Topic) -> Callable[[Work], Work]:
    """Register what a group of commands does when it is called without one of them."""

    def register(work: Work) -> Work:
        topic.alone = Command(work)
        return work

    return register


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
