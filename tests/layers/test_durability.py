"""What a store's spaces are made with, and a server that cannot give it."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import DurabilityUnavailable, InvalidInput
from holdfast.testing.servers.redis import RedisServer
from tests.servers import started

pytestmark = pytest.mark.every_engine


async def test_a_store_says_what_its_spaces_are_made_with_unless_they_do(url: str) -> None:
    async with holdfast.open(url, durability="async", background=False) as store:
        await store.space("a").records.set("k", 1)
        await store.space("b", durability="sync").records.set("k", 1)
        await store.space("b").records.set("k", 2)  # as it is
        made = {info.name: info.durability for info in await store.spaces()}
        assert made == {"a": "async", "b": "sync"}
        with pytest.raises(InvalidInput):
            await store.space("a", durability="sync").records.set("k", 1)
    with pytest.raises(InvalidInput):
        holdfast.open(url, durability="eternal")  # type: ignore[arg-type]


async def test_a_server_that_cannot_be_durable_is_refused_when_it_is_opened_with_both_ways_out() -> None:
    with started(RedisServer.temporary(appendonly="no")) as server:
        with pytest.raises(DurabilityUnavailable, match=r"appendonly to yes.*durability='async'"):
            await holdfast.open(server.url)
        async with holdfast.open(server.url, durability="async", redact=holdfast.Redaction(fields=["pin"])) as store:
            await store.space("team").records.set("k", 1)
            await store.drop_space("team")
