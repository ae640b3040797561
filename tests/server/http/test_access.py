"""Who may ask, and what everybody is told."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from holdfast import Store
from holdfast.engine import Batch, Engine, Receipt
from holdfast.errors import OutcomeUnknown, QuotaExceeded, RateLimitExceeded, Unavailable
from holdfast.middleware.wrapper import Wrapper
from holdfast.server.http.table import ENDPOINTS
from tests.server.http.keeping import ADMIN, FOREIGN, MARKET, Keeper, Running, running

GUARDED = [(each.method, each.path) for each in ENDPOINTS if not each.is_open]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer hf_wrong", "Basic hf_market", "hf_market", "Bearer  hf_market", "Bearer market"],
)
async def test_without_a_valid_token_nothing_answers_and_every_cause_gets_one_answer(
    port: Running, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with port.client(None) as client:
        answers = [
            await client.request(method, path.replace("{", "").replace("}", ""), headers=headers)
            for method, path in [*GUARDED, ("GET", "/nowhere"), ("GET", "/no%0Awhere"), ("PUT", "/v1/whoami")]
        ]
    assert {answer.status_code for answer in answers} == {401}
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
    assert {answer.text for answer in answers} == {
        '{"error":"authentication_failed","message":"a valid token is needed: Authorization: Bearer hf_…"}'
    }


async def test_a_revoked_token_is_refused_at_once(port: Running, market: httpx.AsyncClient) -> None:
    assert (await market.get("/v1/whoami")).json() == {"agent": "market", "role": "agent", "space": "contoso"}
    port.keeper.revoked.add(MARKET)
    assert (await market.get("/v1/whoami")).status_code == 401


async def test_a_space_of_others_is_denied_whether_or_not_it_exists(port: Running, market: httpx.AsyncClient) -> None:
    await market.put("/v1/spaces/contoso/records/secret", json="s3cret")
    async with port.client(FOREIGN) as foreign:
        for space in ("contoso", "nobodys"):
            for method, path in (
                ("GET", "records/secret"),
                ("GET", "records"),
                ("PUT", "records/x"),
                ("GET", "feed"),
                ("GET", "audit"),
                ("GET", "locks"),
                ("POST", "locks/l"),
            ):
                sent: dict[str, Any] = {"json": {}} if method != "GET" else {}
                answer = await foreign.request(method, f"/v1/spaces/{space}/{path}", **sent)
                assert (answer.status_code, answer.json()["error"]) == (403, "access_denied")
                assert answer.json()["message"] == "the token of 'market' is for space 'fabrikam' and no other"
        assert (await foreign.get("/v1/spaces")).json() == {"spaces": []}


async def test_health_needs_no_token_and_readiness_tells_why_not(port: Running) -> None:
    async with port.client(None) as client:
        assert (await client.get("/healthz")).json() == {"status": "alive"}
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        port.keeper.reason = "the store is being read"
        waiting = await client.get("/readyz")
        assert (waiting.status_code, waiting.json()) == (
            503,
            {"error": "unavailable", "message": "the store is being read"},
        )
        assert (await client.get("/healthz")).status_code == 200


async def test_metrics_are_for_administrators_unless_they_are_open(store: Store) -> None:
    for is_open, statuses in ((False, [401, 403, 200]), (True, [200, 200, 200])):
        async with running(Keeper(store), metrics=lambda: b"up 1\n", metrics_open=is_open) as port:
            answers = []
            for token in (None, MARKET, ADMIN):
                async with port.client(token) as client:
                    answers.append(await client.get("/metrics"))
            assert [answer.status_code for answer in answers] == statuses
            assert answers[-1].text == "up 1\n"
            assert answers[-1].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_every_answer_forbids_caching_and_guessing_and_offers_no_cors(market: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/v1/whoami", "/nowhere", "/docs", "/openapi.json"):
        answer = await market.get(path, headers={"Origin": "https://elsewhere.example"})
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert "server" not in answer.headers


async def test_a_request_keeps_its_name(market: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with caplog.at_level(logging.INFO, "holdfast.http"):
        answer = await market.get("/v1/whoami", headers={"X-Request-Id": "r-17", "traceparent": trace})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("r-17", trace)
    [line] = [record for record in caplog.records if record.name == "holdfast.http"]
    assert (line.request_id, line.traceparent, line.status) == ("r-17", trace, 200)  # type: ignore[attr-defined]
    strange = await market.get("/v1/whoami", headers={"X-Request-Id": "two words", "traceparent": "nonsense"})
    assert strange.headers["x-request-id"] != "two words"
    assert "traceparent" not in strange.headers


async def test_a_messages_correlation_is_in_the_log(
    market: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"id": "m-1", "correlationId": "c-9", "payload": {"operation": "Get", "key": "a"}}
    with caplog.at_level(logging.INFO, "holdfast.http"):
        await market.post("/v1/messages", json=message)
    [line] = [record for record in caplog.records if record.name == "holdfast.http"]
    assert (line.correlation_id, line.message_id) == ("c-9", "m-1")  # type: ignore[attr-defined]


async def test_no_token_is_ever_in_an_answer_or_a_log(port: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with port.client("hf_sesame-open") as client:
            answers = [
                await client.get("/v1/whoami"),
                await client.get("/healthz"),
                await client.post("/v1/messages", json={}),
            ]
    assert not any("sesame" in answer.text + str(answer.headers) for answer in answers)
    assert not any("sesame" in record.getMessage() for record in caplog.records if record.name.startswith("holdfast"))


class Failing(Wrapper):
    """An engine whose commits fail as they are told to."""

    def __init__(self, inner: Engine, error: Exception) -> None:
        super().__init__(inner)
        self.error = error

    async def commit(self, space: str, batch: Batch) -> Receipt:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "code", "header"),
    [
        (RateLimitExceeded("too fast", retry_after=2.2), 429, "rate_limit_exceeded", ("retry-after", "3")),
        (QuotaExceeded("full"), 507, "quota_exceeded", None),
        (Unavailable("later"), 503, "unavailable", ("retry-after", "1")),
        (OutcomeUnknown("perhaps", request_id="r-1"), 504, "outcome_unknown", None),
        (ZeroDivisionError("inner detail"), 500, "error", None),
    ],
)
async def test_what_the_store_refuses_is_told_with_its_status(
    store: Store, error: Exception, status: int, code: str, header: tuple[str, str] | None
) -> None:
    keeper = Keeper(store, around=lambda engine: Failing(engine, error))
    async with running(keeper) as port, port.client() as client:
        put = await client.put("/v1/spaces/contoso/records/a", json=1)
        message = await client.post(
            "/v1/messages", json={"id": "m", "payload": {"operation": "Set", "key": "a", "value": 1}}
        )
    assert (put.status_code, put.json()["error"]) == (status, code)
    assert message.status_code == status
    assert (message.json().get("payload") or message.json())["error"] == code
    assert "inner detail" not in put.text + message.text
    if header is not None:
        assert put.headers[header[0]] == message.headers[header[0]] == header[1]


async def test_a_method_that_is_not_there_is_405_and_names_those_that_are(market: httpx.AsyncClient) -> None:
    answer = await market.patch("/v1/spaces/contoso/records/a")
    assert (answer.status_code, answer.json()["error"]) == (405, "invalid_request")
    assert {name.strip() for name in answer.headers["allow"].split(",")} >= {"GET", "PUT", "DELETE"}
    head = await market.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")
