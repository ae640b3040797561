"""Transactions over HTTP, in both of their ways, compared with a plain dictionary."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from holdfast import Store
from holdfast.layers.records import RecordTransaction

URL = "/v1/spaces/contoso/transactions"


def op(operation: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"operation": operation, "key": key, **fields}


async def run(client: httpx.AsyncClient, *operations: dict[str, Any], **body: Any) -> httpx.Response:
    return await client.post(URL, json={"operations": list(operations), **body})


async def test_a_get_sees_the_transactions_own_writes(market: httpx.AsyncClient) -> None:
    await run(market, op("Set", "balance", value=500))
    done = await run(
        market,
        op("Get", "balance"),
        op("Set", "balance", value=400),
        op("Get", "balance"),
        op("Increment", "count"),
        op("Get", "count"),
        op("Delete", "balance"),
        op("Get", "balance"),
    )
    assert done.json()["results"] == [500, True, 400, 1, 1, True, None]
    assert done.json()["result"] is None


async def test_a_transaction_that_fails_in_its_last_step_has_changed_nothing(market: httpx.AsyncClient) -> None:
    await run(market, op("Set", "a", value=1), op("Set", "text", value="x"))
    before = (await market.get("/v1/spaces")).json()
    for last in (op("Increment", "text"), op("CompareAndSwap", "a", old=9, new=10)):
        for first in (op("Set", "b", value=2), op("Get", "a")):
            refused = await run(market, first, op("Set", "a", value=5), last)
            assert refused.status_code in (400, 409), refused.text
    assert (await market.get("/v1/spaces")).json() == before


@pytest.mark.parametrize("reads", [False, True], ids=["one batch", "reads"])
@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"condition": "AtLeast", "key": "n", "number": 3}, True),
        ({"condition": "AtLeast", "key": "n", "number": 4}, False),
        ({"condition": "AtLeast", "key": "none", "number": 0}, True),
        ({"condition": "Present", "key": "n"}, True),
        ({"condition": "Present", "key": "none"}, False),
        ({"condition": "Absent", "key": "none"}, True),
        ({"condition": "Absent", "key": "n"}, False),
        ({"condition": "ValueIs", "key": "n", "value": 3}, True),
        ({"condition": "ValueIs", "key": "n", "value": None}, False),
        ({"condition": "VersionIs", "key": "n", "version": 1}, True),
        ({"condition": "VersionIs", "key": "n", "version": 2}, False),
    ],
)
async def test_conditions_decide_for_everything(
    market: httpx.AsyncClient, condition: dict[str, Any], holds: bool, reads: bool
) -> None:
    await run(market, op("Set", "n", value=3))
    steps = [op("Set", "done", value=True), *([op("Get", "n")] if reads else [])]
    response = await run(market, *steps, conditions=[condition])
    assert response.status_code == (200 if holds else 409), response.text
    if not holds:
        assert (response.json()["error"], response.json()["key"]) == ("conflict", condition["key"])
    assert ((await market.get("/v1/spaces/contoso/records/done")).status_code == 200) is holds


def expected(state: dict[str, Any], operations: list[dict[str, Any]]) -> list[Any] | None:
    """What a dictionary does; None when it refuses."""
    results: list[Any] = []
    for each in operations:
        key, kind = each["key"], each["operation"]
        if kind == "Get":
            results.append(state.get(key))
        elif kind == "Set":
            state[key] = each["value"]
            results.append(True)
        elif kind == "Delete":
            results.append(state.pop(key, None) is not None)
        elif kind == "Increment":
            state[key] = state.get(key, 0) + each["delta"]
            results.append(state[key])
        elif state.get(key) == each["old"]:
            state[key] = each["new"]
            results.append(True)
        else:
            return None
    return results


_key = st.sampled_from(["a", "b", "c"])
_value = st.integers(1, 3)
_step = st.one_of(
    st.builds(lambda key: op("Get", key), _key),
    st.builds(lambda key, value: op("Set", key, value=value), _key, _value),
    st.builds(lambda key: op("Delete", key), _key),
    st.builds(lambda key, value: op("Increment", key, delta=value), _key, _value),
    st.builds(lambda key, old, new: op("CompareAndSwap", key, old=old, new=new), _key, st.none() | _value, _value),
)


async def test_any_sequence_does_what_a_dictionary_does(market: httpx.AsyncClient) -> None:
    from hypothesis import HealthCheck, Phase, given, settings

    sequences: list[list[list[dict[str, Any]]]] = []

    @settings(max_examples=40, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(_step, min_size=1, max_size=6), min_size=1, max_size=4))
    def collect(sequence: list[list[dict[str, Any]]]) -> None:
        sequences.append(sequence)

    collect()
    for sequence in sequences:
        state: dict[str, Any] = {}
        await run(market, *(op("Delete", key) for key in "abc"))
        for operations in sequence:
            after = dict(state)
            wanted = expected(after, operations)
            response = await run(market, *operations)
            if wanted is None:
                assert response.status_code == 409, (operations, state, response.text)
            else:
                assert response.json()["results"] == wanted, (operations, state)
                state = after


@pytest.mark.parametrize("first", [op("Get", "n"), op("Set", "m", value=1)], ids=["reads", "one batch"])
async def test_feed_and_audit_tell_the_id_that_the_request_has(
    market: httpx.AsyncClient, admin: httpx.AsyncClient, first: dict[str, Any]
) -> None:
    start = (await market.get("/v1/spaces/contoso/feed", headers={"Accept": "application/json"})).json()["cursor"]
    payload = {"operation": "Transaction", "operations": [first, op("Increment", "n")]}
    for _ in range(2):
        sent = await market.post("/v1/messages", json={"id": "m-17", "payload": payload})
        assert sent.status_code == 200, sent.text
    feed = await market.get("/v1/spaces/contoso/feed", params={"cursor": start}, headers={"Accept": "application/json"})
    assert [each["request_id"] for each in feed.json()["commits"]] == ["m-17"]
    audit = await admin.get("/v1/spaces/contoso/audit", params={"key": "records/n"})
    assert {each["request_id"] for each in audit.json()["records"]} == {"m-17"}


async def test_an_id_of_one_batch_is_no_id_of_a_transaction_that_reads(market: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"operations": [op("Set", "a", value=1)]}
    assert (await market.post(URL, json=body, headers=headers)).status_code == 200
    other = {"operations": [op("Get", "a"), op("Set", "a", value=2)]}
    refused = await market.post(URL, json=other, headers=headers)
    assert (refused.status_code, "used before" in refused.json()["message"]) == (400, True)
    assert (await market.get("/v1/spaces/contoso/records/a")).json() == 1


async def test_the_same_request_twice_at_once_has_one_effect_and_one_answer_whatever_each_has_read(
    store: Store,
) -> None:
    """As two keepers of one store may do it."""
    space, both, numbers = store.space("contoso", agent="market"), asyncio.Barrier(2), itertools.count()

    async def work(tx: RecordTransaction) -> int:
        answer = next(numbers)
        if answer < 2:
            await both.wait()  # neither has committed yet
        tx.increment("n")
        return answer

    one, two = await asyncio.gather(*(space.records.transact(work, request_id="k", asked="the same") for _ in range(2)))
    assert one == two
    assert await space.records.get("n") == 1
