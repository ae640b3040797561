"""Records, counters, lists and sets over HTTP."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import pytest

from holdfast import ManualClock

BASE = "/v1/spaces/contoso"


@pytest.mark.parametrize("key", ["cash", "a/b/c", "ä ö", "50%/x?y#z", "a//b", "line\nbreak\n", "a:b", "null"])
async def test_a_record_has_the_value_that_was_put_there(market: httpx.AsyncClient, key: str) -> None:
    url = f"{BASE}/records/{quote(key, safe='')}"
    value = {"n": 1, "text": "é", "list": [1.5, None, True]}
    written = await market.put(url, json=value)
    assert written.status_code == 200, written.text
    read = await market.get(url)
    assert read.json() == value
    assert read.headers["etag"] == written.headers["etag"] == f'"{written.json()["version"]}"'
    assert read.headers["holdfast-owner"] == "market"
    listed = (await market.get(f"{BASE}/records", params={"prefix": key, "values": "true"})).json()["records"]
    assert [(record["key"], record["value"]) for record in listed] == [(key, value)]


async def test_what_is_not_there_is_404_and_deleting_it_says_so(market: httpx.AsyncClient) -> None:
    missing = await market.get(f"{BASE}/records/nothing")
    assert (missing.status_code, missing.json()["error"]) == (404, "not_found")
    assert (await market.delete(f"{BASE}/records/nothing")).json() == {"deleted": False}
    await market.put(f"{BASE}/records/something", json=1)
    assert (await market.delete(f"{BASE}/records/something")).json() == {"deleted": True}


async def test_an_etag_that_does_not_match_is_412_and_changes_nothing(market: httpx.AsyncClient) -> None:
    url = f"{BASE}/records/cash"
    first = (await market.put(url, json=1, headers={"If-None-Match": "*"})).headers["etag"]
    again = await market.put(url, json=2, headers={"If-None-Match": "*"})
    assert (again.status_code, again.json()["error"], again.json()["key"]) == (412, "conflict", "cash")
    second = (await market.put(url, json=3, headers={"If-Match": first})).headers["etag"]
    stale = await market.put(url, json=4, headers={"If-Match": first})
    assert (stale.status_code, stale.json()["version"]) == (412, int(second.strip('"')))
    assert (await market.delete(url, headers={"If-Match": first})).status_code == 412
    assert (await market.get(url)).json() == 3
    assert (await market.put(f"{BASE}/records/other", json=4, headers={"If-Match": "*"})).status_code == 412
    assert (await market.put(url, json=4, headers={"If-Match": "17"})).status_code == 400


async def test_a_ttl_a_type_and_a_state_are_written_together(market: httpx.AsyncClient, clock: ManualClock) -> None:
    url = f"{BASE}/records/session"
    await market.put(url, json=1, params={"ttl": "5s"})
    await market.put(f"{BASE}/records/c", json=1, params={"type": "correlation_state", "state": "completed"})
    read = await market.get(f"{BASE}/records/c")
    assert (read.headers["holdfast-type"], read.headers["holdfast-state"]) == ("correlation_state", "completed")
    clock.advance("6s")
    assert (await market.get(url)).status_code == 404
    clock.advance("1h")
    assert (await market.get(f"{BASE}/records/c")).status_code == 404
    for ttl in ("0", "-1s", "soon"):
        assert (await market.put(url, json=1, params={"ttl": ttl})).status_code == 400


async def test_pages_show_every_record_once_and_end(market: httpx.AsyncClient) -> None:
    for number in range(25):
        await market.put(f"{BASE}/records/r{number:02}", json=number)
    await market.put(f"{BASE}/records/other", json=0)
    seen, after, pages = [], None, 0
    while True:
        params = {"prefix": "r", "limit": "10", **({"after": after} if after else {})}
        page = (await market.get(f"{BASE}/records", params=params)).json()
        seen += [record["key"] for record in page["records"]]
        pages, after = pages + 1, page["next"]
        assert all(record["value"] is None for record in page["records"])
        if after is None:
            break
    assert seen == [f"r{number:02}" for number in range(25)]
    assert pages == 3


async def test_a_page_of_large_values_is_bounded(market: httpx.AsyncClient) -> None:
    for number in range(6):
        await market.put(f"{BASE}/records/large{number}", json="x" * 1_500_000)
    page = await market.get(f"{BASE}/records", params={"values": "true"})
    assert len(page.content) < 7_000_000
    assert page.json()["next"] == "large2"


async def test_a_counter_counts(market: httpx.AsyncClient) -> None:
    url = f"{BASE}/counters/visits"
    assert (await market.post(url, json={})).json() == {"value": 1}
    assert (await market.post(url, json={"delta": -5})).json() == {"value": -4}
    assert (await market.get(f"{BASE}/records/visits")).json() == -4
    await market.put(f"{BASE}/records/visits", json="text")
    assert (await market.post(url, json={})).status_code == 400


async def test_lists_and_sets(market: httpx.AsyncClient) -> None:
    files, tags = f"{BASE}/lists/files", f"{BASE}/sets/tags"
    assert (await market.post(files, json={"values": ["a", {"b": 1}]})).json() == {"appended": 2}
    assert (await market.post(files, json={"values": ["c"]})).json() == {"appended": 1}
    assert (await market.get(files)).json() == {"values": ["a", {"b": 1}, "c"], "next": None}
    first = (await market.get(files, params={"limit": "2"})).json()
    assert first["values"] == ["a", {"b": 1}]
    assert (await market.get(files, params={"after": first["next"]})).json()["values"] == ["c"]
    assert (await market.patch(tags, json={"add": ["x", "y", "x"]})).json() == {"added": 2, "removed": 0}
    assert (await market.patch(tags, json={"add": ["z"], "remove": ["x", "q"]})).json() == {"added": 1, "removed": 1}
    assert (await market.get(tags)).json()["values"] == ["y", "z"]
    page = (await market.get(tags, params={"limit": "1"})).json()
    assert (await market.get(tags, params={"after": page["next"]})).json()["values"] == ["z"]
    for wrong in (await market.get(f"{BASE}/lists/tags"), await market.get(f"{BASE}/records/files")):
        assert (wrong.status_code, wrong.json()["error"]) == (400, "invalid_request")
    await market.delete(f"{BASE}/records/files")
    assert (await market.get(files)).json()["values"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "other"),
    [
        ("PUT", "records/n", 7, 8),
        ("DELETE", "records/seed", None, None),
        ("POST", "counters/seed", {"delta": 2}, {"delta": 3}),
        ("POST", "lists/l", {"values": [1]}, {"values": [2]}),
        ("PATCH", "sets/s", {"add": [1]}, {"add": [2]}),
        (
            "POST",
            "transactions",
            {"operations": [{"operation": "Get", "key": "seed"}, {"operation": "Increment", "key": "seed"}]},
            {"operations": [{"operation": "Get", "key": "seed"}]},
        ),
        ("POST", "locks/l", {"ttl": 60}, {"ttl": 61}),
    ],
)
async def test_every_change_is_repeatable_under_an_idempotency_key(
    market: httpx.AsyncClient, method: str, path: str, body: object, other: object
) -> None:
    await market.put(f"{BASE}/records/seed", json=10)

    async def change(json: object) -> httpx.Response:
        sent = {} if json is None else {"json": json}
        return await market.request(method, f"{BASE}/{path}", headers={"Idempotency-Key": "k-1"}, **sent)  # type: ignore[arg-type]

    first = await change(body)
    assert first.status_code == 200, first.text
    revision = (await market.get("/v1/spaces")).json()["spaces"][0]["revision"]
    again = await change(body)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert (await market.get("/v1/spaces")).json()["spaces"][0]["revision"] == revision
    if other is not None and "Get" not in str(other):
        misused = await change(other)
        assert (misused.status_code, misused.json()["error"]) == (400, "invalid_request")


async def test_a_guarded_write_is_refused_when_the_guard_is_over(market: httpx.AsyncClient, clock: ManualClock) -> None:
    guard = (await market.post(f"{BASE}/locks/portfolio", json={"ttl": "5s"})).json()["guard"]
    under = {"Holdfast-Guard": guard}
    assert (await market.put(f"{BASE}/records/cash", json=10, headers=under)).status_code == 200
    clock.advance("6s")
    late = [
        await market.put(f"{BASE}/records/cash", json=20, headers=under),
        await market.delete(f"{BASE}/records/cash", headers=under),
        await market.post(f"{BASE}/counters/cash", json={}, headers=under),
        await market.post(f"{BASE}/lists/l", json={"values": [1]}, headers=under),
        await market.patch(f"{BASE}/sets/s", json={"add": [1]}, headers=under),
        await market.post(
            f"{BASE}/transactions",
            json={"operations": [{"operation": "Set", "key": "cash", "value": 1}]},
            headers=under,
        ),
    ]
    assert [(response.status_code, response.json()["error"]) for response in late] == [(409, "lease_lost")] * 6
    assert (await market.get(f"{BASE}/records/cash")).json() == 10


async def test_a_header_or_parameter_that_does_not_fit_is_told_what_would(market: httpx.AsyncClient) -> None:
    weak = await market.put(f"{BASE}/records/a", json=1, headers={"If-Match": 'W/"1"'})
    never = await market.put(f"{BASE}/records/a", params={"ttl": "0"}, json=1)
    for refused, words in ((weak, 'A version as an ETag, "17"'), (never, '"250ms", "90s"')):
        assert refused.status_code == 400
        assert words in refused.json()["message"]
        assert "regex" not in refused.json()["message"]
