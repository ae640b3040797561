"""Which verb an operation needs, and whose entries it may change: the one table behind access and ownership.

Rules speak of verbs (document D's, and Audit). What a client sends are operations on keys. `TERRITORIES` says for each
subspace which verb reads it, which one each operation needs there, and who may change what is there:

    free   everybody: records
    item   everybody: lists and sets, under the record that stands for them (`item_claims.py`)
    own    one creates what is absent and changes what one owns
    line   as own, and entries come only by Push: whoever comes first has it, so nobody chooses a key, and keeps what it said
    size   of such a line: one creates what is absent; it stays as it is until one deletes it, while nobody uses it (`line_claims.py`)
    once   one creates what is absent; it stays as it is
    named  one element of the key is a name, and whoever has that name writes there; orchestrators for everybody
    message  queues, which have rules of their own (`messages.py`)
    task     tasks, which have too (`task_claims.py`)
    workflow, tally   executions and what is counted of them: orchestrators, and agents that start and signal (`workflow_claims.py`)

Where only orchestrators and administrators write at all, the territory says so (`by_orchestrators`).

`demands` gives every verb a batch needs: a condition reads its key, so it needs what reading needs; a batch with more than
one operation on records needs Transaction besides. `claims` gives the conditions that make the rule of ownership part of the
commit itself. Both depend on the batch and nothing else, so a repeated request gets the same conditions and the same digest.

A subspace that is not in the table is closed to everybody but administrators, and so is what needs ADMIN, a verb that no
rule can give; ORCHESTRATE is one that comes with the role. REMEMBER everybody has: what is remembered of a request needs no
verb, so that the same request is allowed or denied under an id and without one. A new capability adds its line here.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.engine import (
    REQUEST_WINDOW_MS,
    Absent,
    Batch,
    Condition,
    Delete,
    Empty,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
)
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import unescape
from holdfast.middleware.history_claims import check_told
from holdfast.middleware.item_claims import item_claims
from holdfast.middleware.line_claims import check_place, size_claims
from holdfast.middleware.messages import Misplaced, count_claims, message_claims
from holdfast.middleware.task_claims import inbox_claims, task_claims
from holdfast.middleware.workflow_claims import check_line, tally_claims, workflow_claims

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
ORCHESTRATE: Final = "Orchestrate"
"""What no rule can give either: orchestrators and administrators have it."""
REMEMBER: Final = "Remember"
"""What no rule can take: everybody has it. A request under an id needs the same verbs as without one."""

Ownership = Literal["free", "item", "own", "line", "size", "once", "named", "message", "task", "workflow", "tally"]


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
    """Orchestrators change what others own, and write in others' names where entries are named."""
    by_orchestrators: bool = False
    """Agents write nothing here, whatever verbs they have."""
    elements: int = 0
    """How many elements the prefix of a Push has, its subspace included; one more would get before it."""
    leased: bool = False
    """What is written here has a ttl: whoever holds it must live, or it is for a while."""
    told: bool = False
    """Agents append only what tells of something that the same batch does (`history_claims.py`)."""
    named: int = 0
    """Which element of a key is its writer's name, the subspace being the first (0); one more follows it."""
    private: bool = False
    """Nobody but the one whose name is the second element reads it."""


_RECORDS: Final = Territory("Get", "Set", "CompareAndSwap", "Set", "Set", "Increment", "Delete", ownership="free")
_ITEMS: Final = Territory("Get", "Set", "Set", "Set", "Set", "Increment", "Delete", ownership="item")
_GIVEN: Final = Territory(
    "Get", "Set", "CompareAndSwap", "Set", "Set", "Increment", "Delete", ownership="free", by_orchestrators=True
)
_DECIDED: Final = Territory(
    ORCHESTRATE,
    ORCHESTRATE,
    ORCHESTRATE,
    touch=ORCHESTRATE,
    delete=ORCHESTRATE,
    ownership="free",
    by_orchestrators=True,
)
CLOSED: Final = Territory(ADMIN)

