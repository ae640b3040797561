"""On behalf of whom a layer works: the space, the agent, and what every write of it is conditional on."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import Clock
from holdfast.engine import Batch, Condition, Durability, Engine, Mine, Operation, Present, Receipt
from holdfast.errors import AccessDenied, Conflict, LeaseLost
from holdfast.ids import new_id
from holdfast.layers.session import Session
from holdfast.offers import Caches

if TYPE_CHECKING:
    from holdfast.layers.catalogue import Catalogue
    from holdfast.layers.redaction import Redaction
    from holdfast.layers.retention import Retention


class Scope(msgspec.Struct, frozen=True):
    """What layers share. `guards` are conditions added to every batch: that is how a lock fences writes.

    `session` is how far this view has come: what it wrote and what its session reads saw.
    """

    engine: Engine
    space: str
    actor: str
    instance: str
    clock: Clock
    retention: Retention
    redaction: Redaction
    guards: tuple[Present | Mine, ...] = ()
    session: Session = msgspec.field(default_factory=Session)
    caches: Caches | None = None
    """The engine, if it has a hot tier: known by itself."""
    _durability: list[Durability] = msgspec.field(default_factory=list)
    catalogue: Catalogue | None = None
    """The types with a schema; None where nothing typed is read or written."""

    def __post_init__(self) -> None:
        caches = self.engine if isinstance(self.engine, Caches) else None  # asked once: it is not for nothing
        msgspec.structs.force_setattr(self, "caches", caches)

    async def commit(
        self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...] = (), request_id: str | None = None
    ) -> Receipt:
        """One batch, under the caller's request id or a fresh one."""
        receipt = await self.send(operations, conditions, request_id)
        self.session.saw(receipt.version)
        return receipt

    def send(
        self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...] = (), request_id: str | None = None
    ) -> Coroutine[Any, Any, Receipt]:
        """`commit` for where every microsecond counts: to be awaited, and what it gives to be told to the session."""
        if self.guards:
            return self._guarded(self.batch(operations, conditions, request_id))
        fresh = request_id is None
        batch = Batch(self.actor, operations, conditions, new_id() if fresh else request_id, fresh)
        return self.engine.commit(self.space, batch)

    def batch(
        self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...] = (), request_id: str | None = None
    ) -> Batch:
        """What `send` sends, for who may have to say it again."""
        fresh = request_id is None
        if self.guards:
            conditions = (*self.guards, *conditions)
        return Batch(self.actor, operations, conditions, new_id() if fresh else request_id, fresh)

    def sent(self, batch: Batch) -> Coroutine[Any, Any, Receipt]:
        """A batch made by `batch`, to be awaited."""
        return self._guarded(batch) if self.guards else self.engine.commit(self.space, batch)

    async def _guarded(self, batch: Batch) -> Receipt:
        try:
            return await self.engine.commit(self.space, batch)
        except Conflict as conflict:
            if conflict.key in {guard.key for guard in self.guards}:
                if conflict.condition == "mine":
                    raise AccessDenied(
                        f"nothing was written: {conflict.key!r} belongs to another agent, and only that one writes under it"
                    ) from conflict
                raise LeaseLost(f"nothing was written: the lease on {conflict.key!r} has ended") from conflict
            raise

    async def durability(self) -> Durability:
        """How durable the space is; it never changes while the space lives."""
        if not self._durability:
            found = await self.engine.spaces(self.space)
            if not found:
                return "sync"
            self._durability.append(found[0].durability)
        return self._durability[0]

    def guarded(self, *conditions: Present | Mine) -> Scope:
        """The same scope, whose every write also needs these conditions to hold."""
        return msgspec.structs.replace(self, guards=(*self.guards, *conditions))

    def unguarded(self) -> Scope:
        """The same scope without such conditions: to give up what one has, whatever became of the rest."""
        return msgspec.structs.replace(self, guards=()) if self.guards else self
