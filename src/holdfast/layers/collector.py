"""Collecting what lists and sets leave behind, and executions of workflows.

When the record that stands for a list or set is deleted, replaced or expires, its items become unreachable at once: the
next list of that name has another id. The collector reads the feed, and removes the items of every id that is no longer
the record's. An execution that has expired leaves its journal (`workflows/collecting.py`). It keeps its position in `system/collector`. Removing twice is harmless, so the items go first and the
position moves after.

Clients that bypass the library write what they like: a record that calls itself a list and names none, keys that no list
has. Nothing of that stops the collector, which would stop the audit and the forgetting of the feed as well. Items that were
written where no record stands for them, or one that is no list, are removed too: the feed tells what was written, and one look at
the records which of it belongs to none. So what counts as one key is one (`middleware/item_claims.py`).

A space that has neither lists nor sets nor executions, which the counts of its usage tell, has nothing to collect: its feed is not read.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from holdfast.codec import decode
from holdfast.engine import (
    OPERATIONS_MAX,
    SYSTEM_ACTOR,
    Absent,
    Batch,
    Change,
    Delete,
    Engine,
    Entry,
    VersionIs,
    cursor_at,
    cursor_revision,
)
from holdfast.errors import Compacted, Conflict, Damaged, InvalidInput
from holdfast.keys import KEY_BYTES_MAX, Subspace, unescape
from holdfast.layers.batch import LIST, RECORDS, SET
from holdfast.layers.consumer import Consumer
from holdfast.layers.records import LISTS, SETS
from holdfast.layers.workflows.collecting import remove_all, remove_execution
from holdfast.layers.workflows.entries import EXECUTIONS, JOURNAL, SIGNALS, WORKFLOWS

POSITION: Final = "system/collector"
SKIPPED_MIN: Final = 4096
"""Commits with nothing to collect are passed over by writing down a new position, once there are so many."""
WRITTEN_MAX: Final = 1000
"""Lists and sets that were written to, whose records are looked at together."""
_SUBSPACES: Final = {LIST: LISTS, SET: SETS}
_COLLECTED: Final = {subspace.name for subspace in (LISTS, SETS, WORKFLOWS, JOURNAL, SIGNALS)}


async def collect(engine: Engine, space: str) -> int:
    """Remove what the feed since the last time left unreachable; gives the number of entries removed."""
    consumer = Consumer(engine, space, POSITION)
    cursor, removed = await consumer.load(), 0
    moved, last = cursor, None
    written: set[str] = set()
    """What the keys of items begin with that were written: subspace, name, id."""
    for info in await engine.spaces(space):
        if not any(usage.keys and usage.subspace in _COLLECTED for usage in info.usage):
            if info.revision - cursor_revision(cursor) >= SKIPPED_MIN:
                await consumer.advance(cursor_at(info.revision))
            return 0
    try:
        seen = (RECORDS.root, LISTS.root, SETS.root, EXECUTIONS)
        async for commit in engine.watch(space, *seen, cursor=cursor, live=False):
            for change in commit.changes:
                if change.key.startswith(EXECUTIONS):
                    if not change.exists:
                        removed += await remove_execution(engine, space, change.key[len(EXECUTIONS) :])
                elif not change.key.startswith(RECORDS.root):
                    if change.exists:
                        written.add("/".join(change.key.split("/", 3)[:3]) + "/")
                elif change.was in _SUBSPACES:
                    removed += await _remove_dead(engine, space, _SUBSPACES[change.was], change)
            if len(written) >= WRITTEN_MAX:
                removed += await _remove_strays(engine, space, written)
                written.clear()
            last = commit
        removed += await _remove_strays(engine, space, written)
        moved = cursor if last is None else last.cursor
    except Compacted:
        removed += await _collect_all(engine, space) + await remove_all(engine, space)
        found = await engine.spaces(space)
        moved = cursor_at(found[0].revision) if found else cursor
    if moved != cursor:
        with suppress(Conflict):  # another process has done the same
            await consumer.advance(moved)
    return removed


async def _remove_dead(engine: Engine, space: str, subspace: Subspace, change: Change) -> int:
    return await _remove_except_current(engine, space, subspace, change.key[len(RECORDS.root) :])


async def _remove_strays(engine: Engine, space: str, written: set[str]) -> int:
    """Of the lists and sets that were written to, remove what stands under no record of its own."""
    keys = {prefix: RECORDS.root + unescape(prefix.split("/", 2)[1]) for prefix in written}
    asked = [key for key in set(keys.values()) if len(key.encode()) <= KEY_BYTES_MAX]
    found = dict(zip(asked, await engine.get(space, asked), strict=True)) if asked else {}
    strays = set()
    for prefix, key in keys.items():
        subspace, name = LISTS if prefix.startswith(LISTS.root) else SETS, key[len(RECORDS.root) :]
        if _current(found.get(key), subspace, name) != prefix:
            strays.add((subspace, name))
    return sum([await _remove_except_current(engine, space, *stray) for stray in strays])


async def _remove_except_current(engine: Engine, space: str, subspace: Subspace, name: str) -> int:
    """Remove the items of all ids but the one the record holds now.

    A list of that name may begin at any moment: what is removed is so on condition that the record is still as it was read.
    """
    key, prefix, after, removed = RECORDS.root + name, subspace.prefix(name), None, 0
    if max(len(prefix.encode()), len(key.encode())) > KEY_BYTES_MAX:
        return 0  # no key can begin so, or none stand for it
    [root] = await engine.get(space, [key])
    while True:
        current = _current(root, subspace, name)
        page = await engine.scan(space, prefix, after=after, limit=OPERATIONS_MAX)
        dead = [entry.key for entry in page.entries if not current or not entry.key.startswith(current)]
        if dead:
            unchanged = Absent(key) if root is None else VersionIs(key, root.version)
            try:
                await engine.commit(space, Batch(SYSTEM_ACTOR, tuple(map(Delete, dead)), (unchanged,)))
            except Conflict:
                [root] = await engine.get(space, [key])
                continue
            removed += len(dead)
        if not page.more:
            return removed
        after = page.entries[-1].key


def _current(root: Entry | None, subspace: Subspace, name: str) -> str:
    """What the keys of the items begin with that the record stands for now; empty when it stands for none."""
    if root is not None and _SUBSPACES.get(root.tag) is subspace:
        with suppress(Damaged, InvalidInput):
            return subspace.prefix(name, decode(root.value, str))
    return ""


async def _collect_all(engine: Engine, space: str) -> int:
    """The feed no longer reaches back: look at every list and set there is."""
    removed = 0
    for subspace in _SUBSPACES.values():
        after: str | None = None
        while (page := await engine.scan(space, subspace.root, after=after, limit=1)).entries:
            key = page.entries[0].key
            element = key[len(subspace.root) :].partition("/")[0]
            removed += await _remove_except_current(engine, space, subspace, unescape(element))
            after = max(key, f"{subspace.root}{element}/\U0010ffff")
    return removed