TERRITORIES: Final[dict[str, Territory]] = {
    "records": _RECORDS,
    "lists": _ITEMS,
    "sets": _ITEMS,
    "locks": Territory(
        "Lock", "Lock", "Lock", "Lock", "Lock", ADMIN, "Unlock", ownership="line", elements=3, leased=True
    ),
    "permits": Territory("Lock", "Lock", "Lock", delete="Lock", ownership="size"),
    "blobs": Territory("Get", "Set", "Set", "Set", "Set", "Increment", "Delete"),
    "schemas": Territory("Get", "Set", "Set", ownership="once", by_orchestrators=True),
    "queues": Territory("Get", "Set", "Set", "Set", delete="Delete", take="Reserve", ownership="message"),
    "reserved": Territory("Get", "Reserve", "Reserve", delete="Reserve", take="Reserve", ownership="message"),
    "consumers": Territory(
        "Get", "Reserve", "Reserve", touch="Reserve", delete="Reserve", ownership="message", leased=True
    ),
    "depths": Territory("Get", increment="Set", delete="Set", take="Reserve", ownership="message"),
    "dedup": Territory("Get", "Set", "Set", delete="Delete", ownership="message", leased=True),
    "reasons": Territory("Get", "Reserve", "Reserve", delete="Reserve", ownership="message"),
    "specs": Territory(ORCHESTRATE, "Set", "Set", ownership="once"),
    "tasks": Territory("Get", "Set", "Set", "Set", "Set", "Set", "Set", ownership="task"),
    "sections": Territory(
        "Get", "Set", "CompareAndSwap", touch="Set", delete="Delete", ownership="named", orchestrated=True, named=3
    ),
    "modes": Territory("Get", "Set", "Set", delete="Delete", ownership="once", orchestrated=True),
    "history": Territory("Get", push="Set", ownership="line", elements=3, told=True),
    "documents": _GIVEN,
    "correlations": _GIVEN,
    "decisions": _DECIDED,
    "workflows": Territory("Get", "Set", "Set", delete="Delete", ownership="workflow", orchestrated=True),
    "signals": Territory("Get", push="Set", delete="Delete", ownership="line", elements=3, orchestrated=True),
    "tallies": Territory("Get", increment="Set", delete=ORCHESTRATE, ownership="tally", orchestrated=True),
    "journal": _GIVEN,
    "shared": _GIVEN,
    "schedules": _GIVEN,
    "answers": Territory(REMEMBER, REMEMBER, REMEMBER, ownership="named", named=1, private=True),
    "audit": Territory("Audit"),
    "system": CLOSED,
}


Demand: TypeAlias = tuple[str, str]
"""A verb, and the key it is needed for."""


def check_verb(verb: str) -> None:
    """Refuse a word that no rule can mean."""
    if verb not in VERBS and verb != EVERY_VERB:
        raise InvalidInput(f"{verb!r} is no verb; there are {', '.join(VERBS)}, and {EVERY_VERB} for all")


def territory_of(key: str) -> Territory:
    return TERRITORIES.get(key.partition("/")[0], CLOSED)


def territory_under(prefix: str) -> Territory:
    """Of a scan's or watch's prefix; one that does not name a whole subspace is closed."""
    return CLOSED if prefix.find("/") < 1 else territory_of(prefix)


def reading(key: str, reader: str, territory: Territory) -> str:
    """The verb that somebody needs to read a key of this territory, or what is under a prefix."""
    return territory.read if not territory.private or _is_of(key, reader) else ADMIN


def _is_of(key: str, name: str) -> bool:
    parts = key.split("/", 2)
    return len(parts) == 3 and unescape(parts[1]) == name


def readable(verbs: frozenset[str]) -> tuple[str, ...]:
    """The prefixes of the subspaces that one may read with these verbs."""
    return tuple(
        f"{name}/" for name, territory in TERRITORIES.items() if territory.read in verbs and not territory.private
    )


