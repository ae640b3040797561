"""Redis with replicas: the primary dies, a replica takes its place, and the client goes on by itself.

Replication is asynchronous, so what was acknowledged and not yet replicated is lost: here the replica is cut off for a
moment before the primary is killed, which makes sure of it. What must hold all the same: versions never fall, fencing
tokens never repeat, nothing is half applied or applied twice. With `?wait=1` an acknowledged commit is on the replica too,
and nothing acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from holdfast.clock import SystemClock
from holdfast.engine import SCAN_MAX, Batch, Engine, Increment, Push, Put, Receipt, Touch
from holdfast.engines.registry import open_engine
from holdfast.errors import Compacted, Conflict, OutcomeUnknown, Unavailable
from holdfast.testing.servers.redis import RedisCluster, RedisSentinels, RedisServer
from tests.servers import started

SPACE = "failover"
CLIENTS = 8
DEADLINE_S = 60
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


@dataclass
class Group:
    """A primary, the replica that will follow it, and how clients find them."""

    url: str
    primary: RedisServer
    replica: RedisServer
    failed_over: Callable[[], bool]
    """Whether everybody knows the new primary."""
    demote: Callable[[], object] = lambda: None
    """Tell the old primary what it is now, as a sentinel does after ten seconds."""


def sentinels(stack: ExitStack) -> Group:
    group = stack.enter_context(started(RedisSentinels.temporary()))
    [replica] = group.replicas

    def failed_over() -> bool:
        told = [sentinel.info("sentinel").get("master0", "") for sentinel in group.sentinels]
        return all(f"address={replica.address}," in each for each in told)

    def demote() -> None:
        if not SOAK:
            group.primary.command("REPLICAOF", "127.0.0.1", str(replica.port))

    return Group(group.url, group.primary, replica, failed_over, demote)


def cluster(stack: ExitStack) -> Group:
    group = stack.enter_context(started(RedisCluster.temporary(replicas=1)))
    slot = int(group.primaries[0].command("CLUSTER", "KEYSLOT", "{" + SPACE + "}").removeprefix(":"))
    number = slot // -(-16384 // len(group.primaries))
    replica = group.servers[len(group.primaries) + number]
    return Group(group.url, group.primaries[number], replica, lambda: replica.info("replication")["role"] == "master")


KINDS: dict[str, Callable[[ExitStack], Group]] = {"sentinel": sentinels, "cluster": cluster}


@pytest.fixture(params=list(KINDS))
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with ExitStack() as stack:
        yield KINDS[request.param](stack)


@dataclass
class Client:
    """Writes one entry of its own and adds one to a counter, in one batch, again and again until it is acknowledged."""

    engine: Engine
    name: str
    acknowledged: dict[str, int] = field(default_factory=dict)
    in_doubt: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            key = f"records/{self.name}/{number}"
            batch = Batch(self.name, (Put(key, b"1"), Increment("records/count", 1)), (), key)
            receipt = await self.insist(batch, stop)
            if receipt is not None:
                self.acknowledged[key] = receipt.version

    async def insist(self, batch: Batch, stop: asyncio.Event) -> Receipt | None:
        while not stop.is_set():
            try:
                return await self.engine.commit(SPACE, batch)
            except OutcomeUnknown:
                self.in_doubt += 1
            except Unavailable:
                await asyncio.sleep(0.02)
        return None


async def hold_tokens(engine: Engine, tokens: list[int], stop: asyncio.Event) -> None:
    """Take a lock of one's own again and again; its token is the version of the entry."""
    while not stop.is_set():
        with contextlib.suppress(Unavailable, OutcomeUnknown, Conflict):
            receipt = await engine.commit(SPACE, Batch("holder", (Push("locks/lock/l/", b"1", 5_000),)))
            tokens.append(receipt.version)
            await engine.commit(SPACE, Batch("holder", (Touch(str(receipt.results[0]), 5_000),)))
        await asyncio.sleep(0.005)


