"""Locks, semaphores, read and write locks, elections and pools: five ways to stand in a line (`lines.py`).

    async with space.lock("portfolio/MSFT", ttl="5s", wait="2s") as guard:
        await guard.space.records.set("cash", 10)

To acquire is to append an entry of one's own to the line and to wait until it is one's turn; to hold is to keep that entry
alive; to release is to delete it. Whoever wants something alone first tries to append on condition that the line is empty
(`Empty`): then it holds it, in one commit. To be first in the line is to hold it, as long as one's lease is good: a guard is given
only to whom its lease was extended by the whole ttl. Who leaves extends that of who comes after it here, in the same commit;
who has waited for somebody elsewhere extends its own before it begins. `guard.space` is a
view of the space whose every write is conditional on that entry, so a holder that was paused past its ttl can write nothing
any more: the store refuses it with LeaseLost. `guard.token` is the version at which the entry was made: it grows from
holder to holder, for systems outside that fence by number.

Who waits keeps its place alive with a short lease (WAITING_MS), so that one that was killed is soon skipped, and has its
whole ttl from the moment its turn begins.

How it fails. `wait=0`, the default, raises LockAcquisitionError at once when it is somebody else's turn, and `wait="2s"`
after that time; `wait=None` waits as long as it takes. A lease that was lost while it was held raises LeaseLost at the end
of the block, unless the block raised something itself. A release that does not reach the store is logged, and tried until
it does or the lease is over. Who is cancelled while it acquires or releases leaves no place behind, as far as the store can be
reached, and does not wait for one that is silent; under a request id the place is left to whoever asks again, until it ends. The
number of permits is stored at first use; another number later is InvalidInput.

Requests that may be repeated. `acquire(request_id=…)` makes the place under that id, and, when its turn has come, writes so
under a second one. Repeated, it finds both: the same guard, also when it has been released or has ended since. A request
that was refused has left the line and stands in it anew when it is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from holdfast.clock import Duration, duration_ms, sleep_or
from holdfast.codec import encode
from holdfast.engine import (
    Absent,
    Batch,
    Condition,
    Delete,
    Empty,
    Entry,
    Push,
    Put,
    Receipt,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import (
    Conflict,
    Error,
    InvalidInput,
    LeaseLost,
    LockAcquisitionError,
    OutcomeUnknown,
    RateLimitExceeded,
    Unavailable,
)
from holdfast.keys import check_name
from holdfast.layers.coordination import Coordination
from holdfast.layers.guards import Guard
from holdfast.layers.leases import LEAVING_S, Lease
from holdfast.layers.lines import LOCKS, PERMITS, Kind, Place, in_turn, permits_of, place_of, read_line
from holdfast.layers.scope import Scope
from holdfast.middleware.line_claims import UNITS_MAX

if TYPE_CHECKING:
    from holdfast.space import Space

TTL_MS: Final = 30_000
WAITING_MS: Final = 5_000
"""How long a place stands in line that nobody keeps alive. Who waits has this lease, if its ttl is not shorter; who holds, its ttl."""
JOINING_MS: Final = 1
"""How long who joins a line behind others waits for another commit to go with: it has to wait anyway."""
PROFILES_MS: Final = {"default": TTL_MS, "locks": 60_000, "long_running": 300_000}
ATTEMPTS_MAX: Final = 16
"""How often one request id may be refused; each time costs every later one a look."""

log = logging.getLogger("holdfast.locks")


@dataclass(frozen=True)
class Wanted:
    """Something that can be acquired, with `async with` or with `acquire()` and `guard.release()`."""

    coordination: Coordination
    scope: Scope
    view: Callable[[Scope], Space]
    kind: Kind
    name: str
    ttl_ms: int
    wait_ms: int | None
    size: int = 1
    units: int = 1
    shared: bool = False
    _held: dict[Hashable, list[Guard]] = field(default_factory=dict, repr=False, compare=False)
    """What `async with` has acquired, by the task that did."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")

    @property
    def called(self) -> str:
        """What it is, as messages name it."""
        return f"{'lock' if self.kind == 'rw' else self.kind} {self.name!r}"

    @property
    def waiting_ms(self) -> int:
        """The ttl of a place whose turn has not begun."""
        return min(WAITING_MS, self.ttl_ms)

    @property
    def _prefix(self) -> str:
        return LOCKS.prefix(self.kind, self.name)

    async def acquire(self, *, request_id: str | None = None) -> Guard:
        """Hold it, or raise LockAcquisitionError when it is not one's turn in time.

        With a request id it may be repeated, one after the other, and is granted once.
        """
        await self._as_agreed()
        clock = self.scope.clock
        deadline = None if self.wait_ms is None else clock.now_ms() + self.wait_ms
        guard = await self._come_first() if request_id is None else None
        attempts = count()
        while guard is None or (request_id is None and not await self._is_good(guard, deadline)):
            attempt = next(attempts)
            if request_id is not None and attempt == ATTEMPTS_MAX:
                raise LockAcquisitionError(
                    f"{self.called} was not acquired: this request id was refused {ATTEMPTS_MAX} times; "
                    "give the next try an id of its own"
                )
            guard = await self._stand_in_line(deadline, None if request_id is None else f"{request_id}#{attempt}")
        self.coordination.leases.granted(guard._lease)
        return guard

    async def _is_good(self, guard: Guard, deadline: int | None) -> bool:
        """Whether what was granted is still held: who was paused until the answer came may have lost it to another."""
        lease, now = guard._lease, self.scope.clock.now_ms()
        if lease.good_until > now and not lease.lost.is_set():
            return True
        self.coordination.leases.lose(lease)
        await self.leave(lease)
        if deadline is not None and now >= deadline:
            why = f"its lease of {self.ttl_ms / 1000:g} s was over when the answer came; try again, with a longer ttl"
            raise LockAcquisitionError(f"{self.called} was not acquired: {why}")
        return False

    async def _come_first(self) -> Guard | None:
        """Hold it, if nobody is there, in one commit; None when one has to stand in line, or may share it."""
        scope, prefix = self.scope, self._prefix
        if not self._is_alone or (self.wait_ms != 0 and self.coordination.lines(scope).crowded(prefix)):
            return None
        sent_at = scope.clock.now_ms()
        try:
            receipt = await self._append((Empty(prefix),), None, self.ttl_ms)
        except Conflict as conflict:
            if self.wait_ms == 0:
                raise self._refused([] if conflict.actual is None else [conflict.actual], "") from conflict
            return None
        lease = self.coordination.leases.keep(scope, str(receipt.results[0]), self.ttl_ms, sent_at)
        return Guard(self, lease, receipt.version, receipt.at)

    async def _stand_in_line(self, deadline: int | None, request_id: str | None) -> Guard | None:
        """Append oneself and wait for one's turn; None when one's place was lost meanwhile.

        With the ttl of who waits, where the turn is written when it begins, or most likely has to be waited for. Who finds
        what it shares with others is mostly in turn at once, and then needs nothing more.
        """
        scope, leases, lines = self.scope, self.coordination.leases, self.coordination.lines(self.scope)
        mine = request_id is None  # a place made under a request id may be held already, by who asked before
        follows = mine and self.wait_ms != 0 and lines.follows(self._prefix)
        ttl_ms = self.ttl_ms if mine and not follows and not self._is_alone else self.waiting_ms
        patience_ms = JOINING_MS if mine and self._is_alone and self.wait_ms != 0 and lines.crowded(self._prefix) else 0
        if mine and self.wait_ms == 0 and not self._is_alone:
            await self._see_room()
        sent_at = scope.clock.now_ms()
        receipt = await self._append((), request_id, ttl_ms, patience_ms)
        key, token = str(receipt.results[0]), receipt.version
        lease = leases.keep(scope, key, ttl_ms, sent_at)
        try:
            if follows and lines.follows(self._prefix):
                return await self._take_over(lease, token, deadline)  # nothing has to be read
            line = await self._line()
            if key in in_turn(((entry.key, place_of(entry.value)) for entry in line), self.size):
                if mine and ttl_ms == self.ttl_ms:
                    return Guard(self, lease, token, receipt.at)
            elif mine or await self._is_there(key):
                mine = True
                if self.wait_ms == 0:
                    raise self._refused(line, "")
                if request_id is None:
                    if ttl_ms > self.waiting_ms and not await self._shorten(lease, token):
                        return None
                    return await self._take_over(lease, token, deadline)
                if not await self._wait(lease, deadline):
                    return None
                mine = False
            return await self._begun(lease, token, None if request_id is None else f"{request_id}!")
        except BaseException:
            leases.release(lease)
            if mine:
                await self.leave(lease)
            raise

    async def _see_room(self) -> None:
        """Refuse who would not wait and finds no room, before it is in the way of others who would."""
        line = await self._line()
        places = [(entry.key, place_of(entry.value)) for entry in line]
        if "" not in in_turn(iter([*places, ("", self._place())]), self.size):
            raise self._refused(line, "")

    async def _append(
        self, conditions: tuple[Condition, ...], request_id: str | None, ttl_ms: int, patience_ms: int = 0
    ) -> Receipt:
        """Append oneself to the line. Who goes away before it is known whether that was done takes it back."""
        scope = self.scope
        sized = await self._as_agreed()
        push = Push(self._prefix, encode(self._place()), ttl_ms)
        batch = scope.batch((push,), (*conditions, *sized), request_id)
        if patience_ms:
            batch = replace(batch, patience_ms=patience_ms)
        try:
            receipt = await scope.sent(batch)
        except Conflict as conflict:
            if not sized or conflict.key != sized[0].key:
                raise
            self.coordination.sizes.pop(
                f"{scope.space} {conflict.key}", None
            )  # whoever deleted it may have wanted another
            return await self._append(conditions, request_id, ttl_ms, patience_ms)
        except OutcomeUnknown:
            if request_id is None:
                self.coordination.leases.give_up(self._take_back(batch))
            raise
        except asyncio.CancelledError:
            if request_id is None:
                await self.coordination.leases.see_to(self._take_back(batch))
            raise  # under a request id it may be somebody's who asked before, and is found when it is asked again
        scope.session.saw(receipt.version)
        return receipt

    async def _take_back(self, batch: Batch) -> None:
        """Leave a place that may have been made: the same request again tells where it is."""
        scope, leases = self.scope, self.coordination.leases
        again, until = replace(batch, fresh=False, patience_ms=0), scope.clock.now_ms() + self.ttl_ms
        try:
            receipt = await leases.insist(lambda: scope.sent(again), until)
            await leases.insist(lambda: scope.unguarded().commit((Delete(str(receipt.results[0])),)), until)
        except (Conflict, LeaseLost):
            pass  # it was not made
        except Error as exc:
            log.warning("a place in the line for %s may be left; it ends in %d ms: %s", self.called, self.ttl_ms, exc)

    async def _is_there(self, key: str) -> bool:
        """Whether the place made by a request still exists; one that was repeated may come too late for it."""
        [entry] = await self.scope.engine.get(self.scope.space, [key])
        return entry is not None

    async def _line(self) -> list[Entry]:
        """As much of the line as tells whose turn it is."""
        limit = None if self.shared else self.size + 1
        entries, _ = await read_line(self.scope.engine, self.scope.space, self._prefix, limit)
        return entries

    async def _line_at_once(self) -> list[Entry] | None:
        """The same, unless the store keeps one waiting."""
        try:
            async with asyncio.timeout(LEAVING_S):
                return await self._line()
        except (TimeoutError, Error):
            return None

    async def _wait(self, lease: Lease, deadline: int | None) -> bool:
        """Until it is one's turn; False when one's place was lost."""
        news = asyncio.Event()
        lease.tell(news)
        lines = self.coordination.lines(self.scope)
        async with lines.standing(self._prefix, lease, self.size, news):
            if not await sleep_or(self.scope.clock, deadline, news):
                raise self._refused(await self._line_at_once(), f" after {(self.wait_ms or 0) / 1000:g} s")
        if lines.closed:
            raise Unavailable(f"the store was closed while {self.called} was waited for; it is not held")
        if lease.lost.is_set():
            await self.leave(lease)  # by the store's clock it may still be there, and stand before the next one
            return False
        return True

    async def _take_over(self, lease: Lease, token: int, deadline: int | None) -> Guard | None:
        """Wait for one's turn and begin, with the whole ttl; None when one's place was lost."""
        lease.turn_ms = self.ttl_ms
        if not await self._wait(lease, deadline):
            return None
        if lease.turn_ms is not None:  # who left before did not do it
            return await self._begun(lease, token, None, lease.good_until)
        guard = Guard(self, lease, token, self.scope.clock.now_ms())
        guard.begin()
        return guard

    async def _begun(self, lease: Lease, token: int, request_id: str | None, until: int | None = None) -> Guard | None:
        """Begin, and have it; None when one's place was lost."""
        since = await self._begin(lease, token, request_id, until)
        if since is None:
            return None
        self.coordination.leases.regained(lease)
        return Guard(self, lease, token, since)

    async def hand_over(self, lease: Lease) -> Receipt:
        """Leave; who waits here and is next has its whole ttl from then on, by the same commit."""
        scope, gone = lease.scope.unguarded(), Delete(lease.key)
        heir = self.coordination.lines(self.scope).heir(self._prefix, lease.key) if self._is_alone else None
        if (
            heir is None
            or heir.turn_ms is None
            or heir.scope.guards  # which its own commit looks at
            or (heir.scope.engine, heir.scope.actor) != (scope.engine, scope.actor)
        ):
            return await scope.commit((gone,))
        sent_at = scope.clock.now_ms()
        try:
            receipt = await scope.commit((gone, Touch(heir.key, heir.turn_ms)))
        except (Conflict, RateLimitExceeded):  # it has just gone; or two are too many, and one is not
            return await scope.commit((gone,))
        heir.begun(sent_at)
        return receipt

    async def note_turn(self, lease: Lease, token: int) -> None:
        """Write that it is held from now on; its lease begins anew."""
        try:
            await self._begin(lease, token, None)
        except Error as exc:
            log.warning("that %s is held could not be noted; its lease is renewed all the same: %s", self.called, exc)

    async def _begin(self, lease: Lease, token: int, request_id: str | None, until: int | None = None) -> int | None:
        """One's turn has come: the lease begins anew, with the whole ttl, if it is still there. Gives since when."""
        return await self._write(lease, token, self.ttl_ms, request_id, until)

    async def _shorten(self, lease: Lease, token: int) -> bool:
        """One has to wait, against expectation: the place gets the ttl of who does. False when it was lost."""
        lease.ttl_ms = self.waiting_ms  # before it is known to be shorter it must not be believed to be longer
        return await self._write(lease, token, self.waiting_ms, None) is not None

    async def _write(
        self, lease: Lease, token: int, ttl_ms: int, request_id: str | None, until: int | None = None
    ) -> int | None:
        """Write one's place with another ttl, from now on; gives the time, or None when it is gone. It is tried `until` then."""
        scope, leases = self.scope, self.coordination.leases
        put = Put(lease.key, encode(self._place(token)), ttl_ms)
        said = lease.value or encode(self._place())  # by which a policy sees that nobody takes more than it had
        batch = scope.batch((put,), (ValueIs(lease.key, said),), request_id)
        sent_at = scope.clock.now_ms()

        def send() -> Awaitable[Receipt]:
            nonlocal batch
            sending, batch = batch, replace(batch, fresh=False)  # again it is the same request
            return scope.sent(sending)

        try:
            receipt = await (send() if until is None else leases.insist(send, until))
        except Conflict:
            if leases.keeps(lease):  # else it was given up meanwhile
                leases.lose(lease)
            return None
        scope.session.saw(receipt.version)
        written_at = sent_at if request_id is None else min(sent_at, receipt.at)  # it may be an old receipt
        leases.written(lease, written_at, ttl_ms)
        lease.value = put.value
        return receipt.at

    def left(self, lease: Lease, version: int) -> None:
        """The place is gone since this version: who waits here may be next."""
        self.coordination.lines(self.scope).left(self._prefix, lease.key, version)

    async def leave(self, lease: Lease) -> None:
        """Step out of the line, and do not wait long for a store that does not answer."""
        await self.coordination.leases.see_to(self.step_out(lease))

    async def step_out(self, lease: Lease) -> None:
        """Step out of the line, in as many tries as it takes while there is a place to leave."""
        scope = self.scope.unguarded()
        try:
            receipt = await self.coordination.leases.insist(
                lambda: scope.commit((Delete(lease.key),)), lease.good_until
            )
            self.left(lease, receipt.version)
        except Error as exc:
            log.warning(
                "the place in the line for %s ends by itself, in %d ms at most: %s", self.called, lease.ttl_ms, exc
            )

    def _place(self, token: int | None = None) -> Place:
        return Place(self.scope.instance, self.units, self.shared, token)

    def _refused(self, line: list[Entry] | None, after: str) -> LockAcquisitionError:
        """Not one's turn; None where the line could not be read."""
        turns = set(in_turn(((entry.key, place_of(entry.value)) for entry in line or ()), self.size))
        owners = sorted({entry.owner for entry in line or () if entry.key in turns})
        nobody = "somebody, and the store does not answer" if line is None else "somebody who has just left"
        holders = ", ".join(owners) or nobody
        first = line[0] if line else None
        advice = "wait longer, or try again later" if after else "name a time with wait= to stand in line"
        return LockAcquisitionError(
            f"{self.called} was not acquired{after}: it is held by {holders}; {advice}",
            key=None if first is None else first.key,
            condition="turn",
            actual=first,
        )

    @property
    def _is_alone(self) -> bool:
        """Whether nobody else can have it at the same time."""
        return not self.shared and self.size == 1

    @property
    def _is_sized(self) -> bool:
        return self.kind in ("semaphore", "pool")

    async def _as_agreed(self) -> tuple[VersionIs, ...]:
        """The size that was agreed on, as a condition: the first user stores it; everybody else must name the same."""
        if not self._is_sized:
            return ()
        key = PERMITS.key(self.kind, self.name)
        known = self.coordination.sizes.get(f"{self.scope.space} {key}")
        if known is None or known[0] != self.size:  # it may have been deleted since
            try:
                receipt = await self.scope.commit((Put(key, encode(self.size)),), (Absent(key),))
                known = self.size, receipt.version
            except Conflict as conflict:
                if conflict.actual is None:
                    raise
                size = permits_of(conflict.actual)
                if size is None:
                    raise InvalidInput(
                        f"what is stored under {key!r} is no number of permits; an orchestrator has to delete it"
                    ) from conflict
                known = size, conflict.actual.version
            self.coordination.sizes[f"{self.scope.space} {key}"] = known
        if known[0] != self.size:
            raise InvalidInput(
                f"{self.called} has {known[0]} permits since its first use; it cannot be used with {self.size}"
            )
        return (VersionIs(key, known[1]),)

    async def available(self) -> int:
        """How many units nobody has at the moment."""
        await self._as_agreed()
        places = {entry.key: place_of(entry.value) for entry in await self._line()}
        return self.size - sum(places[key].units for key in in_turn(iter(places.items()), self.size))

    async def __aenter__(self) -> Guard:
        guard = await self.acquire()
        self._entered(asyncio.current_task(), guard)
        return guard

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        await self._left(asyncio.current_task(), exc)

    def _entered(self, by: Hashable, guard: Guard) -> None:
        """A block of this task, or thread, has begun: others may use the same object at the same time."""
        self._held.setdefault(by, []).append(guard)

    async def _left(self, by: Hashable, exc: BaseException | None) -> None:
        """The block that began last has ended: of this task, or, when it was begun by another one, the only one there is."""
        if by not in self._held:
            if len(self._held) != 1:
                raise InvalidInput(
                    f"{self.called} was entered by {len(self._held)} tasks with one object, and is left by another, so nobody knows which "
                    "of them has ended: make an object for each block, or use acquire() and release()"
                )
            [by] = self._held
        guard = self._held[by].pop()
        if not self._held[by]:
            del self._held[by]
        try:
            await guard.release()
        except LeaseLost as lost:
            if exc is None:
                raise
            exc.add_note(str(lost))
        except Error as failure:
            log.warning("the release of %s did not reach the store; it is tried again: %s", self.called, failure)


def ttl_of(ttl: Duration | None, profile: str) -> int:
    """The ttl of a lease: as given, or as the profile says."""
    if ttl is not None:
        return duration_ms(ttl, name="ttl")
    if profile not in PROFILES_MS:
        raise InvalidInput(f"the profile is one of {', '.join(PROFILES_MS)}, not {profile!r}")
    return PROFILES_MS[profile]


def check_units(number: int, what: str) -> int:
    if type(number) is not int or not 0 < number <= UNITS_MAX:
        raise InvalidInput(f"{what} must be a whole number between 1 and {UNITS_MAX:,}, not {number!r}")
    return number
