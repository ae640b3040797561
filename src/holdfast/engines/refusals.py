"""Why a condition does not hold: the same words and attributes whichever engine refuses a batch."""

from __future__ import annotations

from holdfast.codec import integer
from holdfast.engine import Absent, Condition, Empty, Entry, Mine, Present, ValueIs, VersionIs
from holdfast.errors import Conflict
from holdfast.keys import shown


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
