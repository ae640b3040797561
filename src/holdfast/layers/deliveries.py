"""Messages handed to somebody whose life cannot be seen: a script between two commands, a client of the HTTP port.

    delivery = await deliver(space.queue("orders"), wait="30s", lease="5m")
    …
    await settle(space.queue("orders"), delivery.key).ack()

Each is taken under a lease of its own, `consumers/<q>/<lease>`, that nobody keeps alive: whoever works on it has so long, or asks for
more (`extend`). The key under which it stands, `reserved/<q>/<lease>/…`, is all that is needed to end it, from any process, at any
time; `message_text` makes a word of it for programs. It carries no right: behind a policy only the agent that took a message ends it.

How it fails. When the lease is over the message comes back to the queue, an attempt more counted, as soon as a consumer looks; whoever
had it is told LeaseLost. Without a consumer it stays where it is, and may still be ended.
"""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import decode
from holdfast.engine import Absent, Entry, Receipt, Touch
from holdfast.errors import Conflict, InvalidInput, LeaseLost, NotFound
from holdfast.keys import unescape
from holdfast.layers.answers import once
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.messages import Ending, Part, lost, noting
from holdfast.layers.queue_entries import CONSUMERS, NO_LEASE, RESERVED, Policy, check_id, place_of, rest_of
from holdfast.layers.queues import Queue, split
from holdfast.layers.transact import Transaction, transact

_PREFIX: Final = "hfm_"
_KEY: Final = re.compile(r"reserved/([^/]+)/([^/]+)/[0-9]{3}/(?:[0-9]{19}/)?[0-9]{19}(?:/@[A-Za-z0-9_-]+)?", re.A)


class Delivery(msgspec.Struct, frozen=True):
    """A message that was handed over, and until when it may be worked on."""

    id: str
    body: Any
    priority: int
    attempts: int
    """How often it failed before."""
    enqueued_at: datetime
    key: str
    expires_at: datetime


async def deliver(queue: Queue, *, wait: Duration | None = 0, lease: Duration = "30s") -> Delivery:
    """The next message, under a lease of its own; Empty if there is none while one waits."""
    scope, lease_ms = queue.scope, duration_ms(lease, name="lease")
    own = Coordination(Leases(scope.clock))
    try:
        alone = Queue(scope, own, queue.name, replace(queue.options, lease_ms=lease_ms, prefetch=0))
        message = await alone.take(wait=wait)
        message.leave()
    finally:
        await own.close()
    until = await extend(queue, message.key, lease)  # the lease began when the waiting did
    return Delivery(
        message.id, message.body, message.priority, message.attempts, message.enqueued_at, message.key, until
    )


async def extend(queue: Queue, key: str, lease: Duration) -> datetime:
    """So long from now; never shorter than it was. Gives until when."""
    scope, lease_ms = queue.scope, duration_ms(lease, name="lease")
    held = CONSUMERS.key(queue.name, _lease_of(key))
    [entry] = await scope.engine.get(scope.space, [key])
    if entry is None:
        raise lost(queue.name, place_of(rest_of(key)).id)
    now = scope.clock.now_ms()
    try:
        await scope.commit((Touch(held, lease_ms),))
    except Conflict as conflict:
        raise LeaseLost(
            f"the lease of message {place_of(rest_of(key)).id} of queue {queue.name!r} is over; it comes back to the queue"
        ) from conflict
    return as_datetime(now + lease_ms)


class Settling:
    """What can become of a message that was handed over."""

    def __init__(self, queue: Queue, ending: Ending) -> None:
        self._queue = queue
        self._ending = ending

    @property
    def id(self) -> str:
        return self._ending.place.id

    async def ack(self, *parts: Part) -> Receipt:
        """It is done."""
        return await self._end([*self._ending.gone(), *parts])

    async def complete(self, result: Any, *, to: str) -> Receipt:
        """It is done, and its result is put into the queue `to`, in one commit."""
        return await self.ack(*self._queue.sibling(to).putting(result))

    async def release(self, *, delay: Duration | None = None) -> Receipt:
        """Give it back, to its old place in the line, or to be taken after a while. No attempt is counted."""
        if delay is None:
            return await self._end(self._ending.ready())
        due_ms = self._queue.scope.clock.now_ms() + duration_ms(delay, name="delay")
        return await self._end(self._ending.delayed(due_ms))

    async def fail(self, reason: str, *, policy: Policy = "keep") -> Receipt:
        """It could not be done, for this reason; it is a dead letter then, unless a policy is given."""
        parts = self._ending.failed(policy, self._ending.failures + 1, self._queue.scope.clock.now_ms())
        noted = [] if policy == "clear" else [await noting(self._queue, self._ending, reason)]
        return await self._end([*parts, *noted])

    async def _end(self, parts: list[Part]) -> Receipt:
        try:
            return await self._queue.commit(*parts)
        except Conflict as conflict:
            if conflict.key == self._ending.key:
                raise lost(self._queue.name, self.id) from conflict
            raise


async def settle(queue: Queue, key: str) -> Settling:
    """A message that was handed over, by the key it stands under; LeaseLost when it is not there any more."""
    _lease_of(key)
    [entry] = await queue.scope.engine.get(queue.scope.space, [key])
    if entry is None:
        raise lost(queue.name, place_of(rest_of(key)).id)
    return Settling(queue, Ending.of(queue.name, entry))


async def settle_id(queue: Queue, id: str) -> Settling:
    """A message that is reserved, by its id. It is looked for among all that are, so this is for people."""
    check_id(id)
    found: Entry | None = None
    async for entry in queue.entries("reserved"):
        if place_of(rest_of(entry.key)).id == id:
            found = entry
    if found is None:
        raise NotFound(
            f"message {id} of queue {queue.name!r} is not reserved: it was settled, or its lease ended and it came back"
        )
    return Settling(queue, Ending.of(queue.name, found))


async def put_once(
    queue: Queue,
    request_id: str,
    body: Any,
    *,
    priority: int = 0,
    delay: Duration | None = None,
    dedup: str | None = None,
) -> str:
    """`queue.put` for a sender that may repeat itself: under the same request id it is put once, and its id is given again."""

    async def work(tx: Transaction) -> Any:
        async def put() -> str:
            id = queue.new_id()
            parts = queue.putting(body, priority=priority, delay=delay, dedup=dedup, id=id)
            operations, conditions = split(parts)
            for condition in conditions:
                if isinstance(condition, Absent) and await tx.value(condition.key) is not None:
                    return str(decode(await tx.value(condition.key) or b"null"))  # of the same dedup key
            tx.operations += operations
            return id

        return await once(tx, request_id, ["put", queue.name, body, priority, delay, dedup], put)

    return str(await transact(lambda: Transaction(queue.scope), work))


def message_text(key: str) -> str:
    """A delivery as one word, for programs to hand back."""
    return _PREFIX + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def read_message(text: str) -> tuple[str, str]:
    """The queue and the key of a delivery; InvalidInput when it is none."""
    try:
        raw = text.removeprefix(_PREFIX)
        key = base64.b64decode(raw + "=" * (-len(raw) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        key = ""
    match = _KEY.fullmatch(key)
    if not text.startswith(_PREFIX) or match is None or match[2] == NO_LEASE:
        raise InvalidInput(f"{text!r:.60} is no delivery; it is a word such as hfm_…, as reserving gave it")
    return unescape(match[1]), key


def _lease_of(key: str) -> str:
    lease = RESERVED.split(key, 3)[1]
    if lease == NO_LEASE:
        raise InvalidInput("a dead letter is in nobody's hands; retry, move back or clear it")
    return lease
