"""An engine that passes everything on: what middleware derives from, to change only what it is about."""

from __future__ import annotations

from collections.abc import AsyncIterator

from holdfast.engine import Batch, ChangeSet, Durability, Engine, Entry, Finding, Page, Receipt, SpaceInfo


class Wrapper:
    """Does what the inner engine does."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    async def commit(self, space: str, batch: Batch) -> Receipt:
        return await self.inner.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return await self.inner.get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        return await self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return self.inner.watch(space, *prefixes, cursor=cursor, live=live)

    async def close(self) -> None:
        await self.inner.close()

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        return await self.inner.create(space, durability, audit_reads=audit_reads)

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        return await self.inner.spaces(name)

    async def drop(self, space: str) -> None:
        await self.inner.drop(space)

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        await self.inner.load(space, entries, revision)

    async def compact(self, space: str, upto: int) -> None:
        await self.inner.compact(space, upto)

    async def inspect(self) -> list[Finding]:
        return await self.inner.inspect()
