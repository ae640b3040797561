"""What differs between two values, path by path, readable and reversible.

    + findings[2]: "downgrade"            it is new
    - owner: "market"                     it is gone
    ~ risk.score: 0.4 → 0.7               it is another

A path is the names of objects with dots between them and the places of lists in brackets; a name that could be misread is
quoted as JSON. Differences are kept as steps (names and numbers), so no name is ambiguous. Lists are compared place by
place: an item that was inserted at the front shows as every later one changed. `undone` gives back the earlier value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from holdfast.codec import decode, encode
from holdfast.errors import Damaged

SHOWN_MAX: Final = 120
"""Characters of a value that a line shows."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_$-][A-Za-z0-9_$ /-]*")


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place at which two values differ."""

    op: Literal["+", "-", "~"]
    steps: list[str | int]
    old: Any = None
    new: Any = None

    @property
    def path(self) -> str:
        """Where, as people write it; empty for the whole."""
        return path_of(self.steps)

    def __str__(self) -> str:
        where = self.path or "(all)"
        if self.op == "~":
            return f"~ {where}: {shown(self.old)} → {shown(self.new)}"
        return f"{self.op} {where}: {shown(self.new if self.op == '+' else self.old)}"


def path_of(steps: Iterable[str | int]) -> str:
    text = ""
    for step in steps:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (step if _PLAIN.fullmatch(step) else encode(step).decode())
    return text


def shown(value: Any) -> str:
    """A value in a line: JSON, cut when it is long."""
    text = encode(value).decode()
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def differences(old: Any, new: Any, *steps: str | int) -> Iterator[Difference]:
    """Everything in which two values differ."""
    if type(old) is dict and type(new) is dict:
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield Difference("-", [*steps, name], old[name])
            elif name not in old:
                yield Difference("+", [*steps, name], None, new[name])
            elif old[name] is not new[name]:
                yield from differences(old[name], new[name], *steps, name)
    elif type(old) is list and type(new) is list:
        for place in range(min(len(old), len(new))):
            yield from differences(old[place], new[place], *steps, place)
        for place in reversed(range(len(new), len(old))):  # so that, undone, each finds its place
            yield Difference("-", [*steps, place], old[place])
        for place in range(len(old), len(new)):
            yield Difference("+", [*steps, place], None, new[place])
    elif type(old) is not type(new) or old != new:
        yield Difference("~", [*steps], old, new)


def undone(value: Any, changes: Iterable[Difference]) -> Any:
    """The value before these changes; what was given stays as it is."""
    value = decode(encode(value))
    for change in reversed(list(changes)):
        if not change.steps:
            value = decode(encode(change.old))
            continue
        try:
            _undo(value, change)
        except (AttributeError, KeyError, IndexError, TypeError) as exc:
            raise Damaged(f"the history does not fit the document at {change.path!r:.100}") from exc
    return value


def _undo(value: Any, change: Difference) -> None:
    *within, last = change.steps
    for step in within:
        value = value[step]
    if change.op == "+":
        del value[last]
    elif change.op == "-" and isinstance(value, list):
        value.insert(int(last), change.old)
    else:
        value[last] = change.old
