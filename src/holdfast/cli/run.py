"""run: a command or a function as a task, begun, followed, and its exit code passed on.

Nothing is between a user and the task but the store: what is printed is read from it, what is typed is written to it, and Ctrl-C is a
STOP like anybody's. So a terminal that closes, or a `run` that is killed, leaves the task running; `status`, `logs` and `task stop` find it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from holdfast.cli import output, values
from holdfast.cli.command import Argument, Ended, Option, command, topic
from holdfast.cli.session import Session, file_of
from holdfast.cli.tasks import readable, tell_output
from holdfast.engines.registry import split_url
from holdfast.errors import Conflict, Error, InvalidInput, NotFound, TaskFailed, TaskPending
from holdfast.layers.task_control import WRITE_BYTES_MAX, Command
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import TaskState
from holdfast.layers.tid import short_tid
from holdfast.space import Space
from holdfast.store import Store

app = topic()

TIMED_OUT: Final = 124
"""The exit code of a task that took too long."""
PIECES_MAX: Final = 16
"""Of stdin that are read and not yet written to the task."""

Word = Annotated[
    list[str] | None,
    Argument(metavar="COMMAND", help="The program and its arguments, behind --.", show_default=False),
]


@command(app, rest=True)
async def run(
    session: Session,
    words: Word = None,
    function: Annotated[
        str | None, Option(metavar="MODULE:NAME", help="Call this function instead of a command.")
    ] = None,
    arg: Annotated[
        list[str] | None, Option(metavar="VALUE", help="An argument of the function: JSON, or text. Repeatable.")
    ] = None,
    kw: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A keyword argument of the function. Repeatable.")
    ] = None,
    spec: Annotated[str | None, Option(metavar="FILE", help="The task's spec, as JSON; options override it.")] = None,
    input: Annotated[str | None, Option(metavar="JSON", help="Its message, instead of what is piped in.")] = None,
    timeout: Annotated[str | None, Option(metavar="TIME", help="How long it may run.")] = None,  # noqa: ASYNC109
    memory: Annotated[str | None, Option(metavar="MB", help="What all its processes may use.")] = None,
    cpu: Annotated[str | None, Option(metavar="PERCENT", help="250 is two and a half cores.")] = None,
    fds: Annotated[str | None, Option(metavar="NUMBER", help="Files it may have open.")] = None,
    env: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A variable; NAME alone passes yours on. Repeatable.")
    ] = None,
    folder: Annotated[
        str | None,
        Option("--cwd", metavar="FOLDER", help="Where it runs. Default: here, if the store is a file."),
    ] = None,
    name: Annotated[str | None, Option(metavar="TEXT", help="What people call it.")] = None,
    tag: Annotated[list[str] | None, Option(metavar="TEXT", help="A tag. Repeatable.")] = None,
    priority: Annotated[str | None, Option(metavar="NUMBER", help="-500 to 499; higher comes first.")] = None,
    attempts: Annotated[
        str | None, Option(metavar="NUMBER", help="Begin it again when it fails, so often in all.")
    ] = None,
    stream: Annotated[bool, Option("--stream", help="Keep its output as it comes, also when detached.")] = False,
    interactive: Annotated[bool, Option("--interactive", "-i", help="Type into it.")] = False,
    detach: Annotated[bool, Option("--detach", "-d", help="Print its tid and end; it goes on.")] = False,
) -> None:
    """Run a command or a function as a task; pass its exit code on.

    124 is a timeout; 126 and 127 cannot be run, as shells have it; 25 means that it ended without a code of its own. A manager is
    started if there is none. What is piped in is the command's stdin, or, as JSON, the message of a function or of a --spec.
    Ctrl-C stops the task, twice kills it; a terminal that closes leaves it running, as --detach does.

    \b
    Example:
      holdfast run -- python train.py --epochs 3
      holdfast run --function pkg.mod:func --arg 3 --kw name=x --timeout 60 --memory 512
      echo '{"x": 1}' | holdfast run --spec task.json --json
      holdfast run --detach --name nightly --tag etl -- ./nightly.sh
    """
    fields: dict[str, Any] = values.json_file(spec) if spec is not None else {}
    given = {
        "command": words or None,
        "function": function,
        "args": None if arg is None else [values.parsed(each) for each in arg],
        "kwargs": None if kw is None else _pairs(kw, "--kw"),
        "timeout": timeout,
        "name": name,
        "tags": tag,
        "priority": None if priority is None else values.whole_number(priority),
        "working_dir": folder,
        "stream_output": stream or None,
        "interactive": interactive or None,
    }
    limits = {"memory_mb": memory, "cpu_percent": cpu, "max_fds": fds}
    fields = fields | {name: value for name, value in given.items() if value is not None}
    if env is not None:
        fields["env"] = fields.get("env", {}) | _environment(env)
    if any(value is not None for value in limits.values()):
        told = {name: _number(value, name) for name, value in limits.items() if value is not None}
        fields["limits"] = fields.get("limits", {}) | told
    if attempts is not None:
        fields["reserved_policy_on_error"] = "requeue"
        fields["retry"] = fields.get("retry", {}) | {"attempts": values.whole_number(attempts)}
    if spec is None and not words and function is None:
        raise InvalidInput("say what to run: holdfast run -- COMMAND, or --function module:name, or --spec FILE")
    if file_of(session.url) is not None:
        fields.setdefault("working_dir", os.getcwd())
    pipes = _stdin_pipes()
    message = None if input is None else values.parsed(input)
    if input is None and pipes and (spec is not None or "function" in fields):
        message, pipes = _message(), False
    pumped = "command" in fields and not detach and input is None and message is None and (pipes or interactive)
    if pumped:
        fields["interactive"] = True
    if not detach and not session.json:
        fields["stream_output"] = True
    code = await _run(session, TaskSpec.of(fields), message, pumped=pumped, detach=detach)
    if code:
        raise Ended(code)


async def _run(session: Session, spec: TaskSpec, message: Any, *, pumped: bool, detach: bool) -> int:
    async with session.store(create=True) as store:
        space = await session.view(store)
        await check_reachable(store, space)
        handle = await space.tasks.submit(spec, message)
        async with _signals(handle, session.json, on=not detach) as interrupted:
            await see_to_a_manager(store, space, session.json)
            if detach:
                output.value({"tid": handle.tid} if session.json else handle.tid, session.json)
                return 0
            pump = asyncio.ensure_future(_pump(handle)) if pumped else None
            try:
                if not session.json:
                    await tell_output(handle, output.Stream(raw=True), follow=True)
                state = await handle.wait()
            except OSError:  # whoever read our output has gone, as a shell's pipe does: nobody wants more of it
                await _ask(handle, "STOP", session.json)
                raise
            finally:
                if pump is not None:
                    pump.cancel()
                    await asyncio.gather(pump, return_exceptions=True)
        await _tell(handle, state, session.json)
        return interrupted[0] if interrupted and state.status != "completed" else exit_code(state)


async def check_reachable(store: Store, space: Space) -> None:
    """Refuse a space that no other process can see, and so no manager."""
    if split_url(store.url)[0] == "memory":
        raise InvalidInput(
            "a memory: store is this command's alone, and no manager can reach it; use a file or a server"
        )
    if store.identity is None:
        for info in await store.engine.spaces(space.name):
            if info.durability == "volatile":
                raise InvalidInput(
                    f"space {space.name!r} is volatile: no manager can see it; use another space for tasks"
                )


async def see_to_a_manager(store: Store, space: Space, json: bool) -> None:
    """Start a manager on this host if there is none. An agent of a keeper cannot be one, and relies on others."""
    from holdfast.manager import ensure_manager

    if store.identity is not None and store.identity.role == "agent":
        if not await space.tasks.managers():
            output.note("no manager serves this space; the task begins when an orchestrator starts one", json)
        return
    await ensure_manager(space)


async def _tell(handle: TaskHandle, state: TaskState, json: bool) -> None:
    """What a task gave, and, where its exit code does not say it, what went wrong."""
    given = await handle.result(wait=0) if state.result is not None and state.status == "completed" else None
    if json:
        told = output.plain(state) if state.result is None else output.plain(state) | {"result": given}
        if state.output is None or state.output.spilled is None:  # what is in a blob, holdfast logs gives
            told["output"] = readable(await handle.output())
        output.json_line(told)
        return
    if state.result is not None and given is not None:
        output.json_line(given)
    if state.status != "completed" and (state.error is not None or state.status != "failed" or not state.return_code):
        why = state.reason or state.status
        if state.error is not None:
            why = f"{state.error.type}: {state.error.message}"
            if state.error.traceback and "\n" in state.error.traceback.strip():
                sys.stderr.write(output.for_people(state.error.traceback.rstrip()) + "\n")
        output.note(f"task {short_tid(state.tid)} {_ways(state)}: {why}", json)


def _ways(state: TaskState) -> str:
    ways = {"timeout": "took too long", "cancelled": "was stopped", "killed": "was killed"}
    return ways.get(state.status, state.status)


def exit_code(state: TaskState) -> int:
    """What a command that waited for a task ends with: the task's own code."""
    if state.status == "completed":
        return 0
    if state.status == "timeout":
        return TIMED_OUT
    return state.return_code or TaskFailed.exit_code


