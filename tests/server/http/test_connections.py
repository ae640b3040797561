"""Clients that keep a server waiting: each has a time, and the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import holdfast
from holdfast import Store
from holdfast.clock import SystemClock
from holdfast.server.http import Limits
from tests.server.http.keeping import MARKET, Keeper, Running, running

SHORT = Limits(
    head_s_max=0.4,
    body_s_max=0.4,
    idle_s_max=1,
    write_s_max=0.5,
    connections=20,
    connections_before_hello=10,
    requests_per_token_max=8,
    requests_max=10,
    head_bytes_max=8192,
)
WAIT_S = 10
AUTH = f"Authorization: Bearer {MARKET}\r\n".encode()


GIVEN_UP = ((408, "invalid_request"), (0, None))
"""What a client hears that is too slow; whoever still sends when the server hangs up may not hear its last words."""


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with holdfast.open("memory:", background=False) as opened:
        yield opened


@pytest.fixture
async def port(store: Store) -> AsyncIterator[Running]:
    async with running(Keeper(store, SystemClock()), limits=SHORT) as opened:
        yield opened


class Raw:
    """A connection in the hands of the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def drip(self, data: bytes, pause_s: float) -> None:
        """One byte at a time, until all is sent or the server hangs up."""
        for byte in data:
            if self.reader.at_eof() or self.writer.is_closing():
                return
            try:
                self.writer.write(bytes([byte]))
                await self.writer.drain()
            except ConnectionError:
                return
            await asyncio.sleep(pause_s)

    async def answer(self) -> tuple[int, dict[str, str]]:
        """What the server says before it closes; status 0 when it says nothing."""
        try:
            data = await asyncio.wait_for(self.reader.read(), WAIT_S)
        except ConnectionError:
            return 0, {}
        head, _, body = data.partition(b"\r\n\r\n")
        return (int(head.split()[1]), json.loads(body)) if head else (0, {})


Connect = Callable[[], Awaitable[Raw]]


@pytest.fixture
async def connect(port: Running) -> AsyncIterator[Connect]:
    """Opens connections, and closes them afterwards."""
    opened: list[Raw] = []

    async def open_one() -> Raw:
        opened.append(Raw(*await asyncio.open_connection("127.0.0.1", port.server.port)))
        return opened[-1]

    yield open_one
    for raw in opened:
        raw.writer.close()
        with contextlib.suppress(ConnectionError):
            await raw.writer.wait_closed()


async def is_well(port: Running) -> None:
    async with port.client() as client:
        assert (await client.get("/v1/whoami")).status_code == 200


async def until_closed(port: Running) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if port.server.connections == 0:
                return
            await asyncio.sleep(0.02)


async def test_a_connection_that_says_nothing_is_closed(port: Running, connect: Connect) -> None:
    raw = await connect()
    status, failure = await raw.answer()
    assert (status, failure["error"]) == (408, "invalid_request")
    await until_closed(port)


async def test_a_head_that_comes_byte_by_byte_is_given_up(port: Running, connect: Connect) -> None:
    raw = await connect()
    dripping = asyncio.create_task(
        raw.drip(b"GET /v1/whoami HTTP/1.1\r\nHost: x\r\n" + AUTH + b"X: " + b"y" * 500, 0.05)
    )
    await is_well(port)
    status, failure = await raw.answer()
    assert (status, failure.get("error")) in GIVEN_UP
    await dripping


async def test_a_second_head_on_the_same_connection_is_given_up_too(port: Running, connect: Connect) -> None:
    raw = await connect()
    raw.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    await raw.reader.readuntil(b"}")
    dripping = asyncio.create_task(raw.drip(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 500, 0.05))
    assert (await raw.answer())[0] in (408, 0)
    await dripping


async def test_a_body_that_comes_byte_by_byte_is_given_up_and_nothing_is_done(
    port: Running, connect: Connect, store: Store
) -> None:
    raw = await connect()
    raw.writer.write(
        b"PUT /v1/spaces/contoso/records/a HTTP/1.1\r\nHost: x\r\n"
        + AUTH
        + b"Content-Length: 1000\r\nConnection: close\r\n\r\n"
    )
    dripping = asyncio.create_task(raw.drip(b"1" * 1000, 0.05))
    await is_well(port)
    status, failure = await raw.answer()
    assert (status, failure.get("error")) in GIVEN_UP
    await dripping
    assert await store.engine.spaces("contoso") == []


