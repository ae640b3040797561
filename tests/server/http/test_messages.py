"""Document D's envelope: every operation, every spelling, and requests that are repeated."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast import ManualClock
from tests.server.http.keeping import ADMIN, MARKET, Keeper, Running, running

ids = itertools.count()


async def send(client: httpx.AsyncClient, operation: str, id: str | None = None, **payload: Any) -> httpx.Response:
    message = {"id": id or f"m-{next(ids)}", "type": "request", "payload": {"operation": operation, **payload}}
    return await client.post("/v1/messages", json=message)


async def ask(client: httpx.AsyncClient, operation: str, **payload: Any) -> dict[str, Any]:
    response = await send(client, operation, **payload)
    assert response.status_code == 200, response.text
    return response.json()["payload"]  # type: ignore[no-any-return]


async def until_somebody_waits(client: httpx.AsyncClient) -> None:
    while True:
        [line] = (await client.get("/v1/spaces/contoso/locks")).json()["locks"]
        if line["waiters"]:
            return
        await asyncio.sleep(0.01)


async def test_the_reply_is_document_ds(market: httpx.AsyncClient) -> None:
    response = await market.post(
        "/v1/messages",
        json={
            "id": "m-17",
            "type": "request",
            "sender": "somebody else",
            "recipient": "state-keeper",
            "correlationId": "c-1",
            "timestamp": "2026-01-01T00:00:00Z",
            "payload": {"operation": "Get", "key": "counter"},
        },
    )
    reply = response.json()
    assert set(reply) == {"id", "type", "sender", "recipient", "correlationId", "timestamp", "payload"}
    assert (reply["type"], reply["sender"], reply["recipient"]) == ("reply", "state-keeper", "market")
    assert reply["correlationId"] == "m-17"
    assert reply["payload"] == {"value": None}


async def test_every_operation_answers_as_document_d_says(market: httpx.AsyncClient) -> None:
    assert await ask(market, "Set", key="counter", value=43) == {"success": True}
    assert await ask(market, "Get", key="counter") == {"value": 43}
    assert await ask(market, "Increment", key="counter", delta=1) == {"newValue": 44}
    assert await ask(market, "CompareAndSwap", key="leader", old=None, new="market") == {"success": True}
    assert await ask(market, "CompareAndSwap", key="leader", old="market", new="risk") == {"success": True}
    assert await ask(market, "Delete", key="counter") == {"success": True, "existed": True}
    assert await ask(market, "Delete", key="counter") == {"success": True, "existed": False}
    locked = await ask(market, "Lock", key="resource", timeout="5s")
    assert await ask(market, "Unlock", guard=locked["guard"]) == {"success": True}


async def test_a_refusal_is_a_reply_with_an_error_and_its_status(
    market: httpx.AsyncClient, risk: httpx.AsyncClient
) -> None:
    await ask(market, "Set", key="leader", value="market")
    refused = await send(risk, "CompareAndSwap", key="leader", old=None, new="risk")
    assert refused.status_code == 409
    payload = refused.json()["payload"]
    assert (payload["success"], payload["error"], payload["key"]) == (False, "conflict", "leader")
    await ask(market, "Lock", key="resource")
    locked = await send(risk, "Lock", key="resource")
    assert (locked.status_code, locked.json()["payload"]["error"]) == (423, "already_locked")
    text = await send(market, "Increment", key="leader")
    assert (text.status_code, text.json()["payload"]["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("id", ["", "has space", "x" * 101, "a\n", 7])
async def test_a_message_without_a_usable_id_is_refused(market: httpx.AsyncClient, id: Any) -> None:
    response = await market.post("/v1/messages", json={"id": id, "payload": {"operation": "Get", "key": "k"}})
    assert (response.status_code, (response.json().get("payload") or response.json())["error"]) == (
        400,
        "invalid_request",
    )


@pytest.mark.parametrize(
    "payload",
    [
        {"Operation": "Set", "Key": "k", "Value": 1},
        {"operation": "SetRequest", "key": "k", "value": 1},
        {"op": "set", "KEY": "k", "value": 1},
        {"operation": "SetOp", "key": "k", "value": 1, "TTL": {"seconds": 5, "nanos": 0}},
        {"operation": "set", "key": "k", "value": 1, "ttl": 5},
    ],
)
async def test_document_ds_spellings_are_understood(market: httpx.AsyncClient, payload: dict[str, Any]) -> None:
    response = await market.post("/v1/messages", json={"id": "m", "payload": payload})
    assert response.json()["payload"] == {"success": True}
    assert await ask(market, "Get", key="k") == {"value": 1}


async def test_a_name_given_twice_in_two_spellings_is_refused(market: httpx.AsyncClient) -> None:
    response = await send(market, "Set", key="a", Key="b", value=1)
    assert (response.status_code, response.json()["payload"]["error"]) == (400, "invalid_request")


async def test_an_unknown_operation_and_an_unknown_field_are_refused(market: httpx.AsyncClient) -> None:
    for response in (
        await send(market, "Destroy", key="a"),
        await send(market, "Get", key="a", colour="red"),
        await send(market, "Lock", key="a", wait={}),
        await send(market, "Lock", key="a", timeout={"fortnights": 1}),
    ):
        assert (response.status_code, response.json()["payload"]["error"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("payload", "there"),
    [
        ({"operation": "Watch", "key": "a"}, "Get, Set, Delete, Increment, CompareAndSwap, Lock, Unlock, Transaction"),
        (
            {"operation": "Transaction", "operations": [{"operation": "Lock", "key": "a"}]},
            "Get, Set, Delete, Increment, CompareAndSwap",
        ),
        (
            {
                "operation": "Transaction",
                "operations": [{"operation": "Delete", "key": "a"}],
                "conditions": [{"condition": "Odd", "key": "a"}],
            },
            "Absent, Present, VersionIs, ValueIs, AtLeast",
        ),
    ],
)
async def test_who_asks_for_what_there_is_not_is_told_what_there_is(
    market: httpx.AsyncClient, payload: dict[str, Any], there: str
) -> None:
    response = await market.post("/v1/messages", json={"id": "m", "payload": payload})
    told = response.json()["payload"]
    assert (response.status_code, told["error"]) == (400, "invalid_request")
    assert told["message"].endswith(f"; there are {there}")


@pytest.mark.parametrize("asked", [500_000_000, 5_000_000_000, 2_592_001, "31d"])
async def test_a_lock_for_so_long_that_nobody_means_it_is_refused_with_the_unit(
    market: httpx.AsyncClient, asked: Any
) -> None:
    refused = await send(market, "Lock", key="a", timeout=asked)
    assert (refused.status_code, refused.json()["payload"]["error"]) == (400, "invalid_request")
    assert "at most 30 days" in refused.json()["payload"]["message"]
    assert "write seconds, or '500ms'" in refused.json()["payload"]["message"]
    rest = await market.post("/v1/spaces/contoso/locks/a", json={"ttl": asked})
    assert (rest.status_code, "at most 30 days" in rest.json()["message"]) == (400, True)
    held = await ask(market, "Lock", key="a", timeout="30d")
    renewed = await market.put(f"/v1/spaces/contoso/guards/{held['guard']}", json={"ttl": asked})
    assert (renewed.status_code, "at most 30 days" in renewed.json()["message"]) == (400, True)


async def test_a_lock_that_names_no_timeout_ends_after_five_seconds(
    market: httpx.AsyncClient, risk: httpx.AsyncClient, clock: ManualClock
) -> None:
    await ask(market, "Lock", key="resource")
    clock.advance("4900ms")
    assert (await send(risk, "Lock", key="resource")).status_code == 423
    clock.advance("200ms")
    assert "guard" in await ask(risk, "Lock", key="resource")


async def test_a_lock_may_be_waited_for(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    guard = (await ask(market, "Lock", key="resource", timeout=30))["guard"]
    waiting = asyncio.create_task(ask(risk, "Lock", key="resource", wait="20s"))
    await until_somebody_waits(risk)
    await ask(market, "Unlock", guard=guard)
    assert "guard" in await asyncio.wait_for(waiting, 20)


async def test_only_the_owner_unlocks(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    guard = (await ask(market, "Lock", key="resource"))["guard"]
    stolen = await send(risk, "Unlock", guard=guard)
    assert (stolen.status_code, stolen.json()["payload"]["error"]) == (403, "access_denied")
    assert await ask(market, "Unlock", guard=guard) == {"success": True}
    over = await send(market, "Unlock", guard=guard)
    assert (over.status_code, over.json()["payload"]["error"]) == (409, "lease_lost")


async def test_document_ds_own_sample_which_has_no_id_is_answered_under_one_that_was_made(
    market: httpx.AsyncClient,
) -> None:
    sample = {
        "type": "request",
        "sender": "agent-1",
        "recipient": "state-keeper",
        "payload": {"operation": "Increment", "key": "counter"},
    }
    replies = [(await market.post("/v1/messages", json=sample)).json() for _ in range(2)]
    assert [reply["payload"] for reply in replies] == [{"newValue": 1}, {"newValue": 2}]
    assert replies[0]["correlationId"] != replies[1]["correlationId"]
    again = await market.post("/v1/messages", json={**sample, "id": replies[1]["correlationId"]})
    assert again.json() == replies[1]


@pytest.mark.parametrize("guard", ["hfg_", "hfg_x", "hfg_Zy9sb2Nr", "nonsense", "hfg_" + "A" * 2000])
async def test_a_guard_of_ones_own_making_is_refused(market: httpx.AsyncClient, guard: str) -> None:
    assert (await send(market, "Unlock", guard=guard)).status_code == 400


async def test_a_write_under_a_guard_is_refused_once_it_is_over(market: httpx.AsyncClient, clock: ManualClock) -> None:
    guard = (await ask(market, "Lock", key="resource", timeout="5s"))["guard"]
    assert await ask(market, "Set", key="cash", value=10, guard=guard) == {"success": True}
    clock.advance("6s")
    late = await send(market, "Set", key="cash", value=20, guard=guard)
    assert (late.status_code, late.json()["payload"]["error"]) == (409, "lease_lost")
    assert await ask(market, "Get", key="cash") == {"value": 10}


async def test_a_pool_is_taken_from_only_while_there_is_some(market: httpx.AsyncClient) -> None:
    await ask(market, "Set", key="pool_available", value=1)
    take = {
        "conditions": [{"condition": "AtLeast", "key": "pool_available", "number": 1}],
        "operations": [
            {"operation": "Get", "key": "pool_available"},
            {"operation": "Increment", "key": "pool_available", "delta": -1},
        ],
    }
    assert await ask(market, "Transaction", **take) == {"result": 0, "results": [1, 0]}
    empty = await send(market, "Transaction", **take)
    assert (empty.status_code, empty.json()["payload"]["error"]) == (409, "conflict")
    assert await ask(market, "Get", key="pool_available") == {"value": 0}


REPEATED: list[tuple[str, dict[str, Any]]] = [
    ("Set", {"key": "counter", "value": 7}),
    ("Increment", {"key": "counter"}),
    ("Delete", {"key": "counter"}),
    ("CompareAndSwap", {"key": "counter", "old": 1, "new": 2}),
    ("Lock", {"key": "resource", "timeout": "60s"}),
    (
        "Transaction",
        {"operations": [{"operation": "Increment", "key": "counter"}, {"operation": "Get", "key": "counter"}]},
    ),
    (
        "Transaction",
        {"operations": [{"operation": "Get", "key": "counter"}, {"operation": "Increment", "key": "counter"}]},
    ),
]


@pytest.mark.parametrize(
    ("operation", "payload"), REPEATED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(REPEATED)]
)
async def test_a_repeated_request_gets_the_identical_reply_and_has_no_second_effect(
    tmp_path: Path, operation: str, payload: dict[str, Any]
) -> None:
    """Also after the store was closed, opened again and changed by others."""
    clock, replies = ManualClock(), []
    for _ in range(2):
        async with holdfast.open(str(tmp_path / "team.db"), clock=clock, background=False) as store:
            space = store.space("contoso", agent="other")
            if not replies:
                await space.records.set("counter", 1)
            async with running(Keeper(store, clock)) as port, port.client(MARKET) as client:
                replies.append((await send(client, operation, "m-1", **payload)).content)
                revision = (await space.info()).revision
                await space.records.increment("others", 1)
                clock.advance("1s")
                replies.append((await send(client, operation, "m-1", **payload)).content)
                assert (await space.info()).revision == revision + 1
    assert len(set(replies)) == 1, replies
    assert b'"error"' not in replies[0]


async def test_an_unlock_that_is_repeated_gets_the_same_reply(
    market: httpx.AsyncClient, risk: httpx.AsyncClient
) -> None:
    guard = (await ask(market, "Lock", key="resource"))["guard"]
    first = await send(market, "Unlock", "u-1", guard=guard)
    await ask(risk, "Lock", key="resource")
    assert (await send(market, "Unlock", "u-1", guard=guard)).content == first.content
    assert (await market.get("/v1/spaces/contoso/locks")).json()["locks"][0]["holders"][0]["agent"] == "risk"


async def test_a_lock_sent_twice_at_once_is_one_lock(market: httpx.AsyncClient, risk: httpx.AsyncClient) -> None:
    guard = (await ask(risk, "Lock", key="resource", timeout=60))["guard"]
    both = [asyncio.create_task(send(market, "Lock", "l-1", key="resource", timeout=60, wait="20s")) for _ in range(2)]
    await until_somebody_waits(risk)
    await ask(risk, "Unlock", guard=guard)
    first, second = await asyncio.gather(*both)
    assert first.content == second.content
    [line] = (await risk.get("/v1/spaces/contoso/locks")).json()["locks"]
    assert (len(line["holders"]), line["waiters"]) == (1, [])


async def test_an_id_that_is_used_for_something_else_is_refused(market: httpx.AsyncClient) -> None:
    await send(market, "Set", "m-1", key="a", value=1)
    other = await send(market, "Set", "m-1", key="a", value=2)
    assert (other.status_code, other.json()["payload"]["error"]) == (400, "invalid_request")
    assert await ask(market, "Get", key="a") == {"value": 1}


async def test_an_administrator_names_the_space_and_an_agent_has_its_own(
    port: Running, market: httpx.AsyncClient
) -> None:
    await ask(market, "Set", key="a", value=1)
    get = {"operation": "Get", "key": "a"}
    async with port.client(ADMIN) as admin:
        none = await admin.post("/v1/messages", json={"id": "1", "payload": get})
        assert (none.status_code, none.json()["payload"]["error"]) == (400, "invalid_request")
        named = (
            await admin.post("/v1/messages", json={"id": "1", "payload": get}, headers={"Holdfast-Space": "contoso"}),
            await admin.post("/v1/messages", json={"id": "1", "payload": {**get, "space": "contoso"}}),
            await admin.post("/v1/messages", json={"id": "1", "payload": get, "recipient": "state-keeper/contoso"}),
        )
        assert [response.json()["payload"] for response in named] == [{"value": 1}] * 3
    for space in ("fabrikam", "does-not-exist"):
        refused = await market.post("/v1/messages", json={"id": "1", "payload": {**get, "space": space}})
        assert (refused.status_code, refused.json()["payload"]["error"]) == (403, "access_denied")
