"""Waiting lines: who stands where, and whose turn it is.

A line is a key range. Whoever wants something appends an entry of its own (`push` gives it the next number, so the line is
first in, first out) with a ttl that it keeps alive, and whoever comes first has it. Nobody ever writes another's entry: a
waiter that dies expires and is skipped, a holder that dies likewise; the lease of who waits is short (`locks.WAITING_MS`).

    lock        the first one
    semaphore   those whose units, with all before them, fit into its size
    read/write  a writer that is first; readers with no writer before them

Once it is somebody's turn it stays so as long as its entry lives, because entries before it only go and never come, and say the same
as long as they are there: behind a policy a place that is written anew keeps what it takes (`middleware/line_claims.py`).

Whoever may write here may append anything. A place that cannot be read, or asks for less than one unit, counts as one unit that
is not shared: it neither breaks the line for others nor makes room in it. What is no place at all is passed over.

A process that has somebody waiting in a line keeps a copy of it and follows what the feed tells of it, once however many
wait; of other lines it hears nothing. A change that makes it a local waiter's turn wakes that one and nobody else, without
a read; so does the answer to whoever leaves the line here, which comes a little earlier. Expiries are in the feed only when
somebody sweeps, so a line is also looked at anew when the first lease of those in turn should have ended. A line that nobody
waits in any more is followed for a moment longer: where there was a waiter there will soon be another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final, Literal

import msgspec
from sortedcontainers import SortedDict

from holdfast.clock import Clock, sleep_or
from holdfast.codec import decode, integer
from holdfast.engine import SCAN_MAX, Change, Engine, Entry, cursor_at
from holdfast.errors import AccessDenied, Compacted, Error
from holdfast.keys import Subspace
from holdfast.layers.leases import Lease
from holdfast.middleware.line_claims import PLACE_BYTES_MAX, UNITS_MAX

LOCKS: Final = Subspace("locks")
PERMITS: Final = Subspace("permits")
Kind = Literal["lock", "semaphore", "rw", "election", "pool"]
KINDS: Final[tuple[Kind, ...]] = ("lock", "semaphore", "rw", "election", "pool")
LOOK_MS_MIN: Final = 100
LOOK_MS_MAX: Final = 5_000
LINGER_MS: Final = 200
"""How long a line is followed after its last local waiter. Longer than a handover; not long, for it is told of every change."""
RETRY_MS: Final = 100
"""After the feed could not be followed."""

log = logging.getLogger("holdfast.lines")


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands in a line, as the entry's value tells it."""

    instance: str
    units: int = 1
    shared: bool = False
    """A reader: others that are shared may hold at the same time."""
    token: int | None = None
    """Written when it began to wait, or its turn to hold, after it was made; otherwise it is the version."""


UNREADABLE: Final = Place("?")


def place_of(value: bytes) -> Place:
    """What an entry in a line says of itself, as far as it can be believed."""
    if len(value) > PLACE_BYTES_MAX:
        return UNREADABLE
    try:
        place = decode(value, Place)
    except Error:
        return UNREADABLE
    return place if place.units >= 1 else UNREADABLE


def permits_of(entry: Entry) -> int | None:
    """The size of a line that is stored; None if it cannot be one."""
    number = integer(entry.value)
    return number if number is not None and 0 < number <= UNITS_MAX else None


def in_turn(places: Iterator[tuple[str, Place]], size: int) -> Iterator[str]:
    """The keys whose turn it is, in a line with so many units to give."""
    left, shared_before = size, False
    for key, place in places:
        if place.shared:
            if left < size:
                return  # somebody before has it alone
            shared_before = True
        elif shared_before or place.units > left:
            return
        else:
            left -= place.units
        yield key


async def read_line(engine: Engine, space: str, prefix: str, limit: int | None = None) -> tuple[list[Entry], int]:
    """The first places of a line, or all of them, and the revision before which nothing was missed."""
    page = await engine.scan(space, prefix, limit=min(limit or SCAN_MAX, SCAN_MAX))
    entries, revision = page.entries, page.revision
    while page.more and (limit is None or len(entries) < limit):
        page = await engine.scan(space, prefix, after=entries[-1].key, limit=SCAN_MAX)
        entries = entries + page.entries
    return entries, revision


