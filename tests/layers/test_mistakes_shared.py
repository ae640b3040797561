"""Mistakes of sections 2 and 4 of the list (`test_mistakes.py`), as documents and correlations could make them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from holdfast import Decision, InvalidInput, ManualClock, NotFound, Space, Store
from holdfast.codec import decode
from holdfast.layers import agenda
from holdfast.layers.correlation_entries import MADE, STATES
from tests.layers.desk import BOTH, MOMENTUM, RISK, running, seen_by, signal, soon


@pytest.fixture
def lead(store: Store) -> Space:
    return seen_by(store, "orchestrator")


# --- 2: shallow updates, += on shared state, reduces that count twice ---


async def test_2_a_merge_into_a_document_keeps_the_siblings_of_what_it_changes(lead: Space) -> None:
    document = lead.document("d")
    await document.declare({"limits.risk": "last", "limits.size": "last"})
    await document.replace({"limits": {"risk": 0.1, "size": 5, "by": "desk"}, "note": "x"}, etag=0)
    await document.merge({"limits": {"risk": 0.2}})
    assert (await document.read()).body == {"limits": {"risk": 0.2, "size": 5, "by": "desk"}, "note": "x"}


async def test_2_what_many_add_to_a_document_is_all_there(store: Store, lead: Space) -> None:
    await lead.document("d").declare({"total": "sum"})
    many = [store.space("contoso", agent="orchestrator", instance=str(number)).document("d") for number in range(8)]
    await asyncio.gather(*(each.merge({"total": 1}) for each in many for _ in range(3)))
    assert (await lead.document("d").read()).body == {"total": 24}


async def test_2_a_repeated_merge_into_a_document_counts_once(lead: Space) -> None:
    document = lead.document("d")
    await document.declare({"total": "sum", "files": "append"})
    for _ in range(3):
        await document.merge({"total": 7, "files": ["a"]}, request_id="task-1")
    assert (await document.read()).body == {"total": 7, "files": ["a"]}


# --- 4: lost signals, live dictionaries, two publishers, revived correlations, naive times ---


async def test_4_a_signal_that_comes_after_the_end_is_kept_and_told_to_be_late(
    store: Store, lead: Space, clock: ManualClock
) -> None:
    correlation = await lead.correlation("c-1", expect=BOTH, timeout="1m")
    clock.advance("1m")
    assert await signal(store, "c-1", "risk", RISK) == "late"
    assert (await correlation.view()).late["risk"]["analysis"] == RISK["analysis"]


async def test_4_what_correlations_hand_out_is_not_the_stored_thing(store: Store, lead: Space) -> None:
    correlation = await lead.correlation("c-1", expect=BOTH)
    sent: dict[str, Any] = {"analysis": {"legs": [1]}}
    await signal(store, "c-1", "risk", sent)
    sent["analysis"]["legs"].append(2)
    (await correlation.signals())["risk"]["analysis"]["legs"].append(3)
    (await correlation.context.read())["recent_decisions"].append("forged")
    assert (await correlation.signals())["risk"]["analysis"] == {"legs": [1]}
    assert (await correlation.context.read())["recent_decisions"] == []


async def test_4_what_documents_hand_out_is_not_the_stored_thing(lead: Space) -> None:
    document = lead.document("d")
    body: dict[str, Any] = {"legs": [1]}
    await document.replace(body, etag=0)
    await document.contribute(body)
    body["legs"].append(2)
    view = await document.read()
    view.body["legs"].append(3)
    view.contributions["orchestrator"].data["legs"].append(3)
    again = await document.read()
    assert (again.body, again.contributions["orchestrator"].data) == ({"legs": [1]}, {"legs": [1]})


@pytest.mark.parametrize("merge", ["momentum_risk_fusion", "of its own"])
async def test_4_orchestrators_that_all_find_it_ready_publish_once(
    store: Store, lead: Space, monkeypatch: pytest.MonkeyPatch, merge: str
) -> None:
    monkeypatch.setattr(agenda, "STEP_MS", 0)  # nobody waits for those before it
    asked: list[str] = []
    published: list[Decision] = []

    async def slowly(signals: Any, question: Any) -> dict[str, Any]:
        asked.append(question.corr_id)
        await asyncio.sleep(0.01)
        return {"action": "monitor"}

    strategy: Any = slowly if merge == "of its own" else merge
    many = [lead.orchestrator(merge=strategy, on_decision=published.append) for _ in range(4)]
    correlation = await lead.correlation("c-1", expect=BOTH)
    await signal(store, "c-1", "momentum", MOMENTUM)
    await signal(store, "c-1", "risk", RISK)
    async with running(*many):
        decision = await soon(correlation.decision(wait=None))
        await asyncio.sleep(0.05)
    assert published == [decision]
    assert sum(each.decided for each in many) == 1
    assert len(asked) == (1 if merge == "of its own" else 0), "a strategy that is not ours is asked by one alone"


async def test_4_a_late_duplicate_does_not_revive_a_correlation_that_was_cleaned_away(
    store: Store, lead: Space, clock: ManualClock
) -> None:
    correlation = await lead.correlation("c-1", expect=BOTH)
    risk = await seen_by(store, "risk").correlation("c-1")
    await risk.signal(RISK)
    async with running(lead.orchestrator(merge="momentum_risk_fusion")):
        await signal(store, "c-1", "momentum", MOMENTUM)
        assert await soon(correlation.decision(wait=None)) is not None
    clock.advance("2h")
    await store.tidy()
    with pytest.raises(NotFound):
        await risk.signal(RISK)
    engine = lead._scope.engine
    assert await engine.get(lead.name, [STATES + "c-1", MADE + "c-1"]) == [None, None]
    assert (await engine.scan(lead.name, "sections/")).entries == []


async def test_4_a_signal_with_a_naive_time_is_refused_and_what_is_stored_is_aware(store: Store, lead: Space) -> None:
    await lead.correlation("c-1", expect=BOTH)
    with pytest.raises(InvalidInput, match="time zone"):
        await signal(store, "c-1", "risk", {**RISK, "enriched_at": "2025-06-15T15:06:40"})
    await signal(store, "c-1", "risk", {**RISK, "enriched_at": "2025-06-15T17:06:40+02:00"})
    [entry] = await lead._scope.engine.get(lead.name, [STATES + "c-1"])
    assert entry is not None
    metadata = decode(entry.value, dict)["metadata"]
    view = await (await lead.correlation("c-1")).view()
    times = [metadata[name] for name in ("created_at", "last_updated", "timeout_at")]
    assert all(datetime.fromisoformat(at).utcoffset() is not None for at in times)
    assert view.signals["risk"]["enriched_at"] == "2025-06-15T15:06:40+00:00"
