"""What must hold for a batch to do nothing with messages that its sender may not: the claims of `verbs.py` for queues.

    queues/      everybody appends; whoever chooses an id has its name behind it; one changes what one owns
    reserved/    messages come here by Take, under a live lease of one's own, `<lease>~` for what is taken ahead and may move
                 to `<lease>`; or one puts a message of one's own there, counted, when nobody stands in line; what is another's is not touched, and what a
                 consumer left can be taken once its lease has ended; only who has a message makes it a dead letter ("-")
    consumers/   a lease is its owner's, and has a ttl
    depths/      numbers that a batch adds to by what it does to messages, and by nothing else (`count_claims`); they go when what they
                 count is gone
    reasons/     written by who has the message, in the batch that ends its reservation

Orchestrators change what waits and what is dead, whoever's it is; not what a consumer has. A key of another form is refused:
a message always stands where the library would look for it.

A batch counts what it does: as many messages more, or fewer, in a state of a queue as it adds to that number, no more and no fewer. That
each message it makes is new, and each that it removes is there, are conditions of the commit. What is in the inboxes of tasks is
not counted, as there are as many of those as tasks.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.engine import (
    Absent,
    Batch,
    Condition,
    Delete,
    Empty,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
)

_NAME: Final = "([^/]+)"
_TAIL: Final = r"(\d{19}(?:/@[A-Za-z0-9_-]+)?)"
_WAITING: Final = re.compile(
    rf"queues/(?:ready/{_NAME}/\d{{3}}/(?:\d{{19}}/)?|delayed/{_NAME}/\d{{3}}/\d{{19}}/){_TAIL}", re.A
)
_APPENDED: Final = re.compile(
    rf"queues/(?:ready/{_NAME}/\d{{3}}/(?:\d{{19}}/)?|delayed/{_NAME}/\d{{3}}/\d{{19}}/)", re.A
)
_RESERVED: Final = re.compile(rf"reserved/{_NAME}/{_NAME}/\d{{3}}/(?:\d{{19}}/)?{_TAIL}", re.A)
_CONSUMER: Final = re.compile(rf"consumers/{_NAME}/[0-9a-f]{{30}}", re.A)
_DEPTH: Final = re.compile(rf"depths/{_NAME}/(ready|delayed|reserved|dead)")
_REASON: Final = re.compile(rf"reasons/{_NAME}/(\d{{19}})", re.A)
_DEDUP: Final = re.compile(r"dedup/[^/]+/.+", re.S)
_LINE: Final = re.compile(rf"queues/ready/{_NAME}/")
_DUE: Final = re.compile(rf"queues/delayed/{_NAME}/(\d{{3}})/", re.A)
_STANDING: Final = re.compile(rf"queues/ready/{_NAME}/(\d{{3}})/", re.A)
_HANDS: Final = re.compile(rf"reserved/{_NAME}/([0-9a-f]{{30}})~?/", re.A)
_LEASE: Final = re.compile(r"[0-9a-f]{30}")
_INBOX: Final = re.compile(r"depths/T[0-9]{19}\.inbox/.+")

DEAD: Final = "-"


class Misplaced(Exception):
    """An operation that cannot be right in its subspace, whoever sends it; `key` is where."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def message_claims(op: Operation, batch: Batch, *, orchestrator: bool) -> list[Condition]:
    """What one operation on queues adds to its batch."""
    if isinstance(op, Take):
        return _taking(op)
    if isinstance(op, Push):
        if _APPENDED.fullmatch(op.prefix) is None:
            raise Misplaced(op.prefix, "it is no place where messages are appended")
        return []
    key = op.key
    subspace = key.partition("/")[0]
    if subspace == "queues":
        return _waiting(op, key, batch, orchestrator)
    if subspace == "reserved":
        return _reserved(op, key, batch, orchestrator)
    if subspace == "consumers":
        if _CONSUMER.fullmatch(key) is None:
            raise Misplaced(key, "it is no consumer's lease")
        return [Mine(key)]
    if subspace == "depths":
        return _depth(op, key)  # and what it is increased by, in `count_claims`
    if subspace == "reasons":
        return _reasons(key, batch)
    if _DEDUP.fullmatch(key) is None:
        raise Misplaced(key, "it is no key of a message")
    return [] if orchestrator else [Mine(key)]


def _waiting(op: Operation, key: str, batch: Batch, orchestrator: bool) -> list[Condition]:
    match = _WAITING.fullmatch(key)
    if match is None:
        raise Misplaced(key, "it is no message's place")
    if isinstance(op, Put) and match[3].partition("/@")[2] != batch.actor:
        # It goes on under the id it has: whoever writes it here has it, and gives it up.
        return [Present(_given_up(key, match[3], batch)), Mine(key)]
    return [] if orchestrator and isinstance(op, Delete) else [Mine(key)]


def _reserved(op: Operation, key: str, batch: Batch, orchestrator: bool) -> list[Condition]:
    match = _RESERVED.fullmatch(key)
    if match is None:
        raise Misplaced(key, "it is no message's place")
    if isinstance(op, Delete):
        return [] if orchestrator and match[2] == DEAD else [Mine(key)]
    if match[2] == DEAD:
        return [Present(_given_up(key, match[3], batch)), Mine(key)]
    if isinstance(op, Put) and op.ttl_ms is None and _LEASE.fullmatch(match[2].removesuffix("~")):
        mine, lease = f"reserved/{match[1]}/{match[2]}", f"consumers/{match[1]}/{match[2].removesuffix('~')}"
        ahead = f"{mine}~{key.removeprefix(mine)}"
        if Delete(ahead) in batch.operations:  # it was taken ahead under the same lease, and begins
            return [Present(ahead), Mine(key), Present(lease), Mine(lease)]
        if (
            match[3].partition("/@")[2] == batch.actor
            and Increment(f"depths/{match[1]}/reserved", 1) in batch.operations
        ):
            return [Absent(key), Present(lease), Mine(lease), Empty(f"queues/ready/{match[1]}/")]
    raise Misplaced(key, "a message is reserved by taking it")


