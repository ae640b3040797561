"""Running workflows from the command line: worker.

A module's workflows are whatever in it was decorated with @workflow. What happens is told on stderr, by the library's own log: a line
each, or with --json a document each.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli import output
from holdfast.cli.command import Argument, Option, command, topic
from holdfast.cli.session import Session
from holdfast.cli.values import whole_number
from holdfast.clock import as_datetime
from holdfast.errors import InvalidInput

if TYPE_CHECKING:
    from holdfast.layers.workflows.definitions import Definition

app = topic()


@command(app, quick=True)
async def worker(
    session: Session,
    modules: Annotated[
        list[str],
        Argument(metavar="MODULE", help="A Python module with workflows, as in import.", show_default=False),
    ],
    concurrency: Annotated[str, Option(metavar="NUMBER", help="How many executions at a time.")] = "50",
    only: Annotated[list[str] | None, Option(metavar="NAME", help="Only this workflow; repeat it for more.")] = None,
    queue: Annotated[
        list[str] | None, Option(metavar="QUEUE", help="Do the steps sent to this queue too; repeat it for more.")
    ] = None,
    steps_only: Annotated[bool, Option("--steps-only", help="Do steps of queues, and run no executions.")] = False,
    lease: Annotated[
        str | None, Option(metavar="TIME", help="How soon another takes over when it dies. Default: 10s.")
    ] = None,
) -> None:
    """Run the workflows of Python modules.

    It fires their schedules too. Any number of workers may run, on any machine that reaches the store. Ctrl-C or SIGTERM hands over at once what it runs; one that dies is followed after its lease. A second signal ends it without that.

    \b
    Example:
      holdfast worker myapp.flows --concurrency 50
      holdfast worker myapp.flows myapp.reports --only research --json
      holdfast worker myapp.flows --queue gpu --steps-only
    """
    found = workflows_in(modules, only or [])
    with _logging_to_stderr(session.json):
        async with session.space(create=True, background=True) as space:
            number = whole_number(concurrency)
            made = space.workflows.worker(
                found, concurrency=number, lease=lease, queues=queue or (), steps_only=steps_only
            )
            loop, stopped = asyncio.get_running_loop(), asyncio.Event()

            def stop() -> None:
                for each in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(each)  # the next one is obeyed at once
                stopped.set()

            for each in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(each, stop)
            async with made:
                _tell(session, space.name, found, made.concurrency)
                waits: list[asyncio.Task[Any]] = [loop.create_task(stopped.wait()), loop.create_task(made.finished())]
                done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in left:
                    wait.cancel()
                for wait in done:
                    wait.result()
    if session.json:
        output.json_line({"event": "stopped"})
    else:
        output.line("Handed over, and stopped.")


def workflows_in(modules: list[str], only: list[str]) -> list[Definition]:
    """Every workflow of these modules, each once; of those, the ones that are named."""
    from holdfast.layers.workflows.definitions import DEFINITION, Definition

    if "" not in sys.path:
        sys.path.insert(0, "")
    found: dict[str, Definition] = {}
    for name in modules:
        if name.endswith(".py"):
            raise InvalidInput(f"{name!r} is a file; name the module as import does: {_module_in(name)!r}")
        mine = [vars(each).get(DEFINITION) for each in vars(_imported(name)).values() if hasattr(each, "__dict__")]
        made = [each for each in mine if isinstance(each, Definition)]
        if not made:
            raise InvalidInput(f"module {name!r} has no workflows; decorate a function or a class in it with @workflow")
        for each in made:
            if found.setdefault(each.name, each) is not each:
                raise InvalidInput(
                    f"two workflows are named {each.name!r}, one of them in {name!r}; give one another name"
                )
    if unknown := sorted(set(only) - found.keys()):
        raise InvalidInput(f"there is no workflow {unknown[0]!r} in {', '.join(modules)}; there are {', '.join(found)}")
    return [each for name, each in found.items() if not only or name in only]


def _module_in(file: str) -> str:
    return file.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise InvalidInput(
                f"there is no module {name!r} to import from here; give it as in `import {name}`, without .py, from the folder it is in"
            ) from exc
        raise InvalidInput(f"module {name!r} cannot be imported: {exc}") from exc
    except Exception as exc:
        raise InvalidInput(
            f"module {name!r} cannot be imported: {type(exc).__name__}: {exc} (HOLDFAST_DEBUG=1 shows where)"
        ) from exc


def _tell(session: Session, space: str, found: list[Definition], concurrency: int) -> None:
    """What is served."""
    if session.json:
        served = [{"workflow": each.name, "version": each.version} for each in found]
        output.json_line({"event": "serving", "space": space, "workflows": served, "concurrency": concurrency})
    else:
        names = ", ".join(f"{output.shown(each.name)} {each.version}" for each in found)
        output.line(f"Serving {names} in space {space}, up to {concurrency} at a time. Ctrl-C hands over and stops.")
    output.flush()


class _Lines(logging.Formatter):
    """A line of the log, for people or for programs."""

    def __init__(self, json: bool) -> None:
        super().__init__()
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        at = output.moment(as_datetime(int(record.created * 1000))) or ""
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {record.exc_info[1]!r}"
        if self._json:
            told = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": message}
            return output.as_json(told)
        return f"{at}  {record.levelname.lower():<7}  {output.shown(message)}"


@contextlib.contextmanager
def _logging_to_stderr(json: bool) -> Iterator[None]:
    logger = logging.getLogger("holdfast")
    before = logger.handlers[:], logger.level, logger.propagate
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(json))
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers[:], level, logger.propagate = before
        logger.setLevel(level)
