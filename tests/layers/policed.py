"""A memory engine as a keeper has it: what each agent sends goes through the policy, as role agent.

The engine of a store is used by all its agents, so a batch goes through the policy of its actor. The store's own work
(`holdfast`), which a keeper does on the engine within, does so here. Reads name no agent: they go through the policy
of one that has the verbs of the others, except those of the store's own book-keeping.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from holdfast.clock import Clock
from holdfast.engine import SYSTEM_ACTOR, Batch, ChangeSet, Engine, Entry, Page, Receipt
from holdfast.engines.memory import MemoryEngine
from holdfast.identity import Identity, Role
from holdfast.keys import subspace_of
from holdfast.layers.settings import SYSTEM_SPACE
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import MB, Quota, Rules
from holdfast.middleware.wrapper import Wrapper

ROLES: dict[str, Role] = {
    "reader": "orchestrator",
    "boss": "orchestrator",
    "orchestrator": "orchestrator",
    "admin": "admin",
    "intruder": "admin",
}
"""Everybody else is an agent. An intruder is one who got hold of what administrators can do."""


async def open_policed(rest: str, clock: Clock) -> Engine:
    """For the registry of engines: `policed:`."""
    return PolicedStore(MemoryEngine(clock=clock), clock)


class PolicedStore(Wrapper):
    """Every batch through the policy of its actor."""

    def __init__(self, inner: Engine, clock: Clock) -> None:
        super().__init__(inner)
        self._engines: dict[tuple[str, str], Engine] = {}
        self._policy = Policy(inner, clock, Rules(rate_limits=(), quotas=(Quota("*", max_value_size=11 * MB),)))

    def _engine(self, space: str, agent: str) -> Engine:
        """Kept, as a keeper does for a connection."""
        engine = self._engines.get((space, agent))
        if engine is None:
            engine = self._policy.engine_for(Identity(agent, ROLES.get(agent, "agent"), space))
            self._engines[space, agent] = engine
        return engine

    async def commit(self, space: str, batch: Batch) -> Receipt:
        if batch.actor == SYSTEM_ACTOR:
            return await self.inner.commit(space, batch)
        return await self._engine(space, batch.actor).commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        if space == SYSTEM_SPACE or any(subspace_of(key) == "system" for key in keys):
            return await self.inner.get(space, keys)
        own = [key.split("/")[1] for key in keys if subspace_of(key) == "answers"]  # which nobody else may read
        return await self._engine(space, own[0] if own else "reader").get(space, keys)

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        reader = self.inner if not prefix else self._engine(space, "reader")
        return await reader.scan(space, prefix, after=after, limit=limit, reverse=reverse)

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        return self._engine(space, "reader").watch(space, *prefixes, cursor=cursor, live=live)
