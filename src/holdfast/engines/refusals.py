"""Why a batch is refused: the same words and attributes whichever engine refuses it."""

from __future__ import annotations

from typing import Final

from holdfast.codec import integer
from holdfast.engine import Absent, Condition, Empty, Entry, Mine, Present, ValueIs, VersionIs
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import shown

_KINDS: Final = {
    **{b'"': "text", b"[": "a list", b"{": "an object", b"t": "true", b"f": "false", b"n": "null"},
    **dict.fromkeys((b"-", *(b"%d" % digit for digit in range(10))), "a number"),
}
"""What a value is, by its first byte: canonical JSON begins with nothing else."""
_COLLECTIONS: Final = {"list": "a list", "set": "a set"}
"""What a record is that stands for items of its own, by its tag."""


def no_number(key: str, first: bytes, tag: str) -> InvalidInput:
    """What cannot be incremented, of which the first byte is given: it is told what it is and never what it says, which may be a secret."""
    kind = _COLLECTIONS.get(tag) or _KINDS.get(first, "something")
    return InvalidInput(f"{shown(key)} holds {kind}, which is no 64-bit integer: it cannot be incremented")


def refusal(condition: Condition, entry: Entry | None) -> Conflict:
    """Why a condition does not hold, in words and as attributes."""
    if isinstance(condition, Empty):
        text = f"nothing was expected under {shown(condition.prefix)}"
        key = condition.prefix if entry is None else entry.key
        return Conflict(
            text if entry is None else f"{text}, but {shown(key)} is there", key=key, condition="empty", actual=entry
        )
    key, called = condition.key, shown(condition.key)
    there = "it is absent" if entry is None else f"it is at version {entry.version}"
    if isinstance(condition, Absent):
        name, text = "absent", f"{called} was expected to be absent, but {there}"
    elif isinstance(condition, Present):
        name, text = "present", f"{called} was expected to be present, but {there}"
    elif isinstance(condition, VersionIs):
        name, text = "version", f"{called} was expected at version {condition.version}, but {there}"
    elif isinstance(condition, ValueIs):
        name, text = "value", f"{called} does not hold the expected value: {there}"
    elif isinstance(condition, Mine):
        name, text = "mine", f"{called} belongs to {entry.owner if entry is not None else 'nobody'!r}"
    else:
        found = 0 if entry is None else integer(entry.value)
        name, text = "at_least", f"{called} was expected to be at least {condition.number}, but it is {found}"
    return Conflict(text, key=key, condition=name, actual=entry)