async def test_a_body_nobody_reads_is_given_up_as_well(port: Running, connect: Connect) -> None:
    raw = await connect()
    raw.writer.write(b"PUT /v1/spaces/contoso/records/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    await raw.drip(b"1" * 100, 0.05)
    await until_closed(port)


async def test_an_answer_nobody_takes_is_given_up(port: Running, connect: Connect, store: Store) -> None:
    space = store.space("contoso", agent="market")
    await space.records.set("large", "x" * 9_000_000)
    raw = await connect()
    for _ in range(3):
        raw.writer.write(b"GET /v1/spaces/contoso/records/large HTTP/1.1\r\nHost: x\r\n" + AUTH + b"\r\n")
    await raw.writer.drain()
    raw.writer.transport.pause_reading()
    await until_closed(port)
    await is_well(port)


async def test_a_connection_that_was_used_and_is_idle_is_closed(port: Running, connect: Connect) -> None:
    raw = await connect()
    raw.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    await raw.reader.readuntil(b"}")
    assert await asyncio.wait_for(raw.reader.read(), WAIT_S) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000,
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    ],
    ids=["bytes", "no path", "large head", "no colon"],
)
async def test_what_is_not_http_gets_an_answer_of_our_shape(port: Running, connect: Connect, data: bytes) -> None:
    raw = await connect()
    raw.writer.write(data)
    status, failure = await raw.answer()
    assert (status, failure["error"]) == (400, "invalid_request")
    await is_well(port)


async def test_too_many_connections_are_refused_and_the_others_work(port: Running, connect: Connect) -> None:
    async with port.client() as client:
        await client.get("/v1/whoami")
        raws = [await connect() for _ in range(11)]
        status, failure = await raws[0].answer()
        assert (status, failure["error"]) == (503, "unavailable")
        assert (await client.get("/v1/whoami")).status_code == 200
        for raw in raws:
            raw.writer.close()
    await until_closed(port)
    await is_well(port)


async def test_too_many_requests_at_once_are_refused_and_the_others_finish(port: Running) -> None:
    async with port.client("hf_risk") as risk, port.client() as market:
        await risk.post("/v1/spaces/contoso/locks/l", json={"ttl": 60})
        waits = [asyncio.create_task(market.post("/v1/spaces/contoso/locks/l", json={"wait": 1})) for _ in range(8)]
        await asyncio.sleep(0.3)
        much = await market.get("/v1/whoami")
        assert (much.status_code, much.json()["error"]) == (429, "rate_limit_exceeded")
        assert "'market' has 8 requests under way" in much.json()["message"]
        async with port.client("hf_lead") as lead, port.client("hf_admin") as admin:
            held = [asyncio.create_task(lead.post("/v1/spaces/contoso/locks/l", json={"wait": 1})) for _ in range(2)]
            await asyncio.sleep(0.1)
            busy = await risk.get("/v1/whoami")
            assert (busy.status_code, busy.json()["error"]) == (503, "unavailable")
            assert (await admin.get("/v1/spaces")).status_code == 200
            assert {answer.status_code for answer in await asyncio.gather(*waits, *held)} == {423}
        assert (await risk.get("/v1/whoami")).status_code == 200


async def test_random_bytes_never_stop_the_server(port: Running, connect: Connect) -> None:
    source = random.Random(7)
    whole = (
        b"PUT /v1/spaces/contoso/records/a?ttl=5s HTTP/1.1\r\nHost: x\r\n" + AUTH + b"Content-Length: 7\r\n\r\n[1,2,3]"
    )
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(source.randint(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        raw = await connect()
        raw.writer.write(bytes(data))
        raw.writer.write_eof()
        await asyncio.wait_for(raw.reader.read(65536), WAIT_S)
        raw.writer.close()
    await is_well(port)