class Line:
    """One line, as this process knows it."""

    def __init__(self, prefix: str, size: int) -> None:
        self.prefix = prefix
        self.size = size
        self.revision = -1
        self.places: SortedDict[str, Place] = SortedDict()
        self._ends: dict[str, int | None] = {}
        """When their leases end, as far as it was told; they are renewed in silence."""
        self._read_at = 0
        self.look_at = 0
        """When to look at it again: when the first lease of those in turn should end, as far as the clocks agree."""
        self.turns: dict[str, asyncio.Event] = {}
        """Local waiters."""
        self.leases: dict[str, Lease] = {}
        """What keeps their places alive."""
        self.idle_at = 0
        """Until when it is followed although nobody waits here."""
        self.following: asyncio.Task[None] | None = None
        self.readings = 0
        """How often it is being read at this moment."""
        self._meanwhile: list[tuple[int, Change]] = []
        """What the feed told since it is being read: the answer may be older."""

    def replace(self, entries: list[Entry], revision: int, now: int) -> None:
        """The line as it was read at a revision; of what the feed told before, the newer part is kept."""
        if revision < self.revision:
            return  # another reading came first
        self.revision = revision
        self.places = SortedDict((entry.key, place_of(entry.value)) for entry in entries)
        self._ends = {entry.key: entry.expires_at for entry in entries}
        self._read_at, self.look_at = now, now + LOOK_MS_MIN
        for version, change in self._meanwhile:
            self._place(version, change)
        self.wake(now)

    def read(self) -> None:
        """A reading of it is over, with or without an answer."""
        self.readings -= 1
        if not self.readings:
            self._meanwhile.clear()

    def apply(self, version: int, change: Change) -> None:
        """One change of the feed."""
        if self.readings:
            self._meanwhile.append((version, change))
        self._place(version, change)

    def _place(self, version: int, change: Change) -> None:
        if version > self.revision:
            if change.exists:
                self.places[change.key] = place_of(change.value)
                self._ends[change.key] = change.expires_at
            else:
                self.places.pop(change.key, None)
                self._ends.pop(change.key, None)

    def wake(self, now: int) -> None:
        """Wake those in turn, and reckon when to look again: not at once, for whose turn it is since now will tell that it lives."""
        first = self._read_at + LOOK_MS_MAX
        for key in in_turn(iter(self.places.items()), self.size):
            if key in self.turns:
                self.turns[key].set()
            end = self._ends[key]
            if end is not None and end < first:
                first = end
        self.look_at = max(first, min(self.look_at, now + LOOK_MS_MIN))

    def stop(self) -> None:
        """Hear of nothing any more."""
        if self.following is not None:
            self.following.cancel()
            self.following = None


