"""One agent's section of something shared: what a contribution to a document and a signal to a correlation both are.

Keys: `sections/<group>/<name>/<agent>/<instance>`, value JSON, owner: the agent. The group says what is shared ("documents",
"correlations"), the name which one. Every section is an entry of its own, so agents never wait for each other and never
conflict, and what one writes costs nothing more when the others have written much.

An agent writes under its own name only. That is a rule of the store (`middleware/verbs.py`), for every operation and also for
what is absent; orchestrators and administrators may write for another, and the entry is that agent's then.

How it fails. `put` and `delete` only make operations: whatever refuses the batch they are part of says so (AccessDenied
for a section that is another's). `read` is one snapshot per page; a section that is written meanwhile is seen before or after.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import Delete, Entry, Page, Put
from holdfast.identity import check_agent
from holdfast.keys import Subspace, escape
from holdfast.layers.consistency import Consistency, read_prefix
from holdfast.layers.scope import Scope
from holdfast.middleware.cache_memory import ITEM_ENTRIES_MAX

SECTIONS: Final = Subspace("sections")
SOLE: Final = "-"
"""Stands for the instance where an agent has one section, whichever of its instances writes it."""
PAGE: Final = 200
"""Sections read at once."""


class Section(msgspec.Struct, frozen=True):
    """What one agent, or one instance of it, wrote."""

    agent: str
    instance: str
    value: Any
    version: int
    owner: str
    updated_at: int
    """Milliseconds since 1970, UTC."""


class Sections:
    """The sections of one shared thing, which has checked its name."""

    def __init__(self, scope: Scope, group: str, name: str) -> None:
        self.scope = scope
        self.prefix = f"{SECTIONS.root}{group}/{escape(name)}/"

    def key(self, agent: str | None = None, instance: str | None = None) -> str:
        """Where an agent's section is; the scope's own agent and instance unless others are named."""
        if agent is not None and agent != self.scope.actor:
            check_agent(agent)
        return f"{self.prefix}{agent or self.scope.actor}/{instance or self.scope.instance}"

    def put(
        self, value: Any, *, agent: str | None = None, instance: str | None = None, ttl_ms: int | None = None
    ) -> Put:
        """The operation that writes a section."""
        owner = None if agent is None or agent == self.scope.actor else agent
        return Put(self.key(agent, instance), encode(value), ttl_ms, owner=owner)

    def delete(self, *, agent: str | None = None, instance: str | None = None) -> Delete:
        """The operation that removes a section."""
        return Delete(self.key(agent, instance))

    def section(self, entry: Entry) -> Section:
        """An entry under `prefix`, read. Whose it is, its key says."""
        agent, _, instance = entry.key[len(self.prefix) :].partition("/")
        return Section(agent, instance, decode(entry.value), entry.version, entry.owner, entry.updated_at)

    def first_limit(self, consistency: Consistency) -> int:
        """How many the first page has: from a hot tier as many as it keeps, because it keeps all or none of them."""
        return PAGE if self.scope.caches is None or consistency == "strong" else ITEM_ENTRIES_MAX

    async def pages(
        self, consistency: Consistency = "strong", first: Page | None = None
    ) -> AsyncIterator[list[Section]]:
        """All sections, by agent and instance, a page at a time. A hot tier answers the first page alone.

        Who has read that one already, with `first_limit`, gives it.
        """
        if first is None:
            limit = self.first_limit(consistency)
            first = await read_prefix(self.scope, self.prefix, consistency, limit=limit)
        page = first
        while True:
            yield [self.section(entry) for entry in page.entries]
            if not page.more:
                return
            after = page.entries[-1].key
            page = await self.scope.engine.scan(self.scope.space, self.prefix, after=after, limit=PAGE)

    async def read(self, consistency: Consistency = "strong") -> list[Section]:
        """All sections, by agent and instance."""
        return [section async for page in self.pages(consistency) for section in page]
