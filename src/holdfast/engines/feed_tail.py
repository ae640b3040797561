"""The newest commits of a space, read once for all watchers of a process, or not at all.

A `Tail` is told of commits in two ways. Those that this process made itself it is given, and no watcher has to ask for them.
Of others it is told that there are some (`look`); then it reads them, in one call whoever waits. A watcher that is further
behind than the tail goes back, or comes while there is none yet, reads the feed itself, from its own position, until it has come up.

What is kept is bounded, and has no gap: commits are added only after the very revision that was reached. Whatever fails makes
it begin anew, and every watcher then goes on from its own position.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

from holdfast.engine import ChangeSet
from holdfast.engines.bells import Bells, Listener
from holdfast.engines.feed import Source
from holdfast.errors import Error

KEPT_MAX: Final = 1024
KEPT_BYTES_MAX: Final = 4 * 1024 * 1024
CHANGE_BYTES: Final = 200
"""What a change takes in memory, about, besides its value."""


class Tail:
    """What is known of one space's feed: all commits after `_floor`, up to `_reached`."""

    def __init__(self, source: Source) -> None:
        self.watchers = 0
        self._bounds = source.bounds
        self._fetch = source.read
        self._floor = self._reached = -1
        """-1: nothing is known."""
        self._commits: list[ChangeSet] = []
        self._bytes = 0
        self._told: float = inf
        """Up to what revision there may be commits."""
        self._reading: asyncio.Task[None] | None = None
        self._bells = Bells()

    # --- for whoever tells of commits ---

    def made(self, after: int, commits: Sequence[ChangeSet]) -> None:
        """This process made these commits, directly after that revision; without any, it did something else."""
        if commits and after == self._reached:
            self._add(commits)
        else:
            self.look(commits[-1].version if commits else None)

    def look(self, revision: int | None = None) -> None:
        """There may be commits up to this revision; to any, if none is given."""
        if revision is None or revision > self._reached:
            self._told = inf if revision is None else max(self._told, revision)
            self._bells.ring_all(self._reached)

    def begin_anew(self) -> None:
        """Nothing that was known need be so: perhaps another server has taken over."""
        self.look()
        self._floor = self._reached = -1
        self._commits.clear()
        self._bytes = 0

    @property
    def reached(self) -> int:
        """The last revision that is known; -1: none."""
        return self._reached

    # --- for whoever follows ---

    @property
    def _is_behind(self) -> bool:
        return self._told > self._reached

    async def bounds(self) -> tuple[int, int]:
        """As the store has them; what it tells of may not have been told here yet."""
        floor, revision = await self._bounds()
        self.look(revision)
        return floor, revision

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        """What comes after that revision; nothing only if, when this was called or later, the store had nothing that was told of."""
        while after >= self._reached >= 0 and (self._is_behind or self._reading is not None):
            await self._catch_up(limit)
        if after == self._reached:
            return []
        start = len(self._commits) - (self._reached - after)  # mostly there is one for every revision
        if not 0 < start <= len(self._commits) or self._commits[start - 1].version != after:
            start = bisect_right(self._commits, after, key=lambda commit: commit.version)
        if after == (self._commits[start - 1].version if start else self._floor):
            return self._commits[start : start + limit]
        found = await self._fetch(after, limit)  # not a position that is known here: the store says what it is
        if self._reached < 0:
            self._floor = self._reached = after
            self._add(found)
            self._told = inf  # what came while we read may be missing from it
        return found

    @contextlib.contextmanager
    def watching(self, prefixes: tuple[str, ...]) -> Iterator[Following]:
        """The feed for one watcher, as long as this lasts."""
        self.watchers += 1
        try:
            with self._bells.listening(prefixes) as listener:
                yield Following(self, listener)
        finally:
            self.watchers -= 1

    async def changed(self, after: int, listener: Listener) -> int:
        """Return when something may have touched what is listened for after this revision, with that up to which nothing has."""
        if self._is_behind or self._reached > after:
            return after
        return max(after, await listener.wait() or 0)

    async def _catch_up(self, limit: int) -> None:
        """Read what is missing, once for everybody; a watcher that leaves meanwhile takes nothing from the others."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_on(limit))
        await asyncio.shield(self._reading)

    async def _read_on(self, limit: int) -> None:
        after, told = self._reached, self._told
        self._told = after  # what is told from here on may come too late for this reading
        try:
            found = await self._fetch(after, limit)
        except Error:
            self.begin_anew()  # each goes on from its own position, and learns there what is wrong
            return
        finally:
            self._reading = None
        if after <= self._reached:
            if found:  # there may be more than one reading gives
                self._told = max(self._told, told)
            self._add([commit for commit in found if commit.version > self._reached])

    def _add(self, commits: Sequence[ChangeSet]) -> None:
        if commits:
            self._bells.ring(self._reached, commits)
            self._commits += commits
            self._reached = commits[-1].version
            self._bytes += _size(commits)
            if len(self._commits) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
                self._trim()

    def _trim(self) -> None:
        """More at once than must be, because the front of a list is dear to remove."""
        count = max(1, len(self._commits) // 2)
        self._floor = self._commits[count - 1].version
        self._bytes -= _size(self._commits[:count])
        del self._commits[:count]


class Following:
    """The feed of a space for one watcher: a `Feed`. What does not touch its prefixes does not wake it, nor is it read again."""

    def __init__(self, tail: Tail, listener: Listener) -> None:
        self.bounds = tail.bounds
        self._tail = tail
        self._listener = listener
        self._quiet_until = 0

    async def read(self, after: int, limit: int) -> list[ChangeSet]:
        return await self._tail.read(max(after, self._quiet_until), limit)

    async def changed(self, after: int) -> None:
        self._quiet_until = await self._tail.changed(max(after, self._quiet_until), self._listener)


def _size(commits: Sequence[ChangeSet]) -> int:
    return sum([CHANGE_BYTES + len(change.value) for commit in commits for change in commit.changes])


class Tails:
    """The tails of the spaces that somebody watches, by name."""

    def __init__(self, source: Callable[[str], Source]) -> None:
        self._source = source
        self._tails: dict[str, Tail] = {}

    def __bool__(self) -> bool:
        return bool(self._tails)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tails))

    def __contains__(self, space: str) -> bool:
        return space in self._tails

    @contextlib.contextmanager
    def watching(self, space: str, prefixes: tuple[str, ...]) -> Iterator[Following]:
        """The feed of a space for one watcher, as long as this lasts."""
        tail = self._tails.get(space)
        if tail is None:
            tail = self._tails[space] = Tail(self._source(space))
        try:
            with tail.watching(prefixes) as following:
                yield following
        finally:
            if not tail.watchers:
                self._tails.pop(space, None)

    def made(self, space: str, after: int, commits: Sequence[ChangeSet]) -> None:
        if (tail := self._tails.get(space)) is not None:
            tail.made(after, commits)

    def look(self, space: str, revision: int | None = None) -> None:
        if (tail := self._tails.get(space)) is not None:
            tail.look(revision)

    def reached(self, space: str) -> int:
        return -1 if (tail := self._tails.get(space)) is None else tail.reached

    def look_all(self) -> None:
        for tail in self._tails.values():
            tail.look()

    def begin_anew(self) -> None:
        for tail in self._tails.values():
            tail.begin_anew()
