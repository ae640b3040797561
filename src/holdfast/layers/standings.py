"""What is held in a space and who waits for it, as `space.locks` shows it; and what is done to it from outside.

A line (`lines.py`) is read as it is: the first places hold, the others wait, in order. An administrator takes a lock away by
deleting its holder's place; an agent gives up or extends its own by the guard's id, also from another process than the one
that acquired it. Nothing is kept here. What is no place in a line is passed over; a guard that is over raises LeaseLost, and
another agent's AccessDenied.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.engine import OPERATIONS_MAX, SCAN_MAX, Delete, Empty, Entry, Mine, Present, Touch
from holdfast.errors import AccessDenied, Conflict, InvalidInput, LeaseLost, NotFound
from holdfast.keys import unescape
from holdfast.layers.lines import KINDS, LOCKS, PERMITS, Kind, Place, in_turn, permits_of, place_of
from holdfast.layers.scope import Scope

Items = list


@dataclass(frozen=True, slots=True)
class Stand:
    """Who stands in a line."""

    agent: str
    instance: str
    id: str
    token: int | None
    """What fences its writes; None as long as it waits."""
    since: datetime
    """Since when it holds, or waits. Of one that had to wait for its turn that is known a moment after that has begun."""
    expires_at: datetime | None
    units: int = 1
    shared: bool = False


@dataclass(frozen=True, slots=True)
class LockState:
    """A line: who holds, and who waits, in order."""

    kind: Kind
    name: str
    size: int
    holders: list[Stand]
    waiters: list[Stand]


class Locks:
    """What is held in a space, as `space.locks`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def list(self, prefix: str = "") -> Items[LockState]:
        """Everything that is held or waited for, whose name begins with the prefix."""
        sizes = {entry.key: permits_of(entry) or 1 for entry in await self._entries(PERMITS.root)}
        lines: dict[tuple[str, str], Items[Entry]] = {}
        for entry in await self._entries(LOCKS.root):
            kind, _, rest = entry.key[len(LOCKS.root) :].partition("/")
            if kind in KINDS and rest.count("/") == 1:  # whatever else is there is no place in a line
                name = unescape(rest.partition("/")[0])
                if name.startswith(prefix):
                    lines.setdefault((kind, name), []).append(entry)
        return [
            _state(kind, name, sizes.get(PERMITS.key(kind, name), 1), entries)  # type: ignore[arg-type]
            for (kind, name), entries in lines.items()
        ]

    async def break_(self, name: str, kind: Kind = "lock") -> Items[Stand]:
        """Take it away from whoever holds it; the next in line has its turn. The audit tells who did it."""
        if kind not in KINDS:
            raise InvalidInput(f"the kind is one of {', '.join(KINDS)}, not {kind!r}")
        found = [state for state in await self.list(name) if (state.kind, state.name) == (kind, name)]
        if not found:
            raise NotFound(f"nobody holds {kind} {name!r}")
        keys = [LOCKS.key(kind, name, stand.id) for stand in found[0].holders]
        for start in range(0, len(keys), OPERATIONS_MAX):
            await self._scope.commit(tuple(Delete(key) for key in keys[start : start + OPERATIONS_MAX]))
        return found[0].holders

    async def forget(self, name: str, kind: Kind = "semaphore") -> None:
        """Forget how large a semaphore or pool is that nobody uses; its next user names a size anew. Conflict while it is used.

        Its size is a key of who used it first: who made it, or an orchestrator, gets that key back so.
        """
        if kind not in ("semaphore", "pool"):
            raise InvalidInput(f"a semaphore or a pool has a size, and no {kind}")
        await self._scope.commit((Delete(PERMITS.key(kind, name)),), (Empty(LOCKS.prefix(kind, name)),))

    async def release(self, kind: Kind, name: str, id: str, *, request_id: str | None = None) -> datetime:
        """Give up what this agent acquired under this id, maybe in another process; LeaseLost if it is over already.

        Gives the time of the release.
        """
        key = LOCKS.key(kind, name, id)
        try:
            receipt = await self._scope.commit((Delete(key),), (Mine(key), Present(key)), request_id)
        except Conflict as conflict:
            raise _refusal(kind, name, conflict) from conflict
        return as_datetime(receipt.at)

    async def renew(self, kind: Kind, name: str, id: str, ttl: Duration, *, request_id: str | None = None) -> datetime:
        """Extend what this agent acquired under this id, never shorten it; gives until when it is held now."""
        key, ttl_ms = LOCKS.key(kind, name, id), duration_ms(ttl, name="ttl")
        try:
            receipt = await self._scope.commit((Touch(key, ttl_ms),), (Mine(key),), request_id)
        except Conflict as conflict:
            raise _refusal(kind, name, conflict) from conflict
        return as_datetime(receipt.results[0])  # type: ignore[arg-type]

    async def _entries(self, root: str) -> Items[Entry]:
        entries: Items[Entry] = []
        while True:
            after = entries[-1].key if entries else None
            page = await self._scope.engine.scan(self._scope.space, root, after=after, limit=SCAN_MAX)
            entries += page.entries
            if not page.more:
                return entries


def _state(kind: Kind, name: str, size: int, entries: list[Entry]) -> LockState:
    places = {entry.key: place_of(entry.value) for entry in entries}
    turns = set(in_turn(iter(places.items()), size))
    stands = {entry.key: _stand(entry, places[entry.key], entry.key in turns) for entry in entries}
    holders = [stand for key, stand in stands.items() if key in turns]
    waiters = [stand for key, stand in stands.items() if key not in turns]
    return LockState(kind, name, size, holders, waiters)


def _stand(entry: Entry, place: Place, holds: bool) -> Stand:
    began = entry.created_at if place.token is None else entry.updated_at
    expires_at = None if entry.expires_at is None else as_datetime(entry.expires_at)
    token = (place.token or entry.version) if holds else None
    number = entry.key[entry.key.rindex("/") + 1 :]
    return Stand(entry.owner, place.instance, number, token, as_datetime(began), expires_at, place.units, place.shared)


def _refusal(kind: Kind, name: str, conflict: Conflict) -> AccessDenied | LeaseLost:
    if conflict.condition == "mine":
        return AccessDenied(f"{kind} {name!r} is held by another agent; only the one that acquired it may do that")
    return LeaseLost(f"{kind} {name!r} is not held any more: its lease ended, it was released, or somebody broke it")
