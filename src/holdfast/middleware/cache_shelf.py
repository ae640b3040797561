"""What a hot tier needs of a place where processes share copies, and how a copy is written.

A copy says at which revision it was read and at which instant. Whether it is new enough is for its reader to judge, by what
it knows of the space's changes; the shelf only makes sure that a copy of an earlier revision never replaces a later one.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from holdfast.engine import Entry
from holdfast.middleware.cache_memory import Item, Name


class Shelf(Protocol):
    """Where processes share copies. It may lose any, at any time."""

    async def get(self, space: str, name: str) -> bytes | None:
        """The copy of this name; None also when the shelf does not answer."""
        ...

    async def get_all(self, space: str, names: list[str]) -> list[bytes | None]:
        """The copies of these names, in one round trip; None for each when the shelf does not answer."""
        ...

    async def put(self, space: str, name: str, at: int, copy: bytes, ttl_ms: int) -> bool:
        """Keep a copy that was read at this revision. False: a later one was there, or the shelf does not answer."""
        ...

    @property
    def errors(self) -> int:
        """How often it did not answer."""
        ...

    async def close(self) -> None: ...


class _Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at: int
    since: int
    read_at: int
    entries: list[Entry]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Copy).decode


def copy_of(item: Item) -> bytes:
    return _encode(_Copy(item.at, item.since, item.read_at, item.entries))


def item_of(copy: bytes) -> Item | None:
    """What a copy says; None when it is none."""
    try:
        read = _decode(copy)
    except msgspec.DecodeError:
        return None
    return Item(read.entries, read.at, read.since, read.read_at)


def label(name: Name) -> str:
    """An item's name on a shelf: a page is told from an entry of the same name."""
    return ("entry:" if len(name) == 2 else "page:") + name[1]
