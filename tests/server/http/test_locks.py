"""Locks over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from holdfast import ManualClock, Store
from holdfast.engine import Batch, Push
from holdfast.server.http.guards import guard_text
from tests.server.http.keeping import RISK, Running

BASE = "/v1/spaces/contoso"
DEADLINE_S = 20


async def test_a_guard_is_acquired_renewed_and_released(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, clock: ManualClock
) -> None:
    held = (await market.post(f"{BASE}/locks/portfolio/MSFT", json={"ttl": "5s"})).json()
    assert (held["kind"], held["name"]) == ("lock", "portfolio/MSFT")
    assert held["expires_at"] > held["acquired_at"]
    taken = await risk.post(f"{BASE}/locks/portfolio/MSFT", json={})
    assert (taken.status_code, taken.json()["error"]) == (423, "already_locked")
    assert "market" in taken.json()["message"]
    clock.advance("4s")
    renewed = await market.put(f"{BASE}/guards/{held['guard']}", json={"ttl": "5s"})
    assert renewed.json()["expires_at"] > held["expires_at"]
    clock.advance("4s")
    assert (await risk.post(f"{BASE}/locks/portfolio/MSFT", json={})).status_code == 423
    assert (await market.delete(f"{BASE}/guards/{held['guard']}")).json() == {"released": True}
    successor = (await risk.post(f"{BASE}/locks/portfolio/MSFT", json={})).json()
    assert successor["token"] > held["token"]


async def test_the_server_renews_nothing(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, clock: ManualClock
) -> None:
    guard = (await market.post(f"{BASE}/locks/l", json={"ttl": "3s"})).json()["guard"]
    for _ in range(4):
        clock.advance("1s")
        await asyncio.sleep(0.01)
    assert (await risk.post(f"{BASE}/locks/l", json={})).status_code == 200
    for over in (await market.put(f"{BASE}/guards/{guard}", json={}), await market.delete(f"{BASE}/guards/{guard}")):
        assert (over.status_code, over.json()["error"]) == (409, "lease_lost")


async def test_another_agents_guard_is_of_no_use(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    guard = (await market.post(f"{BASE}/locks/l", json={})).json()["guard"]
    for stolen in (await risk.put(f"{BASE}/guards/{guard}", json={}), await risk.delete(f"{BASE}/guards/{guard}")):
        assert (stolen.status_code, stolen.json()["error"]) == (403, "access_denied")
    assert (await market.delete(f"{BASE}/guards/{guard}")).status_code == 200


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ({"kind": "semaphore", "size": 2}, {"kind": "semaphore", "size": 2}, {"kind": "semaphore", "size": 2}),
        ({"kind": "rw", "shared": True}, {"kind": "rw", "shared": True}, {"kind": "rw"}),
        ({"kind": "pool", "size": 5, "units": 3}, {"kind": "pool", "size": 5, "units": 2}, {"kind": "pool", "size": 5}),
    ],
    ids=["semaphore", "rw", "pool"],
)
async def test_two_may_hold_and_the_third_may_not(
    market: httpx.AsyncClient, first: dict[str, object], second: dict[str, object], third: dict[str, object]
) -> None:
    for body, status in ((first, 200), (second, 200), (third, 423)):
        response = await market.post(f"{BASE}/locks/thing", json=body)
        assert response.status_code == status, response.text


async def test_one_leads_and_the_next_has_a_higher_epoch(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    term = (await market.post(f"{BASE}/locks/leader", json={"kind": "election"})).json()
    assert (await risk.post(f"{BASE}/locks/leader", json={"kind": "election"})).status_code == 423
    await market.delete(f"{BASE}/guards/{term['guard']}")
    assert (await risk.post(f"{BASE}/locks/leader", json={"kind": "election"})).json()["token"] > term["token"]


async def test_a_semaphore_of_another_size_or_of_none_is_refused(market: httpx.AsyncClient) -> None:
    await market.post(f"{BASE}/locks/gpu", json={"kind": "semaphore", "size": 2})
    for body in ({"kind": "semaphore", "size": 3}, {"kind": "semaphore"}, {"kind": "mutex"}, {"size": 0}):
        response = await market.post(f"{BASE}/locks/gpu", json=body)
        assert (response.status_code, response.json()["error"]) == (400, "invalid_request")


async def test_waiting_is_bounded_and_in_order(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, clock: ManualClock
) -> None:
    for wait in (31, "31s", "1h"):
        assert (await market.post(f"{BASE}/locks/l", json={"wait": wait})).status_code == 400
    guard = (await market.post(f"{BASE}/locks/l", json={"ttl": 60})).json()["guard"]
    waits = [asyncio.create_task(client.post(f"{BASE}/locks/l", json={"wait": 20})) for client in (risk, market)]
    while True:
        [line] = (await risk.get(f"{BASE}/locks")).json()["locks"]
        if len(line["waiters"]) == 2:
            break
        await asyncio.sleep(0.01)
    assert [stand["agent"] for stand in line["holders"]] == ["market"]
    await market.delete(f"{BASE}/guards/{guard}")
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert [task.result().status_code for task in done] == [200]
    clock.advance("21s")
    answers = await asyncio.wait_for(asyncio.gather(*waits), 20)
    assert sorted(answer.status_code for answer in answers) == [200, 423]


async def test_only_an_administrator_breaks_a_lock_and_the_audit_tells(
    market: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    await market.post(f"{BASE}/locks/l", json={})
    denied = await market.delete(f"{BASE}/locks/l")
    assert (denied.status_code, denied.json()["error"]) == (403, "access_denied")
    broken = await admin.delete(f"{BASE}/locks/l")
    assert [stand["agent"] for stand in broken.json()["broken"]] == ["market"]
    assert (await admin.delete(f"{BASE}/locks/l")).status_code == 404
    records = (await admin.get(f"{BASE}/audit", params={"actor": "root"})).json()["records"]
    assert [(record["operation"], record["key"].split("/")[:3]) for record in records] == [
        ("delete", ["locks", "lock", "l"])
    ]


async def test_who_goes_away_while_it_stands_in_line_is_skipped(port: Running, market: httpx.AsyncClient) -> None:
    held = (await market.post(f"{BASE}/locks/book", json={})).json()
    for key in ({}, {"Idempotency-Key": "order-17"}):
        async with port.client(RISK) as leaving:
            asked = asyncio.create_task(leaving.post(f"{BASE}/locks/book", json={"wait": "30s"}, headers=key))
            await waiters(market, 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        await waiters(market, 0)
    await market.delete(f"{BASE}/guards/{held['guard']}")
    async with port.client(RISK) as back:
        repeated = await back.post(f"{BASE}/locks/book", json={}, headers={"Idempotency-Key": "order-17"})
    assert repeated.status_code == 200


async def waiters(client: httpx.AsyncClient, count: int) -> None:
    """Return when so many stand in line for the book."""
    async with asyncio.timeout(DEADLINE_S):
        while len((await client.get(f"{BASE}/locks")).json()["locks"][0]["waiters"]) != count:
            await asyncio.sleep(0.01)


async def test_what_means_nothing_for_a_kind_is_refused(market: httpx.AsyncClient) -> None:
    for body in (
        {"size": 2},
        {"shared": True},
        {"kind": "election", "shared": True},
        {"kind": "rw", "size": 2},
        {"kind": "semaphore", "size": 3, "units": 2},
    ):
        refused = await market.post(f"{BASE}/locks/l", json=body)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid_request")
        assert "means nothing for the kind" in refused.json()["message"]
    assert (await market.get(f"{BASE}/locks")).json() == {"locks": []}


async def test_whose_token_is_revoked_while_it_stands_in_line_is_skipped(
    port: Running, market: httpx.AsyncClient, clock: ManualClock
) -> None:
    await market.post(f"{BASE}/locks/book", json={"ttl": "1h"})
    async with port.client(RISK) as waiting:
        asked = asyncio.create_task(waiting.post(f"{BASE}/locks/book", json={"wait": "30s"}))
        await waiters(market, 1)
        port.keeper.revoked.add(RISK)
        clock.advance("1s")
        refused = await asyncio.wait_for(asked, DEADLINE_S)
    assert (refused.status_code, refused.json()["error"]) == (401, "authentication_failed")
    await waiters(market, 0)


async def test_nobody_writes_under_another_agents_guard(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    guard = (await market.post(f"{BASE}/locks/l", json={})).json()["guard"]
    under = {"Holdfast-Guard": guard}
    message = {"payload": {"operation": "Set", "key": "cash", "value": 1, "guard": guard}}
    transaction = {"operations": [{"operation": "Set", "key": "cash", "value": 1}]}
    for stolen in (
        await risk.put(f"{BASE}/records/cash", json=1, headers=under),
        await risk.post(f"{BASE}/counters/cash", json={}, headers=under),
        await risk.post(f"{BASE}/lists/cash", json={"values": [1]}, headers=under),
        await risk.post(f"{BASE}/transactions", json=transaction, headers=under),
        await risk.post("/v1/messages", json=message),
    ):
        told = stolen.json()
        assert (stolen.status_code, told.get("payload", told)["error"]) == (403, "access_denied")
    assert (await risk.get(f"{BASE}/records/cash")).status_code == 404
    assert (await market.put(f"{BASE}/records/cash", json=1, headers=under)).status_code == 200


@pytest.mark.parametrize("size", [None, 2])
async def test_a_guard_made_by_hand_for_a_place_that_still_waits_writes_nothing(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, store: Store, size: int | None
) -> None:
    body = {"ttl": "30s"} if size is None else {"ttl": "30s", "kind": "semaphore", "size": size}
    kind, now = ("lock", 1) if size is None else ("semaphore", size)
    held = [(await market.post(f"{BASE}/locks/l", json=body)).json()["guard"] for _ in range(now)]
    waiting = Push(f"locks/{kind}/l/", b'{"instance":"w"}', 30_000)
    receipt = await store.engine.commit("contoso", Batch("risk", (waiting,)))
    made = guard_text(kind, "l", str(receipt.results[0]).rpartition("/")[2])  # type: ignore[arg-type]
    early = await risk.put(f"{BASE}/records/cash", json=1, headers={"Holdfast-Guard": made})
    assert (early.status_code, early.json()["error"]) == (409, "lease_lost")
    assert "turn has not come" in early.json()["message"]
    assert (await risk.get(f"{BASE}/records/cash")).status_code == 404
    assert (await market.delete(f"{BASE}/guards/{held[0]}")).status_code == 200
    assert (await risk.put(f"{BASE}/records/cash", json=1, headers={"Holdfast-Guard": made})).status_code == 200


async def test_a_write_under_a_guard_that_is_repeated_after_its_end_gets_the_same_answer(
    market: httpx.AsyncClient,
) -> None:
    guard = (await market.post(f"{BASE}/locks/l", json={})).json()["guard"]
    headers = {"Holdfast-Guard": guard, "Idempotency-Key": "k1"}
    first = await market.put(f"{BASE}/records/cash", json=1, headers=headers)
    await market.delete(f"{BASE}/guards/{guard}")
    again = await market.put(f"{BASE}/records/cash", json=1, headers=headers)
    assert (again.status_code, again.json()) == (first.status_code, first.json()) == (200, first.json())
