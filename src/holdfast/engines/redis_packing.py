"""How batches, entries and commits travel to Redis and lie in it.

Entries are text for people: version, created, updated, expiry, owner and tag on a line each, then the value as it is. A
batch is sent as plain arguments, so nothing in it is decoded on the way; numbers are decimal text, because Lua's numbers
lose bits beyond 2^53. A commit in the feed is a stream entry whose changes are msgpack.

Why a batch was refused comes back as data. The words are made here and are those of `evaluation.py`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.engine import (
    Absent,
    AtLeast,
    Batch,
    Change,
    ChangeSet,
    Delete,
    Empty,
    Entry,
    Increment,
    Mine,
    Present,
    Push,
    Put,
    Receipt,
    Result,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.engines.refusals import no_number, refusal
from holdfast.engines.stored import digest_of
from holdfast.errors import Conflict, Damaged, Error, InvalidInput
from holdfast.keys import shown

Argument = str | bytes | int

CONDITION: Final[dict[type, str]] = {
    Absent: "a",
    Present: "e",
    VersionIs: "v",
    ValueIs: "=",
    AtLeast: ">",
    Mine: "m",
    Empty: "n",
}
_HEADER_LINES: Final = 6

_unpack = msgspec.msgpack.Decoder().decode
_unpack_changes = msgspec.msgpack.Decoder(list[Change]).decode


def arguments_of(batch: Batch) -> list[Argument]:
    """A batch as the commit script takes it, its length first."""
    digest = "" if batch.request_id is None else digest_of(batch)
    packed: list[Argument] = [
        0, batch.actor, batch.request_id or "", digest, len(batch.conditions), len(batch.operations)
    ]  # fmt: skip
    for condition in batch.conditions:
        if isinstance(condition, Empty):
            packed += (CONDITION[Empty], condition.prefix, "")
            continue
        operand: Argument = ""
        if isinstance(condition, VersionIs):
            operand = condition.version
        elif isinstance(condition, ValueIs):
            operand = condition.value
        elif isinstance(condition, AtLeast):
            operand = condition.number
        packed += (CONDITION[type(condition)], condition.key, operand)
    for op in batch.operations:
        if isinstance(op, Put):
            if op.ttl_ms is None and op.tag == "" and op.owner is None:
                packed += ("P", op.key, op.value)
            else:
                packed += ("p", op.key, op.value, _optional(op.ttl_ms), op.tag, op.owner or "")
        elif isinstance(op, Increment):
            packed += ("i", op.key, op.delta, _optional(op.ttl_ms))
        elif isinstance(op, Delete):
            packed += ("d", op.key)
        elif isinstance(op, Push):
            packed += ("q", op.prefix, op.value, _optional(op.ttl_ms), op.tag)
        elif isinstance(op, Touch):
            packed += ("t", op.key, op.ttl_ms)
        else:
            packed += (
                "k", op.source, op.target, op.n, op.upto or "", op.source_counter or "", op.target_counter or ""
            )  # fmt: skip
    packed[0] = len(packed) - 1
    return packed


def _optional(ttl_ms: int | None) -> Argument:
    return "" if ttl_ms is None else ttl_ms


def outcome_of(batch: Batch, reply: bytes) -> Receipt | Error:
    """What became of a batch, from the script's answer to it."""
    kind, *rest = _unpack(reply)
    if kind == 0:
        version, at, results = rest
        return Receipt(version, at, [_result(op, result) for op, result in zip(batch.operations, results, strict=True)])
    if kind == 1:
        index, raw = rest
        condition = batch.conditions[index]
        if isinstance(condition, Empty):
            key, raw = raw
            return refusal(condition, entry_of(key, raw))
        return refusal(condition, None if raw is None else entry_of(condition.key, raw))
    if kind == 2:
        key, first, tag = rest
        return no_number(key, first, tag)
    if kind == 3:
        key, total = rest
        return InvalidInput(f"{shown(key)} would become {total}, which is no 64-bit integer any more")
    if kind == 4:
        return Conflict(
            f"{shown(rest[0])} cannot be extended: it has expired or was never there", key=rest[0], condition="touch"
        )
    if kind == 5:
        key, target = rest
        return InvalidInput(f"{key!r} cannot move under {target!r}: the key would be too long")
    return InvalidInput(
        f"request id {batch.request_id!r} was used before for another batch; give every request its own id"
    )


def _result(op: object, result: Any) -> Result:
    if isinstance(op, Increment):
        return int(result)
    if isinstance(op, Take):
        return [entry_of(key, raw) for key, raw in result]
    return result  # type: ignore[no-any-return]


def entry_of(key: str, raw: bytes) -> Entry:
    """The entry under a key, from the form in which the server keeps it."""
    try:
        version, created, updated, expires, owner, tag, value = raw.split(b"\n", _HEADER_LINES)
        return Entry(
            key,
            value,
            int(version),
            owner.decode(),
            int(created),
            int(updated),
            int(expires) if expires else None,
            tag.decode(),
        )
    except ValueError as exc:
        raise Damaged(f"{shown(key)} is not stored in a form that this version reads") from exc


def raw_of(entry: Entry) -> bytes:
    """The form in which the server keeps an entry."""
    expires = "" if entry.expires_at is None else entry.expires_at
    header = f"{entry.version}\n{entry.created_at}\n{entry.updated_at}\n{expires}\n{entry.owner}\n{entry.tag}\n"
    if header.count("\n") != _HEADER_LINES:
        raise InvalidInput(f"owner and tag of {shown(entry.key)} must be one line each")
    return header.encode() + entry.value


def commit_of(streamed: list[Any]) -> ChangeSet:
    """A commit of the feed, as XRANGE gives it."""
    id, fields = streamed
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        return ChangeSet(
            int(id.partition(b"-")[0]),
            int(named[b"at"]),
            named[b"actor"].decode(),
            _unpack_changes(named[b"changes"]),
            named[b"request"].decode() or None,
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as exc:
        raise Damaged(f"commit {id.decode()} of the feed is not in a form that this version reads") from exc
