"""Does the cost stay flat? The same operations with 1,000,000 keys and a long history, and with 1,000 and a short one.

Both stores are open at once and take turns. Keys are chosen at random, in groups of a hundred, so that `scan` of a group
gives a hundred records. `feed` reads the last hundred commits from a saved cursor, as a watcher does that comes back;
`size` counts; `tidy` is a round of the background work when there is nothing to do: were any of them to look at the
history, the large store would show it.

Here `ours` and `peer` are microseconds per operation, the large store's and the small one's: lower is better.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import holdfast
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan, take_turns, timed_async
from benchmarks.stores import KINDS, stores
from holdfast import Space, Store
from holdfast.engine import Entry, cursor_at

SMALL: Final = 1_000
"""Keys, and commits, of the small store."""
PER_GROUP: Final = 100
LOADED: Final = 10_000
"""Entries written per step while a store is filled."""
WRITERS: Final = 64
ROUNDS: Final = 11
GOAL: Final = Goal("ratio", "at most", 1.5)


async def run(plan: Plan) -> AsyncIterator[Line]:
    for kind in KINDS:
        with stores(kind, plan.folder) as new_url:
            async for line in _compare(plan, kind, new_url(), new_url()):
                yield line


async def _compare(plan: Plan, kind: str, large_url: str, small_url: str) -> AsyncIterator[Line]:
    async with holdfast.open(large_url) as large_store, holdfast.open(small_url) as small_store:
        large = await Filled.fill(large_store, plan.keys, plan.commits)
        small = await Filled.fill(small_store, SMALL, SMALL)
        plan = replace(plan, rounds=min(plan.rounds, ROUNDS))
        for name in ("get", "scan", "feed", "size", "tidy", "set"):  # set comes last: it adds to the history
            rates = await take_turns(
                plan, {"large": timed_async(large.steps[name]), "small": timed_async(small.steps[name])}
            )
            yield Line(
                f"flat_{kind}_{name}",
                1e6 / rates["large"].median,
                "us",
                1e6 / rates["small"].median,
                f"the same with {SMALL:,} keys",
                rates["small"].ratio(rates["large"]),
                GOAL,
                runs=len(rates["large"].values),
                more={
                    "overall": rates["small"].overall(rates["large"]),
                    "keys": plan.keys,
                    "commits": plan.commits,
                },
            )


class Filled:
    """A store with so many keys and commits, and what is measured on it."""

    def __init__(self, store: Store, space: Space, keys: int, saved: int) -> None:
        self._store = store
        self._space = space
        self._keys = keys
        self._saved = saved
        self._random = random.Random(7)
        self._written = 0
        self.steps: dict[str, Callable[[], Awaitable[object]]] = {
            "get": self._get,
            "scan": self._scan,
            "feed": self._feed,
            "size": self._size,
            "tidy": store.tidy,
            "set": self.set,
        }

    @classmethod
    async def fill(cls, store: Store, keys: int, commits: int) -> Filled:
        """Entries by way of `load`, history by way of commits, all of it sealed, then a few commits more."""
        await store.engine.create("bench")
        for start in range(0, keys, LOADED):
            numbers = range(start, min(start + LOADED, keys))
            entries = [Entry(f"records/{_key(n)}", b'"loaded"', n + 1, "writer", 1, 1) for n in numbers]
            await store.engine.load("bench", entries, keys)
        space = store.space("bench", agent="writer")  # only now: from here on the background work writes to it too
        filled = cls(store, space, keys, 0)
        await filled._commit(commits)
        await store.tidy()
        await filled._commit(4 * WRITERS)
        filled._saved = (await space.info()).revision
        await store.tidy()
        return filled

    async def _commit(self, count: int) -> None:
        async def write() -> None:
            for _ in range(count // WRITERS):
                await self.set()

        await asyncio.gather(*(write() for _ in range(WRITERS)))

    def _any(self) -> int:
        return self._random.randrange(self._keys)

    async def set(self) -> None:
        self._written += 1
        await self._space.records.set(_key(self._any()), f"value {self._written}")

    async def _get(self) -> None:
        if await self._space.records.get(_key(self._any())) is None:
            raise RuntimeError("a key that was loaded is not there")

    async def _scan(self) -> None:
        found = 0
        async for _ in self._space.records.scan(_key(self._any())[:-2], page=PER_GROUP):
            found += 1
        if found != PER_GROUP:
            raise RuntimeError(f"a group has {found} records, not {PER_GROUP}")

    async def _feed(self) -> None:
        seen = 0
        async with aclosing(self._space.watch(cursor=cursor_at(self._saved - 100))) as commits:  # type: ignore[type-var]
            async for commit in commits:
                seen += 1
                if commit.version >= self._saved:
                    break
        if not 90 <= seen <= 100:  # some are the store's own, such as the caretaker's
            raise RuntimeError(f"the feed told of {seen} commits, not of about 100")

    async def _size(self) -> None:
        if await self._space.records.size() != self._keys:
            raise RuntimeError("the count is wrong")


def _key(number: int) -> str:
    return f"{number // PER_GROUP:05d}/{number % PER_GROUP:02d}"