# --- Ctrl-C ---


@asynccontextmanager
async def _signals(handle: TaskHandle, json: bool, *, on: bool) -> AsyncIterator[list[int]]:
    """As long as this lasts Ctrl-C stops the task, and the second time kills it. Gives the exit code for that."""
    loop, codes = asyncio.get_running_loop(), list[int]()
    asked: set[asyncio.Task[None]] = set()

    def heard(number: int) -> None:
        codes.append(128 + number)
        if len(codes) == 1:
            output.note(f"stopping task {short_tid(handle.tid)}; once more kills it", json)
        task = loop.create_task(_ask(handle, "STOP" if len(codes) == 1 else "KILL", json))
        asked.add(task)
        task.add_done_callback(asked.discard)

    numbers = (signal.SIGINT, signal.SIGTERM) if on and threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield codes
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
        if asked:
            await asyncio.gather(*asked)


async def _ask(handle: TaskHandle, what: Command, json: bool) -> None:
    """Give a command, and do not wait for its answer."""
    try:
        await handle.control(what, wait=0)
    except (Conflict, TaskPending, NotFound):
        return  # it has ended, or it was told
    except Error as exc:
        output.note(f"task {handle.tid} could not be told to {what}: {exc}", json)


# --- stdin ---


def _stdin_pipes() -> bool:
    """Whether something is piped in. A device that is no terminal, such as /dev/null, is nothing."""
    if sys.stdin is None or sys.stdin.isatty():
        return False
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # no file of the system: a test's
        return True


