"""What a keeper writes: one record a line, with the request's fields, and without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import ManualClock, Redaction
from holdfast.server.logs import Format, Logs, bound, logger
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import DEADLINE_S, http, make_token, revoke
from tests.soak import examples

TOKEN = f"hf_{'a' * 16}_{'b' * 52}"
LOG = logging.getLogger("holdfast.keeper")


class Written:
    """A stream that remembers, and the logging that writes to it."""

    def __init__(self, format: Format = "json", **options: Any) -> None:
        self.stream = io.StringIO()
        self.logs = Logs("info", format, stream=self.stream, clock=ManualClock(), **options)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def written() -> Iterator[Written]:
    written = Written()
    with written.logs:
        yield written


@pytest.fixture
def lines() -> Iterator[Written]:
    written = Written("text")
    with written.logs:
        yield written


def test_both_ways_of_logging_give_the_same_record(written: Written) -> None:
    LOG.warning("taken %s", "over", extra={"epoch": 7})
    logger("holdfast.keeper").warning("taken %s", "over", epoch=7)
    one, two = written.records
    assert one == two
    assert one == {
        "timestamp": "2025-06-15T15:06:40.000Z",
        "level": "warning",
        "logger": "holdfast.keeper",
        "event": "taken over",
        "epoch": 7,
    }


def test_the_fields_of_a_request_are_in_everything_written_inside(written: Written) -> None:
    with bound(request_id="r-1", correlation_id="c-1", agent="market", space="contoso"):
        LOG.info("one")
        with bound(agent="risk"):
            logger("holdfast.http").info("two")
        LOG.info("three")
    LOG.info("four")
    fields = {"request_id": "r-1", "correlation_id": "c-1", "agent": "market", "space": "contoso"}
    told = [{name: record[name] for name in fields if name in record} for record in written.records]
    assert told == [fields, {**fields, "agent": "risk"}, fields, {}]


async def test_the_fields_of_two_requests_do_not_mix(written: Written) -> None:
    async def request(number: int) -> None:
        with bound(request_id=f"r-{number}"):
            await asyncio.sleep(0)
            LOG.info("%d", number)

    await asyncio.gather(*map(request, range(20)))
    assert all(record["request_id"] == f"r-{record['event']}" for record in written.records)
    assert len(written.records) == 20


def test_the_level_holds_for_us_and_warnings_of_others_are_shown(written: Written) -> None:
    LOG.debug("no")
    logging.getLogger("uvicorn.error").info("yes")
    logging.getLogger("elsewhere").info("no")
    logging.getLogger("elsewhere").warning("yes")
    written.logs.change("debug", "json")
    LOG.debug("yes")
    logger("holdfast.keeper").debug("yes")
    written.logs.change("error", "json")
    LOG.warning("no")
    logging.getLogger("elsewhere").warning("no")
    assert [record["event"] for record in written.records] == ["yes"] * 4


@pytest.mark.parametrize("format", ["json", "text"])
def test_no_secret_is_written(format: Format) -> None:
    written = Written(format, redaction=Redaction(fields=["iban"]))
    with written.logs:
        LOG.error("came with %s", TOKEN)
        LOG.error("cut off: %.60s", TOKEN)
        LOG.error("GET /feed?prefix=a&access_token=s3cret&x=1")
        LOG.error("store redis://user:s3cret@host/0 and postgresql://u:s3cret@h")
        LOG.error("header Authorization: Bearer s3cret-s3cret")
        LOG.error('body {"password": "s3cret", "n": 1} and api_key=s3cret;')
        LOG.error("fields", extra={"password": "s3cret", "iban": "s3cret", "deep": {"client-secret": ["s3cret"]}})
        logger("holdfast.x").error("fields", apiKey="s3cret", items=[{"token": "s3cret"}], text=f"see {TOKEN}")
        try:
            raise ValueError(f"bad token={TOKEN} password=s3cret")
        except ValueError:
            LOG.exception("failed")
            logger("holdfast.x").exception("failed")
        LOG.error("x" * 8170 + " password=s3cret")
        LOG.error("x" * 8170 + f" {TOKEN}")
    assert "s3cret" not in written.text
    assert "b" * 10 not in written.text
    assert written.text.count("hf_aaaaaaaaaaaaaaaa_…") >= 4
    assert "prefix=a&access_token=[redacted]&x=1" in written.text
    assert "ValueError" in written.text


def test_a_text_cannot_look_like_a_record(lines: Written) -> None:
    LOG.error("first\n2026-01-01T00:00:00.000Z error holdfast.keeper: forged", extra={"name2": "a\nb \x1b[31m"})
    try:
        raise ValueError("x\n2026-01-01T00:00:00.000Z error holdfast.keeper: forged \x1b[31m")
    except ValueError:
        LOG.exception("second")
    assert [line[:4] for line in lines.text.splitlines() if not line.startswith("    ")] == ["2025", "2025"]
    assert "\x1b" not in lines.text


def test_text_is_for_people(lines: Written) -> None:
    with bound(agent="market"):
        logger("holdfast.keeper").info("taken over", epoch=7, why="lease lost", empty="")
    assert lines.text == (
        '2025-06-15T15:06:40.000Z info    holdfast.keeper: taken over epoch=7 why="lease lost" empty="" agent=market\n'
    )


def test_what_cannot_be_shown_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would fail on these
    written = Written()

    class Stubborn:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    nested: Any = []
    nested.append(nested)
    odd = {1: 2, "nan": float("nan"), "set": {1}, "bytes": b"\xff", "lone": "\ud800", "big": 10**5000}
    with written.logs:
        logger("holdfast.x").info("odd", stubborn=Stubborn(), nested=nested, odd=odd, kind=Stubborn)
        LOG.info("\ud800", extra={"\ud800": 1})
        LOG.info("not enough %s %s", "arguments")
        LOG.info("still here")
    assert '"<Stubborn>"' in written.text
    assert "a record of holdfast.keeper, test_logs.py:" in written.text
    assert "still here" in written.text.splitlines()[-1]
    assert len(written.text) < 10_000


def test_a_stream_that_is_gone_does_not_stop_the_work() -> None:
    stream = io.StringIO()
    with Logs("info", "json", stream=stream):
        stream.close()
        LOG.error("to nobody")


def test_closing_puts_back_what_was_there() -> None:
    own = logging.getLogger("uvicorn.access")
    handler = logging.NullHandler()
    own.addHandler(handler)
    try:
        before = [(each.level, list(each.handlers), each.propagate) for each in (logging.getLogger(), LOG, own)]
        with Written().logs:
            assert own.handlers == []
        assert [(each.level, list(each.handlers), each.propagate) for each in (logging.getLogger(), LOG, own)] == before
    finally:
        own.removeHandler(handler)


async def test_a_web_servers_own_records_go_the_same_way(written: Written) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        raise ValueError(f"after the answer {TOKEN}")

    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{port}/v1/feed?token={TOKEN}&api_key=s3cret")
    server.should_exit = True
    await serving
    assert {"uvicorn.error", "uvicorn.access"} <= {record["logger"] for record in written.records}
    assert any("GET /v1/feed?token=" in record["event"] for record in written.records)
    assert any("ValueError" in record.get("exception", "") for record in written.records)
    assert "b" * 10 not in written.text
    assert "s3cret" not in written.text


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.floats() | st.binary(), max_size=4))
@settings(max_examples=examples(80), deadline=None)
def test_whatever_is_logged_is_one_line(event: str, fields: dict[str, Any]) -> None:
    for format in ("json", "text"):
        written = Written(format)  # type: ignore[arg-type]
        with written.logs:
            LOG.warning("%s", event, extra={"fields": fields})
        assert written.text.endswith("\n")
        assert len(written.text.splitlines()) == 1
        written.text.encode()


# --- a keeper's own ---


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(log={"format": "json", "level": "info"}, timeout_default="5s") as running:
        yield running


def told(keeper: KeeperServer) -> list[dict[str, Any]]:
    """Its records; what it says when it is ready is none."""
    lines = keeper.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"timestamp"') and line.endswith("}")]


async def record_of(keeper: KeeperServer, event: str, **fields: Any) -> dict[str, Any]:
    """The last record that begins so and has these fields, when there is one."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = [
                each
                for each in told(keeper)
                if each["event"].startswith(event) and all(each.get(name) == value for name, value in fields.items())
            ]
            if found:
                return found[-1]
            await asyncio.sleep(0.02)


