"""A copy of a store that others go on writing to, where the engine cannot make one in a single step.

A space is read page by page, each page as it is at its own moment; then the feed, from before the first page to one revision
behind the last, tells what has changed since, and the copy becomes what the space was at that revision. What was written is
read once more, for all that is known about it; if it has changed again, the feed has the value that it had. The feed does not
have large values: if one of them has changed again, the copy goes on to a later revision.

How it fails. Conflict when large values are written faster than they are copied; Compacted when the feed does not reach back.
What a copy that failed leaves is no store to be used: its caller removes it.
"""

from __future__ import annotations

from typing import Final

from holdfast.engine import (
    OPERATIONS_MAX,
    SYSTEM_ACTOR,
    Batch,
    Change,
    ChangeSet,
    Delete,
    Engine,
    Entry,
    SpaceInfo,
    cursor_at,
)
from holdfast.errors import Conflict
from holdfast.layers.transfer import pages

PASSES_MAX: Final = 100
CHUNK: Final = 500


async def copy_living_store(source: Engine, target: Engine) -> None:
    """Copy every space into a store that has none, each as it is at one moment."""
    for info in await source.spaces():
        await copy_living(source, target, info)


async def copy_living(source: Engine, target: Engine, info: SpaceInfo) -> None:
    """Copy one space as it is at one moment, which is not before this call."""
    await target.create(info.name, info.durability, audit_reads=info.audit_reads)
    async for entries, _ in pages(source, info.name):
        await target.load(info.name, entries, 0)
    reached = info.revision
    for _ in range(PASSES_MAX):
        changes, reached = await _changes(source, info.name, reached)
        if await _apply(source, target, info.name, changes):
            await target.load(info.name, [], reached)
            return
    raise Conflict(f"large values of space {info.name!r} are written faster than they can be copied; try again later")


class _Last:
    """What the feed tells last of an entry."""

    __slots__ = ("change", "commit", "created_at")

    def __init__(self) -> None:
        self.change: Change
        self.commit: ChangeSet
        self.created_at: int | None = None
        """Known if the feed tells of its beginning."""

    def tell(self, change: Change, commit: ChangeSet, begins: bool) -> None:
        if not change.exists:
            self.created_at = None
        elif begins:
            self.created_at = commit.at
        self.change, self.commit = change, commit


async def _changes(source: Engine, space: str, after: int) -> tuple[dict[str, _Last], int]:
    """What has changed after a revision, up to what the space is at now; and that revision."""
    found = await source.spaces(space)
    goal, told = found[0].revision if found else after, dict[str, _Last]()
    if goal > after:
        async for commit in source.watch(space, cursor=cursor_at(after), live=False):
            if commit.version > goal:
                break
            for change in commit.changes:
                last = told.get(change.key)
                begins = last is not None and not last.change.exists
                if last is None:
                    last = told[change.key] = _Last()
                last.tell(change, commit, begins)
    return told, goal


async def _apply(source: Engine, target: Engine, space: str, changes: dict[str, _Last]) -> bool:
    """Make the copy what the feed tells; False when there is a large value that has changed since."""
    complete, every = True, list(changes)
    for start in range(0, len(every), CHUNK):
        keys = every[start : start + CHUNK]
        there, here = await source.get(space, keys), await target.get(space, keys)
        written, gone = list[Entry](), list[str]()
        for key, entry, copied in zip(keys, there, here, strict=True):
            last = changes[key]
            change, commit = last.change, last.commit
            if not change.exists:
                gone.append(key)
            elif entry is not None and entry.version == commit.version:
                written.append(entry)
            elif change.size and not change.value:
                complete = False
            else:
                created_at = last.created_at or (commit.at if copied is None else copied.created_at)
                times = created_at, commit.at, change.expires_at
                written.append(Entry(key, change.value, commit.version, change.owner, *times, change.tag))
        if written:
            await target.load(space, written, 0)
        while gone:
            await target.commit(space, Batch(SYSTEM_ACTOR, tuple(map(Delete, gone[:OPERATIONS_MAX]))))
            del gone[:OPERATIONS_MAX]
    return complete
