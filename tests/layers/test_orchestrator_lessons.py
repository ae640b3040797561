"""Orchestrators in hard times: large signals, a full outbox, crashes at the wrong moment, and agents that mean no good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from holdfast import Conflict, Decision, InvalidInput, LeaseLost, ManualClock, Question, Space, Store, Unavailable
from holdfast.engine import SYSTEM_ACTOR, Batch, ChangeSet, Delete, Engine, Page, Put, Receipt
from holdfast.layers import agenda, deciding
from holdfast.layers.agenda import SIGNALLED
from holdfast.layers.coordination import Coordination
from holdfast.layers.correlation_entries import MADE, OPEN, ORCHESTRATORS, OUTBOX, SIGNALS, STATES
from holdfast.layers.leases import Leases
from holdfast.layers.merging import STRATEGIES
from holdfast.layers.orchestrator import ATTEMPTS_MAX, STOP_S_MAX
from holdfast.layers.sections import SECTIONS, SOLE, Sections
from holdfast.middleware.wrapper import Wrapper
from holdfast.testing.dying import Dying
from tests.layers import desk as shared
from tests.layers.conftest import everything
from tests.layers.desk import BOTH, MOMENTUM, RISK, running, seen_by, signal, soon

T = TypeVar("T")
FUSION = "momentum_risk_fusion"
HUGE = 10**400
"""An integer that is JSON, and more than any float can hold."""
in_memory = pytest.mark.parametrize("url", ["memory"], indirect=True)


@pytest.fixture
def desk(store: Store) -> Space:
    return seen_by(store, "orchestrator")


def through(space: Space, engine: Engine) -> Space:
    """The same space, seen through another engine."""
    return Space(replace(space._scope, engine=engine), space._blob_folder, space._coordination)


async def complete(store: Store, desk: Space, corr_id: str) -> None:
    """A correlation that is due."""
    await desk.correlation(corr_id, expect=BOTH)
    await signal(store, corr_id, "momentum", MOMENTUM)
    await signal(store, corr_id, "risk", RISK)


async def keys(space: Space, *prefixes: str) -> list[str]:
    engine = space._scope.engine
    return [entry.key for prefix in prefixes for entry in (await engine.scan(space.name, prefix)).entries]


async def until(condition: Callable[[], object], clock: ManualClock | None = None) -> None:
    """Wait for it; with a clock, time passes meanwhile."""
    async with asyncio.timeout(shared.DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)
            if clock is not None:
                clock.advance("100ms")


async def in_time(work: Awaitable[T], clock: ManualClock) -> T:
    """What comes of it while time passes."""
    task = asyncio.ensure_future(work)
    try:
        await until(task.done, clock)
    finally:
        task.cancel()
    return task.result()


# --- what is large ---


@pytest.mark.parametrize("merge", ["first", "own"])
async def test_a_hundred_agents_with_the_largest_signals_are_decided(store: Store, desk: Space, merge: str) -> None:
    agents = [f"a{number:02}" for number in range(100)]
    correlation = await desk.correlation("c-1", expect=agents)
    for agent in agents:
        await signal(store, "c-1", agent, {"analysis": {"action": "buy", "notes": "x" * 59_000}})
    left: list[list[str]] = []

    async def publish(decision: Decision) -> None:
        left.append(await keys(desk, SECTIONS.root))

    strategy = (lambda signals, question: {"action": "buy"}) if merge == "own" else merge
    async with running(desk.orchestrator(merge=strategy, on_decision=publish)):
        decision = await soon(correlation.decision(wait=None))
        await until(lambda: left)
    assert decision is not None
    assert (decision.status, decision.action, decision.audit.input_signals) == ("completed", "buy", agents)
    assert list(decision.merged["source_signals"]) == agents
    view = await correlation.view()
    assert {len(each["analysis"]["notes"]) for each in view.signals.values()} == {59_000}, "the state has them whole"
    assert left == [[]], "whoever dies while it publishes leaves no signals behind"


async def test_an_answer_too_large_to_be_kept_is_a_failed_decision_that_says_why(store: Store, desk: Space) -> None:
    asked: list[str] = []

    def strategy(signals: Any, question: Question) -> dict[str, Any]:
        asked.append(question.corr_id)
        return {"action": "buy", "why": "x" * (9 * 1024 * 1024)}

    await complete(store, desk, "c-1")
    async with running(desk.orchestrator(merge=strategy, on_decision=lambda decision: None)):
        decision = await soon((await desk.correlation("c-1")).decision(wait=None))
    assert decision is not None
    assert (decision.status, decision.action, decision.details["reason"]) == ("failed", "error", "merge_failed")
    assert f"a decision has at most {deciding.DECISION_BYTES_MAX:,} bytes" in decision.details["error"]
    assert asked == ["c-1"]


async def test_more_decisions_in_the_outbox_than_there_is_room_for_are_published_and_new_ones_made(
    store: Store, desk: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agenda, "OPEN_MAX", 4)
    names = [f"c-{number}" for number in range(6)]
    for name in names:
        await complete(store, desk, name)
        await desk.orchestrator(merge=FUSION, publish=True).decide(name)
    published: list[str] = []
    async with running(desk.orchestrator(merge=FUSION, on_decision=lambda each: published.append(each.corr_id))):
        await until(lambda: len(published) == 6)
        await complete(store, desk, "new")
        await until(lambda: len(published) == 7)
    assert sorted(published) == [*names, "new"]
    assert await keys(desk, OUTBOX) == []


async def test_an_id_is_not_used_again_before_its_decision_is_published(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    await complete(store, desk, "c-1")
    first = await desk.orchestrator(merge=FUSION, publish=True).decide("c-1")
    clock.advance("2h")  # the correlation and its decision are gone
    await desk.records.set("x", 1)
    assert await keys(desk, MADE) == []
    before = await everything(desk)
    with pytest.raises(Conflict, match="has not been published yet; choose another id, or wait") as caught:
        await desk.correlation("c-1", expect=BOTH)
    assert caught.value.key == OUTBOX + "c-1"
    assert await everything(desk) == before
    published: list[Decision] = []
    async with running(desk.orchestrator(merge=FUSION, on_decision=published.append)):
        await until(lambda: published)
    assert published == [first]
    await complete(store, desk, "c-1")
    second = await desk.orchestrator(merge=FUSION).decide("c-1")
    assert second.id != first.id


# --- on_decision, whatever becomes of it ---


@pytest.mark.parametrize("ends", ["lease lost", "cancelled"])
async def test_a_lease_or_a_task_of_on_decisions_own_is_not_the_orchestrators(
    store: Store, desk: Space, clock: ManualClock, ends: str
) -> None:
    calls: Counter[str] = Counter()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def publish(decision: Decision) -> None:
        calls[decision.corr_id] += 1
        if decision.corr_id == "good":
            begun.set()
            await go_on.wait()
            calls["good, to its end"] += 1
        elif calls["bad"] == 1 and ends == "lease lost":
            raise LeaseLost("the lock of the ledger is not held any more")
        elif calls["bad"] == 1:
            own = asyncio.ensure_future(asyncio.sleep(1))
            own.cancel()
            await own

    orchestrator = desk.orchestrator(merge=FUSION, on_decision=publish, lease="1m")
    async with running(orchestrator):
        await complete(store, desk, "good")
        await soon(begun.wait())
        assert orchestrator._term is not None
        term = orchestrator._term
        await complete(store, desk, "bad")
        await until(lambda: calls["bad"])
        await until(lambda: calls["bad"] == 2, clock)
        assert orchestrator._term is term, "it has the lease it had"
        go_on.set()
        await until(lambda: orchestrator.published == 2)
    assert calls == {"good": 1, "good, to its end": 1, "bad": 2}
    assert await keys(desk, OUTBOX) == []


class Cut(Wrapper):
    """An engine whose feed breaks off at the next commit when it is told to."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.cut = False

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            if self.cut:
                self.cut = False
                raise Unavailable("the connection was reset")
            yield commit