async def test_a_start_and_a_stop_are_told_with_what_is_served_where_and_how_long_it_took(keeper: KeeperServer) -> None:
    began = await record_of(keeper, "the keeper takes requests")
    assert (began["level"], began["store"]) == ("info", f"resident:{keeper.folder}/store.db")
    assert (began["binary"], began["http"]) == (f"127.0.0.1:{keeper.port}", f"127.0.0.1:{keeper.http_port}")
    assert 0 < began["loaded_s"] < DEADLINE_S
    async with http(keeper, await make_token(keeper, "writer")) as writer:
        assert (await writer.put("/v1/spaces/contoso/records/k", json=1)).status_code == 200
    keeper.stop()
    assert (await record_of(keeper, "the keeper is stopping"))["level"] == "info"
    assert (await record_of(keeper, "the keeper has stopped"))["took_s"] >= 0
    keeper.start()
    assert (await record_of(keeper, "the keeper takes requests", spaces=began["spaces"] + 1))["level"] == "info"


async def test_the_line_of_a_request_says_whose_it_is_and_in_which_space(keeper: KeeperServer) -> None:
    async with http(keeper, await make_token(keeper, "market")) as market:
        await market.get("/v1/spaces/contoso/records/one")
        await market.get("/v1/spaces/fabrikam/records/two")
    async with http(keeper, keeper.admin) as admin:
        await admin.get("/v1/spaces/contoso/records/three")
        await admin.post(
            "/v1/messages",
            json={"id": "m", "payload": {"operation": "Get", "key": "k"}},
            headers={"Holdfast-Space": "contoso"},
        )
        await admin.get("/v1/whoami")
    found = {}
    for path in ("spaces/contoso/records/one", "spaces/fabrikam/records/two", "spaces/contoso/records/three"):
        record = await record_of(keeper, f"GET /v1/{path}")
        found[path.rpartition("/")[2]] = (record["agent"], record["space"], record["status"])
    assert found == {
        "one": ("market", "contoso", 404),
        "two": ("market", "contoso", 403),
        "three": ("admin", "contoso", 404),
    }
    assert (await record_of(keeper, "POST /v1/messages", message_id="m"))["space"] == "contoso"
    who = await record_of(keeper, "GET /v1/whoami")
    assert (who["agent"], "space" in who) == ("admin", False)


