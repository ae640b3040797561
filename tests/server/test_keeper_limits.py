"""Quotas and rates of a keeper with real clients, and one that floods beside one that does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from holdfast import QuotaExceeded, RateLimitExceeded, Space
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import SPACE, clean_environment, client, http, make_token

POLICIES = {
    "rate_limits": [
        {"agent_pattern": "slow-*", "max_ops_per_second": 2, "burst": 6},
        {"agent_pattern": "flood", "max_ops_per_second": 100, "burst": 200},
    ],
    "quotas": [{"agent_pattern": "small-*", "max_keys_per_agent": 3, "max_value_size": "1 KB"}],
}
FLOOD = """
import socket, sys
from holdfast.engine import Batch, Put
from holdfast.wire import PROTOCOL, Commit, Get, Hello, frame
port, token, space = int(sys.argv[1]), sys.argv[2], sys.argv[3]
line = socket.create_connection(("127.0.0.1", port))
line.sendall(frame(Hello(PROTOCOL, token, "flood")))
put = frame(Commit(1, space, Batch("flood", (Put("records/flood", b'"' + b"x" * 1000 + b'"'),))))
print("flooding", flush=True)
while True:
    line.sendall(put * 500)
    line.setblocking(False)
    try:
        while line.recv(1 << 20):
            pass
    except BlockingIOError:
        line.setblocking(True)
"""


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(policies=POLICIES) as running:
        yield running


async def test_who_is_over_quota_reads_and_deletes_and_recovers_without_anybodys_help(keeper: KeeperServer) -> None:
    async with client(keeper, "small-1") as (_, space):
        records = space.records
        for name in "abc":
            await records.set(name, 1)
        with pytest.raises(QuotaExceeded, match="its quota is 3 keys"):
            await records.set("d", 1)
        with pytest.raises(QuotaExceeded):
            await records.append_to_list("l", 1)
        with pytest.raises(QuotaExceeded):
            await records.set("a", "x" * 2000)
        assert await records.get("a") == 1
        await records.set("a", 2)
        await records.increment("a")
        assert await records.keys() == ["a", "b", "c"]
        await records.delete("b")
        await records.set("d", 1)
        async with client(keeper, "small-2") as (_, other):
            await other.records.set("others have their own", 1)


async def test_a_rate_is_told_with_the_time_to_wait_and_waiting_so_long_is_enough(keeper: KeeperServer) -> None:
    async with client(keeper, "slow-1") as (_, space):
        refused = 0
        for number in range(9):
            try:
                await space.records.set("k", number)
            except RateLimitExceeded as exc:
                refused += 1
                await asyncio.sleep(exc.retry_after)
                await space.records.set("k", number)
        assert refused
    token = await make_token(keeper, "slow-2")
    async with http(keeper, token) as web:
        answers = [await web.get(f"/v1/spaces/{SPACE}/records/k") for _ in range(10)]
        [*_, last] = answers
        assert last.status_code == 429
        assert last.json()["error"] == "rate_limit_exceeded"
        assert int(last.headers["Retry-After"]) >= 1


async def test_a_flooding_agent_does_not_delay_another(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "flood")
    async with client(keeper, "calm") as (_, space):
        alone = await _latencies(space)
        flood = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", FLOOD, str(keeper.port), token, SPACE],
            env=clean_environment(),
            stdout=subprocess.PIPE,
        )
        try:
            assert flood.stdout is not None
            await asyncio.to_thread(flood.stdout.readline)
            beside = await _latencies(space)
            assert flood.poll() is None, "the flood ended"
        finally:
            flood.kill()
            flood.communicate()
        async with http(keeper, keeper.admin) as web:
            text = (await web.get("/metrics")).text
    [refused] = [
        line for line in text.splitlines() if 'outcome="rate_limit_exceeded"' in line and 'op="commit"' in line
    ]
    print(f"p99 of the calm one: alone {alone:.1f} ms, beside the flood {beside:.1f} ms; {refused.split()[-1]} refused")
    assert float(refused.split()[-1]) > 20
    assert beside < 10 * alone + 100, f"p99 {alone:.1f} ms alone, {beside:.1f} ms beside the flood"


async def _latencies(space: Space) -> float:
    """The p99 of some hundred increments, one after the other, in ms."""
    took = []
    for _ in range(300):
        began = time.perf_counter()
        await space.records.increment("calm")
        took.append(time.perf_counter() - began)
    return sorted(took)[int(len(took) * 0.99)] * 1000