def _message() -> Any:
    """What is piped in, as JSON; nothing is no message."""
    data = sys.stdin.buffer.read(values.STDIN_BYTES_MAX + 1)
    if len(data) > values.STDIN_BYTES_MAX:
        raise InvalidInput(
            f"the piped message has more than {values.STDIN_BYTES_MAX:,} bytes; send a blob's name instead"
        )
    if not data.strip():
        return None
    try:
        return values.strict(data)
    except ValueError as exc:
        raise InvalidInput(f"what is piped in is the task's message, and no JSON: {exc}") from None


async def _pump(handle: TaskHandle) -> None:
    """Write what is piped or typed in to the task, until either ends."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes](PIECES_MAX)

    def read() -> None:
        # Not through sys.stdin, which would be locked when the interpreter ends while this waits.
        while True:
            try:
                data = os.read(number, WRITE_BYTES_MAX)
            except OSError:
                data = b""
            try:
                asyncio.run_coroutine_threadsafe(queue.put(data), loop).result()
            except (RuntimeError, asyncio.CancelledError):
                return
            if not data:
                return

    try:
        number = sys.stdin.fileno()
    except (OSError, ValueError):
        whole = sys.stdin.buffer.read()
        for start in range(0, len(whole), WRITE_BYTES_MAX):
            queue.put_nowait(whole[start : start + WRITE_BYTES_MAX])
        queue.put_nowait(b"")
    else:
        threading.Thread(target=read, daemon=True, name="holdfast-stdin").start()
    while True:
        data = await queue.get()
        try:
            answer = await handle.write(data, eof=not data, wait=None)
        except (Conflict, NotFound):
            return  # it ended without reading all of it
        if not data or answer.status != "ok":
            return


# --- options ---


def _pairs(texts: list[str], option: str) -> dict[str, Any]:
    pairs = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not name or not is_given:
            raise InvalidInput(f"{option} reads NAME=VALUE, not {text!r:.60}")
        pairs[name] = values.parsed(value)
    return pairs


def _environment(texts: list[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not is_given and name not in os.environ:
            raise InvalidInput(f"--env {name}: there is no such variable here to pass on; write NAME=VALUE")
        variables[name] = value if is_given else os.environ[name]
    return variables


def _number(text: str, name: str) -> float | int:
    try:
        number = float(text)
    except ValueError:
        raise InvalidInput(f"limits.{name} must be a number, not {text!r:.60}") from None
    return int(number) if number.is_integer() else number
