"""A forked process becomes the target: it executes the command, or finds the function and calls it.

It has a session and a group of its own, the default signals, the descriptors 0, 1 and 2 and no others (a function also the
pipe for its outcome, which is closed in programs it starts), and dies with its warden. What fails before the command runs is
told through `trouble`, a pipe that closes when the program is executed. What fails in finding a function is its outcome,
because it takes running the author's code: the module is imported.

A function's outcome is JSON, or the type, message and traceback of its exception, each of bounded length. An `async def` is
run with `asyncio.run`. Exit codes: 0, 1 for an exception, 126 and 127 for what cannot be called or found, what `sys.exit`
says.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import gc
import importlib
import inspect
import io
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

from holdfast.codec import decode, encode
from holdfast.errors import AccessDenied, Error, InvalidInput, NotRunnable, TargetMissing
from holdfast.processes.kernel import Slot, die_with_parent
from holdfast.processes.messages import FAILURE_CHARACTERS_MAX, Failure, Outcome, Refused, Work, pack
from holdfast.processes.orders import MARKER_VARIABLE, is_below
from holdfast.processes.titles import show

RESULT_BYTES_MAX: Final = 60 * 1024 * 1024
"""The largest JSON a function may return; more belongs into a file or a blob."""

_RESET: Final = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT),
    *(signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)
"""Those that a warden handles, and those that a shell ignores for what it starts in the background."""
_PYTHONS_OWN: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by Python; programs expect the default."""


def become(work: Work, streams: tuple[int, int, int], outcome: int, trouble: int, warden: int, slot: Slot) -> NoReturn:
    """Be the target of this work. Never returns: the caller's frames are the warden's."""
    refused = None
    try:
        die_with_parent()
        if os.getppid() != warden:
            os._exit(128 + signal.SIGKILL)
        _leave(work, streams, outcome, trouble, slot)
        try:
            os.chdir(work.cwd or ".")
        except OSError as exc:
            refused = Refused(False, f"the working directory {work.cwd!r} cannot be entered: {exc.strerror}")
        if refused is None and work.argv is not None:
            try:
                os.execvpe(work.argv[0], work.argv, work.env)  # noqa: S606 - no shell is the point
            except OSError as exc:
                refused = _refusal(work, exc)
    except BaseException as exc:
        refused = Refused(False, f"the target could not be started: {exc!r}"[:FAILURE_CHARACTERS_MAX])
    if refused is not None:
        os.write(trouble, pack(refused))
        os._exit(127 if refused.missing else 126)
    os.close(trouble)
    _perform(work, outcome)


def _leave(work: Work, streams: tuple[int, int, int], outcome: int, trouble: int, slot: Slot) -> None:
    """Leave everything that is the warden's behind."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd, inheritable=True)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (outcome, trouble):
            with contextlib.suppress(OSError):  # the one that read the folder is closed already
                os.close(fd)
    if work.argv is not None:
        for number in _PYTHONS_OWN:
            signal.signal(number, signal.SIG_DFL)
    else:
        slot.write(f"{MARKER_VARIABLE}={work.marker}")


def _refusal(work: Work, exc: OSError) -> Refused:
    command = "" if work.argv is None else work.argv[0]
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return Refused(True, f"there is no command {command!r}, or the program that should interpret it is missing")
    return Refused(False, f"the command {command!r} cannot be executed: {exc.strerror}")


def _perform(work: Work, pipe: int) -> NoReturn:
    """Call the function and tell what it came to."""
    code = 1
    outcome = Outcome()
    try:
        _settle_in(work)
        show(work.short, "running", work.name or (work.function or ""))
        function = find(work.function or "", work.modules)
        args, kwargs = decode(work.parameters, tuple[list[Any], dict[str, Any]])
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        encoded = encode(value)
        if len(encoded) > RESULT_BYTES_MAX:
            raise InvalidInput(
                f"the result has {len(encoded):,} bytes of JSON; at most {RESULT_BYTES_MAX:,} are allowed: "
                "print it, or write it to a file and return where it is"
            )
        outcome, code = Outcome(value=encoded), 0
    except SystemExit as exc:
        code = _exit_code(exc)
    except BaseException as exc:
        outcome = Outcome(failure=failure_of(exc))
        code = exc.exit_code if isinstance(exc, NotRunnable) else 126 if isinstance(exc, AccessDenied) else 1
    _tell(pipe, outcome)
    _end(code)


def _settle_in(work: Work) -> None:
    gc.enable()
    os.environ.clear()
    os.environ.update(work.env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [work.function or ""]
    if work.modules is None:
        sys.path.insert(0, os.getcwd())
    # The interpreter's own are of the zygote's descriptors; these know that they are pipes.
    sys.stdin = sys.__stdin__ = _text(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "w", "backslashreplace")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "w", "backslashreplace")  # type: ignore[misc]


def _text(fd: int, mode: Literal["r", "w"], errors: str) -> io.TextIOWrapper:
    return open(fd, mode, buffering=1, encoding="utf-8", errors=errors, closefd=False)


def find(name: str, modules: frozenset[str] | None = None) -> Callable[..., Any]:
    """The callable of this name. The path after the colon goes through classes, never through another module."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
            raise TargetMissing(f"there is no module {exc.name!r}, which should have {name!r}") from None
        raise
    for part in path.split("."):
        if part.startswith("_"):
            raise NotRunnable(f"{name!r} is private")
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetMissing(f"there is no {part!r} in {module!r}, which should have {name!r}") from None
        if isinstance(found, types.ModuleType):
            raise NotRunnable(f"{name!r} goes through another module; name the function by its own")
    home = getattr(found, "__module__", None)
    if not callable(found):
        raise NotRunnable(f"{name!r} is a {type(found).__name__}, and cannot be called")
    if home == "builtins" or getattr(found, "__name__", "") == "<lambda>":
        raise NotRunnable(f"{name!r} is a lambda or Python's own; name a function with `def`")
    if modules is not None and not is_below(home if isinstance(home, str) else module, modules):
        raise AccessDenied(f"{name!r} is defined in {home!r}, of which no function is allowed here")
    return found  # type: ignore[no-any-return]


def failure_of(exc: BaseException) -> Failure:
    """An exception in bounded text; the frames of this module are of no use to its author."""
    shown = exc.__traceback__
    while shown is not None and shown.tb_frame.f_globals.get("__name__") == __name__:
        shown = shown.tb_next
    try:
        text = "".join(traceback.format_exception(type(exc), exc, shown))
        message = str(exc)
    except BaseException as other:
        text = message = f"the exception could not be shown: {type(other).__name__}"
    name = type(exc).__qualname__ if isinstance(exc, Error) else f"{type(exc).__module__}.{type(exc).__qualname__}"
    return Failure(name.removeprefix("builtins."), _cut(message), _cut(text))


def _cut(text: str) -> str:
    """The beginning and the end of a long text; lone surrogates cannot be sent."""
    text = text.encode("utf-8", "backslashreplace").decode()
    half = FAILURE_CHARACTERS_MAX // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n…\n{text[-half:]}"


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{exc.code}\n")
    return 1


def _tell(pipe: int, outcome: Outcome) -> None:
    left = memoryview(pack(outcome))
    try:
        while left:
            left = left[os.write(pipe, left) :]
        os.close(pipe)
    except OSError:
        return  # closed by the function itself, or nobody listens any more


def _end(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, run what asked to be run at the end, write what is buffered."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
