"""Correlations over HTTP, and what agents and orchestrators may do there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import ManualClock, Store
from holdfast.engine import Engine
from holdfast.identity import Identity
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import Rules
from tests.server.http.keeping import LEAD, MARKET, RISK, TOKENS, Keeper, running

BASE = "/v1/spaces/contoso"
EXPECT: dict[str, Any] = {"expect": ["market", "risk"], "timeout": "5m"}


class Ruled(Keeper):
    """A keeper with the rules that ship: each identity through its own policy."""

    def engine_for(self, identity: Identity) -> Engine:
        self.policy = getattr(self, "policy", None) or Policy(self.store.engine, self.clock, Rules())
        return self.policy.engine_for(identity)

    def space_for(self, identity: Identity, name: str) -> Any:
        return self.store.seen_through(self.engine_for(identity), name, identity.agent, self.coordination)


@pytest.fixture
async def clients(store: Store, clock: ManualClock) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    async with running(Ruled(store, clock)) as port:
        opened = {TOKENS[token].agent: port.client(token) for token in (LEAD, MARKET, RISK)}
        yield opened
        for client in opened.values():
            await client.aclose()


async def test_a_correlation_over_http(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, market, risk = clients["lead"], clients["market"], clients["risk"]
    made = await lead.post(f"{BASE}/correlations/desk/c-1", json=EXPECT)
    assert (made.status_code, made.json()["status"]) == (200, "collecting")
    assert (await lead.post(f"{BASE}/correlations/desk/c-1", json=EXPECT)).status_code == 200
    assert (await lead.post(f"{BASE}/correlations/desk/c-1", json={"expect": 1})).status_code == 409
    told = (await lead.put(f"{BASE}/contexts/desk/c-1", json={"market_regime": "risk-on"})).json()["context"]
    assert (await market.get(f"{BASE}/contexts/desk/c-1")).json()["context"] == told
    sent = await market.put(f"{BASE}/signals/desk/c-1", json={"analysis": {"action": "trade"}})
    assert (sent.status_code, sent.json()["outcome"]) == (200, "accepted")
    again = await market.put(f"{BASE}/signals/desk/c-1", json={"analysis": {"action": "trade"}})
    assert again.json() == {**sent.json(), "outcome": "duplicate"}
    other = await market.put(f"{BASE}/signals/desk/c-1", json={"analysis": {"action": "hold"}})
    assert (other.status_code, other.json()["error"]) == (409, "conflict")
    revised = await market.put(f"{BASE}/signals/desk/c-1?replace=true", json={"analysis": {"action": "hold"}})
    assert revised.json()["outcome"] == "accepted"
    shown = (await risk.get(f"{BASE}/correlations/desk/c-1")).json()
    assert (shown["missing"], shown["signals"]["market"]["analysis"]) == (["risk"], {"action": "hold"})
    assert (await lead.get(f"{BASE}/decisions/desk/c-1")).json() == {"decision": None}
    waiting = asyncio.ensure_future(lead.get(f"{BASE}/decisions/desk/c-1", params={"wait": "20s"}))
    decided = (await lead.post(f"{BASE}/decisions/desk/c-1", json={"merge": "first"})).json()
    assert decided["decision"]["action"] == "hold"
    assert (await waiting).json() == decided
    assert (await lead.post(f"{BASE}/decisions/desk/c-1", json={})).status_code == 409
    late = await risk.put(f"{BASE}/signals/desk/c-1", json={"analysis": {}})
    assert late.json()["outcome"] == "late"
    listed = (await market.get(f"{BASE}/correlations", params={"status": "completed"})).json()["correlations"]
    assert [each["id"] for each in listed] == ["desk/c-1"]


async def test_what_changes_something_gets_the_same_answer_when_it_is_repeated_with_its_key(
    clients: dict[str, httpx.AsyncClient], store: Store, clock: ManualClock
) -> None:
    lead, market, risk = clients["lead"], clients["market"], clients["risk"]
    await store.engine.create("contoso", "volatile")  # where what has ended is kept for a minute
    analysis = {"analysis": {"action": "trade"}}

    def keyed(key: str) -> dict[str, str]:
        return {"Idempotency-Key": key}

    async def everything() -> list[tuple[int, Any]]:
        answers = [
            await lead.post(f"{BASE}/correlations/c-1", json=EXPECT, headers=keyed("make")),
            await lead.put(f"{BASE}/contexts/c-1", json={"market_regime": "risk-on"}, headers=keyed("context")),
            await market.put(f"{BASE}/signals/c-1", json=analysis, headers=keyed("signal")),
            await risk.put(f"{BASE}/signals/c-1", json=analysis, headers=keyed("signal")),
            *await asyncio.gather(
                *(lead.post(f"{BASE}/decisions/c-1", json={}, headers=keyed("decide")) for _ in range(3))
            ),
            await risk.put(f"{BASE}/signals/c-1?replace=true", json={"analysis": {}}, headers=keyed("late")),
        ]
        return [(answer.status_code, answer.json()) for answer in answers]

    first = await everything()
    assert [status for status, _ in first] == [200] * 8
    assert [told.get("outcome") for _, told in first if "outcome" in told] == ["accepted", "accepted", "late"]
    assert first[4] == first[5] == first[6]
    assert await everything() == first
    other = await lead.post(f"{BASE}/decisions/c-1", json={"merge": "first"}, headers=keyed("decide"))
    assert (other.status_code, "used before" in other.json()["message"]) == (400, True)
    assert (await lead.post(f"{BASE}/decisions/c-1", json={})).status_code == 409, "another request"
    clock.advance("10m")
    revision = (await store.spaces())[0].revision
    assert [answer for answer in await everything() if answer not in first] == [
        (
            404,
            {"error": "not_found", "message": "what this request decided about correlation 'c-1' is not kept any more"},
        )
    ] * 3
    assert (await store.spaces())[0].revision == revision, "nothing was made anew"


async def test_a_decision_over_http_is_published_where_decisions_are(
    clients: dict[str, httpx.AsyncClient], store: Store
) -> None:
    lead, published = clients["lead"], []
    orchestrator = store.space("contoso", agent="lead").orchestrator(on_decision=published.append)
    running_ = asyncio.ensure_future(orchestrator.run())
    try:
        async with asyncio.timeout(20):
            while orchestrator._term is None:
                await asyncio.sleep(0.002)
            for name, body, told in (("c-1", {}, True), ("c-2", {"publish": False}, False)):
                await lead.post(f"{BASE}/correlations/{name}", json=EXPECT)
                decided = (await lead.post(f"{BASE}/decisions/{name}", json=body)).json()["decision"]
                assert decided["to_publish"] is told
            while not published:
                await asyncio.sleep(0.002)
            await orchestrator.stop()
    finally:
        running_.cancel()
    assert [each.corr_id for each in published] == ["c-1"]


async def test_what_is_ready_is_listed_as_ready(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, risk = clients["lead"], clients["risk"]
    for name in ("c-1", "c-2"):
        await lead.post(f"{BASE}/correlations/{name}", json={"expect": ["risk"]})
    await risk.put(f"{BASE}/signals/c-2", json={"analysis": {}})
    listed = (await risk.get(f"{BASE}/correlations")).json()["correlations"]
    assert [(each["id"], each["status"]) for each in listed] == [("c-1", "collecting"), ("c-2", "ready")]
    ready = (await risk.get(f"{BASE}/correlations", params={"status": "ready"})).json()["correlations"]
    assert [each["id"] for each in ready] == ["c-2"]


async def test_what_is_wrong_is_refused_by_name(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, market = clients["lead"], clients["market"]
    for answer, status in (
        (await lead.get(f"{BASE}/correlations/c-1"), 404),
        (await market.put(f"{BASE}/signals/c-1", json={}), 404),
        (await lead.get(f"{BASE}/decisions/c-1"), 404),
        (await lead.post(f"{BASE}/correlations/c-1", json={}), 400),
        (await lead.post(f"{BASE}/correlations/c-1", json={"expect": []}), 400),
        (await lead.post(f"{BASE}/correlations/c-1", json={"expect": ["a"], "color": 1}), 400),
        (await lead.post(f"{BASE}/decisions/c-1", json={"merge": "odd"}), 400),
        (await lead.get(f"{BASE}/decisions/c-1", params={"wait": "5m"}), 400),
    ):
        assert answer.status_code == status, answer.text


async def test_agents_write_their_own_signal_and_nothing_else(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, market = clients["lead"], clients["market"]
    assert (await market.post(f"{BASE}/correlations/c-1", json=EXPECT)).status_code == 403
    await lead.post(f"{BASE}/correlations/c-1", json=EXPECT)
    for denied in (
        await market.put(f"{BASE}/signals/c-1", json={"agent_name": "risk", "analysis": {}}),
        await market.put(f"{BASE}/contexts/c-1", json={"market_regime": "mine"}),
        await market.post(f"{BASE}/decisions/c-1", json={}),
    ):
        assert (denied.status_code, denied.json()["error"]) == (403, "access_denied"), denied.text
    await lead.put(f"{BASE}/signals/c-1", json={"agent_name": "risk", "analysis": {"action": "hold"}})
    await market.put(f"{BASE}/signals/c-1", json={"analysis": {"action": "hold"}})
    await lead.post(f"{BASE}/decisions/c-1", json={})
    assert (await market.get(f"{BASE}/decisions/c-1")).status_code == 403
    assert set((await market.get(f"{BASE}/correlations/c-1")).json()["signals"]) == {"market", "risk"}