class Lines:
    """The lines of one space in which somebody waits in this process."""

    def __init__(self, engine: Engine, space: str, clock: Clock) -> None:
        self._engine = engine
        self._space = space
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._look_at = 0
        """When lines are looked at next."""
        self.closed = False

    def follows(self, prefix: str) -> bool:
        """Whether this line is known, and what changes in it will be heard of."""
        line = self._lines.get(prefix)
        return line is not None and line.following is not None

    def crowded(self, prefix: str) -> bool:
        """Whether somebody is known to stand in this line."""
        return self.follows(prefix) and bool(self._lines[prefix].places)

    def left(self, prefix: str, key: str, version: int) -> None:
        """Somebody here has left a line, by a commit that was answered: whose turn it is need not wait for the feed to tell.

        A copy that has a place has every one that was before it, so it tells who is next as soon as it knows who is gone.
        """
        line = self._lines.get(prefix)
        if line is not None and line.turns:
            line.apply(version, Change("delete", key, False))
            line.wake(self._clock.now_ms())

    def heir(self, prefix: str, key: str) -> Lease | None:
        """Who is alone in turn when this first one has left, if it waits here."""
        line = self._lines.get(prefix)
        if line is None or not line.turns or len(line.places) < 2 or line.places.peekitem(0)[0] != key:
            return None
        return line.leases.get(line.places.peekitem(1)[0])

    async def _read(self, line: Line) -> None:
        """Who stands in a line now."""
        now = self._clock.now_ms()  # from before: what ends while it is being read is looked at again
        line.readings += 1
        try:
            entries, revision = await read_line(self._engine, self._space, line.prefix)
            line.replace(entries, revision, now)
        finally:
            line.read()
        self._changed.set()

    @asynccontextmanager
    async def standing(self, prefix: str, lease: Lease, size: int, turn: asyncio.Event) -> AsyncIterator[None]:
        """As long as this lasts: `turn` is set when it is the turn of this place, which its owner keeps alive."""
        line, key = self._lines.get(prefix), lease.key
        if line is None:
            line = self._lines[prefix] = Line(prefix, size)
        line.size = size  # it may have been agreed on anew since somebody stood here
        line.turns[key], line.leases[key] = turn, lease
        try:
            loop = asyncio.get_running_loop()
            if self._looking is None:
                self._looking = loop.create_task(self._look())
            if line.revision < 0:
                await self._read(line)
            if line.following is None and not self.closed:
                line.following = loop.create_task(self._follow(line))
            line.wake(self._clock.now_ms())
            if self.closed:  # while it came here; nobody else would wake it
                turn.set()
            yield
        finally:
            del line.turns[key], line.leases[key]
            if not line.turns:
                line.idle_at = self._clock.now_ms() + LINGER_MS
                if line.idle_at < self._look_at:
                    self._changed.set()

    def close(self) -> None:
        """Stop for ever, and wake whoever still stands in a line: their turn will not come."""
        self.closed = True
        if self._looking is not None:
            self._looking.cancel()
        for line in self._lines.values():
            line.stop()
            for turn in line.turns.values():
                turn.set()

    async def _follow(self, line: Line) -> None:
        """Hear what changes in a line, from what was read of it on."""
        cursor = cursor_at(line.revision)
        while True:
            try:
                async for commit in self._engine.watch(self._space, line.prefix, cursor=cursor):
                    cursor = commit.cursor
                    for change in commit.changes:
                        line.apply(commit.version, change)
                    line.wake(self._clock.now_ms())
                    if line.look_at < self._look_at:
                        self._changed.set()
            except Compacted as exc:
                log.debug("line %s is followed from now: %s", line.prefix, exc)
                cursor = await self._now(line, cursor)
            except Error as exc:
                # Each try of one who may not is noted.
                pause_ms = LOOK_MS_MAX if isinstance(exc, AccessDenied) else RETRY_MS
                log.warning("line %s cannot be followed, and is tried again: %s", line.prefix, exc)
                await self._clock.sleep_until(self._clock.now_ms() + pause_ms)

    async def _now(self, line: Line, cursor: str) -> str:
        """Read a line anew, and where to follow it from."""
        try:
            await self._read(line)
        except Error as exc:
            log.warning("line %s cannot be read and is tried again: %s", line.prefix, exc)
            await self._clock.sleep_until(self._clock.now_ms() + RETRY_MS)
            return cursor
        return cursor_at(line.revision)

    async def _look(self) -> None:
        """Look at a line anew when a lease in it should have ended; forget the lines that nobody waits in."""
        while True:
            self._changed.clear()
            now = self._clock.now_ms()
            for prefix, line in list(self._lines.items()):
                # Later than it can be: the clock was set back.
                if not line.turns and not now < line.idle_at <= now + LINGER_MS:
                    line.stop()
                    del self._lines[prefix]
            if not self._lines:
                self._looking = None
                return
            for line in [
                line
                for line in self._lines.values()
                if line.revision >= 0 and not now < line.look_at <= now + LOOK_MS_MAX
            ]:
                try:
                    await self._read(line)
                except Error as exc:
                    line.look_at = now + RETRY_MS
                    log.warning("line %s cannot be read and is tried again: %s", line.prefix, exc)
            times = [line.look_at for line in self._lines.values() if line.revision >= 0]
            times += [line.idle_at for line in self._lines.values() if not line.turns]
            self._look_at = min(times, default=now + LOOK_MS_MAX)
            await sleep_or(self._clock, self._look_at, self._changed)
