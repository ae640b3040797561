"""What the tests of the hot tier work with: a durable engine that counts and whose feed can fail, and a shelf in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from holdfast.clock import ManualClock
from holdfast.engine import Batch, ChangeSet, Delete, Engine, Entry, Operation, Page, Put, Receipt, SpaceInfo
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Unavailable
from holdfast.middleware.cache import CachedEngine
from holdfast.middleware.cache_options import Cache
from holdfast.middleware.cache_shelf import Shelf
from holdfast.middleware.wrapper import Wrapper

SPACE = "contoso"


class Durable(Wrapper):
    """Counts what it is asked, and can be held up; what its feed tells can be held back, or the feed cut."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.reads = 0
        self.looks = 0
        self.ready = asyncio.Event()
        self.ready.set()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.cut = False
        self.broken = False

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.reads += 1
        found = await super().get(space, keys)
        await self._answer()
        return found

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        self.reads += 1
        found = await super().scan(space, prefix, **options)
        await self._answer()
        return found

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self.looks += 1
        found = await super().spaces(name)
        await self._answer()
        return found

    async def _answer(self) -> None:
        """The snapshot was taken; the answer is on its way."""
        await self.ready.wait()
        if self.broken:
            raise Unavailable("the server is away")

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        if self.cut:
            raise Unavailable("the feed is cut")
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            await self.flowing.wait()
            if self.cut:
                raise Unavailable("the feed is cut")
            yield commit

    async def close(self) -> None:
        """Others use the engine within."""


class MemoryShelf:
    """A shelf that processes of these tests share."""

    def __init__(self) -> None:
        self.copies: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.errors = 0
        self.round_trips = 0

    async def get(self, space: str, name: str) -> bytes | None:
        return self.copies.get((space, name), (0, None))[1]

    async def get_all(self, space: str, names: list[str]) -> list[bytes | None]:
        self.round_trips += 1
        await asyncio.sleep(0)
        return [await self.get(space, name) for name in names]

    async def put(self, space: str, name: str, at: int, copy: bytes, ttl_ms: int) -> bool:
        if self.copies.get((space, name), (0, b""))[0] > at:
            return False
        self.copies[space, name] = (at, copy)
        return True

    async def close(self) -> None:
        pass


class ReadsThroughTheTier(CachedEngine):
    """Every read that the tier may answer, for one who has seen the newest revision."""

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        entries, _ = await self.get_seen(space, keys, await self._newest(space))
        return entries

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        if after is not None or reverse:
            return await super().scan(space, prefix, after=after, limit=limit, reverse=reverse)
        newest = await self._newest(space)
        page = await self.scan_seen(space, prefix, newest, limit=limit)
        return Page(page.entries, page.more, max(newest, page.revision))

    async def _newest(self, space: str) -> int:
        return max((info.revision for info in await self.inner.spaces(space)), default=0)


class Bench:
    """A store, and the processes that read it through a hot tier of their own."""

    kind: type[CachedEngine] = CachedEngine

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryEngine(clock=self.clock)
        self.durable = Durable(self.store)
        self._processes: list[CachedEngine] = []

    def process(
        self, options: Cache | None = None, shelf: Shelf | None = None, durable: Durable | None = None
    ) -> CachedEngine:
        """One more."""
        engine = self.kind(durable or self.durable, self.clock, options or Cache(), shelf, store="tests")
        self._processes.append(engine)
        return engine

    async def commit(self, *operations: Operation, engine: Engine | None = None, actor: str = "alice") -> Receipt:
        """By somebody else, unless an engine is named."""
        return await (engine or self.store).commit(SPACE, Batch(actor, operations))

    async def put(self, key: str, value: bytes | str, engine: Engine | None = None, **options: Any) -> int:
        data = value if isinstance(value, bytes) else value.encode()
        return (await self.commit(Put(key, data, **options), engine=engine)).version

    async def delete(self, key: str, engine: Engine | None = None) -> int:
        return (await self.commit(Delete(key), engine=engine)).version

    async def info(self) -> SpaceInfo:
        [info] = await self.store.spaces(SPACE)
        return info

    async def told(self) -> None:
        """Let every feed tell everything."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.durable.ready.set()
        self.durable.flowing.set()
        for engine in self._processes:
            await engine.close()
        await self.store.close()


async def value(engine: CachedEngine, key: str, seen: int = 0) -> bytes | None:
    [entry], _ = await engine.get_seen(SPACE, [key], seen)
    return None if entry is None else entry.value


async def values(engine: CachedEngine, prefix: str, seen: int = 0) -> list[bytes]:
    return [entry.value for entry in (await engine.scan_seen(SPACE, prefix, seen)).entries]
