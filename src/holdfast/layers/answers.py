"""Answers that are remembered: a transaction that reads, repeated under its request id, gives what it gave before.

An engine remembers the receipt of a batch by its request id, as long as the same batch is sent again. A transaction that
reads makes another batch each time, because its conditions name the versions it read, and what it read is in no receipt.
So its answer is written in its own commit, as `answers/<agent>/<request id>`, and found there when it is repeated. The
entry holds a digest of what was asked, for the same id must not be used for something else, and ends after an hour, as
request ids do. A transaction that wrote nothing leaves nothing: repeating it reads anew.

The commit has that id too where it is made by `records.transact`, so that feed and audit tell it.

How it fails. Two of the same id at once: one commits, the other is refused by the first one's entry or its id, and finds the
answer. An answer is a value: over 10 MiB it is InvalidInput, and nothing was changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.checking import check_label
from holdfast.codec import STORED_NESTING_MAX, decode, encode
from holdfast.engine import REQUEST_ID_BYTES_MAX, REQUEST_WINDOW_MS, Put
from holdfast.errors import InvalidInput
from holdfast.keys import Subspace
from holdfast.layers.scope import Scope
from holdfast.layers.transact import Transaction

ANSWERS: Final = Subspace("answers")


async def once(transaction: Transaction, request_id: str | None, asked: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """Within a transaction: do the work, or give what it answered when this request id was first asked."""
    before = await answered(transaction, request_id, asked)
    if before is not None:
        return before.answer
    answer = await work()
    if request_id is None:
        return answer
    if transaction.operations:
        transaction.put(remembering(transaction.scope, request_id, asked, answer))
    return decode(encode(answer, levels=STORED_NESTING_MAX))


class Answered(msgspec.Struct, frozen=True):
    """What was answered, and the version and the time of the commit it tells of."""

    answer: Any
    version: int
    at: int


async def answered(transaction: Transaction, request_id: str | None, asked: Any) -> Answered | None:
    """What was answered when this request id was first asked; None when it is new. The commit needs that it still is."""
    if request_id is None:
        return None
    check_label(request_id, "a request id", REQUEST_ID_BYTES_MAX)
    [entry] = await transaction.read(answer_key(transaction.scope, request_id))
    if entry is None:
        return None
    digest, answer = decode(entry.value, list)
    if digest != _digest(asked):
        raise InvalidInput(
            f"request id {request_id!r} was used before for something else; give every request its own id"
        )
    return Answered(answer, entry.version, entry.updated_at)


def remembering(scope: Scope, request_id: str, asked: Any, answer: Any) -> Put:
    """The operation by which a commit remembers its answer."""
    return Put(
        answer_key(scope, request_id), encode([_digest(asked), answer], levels=STORED_NESTING_MAX), REQUEST_WINDOW_MS
    )


def answer_key(scope: Scope, request_id: str) -> str:
    return ANSWERS.key(scope.actor, request_id)


def _digest(asked: Any) -> str:
    return hashlib.sha256(encode(asked, levels=STORED_NESTING_MAX)).hexdigest()
