"""Removing what an execution leaves behind when its record has expired, or was deleted.

Everything about an execution is read through `workflows/executions/<id>`. When that is gone, the collector, which reads the feed, removes
the rest, and ends its references to blobs. Removing twice is harmless.
"""

from __future__ import annotations

from holdfast.codec import decode
from holdfast.engine import OPERATIONS_MAX, SYSTEM_ACTOR, Absent, Batch, Delete, Engine, Entry, Operation
from holdfast.errors import Conflict, Error
from holdfast.keys import Subspace
from holdfast.layers.workflows.entries import (
    META,
    StepRecord,
    data_prefix,
    execution_key,
    inbox_key,
    items_prefix,
    log_prefix,
    mail_prefixes,
    meta_key,
    steps_prefix,
)

_BLOBS = Subspace("blobs")


async def remove_execution(engine: Engine, space: str, id: str) -> int:
    """Remove what is left of an execution that is gone; gives the number of entries removed."""
    [entry] = await engine.get(space, [execution_key(id)])
    if entry is not None:
        return 0  # it was tried again, or started anew
    removed, gone = 0, (Absent(execution_key(id)),)
    steps = steps_prefix(id)
    try:
        for prefix in (steps, log_prefix(id), data_prefix(id), items_prefix(id), *mail_prefixes(id)):
            while (page := await engine.scan(space, prefix, limit=OPERATIONS_MAX // 2)).entries:
                operations: list[Operation] = [Delete(each.key) for each in page.entries]
                if prefix == steps:
                    operations += [Delete(key) for each in page.entries if (key := _reference(each)) is not None]
                await engine.commit(space, Batch(SYSTEM_ACTOR, tuple(operations), gone))
                removed += len(page.entries)
        await engine.commit(space, Batch(SYSTEM_ACTOR, (Delete(inbox_key(id)), Delete(meta_key(id))), gone))
    except Conflict:
        return removed  # it came back meanwhile, out of its archive
    return removed + 2


def _reference(entry: Entry) -> str | None:
    """The reference to a blob that a step holds."""
    try:
        blob = decode(entry.value, StepRecord).blob
    except Error:
        return None  # no worker wrote it
    return None if blob is None else _BLOBS.key(blob.sha256, entry.key)


async def remove_all(engine: Engine, space: str) -> int:
    """Look at every execution there is: where the feed does not reach back."""
    removed, after = 0, None
    while True:
        page = await engine.scan(space, META, after=after, limit=500)
        ids = [entry.key[len(META) :] for entry in page.entries]
        found = await engine.get(space, [execution_key(id) for id in ids]) if ids else []
        for id, entry in zip(ids, found, strict=True):
            if entry is None:
                removed += await remove_execution(engine, space, id)
        if not page.more:
            return removed
        after = page.entries[-1].key
