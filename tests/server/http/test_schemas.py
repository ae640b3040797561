"""Schemas over HTTP: what is written is checked by the keeper, older data comes in its newest version, and they can be read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast import Space, Store

SPACE = "contoso"

BASE = f"/v1/spaces/{SPACE}"
ORDER = {"type": "object", "required": ["qty"], "properties": {"qty": {"type": "integer"}}}
ORDER_2 = {"type": "object", "required": ["amount"]}


@pytest.fixture
async def space(store: Store) -> Space:
    space = store.space(SPACE, agent="boss")
    await space.schemas.register("order", "1.0.0", ORDER)
    return space


async def put(client: httpx.AsyncClient, key: str, value: Any) -> httpx.Response:
    return await client.put(f"{BASE}/records/{key}", json=value, params={"type": "order"})


async def test_what_is_written_over_http_is_checked(market: httpx.AsyncClient, space: Space) -> None:
    refused = await put(market, "k", {"qty": "many"})
    assert (refused.status_code, refused.json()["error"], refused.json()["path"]) == (400, "schema_violation", "/qty")
    step = {"operation": "Set", "key": "k", "value": {}, "type": "order"}
    refused = await market.post(f"{BASE}/transactions", json={"operations": [step]})
    assert (refused.status_code, refused.json()["error"]) == (400, "schema_violation")
    assert (await market.get(f"{BASE}/records/k")).status_code == 404
    assert (await put(market, "k", {"qty": 1})).status_code == 200
    read = await market.get(f"{BASE}/records/k")
    assert read.headers["holdfast-schema-version"] == "1.0.0"


async def test_older_data_comes_in_its_newest_version_or_says_what_is_missing(
    market: httpx.AsyncClient, space: Space
) -> None:
    await put(market, "k", {"qty": 1})
    await space.schemas.register("order", "2.0.0", ORDER_2)
    missing = await market.get(f"{BASE}/records/k")
    assert (missing.status_code, missing.json()["error"]) == (409, "migration_failed")
    listed = (await market.get(f"{BASE}/records", params={"values": "true"})).json()["records"]
    assert [(each["value"], each["schema_version"]) for each in listed] == [({"qty": 1}, "1.0.0")]
    space.schemas.add_step("order", "1.0.0", "2.0.0", lambda order: {"amount": order["qty"]})
    read = await market.get(f"{BASE}/records/k")
    assert (read.json(), read.headers["holdfast-schema-version"]) == ({"amount": 1}, "2.0.0")


async def test_schemas_can_be_read(market: httpx.AsyncClient, space: Space) -> None:
    await space.schemas.register("order", "2.0.0", ORDER_2)
    listed = (await market.get(f"{BASE}/schemas")).json()["schemas"]
    assert [(each["type"], each["version"], each["registered_by"]) for each in listed] == [
        ("order", "1.0.0", "boss"),
        ("order", "2.0.0", "boss"),
    ]
    assert (await market.get(f"{BASE}/schemas/order")).json()["schema"] == ORDER_2
    assert (await market.get(f"{BASE}/schemas/order", params={"version": "v1.0.0"})).json()["schema"] == ORDER
    assert (await market.get(f"{BASE}/schemas/trade")).status_code == 404
    assert (await market.get(f"{BASE}/schemas/order", params={"version": "newest"})).status_code == 400
    assert (await market.get("/v1/spaces/other/schemas")).status_code == 403
