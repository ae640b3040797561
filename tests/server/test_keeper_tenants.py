"""Two tenants of one keeper see nothing of each other; what it counts and traces is there, and names nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import holdfast
from holdfast import Error
from holdfast.engines.remote import RemoteEngine
from holdfast.layers.tokens import Tokens
from holdfast.server.config import Config, Listen
from holdfast.server.keeper import Keeper
from holdfast.server.leaves import Address
from holdfast.server.traces import Traces
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.live import client, command, http, make_token

FREELY = {"policies": {"rate_limits": []}, "log": {"level": "debug", "format": "json"}}
MARK = "zanzibar"
"""In every name and value of the first tenant."""


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(**FREELY) as running:
        yield running


async def _busy(web: httpx.AsyncClient, space: holdfast.Space) -> list[str]:
    """Do a bit of everything, right and wrong; gives all that was said."""
    said = []

    async def hear(work: Any) -> None:
        try:
            said.append(repr(await work))
        except Error as exc:
            said.append(f"{exc!r} {exc.__dict__!r}")

    own, other = space.name, f"{MARK}-corp" if space.name == "globex" else "globex"
    mark = MARK if own != "globex" else "globex"
    await space.records.set(f"{mark}-key", {"v": f"{mark}-value"})
    await hear(space.records.get(f"{mark}-key"))
    await hear(space.records.compare_and_swap(f"{mark}-key", 1, expect=2))
    await hear(space.records.increment(f"{mark}-key"))
    guard = await space.lock(f"{mark}-lock", ttl="60s").acquire()
    await hear(space.lock(f"{mark}-lock").acquire())
    await hear(space.locks.list())
    await guard.release()
    paths = ("/v1/spaces", f"/v1/spaces/{own}", f"/v1/spaces/{own}/records", f"/v1/spaces/{own}/locks", "/v1/whoami")
    for path in (
        *paths,
        f"/v1/spaces/{own}/audit",
        f"/v1/spaces/{own}/feed?cursor=r0",
        "/metrics",
        "/healthz",
        "/nowhere",
    ):
        answer = await web.get(path, headers={"Accept": "application/json"})
        said.append(f"{answer.status_code} {answer.text}")
    for path in ("", "/records", "/records/k", "/locks", "/audit", "/feed"):
        answer = await web.get(f"/v1/spaces/{other}{path}", headers={"Accept": "application/json"})
        assert answer.status_code == 403, answer.text
        said.append(answer.text.replace(other, "THE SPACE I ASKED FOR"))
    return said


async def test_two_tenants_see_nothing_of_each_other(keeper: KeeperServer) -> None:
    tokens = [await make_token(keeper, "a", name, "orchestrator") for name in (f"{MARK}-corp", "globex")]
    heard = []
    for token, name in zip(tokens, (f"{MARK}-corp", "globex"), strict=True):
        async with http(keeper, token) as web, holdfast.open(keeper.url, token=token) as store:
            heard.append(await _busy(web, store.space(name)))
            assert [info.name for info in await store.spaces()] == [name]
            heard[-1].append(repr([record async for record in store.space(name).audit.records()]))
    assert any(f"{MARK}-value" in text for text in heard[0])
    assert any("globex-value" in text for text in heard[1])
    assert [text for text in heard[1] if MARK in text] == []
    assert [text for text in heard[0] if "globex" in text] == []


async def test_what_is_counted_is_there_after_traffic_on_both_ports_and_names_nobody(keeper: KeeperServer) -> None:
    async with client(keeper, "counting", f"{MARK}-counted") as (_, space):
        await space.records.set("k", "x" * 10_000)
        with pytest.raises(holdfast.Conflict):
            await space.records.compare_and_swap("k", 1, expect=2)
        async with space.lock("l"):
            pass
        watch = space.watch()
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        token = await make_token(keeper, "over-http", f"{MARK}-counted")
        async with http(keeper, token) as web:
            assert (await web.get("/metrics")).status_code == 403
            await web.put(f"/v1/spaces/{MARK}-counted/records/k2", json=1)
        async with http(keeper, keeper.admin) as web:
            text = (await web.get("/metrics")).text
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values['holdfast_operations_total{op="commit",outcome="ok"}'] > 2
    assert values['holdfast_operations_total{op="commit",outcome="conflict"}'] >= 1
    assert values['holdfast_operation_seconds_count{op="commit"}'] > 2
    assert values["holdfast_conflicts_total"] >= 1
    assert values["holdfast_connections"] >= 1
    assert values["holdfast_watchers"] >= 1
    for name in ("state_bytes", "queue_depth", "locks_held", "in_flight"):
        assert f"holdfast_{name}" in values
    assert MARK not in text
    assert "counting" not in text


async def test_the_log_tells_of_no_value_and_no_token(keeper: KeeperServer) -> None:
    token = await make_token(keeper, "logged")
    async with http(keeper, token) as web:
        await web.put("/v1/spaces/contoso/records/k", json=f"{MARK}-value")
        await web.put("/v1/spaces/elsewhere/records/k", json=1)
        await web.get("/v1/whoami", headers={"Authorization": f"Bearer {token[:-1]}"})
    text = keeper.log.read_text()
    assert f"{MARK}-value" not in text
    assert token.rpartition("_")[2][:-1] not in text


async def test_spans_of_both_ports_carry_operation_space_and_outcome(tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    anywhere = Address("127.0.0.1", 0)
    config = Config(store=f"resident:{tmp_path}/store.db", listen=Listen(anywhere, anywhere))
    keeper = Keeper(config, traces=Traces(provider))
    await keeper.start()
    try:
        admin = str(keeper.admin_token)
        text, _ = await Tokens(keeper.store.engine, keeper.clock, "admin").create("market", "contoso", "agent")
        engine = await RemoteEngine.open(f"holdfast://127.0.0.1:{keeper.binary_port}", token=str(text))
        await engine.get("contoso", ["records/k"])
        with pytest.raises(holdfast.AccessDenied):
            await engine.get("elsewhere", ["records/k"])
        await engine.close()
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{keeper.http_port}") as web:
            headers = {"Authorization": f"Bearer {admin}", "traceparent": parent}
            assert (await web.put("/v1/spaces/contoso/records/k", json=1, headers=headers)).status_code == 200
            message = {"id": "m-1", "type": "request", "correlationId": "c-1"}
            payload = {"operation": "Get", "key": "k"}
            headers["Holdfast-Space"] = "contoso"
            answer = await web.post("/v1/messages", json={**message, "payload": payload}, headers=headers)
            assert answer.status_code == 200, answer.text
    finally:
        await keeper.stop()
    spans = [(span.name, dict(span.attributes or {}), span.context.trace_id) for span in exporter.get_finished_spans()]
    found = [attributes for name, attributes, _ in spans if name == "holdfast.get"]
    assert {"holdfast.op": "get", "holdfast.space": "contoso", "holdfast.outcome": "ok"} in found
    assert {"holdfast.op": "get", "holdfast.space": "elsewhere", "holdfast.outcome": "access_denied"} in found
    assert any(f"{trace:032x}" == parent.split("-")[1] for _, _, trace in spans), "the caller's trace goes on"
    assert any(attributes.get("holdfast.correlation_id") == "c-1" for _, attributes, _ in spans)


async def test_a_space_that_is_dropped_through_the_command_line_is_gone_for_its_agents(keeper: KeeperServer) -> None:
    async with client(keeper, "last", "brief") as (_, space):
        await space.records.set("k", 1)
        command(keeper, "spaces", "drop", "brief", "--yes")
        assert await space.records.get("k") is None
        assert "drop_space" in command(keeper, "audit", "--system").out
