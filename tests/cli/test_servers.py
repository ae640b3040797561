"""The commands on a store that a server keeps: moving up to one, using it, and asking what it guarantees."""

from __future__ import annotations

import uuid

import pytest

from holdfast.testing.servers.redis import RedisServer
from tests.cli.conftest import Cli
from tests.servers import started


@pytest.fixture(params=["redis", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    name = f"cli{uuid.uuid4().hex}"
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_server').url}?prefix={name}"
    return f"{request.getfixturevalue('postgres_server').url}?schema={name}"


def test_a_project_moves_up_to_a_server_and_back_unchanged(cli: Cli, url: str) -> None:
    cli("set", "regime", '{"a": [1, 2]}', "--ttl", "1h")
    cli("append", "files", "a.csv", "b.csv")
    cli("increment", "n", "9007199254740993")
    told = cli("copy", ".holdfast/store.db", url, "--json").json["spaces"]
    assert told["default"] >= 5
    assert cli("copy", ".holdfast/store.db", url, "--json").json["spaces"] == told
    cli("copy", url, "back.db")
    for store in (url, "back.db"):
        for command in (["entry", "regime"], ["get", "n"], ["list", "files"], ["keys"]):
            assert cli("--store", store, *command).out == cli(*command).out
    before = cli("spaces", "--json").json[0]["revision"]
    assert cli("--store", url, "increment", "n", "--json").json["value"] == 9007199254740994
    assert cli("--store", url, "spaces", "--json").json[0]["revision"] > before
    assert "sound" in cli("--store", url, "audit", "verify").out


def test_the_doctor_tells_what_a_server_guarantees(cli: Cli, url: str) -> None:
    told = cli("doctor", url, "--json").json
    assert told
    assert all(finding["level"] in ("ok", "note") for finding in told), told


def test_a_server_that_keeps_nothing_is_told_of_and_refused(cli: Cli) -> None:
    with started(RedisServer.temporary(appendonly="no")) as server:
        warned = cli("doctor", server.url, "--json").json
        assert any("appendonly" in finding["advice"] for finding in warned)
        refused = cli("--store", server.url, "set", "k", "1", code=16)
        assert "appendfsync" in refused.err
        cli("--store", server.url, "spaces", "create", "default", "--durability", "async")
        cli("--store", server.url, "set", "k", "1")
        assert cli("--store", server.url, "get", "k").out == "1\n"
        cli("--store", server.url, "spaces", "drop", "default", "--yes")


def test_a_server_that_is_not_there_is_unavailable_and_its_password_is_not_told(cli: Cli) -> None:
    for url in ("redis://me:s3cret@127.0.0.1:1/0", "postgresql://me:s3cret@127.0.0.1:1/none"):
        for command in (["get", "k"], ["doctor"]):
            refused = cli("--store", url, *command, code=14)
            assert "s3cret" not in refused.err + refused.out
