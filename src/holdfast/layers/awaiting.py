"""Waiting for entries to change: one watch per process and prefix, however many wait.

Whoever waits for an entry gets an event that is set when the feed shows a change of it. It reads after it has begun to
listen, so nothing is missed in between; what the feed showed it need not read again. Where the feed cannot be followed everybody is
woken, and looks for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from holdfast.clock import Clock
from holdfast.engine import Engine, cursor_at
from holdfast.errors import Compacted, Error, Unavailable

RETRY_MS: Final = 100
"""After the feed could not be followed."""
LINGER_S: Final = 2.0
"""How long the feed is followed when nobody waits any more: mostly somebody comes back at once. Nothing depends on it."""

log = logging.getLogger("holdfast.awaiting")


class Listener(asyncio.Event):
    """One who waits."""

    def __init__(self, tags: frozenset[str] | None) -> None:
        super().__init__()
        self.tags = tags
        self.value: bytes | None = None
        """What the feed showed last of the entry, if it showed all of it."""
        self._shown = self.read = 0
        self.missed_nothing = False
        """Whether the feed will show all that comes after what the one who waits knows."""
        self._closed = False

    def close(self) -> None:
        """Nothing more will be told: who waits finds out as soon as they want to wait again."""
        self._closed = True
        self.set()

    def clear(self) -> None:
        if self._closed:
            raise Unavailable("the store was closed while this was waited for; open it again")
        super().clear()

    def show(self, value: bytes | None, version: int = 0) -> None:
        """The entry was changed; to this, if it is known."""
        if version and version <= self.read:
            return  # the feed shows what was before
        if version or not self.read:
            self.value, self._shown = value, version
        self.set()

    def has_read(self, version: int) -> None:
        """The one who waits has read this version of the entry: what was before it is old."""
        self.read = version
        if self._shown <= version:
            self.value = None


class Awaiting:
    """Those who wait for entries under one prefix of one space."""

    def __init__(self, engine: Engine, space: str, prefix: str, clock: Clock) -> None:
        self._engine = engine
        self._space = space
        self._prefix = prefix
        self._clock = clock
        self._events: dict[str, set[Listener]] = {}
        self._task: asyncio.Task[None] | None = None
        self._shown = 0
        """The last revision of which the feed showed something, or as of which it is followed."""
        self._leaving: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def listening(
        self, key: str, tags: frozenset[str] | None = None, known: int | None = None
    ) -> AsyncIterator[Listener]:
        """As long as this lasts: the event is set when the entry changes; if `tags` are given, to one with such a tag, or to nothing.

        `known` is the revision as of which the entry is known: if the feed is not further than that, nothing needs to be read.
        """
        event = Listener(tags)
        self._events.setdefault(key, set()).add(event)
        try:
            if self._task is None:
                revision = await self._now()
                if self._task is None:
                    self._shown = revision
                    self._task = asyncio.get_running_loop().create_task(self._follow(cursor_at(revision)))
            event.missed_nothing = known is not None and self._shown <= known
            yield event
        finally:
            self._events[key].discard(event)
            if not self._events[key]:
                del self._events[key]
            if not self._events and self._leaving is None:
                self._leaving = asyncio.get_running_loop().call_later(LINGER_S, self._leave)

    def _leave(self) -> None:
        self._leaving = None
        if not self._events:
            self.stop()

    def tell(self, key: str, value: Callable[[], bytes] | None = None) -> None:
        """An entry was changed here, to this if it is known: who waits need not wait for the feed to say so."""
        for event in self._events.get(key, ()):
            event.show(value() if value is not None and event.value is None else event.value)

    def stop(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """Stop for ever; whoever still waits is told."""
        self.stop()
        for events in self._events.values():
            for event in events:
                event.close()

    async def _now(self) -> int:
        found = await self._engine.spaces(self._space)
        return found[0].revision if found else 0

    async def _follow(self, cursor: str) -> None:
        while True:
            try:
                async for commit in self._engine.watch(self._space, self._prefix, cursor=cursor):
                    cursor, self._shown = commit.cursor, commit.version
                    for change in commit.changes:
                        for event in self._events.get(change.key, ()):
                            if event.tags is None or not change.exists or change.tag in event.tags:
                                event.show(change.value if change.exists and change.value else None, commit.version)
            except Error as exc:
                log.debug("the feed of %s is followed anew: %s", self._space, exc)
                await self._clock.sleep_until(self._clock.now_ms() + RETRY_MS)
                if isinstance(exc, Compacted):
                    try:
                        self._shown = await self._now()
                    except Error:
                        continue
                    cursor = cursor_at(self._shown)
                for events in self._events.values():
                    for event in events:
                        event.value = None
                        event.set()
