"""Executions of workflows over HTTP, with the rules that ship; and what the metrics say of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast import Context, ManualClock, Space, Store, Worker, workflow
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.server.gauges import Gauges
from holdfast.server.metrics import Metrics
from tests.server.http.keeping import LEAD, MARKET, RISK, TOKENS, running
from tests.server.http.test_correlations import Ruled

BASE = "/v1/spaces/contoso/executions"


@workflow
async def approve(ctx: Context, order: Any) -> Any:
    ctx.state["order"] = order
    answer = await ctx.wait_for("approval")
    if answer is None:
        raise ValueError("nobody")
    return [order, answer]


@workflow(concurrency=1, key=lambda order: order["key"])
async def keyed(ctx: Context, order: Any) -> Any:
    return order


@pytest.fixture
async def clients(store: Store, clock: ManualClock) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    async with running(Ruled(store, clock)) as port:
        opened = {TOKENS[token].agent: port.client(token) for token in (LEAD, MARKET, RISK)}
        yield opened
        for client in opened.values():
            await client.aclose()


@pytest.fixture
async def worker(store: Store, clock: ManualClock) -> AsyncIterator[Worker]:
    coordination = Coordination(Leases(clock))
    space = Space(store._scope("contoso", "worker"), store._blob_folder, coordination)
    async with space.workflows.worker([approve, keyed]) as made:
        yield made
    await coordination.close()


@pytest.mark.usefixtures("worker")
async def test_an_execution_over_http(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, market = clients["lead"], clients["market"]
    body = {"workflow": "approve", "input": {"symbol": "MSFT"}, "id": "desk/17"}
    started = await market.post(BASE, json=body)
    assert (started.status_code, started.json()["id"], started.json()["version"]) == (200, "desk/17", "1")
    assert (await market.post(BASE, json=body)).status_code == 200
    assert (await market.post(BASE, json={**body, "workflow": "keyed", "key": "a"})).status_code == 400
    [listed] = (await market.get(BASE, params={"workflow": "approve"})).json()["executions"]
    assert (listed["id"], listed["workflow"]) == ("desk/17", "approve")
    sent = await market.post(f"{BASE}/desk/17", json={"signal": "approval", "value": "ann"})
    assert (sent.status_code, sent.json()) == (200, {"id": "desk/17"})
    told = (await market.get(f"{BASE}/desk/17", params={"wait": "30s"})).json()
    assert (told["status"], told["result"], told["error"]) == ("completed", [{"symbol": "MSFT"}, "ann"], None)
    late = await market.post(f"{BASE}/desk/17", json={"signal": "approval"})
    assert (late.status_code, late.json()["error"]) == (409, "conflict")
    assert (await lead.delete(f"{BASE}/desk/17")).status_code == 409
    ended = (await lead.get(BASE, params={"status": "completed"})).json()["executions"]
    assert [each["id"] for each in ended] == ["desk/17"]


async def test_a_signal_that_is_repeated_with_its_key_comes_once(clients: dict[str, httpx.AsyncClient]) -> None:
    market, risk = clients["market"], clients["risk"]
    await market.post(BASE, json={"workflow": "approve", "id": "k"})
    key, body = {"Idempotency-Key": "ann-said-so"}, {"signal": "approval", "value": "ann"}
    for _ in range(2):
        sent = await market.post(f"{BASE}/k", json=body, headers=key)
        assert (sent.status_code, sent.json()) == (200, {"id": "k"})
    for other in ({"signal": "approval", "value": "bob"}, {"signal": "refusal", "value": "ann"}):
        refused = await market.post(f"{BASE}/k", json=other, headers=key)
        assert (refused.status_code, "something else" in refused.json()["message"]) == (400, True)
    assert (await risk.post(f"{BASE}/k", json=body, headers=key)).status_code == 200  # keys are an agent's own
    assert (await market.post(f"{BASE}/none", json=body, headers={"Idempotency-Key": "x"})).status_code == 404


async def test_a_repeated_signal_comes_once_also_after_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    key, body, sent = {"Idempotency-Key": "ann"}, {"signal": "approval", "value": "ann"}, list[tuple[int, Any]]()
    for _ in range(2):
        async with (
            holdfast.open(str(tmp_path / "team.db"), clock=clock, background=False) as store,
            running(Ruled(store, clock)) as port,
            port.client(MARKET) as market,
        ):
            await market.post(BASE, json={"workflow": "approve", "id": "k"})
            answer = await market.post(f"{BASE}/k", json=body, headers=key)
            sent.append((answer.status_code, answer.json()))
            kept = await store.engine.scan("contoso", "signals/k/", limit=10)
            assert len(kept.entries) == 1
    assert sent == [(200, {"id": "k"})] * 2
    async with holdfast.open(str(tmp_path / "team.db"), clock=clock, background=False) as store:
        boss = store.space("contoso", agent="boss").workflows
        async with boss.worker([approve]):
            await (await boss.get("k")).result("30s")
        async with running(Ruled(store, clock)) as port, port.client(MARKET) as market:
            again = await market.post(f"{BASE}/k", json=body, headers=key)
            assert (again.status_code, again.json()) == sent[0], "it was sent, whatever came of the execution"
            late = await market.post(f"{BASE}/k", json=body, headers={"Idempotency-Key": "another"})
            assert late.status_code == 409


@pytest.mark.usefixtures("worker")
async def test_failures_and_cancellations_are_told(clients: dict[str, httpx.AsyncClient]) -> None:
    lead, market = clients["lead"], clients["market"]
    for id in ("a", "b"):
        await market.post(BASE, json={"workflow": "approve", "id": id})
    await market.post(f"{BASE}/a", json={"signal": "approval"})
    told = (await market.get(f"{BASE}/a", params={"wait": "30s"})).json()
    assert (told["status"], told["error"]["type"], told["result"]) == ("failed", "ValueError", None)
    denied = await market.delete(f"{BASE}/b")
    assert (denied.status_code, denied.json()["error"]) == (403, "access_denied")
    assert (await lead.delete(f"{BASE}/b")).json() == {"id": "b"}
    told = (await market.get(f"{BASE}/b", params={"wait": "30s"})).json()
    assert (told["status"], told["served"]) == ("cancelled", False)


@pytest.mark.usefixtures("worker")
async def test_a_limit_by_key_needs_its_key(clients: dict[str, httpx.AsyncClient]) -> None:
    market = clients["market"]
    refused = await market.post(BASE, json={"workflow": "keyed", "id": "k"})
    assert (refused.status_code, "name the key" in refused.json()["message"]) == (400, True)
    await market.post(BASE, json={"workflow": "keyed", "id": "k", "key": "a"})
    assert (await market.get(f"{BASE}/k", params={"wait": "30s"})).json()["status"] == "completed"
    refused = await market.post(BASE, json={"workflow": "approve", "key": "a"})
    assert refused.status_code == 400


async def test_what_no_worker_serves_waits_visibly(clients: dict[str, httpx.AsyncClient]) -> None:
    market = clients["market"]
    started = (await market.post(BASE, json={"workflow": "unknown"})).json()
    assert (started["status"], started["served"]) == ("pending", False)
    assert started["result"] is None


async def test_bad_requests_are_refused(clients: dict[str, httpx.AsyncClient]) -> None:
    market = clients["market"]
    for body in (
        {},
        {"workflow": "a/b"},
        {"workflow": "~a"},
        {"workflow": "a", "priority": 1000},
        {"workflow": "a", "x": 1},
    ):
        assert (await market.post(BASE, json=body)).status_code == 400
    assert (await market.get(f"{BASE}/none")).status_code == 404
    assert (await market.post(f"{BASE}/none", json={"signal": "x"})).status_code == 404
    assert (await market.get(BASE, params={"status": "odd"})).status_code == 400
    await market.post(BASE, json={"workflow": "a", "id": "a"})
    assert (await market.get(f"{BASE}/a", params={"wait": "31s"})).status_code == 400
    assert (await market.post(f"{BASE}/a", json={"signal": "~cancel"})).status_code == 400


@pytest.mark.usefixtures("worker")
async def test_the_metrics_count_executions_by_status(
    clients: dict[str, httpx.AsyncClient], store: Store, clock: ManualClock
) -> None:
    market = clients["market"]
    for id in ("a", "b", "c"):
        await market.post(BASE, json={"workflow": "approve", "id": id})
    for id in ("a", "b"):
        await market.post(f"{BASE}/{id}", json={"signal": "approval", "value": 1})
        await market.get(f"{BASE}/{id}", params={"wait": "30s"})
    await market.post(BASE, json={"workflow": "unknown"})
    gauges = Gauges(store, clock)
    await gauges.count()
    told = gauges.executions
    assert (told["completed"], told["pending"] + told["running"], told["failed"]) == (2, 2, 0)
    text = Metrics("1", labelled={"executions": lambda: gauges.executions}, process=False).text().decode()
    assert 'holdfast_executions{status="completed"} 2.0' in text
