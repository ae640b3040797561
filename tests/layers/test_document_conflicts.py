"""Contradictions are found, and settled by a rule, by agreement, or by a person; nothing that was said is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import (
    AccessDenied,
    Case,
    Conflict,
    Contradiction,
    DocumentView,
    InvalidInput,
    ManualClock,
    NotFound,
    Space,
    Store,
    Verdict,
    differing,
)
from tests.layers.conftest import everything

NAME = "research/MSFT"
INCREASE: Any = {"symbol": "MSFT", "recommendation": "increase position size"}
REDUCE: Any = {"symbol": "MSFT", "recommendation": "Reduce exposure"}


@pytest.fixture
def boss(store: Store) -> Space:
    return store.space("contoso", agent="orchestrator")


async def said(store: Store, agent: str, data: Any, confidence: float | None = 0.8, instance: str = "1") -> int:
    space = store.space("contoso", agent=agent, instance=instance)
    return await space.document(NAME).contribute(data, confidence=confidence)


# --- finding ---


async def test_increase_against_reduce_of_msft_is_found(store: Store, boss: Space) -> None:
    one = await said(store, "market-analysis", INCREASE)
    two = await said(store, "risk", REDUCE)
    await said(store, "reporting", {"symbol": "AAPL", "recommendation": "reduce"})
    await said(store, "compliance", {"symbol": "MSFT", "recommendation": "hold"})
    [found] = await boss.document(NAME).conflicts()
    assert (found.kind, found.rule, found.subject) == ("output-inconsistency", "opposite-recommendation", "MSFT")
    assert found.parties == ("market-analysis/1", "risk/1")
    assert found.values == {"market-analysis/1": "increase position size", "risk/1": "Reduce exposure"}
    assert found.versions == {"market-analysis/1": one, "risk/1": two}
    assert not found.escalated
    [again] = await boss.document(NAME).conflicts()
    assert again.id == found.id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("MSFT shows strong growth indicators and recommends increasing position size",
         "MSFT faces elevated sector-specific risk and recommends reducing exposure"),
        ("recommends increasing position size", "recommends reducing exposure"),
        ("strong buy", "sell"), ("Long", "short"), ("we would raise it", "CUT by half"), ("add to the position", "trim"),
        ("increase position size", "reduce exposure as volatility is increasing"), ("accumulating", "time to divest!"),
        ("increase for the long term", "a short run problem; reduce"),
    ],
)  # fmt: skip
async def test_opposite_words_anywhere_in_a_recommendation_are_found(one: str, other: str) -> None:
    async with holdfast.open("memory:", background=False) as store:
        await said(store, "market-analysis", {"symbol": "MSFT", "recommendation": one})
        await said(store, "risk", {"symbol": "MSFT", "recommendation": other})
        [found] = await store.space("contoso").document(NAME).conflicts()
        assert found.values == {"market-analysis/1": one, "risk/1": other}


@pytest.mark.parametrize(
    "said_so",
    ["do not increase", "don't buy", "don\u2019t buy", "I would never add here", "no need to increase", "we do not recommend an increase",
     "hold rather than buy", "avoid buying", "hold, the long-term outlook is good", "hold for the long term", "the address is additional",
     "risk is increasing, so sell", "a buyback", "a buy-back is likely", "hold", ""],
)  # fmt: skip
async def test_what_is_negated_or_says_both_or_neither_contradicts_nobody(said_so: str) -> None:
    async with holdfast.open("memory:", background=False) as store:
        await said(store, "a", {"symbol": "MSFT", "recommendation": said_so})
        await said(store, "b", REDUCE)
        await said(store, "c", {"symbol": "AAPL", "recommendation": "buy"})
        assert await store.space("contoso").document(NAME).conflicts() == []


async def test_symbols_are_the_same_in_any_case(store: Store, boss: Space) -> None:
    await said(store, "market-analysis", {"symbol": "msft", "recommendation": "buy"})
    await said(store, "risk", {"symbol": " MSFT", "recommendation": "sell"})
    [found] = await boss.document(NAME).conflicts()
    assert found.subject == "MSFT"
    boss.judgement.detectors = {"far": differing("target", tolerance=1, per="symbol")}
    await said(store, "a", {"symbol": "Aapl", "target": 1})
    await said(store, "b", {"symbol": "AAPL", "target": 3})
    assert [each.subject for each in await boss.document(NAME).conflicts()] == ["AAPL"]


async def test_who_names_no_symbol_means_the_one_that_the_others_name(store: Store, boss: Space) -> None:
    await said(store, "market-analysis", INCREASE)
    await said(store, "risk", {"recommendation": "reduce exposure"})
    [found] = await boss.document(NAME).conflicts()
    assert (found.subject, found.parties) == ("MSFT", ("market-analysis/1", "risk/1"))
    await said(store, "reporting", {"symbol": "AAPL"})
    assert await boss.document(NAME).conflicts() == [], "of two symbols nobody knows which is meant"


async def test_more_claimed_than_there_is_is_found(store: Store, boss: Space) -> None:
    await boss.document(NAME).replace({"capacity": {"capital": 1000}}, etag=0)
    await said(store, "a", {"claims": {"capital": 600, "desk": 1}})
    await said(store, "b", {"claims": {"capital": 400, "desk": 0}})
    assert await boss.document(NAME).conflicts() == []
    await said(store, "c", {"claims": {"capital": 1, "desk": 1}})
    found = {each.subject: each for each in await boss.document(NAME).conflicts()}
    assert {each.kind for each in found.values()} == {"resource-contention"}
    assert found["capital"].parties == ("a/1", "b/1", "c/1")
    assert found["desk"].parties == ("a/1", "c/1")  # without a capacity there is one


async def test_who_is_ready_after_another_s_deadline_is_found(store: Store, boss: Space) -> None:
    await said(store, "a", {"ready_at": "2026-03-01T12:00:00Z", "deadline": "2026-03-01T10:00:00Z"})
    await said(store, "b", {"deadline": "2026-03-01T12:00:00+00:00"})
    assert await boss.document(NAME).conflicts() == []
    await said(store, "c", {"deadline": "2026-03-01T12:30:00+01:00"})
    await boss.document(NAME).replace({"deadline": "2026-03-01T11:59:59"}, etag=0)
    found = await boss.document(NAME).conflicts()
    assert {each.parties for each in found} == {("a/1", "c/1"), ("a/1", "body")}
    assert {each.kind for each in found} == {"deadline"}


async def test_two_that_are_late_for_each_other_are_two_contradictions(store: Store, boss: Space) -> None:
    await said(store, "a", {"ready_at": "2026-03-01T12:00:00Z", "deadline": "2026-03-01T10:00:00Z"})
    await said(store, "b", {"ready_at": "2026-03-01T11:00:00Z", "deadline": "2026-03-01T09:00:00Z"})
    found = await boss.document(NAME).conflicts()
    assert {each.subject: each.values["a/1"] for each in found} == {
        "ready_at of a/1": "2026-03-01T12:00:00+00:00",
        "ready_at of b/1": "2026-03-01T10:00:00+00:00",
    }
    await boss.document(NAME).resolve(found[0], by="person", winner="a/1", justification="it was agreed")
    assert [each.id for each in await boss.document(NAME).conflicts()] == [found[1].id]


@pytest.mark.parametrize(
    "odd",
    [None, 3, "increase", [], {"recommendation": 3}, {"recommendation": ["increase"]}, {"claims": []}, {"claims": {"x": "y"}},
     {"claims": {"x": True}}, {"ready_at": 3}, {"ready_at": "soon", "deadline": None}, {"recommendation": ""}],
    ids=str,
)  # fmt: skip
async def test_what_has_another_shape_is_no_contradiction(odd: Any) -> None:
    async with holdfast.open("memory:", background=False) as store:
        await said(store, "a", odd)
        await said(store, "b", REDUCE)
        await said(store, "c", odd)
        assert await store.space("contoso").document(NAME).conflicts() == []


async def test_detectors_are_functions_under_a_name(store: Store, boss: Space) -> None:
    def nobody_answers(view: DocumentView) -> Iterator[Contradiction]:
        if len(view.sections) > 1:
            yield Contradiction("deadline", "", "silence", tuple(view.sections), {})

    boss.judgement.detectors = {"far": differing("target", tolerance=10), "silent": nobody_answers}
    await said(store, "a", {"target": 400})
    await said(store, "b", {"target": 410})
    await said(store, "c", {"target": 411})
    found = await boss.document(NAME).conflicts()
    assert [(each.rule, each.parties) for each in found] == [("far", ("a/1", "c/1")), ("silent", ("a/1", "b/1", "c/1"))]
    async with boss.lock("l") as guard:
        assert len(await guard.space.document(NAME).conflicts()) == 2


async def test_what_is_registered_for_a_space_is_known_to_all_its_views(store: Store, boss: Space) -> None:
    boss.judgement.detectors["far"] = differing("target", tolerance=10)
    boss.judgement.priorities["a"] = 7
    await said(store, "a", {"target": 400})
    await said(store, "b", {"target": 411})
    again = store.space("contoso", agent="orchestrator")
    [found] = await again.document(NAME).conflicts()
    assert (found.rule, (await again.document(NAME).resolve(found)).winner) == ("far", "a/1")
    assert "far" not in store.space("fabrikam").judgement.detectors
    async with holdfast.open("memory:", background=False) as other:
        assert "far" not in other.space("contoso").judgement.detectors


# --- settling ---


async def contradiction(store: Store, one: float | None = 0.8, two: float | None = 0.7) -> Contradiction:
    await said(store, "market-analysis", INCREASE, one)
    await said(store, "risk", REDUCE, two)
    [found] = await store.space("contoso", agent="orchestrator").document(NAME).conflicts()
    return found


async def test_priority_settles_it_and_both_outputs_are_kept(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    sections = (await doc.read()).sections
    settled = await doc.resolve(found, by="priority")
    assert (settled.winner, settled.method, settled.by) == ("risk/1", "priority", "orchestrator")
    assert settled.outputs == {"market-analysis/1": INCREASE, "risk/1": REDUCE}
    assert await doc.conflicts() == []
    assert await doc.resolutions() == [settled]
    assert (await doc.read()).sections == sections
    [event] = await doc.history(limit=1)
    assert (event.kind, event.by, event.data["winner"]) == ("resolved", "orchestrator", "risk/1")
    assert event.data["outputs"] == settled.outputs


async def test_the_history_keeps_decisions_for_a_year(store: Store, boss: Space, clock: ManualClock) -> None:
    await boss.document(NAME).resolve(await contradiction(store))
    clock.advance("8d")
    assert [event.kind for event in await boss.document(NAME).history()] == ["resolved"]
    clock.advance("358d")
    assert await boss.document(NAME).history() == []
    assert len(await boss.document(NAME).resolutions()) == 1


async def test_a_repeated_request_to_resolve_tells_what_was_decided_then(
    store: Store, boss: Space, clock: ManualClock
) -> None:
    doc, conflict = boss.document(NAME), await contradiction(store)
    first = await doc.resolve(conflict, request_id="r")
    clock.advance("1s")
    why = "the market has moved"
    other = next(party for party in conflict.parties if party != first.winner)
    await doc.resolve(conflict, by="person", winner=other, justification=why)
    await said(store, "risk", INCREASE)
    before = await everything(boss)
    assert await doc.resolve(conflict, request_id="r") == first
    assert await everything(boss) == before
    with pytest.raises(InvalidInput, match="used before for something else"):
        await doc.resolve(conflict, by="confidence", request_id="r")


async def test_decisions_are_audited(store: Store, boss: Space, url: str) -> None:
    if url == "policed:":
        pytest.skip("agents do not read the audit")
    await boss.document(NAME).resolve(await contradiction(store))
    await boss.audit.seal()
    records = [record async for record in boss.audit.records() if "/resolutions/" in record.key]
    assert [(record.actor, record.outcome) for record in records] == [("orchestrator", "committed")]


async def test_the_surest_side_wins_by_confidence(store: Store, boss: Space) -> None:
    await said(store, "market-analysis", INCREASE, 0.6, "2")
    found = await contradiction(store, 0.5, 0.9)
    settled = await boss.document(NAME).resolve(found, by="confidence")
    assert settled.winner == "market-analysis/2"  # 0.5 and 0.6 against 0.9
    assert "1.1 of 2" in settled.reason


async def test_what_nobody_is_sure_of_waits_for_a_person(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store, None, 0.9)
    waiting = await doc.resolve(found, by="confidence")
    assert (waiting.winner, waiting.method) == (None, "confidence")
    assert await doc.escalations() == [waiting] == await boss.documents.escalations()
    [still] = await doc.conflicts()
    assert still.escalated
    assert await doc.resolutions() == []
    decided = await doc.resolve(found.id, by="person", winner="risk/1", justification="the regulator called")
    assert (decided.winner, decided.justification, decided.overrode) == ("risk/1", "the regulator called", None)
    assert decided.outputs == {"market-analysis/1": INCREASE, "risk/1": REDUCE}
    assert (await doc.escalations(), await doc.conflicts()) == ([], [])
    assert [event.kind for event in await doc.history(limit=2)] == ["resolved", "escalated"]


@pytest.mark.parametrize(("by", "one", "two", "winner"), [
    ("confidence", None, 0.9, None), ("confidence", 0.9, None, None), ("confidence", 0.49, 0.3, None),
    ("confidence", 0.7, 0.7, None), ("confidence", 0.3, 0.5, "risk/1"), ("confidence", 0.9, 0.6, "market-analysis/1"),
    ("priority", 0.9, None, None), ("priority", 0.9, 0.49, None), ("priority", None, 0.5, "risk/1"),
    ("consensus", 0.9, 0.9, None), ("escalate", 0.9, 0.9, None),
])  # fmt: skip
async def test_a_machine_decides_only_for_who_is_at_least_half_sure(
    by: str, one: float | None, two: float | None, winner: str | None
) -> None:
    async with holdfast.open("memory:", background=False) as store:
        found = await contradiction(store, one, two)
        settled = await store.space("contoso", agent="orchestrator").document(NAME).resolve(found, by=by)
        assert settled.winner == winner


async def test_priority_decides_without_confidence_if_that_is_wished(store: Store, boss: Space) -> None:
    settled = await boss.document(NAME).resolve(await contradiction(store, None, None), confidence_min=None)
    assert settled.winner == "risk/1"


async def test_equal_priorities_wait_for_a_person(store: Store, boss: Space) -> None:
    boss.judgement.priorities = {"market-analysis": 7, "risk": 7}
    assert (await boss.document(NAME).resolve(await contradiction(store))).winner is None


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        ("priority", "none of alpha/1, beta/1, gamma/1 has a rank"),
        ("consensus", "1 of 3 agree"),
        ("confidence", "equally sure"),
    ],
)
async def test_who_claims_as_much_as_another_does_not_agree_with_it(by: str, reason: str) -> None:
    async with holdfast.open("memory:", background=False) as store:
        doc = store.space("contoso", agent="orchestrator").document(NAME)
        await doc.replace({"capacity": {"capital": 1000}}, etag=0)
        for agent in ("alpha", "beta", "gamma"):
            await said(store, agent, {"claims": {"capital": 700}}, 0.9)
        [found] = await doc.conflicts()
        settled = await doc.resolve(found, by=by)
        assert settled.winner is None
        assert reason in settled.reason
        [waiting] = await doc.conflicts()
        assert waiting.escalated


@pytest.mark.parametrize(("ranks", "winner"), [
    ({}, None), ({"beta": 1}, "beta/1"), ({"alpha": 2, "beta": 2}, None), ({"alpha": 2, "beta": 3}, "beta/1"),
    ({"elsewhere": 9}, None),
])  # fmt: skip
async def test_priority_chooses_nobody_by_the_alphabet(ranks: dict[str, int], winner: str | None) -> None:
    async with holdfast.open("memory:", background=False) as store:
        boss = store.space("contoso", agent="orchestrator")
        boss.judgement.priorities = ranks
        for agent in ("alpha", "beta", "gamma"):
            await said(store, agent, {"claims": {"desk": 1}})
        [found] = await boss.document(NAME).conflicts()
        assert (await boss.document(NAME).resolve(found, by="priority")).winner == winner


async def test_of_what_says_nothing_priority_chooses_nobody(boss: Space, store: Store) -> None:
    for agent in ("market-analysis", "reporting", "risk"):
        await said(store, agent, 1)
    boss.judgement.priorities = {"market-analysis": 1, "risk": 1}
    boss.judgement.detectors = {"late": lambda view: [Contradiction("deadline", "", "x", tuple(view.sections), {})]}
    [found] = await boss.document(NAME).conflicts()
    assert (await boss.document(NAME).resolve(found)).winner is None


async def test_a_decision_keeps_the_body_where_that_is_a_party(store: Store, boss: Space) -> None:
    doc, late = boss.document(NAME), {"ready_at": "2026-03-01T12:00:00Z"}
    await doc.replace({"deadline": "2026-03-01T09:00:00Z", "round": 1}, etag=0)
    await said(store, "risk", late)
    [found] = await doc.conflicts()
    settled = await doc.resolve(found, by="priority")
    assert settled.winner == "risk/1"
    assert settled.outputs == {"risk/1": late, "body": {"deadline": "2026-03-01T09:00:00Z", "round": 1}}
    assert [each.outputs for each in await doc.resolutions()] == [settled.outputs]


async def test_consensus_needs_enough_of_enough(store: Store, boss: Space) -> None:
    await said(store, "reporting", {"symbol": "MSFT", "recommendation": "increase"}, 0.9)
    found = await contradiction(store)
    for quorum, wins in (("2/3", True), ("3/3", False), ("1/2", True), ("3/4", False), ("2/4", False)):
        settled = await boss.document(NAME).resolve(found, by="consensus", quorum=quorum, justification="counted anew")
        assert settled.winner == ("reporting/1" if wins else None), quorum
        assert "2 of 3" in settled.reason


async def test_approvals_are_votes_and_are_kept(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    votes = {"alice": "risk/1", "bob": "risk/1", "carol": "risk/1"}
    settled = await doc.resolve(found, by="consensus", quorum="3/3", approvals=votes)
    assert (settled.winner, settled.approvals) == ("risk/1", votes)
    assert (await doc.resolutions())[0].approvals == votes


async def test_a_person_overrides_a_decision_and_says_why(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    first = await doc.resolve(found)
    before = await everything(boss)
    for wrong in (
        {"winner": "market-analysis/1"},
        {"winner": "market-analysis/1", "justification": "  "},
        {"winner": "nobody/1", "justification": "because"},
        {"justification": "because"},
    ):
        with pytest.raises(InvalidInput):
            await doc.resolve(found, by="person", **wrong)
    assert await everything(boss) == before
    second = await doc.resolve(found, by="person", winner="market-analysis/1", justification="hedged elsewhere")
    assert second.overrode is not None
    assert await doc.resolutions() == [second]
    decided = [event.data["winner"] for event in await doc.history() if event.kind == "resolved"]
    assert decided == ["market-analysis/1", first.winner]
    with pytest.raises(Conflict, match="only a person overrides that"):
        await doc.resolve(found)
    assert await doc.resolutions() == [second]


async def test_whoever_decides_anew_about_the_same_outputs_says_why(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    first = await doc.resolve(found, by="priority")
    before = await everything(boss)
    for by in ("priority", "confidence", "consensus", "escalate"):
        with pytest.raises(InvalidInput, match=r"decided by 'priority' already, for risk/1; .* needs a justification"):
            await doc.resolve(found, by=by)
    assert await everything(boss) == before
    second = await doc.resolve(found, by="confidence", justification="the ranks were a sample")
    assert (first.winner, second.winner) == ("risk/1", "market-analysis/1")
    assert (second.justification, second.method) == ("the ranks were a sample", "confidence")
    assert second.overrode is not None
    assert await doc.resolutions() == [second]


async def test_a_decision_that_is_escalated_is_open_until_a_person_decides(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    await doc.resolve(found)
    await doc.resolve(found, by="escalate", justification="the desk disagrees")
    [waiting] = await doc.escalations()
    assert [(each.id, each.escalated) for each in await doc.conflicts()] == [(waiting.conflict.id, True)]
    decided = await doc.resolve(found, by="person", winner="risk/1", justification="looked at it")
    assert decided.overrode is not None
    assert (await doc.conflicts(), await doc.escalations()) == ([], [])


async def test_a_contradiction_is_open_again_when_a_party_writes_again(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    await doc.resolve(found)
    await said(store, "risk", REDUCE, 0.9)
    [again] = await doc.conflicts()
    assert again.id == found.id
    before = await everything(boss)
    with pytest.raises(Conflict, match="have changed"):
        await doc.resolve(found)
    assert await everything(boss) == before
    assert (await doc.resolve(again)).overrode is not None


async def test_a_decision_about_outputs_that_change_meanwhile_is_refused(
    store: Store, boss: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await contradiction(store)
    doc = boss.document(NAME)
    view = await doc.read()
    await said(store, "risk", INCREASE)

    async def earlier(**_: Any) -> DocumentView:
        return view

    monkeypatch.setattr(doc, "read", earlier)
    before = await everything(boss)
    with pytest.raises(Conflict):
        await doc.resolve(found)
    assert await everything(boss) == before


async def test_an_escalation_that_has_dissolved_is_closed_by_a_person(store: Store, boss: Space) -> None:
    doc, found = boss.document(NAME), await contradiction(store)
    await doc.resolve(found, by="escalate")
    await said(store, "risk", {"symbol": "MSFT", "recommendation": "hold"})
    assert await doc.conflicts() == []
    [waiting] = await doc.escalations()
    await doc.resolve(waiting.conflict.id, by="person", winner="risk/1", justification="it agrees by now")
    assert await doc.escalations() == []


async def test_a_deleted_document_waits_for_nobody(store: Store, boss: Space) -> None:
    doc = boss.document(NAME)
    await doc.resolve(await contradiction(store), by="escalate")
    assert await doc.delete()
    assert await boss.documents.escalations() == []


async def test_large_outputs_are_named_in_a_decision_and_stay_in_their_sections(store: Store, boss: Space) -> None:
    large = {**INCREASE, "recommendation": "increase " + "x" * 300_000}
    await said(store, "market-analysis", large)
    await said(store, "risk", REDUCE)
    [found] = await boss.document(NAME).conflicts()
    settled = await boss.document(NAME).resolve(found)
    assert settled.outputs["market-analysis/1"]["omitted"] > 300_000
    assert settled.conflict.values["market-analysis/1"]["omitted"] > 300_000
    assert (await boss.document(NAME).read()).contributions["market-analysis"].data == large


async def test_strategies_are_functions_under_a_name(store: Store, boss: Space) -> None:
    def youngest(case: Case) -> Verdict:
        return Verdict(max(case.conflict.parties, key=lambda party: case.view.versions[party]), "it spoke last")

    boss.judgement.strategies["youngest"] = youngest
    doc, found = boss.document(NAME), await contradiction(store)
    assert (await doc.resolve(found, by="youngest")).winner == "risk/1"
    boss.judgement.strategies["absurd"] = lambda case: Verdict("nobody/1", "")
    with pytest.raises(InvalidInput, match="no party"):
        await doc.resolve(found, by="absurd")


async def test_a_resolution_that_makes_no_sense_is_refused(store: Store, boss: Space) -> None:
    found = await contradiction(store)
    before = await everything(boss)
    wrong: list[dict[str, Any]] = [
        {"by": "dice"}, {"by": "consensus", "quorum": "most"}, {"by": "consensus", "quorum": "4/3"},
        {"by": "priority", "winner": "risk/1"}, {"by": "priority", "justification": " "},
        {"approvals": {"alice": "nobody/1"}},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidInput):
            await boss.document(NAME).resolve(found, **options)
    with pytest.raises(NotFound, match="no conflict"):
        await boss.document(NAME).resolve("0123456789abcdef")
    assert await everything(boss) == before


async def test_behind_a_policy_only_orchestrators_settle(store: Store, space: Space, url: str) -> None:
    if url != "policed:":
        pytest.skip("an embedded store trusts its agents")
    found = await contradiction(store)
    before = await everything(space)
    for by in ("priority", "escalate"):
        with pytest.raises(AccessDenied):
            await space.document(NAME).resolve(found, by=by)
    assert await everything(space) == before
    assert len(await space.document(NAME).conflicts()) == 1  # they may see it


async def test_what_waits_for_a_person_survives_a_restart(tmp_path: Path) -> None:
    url = str(tmp_path / "team.db")
    async with holdfast.open(url, background=False) as store:
        found = await contradiction(store)
        await store.space("contoso", agent="orchestrator").document(NAME).resolve(found, by="escalate")
    async with holdfast.open(url, background=False) as store:
        [waiting] = await store.space("contoso").documents.escalations()
        assert (waiting.document, waiting.conflict.id) == (NAME, found.id)
        doc = store.space("contoso", agent="person").document(waiting.document)
        await doc.resolve(found.id, by="person", winner="risk/1", justification="looked at it")
        assert await store.space("contoso").documents.escalations() == []
