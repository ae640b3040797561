"""Opening and closing the port."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from holdfast import InvalidInput, ManualClock, Store, Unavailable
from holdfast.server.http import Limits, make_app, serve_http
from tests.server.http.keeping import MARKET, Keeper, Running, running
from tests.server.http.test_feed import FEED, Stream

BASE = "/v1/spaces/contoso"


async def test_the_real_port_is_told_and_signals_are_left_alone(store: Store) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with running(Keeper(store)) as port:
        assert port.server.port
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_a_port_that_is_taken_is_unavailable(port: Running) -> None:
    with pytest.raises(Unavailable, match="choose another"):
        await serve_http(make_app(port.keeper), port=port.server.port or 0)


async def test_a_stopped_port_has_finished_what_was_running_and_told_the_others(
    port: Running, market: httpx.AsyncClient, risk: httpx.AsyncClient
) -> None:
    await risk.post(f"{BASE}/locks/l", json={"ttl": 600})
    waiting = asyncio.create_task(market.post(f"{BASE}/locks/l", json={"ttl": 600, "wait": 30}))
    while True:
        [line] = (await risk.get(f"{BASE}/locks")).json()["locks"]
        if line["waiters"]:
            break
        await asyncio.sleep(0.01)
    async with market.stream("GET", FEED) as response:
        stream = Stream(response)
        await stream.next()
        await asyncio.wait_for(port.server.stop(), 5)
        assert '"error":"unavailable"' in (await stream.next())["data"]
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
    [state] = await port.keeper.store.space("contoso").locks.list()
    assert state.waiters == []
    with pytest.raises(httpx.ConnectError):
        await risk.get("/healthz")


async def test_a_request_that_does_not_end_is_cut_off_in_time(store: Store, clock: ManualClock) -> None:
    from holdfast.engine import Entry
    from holdfast.middleware.wrapper import Wrapper

    class Stuck(Wrapper):
        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            await asyncio.Event().wait()
            return []

    keeper = Keeper(store, clock, around=Stuck)
    async with running(keeper, limits=Limits(stop_s_max=1)) as port, port.client() as client:
        stuck = asyncio.create_task(client.get(f"{BASE}/records/a"))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(port.server.stop(), 5)
        with pytest.raises(httpx.HTTPError):
            (await stuck).raise_for_status()


async def test_a_unix_socket_serves_and_is_its_users_alone(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    async with running(Keeper(store), path=path) as port:
        assert port.server.path == path
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://keeper") as client:
            assert (await client.get("/healthz")).status_code == 200
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(InvalidInput, match="no socket"):
        await serve_http(make_app(Keeper(store)), path=path)


async def test_tls(store: Store, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    making = await asyncio.create_subprocess_exec(
        "openssl", *options.split(), "-keyout", key, "-out", cert, stderr=asyncio.subprocess.DEVNULL
    )
    assert await making.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = await serve_http(make_app(Keeper(store)), port=0, tls=context)
    try:
        headers = {"Authorization": f"Bearer {MARKET}"}
        trusting = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{server.port}", verify=trusting) as client:
            assert (await client.get("/v1/whoami", headers=headers)).status_code == 200
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/healthz")
    finally:
        await server.stop()


def test_importing_holdfast_brings_no_web_library() -> None:
    code = "import holdfast, sys; sys.exit(any(name in sys.modules for name in ('starlette', 'uvicorn', 'h11')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
