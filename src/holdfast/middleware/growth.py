"""What a batch adds to a space: at worst, from the batch alone, and in truth, given the entries it replaces.

Counted are keys (per owner) and bytes (key and value), as `SpaceInfo.usage` has them. The items of lists and sets, the
history of documents and the book-keeping of queues count as bytes but not as keys: their record, section or message is the
key. Nor does what comes along with a request and cannot be deleted by who made it: an answer that is remembered for an hour, the
mode of a document, a count of executions. It would use up a quota from which no delete leads back. The
store's own book-keeping, `audit/` and `system/`, does not count.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from holdfast.codec import integer
from holdfast.engine import ID_DIGITS, Batch, Delete, Entry, Increment, Push, Put, Take, Touch, Usage

NUMBER_BYTES_MAX: Final = 20
UNCOUNTED: Final = frozenset({"audit", "system"})
"""Subspaces that no quota is about."""
PARTS: Final = frozenset({"lists", "sets", "history", "depths", "dedup", "reasons", "tasks"})
"""Subspaces whose entries belong to something that is a key elsewhere."""
UNDELETABLE: Final = frozenset({"answers", "modes", "tallies"})
"""Subspaces where agents make entries by the way, and delete none."""
WITHOUT_KEYS: Final = PARTS | UNDELETABLE | UNCOUNTED
"""Subspaces whose entries are no keys of their own."""


class Growth(msgspec.Struct, frozen=True):
    """Bytes of the space, and keys by owner, that there are more (or fewer) than before; and the largest value written."""

    bytes: int
    keys: dict[str, int]
    value: int = 0


def totals(usage: Iterable[Usage], owner: str) -> tuple[int, int]:
    """The bytes of a space, and the keys of one owner."""
    size = keys = 0
    for each in usage:
        if each.subspace not in UNCOUNTED:
            size += each.bytes
            if each.owner == owner and each.subspace not in WITHOUT_KEYS:
                keys += each.keys
    return size, keys


def at_worst(batch: Batch) -> Growth:
    """As if nothing of what is written were there yet, and nothing were removed."""
    size = largest = 0
    keys: dict[str, int] = {}
    for op in batch.operations:
        kind, count, owner = type(op), 1, batch.actor
        if kind is Put:
            key, added = op.key, len(op.value)  # type: ignore[union-attr]
            largest = max(largest, added)
            added += _length(key)
            owner = op.owner or owner  # type: ignore[union-attr]
        elif kind is Push:
            key, added = op.prefix, len(op.value)  # type: ignore[union-attr]
            largest = max(largest, added)
            added += _length(key) + ID_DIGITS
        elif isinstance(op, Increment):
            key, added = op.key, _length(op.key) + NUMBER_BYTES_MAX
        elif isinstance(op, Take):
            key, count = op.target, op.n
            added = count * max(0, _length(op.target) - _length(op.source))
            for counter in (op.source_counter, op.target_counter):
                if counter is not None:
                    size += _length(counter) + NUMBER_BYTES_MAX
                    if counter.partition("/")[0] not in WITHOUT_KEYS:
                        keys[owner] = keys.get(owner, 0) + 1
        else:
            continue
        subspace = key.partition("/")[0]
        if subspace not in UNCOUNTED:
            size += added
            if subspace not in WITHOUT_KEYS:
                keys[owner] = keys.get(owner, 0) + count
    return Growth(size, keys, largest)


def keys_named(batch: Batch) -> list[str]:
    """The keys whose entries `in_truth` needs."""
    named = (op.key for op in batch.operations if isinstance(op, Put | Delete | Increment))
    return list(dict.fromkeys(named))


class _Image(NamedTuple):
    owner: str
    value: bytes


def in_truth(batch: Batch, entries: Mapping[str, Entry | None], unsure: Container[str] = ()) -> Growth:
    """Given the entries of `keys_named`, as they are before it. Of what a Take moves only the worst is known.

    An increment adds to its owner's number; but if that is gone by then, it makes one of the actor's own. Entries that are
    `unsure` may be gone. For everything else that makes no difference: what is gone was counted, and is credited.
    """
    before = {key: _Image(entry.owner, entry.value) for key, entry in entries.items() if entry is not None}
    after: dict[str, _Image] = dict(before)
    pushed: list[tuple[str, _Image]] = []
    takes = []
    for op in batch.operations:
        if isinstance(op, Put):
            after[op.key] = _Image(op.owner or batch.actor, op.value)
        elif isinstance(op, Delete):
            after.pop(op.key, None)
        elif isinstance(op, Increment):
            old = after.get(op.key)
            number = 0 if old is None else integer(old.value)
            if op.key in unsure or number is None:
                after[op.key] = _Image(batch.actor, b"0" * NUMBER_BYTES_MAX)
            else:
                after[op.key] = _Image(batch.actor if old is None else old.owner, b"%d" % (number + op.delta))
        elif isinstance(op, Push):
            pushed.append((op.prefix + "0" * ID_DIGITS, _Image(batch.actor, op.value)))
        elif isinstance(op, Take):
            takes.append(op)
        elif isinstance(op, Touch):
            continue
    moved = at_worst(Batch(batch.actor, tuple(takes)))
    size, keys = moved.bytes, dict(moved.keys)
    for sign, images in ((1, [*after.items(), *pushed]), (-1, before.items())):
        for key, image in images:
            subspace = key.partition("/")[0]
            if subspace not in UNCOUNTED:
                size += sign * (_length(key) + len(image.value))
                if subspace not in WITHOUT_KEYS:
                    keys[image.owner] = keys.get(image.owner, 0) + sign
    return Growth(size, keys)


def _length(key: str) -> int:
    return len(key) if key.isascii() else len(key.encode())
