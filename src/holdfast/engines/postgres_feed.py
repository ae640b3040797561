"""The feed of a space in a PostgreSQL store, as `feed.follow` reads it, and the bell that tells of new commits.

A commit is handed to the watchers of its own process directly (`feed_tail.py`). For those of others it is followed by a NOTIFY
with the space and its revision, which is no part of its transaction, because a NOTIFY holds a lock of the whole database until
that ends. There is at most one per RING_S and engine, for all that was committed since the last, and none while nobody else listens: a
listener holds a shared advisory lock, and who rings tries to take it, on the connection it listens with itself, whose own lock does not
count. Whoever misses a ring, because a connection broke or a listener had just come, finds the change by asking every POLL_S; while it has no connection to listen on, every POLL_DEAF_S.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.engine import ChangeSet
from holdfast.engines.feed_tail import Following, Tails
from holdfast.engines.postgres_link import Broken, Call, Link, Refused, Rows, int4, int8, number, text, text_array
from holdfast.engines.postgres_rows import decode_row
from holdfast.engines.postgres_statements import FEED, HEADS, LISTENING, POSITION, RING, listen_to
from holdfast.errors import Compacted, Error

if TYPE_CHECKING:
    pass

RING_S: Final = 0.004
"""The pause between two rings."""
RING_MAX: Final = 200
"""Spaces one ring tells of: a NOTIFY has less than 8,000 bytes. Those left out are found by asking."""
QUIET_S: Final = 0.1
"""The pause after a ring that nobody was there to hear."""
POLL_S: Final = 0.5
"""While it listens: whoever commits may die before it rings."""
POLL_DEAF_S: Final = 0.25
AGAIN_S: Final = 1.0
"""The pause before a listener that lost its connection tries again."""
FEED_BYTES_MAX: Final = 8 * 1024 * 1024
"""Rows of the feed are read at once up to about this size."""


class PostgresFeed:
    """The feed of one space, as the server has it."""

    def __init__(self, ask: Callable[..., Awaitable[list[Rows]]], space: str) -> None:
        self._ask = ask
        self._space = space

    async def bounds(self) -> tuple[int, int]:
        [rows] = await self._ask((POSITION, (text(self._space),)))
        return (number(rows[0][0]), number(rows[0][1])) if rows else (0, 0)

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        [rows] = await self._ask((FEED, (text(self._space), int8(after), int8(limit), int8(FEED_BYTES_MAX))))
        if rows and after < (floor := number(rows[0][0])):
            raise Compacted(f"the feed begins after revision {floor} and this watch stands at {after}")
        found: list[ChangeSet] = []
        for _, *row in rows:
            if row[0] is not None:
                found.extend(commit for commit in decode_row(row) if commit.version > after)
            if len(found) >= limit:
                break
        return found


class Bell:
    """Tells the tails of this process what was committed, and rings for those in others."""

    def __init__(
        self,
        run: Callable[..., Awaitable[list[Rows]]],
        ask: Callable[..., Awaitable[list[Rows]]],
        connect: Callable[[], Awaitable[Link]],
        locks: int,
    ) -> None:
        self._run = run
        self._connect = connect
        self._locks = locks
        self._channel = f"holdfast_{locks}"
        self._names: dict[int, str] = {}
        self.tails = Tails(partial(PostgresFeed, ask))
        self._pending: dict[int, int] = {}
        """Revisions to tell others of."""
        self._ear: Link | None = None
        """The connection that listens, while there is one."""
        self._ringing: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    @contextlib.contextmanager
    def watching(self, space: str, prefixes: tuple[str, ...]) -> Iterator[Following]:
        """The feed of a space for one watcher, as long as this lasts."""
        if self._listening is None and not self._closed:
            self._listening = asyncio.create_task(self._listen())
            self._polling = asyncio.create_task(self._poll())
        with self.tails.watching(space, prefixes) as feed:
            yield feed

    def committed(self, space: str, id: int, after: int, revision: int, commits: Sequence[ChangeSet]) -> None:
        """We brought the space to this revision; by these commits, directly after that one, unless there are none."""
        self._names[id] = space
        self.tails.made(space, after, commits)
        self._pending[id] = revision
        if self._ringing is None and not self._closed:
            self._ringing = asyncio.create_task(self._ring())

    async def _ring(self) -> None:
        """Tell other processes, until there is nothing more to tell."""
        try:
            while self._pending and not self._closed:
                told, self._pending = self._pending, {}
                payload = ",".join(f"{id}:{revision}" for id, revision in [*told.items()][-RING_MAX:])
                call: Call = (RING, (int4(self._locks), text(self._channel), text(payload)))
                try:
                    [rows] = await (self._run(call) if self._ear is None else self._ear.send(call))
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
                self._ear = link
                self.tails.begin_anew()  # what was rung before we listened; and it may be another server
                await ended.wait()
            except (Error, Broken, Refused):
                await asyncio.sleep(AGAIN_S)
            finally:
                self._ear = None
                if link is not None:
                    link.ended = None
                    link.close()

    def _heard(self, payload: str) -> None:
        for each in payload.split(","):
            id, _, revision = each.partition(":")
            name = self._names.get(int(id))
            if name is None:  # a space we only watch
                self.tails.look_all()
            else:
                self.tails.look(name, int(revision))

    async def _poll(self) -> None:
        """The safety net, for a ring that was missed."""
        while True:
            await asyncio.sleep(POLL_DEAF_S if self._ear is None else POLL_S)
            if not self.tails:
                continue
            with contextlib.suppress(Error, Broken, Refused):
                [rows] = await self._run((HEADS, (text_array(list(self.tails)),)))
                for id, name, revision in rows:
                    space = self._names[number(id)] = (name or b"").decode()
                    self.tails.look(space, number(revision))

    async def close(self) -> None:
        """Stop, and let whoever waits find out that the store is closed."""
        self._closed = True
        tasks = [task for task in (self._ringing, self._listening, self._polling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.tails.begin_anew()
