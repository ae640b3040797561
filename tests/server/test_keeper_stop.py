"""How a keeper stops, and how it takes new settings while it runs: no request is lost, and nobody can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import AccessDenied
from holdfast.engine import Batch, Put
from holdfast.engines.remote import RemoteEngine
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import PROTOCOL, Commit, Committed, Failed, Get, Goodbye, Hello, Watch, frame
from tests.server.live import SPACE, by_hand, client, http, make_token

FREELY = {"policies": {"rate_limits": [], "quotas": []}}
STOPS_WITHIN_S = 10.0


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperServer]:
    running = KeeperServer(tmp_path, **FREELY)
    running.start()
    yield running
    running.stop()


async def test_what_was_taken_is_answered_what_is_new_is_refused_and_everything_is_closed(keeper: KeeperServer) -> None:
    token, value = await make_token(keeper, "market"), json.dumps("x" * 20_000).encode()
    answers: dict[int, object] = {}
    farewells = []
    async with by_hand(keeper, token) as hand, http(keeper, token) as web:
        hand.writer.write(frame(Watch(1_000_000, SPACE, ["locks/"], None, True, 1 << 20)))
        await hand.commit(Put("records/first", b"1"))
        opened = asyncio.Event()
        feed = asyncio.create_task(_read_feed(web, opened))
        await asyncio.wait_for(opened.wait(), 10)
        count = 500
        for id in range(10, 10 + count):
            hand.writer.write(frame(Commit(id, SPACE, Batch("market", (Put(f"records/{id}", value),)))))
        await hand.answer(10)
        answers[10] = Committed
        keeper.signal(signal.SIGTERM)
        with contextlib.suppress(EOFError):
            while True:
                message = await hand.next()
                if isinstance(message, Goodbye):
                    farewells.append(message.reason)
                elif isinstance(message, Committed | Failed):
                    assert message.id not in answers
                    answers[message.id] = message
        assert "stopping" in await asyncio.wait_for(feed, 10)
    async with asyncio.timeout(STOPS_WITHIN_S):
        while keeper.running:  # another signal would end it at once
            await asyncio.sleep(0.01)
    assert farewells
    assert "Traceback" not in keeper.log.read_text()
    refused = {id for id, each in answers.items() if isinstance(each, Failed)}
    assert {each.code for each in answers.values() if isinstance(each, Failed)} <= {"unavailable"}

    assert not (keeper.folder / "store.db-wal").exists(), "the log was not folded"
    async with holdfast.open(str(keeper.folder / "store.db"), background=False) as store:
        space = store.space(SPACE)
        kept = {int(name) for name in await space.records.keys() if name != "first"}
        assert kept >= answers.keys() - refused, "acknowledged, and not there"
        assert not kept & refused, "refused, and there all the same"
        checked = await space.audit.verify()
        assert checked.sound
        assert checked.unsealed == 0


async def _read_feed(web: httpx.AsyncClient, opened: asyncio.Event) -> str:
    """What the feed tells until the keeper ends it."""
    lines = []
    async with web.stream("GET", f"/v1/spaces/{SPACE}/feed", headers={"Accept": "text/event-stream"}) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            opened.set()
    return "".join(lines)


async def test_neither_stuck_clients_nor_an_audit_that_is_behind_hold_up_a_stop(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "stuck")
    engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
    small, large = b'"x"', b'"' + b"x" * 60_000 + b'"'
    for start in range(0, 15_000, 500):
        batches = [
            Batch("admin", (Put(f"records/{n}", large if n < 300 else small),)) for n in range(start, start + 500)
        ]
        await asyncio.gather(*(engine.commit(SPACE, batch) for batch in batches))
    await engine.close()
    with (
        socket.create_connection(("127.0.0.1", keeper.port)) as binary,
        socket.create_connection(("127.0.0.1", keeper.http_port)) as web,
    ):
        binary.sendall(frame(Hello(PROTOCOL, token, "stuck")))
        binary.sendall(frame(Watch(1, SPACE, ["records/"], "r0", True, 1 << 30)))
        for id in range(2, 200):
            binary.sendall(frame(Get(id, SPACE, [f"records/{id}"])))
        head = f"GET /v1/spaces/{SPACE}/feed?cursor=r0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        web.sendall(head.encode())
        assert web.recv(4) == b"HTTP"
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await asyncio.to_thread(keeper.stop)
        took = time.monotonic() - began
    print(f"stopped in {took:.1f} s")
    assert took < STOPS_WITHIN_S, f"{took:.1f} s"
    assert not (keeper.folder / "store.db-wal").exists()
    keeper.start()


async def test_new_settings_count_from_the_next_request_on_and_no_request_fails(keeper: KeeperServer) -> None:
    async with client(keeper, "steady") as (_, steady), client(keeper, "noisy-1") as (_, noisy):
        done, end = 0, asyncio.Event()

        async def work() -> None:
            nonlocal done
            while not end.is_set():
                await steady.records.increment("n")
                done += 1

        working = [asyncio.create_task(work()) for _ in range(4)]
        await noisy.records.set("k", 1)

        rules = [{"agent_pattern": "*", "allow": ["*"]}, {"agent_pattern": "noisy-*", "deny": ["Set"]}]
        keeper.write_settings(policies={**FREELY["policies"], "access_control": rules})
        keeper.signal(signal.SIGHUP)
        await _until(noisy, denied=True)

        bad = dict(keeper.settings)
        keeper.write_settings(policies={"access_control": [{"agent_pattern": "*", "allow": ["Fly"]}]})
        keeper.signal(signal.SIGHUP)
        await _logged(keeper, f"{keeper.config}:")
        text = keeper.log.read_text()
        assert "the new configuration is not used and the old one stays" in text
        assert "'Fly' is no verb" in text
        with pytest.raises(AccessDenied):
            await noisy.records.set("k", 2)

        keeper.settings = bad
        port = keeper.settings["listen"]
        keeper.write_settings(policies=FREELY["policies"], listen={**port, "http": "127.0.0.1:1"})
        await _until(noisy, denied=False)  # nobody has sent a signal: it looks at the file itself
        await _logged(keeper, "listen.http changed in the file and needs a restart")

        keeper.write_settings(spaces={"made": {"durability": "async"}}, limits={"connections_before_hello": 8})
        keeper.signal(signal.SIGHUP)
        async with asyncio.timeout(20):
            while "made" not in await _durabilities(keeper):
                await asyncio.sleep(0.05)
        assert (await _durabilities(keeper))["made"] == "async"
        socket_of = (socket.create_connection(("127.0.0.1", keeper.http_port)) for _ in range(9))
        with ExitStack() as stack:
            opened = [stack.enter_context(each) for each in socket_of]
            assert b"503" in opened[0].recv(100)

        before = done
        await asyncio.sleep(0.2)
        end.set()
        await asyncio.gather(*working)
        assert done > before > 10
        assert await steady.records.get("n") == done
    keeper.stop()
    assert "Traceback" not in keeper.log.read_text()


async def _durabilities(keeper: KeeperServer) -> dict[str, str]:
    async with holdfast.open(keeper.url, token=keeper.admin) as store:
        return {info.name: info.durability for info in await store.spaces()}


async def _until(space: holdfast.Space, *, denied: bool) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await space.records.set("k", 1)
                if not denied:
                    return
            except AccessDenied:
                if denied:
                    return
            await asyncio.sleep(0.02)


async def _logged(keeper: KeeperServer, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in keeper.log.read_text():
            await asyncio.sleep(0.02)
