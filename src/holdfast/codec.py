"""Values: JSON, encoded once, canonical.

Two equal values have the same bytes (object keys sorted, no white space), so an engine compares values without
understanding them. Numbers keep their kind: `1` and `1.0` are different values. NaN and infinity are refused, because
JSON has no word for them. Dataclasses, TypedDicts, msgspec structs and pydantic models go in as they are and come out
typed when the caller names the type; datetimes, UUIDs, Decimals and bytes are text unless read back typed. Nothing
stored is ever executed: there is no pickle here.

How deep a value may be nested is fixed (`NESTING_MAX`), so that what one process wrote every other can read: left to the
interpreter it would depend on its version, and on how deep in calls it happens to be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

import msgspec

from holdfast.errors import Damaged, Error, InvalidInput

T = TypeVar("T")

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
WHOLE_BYTES_MAX: Final = 16 * 1024
"""Up to here a foreign value is looked at by reading it; beyond, that would take too long."""
LOOKED_AT_BYTES_MAX: Final = 256 * 1024
"""Up to here it is read all the same where a number in it may be too large to be read again."""
NESTING_MAX: Final = 100
"""Levels of lists and objects in a value that is given, with what its layer puts around it before it is encoded."""
STORED_NESTING_MAX: Final = 128
"""Levels in a value that somebody else encoded: the rest is for what layers put around values they have read."""
NESTING_WORK_MAX: Final = 32 * 1024 * 1024
"""Brackets looked at to tell how deep one value is; no value that is a tree of anything needs as many."""
STRUCTS_MAX: Final = 1024
_INTEGER: Final = re.compile(rb"0|-?[1-9][0-9]{0,18}")


def _encode_foreign(value: Any) -> Any:
    if hasattr(value, "model_dump") and hasattr(type(value), "model_validate"):  # pydantic, without importing it
        kind = cast(Any, type(value))
        dumped = value.model_dump(mode="json", round_trip=_is_picky(kind))
        if _has_secrets(kind) and any(item == _MASKED for item in _within(dumped)):
            raise TypeError(
                f"{kind.__name__} has a secret, of which pydantic shows asterisks only; give it a field_serializer, "
                "or make it str"
            )
        return _in_order(dumped, value) if _has_sets(kind) else dumped
    raise TypeError(f"objects of type {type(value).__name__} cannot be stored")


def _decode_foreign(type_: type, value: Any) -> Any:
    if hasattr(type_, "model_validate_json"):
        return _read_model(type_, _encode(value))  # as JSON: a strict model takes a datetime as text from there alone
    raise TypeError(f"values cannot be read as {type_.__name__}")


def _read_model(type_: Any, data: bytes) -> Any:
    """A pydantic model. It is kept by the names of its fields; others may have written its aliases."""
    if _reads_names(type_):
        return type_.model_validate_json(data, by_alias=True, by_name=True)
    return type_.model_validate_json(data)


@lru_cache(maxsize=1024)
def _reads_names(type_: Any) -> bool:
    """Whether this pydantic can be told to, which it can since 2.11."""
    import inspect

    return "by_name" in inspect.signature(type_.model_validate_json).parameters


@lru_cache(maxsize=1024)
def _has_secrets(type_: Any) -> bool:
    return "Secret" in repr(getattr(type_, "__pydantic_core_schema__", ""))


@lru_cache(maxsize=1024)
def _is_picky(type_: Any) -> bool:
    """Whether it could not be read back with its computed fields, which it forbids, or with what its JSON texts mean."""
    schema = repr(getattr(type_, "__pydantic_core_schema__", ""))
    return "'forbid'" in schema or "'type': 'json'" in schema


@lru_cache(maxsize=1024)
def _has_sets(type_: Any) -> bool:
    """Whether a set may be in it, of which pydantic makes a list in an order that differs from process to process."""
    schema = repr(getattr(type_, "__pydantic_core_schema__", ""))
    return "set'" in schema or "'any'" in schema


def _in_order(dumped: Any, value: Any) -> Any:
    """What pydantic made of a value, with the lists that were sets sorted: equal values have the same bytes."""
    if isinstance(dumped, list) and isinstance(value, set | frozenset) and len(dumped) == len(value):
        return sorted(map(_in_order, dumped, value), key=_encode)
    if isinstance(dumped, list) and isinstance(value, list | tuple) and len(dumped) == len(value):
        return list(map(_in_order, dumped, value))
    if isinstance(dumped, dict) and isinstance(value, dict) and len(dumped) == len(value):
        return dict(zip(dumped, map(_in_order, dumped.values(), value.values()), strict=True))
    if hasattr(type(value), "model_validate") and hasattr(value, "root"):
        return _in_order(dumped, value.root)
    if isinstance(dumped, dict) and hasattr(value, "__dict__"):
        fields = value.__dict__  # what is computed is not computed again
        return {name: _in_order(each, fields.get(name)) for name, each in dumped.items()}
    return dumped


_MASKED: Final = "**********"
"""What pydantic shows of a secret."""


_encode = msgspec.json.Encoder(enc_hook=_encode_foreign, order="sorted").encode
_decode = msgspec.json.Decoder().decode
_pack = msgspec.msgpack.Encoder(enc_hook=_encode_foreign).encode
_NOT_FINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""How msgpack, unlike JSON, writes NaN and infinity; now and then something else looks like it."""
_Struct: Final = type(msgspec.Struct)
_STRUCTS: Final[dict[type, Callable[[bytes], Any]]] = {}
"""What reads the structs that were read so far."""
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_NUMERALS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_FAR: Final = (b"0" * 200, b"e000", b"e+000")
"""One of these is in every number, written with `_NUMERALS`, that is too large to be read."""
_TEXTS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_NO_MARK: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")


