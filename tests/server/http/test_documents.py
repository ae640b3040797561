"""Documents over HTTP: bodies under their ETag, contributions, history, conflicts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import ManualClock, Space, Store
from holdfast.identity import Identity
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import Rules
from holdfast.server.http import documents
from tests.server.http.keeping import LEAD, MARKET, RISK, Keeper, Running, running

BASE = "/v1/spaces/contoso"
DOC = f"{BASE}/documents/research/MSFT"


class PolicedKeeper(Keeper):
    """A keeper as it ships: everybody through the rules of its role."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = Policy(self.store.engine, self.clock, Rules(rate_limits=()))

    def space_for(self, identity: Identity, name: str) -> Space:
        return self.store.seen_through(self.policy.engine_for(identity), name, identity.agent, self.coordination)


@pytest.fixture
async def port(store: Store, clock: ManualClock) -> AsyncIterator[Running]:
    async with running(PolicedKeeper(store, clock)) as opened:
        yield opened


@pytest.fixture
async def lead(port: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client(LEAD) as client:
        yield client


async def said(client: httpx.AsyncClient, data: Any, **more: Any) -> Any:
    answer = await client.put(f"{BASE}/contributions/research/MSFT", json={"data": data, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_body_is_written_at_its_etag_and_otherwise_412(lead: httpx.AsyncClient) -> None:
    empty = await lead.get(DOC)
    assert (empty.headers["etag"], empty.json()["body"], empty.json()["contributions"]) == ('"0"', {}, {})
    made = await lead.put(DOC, json={"round": 1}, headers={"If-None-Match": "*"})
    assert made.status_code == 200
    etag = made.headers["etag"]
    assert etag == f'"{made.json()["etag"]}"'
    read = await lead.get(DOC)
    assert (read.headers["etag"], read.json()["body"]) == (etag, {"round": 1})
    for headers in ({"If-Match": '"9999"'}, {"If-None-Match": "*"}, {"If-Match": '"0"'}):
        refused = await lead.put(DOC, json={"round": 9}, headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (412, "conflict")
        assert refused.json()["version"] == made.json()["etag"]
    for headers in ({}, {"If-Match": "*"}):
        assert (await lead.put(DOC, json={"round": 9}, headers=headers)).status_code == 400
    assert (await lead.put(DOC, json=None, headers={"If-Match": etag})).status_code == 400
    second = await lead.put(DOC, json={"round": 2}, headers={"If-Match": etag})
    assert second.json()["etag"] > made.json()["etag"]
    assert (await lead.get(DOC)).json()["body"] == {"round": 2}


async def test_a_repeated_write_has_one_effect_and_one_answer(
    lead: httpx.AsyncClient, market: httpx.AsyncClient
) -> None:
    first = await lead.put(DOC, json={"n": 1}, headers={"If-None-Match": "*", "Idempotency-Key": "a"})
    again = await lead.put(DOC, json={"n": 1}, headers={"If-None-Match": "*", "Idempotency-Key": "a"})
    assert (again.status_code, again.json(), again.headers["etag"]) == (200, first.json(), first.headers["etag"])
    one, two = [
        await market.put(f"{BASE}/contributions/research/MSFT", json={"data": 1}, headers={"Idempotency-Key": "b"})
        for _ in range(2)
    ]
    assert one.json() == two.json()
    assert len((await market.get(f"{BASE}/history/research/MSFT")).json()["events"]) == 2


async def test_agents_contribute_each_to_its_own_section(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, lead: httpx.AsyncClient
) -> None:
    first = await said(market, {"outlook": "growth"}, confidence=0.8)
    assert first["section"] == "market/1"
    versions = (await risk.get(DOC)).json()["versions"]
    await said(risk, "elevated", inputs=versions, instance="b")
    second = await said(market, {"outlook": "decline"})
    shown = (await lead.get(DOC)).json()
    assert set(shown["contributions"]) == {"market/1", "risk/b"}
    assert shown["contributions"]["risk/b"]["inputs"] == {"body": 0, "market/1": first["version"]}
    assert shown["stale"] == [
        {"section": "risk/b", "input": "market/1", "read": first["version"], "present": second["version"]}
    ]
    assert (await said(lead, 1, agent="market"))["section"] == "market/1"
    gone = await market.delete(f"{BASE}/contributions/research/MSFT")
    assert gone.json() == {"deleted": True}
    assert set((await lead.get(DOC)).json()["contributions"]) == {"risk/b"}


async def test_what_belongs_to_others_is_denied(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, lead: httpx.AsyncClient
) -> None:
    await said(risk, 1)
    etag = (await lead.put(DOC, json={"a": 1}, headers={"If-None-Match": "*"})).headers["etag"]
    before = (await lead.get(DOC)).json()
    contributions = f"{BASE}/contributions/research/MSFT"
    for answer in (
        await market.put(contributions, json={"data": 2, "agent": "risk"}),
        await market.put(contributions, json={"data": 2, "agent": "absent"}),
        await market.delete(contributions, params={"agent": "risk"}),
        await market.put(DOC, json={"a": 2}, headers={"If-Match": etag}),
        await market.patch(DOC, json={}),
        await market.delete(DOC),
        await market.put(f"{BASE}/reducers/research/MSFT", json={"reducers": {"a": "sum"}}),
    ):
        assert (answer.status_code, answer.json()["error"]) == (403, "access_denied"), answer.text
    assert (await lead.get(DOC)).json() == before


async def test_in_mode_reject_the_second_instance_gets_a_conflict(market: httpx.AsyncClient) -> None:
    url = f"{BASE}/contributions/research/MSFT"
    first = await said(market, 1, mode="reject", instance="a")
    assert first["section"] == "market/-"
    refused = await market.put(url, json={"data": 2, "mode": "reject", "instance": "b"})
    assert (refused.status_code, refused.json()["version"]) == (409, first["version"])
    versions = (await market.get(DOC)).json()["versions"]
    assert (await said(market, 2, mode="reject", instance="b", inputs=versions))["version"] > first["version"]


async def test_values_are_merged_by_declared_reducers(lead: httpx.AsyncClient) -> None:
    declared = await lead.put(f"{BASE}/reducers/research/MSFT", json={"reducers": {"cost": "sum", "tags": "union"}})
    assert declared.json() == {"reducers": {"cost": "sum", "tags": "union"}}
    for tag in ("a", "b", "a"):
        assert (await lead.patch(DOC, json={"cost": 2, "tags": [tag]})).status_code == 200
    assert (await lead.get(DOC)).json()["body"] == {"cost": 6, "tags": ["a", "b"]}
    assert (await lead.patch(DOC, json={"other": 2})).status_code == 400
    wrong = await lead.put(f"{BASE}/reducers/research/MSFT", json={"reducers": {"cost": "average"}})
    assert wrong.status_code == 400


async def test_a_guard_that_is_lost_writes_nothing(lead: httpx.AsyncClient, clock: ManualClock) -> None:
    guard = (await lead.post(f"{BASE}/locks/documents/research/MSFT", json={"ttl": "5s"})).json()["guard"]
    headers = {"If-None-Match": "*", "Holdfast-Guard": guard}
    etag = (await lead.put(DOC, json={"a": 1}, headers=headers)).headers["etag"]
    clock.advance("6s")
    late = await lead.put(DOC, json={"a": 2}, headers={"If-Match": etag, "Holdfast-Guard": guard})
    assert (late.status_code, late.json()["error"]) == (409, "lease_lost")


async def test_history_is_paged_and_diffs_are_told(lead: httpx.AsyncClient, market: httpx.AsyncClient) -> None:
    first = (await lead.put(DOC, json={"n": 1}, headers={"If-None-Match": "*"})).json()["etag"]
    for number in range(3):
        await said(market, number)
    history = f"{BASE}/history/research/MSFT"
    page = (await market.get(history, params={"limit": 2})).json()
    rest = (await market.get(history, params={"limit": 2, "before": page["next"]})).json()
    assert rest["next"] is None
    assert [event["kind"] for event in page["events"] + rest["events"]] == ["contributed"] * 3 + ["body"]
    assert rest["events"][-1]["changes"] == [{"op": "+", "path": "n", "old": None, "new": 1}]
    diff = (await market.get(f"{BASE}/diffs/research/MSFT", params={"from": first})).json()
    assert diff == {"changes": [{"op": "+", "path": "contributions.market/1", "old": None, "new": 2}]}
    assert (await market.get(f"{BASE}/diffs/research/MSFT", params={"from": 5, "to": 2})).status_code == 400
    assert (await market.get(history, params={"before": "x"})).status_code == 400


async def test_a_page_of_history_is_bounded_in_bytes(
    market: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PAGE_BYTES_MAX", 1000)
    for _ in range(5):
        await said(market, "x" * 600)
    page = (await market.get(f"{BASE}/history/research/MSFT")).json()
    assert (len(page["events"]), page["next"]) == (2, page["events"][-1]["id"])


async def test_a_document_is_bounded_in_bytes_and_its_contributions_come_in_pages(
    lead: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.http.documents.PAGE_BYTES_MAX", 3000)
    monkeypatch.setattr("holdfast.server.http.documents.SCAN_PAGE", 3)
    assert (await lead.put(f"{BASE}/documents/m", json={"round": 1}, headers={"If-None-Match": "*"})).status_code == 200
    versions: dict[str, int] = {}
    for number in range(10):
        told = {"data": "x" * 700, "agent": f"agent-{number}", "instance": "1", "inputs": versions}
        made = await lead.put(f"{BASE}/contributions/m", json=told)
        versions[made.json()["section"]] = made.json()["version"]
    await lead.put(f"{BASE}/contributions/m", json={"data": "y", "agent": "agent-0", "instance": "1"})
    found: dict[str, Any] = {}
    stale: list[dict[str, Any]] = []
    after, pages = None, 0
    while True:
        answer = await lead.get(f"{BASE}/documents/m", params={} if after is None else {"after": after})
        assert len(answer.content) < 3 * 3000
        shown = answer.json()
        assert answer.headers["ETag"].startswith(f'"{shown["etag"]}-')
        assert shown["body"] == ({"round": 1} if after is None else None)
        assert not set(found) & set(shown["contributions"])
        found |= shown["contributions"]
        stale += shown["stale"]
        pages, after = pages + 1, shown["next"]
        if after is None:
            break
    assert sorted(found) == [f"agent-{number}/1" for number in range(10)]
    assert pages >= 3
    assert {each["input"] for each in stale} == {"agent-0/1"}, (
        "and nothing is called gone because it is on another page"
    )


async def test_what_a_reader_has_already_is_told_by_304(port: Running, lead: httpx.AsyncClient) -> None:
    async def asked(tag: str) -> tuple[int, bytes]:
        answer = await lead.get(DOC, headers={"If-None-Match": tag})
        assert answer.headers["etag"]
        return answer.status_code, answer.content

    await lead.put(DOC, json={"n": 1}, headers={"If-None-Match": "*"})
    tags = []
    for change in ("", "a contribution", "another", "reducers", "a withdrawal"):
        if change in ("a contribution", "another"):
            await lead.put(f"{BASE}/contributions/research/MSFT", json={"data": change})
        elif change == "reducers":
            await lead.put(f"{BASE}/reducers/research/MSFT", json={"reducers": {"n": "sum"}})
        elif change == "a withdrawal":
            await lead.delete(f"{BASE}/contributions/research/MSFT")
        assert [(await asked(tag))[0] for tag in tags] == [200] * len(tags), change
        tags.append((await lead.get(DOC)).headers["etag"])
        assert await asked(tags[-1]) == (304, b"")
        assert (await asked(f'"9", {tags[-1]}'))[0] == 304
    written = await lead.put(DOC, json={"n": 2}, headers={"If-Match": tags[-1]})
    assert written.status_code == 200, "what a reader was given is what a writer may name"
    assert (await asked(tags[-1]))[0] == 200
    assert (await lead.put(DOC, json={"n": 3}, headers={"If-Match": tags[-1]})).status_code == 412


async def test_an_override_without_a_justification_is_refused(port: Running, lead: httpx.AsyncClient) -> None:
    async with port.client(MARKET) as market, port.client(RISK) as risk:
        await said(market, {"symbol": "MSFT", "recommendation": "increase"}, confidence=0.9)
        await said(risk, {"symbol": "MSFT", "recommendation": "reduce"}, confidence=0.8)
    [found] = (await lead.get(f"{BASE}/conflicts/research/MSFT")).json()["conflicts"]
    url, settle = f"{BASE}/resolutions/research/MSFT", {"conflict": found["id"], "by": "priority"}
    assert (await lead.post(url, json=settle)).json()["winner"] == "risk/1"
    settle["by"] = "confidence"
    refused = await lead.post(url, json=settle)
    assert (refused.status_code, "needs a justification" in refused.json()["message"]) == (400, True)
    override = (await lead.post(url, json={**settle, "justification": "the ranks were a sample"})).json()
    assert (override["winner"], override["justification"]) == ("market/1", "the ranks were a sample")
    assert (await lead.get(url)).json()["resolutions"] == [override]


async def test_documents_are_listed_page_by_page(lead: httpx.AsyncClient) -> None:
    for name in ("a", "b/1", "b/2"):
        await lead.put(f"{BASE}/documents/{name}", json={}, headers={"If-None-Match": "*"})
    page = (await lead.get(f"{BASE}/documents", params={"limit": 2})).json()
    assert ([each["name"] for each in page["documents"]], page["next"]) == (["a", "b/1"], "b/1")
    rest = (await lead.get(f"{BASE}/documents", params={"after": "b/1"})).json()
    assert ([each["name"] for each in rest["documents"]], rest["next"]) == (["b/2"], None)
    assert len((await lead.get(f"{BASE}/documents", params={"prefix": "b/"})).json()["documents"]) == 2
    assert (await lead.delete(f"{BASE}/documents/a")).json() == {"deleted": True}
    assert (await lead.delete(f"{BASE}/documents/a")).json() == {"deleted": False}


async def test_a_conflict_is_found_waits_for_a_person_and_is_decided(port: Running, lead: httpx.AsyncClient) -> None:
    async with port.client(MARKET) as market, port.client(RISK) as risk:
        await said(market, {"symbol": "MSFT", "recommendation": "increase"}, confidence=0.4)
        await said(risk, {"symbol": "MSFT", "recommendation": "reduce"}, confidence=0.3)
        [found] = (await market.get(f"{BASE}/conflicts/research/MSFT")).json()["conflicts"]
        assert (found["rule"], found["subject"], found["escalated"]) == ("opposite-recommendation", "MSFT", False)
        url = f"{BASE}/resolutions/research/MSFT"
        settle = {"conflict": found["id"], "by": "confidence"}
        assert (await market.post(url, json=settle)).status_code == 403
        waiting = (await lead.post(url, json=settle)).json()
        assert (waiting["winner"], waiting["conflict"]["escalated"]) == (None, True)
        assert (await market.get(f"{BASE}/escalations")).json()["resolutions"] == [waiting]
        decide = {"conflict": found["id"], "by": "person", "winner": "risk/1"}
        assert (await lead.post(url, json=decide)).status_code == 400
        decide["justification"] = "the regulator called"
        decided = await lead.post(url, json=decide, headers={"Idempotency-Key": "d"})
        again = await lead.post(url, json=decide, headers={"Idempotency-Key": "d"})
        assert decided.json() == again.json()
        assert (decided.json()["by"], decided.json()["winner"]) == ("lead", "risk/1")
        assert set(decided.json()["outputs"]) == {"market/1", "risk/1"}
        assert (await market.get(url)).json()["resolutions"] == [decided.json()]
        assert (await market.get(f"{BASE}/conflicts/research/MSFT")).json() == {"conflicts": []}
        assert (await market.get(f"{BASE}/escalations")).json() == {"resolutions": []}
        assert decided.json()["overrode"] is None
        override = {"conflict": found["id"], "by": "person", "winner": "market/1", "justification": "hedged elsewhere"}
        assert (await lead.post(url, json=override)).json()["overrode"] > 0
    missing = await lead.post(f"{BASE}/resolutions/research/MSFT", json={"conflict": "0" * 16})
    assert missing.status_code == 404
