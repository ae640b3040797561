"""A space that is created, with the settings its user named, when it is first used."""

from __future__ import annotations

from collections.abc import AsyncIterator

from holdfast.engine import Batch, ChangeSet, Durability, Engine, Entry, Page, Receipt, SpaceInfo
from holdfast.middleware.snapshot import get_seeing
from holdfast.middleware.wrapper import Wrapper
from holdfast.offers import Caches


class CreatedOnFirstUse(Wrapper):
    """For one space: `create` comes before its first operation, and a durability other than `asked` is refused there.

    Who asks for none takes the space as it is, or gets a new one with the durability `otherwise`.
    """

    def __init__(
        self, inner: Engine, space: str, asked: Durability | None, otherwise: Durability, audit_reads: bool
    ) -> None:
        super().__init__(inner)
        self._space = space
        self._asked = asked
        self._otherwise: Durability = otherwise
        self._audit_reads = audit_reads
        self._created = False
        self._caches = inner if isinstance(inner, Caches) else None

    def forget(self, space: str) -> None:
        """The space was dropped: its next use makes it as the first one did."""
        if space == self._space:
            self._created = False

    async def _create(self) -> None:
        if not self._created:
            durability = self._asked or await self._found() or self._otherwise
            await self.inner.create(self._space, durability, audit_reads=self._audit_reads)
            self._created = True

    async def _found(self) -> Durability | None:
        found = await self.inner.spaces(self._space)
        return found[0].durability if found else None

    async def commit(self, space: str, batch: Batch) -> Receipt:
        await self._create()
        return await self.inner.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        await self._create()
        return await self.inner.get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        await self._create()
        return await self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)

    async def get_seen(self, space: str, keys: list[str], seen: int) -> tuple[list[Entry | None], int]:
        await self._create()
        if self._caches is None:
            return await get_seeing(self.inner, space, keys)
        return await self._caches.get_seen(space, keys, seen)

    async def scan_seen(self, space: str, prefix: str, seen: int, *, limit: int = 1000) -> Page:
        if self._caches is None:
            return await self.scan(space, prefix, limit=limit)
        await self._create()
        return await self._caches.scan_seen(space, prefix, seen, limit=limit)

    async def read_seen(
        self, space: str, keys: list[str], prefix: str, seen: int, *, limit: int = 1000
    ) -> tuple[list[Entry | None], Page, int]:
        await self._create()
        if self._caches is None:
            entries, revision = await get_seeing(self.inner, space, keys)
            page = await self.inner.scan(space, prefix, limit=limit)
            return entries, page, max(revision, page.revision)
        return await self._caches.read_seen(space, keys, prefix, seen, limit=limit)

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        await self._create()
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            yield commit

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        if name == self._space:
            await self._create()
        return await self.inner.spaces(name)
