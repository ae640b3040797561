"""Orchestrators: each correlation is decided once, in one commit, and published; whoever dies is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Conflict, Decision, InvalidInput, ManualClock, NotFound, Question, Space, Store, Unavailable
from holdfast.codec import decode, encode
from holdfast.engine import CONDITIONS_MAX, SYSTEM_ACTOR, Batch, Delete, Engine, Entry, Page, Present, Put, Receipt
from holdfast.layers import agenda, terms
from holdfast.layers.correlation_entries import (
    MADE,
    OPEN,
    ORCHESTRATORS,
    OUTBOX,
    SCHEMA_VERSION,
    STATES,
    Claim,
    State,
    status_in,
    tag_of,
)
from holdfast.layers.orchestrator import ATTEMPTS_MAX
from holdfast.layers.sections import SECTIONS
from holdfast.layers.terms import NOTE_S
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything
from tests.layers.desk import BOTH, DEADLINE_S, MOMENTUM, RISK, mortal, running, seen_by, signal, soon

FUSION = "momentum_risk_fusion"


@pytest.fixture
def desk(store: Store) -> Space:
    return seen_by(store, "orchestrator")


async def send_both(store: Store, corr_id: str) -> None:
    await signal(store, corr_id, "momentum", MOMENTUM)
    await signal(store, corr_id, "risk", RISK)


async def keys(space: Space, *prefixes: str) -> list[str]:
    engine = space._scope.engine
    return [entry.key for prefix in prefixes for entry in (await engine.scan(space.name, prefix)).entries]


async def until(condition: Any) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await soon(wait())


# --- deciding ---


async def test_a_correlation_is_decided_when_its_last_signal_is_there(store: Store, desk: Space) -> None:
    published: list[Decision] = []
    async with running(desk.orchestrator(merge=FUSION, on_decision=published.append, version="9.1")):
        correlation = await desk.correlation("c-1", expect=BOTH)
        await correlation.context.publish({"market_regime": "risk-on"})
        await send_both(store, "c-1")
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert (decision.action, decision.direction, decision.size, decision.confidence) == ("trade", "buy", 8750, 0.632)
    assert decision.merged["corr_id"] == "c-1"
    assert decision.merged["merged_analysis"]["position_sizing"]["final_size"] == 8750
    assert decision.merged["metadata"]["merge_pattern"] == FUSION
    assert decision.merged["metadata"]["orchestrator_version"] == "9.1"
    audit = decision.audit
    assert (audit.input_signals, audit.pattern, audit.timed_out, audit.error_count) == (BOTH, "fan_in", False, 0)
    assert audit.processing_ms >= 0
    assert published == [decision]
    view = await correlation.view()
    assert (view.status, list(view.signals)) == ("completed", BOTH)
    assert (await correlation.context.read())["market_regime"] == "risk-on"


async def test_the_decisions_of_a_busy_orchestrator_go_with_other_commits(
    store: Store, desk: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[str] = []
    patience: list[int] = []
    patience_ms = terms.Term.patience_ms
    monkeypatch.setattr(terms.Term, "patience_ms", lambda term: patience.append(patience_ms(term)) or patience[-1])
    orchestrator = desk.orchestrator(merge=FUSION, on_decision=lambda each: decided.append(each.corr_id))
    async with running(orchestrator):
        await until(lambda: orchestrator._term is not None)
        for busy_s in (0.0, 1000.0, 1000.0, 0.0):
            monkeypatch.setattr(terms, "BUSY_S", busy_s)
            corr_id = f"c-{len(decided)}"
            await desk.correlation(corr_id, expect=BOTH)
            await send_both(store, corr_id)
            await until(lambda: decided[-1:] == [corr_id])  # noqa: B023
    assert patience == [0, terms.PATIENCE_MS, terms.PATIENCE_MS, 0], "what comes after a pause is committed at once"


async def test_the_decision_is_one_commit(store: Store, desk: Space) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    cursor = await desk.cursor()
    async with running(desk.orchestrator(merge=FUSION, on_decision=lambda decision: None)):
        await soon(correlation.decision(wait=None))
    commits = [commit async for commit in desk._scope.engine.watch(desk.name, cursor=cursor, live=False)]
    [deciding] = [commit for commit in commits if any(change.key == MADE + "c-1" for change in commit.changes)]
    assert {(change.key, change.exists) for change in deciding.changes} == {
        (STATES + "c-1", True),
        (MADE + "c-1", True),
        (OUTBOX + "c-1", True),
        (next(iter(change.key for change in deciding.changes if change.key.startswith(OPEN))), False),
        ("sections/correlations/c-1/momentum/-", False),
        ("sections/correlations/c-1/risk/-", False),
    }
    assert await keys(desk, OPEN, OUTBOX, SECTIONS.root, ORCHESTRATORS) == []


async def test_a_shipped_strategy_claims_and_decides_in_one_commit_and_the_next_one_empties_the_outbox(
    store: Store, desk: Space
) -> None:
    for number in range(2):
        await desk.correlation(f"c-{number}", expect=BOTH)
        await send_both(store, f"c-{number}")
    cursor = await desk.cursor()
    orchestrator = desk.orchestrator(merge=FUSION, on_decision=lambda decision: None)
    async with running(orchestrator):
        await until(lambda: orchestrator.published == 2)
    commits = [
        commit async for commit in desk._scope.engine.watch(desk.name, STATES, OUTBOX, cursor=cursor, live=False)
    ]
    steps = [
        [status_in(change.tag) for change in commit.changes if change.key.startswith(STATES)] for commit in commits
    ]
    assert [step for step in steps if step] == [["orchestrating", "completed"]] * 2
    assert len(commits) <= 3, "two decisions, and at most one commit more for the outbox"
    assert await keys(desk, OUTBOX) == []


class Read(Wrapper):
    """An engine that notes what is read."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        self.keys += keys
        return await super().get(space, keys)

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        self.keys.append(prefix)
        return await super().scan(space, prefix, **options)


