"""Queues over HTTP: deliveries under leases of their own, and what agents and orchestrators may do there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import ManualClock, Store
from tests.server.http.keeping import LEAD, MARKET, RISK, TOKENS, running
from tests.server.http.test_correlations import Ruled

BASE = "/v1/spaces/contoso"
Clients = dict[str, httpx.AsyncClient]


@pytest.fixture
async def clients(store: Store, clock: ManualClock) -> AsyncIterator[Clients]:
    async with running(Ruled(store, clock)) as port:
        opened = {TOKENS[token].agent: port.client(token) for token in (LEAD, MARKET, RISK)}
        yield opened
        for client in opened.values():
            await client.aclose()


async def depths(client: httpx.AsyncClient, name: str) -> tuple[int, ...]:
    told = (await client.get(f"{BASE}/queues/{name}")).json()
    return tuple(told[state] for state in ("ready", "delayed", "reserved", "dead"))


async def reserve(client: httpx.AsyncClient, name: str = "orders/eu", **body: Any) -> Any:
    answer = await client.post(f"{BASE}/reservations/{name}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_message_is_put_reserved_and_completed_with_its_result(clients: Clients) -> None:
    market, risk = clients["market"], clients["risk"]
    put = await market.post(f"{BASE}/queues/orders/eu", json={"body": {"id": 1}, "priority": 5})
    assert put.status_code == 200
    found = await reserve(risk)
    assert (found["id"], found["body"], found["priority"]) == (put.json()["id"], {"id": 1}, 5)
    ended = await risk.post(
        f"{BASE}/deliveries/{found['delivery']}", json={"outcome": "complete", "result": "shipped", "to": "done"}
    )
    assert ended.json() == {"id": found["id"], "outcome": "complete"}
    assert (await depths(risk, "orders/eu"), await depths(risk, "done")) == ((0, 0, 0, 0), (1, 0, 0, 0))
    again = await risk.delete(f"{BASE}/deliveries/{found['delivery']}")
    assert (again.status_code, again.json()["error"]) == (409, "lease_lost")
    listed = (await risk.get(f"{BASE}/queues?pattern=d*")).json()["queues"]
    assert [(each["name"], each["message_count"]) for each in listed] == [("done", 1)]
    nothing = await risk.post(f"{BASE}/reservations/orders/eu", json={})
    assert (nothing.status_code, nothing.json()["error"]) == (404, "empty")


async def test_a_put_that_is_repeated_under_its_request_id_is_put_once(clients: Clients) -> None:
    market, headers = clients["market"], {"Idempotency-Key": "order-1"}
    body = {"body": 1, "delay": "1h"}
    first = await market.post(f"{BASE}/queues/orders", json=body, headers=headers)
    assert (await market.post(f"{BASE}/queues/orders", json=body, headers=headers)).json() == first.json()
    assert await depths(market, "orders") == (0, 1, 0, 0)
    other = await market.post(f"{BASE}/queues/orders", json={"body": 2}, headers=headers)
    assert other.status_code == 400
    for key in ("a", "b"):
        again = await market.post(
            f"{BASE}/queues/orders", json={"body": 3, "dedup": "d"}, headers={"Idempotency-Key": key}
        )
        assert again.status_code == 200
    assert await depths(market, "orders") == (1, 1, 0, 0)


async def test_a_delivery_is_good_for_its_lease_and_may_be_extended(clients: Clients, clock: ManualClock) -> None:
    market, risk = clients["market"], clients["risk"]
    for number in (1, 2):
        await market.post(f"{BASE}/queues/orders/eu", json={"body": number})
    first, second = await reserve(risk, lease="10s"), await reserve(risk, lease="10s")
    clock.advance("8s")
    extended = await risk.put(f"{BASE}/deliveries/{second['delivery']}", json={"lease": "60s"})
    assert extended.json()["expires_at"] > second["expires_at"]
    clock.advance("8s")
    assert (await market.post(f"{BASE}/reservations/orders/eu", json={})).status_code == 404
    clock.advance("2s")
    again = await reserve(market)
    assert (again["body"], again["attempts"]) == (1, 1)
    late = await risk.post(f"{BASE}/deliveries/{first['delivery']}", json={"outcome": "release"})
    assert (late.status_code, late.json()["error"]) == (409, "lease_lost")
    assert (await risk.delete(f"{BASE}/deliveries/{second['delivery']}")).status_code == 200


async def test_who_waits_gets_the_message_that_comes(clients: Clients) -> None:
    market, risk = clients["market"], clients["risk"]
    waiting = asyncio.ensure_future(reserve(risk, wait="20s"))
    await asyncio.sleep(0.05)
    await market.post(f"{BASE}/queues/orders/eu", json={"body": "now"})
    assert (await asyncio.wait_for(waiting, 20))["body"] == "now"
    long = await risk.post(f"{BASE}/reservations/orders/eu", json={"wait": "31s"})
    assert (long.status_code, "at most 30 s" in long.json()["message"]) == (400, True)


async def test_failed_deliveries_are_dead_letters_that_orchestrators_treat(clients: Clients) -> None:
    market, risk, lead = clients["market"], clients["risk"], clients["lead"]
    await market.post(f"{BASE}/queues/orders/eu", json={"body": 1})
    found = await reserve(risk)
    assert (await market.get(f"{BASE}/queued/orders/eu?state=reserved")).json()["messages"][0]["owner"] == "risk"
    await risk.post(f"{BASE}/deliveries/{found['delivery']}", json={"outcome": "fail", "reason": "out of stock"})
    [letter] = (await market.get(f"{BASE}/queued/orders/eu?state=dead")).json()["messages"]
    assert [why["reason"] for why in letter["reasons"]] == ["out of stock"]
    denied = await market.post(f"{BASE}/dead-letters/orders/eu", json={"action": "clear"})
    assert denied.status_code == 403
    assert await depths(market, "orders/eu") == (0, 0, 0, 1)
    unknown = await lead.post(f"{BASE}/dead-letters/orders/eu", json={"action": "retry", "ids": ["9" * 19]})
    assert unknown.status_code == 404
    done = await lead.post(f"{BASE}/dead-letters/orders/eu", json={"action": "anew", "ids": [letter["id"]]})
    assert done.json() == {"done": 1}
    [waits] = (await market.get(f"{BASE}/queued/orders/eu")).json()["messages"]
    assert (waits["id"], waits["attempts"]) == (letter["id"], 0)


async def test_a_delivery_is_ended_by_the_agent_that_got_it_alone(clients: Clients) -> None:
    market, risk = clients["market"], clients["risk"]
    await market.post(f"{BASE}/queues/orders/eu", json={"body": 1})
    found = await reserve(risk)
    for stolen in (
        await market.delete(f"{BASE}/deliveries/{found['delivery']}"),
        await market.put(f"{BASE}/deliveries/{found['delivery']}", json={"lease": "1h"}),
        await market.post(f"{BASE}/deliveries/{found['delivery']}", json={"outcome": "release"}),
        await market.post(f"{BASE}/deliveries/{found['delivery']}", json={"outcome": "fail"}),
    ):
        assert stolen.status_code == 403, stolen.text
    assert await depths(risk, "orders/eu") == (0, 0, 1, 0)
    assert (await risk.delete(f"{BASE}/deliveries/{found['delivery']}")).status_code == 200
    forged = await risk.delete(f"{BASE}/deliveries/hfm_cmVjb3Jkcy9h")
    assert forged.status_code == 400
