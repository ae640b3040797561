"""Who waits for changes of a space, by the beginning of the keys they wait for.

A commit wakes only those whose prefix it touches, whatever the number of others: for every length of a prefix that somebody waits
with, the key's beginning of that length is looked up. Who was not woken meanwhile has missed nothing, and is told when it is woken up
to which revision that is so: it need not read what came before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.engine import ChangeSet

FEW: Final = 16
"""So many prefixes are compared one by one, before anything is looked up."""


class Listener:
    """One who waits for changes of a space, again and again."""

    __slots__ = ("_bells", "_loop", "waiter")

    def __init__(self, bells: Bells) -> None:
        self._bells = bells
        self._loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[int | None] | None = None

    async def wait(self) -> int | None:
        """Return at the next commit that touches a prefix, with the revision before it; None: there is another reason to look."""
        waiter: asyncio.Future[int | None] = self._loop.create_future()
        self.waiter = waiter
        self._bells.asleep += 1
        try:
            return await waiter
        finally:
            if waiter.cancelled():
                self._bells.asleep -= 1
            self.waiter = None


class Bells:
    """The waiters of one space."""

    def __init__(self) -> None:
        self._listening: dict[str, set[Listener]] = {}
        self._lengths: dict[int, int] = {}
        """How many prefixes there are of each length."""
        self.asleep = 0
        """Who waits, and was not rung for yet."""
        self._here = 0
        """Who waits again and again, asleep or not."""

    @contextlib.contextmanager
    def listening(self, prefixes: tuple[str, ...]) -> Iterator[Listener]:
        """One who waits for changes under these prefixes, as long as this lasts."""
        listener = Listener(self)
        prefixes = tuple(dict.fromkeys(prefixes)) or ("",)
        for prefix in prefixes:
            self._join(prefix, listener)
        self._here += 1
        try:
            yield listener
        finally:
            self._here -= 1
            for prefix in prefixes:
                self._leave(prefix, listener)

    def _join(self, prefix: str, listener: Listener) -> None:
        listening, length = self._listening.get(prefix), len(prefix)
        if listening is None:
            self._listening[prefix] = {listener}
            self._lengths[length] = self._lengths.get(length, 0) + 1
        else:
            listening.add(listener)

    def _leave(self, prefix: str, listener: Listener) -> None:
        listening, length = self._listening[prefix], len(prefix)
        listening.discard(listener)
        if not listening:
            del self._listening[prefix]
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def ring(self, after: int, commits: Iterable[ChangeSet]) -> bool:
        """These commits follow that revision. Whether anybody may look at them: who is awake, if only just now."""
        listening = self._listening
        if not self.asleep:
            return self._here > 0
        any_of = tuple(listening) if len(listening) <= FEW else ("",)
        for commit in commits:
            for change in commit.changes:
                key = change.key
                if key.startswith(any_of):
                    for length in self._lengths:
                        for listener in listening.get(key[:length], ()):
                            self._wake(listener, after)
                    if not self.asleep:
                        return True
            after = commit.version
        return self.asleep < self._here

    def ring_all(self, at: int | None = None) -> None:
        """Everybody is to look; up to that revision, if one is given, nobody who waits has missed anything."""
        for listening in self._listening.values():
            for listener in listening:
                self._wake(listener, at)

    def _wake(self, listener: Listener, after: int | None) -> None:
        waiter = listener.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(after)
            self.asleep -= 1