async def follow(engine: Engine, versions: list[int]) -> None:
    """The versions a watcher sees; after Compacted it goes on from now, as it is told to."""
    cursor: str | None = None
    while True:
        try:
            async for commit in engine.watch(SPACE, cursor=cursor):
                versions.append(commit.version)
                cursor = commit.cursor
        except Compacted:
            cursor = None
        except Unavailable:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("wait", [0, 1])
async def test_a_failover_breaks_no_promise(group: Group, wait: int, record_property: Callable[..., None]) -> None:
    joint = "&" if "?" in group.url else "?"
    engine = await open_engine(f"{group.url}{joint}wait={wait}&wait_timeout=200" if wait else group.url, SystemClock())
    await engine.create(SPACE)
    clients = [Client(engine, f"c{number}") for number in range(CLIENTS)]
    tokens: list[int] = []
    seen: list[int] = []
    stop = asyncio.Event()
    tasks = [asyncio.create_task(client.run(stop)) for client in clients]
    tasks.append(asyncio.create_task(hold_tokens(engine, tokens, stop)))
    watching = asyncio.create_task(follow(engine, seen))

    await asyncio.wait_for(more(clients, 200), DEADLINE_S)
    group.replica.pause()
    group.primary.command("CLIENT", "KILL", "TYPE", "replica")
    await asyncio.sleep(0.8)
    group.primary.kill()
    await asyncio.sleep(0.1)  # answers that had left it are read
    before = {key: version for client in clients for key, version in client.acknowledged.items()}
    group.replica.resume()
    await asyncio.wait_for(until(group.failed_over), DEADLINE_S)
    if wait:  # somebody must be there to wait for
        group.primary.start()  # it comes back as a replica, and forgets what only it had
        group.demote()
    await asyncio.wait_for(more(clients, 200), DEADLINE_S)
    stop.set()
    await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)

    present = await entries(engine)
    after = {key: version for client in clients for key, version in client.acknowledged.items() if key not in before}
    count = int(present.pop("records/count"))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await engine.close()

    lost = before.keys() - present.keys()
    record_property("lost", len(lost))
    print(f"acknowledged before {len(before)}, lost {len(lost)}, in doubt {sum(c.in_doubt for c in clients)}")
    assert count == len(present), "a batch was applied in part, or twice"
    assert not after.keys() - present.keys(), "what was acknowledged after the failover is lost"
    assert min(after.values()) > max(before.values()), "versions fell"
    assert tokens == sorted(set(tokens)), "a fencing token was repeated, or fell"
    assert seen == sorted(set(seen)), "the feed told something twice, or out of order"
    if wait:
        assert not lost, "an acknowledged commit was not on the replica"
        assert sum(client.in_doubt for client in clients) > 0, "nobody was told that the replica did not answer"
    else:
        assert lost, "the test is too tame: nothing was lost, so it shows nothing"


async def test_who_was_told_of_the_old_primary_does_not_commit_to_it_when_it_comes_back() -> None:
    """It calls itself a primary for seconds, until a sentinel has told it."""
    with ExitStack() as stack:
        group = stack.enter_context(started(RedisSentinels.temporary()))
        stranger = stack.enter_context(started(RedisServer.temporary()))  # a primary by its own word
        engine = await open_engine(group.url, SystemClock())
        engine._servers.finder._primary = ("127.0.0.1", stranger.port)  # type: ignore[attr-defined]
        await engine.commit(SPACE, Batch("c", (Put("records/a", b"1"),)))
        assert (await entries(engine)) == {"records/a": b"1"}
        await engine.close()
        assert stranger.command("DBSIZE") == ":0"
        assert group.primary.command("DBSIZE") != ":0"


async def until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.05)


async def more(clients: list[Client], count: int) -> None:
    """Return when so many more were acknowledged."""
    start = sum(len(client.acknowledged) for client in clients)
    while sum(len(client.acknowledged) for client in clients) < start + count:
        await asyncio.sleep(0.01)


async def entries(engine: Engine) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    after: str | None = None
    while True:
        page = await engine.scan(SPACE, "records/", after=after, limit=SCAN_MAX)
        found.update((entry.key, entry.value) for entry in page.entries)
        if not page.more:
            return found
        after = page.entries[-1].key
