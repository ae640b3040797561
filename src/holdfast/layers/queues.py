"""Queues: messages that are put, reserved by one consumer at a time, and done once.

    q = space.queue("orders")
    await q.put({"id": 1}, priority=5, delay="10s", dedup="order-1")
    async with q.reserve(wait="30s") as message:
        await message.complete(result, to="done")

A message is an entry (`queue_entries.py` says under which keys). To put one is to append it; to reserve one is to move the first of the line
under the consumer's own lease (`receiving.py`); to acknowledge it is to delete it there, in one commit with whatever came of it
(`messages.py`). So a message is delivered to one consumer at a time, none is lost, and its outcome happens once. How many there are is
counted in the same commits, in `depths/<q>/…`, and never by counting.

What goes wrong. A consumer that dies loses its lease, and its messages come back with an attempt more. A message that fails is a
dead letter, with its reasons, unless the policy says otherwise: `q.dead` lists, retries, moves back, clears. `putting` and
`message.acking` give the parts of a batch to layers that have more to write in the same commit.

Small batches of one agent that come at the same time go together (`gathering.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms, wait_ms
from holdfast.codec import decode, encode, integer
from holdfast.engine import (
    OPERATIONS_MAX,
    SCAN_MAX,
    Absent,
    Condition,
    Delete,
    Entry,
    Increment,
    Operation,
    Push,
    Put,
    Receipt,
)
from holdfast.engine import Empty as NothingUnder
from holdfast.errors import Conflict, Empty, InvalidInput, NotFound
from holdfast.keys import check_name
from holdfast.layers.coordination import Coordination
from holdfast.layers.dead_letters import DeadLetters
from holdfast.layers.gathering import Gathering
from holdfast.layers.handing import Handing, handing
from holdfast.layers.messages import Ending, Hand, Message, Part, noting
from holdfast.layers.queue_entries import (
    DEDUP,
    DEDUP_BYTES_MAX,
    DEDUP_WINDOW_MS,
    DEPTHS,
    LEASE_MS,
    NO_LEASE,
    QUEUES,
    RESERVED,
    STATES,
    Peeked,
    Place,
    Policy,
    Requeue,
    check_id,
    check_policy,
    check_queue,
    delayed_prefix,
    depth_key,
    new_message_id,
    peeked,
    place_of,
    position_at,
    priority_element,
    queue_behind,
    ready_prefix,
    rest_of,
)
from holdfast.layers.queue_watching import QueueCommit, watch_queue
from holdfast.layers.receiving import Receiver
from holdfast.layers.scope import Scope

PREFETCH_MAX: Final = 128
CONCURRENCY_MAX: Final = 10_000
PUTS_IN_FLIGHT: Final = 8
"""Batches that `put_many` has under way at once."""
PAGE: Final = 500
BATCH_BYTES: Final = 4 * 1024 * 1024
"""What a batch of `put_many` holds, a single larger body excepted."""


@dataclass(frozen=True)
class Options:
    """How a queue is used here. It is not stored: every process says for itself."""

    lease_ms: int = LEASE_MS
    on_error: Policy = "keep"
    on_stop: Policy = "keep"
    on_death: Policy = field(default_factory=Requeue)
    prefetch: int = 0
    dedup_window_ms: int = DEDUP_WINDOW_MS


class QueueStats(msgspec.Struct, frozen=True):
    """How many messages a queue has, and when it last changed."""

    name: str
    message_count: int
    """Those that wait: ready and delayed."""
    has_pending: bool
    last_activity: datetime | None
    ready: int = 0
    delayed: int = 0
    reserved: int = 0
    dead: int = 0


class Queue:
    """Messages in line. Made by `space.queue(name)`; it comes into being with its first message."""

    def __init__(self, scope: Scope, coordination: Coordination, name: str, options: Options | None = None) -> None:
        self.name = check_queue(name)
        self.scope = scope
        self.options = options or Options()
        self._coordination = coordination
        self._behind = queue_behind(name)
        for when in ("on_error", "on_stop", "on_death"):
            check_policy(getattr(self.options, when), when)
        if type(self.options.prefetch) is not int or not 0 <= self.options.prefetch <= PREFETCH_MAX:
            raise InvalidInput(f"prefetch is between 0 and {PREFETCH_MAX}, not {self.options.prefetch!r}")

    @property
    def on_error(self) -> Policy:
        return self.options.on_error

    @property
    def on_stop(self) -> Policy:
        return self.options.on_stop

    @property
    def dead(self) -> DeadLetters:
        """The messages that failed for good."""
        return DeadLetters(self)

    def sibling(self, name: str) -> Queue:
        """Another queue of the same space, used in the same way."""
        return Queue(self.scope, self._coordination, name, self.options)

    # --- putting ---

    async def put(
        self,
        body: Any,
        *,
        priority: int = 0,
        delay: Duration | None = None,
        dedup: str | None = None,
        id: str | None = None,
    ) -> str:
        """Append a message; gives its id.

        Of higher priority comes first, then who came first; with a `delay` it comes when that is over. A second message with the
        same `dedup` key within the window (5 minutes unless the queue is used with another) is not put: the id of the first
        is given. `id` is one that was made by `new_id`, for whoever has to know it before.
        """
        if dedup is not None and id is None:
            id = self.new_id()
        parts = self.putting(body, priority=priority, delay=delay, dedup=dedup, id=id)
        try:
            receipt = await self.commit(*parts)
        except Conflict as conflict:
            if dedup is None or conflict.key != self._dedup_key(dedup) or conflict.actual is None:
                raise
            return str(decode(conflict.actual.value))
        return id if id is not None else _pushed_id(receipt.results[0])

    def new_id(self) -> str:
        """An id for a message that is going to be put."""
        return new_message_id(self.scope.clock.now_ms())

    def putting(
        self,
        body: Any,
        *,
        priority: int = 0,
        delay: Duration | None = None,
        dedup: str | None = None,
        id: str | None = None,
    ) -> list[Part]:
        """What `put` commits, for a batch that has more to write. Without an `id`, the first operation's result is the key."""
        self._refuse_reserved("put")
        value, pp, now_ms = encode(body), priority_element(priority), self.scope.clock.now_ms()
        state, position = "ready", None
        if delay is not None:
            state, position = "delayed", position_at(now_ms + duration_ms(delay, name="delay"))
        one_more = Increment(depth_key(self.name, state), 1)
        prefix = QUEUES.prefix(state, self.name)
        if id is None:
            if dedup is not None:
                raise InvalidInput("a message with a dedup key needs an id of its own: see new_id()")
            return [Push(f"{prefix}{pp}/{position}/" if position else f"{prefix}{pp}/", value), one_more]
        key = prefix + Place(pp, position or check_id(id), check_id(id), self.scope.actor).rest
        parts: list[Part] = [Absent(key), Put(key, value), one_more]
        if dedup is not None:
            name = self._dedup_key(dedup)
            parts += [Absent(name), Put(name, encode(id), self.options.dedup_window_ms)]
        return parts

    def _dedup_key(self, dedup: str) -> str:
        check_name(dedup, "dedup key")
        if len(dedup.encode()) > DEDUP_BYTES_MAX:
            raise InvalidInput(f"a dedup key has at most {DEDUP_BYTES_MAX} bytes; {dedup[:40]!r}… has more")
        return DEDUP.key(self.name, dedup)

    async def put_many(
        self, bodies: Iterable[Any], *, priority: int = 0, delay: Duration | None = None, ordered: bool = True
    ) -> list[str]:
        """Append many messages, in this order; gives their ids. Each batch of 127 is put together, not all of them.

        With `ordered=False` several batches are under way at once, and may pass each other.
        """
        self._refuse_reserved("put")
        pp, state, position = priority_element(priority), "ready", ""
        if delay is not None:
            due_ms = self.scope.clock.now_ms() + duration_ms(delay, name="delay")
            state, position = "delayed", f"{position_at(due_ms)}/"
        prefix = f"{QUEUES.prefix(state, self.name)}{pp}/{position}"
        counter, start = depth_key(self.name, state), len(prefix)
        flying: deque[asyncio.Task[Receipt]] = deque()
        ids: list[str] = []
        try:
            for values in _batches(bodies):
                if len(flying) == (1 if ordered else PUTS_IN_FLIGHT):
                    while flying:  # they went together, and so do the next ones
                        ids += _ids(await flying.popleft(), start)
                operations: list[Operation] = [Push(prefix, value) for value in values]
                operations.append(Increment(counter, len(values)))
                flying.append(asyncio.ensure_future(self.scope.commit(tuple(operations))))
            while flying:
                ids += _ids(await flying.popleft(), start)
        finally:
            await asyncio.gather(*flying, return_exceptions=True)
        return ids

    async def commit(self, *parts: Part) -> Receipt:
        """Commit parts, those of `putting` and `acking` among them, together with what else is being sent."""
        operations, conditions = split(parts)
        gathering = self._coordination.shared(
            ("gathering", id(self.scope.engine), self.scope.space, self.scope.actor, self.scope.guards),
            lambda: Gathering(self.scope),
        )
        receipt = await gathering.commit(operations, conditions)
        self.scope.session.saw(receipt.version)
        return receipt

    def unguarded(self) -> Queue:
        """The same queue, without what this view of it is conditional on."""
        return Queue(self.scope.unguarded(), self._coordination, self.name, self.options)

    # --- reserving ---

    def reserve(self, *, wait: Duration | None = 0) -> Reservation:
        """The next message, reserved as long as the block lasts; Empty if there is none while one waits.

        `wait` is how long: 0 not at all, None as long as it takes. Leaving the block acknowledges the message, an exception
        applies `on_error`, being cancelled `on_stop`; unless it was settled inside.
        """
        return Reservation(self, wait)

    async def take(self, *, wait: Duration | None = 0) -> Message:
        """The next message, reserved until it is settled; Empty if there is none while one waits."""
        self._refuse_reserved("reserved from")
        patience = wait_ms(wait)
        deadline = None if patience is None else self.scope.clock.now_ms() + patience
        receiver = self._receiver()
        return await Message(self, receiver, await receiver.receive(deadline)).as_guarded()

    def handing(self, body: Any, *, priority: int = 0) -> tuple[str, Handing] | None:
        """If somebody of this process, and of this agent, waits: a message that is theirs from the beginning, and its id."""
        found = self.served
        if found is None:
            return None
        id = self.new_id()
        place = Place(priority_element(priority), id, id, self.scope.actor)
        made = handing(self, found, place.rest, encode(body))
        return None if made is None else (id, made)

    def take_ahead(self, n: int, room: Callable[[], int] | None = None, hand: Hand | None = None) -> None:
        """From now on, so many are taken ahead of those that are asked for, as far as there is `room`; others may be handed over."""
        receiver = self._receiver()
        receiver.prefetch = min(n, PREFETCH_MAX)
        if room is not None:
            receiver.rooms[room] = hand

    @property
    def served(self) -> Receiver | None:
        """What takes for those who wait in this process, if there is one."""
        found = self._coordination.receivers.get(self._receiver_name[:-1])
        return found if isinstance(found, Receiver) else None

    async def give_back(self) -> None:
        """Return at once what was taken ahead and has not begun."""
        receiver = self._receiver()
        receiver.prefetch = 0
        await receiver.give_back()

    async def consume(self, *, concurrency: int = 1, wait: Duration | None = None) -> AsyncIterator[Message]:
        """Messages as they come, at most so many that are not settled; it ends when none came for `wait` (None: never).

        One at a time, a message is acknowledged when the loop asks for the next one. With more, each is settled by who
        works on it: `async with message:`, or one of its methods.
        """
        if type(concurrency) is not int or not 0 < concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"concurrency is between 1 and {CONCURRENCY_MAX:,}, not {concurrency!r}")
        receiver = self._receiver()
        receiver.prefetch = max(receiver.prefetch, min(concurrency, PREFETCH_MAX) if concurrency > 1 else 0)
        begun: list[Message] = []
        try:
            while True:
                begun = [message for message in begun if not message.settled]
                if len(begun) >= concurrency:
                    waits = [asyncio.ensure_future(message.until_settled()) for message in begun]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for each in waits:
                            each.cancel()
                    continue
                try:
                    message = await self.take(wait=wait)
                except Empty:
                    return
                begun.append(message)
                yield message
                if concurrency == 1 and not message.settled:
                    await message.__aexit__(None, None, None)
        finally:
            if concurrency == 1:
                for message in begun:
                    await message.stop()

    @property
    def _receiver_name(self) -> tuple[Hashable, ...]:
        scope = self.scope
        return ("receiver", id(scope.engine), scope.space, scope.actor, self.name, self.options.lease_ms)

    def _receiver(self) -> Receiver:
        scope, options, name = self.scope, self.options, self._receiver_name
        receiver = self._coordination.shared(
            name,
            lambda: Receiver(
                msgspec.structs.replace(scope, guards=()),
                self._coordination.leases,
                self.name,
                options.lease_ms,
                self._abandoned,
                self._unbegun,
                lambda: self._coordination.forget(name),
            ),
        )
        self._coordination.receivers[name[:-1]] = receiver
        receiver.prefetch = max(receiver.prefetch, options.prefetch)
        return receiver

    async def _abandoned(self, entry: Entry, reason: str) -> None:
        """A message whose consumer died has failed once more; it stands under our own lease now."""
        ending = Ending.of(self.name, entry)
        parts = ending.failed(self.options.on_death, ending.failures + 1, self.scope.clock.now_ms())
        noted = [] if self.options.on_death == "clear" else [await noting(self, ending, reason)]
        await self.commit(*parts, *noted)

    async def _unbegun(self, entry: Entry, tag: str) -> None:
        """A message that was taken ahead goes back to where it was."""
        await self.commit(*Ending.of(self.name, entry).back(tag))

    async def ack(self, id: str) -> None:
        """Acknowledge a reserved message by its id; NotFound if it is not reserved."""
        entry = await self._find(id, ("reserved",))
        if entry is None:
            raise NotFound(f"message {id} of queue {self.name!r} is not reserved")
        held = self._receiver().held.get(entry.key)
        if isinstance(held, Message):
            await held.ack()
            return
        await self._end(Ending.of(self.name, entry).gone(), id)

    # --- looking, and what operators do ---

    async def peek(self, limit: int = 10) -> list[Peeked]:
        """The next messages, in the order in which they would come; nothing happens to them. Of `….reserved`: what consumers have."""
        if type(limit) is not int or not 0 < limit <= SCAN_MAX:
            raise InvalidInput(f"a peek shows between 1 and {SCAN_MAX:,} messages, not {limit!r}")
        if self._behind is not None:
            page = await self.scope.engine.scan(self.scope.space, RESERVED.prefix(self._behind), limit=limit)
            return [peeked(entry, _state(entry.key)) for entry in page.entries]
        page = await self.scope.engine.scan(self.scope.space, ready_prefix(self.name), limit=limit)
        shown = [peeked(entry, "ready") for entry in page.entries]
        if len(shown) < limit:
            page = await self.scope.engine.scan(self.scope.space, delayed_prefix(self.name), limit=limit - len(shown))
            shown += [peeked(entry, "delayed") for entry in page.entries]
        return shown

    async def move(self, id: str, *, to: str) -> None:
        """Put a message that waits, or a dead letter, at the end of another queue. It keeps its id and its priority."""
        entry, state = await self._found(id, ("ready", "delayed", "dead"))
        position = position_at(self.scope.clock.now_ms())
        target = Queue(self.scope, self._coordination, to)
        target._refuse_reserved("moved to")
        await self._end(Ending.of(self.name, entry, state).ready(0, position, to), id)

    async def delete(self, id: str) -> None:
        """Remove a message that waits, or a dead letter."""
        entry, state = await self._found(id, ("ready", "delayed", "dead"))
        await self._end(Ending.of(self.name, entry, state).gone(), id)

    async def stats(self) -> QueueStats:
        """How many messages there are, as they were counted; last_activity is when that last changed."""
        name = self.name if self._behind is None else self._behind
        entries = await self.scope.engine.get(self.scope.space, [depth_key(name, state) for state in STATES])
        return _stats(self.name, entries, reserved=self._behind is not None)

    def watch(self, *, cursor: str | None = None, live: bool = True) -> AsyncIterator[QueueCommit]:
        """What happens to the queue's messages, commit by commit, from now or from a saved cursor on."""
        return watch_queue(self.scope, self.name, cursor, live)

    def dropping(self) -> list[Part]:
        """What forgets that there was a queue, on condition that nothing is in it; for a batch that has more to write."""
        kept = (ready_prefix(self.name), delayed_prefix(self.name), RESERVED.prefix(self.name))
        return [
            *(NothingUnder(prefix) for prefix in kept),
            *(Delete(depth_key(self.name, state)) for state in STATES),
        ]

    async def drop(self) -> None:
        """Forget an empty queue; Conflict when something is in it."""
        operations, conditions = split(self.dropping())
        await self.scope.commit(operations, conditions)

    async def _end(self, parts: list[Part], id: str) -> None:
        try:
            await self.commit(*parts)
        except Conflict as conflict:
            raise NotFound(f"message {id} of queue {self.name!r} is not where it was a moment ago") from conflict

    async def _found(self, id: str, states: tuple[str, ...]) -> tuple[Entry, str]:
        for state in states:
            entry = await self._find(id, (state,))
            if entry is not None:
                return entry, state
        raise NotFound(f"queue {self.name!r} has no message {id} that waits; one that is reserved is its consumer's")

    async def _find(self, id: str, states: tuple[str, ...]) -> Entry | None:
        """The entry of a message. Only the priority and the time it is due are not known: where they tell nothing, it is
        looked for from the beginning, so this is for people and not for the hot path."""
        check_id(id)
        for state in states:
            async for entry in self.entries(state):
                if place_of(rest_of(entry.key)).id == id:
                    return entry
        return None

    async def entries(self, state: str) -> AsyncIterator[Entry]:
        """Every message in that state, as it is stored."""
        after: str | None = None
        if state == "dead":
            prefix = RESERVED.prefix(self.name, NO_LEASE)
        elif state == "reserved":
            prefix = RESERVED.prefix(self.name)
            after = f"{prefix}{NO_LEASE}0"
        else:
            prefix = QUEUES.prefix(state, self.name)
        while True:
            page = await self.scope.engine.scan(self.scope.space, prefix, after=after, limit=PAGE)
            for entry in page.entries:
                yield entry
            if not page.more:
                return
            after = page.entries[-1].key

    def _refuse_reserved(self, what: str) -> None:
        if self._behind is not None:
            raise InvalidInput(
                f"{self.name!r} shows what consumers of {self._behind!r} have; nothing can be {what} there"
            )

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} of {self.scope.space!r}>"


