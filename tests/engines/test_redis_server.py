"""What happens to a Redis store: round trips, restarts, failovers, lost connections, servers that are not the right one."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.engine import Batch, Increment, Put, Receipt, cursor_at
from holdfast.engines import redis_link, redis_servers
from holdfast.engines.redis_engine import RedisEngine
from holdfast.engines.redis_link import facts_of
from holdfast.errors import (
    Compacted,
    IncompatibleStore,
    InvalidInput,
    OutcomeUnknown,
    Unavailable,
)
from holdfast.ids import new_id
from holdfast.testing.servers.process import wait_until
from holdfast.testing.servers.redis import RedisServer

SPACE = "s"
JUMP = 2**32

prefixes = itertools.count(1)


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return f"{redis_server.url}?prefix=server-{next(prefixes)}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_servers, "PATIENCE_S", 0.3)
    monkeypatch.setattr(redis_servers, "OPEN_PATIENCE_S", 0.3)
    monkeypatch.setattr(redis_link, "CONNECT_S", 0.3)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisEngine]:
    engine = await RedisEngine.open(url)
    try:
        yield engine
    finally:
        await engine.close()


def put(key: str = "a/k", value: bytes = b"1", request_id: str | None = None) -> Batch:
    return Batch("alice", (Put(key, value),), (), request_id)


# --- round trips ---


@contextmanager
def monitored(server: RedisServer) -> Iterator[list[str]]:
    """The commands that clients send, not those of scripts."""
    seen: list[str] = []
    monitor = socket.create_connection(("127.0.0.1", server.port))
    monitor.sendall(b"MONITOR\r\n")
    assert monitor.recv(64) == b"+OK\r\n"

    def read() -> None:
        with monitor.makefile("r", errors="replace") as lines:
            for line in lines:
                if " lua] " not in line:
                    seen.append(line.split('"')[1].upper())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seen
    finally:
        server.command("ECHO", "the end")
        wait_until(lambda: "ECHO" in seen, "the monitor")
        monitor.shutdown(socket.SHUT_RDWR)
        monitor.close()
        reader.join()
        seen.remove("ECHO")


async def test_a_commit_or_a_group_of_commits_is_one_command(redis_server: RedisServer, url: str) -> None:
    async with opened(url) as engine:
        await engine.commit(SPACE, put())
        await engine.get(SPACE, ["a/k"])
        await engine.scan(SPACE, "a/")
        with monitored(redis_server) as sent:
            for i in range(10):
                await engine.commit(SPACE, put(f"a/{i}", request_id=f"r{i}"))
        assert sent == ["EVALSHA"] * 10
        with monitored(redis_server) as sent:
            await asyncio.gather(*(engine.commit(SPACE, put(f"a/{i}")) for i in range(300)))
        assert sent == ["EVALSHA"]
        with monitored(redis_server) as sent:
            await engine.get(SPACE, ["a/1", "a/2"])
            await engine.scan(SPACE, "a/")
        assert sent == ["EVALSHA"] * 2


async def test_a_server_that_forgot_the_scripts_learns_them_again(redis_server: RedisServer, url: str) -> None:
    async with opened(url) as engine:
        await engine.commit(SPACE, put())
        redis_server.command("SCRIPT", "FLUSH")
        results = await asyncio.gather(
            *(engine.commit(SPACE, Batch("alice", (Increment("a/n", 1),))) for _ in range(20)),
            *(engine.get(SPACE, ["a/k"]) for _ in range(5)),
        )
        assert [receipt.results[0] for receipt in results[:20]] == list(range(1, 21))  # type: ignore[union-attr]


# --- restarts and failovers ---


async def test_a_killed_server_comes_back_with_all_it_acknowledged_and_watches_go_on() -> None:
    with RedisServer.temporary() as server:
        async with opened(server.url) as engine, opened(server.url) as other:
            first = await engine.commit(SPACE, put())
            watching = other.watch(SPACE, cursor=cursor_at(first.version - 1))
            assert (await anext(watching)).version == first.version
            waiting = asyncio.ensure_future(anext(watching))
            await asyncio.sleep(0.05)
            for i in range(3):
                server.restart()
                receipt = await engine.commit(SPACE, put(value=b"%d" % i, request_id=f"r{i}"))
                assert receipt.version == first.version + 1 + i
                commit = await asyncio.wait_for(waiting, 10)
                assert commit.version == receipt.version
                waiting = asyncio.ensure_future(anext(watching))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_versions_jump_where_a_restart_may_have_lost_commits() -> None:
    with RedisServer.temporary(appendfsync="everysec") as server:
        async with opened(server.url) as engine:
            made = await engine.create(SPACE, "async")
            assert made.revision > 10**15, "versions begin where no lost ones can have been"
            before = [(await engine.commit(SPACE, put(value=b"%d" % i))).version for i in range(3)]
            server.stop()
            server.start()
            told = engine.watch(SPACE, cursor=cursor_at(before[1]))
            assert (await anext(told)).version == before[2]
            with pytest.raises(Compacted):
                await anext(engine.watch(SPACE, cursor=cursor_at(before[2] + 1)))
            after = await engine.commit(SPACE, put(value=b"3"))
            assert after.version == before[2] + JUMP + 1
            assert (await anext(told)).version == after.version
            for lost in (before[2] + 1, before[2] + JUMP - 1):
                with pytest.raises(Compacted):
                    await anext(engine.watch(SPACE, cursor=cursor_at(lost)))
            assert (await anext(engine.watch(SPACE, cursor=cursor_at(before[2])))).version == after.version
            assert (await engine.commit(SPACE, put(value=b"4"))).version == after.version + 1
            await engine.compact(SPACE, after.version)
            assert "gaps" not in server.command("HGET", "holdfast:{s}:meta", "gaps")
            [info] = await engine.spaces(SPACE)
            assert info.feed_floor == after.version


async def test_a_replica_that_took_over_never_gives_out_a_version_again(tmp_path: Path) -> None:
    """The primary acknowledges what the replica has not got, and dies."""
    with RedisServer.temporary() as primary:
        replica = RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {primary.port}")
        replica.start()
        try:
            wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica")
            async with opened(primary.url) as engine:
                first = await engine.commit(SPACE, put())
                wait_until(lambda: replica.command("EXISTS", "holdfast:{s}:meta") == ":1", "the replica to have it")
                replica.command("REPLICAOF", "NO", "ONE")
                lost = [await engine.commit(SPACE, put(value=b"%d" % i)) for i in range(5)]
            async with opened(replica.url) as engine:
                with pytest.raises(Compacted):
                    await anext(engine.watch(SPACE, cursor=cursor_at(lost[-1].version)))
                after = await engine.commit(SPACE, put())
                assert after.version > first.version + JUMP
                with pytest.raises(Compacted):
                    await anext(engine.watch(SPACE, cursor=cursor_at(lost[-1].version)))
                assert (await anext(engine.watch(SPACE, cursor=cursor_at(first.version)))).version == after.version
        finally:
            replica.stop()


async def test_connections_that_are_cut_double_nothing_and_lose_nothing(url: str, redis_server: RedisServer) -> None:
    async with opened(url) as engine:
        await engine.commit(SPACE, put())
        answers: list[object] = []

        async def count(worker: int) -> None:
            for i in range(25):
                request_id = new_id() if worker % 2 else None
                try:
                    answers.append(
                        await engine.commit(SPACE, Batch("a", (Increment(f"a/{worker}", 1),), (), request_id))
                    )
                except OutcomeUnknown as exc:
                    assert request_id is None
                    answers.append(exc)
                if worker == 0 and i % 5 == 0:
                    redis_server.command("CLIENT", "KILL", "TYPE", "normal")

        await asyncio.gather(*(count(worker) for worker in range(8)))
        entries = await engine.get(SPACE, [f"a/{worker}" for worker in range(8)])
        counted = [int(entry.value) for entry in entries if entry is not None]
        assert counted[1::2] == [25] * 4
        acknowledged = sum(isinstance(answer, Receipt) for answer in answers)
        assert acknowledged <= sum(counted) <= 200


async def test_what_was_not_sent_is_unavailable_and_what_was_sent_is_in_doubt(impatient: None) -> None:
    with RedisServer.temporary() as server:
        async with opened(server.url) as engine:
            await engine.commit(SPACE, put())
            server.pause()
            sent = asyncio.ensure_future(engine.commit(SPACE, put(value=b"2", request_id="sent")))
            await asyncio.sleep(0.05)
            server.kill()
            with pytest.raises(OutcomeUnknown) as doubt:
                await sent
            assert doubt.value.request_id == "sent"
            with pytest.raises(Unavailable):
                await engine.commit(SPACE, put(value=b"3"))
            with pytest.raises(Unavailable):
                await engine.get(SPACE, ["a/k"])
            server.start()
            receipt = await engine.commit(SPACE, put(value=b"2", request_id="sent"))
            assert await engine.commit(SPACE, put(value=b"2", request_id="sent")) == receipt


async def test_expiries_are_told_once_although_many_engines_find_them(url: str) -> None:
    engines = [await RedisEngine.open(url) for _ in range(4)]
    try:
        await engines[0].create(SPACE, "async")
        for start in range(0, 600, 100):
            puts = tuple(Put(f"a/{i}", b"1", ttl_ms=100) for i in range(start, start + 100))
            await engines[0].commit(SPACE, Batch("a", puts))

        async def work(engine: RedisEngine, number: int) -> None:
            for i in range(40):
                await engine.commit(SPACE, Batch("a", (Increment(f"a/{(number * 40 + i) * 3 % 600}", 1),)))
                await asyncio.sleep(0.005)

        await asyncio.gather(*(work(engine, number) for number, engine in enumerate(engines)))
        await asyncio.sleep(0.1)
        while (await engines[1].spaces(SPACE))[0].next_expiry is not None:
            await asyncio.gather(*(engine.commit(SPACE, Batch("a")) for engine in engines))
        told: Counter[str] = Counter()
        live: dict[str, bool] = {}
        async for commit in engines[2].watch(SPACE, cursor=cursor_at(0), live=False):
            for change in commit.changes:
                if change.op == "expire":
                    assert live[change.key], "told of an expiry twice"
                    told[change.key] += 1
                live[change.key] = change.exists
        assert sorted(told) == sorted(f"a/{i}" for i in range(600))
    finally:
        for engine in engines:
            await engine.close()


async def test_waiting_for_replicas_is_kept_or_the_outcome_is_unknown(tmp_path: Path) -> None:
    with RedisServer.temporary() as primary:
        replica = RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {primary.port}")
        replica.start()
        try:
            wait_until(lambda: primary.info("replication").get("connected_slaves") == "1", "the replica")
            wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica")
            async with opened(f"{primary.url}?wait=1&wait_timeout=5000") as engine:
                receipt = await engine.commit(SPACE, put(request_id="r"))
                assert f"{receipt.version}" in replica.command("HGET", "holdfast:{s}:meta", "revision")
            replica.stop()
            wait_until(lambda: primary.info("replication").get("connected_slaves") == "0", "the replica to be gone")
            async with opened(f"{primary.url}?wait=1&wait_timeout=50") as engine:
                with pytest.raises(OutcomeUnknown) as doubt:
                    await engine.commit(SPACE, put(value=b"2", request_id="s"))
                assert doubt.value.request_id == "s"
                with pytest.raises(OutcomeUnknown):
                    await engine.commit(SPACE, put(request_id="r"))
                with pytest.raises(Unavailable):
                    await engine.commit(SPACE, Batch("a", (), (holdfast.engine.Absent("a/k"),)))
        finally:
            replica.stop()


# --- who answers ---


async def test_a_replica_is_not_a_store(impatient: None, redis_server: RedisServer, tmp_path: Path) -> None:
    replica = RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {redis_server.port}")
    replica.start()
    try:
        with pytest.raises(Unavailable, match="replica"):
            await RedisEngine.open(replica.url)
    finally:
        replica.stop()


async def test_a_node_of_a_cluster_names_the_url_to_use(redis_cluster: object) -> None:
    server = redis_cluster.servers[0]  # type: ignore[attr-defined]
    async with opened(server.url) as engine:
        with pytest.raises(InvalidInput, match=r"redis\+cluster://"):
            await asyncio.gather(*(engine.commit(f"s{i}", put()) for i in range(30)))


async def test_a_newer_layout_is_refused_everywhere(url: str, redis_server: RedisServer) -> None:
    prefix = url.partition("=")[2]
    async with opened(url) as engine:
        await engine.commit(SPACE, put())
        redis_server.command("HSET", f"{prefix}:{{s}}:meta", "layout", "2")
        for attempt in (
            engine.commit(SPACE, put()),
            engine.get(SPACE, ["a/k"]),
            engine.scan(SPACE, ""),
            engine.create(SPACE),
            engine.spaces(),
            engine.drop(SPACE),
            engine.load(SPACE, [], 5),
            engine.compact(SPACE, 1),
            anext(engine.watch(SPACE)),
        ):
            with pytest.raises(IncompatibleStore, match="layout 2"):
                await attempt


def test_an_old_server_is_refused() -> None:
    with pytest.raises(IncompatibleStore, match=r"Redis 6\.0\.16"):
        facts_of({"redis_version": "6.0.16"}, None, asserted=False)
    assert facts_of({"redis_version": "6.2.0"}, None, asserted=False).version == "6.2.0"


async def test_people_can_read_what_is_stored(url: str, redis_server: RedisServer) -> None:
    prefix = url.partition("=")[2]
    async with opened(url) as engine:
        receipt = await engine.commit(SPACE, Batch("alice", (Put("records/k", b'{"a":1}', tag="kind"),)))
    lines = redis_server.command("HGET", f"{prefix}:{{s}}:entries", "records/k").split("\n")
    assert lines == [str(receipt.version), str(receipt.at), str(receipt.at), "", "alice", "kind", '{"a":1}']
    assert redis_server.command("HGET", f"{prefix}:{{s}}:usage", "records/alice") == "1 16"
    assert redis_server.command("SISMEMBER", f"{prefix}:spaces", SPACE) == ":1"
    assert redis_server.command("TTL", f"{prefix}:{{s}}:entries") == ":-1"


# --- the store above ---


async def test_a_store_in_redis_does_what_a_store_does(url: str) -> None:
    async with holdfast.open(url) as store, holdfast.open(url) as elsewhere:
        here, there = store.space("contoso", agent="a"), elsewhere.space("contoso", agent="b")
        await here.records.set("regime", {"risk": "on", "empty": []})
        assert await there.records.get("regime") == {"risk": "on", "empty": []}
        await here.records.append_to_list("files", "a.csv")
        await there.records.append_to_list("files", "b.csv")
        assert await here.records.list("files") == ["a.csv", "b.csv"]
        await store.tidy()
        assert [info.name for info in await store.spaces()] == ["contoso"]
