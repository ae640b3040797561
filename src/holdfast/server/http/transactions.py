"""Transactions over HTTP: `steps.py` as an endpoint of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import Conflict, LeaseLost, QuotaExceeded
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.guards import under
from holdfast.server.http.shapes import Changing, InSpace, Wire
from holdfast.server.http.steps import Conditions, Steps, run_steps


class Transaction(Wire, frozen=True):
    """Everything that is to happen, or nothing; conditions are about how things were before."""

    operations: Steps
    conditions: Conditions = msgspec.field(default_factory=list)


class Results(msgspec.Struct, frozen=True):
    """One result per operation (Get: the value or null, Increment: the sum, Delete: whether there was one, otherwise true)."""

    result: Any
    """The last one."""
    results: list[Any]


@endpoint("POST", "/v1/spaces/{space}/transactions", errors=(Conflict, LeaseLost, QuotaExceeded), verb="Transaction")
async def transact(call: Call, path: InSpace, headers: Changing, body: Transaction) -> Results:
    """Several operations at once, all or nothing. A Get sees the transaction's own writes."""
    space = await under(call.space(path.space), headers.guard)
    call.require(path.space, "Transaction")
    clock = call.port.keeper.clock
    outcome = await run_steps(space, clock, body.conditions, body.operations, headers.request_id)
    return Results(outcome.results[-1], outcome.results)


ENDPOINTS = (transact,)
