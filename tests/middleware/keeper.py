"""What the tests of the policy work with: an engine behind a policy, several identities, and a witness within."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

from holdfast.clock import ManualClock
from holdfast.engine import (
    Batch,
    ChangeSet,
    Delete,
    Engine,
    Entry,
    Increment,
    Page,
    Push,
    Put,
    Receipt,
    SpaceInfo,
    Take,
)
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Error
from holdfast.identity import Identity, Role
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import PolicedEngine, Policy
from holdfast.middleware.rules import Rules
from holdfast.middleware.wrapper import Wrapper

SPACE = "contoso"
FREELY = Rules(rate_limits=(), quotas=())
"""The verbs of the role, as often and as much as one likes."""


class Witness(Wrapper):
    """Remembers what reached the engine within."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, str]] = []
        """Space, and what was called there."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.seen.append((space, "commit"))
        return await super().commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.seen.append((space, "get"))
        return await super().get(space, keys)

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        self.seen.append((space, "scan"))
        return await super().scan(space, prefix, **options)

    def watch(self, space: str, *prefixes: str, **options: Any) -> AsyncIterator[ChangeSet]:
        self.seen.append((space, "watch"))
        return super().watch(space, *prefixes, **options)

    async def spaces(self, name: str | None = None) -> list[SpaceInfo]:
        self.seen.append(("" if name is None else name, "spaces"))
        return await super().spaces(name)

    async def create(self, space: str, *args: Any, **options: Any) -> SpaceInfo:
        self.seen.append((space, "create"))
        return await super().create(space, *args, **options)

    async def drop(self, space: str) -> None:
        self.seen.append((space, "drop"))
        await super().drop(space)


class Keeper:
    """An engine behind a policy."""

    def __init__(self, rules: Rules = FREELY, engine: Engine | None = None) -> None:
        self.clock = ManualClock()
        self.engine = engine or MemoryEngine(clock=self.clock)
        self.witness = Witness(self.engine)
        self.denials: list[Denial] = []
        self.policy = Policy(self.witness, self.clock, rules, denied=self.denials.append)

    def engine_of(self, agent: str, role: Role = "agent", space: str = SPACE) -> PolicedEngine:
        return self.policy.engine_for(Identity(agent, role, space))

    @property
    def admin(self) -> PolicedEngine:
        return self.engine_of("root", "admin", "*")

    async def entries(self, prefix: str = "", space: str = SPACE) -> dict[str, Entry]:
        page = await self.engine.scan(space, prefix, limit=10_000)
        return {entry.key: entry for entry in page.entries}


async def refusal(attempt: Awaitable[object]) -> Error | None:
    """Why it was refused; None if it was not."""
    try:
        await attempt
    except Error as exc:
        return exc
    return None


def batch(
    agent: str, *operations: Any, when: tuple[Any, ...] = (), request_id: str | None = None, fresh: bool = False
) -> Batch:
    return Batch(agent, operations, when, request_id, fresh)


def counted(*operations: Any) -> tuple[Any, ...]:
    """The same, with what they add to the numbers of messages, as a client of queues sends it."""
    sent: list[Any] = []
    added: dict[str, int] = {}
    for op in operations:
        if isinstance(op, Take):
            counters, given = (depth(op.source), depth(op.target)), (op.source_counter, op.target_counter)
            free = given == (None, None) and counters[0] != counters[1]
            sent.append(Take(op.source, op.target, op.n, op.upto, *counters) if free else op)
            continue
        sent.append(op)
        place = depth(op.prefix if isinstance(op, Push) else op.key)
        if place is not None and isinstance(op, Put | Push | Delete):
            added[place] = added.get(place, 0) + (-1 if isinstance(op, Delete) else 1)
    return (*sent, *(Increment(place, number) for place, number in added.items() if number))


def depth(place: str) -> str | None:
    """What counts the messages that stand there."""
    parts = place.split("/", 3)
    if len(parts) < 4 or parts[0] not in ("queues", "reserved"):
        return None
    if parts[0] == "queues":
        return f"depths/{parts[2]}/{parts[1]}"
    return f"depths/{parts[1]}/{'dead' if parts[2] == '-' else 'reserved'}"


def contribution(agent: str, value: bytes) -> tuple[Put, Push]:
    """A section of the document `d`, and the event that tells of it."""
    told = b'{"data":%s,"kind":"contributed","section":"%s/1"}' % (value, agent.encode())
    return Put(f"sections/documents/d/{agent}/1", value), Push("history/documents/d/", told, 1000)