async def test_the_line_of_a_request_and_the_audit_of_what_it_wrote_find_each_other(keeper: KeeperServer) -> None:
    async with http(keeper, await make_token(keeper, "market")) as market:
        await market.put("/v1/spaces/contoso/records/found/plain", json=1)
        await market.put("/v1/spaces/contoso/records/found/keyed", json=1, headers={"Idempotency-Key": "order-17"})
    lines = {
        key: await record_of(keeper, f"PUT /v1/spaces/contoso/records/{key}") for key in ("found/plain", "found/keyed")
    }
    async with http(keeper, keeper.admin) as admin:
        feed = await admin.get(
            "/v1/spaces/contoso/feed?cursor=r0&prefix=found/", headers={"Accept": "application/json"}
        )
    asked = {commit["changes"][0]["key"]: commit["request_id"] for commit in feed.json()["commits"]}
    assert {key: line["audit_request_id"] for key, line in lines.items()} == asked
    assert asked["found/keyed"] == "order-17"


async def test_what_becomes_of_tokens_is_told_without_their_secret(keeper: KeeperServer) -> None:
    assert (await record_of(keeper, "the first start made an administrator's token"))["agent"] == "admin"
    token = await make_token(keeper, "short-lived", role="orchestrator")
    made = await record_of(keeper, "a token was made", agent="short-lived")
    assert (made["level"], made["role"], made["space"], made["by"]) == ("info", "orchestrator", "contoso", "admin")
    assert token.startswith(f"hf_{made['id']}_")
    await revoke(keeper, "short-lived")
    assert (await record_of(keeper, "a token was revoked", agent="short-lived"))["id"] == made["id"]
    assert token.rpartition("_")[2] not in keeper.log.read_text()
    written = "".join(json.dumps(each) for each in told(keeper))
    assert keeper.admin.rpartition("_")[2] not in written


async def test_every_reading_of_the_settings_is_told_how_it_ended(keeper: KeeperServer) -> None:
    keeper.signal(signal.SIGHUP)
    assert (await record_of(keeper, "the configuration was read anew: nothing changed"))["level"] == "info"
    keeper.write_settings(timeout_default="never")
    keeper.signal(signal.SIGHUP)
    assert (await record_of(keeper, "the new configuration is not used"))["level"] == "error"
    keeper.write_settings(timeout_default="5s")
    keeper.signal(signal.SIGHUP)
    assert (await record_of(keeper, "the configuration was corrected and is in force again"))["level"] == "info"
    keeper.write_settings(timeout_default="6s")
    keeper.signal(signal.SIGHUP)
    await record_of(keeper, "the configuration was reloaded: timeout_default changed")