def _given_up(key: str, tail: str, batch: Batch) -> str:
    """Where the batch removes the message that it writes under `key`; what it may remove, is claimed with that operation."""
    for op in batch.operations:
        if isinstance(op, Delete):
            match = _RESERVED.fullmatch(op.key) or _WAITING.fullmatch(op.key)
            if match is not None and match[3] == tail:
                return op.key
    raise Misplaced(
        key, "a message is written under an id of another's making only by who has it, and gives it up with that"
    )


def _depth(op: Operation, key: str) -> list[Condition]:
    match = _DEPTH.fullmatch(key)
    if match is None or (isinstance(op, Increment) and op.ttl_ms is not None):
        raise Misplaced(key, "it counts no messages")
    if not isinstance(op, Delete):
        return []
    if match[2] in ("ready", "delayed"):
        return [Empty(f"queues/{match[2]}/{match[1]}/")]
    return [Empty(f"reserved/{match[1]}/")]


def _reasons(key: str, batch: Batch) -> list[Condition]:
    match = _REASON.fullmatch(key)
    if match is None:
        raise Misplaced(key, "it is no message's reasons")
    for op in batch.operations:
        if isinstance(op, Delete):
            found = _RESERVED.fullmatch(op.key)
            if found is not None and (found[1], found[3].partition("/")[0]) == (match[1], match[2]):
                return [Present(op.key)]
    raise Misplaced(key, "why a message failed is written by who has it, with what becomes of it")


def _taking(op: Take) -> list[Condition]:
    due, standing = _DUE.fullmatch(op.source), _STANDING.fullmatch(op.target)
    if due is not None and standing is not None and due.groups() == standing.groups() and op.upto is not None:
        return []
    hands = _HANDS.fullmatch(op.target)
    if hands is None:
        raise Misplaced(op.target, "messages are taken under a lease of one's own")
    mine = f"consumers/{hands[1]}/{hands[2]}"
    conditions: list[Condition] = [Present(mine), Mine(mine)]
    line, left = _LINE.fullmatch(op.source), _HANDS.fullmatch(op.source)
    if line is not None and line[1] == hands[1]:
        return conditions
    if left is not None and left[1] == hands[1]:
        return [*conditions, Absent(f"consumers/{left[1]}/{left[2]}")]
    raise Misplaced(op.source, "messages are taken from the line of the same queue, or from a consumer that is dead")


def count_claims(batch: Batch) -> list[Condition]:
    """That what a batch adds to the numbers of messages is what it does to messages; for those in places of the right form."""
    added: dict[str, int] = {}
    happens: dict[str, int] = {}
    made: dict[str, str] = {}
    gone: dict[str, str] = {}
    taken: set[str | None] = set()
    for op in batch.operations:
        if isinstance(op, Take):
            taken.update(_counters(op))
            continue
        place = op.prefix if isinstance(op, Push) else op.key
        if isinstance(op, Increment) and place.startswith("depths/"):
            added[place] = added.get(place, 0) + op.delta
        depth = _depth_of(place)
        if depth is None:
            continue
        if isinstance(op, Put | Push) and op.ttl_ms is not None:
            raise Misplaced(place, "a message stays until it is done, and has no ttl")
        happens[depth] = happens.get(depth, 0) + (-1 if isinstance(op, Delete) else 1)
        if not isinstance(op, Push):
            if place in made or (isinstance(op, Delete) and place in gone):
                raise Misplaced(place, "a batch writes a message once, and removes one once, before it writes it anew")
            (gone if isinstance(op, Delete) else made)[place] = depth
    counted = {depth for depth in added.keys() | happens.keys() if depth in added or not _INBOX.fullmatch(depth)}
    for depth in counted:
        right = happens.get(depth, 0)
        if added.get(depth, 0) != right:
            raise Misplaced(
                depth, f"it counts messages, of which the batch makes {right} more: add that to it, and no other"
            )
        if depth in taken or Delete(depth) in batch.operations:
            raise Misplaced(depth, "a batch takes messages, writes them, or forgets their number: one of these")
    needed: list[Condition] = [Present(place) for place, depth in gone.items() if depth in counted]
    needed += [Absent(place) for place, depth in made.items() if depth in counted and place not in gone]
    asked = set(batch.conditions)
    return [condition for condition in needed if condition not in asked]


def _counters(op: Take) -> tuple[str | None, str | None]:
    """What counts the messages that a Take moves; Misplaced when it does not count them, or others."""
    source, target = _depth_of(op.source), _depth_of(op.target)
    right = {(source, target)}
    if source == target or (source is not None and _INBOX.fullmatch(source)):
        right.add((None, None))
    if (op.source_counter, op.target_counter) not in right:
        raise Misplaced(op.source, f"what is taken from here is counted by {source} and {target}")
    return source, target


def _depth_of(place: str) -> str | None:
    """The number that counts what stands at a place of messages, a key or a prefix; None for any other."""
    parts = place.split("/", 3)
    if parts[0] == "queues" and len(parts) == 4:
        return f"depths/{parts[2]}/{parts[1]}"
    if parts[0] == "reserved" and len(parts) == 4:
        return f"depths/{parts[1]}/{'dead' if parts[2] == DEAD else 'reserved'}"
    return None
