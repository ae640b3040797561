"""Following a feed: the one loop behind every engine's `watch`.

A watcher pulls. It reads the commits after its position, and when there are none it waits for the engine's bell. It
therefore costs no memory while its consumer is slow; a consumer that falls behind what the feed keeps gets `Compacted`,
never a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, Protocol, overload

from holdfast.checking import check_start
from holdfast.engine import ChangeSet, resume_revision

READ_MAX: Final = 256
"""Commits read at once."""


class Source(Protocol):
    """One space's feed as the store has it: enough for who does not wait."""

    async def bounds(self) -> tuple[int, int]:
        """The floor (the feed holds what came after it) and the present revision."""
        ...

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        """Whole commits after a revision, in order; Compacted when they are no longer all there."""
        ...


class Feed(Source, Protocol):
    """One space's feed as an engine offers it to `follow`."""

    async def changed(self, after: int) -> None:
        """Return once the revision is past `after`; may return early."""
        ...


@overload
def follow(
    feed: Source, prefixes: tuple[str, ...], cursor: str | None, live: Literal[False]
) -> AsyncIterator[ChangeSet]: ...
@overload
def follow(
    feed: Feed | AbstractContextManager[Feed], prefixes: tuple[str, ...], cursor: str | None, live: bool = True
) -> AsyncIterator[ChangeSet]: ...


async def follow(
    feed: Any, prefixes: tuple[str, ...], cursor: str | None, live: bool = True
) -> AsyncIterator[ChangeSet]:
    """The commits that touch the prefixes, from the cursor (or from now) on; without end, if live.

    A feed that is there only as long as somebody follows it is given as the context that it is there in: a generator around this
    one would be another step for each commit.
    """
    with feed if isinstance(feed, AbstractContextManager) else nullcontext(feed) as source:
        for prefix in prefixes:
            check_start(prefix)
        floor, revision = await source.bounds()
        position = revision if cursor is None else resume_revision(cursor, floor, revision)
        while True:
            commits = await source.read(position, READ_MAX)
            if not commits:
                if not live:
                    return
                await source.changed(position)
                continue
            for commit in commits:
                position = commit.version
                changes = [change for change in commit.changes if not prefixes or change.key.startswith(prefixes)]
                if changes:
                    yield ChangeSet(position, commit.at, commit.actor, changes, commit.request_id)
            if len(commits) == READ_MAX:
                await asyncio.sleep(0)  # others run too while somebody reads through a long feed
            elif live:
                await source.changed(position)  # that was all, so the next read would find nothing
