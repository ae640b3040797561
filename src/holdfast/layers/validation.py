"""Checking data against JSON Schemas: what a schema is made of, and what a violation says.

A schema is a dictionary, or derived from a class: a pydantic model, a dataclass, a TypedDict, a msgspec struct. It stands for
itself: a reference to anywhere else (`https:`, `file:`) is refused when it is registered, and nothing is ever fetched.
`format` is checked, unlike where it is mere annotation: an instant without its offset is no `date-time`.

The work is done by jsonschema-rs, or by jsonschema where only that is installed; neither is imported before the first check.
jsonschema-rs bounds what a pattern may cost; jsonschema does not, and knows fewer formats.

How it fails. A schema that is none is InvalidInput with the path of what is wrong. Violations name paths and what was
expected, never the offending value: it may be a secret. Without either library InvalidInput says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NoReturn

import msgspec

from holdfast.codec import decode, encode
from holdfast.errors import InvalidInput, Violation

SCHEMA_BYTES_MAX: Final = 256 * 1024
VIOLATIONS_MAX: Final = 10
"""Told of one value."""
TEXT_MAX: Final = 300
"""Characters of one violation's text."""


Check = Callable[[Any], list[Violation]]
"""What is wrong with a value, at most VIOLATIONS_MAX things; nothing when it is as it should be."""


def schema_of(source: Any) -> dict[str, Any]:
    """The JSON Schema that was given, or that describes the class that was given; plain data, and bounded."""
    document = source
    if not isinstance(source, dict):
        if not isinstance(source, type):
            raise InvalidInput(f"a schema is a dictionary or a class, not {source!r:.60}")
        try:
            derive = getattr(source, "model_json_schema", None)  # pydantic, without importing it
            document = msgspec.json.schema(source) if derive is None else derive()
        except Exception as exc:
            raise InvalidInput(f"no JSON Schema can be derived from {source.__name__}: {exc}") from exc
    data = encode(document)
    if len(data) > SCHEMA_BYTES_MAX:
        raise InvalidInput(f"a schema has at most {SCHEMA_BYTES_MAX:,} bytes of JSON; this one has {len(data):,}")
    plain: dict[str, Any] = decode(data)
    return plain


def compile_schema(schema: dict[str, Any]) -> Check:
    """The check that a schema stands for; InvalidInput when it is no schema."""
    try:
        return _compile_fast(schema)
    except ModuleNotFoundError as missing:
        if missing.name != "jsonschema_rs":
            raise
    try:
        return _compile_portable(schema)
    except ModuleNotFoundError as missing:
        raise InvalidInput(
            f"checking data against a schema needs {missing.name}: pip install 'holdfast[schemas]'"
        ) from missing


def pointer(path: Any) -> str:
    """A path as a JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _refuse_schema(path: Any, why: str) -> NoReturn:
    where = f" at {pointer(path)}" if path else ""
    raise InvalidInput(f"this is no usable JSON Schema{where}: {_short(why)}. Nothing was registered")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_MAX else line[: TEXT_MAX - 1] + "…"


def _fetch_nothing(uri: str) -> NoReturn:
    raise LookupError("a schema stands for itself, nothing is fetched; copy what it refers to under $defs")


# --- jsonschema-rs ---


def _compile_fast(schema: dict[str, Any]) -> Check:
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True, retriever=_fetch_nothing, mask="it")
    except jsonschema_rs.ValidationError as exc:
        _refuse_schema(exc.instance_path, exc.message)
    except (ValueError, jsonschema_rs.ReferencingError) as exc:
        _refuse_schema((), str(exc))

    def check(value: Any) -> list[Violation]:
        if validator.is_valid(value):
            return []
        errors = islice(validator.iter_errors(value), VIOLATIONS_MAX)
        return [Violation(pointer(error.instance_path), error.kind.name, _short(error.message)) for error in errors]

    return check


# --- jsonschema ---


def _compile_portable(schema: dict[str, Any]) -> Check:
    import jsonschema
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as exc:
        _refuse_schema(exc.absolute_path, exc.message)
    except RecursionError:
        _refuse_schema((), "it is nested too deeply")
    for path, reference in _references(schema, ()):
        if not reference.startswith("#"):
            _refuse_schema(path, f"{reference} is elsewhere, and nothing is fetched; copy it under $defs")
    validator = kind(schema, registry=REGISTRY, format_checker=kind.FORMAT_CHECKER)

    def check(value: Any) -> list[Violation]:
        try:
            errors = list(islice(validator.iter_errors(value), VIOLATIONS_MAX))
        except Exception as exc:  # a reference into nothing, or without end, shows only here
            raise InvalidInput(f"the schema cannot be applied: {type(exc).__name__}: {_short(str(exc))}") from exc
        return [Violation(pointer(error.absolute_path), str(error.validator), _told(error)) for error in errors]

    return check


def _references(schema: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, part in parts:
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(part, str):
            yield (*path, name), part
        else:
            yield from _references(part, (*path, name))


def _told(error: Any) -> str:
    if error.validator in ("required", "additionalProperties", "dependentRequired", "unevaluatedProperties"):
        return _short(error.message)  # names of properties, not what they hold
    return _short(f"it does not satisfy {error.validator} {encode(error.validator_value).decode()}")
