"""Correlations: signals of several agents about one thing, collected until all are there or the time is over.

    corr = await space.correlation("c-123", expect=["momentum", "risk"], timeout="5m")     # orchestrators make it
    corr = await space.correlation("c-123", wait="5s")                                     # agents find it
    await corr.signal({"analysis": {"confidence": 0.82}})
    decision = await corr.decision(wait="5m")

States: collecting → ready → orchestrating → completed | failed, each step a compare-and-set of the state entry
(`correlation_entries.py` has all keys). An `Orchestrator` takes them from collecting on. A signal is written under the condition
that the state is still the one it was collecting in, so when a correlation is claimed its signals are settled: none comes in
between, and none is lost that was acknowledged.

Duplicates. An agent signals once. The same signal again changes nothing, before and after the end; another one is a Conflict,
unless `replace=True` says that it is meant. Late ones, after the claim or the timeout, are kept beside it, the last of each
agent, and shown by `view()`; they change no state. A correlation that was cleaned away, or never made, is NotFound: a
signal does not bring it back. An agent that may be faster than the orchestrator waits for it with `wait=`.

How it fails. A signal that is not well formed is InvalidInput, one of an agent nobody expects too. Making one that exists
with other expectations is a Conflict; with the same it is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from msgspec import convert

from holdfast.clock import Duration, as_datetime, duration_ms, sleep_or, wait_ms
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Entry, Put, VersionIs
from holdfast.errors import AccessDenied, Conflict, InvalidInput, NotFound
from holdfast.identity import check_agent
from holdfast.ids import new_id
from holdfast.layers.answers import answered, once, remembering
from holdfast.layers.coordination import Coordination
from holdfast.layers.correlation_entries import (
    CONTEXTS,
    FINISHED,
    LATE,
    MADE,
    OPEN,
    OUTBOX,
    SIGNALS,
    STATES,
    STATUSES,
    Decision,
    Metadata,
    Sent,
    State,
    Status,
    check_id,
    due_key,
    kept_ms,
    not_for_agents,
    state_of,
    status_in,
    tag_of,
)
from holdfast.layers.patterns import AGENTS_MAX, PATTERNS, profile_of
from holdfast.layers.scope import Scope
from holdfast.layers.sections import SOLE, Sections
from holdfast.layers.signals import SIGNAL_BYTES_MAX, checked_signal, gather, same_signal, signal_of
from holdfast.layers.transact import Transaction, transact

TIMEOUT_MS: Final = 300_000
STATES_READ: Final = 100
"""Open correlations that a list looks at together."""
CONTEXT_BYTES_MAX: Final = 1024 * 1024
CONTEXT_FIELDS: Final[dict[str, Any]] = {
    "instrument_history": {},
    "recent_decisions": [],
    "market_regime": None,
    "portfolio_state": {},
}
"""What agents find in a context where nobody published it."""

SignalOutcome: TypeAlias = Literal["accepted", "duplicate", "late"]
Items = list


@dataclass(frozen=True, slots=True)
class Signalled:
    """What became of a signal."""

    outcome: SignalOutcome
    version: int
    """Of the entry that holds it."""


@dataclass(frozen=True, slots=True)
class CorrelationView:
    """A correlation as everybody may see it."""

    corr_id: str
    status: Status
    signals: dict[str, dict[str, Any]]
    """By agent, in the order in which they came."""
    missing: tuple[str, ...]
    missing_count: int
    late: dict[str, dict[str, Any]]
    metadata: Metadata
    version: int
    expires_at: datetime | None


class Correlation:
    """One correlation, seen by one agent. Made by `space.correlation`."""

    def __init__(self, scope: Scope, coordination: Coordination, corr_id: str) -> None:
        self.id = corr_id
        self._scope = scope
        self._coordination = coordination
        self._key = STATES + corr_id
        self._outbox = OUTBOX + corr_id
        self._signals = Sections(scope, SIGNALS, corr_id)
        self._known: tuple[State, int] | None = None

    @cached_property
    def context(self) -> SharedContext:
        """What orchestrators let the agents know."""
        return SharedContext(self._scope, self.id)

    @cached_property
    def _late(self) -> Sections:
        return Sections(self._scope, LATE, self.id)

    # --- making and finding ---

    async def make(self, metadata: Metadata, *remembered: Put) -> bool:
        """Make it, and write what is to be remembered of that; False when there is one that was made with the same expectations."""
        state = State(self.id, "collecting", new_id(), metadata)
        put = Put(self._key, encode(state, known=True), tag=tag_of("collecting"))
        operations = put, Put(due_key(state), encode(state.run)), *remembered
        try:
            receipt = await self._scope.commit(operations, (Absent(self._key), Absent(self._outbox)))
        except Conflict as conflict:
            if conflict.key == self._outbox:
                raise Conflict(
                    f"correlation {self.id!r} was decided before, and that decision has not been published yet; choose another id, "
                    "or wait until it is",
                    key=self._outbox,
                    condition="absent",
                    actual=conflict.actual,
                ) from None
            if conflict.actual is None or conflict.key != self._key:
                raise
            found = state_of(conflict.actual)
            if _agreed(found.metadata) != _agreed(metadata):
                raise Conflict(
                    f"correlation {self.id!r} exists already and expects something else: {_told(found.metadata)}; "
                    "find it without saying what it expects, or choose another id",
                    key=self._key,
                    condition="absent",
                    actual=conflict.actual,
                ) from None
            self._known = found, conflict.actual.version
            return False
        except AccessDenied as exc:
            raise not_for_agents(self._scope.actor, f"make correlation {self.id!r}") from exc
        self._known = state, receipt.version
        return True

    @property
    def version(self) -> int:
        """Of its state, as it was last seen."""
        return 0 if self._known is None else self._known[1]

    def as_made(self, metadata: Metadata, version: int) -> CorrelationView:
        """As everybody saw it when it was made, at this version."""
        missing = tuple(metadata.expected_agents)
        return CorrelationView(self.id, "collecting", {}, missing, metadata.needed, {}, metadata, version, None)

    async def find(self, wait: Duration | None = 0) -> None:
        """NotFound when there is none, or none comes within that time."""
        root = await self._read() if wait == 0 else await self._await(lambda entry: entry is not None, wait)
        if root is None:
            raise self._not_found()

    # --- what agents do ---

    async def signal(
        self,
        signal: Mapping[str, Any],
        *,
        agent: str | None = None,
        replace: bool = False,
        request_id: str | None = None,
    ) -> Signalled:
        """Send this agent's signal. `agent` is for orchestrators, who may send one on another's behalf.

        Repeated under its `request_id` within an hour it gives what it gave before, and changes nothing.
        """
        agent = agent or self._scope.actor
        now_ms = self._scope.clock.now_ms()
        fields = checked_signal(signal, agent, self.id, now_ms)
        if self._known is not None and not (replace or request_id) and self._known[0].collects(now_ms):
            # The usual case, without a read: it is collecting as it was, and this is the agent's first signal.
            state, version = self._known
            put = self._put(self._signals, state, agent, fields)
            try:
                done = await self._scope.send((put,), (VersionIs(self._key, version), Absent(put.key)))
            except Conflict:
                self._known = None  # it has moved on, or the agent has signalled before
            else:
                self._scope.session.saw(done.version)
                return Signalled("accepted", done.version)
        begun: Items[Transaction] = []
        told = decode(encode(fields), dict)  # as it will be read, to be compared with what was
        asked = ["signal", self.id, agent, {name: told[name] for name in signal}, replace]

        def begin() -> Transaction:
            begun.append(Transaction(self._scope))
            return begun[-1]

        async def work(tx: Transaction) -> tuple[SignalOutcome, int]:
            if (before := await answered(tx, request_id, asked)) is not None:
                return before.answer, before.version
            outcome, version = await self._signal_in(tx, agent, told, replace)
            if request_id is not None and tx.operations:
                tx.put(remembering(self._scope, request_id, asked, outcome))
            return outcome, version

        outcome, version = await transact(begin, work)
        receipt = begun[-1].receipt
        return Signalled(outcome, version or (0 if receipt is None else receipt.version))

    async def _signal_in(
        self, tx: Transaction, agent: str, fields: dict[str, Any], replace: bool
    ) -> tuple[SignalOutcome, int]:
        """What becomes of it, and where it is if that was there before."""
        key = self._signals.key(agent, SOLE)
        root, before = await tx.read(self._key, key)
        if root is None:
            raise self._not_found()
        state = state_of(root)
        counted = state.signals.get(agent)
        if not state.finished and before is not None:
            counted = signal_of(before.value, agent, state)
        if counted is not None and same_signal(counted, fields):
            return "duplicate", root.version if before is None else before.version
        if not state.collects(self._scope.clock.now_ms()):
            tx.put(self._put(self._late, state, agent, fields, await self._late_ms(root)))
            return "late", 0
        if counted is not None and not replace:
            raise Conflict(
                f"{agent!r} has sent another signal to correlation {self.id!r}; to revise that, send it with replace",
                key=key,
                condition="absent",
                actual=before,
            )
        tx.put(self._put(self._signals, state, agent, fields))
        return "accepted", 0

    def _put(self, where: Sections, state: State, agent: str, fields: dict[str, Any], ttl_ms: int | None = None) -> Put:
        if not state.expects(agent):
            expected = ", ".join(state.metadata.expected_agents)
            raise InvalidInput(f"correlation {self.id!r} expects no signal of {agent!r}; it expects {expected}")
        put = where.put(Sent(state.run, fields), agent=agent, instance=SOLE, ttl_ms=ttl_ms)
        if len(put.value) > SIGNAL_BYTES_MAX:
            raise InvalidInput(
                f"a signal has at most {SIGNAL_BYTES_MAX:,} bytes, not {len(put.value):,}; keep the rest as a blob"
            )
        return put

    async def _late_ms(self, root: Entry) -> int:
        """A late signal is kept as long as what it came too late for."""
        if root.expires_at is not None:
            return max(root.expires_at - self._scope.clock.now_ms(), 1)
        return await kept_ms(self._scope, None) or TIMEOUT_MS

    # --- what everybody sees ---

    async def signals(self) -> dict[str, dict[str, Any]]:
        """The signals so far, by agent, in the order in which they came."""
        return (await self.view()).signals

    async def status(self) -> Status:
        """collecting, ready, orchestrating, completed or failed."""
        return (await self.view()).status

    async def view(self) -> CorrelationView:
        """Status, signals, who is missing, what came late."""
        root = await self._read()
        if root is None:
            raise self._not_found()
        state = state_of(root)
        signals = state.signals
        if not state.finished:
            sent = (await gather(self._scope, [state]))[self.id]
            state, signals = sent.shown(state), sent.signals
        late = (await gather(self._scope, [state], LATE))[self.id].signals
        metadata = state.metadata
        missing = tuple(agent for agent in metadata.expected_agents if agent not in signals)
        lacking = max(metadata.needed - len(signals), 0)
        expires_at = None if root.expires_at is None else as_datetime(root.expires_at)
        return CorrelationView(
            self.id, state.status, signals, missing, lacking, late, metadata, root.version, expires_at
        )

    async def decision(self, wait: Duration | None = 0) -> Decision | None:
        """What was decided, as soon as it is, or None when it is not within that time. For orchestrators.

        `wait` is 0 by default; None waits as long as it takes.
        """
        root = await self._await(lambda entry: entry is None or state_of(entry).finished, wait, tell_last=True)
        if root is None:
            raise self._not_found()
        if not state_of(root).finished:
            return None
        try:
            [entry] = await self._scope.engine.get(self._scope.space, [MADE + self.id])
        except AccessDenied as exc:
            raise not_for_agents(self._scope.actor, f"see what was decided about {self.id!r}") from exc
        return None if entry is None else decode(entry.value, Decision)

    async def _await(self, enough: Any, wait: Duration | None, *, tell_last: bool = False) -> Entry | None:
        """The state entry as soon as it is as wanted; None, or how it is, when it is not in time."""
        root = await self._read()
        given = wait_ms(wait)
        if enough(root) or given == 0:
            return root
        clock = self._scope.clock
        deadline = None if given is None else clock.now_ms() + given
        async with self._coordination.awaiting(self._scope, STATES).listening(self._key) as changed:
            while not enough(root := await self._read()):
                if not await sleep_or(clock, deadline, changed):
                    return root if tell_last else None
                changed.clear()
        return root

    async def _read(self) -> Entry | None:
        [root] = await self._scope.engine.get(self._scope.space, [self._key])
        self._known = None if root is None else (state_of(root), root.version)
        return root

    def _not_found(self) -> NotFound:
        return NotFound(
            f"there is no correlation {self.id!r}: it was never made, or it ended long ago and was cleaned away. "
            "A signal makes none; an orchestrator does, and says whom it expects"
        )

    def __repr__(self) -> str:
        return f"<Correlation {self.id!r} as {self._scope.actor!r}>"


class SharedContext:
    """What orchestrators let the agents of a correlation know."""

    def __init__(self, scope: Scope, corr_id: str) -> None:
        self._scope = scope
        self._id = corr_id
        self._key = CONTEXTS + corr_id
        self._state = STATES + corr_id

    async def publish(self, fields: Mapping[str, Any], *, request_id: str | None = None) -> dict[str, Any]:
        """Add or replace these fields, as long as it is collecting, and give what agents see then. For orchestrators.

        Repeated under its `request_id` within an hour it gives what it gave before, and changes nothing.
        """
        asked = ["context", self._id, dict(fields)]

        async def work(tx: Transaction) -> dict[str, Any]:
            seen: dict[str, Any] = await once(tx, request_id, asked, lambda: add(tx))
            return seen

        async def add(tx: Transaction) -> dict[str, Any]:
            root, context = await tx.read(self._state, self._key)
            if root is None:
                raise NotFound(f"there is no correlation {self._id!r}")
            if state_of(root).status != "collecting":
                raise Conflict(
                    f"correlation {self._id!r} is not collecting, so its context stays as it is",
                    key=self._state,
                    condition="version",
                    actual=root,
                )
            value = encode({**({} if context is None else decode(context.value, dict)), **fields})
            if len(value) > CONTEXT_BYTES_MAX:
                raise InvalidInput(f"a context has at most {CONTEXT_BYTES_MAX:,} bytes, not {len(value):,}")
            tx.put(Put(self._key, value))
            return _seen(decode(value, dict))

        try:
            return await transact(lambda: Transaction(self._scope), work)
        except AccessDenied as exc:
            raise not_for_agents(self._scope.actor, f"publish a context for {self._id!r}") from exc

    async def read(self) -> dict[str, Any]:
        """What was published; the usual fields are there, empty, also when they were not."""
        root, context = await self._scope.engine.get(self._scope.space, [self._state, self._key])
        if root is None:
            raise NotFound(f"there is no correlation {self._id!r}")
        told = decode(context.value, dict) if context is not None else state_of(root).context or {}
        return _seen(told)


def _seen(context: dict[str, Any]) -> dict[str, Any]:
    """A context with the usual fields, empty where nobody published them."""
    return {**decode(encode(CONTEXT_FIELDS), dict), **context}


class Correlations:
    """The correlations of a space, as `space.correlations`."""

    def __init__(self, scope: Scope, coordination: Coordination) -> None:
        self._scope = scope
        self._coordination = coordination

    def at(self, id: str) -> Correlation:
        """The one of this id, unread: whether there is one, what is asked of it tells."""
        return Correlation(self._scope, self._coordination, check_id(id))

    async def find(self, id: str, wait: Duration | None = 0) -> Correlation:
        """The one of this id; NotFound when there is none, or none comes within that time."""
        correlation = self.at(id)
        await correlation.find(wait)
        return correlation

    async def make(
        self,
        id: str,
        expect: Sequence[str] | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - of the correlation, not of this call
        min_agents: int | None = None,
        profile: str | None = None,
        pattern: str = "fan_in",
    ) -> Correlation:
        """Make one, or find the one that was made with the same expectations; as `space.correlation(id, expect=…)`."""
        correlation = self.at(id)
        now_ms = self._scope.clock.now_ms()
        await correlation.make(metadata_of(now_ms, expect, timeout, min_agents, profile, pattern))
        return correlation

    async def make_once(
        self,
        id: str,
        request_id: str | None,
        *,
        expect: Sequence[str] | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - of the correlation, not of this call
        min_agents: int | None = None,
        profile: str | None = None,
        pattern: str = "fan_in",
    ) -> CorrelationView:
        """Make one, or find it, and see it. Repeated under its request id within an hour it is seen as it was made, and not made anew."""
        correlation = self.at(id)
        metadata = metadata_of(self._scope.clock.now_ms(), expect, timeout, min_agents, profile, pattern)
        asked = ["correlation", id, _agreed(metadata)]
        before = await answered(Transaction(self._scope), request_id, asked)
        if before is not None:
            return correlation.as_made(convert(before.answer, Metadata), before.version)
        remembered = () if request_id is None else (remembering(self._scope, request_id, asked, metadata),)
        if await correlation.make(metadata, *remembered):
            return correlation.as_made(metadata, correlation.version)
        return await correlation.view()

    async def list(
        self, *, status: Status | None = None, prefix: str = "", after: str | None = None, limit: int = 1000
    ) -> Items[State]:
        """Correlations by id, as `view` shows them, those that ended and are kept included."""
        if status is not None and status not in STATUSES:
            raise InvalidInput(f"there is no status {status!r:.60}; there are {', '.join(STATUSES)}")
        if not 0 < limit <= SCAN_MAX:
            raise InvalidInput(f"a list has between 1 and {SCAN_MAX:,} correlations, not {limit!r}")
        if status is not None and status not in FINISHED:
            return await self._open(status, prefix, after or "", limit)
        found: Items[State] = []
        last = None if after is None else STATES + after
        while True:
            page = await self._scope.engine.scan(self._scope.space, STATES + prefix, after=last, limit=limit)
            for entry in page.entries:
                if status is None or status_in(entry.tag) == status:
                    found.append(state_of(entry))
                if len(found) == limit:
                    return await self._shown(found)
            if not page.more:
                return await self._shown(found)
            last = page.entries[-1].key

    async def _open(self, status: Status, prefix: str, after: str, limit: int) -> Items[State]:
        """Those that are not finished, from the index of these: those that are, and are kept, may be far more."""
        ids: Items[str] = []
        last: str | None = None
        while True:
            page = await self._scope.engine.scan(self._scope.space, OPEN, after=last, limit=SCAN_MAX // 10)
            named = (entry.key[len(OPEN) :].partition("/")[2] for entry in page.entries)
            ids += [name for name in named if name.startswith(prefix) and name > after]
            if not page.more:
                break
            last = page.entries[-1].key
        ids.sort()
        found: Items[State] = []
        for start in range(0, len(ids), STATES_READ):
            keys = [STATES + name for name in ids[start : start + STATES_READ]]
            entries = await self._scope.engine.get(self._scope.space, keys)
            shown = await self._shown([state_of(entry) for entry in entries if entry is not None])
            found += [state for state in shown if state.status == status]
            if len(found) >= limit:
                return found[:limit]
        return found

    async def _shown(self, states: Items[State]) -> Items[State]:
        """As `view` shows them."""
        sent = await gather(self._scope, [state for state in states if not state.finished])
        return [state if state.finished else sent[state.corr_id].shown(state) for state in states]


def metadata_of(
    now_ms: int,
    expect: Sequence[str] | int | None,
    timeout: Duration | None,
    min_agents: int | None,
    profile: str | None,
    pattern: str,
) -> Metadata:
    """What a new correlation agrees on."""
    given = None if profile is None else profile_of(profile)
    if expect is None and given is not None:
        expect = given.agents
    names: Items[str] = []
    if isinstance(expect, int) and not isinstance(expect, bool):
        needed = expect
    elif isinstance(expect, Sequence) and not isinstance(expect, str):
        names = [*expect]
        needed = len(names)
        for name in names:
            check_agent(name)
        if len(set(names)) != needed:
            raise InvalidInput(f"expect names an agent twice: {names!r:.200}")
    else:
        raise InvalidInput("expect is a list of agents' names, or how many agents are needed")
    if not 0 < needed <= AGENTS_MAX:
        raise InvalidInput(f"a correlation expects between 1 and {AGENTS_MAX} agents, not {needed}")
    if min_agents is not None and (type(min_agents) is not int or not 0 < min_agents <= needed):
        raise InvalidInput(f"min_agents is between 1 and the {needed} that are expected, not {min_agents!r}")
    if pattern not in PATTERNS:
        raise InvalidInput(f"there is no pattern {pattern!r:.60}; there are {', '.join(PATTERNS)}")
    timeout_ms = TIMEOUT_MS if given is None else given.timeout_ms
    if timeout is not None:
        timeout_ms = duration_ms(timeout, name="timeout")
    now = as_datetime(now_ms)
    return Metadata(now, now, names, as_datetime(now_ms + timeout_ms), pattern, needed, min_agents)


def _told(metadata: Metadata) -> str:
    """What was agreed, in a sentence."""
    agreed = _agreed(metadata)
    who = ", ".join(metadata.expected_agents) or f"any {metadata.needed} agents"
    least = "" if metadata.min_agents is None else f", at least {metadata.min_agents}"
    return f"{who} within {agreed['timeout']:g} s{least}, pattern {metadata.orchestration_pattern}"


def _agreed(metadata: Metadata) -> dict[str, Any]:
    """What must be the same for it to be the same correlation; the times differ."""
    return {
        "expect": metadata.expected_agents or metadata.needed,
        "min_agents": metadata.min_agents,
        "pattern": metadata.orchestration_pattern,
        "timeout": (metadata.timeout_at - metadata.created_at).total_seconds(),
    }
