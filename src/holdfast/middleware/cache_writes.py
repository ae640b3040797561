"""What a commit wrote, told from its batch and its receipt, so that a hot tier need not read it back.

An entry is known afterwards if what was there before is known: it keeps the instant it was created at. Where that is not
known, or a key is written twice, or entries were taken, nothing is guessed: it is read when it is wanted.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec.structs import replace

from holdfast.engine import Batch, Delete, Entry, Increment, Operation, Push, Put, Receipt, Result, Take, Touch


class Unknown:
    """Whatever it is, it has to be read."""


UNKNOWN: Final = Unknown()
Known: TypeAlias = Entry | Unknown | None


def changed_keys(batch: Batch, receipt: Receipt) -> list[str] | None:
    """The keys that this commit changed; None when the batch does not tell.

    A batch that changed nothing may have no revision of its own: its receipt then shows that of somebody else's commit.
    """
    keys: list[str] = []
    certain = False
    for op, result in zip(batch.operations, receipt.results, strict=True):
        if isinstance(op, Take):
            return None
        if isinstance(op, Touch):
            continue
        keys.append(str(result) if isinstance(op, Push) else op.key)
        certain = certain or not isinstance(op, Delete) or result is True
    return keys if certain else None


def entry_after(op: Operation, result: Result, before: Known, actor: str, receipt: Receipt) -> Known:
    """What is under the operation's key after the commit; None when it is gone."""
    version, at = receipt.version, receipt.at
    if isinstance(op, Delete):
        return None
    if isinstance(op, Push):
        expires_at = None if op.ttl_ms is None else at + op.ttl_ms
        return Entry(str(result), op.value, version, actor, at, at, expires_at, op.tag)
    if isinstance(before, Unknown) or not isinstance(op, Put | Increment):
        return UNKNOWN
    expires_at = None if op.ttl_ms is None else at + op.ttl_ms
    created_at = at if before is None else before.created_at
    if isinstance(op, Put):
        owner = actor if op.owner is None else op.owner
        return Entry(op.key, op.value, version, owner, created_at, at, expires_at, op.tag)
    value = str(result).encode()
    if before is None:
        return Entry(op.key, value, version, actor, at, at, expires_at)
    if op.ttl_ms is None and before.expires_at is not None:
        return UNKNOWN  # somebody may have extended its life, which is no change that anybody hears of
    return replace(before, value=value, version=version, updated_at=at, expires_at=expires_at)
