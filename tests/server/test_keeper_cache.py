"""A keeper's clients with a hot tier in their memory: filled and followed by what their token may read, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import holdfast
from holdfast import InvalidInput
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, client, make_token

DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary() as running:
        yield running


async def test_an_agent_has_a_hot_tier_and_hears_of_the_changes_of_others(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "reader")
    async with client(keeper, "writer") as (_, writer), holdfast.open(keeper.url, token=token, cache="memory") as store:
        await writer.records.set("n", 1)
        space = store.space(SPACE)
        for _ in range(5):
            assert await space.records.get("n", consistency="session") == 1
        assert store.cache is not None
        assert store.cache.stats.hits == 4
        await writer.records.set("n", 2)
        async with asyncio.timeout(DEADLINE_S):
            while await space.records.get("n", consistency="eventual") != 2:
                await asyncio.sleep(0.005)
        await space.records.set("n", 3)
        async with space.lock("l"):  # a commit that it does not hear of
            await space.records.get("n", consistency="session")
        assert await space.records.get("n", consistency="session") == 3
        assert store.cache.stats.spaces == 1
    async with client(keeper, "auditor", role="orchestrator") as (_, auditor):
        denied = [record async for record in auditor.audit.records() if record.outcome == "denied"]
        assert denied == []


async def test_an_agents_session_reads_of_a_document_hit_and_hear_of_contributions(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "analyst")
    async with (
        client(keeper, "desk", role="orchestrator") as (_, desk),
        client(keeper, "colleague") as (_, colleague),
        holdfast.open(keeper.url, token=token, cache="memory") as store,
    ):
        await desk.document("research").update(lambda body: {**body, "round": 1})
        await colleague.document("research").contribute({"outlook": "growth"})
        document = store.space(SPACE).document("research")
        await document.read()
        assert store.cache is not None
        hits, misses = store.cache.stats.hits, store.cache.stats.misses
        for _ in range(10):
            view = await document.read()
        assert view.contributions["colleague"].data == {"outlook": "growth"}
        assert (store.cache.stats.hits - hits, store.cache.stats.misses - misses) == (30, 0)
        await colleague.document("research").contribute({"outlook": "decline"})
        async with asyncio.timeout(DEADLINE_S):
            while (await document.read(consistency="eventual")).contributions["colleague"].data["outlook"] != "decline":
                await asyncio.sleep(0.005)


async def test_what_rules_let_one_read_is_not_put_where_others_read_it(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "sharer")
    with pytest.raises(InvalidInput, match="others share"):
        await holdfast.open(keeper.url, token=token, cache="redis://127.0.0.1:1")
