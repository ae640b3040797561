"""What a keeper writes to stderr: one record a line, as JSON or as text, without secrets.

Modules log as usual, with `logging.getLogger("holdfast.…")` and `extra=`, or through `logger(name)` with fields. Both go
through structlog's processors: the fields of the request under way are added (`bound`), secrets are taken out by the
same names as in the audit (`Redaction`), tokens, passwords in URLs and `name=value` wherever they stand in a text, and the
record is written. Records of uvicorn and of other libraries go the same way. Text that somebody else chose cannot look
like a record: characters a terminal acts on, and line ends, are escaped.

    with Logs("info", "json"):
        with bound(request_id=id, correlation_id=correlation, agent="market", space="contoso"):
            logger("holdfast.keeper").info("taken over", epoch=7)

How it fails. What cannot be shown is shown by its type; long text is cut. A record that cannot be written is lost, and
the work goes on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal, TextIO

import msgspec
import structlog

from holdfast.clock import Clock, SystemClock, as_datetime
from holdfast.identity import hidden
from holdfast.layers.redaction import REDACTED, Redaction

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]

OURS: Final = ("holdfast", "uvicorn")
"""Loggers that follow the level; of others, warnings and worse are of interest."""
FOREIGN: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
"""Loggers that may have brought handlers of their own."""
TEXT_CHARS_MAX: Final = 8_192
ITEMS_MAX: Final = 100
DEPTH_MAX: Final = 8

_PAIR: Final = re.compile(
    r"(?<![A-Za-z0-9_-])([A-Za-z][A-Za-z0-9_-]{0,255})([\"']?\s{0,2}[=:]\s{0,2}[\"']?)([^\s\"'&,;]{1,16384})"
)
_URL_PASSWORD: Final = re.compile(r"(://[^/@:\s]{0,256}):[^/@\s]{1,1024}@")
_CREDENTIAL: Final = re.compile(r"\b(bearer|basic)(\s{1,2})[A-Za-z0-9._~+/=-]{8,4096}", re.IGNORECASE)

Event = MutableMapping[str, Any]


def bound(
    *,
    request_id: str | None = None,
    correlation_id: str | None = None,
    agent: str | None = None,
    space: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Fields of every record that is written inside, in this task and those it starts."""
    given = {"request_id": request_id, "correlation_id": correlation_id, "agent": agent, "space": space}
    fields = {name: value for name, value in given.items() if value is not None}
    return structlog.contextvars.bound_contextvars(**fields)


