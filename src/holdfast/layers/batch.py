"""The words of a batch of records: conditions and operations for `space.commit(...)`.

    await space.commit(at_least("available", 1), increment("available", -1), set_("owner", "market"))

Each gives the contract's own object for the record's key. `set_` and `delete_` end in an underscore only so that they
do not hide Python's own words.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.clock import Duration, optional_ms
from holdfast.codec import encode
from holdfast.engine import Absent, AtLeast, Condition, Delete, Increment, Operation, Present, Put, ValueIs, VersionIs
from holdfast.errors import InvalidInput
from holdfast.keys import NAME_BYTES_MAX, Subspace, check_name, plain

RECORDS: Final = Subspace("records")

LIST: Final = "list"
SET: Final = "set"


class AbsentType:
    """The type of ABSENT: "there must be nothing yet"."""

    _only: AbsentType | None = None

    def __new__(cls) -> AbsentType:
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False


ABSENT: Final = AbsentType()
"""`compare_and_swap(key, expect=ABSENT, value=…)`: only if there is nothing yet. Not the same as None, which is a value."""


def record_key(name: str) -> str:
    """The engine's key of a record."""
    if type(name) is str and 0 < len(name) <= NAME_BYTES_MAX and name.isascii() and "\0" not in name:
        return "records/" + name
    return "records/" + check_name(plain(name))


def absent(key: str) -> Condition:
    """Only if the record does not exist."""
    return Absent(record_key(key))


def present(key: str) -> Condition:
    """Only if the record exists."""
    return Present(record_key(key))


def version_is(key: str, version: int) -> Condition:
    """Only if the record is at this version."""
    return VersionIs(record_key(key), version)


def value_is(key: str, value: Any) -> Condition:
    """Only if the record holds exactly this value; ABSENT: only if it does not exist."""
    return absent(key) if value is ABSENT else ValueIs(record_key(key), encode(value))


def at_least(key: str, number: int) -> Condition:
    """Only if the record's number is at least this; a record that does not exist counts as 0."""
    return AtLeast(record_key(key), number)


def set_(
    key: str, value: Any, *, ttl: Duration | None = None, type: str | None = None, state: str | None = None
) -> Put:
    """Write a value. Without a ttl it never expires, unless its type has a retention."""
    return Put(record_key(key), encode(value), optional_ms(ttl), type_tag(type, state))


def delete_(key: str) -> Operation:
    """Remove a record; removing what is not there is no error, and its result is False."""
    return Delete(record_key(key))


def increment(key: str, delta: int = 1, *, ttl: Duration | None = None) -> Increment:
    """Add to a number; its result is the sum. A ttl, when given, is set together with it; otherwise it is kept."""
    return Increment(record_key(key), delta, optional_ms(ttl))


def type_tag(type: str | None, state: str | None, version: str | None = None) -> str:
    """How an entry remembers its type and state, and the version of its type's schema if there is one."""
    if type is None:
        if state is not None:
            raise InvalidInput(f"state={state!r} needs a type")
        return ""
    for word in (type, state or ""):
        if not isinstance(word, str) or ":" in word:
            raise InvalidInput(f"a type or state must be a name without ':', not {word!r}")
    if not type:
        raise InvalidInput("a type must not be empty")
    return f":{type}:{state or ''}" if version is None else f":{type}:{state or ''}:{version}"


def split_tag(tag: str) -> tuple[str | None, str | None]:
    """The type and state of a tag made by `type_tag`. Tags that no library made have none."""
    parts = tag.split(":")
    if parts[0] or not 3 <= len(parts) <= 4 or not parts[1]:
        return None, None
    return parts[1], parts[2] or None


def tag_version(tag: str) -> str | None:
    """Under which version of its type's schema an entry was written; None when there was no schema."""
    parts = tag.split(":")
    return parts[3] or None if len(parts) == 4 and not parts[0] and parts[1] else None
