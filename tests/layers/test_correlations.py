"""Correlations as agents see them: signals in time, twice, late; the context; what is refused."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Conflict, InvalidInput, ManualClock, NotFound, Space, Store
from holdfast.engine import Entry, Page
from holdfast.layers.correlation_entries import SIGNALS, STATES, STATUSES, Sent, Status, state_of
from holdfast.layers.sections import SOLE, Sections
from holdfast.layers.signals import SIGNAL_BYTES_MAX
from holdfast.middleware.wrapper import Wrapper
from tests.layers.conftest import everything
from tests.layers.desk import BOTH, MOMENTUM, RISK, running, seen_by, signal, soon


@pytest.fixture
def maker(store: Store) -> Space:
    return seen_by(store, "orchestrator")


async def test_signals_are_collected_until_all_are_there(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    assert await correlation.status() == "collecting"
    assert await signal(store, "c-1", "risk", RISK) == "accepted"
    view = await correlation.view()
    assert (view.status, view.missing, view.missing_count) == ("collecting", ("momentum",), 1)
    assert await signal(store, "c-1", "momentum", MOMENTUM) == "accepted"
    view = await correlation.view()
    assert (view.status, view.missing, list(view.signals)) == ("ready", (), ["risk", "momentum"])


async def test_a_signal_gets_what_it_lacks_and_its_times_are_aware(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    east = timezone(timedelta(hours=2))
    await signal(store, "c-1", "risk", {**RISK, "enriched_at": datetime(2025, 6, 15, 17, 6, 40, tzinfo=east)})
    await signal(store, "c-1", "momentum", {"source_signal": {"id": 7}, "schema_version": "1.0.0"})
    signals = await correlation.signals()
    assert signals["risk"] == {
        **RISK,
        "agent_name": "risk",
        "corr_id": "c-1",
        "enriched_at": "2025-06-15T15:06:40+00:00",
    }
    assert datetime.fromisoformat(signals["momentum"]["enriched_at"]).utcoffset() == timedelta(0)
    metadata = (await correlation.view()).metadata
    assert metadata.created_at.tzinfo == metadata.timeout_at.tzinfo == UTC
    assert metadata.timeout_at - metadata.created_at == timedelta(minutes=5)
    assert (metadata.expected_agents, metadata.orchestration_pattern) == (BOTH, "fan_in")


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"enriched_at": "2025-06-15T15:06:40"}, "names no time zone"),
    ({"enriched_at": "yesterday"}, "must be a time"),
    ({"trend": "up"}, "put it into analysis"),
    ({"agent_name": "risk"}, "sent as 'momentum'"),
    ({"corr_id": "c-2"}, "sent as 'c-1'"),
    ({"analysis": [1]}, "analysis must be an object"),
    ({"agent_version": 1}, "agent_version must be text"),
    ({"analysis": {"text": "x" * SIGNAL_BYTES_MAX}}, "at most 60,000 bytes"),
]


async def test_a_signal_that_is_not_well_formed_changes_nothing(store: Store, maker: Space) -> None:
    await maker.correlation("c-1", expect=BOTH)
    before = await everything(maker)
    for fields, words in MALFORMED:
        with pytest.raises(InvalidInput, match=words):
            await signal(store, "c-1", "momentum", fields)
    assert await everything(maker) == before


async def test_a_signal_of_an_agent_nobody_expects_is_refused(store: Store, maker: Space) -> None:
    await maker.correlation("c-1", expect=BOTH)
    before = await everything(maker)
    with pytest.raises(InvalidInput, match="expects no signal of 'news'; it expects momentum, risk"):
        await signal(store, "c-1", "news", RISK)
    assert await everything(maker) == before


async def test_the_same_signal_again_changes_nothing(store: Store, maker: Space, clock: ManualClock) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    agent = await seen_by(store, "risk").correlation("c-1")
    first = await agent.signal(RISK)
    clock.advance("1s")
    before = await everything(maker)
    again = await agent.signal(RISK)
    assert (again.outcome, again.version) == ("duplicate", first.version)
    assert await everything(maker) == before
    assert await signal(store, "c-1", "risk", RISK) == "duplicate"
    assert list(await correlation.signals()) == ["risk"]


async def test_another_signal_of_the_same_agent_has_to_be_meant(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    agent = await seen_by(store, "risk").correlation("c-1")
    await agent.signal(RISK)
    with pytest.raises(Conflict, match="send it with replace"):
        await agent.signal({"analysis": {"risk_level": "high"}})
    assert (await correlation.signals())["risk"]["analysis"]["risk_level"] == "medium"
    await agent.signal({"analysis": {"risk_level": "high"}}, replace=True)
    assert (await correlation.signals())["risk"]["analysis"]["risk_level"] == "high"


async def test_two_instances_of_an_agent_have_one_signal(store: Store, maker: Space) -> None:
    await maker.correlation("c-1", expect=BOTH)
    handles = [
        await store.space("contoso", agent="risk", instance=number).correlation("c-1") for number in ("1", "2", "3")
    ]
    outcomes = await asyncio.gather(*(each.signal(RISK) for each in handles))
    assert sorted(each.outcome for each in outcomes) == ["accepted", "duplicate", "duplicate"]


async def test_a_signal_makes_no_correlation(store: Store, maker: Space) -> None:
    with pytest.raises(NotFound, match="never made"):
        await seen_by(store, "risk").correlation("c-1")
    handle = await maker.correlation("c-1", expect=BOTH)
    await maker._scope.engine.drop(maker.name)
    before = await everything(maker)
    with pytest.raises(NotFound):
        await handle.signal(RISK, agent="risk")
    assert await everything(maker) == before


async def test_an_agent_that_is_faster_waits_for_the_correlation(
    store: Store, maker: Space, clock: ManualClock
) -> None:
    await maker.records.set("begun", True)
    early = asyncio.ensure_future(seen_by(store, "risk").correlation("c-1", wait="5s"))
    await asyncio.sleep(0.01)
    await maker.correlation("c-1", expect=BOTH)
    assert (await (await soon(early)).signal(RISK)).outcome == "accepted"
    nobody = asyncio.ensure_future(seen_by(store, "risk").correlation("c-2", wait="5s"))
    while not clock._sleepers:
        await asyncio.sleep(0.001)
    clock.advance("5s")
    with pytest.raises(NotFound):
        await soon(nobody)


async def test_making_one_twice_finds_it_and_with_other_expectations_it_is_refused(store: Store, maker: Space) -> None:
    await maker.correlation("c-1", expect=BOTH, timeout="5m")
    await signal(store, "c-1", "risk", RISK)
    before = await everything(maker)
    again = await maker.correlation("c-1", expect=BOTH)
    assert list(await again.signals()) == ["risk"]
    for other in ({"expect": ["risk"]}, {"expect": BOTH, "timeout": "1m"}, {"expect": BOTH, "min_agents": 1}):
        with pytest.raises(Conflict, match="expects something else"):
            await maker.correlation("c-1", **other)
    assert await everything(maker) == before


SENSELESS: list[dict[str, Any]] = [
    {"expect": []},
    {"expect": ["a", "a"]},
    {"expect": ["not a name"]},
    {"expect": "momentum"},
    {"expect": 0},
    {"expect": 101},
    {"expect": BOTH, "min_agents": 3},
    {"expect": BOTH, "min_agents": 0},
    {"expect": BOTH, "timeout": 0},
    {"expect": BOTH, "pattern": "chaos"},
    {"profile": "slow"},
    {"timeout": "5m"},
]


async def test_expectations_that_cannot_be_meant_are_refused(maker: Space) -> None:
    for options in SENSELESS:
        with pytest.raises(InvalidInput):
            await maker.correlation("c-1", **options)


async def test_a_profile_waits_for_any_so_many_agents(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", profile="simple")
    metadata = (await correlation.view()).metadata
    assert (metadata.needed, metadata.timeout_at - metadata.created_at) == (2, timedelta(seconds=60))
    await signal(store, "c-1", "whoever", RISK)
    assert (await correlation.view()).missing_count == 1
    await signal(store, "c-1", "another", RISK)
    assert await correlation.status() == "ready"


async def test_a_signal_after_the_timeout_is_late_and_changes_no_state(
    store: Store, maker: Space, clock: ManualClock
) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH, timeout="1m")
    agent = await seen_by(store, "risk").correlation("c-1")
    clock.advance("1m")
    assert (await agent.signal(RISK)).outcome == "late"
    view = await correlation.view()
    assert (view.status, view.signals, list(view.late)) == ("collecting", {}, ["risk"])


async def test_ids_do_not_reach_into_each_other(store: Store, maker: Space) -> None:
    ids = ["a", "a/b", "a%2Fb", "a/b/risk", "ä ö"]
    for corr_id in ids:
        await maker.correlation(corr_id, expect=BOTH)
    await signal(store, "a/b", "risk", RISK)
    found = {
        state.corr_id: await (await maker.correlation(state.corr_id)).signals()
        for state in await maker.correlations.list()
    }
    assert {corr_id for corr_id, signals in found.items() if signals} == {"a/b"}
    assert set(found) == set(ids)
    with pytest.raises(InvalidInput):
        await maker.correlation("x" * 257)


async def test_agents_read_what_orchestrators_publish(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    agent = await seen_by(store, "risk").correlation("c-1")
    empty = {"instrument_history": {}, "recent_decisions": [], "market_regime": None, "portfolio_state": {}}
    assert await agent.context.read() == empty
    await correlation.context.publish({"market_regime": "risk-on", "vix": 14.2})
    await correlation.context.publish({"recent_decisions": [{"action": "trade"}]})
    assert await agent.context.read() == {
        **empty,
        "market_regime": "risk-on",
        "vix": 14.2,
        "recent_decisions": [{"action": "trade"}],
    }


async def test_correlations_are_listed_by_state_and_prefix(store: Store, maker: Space) -> None:
    for number in range(5):
        await maker.correlation(f"{'ab'[number % 2]}-{number}", expect=BOTH)
    assert [state.corr_id for state in await maker.correlations.list()] == ["a-0", "a-2", "a-4", "b-1", "b-3"]
    assert [state.corr_id for state in await maker.correlations.list(prefix="b-", limit=1)] == ["b-1"]
    assert [state.corr_id for state in await maker.correlations.list(after="a-4", limit=2)] == ["b-1", "b-3"]
    assert len(await maker.correlations.list(status="collecting")) == 5
    assert await maker.correlations.list(status="completed") == []
    with pytest.raises(InvalidInput):
        await maker.correlations.list(status="done")  # type: ignore[arg-type]


async def test_a_list_tells_who_is_ready_as_the_correlation_itself_does(store: Store, maker: Space) -> None:
    names = ["a", "a!", "a/b", "a%b", "é", "z"]
    for name in names:
        await maker.correlation(name, expect=BOTH)
        await signal(store, name, "risk", RISK)
    for name in ("a", "a/b", "z"):
        await signal(store, name, "momentum", MOMENTUM)
    await maker.orchestrator(merge="first").decide("z")
    listed = await maker.correlations.list()
    assert [state.corr_id for state in listed] == sorted(names)
    for state in listed:
        view = await (await maker.correlation(state.corr_id)).view()
        assert (state.status, state.metadata) == (view.status, view.metadata)
    by_status = {
        status: [state.corr_id for state in await maker.correlations.list(status=status)] for status in STATUSES
    }
    assert by_status == {
        "collecting": ["a!", "a%b", "é"],
        "ready": ["a", "a/b"],
        "orchestrating": [],
        "completed": ["z"],
        "failed": [],
    }
    ready = await maker.correlations.list(status="ready", prefix="a", after="a", limit=1)
    assert [state.corr_id for state in ready] == ["a/b"]
    [many] = await maker.correlations.list(status="collecting", after="a!", limit=1)
    assert many.corr_id == "a%b"


async def test_what_is_open_is_listed_without_reading_what_ended(store: Store, maker: Space) -> None:
    for number in range(5):
        await maker.correlation(f"old-{number}", expect=BOTH)
        await maker.orchestrator().decide(f"old-{number}")
    await maker.correlation("new", expect=BOTH)
    seen: list[str] = []

    class Reading(Wrapper):
        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            seen.extend(keys)
            return await super().get(space, keys)

        async def scan(self, space: str, prefix: str, **how: Any) -> Page:
            page = await super().scan(space, prefix, **how)
            seen.extend(entry.key for entry in page.entries)
            return page

    scope = replace(maker._scope, engine=Reading(maker._scope.engine))
    through = Space(scope, maker._blob_folder, maker._coordination)
    wanted: tuple[Status, ...] = ("collecting", "ready", "orchestrating")
    for status in wanted:
        await through.correlations.list(status=status)
    assert seen
    assert not [key for key in seen if "old-" in key]


async def test_a_signal_makes_a_correlation_newer(store: Store, maker: Space, clock: ManualClock) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    before = (await correlation.view()).metadata.last_updated
    clock.advance("10s")
    await signal(store, "c-1", "risk", RISK)
    assert (await correlation.view()).metadata.last_updated - before == timedelta(seconds=10)


HAND_MADE: list[dict[str, Any]] = [
    {"analysis": "text"},
    {"agent_name": "momentum"},
    {"corr_id": "c-2"},
    {"enriched_at": "2025-06-15T15:06:40"},
    {"enriched_at": None},
    {"agent_version": 7},
    {"trend": "up"},
]


@pytest.mark.parametrize("bad", HAND_MADE, ids=str)
async def test_what_an_agent_writes_by_hand_and_is_no_signal_does_not_count_as_one(
    store: Store, maker: Space, clock: ManualClock, bad: dict[str, Any]
) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH, timeout="5m", min_agents=1)
    [root] = await maker._scope.engine.get(maker.name, [STATES + "c-1"])
    assert root is not None
    fields = {"agent_name": "risk", "corr_id": "c-1", "enriched_at": "2025-06-15T15:06:40+00:00", **RISK, **bad}
    risk = seen_by(store, "risk")._scope
    put = Sections(risk, SIGNALS, "c-1").put(Sent(state_of(root).run, fields), instance=SOLE)
    orchestrator = maker.orchestrator(merge="momentum_risk_fusion")
    async with running(orchestrator):
        while orchestrator._term is None:
            await asyncio.sleep(0.001)
        await risk.commit((put,))
        await signal(store, "c-1", "momentum", MOMENTUM)
        view = await correlation.view()
        assert (view.status, list(view.signals), view.missing) == ("collecting", ["momentum"], ("risk",))
        [listed] = await maker.correlations.list()
        assert listed.status == "collecting"
        await asyncio.sleep(0.02)
        assert await correlation.decision() is None, "it is not complete"
        clock.advance("5m")
        decision = await soon(correlation.decision(wait=None))
    assert decision is not None
    assert (decision.status, decision.action, decision.audit.timed_out) == ("completed", "monitor", True)
    audit = decision.audit
    assert (audit.input_signals, audit.missing_signals) == (["momentum"], ["risk"])
    assert (audit.invalid_signals, audit.error_count) == (["risk"], 1)


async def test_an_agent_that_wrote_no_signal_may_still_send_one(store: Store, maker: Space) -> None:
    correlation = await maker.correlation("c-1", expect=["risk"])
    [root] = await maker._scope.engine.get(maker.name, [STATES + "c-1"])
    assert root is not None
    risk = seen_by(store, "risk")._scope
    await risk.commit((Sections(risk, SIGNALS, "c-1").put(Sent(state_of(root).run, {"analysis": 1}), instance=SOLE),))
    assert await signal(store, "c-1", "risk", RISK) == "accepted"
    assert await correlation.status() == "ready"


async def test_what_is_decided_by_hand_after_its_time_is_a_timeout(
    store: Store, maker: Space, clock: ManualClock
) -> None:
    for name in ("silent", "partial", "whole"):
        await maker.correlation(name, expect=BOTH, timeout="5m")
    await signal(store, "partial", "risk", RISK)
    for agent, sent in (("risk", RISK), ("momentum", MOMENTUM)):
        await signal(store, "whole", agent, sent)
    clock.advance("6m")
    silent = await maker.orchestrator().decide("silent")
    assert (silent.details["reason"], silent.audit.timed_out, silent.status) == ("workflow_timeout", True, "failed")
    partial = await maker.orchestrator(merge="momentum_risk_fusion").decide("partial")
    assert (partial.action, partial.audit.timed_out, partial.status) == ("monitor", True, "completed")
    whole = await maker.orchestrator(merge="momentum_risk_fusion").decide("whole")
    assert (whole.action, whole.audit.timed_out) == ("trade", False)


async def test_an_unfinished_correlation_is_never_swept(maker: Space, store: Store, clock: ManualClock) -> None:
    correlation = await maker.correlation("c-1", expect=BOTH)
    await signal(store, "c-1", "risk", RISK)
    clock.advance("400d")
    await maker.records.set("x", 1)
    assert list(await correlation.signals()) == ["risk"]
