"""Document D's envelope: one request, one reply.

    {"id": "m-17", "type": "request", "sender": "worker-7", "recipient": "state-keeper", "payload": {"operation": "Get", "key": "counter"}}

The payload is one operation; `SPELLINGS` is everything it may be called besides its own name. The id is the request's:
the same one again has no second effect and gives the identical reply, its id and timestamp included, for an hour and
after a restart. That holds for what changed something; what was refused changed nothing and is tried anew, and what only
reads reads anew. A request without an id gets one, which the reply tells as its correlationId.

Whose request it is, the credential says. `sender` is not looked at. The space is the token's; an administrator names one
with the header Holdfast-Space, in the payload, or as recipient `state-keeper/contoso`.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from holdfast.checking import check_label
from holdfast.clock import as_datetime
from holdfast.codec import passed_on
from holdfast.errors import Conflict, Error, InvalidInput, LeaseLost, LockAcquisitionError, QuotaExceeded
from holdfast.ids import new_id
from holdfast.server.http import steps
from holdfast.server.http.endpoint import Answer, Asked, Call, endpoint
from holdfast.server.http.failures import Failure, failure_of, headers_of, status_of
from holdfast.server.http.guards import read_guard, under
from holdfast.server.http.limits import REQUEST_ID_CHARS_MAX
from holdfast.server.http.locks import LockName, Zero, acquire, held
from holdfast.server.http.reading import read_as
from holdfast.server.http.shapes import (
    DurationText,
    GuardText,
    HoldingTime,
    Int64,
    Key,
    Lifetime,
    RequestId,
    SpaceName,
    Wire,
    holding_ms,
    plain,
)
from holdfast.server.http.tracing import bind
from holdfast.server.refusals import DENIALS
from holdfast.space import Space

KEEPER: Final = "state-keeper"


class _Told(Wire, frozen=True, tag_field="operation"):
    space: SpaceName | None = None


class _Changing(_Told, frozen=True):
    guard: GuardText | None = None
    """Only as long as this guard is held."""


class GetRequest(_Told, frozen=True, kw_only=True, tag="Get"):
    """Answered by {value}: null if there is none."""

    key: Key


class SetRequest(_Changing, frozen=True, kw_only=True, tag="Set"):
    """Answered by {success}."""

    key: Key
    value: Any
    ttl: Lifetime | None = None


class DeleteRequest(_Changing, frozen=True, kw_only=True, tag="Delete"):
    """Answered by {success, existed}."""

    key: Key


class IncrementRequest(_Changing, frozen=True, kw_only=True, tag="Increment"):
    """Answered by {newValue}."""

    key: Key
    delta: Int64 = 1
    ttl: Lifetime | None = None


class CompareAndSwapRequest(_Changing, frozen=True, kw_only=True, tag="CompareAndSwap"):
    """Answered by {success}. `old` null means that there is none yet."""

    key: Key
    new: Any
    old: Any = None
    ttl: Lifetime | None = None


class LockRequest(_Told, frozen=True, kw_only=True, tag="Lock"):
    """Answered by {guard, token, expiresAt}. `timeout` is how long it is held (otherwise as long as the keeper's
    `timeout_default` says, 5 s unless it is set), `wait` how long to stand in line."""

    key: LockName
    timeout: HoldingTime | None = None
    wait: DurationText | Zero = 0.0


class UnlockRequest(_Told, frozen=True, kw_only=True, tag="Unlock"):
    """Answered by {success}."""

    guard: GuardText


class TransactionRequest(_Changing, frozen=True, kw_only=True, tag="Transaction"):
    """Answered by {result, results}: all of it happens, or nothing."""

    operations: steps.Steps
    conditions: steps.Conditions = msgspec.field(default_factory=list)


Payload: TypeAlias = (
    GetRequest
    | SetRequest
    | DeleteRequest
    | IncrementRequest
    | CompareAndSwapRequest
    | LockRequest
    | UnlockRequest
    | TransactionRequest
)


class Envelope(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A request whose payload is not understood yet."""

    id: RequestId | None = None
    """Without one the server makes one: it is the reply's correlationId."""
    payload: dict[str, Any]
    type: Literal["request"] = "request"
    sender: str | None = None
    """Not looked at: the credential says who asks."""
    recipient: Annotated[str, Meta(pattern=r"^state-keeper(/[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$")] = KEEPER
    correlation_id: str | None = None
    timestamp: str | float | None = None


