"""What a person writes on the command line, understood: values, whole numbers, instants."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from holdfast.clock import duration_ms
from holdfast.engine import VALUE_BYTES_MAX
from holdfast.errors import InvalidInput, NotFound
from holdfast.layers.records import ITEMS_MAX

STDIN: Final = "-"
NO_NUMBERS: Final = ("NaN", "Infinity", "-Infinity")
"""How programs write numbers that JSON has no word for; as text they would be found by somebody who expects a number."""
QUOTED_MAX: Final = 60
"""Characters of a text that an error shows as it should be written."""
FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a file that describes something."""
STDIN_BYTES_MAX: Final = 4 * VALUE_BYTES_MAX
"""What is read of a piped value: JSON may be laid out more widely than it is stored."""


def parsed(text: str, *, as_text: bool | None = None) -> Any:
    """The value a word stands for: JSON if it is JSON, else the text itself. What begins as JSON does and is none is refused, and so is
    a number that JSON does not know.

    `as_text` is None where the command has no --text.
    """
    if as_text:
        return text
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as exc:
        way = f"write it as JSON text: {_quoted(text)}" if as_text is None else "give --text"
        if text.strip() in NO_NUMBERS:
            raise InvalidInput(f"{text.strip()} is a number that JSON does not have; if text is meant, {way}") from None
        if not text.lstrip().startswith(("{", "[", '"')):
            return text
        raise InvalidInput(
            f"{text!r:.60} looks like JSON and is none: {_break(text, exc)}; correct it or, if text is meant, {way}"
        ) from None


def given(text: str | None, *, as_text: bool | None = None) -> Any:
    """The value of an argument; "-", or none at all in a pipe, reads it from stdin. One final line end is not part of it."""
    if text is not None and text != STDIN:
        return parsed(text, as_text=as_text)
    data = _stdin("a value").read(STDIN_BYTES_MAX + 1)
    if not data and text is None:
        raise InvalidInput("give a value, or pipe it into this command; write '-' if it is meant to be empty text")
    if len(data) > STDIN_BYTES_MAX:
        raise InvalidInput(f"the piped value has more than {STDIN_BYTES_MAX:,} bytes; keep large data as a blob")
    return parsed(_text(data), as_text=as_text)


def several(texts: Sequence[str], *, as_text: bool | None = None) -> Iterable[list[Any]]:
    """The values of arguments, as many at a time as one call takes; a single "-" reads one value a line from stdin."""
    return _lines(as_text) if list(texts) == [STDIN] else [[parsed(text, as_text=as_text) for text in texts]]


def _lines(as_text: bool | None) -> Iterator[list[Any]]:
    stdin, done = _stdin("values"), 0
    lines = iter(lambda: stdin.readline(STDIN_BYTES_MAX), b"")
    while chunk := list(islice(lines, ITEMS_MAX)):
        found = []
        for line in chunk:
            try:
                found.append(parsed(_text(line), as_text=as_text))
            except InvalidInput as exc:
                raise InvalidInput(f"line {done + len(found) + 1} ({done} before it are done): {exc}") from None
        yield found
        done += len(chunk)


def strict(data: bytes) -> Any:
    """JSON, or a ValueError that says where it breaks."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as exc:
        raise ValueError(_break(data, exc)) from None


def json_file(name: str) -> dict[str, Any]:
    """The object that a file holds as JSON."""
    try:
        with open(name, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {name}") from None
    except OSError as exc:
        raise InvalidInput(f"{name} cannot be read: {exc.strerror}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(f"{name} has more than {FILE_BYTES_MAX:,} bytes")
    try:
        found = strict(data)
    except ValueError as exc:
        raise InvalidInput(f"{name} is no JSON: {exc}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{name} holds no JSON object")
    return found


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a whole number") from None


def count(text: str | None) -> int | None:
    """How many lines; None is without end."""
    if text is None:
        return None
    number = whole_number(text)
    if number < 1:
        raise InvalidInput(f"-n must be at least 1, not {number}")
    return number


def wait(text: str) -> str | int:
    """How long to wait; 0 is not at all."""
    if text.strip() == "0":
        return 0
    duration_ms(text, name="wait")
    return text


def confirmed(question: str) -> bool:
    """Ask at the terminal, beside the output; anything but a yes is a no."""
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _stdin(what: str) -> Any:
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidInput(f"give {what}, or pipe it into this command")
    return sys.stdin.buffer


def _text(data: bytes) -> str:
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"what was piped in is not UTF-8 text ({exc}); keep binary data as a blob") from exc


def _break(data: str | bytes, exc: Exception) -> str:
    """Where JSON breaks, and what was expected there; `exc` is what msgspec said."""
    import json  # which knows lines and columns, and takes its time to be imported

    if isinstance(exc, RecursionError):
        return "it is nested too deeply"
    try:
        json.loads(data)
    except json.JSONDecodeError as found:
        why = found.msg[:1].lower() + found.msg[1:].removesuffix(" at")
        return f"{why} at line {found.lineno}, column {found.colno}"
    except (ValueError, RecursionError):
        pass
    return str(exc).removeprefix("JSON is malformed: ")


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(msgspec.json.encode(text).decode()) if len(text) <= QUOTED_MAX else "in double quotes"


def part_of(request_id: str | None, number: int) -> str | None:
    """The id of a part of a request, where it is too large to be done together."""
    return request_id if request_id is None or not number else f"{request_id}#{number}"
