"""How a group of batches is committed to a PostgreSQL store.

At once. The group is evaluated on what this process remembers of the space, and one call writes it: it takes the space's
lock, looks whether the head is still where the evaluation began, and writes the post-images, or nothing. That is one
round trip, the commit and its flush included. When nothing is remembered, one round trip before it reads what is needed. A
key that is not remembered is taken for absent. If it is not, a put replaces it all the same, unseen; what decides about
more comes back with the answer, and is evaluated and sent again.

At once, among others. A process that finds that others write to the space too sends with its groups what they relied on:
the entries of the keys they look at, or, where a batch just replaces an entry, its outlines (created when, whose, which
tag, how large). If the head has moved the server compares, and if all of it is still so it writes the group after what the
others wrote, with the versions that follow theirs and lives that begin then: exactly what an evaluation there would have
given. So the lock is held by the server alone, for one flush, and never while a client thinks or a network carries. What
depends on more (a take, an expiry to be told of) is read and evaluated anew, and sent again.

In turn. What is overtaken each of AT_ONCE_MAX times takes the lock first, reads, is evaluated while the lock is held, and
is written: two round trips, and nobody can be overtaken for ever.

Time. With the system's clock the time is the server's, so that machines agree. A group that is evaluated before it is
sent needs the time earlier: a client estimates it from the latest answers, never ahead of the truth by more than
CLOCK_SLACK_MS. The server refuses a group if, by its own clock after the lock, an entry has expired that the evaluation
took for live: what is written is what an evaluation at that moment would have written.

Failure. An error of the server rolls back. When the connection breaks after a group was sent its fate is open: the space's
lock is taken on a new connection, which waits for the old one's transaction to end, and the feed tells, by a number the
writer drew, whether the group was written. If it was not it is tried again, under the same number. A message that is still
under way finds another head, and the number written already; after MESSAGE_MS it is refused for its age, and resolving goes
on for longer than that. Only if the server cannot be asked is the outcome unknown.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Final

from holdfast.engine import REQUEST_WINDOW_MS, Batch, ChangeSet, Receipt
from holdfast.engines.committing import Over
from holdfast.engines.evaluation import Group
from holdfast.engines.grouping import Waiting
from holdfast.engines.postgres_functions import CHANGED, DONE, EXPIRED, LATE, MOVED, REBASED, SUMMED_EVERY
from holdfast.engines.postgres_link import (
    FALSE,
    TRUE,
    Broken,
    Call,
    Link,
    Pool,
    Refused,
    Rows,
    int4,
    int8,
    int8_array,
    number,
    refused,
    text,
    text_array,
)
from holdfast.engines.postgres_plain import plain_calls, plain_reply
from holdfast.engines.postgres_rows import Reply, Terms, settle, write_call
from holdfast.engines.postgres_server import ServerTime
from holdfast.engines.postgres_state import Missing, SpaceState, Uses, Wanted
from holdfast.engines.postgres_statements import (
    BEGIN,
    BEGIN_SNAPSHOT,
    COMMIT,
    FORGET,
    HEAD,
    LOCK,
    LOCK_NAMED,
    MAKE,
    REVIVE,
    ROLLBACK,
    SPACE,
    WRITER,
)
from holdfast.engines.postgres_traffic import Attempt, Sent, Traffic
from holdfast.errors import Conflict, Error, OutcomeUnknown, Unavailable

MESSAGE_MS: Final = 10_000
"""A group that reaches the server later than this is refused."""
RESOLVE_S: Final = 30.0
"""How long to try to find out what became of a group; longer than MESSAGE_MS."""
RECONNECT_S: Final = 5.0
"""How long to wait for a server that went away before anything was sent."""
AT_ONCE_MAX: Final = 4
"""Attempts before waiting for the lock."""
IN_TURN_MAX: Final = 64
"""Attempts with the lock; each fails only if an entry expires in the same moment."""
TRIES_MAX: Final = 5
"""Times a group is begun anew after a connection broke, or the server ended a transaction to resolve a deadlock."""
REPEATED_STATES: Final = ("40001", "40P01")

Committed = Callable[[str, int, int, int, Sequence[ChangeSet]], None]
"""Is told of a group: the space, its id, the revision before, the revision after, and the commits if all versions are as evaluated."""


class MadeAnew(Exception):
    """The space was dropped and made anew, volatile, since this process looked."""


class Writer:
    """Commits groups, and remembers what it saw of spaces."""

    def __init__(self, pool: Pool, time: ServerTime, locks: int, committed: Committed) -> None:
        self._pool = pool
        self._time = time
        self._locks = locks
        self._committed = committed
        self._ids: dict[str, int] = {}
        """Spaces keep their ids for ever."""
        self._states: dict[str, SpaceState] = {}
        self._traffic: dict[str, Traffic] = {}
        self._number = secrets.randbits(41) << 22
        self._chance = random.Random(self._number).random  # noqa: S311 - nothing secret

    def forget(self, space: str) -> None:
        """Something changed the space beside its commits."""
        self._states.pop(space, None)

    def begin(self, space: str, items: list[Waiting], over: Over) -> None:
        """Commit a group of one space, and leave every item's outcome in it.

        Mostly this process is alone and remembers all it needs. Then the group is sent here and now, its answer ends it, and
        no task is needed.
        """
        attempt = self._attempt(space, items)
        link = None if attempt is None else self._pool.idle()
        if attempt is None or link is None:
            return over(self._write(space, items, attempt))

        def came(link: Link) -> None:
            self._pool.release(link)
            if attempt.reply is not None:
                over(None if self._ended(attempt.reply, attempt, items) else self._write(space, items, attempt))

        calls = self._plain(attempt)
        attempt.plain = calls is not None
        calls = calls or self._calls(attempt.state, attempt.group, items, attempt.sent, None)
        attempt.reply = link.send(*calls, then=came)
        if attempt.reply.done():  # it could not even be sent
            over(self._write(space, items, attempt))
        return None

    def _plain(self, attempt: Attempt) -> list[Call] | None:
        """What writes the group in plain SQL, if that can do it, and is likely to."""
        state, group = attempt.state, attempt.group
        if state.assumed and self._traffic_of(state.name).guessing.holds():
            return None
        calls = plain_calls(state, group, self._terms(attempt.sent))
        if calls is not None:
            attempt.sent.leaves(state, group)
        return calls

    def _attempt(self, space: str, items: list[Waiting]) -> Attempt | None:
        """The group as it is evaluated on what is known; None when that is not enough, or others write too."""
        if self._traffic_of(space).shared:
            return None
        state = self._states.pop(space, None)
        if state is None:
            return None
        try:
            group = self._evaluate(state, items, self._time.now(), known_new=True)
        except Missing:
            state.retract()
            self._states[space] = state
            return None
        return None if self._is_volatile(state, items) else Attempt(state, group, self._numbered())

    def _ended(self, answers: asyncio.Future[list[Rows]], attempt: Attempt, items: list[Waiting]) -> bool:
        """Whether the answer to what was sent at once is that it is written, just so; the items have their outcomes then."""
        if answers.exception() is not None:
            return False
        try:
            *_, rows = answers.result()
            if attempt.plain:
                reply = plain_reply(rows, attempt.group)
                if attempt.state.assumed:
                    guessing = self._traffic_of(attempt.state.name).guessing
                    guessing.was_in_vain() if reply is None else guessing.was_worth_it()
                if reply is None:  # nothing was written; a function finds out why
                    attempt.reply, attempt.sent.open = None, False
                    return False
                self._time.observe(reply.clock)
            else:
                reply = self._answered(rows)
                if reply.outcome != DONE:
                    return False
            self._done(attempt.state, attempt.group, reply, items, None)
        except Exception as exc:  # whoever waits must hear of it
            for item in items:
                item.outcome = exc
        return True

    def _numbered(self) -> Sent:
        self._number += 1
        return Sent(self._number, sums=self._chance() * SUMMED_EVERY < 1)

    async def _write(self, space: str, items: list[Waiting], attempt: Attempt | None) -> None:
        try:
            await self._try(space, items, attempt)
        except BaseException as exc:
            for item in items:
                item.outcome = exc  # not what the evaluation said: it was not written
            raise

    async def _try(self, space: str, items: list[Waiting], attempt: Attempt | None) -> None:
        loop = asyncio.get_running_loop()
        until: float | None = None
        doubt: Broken | None = None
        """A message may still be under way; it is harmless once a later one is written."""
        sent = self._numbered() if attempt is None else attempt.sent
        for _ in range(TRIES_MAX):
            begun, attempt = attempt, None
            if begun is None:
                sent.open = False
            try:
                waits = begun is None and self._traffic_of(space).at_once.holds()
                if waits or not await self._at_once(space, items, sent, begun):
                    await self._in_turn(space, items, sent)
                return None
            except Refused as exc:
                if exc.sqlstate not in REPEATED_STATES:
                    raise refused(exc) from exc
                failure: Exception = refused(exc)
            except Broken as exc:
                failure = exc
                until = until or loop.time() + RECONNECT_S
                if sent.open:
                    doubt = exc
                    written = await self._resolve(space, items, sent)
                    if written is None:
                        break
                    if written:
                        return None
            except Unavailable as exc:
                # The server is away. Only who was connected a moment ago waits for it to come back.
                failure = exc
                while until is not None and not self._pool.closed and loop.time() < until:
                    await asyncio.sleep(0.1)
                    if await self._answers():
                        break
                else:
                    break
        if doubt is not None:
            return _tell_unknown(items, doubt)
        if isinstance(failure, Broken):
            raise Unavailable(f"the connection to the server broke ({failure}); nothing was changed") from failure
        raise failure

    async def _answers(self) -> bool:
        try:
            self._pool.release(await self._pool.acquire())
        except Error:
            return False
        return True

    # --- at once ---

    async def _at_once(self, space: str, items: list[Waiting], sent: Sent, begun: Attempt | None) -> bool:
        """Evaluate on what is known and write it if that is still so. False: wait for the turn."""
        traffic = self._traffic_of(space)
        before = self._states.pop(space, None) if begun is None else begun.state
        state, wanted = before, None
        for _ in range(AT_ONCE_MAX):
            uses: Uses | None = None
            answers: Awaitable[list[Rows]] | None = None
            if begun is not None:
                state, group, answers, begun = begun.state, begun.group, begun.reply, None
            else:
                now = self._time.now()
                if state is None:
                    wanted = wanted or Wanted(_batches(items))
                    id = self._ids.get(space) or await self._look_up(space)
                    if id is None:
                        return False
                    state = await self._read(space, id, wanted)
                    if state.id is None or state.dropped:
                        return False
                    now = state.now
                try:
                    group = self._evaluate(state, items, now, known_new=wanted is None)
                except Missing:
                    state.retract()
                    if wanted is not None:
                        wanted.more()
                    state = None
                    continue
                if self._is_volatile(state, items):
                    return True
                uses = self._uses(items, now) if traffic.shared else None
            *_, rows = await (answers or self._pool.run(*self._calls(state, group, items, sent, uses)))
            reply = self._answered(rows)
            if reply.outcome in (DONE, REBASED):
                self._done(state, group, reply, items, before)
                return True
            sent.open = False
            if reply.outcome == CHANGED:
                state.correct(reply)
            elif reply.outcome == LATE:
                break
            else:
                if reply.outcome == MOVED:
                    traffic.met_others()
                state = None
        traffic.was_in_vain()
        if before is not None:
            before.retract()
            self._states[space] = before
        return False

    def _calls(
        self, state: SpaceState, group: Group, items: list[Waiting], sent: Sent, uses: Uses | None
    ) -> list[Call]:
        """What writes a group at once."""
        blind: Set[str] = frozenset()
        if state.assumed:
            blind = (uses or Uses(_batches(items))).blind(state.assumed, group.writes)
        return [*self._forgotten(state, group), self._prepared(state, group, sent, uses, blind)]

    def _uses(self, items: list[Waiting], now: int) -> Uses:
        uses = Uses(_batches(items))
        for item in items:
            if isinstance(item.outcome, Receipt):
                uses.answered(item.batch, item.outcome, now)
            # A refusal names the version it found, so one that another batch of the group wrote must not change any more.
            if isinstance(item.outcome, Conflict) and item.outcome.actual is not None:
                uses.version_max = max(uses.version_max, item.outcome.actual.version)
        return uses

    def _traffic_of(self, space: str) -> Traffic:
        return self._traffic.get(space) or self._traffic.setdefault(space, Traffic())

    async def _look_up(self, space: str) -> int | None:
        [rows] = await self._pool.run((SPACE, (text(space),)))
        return self.know(space, number(rows[0][0])) if rows else None

    def know(self, space: str, id: int) -> int:
        self._ids[space] = id
        return id

    async def _read(self, space: str, id: int, wanted: Wanted) -> SpaceState:
        """The space as it is, from one snapshot."""
        calls = self._reads(space, id, wanted)
        _, *answers, _ = await self._pool.run((BEGIN_SNAPSHOT, ()), *calls, (COMMIT, ()))
        return self._state_of(space, wanted, answers)

    def _state_of(self, space: str, wanted: Wanted, answers: list[Rows]) -> SpaceState:
        head, *rest = answers
        state = SpaceState(space, head)
        state.learn(wanted, rest)
        if self._time.given() is None:
            self._time.observe(state.now)
        return state

    def _oldest(self) -> int:
        """Requests before this are forgotten, by any clock that is not an hour wrong."""
        return self._time.now() - 2 * REQUEST_WINDOW_MS

    # --- in turn ---

    async def _in_turn(self, space: str, items: list[Waiting], sent: Sent) -> None:
        """Take the lock, then read, evaluate and write."""
        before = self._states.pop(space, None)
        wanted = Wanted(_batches(items))
        id = self._ids.get(space) or await self._look_up(space)
        if id is not None:
            await self._search(space, id, wanted)
        link = await self._pool.acquire()
        try:
            for _ in range(IN_TURN_MAX):
                if id is None:
                    if await self._first(link, space, items, sent):
                        return
                    id = self._ids.get(space)
                    continue
                if await self._turn(link, space, id, items, wanted, sent, before):
                    return
                sent.open = False
        finally:
            self._pool.release(link)
        raise Unavailable("entries of this space expire faster than a batch can be committed; nothing was changed")

    async def _turn(
        self,
        link: Link,
        space: str,
        id: int,
        items: list[Waiting],
        wanted: Wanted,
        sent: Sent,
        before: SpaceState | None,
    ) -> bool:
        """One transaction with the lock. False: something expired meanwhile, or a key was not absent; try again."""
        _, _, *answers = await link.send(
            (BEGIN, ()), (LOCK, (int4(self._locks), int4(id))), *self._reads(space, id, wanted)
        )
        while True:
            state = self._state_of(space, wanted, answers)
            try:
                group = self._evaluate(state, items, state.now, known_new=False)
                break
            except Missing:
                wanted.more()
                answers = await link.send(*self._reads(space, id, wanted))
        if self._is_volatile(state, items) or (state.dropped and group.empty):
            await link.send((ROLLBACK, ()))
            return True
        others = self._traffic_of(space).left != (state.revision, state.step)
        if state.dropped:
            state.durability = "sync"
            await link.send((REVIVE, (int4(id), b"sync", FALSE, int8(group.now))))
        call = self._prepared(state, group, sent, None)
        if state.dropped:
            reply = await self._make(link, call)
        else:
            *_, rows, _ = await link.send(*self._forgotten(state, group), call, (COMMIT, ()))
            reply = self._answered(rows)
        if reply.outcome == DONE:
            self._done(state, group, reply, items, before, others=others)
            return True
        if reply.outcome == CHANGED:
            wanted.keys = sorted({*wanted.keys, *reply.entries})
        elif reply.outcome not in (EXPIRED, LATE):
            raise Unavailable(f"the lock of space {space!r} did not hold ({reply.outcome}); nothing was changed")
        return False

    def _reads(self, space: str, id: int, wanted: Wanted) -> list[Call]:
        given = self._time.given()
        return [(HEAD, (text(space), int8(given))), *wanted.calls(id, given, self._oldest())]

    async def _first(self, link: Link, space: str, items: list[Waiting], sent: Sent) -> bool:
        """The first commit to a name makes the space. False: somebody else has made it."""
        _, _, head = await link.send(
            (BEGIN, ()), (LOCK, (int4(self._locks), int4(0))), (HEAD, (text(space), int8(self._time.given())))
        )
        if head:
            self.know(space, number(head[0][0]))
            await link.send((ROLLBACK, ()))
            return False
        state = SpaceState(space, [])
        group = self._evaluate(state, items, self._time.now(), known_new=False)
        if group.empty:
            await link.send((ROLLBACK, ()))
            return True
        [rows] = await link.send((MAKE, (text(space), b"sync", FALSE, int8(group.now))))
        state.id = number(rows[0][0])
        call = self._prepared(state, group, sent, None)
        reply = await self._make(link, call)
        if reply.outcome != DONE:
            sent.open = False
            return False
        self.know(space, state.id)
        self._done(state, group, reply, items, None)
        return True

    async def _make(self, link: Link, call: Call) -> Reply:
        """The first group of a space that was just made: if it cannot be written there is no space either."""
        [rows] = await link.send(call)
        reply = self._answered(rows)
        await link.send((COMMIT if reply.outcome == DONE else ROLLBACK, ()))
        return reply

    async def _search(self, space: str, id: int, wanted: Wanted) -> None:
        """Look for generated ids in the feed before taking the lock, since it may take a while."""
        if wanted.searched:
            head = (HEAD, (text(space), int8(self._time.given())))
            searches = wanted.searches(id, self._oldest())
            _, head_rows, *answers, _ = await self._pool.run((BEGIN_SNAPSHOT, ()), head, *searches, (COMMIT, ()))
            wanted.search_done(SpaceState(space, head_rows).revision, answers)

    # --- both ---

    def _evaluate(self, state: SpaceState, items: list[Waiting], now: int, *, known_new: bool) -> Group:
        state.begin(now)
        group = Group(state, now)
        outcomes = group.evaluate_all([item.batch for item in items], known_new=known_new)
        for item, outcome in zip(items, outcomes, strict=True):
            item.outcome = outcome
        return group

    def _is_volatile(self, state: SpaceState, items: list[Waiting]) -> bool:
        if state.durability != "volatile" or state.dropped:
            return False
        for item in items:
            item.outcome = MadeAnew()
        return True

    def _forgotten(self, state: SpaceState, group: Group) -> list[Call]:
        """Ids whose window is over make room for their next use."""
        old = state.outdated_requests(group)
        if not old:
            return []
        actors, ids = [commit.actor for commit in old], [commit.request_id or "" for commit in old]
        versions = int8_array([commit.version for commit in old])
        return [(FORGET, (int4(state.id or 0), text_array(actors), text_array(ids), versions))]

    def _prepared(
        self, state: SpaceState, group: Group, sent: Sent, uses: Uses | None, blind: Set[str] = frozenset()
    ) -> Call:
        """The call that writes a group; from here on its fate is open until it is answered."""
        if not group.empty:
            sent.leaves(state, group)
        return write_call(state, group, self._terms(sent, uses, blind))

    def _terms(self, sent: Sent, uses: Uses | None = None, blind: Set[str] = frozenset()) -> Terms:
        deadline = self._time.server() + MESSAGE_MS
        return Terms(self._locks, self._time.given(), deadline, sent.number, uses, blind, sent.sums)

    def _answered(self, rows: Rows) -> Reply:
        reply = Reply(rows)
        self._time.observe(reply.clock, exact=reply.outcome in (EXPIRED, LATE))
        return reply

    def _done(
        self,
        state: SpaceState,
        group: Group,
        reply: Reply,
        items: list[Waiting],
        before: SpaceState | None,
        *,
        others: bool | None = None,
    ) -> None:
        """The group is committed: remember it, and give every receipt the version it really has."""
        space, traffic = state.name, self._traffic_of(state.name)
        if reply.moved:
            _settle(items, group, state.revision, reply.revision, reply.time)
        if not group.empty:
            traffic.left = (reply.revision, reply.step)
            certain = [] if reply.moved else group.commits
            self._committed(space, state.id or 0, state.revision, reply.revision, certain)
        worth = traffic.met(reply.moved if others is None else others, at_once=others is None)
        if before is not None and before is not state:
            same = before.sure and (before.revision, before.step) == (state.revision, state.step)
            if same or traffic.shared:
                state.inherit(before, sure=same)
        if state.keep(group, reply.settled(group, state.revision), reply) and worth:
            self._states[space] = state

    # --- after a broken connection ---

    async def _resolve(self, space: str, items: list[Waiting], sent: Sent) -> bool | None:
        """Whether what was sent has been written; None when that cannot be found out."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + RESOLVE_S, 0.02
        while not self._pool.closed and loop.time() < until:
            try:
                answers = await self._pool.run(
                    (BEGIN, ()),
                    (LOCK, (int4(self._locks), int4(0))),
                    (LOCK_NAMED, (int4(self._locks), text(space))),
                    (WRITER, (text(space), int8(sent.revision), int8(sent.number))),
                    (COMMIT, ()),
                )
            except (Broken, Refused, Error):
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)
                continue
            rows = answers[3]
            if not rows:
                return False  # there is no such space: the group that makes it was not written
            forgotten, revision, time = rows[0]
            if revision is not None and sent.group is not None:
                _settle(items, sent.group, sent.revision, number(revision), number(time))
                return True
            return None if forgotten == TRUE else False
        return None


def _settle(items: list[Waiting], group: Group, base: int, revision: int, time: int) -> None:
    """Give every receipt the version it really has.

    The answer to a repeated request is older than the group, and true already. A new one with an id has a version of its own.
    """
    for item in items:
        repeatable = item.batch.request_id is not None and item.batch.operations
        if isinstance(item.outcome, Receipt) and (item.outcome.version > base or not repeatable):
            item.outcome = settle(item.batch, item.outcome, group, revision, time)


def _batches(items: list[Waiting]) -> list[Batch]:
    return [item.batch for item in items]


def _tell_unknown(items: list[Waiting], exc: Broken) -> None:
    for item in items:
        if isinstance(item.outcome, Receipt) and item.batch.operations:
            item.outcome = OutcomeUnknown(
                f"the connection to the server broke during a commit ({exc}): it may or may not have happened. "
                "Repeat the request with the same request id to find out",
                request_id=item.batch.request_id,
            )
        else:
            item.outcome = Unavailable(f"the connection to the server broke ({exc}); nothing was changed")
