"""Queues over HTTP: put, reserve and get a delivery, end the delivery, look, and deal with dead letters.

The server does not know whether a client lives, so every message is delivered under a lease of its own that nobody renews: it comes
back to the queue when the lease is over, unless the client ends the delivery or extends it. Repeated, the end of a delivery is
lease_lost: it was ended, or it came back. Who may do what the store decides: a delivery is ended by the agent that got it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.clock import as_datetime, wait_ms
from holdfast.errors import Conflict, Empty, InvalidInput, LeaseLost, NotFound
from holdfast.layers.deliveries import deliver, extend, message_text, put_once, read_message, settle
from holdfast.layers.queue_entries import (
    ATTEMPTS_MAX,
    DEDUP_BYTES_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    QUEUE_NAME_BYTES_MAX,
    Peeked,
    Policy,
    Requeue,
)
from holdfast.layers.queues import QueueStats
from holdfast.server.http.endpoint import Call, endpoint
from holdfast.server.http.shapes import DurationText, InSpace, Lifetime, PageSize, Repeatable, Wire

QueueName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=QUEUE_NAME_BYTES_MAX,
        pattern="^[^\\x00]+$",
        description="The queue.",
        examples=["orders"],
    ),
]
Priority = Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX, description="Higher comes first.")]
DedupKey = Annotated[str, Meta(min_length=1, max_length=DEDUP_BYTES_MAX, pattern="^[^\\x00]+$")]
MessageId = Annotated[str, Meta(pattern="^[0-9]{19}$", description="A message.")]
DeliveryText = Annotated[
    str, Meta(pattern="^hfm_[A-Za-z0-9_-]{1,1600}$", description="A delivery, as reserving gave it.")
]
NameText = Annotated[str, Meta(pattern="^[^\\x00]*$", max_length=256)]
WaitSeconds = Annotated[float, Meta(ge=0, le=30)]


class QueueAt(InSpace, frozen=True):
    """A path that names a queue."""

    name: QueueName


class DeliveryAt(InSpace, frozen=True):
    """A path that names a delivery."""

    delivery: DeliveryText


class QueuesQuery(Wire, frozen=True):
    """Which queues to list."""

    pattern: NameText = "*"


class PeekQuery(Wire, frozen=True):
    """What to look at: what waits, what consumers have, or dead letters."""

    state: Literal["waiting", "reserved", "dead"] = "waiting"
    limit: PageSize = 10


class NewMessage(Wire, frozen=True):
    """A message. `dedup`: not again under this key within 5 minutes; the id of the first is given."""

    body: Any
    priority: Priority = 0
    delay: Lifetime | None = None
    dedup: DedupKey | None = None


class Reserve(Wire, frozen=True):
    """How long to wait for a message (at most 30 s; 0 not at all), and how long the delivery is good."""

    wait: DurationText | WaitSeconds = 0.0
    lease: Lifetime = 30.0


class Extend(Wire, frozen=True):
    """How long from now; never shorter than it was."""

    lease: Lifetime = 30.0


class Ended(Wire, frozen=True):
    """What becomes of a delivery: complete (its result goes into the queue `to`), release (after a `delay`), or fail (with a `reason`;
    delivered again with backoff up to so many `attempts`, else a dead letter)."""

    outcome: Literal["complete", "release", "fail"]
    result: Any = None
    to: QueueName | None = None
    delay: Lifetime | None = None
    reason: str = "failed"
    attempts: Annotated[int, Meta(ge=1, le=ATTEMPTS_MAX)] | None = None


class LettersAction(Wire, frozen=True):
    """What to do with dead letters, all of them if none is named: retry (attempts still count), anew (as if they had never failed),
    clear."""

    action: Literal["retry", "anew", "clear"]
    ids: tuple[MessageId, ...] = ()


class PutMessage(msgspec.Struct, frozen=True):
    """Under which id it was put."""

    id: str


class Delivered(msgspec.Struct, frozen=True):
    """A message, and the delivery by which it is ended until `expires_at`."""

    delivery: str
    id: str
    body: Any
    priority: int
    attempts: int
    enqueued_at: datetime
    expires_at: datetime


class Extended(msgspec.Struct, frozen=True):
    """Until when it is good now."""

    delivery: str
    expires_at: datetime


class EndedDelivery(msgspec.Struct, frozen=True):
    """It was ended."""

    id: str
    outcome: str


class QueueList(msgspec.Struct, frozen=True):
    """The queues there are, by name."""

    queues: list[QueueStats]


class FailureReason(msgspec.Struct, frozen=True):
    """Which attempt failed, when, in whose hands, and why."""

    attempt: int
    at: datetime
    agent: str
    reason: str


class QueuedMessage(msgspec.Struct, frozen=True):
    """A message as it is seen from outside."""

    id: str
    body: Any
    state: str
    priority: int
    attempts: int
    owner: str
    enqueued_at: datetime
    due_at: datetime
    reasons: list[FailureReason]


class QueuedMessages(msgspec.Struct, frozen=True):
    """Messages, in the order in which they would come."""

    messages: list[QueuedMessage]


class LettersDone(msgspec.Struct, frozen=True):
    """How many it was done with."""

    done: int


def patience(call: Call, wait: str | float) -> str | float:
    """A time to wait, if it is not too long for a request."""
    limit = call.port.limits.lock_wait_ms_max
    if (wait_ms(wait) or 0) > limit:
        raise InvalidInput(f"wait is at most {limit / 1000:g} s over HTTP; repeat the request to wait longer")
    return wait


@endpoint("GET", "/v1/spaces/{space}/queues")
async def list_queues(call: Call, path: InSpace, query: QueuesQuery) -> QueueList:
    """The queues whose name fits a pattern, with how many messages are ready, delayed, reserved and dead."""
    return QueueList(await call.space(path.space).queues.list(query.pattern))


@endpoint("GET", "/v1/spaces/{space}/queues/{name}")
async def queue_stats(call: Call, path: QueueAt) -> QueueStats:
    """How many messages a queue has."""
    return await call.space(path.space).queue(path.name).stats()


@endpoint("POST", "/v1/spaces/{space}/queues/{name}", errors=(Conflict,))
async def put_message(call: Call, path: QueueAt, headers: Repeatable, body: NewMessage) -> PutMessage:
    """Append a message."""
    queue = call.space(path.space).queue(path.name)
    options = {"priority": body.priority, "delay": body.delay, "dedup": body.dedup}
    if headers.request_id is None:
        return PutMessage(await queue.put(body.body, **options))  # type: ignore[arg-type]
    return PutMessage(await put_once(queue, headers.request_id, body.body, **options))  # type: ignore[arg-type]


@endpoint("GET", "/v1/spaces/{space}/queued/{name}")
async def peek_messages(call: Call, path: QueueAt, query: PeekQuery) -> QueuedMessages:
    """Look at messages; nothing happens to them."""
    queue = call.space(path.space).queue(path.name)
    if query.state == "dead":
        found = await queue.dead.list(query.limit)
    elif query.state == "reserved":
        found = await call.space(path.space).queue(f"{path.name}.reserved").peek(query.limit)
        found = [each for each in found if each.state == "reserved"]
    else:
        found = await queue.peek(query.limit)
    return QueuedMessages([_seen(each) for each in found])


def _seen(each: Peeked) -> QueuedMessage:
    return QueuedMessage(
        each.id,
        each.body,
        each.state,
        each.priority,
        each.attempts,
        each.owner,
        each.enqueued_at,
        each.due_at,
        [FailureReason(why.attempt, as_datetime(why.at), why.agent, why.reason) for why in each.reasons],
    )


@endpoint("POST", "/v1/spaces/{space}/reservations/{name}", errors=(Empty, LeaseLost), verb="Reserve")
async def reserve_message(call: Call, path: QueueAt, body: Reserve) -> Delivered:
    """Take the next message, for as long as the lease lasts."""
    queue = call.space(path.space).queue(path.name)
    wait = patience(call, body.wait)
    found = await call.unless_stopped(deliver(queue, wait=wait, lease=body.lease))
    return Delivered(
        message_text(found.key),
        found.id,
        found.body,
        found.priority,
        found.attempts,
        found.enqueued_at,
        found.expires_at,
    )


@endpoint("PUT", "/v1/spaces/{space}/deliveries/{delivery}", errors=(LeaseLost,), verb="Reserve")
async def extend_delivery(call: Call, path: DeliveryAt, body: Extend) -> Extended:
    """Have more time for it. For the agent that got it."""
    name, key = read_message(path.delivery)
    return Extended(path.delivery, await extend(call.space(path.space).queue(name), key, body.lease))


@endpoint("DELETE", "/v1/spaces/{space}/deliveries/{delivery}", errors=(LeaseLost, Conflict), verb="Reserve")
async def ack_delivery(call: Call, path: DeliveryAt) -> EndedDelivery:
    """It is done. For the agent that got it."""
    name, key = read_message(path.delivery)
    settling = await settle(call.space(path.space).queue(name), key)
    await settling.ack()
    return EndedDelivery(settling.id, "done")


@endpoint("POST", "/v1/spaces/{space}/deliveries/{delivery}", errors=(LeaseLost, Conflict), verb="Reserve")
async def end_delivery(call: Call, path: DeliveryAt, body: Ended) -> EndedDelivery:
    """Complete it with a result, give it back, or say that it failed; each is one commit. For the agent that got it."""
    name, key = read_message(path.delivery)
    settling = await settle(call.space(path.space).queue(name), key)
    if body.outcome == "complete":
        if body.to is None:
            raise InvalidInput("a result needs a queue to go to: name it with `to`, or DELETE the delivery")
        await settling.complete(body.result, to=body.to)
    elif body.outcome == "release":
        await settling.release(delay=body.delay)
    else:
        policy: Policy = "keep" if body.attempts is None else Requeue(attempts=body.attempts)
        await settling.fail(body.reason, policy=policy)
    return EndedDelivery(settling.id, body.outcome)


@endpoint("POST", "/v1/spaces/{space}/dead-letters/{name}", errors=(NotFound, Conflict))
async def treat_dead_letters(call: Call, path: QueueAt, body: LettersAction) -> LettersDone:
    """Deliver dead letters once more, or remove them."""
    dead = call.space(path.space).queue(path.name).dead
    treat = {"retry": dead.retry, "anew": dead.move_back, "clear": dead.clear}[body.action]
    return LettersDone(await treat(*body.ids))


ENDPOINTS = (
    list_queues,
    queue_stats,
    put_message,
    peek_messages,
    reserve_message,
    extend_delivery,
    ack_delivery,
    end_delivery,
    treat_dead_letters,
)