@pytest.mark.parametrize("context", [None, {"market_regime": "risk-on"}])
async def test_what_the_feed_has_told_is_decided_without_a_read(
    store: Store, desk: Space, context: dict[str, Any] | None
) -> None:
    engine = Read(desk._scope.engine)
    view = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    async with running(view.orchestrator(merge="momentum_risk_fusion")):
        await soon(_until_there_is_one(desk))
        correlation = await desk.correlation("c-1", expect=BOTH)
        if context is not None:
            await correlation.context.publish(context)
        engine.keys.clear()
        await signal(store, "c-1", "momentum", MOMENTUM)
        await signal(store, "c-1", "risk", RISK)
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert decision.action == "trade"
    assert [key for key in engine.keys if "c-1" in key] == (
        [] if context is None else ["correlations/context/c-1", "sections/correlations/c-1/"]
    )
    [state] = await desk.correlations.list()
    assert (list(state.signals), state.context) == (BOTH, context)


async def _until_there_is_one(desk: Space) -> None:
    """Wait for an orchestrator that serves, and so follows the feed."""
    while not (await desk._scope.engine.scan(desk.name, ORCHESTRATORS)).entries:
        await asyncio.sleep(0.002)


class Meanwhile(Wrapper):
    """An engine on which something happens just before the first decision is written."""

    def __init__(self, inner: Engine, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self.happens: Callable[[], Awaitable[object]] | None = happens

    async def commit(self, space: str, batch: Batch) -> Receipt:
        decides = any(isinstance(op, Put) and op.key.startswith(MADE) for op in batch.operations)
        if self.happens is not None and decides:
            happens, self.happens = self.happens, None
            await happens()
        return await super().commit(space, batch)


@pytest.mark.parametrize("what", ["signal", "context"])
async def test_a_decision_rests_on_what_was_there_when_it_was_written(store: Store, desk: Space, what: str) -> None:
    """An agent revises its signal, or the context is published, after the orchestrator has read them."""
    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    risk = await seen_by(store, "risk").correlation("c-1")
    revised = {"analysis": {**RISK["analysis"], "risk_level": "blocked"}}

    async def happens() -> None:
        if what == "signal":
            assert (await risk.signal(revised, replace=True)).outcome == "accepted"
        else:
            await correlation.context.publish({"market_regime": "risk-off"})

    engine = Meanwhile(desk._scope.engine, happens)
    view = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    async with running(view.orchestrator(merge=FUSION)):
        decision = await soon(correlation.decision(wait=None))
    assert engine.happens is None
    assert decision is not None
    assert decision.action == ("no_trade" if what == "signal" else "trade")
    signals = (await correlation.view()).signals
    assert signals["risk"]["analysis"]["risk_level"] == ("blocked" if what == "signal" else "medium")
    assert (await correlation.context.read())["market_regime"] == (None if what == "signal" else "risk-off")


@pytest.mark.parametrize("version", ["1.0.0", SCHEMA_VERSION])
async def test_every_state_that_is_stored_satisfies_the_shipped_schema(
    store: Store, desk: Space, clock: ManualClock, version: str
) -> None:
    await desk.schemas.register_shipped("correlation_state")
    cursor = await desk.cursor()

    async def raises(signals: Any, question: Question) -> dict[str, Any]:
        raise RuntimeError("no")

    async with running(desk.orchestrator(merge=FUSION)):
        complete = await desk.correlation("complete", expect=BOTH)
        await complete.context.publish({"market_regime": "risk-on"})
        await send_both(store, "complete")
        await soon(complete.decision(wait=None))
        late = await desk.correlation("late", expect=2, timeout="1s", min_agents=1, pattern="sequential")
        await signal(store, "late", "risk", {**RISK, "schema_version": "1.1.0", "source_signal": {"id": 1}})
        waiting = asyncio.ensure_future(late.decision(wait=None))
        while not waiting.done():
            await asyncio.sleep(0.005)
            clock.advance("200ms")
    async with running(desk.orchestrator(merge=raises)):
        failed = await desk.correlation("failed", expect=["risk"])
        await signal(store, "failed", "risk", RISK)
        await soon(failed.decision(wait=None))
    await desk.correlation("open", expect=BOTH)
    seen: set[str] = set()
    async for commit in desk._scope.engine.watch(desk.name, STATES, cursor=cursor, live=False):
        for change in commit.changes:
            value = decode(change.value, dict)
            await desk.schemas.validate("correlation_state", value, version)
            assert value["schema_version"] == SCHEMA_VERSION
            assert isinstance(value["metadata"]["orchestration_pattern"], str)
            seen.add(value["status"])
    assert seen == {"collecting", "orchestrating", "completed", "failed"}


async def test_what_was_there_before_it_started_is_decided_too(store: Store, desk: Space) -> None:
    for number in range(3):
        await desk.correlation(f"c-{number}", expect=BOTH)
        await send_both(store, f"c-{number}")
    orchestrator = desk.orchestrator(merge=FUSION)
    async with running(orchestrator):
        for number in range(3):
            assert await soon((await desk.correlation(f"c-{number}")).decision(wait=None)) is not None
    assert orchestrator.decided == 3
    assert await keys(desk, OUTBOX) == [], "without on_decision nothing waits to be published"


async def test_of_many_orchestrators_one_decides_and_publishes(store: Store, desk: Space) -> None:
    published: list[str] = []
    many = [
        desk.orchestrator(merge=FUSION, on_decision=lambda decision: published.append(decision.corr_id))
        for _ in range(5)
    ]
    async with running(*many):
        for number in range(10):
            await desk.correlation(f"c-{number}", expect=BOTH)
        await asyncio.gather(*(send_both(store, f"c-{number}") for number in range(10)))
        clock = desk._scope.clock
        while len(published) < 10:
            await asyncio.sleep(0.005)
            clock.advance("20ms")  # type: ignore[attr-defined]
    assert sorted(published) == sorted(f"c-{number}" for number in range(10))
    assert sum(each.decided for each in many) == 10


async def test_of_many_that_all_try_at_once_one_claims(
    store: Store, desk: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for those before it: what is left is the compare-and-set."""
    monkeypatch.setattr(agenda, "STEP_MS", 0)
    published: list[str] = []
    many = [desk.orchestrator(on_decision=lambda each: published.append(each.corr_id)) for _ in range(4)]
    async with running(*many):
        await until(lambda: all(each._term is not None for each in many))
        cursor = await desk.cursor()
        for number in range(5):
            await desk.correlation(f"c-{number}", expect=BOTH)
            await send_both(store, f"c-{number}")
        await until(lambda: len(published) == 5)
        await asyncio.sleep(0.02)
    commits = [commit async for commit in desk._scope.engine.watch(desk.name, STATES, cursor=cursor, live=False)]
    steps = Counter((change.key, status_in(change.tag)) for commit in commits for change in commit.changes)
    assert set(steps.values()) == {1}, "each state was taken once"
    assert len(steps) == 5 * 3
    assert sorted(published) == [f"c-{number}" for number in range(5)]


async def test_a_timeout_is_a_decision_that_names_who_is_missing(store: Store, desk: Space, clock: ManualClock) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH, timeout="5m")
    await signal(store, "c-1", "risk", RISK)
    async with running(desk.orchestrator(merge=FUSION)):
        clock.advance("299s")
        await asyncio.sleep(0.02)
        assert await correlation.decision() is None
        clock.advance("1s")
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert decision.details == {
        "action": "timeout",
        "reason": "workflow_timeout",
        "partial_signals": ["risk"],
        "missing_signals": ["momentum"],
        "missing_count": 1,
    }
    assert (decision.status, decision.audit.timed_out) == ("failed", True)
    assert await correlation.status() == "failed"


async def test_enough_agents_at_the_timeout_give_a_partial_decision(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    asked: list[Question] = []

    def strategy(signals: Any, question: Question) -> dict[str, Any]:
        asked.append(question)
        return {"action": "monitor", "confidence": 0.3}

    correlation = await desk.correlation("c-1", expect=BOTH, timeout="1m", min_agents=1)
    await signal(store, "c-1", "risk", RISK)
    async with running(desk.orchestrator(merge=strategy)):
        clock.advance("1m")
        decision = await soon(correlation.decision(wait=None))
    assert asked == [Question("c-1", ("momentum", "risk"), ("momentum",), timed_out=True)]
    assert decision is not None
    assert (decision.action, decision.status, decision.audit.timed_out) == ("monitor", "completed", True)
    assert (decision.audit.input_signals, decision.audit.missing_signals) == (["risk"], ["momentum"])


async def test_a_strategy_that_raises_or_answers_nonsense_fails_its_correlation_alone(
    store: Store, desk: Space
) -> None:
    def strategy(signals: Any, question: Question) -> Any:
        answers = {"c-1": ZeroDivisionError("by nothing"), "c-2": {"size": 1}, "c-3": {"action": "x", "size": object()}}
        answer: Any = answers.get(question.corr_id, {"action": "monitor"})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with running(desk.orchestrator(merge=strategy)):
        decisions = []
        for number in range(1, 5):
            correlation = await desk.correlation(f"c-{number}", expect=BOTH)
            await send_both(store, f"c-{number}")
            decisions.append(await soon(correlation.decision(wait=None)))
    told = [(each.action, each.status, each.audit.error_count) for each in decisions if each is not None]
    assert told == [("error", "failed", 1)] * 3 + [("monitor", "completed", 0)]
    assert decisions[0] is not None
    assert decisions[0].details["error"] == "ZeroDivisionError: by nothing"


async def test_a_person_may_decide_one_now(store: Store, desk: Space) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH)
    await signal(store, "c-1", "risk", RISK)
    decision = await desk.orchestrator(merge="all").decide("c-1")
    assert (decision.action, decision.audit.missing_signals) == ("review", ["momentum"])
    assert await correlation.decision() == decision
    with pytest.raises(Conflict, match="is completed already"):
        await desk.orchestrator().decide("c-1")
    with pytest.raises(NotFound):
        await desk.orchestrator().decide("c-2")
    assert await keys(desk, ORCHESTRATORS) == []


async def test_what_one_leaves_to_be_published_another_publishes(store: Store, desk: Space) -> None:
    published: list[Decision] = []
    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    async with running(desk.orchestrator(on_decision=published.append, merge="first")):
        await soon((await desk.correlation("c-1")).decision(wait=None))
        await desk.correlation("c-2", expect=["risk"])
        decision = await desk.orchestrator(merge="all", publish=True).decide("c-2")
        await until(lambda: len(published) == 2)
    assert published[1] == decision


# --- what comes late ---


async def test_a_late_signal_is_recorded_and_revives_nothing(store: Store, desk: Space, clock: ManualClock) -> None:
    published: list[Decision] = []
    correlation = await desk.correlation("c-1", expect=BOTH, timeout="1m", min_agents=1)
    risk = await seen_by(store, "risk").correlation("c-1")
    await signal(store, "c-1", "momentum", MOMENTUM)
    async with running(desk.orchestrator(merge=FUSION, on_decision=published.append)):
        clock.advance("1m")
        await soon(correlation.decision(wait=None))
        before = await correlation.view()
        assert (await risk.signal(RISK)).outcome == "late"
        assert await signal(store, "c-1", "momentum", MOMENTUM) == "duplicate"
        await asyncio.sleep(0.02)
    after = await correlation.view()
    assert (after.status, after.signals, after.version) == ("completed", before.signals, before.version)
    assert list(after.late) == ["risk"]
    assert len(published) == 1
    clock.advance("1h")
    await desk.records.set("x", 1)
    assert await keys(desk, STATES, MADE, SECTIONS.root) == [], "all of it is gone together"
    with pytest.raises(NotFound):
        await risk.signal(RISK)
    assert await keys(desk, STATES, MADE, SECTIONS.root) == []


async def test_how_long_it_is_kept_depends_on_how_it_ended(store: Store, desk: Space, clock: ManualClock) -> None:
    async with running(desk.orchestrator(merge=FUSION)):
        good = await desk.correlation("good", expect=BOTH)
        bad = await desk.correlation("bad", expect=BOTH, timeout="1m")
        await send_both(store, "good")
        await soon(good.decision(wait=None))
        ended_at = clock.now_ms()
        assert (await good.view()).expires_at is not None
        clock.advance("1m")
        await soon(bad.decision(wait=None))
        lives = [(await each.view()).expires_at for each in (good, bad)]
    assert [at.timestamp() * 1000 - ended_at for at in lives if at] == [3_600_000, 7 * 86_400_000 + 60_000]


async def test_an_id_may_be_used_again_and_what_is_left_of_before_does_not_count(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    first = await desk.orchestrator(merge=FUSION).decide("c-1")
    clock.advance("1h")
    section = Put("sections/correlations/c-1/risk/-", encode({"run": first.run, "signal": {"analysis": {}}}))
    await seen_by(store, "risk")._scope.commit((section,))
    other = Put("sections/correlations/c-2/risk/-", section.value)
    await seen_by(store, "risk")._scope.commit((other,))
    await desk.correlation("c-2", expect=BOTH)
    await signal(store, "c-2", "momentum", MOMENTUM)
    assert (await desk.orchestrator(merge="first").decide("c-2")).audit.input_signals == ["momentum"]
    again = await desk.correlation("c-1", expect=BOTH)
    assert await again.signals() == {}
    assert await again.decision() is None
    async with running(desk.orchestrator(merge=FUSION)):
        await signal(store, "c-1", "momentum", MOMENTUM)
        await asyncio.sleep(0.02)
        assert await again.decision() is None
        assert await signal(store, "c-1", "risk", RISK) == "accepted"
        second = await soon(again.decision(wait=None))
    assert second is not None
    assert second.id != first.id


async def test_a_context_stays_as_it_was_when_the_decision_was_made(store: Store, desk: Space) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    await desk.orchestrator(merge=FUSION).decide("c-1")
    before = await everything(desk)
    with pytest.raises(Conflict, match="is not collecting"):
        await correlation.context.publish({"market_regime": "risk-off"})
    assert await everything(desk) == before


# --- those who die ---


async def test_a_dead_orchestrators_correlation_is_taken_over_and_its_late_word_is_refused(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hang(signals: Any, question: Question) -> dict[str, Any]:
        begun.set()
        await go_on.wait()
        return {"action": "forged"}

    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    async with mortal(desk, merge=hang, lease="10s") as (dying, leases):
        await soon(begun.wait())
        assert await correlation.status() == "orchestrating"
        with pytest.raises(Conflict, match="another orchestrator"):
            await desk.orchestrator().decide("c-1")
        async with running(desk.orchestrator(merge=FUSION, lease="10s")):
            await leases.close()
            await asyncio.sleep(0.02)
            clock.advance("9s")
            await asyncio.sleep(0.02)
            assert await correlation.status() == "orchestrating", "its lease lasts"
            for _ in range(20):
                clock.advance("1s")
                await asyncio.sleep(0.01)
            decision = await soon(correlation.decision(wait=None))
        go_on.set()
        await asyncio.sleep(0.05)
        assert dying.decided == 0
    assert decision is not None
    assert (decision.action, decision.audit.error_count) == ("trade", 1)
    assert await correlation.decision() == decision


async def test_one_whose_lease_has_ended_claims_nothing_before_it_has_another(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    async with mortal(desk, merge=FUSION, lease="10s") as (orchestrator, leases):
        await until(lambda: orchestrator._term is not None)
        assert orchestrator._term is not None
        former = orchestrator._term.id
        await leases.close()
        clock.advance("11s")
        correlation = await desk.correlation("c-1", expect=BOTH)
        await send_both(store, "c-1")
        waiting = asyncio.ensure_future(correlation.decision(wait=None))
        while not waiting.done():
            await asyncio.sleep(0.005)
            clock.advance("50ms")
        decision = waiting.result()
    assert decision is not None
    assert decision.audit.orchestrator != former


async def test_a_crash_between_decision_and_publication_is_repaired_by_one(
    store: Store, desk: Space, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agenda, "STEP_MS", 0)
    calls: list[str] = []
    begun = asyncio.Event()

    async def publish(decision: Decision) -> None:
        calls.append(decision.id)
        await asyncio.sleep(0.05)

    async def hang(decision: Decision) -> None:
        begun.set()
        await asyncio.Event().wait()

    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    async with mortal(desk, merge=FUSION, on_decision=hang, lease="10s") as (_, leases):
        await soon(begun.wait())
        await leases.close()
        decision = await correlation.decision()
        async with running(*(desk.orchestrator(on_decision=publish, lease="10s") for _ in range(3))):
            await asyncio.sleep(0.02)
            assert calls == [], "as long as the one that decided lives, it publishes"
            for _ in range(20):
                clock.advance("1s")
                await asyncio.sleep(0.01)
            await until(lambda: calls)
    assert decision is not None
    assert calls == [decision.id]
    assert await correlation.decision() == decision
    assert await keys(desk, OUTBOX) == []


async def test_a_publication_that_fails_is_tried_again_with_the_same_id(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    calls: list[str] = []

    def publish(decision: Decision) -> None:
        calls.append(decision.id)
        if len(calls) < 3:
            raise OSError("the broker is away")

    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    async with running(desk.orchestrator(merge=FUSION, on_decision=publish)):
        await until(lambda: calls)
        while len(calls) < 3:
            await asyncio.sleep(0.01)
            clock.advance("1s")
        await asyncio.sleep(0.02)
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert await keys(desk, OUTBOX) == []


class Forgetful(Wrapper):
    """An engine that does not reach the store when the first publication is to be noted."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.failures = 1

    async def commit(self, space: str, batch: Batch) -> Receipt:
        if self.failures and any(isinstance(op, Delete) and op.key.startswith(OUTBOX) for op in batch.operations):
            self.failures -= 1
            raise Unavailable("the network is away")
        return await super().commit(space, batch)


async def test_a_publication_that_could_not_be_noted_is_noted_later_and_not_done_again(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    engine = Forgetful(desk._scope.engine)
    flaky = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    calls: list[str] = []
    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    async with running(flaky.orchestrator(on_decision=lambda each: calls.append(each.id))):
        while await keys(desk, OUTBOX) or not calls:
            await asyncio.sleep(0.01)
            clock.advance("1s")
    assert (len(calls), engine.failures) == (1, 0)


class Robbing(Forgetful):
    """An engine that ends the orchestrator's lease when the first publication is to be noted."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        try:
            return await super().commit(space, batch)
        except Unavailable:
            [lease] = [condition for condition in batch.conditions if isinstance(condition, Present)]
            await self.inner.commit(space, Batch(SYSTEM_ACTOR, (Delete(lease.key),)))
            return await self.inner.commit(space, batch)


async def test_one_that_lost_its_lease_after_it_had_published_does_not_publish_again(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    engine = Robbing(desk._scope.engine)
    robbed = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    calls: list[str] = []
    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    orchestrator = robbed.orchestrator(on_decision=lambda each: calls.append(each.id))
    async with running(orchestrator):
        while (
            await keys(desk, OUTBOX) or not calls or orchestrator._told
        ):  # it hears of its note after the store has it
            await asyncio.sleep(0.01)
            clock.advance("1s")
    assert (len(calls), engine.failures) == (1, 0)


class Silent(Forgetful):
    """An engine that takes the first publication out of the outbox and never says so."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.done = asyncio.Event()

    async def commit(self, space: str, batch: Batch) -> Receipt:
        try:
            return await super().commit(space, batch)
        except Unavailable:
            await self.inner.commit(space, batch)
            self.done.set()
            return await asyncio.Future()


async def test_a_publication_whose_note_was_cancelled_and_written_all_the_same_is_forgotten(
    store: Store, desk: Space
) -> None:
    engine = Silent(desk._scope.engine)
    silent = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    calls: list[str] = []
    await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    orchestrator = silent.orchestrator(on_decision=lambda each: calls.append(each.id))
    async with running(orchestrator):
        await soon(engine.done.wait())
    assert len(calls) == 1
    assert orchestrator._told == {}


class Counting(Wrapper):
    """An engine that counts how often what is open is read."""

    reads = 0

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        self.reads += prefix == OPEN
        return await super().scan(space, prefix, **options)


async def test_one_that_loses_its_leases_goes_on_with_what_it_knows(store: Store, desk: Space) -> None:
    """What is open is read once: to read it again after each loss would make a busy machine lose the next lease too."""
    engine = Counting(desk._scope.engine)
    counted = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    for number in range(3):
        await desk.correlation(f"c-{number}", expect=BOTH)
    calls: list[str] = []
    async with running(counted.orchestrator(on_decision=lambda each: calls.append(each.corr_id))):
        for number in range(3):
            [lease] = await soon(registered(desk))
            await send_both(store, f"c-{number}")
            await until(lambda n=number: f"c-{n}" in calls)
            await desk._scope.engine.commit(desk.name, Batch(SYSTEM_ACTOR, (Delete(lease),)))
            await signal(store, f"c-{(number + 1) % 3}", "momentum", MOMENTUM)
    assert (calls, engine.reads) == (["c-0", "c-1", "c-2"], 1)


async def registered(desk: Space) -> list[str]:
    while not (found := await keys(desk, ORCHESTRATORS)):
        await asyncio.sleep(0.001)
    return found


class Slow(Wrapper):
    """An engine that does not reach the store, after a while, when a decision would have emptied the outbox too."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.failures = 1

    async def commit(self, space: str, batch: Batch) -> Receipt:
        puts = [op.key for op in batch.operations if isinstance(op, Put)]
        gone = [op.key for op in batch.operations if isinstance(op, Delete)]
        if self.failures and MADE + "c-1" in puts and OUTBOX + "c-0" in gone:
            await asyncio.sleep(2 * NOTE_S)
            self.failures -= 1
            raise Unavailable("the network is away")
        return await super().commit(space, batch)


async def test_what_a_failed_decision_would_have_taken_out_of_the_outbox_is_taken_out_without_it(
    store: Store, desk: Space
) -> None:
    engine = Slow(desk._scope.engine)
    slow = Space(replace(desk._scope, engine=engine), desk._blob_folder, desk._coordination)
    calls: list[str] = []

    async def publish(decision: Decision) -> None:
        calls.append(decision.corr_id)
        await signal(store, "c-1", "risk", RISK)  # the other is due at once

    for number in range(2):
        await desk.correlation(f"c-{number}", expect=BOTH)
        await signal(store, f"c-{number}", "momentum", MOMENTUM)
    async with running(slow.orchestrator(merge=FUSION, on_decision=publish)):
        await signal(store, "c-0", "risk", RISK)
        await until(lambda: engine.failures == 0)  # the clock stands still, so the other is not tried again
        async with asyncio.timeout(DEADLINE_S):
            while await keys(desk, OUTBOX):
                await asyncio.sleep(0.01)
    assert calls == ["c-0"]


async def test_what_somebody_else_put_into_the_outbox_meanwhile_stays_there_and_holds_nobody_up(
    store: Store, desk: Space
) -> None:
    """While its decision is published another orchestrator puts another one there."""
    engine = desk._scope.engine

    async def publish(decision: Decision) -> None:
        if decision.corr_id == "c-0":
            await engine.commit(desk.name, Batch("orchestrator", (Put(OUTBOX + "c-0", encode("another")),)))

    for number in range(2):
        await desk.correlation(f"c-{number}", expect=BOTH)
    orchestrator = desk.orchestrator(merge=FUSION, on_decision=publish)
    async with running(orchestrator):
        for number in range(2):
            await send_both(store, f"c-{number}")
            await until(lambda wanted=number + 1: orchestrator.published == wanted)
    [entry] = (await engine.scan(desk.name, OUTBOX)).entries
    assert decode(entry.value) == "another"


async def test_a_correlation_that_ends_its_orchestrators_is_given_up(store: Store, desk: Space) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH)
    await send_both(store, "c-1")
    [entry] = await desk._scope.engine.get(desk.name, [STATES + "c-1"])
    assert entry is not None
    state = decode(entry.value, State)
    claim = Claim("gone", ATTEMPTS_MAX, state.metadata.created_at)
    claimed = State(state.corr_id, "orchestrating", state.run, state.metadata, claim=claim)
    await desk._scope.commit((Put(entry.key, encode(claimed), tag=tag_of("orchestrating")),))
    async with running(desk.orchestrator(merge=FUSION)):
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert (decision.status, decision.details["reason"]) == ("failed", "orchestration_abandoned")
    assert decision.audit.error_count == ATTEMPTS_MAX


async def test_a_claim_settles_the_signals(store: Store, desk: Space) -> None:
    """A signal that comes while the strategy is asked is late, and not in what it was asked about."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(signals: Any, question: Question) -> dict[str, Any]:
        begun.set()
        await go_on.wait()
        return {"action": "monitor"}

    correlation = await desk.correlation("c-1", expect=1)
    other = await seen_by(store, "risk").correlation("c-1")
    async with running(desk.orchestrator(merge=slow)):
        await signal(store, "c-1", "momentum", MOMENTUM)
        await soon(begun.wait())
        assert (await other.signal(RISK)).outcome == "late"
        go_on.set()
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert decision.audit.input_signals == ["momentum"]
    view = await correlation.view()
    assert (list(view.signals), list(view.late)) == (["momentum"], ["risk"])


async def test_an_orchestrator_goes_on_when_the_feed_it_followed_is_gone(store: Store, desk: Space) -> None:
    await desk.records.set("x", 1)
    orchestrator = desk.orchestrator(merge=FUSION)
    async with running(orchestrator):
        for number in range(3):
            correlation = await desk.correlation(f"c-{number}", expect=BOTH)
            info = await desk.info()
            await desk._scope.engine.compact(desk.name, info.revision)
            await send_both(store, f"c-{number}")
            clock: Any = desk._scope.clock
            waiting = asyncio.ensure_future(correlation.decision(wait=None))
            while not waiting.done():
                await asyncio.sleep(0.005)
                clock.advance("100ms")
            assert waiting.result() is not None


async def test_one_that_runs_is_not_run_twice(desk: Space) -> None:
    orchestrator = desk.orchestrator()
    async with running(orchestrator):
        await until(lambda: orchestrator._term is not None)
        with pytest.raises(InvalidInput, match="running already"):
            await orchestrator.run()


async def test_waiting_for_a_decision_is_bounded(desk: Space, clock: ManualClock) -> None:
    correlation = await desk.correlation("c-1", expect=BOTH)
    waiting = asyncio.ensure_future(correlation.decision(wait="5s"))
    while not clock._sleepers:
        await asyncio.sleep(0.001)
    clock.advance("5s")
    assert await soon(waiting) is None
    metadata = (await correlation.view()).metadata
    assert metadata.timeout_at - metadata.created_at == timedelta(minutes=5)


async def test_one_that_far_more_agents_have_signalled_than_it_needs_is_decided(store: Store, desk: Space) -> None:
    """Nobody had decided it meanwhile; a batch cannot have a condition for each of them."""
    correlation = await desk.correlation("c-1", expect=2)
    many = [signal(store, "c-1", f"agent-{number}", MOMENTUM) for number in range(CONDITIONS_MAX + 1)]
    assert set(await asyncio.gather(*many)) == {"accepted"}
    async with running(desk.orchestrator(merge=FUSION)):
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert len(await correlation.signals()) == CONDITIONS_MAX + 1
