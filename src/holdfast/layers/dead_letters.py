"""Dead letters: messages of a queue that are reserved under no lease, because they failed for good.

They are `reserved/<q>/-/…`, each with its reasons in `reasons/<q>/<id>`. Nothing happens to them by itself. Behind a policy who
made one a dead letter, orchestrators and administrators decide about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.engine import Entry
from holdfast.errors import Conflict, NotFound
from holdfast.layers.messages import Ending, Part, readable_reasons
from holdfast.layers.queue_entries import (
    NO_LEASE,
    REASONS,
    RESERVED,
    Failure,
    Peeked,
    check_id,
    peeked,
    place_of,
    position_at,
    rest_of,
)

if TYPE_CHECKING:
    from holdfast.layers.queues import Queue

GROUP: Final = 500
"""Dead letters that are dealt with at once."""
Entries = list
"""`list` is one of the methods here."""


class DeadLetters:
    """The messages of a queue that failed for good: those reserved under no lease."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def list(self, limit: int = 100) -> Entries[Peeked]:
        """The dead letters, of the highest priority first, with their reasons."""
        queue, scope = self._queue, self._queue.scope
        page = await scope.engine.scan(scope.space, RESERVED.prefix(queue.name, NO_LEASE), limit=limit)
        ids = [place_of(rest_of(entry.key)).id for entry in page.entries]
        found = await scope.engine.get(scope.space, [REASONS.key(queue.name, id) for id in ids]) if ids else []
        reasons: Entries[tuple[Failure, ...]] = [
            () if entry is None else tuple(readable_reasons(entry.value)) for entry in found
        ]
        return [peeked(entry, "dead", why) for entry, why in zip(page.entries, reasons, strict=True)]

    async def retry(self, *ids: str) -> int:
        """Deliver them once more, all of them if none is named, from their old place in line; their attempts still count."""
        return await self._each(ids, lambda ending: ending.ready())

    async def move_back(self, *ids: str) -> int:
        """Put them back at the end of the line, all of them if none is named, as if they had never failed."""
        position = position_at(self._queue.scope.clock.now_ms())
        return await self._each(ids, lambda ending: ending.ready(0, position))

    async def clear(self, *ids: str) -> int:
        """Remove them, all of them if none is named."""
        return await self._each(ids, Ending.gone)

    async def _each(self, ids: tuple[str, ...], end: Callable[[Ending], Entries[Part]]) -> int:
        queue = self._queue
        wanted = {check_id(id) for id in ids}
        found: Entries[Entry] = []
        async for entry in queue.entries("dead"):
            if not wanted or place_of(rest_of(entry.key)).id in wanted:
                found.append(entry)
        if len(found) < len(wanted):
            missing = wanted - {place_of(rest_of(entry.key)).id for entry in found}
            raise NotFound(f"queue {queue.name!r} has no dead letter {', '.join(sorted(missing))}; nothing was changed")
        done = 0
        for start in range(0, len(found), GROUP):
            endings = [Ending.of(queue.name, entry, "dead") for entry in found[start : start + GROUP]]
            results = await asyncio.gather(*(queue.commit(*end(each)) for each in endings), return_exceptions=True)
            for result in results:
                if isinstance(result, Conflict):
                    continue  # somebody else did something with it
                if isinstance(result, BaseException):
                    raise result
                done += 1
        return done
