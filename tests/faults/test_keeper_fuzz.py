"""Hostile clients of the binary port: random and mutated frames, slow ones, half-open ones, floods of connections.

A good client works all the while. Afterwards the keeper lives, has not grown, and has lost nothing of the good client's.
HOLDFAST_SOAK=1 sends a million frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import struct
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from holdfast.engine import (
    Absent,
    AtLeast,
    Batch,
    Delete,
    Empty,
    Increment,
    Mine,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.engines.remote import RemoteEngine
from holdfast.ids import new_id
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import (
    LENGTH,
    PROTOCOL,
    Cancel,
    Commit,
    Compact,
    Create,
    Drop,
    Get,
    Grant,
    Hello,
    Inspect,
    Load,
    Message,
    Ping,
    Scan,
    Spaces,
    Watch,
    frame,
)
from tests.server.live import rss_of

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
FRAMES = 1_000_000 if SOAK else 20_000
GROWTH = 1.10
SPACE = "contoso"
SERVED_MIN = 200 if SOAK else 3
"""Commits of the good client meanwhile. A small attack is over in half a second, in which the attackers have its process's core."""
TIMEOUT_S = 3600 if SOAK else 120

OPERATIONS = (
    Put("records/fuzz", b"1", 1000, "tag", "agent"),
    Delete("records/fuzz"),
    Increment("records/n", 1),
    Touch("locks/lock/l/1", 1000),
    Push("locks/lock/l/", b"{}", 1000),
    Take("queues/a/", "queues/b/", 2),
)
CONDITIONS = (
    Absent("records/a"),
    VersionIs("records/a", 3),
    ValueIs("records/a", b"1"),
    AtLeast("records/n", 1),
    Mine("x/y"),
    Empty("locks/lock/l/"),
)
SEEDS: tuple[Message, ...] = (
    Hello(PROTOCOL, "hf_wrong", "fuzz"),
    Commit(1, SPACE, Batch("fuzz", OPERATIONS, CONDITIONS, "request", True)),
    Commit(2, SPACE, Batch("fuzz", OPERATIONS[:1])),
    Get(3, SPACE, ["records/a", "records/b"]),
    Scan(4, SPACE, "records/", None, 10, False),
    Watch(5, SPACE, ["records/"], "r0", True, 1000),
    Watch(6, SPACE, [], None, False, -5),
    Grant(5, 1000),
    Cancel(5),
    Create(7, "other", "sync", False),
    Spaces(8, None),
    Drop(9, SPACE),
    Load(10, SPACE, [], 1 << 62),
    Compact(11, SPACE, 1 << 40),
    Inspect(12),
    Ping(13),
)


@pytest.fixture
def keeper() -> Iterator[KeeperServer]:
    settings = {"limits": {"idle": "5s"}, "policies": {"rate_limits": []}}  # one over its rate would not be read
    with KeeperServer.temporary(**settings) as running:
        yield running


