"""From the signals of one correlation to its decision: what is read, what the strategy is asked, what is told of it.

A `Case` is all that the decision rests on, read after the claim, when nothing of it can change any more; or as the feed told it before,
and then the decision is committed on condition that nothing has changed (`as_read`). `conclude` asks the
strategy, if there are signals enough, and puts decision, merged context and the facts for the audit together. It writes nothing.

Signals enough: all; or at least `min_agents` when the time is over; or any at all when somebody asked to decide now. Otherwise the
decision is `{action: timeout, reason, partial_signals, missing_signals}` and the correlation has failed. So it has when
the strategy raises: its action is then `error`, and its reason `merge_failed`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.clock import as_datetime, as_text
from holdfast.codec import decode, encode
from holdfast.engine import Absent, Condition, Entry, Put, VersionIs
from holdfast.errors import Error, InvalidInput
from holdfast.ids import new_id
from holdfast.layers.correlation_entries import (
    CONTEXTS,
    SIGNALS,
    STATES,
    Audit,
    Claim,
    Decision,
    Metadata,
    Sent,
    State,
    Status,
    millis,
    tag_of,
)
from holdfast.layers.merging import Merged, Question, Strategy, merged_of, number
from holdfast.layers.patterns import called, timeout_decision
from holdfast.layers.scope import Scope
from holdfast.layers.sections import SOLE, Sections
from holdfast.layers.signals import is_of, signal_of

ERROR_CHARS_MAX: Final = 500
DECISION_BYTES_MAX: Final = 4 * 1024 * 1024
"""Two of them, and a state with its signals and its context, are one commit."""
SIGNALS_BYTES_TOLD: Final = 1024 * 1024
"""So much of signals is repeated in a decision of whatever size."""
ENTRIES_MAX: Final = 1000
"""Sections looked at; no honest correlation has more than AGENTS_MAX."""

log = logging.getLogger("holdfast.orchestrator")


class Case(msgspec.Struct, frozen=True):
    """A claimed correlation, with all there is to decide it by."""

    state: State
    signals: dict[str, dict[str, Any]]
    """By agent, in the order in which they came."""
    context: dict[str, Any] | None
    entries: list[str]
    """The keys of what is told by the state from the decision on, and goes."""
    as_read: tuple[Condition, ...]
    """What holds as long as nobody has changed any of it."""
    forced: bool = False
    size: int = 0
    """The bytes of its signals."""
    invalid: tuple[str, ...] = ()
    """Agents that sent something that is no signal."""
    broken: str | None = None
    """Why nobody should ask the strategy any more."""

    @property
    def missing(self) -> list[str]:
        return [agent for agent in self.state.metadata.expected_agents if agent not in self.signals]

    @property
    def complete(self) -> bool:
        return len(self.signals) >= self.state.metadata.needed

    @property
    def enough(self) -> bool:
        """Whether there is something to merge."""
        if self.complete or self.forced:
            return bool(self.signals)
        least = self.state.metadata.min_agents
        return least is not None and len(self.signals) >= least

    @property
    def timed_out(self) -> bool:
        return not self.complete and self.state.claim is not None and self.state.claim.timed_out

    def abandoned(self) -> Case:
        """Too many orchestrators have ended in the middle of it."""
        return msgspec.structs.replace(self, broken="orchestration_abandoned")


def claimed(state: State, by: str, now: int, *, timed_out: bool = False, forced: bool = False) -> State:
    """The same, as this orchestrator's. What one tries again, because the store was away, is no other attempt: those are counted for who
    dies of it."""
    before = state.claim
    attempt = 1 if before is None else before.attempt + (before.orchestrator != by)
    claim = Claim(by, attempt, as_datetime(now), timed_out, forced)
    return State(state.corr_id, "orchestrating", state.run, updated(state, now), claim=claim)


def claiming(state: State) -> Put:
    """What writes down that it is claimed."""
    return Put(STATES + state.corr_id, encode(state, known=True), tag=tag_of("orchestrating"))


def updated(state: State, now: int) -> Metadata:
    """What is known of it, changed now."""
    return msgspec.structs.replace(state.metadata, last_updated=as_datetime(now))


async def read_case(scope: Scope, state: State, *, forced: bool = False) -> Case:
    """What there is of a correlation now."""
    prefix = Sections(scope, SIGNALS, state.corr_id).prefix
    [context] = await scope.engine.get(scope.space, [CONTEXTS + state.corr_id])
    sent: dict[str, Entry] = {}
    strays: list[str] = []
    invalid: list[str] = []
    after, more = None, True
    while more and (after is None or len(sent) < state.metadata.needed):  # others may have filled the first pages
        page = await scope.engine.scan(scope.space, prefix, after=after, limit=ENTRIES_MAX)
        for entry in page.entries:
            agent, _, instance = entry.key[len(prefix) :].partition("/")
            is_place = instance == SOLE and state.expects(agent)
            if is_place and signal_of(entry.value, agent, state) is not None:
                sent[agent] = entry
                continue
            strays.append(entry.key)
            if is_place and is_of(entry.value, state.run):
                invalid.append(agent)
        after, more = (page.entries[-1].key, page.more) if page.entries else (after, False)
    case = case_of(state, sent, strays, context, forced=forced)
    return msgspec.structs.replace(case, invalid=tuple(invalid)) if invalid else case


def case_of(
    state: State,
    sent: Mapping[str, Entry],
    strays: Sequence[str] = (),
    context: Entry | None = None,
    *,
    forced: bool = False,
) -> Case:
    """All there is: the signals by agent, which were checked, the keys of what else is beside them, the context."""
    keys = [entry.key for entry in sent.values()]
    keys += strays
    signals: dict[str, dict[str, Any]] = {}
    as_read: list[Condition] = []
    size, told = 0, None
    for agent, entry in sorted(sent.items(), key=lambda each: (each[1].version, each[0])):
        signals[agent] = decode(entry.value, Sent).signal
        as_read.append(VersionIs(entry.key, entry.version))
        size += len(entry.value)
    if context is None:
        as_read.append(Absent(CONTEXTS + state.corr_id))
    else:
        as_read.append(VersionIs(context.key, context.version))
        keys.append(context.key)
        told = decode(context.value, dict)
    return Case(state, signals, told, keys, tuple(as_read), forced, size)


async def conclude(
    case: Case, merge: str, strategy: Strategy, version: str, scope: Scope, *, to_publish: bool
) -> tuple[Decision, bytes]:
    """The decision, and the bytes of it."""
    state, claim = case.state, case.state.claim
    errors = len(case.invalid) + (0 if claim is None else claim.attempt - 1)

    def decided(status: Status, merged: Merged) -> tuple[Decision, bytes]:
        return _told(_decision(case, status, merged, errors, merge, version, scope, to_publish), merged)

    if case.broken is not None:
        return decided("failed", _failed(case.broken, "orchestrators ended while they were deciding it"))
    if not case.enough:
        reason = "workflow_timeout" if case.timed_out else "signals_missing"
        lacking = state.metadata.needed - len(case.signals)
        return decided("failed", Merged({**timeout_decision([*case.signals], case.missing, lacking), "reason": reason}))
    try:
        question = Question(state.corr_id, tuple(state.metadata.expected_agents), tuple(case.missing), case.timed_out)
        return decided("completed", merged_of(await called(strategy, case.signals, question)))
    except Exception as exc:  # a strategy is anybody's; whatever it raises is its answer
        log.warning("merging correlation %s by %s failed: %s", state.corr_id, merge, exc)
        errors += 1
        return decided("failed", _failed("merge_failed", f"{type(exc).__name__}: {exc}"))


def _decision(
    case: Case, status: Status, merged: Merged, errors: int, merge: str, version: str, scope: Scope, to_publish: bool
) -> Decision:
    state, claim, now = case.state, case.state.claim, scope.clock.now_ms()
    details = dict(merged.decision)
    return Decision(
        id=new_id(),
        corr_id=state.corr_id,
        run=state.run,
        status=status,
        action=details["action"],
        direction=details.get("direction"),
        size=number(details, "size", 0),
        confidence=number(details, "confidence", 0.0),
        details=details,
        merged={
            "corr_id": state.corr_id,
            "source_signals": _told_sources(case, merged),
            "merged_analysis": dict(merged.analysis),
            "metadata": {
                "merged_at": as_text(now),
                "orchestrator_version": version,
                "merge_pattern": merge,
            },
        },
        audit=Audit(
            input_signals=[*case.signals],
            missing_signals=case.missing,
            processing_ms=0 if claim is None else max(now - millis(claim.at), 0),
            pattern=state.metadata.orchestration_pattern,
            merge=merge,
            timed_out=case.timed_out,
            error_count=errors,
            orchestrator="" if claim is None else claim.orchestrator,
            agent=scope.actor,
            invalid_signals=[*case.invalid],
        ),
        decided_at=as_datetime(now),
        to_publish=to_publish,
    )


def _sources(case: Case) -> dict[str, Any]:
    told = ("agent_version", "enriched_at", "analysis")
    return {agent: {name: signal[name] for name in told if name in signal} for agent, signal in case.signals.items()}


def _told_sources(case: Case, merged: Merged) -> dict[str, Any]:
    """As the strategy gave them, or each signal's; without the analyses where that is too much: the state has the signals."""
    if merged.sources is not None:
        return dict(merged.sources)
    found = _sources(case)
    if case.size <= SIGNALS_BYTES_TOLD or case.size + len(encode(merged.analysis)) <= DECISION_BYTES_MAX:
        return found
    return {agent: {name: value for name, value in told.items() if name != "analysis"} for agent, told in found.items()}


def _failed(reason: str, error: str) -> Merged:
    return Merged({"action": "error", "reason": reason, "error": error[:ERROR_CHARS_MAX]})


def _told(decision: Decision, merged: Merged) -> tuple[Decision, bytes]:
    """As everybody will read it; whatever cannot be JSON, or is no decision, is the strategy's error."""
    if not isinstance(decision.direction, str | None):
        raise InvalidInput("a decision's direction is text or null")
    try:
        told = encode(decision)
        own = (
            len(told)
            if len(told) <= DECISION_BYTES_MAX
            else len(encode([merged.decision, merged.analysis, merged.sources]))
        )
    except Error as exc:
        raise InvalidInput(f"what the strategy gave cannot be stored: {exc}") from exc
    if own > DECISION_BYTES_MAX:
        raise InvalidInput(f"a decision has at most {DECISION_BYTES_MAX:,} bytes, and this one has {own:,}")
    return decode(told, Decision), told
