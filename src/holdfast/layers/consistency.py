"""How new a read must be, and how layers ask for it.

    strong      shows every commit acknowledged before it began; always asks the durable engine
    session     shows what this view wrote and what its session reads showed before, or newer: never older
    eventual    shows what was true at some time within the hot tier's ttl

Where there is no hot tier all three ask the engine, so all are strong; a session counts what it sees all the same, because
its token may be handed to a process that has one. What is not there has no version; such a read tells the revision of its
snapshot (`middleware/snapshot.py`), so that nobody sees afterwards what was deleted before.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from holdfast.engine import Entry, Page
from holdfast.errors import InvalidInput
from holdfast.layers.scope import Scope
from holdfast.middleware.snapshot import get_seeing

Consistency: TypeAlias = Literal["strong", "session", "eventual"]


async def read(scope: Scope, keys: list[str], consistency: Consistency = "strong") -> list[Entry | None]:
    """The entries of these keys, from one snapshot that is as new as asked."""
    caches, session = scope.caches, scope.session
    if consistency == "session":
        if caches is not None:
            entries, seen = await caches.get_seen(scope.space, keys, session.seen)
        else:
            entries, seen = await get_seeing(scope.engine, scope.space, keys)
        session.saw(seen)
        return entries
    if consistency == "eventual" and caches is not None:
        return (await caches.get_seen(scope.space, keys, 0))[0]
    _check(consistency)
    return await scope.engine.get(scope.space, keys)


async def read_prefix(scope: Scope, prefix: str, consistency: Consistency = "strong", *, limit: int = 1000) -> Page:
    """The first entries under a prefix, from one snapshot that is as new as asked.

    One that ends in a slash, with at most ITEM_ENTRIES_MAX entries in it, can be answered by a hot tier.
    """
    caches, session = scope.caches, scope.session
    if consistency == "session":
        if caches is not None:
            page = await caches.scan_seen(scope.space, prefix, session.seen, limit=limit)
        else:
            page = await scope.engine.scan(scope.space, prefix, limit=limit)
        session.saw(page.revision)
        return page
    if consistency == "eventual" and caches is not None:
        return await caches.scan_seen(scope.space, prefix, 0, limit=limit)
    _check(consistency)
    return await scope.engine.scan(scope.space, prefix, limit=limit)


async def read_with_prefix(
    scope: Scope, keys: list[str], prefix: str, consistency: Consistency = "strong", *, limit: int = 1000
) -> tuple[list[Entry | None], Page]:
    """Entries and the first page under a prefix: two snapshots, each as new as asked; from a hot tier in one round trip."""
    caches, session = scope.caches, scope.session
    if caches is None or consistency not in ("session", "eventual"):
        return await read(scope, keys, consistency), await read_prefix(scope, prefix, consistency, limit=limit)
    least = session.seen if consistency == "session" else 0
    entries, page, seen = await caches.read_seen(scope.space, keys, prefix, least, limit=limit)
    if consistency == "session":
        session.saw(seen)
    return entries, page


def _check(consistency: str) -> None:
    if consistency not in ("strong", "eventual"):
        raise InvalidInput(f"consistency is strong, session or eventual, not {consistency!r:.40}")
