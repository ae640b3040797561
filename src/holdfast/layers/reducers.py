"""How values meet without a conflict: a reducer per path of a document's body.

    await doc.declare({"cost": "sum", "risk.worst": "max", "tags": "union", "log": "append", "phase": "last"})
    await doc.merge({"cost": 3, "risk": {"worst": 0.7}, "tags": ["tech"]})

A path is made of the names of objects, with dots between them. sum adds numbers; max keeps the greater number or text; union
adds the items of a list that are not there yet; append adds all of them; last replaces. sum, max and union give the same
whatever the order (union: the same items); append and last follow the order in which they are applied.

Pure functions: nothing is stored here. What does not fit (a text for sum, a path that nobody declared) is InvalidInput.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from holdfast.codec import encode
from holdfast.errors import InvalidInput

REDUCERS_MAX: Final = 256
"""Paths of one document."""
DEPTH_MAX: Final = 32
"""Names in one path."""
_MISSING: Final = object()


def check_reducers(reducers: Mapping[str, str]) -> dict[str, str]:
    """Refuse what cannot be declared: unknown reducers, and paths of which one is within another."""
    if not isinstance(reducers, Mapping) or len(reducers) > REDUCERS_MAX:
        raise InvalidInput(f"reducers are a mapping of at most {REDUCERS_MAX} paths to {', '.join(REDUCERS)}")
    for path, reducer in reducers.items():
        names = path.split(".") if isinstance(path, str) else []
        if not all(names) or not 0 < len(names) <= DEPTH_MAX:
            raise InvalidInput(f"{path!r:.60} is no path; write names with dots between them, at most {DEPTH_MAX}")
        if reducer not in REDUCERS:
            raise InvalidInput(f"{reducer!r:.60} is no reducer; there are {', '.join(REDUCERS)}")
        for depth in range(1, len(names)):
            if (outer := ".".join(names[:depth])) in reducers:
                raise InvalidInput(f"{path!r} is within {outer!r}: declare the one or the other")
    return dict(reducers)


def reduced(body: Any, change: Any, reducers: Mapping[str, str], *, strict: bool = True) -> Any:
    """The body with the change reduced into it; what was given stays as it is.

    With `strict` a part of the change that no reducer is declared for is InvalidInput; otherwise it is left out.
    """
    if strict:
        for path in _parts(change, reducers):
            if path not in reducers:
                raise InvalidInput(
                    f"no reducer is declared for {path or 'the whole body'!r:.100}; declare one, or write it with update or replace"
                )
    for path, reducer in reducers.items():
        names = path.split(".")
        if (given := _at(change, names)) is not _MISSING:
            try:
                body = _with(body, names, REDUCERS[reducer], given, path)
            except InvalidInput:
                if strict:
                    raise  # otherwise it is left out, as what nobody declared
    return body


def _parts(change: Any, reducers: Mapping[str, str], path: str = "") -> Iterator[str]:
    """The paths at which the change says something: down to where a reducer is declared, or none can be."""
    inner = f"{path}." if path else ""
    within = path not in reducers and (not path or any(each.startswith(inner) for each in reducers))
    if isinstance(change, dict) and within:
        for name, value in change.items():
            if not name or "." in name:
                raise InvalidInput(
                    f"{name!r:.60} is no name within a path; write {{'a': {{'b': 1}}}} for the path 'a.b'"
                )
            yield from _parts(value, reducers, inner + name)
    else:
        yield path


def _at(value: Any, names: list[str]) -> Any:
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _with(body: Any, names: list[str], reduce: Callable[[Any, Any, str], Any], given: Any, path: str) -> Any:
    """The body, copied along the path, with the value at its end reduced."""
    if not names:
        return reduce(body, given, path)
    if body is _MISSING:
        body = {}
    if not isinstance(body, dict):
        raise InvalidInput(f"{path!r} cannot be reduced: {names[0]!r} is not within an object")
    return {**body, names[0]: _with(body.get(names[0], _MISSING), names[1:], reduce, given, path)}


def _sum(old: Any, new: Any, path: str) -> Any:
    for value in (new, 0 if old is _MISSING else old):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(f"{path!r} is summed, and {value!r:.60} is no number")
    try:
        return new if old is _MISSING else old + new
    except OverflowError:
        raise InvalidInput(f"{path!r} is summed, and a number is too large to be added to a fraction") from None


def _max(old: Any, new: Any, path: str) -> Any:
    for value in (new, new if old is _MISSING else old):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidInput(f"{path!r} keeps the greatest, and {value!r:.60} is neither a number nor text")
    if old is _MISSING:
        return new
    if isinstance(old, str) != isinstance(new, str):
        raise InvalidInput(f"{path!r} keeps the greatest; a number and a text cannot be compared")
    return max(old, new)


def _union(old: Any, new: Any, path: str) -> Any:
    found = {encode(item): item for item in [*_items(old, path), *_items(new, path)]}
    return list(found.values())


def _append(old: Any, new: Any, path: str) -> Any:
    return [*_items(old, path), *_items(new, path)]


def _items(value: Any, path: str) -> list[Any]:
    if value is _MISSING:
        return []
    if not isinstance(value, list):
        raise InvalidInput(f"{path!r} is a list, and {value!r:.60} is none")
    return value


def _last(old: Any, new: Any, path: str) -> Any:
    return new


REDUCERS: Final[Mapping[str, Callable[[Any, Any, str], Any]]] = {
    "sum": _sum,
    "max": _max,
    "union": _union,
    "append": _append,
    "last": _last,
}