def demands(batch: Batch) -> list[Demand]:
    """Every verb the batch needs, with a key for each."""
    needed: list[Demand] = []
    tested = set()
    for condition in batch.conditions:
        if type(condition) is Empty:
            prefix = condition.prefix
            needed.append((reading(prefix, batch.actor, territory_under(prefix)), prefix))
            continue
        key = condition.key  # type: ignore[union-attr]
        tested.add(key)
        needed.append((reading(key, batch.actor, TERRITORIES.get(key.partition("/")[0], CLOSED)), key))
    records = 0
    for op in batch.operations:
        kind = type(op)
        if kind is Take:
            for place in (op.source, op.target, op.source_counter, op.target_counter):  # type: ignore[union-attr]
                if place is not None:
                    needed.append((territory_of(place).take, place))
            continue
        key = op.prefix if kind is Push else op.key  # type: ignore[union-attr]
        territory = TERRITORIES.get(key.partition("/")[0], CLOSED)
        if kind is Put and key in tested:
            needed.append((territory.swap, key))
        else:
            needed.append((_verb(territory, kind), key))
        if territory is _RECORDS:
            records += 1
            if records == 2:
                needed.append(("Transaction", key))
    return needed


def _verb(territory: Territory, kind: type[Operation]) -> str:
    if kind is Put:
        return territory.put
    if kind is Delete:
        return territory.delete
    if kind is Push:
        return territory.push
    if kind is Touch:
        return territory.touch
    return territory.increment


def renews(batch: Batch) -> bool:
    """Whether it does nothing but keep alive what is there."""
    return bool(batch.operations) and all(type(op) is Touch for op in batch.operations)


def claims(batch: Batch, *, orchestrator: bool) -> tuple[Condition, ...]:
    """What must hold for the batch to change nothing that is another's. Misplaced when it never can."""
    conditions: list[Condition] = []
    has_messages = has_items = False
    for op in batch.operations:
        kind = type(op)
        if kind is Take:
            if not orchestrator:
                check_line(op)
            conditions += message_claims(op, batch, orchestrator=orchestrator)
            has_messages = True
            continue
        key: str = op.prefix if kind is Push else op.key  # type: ignore[union-attr]
        territory = TERRITORIES.get(key.partition("/")[0], CLOSED)
        if territory.by_orchestrators and not orchestrator:
            raise Misplaced(key, "orchestrators write it, and agents read it")
        ownership = territory.ownership
        if ownership == "free" or (orchestrator and territory.orchestrated):
            continue
        if ownership == "item":
            has_items = True
            continue
        if ownership == "named":
            if named_in(key) != batch.actor:
                raise Misplaced(
                    key, f"it is not named after {batch.actor!r}, and here one writes under one's own name only"
                )
            if territory.put == REMEMBER and all(territory_of(_place(each)) is territory for each in batch.operations):
                raise Misplaced(key, "an answer is written along with what it tells of")
            if territory.put == REMEMBER and not 0 < (op.ttl_ms or 0) <= REQUEST_WINDOW_MS:  # type: ignore[union-attr]
                raise Misplaced(
                    key, "an answer is remembered as long as a request id, and needs a ttl of no more than that"
                )
            continue
        if kind is Push and territory.elements and key.count("/") != territory.elements:
            raise Misplaced(key, f"a line has {territory.elements - 1} names before its places")
        if territory.leased and (kind is Push or kind is Put) and op.ttl_ms is None:  # type: ignore[union-attr]
            raise Misplaced(key, "it is held by a lease and needs a ttl")
        if territory.told and kind is Push and not orchestrator:
            check_told(op, batch)  # type: ignore[arg-type]
        if ownership == "message":
            if not orchestrator:
                check_line(op)
            has_messages = True
            inbox = inbox_claims(op, batch, orchestrator=orchestrator)
            conditions += message_claims(op, batch, orchestrator=orchestrator) if inbox is None else inbox
            continue
        if ownership == "task":
            conditions += task_claims(op, batch, orchestrator=orchestrator)
            continue
        if ownership == "workflow" or ownership == "tally":
            conditions += workflow_claims(op, batch) if ownership == "workflow" else tally_claims(op, batch)
            continue
        if ownership == "size":
            conditions += size_claims(op, orchestrator=orchestrator)
        elif ownership == "once":
            conditions.append(Absent(key))
        elif kind is not Push:
            conditions.append(Mine(key))
            if ownership == "line" and kind is Put:
                check_place(op, batch)  # type: ignore[arg-type]
    if has_messages:
        conditions += count_claims(batch)
    if has_items:
        conditions += item_claims(batch)
    return tuple(conditions) if len(conditions) < 2 else tuple(dict.fromkeys(conditions))


