"""What stands between an identity's rules and a port, where something is left to do: noting reads, and new spaces."""

from __future__ import annotations

from typing import Protocol

from holdfast.engine import Batch, Durability, Engine, Receipt, SpaceInfo
from holdfast.identity import Identity
from holdfast.middleware.audited_reads import AuditedReads
from holdfast.middleware.wrapper import Wrapper
from holdfast.server.backups import Backups


class House(Protocol):
    """What the door tells the keeper."""

    audited: set[str]
    """Spaces whose reads are noted."""
    backups: Backups

    @property
    def store_engine(self) -> Engine: ...

    def look_after(self, space: str) -> None: ...

    def audit_reads_of(self, space: str) -> None: ...

    async def note_drop(self, space: str, agent: str) -> None: ...


def enter(engine: Engine, identity: Identity, house: House) -> Engine:
    """The engine of an identity behind its rules. An agent in a space without audited reads has nothing in between."""
    if identity.role == "admin":
        noted = AuditedReads(engine, identity.agent, house.store_engine, house.audited)
        return _Administration(noted, house, identity.agent)
    house.look_after(identity.space)
    if identity.space in house.audited:
        return AuditedReads(engine, identity.agent, house.store_engine, house.audited)
    return engine


class _Administration(Wrapper):
    """Administrators come into any space, make new ones, and take copies of the whole store."""

    def __init__(self, inner: Engine, house: House, agent: str) -> None:
        super().__init__(inner)
        self._house = house
        self._agent = agent

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self._house.look_after(space)
        return await self.inner.commit(space, batch)

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        info = await self.inner.create(space, durability, audit_reads=audit_reads)
        self._house.look_after(space)
        if info.audit_reads:
            self._house.audit_reads_of(space)
        return info

    async def drop(self, space: str) -> None:
        if await self.inner.spaces(space):
            await self._house.note_drop(space, self._agent)
        await self.inner.drop(space)

    async def begin_backup(self) -> tuple[str, int]:
        return await self._house.backups.begin()

    def read_backup(self, id: str, offset: int) -> bytes:
        return self._house.backups.read(id, offset)
