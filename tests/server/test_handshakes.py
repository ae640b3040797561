"""Whoever connects to a port with TLS and does not shake hands is counted, bounded, and in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

import holdfast
from holdfast.server import handshakes
from holdfast.server.config import Address, Config, Listen, Tls
from holdfast.server.handshakes import Handshakes
from holdfast.server.keeper import Keeper, tls_context
from tests.server.test_keeper_tls import Authority

DEADLINE_S = 10.0
ANY = Address("127.0.0.1", 0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@contextlib.asynccontextmanager
async def serving(authority: Authority) -> AsyncIterator[Keeper]:
    certificate, key = authority.signed("keeper")
    config = Config(store="memory:", listen=Listen(ANY, ANY), tls=Tls(str(certificate), str(key)))
    keeper = Keeper(config, background=False)
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.stop()


@pytest.fixture
async def keeper(authority: Authority) -> AsyncIterator[Keeper]:
    async with serving(authority) as keeper:
        yield keeper


def opened(keeper: Keeper) -> float:
    """How many connections its metrics tell of."""
    [line] = [each for each in keeper.metrics.text().decode().splitlines() if each.startswith("holdfast_connections ")]
    return float(line.split()[1])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


class Strangers:
    """Connections that say nothing."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def come(self, port: int, count: int) -> list[socket.socket]:
        new = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for each in new:
            each.setblocking(False)
        self._open += new
        return new

    def go(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    strangers = Strangers()
    yield strangers
    strangers.go()


async def ended(connection: socket.socket) -> None:
    """Return when the other side has closed it."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(connection, 1000):
                pass


async def honest(keeper: Keeper, authority: Authority) -> None:
    """Somebody who comes with a token, to both ports."""
    url = f"holdfasts://127.0.0.1:{keeper.binary_port}?ca={authority.file}"
    async with holdfast.open(url, token=str(keeper.admin_token)) as store:
        await store.space("contoso").records.set("k", "x" * 300_000)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    async with httpx.AsyncClient(verify=trusting) as web:
        answer = await web.get(f"https://127.0.0.1:{keeper.http_port}/healthz")
        assert answer.status_code == 200


async def test_who_never_shakes_hands_is_counted_and_makes_room_for_who_does(
    keeper: Keeper,
    authority: Authority,
    strangers: Strangers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 4)
    for port in (keeper.binary_port, keeper.http_port):
        before = opened(keeper)
        for each in strangers.come(port, 20)[:16]:
            await ended(each)
        await until(lambda: opened(keeper) == before + 4)  # noqa: B023 - it is awaited here
    assert "more than 4 connections have not finished their TLS handshake" in caplog.text
    await honest(keeper, authority)


async def test_a_handshake_has_its_time_and_no_more(
    keeper: Keeper, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.05)
    for port in (keeper.binary_port, keeper.http_port):
        for each in strangers.come(port, 3):
            await ended(each)
    await until(lambda: opened(keeper) == 0)
    assert "no TLS handshake within 0.05 s" in caplog.text


async def test_a_keeper_that_stops_waits_for_no_handshake(authority: Authority, strangers: Strangers) -> None:
    async with serving(authority) as keeper:
        silent = strangers.come(keeper.binary_port, 3) + strangers.come(keeper.http_port, 3)
        await until(lambda: opened(keeper) == 6)
        async with asyncio.timeout(handshakes.HANDSHAKE_S - 1):
            await keeper.stop()
            for each in silent:
                await ended(each)


async def test_what_is_no_tls_ends_its_own_connection_alone(
    keeper: Keeper, authority: Authority, strangers: Strangers
) -> None:
    for port in (keeper.binary_port, keeper.http_port):
        [plain] = strangers.come(port, 1)
        plain.send(b"GET / HTTP/1.1\r\n\r\n")
        await ended(plain)
    await until(lambda: opened(keeper) == 0)
    await honest(keeper, authority)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_on_either_loop_what_follows_the_handshake_at_once_is_not_lost(
    run: Callable[..., int], authority: Authority
) -> None:
    certificate, key = authority.signed("keeper")
    context = tls_context(Tls(str(certificate), str(key)))
    trusting = ssl.create_default_context(cafile=str(authority.file))

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._transport.write(data)  # type: ignore[attr-defined]

    async def one(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(b"hello")
        async with asyncio.timeout(DEADLINE_S):
            heard = await reader.readexactly(5)
        writer.close()
        return heard

    async def main() -> int:
        shaking = Handshakes(context, lambda error, peer: None)
        server = await asyncio.get_running_loop().create_server(lambda: shaking.before(Echo), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        heard = await asyncio.gather(*(one(port) for _ in range(20)))
        server.close()
        return heard.count(b"hello")

    assert run(main()) == 20
