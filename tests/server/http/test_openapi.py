"""The OpenAPI document, and the server held against it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.clock import SystemClock
from holdfast.server.http import Limits
from holdfast.server.http.openapi import document
from holdfast.server.http.table import ENDPOINTS
from holdfast.testing.servers.keeper import KeeperServer
from tests.server.http.keeping import ADMIN, Keeper, Running, running
from tests.server.live import make_token, rss_of

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
EXAMPLES = 200
LIMIT_S = 900 if SOAK else 120
WAIT_S = 45
"""A lock is waited for as long as 30 s."""
STATE_DECIDES = "positive_data_acceptance"
"""Whether a well-formed request is accepted depends on what is in the store: a stale ETag, a used request id, a held lock."""


async def test_the_document_has_every_path_with_its_types_and_errors(market: httpx.AsyncClient) -> None:
    served = (await market.get("/openapi.json")).json()
    assert served["openapi"].startswith("3.1")
    operations = {
        (method.upper(), path): each for path, methods in served["paths"].items() for method, each in methods.items()
    }
    assert set(operations) == {(each.method, each.path) for each in ENDPOINTS}
    for (method, path), each in operations.items():
        named = {parameter["name"] for parameter in each["parameters"] if parameter["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))
        assert each["summary"]
        assert each["operationId"]
        assert ("requestBody" in each) == (method in ("POST", "PUT", "PATCH"))
        if each.get("security") != []:
            assert {"400", "401", "403", "429", "500", "503", "504"} <= set(each["responses"]), path
        for status, response in each["responses"].items():
            assert status == "304" or response["content"], (path, status)


def test_every_reference_of_the_document_leads_somewhere() -> None:
    whole = document()
    known = set(whole["components"]["schemas"])
    references: set[str] = set()

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            references.update(value.rpartition("/")[2] for name, value in part.items() if name == "$ref")
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(whole)
    assert references
    assert references <= known
    assert not [name for name in known if "." in name], "two types share a name"


async def test_the_page_for_people_shows_every_path_and_loads_nothing(port: Running) -> None:
    async with port.client(None) as client:
        answer = await client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(each.path in answer.text for each in ENDPOINTS)
    assert not re.search(r"<script|src=|https?://|@import", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def hold_against_the_document(
    url: str, token: str, folder: Path, request_s: int, phases: str = "examples,fuzzing", examples: int = 1
) -> None:
    """schemathesis sends what fits the document and what does not, and compares every answer with it."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{url}/openapi.json",
        *("--header", f"Authorization: Bearer {token}"),
        *("--header", "Accept: application/json"),  # a stream of events has no end
        *("--checks", "all", "--exclude-checks", STATE_DECIDES),
        *("--phases", phases, "--max-examples", str(examples), "--seed", "1", "--request-timeout", str(request_s)),
        *("--workers", "1"),  # with more threads, Python 3.11 itself stumbles now and then (gh-106905)
        *("--no-color", "--suppress-health-check", "all", "--warnings", "off"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    tested = re.search(r"Tested: (\d+)", text)
    assert tested is not None
    assert int(tested[1]) == len(ENDPOINTS) - 1, text  # all but the document itself


@pytest.mark.skipif(not SOAK, reason="at its small size the keeper below does the same")
async def test_the_server_does_what_the_document_says_in_every_phase(tmp_path: Path) -> None:
    async with holdfast.open("memory:", background=False) as store:
        keeper = Keeper(store, SystemClock())
        limits = Limits(lock_wait_ms_max=200)  # nobody waits for its turn for longer than a request may take
        async with running(keeper, metrics=lambda: b"up 1\n", limits=limits) as port:
            await hold_against_the_document(
                port.url, ADMIN, tmp_path, 10, "examples,coverage,fuzzing,stateful", EXAMPLES
            )


async def test_a_keeper_with_its_rules_does_what_the_document_says_and_keeps_its_memory(tmp_path: Path) -> None:
    """An agent is refused much of it, an administrator nothing; the log has no failure, and what was asked is forgotten."""
    rules = {
        "rate_limits": [{"agent_pattern": "*", "max_ops_per_second": 1_000_000, "burst": 1_000_000}],
        "quotas": [{"agent_pattern": "*", "max_keys_per_agent": 1_000_000}],
    }
    with KeeperServer.temporary(policies=rules) as keeper:
        agent, sizes = await make_token(keeper, "market"), []
        for token in (agent, keeper.admin):
            await hold_against_the_document(keeper.http, token, tmp_path, WAIT_S)
            sizes.append(rss_of(keeper.pid))
        assert "Traceback" not in (log := keeper.log.read_text()), log[-3000:]
        assert sizes[1] <= sizes[0] * 1.10, f"{sizes} bytes after each round"
