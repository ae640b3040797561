"""Orchestrators: any number of them run, and each correlation is decided once.

    orchestrator = space.orchestrator(merge="momentum_risk_fusion", on_decision=publish)
    await orchestrator.run()

An orchestrator follows the feed, which gives it a picture of what is open (`agenda.py`). It serves as long as its lease,
`correlations/orchestrators/<id>`, and everything it writes is conditional on it; when that is lost it goes on under another, with
the same picture. When a correlation is due it takes three steps:

1. Claim: the state goes to orchestrating, by compare-and-set. Of several one wins. From here on no signal comes in.
2. Merge: read signals and context, ask the strategy (`merging.py`). Nothing is written.
3. Decide, in one commit: the state with its signals and its retention, the decision with the merged context and how it came
   about, the entry in the outbox, the end of the index entry and of the signals' own entries.

A shipped strategy takes no time and has no effects, so there is nothing a claim of its own would guard: when the signals of all
named agents are there, claim and decision are one commit, on condition that state, signals and context are as the feed has told
them, or as they were read where it has not told all. The feed tells both steps. Where something was changed meanwhile, it is claimed first.

Then the decision is published: `on_decision` is called, and the outbox entry is removed, with the next commit of this
orchestrator or after NOTE_S (`terms.py`). The decision is in the outbox once, from the commit that made it, and the orchestrator
that made it is the one to publish it as long as its lease lives. Who decides and does not publish leaves it to anybody who does.

Whether decisions of a space are published, `correlations/publishing` says, which the first orchestrator that runs with `on_decision`
writes, for ever. Who has none decides on condition that the mark is absent, so that there is no time between that and having
heard of it; when it is refused for that, it writes the outbox from then on. Where nobody ever publishes, nothing waits for it.

How it fails. One that dies, at any point, loses its lease; another takes over what it had claimed, and publishes what it left in
the outbox. If it died after `on_decision` had done its work and before that was noted, `on_decision` is called again: with
the same `decision.id`, by which whoever receives it can tell. One that was paused past its lease is refused by the store, goes on
under another, and remembers what it had published. A strategy that raises fails the correlation, with the error in the decision. So does one that takes its process down
ATTEMPTS_MAX times. An `on_decision` that raises is called again after a pause that grows to PUBLISH_MS_MAX; it must not block
the event loop for the length of a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from holdfast.clock import sleep_or
from holdfast.codec import decode, encode
from holdfast.engine import (
    OPERATIONS_MAX,
    SCAN_MAX,
    Absent,
    Condition,
    Delete,
    Entry,
    Operation,
    Present,
    Put,
    VersionIs,
    cursor_at,
)
from holdfast.errors import (
    AccessDenied,
    Compacted,
    Conflict,
    Error,
    InvalidInput,
    LeaseLost,
    NotFound,
    OutcomeUnknown,
    RateLimitExceeded,
    Unavailable,
)
from holdfast.ids import new_id
from holdfast.layers.agenda import SIGNALLED, Agenda, ToDecide, ToPublish
from holdfast.layers.answers import answered, remembering
from holdfast.layers.coordination import Coordination
from holdfast.layers.correlation_entries import (
    CONTEXTS,
    MADE,
    OPEN,
    ORCHESTRATORS,
    OUTBOX,
    PUBLISHING,
    STATES,
    Decision,
    State,
    check_id,
    due_key,
    kept_ms,
    millis,
    not_for_agents,
    state_of,
    tag_of,
)
from holdfast.layers.deciding import Case, case_of, claimed, claiming, conclude, read_case, updated
from holdfast.layers.merging import STRATEGIES, Strategy, strategy_of
from holdfast.layers.patterns import called
from holdfast.layers.scope import Scope
from holdfast.layers.terms import NOTES_MAX, RETRY_MS, Term
from holdfast.layers.transact import Transaction

LEASE_MS: Final = 10_000
WORK_MAX: Final = 64
"""Correlations an orchestrator works at, at once."""
ATTEMPTS_MAX: Final = 5
"""Orchestrators that may end in the middle of one correlation before it is failed."""
PUBLISH_MS_MAX: Final = 60_000
REMEMBERED_MAX: Final = 10_000
"""Decisions that an orchestrator knows to have published although the outbox still has them."""
STOP_S_MAX: Final = 10.0
"""How long stopping waits for what is being decided."""
FOLLOWED: Final = (ORCHESTRATORS, STATES, SIGNALLED, OUTBOX, CONTEXTS)
PASSING: Final = (Unavailable, OutcomeUnknown, Compacted, LeaseLost, RateLimitExceeded)
"""What may be otherwise the next time."""

OnDecision = Callable[[Decision], Any]
Remembered = Callable[[str], Operation]
"""From a decision's id to what remembers by which request it was made."""

