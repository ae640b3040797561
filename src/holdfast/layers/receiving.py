"""Taking messages from a queue: one receiver per process, agent and queue serves all who wait here.

It holds a lease, `consumers/<q>/<lease>`, and takes messages by moving them under it (`Take`), as many at once as somebody waits for
and are wanted ahead. Those taken ahead have not begun: when the receiver stops, they go back to where they were.

Whoever takes nothing ahead takes to `reserved/<q>/<lease>/`, others to `reserved/<q>/<lease>~/`. There messages stay when they are handed
out, which so costs nothing; only one with a tag is moved to the other place first. `leavings.py` tells what that is for.

Nothing is polled. When the queue has nothing, the receiver follows the feed of the queue, and sleeps until then, until the first
delayed message is due, or until the lease of another consumer should have ended. The feed is followed from the revision of the
Take that found nothing, or of the look before it. While there is more than it can take, it looks every LOOK_MS instead.

How it fails. Whether a Take that was cut off has happened is seen by looking under one's own lease, and so is what became of a message
whose end was not acknowledged: if it is still there, it is handed out again. A lease that was lost is replaced by a new one; what was
under it is treated as any dead consumer's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import sleep_or
from holdfast.codec import encode
from holdfast.engine import (
    SCAN_MAX,
    TAKE_MAX,
    Batch,
    Change,
    Condition,
    Delete,
    Entry,
    Operation,
    Present,
    Put,
    Receipt,
    Take,
    cursor_at,
)
from holdfast.errors import Compacted, Conflict, Empty, Error, OutcomeUnknown, RateLimitExceeded, Unavailable
from holdfast.ids import new_id
from holdfast.layers.leases import Lease, Leases
from holdfast.layers.leavings import Leavings, Settle
from holdfast.layers.queue_entries import (
    CONSUMERS,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Begun,
    delayed_prefix,
    depth_key,
    instant_of,
    place_of,
    promoting,
    ready_prefix,
    reserved_prefix,
    rest_of,
)
from holdfast.layers.scope import Scope

if TYPE_CHECKING:
    from holdfast.layers.messages import Hand

LOOK_MS: Final = 1_000
"""How often a busy receiver looks for what it would otherwise be told."""
SEARCH_MS: Final = 30_000
"""How often it looks for messages of dead consumers although nothing tells of one."""
LINGER_MS: Final = 5_000
"""How long a receiver that nobody needs keeps its lease, and what it has taken ahead."""
SPINS: Final = 8
"""Turns of the event loop that are waited before it counts as waiting."""
RETRY_MS: Final = 200
PROMOTED_MAX: Final = 64
"""Delayed messages of one priority that one commit moves."""
NOTHING: Final = "nothing came to queue {!r} in time; wait again, or do something else"

log = logging.getLogger("holdfast.queues")

Operations = tuple[Operation, ...]
Conditions = tuple[Condition, ...]


class Receiver:
    """Takes messages of one queue for those who wait in this process. Made by `Queue`."""

    def __init__(
        self,
        scope: Scope,
        leases: Leases,
        name: str,
        lease_ms: int,
        abandoned: Settle,
        unbegun: Settle,
        ended: Callable[[], None],
    ) -> None:
        self.scope = scope
        self.name = name
        self.lease_ms = lease_ms
        self.prefetch = 0
        """How many are taken ahead."""
        self.lease: Lease | None = None
        self.held: dict[str, Begun | None] = {}
        """By key: messages that have begun and are not settled."""
        self.left: set[str] = set()
        """Keys of messages that stay under the lease on purpose."""
        self._leases = leases
        self._unbegun = unbegun
        self._leavings = Leavings(scope, name, abandoned, unbegun)
        self._ended = ended
        self._waiting: deque[asyncio.Future[Entry]] = deque()
        self._impatient: set[asyncio.Future[Entry]] = set()
        """Those that are told at once when there is nothing."""
        self._ahead: deque[Entry] = deque()
        self.rooms: dict[Callable[[], int], Hand | None] = {}
        """Of those who take many: how many more they have room for now, and how they are handed one."""
        self._asleep = False
        """Whether it is known that there is nothing, and the feed will tell when there is."""
        self._low = False
        """Whether more is to be taken ahead."""
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._known = 0
        """The revision as of which delayed messages and other consumers are known; the feed tells what came after."""
        self._took_at = 0
        """The revision as of which the last Take found what it found."""
        self._unsure = False
        """Whether something may be under the lease that nobody here knows of."""
        self._due: dict[str, int] = {}
        """By priority: when its first delayed message is due."""
        self._others: set[str] = set()
        self._next_end: int | None = None
        """When the first of the others' leases should have ended."""
        self._looked_at: int | None = None
        self._searched_at: int | None = None
        self._closed = False

    # --- for those who wait ---

    async def receive(self, deadline: int | None) -> Entry:
        """The next message, which has begun then; Empty if there is none until the deadline (None: as long as it takes)."""
        if self._closed:
            raise Unavailable(f"the store was closed; nothing more is taken from queue {self.name!r}")
        if self._ahead and not self._waiting:
            entry = self._ahead.popleft()
            self.held[entry.key] = None
            if len(self._ahead) * 2 <= self.prefetch and (not self.rooms or self.room > 0):
                self._low = True
                self._want()
            return entry if not entry.tag else await self._begin(entry, deadline)
        reply: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        try:
            if deadline is None:
                if not self._asleep:
                    self._want()
                entry = await reply
            else:
                entry = await self._until(reply, deadline)
        except BaseException:
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                self._give_back(reply.result())
            reply.cancel()
            raise
        finally:
            self._impatient.discard(reply)
        return entry if not entry.tag else await self._begin(entry, deadline)

    async def _begin(self, entry: Entry, deadline: int | None) -> Entry:
        """A message that may have ended a consumer begins: from here on its consumer's death is its failure."""
        lease = self.lease
        if lease is None or not entry.key.startswith(self._ahead_prefix(lease)):
            return entry
        key = self._prefix(lease) + entry.key[len(self._ahead_prefix(lease)) :]
        moved = (Delete(entry.key), Put(key, entry.value, None, entry.tag))
        self.held.pop(entry.key, None)
        try:
            await self._commit(moved, (Present(entry.key), Present(lease.key)))
        except Conflict:
            self._want()
            return await self.receive(deadline)  # somebody else has it now
        except BaseException:
            self._unsure = True  # it is in one of the two places
            self._want()
            raise
        self.held[key] = None
        return msgspec.structs.replace(entry, key=key)

    async def _until(self, reply: asyncio.Future[Entry], deadline: int) -> Entry:
        clock = self.scope.clock
        if deadline <= clock.now_ms():
            self._impatient.add(reply)  # not to wait is still to look once
            self._want()
            return await reply
        self._want()
        for _ in range(SPINS):
            if reply.done():
                return reply.result()
            await asyncio.sleep(0)
        answered = asyncio.Event()
        reply.add_done_callback(lambda _: answered.set())
        await sleep_or(clock, deadline, answered)
        if not reply.done():
            raise Empty(NOTHING.format(self.name))
        return reply.result()

    def settled(self, key: str) -> None:
        """A message that had begun is not here any more."""
        if self.held.pop(key, self) is not self and not self.held and not self._asleep:
            self._wake.set()

    def forsaken(self, key: str) -> None:
        """What became of a message is not known: if it is still under the lease, it is handed out again."""
        self.settled(key)
        self.doubt()

    def call_off(self) -> None:
        """Whoever waits has no room any more: Empty."""
        _refuse(self._waiting, Empty(NOTHING.format(self.name)))

    def doubt(self) -> None:
        """Something may be under the lease that nobody knows of."""
        self._unsure = True
        self._want()

    @property
    def pending(self) -> int:
        """How many are here and have not begun."""
        return len(self._ahead) + sum(each is None for each in self.held.values())

    @property
    def room(self) -> int:
        """How many more can begin at once."""
        return sum(max(0, room()) for room in self.rooms) if self._is_open else 0

    @property
    def hand(self) -> Hand | None:
        """Who has room for one more that is handed over."""
        return next((hand for room, hand in self.rooms.items() if hand and room() > 0), None) if self._is_open else None

    @property
    def _is_open(self) -> bool:
        return not self._closed and self.lease is not None and not self.lease.lost.is_set()

    def _give_back(self, entry: Entry) -> None:
        """It was given to somebody who went away before it began."""
        self.held.pop(entry.key, None)
        self._ahead.appendleft(entry)
        self._deliver()
        self._wake.set()

    def _want(self) -> None:
        self._wake.set()
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    # --- the task ---

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                while self._waiting and self._waiting[0].done():
                    self._waiting.popleft()
                if not self._waiting and not self._low:
                    if not await self._rest():
                        self._ended()
                        return
                    continue
                impatient = set(self._impatient)  # who comes during this look gets one of its own
                try:
                    taken, asked = await self._fetch()
                except Error as exc:
                    await self._stumble(exc)
                    continue
                self._low = False
                self._deliver()
                if taken >= asked:
                    self._stop_watching()  # busy
                elif self._waiting:
                    self._refuse_impatient(impatient, Empty(NOTHING.format(self.name)))
                    if any(not reply.done() for reply in self._waiting):
                        await self._sleep()
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # a defect here must not leave anybody waiting for ever
            log.exception("queue %s is no longer received", self.name)
            _refuse(self._waiting, exc)
        finally:
            self._task = None
            self._stop_watching()

    def _deliver(self) -> None:
        while self._ahead and self._waiting:
            reply = self._waiting.popleft()
            if not reply.done():
                entry = self._ahead.popleft()
                self.held[entry.key] = None
                reply.set_result(entry)

    def _refuse_impatient(self, impatient: set[asyncio.Future[Entry]], exc: Error) -> None:
        _refuse(impatient, exc)
        self._impatient -= impatient

    async def _stumble(self, exc: Error) -> None:
        """Something failed: who waits goes on waiting if it may get better, and is told otherwise."""
        if isinstance(exc, Conflict) and self.lease is not None and exc.key == self.lease.key:
            self._lose()
            return
        if isinstance(exc, OutcomeUnknown | Unavailable):
            self._unsure = True
        elif not isinstance(exc, RateLimitExceeded):
            _refuse(self._waiting, exc)
            return
        self._refuse_impatient(set(self._impatient), exc)
        log.warning("messages of queue %s could not be taken; it is tried again: %s", self.name, exc)
        pause_ms = round(exc.retry_after * 1000) if isinstance(exc, RateLimitExceeded) else RETRY_MS
        clock = self.scope.clock
        await clock.sleep_until(clock.now_ms() + pause_ms)

    async def _rest(self) -> bool:
        """Nobody waits: stay for a while, then let go. False when it is over."""
        clock = self.scope.clock
        for _ in range(SPINS):  # mostly somebody comes back at once, and no timer is worth it
            if self._wake.is_set():
                return True
            await asyncio.sleep(0)
        if self._ahead and not self.prefetch:
            await self.give_back()  # it was taken for somebody who has gone, and others may be waiting
        if await sleep_or(clock, clock.now_ms() + LINGER_MS, self._wake):
            return True
        self._stop_watching()
        await self.give_back()
        if self.held:
            await self._wake.wait()
            return True
        await self._let_go()
        return self._wake.is_set()

    async def give_back(self) -> None:
        """Give back what was taken ahead."""
        while self._ahead:
            entry = self._ahead.popleft()
            try:
                await self._unbegun(entry, entry.tag)
            except Error as exc:
                log.warning("message %s of queue %s could not be given back yet: %s", entry.key, self.name, exc)
                self._unsure = True

    async def _let_go(self) -> None:
        """End the lease. What is still under it comes back when its time is over."""
        lease, self.lease = self.lease, None
        self._looked_at = None
        if lease is None:
            return
        self._leases.release(lease)
        if self.left or self._unsure:
            self.left.clear()
            self._unsure = False
            return
        try:
            await self._commit((Delete(lease.key),), ())
        except Error as exc:
            log.info("the lease of a consumer of %s ends by itself: %s", self.name, exc)

    def _lose(self) -> None:
        """The lease is over. Whatever was under it is treated as any dead consumer's."""
        if self.lease is not None:
            self._leases.lose(self.lease)
            self.lease = None
            self._ahead.clear()
            self._searched_at = self._looked_at = None  # what was under it is looked for at once

    async def close(self) -> None:
        """Take nothing more; give back what has not begun, and do with the rest what its policy for a stop says."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._stop_watching()
        _refuse(self._waiting, Unavailable(f"the store was closed; nothing more is taken from queue {self.name!r}"))
        await self.give_back()
        for message in list(self.held.values()):
            if message is not None:
                try:
                    await message.stop()
                except Error as exc:
                    log.warning("a message of queue %s comes back when its lease ends: %s", self.name, exc)
        self._unsure = self._unsure or bool(self.held)
        await self._let_go()

    # --- taking ---

    async def _commit(self, operations: Operations, conditions: Conditions) -> Receipt:
        """Without a request id: what changes nothing is not written, and the receipt tells as of when that is so."""
        return await self.scope.engine.commit(self.scope.space, Batch(self.scope.actor, operations, conditions))

    async def _hold(self) -> Lease:
        """The lease under which messages are taken."""
        if self.lease is not None and self.lease.lost.is_set():
            self._lose()
        if self.lease is None:
            key = CONSUMERS.key(self.name, new_id())
            sent_at = self.scope.clock.now_ms()
            await self.scope.commit((Put(key, encode({"instance": self.scope.instance}), self.lease_ms),))
            self.lease = self._leases.keep(self.scope, key, self.lease_ms, sent_at)
            self.lease.tell(self._wake)
        return self.lease

    async def _fetch(self) -> tuple[int, int]:
        """Take as many as are wanted; gives how many came, and how many were asked for."""
        lease = await self._hold()
        if self._unsure:
            await self._adopt(lease)
        now = self.scope.clock.now_ms()
        looked = (
            self._looked_at is None
            or (self._watch is None and now - self._looked_at >= LOOK_MS)
            or (self._next_end is not None and self._next_end <= now)
        )
        if looked:
            await self._look(lease)
        waiting = sum(not reply.done() for reply in self._waiting)
        wanted = min(waiting + self.prefetch, self.room if self.rooms else waiting + self.prefetch - len(self._ahead))
        asked = min(max(1, wanted), TAKE_MAX // 2)
        taken = await self._take(lease, asked)
        if taken < asked and self._watch is None and not looked:
            as_of = self._took_at
            await self._look(lease)  # before it is said that there is nothing
            self._known = min(self._known, as_of)  # what came between the Take and the look is told by the feed
            if any(due <= now for due in self._due.values()):
                taken += await self._take(lease, asked - taken)
        return taken, asked

    async def _take(self, lease: Lease, asked: int) -> int:
        """Make ready what is due, and take so many; gives how many came."""
        now = self.scope.clock.now_ms()
        operations: list[Operation] = []
        room = TAKE_MAX - asked
        for pp in sorted(pp for pp, due in self._due.items() if due <= now):
            n = min(PROMOTED_MAX, room)
            if n > 0:
                operations.append(promoting(self.name, pp, now, n))
                room -= n
        counters = depth_key(self.name, "ready"), depth_key(self.name, "reserved")
        take = Take(ready_prefix(self.name), self.place(lease), asked, None, *counters)
        receipt = await self._commit((*operations, take), (Present(lease.key),))
        taken = self._keep(receipt)
        if operations:
            await self._look_for_delayed()
        return taken

    def _keep(self, receipt: Receipt) -> int:
        """What the last operation, a Take, has given; tells how many."""
        entries = receipt.results[-1]
        assert isinstance(entries, list)  # noqa: S101 - what a Take gives
        self._took_at = receipt.version
        self._ahead.extend(entry for entry in entries if entry.key not in self.held)
        return len(entries)

    def place(self, lease: Lease) -> str:
        """Where messages are taken to."""
        return self._ahead_prefix(lease) if self.prefetch else self._prefix(lease)

    def _prefix(self, lease: Lease) -> str:
        return reserved_prefix(self.name, lease.key)

    def _ahead_prefix(self, lease: Lease) -> str:
        return reserved_prefix(self.name, lease.key, ahead=True)

    async def _adopt(self, lease: Lease) -> None:
        """What is under the lease without anybody here knowing: a commit that took it, or should end it, was not answered."""
        await self._commit((), (Present(lease.key),))  # which comes after what is under way
        known = self.held.keys() | self.left | {each.key for each in self._ahead}
        for prefix in (self._prefix(lease), self._ahead_prefix(lease)):
            page = await self.scope.engine.scan(self.scope.space, prefix, limit=SCAN_MAX)
            self._ahead.extend(entry for entry in page.entries if entry.key not in known)
        self._unsure = False

    # --- looking ---

    async def _look(self, lease: Lease) -> None:
        """For delayed messages, and for consumers that are gone."""
        now = self.scope.clock.now_ms()
        engine, space = self.scope.engine, self.scope.space
        self._known = await self._look_for_delayed()
        page = await engine.scan(space, CONSUMERS.prefix(self.name), limit=SCAN_MAX)
        others = [entry for entry in page.entries if entry.key != lease.key]
        self._next_end = min((entry.expires_at for entry in others if entry.expires_at is not None), default=None)
        live = {_last(entry.key) for entry in others}
        gone = self._others - live
        self._others = live
        if gone or self._searched_at is None or now - self._searched_at >= SEARCH_MS:
            await self._leavings.search(_last(lease.key), live)
            self._searched_at = now
        self._looked_at = now

    async def _look_for_delayed(self) -> int:
        """When the first message of each priority is due: one look per priority that is in use. Gives as of which revision."""
        prefix = delayed_prefix(self.name)
        due: dict[str, int] = {}
        after: str | None = None
        revision: int | None = None
        for _ in range(PRIORITY_MIN, PRIORITY_MAX + 2):
            page = await self.scope.engine.scan(self.scope.space, prefix, after=after, limit=1)
            revision = page.revision if revision is None else revision
            if not page.entries:
                break
            place = place_of(rest_of(page.entries[0].key))
            due[place.pp] = instant_of(place.position)
            after = f"{prefix}{place.pp}0"  # the first key after this priority's: "0" follows "/"
        self._due = due
        return revision or 0

    # --- being told ---

    async def _sleep(self) -> None:
        """Until there may be something."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._follow(cursor_at(self._known)))
        times = [*self._due.values(), *([] if self._next_end is None else [self._next_end])]
        self._asleep = True
        try:
            await sleep_or(self.scope.clock, min(times, default=None), self._wake)
        finally:
            self._asleep = False

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _follow(self, cursor: str) -> None:
        scope, clock = self.scope, self.scope.clock
        prefixes = ready_prefix(self.name), delayed_prefix(self.name), CONSUMERS.prefix(self.name)
        while True:
            try:
                async for commit in scope.engine.watch(scope.space, *prefixes, cursor=cursor):
                    cursor = commit.cursor
                    last = {change.key: change for change in commit.changes}  # what is put and taken at once is no news
                    for change in last.values():
                        self._hear(change, prefixes)
            except (Unavailable, Compacted, OutcomeUnknown, RateLimitExceeded) as exc:
                log.debug("the feed of queue %s is followed anew: %s", self.name, exc)
                await clock.sleep_until(clock.now_ms() + RETRY_MS)
                if isinstance(exc, Compacted):
                    self._watch = None  # whoever sleeps next begins where its Take was
                self._looked_at = None
                self._wake.set()
                if self._watch is None:
                    return
            except Error as exc:
                _refuse(self._waiting, exc)
                self._watch = None
                self._wake.set()
                return

    def _hear(self, change: Change, prefixes: tuple[str, str, str]) -> None:
        ready, delayed, consumers = prefixes
        key = change.key
        if key.startswith(ready):
            if change.exists:
                self._wake.set()
        elif key.startswith(delayed):
            if change.exists:
                place = place_of(rest_of(key))
                due = instant_of(place.position)
                self._due[place.pp] = min(due, self._due.get(place.pp, due))
                self._wake.set()
        elif key.startswith(consumers) and (self.lease is None or key != self.lease.key):
            if change.exists:
                self._others.add(_last(key))
                if change.expires_at is not None and (self._next_end is None or change.expires_at < self._next_end):
                    self._next_end = change.expires_at
            else:
                self._looked_at = None
            self._wake.set()


def _last(key: str) -> str:
    return key[key.rindex("/") + 1 :]


def _refuse(replies: Iterable[asyncio.Future[Entry]], exc: BaseException) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(exc)
