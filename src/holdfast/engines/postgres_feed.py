"""The feed of a space in a PostgreSQL store, as `feed.follow` reads it, and the bell that tells of new commits.

A commit wakes the watchers of its own process directly. For those of others it is followed by a NOTIFY, which is no part
of its transaction, because a NOTIFY holds a lock of the whole database until that ends. There is at most one per RING_S and
engine, for all that was committed since the last, and none while nobody listens: a listener holds a shared advisory lock,
and who rings tries to take it. Whoever misses a ring, because a connection broke or a listener had just come, finds the
change by asking every POLL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

from holdfast.engine import ChangeSet
from holdfast.engines.postgres_link import Broken, Call, Link, Refused, Rows, int4, int8, number, text, text_array
from holdfast.engines.postgres_rows import decode_row
from holdfast.engines.postgres_statements import FEED, HEADS, LISTENING, POSITION, RING, listen_to
from holdfast.errors import Compacted, Error

if TYPE_CHECKING:
    from holdfast.engines.postgres import PostgresEngine

RING_S: Final = 0.004
"""The pause between two rings."""
QUIET_S: Final = 0.1
"""The pause after a ring that nobody was there to hear."""
POLL_S: Final = 0.25
AGAIN_S: Final = 1.0
"""The pause before a listener that lost its connection tries again."""
FEED_BYTES_MAX: Final = 8 * 1024 * 1024
"""Rows of the feed are read at once up to about this size."""


class PostgresFeed:
    """`Feed` of one space."""

    def __init__(self, engine: PostgresEngine, space: str) -> None:
        self._engine = engine
        self._space = space

    async def bounds(self) -> tuple[int, int]:
        [rows] = await self._engine._ask((POSITION, (text(self._space),)))
        return (number(rows[0][0]), number(rows[0][1])) if rows else (0, 0)

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        [rows] = await self._engine._ask((FEED, (text(self._space), int8(after), int8(limit), int8(FEED_BYTES_MAX))))
        if rows and after < (floor := number(rows[0][0])):
            raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
        found: list[ChangeSet] = []
        for _, *row in rows:
            if row[0] is not None:
                found.extend(commit for commit in decode_row(row) if commit.version > after)
            if len(found) >= limit:
                break
        return found

    async def changed(self, after: int) -> None:
        with self._engine._bell.listening(self._space) as rung:  # before looking, so that nothing falls in between
            if (await self.bounds())[1] <= after:
                await rung


class Bell:
    """Wakes watchers in this process, and rings for those in others."""

    def __init__(
        self,
        run: Callable[..., Awaitable[list[Rows]]],
        connect: Callable[[], Awaitable[Link]],
        locks: int,
    ) -> None:
        self._run = run
        self._connect = connect
        self._locks = locks
        self._channel = f"holdfast_{locks}"
        self._names: dict[int, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._seen: dict[str, int] = {}
        self._pending: set[int] = set()
        self._ringing: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    @contextlib.contextmanager
    def listening(self, space: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done at the next commit to the space, whoever makes it; it may be done for nothing."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closed:
            waiter.set_result(None)
        elif self._listening is None:
            self._listening = asyncio.create_task(self._listen())
            self._polling = asyncio.create_task(self._poll())
        self._waiting.setdefault(space, set()).add(waiter)
        try:
            yield waiter
        finally:
            waiting = self._waiting.get(space)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    self._waiting.pop(space, None)

    def wake(self, space: str) -> None:
        """Something was committed to the space."""
        for waiter in self._waiting.get(space, ()):
            if not waiter.done():
                waiter.set_result(None)

    def committed(self, space: str, id: int) -> None:
        """We committed something to the space."""
        self._names[id] = space
        if self._waiting:
            self.wake(space)
        self._pending.add(id)
        if self._ringing is None and not self._closed:
            self._ringing = asyncio.create_task(self._ring())

    async def _ring(self) -> None:
        """Tell other processes, until there is nothing more to tell."""
        try:
            while self._pending and not self._closed:
                ids, self._pending = self._pending, set()
                payload = ",".join(map(str, sorted(ids)[:500]))
                try:
                    [rows] = await self._run((RING, (int4(self._locks), text(self._channel), text(payload))))
                    heard = rows[0][0] == b"\x01"
                except (Error, Broken, Refused):
                    heard = False  # they find out by themselves a moment later
                await asyncio.sleep(RING_S if heard else QUIET_S)
        finally:
            self._ringing = None

    async def _listen(self) -> None:
        """Hear what other processes ring, on a connection of its own."""
        while True:
            ended = asyncio.Event()
            link: Link | None = None
            try:
                link = await self._connect()
                link.heard = self._heard
                link.ended = ended.set
                calls: list[Call] = [(LISTENING, (int4(self._locks),)), (listen_to(self._channel), ())]
                await link.send(*calls)
                for space in list(self._waiting):
                    self.wake(space)  # what was rung before we listened
                await ended.wait()
            except (Error, Broken, Refused):
                await asyncio.sleep(AGAIN_S)
            finally:
                if link is not None:
                    link.ended = None
                    link.close()

    def _heard(self, payload: str) -> None:
        for id in payload.split(","):
            name = self._names.get(int(id))
            if name is not None:
                self.wake(name)
            else:  # a space we only watch: let the watchers look
                for space in list(self._waiting):
                    self.wake(space)

    async def _poll(self) -> None:
        """The safety net, for a ring that was missed."""
        while True:
            await asyncio.sleep(POLL_S)
            if not self._waiting:
                self._seen.clear()
                continue
            with contextlib.suppress(Error, Broken, Refused):
                [rows] = await self._run((HEADS, (text_array(list(self._waiting)),)))
                for id, name, revision in rows:
                    space, reached = (name or b"").decode(), number(revision)
                    self._names[number(id)] = space
                    if self._seen.get(space) != reached:
                        self._seen[space] = reached
                        self.wake(space)

    async def close(self) -> None:
        """Stop, and let whoever waits find out that the store is closed."""
        self._closed = True
        tasks = [task for task in (self._ringing, self._listening, self._polling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for space in list(self._waiting):
            self.wake(space)
