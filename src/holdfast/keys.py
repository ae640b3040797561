"""How keys are built.

A key is text: a subspace, a slash, and the elements of what it names: `records/orders/1`,
`lists/files/018f…/1889012345678901234`. The first element says which capability owns the entry; docs/keyspace.md lists
them all. The last element is written as it is, so a record's key stays readable and keeps its order. Every element
before the last is escaped (`%` and `/` only), so that no name can reach into another's range.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from holdfast.errors import InvalidInput

KEY_BYTES_MAX: Final = 1024
"""The longest key of an engine, subspace included, in UTF-8 bytes; a slash in an element before the last takes three."""

NAME_BYTES_MAX: Final = 512
"""The longest name a user gives to a record."""


def check_key(key: str) -> None:
    """Refuse what cannot be a key of an engine."""
    if type(key) is str and len(key) <= KEY_BYTES_MAX and key.isascii() and "\0" not in key and key.find("/") > 0:
        return
    if type(key) is not str:
        raise InvalidInput(f"a key must be text, not {type(key).__name__}")
    if key.isascii():
        size = len(key)
    else:
        try:
            size = len(key.encode())
        except UnicodeEncodeError:
            raise InvalidInput(f"key {_shown(key)} is not valid Unicode text: it has a lone surrogate") from None
    if size > KEY_BYTES_MAX:
        raise too_long(key, size, KEY_BYTES_MAX)
    if "\0" in key:
        raise InvalidInput(f"key {_shown(key)} contains a NUL character, which no key may")
    if key.find("/") < 1:
        raise InvalidInput(f"key {_shown(key)} names no subspace; write subspace/name")


def too_long(key: str, size: int, limit: int) -> InvalidInput:
    """What to say of a key that is too long: by the name that somebody gave, where slashes have made it so long."""
    name = next((each for each in key.split("/") if "%2F" in each or "%25" in each), None)
    if name is None:
        return InvalidInput(f"key {_shown(key)} is {size:,} bytes long; the limit is {limit:,} bytes")
    return InvalidInput(
        f"key {_shown(unescape(name))} is too long: it is kept as {key[: key.index('/')]}/…, where each '/' and '%' in it takes "
        f"three bytes, which makes {size:,}; the limit is {limit:,} bytes"
    )


def check_name(name: str, what: str = "key") -> str:
    """Refuse what cannot be the name a user gives to a record, and return it."""
    if type(name) is not str:
        raise InvalidInput(f"a {what} must be text, not {type(name).__name__}")
    if not name:
        raise InvalidInput(f"a {what} must not be empty")
    if len(name) > NAME_BYTES_MAX or not name.isascii():
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidInput(f"{what} {_shown(name)} is not valid Unicode text: it has a lone surrogate") from None
        if size > NAME_BYTES_MAX:
            raise InvalidInput(f"{what} {_shown(name)} is {size:,} bytes long; the limit is {NAME_BYTES_MAX:,} bytes")
    if "\0" in name:
        raise InvalidInput(f"{what} {_shown(name)} contains a NUL character, which no {what} may")
    return name


def plain(name: str) -> str:
    """A member of an enum of texts as the text that it is; anything else as it came."""
    return str.__str__(name) if isinstance(name, str) and isinstance(name, Enum) else name


def check_prefix(prefix: str) -> str:
    """Like `check_name`, for the beginning of a name; empty means every name."""
    return "" if prefix == "" else check_name(prefix, "prefix")


def escape(element: str) -> str:
    """An element that may stand before another: no slash, so it ends where its slash stands."""
    return element.replace("%", "%25").replace("/", "%2F") if "/" in element or "%" in element else element


def unescape(element: str) -> str:
    return element.replace("%2F", "/").replace("%25", "%") if "%" in element else element


def prefix_end(prefix: str) -> str | None:
    """The first text after everything that begins with the prefix; None when there is none."""
    while prefix:
        last = ord(prefix[-1])
        if last < 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)
        prefix = prefix[:-1]
    return None


def shown(key: str) -> str:
    """A key as messages tell it to people: a record by the name they gave it, anything else in full."""
    name = key.removeprefix("records/")
    return repr(name) if len(name) <= 60 else repr(name[:57]) + "…"


def subspace_of(key: str) -> str:
    return key[: key.index("/")]


class Subspace:
    """One capability's part of the keyspace.

    >>> lists = Subspace("lists")
    >>> lists.key("a/b", "0001")
    'lists/a%2Fb/0001'
    >>> lists.prefix("a/b")
    'lists/a%2Fb/'
    >>> lists.split("lists/a%2Fb/0001", 2)
    ['a/b', '0001']
    """

    __slots__ = ("name", "root")

    def __init__(self, name: str) -> None:
        self.name = name
        self.root = name + "/"

    def key(self, *elements: str) -> str:
        """The key of these elements; the last one is written as it is."""
        if len(elements) == 1:
            return self.root + elements[0]
        return self.root + "/".join((*map(escape, elements[:-1]), elements[-1]))

    def prefix(self, *elements: str) -> str:
        """What every key below these elements begins with."""
        return self.root + "".join([escape(element) + "/" for element in elements])

    def split(self, key: str, count: int) -> list[str]:
        """The elements of a key that was made of `count` of them."""
        parts = key[len(self.root) :].split("/", count - 1)
        return [*map(unescape, parts[:-1]), parts[-1]]


def _shown(key: str) -> str:
    return repr(key if len(key) <= 40 else key[:37] + "...")