async def test_a_feed_that_is_cut_does_not_end_what_is_being_published(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    engine = Cut(desk._scope.engine)
    calls: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def publish(decision: Decision) -> None:
        calls.append(f"{decision.corr_id} begins")
        begun.set()
        await go_on.wait()
        calls.append(f"{decision.corr_id} ends")

    async with running(through(desk, engine).orchestrator(merge=FUSION, on_decision=publish)):
        await complete(store, desk, "c-1")
        await soon(begun.wait())
        engine.cut = True
        other = await desk.correlation("c-2", expect=BOTH)  # of which the feed should have told
        await until(lambda: not engine.cut)
        await asyncio.sleep(0.02)
        assert calls == ["c-1 begins"]
        go_on.set()
        await signal(store, "c-2", "momentum", MOMENTUM)
        await signal(store, "c-2", "risk", RISK)
        assert await in_time(other.decision(wait=None), clock) is not None
        await until(lambda: "c-2 ends" in calls, clock)
    assert calls == ["c-1 begins", "c-1 ends", "c-2 begins", "c-2 ends"]


@in_memory
@pytest.mark.parametrize("stopping", [False, True])
async def test_to_cancel_run_ends_what_is_being_published_at_once(store: Store, desk: Space, stopping: bool) -> None:
    calls: list[str] = []

    async def publish(decision: Decision) -> None:
        calls.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            calls.append("ends")

    await complete(store, desk, "c-1")
    orchestrator = desk.orchestrator(merge=FUSION, on_decision=publish)
    task = asyncio.ensure_future(orchestrator.run())
    await until(lambda: calls)
    stop = asyncio.ensure_future(orchestrator.stop()) if stopping else None
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=STOP_S_MAX / 2)
    assert task.cancelled()
    assert calls == ["begins", "ends"]
    if stop is not None:
        await stop
    assert await keys(desk, ORCHESTRATORS) == []