class Request(Envelope, frozen=True):
    """A request, by the names this document gives to everything; others are understood as well."""

    payload: Payload  # type: ignore[assignment]


class Reply(msgspec.Struct, frozen=True, rename="camel"):
    """Its reply."""

    id: str
    type: Literal["reply"]
    sender: str
    recipient: str
    correlation_id: str
    """The request's id."""
    timestamp: datetime
    payload: dict[str, Any]


class MessageHeaders(Wire, frozen=True, rename={"space": "Holdfast-Space"}):
    """Which space, for administrators."""

    space: SpaceName | None = None


# --- what things may be called ---

SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "operation": ("op",),
    "condition": (),
    "operations": ("ops", "steps"),
    "conditions": (),
    "key": ("resource",),
    "value": (),
    "delta": ("by",),
    "old": ("expected",),
    "new": (),
    "number": ("min",),
    "version": (),
    "timeout": (),
    "ttl": (),
    "wait": (),
    "guard": (),
    "space": (),
}
"""The name of each field, and its others. Capitals, underscores and a leading capital make no difference."""
OPERATIONS: Final = ("Get", "Set", "Delete", "Increment", "CompareAndSwap", "Lock", "Unlock", "Transaction")
STEPS: Final = OPERATIONS[:5]
"""Those that a transaction may have."""
CONDITIONS: Final = ("Absent", "Present", "VersionIs", "ValueIs", "AtLeast")
MEMBERS_MAX: Final = 32
"""Of a payload, or of a step or a condition in it: more than there are."""
SUFFIXES: Final = ("request", "op", "operation")
"""`GetRequest` and `GetOp` are `Get`."""
UNITS_MS: Final = {
    "hours": 3_600_000.0,
    "minutes": 60_000.0,
    "seconds": 1000.0,
    "secs": 1000.0,
    "milliseconds": 1.0,
    "millis": 1.0,
    "nanoseconds": 1e-6,
    "nanos": 1e-6,
}
"""Of a duration that is an object: {"seconds": 5}."""