def encode(value: Any, *, known: bool = False, levels: int = NESTING_MAX) -> bytes:
    """The canonical JSON bytes of a value, nested at most so many `levels`.

    What is `known` was read or encoded before: neither NaN is looked for in it, nor how deep it is.
    """
    try:
        data = _encode(value)
    except RecursionError:
        raise InvalidInput(
            f"the value is nested more than {levels} levels deep, or contains itself; make it flatter, or keep parts of it "
            "as records of their own"
        ) from None
    except UnicodeEncodeError:
        raise InvalidInput("the value contains text with a lone surrogate, which is not valid Unicode") from None
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as exc:
        data = _with_text_keys(value, exc)
        if not data:
            raise InvalidInput(f"the value cannot be stored as JSON: {_odd_key(value, exc)}") from exc
    if type(value) is msgspec.Raw:
        raise InvalidInput("msgspec.Raw is written without being looked at; give the value it stands for")
    # NaN and infinity come out as null: only then is it worth looking for them, and never in a text.
    if type(value) is not str and not known and b"null" in data and value is not None and _may_have_nan(value):
        _refuse_nan(value)
    if len(data) > 2 * levels and not known:  # written out: a level takes two bytes at least, and most values are small
        _check_nesting(data, levels)
    return data


def _may_have_nan(value: Any) -> bool:
    """Quick; what it cannot tell it leaves to who looks at everything."""
    try:
        return _NOT_FINITE.search(_pack(value)) is not None
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return True


