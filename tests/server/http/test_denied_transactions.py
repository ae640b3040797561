"""Who may not do transactions does none over HTTP, whatever is in them and whatever header they come with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast import ManualClock, Space, Store
from holdfast.engine import Engine
from holdfast.identity import Identity
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import AccessRule, Rules
from tests.server.http.keeping import ADMIN, TOKENS, Keeper, running
from tests.server.live import NOBODY

BASE = "/v1/spaces/contoso"
WORKER = "hf_worker"
DOCUMENT_D = Rules(
    access_control=(
        AccessRule("worker-*", allow=("Get", "Set", "Increment"), deny=("Delete", "Transaction")),
        AccessRule("admin", allow=("*",)),
    )
)
SET = {"operation": "Set", "key": "k", "value": 1}
GET = {"operation": "Get", "key": "k"}
INCREMENT = {"operation": "Increment", "key": "n"}


class Ruled(Keeper):
    """A keeper with document D's rules."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.denials: list[Denial] = []
        self.policy = Policy(self.store.engine, self.clock, DOCUMENT_D, denied=self.denials.append)

    def engine_for(self, identity: Identity) -> Engine:
        return self.policy.engine_for(identity)

    def space_for(self, identity: Identity, name: str) -> Space:
        return self.store.seen_through(self.engine_for(identity), name, identity.agent, self.coordination)

    def require(self, identity: Identity, space: str, verb: str) -> None:
        self.policy.engine_for(identity).require(space, verb)


@pytest.fixture
def keeper(store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Ruled:
    monkeypatch.setitem(TOKENS, WORKER, Identity("worker-7", "agent", "contoso", "t9"))
    return Ruled(store, clock)


@pytest.fixture
async def worker(keeper: Ruled) -> AsyncIterator[httpx.AsyncClient]:
    async with running(keeper) as port, port.client(WORKER) as client:
        yield client


@pytest.mark.parametrize(
    "operations", [[SET], [GET], [SET, GET], [GET, SET], [INCREMENT, SET]], ids=lambda each: str(len(each))
)
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k-1"}], ids=["", "with a key"])
async def test_a_transaction_is_denied_by_its_name_whatever_is_in_it(
    worker: httpx.AsyncClient, keeper: Ruled, operations: list[dict[str, Any]], headers: dict[str, str]
) -> None:
    message = {"id": "m-1", "type": "request", "payload": {"operation": "Transaction", "operations": operations}}
    answers = [
        await worker.post(f"{BASE}/transactions", json={"operations": operations}, headers=headers),
        await worker.post("/v1/messages", json=message),
    ]
    told = "'worker-7' may not do that: its rules do not allow Transaction. Ask whoever keeps the rules"
    assert [answer.status_code for answer in answers] == [403, 403]
    assert answers[0].json()["message"] == answers[1].json()["payload"]["message"] == told
    assert [(denial.code, denial.verb, denial.key) for denial in keeper.denials] == [
        ("access_denied", "Transaction", "")
    ] * 2
    assert await keeper.store.space("contoso").records.keys() == []


async def test_what_else_the_rules_allow_passes_with_and_without_a_key(
    worker: httpx.AsyncClient, keeper: Ruled
) -> None:
    desk = keeper.store.space("contoso", agent="desk")
    await desk.records.append_to_list("log", 0)
    for headers in ({}, {"Idempotency-Key": "k-1"}, {"Idempotency-Key": "k-1"}):
        appended = await worker.post(f"{BASE}/lists/log", json={"values": [1]}, headers=headers)
        assert appended.status_code == 200, appended.text
    assert await desk.records.list("log") == [0, 1, 1]
    for headers in ({}, {"Idempotency-Key": "k-2"}):
        refused = await worker.post(f"{BASE}/lists/new", json={"values": [1]}, headers=headers)
        assert (refused.status_code, "CompareAndSwap of 'new'" in refused.text) == (403, True)
    for operation in (SET, GET, INCREMENT):
        sent = {"id": f"m-{operation['operation']}", "type": "request", "payload": operation}
        assert (await worker.post("/v1/messages", json=sent)).status_code == 200


async def test_administrators_do_transactions(worker: httpx.AsyncClient, keeper: Ruled) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(base_url=worker.base_url, headers=headers, verify=NOBODY) as admin:
        answer = await admin.post(f"{BASE}/transactions", json={"operations": [SET, GET]})
    assert answer.json()["results"] == [True, 1]
