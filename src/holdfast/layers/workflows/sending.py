"""Sending something to an execution: read how it stands, and commit on condition that it still stands so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from holdfast.engine import Condition, Operation
from holdfast.errors import Conflict, NotFound
from holdfast.layers.answers import once
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.transact import Transaction, transact
from holdfast.layers.workflows.entries import execution_key, execution_of
from holdfast.layers.workflows.mail import sending


async def send(
    scope: Scope,
    queue_of: Callable[[str], Queue],
    id: str,
    name: str,
    value: bytes,
    *,
    wake: bool | None = None,
    request_id: str | None = None,
) -> None:
    """Send it. NotFound if there is no such execution, Conflict if it has ended. What was sent under a request id is not sent again."""

    async def put(transaction: Transaction) -> None:
        [entry] = await transaction.read(execution_key(id))
        if entry is None:
            raise NotFound(f"there is no execution {id!r}; it was never started, or its record has expired")
        execution = execution_of(entry)
        if execution.ended:
            raise Conflict(
                f"execution {id!r} is {execution.status}, and takes nothing more",
                key=entry.key,
                condition="status",
                actual=entry,
            )
        operations: list[Operation]
        conditions: list[Condition]
        operations, conditions = sending(queue_of(execution.name), entry, execution, name, value, wake=wake)
        transaction.operations += operations
        transaction.conditions += [each for each in conditions if each not in transaction.conditions]

    async def work(transaction: Transaction) -> None:
        asked = ["signal", id, name, hashlib.sha256(value).hexdigest()]
        await once(transaction, request_id, asked, lambda: put(transaction))

    await transact(lambda: Transaction(scope), work)
