"""What is no good is refused with a sentence, and never a 500."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.server.http.limits import NESTING_MAX
from holdfast.server.http.reading import read_json
from tests.soak import examples

URL = "/v1/spaces/contoso/records/a"
BAD = [
    b"",
    b"{",
    b"nonsense",
    b"NaN",
    b"[Infinity]",
    b"1e999",
    b"123456789012345678901234567890",
    b'{"n": [9223372036854775808]}',
    b'"\xff\xfe"',
    b'"\\ud800"',
    b'{"a": 1, "a": 2}',
    b'{"x": [{"a": 1, "\\u0061": 2}]}',
    b"[" * 200 + b"]" * 200,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 101 + b"1" + b"}" * 101,
    b"[1] 2",
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: repr(body[:20]))
async def test_a_body_that_is_no_plain_json_is_refused(market: httpx.AsyncClient, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for method, url in (("PUT", URL), ("POST", "/v1/messages"), ("POST", "/v1/spaces/contoso/transactions")):
        answer = await market.request(method, url, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request"), answer.text
        assert len(answer.json()["message"]) > 10
    assert (await market.get(URL)).status_code == 404


@pytest.mark.parametrize(
    "value",
    [9223372036854775807, -9223372036854775808, 1e300, {"a": {"a": 1}}, ["1:2", {"b:c": "d:e"}], '\\"', {"\\": ":"}],
)
async def test_what_json_can_say_is_taken(market: httpx.AsyncClient, value: Any) -> None:
    await market.put(URL, json=value)
    assert (await market.get(URL)).json() == value


async def test_what_is_of_another_type_is_told_in_words(market: httpx.AsyncClient) -> None:
    answer = await market.post("/v1/spaces/contoso/counters/n", json={"delta": "5"})
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request")
    assert answer.json()["message"].endswith("delta must be a whole number, not text")


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_nesting_is_counted_exactly() -> None:
    read_json(deep(NESTING_MAX))
    with pytest.raises(InvalidInput, match="levels deep"):
        read_json(deep(NESTING_MAX + 1))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(_json)
@settings(max_examples=100, deadline=None)
def test_any_json_value_reads_as_python_reads_it(value: Any) -> None:
    try:
        data = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert read_json(data) == json.loads(data)


@given(st.binary(max_size=60) | st.text('{}[]",:0123456789.eE+-ntfa\\u ', max_size=40).map(str.encode))
@settings(max_examples=examples(150), deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        read_json(data)


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=many", "limit"),
        ("limit=1&limit=2", "twice"),
        ("prefix=%FF", "UTF-8"),
        ("after=", "after"),
        ("values=perhaps", "values"),
        ("colour=red", "colour"),
        ("&".join(f"p{n}=1" for n in range(40)), "32"),
    ],
)
async def test_a_query_that_is_wrong_is_refused_by_name(market: httpx.AsyncClient, query: str, word: str) -> None:
    answer = await market.get(f"/v1/spaces/contoso/records?{query}")
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request")
    assert word in answer.json()["message"]


@pytest.mark.parametrize(
    "path", ["records/%FF", "records/%00", "records/", f"records/{'x' * 513}", f"records/{'%C3%A4' * 257}"]
)
async def test_a_name_that_cannot_be_is_refused(market: httpx.AsyncClient, path: str) -> None:
    answer = await market.put(f"/v1/spaces/contoso/{path}", json=1)
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("space", ["_holdfast", "a%20b", "x" * 129, "%2e%2e"])
async def test_a_space_that_cannot_be_is_refused(admin: httpx.AsyncClient, space: str) -> None:
    answer = await admin.get(f"/v1/spaces/{space}/records")
    assert answer.status_code in (400, 404)


async def test_a_body_of_another_kind_is_415(market: httpx.AsyncClient) -> None:
    answer = await market.put(URL, content=b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (answer.status_code, answer.json()["error"]) == (415, "invalid_request")


async def test_a_body_over_the_limit_is_413_with_and_without_its_length(market: httpx.AsyncClient) -> None:
    whole = b'"' + b"x" * (16 * 1024 * 1024) + b'"'

    async def parts() -> Any:
        for start in range(0, len(whole), 1 << 20):
            yield whole[start : start + (1 << 20)]

    for content in (whole, parts()):
        answer = await market.put(URL, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]) == (413, "invalid_request")
    assert (await market.get(URL)).status_code == 404


async def test_a_value_over_ten_megabytes_is_refused(market: httpx.AsyncClient) -> None:
    answer = await market.put(
        URL, content=b'"' + b"x" * (11 * 1024 * 1024) + b'"', headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request")
    assert "blob" in answer.json()["message"]
