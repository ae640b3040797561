"""Everything that is printed: values, lines, tables, errors.

Text that agents wrote is shown, never obeyed: in lines for people, characters that a terminal would act on (and line
ends) are escaped. What is piped is exact. JSON escapes the same characters, which changes its look and not its meaning.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.errors import Conflict, Error, InvalidInput, RateLimitExceeded, Unavailable

SHOWN_MAX: Final = 200
"""Characters of a value that a line for people shows."""


OUTPUT_FAILED: Final = 74
"""What a command ends with whose output found no place; sysexits.h knows it as EX_IOERR."""


class PipeClosed(Exception):
    """Whoever read our output has gone."""


class OutputFailed(OSError):
    """What was printed could not be written. It says nothing of the store: the command may be done, and repeated it counts twice."""

    is_done = False
    """Whether the command had come to its end."""


class _Outlet(io.FileIO):
    """Where stdout leaves. Below everything that prints, so that a failure here is never taken for one of the store."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise OutputFailed(exc.errno, exc.strerror) from exc


def prepare() -> None:
    """Make stdout and stderr take any text. We flush ourselves, where it matters.

    A closed stderr becomes a sink. A closed stdout becomes what cannot be written to: a command that prints something fails then, as
    on a full disk. Either way its number is taken, and the store's file does not get it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None and name == "stdout":
            buffer = io.BufferedWriter(_Outlet(os.open(os.devnull, os.O_RDONLY), "wb"))
            sys.stdout = io.TextIOWrapper(buffer, "utf-8", "backslashreplace")
        elif stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            is_tty = stream.isatty()
            encoding = stream.encoding if is_tty else "utf-8"
            if name == "stdout" and isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
                buffer = io.BufferedWriter(_Outlet(stream.fileno(), "wb", closefd=False))  # also with PYTHONUNBUFFERED
                sys.stdout = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=is_tty)
            else:
                stream.reconfigure(encoding=encoding, errors="backslashreplace", write_through=False)


@contextlib.contextmanager
def piping() -> Iterator[None]:
    """What is printed inside has left when it ends; a reader that went away is PipeClosed."""
    try:
        yield
        try:
            sys.stdout.flush()
        except OutputFailed as exc:
            exc.is_done = True
            raise
    except BrokenPipeError as exc:
        raise PipeClosed from exc


def silence() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not complain about it at its end."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)


# --- writing ---


def line(text: str) -> None:
    sys.stdout.write(text + "\n")


def json_line(value: Any) -> None:
    line(as_json(value))


def value(value: Any, json: bool) -> None:
    """A value alone: text as it is, anything else, or with --json everything, as JSON."""
    if json or not isinstance(value, str):
        json_line(value)
    else:
        line(for_people(value) if sys.stdout.isatty() else value)


class Stream:
    """What a program printed, as it comes: bytes as they were, or, where a terminal would obey them, shown."""

    def __init__(self, *, raw: bool = False) -> None:
        self._out = (
            None if raw or not sys.stdout.isatty() else codecs.getincrementaldecoder("utf-8")("backslashreplace")
        )

    def write(self, data: bytes, *, is_error: bool = False) -> None:
        """Print it now; what was an error of the program goes to stderr."""
        target = sys.stderr if is_error else sys.stdout
        if self._out is not None:
            target.write(for_people(self._out.decode(data)))
            target.flush()
            return
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()


def flush() -> None:
    sys.stdout.flush()


def note(text: str, json: bool) -> None:
    """Something the user should know, beside the output."""
    with contextlib.suppress(OSError):  # who cannot hear it still wants the command done
        sys.stderr.write((as_json({"note": text}) if json else f"holdfast: {text}") + "\n")
        sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal; lines with tabs for the next command of a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            line("\t".join(map(shown, row)))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    headers = [Column(column, overflow="fold", no_wrap=column in _WHOLE) for column in columns]
    drawn = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*(f"[{_COLOURS[cell]}]{cell}[/]" if cell in _COLOURS else escape(shown(cell)) for cell in row))
    Console().print(drawn)


_WHOLE: Final = frozenset(
    {"id", "tid", "since", "at", "ended", "created", "updated", "archived", "timeout", "version", "etag"}
)
"""Columns whose cells are not folded: they are to be copied, or compared."""
_COLOURS: Final = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


# --- as text ---


def as_json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if text.isprintable() else "".join(map(_escaped, text))


class Json(str):
    """Text that is JSON already."""


def shown(text: str) -> str:
    """A name on a line of its own: as it is, or quoted as JSON when it could be taken for something else."""
    if isinstance(text, Json):
        return text
    return text if text.isprintable() and not text.startswith('"') else as_json(text)


def brief(value: Any) -> str:
    """A value as part of a line: JSON, cut when it is long."""
    text = as_json(value)
    return Json(text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…")


def moment(at: datetime | None) -> str | None:
    """ISO 8601, UTC, to the millisecond: how every time is printed, for people and for programs."""
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """What the library tells as objects, as JSON has it."""
    return _timed(msgspec.to_builtins(value, builtin_types=(datetime,)))


def _timed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timed(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_timed(each) for each in value]
    return moment(value) if isinstance(value, datetime) else value


def for_people(text: str) -> str:
    """Text of several lines, without what a terminal would act on."""
    return "".join(char if char in "\n\t" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


# --- errors ---


def tell_error(exc: Exception, json: bool) -> int:
    """Say what went wrong, in one sentence on stderr; gives the exit code."""
    code, exit_code, message = _judged(exc)
    with contextlib.suppress(OSError):
        if json:
            told: dict[str, Any] = {"error": code, "message": message}
            if isinstance(exc, Conflict) and exc.key is not None:
                told |= {"key": exc.key, "version": exc.actual.version if exc.actual else None}
            if isinstance(exc, RateLimitExceeded):
                told["retry_after"] = exc.retry_after
            sys.stderr.write(as_json(told) + "\n")
        else:
            between = "\n  " if isinstance(exc, InvalidInput) else " "  # a line for each mistake in a file
            sys.stderr.write("holdfast: " + for_people(message).replace("\n", between) + "\n")
        sys.stderr.flush()
    return exit_code


def _judged(exc: Exception) -> tuple[str, int, str]:
    """The error's code, exit code and sentence."""
    if isinstance(exc, Error):
        return exc.code, exc.exit_code, str(exc)
    if hasattr(exc, "format_message"):  # a wrong call, found by typer
        context = getattr(exc, "ctx", None)
        hint = f" See: {context.command_path} --help" if context is not None else ""
        return InvalidInput.code, InvalidInput.exit_code, _sentence(exc.format_message()) + hint
    if isinstance(exc, OutputFailed):
        silence()  # it must not fail again
        return "output_failed", OUTPUT_FAILED, f"the output could not be written ({exc.strerror}); {_rest(exc)}"
    if isinstance(exc, OSError):
        where = f"{exc.filename}: " if exc.filename else ""
        return Unavailable.code, Unavailable.exit_code, f"{where}{exc.strerror or exc}"
    return Error.code, Error.exit_code, f"unexpected {type(exc).__name__}: {exc} (HOLDFAST_DEBUG=1 shows where)"


def _rest(exc: OutputFailed) -> str:
    if exc.is_done:
        return "the command itself was done, and need not be repeated for that"
    return "the command ended there, and what it had done until then stays done: look before you repeat it"


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "?", "!")) else text + "."
