"""What a hot tier remembers in this process: the least recently used goes first.

Items are named (space, key) for one entry, and (space, prefix, "page") for all entries under a prefix. What is not there is
remembered too, but apart, in little room and for a short time: a stream of questions for nothing must not push out what
is wanted, and nothing stays absent for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeAlias

from holdfast.engine import Entry

BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all items together, keys and values."""
ITEM_BYTES_MAX: Final = 1024 * 1024
ITEM_ENTRIES_MAX: Final = 1000
"""What is larger is not kept: it is read from the durable engine each time."""
NEGATIVES_MAX: Final = 200
NEGATIVE_TTL_MS: Final = 5_000
EXPIRY_MARGIN_MS: Final = 1_000
"""An entry that expires within this time is asked for: the store's clock may be ahead of ours."""

Name: TypeAlias = tuple[str, ...]


class Item:
    """What was read: entries, and the revisions at which they are known to be so, from `since` up to `at`."""

    __slots__ = ("at", "entries", "more", "read_at", "since", "until")

    def __init__(self, entries: list[Entry], at: int, since: int, read_at: int, more: bool = False) -> None:
        self.entries = entries
        self.at = at
        self.since = since
        self.read_at = read_at
        self.more = more
        self.until = 0

    def keep_until(self, at_ms: int) -> None:
        """It may be shown before this instant, and before one of its entries expires."""
        for entry in self.entries:
            if entry.expires_at is not None and entry.expires_at - EXPIRY_MARGIN_MS < at_ms:
                at_ms = entry.expires_at - EXPIRY_MARGIN_MS
        self.until = at_ms

    @property
    def size(self) -> int:
        return sum([len(entry.key) + len(entry.value) for entry in self.entries])

    @property
    def fits(self) -> bool:
        return not self.more and self.size <= ITEM_BYTES_MAX and len(self.entries) <= ITEM_ENTRIES_MAX


class Memory:
    """Items by name, bounded in number and bytes."""

    def __init__(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self._items: OrderedDict[Name, Item] = OrderedDict()
        self._absent: OrderedDict[Name, Item] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._items) + len(self._absent)

    def get(self, name: Name) -> Item | None:
        item = self._items.get(name)
        if item is not None:
            self._items.move_to_end(name)
            return item
        return self._absent.get(name)

    def put(self, name: Name, item: Item) -> bool:
        """Keep it, unless what is there is of a later revision."""
        there = self._items.get(name) or self._absent.get(name)
        if there is not None:
            if there.at > item.at:
                return False
            self.forget(name)
        if item.entries:
            self._items[name] = item
            self._size += item.size
            while len(self._items) > self.entries_max or self._size > BYTES_MAX:
                _, oldest = self._items.popitem(last=False)
                self._size -= oldest.size
        else:
            item.until = min(item.until, item.read_at + NEGATIVE_TTL_MS)
            self._absent[name] = item
            while len(self._absent) > NEGATIVES_MAX:
                self._absent.popitem(last=False)
        return True

    def forget(self, name: Name) -> None:
        item = self._items.pop(name, None)
        if item is not None:
            self._size -= item.size
        self._absent.pop(name, None)

    def forget_space(self, space: str) -> None:
        for name in [name for name in (*self._items, *self._absent) if name[0] == space]:
            self.forget(name)
