"""Spaces and their audit over HTTP."""

from __future__ import annotations

import httpx


async def test_an_administrator_makes_lists_and_deletes_spaces(
    admin: httpx.AsyncClient, market: httpx.AsyncClient
) -> None:
    made = await admin.post("/v1/spaces", json={"name": "fabrikam", "durability": "async", "audit_reads": True})
    assert (made.status_code, made.json()["name"], made.json()["durability"]) == (201, "fabrikam", "async")
    assert (await admin.post("/v1/spaces", json={"name": "fabrikam", "durability": "async"})).status_code == 201
    assert (await admin.post("/v1/spaces", json={"name": "fabrikam", "durability": "sync"})).status_code == 400
    await market.put("/v1/spaces/contoso/records/a", json=1)
    assert [space["name"] for space in (await admin.get("/v1/spaces")).json()["spaces"]] == ["contoso", "fabrikam"]
    assert (await admin.get("/v1/spaces/contoso")).json()["usage"][0]["keys"] == 1
    assert (await admin.delete("/v1/spaces/fabrikam")).json() == {"dropped": "fabrikam"}
    assert (await admin.delete("/v1/spaces/fabrikam")).status_code == 404
    assert (await admin.get("/v1/spaces/fabrikam")).status_code == 404


async def test_an_agent_sees_its_own_space_and_makes_and_deletes_none(
    market: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    await admin.post("/v1/spaces", json={"name": "fabrikam"})
    assert (await market.get("/v1/spaces")).json() == {"spaces": []}
    await market.put("/v1/spaces/contoso/records/a", json=1)
    assert [space["name"] for space in (await market.get("/v1/spaces")).json()["spaces"]] == ["contoso"]
    for denied in (
        await market.post("/v1/spaces", json={"name": "contoso"}),
        await market.delete("/v1/spaces/contoso"),
        await market.get("/v1/spaces/fabrikam"),
    ):
        assert (denied.status_code, denied.json()["error"]) == (403, "access_denied")


async def test_the_audit_tells_who_did_what_in_pages_without_secrets(
    market: httpx.AsyncClient, risk: httpx.AsyncClient
) -> None:
    base = "/v1/spaces/contoso"
    steps = [{"operation": "Set", "key": f"k{number}", "value": {"password": "s3cret"}} for number in range(3)]
    await market.post(f"{base}/transactions", json={"operations": steps}, headers={"Idempotency-Key": "t-1"})
    await risk.put(f"{base}/records/r", json=1)
    page = (await market.get(f"{base}/audit", params={"limit": "1"})).json()
    assert [record["key"] for record in page["records"]] == ["records/k0", "records/k1", "records/k2"]
    assert {record["request_id"] for record in page["records"]} == {"t-1"}
    assert "s3cret" not in str(page)
    rest = (await market.get(f"{base}/audit", params={"after": str(page["next"])})).json()
    assert [(record["actor"], record["key"]) for record in rest["records"]] == [("risk", "records/r")]
    assert rest["next"] is None
    own = (await market.get(f"{base}/audit", params={"actor": "risk", "outcome": "committed"})).json()["records"]
    assert [record["key"] for record in own] == ["records/r"]
