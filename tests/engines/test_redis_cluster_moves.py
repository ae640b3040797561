"""A space moves from one node of a cluster to another while it is used."""

from __future__ import annotations

import asyncio
import itertools

from redis.crc import key_slot

from holdfast.engine import Batch, Increment, Put, cursor_at
from holdfast.engines.redis_engine import RedisEngine, space_keys
from holdfast.testing.servers.redis import LOOPBACK, RedisCluster, RedisServer

SPACE = "wanderer"
prefixes = itertools.count(1)


def owner_of(cluster: RedisCluster, slot: int) -> RedisServer:
    [owner] = [each for each in cluster.servers if each.command("CLUSTER", "COUNTKEYSINSLOT", str(slot)) != ":0"]
    return owner


async def move(source: RedisServer, target: RedisServer, others: list[RedisServer], slot: int, keys: list[str]) -> None:
    """Move a slot as redis-cli does, one key at a time."""
    source_id, target_id = source.command("CLUSTER", "MYID"), target.command("CLUSTER", "MYID")
    assert target.command("CLUSTER", "SETSLOT", str(slot), "IMPORTING", source_id) == "+OK"
    assert source.command("CLUSTER", "SETSLOT", str(slot), "MIGRATING", target_id) == "+OK"
    for key in keys:
        await asyncio.sleep(0.02)
        assert source.command("MIGRATE", LOOPBACK, str(target.port), key, "0", "5000") in ("+OK", "+NOKEY")
    for server in (target, source, *others):
        assert server.command("CLUSTER", "SETSLOT", str(slot), "NODE", target_id) == "+OK"


async def test_a_space_that_moves_to_another_node_loses_nothing_and_doubles_nothing(
    redis_cluster: RedisCluster,
) -> None:
    prefix = f"moves-{next(prefixes)}"
    engine = await RedisEngine.open(f"{redis_cluster.url}?prefix={prefix}")
    other = await RedisEngine.open(f"{redis_cluster.url}?prefix={prefix}")
    slot, names = key_slot(f"{{{SPACE}}}".encode()), space_keys(prefix, SPACE)
    try:
        first = await engine.commit(SPACE, Batch("a", (Put("a/k", b"1"),)))
        moving = True

        async def count(through: RedisEngine, key: str) -> int:
            done = 0
            while moving or done < 50:
                receipt = await through.commit(SPACE, Batch("a", (Increment(key, 1),)))
                done += 1
                assert receipt.results == [done]
            return done

        workers = [asyncio.ensure_future(count(each, f"a/{n}")) for n, each in enumerate((engine, other, engine))]
        await asyncio.sleep(0.05)
        source = owner_of(redis_cluster, slot)
        target, third = [server for server in redis_cluster.servers if server is not source]
        await move(source, target, [third], slot, [*names.all_but_meta, names.meta, names.probe])
        moving = False
        counts = await asyncio.wait_for(asyncio.gather(*workers), 20)
        assert owner_of(redis_cluster, slot) is target
        versions = [commit.version async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False)]
        assert versions == list(range(first.version, first.version + 1 + sum(counts)))
        assert [info.name for info in await other.spaces()] == [SPACE]
    finally:
        await engine.close()
        await other.close()
