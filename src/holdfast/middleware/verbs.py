"""Which verb an operation needs, and whose entries it may change: the one table behind access and ownership.

Rules speak of verbs (document D's, and Audit). What a client sends are operations on keys. `TERRITORIES` says for each
subspace which verb reads it, which one each operation needs there, and who may change what is there:

    free   everybody: records, with their lists and sets
    own    one creates what is absent and changes what one owns
    line   as own, and entries come only by Push: whoever comes first has it, so nobody chooses a key
    once   one creates what is absent; it stays as it is

`demands` gives every verb a batch needs: a condition reads its key, so it needs what reading needs; a batch with more than
one operation on records needs Transaction besides. `claims` gives the conditions that make the rule of ownership part of the
commit itself. Both depend on the batch and nothing else, so a repeated request gets the same conditions and the same digest.

A subspace that is not in the table is closed to everybody but administrators, and so is what needs ADMIN, a verb that no
rule can give. A new capability adds its line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.engine import (
    Absent,
    Batch,
    Condition,
    Delete,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
)

from holdfast.errors import InvalidInput

VERBS: Final = (
    "Get",
    "Set",
    "Delete",
    "Increment",
    "CompareAndSwap",
    "Lock",
    "Unlock",
    "Transaction",
    "Watch",
    "Reserve",
    "Audit",
)
EVERY_VERB: Final = "*"
ADMIN: Final = "Admin"
"""What no rule can give: only administrators have it."""

Ownership = Literal["free", "own", "line", "once"]


class Territory(msgspec.Struct, frozen=True):
    """The verbs of one subspace, and whose its entries are."""

    read: str
    put: str = ADMIN
    swap: str = ADMIN
    """A Put with a condition on the same key."""
    push: str = ADMIN
    touch: str = ADMIN
    increment: str = ADMIN
    delete: str = ADMIN
    take: str = ADMIN
    ownership: Ownership = "own"
    orchestrated: bool = False
    """Orchestrators change what others own."""
    elements: int = 0
    """How many elements the prefix of a line has, its subspace included; one more would get before it."""


_RECORDS: Final = Territory("Get", "Set", "CompareAndSwap", "Set", "Set", "Increment", "Delete", ownership="free")
_ITEMS: Final = Territory("Get", "Set", "Set", "Set", "Set", "Increment", "Delete", ownership="free")
_DOCUMENTS: Final = Territory("Get", "Set", "CompareAndSwap", "Set", "Set", "Increment", "Delete", orchestrated=True)
CLOSED: Final = Territory(ADMIN)

TERRITORIES: Final[dict[str, Territory]] = {
    "records": _RECORDS,
    "lists": _ITEMS,
    "sets": _ITEMS,
    "locks": Territory("Lock", "Lock", "Lock", "Lock", "Lock", ADMIN, "Unlock", ownership="line", elements=3),
    "permits": Territory("Lock", "Lock", "Lock", ownership="once"),
    "blobs": Territory("Get", "Set", "Set", "Set", "Set", "Increment", "Delete"),
    "queues": Territory("Get", "Set", "Set", "Set", "Reserve", "Set", "Delete", "Reserve", ownership="line"),
    "documents": _DOCUMENTS,
    "correlations": _DOCUMENTS,
    "answers": Territory("Transaction", "Transaction", "Transaction"),
    "audit": Territory("Audit"),
    "system": CLOSED,
}


class Demand(NamedTuple):
    """A verb, and the key it is needed for."""

    verb: str
    key: str


class Claims(NamedTuple):
    """Conditions that ownership adds to a batch, and which of them the client did not ask for itself."""

    conditions: tuple[Condition, ...]
    added: frozenset[tuple[str, str]]
    """By the names that Conflict has for them: condition and key."""


class Misplaced(Exception):
    """An operation that cannot be right in its subspace, whoever sends it; `key` is where."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


NO_CLAIMS: Final = Claims((), frozenset())


def check_verb(verb: str) -> None:
    """Refuse a word that no rule can mean."""
    if verb not in VERBS and verb != EVERY_VERB:
        raise InvalidInput(f"{verb!r} is no verb; there are {', '.join(VERBS)}, and {EVERY_VERB} for all")


def territory_of(key: str) -> Territory:
    return TERRITORIES.get(key.partition("/")[0], CLOSED)


def territory_under(prefix: str) -> Territory:
    """Of a scan's or watch's prefix; one that does not name a whole subspace is closed."""
    return CLOSED if prefix.find("/") < 1 else territory_of(prefix)


def readable(verbs: frozenset[str]) -> tuple[str, ...]:
    """The prefixes of the subspaces that one may read with these verbs."""
    return tuple(f"{name}/" for name, territory in TERRITORIES.items() if territory.read in verbs)


def demands(batch: Batch) -> Iterator[Demand]:
    """Every verb the batch needs, with a key for each."""
    tested = set()
    for condition in batch.conditions:
        key = condition.key
        tested.add(key)
        yield Demand(territory_of(key).read, key)
    records = 0
    for op in batch.operations:
        if isinstance(op, Take):
            for place in (op.source, op.target, op.source_counter, op.target_counter):
                if place is not None:
                    yield Demand(territory_of(place).take, place)
            continue
        key = op.prefix if isinstance(op, Push) else op.key
        territory = territory_of(key)
        yield Demand(_verb(territory, op, key in tested), key)
        if territory is _RECORDS:
            records += 1
            if records == 2:
                yield Demand("Transaction", key)


def _verb(territory: Territory, op: Operation, tested: bool) -> str:
    if isinstance(op, Put):
        return territory.swap if tested else territory.put
    if isinstance(op, Delete):
        return territory.delete
    if isinstance(op, Push):
        return territory.push
    if isinstance(op, Increment):
        return territory.increment
    if isinstance(op, Touch):
        return territory.touch
    return territory.take


def claims(batch: Batch, *, orchestrator: bool) -> Claims:
    """What must hold for the batch to change nothing that is another's. Misplaced when it never can."""
    conditions: dict[tuple[str, str], Condition] = {}
    for op in batch.operations:
        if isinstance(op, Take):
            continue  # only where everybody may take
        territory = territory_of(op.prefix if isinstance(op, Push) else op.key)
        if territory.ownership == "free" or (orchestrator and territory.orchestrated):
            continue
        if isinstance(op, Push):
            if territory.elements and op.prefix.count("/") != territory.elements:
                raise Misplaced(op.prefix, f"a line has {territory.elements - 1} names before its places")
        elif territory.ownership == "once":
            conditions["absent", op.key] = Absent(op.key)
            continue
        else:
            conditions["mine", op.key] = Mine(op.key)
            if territory.ownership == "line" and isinstance(op, Put | Increment):
                conditions["present", op.key] = Present(op.key)
        if territory.elements and isinstance(op, Put | Push) and op.ttl_ms is None:
            raise Misplaced(
                op.prefix if isinstance(op, Push) else op.key, "a place in a line is held by a lease and needs a ttl"
            )
    if not conditions:
        return NO_CLAIMS
    asked = {(name, each.key) for each in batch.conditions if (name := _names.get(type(each)))}
    return Claims(tuple(conditions.values()), frozenset(conditions) - asked)


_names: Final[dict[type, str]] = {Absent: "absent", Present: "present"}