# --- those who begin, stop and die ---


class Held(Wrapper):
    """An engine that answers the scan of one prefix late."""

    def __init__(self, inner: Engine, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = prefix
        self.read, self.go_on = asyncio.Event(), asyncio.Event()

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        page = await self.inner.scan(space, prefix, **options)
        if prefix == self.prefix:
            self.read.set()
            await self.go_on.wait()
        return page


@pytest.mark.parametrize("prefix", [ORCHESTRATORS, OPEN, SIGNALLED])
async def test_one_that_began_while_another_was_reading_is_not_taken_for_dead(
    store: Store, desk: Space, prefix: str
) -> None:
    engine = Held(desk._scope.engine, prefix)
    calls: list[str] = []
    done = asyncio.Event()

    def publishing(who: str) -> Callable[[Decision], Awaitable[object]]:
        async def publish(decision: Decision) -> None:
            calls.append(who)
            await done.wait()

        return publish

    late = through(desk, engine).orchestrator(merge=FUSION, on_decision=publishing("late"))
    quick = desk.orchestrator(merge=FUSION, on_decision=publishing("quick"))
    await complete(store, desk, "c-1")
    async with running(late):
        await soon(engine.read.wait())
        async with running(quick):
            await until(lambda: calls)
            engine.go_on.set()
            await until(lambda: late._term is not None)
            await asyncio.sleep(0.05)
            done.set()
    assert calls == ["quick"]
    assert await keys(desk, OUTBOX) == []


async def test_what_somebody_wanted_decided_now_is_no_timeout_when_its_orchestrator_died_of_it(
    store: Store, desk: Space
) -> None:
    correlation = await desk.correlation("c-1", expect=["a", "b", "c"], timeout="1h")
    for agent in ("a", "b"):
        await signal(store, "c-1", agent, {"analysis": {"action": "buy", "confidence": 0.9}})
    leases, engine = Leases(desk._scope.clock), Dying(desk._scope.engine, 1, after=True)  # 0: its lease, 1: its claim
    dying = Space(replace(desk._scope, engine=engine), desk._blob_folder, Coordination(leases))
    forced = asyncio.ensure_future(dying.orchestrator(merge="first").decide("c-1"))
    await soon(engine.dead.wait())
    await until(lambda: not engine.dying)
    await leases.close()
    while not forced.done():  # what it would do on its way out is cancelled too
        forced.cancel()
        await asyncio.sleep(0)
    assert await correlation.status() == "orchestrating"
    [lease] = await keys(desk, ORCHESTRATORS)
    await desk._scope.engine.commit(desk.name, Batch(SYSTEM_ACTOR, (Delete(lease),)))
    async with running(desk.orchestrator(merge="first")):
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert (decision.status, decision.action) == ("completed", "buy")
    assert (decision.audit.input_signals, decision.audit.missing_signals) == (["a", "b"], ["c"])
    assert not decision.audit.timed_out


class Withdrawing(Wrapper):
    """An engine through which a signal goes away in the moment its correlation becomes due: as the feed tells it, or before the claim."""

    def __init__(self, inner: Engine, moment: str, withdraw: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self.moment = moment
        self.withdraw = withdraw
        self.withdrawn: bool | None = None
        self.follows = False

    async def _withdraw(self) -> None:
        self.withdrawn = False
        await self.withdraw()
        self.withdrawn = True

    async def commit(self, space: str, batch: Batch) -> Receipt:
        claims = any(isinstance(op, Put) and op.key.startswith(STATES) for op in batch.operations)
        if claims and self.moment != "feed" and self.withdrawn is None:
            await self._withdraw()
        return await self.inner.commit(space, batch)

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        held: list[ChangeSet] = []
        self.follows = True
        async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
            held.append(commit)
            if self.moment == "feed" and self.withdrawn is None and any("risk" in each.key for each in commit.changes):
                await self._withdraw()  # and both are told in one breath
                continue
            for each in held:
                yield each
            held.clear()


@pytest.mark.parametrize("merge", ["first", "own"])
@pytest.mark.parametrize("moment", ["feed", "commit"])
async def test_a_signal_that_goes_away_when_its_correlation_becomes_due_is_no_timeout(
    store: Store, desk: Space, clock: ManualClock, moment: str, merge: str
) -> None:
    async def own(signals: Any, question: Question) -> dict[str, Any]:
        return {"action": "monitor"}

    async def withdraw() -> None:
        risk = seen_by(store, "risk")._scope
        await risk.commit((Sections(risk, SIGNALS, "c-1").delete(instance=SOLE),))

    correlation = await desk.correlation("c-1", expect=BOTH, timeout="1h")
    await signal(store, "c-1", "momentum", MOMENTUM)
    engine = Withdrawing(desk._scope.engine, moment, withdraw)
    orchestrator = through(desk, engine).orchestrator(merge=own if merge == "own" else merge)
    async with running(orchestrator):
        await until(lambda: engine.follows)
        await signal(store, "c-1", "risk", RISK)
        await until(lambda: engine.withdrawn)
        assert await signal(store, "c-1", "risk", RISK) == "accepted"
        decision = await in_time(correlation.decision(wait=None), clock)
    assert decision is not None
    assert (decision.status, decision.audit.timed_out) == ("completed", False)
    assert decision.audit.input_signals == BOTH


class Busy(Wrapper):
    """An engine that does not reach the store the first times a decision is to be written."""

    def __init__(self, inner: Engine, failures: int) -> None:
        super().__init__(inner)
        self.failures = failures

    async def commit(self, space: str, batch: Batch) -> Receipt:
        decides = any(isinstance(op, Put) and op.key.startswith(MADE) for op in batch.operations)
        if self.failures and decides:
            self.failures -= 1
            raise Unavailable("busy")
        return await self.inner.commit(space, batch)


async def test_a_store_that_was_away_is_no_orchestrator_that_died(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    engine = Busy(desk._scope.engine, ATTEMPTS_MAX)
    await complete(store, desk, "c-1")
    correlation = await desk.correlation("c-1")
    view = through(desk, engine)
    async with running(view.orchestrator(merge=lambda signals, question: {"action": "buy"}, lease="1m")):
        decision = await in_time(correlation.decision(wait=None), clock)
    assert engine.failures == 0
    assert decision is not None
    assert (decision.status, decision.details) == ("completed", {"action": "buy"})


async def test_one_that_is_stopped_before_it_has_begun_ends_and_may_run_again(store: Store, desk: Space) -> None:
    orchestrator = desk.orchestrator(merge=FUSION)
    task = asyncio.create_task(orchestrator.run())
    await orchestrator.stop()
    await soon(task)
    await complete(store, desk, "c-1")
    async with running(orchestrator):
        assert await soon((await desk.correlation("c-1")).decision(wait=None)) is not None
    assert orchestrator.decided == 1


async def test_one_that_is_stopped_while_it_does_not_run_runs_when_it_is_told_to(store: Store, desk: Space) -> None:
    orchestrator = desk.orchestrator(merge=FUSION)
    for number in range(2):
        await orchestrator.stop()
        await complete(store, desk, f"c-{number}")
        async with running(orchestrator):
            assert await soon((await desk.correlation(f"c-{number}")).decision(wait=None)) is not None
    assert orchestrator.decided == 2


# --- what agents say ---


async def test_an_agent_that_fills_its_sections_hides_nobodys_signal(
    store: Store, desk: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "ENTRIES_MAX", 10)
    correlation = await desk.correlation("c-1", expect=["alpha", "risk"])
    await signal(store, "c-1", "alpha", {"analysis": {"action": "buy"}})
    filled = tuple(Put(f"sections/correlations/c-1/alpha/x{number}", b"1") for number in range(25))
    await seen_by(store, "alpha")._scope.commit(filled)
    await signal(store, "c-1", "risk", {"analysis": {"action": "buy"}})
    async with running(desk.orchestrator(merge="all")):
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert (decision.status, decision.action) == ("completed", "buy")
    assert decision.audit.input_signals == ["alpha", "risk"]
    assert await keys(desk, SECTIONS.root) == []


@pytest.mark.parametrize("unsaid", [None, "", 3, {"x": 1}])
@pytest.mark.parametrize(("merge", "action"), [("all", "review"), ("first", "monitor"), ("priority", "monitor")])
def test_an_action_that_is_no_text_counts_as_not_said(merge: str, action: str, unsaid: Any) -> None:
    signals = {agent: {"analysis": {"action": unsaid, "confidence": 0.9}} for agent in ("a", "b")}
    merged: Any = STRATEGIES[merge](signals, Question("c-1", ("a", "b")))
    assert merged.decision["action"] == action


async def test_a_huge_integer_in_an_analysis_breaks_no_decision(store: Store, desk: Space) -> None:
    await desk.correlation("c-1", expect=["a", "b"])
    buy = {"action": "buy", "confidence": 0.9, "score": 1}
    await signal(store, "c-1", "a", {"analysis": {**buy, "score": HUGE}})
    await signal(store, "c-1", "b", {"analysis": buy})
    decision = await desk.orchestrator(merge="weighted_average").decide("c-1")
    assert (decision.status, decision.action) == ("completed", "buy")
    assert decision.merged["source_signals"]["a"]["analysis"]["score"] == HUGE


async def test_a_huge_integer_is_no_claim_and_hides_none(store: Store, boss: Space) -> None:
    document = boss.document("d")
    await document.replace({"capacity": {"capital": 1}}, etag=0)
    for agent, amount in (("mallory", HUGE), ("honest", 0.5), ("other", 0.75)):
        await seen_by(store, agent).document("d").contribute({"claims": {"capital": amount}})
    [found] = await document.conflicts()
    assert (found.kind, found.subject) == ("resource-contention", "capital")
    assert sorted(found.parties) == ["honest/1", "other/1"]


async def test_a_sum_that_no_number_can_hold_is_refused_and_left_out_of_what_is_merged(
    store: Store, boss: Space
) -> None:
    document = boss.document("d")
    await document.declare({"n": "sum"})
    await document.merge({"n": 0.5})
    before = await everything(boss)
    with pytest.raises(InvalidInput, match="too large"):
        await document.merge({"n": HUGE})
    assert await everything(boss) == before
    await seen_by(store, "mallory").document("d").contribute({"n": HUGE})
    await seen_by(store, "honest").document("d").contribute({"n": 0.25})
    assert (await document.read()).merged == {"n": 0.75}


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
async def test_a_time_beyond_the_years_is_refused(store: Store, desk: Space, at: str) -> None:
    await desk.correlation("c-1", expect=BOTH)
    before = await everything(desk)
    with pytest.raises(InvalidInput, match="beyond the years 1 to 9999"):
        await signal(store, "c-1", "risk", {**RISK, "enriched_at": at})
    assert await everything(desk) == before


@pytest.mark.parametrize("change", [{"risk.worst": 5}, {"": {"cost": 3}}, {"cost": 1, "risk.worst": 5}])
async def test_what_is_merged_names_no_path_with_dots(boss: Space, change: dict[str, Any]) -> None:
    document = boss.document("d")
    await document.declare({"risk.worst": "max", "cost": "sum"})
    await document.merge({"risk": {"worst": 1}, "cost": 1})
    before = await everything(boss)
    with pytest.raises(InvalidInput, match="is no name within a path"):
        await document.merge(change)
    assert await everything(boss) == before


async def test_a_contribution_that_does_not_fit_is_left_out_of_what_is_merged(store: Store, boss: Space) -> None:
    document = boss.document("d")
    await document.declare({"cost": "sum", "tags": "union"})
    await document.merge({"cost": 1})
    await seen_by(store, "odd").document("d").contribute({"cost": "much", "tags": ["late"]})
    await seen_by(store, "even").document("d").contribute({"cost": 2})
    assert (await document.read()).merged == {"cost": 3, "tags": ["late"]}