log = logging.getLogger("holdfast.orchestrator")


class Orchestrator:
    """Decides correlations. Made by `space.orchestrator`."""

    def __init__(
        self,
        scope: Scope,
        coordination: Coordination,
        *,
        merge: str | Strategy,
        strategies: Mapping[str, Strategy] | None,
        on_decision: OnDecision | None,
        publish: bool | None,
        lease_ms: int,
        version: str,
    ) -> None:
        self.merge, self._strategy = strategy_of(merge, strategies)
        self._at_once = self._strategy is STRATEGIES.get(self.merge)
        self.decided = 0
        """Correlations this one has decided."""
        self.published = 0
        self._scope = scope
        self._coordination = coordination
        self._on_decision = on_decision
        self._publish_given = publish
        self._writes_outbox = True if publish is None and on_decision is not None else publish
        """None: as soon as somebody publishes here."""
        self._lease_ms = lease_ms
        self._version = version
        self._told: dict[str, None] = {}
        """Decisions that were published and not noted yet, in whichever term, the oldest first."""
        self._stopping = False
        self._term: Term | None = None
        self._ended = asyncio.Event()
        self._ended.set()

    # --- its life ---

    def run(self) -> Coroutine[Any, Any, None]:
        """Decide whatever becomes due, until it is stopped or cancelled."""
        if self._ended.is_set():
            # Here, not when it begins: it may be stopped in between, and what was before is over.
            self._stopping = False
        return self._run()

    async def _run(self) -> None:
        if not self._ended.is_set():
            raise InvalidInput("this orchestrator is running already; make another one")
        self._ended.clear()
        try:
            while not self._stopping:
                try:
                    await self._watch_over()
                except PASSING as exc:
                    await self._pause(exc)
        except AccessDenied as exc:
            raise not_for_agents(self._scope.actor, "decide correlations") from exc
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Finish what was begun, and return when that is done."""
        self._stopping = True
        if self._term is not None:
            self._term.news.set()
        await self._ended.wait()

    async def _pause(self, why: Error) -> None:
        log.warning("the orchestrator in %s begins anew: %s", self._scope.space, why)
        clock = self._scope.clock
        await clock.sleep_until(clock.now_ms() + RETRY_MS)

    async def _watch_over(self) -> None:
        """Draw a picture of what is open, keep it up to date, and serve, term after term, as long as it can be."""
        if self._on_decision is not None:
            await self._promise()
        agenda = self._agenda()
        following = asyncio.ensure_future(self._follow(agenda, await self._load(agenda)))
        following.add_done_callback(lambda _: self._wake())
        try:
            while not (self._stopping or following.done() or agenda.is_outgrown):
                try:
                    async with self._serving(agenda) as term:
                        await self._serve(term, following)
                except PASSING as exc:
                    await self._pause(exc)
                agenda.begin_anew(new_id(), self._scope.clock.now_ms())
        finally:
            following.cancel()
            await asyncio.wait([following])
        if not following.cancelled():
            following.result()

    async def _promise(self) -> None:
        """Say, once for the space and for ever, that decisions are published: whoever decides leaves them in the outbox."""
        [mark] = await self._scope.engine.get(self._scope.space, [PUBLISHING])
        if mark is None:
            with suppress(Conflict):  # another one was as quick
                put = Put(PUBLISHING, encode({"agent": self._scope.actor}))
                await self._scope.commit((put,), (Absent(PUBLISHING),))

    def _agenda(self) -> Agenda:
        return Agenda(new_id(), self._lease_ms, publishes=self._on_decision is not None)

    def _wake(self) -> None:
        if self._term is not None:
            self._term.news.set()

    @asynccontextmanager
    async def _serving(self, agenda: Agenda) -> AsyncIterator[Term]:
        """Hold a lease of one's own as long as this lasts."""
        scope, id = self._scope, agenda.me
        key, publishes = ORCHESTRATORS + id, self._on_decision is not None
        told = {"agent": scope.actor, "instance": scope.instance, "merge": self.merge, "publishes": publishes}
        sent_at = scope.clock.now_ms()
        await scope.commit((Put(key, encode(told), self._lease_ms),), (Absent(key),))
        lease = self._coordination.leases.keep(scope, key, self._lease_ms, sent_at)
        try:
            yield Term(id, lease, agenda, self._coordination.leases, self._told)
        finally:
            self._coordination.leases.release(lease)
            # Until a lost one ends by itself, what it had is taken over by who knows what of it is done.
            if not lease.lost.is_set():
                try:
                    await scope.commit((Delete(key),))
                except Error as exc:
                    log.warning("the lease of an orchestrator ends by itself in %d ms: %s", self._lease_ms, exc)

    async def _serve(self, term: Term, following: asyncio.Future[None]) -> None:
        """Do what is due, until the lease is lost, or the feed cannot be followed."""
        clock, agenda = self._scope.clock, term.agenda

        def is_over() -> bool:
            return self._stopping or term.lost or following.done() or agenda.is_outgrown

        self._term, patient = term, True
        try:
            while not is_over():
                term.news.clear()
                for peer in agenda.looks(clock.now_ms()):
                    await self._look(term, peer)
                self._begin_due(term)
                if not is_over():
                    is_full = len(term.tasks) >= WORK_MAX  # then the next one to finish wakes this
                    term.sleeps_until = None if is_full else agenda.next_at()
                    await sleep_or(clock, term.sleeps_until, term.news)
        except asyncio.CancelledError:
            patient = False
            raise
        finally:
            self._term = None
            await self._wind_up(term, patient)

    async def _wind_up(self, term: Term, patient: bool) -> None:
        """Let finish what was begun, if there is time and it can still be written; another takes over what is not."""
        try:
            if term.tasks and patient and not term.lost:
                await asyncio.wait(term.tasks, timeout=STOP_S_MAX)
        finally:
            for task in term.tasks:
                task.cancel()
            if term.tasks:
                await asyncio.wait(term.tasks)
        await term.note_now()

    async def _load(self, agenda: Agenda) -> str:
        """Read what is there, and give the cursor from which on the feed tells the rest."""
        found = await self._scope.engine.spaces(self._scope.space)
        cursor, now = cursor_at(found[0].revision if found else 0), self._scope.clock.now_ms()
        async for entries in self._pages(OPEN):
            keys = [STATES + entry.key[len(OPEN) :].partition("/")[2] for entry in entries]
            states = await self._scope.engine.get(self._scope.space, keys)
            agenda.load([entry for entry in states if entry is not None], now)
        for prefix in (SIGNALLED, OUTBOX):
            async for entries in self._pages(prefix):
                agenda.load(entries, now)
        # Last: whoever has claimed something by now was there before it did, and is not taken for dead.
        async for entries in self._pages(ORCHESTRATORS):
            agenda.load(entries, now)
        return cursor

    async def _pages(self, prefix: str) -> AsyncIterator[list[Entry]]:
        after = None
        while True:
            page = await self._scope.engine.scan(self._scope.space, prefix, after=after, limit=SCAN_MAX // 10)
            if page.entries:
                yield page.entries
            if not page.more:
                return
            after = page.entries[-1].key

    async def _follow(self, agenda: Agenda, cursor: str) -> None:
        clock, looked = self._scope.clock, -1
        async for commit in self._scope.engine.watch(self._scope.space, *FOLLOWED, cursor=cursor):
            now = clock.now_ms()
            agenda.apply(commit, now)
            term = self._term
            if term is None:
                continue  # the next one sees it
            if agenda.plans == looked:
                continue  # nothing is due sooner than when this was last asked
            due_at = agenda.next_at()
            if due_at is not None and due_at <= now:
                self._begin_due(term)
                due_at = agenda.next_at()
            if due_at is not None and (term.sleeps_until is None or due_at < term.sleeps_until):
                term.news.set()  # something is due earlier than what is slept for
            looked = agenda.plans

    async def _look(self, term: Term, peer: str) -> None:
        """Whether another orchestrator lives."""
        [entry] = await self._scope.engine.get(self._scope.space, [ORCHESTRATORS + peer])
        now = self._scope.clock.now_ms()
        if entry is None or entry.expires_at is None:
            term.agenda.gone(peer, now)
        else:
            term.agenda.alive(peer, entry.expires_at, now)

    # --- its work ---

    def _begin_due(self, term: Term) -> None:
        if self._stopping or term.lost:
            return
        for work in term.agenda.due(self._scope.clock.now_ms(), WORK_MAX - len(term.tasks)):
            task = asyncio.create_task(self._do(term, work, self._step(term, work)))
            term.tasks.add(task)
            task.add_done_callback(lambda done: self._done(term, done))

    def _step(self, term: Term, work: ToDecide | ToPublish) -> Callable[[], Awaitable[object]]:
        """What to do about it as it is now: the feed may tell that it is another's before the work begins."""
        if isinstance(work, ToDecide):
            return partial(self._decide, term, work, work.state, work.version)
        return partial(self._publish, term, work, work.version, work.claimant)

    def _done(self, term: Term, task: asyncio.Task[None]) -> None:
        was_full = len(term.tasks) >= WORK_MAX
        term.tasks.discard(task)
        if was_full:
            term.news.set()

    async def _do(self, term: Term, work: ToDecide | ToPublish, step: Callable[[], Awaitable[object]]) -> None:
        """One piece of work, whatever becomes of it."""
        clock, retry_ms = self._scope.clock, 0
        try:
            await step()
        except LeaseLost:
            term.lose()
        except Conflict as conflict:
            log.debug("somebody else was faster with %s: %s", work.corr_id, conflict)
            retry_ms = RETRY_MS
        except Error as exc:
            log.warning("correlation %s is tried again: %s", work.corr_id, exc)
            retry_ms = RETRY_MS
        except Exception:
            log.exception("correlation %s failed unexpectedly and is tried again", work.corr_id)
            retry_ms = RETRY_MS
        finally:
            now = clock.now_ms()
            if retry_ms:
                work.tries += 1
                retry_ms = min(retry_ms << min(work.tries, 16), PUBLISH_MS_MAX)
            term.agenda.release(work, now, now + retry_ms if retry_ms else 0)
            if retry_ms or term.lost or term.agenda.is_outgrown:
                term.news.set()
            if term.unnoted and term.noting is None:  # also when a commit was refused that would have taken them out
                term.noting = asyncio.ensure_future(term.note_soon())

    async def _decide(self, term: Term, work: ToDecide, seen: State, version: int) -> None:
        """Decide what has become due. Where a signal has gone again since, it collects on."""
        if (claim := seen.claim) is not None:
            await self._take(term, seen, version, timed_out=claim.timed_out, forced=claim.forced)
            return
        at_once = self._at_once and work.complete and bool(seen.metadata.expected_agents)
        if at_once and await self._decide_at_once(term, work, seen, version):
            return
        if work.complete:
            enough = islice(work.sent.values(), seen.metadata.needed)  # of any agents, far more may have come
            await self._take(term, seen, version, [Present(entry.key) for entry in enough])
        elif millis(seen.metadata.timeout_at) <= self._scope.clock.now_ms():
            await self._take(term, seen, version, timed_out=True)

    async def _take(
        self,
        term: Term,
        seen: State,
        version: int,
        there: Iterable[Condition] = (),
        *,
        timed_out: bool = False,
        forced: bool = False,
        remembered: Remembered | None = None,
    ) -> Decision:
        """Make it this orchestrator's, from the state that was seen, and decide it; Conflict if that is over, or `there` is not."""
        state = claimed(seen, term.id, self._scope.clock.now_ms(), timed_out=timed_out, forced=forced)
        put = claiming(state)
        version = (await term.commit((put,), (VersionIs(put.key, version), *there))).version
        case = await read_case(self._scope, state, forced=forced)
        if state.claim is not None and state.claim.attempt > ATTEMPTS_MAX:
            case = case.abandoned()
        return await self._finish(term, case, version, remembered=remembered)

    async def _decide_at_once(self, term: Term, work: ToDecide, seen: State, version: int) -> bool:
        """Claim and decide in one commit; False when a signal or the context was changed meanwhile: a claim ends that."""
        state = claimed(seen, term.id, self._scope.clock.now_ms())
        case = case_of(state, work.sent) if work.is_told else await read_case(self._scope, state)
        if not case.complete:
            return False
        try:
            await self._finish(term, case, version, case.as_read)
        except Conflict as conflict:
            if conflict.key == STATES + seen.corr_id:
                raise
            return False
        return True

    async def _finish(
        self,
        term: Term,
        case: Case,
        version: int,
        as_read: tuple[Condition, ...] = (),
        remembered: Remembered | None = None,
    ) -> Decision:
        """Ask the strategy; state, decision, outbox and what goes away are one commit."""
        outbox = self._writes_outbox  # as it is now: another task may hear of the mark meanwhile
        decision, told = await conclude(
            case, self.merge, self._strategy, self._version, self._scope, to_publish=bool(outbox)
        )
        more = () if remembered is None else (remembered(decision.id),)
        try:
            unmarked = (Absent(PUBLISHING),) if outbox is None else ()
            return await self._write(term, case, version, decision, told, as_read, unmarked, more)
        except Conflict as conflict:
            if conflict.key != PUBLISHING:
                raise
        self._writes_outbox = True
        decision = msgspec.structs.replace(decision, to_publish=True)
        return await self._write(term, case, version, decision, encode(decision, known=True), as_read, more=more)

    async def _write(
        self,
        term: Term,
        case: Case,
        version: int,
        decision: Decision,
        told: bytes,
        as_read: tuple[Condition, ...],
        unmarked: tuple[Condition, ...] = (),
        more: tuple[Operation, ...] = (),
    ) -> Decision:
        """Commit a decision, and publish it."""
        state, now = case.state, self._scope.clock.now_ms()
        ttl_ms = await kept_ms(self._scope, decision.status)
        finished = State(
            state.corr_id,
            decision.status,
            state.run,
            updated(state, now),
            signals=case.signals,
            claim=state.claim,
            context=case.context,
        )
        operations: list[Operation] = [
            *([claiming(state)] if as_read else []),
            Put(STATES + state.corr_id, encode(finished, known=True), ttl_ms, tag_of(decision.status)),
            Put(MADE + state.corr_id, told, ttl_ms),
            Delete(due_key(state)),
            *more,
        ]
        if decision.to_publish:
            operations.append(Put(OUTBOX + state.corr_id, told, tag="" if self._on_decision is None else term.id))
        room = OPERATIONS_MAX - NOTES_MAX - len(operations)
        operations += map(Delete, case.entries[:room])
        work = None if self._on_decision is None else term.agenda.publishing(state.corr_id, now)
        try:
            conditions = VersionIs(STATES + state.corr_id, version), *as_read, *unmarked
            receipt = await term.commit(tuple(operations), conditions, patience_ms=term.patience_ms())
        except BaseException:
            if work is not None:
                term.agenda.not_publishing(work, self._scope.clock.now_ms())
            raise
        self.decided += 1
        term.agenda.drop(state.corr_id, receipt.version)
        for start in range(room, len(case.entries), OPERATIONS_MAX):
            await term.scope.commit(tuple(map(Delete, case.entries[start : start + OPERATIONS_MAX])))
        if work is not None:
            work.decision = decision
            await self._do(term, work, partial(self._publish, term, work, receipt.version, term.id))
        return decision

    async def _publish(self, term: Term, work: ToPublish, version: int, claimant: str | None) -> None:
        """Publish what is in the outbox at this version: one's own, or that of one who is gone."""
        key = OUTBOX + work.corr_id
        if work.decision is None:
            [entry] = await self._scope.engine.get(self._scope.space, [key])
            if entry is None or entry.version != version:
                return  # it is another's by now; the feed will tell
            work.decision = decode(entry.value, Decision)
        if claimant != term.id:
            put = Put(key, encode(work.decision, known=True), tag=term.id)
            version = (await term.commit((put,), (VersionIs(key, version),))).version
        if self._on_decision is not None and work.decision.id not in self._told:
            try:
                await called(self._on_decision, work.decision)
            except (LeaseLost, asyncio.CancelledError) as exc:  # of something of its own, unless this task is cancelled
                task = asyncio.current_task()
                if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                raise RuntimeError(f"on_decision ended with {type(exc).__name__}: {exc}") from exc
            self._told[work.decision.id] = None
            if len(self._told) > REMEMBERED_MAX:
                del self._told[next(iter(self._told))]
            self.published += 1
        if term.agenda.noting(work, version):
            if not term.unnoted:
                term.unnoted_since = asyncio.get_running_loop().time()
            term.unnoted.append(work)
        else:
            term.news.set()

    async def decide(self, corr_id: str, *, request_id: str | None = None) -> Decision:
        """Decide this one now, with the signals that are there; Conflict if it is decided, or another is at it.

        Repeated under its `request_id` within an hour it gives what it decided then.
        """
        asked = ["decide", check_id(corr_id), self.merge, self._publish_given]
        try:
            before = await answered(Transaction(self._scope), request_id, asked)
            if before is not None:
                return await self._decided_before(corr_id, before.answer)
            remembered = None if request_id is None else partial(remembering, self._scope, request_id, asked)
            return await self._decide_now(corr_id, remembered)
        except AccessDenied as exc:
            raise not_for_agents(self._scope.actor, f"decide correlation {corr_id!r}") from exc

    async def _decided_before(self, corr_id: str, decision_id: str) -> Decision:
        [entry] = await self._scope.engine.get(self._scope.space, [MADE + corr_id])
        decision = None if entry is None else decode(entry.value, Decision)
        if decision is None or decision.id != decision_id:
            raise NotFound(f"what this request decided about correlation {corr_id!r} is not kept any more")
        return decision

    async def _decide_now(self, corr_id: str, remembered: Remembered | None) -> Decision:
        key = STATES + corr_id
        async with self._serving(self._agenda()) as term:
            entry, mark = await self._scope.engine.get(self._scope.space, [key, PUBLISHING])
            if entry is None:
                raise NotFound(f"there is no correlation {corr_id!r}")
            if mark is not None and self._writes_outbox is None:
                self._writes_outbox = True
            state = state_of(entry)
            busy = state.claim is not None and not state.finished and await self._lives(state.claim.orchestrator)
            if state.finished or busy:
                what = "is being decided by another orchestrator" if busy else f"is {state.status} already"
                raise Conflict(f"correlation {corr_id!r} {what}", key=key, condition="version", actual=entry)
            timed_out = millis(state.metadata.timeout_at) <= self._scope.clock.now_ms()  # nobody has decided it since
            decision = await self._take(
                term, state, entry.version, timed_out=timed_out, forced=True, remembered=remembered
            )
            await term.note_now()
            return decision

    async def _lives(self, orchestrator: str) -> bool:
        [entry] = await self._scope.engine.get(self._scope.space, [ORCHESTRATORS + orchestrator])
        return entry is not None

    def __repr__(self) -> str:
        return f"<Orchestrator in {self._scope.space!r} by {self.merge}>"
