"""What every process that works on a store must agree on: which names are secret, how long feed and audit are kept, how agents are called.

One process may have been told at `open` that `vault/*` is secret; another one seals the audit. So what is given to
`open(redact=…, retention=…)` is written to the entry `system/settings` of the store's own space, and every process
learns it when it opens the store and before it seals or prunes. Secrets are only ever added. Of two different lifetimes, or rules
for agents' names, the one given last counts.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import SYSTEM_ACTOR, Absent, Batch, Condition, Durability, Engine, Put, VersionIs
from holdfast.errors import Conflict, DurabilityUnavailable
from holdfast.identity import AgentNames
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention

SYSTEM_SPACE: Final = "_holdfast"
"""Where the store keeps what belongs to no space: its settings, and the note that a space was dropped."""
SETTINGS: Final = "system/settings"


class Settings(msgspec.Struct, frozen=True):
    """What is shared."""

    secret_fields: list[str] = []
    secret_keys: list[str] = []
    kept_ms: dict[str, int | None] = {}
    agent_names: AgentNames = "plain"


async def learn(engine: Engine, redaction: Redaction, retention: Retention) -> tuple[Settings, Condition]:
    """Take over what other processes were told."""
    [entry] = await engine.get(SYSTEM_SPACE, [SETTINGS])
    if entry is None:
        return Settings(), Absent(SETTINGS)
    settings = decode(entry.value, Settings)
    redaction.add(settings.secret_fields, settings.secret_keys)
    retention.adopt(settings.kept_ms)
    return settings, VersionIs(SETTINGS, entry.version)


async def make_system_space(engine: Engine, durability: Durability | None) -> None:
    """The store's own space, as durable as the store's spaces are by default; None: as durable as it can be."""
    if not await engine.spaces(SYSTEM_SPACE):
        try:
            await engine.create(SYSTEM_SPACE, durability or "sync")
        except DurabilityUnavailable:
            if durability is not None:
                raise
            await engine.create(SYSTEM_SPACE, "async")


async def names_of(engine: Engine) -> AgentNames:
    """What agents of this store may be called."""
    [entry] = await engine.get(SYSTEM_SPACE, [SETTINGS])
    return "plain" if entry is None else decode(entry.value, Settings).agent_names


async def share(
    engine: Engine,
    redaction: Redaction,
    retention: Retention,
    durability: Durability | None,
    agent_names: AgentNames | None = None,
) -> AgentNames:
    """Learn, and tell what this process was told; a process that was told nothing writes nothing. Gives how agents are called."""
    while True:
        known, unchanged = await learn(engine, redaction, retention)
        kept_ms, names = {**known.kept_ms, **retention.told}, agent_names or known.agent_names
        mine = Settings(sorted(redaction.fields), sorted(redaction.keys), kept_ms, names)
        if mine == known:
            return names
        await make_system_space(engine, durability)
        try:
            await engine.commit(SYSTEM_SPACE, Batch(SYSTEM_ACTOR, (Put(SETTINGS, encode(mine)),), (unchanged,)))
        except Conflict:
            continue  # another process told something in the meantime
        return names
