"""A message that was reserved, and what can become of it.

    async with q.reserve(wait="30s") as message:
        await message.complete(result, to="done")

While it is reserved it stands under its consumer's lease, `reserved/<q>/<lease>/…`. Whatever ends that is one batch, on condition that it
still stands there: acknowledged with its result, released, put off, made a dead letter. So it ends once, however often somebody
tries, and who has lost it writes nothing: LeaseLost. `acking()` gives the parts of such a batch to those who have more to write
with it.

Leaving the block acknowledges, an exception applies `on_error`, being cancelled or closed `on_stop`. Where that cannot be committed, what
has become of it is looked up, and if it is nothing the message is handed out again. A message that has failed
has one attempt more, and its reason with those before it in `reasons/<q>/<id>`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms
from holdfast.codec import decode, encode
from holdfast.engine import Condition, Delete, Entry, Increment, Operation, Present, Put, Receipt
from holdfast.errors import Conflict, Error, InvalidInput, LeaseLost
from holdfast.layers.queue_entries import (
    NO_LEASE,
    QUEUES,
    REASON_CHARS_MAX,
    REASONS,
    REASONS_MAX,
    RESERVED,
    Failure,
    Place,
    Policy,
    Requeue,
    depth_key,
    failures_of,
    failures_tag,
    instant_of,
    place_of,
    position_at,
    rest_of,
)

if TYPE_CHECKING:
    from holdfast.layers.queues import Queue
    from holdfast.layers.receiving import Receiver

Part = Condition | Operation
STOPPED: Final = "its consumer was stopped"

log = logging.getLogger("holdfast.queues")


@dataclass(frozen=True)
class Ending:
    """What becomes of a message that stands somewhere in a queue: the parts of the batch that does it."""

    name: str
    key: str
    place: Place
    value: bytes
    failures: int
    state: str = "reserved"
    tag: str = ""

    @classmethod
    def of(cls, name: str, entry: Entry, state: str = "reserved") -> Ending:
        return cls(name, entry.key, place_of(rest_of(entry.key)), entry.value, failures_of(entry), state, entry.tag)

    def gone(self) -> list[Part]:
        """It is not there any more, nor is anything about it."""
        return [*self._leaving(), *([Delete(REASONS.key(self.name, self.place.id))] if self.failures else [])]

    def _leaving(self) -> list[Part]:
        return [Present(self.key), Delete(self.key), Increment(depth_key(self.name, self.state), -1)]

    def back(self, tag: str) -> list[Part]:
        """It goes back to where it was, as it was, but for its tag."""
        put = Put(QUEUES.prefix("ready", self.name) + self.place.rest, self.value, None, tag)
        return [*self._leaving(), put, _one_more(self.name, "ready")]

    def ready(self, failures: int | None = None, position: str | None = None, to: str | None = None) -> list[Part]:
        """It may be taken again, from its old place in the line unless told otherwise."""
        return self._elsewhere("ready", to or self.name, position, failures)

    def delayed(self, due_ms: int, failures: int | None = None) -> list[Part]:
        """It may be taken again from that instant on."""
        return self._elsewhere("delayed", self.name, position_at(due_ms), failures)

    def dead(self, failures: int) -> list[Part]:
        """It is a dead letter."""
        key = RESERVED.prefix(self.name, NO_LEASE) + self.place.rest
        return [*self._leaving(), Put(key, self.value, None, failures_tag(failures)), _one_more(self.name, "dead")]

    def _elsewhere(self, state: str, name: str, position: str | None, failures: int | None) -> list[Part]:
        place = self.place.at(position or self.place.position)
        tag = self.tag if failures is None else failures_tag(failures)
        forgotten: list[Part] = []
        if self.failures and (not failures_tag(self.failures if failures is None else failures) or name != self.name):
            forgotten.append(Delete(REASONS.key(self.name, self.place.id)))
        put = Put(QUEUES.prefix(state, name) + place.rest, self.value, None, tag)
        return [*self._leaving(), put, _one_more(name, state), *forgotten]

    def failed(self, policy: Policy, failures: int, now_ms: int) -> list[Part]:
        """What a policy makes of a message that has failed so many times."""
        if policy == "clear":
            return self.gone()
        if policy == "release":
            return self.ready(failures)
        if isinstance(policy, Requeue) and failures < policy.attempts:
            return self.delayed(now_ms + policy.delay_ms(failures), failures)
        return self.dead(failures)


class Message:
    """A message in the hands of its consumer."""

    def __init__(self, queue: Queue, receiver: Receiver, entry: Entry) -> None:
        self._queue = queue
        self._receiver = receiver
        self._ending = Ending.of(queue.name, entry)
        self._lease = receiver.lease
        self._settled = asyncio.Event()
        self.queue = queue.name
        """The queue it came from."""
        self.id = self._ending.place.id
        """19 digits: unique in the space, ordered by time, kept wherever the message goes."""
        self.attempts = self._ending.failures
        """How often it failed before."""
        self.is_redelivered = self._ending.tag != ""
        """Whether somebody may have begun it before: it failed, or was with a consumer that died."""
        receiver.held[entry.key] = self

    @cached_property
    def body(self) -> Any:
        """What was put."""
        return decode(self._ending.value)

    @property
    def key(self) -> str:
        """Where it stands while it is reserved."""
        return self._ending.key

    @property
    def priority(self) -> int:
        return self._ending.place.priority

    @property
    def enqueued_at(self) -> datetime:
        """When it was put."""
        return as_datetime(instant_of(self.id))

    @property
    def settled(self) -> bool:
        """Whether something has become of it."""
        return self._settled.is_set()

    @property
    def lost(self) -> bool:
        """Whether the lease under which it stands is known to have ended: somebody else may have it."""
        return self._lease is not None and self._lease.lost.is_set()

    async def until_lost(self) -> None:
        """Return when the lease under which it stands has ended."""
        if self._lease is not None:
            await self._lease.lost.wait()

    async def until_settled(self) -> None:
        """Return when something has become of it."""
        await self._settled.wait()

    # --- what can become of it ---

    def acking(self) -> list[Part]:
        """What acknowledges it, for a batch that has more to write; tell `committed()` when it was."""
        return self._ending.gone()

    def failing(self, policy: Policy, reason: str) -> list[Part]:
        """What makes it fail, without its reason, for a batch that has more to write; tell `committed()` when it was."""
        now_ms = self._queue.scope.clock.now_ms()
        return self._ending.failed(policy, self.attempts + 1, now_ms)

    def delaying(self, due_ms: int) -> list[Part]:
        """What puts it off until that instant, as one that never failed, for a batch that has more to write."""
        return self._ending.delayed(due_ms, 0)

    def releasing(self) -> list[Part]:
        """What gives it back at once, for a batch that has more to write."""
        return self._ending.ready()

    def committed(self) -> None:
        """A batch with `acking()`, or one of its kind, in it was committed."""
        self._end()

    async def ack(self, *parts: Part) -> Receipt:
        """It is done. `parts` are further conditions and operations of the same commit."""
        return await self._settle([*self.acking(), *parts])

    async def complete(self, result: Any = None, *parts: Part, to: str | None = None) -> Receipt:
        """It is done, and this is its result: put into the queue `to`, if one is named, in the same commit."""
        if to is None and result is not None:
            raise InvalidInput("a result needs a queue to go to: complete(result, to=…)")
        putting = [] if to is None else self._queue.sibling(to).putting(result)
        return await self._settle([*self.acking(), *putting, *parts])

    async def release(self, *, delay: Duration | None = None) -> None:
        """Give it back, to its old place in the line, or to be taken after a while. No attempt is counted."""
        if delay is None:
            await self._settle(self._ending.ready())
        else:
            now_ms = self._queue.scope.clock.now_ms()
            await self._settle(self._ending.delayed(now_ms + duration_ms(delay, name="delay")))

    async def fail(self, reason: str | BaseException, *, policy: Policy | None = None) -> None:
        """It could not be done, for this reason; what becomes of it `on_error` says, unless a policy is given."""
        await self._fail(reason, self._queue.on_error if policy is None else policy)

    async def stop(self) -> None:
        """Its consumer stops: `on_stop` says what becomes of it."""
        if not self.settled:
            policy = self._queue.on_stop
            if policy == "release":
                await self.release()
            else:
                await self._fail(STOPPED, policy)

    def leave(self) -> None:
        """Let it be: it stays reserved as long as the lease lasts, which this process keeps alive no longer when it closes.

        For whoever acknowledges from another process, by `q.ack(id)`.
        """
        self._receiver.left.add(self.key)
        self._end()

    async def give_back(self, *, delay: Duration | None = None) -> None:
        """Release it, if it is still ours; if the store cannot be asked, `forsake` it."""
        try:
            await self.release(delay=delay)
        except LeaseLost as exc:
            log.info("%s", exc)
        except Error as exc:
            log.info(
                "message %s of queue %s could not be given back, and is handed out here again: %s",
                self.id,
                self.queue,
                exc,
            )
            self.forsake()

    async def as_guarded(self) -> Message:
        """It is to begin, unless what guards this view of the queue was lost. Messages are taken for all views alike, so each is asked for."""
        scope = self._queue.scope
        if not scope.guards:
            return self
        try:
            found = await scope.engine.get(scope.space, [guard.key for guard in scope.guards])
        except BaseException:
            self.forsake()
            raise
        for guard, entry in zip(scope.guards, found, strict=True):
            if entry is None:
                await self.hand_on()
                raise LeaseLost(f"nothing was taken from queue {self.queue!r}: the lease on {guard.key!r} has ended")
        return self

    async def hand_on(self) -> None:
        """What this view of the queue is guarded by was lost, so somebody else is to have it, at once."""
        try:
            await self._queue.unguarded().commit(*self._ending.ready())
            self._end()
        except Error as exc:
            log.info("message %s of queue %s could not be handed on: %s", self.id, self.queue, exc)
            self.forsake()

    def forsake(self) -> None:
        """Nothing is known to have become of it, and nothing more is done about it: unless it has ended, it is handed out again.

        The lease goes on, so it would not come back by itself as long as this process lives.
        """
        self._settled.set()
        self._receiver.forsaken(self.key)

    async def _fail(self, reason: str | BaseException, policy: Policy) -> None:
        parts = self.failing(policy, "")
        noted = [] if policy == "clear" else [await noting(self._queue, self._ending, reason)]
        await self._settle([*parts, *noted])

    async def _settle(self, parts: list[Part]) -> Receipt:
        if self.settled:
            raise InvalidInput(f"message {self.id} was settled before; it ends once")
        try:
            receipt = await self._queue.commit(*parts)
        except Conflict as conflict:
            if conflict.key == self.key:
                self._end()
                raise lost(self.queue, self.id) from conflict
            raise
        except LeaseLost:
            await self.hand_on()
            raise
        self._end()
        return receipt

    def _end(self) -> None:
        self._settled.set()
        self._receiver.settled(self.key)

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if self.settled:
            return
        if exc is None:
            try:
                await self.ack()
            except LeaseLost:
                raise
            except Error:
                self.forsake()
                raise
            return
        try:
            if isinstance(exc, Exception):
                await self.fail(exc)
            else:  # cancelled, or the program ends
                await self.stop()
        except Error as failure:
            log.warning("what became of message %s of queue %s: %s", self.id, self.queue, failure)
            if not self.settled:
                self.forsake()

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.queue!r}>"


Hand = Callable[[Message, Any, asyncio.Future[Receipt]], None]
"""Is given a message that is being written, what it is about, and what tells that it is written (`handing.py`)."""


async def noting(queue: Queue, ending: Ending, reason: str | BaseException) -> Put:
    """The reasons of a message with one more. Only who has the message writes them, so nobody comes in between."""
    scope, key = queue.scope, REASONS.key(ending.name, ending.place.id)
    before: list[Failure] = []
    if ending.failures:
        before = await reasons_of(queue, ending.place.id)
    failure = Failure(ending.failures + 1, scope.clock.now_ms(), scope.actor, told(reason))
    return Put(key, encode([*before, failure][-REASONS_MAX:]))


async def reasons_of(queue: Queue, id: str) -> list[Failure]:
    """Why a message failed, the oldest first; what cannot be read is left out."""
    scope = queue.scope
    [entry] = await scope.engine.get(scope.space, [REASONS.key(queue.name, id)])
    return [] if entry is None else readable_reasons(entry.value)


def readable_reasons(value: bytes) -> list[Failure]:
    try:
        return msgspec.json.decode(value, type=list[Failure])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def told(reason: str | BaseException) -> str:
    """A reason in words, not too many."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"


def lost(queue: str, id: str) -> LeaseLost:
    return LeaseLost(
        f"message {id} of queue {queue!r} is not reserved here any more: its lease ended, or somebody settled it. Nothing "
        "was written; whoever has it now does the work"
    )


def _one_more(name: str, state: str) -> Increment:
    return Increment(depth_key(name, state), 1)
