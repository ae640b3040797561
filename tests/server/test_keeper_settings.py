"""Settings of a keeper that its HTTP port goes by, as a running one has them and as they change."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import DEADLINE_S, http, make_token

ids = itertools.count()


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(timeout_default="7s") as running:
        yield running


async def send(client: httpx.AsyncClient, operation: str, **payload: Any) -> httpx.Response:
    message = {"id": f"m-{next(ids)}", "type": "request", "payload": {"operation": operation, **payload}}
    return await client.post("/v1/messages", json=message)


async def held_for(client: httpx.AsyncClient, key: str, **payload: Any) -> float:
    """For how many seconds a lock is held."""
    response = await send(client, "Lock", key=key, **payload)
    assert response.status_code == 200, response.text
    reply = response.json()
    until, at = (datetime.fromisoformat(each) for each in (reply["payload"]["expiresAt"], reply["timestamp"]))
    [line] = (await client.get("/v1/spaces/contoso/locks", params={"prefix": key})).json()["locks"]
    assert datetime.fromisoformat(line["holders"][0]["expires_at"]) == until, "the store says so too"
    return (until - at).total_seconds()


async def changed(keeper: KeeperServer, settings: str, **changes: Any) -> None:
    """New settings are in force."""
    keeper.write_settings(**changes)
    keeper.signal(signal.SIGHUP)
    async with asyncio.timeout(DEADLINE_S):
        while f"the configuration was reloaded: {settings} changed" not in keeper.log.read_text():
            await asyncio.sleep(0.02)


async def test_a_lock_whose_message_names_no_timeout_is_held_as_long_as_the_settings_say(keeper: KeeperServer) -> None:
    async with http(keeper, await make_token(keeper, "market")) as market:
        assert await held_for(market, "first") == 7
        assert await held_for(market, "named", timeout="2s") == 2
        await changed(keeper, "timeout_default", timeout_default="90s")
        assert await held_for(market, "second") == 90
        assert await held_for(market, "named again", timeout=3) == 3


async def test_the_largest_request_of_the_settings_holds_for_bodies_too(keeper: KeeperServer) -> None:
    async with http(keeper, await make_token(keeper, "writer")) as writer:
        url, body = "/v1/spaces/contoso/records/large", {"value": "x" * 100_000}
        assert (await writer.put(url, json=body)).status_code == 200
        await changed(keeper, "limits", limits={"frame_bytes": "64 KB"})
        refused = await writer.put(url, json=body)
        assert (refused.status_code, "at most 65,536 bytes" in refused.text) == (413, True)