def _refuse_nan(value: Any) -> None:
    with suppress(TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        value = msgspec.msgpack.decode(_pack(value))  # plain, whatever it was made of
    for item in _within(value):
        if isinstance(item, float) and not math.isfinite(item):
            raise InvalidInput(f"the value contains {item!r}: JSON has no such number")


def _with_text_keys(value: Any, exc: Exception) -> bytes:
    """A struct or dataclass whose dictionaries have numbers, dates or ids for keys, if its type brings them back; b"" if it does not."""
    if "str keys" not in str(exc) or not (isinstance(value, msgspec.Struct) or is_dataclass(value)):
        return b""
    try:
        data = _encode(msgspec.to_builtins(value, str_keys=True, order="sorted", enc_hook=_encode_foreign))
        return data if decode(data, type(value)) == value else b""
    except (Error, TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        return b""


def _odd_key(value: Any, exc: Exception) -> str:
    """What is wrong with a value; msgspec does not say with which key."""
    for item in _within(value) if "str keys" in str(exc) else ():
        for key in item if isinstance(item, dict) else ():
            if not isinstance(key, str):
                return (
                    f"{key!r:.60} is no key for an object, whose keys are text; make it text, or keep a list of pairs"
                )
    return str(exc)


def _within(value: Any) -> Iterator[Any]:
    """The value and everything in it, each container once."""
    stack, seen = [value], dict[int, Any]()
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            if id(item) in seen:
                continue
            seen[id(item)] = item  # kept, so that no other gets its id
        yield item
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif not isinstance(item, str | int | float | None):
            if hasattr(item, "model_dump"):
                stack.append(item.model_dump(mode="python"))
            elif hasattr(item, "__struct_fields__") or hasattr(item, "__dataclass_fields__"):
                names = getattr(item, "__struct_fields__", None) or item.__dataclass_fields__
                stack.extend(getattr(item, name) for name in names)


def decode(data: bytes, as_type: type[T] | None = None) -> T:
    """The value of canonical JSON bytes, as plain Python or as `as_type`; as `msgspec.Raw` it is not read at all."""
    if as_type is None:
        try:
            value: Any = _decode(data)
            return value  # type: ignore[no-any-return]
        except RecursionError as exc:
            raise Damaged(
                "a stored value is nested too deeply to be read here: an older version took it, or an administrator wrote it; "
                "write it anew, or read it where fewer calls are under way"
            ) from exc
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise Damaged(f"a stored value is not JSON: {exc}") from exc
    if as_type is msgspec.Raw:
        return cast(T, msgspec.Raw(data))
    try:
        # Our own structs come by the dozen: what reads one is made once, and they are not asked for what they have not.
        if type(as_type) is _Struct:
            return (_STRUCTS.get(as_type) or _reader_of(as_type))(data)  # type: ignore[no-any-return]
        read_pydantic = getattr(as_type, "model_validate_json", None)
        if read_pydantic is not None:
            return cast(T, _read_model(as_type, bytes(data)))
        return msgspec.json.decode(data, type=as_type, dec_hook=_decode_foreign)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as exc:
        name = getattr(as_type, "__name__", str(as_type))
        raise InvalidInput(f"the stored value is not a {name}: {mistake(exc)}") from exc


def passed_on(unread: msgspec.Raw) -> msgspec.Raw:
    """A value that was not read, to be a part of other JSON as it is; Damaged if it would spoil that.

    A large one is not looked at, which would take too long: what is written under rules was (`check_json`).
    """
    if memoryview(unread).nbytes > LOOKED_AT_BYTES_MAX:
        return unread
    try:
        if not (data := bytes(unread)).isascii():
            data.decode()
        return _skip(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Damaged(f"a stored value is not JSON: {exc}") from exc


def _reader_of(struct: type) -> Callable[[bytes], Any]:
    read: Callable[[bytes], Any] = msgspec.json.Decoder(struct, dec_hook=_decode_foreign).decode
    if len(_STRUCTS) < STRUCTS_MAX:  # a program may make classes without end
        _STRUCTS[struct] = read
    return read


def mistake(exc: Exception) -> str:
    """What msgspec found to be of another type, in words for who wrote it."""
    found = _MISTAKE.fullmatch(str(exc))
    if found is None:
        return str(exc)
    where = (found["where"] or "$")[1:].removeprefix(".")
    if found["missing"]:
        return f"{where}{where and '.'}{found['missing']} is missing"
    if where.endswith("[...]"):
        where = f"a value of {where.removesuffix('[...]')}"
    wanted = [_WORDS.get(each, each) for each in found["wanted"].split(" | ") if each != "null"]
    what = f"a key of {where}" if found["key"] else where or "it"
    got = "a decimal" if found["got"] == "float" else _WORDS.get(found["got"], found["got"])
    return f"{what} must be {' or '.join(wanted)}, not {got}"


_MISTAKE: Final = re.compile(
    r"(?:Object missing required field `(?P<missing>[^`]+)`|Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`)"
    r"(?: - at (?P<key>`key` in )?`(?P<where>\$[^`]*)`)?"
)
_WORDS: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def check_json(data: bytes, *, levels: int = STORED_NESTING_MAX) -> None:
    """Refuse what `decode` could not read, before it is stored: for values that somebody else encoded."""
    check_all_json((data,), levels)


def check_all_json(values: Iterable[bytes], levels: int = STORED_NESTING_MAX) -> None:
    """`check_json` of each."""
    shallow = 2 * levels
    try:
        for data in values:
            if (size := len(data)) <= WHOLE_BYTES_MAX:
                _decode(data)
            else:
                _check_large(data)
            if size > shallow:
                _check_nesting(data, levels)
    except RecursionError:
        raise _too_deep(levels) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"a value must be JSON: {exc}") from None


def _too_deep(levels: int) -> InvalidInput:
    return InvalidInput(
        f"a value must be JSON nested at most {levels} levels deep, and this one is deeper; make it flatter, or keep parts "
        "of it as records of their own"
    )


def _check_nesting(data: bytes, levels: int) -> None:
    if is_deeper(data, levels):
        raise _too_deep(levels)


def is_deeper(data: bytes, levels: int) -> bool:
    """Whether lists and objects are nested in this JSON more than so many levels deep.

    By its brackets, without recursion: pairs with nothing between them are taken away level by level. A value so full of
    them that this would take too long counts as deeper.
    """
    if len(data) <= 2 * levels or len(data.translate(None, _NO_OPENING)) <= levels:
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = data.translate(_SQUARE, _NO_MARK).replace(b'""', b"")
    if b'"' in data:
        data = b"".join(data.split(b'"')[::2])  # what is outside of texts
    work = 0
    for _ in range(levels):
        work += len(data)
        if not data or work > NESTING_WORK_MAX:
            break
        data = data.replace(b"[]", b"")
    return bool(data)


def _check_large(data: bytes) -> None:
    _skip(data)
    if not data.isascii():
        data.decode()
    if not _may_be_far(data):
        return
    if len(data) <= LOOKED_AT_BYTES_MAX:
        _decode(data)
    elif _may_be_far(_TEXTS.sub(b'""', data)):  # texts may have anything in them, such as hexadecimal ids
        raise InvalidInput(
            f"a value of {len(data):,} bytes has something in it that looks like a number beyond any range; keep it "
            "as a blob, or in parts"
        )


def _may_be_far(data: bytes) -> bool:
    """Whether a number in it may be too large to be read."""
    numerals = data.translate(_NUMERALS)
    return any(far in numerals for far in _FAR)


def integer(data: bytes) -> int | None:
    """The number, if the bytes are a canonical signed 64-bit decimal; None otherwise."""
    if _INTEGER.fullmatch(data) is None:
        return None
    number = int(data)
    return number if INT64_MIN <= number <= INT64_MAX else None
