"""Moving spaces between stores, exactly: values, versions, owners, times and expiries.

A copy reads pages from one engine and loads them into the other as they are, and raises the target's revision to the
source's, so versions held outside (ETags, fencing tokens, session tokens) stay true. The feed and request ids do not
travel. `copy_space` ends by comparing both sides entry by entry; a difference raises Damaged. A copy that was interrupted
is simply run again: what is there already is written once more with the same bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from holdfast.engine import Engine, Entry, SpaceInfo
from holdfast.errors import Conflict, Damaged, NotFound

PAGE: Final = 2_000

Progress = Callable[[str, int, int], None]
"""Called with the space, the entries done, and the entries in all."""


async def copy_store(source: Engine, target: Engine, progress: Progress | None = None) -> dict[str, int]:
    """Copy every space; gives the number of entries of each."""
    return {info.name: await copy_space(source, target, info, progress) for info in await source.spaces()}


async def copy_space(source: Engine, target: Engine, info: SpaceInfo, progress: Progress | None = None) -> int:
    """Copy one space into a target where it does not exist yet (or where an earlier copy was interrupted)."""
    present = await target.spaces(info.name)
    if present and present[0].revision > info.revision:
        raise Conflict(
            f"space {info.name!r} exists in the target and is further than the source; copy into a store without it"
        )
    await target.create(info.name, info.durability, audit_reads=info.audit_reads)
    total, done = sum(usage.keys for usage in info.usage), 0
    async for entries, revision in pages(source, info.name):
        await target.load(info.name, entries, revision)
        done += len(entries)
        if progress is not None:
            progress(info.name, done, max(total, done))
    await target.load(info.name, [], info.revision)
    await compare(source, target, info.name)
    return done


async def pages(engine: Engine, space: str) -> AsyncIterator[tuple[list[Entry], int]]:
    """All entries of a space, page by page, with the revision each page was read at."""
    after: str | None = None
    while True:
        page = await engine.scan(space, "", after=after, limit=PAGE)
        if page.entries:
            yield page.entries, page.revision
            after = page.entries[-1].key
        if not page.more:
            return


async def compare(source: Engine, target: Engine, space: str) -> None:
    """Make sure that both hold the same entries; Damaged, naming the first that differs, otherwise."""
    if not await target.spaces(space):
        raise NotFound(f"the target has no space {space!r}")
    there = pages(target, space)
    async for entries, _ in pages(source, space):
        copied, _ = await anext(there, ([], 0))
        for mine, theirs in zip(entries, copied, strict=False):
            if mine != theirs:
                raise Damaged(f"the copy of space {space!r} differs at {mine.key!r}: was the source written to meanwhile?")
        if len(entries) != len(copied):
            raise Damaged(f"the copy of space {space!r} has another number of entries: was the source written to meanwhile?")
    if await anext(there, None) is not None:
        raise Damaged(f"the copy of space {space!r} has entries that the source has not")
