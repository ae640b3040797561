"""Clients that take too much: connections, requests, bytes, time. They are refused in words, and the others do not notice."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Store, codec
from holdfast.clock import SystemClock
from holdfast.engine import Batch, Put
from holdfast.errors import RateLimitExceeded
from holdfast.identity import Identity
from holdfast.server.http import Limits, app, reading, steps
from holdfast.server.http.failures import BodyTooLarge
from holdfast.server.http.limits import ELEMENTS_MAX
from holdfast.server.http.shares import LARGE_BYTES
from tests.server.http.keeping import ADMIN, FOREIGN, LEAD, MARKET, RISK, Keeper, Running, running

URL = "/v1/spaces/contoso/records/a"
JSON = {"Content-Type": "application/json"}
DEADLINE_S = 10
KB = 1024


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with holdfast.open("memory:", background=False) as opened:
        yield opened


@asynccontextmanager
async def opened(store: Store, **limits: Any) -> AsyncIterator[Running]:
    async with running(Keeper(store, SystemClock()), limits=Limits(**limits)) as port:
        yield port


class Wire:
    """A connection in the hands of the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, Any, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(re.findall(r"(?m)^([\w-]+): (.*?)\r$", head.lower()))
            return (
                int(head.split()[1]),
                json.loads(await self.reader.readexactly(int(headers["content-length"]))),
                headers,
            )

    async def ended(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read() == b""


Connect = Callable[[Running], Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def one(port: Running) -> Wire:
            wire = Wire(*await asyncio.open_connection("127.0.0.1", port.server.port))
            stack.callback(wire.writer.close)
            return wire

        yield one


def asks(token: str | None, path: str = "/v1/whoami") -> bytes:
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{shown}\r\n".encode()


def puts(token: str, length: int, url: str = URL) -> bytes:
    """The head of a request whose body has so many bytes."""
    return (
        f"PUT {url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n".encode()
    )


async def status(port: Running, token: str | None, path: str = "/v1/whoami") -> int:
    async with port.client(token) as client:
        return (await client.get(path)).status_code


async def nothing_is_kept(port: Running) -> None:
    shares, admission = port.server._port.shares, port.server._port.admission
    async with asyncio.timeout(DEADLINE_S):
        while shares._running or shares._bytes or shares._waiting or admission._entered or admission._silent:
            await asyncio.sleep(0.01)
    assert not admission._of_token


# --- connections ---


async def test_strangers_who_keep_their_connections_open_keep_nobody_out(store: Store, connect: Connect) -> None:
    async with opened(store, connections=4, connections_before_hello=6) as port:
        strangers = []
        for _ in range(20):
            strangers.append(await connect(port))
            strangers[-1].say(asks(None, "/healthz"))
            assert (await strangers[-1].answer())[0] == 200
        assert port.server.connections <= 6
        assert [await status(port, token) for token in (MARKET, RISK, ADMIN)] == [200, 200, 200]
        assert await status(port, None, "/healthz") == 200
        code, failure, _ = await strangers[0].answer()
        assert (code, failure["error"]) == (503, "unavailable")
        assert "have not shown a token, and this one has been silent for longest" in failure["message"]
        strangers[-1].say(asks(MARKET))  # it is still there, and may say who it is
        assert (await strangers[-1].answer())[0] == 200


async def test_one_token_has_so_many_connections_and_administrators_have_room(store: Store, connect: Connect) -> None:
    async with opened(
        store, connections=3, connections_per_token=2, connections_for_administrators=1, connections_before_hello=9
    ) as port:

        async def asked(token: str) -> tuple[int, str, Wire]:
            wire = await connect(port)
            wire.say(asks(token))
            code, said, headers = await wire.answer()
            if code != 200:
                assert (headers["connection"], headers["retry-after"]) == ("close", "1")
                assert await wire.ended()
            return code, said.get("message", ""), wire

        first = (await asked(MARKET))[2]
        assert (await asked(MARKET))[0] == 200
        code, words, _ = await asked(MARKET)
        assert (code, "'market' has 2 connections with this token" in words) == (503, True)
        assert (await asked(RISK))[0] == 200
        code, words, _ = await asked(LEAD)
        assert (code, "there are 3 connections already" in words) == (503, True)
        assert (await asked(ADMIN))[0] == 200
        first.say(asks(RISK))  # somebody else on the same connection, as behind a proxy: it is counted for him
        assert (await first.answer())[0] == 503
        assert await first.ended()
        assert (await asked(MARKET))[0] == 503  # with the administrator there are three all the same
    await nothing_is_kept(port)


# --- bodies that do not come ---


async def test_bodies_that_do_not_come_take_no_place_of_requests_and_cost_their_sender(
    store: Store, connect: Connect
) -> None:
    async with opened(store, requests_max=4, requests_per_token_max=2, body_s_max=0.5) as port:
        waiting = [await connect(port) for _ in range(12)]
        for wire in waiting:
            wire.say(puts(MARKET, 10) + b"1")
        await asyncio.sleep(0.1)
        assert [await status(port, token) for token in (MARKET, RISK, ADMIN)] == [200, 200, 200]
        assert {(await wire.answer())[0] for wire in waiting} == {408}
        assert port.keeper.charged == ["market"] * 12
    await nothing_is_kept(port)


async def test_what_is_no_good_costs_its_sender_and_what_is_good_costs_nothing_here(store: Store) -> None:
    async with opened(store) as port, port.client() as market:
        assert (await market.put(URL, json=1)).status_code == 200
        assert port.keeper.charged == []
        assert (await market.put(URL, content=b"[1,", headers=JSON)).status_code == 400
        assert (await market.post("/v1/spaces/contoso/counters/n", json={"delta": "x"})).status_code == 400
        assert port.keeper.charged == ["market", "market"]


async def test_space_and_rate_are_asked_for_before_the_body_is_there(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as port:
        wire = await connect(port)
        wire.say(puts(FOREIGN, 10))
        assert (await wire.answer())[0] == 403

        def look(self: Keeper, identity: Identity) -> None:
            raise RateLimitExceeded("not now", retry_after=3)

        monkeypatch.setattr(Keeper, "look_at_rate", look)
        wire = await connect(port)
        wire.say(puts(MARKET, 10))
        code, failure, headers = await wire.answer()
        assert (code, failure["error"], headers["retry-after"]) == (429, "rate_limit_exceeded", "3")


async def test_a_stop_does_not_wait_for_a_body(
    store: Store, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(store) as port:
        wire = await connect(port)
        wire.say(puts(MARKET, 10) + b"1")
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await port.server.stop()
        assert time.monotonic() - began < 2
        code, failure, _ = await wire.answer()
        assert (code, failure["error"]) == (503, "unavailable")
        assert "nothing was done" in failure["message"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert [record.status for record in caplog.records if hasattr(record, "status")] == [503]
    assert await store.engine.spaces("contoso") == []


# --- bodies that are large ---


async def test_bytes_of_bodies_are_bounded_by_token_and_in_all_and_small_ones_pass(
    store: Store, connect: Connect
) -> None:
    limits = {"body_bytes_free": KB, "bodies_bytes_per_token_max": 100 * KB, "bodies_bytes_max": 150 * KB}
    async with opened(store, **limits) as port:

        async def half(token: str) -> Wire:
            wire = await connect(port)
            wire.say(puts(token, 200 * KB) + b'"' + b"x" * (61 * KB))
            return wire

        def arrived() -> int:
            return port.server._port.shares._bytes.total()

        async with asyncio.timeout(DEADLINE_S):
            await half(MARKET)
            while arrived() < 60 * KB:
                await asyncio.sleep(0.01)
            code, failure, _ = await (await half(MARKET)).answer()
            assert (code, failure["error"]) == (429, "rate_limit_exceeded")
            assert "'market' has bodies of more than 102,400 bytes under way" in failure["message"]
            await half(RISK)
            while arrived() < 120 * KB:
                await asyncio.sleep(0.01)
            code, failure, _ = await (await half(LEAD)).answer()
            assert (code, failure["error"]) == (503, "unavailable")
            assert "bodies of more than 153,600 bytes are under way" in failure["message"]
            for token in (MARKET, RISK, LEAD):
                async with port.client(token) as client:
                    assert (await client.put(URL, json="x" * 900)).status_code == 200
    await nothing_is_kept(port)


DENSE = {
    "lists": b"[" + b"[]," * ELEMENTS_MAX + b"[]]",
    "objects": b"[" + b'{"":0},' * ELEMENTS_MAX + b"{}]",
    "texts": b"[" + b'"\\\\",' * ELEMENTS_MAX + b"0]",
    "members": b'{"":0' + b',"a":0' * ELEMENTS_MAX + b"}",
}


@pytest.mark.parametrize("body", DENSE.values(), ids=DENSE)
async def test_a_body_of_too_many_values_is_refused_and_nothing_is_written(store: Store, body: bytes) -> None:
    async with opened(store) as port, port.client() as market:
        message = b'{"id":"m","payload":{"operation":"Set","key":"k","value":' + body + b"}}"
        for method, url, content in (("PUT", URL, body), ("POST", "/v1/messages", message)):
            answer = await market.request(method, url, content=content, headers=JSON)
            assert (answer.status_code, answer.json()["error"]) == (413, "invalid_request")
            assert "at most 100,000 values" in answer.json()["message"]
    assert await store.engine.spaces("contoso") == []


def test_values_are_counted_exactly_and_never_in_texts() -> None:
    assert len(reading.read_json(b"[" + b"0," * (ELEMENTS_MAX - 1) + b"0]")) == ELEMENTS_MAX
    with pytest.raises(BodyTooLarge):
        reading.read_json(b"[" + b"0," * ELEMENTS_MAX + b"0]")
    for text in (",[{" * ELEMENTS_MAX, '",' * ELEMENTS_MAX, '\\",[' * ELEMENTS_MAX):
        assert reading.read_json(json.dumps([text, "a"]).encode()) == [text, "a"]


@given(st.text('\\",[{:a\n', max_size=30) | st.lists(st.text('\\",[{:a\n', max_size=8)), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_texts_are_left_out_wherever_they_are_cut(value: Any, piece: int) -> None:
    data = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece)
        assert reading.between_texts(data) == re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"", data)


async def test_large_bodies_are_read_beside_the_loop_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, seen = 0, []

    def slowly(data: bytes) -> Any:
        nonlocal under_way
        under_way += 1
        seen.append((len(data) > LARGE_BYTES, threading.current_thread() is threading.main_thread(), under_way))
        if len(data) > LARGE_BYTES:
            time.sleep(0.05)
        under_way -= 1
        return reading.read_json(data)

    monkeypatch.setattr(app, "read_json", slowly)
    async with opened(store) as port, port.client() as market:
        large, small = "x" * LARGE_BYTES, "x" * (LARGE_BYTES - 100)
        answers = await asyncio.gather(*(market.put(URL, json=large) for _ in range(3)))
        answers.append(await market.put(URL, json=small))
        assert {answer.status_code for answer in answers} == {200}
    assert seen == [(True, False, 1)] * 3 + [(False, True, 1)]


# --- values that are large ---


@pytest.fixture
async def stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A value that nobody may read, because it would take long."""
    value = b"[" + b"[]," * 200_000 + b"[]]"
    await store.engine.create("contoso")
    await store.engine.commit("contoso", Batch("market", (Put("records/big", value), Put("records/n", b"7"))))
    decode = codec._decode

    def decoded(data: bytes) -> Any:
        assert len(data) < len(value), "a large value was read"
        return decode(data)

    monkeypatch.setattr(codec, "_decode", decoded)
    return value


async def test_stored_values_are_passed_on_and_not_read(store: Store, stored: bytes) -> None:
    async with opened(store) as port, port.client() as market:
        assert (await market.get("/v1/spaces/contoso/records/big")).content == stored
        head = await market.head("/v1/spaces/contoso/records/big")
        assert (head.headers["content-length"], head.content) == (str(len(stored)), b"")
        page = (await market.get("/v1/spaces/contoso/records?values=true")).content
        assert stored in page
        assert [each["value"] for each in msgspec.json.decode(page)["records"]][1] == 7
        assert stored not in (await market.get("/v1/spaces/contoso/records")).content
        got = await market.post("/v1/messages", json={"id": "1", "payload": {"operation": "Get", "key": "big"}})
        assert stored in got.content
        none = await market.post("/v1/messages", json={"id": "2", "payload": {"operation": "Get", "key": "none"}})
        assert none.json()["payload"] == {"value": None}


async def transact(market: httpx.AsyncClient, *operations: dict[str, Any], id: str | None = None) -> httpx.Response:
    headers = {"Idempotency-Key": id} if id else {}
    body = {"operations": list(operations)}
    return await market.post("/v1/spaces/contoso/transactions", json=body, headers=headers)


async def test_a_transaction_reads_no_more_than_it_may(
    store: Store, stored: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, write = {"operation": "Get", "key": "big"}, {"operation": "Set", "key": "a", "value": 1}
    async with opened(store) as port, port.client() as market:
        answer = await transact(market, get, {"operation": "Get", "key": "n"})
        assert stored in answer.content
        assert (await transact(market, {"operation": "Get", "key": "n"}, write, id="few")).json()["results"] == [
            7,
            True,
        ]
        answer = await transact(market, get, write | {"value": 2}, id="many")
        assert (answer.status_code, "at most 100,000 values" in answer.json()["message"]) == (413, True)
        monkeypatch.setattr(steps, "READ_BYTES_MAX", 2 * len(stored))
        answer = await transact(market, get, get, get)
        assert (answer.status_code, "Read fewer at once" in answer.json()["message"]) == (400, True)
        twice = {"operation": "Set", "key": "b", "value": "x" * len(stored)}, {"operation": "Get", "key": "b"}
        answer = await transact(market, *twice, twice[1], twice[1])
        assert (answer.status_code, "Read fewer at once" in answer.json()["message"]) == (400, True)
        assert (await market.get(URL)).json() == 1
        assert (await market.get("/v1/spaces/contoso/records/b")).status_code == 404


async def test_a_message_of_more_members_or_steps_than_there_may_be_is_refused(store: Store) -> None:
    many = {f"m{number}": 1 for number in range(40)}
    steps_ = [{"op": "Get", "key": "n"}] * 121
    async with opened(store) as port, port.client() as market:
        for payload in ({"operation": "Get", **many}, {"operation": "Transaction", "operations": steps_}):
            answer = await market.post("/v1/messages", json={"id": "m", "payload": payload})
            assert (answer.status_code, answer.json()["payload"]["error"]) == (400, "invalid_request")
