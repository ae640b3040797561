"""Tasks over HTTP. No process is started: a ledger does what a manager would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from holdfast import ManualClock, Space, Store, TaskOutcome
from tests.layers.works import begun, done
from tests.server.http.keeping import LEAD, MARKET, RISK, TOKENS, running
from tests.server.http.test_correlations import Ruled

BASE = "/v1/spaces/contoso/tasks"
Clients = dict[str, httpx.AsyncClient]


@pytest.fixture
async def clients(store: Store, clock: ManualClock) -> AsyncIterator[Clients]:
    async with running(Ruled(store, clock)) as port:
        opened = {TOKENS[token].agent: port.client(token) for token in (LEAD, MARKET, RISK)}
        yield opened
        for client in opened.values():
            await client.aclose()


@pytest.fixture
def manager(store: Store) -> Space:
    return store.space("contoso", agent="lead")


async def submit(client: httpx.AsyncClient, **spec: object) -> str:
    answer = await client.post(BASE, json={"spec": spec})
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "created"
    return str(answer.json()["tid"])


async def test_a_task_is_submitted_seen_and_its_result_awaited(clients: Clients, manager: Space) -> None:
    market, risk = clients["market"], clients["risk"]
    tid = await submit(market, function="jobs:add", args=[1, 2], kwargs={"api_key": "hunter2"}, name="sum")
    assert (await risk.get(f"{BASE}/{tid}")).json()["title"] == "sum"
    pending = await market.get(f"{BASE}/{tid}/result")
    assert (pending.status_code, pending.json()["error"]) == (504, "task_pending")
    waiting = asyncio.ensure_future(market.get(f"{BASE}/{tid}/result?wait=20s"))
    await asyncio.sleep(0.05)
    async with manager.tasks.ledger(capacity=1, host="h") as ledger:
        await done(manager, ledger, TaskOutcome("completed", return_code=0, result=3), output=b"adding\n")
    told = (await asyncio.wait_for(waiting, 20)).json()
    assert told == {"tid": tid, "status": "completed", "return_code": 0, "result": 3}
    page = (await market.get(f"{BASE}/{tid}/logs?limit=3")).json()
    assert ([each["status"] for each in page["events"]], page["more"]) == (["created", "spawning", "running"], True)
    assert "hunter2" not in str(page)
    rest = (await market.get(f"{BASE}/{tid}/logs?after={page['events'][-1]['id']}")).json()
    assert ([each["status"] for each in rest["events"]], rest["more"]) == (["completed"], False)
    output = (await market.get(f"{BASE}/{tid}/output")).json()
    assert ([each["data"] for each in output["envelopes"]], output["done"]) == (["YWRkaW5nCg=="], True)
    assert (await market.get(f"{BASE}/{tid}/output?after=0")).json() == {"envelopes": [], "done": True}
    listed = (await market.get(f"{BASE}?status=completed&pattern=s*")).json()
    assert ([each["tid"] for each in listed["tasks"]], listed["counts"]["completed"]) == ([tid], 2)


async def test_a_failed_task_says_so_and_a_wrong_one_is_refused(clients: Clients, manager: Space) -> None:
    market = clients["market"]
    tid = await submit(market, command=["false"])
    async with manager.tasks.ledger(capacity=1, host="h") as ledger:
        await done(manager, ledger, TaskOutcome("failed", return_code=1, reason="it exited with 1"))
    failed = await market.get(f"{BASE}/{tid}/result")
    assert (failed.status_code, failed.json()["error"]) == (409, "task_failed")
    assert "it exited with 1" in failed.json()["message"]
    for spec, said in (
        ({"comand": ["true"]}, "did you mean command?"),
        ({}, "exactly one of them"),
        ({"command": ["true"], "limits": {"memory_mb": 0}}, "memory_mb"),
        ({"command": ["true"], "env": {"A B": "c"}}, "no variable's name"),
    ):
        refused = await market.post(BASE, json={"spec": spec})
        assert (refused.status_code, said in refused.json()["message"]) == (400, True), refused.text
    assert (await market.get(f"{BASE}/{'9' * 19}")).status_code == 404
    assert (await market.get(f"{BASE}/123")).status_code == 400
    assert (await market.get(f"{BASE}")).json()["counts"]["created"] == 0


async def test_a_submission_that_is_repeated_under_its_request_id_is_one_task(clients: Clients) -> None:
    market, body, headers = clients["market"], {"spec": {"command": ["true"]}}, {"Idempotency-Key": "r1"}
    first = (await market.post(BASE, json=body, headers=headers)).json()
    again = (await market.post(BASE, json=body, headers=headers)).json()
    assert first["tid"] == again["tid"]
    assert (await market.get(BASE)).json()["counts"]["created"] == 1
    other = await market.post(BASE, json={"spec": {"command": ["false"]}}, headers=headers)
    assert other.status_code == 400


async def test_owners_and_orchestrators_control_a_task_and_others_do_not(clients: Clients, manager: Space) -> None:
    market, risk, lead = clients["market"], clients["risk"], clients["lead"]
    tid = await submit(market, command=["sleep", "60"])
    denied = await risk.post(f"{BASE}/{tid}/control", json={"command": "STOP"})
    assert denied.status_code == 403
    stopped = await market.post(f"{BASE}/{tid}/control", json={"command": "STOP"})
    assert (stopped.status_code, stopped.json()["status"]) == (200, "ok")
    over = await lead.post(f"{BASE}/{tid}/control", json={"command": "KILL"})
    assert (over.status_code, over.json()["error"]) == (409, "conflict")
    second = await submit(market, command=["sleep", "60"])
    async with manager.tasks.ledger(capacity=1, host="h") as ledger:
        await begun(manager, ledger)
        unanswered = await lead.post(f"{BASE}/{second}/control", json={"command": "PAUSE", "wait": "0"})
        assert (unanswered.status_code, unanswered.json()["error"]) == (504, "task_pending")
        [command] = await ledger.pending(second)
        assert (command.command, command.by) == ("PAUSE", "lead")
        odd = await lead.post(f"{BASE}/{second}/control", json={"command": "DANCE"})
        assert odd.status_code == 400
