"""What a Redis server must be set to, and how it is named: durability, URLs, secrets, the missing driver, the doctor."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.engine import Batch, Finding, Put, cursor_at
from holdfast.engines import redis_link, redis_servers
from holdfast.engines.redis_engine import RedisEngine
from holdfast.engines.redis_url import parse
from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    Conflict,
    Damaged,
    DurabilityUnavailable,
    Error,
    InvalidInput,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
)
from holdfast.testing.servers.process import free_port
from holdfast.testing.servers.redis import RedisServer

SPACE = "s"
PASSWORD = "sw0rdf1sh"

prefixes = itertools.count(1)


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return f"{redis_server.url}?prefix=settings-{next(prefixes)}"


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


# --- durability ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"appendfsync": "everysec"}, "appendfsync everysec"),
        ({"appendonly": "no"}, "appendonly no"),
        ({"no_appendfsync_on_rewrite": "yes"}, "no-appendfsync-on-rewrite"),
    ],
)
async def test_a_server_that_does_not_fsync_every_write_refuses_sync(settings: dict[str, str], words: str) -> None:
    with RedisServer.temporary(**settings) as server:
        async with opened(server.url) as engine:
            for attempt in (
                engine.create(SPACE),
                engine.commit(SPACE, put()),
                engine.load(SPACE, [], 5),
            ):
                with pytest.raises(DurabilityUnavailable, match=words) as refused:
                    await attempt
                assert "appendfsync to always" in str(refused.value)
                assert "durability='async'" in str(refused.value)
            assert await engine.spaces() == []
            for durability in ("async", "volatile"):
                await engine.create(durability, durability)  # type: ignore[arg-type]
                await engine.commit(durability, put())
        async with opened(f"{server.url}?durable=asserted") as engine:
            await engine.create(SPACE)
            await engine.commit(SPACE, put())
        async with opened(server.url) as engine:
            with pytest.raises(DurabilityUnavailable):
                await engine.commit(SPACE, put())


async def test_a_setting_that_is_changed_back_is_noticed_after_a_reconnect() -> None:
    with RedisServer.temporary() as server:
        async with opened(server.url) as engine:
            await engine.commit(SPACE, put())
            server.command("CONFIG", "SET", "appendfsync", "no")
            server.command("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.05)
            with pytest.raises(DurabilityUnavailable):
                await engine.commit(SPACE, put(request_id="r"))
            server.command("CONFIG", "SET", "appendfsync", "always")
            server.command("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.05)
            await engine.commit(SPACE, put(request_id="r"))


async def test_a_policy_that_evicts_our_keys_is_refused_for_durable_spaces() -> None:
    with RedisServer.temporary(maxmemory_policy="allkeys-lru", maxmemory="100mb") as server:
        async with opened(server.url) as engine:
            for durability in ("sync", "async"):
                with pytest.raises(DurabilityUnavailable, match="noeviction"):
                    await engine.create(SPACE, durability)  # type: ignore[arg-type]
            with pytest.raises(DurabilityUnavailable, match="allkeys-lru"):
                await engine.commit(SPACE, put())
            await engine.create(SPACE, "volatile")
            await engine.commit(SPACE, put())
            assert [finding.level for finding in await engine.inspect() if finding.subject == "memory"] == ["error"]


async def test_where_config_is_forbidden_durability_is_asserted() -> None:
    with RedisServer.temporary() as server:
        server.command("ACL", "SETUSER", "agent", "on", f">{PASSWORD}", "~*", "&*", "+@all", "-config")
        address = f"redis://agent:{PASSWORD}@{server.address}"
        async with opened(address) as engine:
            with pytest.raises(DurabilityUnavailable, match="durable=asserted") as refused:
                await engine.commit(SPACE, put())
            assert PASSWORD not in str(refused.value)
        async with opened(f"{address}?durable=asserted") as engine:
            await engine.commit(SPACE, put())
            assert "error" not in {finding.level for finding in await engine.inspect()}


async def test_a_full_memory_refuses_writes_changes_nothing_and_lets_entries_be_deleted() -> None:
    with RedisServer.temporary() as server:
        async with opened(server.url) as engine:
            await engine.commit(SPACE, put("a/1"))
            await engine.commit(SPACE, put("a/2", b"x" * 100_000))
            server.command("CONFIG", "SET", "maxmemory", "1mb")
            before = await engine.scan(SPACE, "")
            for value in (b"2", b"y" * 100_000):
                with pytest.raises(StorageFull):
                    await engine.commit(SPACE, put("a/1", value, request_id="r"))
            with pytest.raises(Conflict):
                await engine.commit(SPACE, Batch("a", (Put("a/1", b"2"),), (holdfast.engine.Absent("a/1"),)))
            assert await engine.scan(SPACE, "") == before
            await engine.commit(SPACE, Batch("a", (holdfast.engine.Delete("a/2"),)))
            server.command("CONFIG", "SET", "maxmemory", "0")
            assert (await engine.commit(SPACE, put("a/1", b"2", request_id="r"))).version == before.revision + 2


# --- secrets, URLs, the missing driver, the doctor ---


async def test_passwords_are_in_no_error(impatient: None) -> None:
    with RedisServer.temporary(requirepass="another") as server:
        urls = [
            f"redis://:{PASSWORD}@{server.address}",
            f"redis://user:{PASSWORD}@{server.address}",
            f"redis://:{PASSWORD}@127.0.0.1:1",
            f"rediss://:{PASSWORD}@{server.address}",
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:1/main?sentinel_password={PASSWORD}",
            f"redis+cluster://:{PASSWORD}@127.0.0.1:1",
            f"redis://:{PASSWORD}@a:b:c",
            f"redis://:{PASSWORD}@{server.address}/x",
            f"redis://:{PASSWORD}@{server.address}?durable={PASSWORD}",
            f"redis://:{PASSWORD}@{server.address}?wait={PASSWORD}",
            f"redis:{PASSWORD}@{server.address}",
        ]
        kinds = []
        for url in urls:
            with pytest.raises(Error) as caught:
                async with holdfast.open(url):
                    pass
            exc: BaseException | None = caught.value
            kinds.append(type(exc))
            while exc is not None:
                assert PASSWORD not in f"{exc} {exc!r}"
                exc = exc.__cause__ or exc.__context__
        assert kinds[:2] == [AuthenticationFailed] * 2
        assert set(kinds[6:]) == {InvalidInput}
        assert PASSWORD not in repr(parse("redis", f"//u:{PASSWORD}@h?sentinel_password={PASSWORD}"))
        with pytest.raises(AuthenticationFailed):
            await RedisEngine.open(server.url)
        async with opened(f"redis://:another@{server.address}") as engine:
            await engine.commit(SPACE, put())


async def test_a_user_without_the_right_is_told(redis_server: RedisServer) -> None:
    redis_server.command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "&*", "+@all", "-evalsha")
    try:
        async with opened(f"redis://reader:{PASSWORD}@{redis_server.address}") as engine:
            with pytest.raises(AccessDenied):
                await engine.get(SPACE, ["a/k"])
    finally:
        redis_server.command("ACL", "DELUSER", "reader")


@pytest.mark.parametrize("lacking", ["xadd", "unlink", "zrem", "time"])
async def test_a_right_that_is_missing_is_noticed_before_a_commit_is_half_done(
    redis_server: RedisServer, url: str, lacking: str
) -> None:
    redis_server.command("ACL", "SETUSER", "partly", "on", f">{PASSWORD}", "~*", "&*", "+@all", f"-{lacking}")
    prefix = url.partition("?")[2]
    try:
        async with opened(f"redis://partly:{PASSWORD}@{redis_server.address}?{prefix}") as engine:
            with pytest.raises(AccessDenied, match=lacking):
                await engine.commit(SPACE, put())
            with pytest.raises(AccessDenied, match=lacking):
                await engine.create(SPACE)
        async with opened(url) as engine:
            assert await engine.spaces() == []
            assert await engine.get(SPACE, ["a/k"]) == [None]
    finally:
        redis_server.command("ACL", "DELUSER", "partly")


async def test_an_error_in_the_middle_of_a_commit_leaves_its_outcome_unknown(
    redis_server: RedisServer, url: str
) -> None:
    """Somebody else's value under one of the store's keys, found after the first write."""
    prefix = url.partition("=")[2]
    async with opened(url) as engine:
        await engine.commit(SPACE, put())
        redis_server.command("DEL", f"{prefix}:{{s}}:feed")
        redis_server.command("SET", f"{prefix}:{{s}}:feed", "not a stream")
        with pytest.raises(OutcomeUnknown, match="WRONGTYPE") as doubt:
            await engine.commit(SPACE, put(value=b"2", request_id="r"))
        assert doubt.value.request_id == "r"
        with pytest.raises(Damaged):
            await anext(engine.watch(SPACE, cursor=cursor_at(0)))


def self_signed(folder: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    port = free_port()
    options = {"tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(key)}
    options |= {"tls-ca-cert-file": str(certificate), "tls-auth-clients": "no"}
    with RedisServer.temporary(**options):
        async with opened(f"rediss://127.0.0.1:{port}?ca={certificate}") as engine:
            await engine.commit(SPACE, put())
            watching = engine.watch(SPACE, cursor=cursor_at(0))
            assert (await anext(watching)).version == 1
        with pytest.raises(Unavailable, match="certificate"):
            await RedisEngine.open(f"rediss://127.0.0.1:{port}")


def test_urls_are_read() -> None:
    plain = parse("redis", "//host")
    assert (plain.kind, plain.addresses, plain.db, plain.prefix) == ("single", (("host", 6379),), 0, "holdfast")
    full = parse("rediss", "//us%40er:p%2Fw@[::1]:7000/3?prefix=team:a&wait=2&wait_timeout=50&ca=/ca.pem")
    assert (full.username, full.password, full.addresses, full.db) == ("us@er", "p/w", (("::1", 7000),), 3)
    assert (full.tls, full.ca, full.prefix, full.wait, full.wait_timeout_ms) == (True, "/ca.pem", "team:a", 2, 50)
    sentinel = parse("redis+sentinel", "//a,b:1,c/main/2?sentinel_user=s&tls=yes")
    assert (sentinel.kind, sentinel.master, sentinel.db, sentinel.tls) == ("sentinel", "main", 2, True)
    assert sentinel.addresses == (("a", 26379), ("b", 1), ("c", 26379))
    cluster = parse("redis+cluster", "//:pw@a:1,b:2?durable=asserted")
    assert (cluster.kind, cluster.asserted, cluster.username, cluster.password) == ("cluster", True, None, "pw")


@pytest.mark.parametrize(
    ("scheme", "rest"),
    [("redis", "host"), ("redis", "//"), ("redis", "//a,b"), ("redis", "//a:0"), ("redis", "//a:70000"), ("redis", "//a/x"),
     ("redis", "//a?x=1"), ("redis", "//a?prefix={x}"), ("redis", "//a?prefix="), ("redis", "//a?wait"),
     ("redis", "//a?tls=1"), ("redis+sentinel", "//a"), ("redis+sentinel", "//a/"), ("redis+cluster", "//a/0"),
     ("redis+cluster", "//a,,b"), ("redis", "//a?durable=yes"), ("redis", "//[x]:1")],
)  # fmt: skip
def test_urls_that_mean_nothing_are_invalid(scheme: str, rest: str) -> None:
    with pytest.raises(InvalidInput):
        parse(scheme, rest)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "redis+cluster"])
def test_a_missing_driver_names_its_cure(scheme: str) -> None:
    code = (
        "import sys, asyncio, holdfast\n"
        "sys.modules['redis'] = sys.modules['hiredis'] = None\n"
        "async def main():\n"
        f"    async with holdfast.open('{scheme}://user:{PASSWORD}@localhost/0'): pass\n"
        "try: asyncio.run(main())\n"
        "except holdfast.InvalidInput as exc: print(exc)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'holdfast[redis]'" in said.stdout
    assert PASSWORD not in said.stdout + said.stderr


def test_importing_holdfast_does_not_import_the_driver() -> None:
    code = "import sys, holdfast; print('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def found(findings: list[Finding], subject: str) -> Finding:
    [finding] = [each for each in findings if each.subject == subject]
    return finding


async def test_the_doctor_says_what_the_server_guarantees() -> None:
    with RedisServer.temporary() as server:
        async with opened(server.url) as engine:
            findings = await engine.inspect()
            assert found(findings, f"server {server.address}").message.startswith("Redis ")
            assert {each.level for each in findings} <= {"ok", "note"}
            assert "always" in found(findings, "durability sync").message
            assert "only copy" in found(findings, "replicas").message
    with RedisServer.temporary(appendonly="no") as server:
        async with opened(f"{server.url}?wait=1") as engine:
            findings = await engine.inspect()
            assert found(findings, "durability sync").level == "warning"
            assert "appendfsync to always" in found(findings, "durability sync").advice
            assert found(findings, "durability async").level == "warning"
            assert found(findings, "replicas").level == "warning"


async def test_the_doctor_sees_every_primary_of_a_cluster(redis_cluster: object) -> None:
    async with opened(redis_cluster.url) as engine:  # type: ignore[attr-defined]
        findings = await engine.inspect()
        servers = [each.subject for each in findings if each.subject.startswith("server ")]
        assert sorted(servers) == sorted(f"server {each.address}" for each in redis_cluster.servers)  # type: ignore[attr-defined]
        assert "cluster" in found(findings, "topology").message