def _folded(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


_FIELDS: Final = {_folded(name): field for field, others in SPELLINGS.items() for name in (field, *others)}
_NAMES: Final = {
    **{_folded(name + suffix): name for name in OPERATIONS for suffix in ("", *SUFFIXES)},
    **{_folded(name): name for name in CONDITIONS},
    "cas": "CompareAndSwap",
}


def canonical(payload: dict[str, Any], known: tuple[str, ...] = OPERATIONS) -> dict[str, Any]:
    """A payload by its own names. An operation must be one of those that are known; other things that are not stay, and are
    refused by name afterwards."""
    if len(payload) > MEMBERS_MAX:
        raise InvalidInput(f"the payload has {len(payload):,} members; what it may have is less than {MEMBERS_MAX}")
    found: dict[str, Any] = {}
    for name, value in payload.items():
        field = _FIELDS.get(_folded(name), name)
        if field in found:
            raise InvalidInput(f"the payload names {field!r} twice, once as {name[:60]!r}")
        if field in ("operation", "condition") and isinstance(value, str):
            value, named = _NAMES.get(_folded(value), value), known if field == "operation" else CONDITIONS
            if value not in named:
                raise InvalidInput(f"there is no {field} {value[:60]!r} here; there are {', '.join(named)}")
        elif field in ("operations", "conditions") and isinstance(value, list) and len(value) <= steps.STEPS_MAX:
            value = [canonical(each, STEPS) if isinstance(each, dict) else each for each in value]
        elif field in ("timeout", "ttl", "wait") and isinstance(value, dict):
            value = _seconds(field, value)
        found[field] = value
    return found


def _seconds(field: str, parts: dict[str, Any]) -> float:
    if not parts or any(_folded(unit) not in UNITS_MS or type(parts[unit]) not in (int, float) for unit in parts):
        raise InvalidInput(f"{field}: write seconds, '5s', or an object of numbers by {', '.join(UNITS_MS)}")
    return sum(float(number) * UNITS_MS[_folded(unit)] for unit, number in parts.items()) / 1000


# --- doing it ---


@endpoint(
    "POST",
    "/v1/messages",
    errors=(Conflict, LeaseLost, LockAcquisitionError, QuotaExceeded),
    failures=(Reply, Failure),
    body_shown=Request,
)
async def send_message(call: Call, headers: MessageHeaders, body: Any) -> Answer[Reply]:
    """One request of document D's message protocol; a refusal is a reply as well, with {error, message} as its payload."""
    envelope = read_as(body, Envelope, "the message")
    id = new_id() if envelope.id is None else envelope.id
    check_label(id, "the id of a message", REQUEST_ID_CHARS_MAX)
    bind(message_id=id, correlation_id=(envelope.correlation_id or id)[:REQUEST_ID_CHARS_MAX])
    try:
        payload: Any = read_as(canonical(envelope.payload), Payload, "payload")  # type: ignore[arg-type]
        named = headers.space or payload.space or envelope.recipient.partition("/")[2] or None
        space = call.space(call.own_space(named))
        answer, at = await _run(call, space, payload, id)
    except Error as error:
        if isinstance(error, DENIALS):
            call.refused(error, _asked(call, headers, envelope))
        payload = plain(failure_of(error))
        if isinstance(error, Conflict) and canonical(envelope.payload).get("operation") == "CompareAndSwap":
            payload = {"success": False, **payload}
        reply = _reply(call, id, payload, call.port.keeper.clock.now_ms())
        return Answer(reply, status_of(error), headers_of(error))
    return Answer(_reply(call, id, answer, at))


def _asked(call: Call, headers: MessageHeaders, envelope: Envelope) -> Asked:
    """What a message that was refused is about."""
    told = canonical(envelope.payload)
    verb, space, key = (str(told.get(name) or "") for name in ("operation", "space", "key"))
    return Asked(verb, headers.space or space or envelope.recipient.partition("/")[2], key, call.asked.began)


def _reply(call: Call, asked: str, payload: dict[str, Any], at: int) -> Reply:
    """The reply to the request of this id."""
    id = hashlib.sha256(f"{call.identity.space} {call.identity.agent} {asked}".encode()).hexdigest()[:32]
    return Reply(id, "reply", KEEPER, call.identity.agent, asked, as_datetime(at), payload)


async def _run(call: Call, space: Space, payload: Payload, id: str) -> tuple[dict[str, Any], int]:
    """The reply's payload, and when it happened."""
    clock = call.port.keeper.clock
    if isinstance(payload, LockRequest):
        default_ms = call.port.limits.lock_ttl_ms
        ttl_ms = default_ms if payload.timeout is None else holding_ms(payload.timeout, "timeout")
        wanted = space.lock(payload.key, ttl=ttl_ms / 1000, wait=payload.wait)
        told = held(await acquire(call, space, wanted, id), "lock", wanted.ttl_ms)
        return {"guard": told.guard, "token": told.token, "expiresAt": told.expires_at}, _ms(told.acquired_at)
    if isinstance(payload, UnlockRequest):
        return {"success": True}, _ms(await space.locks.release(*read_guard(payload.guard), request_id=id))
    if isinstance(payload, GetRequest):
        value = await space.records.get(payload.key, as_type=msgspec.Raw)
        return {"value": None if value is None else passed_on(value)}, clock.now_ms()
    space = await under(space, payload.guard)
    if isinstance(payload, TransactionRequest):
        call.require(space.name, "Transaction")
        outcome = await steps.run_steps(space, clock, payload.conditions, payload.operations, id)
        return {"result": outcome.results[-1], "results": outcome.results}, outcome.at
    outcome = await steps.run_steps(space, clock, [], [_step(payload)], id)
    [result] = outcome.results
    if isinstance(payload, IncrementRequest):
        return {"newValue": result}, outcome.at
    if isinstance(payload, DeleteRequest):
        return {"success": True, "existed": result}, outcome.at
    return {"success": True}, outcome.at


def _step(payload: SetRequest | DeleteRequest | IncrementRequest | CompareAndSwapRequest) -> steps.AnyStep:
    match payload:
        case SetRequest():
            return steps.Set(payload.key, payload.value, payload.ttl)
        case DeleteRequest():
            return steps.Delete(payload.key)
        case IncrementRequest():
            return steps.Increment(payload.key, payload.delta, payload.ttl)
        case CompareAndSwapRequest():
            return steps.CompareAndSwap(payload.key, payload.new, payload.old, payload.ttl)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


ENDPOINTS = (send_message,)
