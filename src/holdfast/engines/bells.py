"""Who waits for changes of a space, by the beginning of the keys they wait for.

A commit wakes only those whose prefix it touches, whatever the number of others: for every length of a prefix that somebody waits
with, the key's beginning of that length is looked up. Who was not woken meanwhile has missed nothing, and is told when it is woken up
to which revision that is so: it need not read what came before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from holdfast.engine import ChangeSet

FEW: Final = 16
"""So many prefixes are compared one by one, before anything is looked up."""


class Bells:
    """The waiters of one space."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[int | None]]] = {}
        self._lengths: dict[int, int] = {}
        """How many prefixes there are of each length."""
        self._asleep = 0
        """Who was not rung for yet."""

    async def wait(self, prefixes: tuple[str, ...]) -> int | None:
        """Return at the next commit that touches a prefix, with the revision before it; None: there is another reason to look."""
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        prefixes = tuple(dict.fromkeys(prefixes)) or ("",)
        for prefix in prefixes:
            waiting = self._waiting.get(prefix)
            if waiting is None:
                self._waiting[prefix] = {waiter}
                self._lengths[len(prefix)] = self._lengths.get(len(prefix), 0) + 1
            else:
                waiting.add(waiter)
        self._asleep += 1
        try:
            return await waiter
        finally:
            if waiter.cancelled():
                self._asleep -= 1
            for prefix in prefixes:
                self._leave(prefix, waiter)

    def _leave(self, prefix: str, waiter: asyncio.Future[int | None]) -> None:
        waiting, length = self._waiting[prefix], len(prefix)
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[prefix]
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def ring(self, after: int, commits: Iterable[ChangeSet]) -> None:
        """These commits follow that revision."""
        waiting = self._waiting
        if not self._asleep:
            return
        any_of = tuple(waiting) if len(waiting) <= FEW else ("",)
        for commit in commits:
            for change in commit.changes:
                key = change.key
                if key.startswith(any_of):
                    for length in self._lengths:
                        for waiter in waiting.get(key[:length], ()):
                            if not waiter.done():
                                waiter.set_result(after)
                                self._asleep -= 1
                    if not self._asleep:
                        return
            after = commit.version

    def ring_all(self, at: int | None = None) -> None:
        """Everybody is to look; up to that revision, if one is given, nobody who waits has missed anything."""
        for waiting in self._waiting.values():
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(at)
                    self._asleep -= 1
