"""The feed over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import ManualClock, Store
from holdfast.engine import Batch, Put
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import AccessRule, Rules
from holdfast.server.http import Limits
from tests.server.http.keeping import MARKET, RISK, TOKENS, Keeper, Running, running

FEED = "/v1/spaces/contoso/feed"
WAIT_S = 20


class Stream:
    """The events of a response, one after the other."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> dict[str, str]:
        """The fields of the next event; a comment has the field ""."""
        fields: dict[str, str] = {}
        while True:
            line = await asyncio.wait_for(anext(self._lines), WAIT_S)
            if not line:
                return fields
            name, _, value = line.partition(":")
            fields[name] = value.strip()

    async def data(self) -> Any:
        while True:
            event = await self.next()
            if "data" in event:
                return json.loads(event["data"])

    async def rest(self) -> list[str]:
        return [line async for line in self._lines]


async def page(client: httpx.AsyncClient, **params: str) -> httpx.Response:
    return await client.get(FEED, params=params, headers={"Accept": "application/json"})


async def put(client: httpx.AsyncClient, key: str, value: Any = 1) -> None:
    (await client.put(f"/v1/spaces/contoso/records/{key}", json=value)).raise_for_status()


async def test_a_stream_tells_what_happens_and_goes_on_where_it_was_interrupted(market: httpx.AsyncClient) -> None:
    async with market.stream("GET", FEED, params={"prefix": "orders/"}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream = Stream(response)
        start = (await stream.next())["id"]
        await put(market, "orders/1", {"n": 1})
        await put(market, "other", 1)
        event = await stream.next()
        told = json.loads(event["data"])
        assert (told["actor"], told["cursor"]) == ("market", event["id"])
        assert [(change["op"], change["key"], change["value"]) for change in told["changes"]] == [
            ("put", "orders/1", {"n": 1})
        ]
    await put(market, "orders/2")
    await put(market, "orders/3")
    async with market.stream(
        "GET", FEED, params={"prefix": "orders/"}, headers={"Last-Event-ID": event["id"]}
    ) as response:
        stream = Stream(response)
        assert [(await stream.data())["changes"][0]["key"] for _ in range(2)] == ["orders/2", "orders/3"]
    async with market.stream("GET", FEED, params={"cursor": start}) as response:
        assert (await Stream(response).data())["changes"][0]["key"] == "orders/1"


async def test_what_happened_together_is_one_event(market: httpx.AsyncClient) -> None:
    async with market.stream("GET", FEED) as response:
        steps = [{"operation": "Set", "key": key, "value": 1} for key in "abc"]
        await market.post(
            "/v1/spaces/contoso/transactions", json={"operations": steps}, headers={"Idempotency-Key": "k1"}
        )
        told = await Stream(response).data()
    assert [change["key"] for change in told["changes"]] == ["a", "b", "c"]
    assert told["request_id"] == "k1"


async def test_pages_are_bounded_and_lose_nothing(market: httpx.AsyncClient) -> None:
    start = (await page(market)).json()["cursor"]
    for number in range(25):
        await put(market, f"n{number}")
    seen, cursor, more = [], start, True
    while more:
        answer = (await page(market, cursor=cursor, limit="10")).json()
        assert len(answer["commits"]) <= 10
        seen += [commit["changes"][0]["key"] for commit in answer["commits"]]
        cursor, more = answer["cursor"], answer["more"]
    assert seen == [f"n{number}" for number in range(25)]
    assert (await page(market, cursor=cursor)).json() == {"commits": [], "cursor": cursor, "more": False}
    await put(market, "last")
    assert len((await page(market, cursor=cursor)).json()["commits"]) == 1


async def test_a_quiet_prefix_moves_on_with_the_space(market: httpx.AsyncClient) -> None:
    start = (await page(market)).json()["cursor"]
    await put(market, "other")
    answer = (await page(market, cursor=start, prefix="orders/")).json()
    assert answer["commits"] == []
    assert answer["cursor"] != start


async def test_a_cursor_that_is_gone_is_compacted(market: httpx.AsyncClient, store: Store) -> None:
    await put(market, "a")
    start = (await page(market)).json()["cursor"]
    for number in range(3):
        await put(market, f"n{number}")
    revision = (await store.engine.spaces("contoso"))[0].revision
    await store.engine.compact("contoso", revision - 1)
    answers = [await page(market, cursor=start), await market.get(FEED, params={"cursor": start})]
    assert [(answer.status_code, answer.json()["error"]) for answer in answers] == [(410, "compacted")] * 2
    ahead = await market.get(FEED, params={"cursor": "r999999"})
    assert (ahead.status_code, ahead.json()["error"]) == (410, "compacted")
    assert (await market.get(FEED, params={"cursor": "nonsense"})).status_code == 400


async def test_a_stream_whose_cursor_goes_ends_with_an_error_event(store: Store, clock: ManualClock) -> None:
    from holdfast.engine import ChangeSet
    from holdfast.errors import Compacted
    from holdfast.middleware.wrapper import Wrapper

    class Forgetful(Wrapper):
        async def watch(
            self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
        ) -> AsyncIterator[ChangeSet]:
            async for commit in self.inner.watch(space, *prefixes, cursor=cursor, live=live):
                yield commit
                raise Compacted("the feed begins later now")

    keeper = Keeper(store, clock, around=Forgetful)
    async with running(keeper) as port, port.client() as market, market.stream("GET", FEED) as response:
        await put(market, "a")
        stream = Stream(response)
        await stream.data()
        event = await stream.next()
        assert event["event"] == "error"
        assert json.loads(event["data"])["error"] == "compacted"
        assert await stream.rest() == []


async def test_a_stream_beats_while_nothing_happens(market: httpx.AsyncClient, clock: ManualClock) -> None:
    async with market.stream("GET", FEED) as response:
        stream = Stream(response)
        await stream.next()
        beat = asyncio.create_task(stream.next())
        for _ in range(16):
            clock.advance("1s")
            await asyncio.sleep(0.02)
        assert await beat == {"": ""}


async def test_a_stream_ends_when_its_token_is_revoked(
    port: Running, market: httpx.AsyncClient, clock: ManualClock
) -> None:
    async with market.stream("GET", FEED) as response:
        stream = Stream(response)
        await stream.next()
        port.keeper.revoked.add(MARKET)
        ending = asyncio.create_task(stream.next())
        while not ending.done():
            clock.advance("1s")
            await asyncio.sleep(0.02)
        assert json.loads((await ending)["data"])["error"] == "authentication_failed"
        assert await stream.rest() == []


async def test_nothing_is_told_to_a_token_that_was_revoked_before_it_happened(
    port: Running, market: httpx.AsyncClient, store: Store
) -> None:
    async with market.stream("GET", FEED) as response:
        stream = Stream(response)
        await stream.next()
        port.keeper.revoked.add(MARKET)
        await store.space("contoso", agent="other").records.set("secret", 1)
        assert json.loads((await stream.next())["data"])["error"] == "authentication_failed"


async def test_one_token_has_only_so_many_feeds(store: Store, clock: ManualClock) -> None:
    limits = Limits(feeds_per_token_max=2)
    async with running(Keeper(store, clock), limits=limits) as port, port.client() as market, port.client(RISK) as risk:
        async with market.stream("GET", FEED) as first, market.stream("GET", FEED) as second:
            await Stream(first).next()
            await Stream(second).next()
            third = await market.get(FEED)
            assert (third.status_code, third.json()["error"]) == (429, "rate_limit_exceeded")
            assert "retry-after" in third.headers
            async with risk.stream("GET", FEED) as other:
                assert other.status_code == 200
        async with asyncio.timeout(WAIT_S):
            await until_free(market)


async def until_free(client: httpx.AsyncClient) -> None:
    """The server learns a little later that a client has gone."""
    while True:
        async with client.stream("GET", FEED) as response:
            if response.status_code == 200:
                return
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("accept", ["application/json", "application/json, text/plain"])
async def test_json_is_a_page(market: httpx.AsyncClient, accept: str) -> None:
    answer = await market.get(FEED, headers={"Accept": accept})
    assert answer.headers["content-type"] == "application/json"


async def test_who_may_not_watch_is_told_by_a_status(store: Store, clock: ManualClock) -> None:
    rules = Rules(access_control=(AccessRule("market", allow=("Get", "Set")),))
    policy = Policy(store.engine, clock, rules)
    keeper = Keeper(store, clock, around=lambda engine: policy.engine_for(TOKENS[MARKET]))
    async with running(keeper) as port, port.client(MARKET) as market:
        await put(market, "orders/1")
        for accept in ("text/event-stream", "application/json"):
            for params in ({}, {"cursor": "r0"}, {"prefix": "orders/"}):
                refused = await market.get(FEED, params=params, headers={"Accept": accept})
                assert (refused.status_code, refused.json()["error"]) == (403, "access_denied")
        assert "''" not in refused.text


@pytest.mark.parametrize("value", [b"[" * 150 + b"]" * 150, b"[" * 5000 + b"]" * 5000, b"no JSON"])
async def test_a_value_that_cannot_be_read_is_told_as_such_and_ends_neither_stream_nor_page(
    market: httpx.AsyncClient, store: Store, value: bytes
) -> None:
    """What an older version stored, or an administrator wrote by hand."""
    await put(market, "before")
    async with market.stream("GET", FEED) as response:
        stream = Stream(response)
        await stream.next()
        await store.engine.commit("contoso", Batch("root", (Put("records/bad", value), Put("records/good", b"2"))))
        await put(market, "later", 3)
        [bad, good], [later] = (await stream.data())["changes"], (await stream.data())["changes"]
    assert bad["value"] is None
    assert bad["error"]
    assert "error" not in good
    assert (good["value"], later["value"]) == (2, 3)
    commits = (await page(market, cursor="r1")).json()["commits"]
    assert [change["value"] for commit in commits for change in commit["changes"]] == [None, 2, 3]
    listed = (await market.get("/v1/spaces/contoso/records?values=true")).json()["records"]
    assert {each["key"]: each["value"] for each in listed} == {"bad": None, "before": 1, "good": 2, "later": 3}
    assert [each["key"] for each in listed if each["error"]] == ["bad"]
