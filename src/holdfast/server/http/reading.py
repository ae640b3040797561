"""Reading what clients send: JSON that means one thing only, and texts that are what they claim to be.

Refused with a sentence: what is no JSON, invalid UTF-8, NaN, an object that names a member twice (readers differ in which
one counts), integers beyond 64 bits (half of all readers round them), lists in lists without end, and more values than can be
read in a moment (ELEMENTS_MAX): the interpreter does nothing else meanwhile. What is counted for that is looked at in pieces, so
that a thread that does it lets others in between.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from functools import cache
from types import NoneType
from typing import Any, Final, TypeVar, cast, get_args
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Meta

from holdfast.codec import INT64_MAX, INT64_MIN, mistake
from holdfast.errors import InvalidInput
from holdfast.server.http.failures import BodyTooLarge
from holdfast.server.http.limits import ELEMENTS_MAX, NESTING_MAX, PARAMETERS_MAX

T = TypeVar("T")
PIECE_BYTES: Final = 64 * 1024
_BEFORE_VALUES: Final = b",[{"
"""Every value of a list or object comes after one of these."""
_OTHERS: Final = bytes(set(range(256)) - set(_BEFORE_VALUES))
_NUMERALS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG: Final = b"0" * 19
"""In every number beyond 64 bits, written with `_NUMERALS`."""


def read_json(data: bytes) -> Any:
    """The value of a body."""
    bare = between_texts(data)
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise InvalidInput("the body is not UTF-8 text") from None
    except msgspec.MsgspecError as exc:
        raise InvalidInput(f"the body is not JSON: {exc}") from None
    if type(value) in (dict, list):
        members = _measure(value, look_at_numbers=_LONG in bare.translate(_NUMERALS))
        if members != bare.count(b":"):
            json.loads(data, object_pairs_hook=_refuse_doubles)
    elif type(value) is int:
        _check_number(value)
    return value


def between_texts(data: bytes, what: str = "a body") -> bytes:
    """JSON without its texts, as far as it is JSON; BodyTooLarge if it has too many values."""
    bare: list[bytes] = []
    count, within, rest = 0, False, b""
    for start in range(0, len(data), PIECE_BYTES):
        piece = rest + data[start : start + PIECE_BYTES]
        rest = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):
                piece, rest = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[within::2])
        within ^= len(parts) % 2 == 0
        count += len(outside.translate(None, _OTHERS))
        if count > ELEMENTS_MAX:
            raise BodyTooLarge(
                f"{what} has at most {ELEMENTS_MAX:,} values, lists and objects counted; nothing was done. Do it in parts, "
                "or keep so many as a text or a blob"
            )
        bare.append(outside)
    return b"".join(bare)


def _measure(value: Any, *, look_at_numbers: bool) -> int:
    """How many members its objects have; refuses what is nested too deeply, and numbers beyond 64 bits."""
    members = 0
    level: list[Any] = [value]
    for _ in range(NESTING_MAX):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                members += len(item)
                parts: Any = item.values()
            else:
                parts = item
            below += [part for part in parts if type(part) in (dict, list)]
            if look_at_numbers:
                for part in parts:
                    if type(part) is int:
                        _check_number(part)
        if not below:
            return members
        level = below
    raise _too_deep()


def _check_number(number: int) -> None:
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidInput(f"{str(number)[:40]} is beyond 64 bits; send it as text")


def _too_deep() -> InvalidInput:
    return InvalidInput(f"the body is nested more than {NESTING_MAX} levels deep")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidInput(f"an object of the body names {name[:60]!r} twice")
        seen.add(name)


def read_as(value: Any, as_type: type[T], what: str, *, strict: bool = True) -> T:
    """The value as this type; InvalidInput says where it differs."""
    try:
        return msgspec.convert(value, as_type, strict=strict)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"{what}: {mistake(exc)}") from None


def read_query(query: bytes) -> dict[str, str]:
    """The parameters of a query string, each once."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX)
    except ValueError:
        raise InvalidInput(f"the query is not at most {PARAMETERS_MAX} parameters in UTF-8, percent-encoded") from None
    parameters = dict(pairs)
    if len(parameters) != len(pairs):
        raise InvalidInput("the query names a parameter twice")
    return parameters


def check_path(raw_path: bytes) -> None:
    """Refuse a path that is no UTF-8: decoding it leniently would make one name of two."""
    try:
        unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        raise InvalidInput("the path is not UTF-8, percent-encoded") from None


def read_struct(values: Mapping[str, str], as_type: type[T], what: str) -> T:
    """Texts (a path's, a query's, headers') as the fields of this type."""
    fields, unknown = _fields(cast(Hashable, as_type)), dict(values)
    found: dict[str, Any] = {}
    for name, (called, type_, required) in fields.items():
        text = unknown.pop(called, None)
        if text is not None:
            found[name] = _read_text(text, type_, f"{what}, {called}")
        elif required:
            raise InvalidInput(f"{what}: {called} is missing")
    if unknown:
        known = ", ".join(called for called, _, _ in fields.values()) or "none"
        raise InvalidInput(f"{what}: there is no parameter {next(iter(unknown))[:60]!r} here; there is: {known}")
    return as_type(**found)


def _read_text(text: str, as_type: Any, what: str) -> Any:
    try:
        return read_as(text, as_type, what, strict=False)
    except InvalidInput:
        described = [each for each in getattr(as_type, "__metadata__", ()) if isinstance(each, Meta) and each.pattern]
        if not described or not described[0].description:
            raise
        example = f" Such as: {described[0].examples[0]}" if described[0].examples else ""
        raise InvalidInput(f"{what}: {text!r:.60} does not fit. {described[0].description}{example}") from None


@cache
def _fields(struct: Hashable) -> dict[str, tuple[str, Any, bool]]:
    """Name → what it is called outside, its type without null (a text "null" is a text), whether it is required."""
    found = {}
    for field in msgspec.structs.fields(struct):  # type: ignore[arg-type]
        options = get_args(field.type)
        type_ = options[0] if options[1:] == (NoneType,) else field.type
        found[field.name] = (field.encode_name, type_, field.required)
    return found


def read_headers(headers: Mapping[str, str], as_type: type[T]) -> T:
    """The headers this type names."""
    called = [called for called, _, _ in _fields(cast(Hashable, as_type)).values()]
    return read_struct({name: headers[name] for name in called if name in headers}, as_type, "headers")
