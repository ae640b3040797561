"""Refusals of a real keeper over HTTP and strangers at either port: what audit, metrics and log say of them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import AccessDenied, AuthenticationFailed, ManualClock
from holdfast.server.refusals import PortName, Strangers
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import Ping, frame
from tests.server.live import DEADLINE_S, by_hand, http, make_token

BASE = "/v1/spaces/contoso"
UNKNOWN = f"hf_{'a' * 16}_{'b' * 52}"


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary() as running:
        yield running


async def denials(admin: httpx.AsyncClient, actor: str, count: int, space: str = "contoso") -> list[tuple[str, str]]:
    """The verbs and keys that the audit says an agent was refused, when it says so many."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            page = await admin.get(f"/v1/spaces/{space}/audit", params={"outcome": "denied", "actor": actor})
            found = [(each["operation"], each["key"]) for each in page.json()["records"]]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


async def values(admin: httpx.AsyncClient) -> dict[str, float]:
    lines = (await admin.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def test_every_refusal_over_http_is_in_audit_and_metrics_once(keeper: KeeperServer) -> None:
    async with (
        http(keeper, keeper.admin) as admin,
        http(keeper, await make_token(keeper, "owner")) as owner,
        http(keeper, await make_token(keeper, "curious")) as agent,
        http(keeper, await make_token(keeper, "other")) as other,
    ):
        guard = (await owner.post(f"{BASE}/locks/book", json={"ttl": "60s"})).json()["guard"]
        before = await values(admin)

        payload = {"operation": "Set", "key": "cash", "value": 1, "space": "fabrikam"}
        refused = [
            await agent.get("/v1/spaces/fabrikam/records/cash"),
            await agent.request("DELETE", f"{BASE}/locks/book"),
            await agent.get("/metrics"),
            await agent.post("/v1/spaces", json={"name": "mine"}),
            await agent.post("/v1/messages", json={"id": "m1", "payload": payload}),
        ]
        assert [each.status_code for each in refused] == [403] * len(refused)
        assert await denials(admin, "curious", 5) == [
            ("Get", "records/cash"),
            ("Admin", "locks/book"),
            ("Admin", ""),
            ("Admin", ""),
            ("Set", "cash"),
        ]
        # Of one agent five are told each second: the rest is asked by another.
        assert (await other.request("DELETE", f"{BASE}/guards/{guard}")).status_code == 403
        unlock = {"id": "m2", "payload": {"operation": "Unlock", "guard": guard}}
        assert (await other.post("/v1/messages", json=unlock)).status_code == 403
        assert (await other.get(f"{BASE}/audit")).status_code == 403, "the rules say so, and tell it themselves"
        assert [verb for verb, _ in await denials(admin, "other", 3)] == ["Unlock", "Unlock", "Audit"]
        after = await values(admin)

        def counted(op: str) -> float:
            name = f'holdfast_operations_total{{op="{op}",outcome="access_denied"}}'
            return after.get(name, 0) - before.get(name, 0)

        # Whose a guard is, the commit finds out that would give it up.
        assert {op: counted(op) for op in ("get", "admin", "set", "unlock", "commit")} == {
            "get": 1,
            "admin": 3,
            "set": 1,
            "unlock": 0,
            "commit": 2,
        }
        assert (await admin.get("/v1/spaces/fabrikam")).status_code == 404, "nobody's denial makes a space"


async def test_a_refusal_in_the_audit_names_the_request_as_its_sender_named_it(keeper: KeeperServer) -> None:
    async with http(keeper, keeper.admin) as admin, http(keeper, await make_token(keeper, "named")) as agent:
        named = {"X-Request-Id": "of-the-request"}
        await agent.put(f"{BASE}/records/first", json=1)  # a space is not made for its denials
        for answer in (
            await agent.get("/v1/spaces/fabrikam/records/cash", headers=named),  # before the rules
            await agent.get(f"{BASE}/audit", headers=named),  # by the rules, for what is read
            await agent.put(f"{BASE}/documents/d", json={}, headers={**named, "If-None-Match": "*"}),
        ):
            assert answer.status_code == 403, answer.text
        assert len(await denials(admin, "named", 3)) == 3
        page = await admin.get(f"{BASE}/audit", params={"outcome": "denied", "actor": "named"})
        told = [each["request_id"] for each in page.json()["records"]]
    assert told == ["of-the-request"] * 3


async def test_who_may_not_copy_the_store_is_in_the_audit(keeper: KeeperServer, tmp_path: Path) -> None:
    token = await make_token(keeper, "thief")
    async with http(keeper, keeper.admin) as admin, holdfast.open(keeper.url, token=token) as store:
        with pytest.raises(AccessDenied, match="only an administrator may back up"):
            await store.backup(tmp_path / "stolen.db")
        assert await denials(admin, "thief", 1) == [("Admin", "")]


async def test_who_is_refused_again_and_again_fills_no_audit(keeper: KeeperServer) -> None:
    async with http(keeper, keeper.admin) as admin, http(keeper, await make_token(keeper, "noisy")) as agent:
        await asyncio.gather(*(agent.get("/v1/spaces/fabrikam") for _ in range(300)))
        async with asyncio.timeout(DEADLINE_S):
            while ("several", "") not in (told := await denials(admin, "noisy", 6)):
                await asyncio.sleep(0.05)
        assert len(told) < 60, "five a second and their sum"


async def test_strangers_at_either_port_are_counted_and_logged_without_what_they_showed(keeper: KeeperServer) -> None:
    async with http(keeper, keeper.admin) as admin:
        before = await values(admin)
        for token in ("nonsense", "hf_wrong", UNKNOWN):
            async with http(keeper, token) as stranger:
                assert (await stranger.get(BASE)).status_code == 401
        async with httpx.AsyncClient(base_url=keeper.http) as stranger:
            assert (await stranger.get(BASE)).status_code == 401
        for _ in range(3):
            with pytest.raises(AuthenticationFailed):
                async with by_hand(keeper, UNKNOWN):
                    pass
        reader, writer = await asyncio.open_connection("127.0.0.1", keeper.port)
        writer.write(frame(Ping(1)))
        await reader.read()
        writer.close()
        after = await values(admin)
        counted = {
            port: after[name] - before[name]
            for port in ("binary", "http")
            for name in [f'holdfast_authentication_failures_total{{port="{port}"}}']
        }
        assert counted == {"binary": 4, "http": 4}

        def told() -> int:
            return sum(int(each) for each in re.findall(r"turned away: .* count=(\d+)", keeper.log.read_text()))

        async with asyncio.timeout(DEADLINE_S):
            while told() < 8:
                await asyncio.sleep(0.05)
        text = keeper.log.read_text()
        assert "warning holdfast.refusals: turned away" in text
        assert "port=http" in text
        assert "b" * 52 not in text
        assert "nonsense" not in text


async def test_of_many_strangers_the_log_has_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    clock, counted = ManualClock(), list[PortName]()
    strangers = Strangers(clock, counted.append)

    async def second() -> None:
        await asyncio.sleep(0)
        clock.advance("1s")
        for _ in range(5):
            await asyncio.sleep(0)

    def lines() -> list[tuple[int, str]]:
        return [(each.count, each.levelname) for each in caplog.records]  # type: ignore[attr-defined]

    with caplog.at_level(logging.INFO, "holdfast.refusals"):
        for _ in range(1000):
            strangers.note("binary", AuthenticationFailed("the token is not valid"), "127.0.0.1:5")
        assert lines() == [(1, "WARNING")]
        await second()
        assert lines()[1:] == [(999, "WARNING")]
        await second()  # nobody came: the next is told at once again
        strangers.note("http", AuthenticationFailed("the token is not valid"), "")
        strangers.note("http", AuthenticationFailed("the token is not valid"), "")
        assert lines()[2:] == [(1, "WARNING")]
        await strangers.close()
        assert lines()[3:] == [(1, "WARNING")], "what was left is told at the end"
    assert (counted.count("binary"), counted.count("http")) == (1000, 2)
