"""Reads that tell how far they have seen.

`get` gives entries and no revision, and what is not there has no version to tell it by. A reader who must never see
anything older next time needs one all the same. A scan tells the revision of its snapshot, and the first key that
begins with a key is that key: so one key is read by a scan of one.
"""

from __future__ import annotations

from holdfast.engine import Engine, Entry


async def get_seeing(engine: Engine, space: str, keys: list[str]) -> tuple[list[Entry | None], int]:
    """The entries, from one snapshot, and a revision that whoever saw them has seen.

    Of one key it is the snapshot's own. Of several it may be lower, when all are there (their versions say enough), or
    higher, when one is not: then it is asked for afterwards.
    """
    if len(keys) == 1:
        page = await engine.scan(space, keys[0], limit=1)
        found = page.entries[0] if page.entries and page.entries[0].key == keys[0] else None
        return [found], page.revision
    entries = await engine.get(space, keys)
    missing = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
    if missing:
        return entries, (await engine.scan(space, missing[0], limit=1)).revision
    return entries, max((entry.version for entry in entries if entry is not None), default=0)