def mutated(rng: random.Random) -> bytes:
    """A frame that is wrong in some way, or none at all."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(1, 200))
    body = bytearray(frame(rng.choice(SEEDS))[4:])
    if kind < 0.5:
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    elif kind < 0.6:
        body = body[: rng.randrange(len(body) + 1)]
    elif kind < 0.7:
        body += rng.randbytes(rng.randrange(20))
    elif kind < 0.8:
        body = bytearray(b"\x91" * rng.randrange(1, 3000))  # arrays in arrays
    elif kind < 0.9:
        body = bytearray(msgspec.msgpack.encode([rng.randrange(20), rng.randrange(1 << 60), _odd(rng), _odd(rng)]))
    length = len(body) if rng.random() < 0.95 else rng.choice([0, 3, 1 << 20, (1 << 32) - 1])
    return LENGTH.pack(length) + bytes(body)


def _odd(rng: random.Random) -> object:
    return rng.choice(
        [None, True, -1, 1 << 63, 1.5, float("nan"), "", "x" * 3000, b"\0" * 50, [], {}, {"a": [1]}, [[[]]]]
    )


async def attack(port: int, token: str | None, frames: int, seed: int) -> int:
    """Send so many frames over as many connections as it takes; gives how many connections."""
    rng, connections = random.Random(seed), 0
    left = frames
    while left > 0:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connections += 1
            drain = asyncio.ensure_future(_swallow(reader))
            if token is not None:
                writer.write(frame(Hello(PROTOCOL, token, f"fuzz-{seed}-{connections}")))
            for _ in range(rng.randrange(1, 200)):
                writer.write(mutated(rng))
                left -= 1
                if drain.done() or left <= 0:
                    break
                await writer.drain()
            if rng.random() < 0.5:
                writer.close()
            else:
                writer.transport.abort()
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
        await asyncio.sleep(0)
    return connections


async def _swallow(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


@contextlib.asynccontextmanager
async def good_client(keeper: KeeperServer) -> AsyncIterator[list[float]]:
    """Somebody who increments a number all the while; gives how long each took."""
    engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
    took: list[float] = []
    end = asyncio.Event()

    async def work() -> None:
        while not end.is_set():
            began = time.perf_counter()
            await engine.commit("good", Batch("good", (Increment("records/n", 1),), (), new_id(), True))
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    working = asyncio.create_task(work())
    yield took
    end.set()
    await working
    [entry] = await engine.get("good", ["records/n"])
    assert entry is not None
    assert int(entry.value) == len(took), "what was acknowledged is there, once"
    await engine.close()


def p99_ms(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99)] * 1000


async def agent_token(keeper: KeeperServer) -> str:
    from holdfast import open

    async with open(keeper.url, token=keeper.admin) as store:
        from holdfast.clock import SystemClock
        from holdfast.layers.tokens import Tokens

        token, _ = await Tokens(store.engine, SystemClock(), "admin").create("fuzz", SPACE, "agent")
        return str(token)


async def test_random_and_mutated_frames_do_no_harm(keeper: KeeperServer) -> None:
    token = await agent_token(keeper)
    await asyncio.gather(*(attack(keeper.port, who, 1000, seed) for seed, who in enumerate((None, token))))
    before = rss_of(keeper.pid)
    async with good_client(keeper) as took, asyncio.timeout(TIMEOUT_S):
        share = FRAMES // 4
        await asyncio.gather(
            *(attack(keeper.port, who, share, 10 + n) for n, who in enumerate((None, token, token, token)))
        )
    after = rss_of(keeper.pid)
    print(f"{FRAMES:,} frames; p99 of the good client {p99_ms(took):.1f} ms; RSS {before >> 20} → {after >> 20} MB")
    assert after < before * GROWTH
    assert len(took) >= SERVED_MIN
    assert "Traceback" not in keeper.log.read_text(), keeper.log.read_text()[-3000:]


async def test_slow_and_half_open_connections_and_floods_of_them_do_no_harm(keeper: KeeperServer) -> None:
    """Half of a Hello and then silence; a byte at a time; and more connections than anybody needs."""
    before = rss_of(keeper.pid)
    hello = frame(Hello(PROTOCOL, keeper.admin, "slow"))
    async with good_client(keeper) as took, asyncio.timeout(TIMEOUT_S):
        half = [await asyncio.open_connection("127.0.0.1", keeper.port) for _ in range(200)]
        for n, (_, writer) in enumerate(half):
            writer.write(hello[: n % len(hello)])
        for _ in range(20):
            flood = await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", keeper.port) for _ in range(50)), return_exceptions=True
            )
            for opened in flood:
                if not isinstance(opened, BaseException):
                    opened[1].write(struct.pack(">I", 1 << 31))
                    opened[1].transport.abort()
        for byte in hello[: len(hello) // 2]:
            half[0][1].write(bytes([byte]))
            await asyncio.sleep(0.01)
        for _, writer in half:
            writer.transport.abort()
    print(f"p99 of the good client {p99_ms(took):.1f} ms; RSS {before >> 20} → {rss_of(keeper.pid) >> 20} MB")
    assert rss_of(keeper.pid) < before * GROWTH
    assert len(took) >= SERVED_MIN
