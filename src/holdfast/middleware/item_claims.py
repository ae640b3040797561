"""What must hold for a list or set to be one key: the claims of `verbs.py` for `lists/` and `sets/`.

The items of a list are no keys of their own: its record is the key (`growth.py`). So an item is written only where that record is
and names the list, `lists/<name>/<id>/…` where `records/<name>` holds `"<id>"`: by then, which is a condition of the commit, or from this
batch on, which then makes the record. What was written before a record went, or under one that is no list, is removed by
`layers/collector.py`. Items are deleted freely.
"""

from __future__ import annotations

from typing import Final

from holdfast.codec import encode
from holdfast.engine import Batch, Condition, Delete, Increment, Push, Put, Take, Touch, ValueIs
from holdfast.keys import escape, unescape
from holdfast.middleware.messages import Misplaced

_TAGS: Final = {"lists": "list", "sets": "set"}
"""What the record of such a collection is tagged."""


def item_claims(batch: Batch) -> list[Condition]:
    """What the items that a batch writes add to it."""
    records: dict[str, tuple[bytes, str] | None] = {}
    """The records that the batch changes, as it leaves them: value and tag, or None."""
    for op in batch.operations:
        if isinstance(op, Put | Delete | Increment) and op.key.startswith("records/"):
            records[op.key] = (op.value, op.tag) if isinstance(op, Put) else None
    needed: dict[tuple[str, ...], ValueIs] = {}
    for op in batch.operations:
        if isinstance(op, Take | Delete | Touch):
            continue
        place = op.prefix if isinstance(op, Push) else op.key
        parts = place.split("/", 3)
        collection = tuple(parts[:3])
        if parts[0] not in _TAGS or collection in needed:
            continue
        if len(parts) < 4 or not all(escape(unescape(part)) == part for part in collection):
            raise Misplaced(place, "an item stands under the name of its list or set, and the id of that")
        standing = ValueIs(f"records/{unescape(parts[1])}", encode(unescape(parts[2])))
        if standing.key in records and records[standing.key] != (standing.value, _TAGS[parts[0]]):
            raise Misplaced(place, "the batch leaves no record that stands for this list or set")
        needed[collection] = standing
    return [standing for standing in needed.values() if standing.key not in records]