class Reservation:
    """A message that is about to be reserved: `async with q.reserve(wait="30s") as message:`."""

    def __init__(self, queue: Queue, wait: Duration | None) -> None:
        self._queue = queue
        self._wait = wait
        self._message: Message | None = None

    async def __aenter__(self) -> Message:
        self._message = await self._queue.take(wait=self._wait)
        return self._message

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if self._message is not None:
            await self._message.__aexit__(kind, exc, trace)


class Queues:
    """The queues of a space."""

    def __init__(self, scope: Scope, coordination: Coordination) -> None:
        self._scope = scope
        self._coordination = coordination

    async def list(self, pattern: str = "*") -> list[QueueStats]:
        """The queues there are, whose name fits a pattern such as "orders.*", by name."""
        found: dict[str, dict[str, Entry]] = {}
        after: str | None = None
        while True:
            page = await self._scope.engine.scan(self._scope.space, DEPTHS.root, after=after, limit=SCAN_MAX)
            for entry in page.entries:
                name, state = DEPTHS.split(entry.key, 2)
                found.setdefault(name, {})[state] = entry
            if not page.more:
                break
            after = page.entries[-1].key
        return [
            _stats(name, [depths.get(state) for state in STATES])
            for name, depths in sorted(found.items())
            if fnmatchcase(name, pattern)
        ]

    async def broadcast(self, names: str | Iterable[str], body: Any, *, priority: int = 0) -> dict[str, str]:
        """Put the same body into many queues, named one by one or by a pattern; gives the ids by queue.

        Up to 64 queues get it together, in one commit; more in several.
        """
        targets = [stats.name for stats in await self.list(names)] if isinstance(names, str) else list(names)
        queues = [Queue(self._scope, self._coordination, name) for name in dict.fromkeys(targets)]
        ids: dict[str, str] = {}
        for start in range(0, len(queues), OPERATIONS_MAX // 2):
            some = queues[start : start + OPERATIONS_MAX // 2]
            operations, _ = split(part for queue in some for part in queue.putting(body, priority=priority))
            receipt = await self._scope.commit(operations)
            ids |= {queue.name: _pushed_id(key) for queue, key in zip(some, receipt.results[::2], strict=True)}
        return ids


def split(parts: Iterable[Part]) -> tuple[tuple[Operation, ...], tuple[Condition, ...]]:
    """The operations and the conditions among the parts of a batch."""
    operations: list[Operation] = []
    conditions: list[Condition] = []
    for part in parts:
        if isinstance(part, Operation):
            operations.append(part)
        elif isinstance(part, Condition):
            conditions.append(part)
        else:
            raise InvalidInput(f"{part!r:.60} is neither a condition nor an operation")
    return tuple(operations), tuple(conditions)


def _batches(bodies: Iterable[Any]) -> Iterable[list[bytes]]:
    """The bodies as they are stored, in full batches."""
    size, values = 0, list[bytes]()
    for body in bodies:
        value = encode(body)
        if len(values) == OPERATIONS_MAX - 1 or (values and size + len(value) > BATCH_BYTES):
            yield values
            size, values = 0, []
        values.append(value)
        size += len(value)
    if values:
        yield values


def _ids(receipt: Receipt, start: int) -> list[str]:
    return [key[start:] for key in receipt.results if type(key) is str]


def _pushed_id(key: object) -> str:
    return str(key).rpartition("/")[2]


def _state(key: str) -> str:
    return "dead" if RESERVED.split(key, 3)[1] == NO_LEASE else "reserved"


def _stats(name: str, entries: list[Entry | None], *, reserved: bool = False) -> QueueStats:
    numbers = [0 if entry is None else max(0, integer(entry.value) or 0) for entry in entries]
    ready, delayed, begun, dead = numbers
    count = begun + dead if reserved else ready + delayed
    changed = max((entry.updated_at for entry in entries if entry is not None), default=None)
    at = None if changed is None else as_datetime(changed)
    if reserved:
        return QueueStats(name, count, count > 0, at, reserved=begun, dead=dead)
    return QueueStats(name, count, count > 0, at, ready, delayed, begun, dead)
