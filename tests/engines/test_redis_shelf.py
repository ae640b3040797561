"""Copies in Redis: an earlier revision never replaces a later one, and a server that fails is a shelf without copies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.servers import started

from holdfast.engines import redis_shelf
from holdfast.engines.redis_shelf import RedisShelf
from holdfast.errors import InvalidInput
from holdfast.testing.servers.redis import RedisCluster, RedisServer

_numbers = itertools.count(1)
SPACE = "contoso.0123456789abcdef"
NAME = "entry:records/a"
DEADLINE_S = 15.0


@pytest.fixture
async def shelf(redis_server: RedisServer) -> AsyncIterator[RedisShelf]:
    opened = await RedisShelf.open(f"{redis_server.url}?prefix=shelf{next(_numbers)}")
    yield opened
    await opened.close()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """One that a test may stop: a cache, which keeps nothing on disk."""
    with started(RedisServer.temporary(appendonly="no")) as running:
        yield running


async def test_a_copy_is_replaced_by_those_of_later_revisions_alone(shelf: RedisShelf) -> None:
    assert await shelf.get(SPACE, NAME) is None
    for at, copy, kept in [
        (10, b"ten", True),
        (9, b"nine", False),
        (10, b"ten again", True),
        (2**62, b"\x00\xff high", True),
        (2**53 + 1, b"low", False),
        (2**62 + 1, b"", True),
    ]:
        before = await shelf.get(SPACE, NAME)
        assert await shelf.put(SPACE, NAME, at, copy, 60_000) is kept
        assert await shelf.get(SPACE, NAME) == (copy if kept else before)
    assert await shelf.get_all(SPACE, ["entry:records/none", NAME]) == [None, await shelf.get(SPACE, NAME)]
    assert shelf.errors == 0


async def test_copies_have_a_ttl_and_belong_to_a_space(shelf: RedisShelf, redis_server: RedisServer) -> None:
    await shelf.put(SPACE, NAME, 1, b"copy", 300_000)
    key = f"{shelf._url.prefix}:cache:{{{SPACE}}}:{NAME}"
    assert 290_000 < int(redis_server.command("PTTL", key).removeprefix(":")) <= 300_000
    assert await shelf.get("contoso.fedcba9876543210", NAME) is None
    await shelf.put("a{b}c", NAME, 1, b"braces", 300_000)
    assert await shelf.get("a{b}c", NAME) == b"braces"


async def test_a_cluster_keeps_copies_too(redis_cluster: RedisCluster) -> None:
    shelf = await RedisShelf.open(f"{redis_cluster.url}?prefix=shelf{next(_numbers)}")
    for number in range(10):
        assert await shelf.put(f"space{number}", NAME, 1, b"%d" % number, 60_000)
    assert [await shelf.get(f"space{number}", NAME) for number in range(10)] == [b"%d" % n for n in range(10)]
    await shelf.close()


async def test_a_server_that_goes_away_is_a_shelf_without_copies_and_is_used_again_when_it_is_back(
    own_server: RedisServer,
) -> None:
    shelf = await RedisShelf.open(own_server.url)
    assert await shelf.put(SPACE, NAME, 1, b"copy", 60_000)
    own_server.kill()
    began = time.monotonic()
    for _ in range(100):
        assert await shelf.get(SPACE, NAME) is None
        assert not await shelf.put(SPACE, NAME, 2, b"copy", 60_000)
    assert time.monotonic() - began < 2
    assert shelf.errors >= 1
    own_server.start()
    async with asyncio.timeout(DEADLINE_S):
        while not await shelf.put(SPACE, NAME, 3, b"again", 60_000):
            await asyncio.sleep(0.01)
    assert await shelf.get(SPACE, NAME) == b"again"
    await shelf.close()


async def test_a_server_that_is_silent_is_waited_for_once(own_server: RedisServer) -> None:
    shelf = await RedisShelf.open(own_server.url)
    assert await shelf.put(SPACE, NAME, 1, b"copy", 60_000)
    own_server.pause()
    began = time.monotonic()
    for _ in range(100):
        assert await shelf.get(SPACE, NAME) is None
        await asyncio.sleep(0.005)
    assert time.monotonic() - began < 3 * redis_shelf.REPLY_S + 100 * 0.005 + 1
    assert shelf.errors == 1
    own_server.resume()
    async with asyncio.timeout(DEADLINE_S):
        while await shelf.get(SPACE, NAME) != b"copy":
            await asyncio.sleep(0.01)
    await shelf.close()


async def test_a_server_that_is_full_still_gives_what_it_has(own_server: RedisServer) -> None:
    shelf = await RedisShelf.open(own_server.url)
    assert await shelf.put(SPACE, NAME, 1, b"copy", 60_000)
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    assert not await shelf.put(SPACE, "entry:records/b", 1, b"copy", 60_000)
    assert await shelf.get(SPACE, NAME) == b"copy"
    assert shelf.errors == 1
    await shelf.close()


async def test_a_server_that_is_not_there_yet_keeps_nobody_from_opening_the_store(own_server: RedisServer) -> None:
    own_server.kill()
    began = time.monotonic()
    shelf = await RedisShelf.open(own_server.url)
    assert await shelf.get(SPACE, NAME) is None
    assert time.monotonic() - began < redis_shelf.OPEN_S + 0.5
    own_server.start()
    async with asyncio.timeout(DEADLINE_S):
        while not await shelf.put(SPACE, NAME, 1, b"copy", 60_000):
            await asyncio.sleep(0.01)
    await shelf.close()


async def test_a_server_that_is_silent_keeps_nobody_from_opening_the_store(own_server: RedisServer) -> None:
    own_server.pause()
    began = time.monotonic()
    shelf = await RedisShelf.open(own_server.url)
    assert await shelf.get(SPACE, NAME) is None
    assert time.monotonic() - began < redis_shelf.OPEN_S + 0.5
    own_server.resume()
    async with asyncio.timeout(DEADLINE_S):
        while not await shelf.put(SPACE, NAME, 1, b"copy", 60_000):
            await asyncio.sleep(0.01)
    await shelf.close()


async def test_a_url_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(InvalidInput):
        await RedisShelf.open("redis://localhost?nonsense=1")