def logger(name: str) -> Any:
    """A logger that takes fields: `logger("holdfast.keeper").info("taken over", epoch=7)`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.ExceptionRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records. One that cannot be written is named by its place; its content may be what failed, or secret."""

    def handleError(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(f"a record of {record.name}, {record.filename}:{record.lineno}, cannot be written\n")


class Logs:
    """The logging of this process, while it is open. Closing it puts back what was there before."""

    def __init__(
        self,
        level: Level = "info",
        format: Format = "text",
        *,
        redaction: Redaction | None = None,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._redaction = redaction or Redaction()
        self._clock = clock or SystemClock()
        self._handler = _Handler(stream or sys.stderr)
        self._before: list[tuple[logging.Logger, int, list[logging.Handler], bool]] = []
        self._settings: tuple[Level, Format] = (level, format)

    def open(self) -> None:
        """Begin: everything that is logged in this process comes here."""
        for name in ("", *OURS, *FOREIGN):
            each = logging.getLogger(name)
            self._before.append((each, each.level, list(each.handlers), each.propagate))
        for name in FOREIGN:
            each = logging.getLogger(name)
            each.handlers, each.propagate = [], True
        logging.getLogger().addHandler(self._handler)
        self.change(*self._settings)

    def change(self, level: Level, format: Format) -> None:
        """Another level or format, from now on."""
        self._settings = (level, format)
        number = logging.getLevelNamesMapping()[level.upper()]
        logging.getLogger().setLevel(max(number, logging.WARNING))
        for name in OURS:
            logging.getLogger(name).setLevel(number)
        self._handler.setFormatter(self._formatter(format))

    def close(self) -> None:
        """Put back what was there before."""
        while self._before:
            each, level, handlers, propagate = self._before.pop()
            each.setLevel(level)
            each.handlers, each.propagate = handlers, propagate

    def __enter__(self) -> Logs:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _formatter(self, format: Format) -> logging.Formatter:
        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                structlog.contextvars.merge_contextvars,
                structlog.processors.ExceptionRenderer(),
            ],
            processors=[self._prepared, _as_json if format == "json" else _as_text],
            keep_exc_info=False,
        )

    def _prepared(self, _: Any, __: str, event: Event) -> Event:
        """The record in its final order, fit to be shown."""
        record: logging.LogRecord = event.pop("_record")
        if not event.pop("_from_structlog", False):
            event.pop("message", None)  # another handler's formatter has left it on the record
            event.pop("asctime", None)
        at = as_datetime(self._clock.now_ms()).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        level = {"critical": "error"}.get(record.levelname.lower(), record.levelname.lower())
        told: Event = {"timestamp": at, "level": level, "logger": record.name}
        told["event"] = self._text(str(event.pop("event", "")))
        exception = event.pop("exception", None)
        for name, value in list(event.items())[:ITEMS_MAX]:
            told.setdefault(
                _escaped(str(name))[:128],
                REDACTED if self._redaction.is_secret_field(str(name)) else self._fit(value, 0),
            )
        if exception is not None:
            told["exception"] = self._text(str(exception))
        return told

    def _fit(self, value: Any, depth: int) -> Any:
        """A value that can be shown, without what is secret in it."""
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if -(2**63) <= value < 2**63 else f"{value:#x}"[:128]
        if isinstance(value, str):
            return self._text(value)
        if depth >= DEPTH_MAX:
            return "…"
        if isinstance(value, Mapping):
            return {
                _escaped(str(name))[:128]: REDACTED
                if self._redaction.is_secret_field(str(name))
                else self._fit(item, depth + 1)
                for name, item in list(value.items())[:ITEMS_MAX]
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self._fit(item, depth + 1) for item in list(value)[:ITEMS_MAX]]
        try:
            return self._text(repr(value))
        except Exception:
            return f"<{type(value).__name__}>"

    def _text(self, text: str) -> str:
        """Text without secrets; it is cut last, so that no half of one is left at the end."""
        text = hidden(text[: 2 * TEXT_CHARS_MAX])
        text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
        text = _CREDENTIAL.sub(rf"\1\2{REDACTED}", text)
        return _PAIR.sub(self._pair, text)[:TEXT_CHARS_MAX]

    def _pair(self, match: re.Match[str]) -> str:
        secret = self._redaction.is_secret_field(match[1]) and match[3] != REDACTED and "_…" not in match[3]
        return f"{match[1]}{match[2]}{REDACTED}" if secret else match[0]


def _as_json(_: Any, __: str, event: Event) -> str:
    try:
        return _escaped(msgspec.json.encode(event).decode())
    except UnicodeEncodeError:  # a lone surrogate somewhere
        return _escaped(msgspec.json.encode({name: _escaped(str(value)) for name, value in event.items()}).decode())


def _as_text(_: Any, __: str, event: Event) -> str:
    """`2026-01-31T08:00:00.000Z warning holdfast.tokens: the tokens cannot be followed agent=market`."""
    exception = event.pop("exception", None)
    head = f"{event.pop('timestamp')} {event.pop('level'):7} {event.pop('logger')}: {_escaped(event.pop('event'))}"
    fields = "".join(f" {name}={_shown(value)}" for name, value in event.items())
    trace = "" if exception is None else "".join(f"\n    {_escaped(line)}" for line in exception.splitlines())
    return head + fields + trace


def _shown(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable() and " " not in value and '"' not in value:
        return value
    try:
        return _escaped(msgspec.json.encode(value).decode())
    except UnicodeEncodeError:
        return _escaped(str(value))


def _escaped(text: str) -> str:
    """What a terminal or a reader of lines could act on, as JSON writes it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _units(char) for char in text)


def _units(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