_LOCKS: Final = TERRITORIES["locks"]


def place_in_line(operations: tuple[Operation, ...]) -> str | None:
    """Which place in the line of a lock these are about: one Push, one Delete, or a Delete that hands over to who is next (Touch).

    None: it is something else.
    """
    op = operations[0] if operations else None
    heir = operations[1] if len(operations) == 2 else None
    keys: tuple[str, ...] = ()
    if len(operations) == 1 and type(op) is Push:
        keys = (op.prefix,)
    elif len(operations) == 1 and type(op) is Delete:
        keys = (op.key,)
    elif type(op) is Delete and type(heir) is Touch:
        keys = (op.key, heir.key)
    for key in keys:
        if type(key) is not str or key[:6] != "locks/" or not key.isascii():
            return None
    return keys[0] if keys else None


def claims_in_line(
    operations: tuple[Operation, ...], conditions: tuple[Condition, ...], verbs: frozenset[str]
) -> tuple[Condition, ...] | None:
    """`demands` and `claims` at one look, for what `place_in_line` knows, as the library says it.

    None: it says something else, or may not; then those two tell what, and why.
    """
    op = operations[0]
    if type(op) is Delete:
        if conditions or _LOCKS.delete not in verbs:
            return None
        if len(operations) == 1:
            return (Mine(op.key),)
        heir: str = operations[1].key  # type: ignore[union-attr]
        return (Mine(op.key), Mine(heir)) if _LOCKS.touch in verbs and heir != op.key else None
    prefix = op.prefix  # type: ignore[union-attr]
    is_free = not conditions or (len(conditions) == 1 and conditions[0] == Empty(prefix))
    if is_free and op.ttl_ms is not None and prefix.count("/") == _LOCKS.elements:  # type: ignore[union-attr]
        return () if _LOCKS.push in verbs and _LOCKS.read in verbs else None
    return None


def _place(op: Operation) -> str:
    """The key, or the prefix, that an operation writes at."""
    return op.target if isinstance(op, Take) else op.prefix if isinstance(op, Push) else op.key


def named_in(key: str) -> str | None:
    """Whose name a key carries; None where keys carry none, or when it is no key of that form."""
    place = TERRITORIES.get(key.partition("/")[0], CLOSED).named
    parts = key.split("/", place + 1)
    return unescape(parts[place]) if place and len(parts) == place + 2 else None


def written_for(op: Put, actor: str, *, orchestrator: bool) -> bool:
    """Whether the actor may make this entry its owner's: its own, or, for orchestrators, that of the name in the key."""
    return op.owner is None or op.owner == actor or (orchestrator and op.owner == named_in(op.key))


_NAMED: Final[dict[str, type[Mine | Absent | Present | ValueIs]]] = {
    "mine": Mine,
    "absent": Absent,
    "present": Present,
    "value": ValueIs,
}
"""As Conflict calls them."""


def claimed(conflict: Conflict, batch: Batch, conditions: tuple[Condition, ...]) -> bool:
    """Whether what refused the batch is one of the conditions that were added to it, and none that its sender asked for."""
    kind = _NAMED.get(conflict.condition or "")
    if kind is None:
        return False
    added, asked = (
        any(type(each) is kind and each.key == conflict.key for each in among)
        for among in (conditions, batch.conditions)
    )
    return added and (kind is Mine or not asked)
