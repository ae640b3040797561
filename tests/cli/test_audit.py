"""audit: filters, redaction, sealing, and what verification says about a chain that was tampered with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

from tests.cli.conftest import Cli

STORE = ".holdfast/store.db"


@pytest.fixture
def history(cli: Cli) -> None:
    cli("set", "orders/1", "new", "--agent", "market")
    cli("set", "orders/2", "new", "--agent", "risk")
    cli("append", "orders/files", "a.csv", "--agent", "risk")
    cli("increment", "n")
    cli("delete", "orders/1")


def keys(cli: Cli, *filters: str) -> list[str]:
    return [record["key"].split("/0")[0] for record in cli("audit", *filters, "--json").json_lines]


@pytest.mark.usefixtures("history")
def test_filters_select(cli: Cli) -> None:
    everything = cli("audit", "--json").json_lines
    assert [record["operation"] for record in everything] == ["put", "put", "put", "push", "increment", "delete"]
    assert {record["outcome"] for record in everything} == {"committed"}
    assert keys(cli, "--actor", "market") == ["records/orders/1"]
    assert keys(cli, "--operation", "increment") == ["records/n"]
    assert keys(cli, "--outcome", "denied") == []
    assert keys(cli, "--key", "orders/1") == ["records/orders/1", "records/orders/1"]
    assert keys(cli, "--key", "records/n") == ["records/n"]
    assert len(keys(cli, "--key", "orders/files")) == 2
    assert keys(cli, "-n", "2") == ["records/n", "records/orders/1"]


@pytest.mark.usefixtures("history")
def test_times_are_iso_or_a_duration_ago(cli: Cli) -> None:
    now = datetime.now(UTC)
    assert len(keys(cli, "--since", "1h")) == 6
    assert keys(cli, "--until", "1h") == []
    assert keys(cli, "--since", (now + timedelta(hours=1)).isoformat()) == []
    assert (
        len(keys(cli, "--since", "2020-01-01", "--until", (now + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")))
        == 6
    )
    for wrong in ("yesterday", "1x", "-5m", ""):
        assert "duration ago" in cli("audit", f"--since={wrong}", code=2).err


@pytest.mark.usefixtures("history")
def test_lines_for_people_have_one_record_each(cli: Cli) -> None:
    cli("set", "odd\nkey", "two\nlines")
    lines = cli("audit").out.splitlines()
    assert len(lines) == 7
    assert lines[-1].endswith('"records/odd\\nkey"  "two\\nlines"')


@pytest.mark.usefixtures("history")
def test_following_ends_after_the_count(cli: Cli) -> None:
    assert keys(cli, "--follow", "-n", "2") == ["records/orders/1", "records/orders/2"]


def test_secrets_are_redacted_in_the_audit_and_true_in_the_record(cli: Cli) -> None:
    cli("set", "login", '{"user": "ann", "password": "hunter2"}')
    cli("set", "vault/api_key", "hunter2")
    for printed in (cli("audit").out, cli("audit", "--json").out, cli("audit", "--json", "--follow", "-n", "2").out):
        assert "hunter2" not in printed
        assert "[redacted]" in printed
        assert "ann" in printed
    assert cli("get", "vault/api_key").out == "hunter2\n"


@pytest.mark.usefixtures("history")
def test_a_sound_chain_verifies_and_its_head_can_be_expected(cli: Cli) -> None:
    assert cli("audit", "seal").out == "6\n"
    assert cli("audit", "seal", "--json").json == {"sealed": 0}
    told = cli("audit", "verify", "--json").json
    assert {name: told[name] for name in ("sound", "segments", "records", "upto", "problems")} == {
        "sound": True,
        "segments": 1,
        "records": 6,
        "upto": 5,
        "problems": [],
    }
    lines = cli("audit", "verify", "--expect", told["hash"]).out.splitlines()
    assert lines == ["sound, up to version 5", f"head      {told['hash']}", "segments  1", "records   6"]
    cli("set", "later", "1")
    cli("audit", "seal")
    cli("audit", "verify", "--expect", told["hash"])


@pytest.mark.usefixtures("history")
def test_what_is_not_sealed_yet_is_told_and_a_verification_seals_it(cli: Cli) -> None:
    only_looked = cli("audit", "verify", "--no-seal")
    assert only_looked.out.splitlines()[0] == "sound, up to version 0"
    assert "unsealed  6: no hash covers them yet; holdfast tidy seals them" in only_looked.out.splitlines()
    assert cli("audit", "verify", "--no-seal", "--json").json["unsealed"] == 6
    told = cli("audit", "verify").out.splitlines()
    assert (told[0], told[-1]) == ("sound, up to version 5", "records   6")
    assert cli("audit", "verify", "--no-seal", "--json").json["unsealed"] == 0


@pytest.mark.usefixtures("history")
def test_nothing_is_sealed_onto_a_chain_that_is_not_sound(cli: Cli, folder: Path) -> None:
    cli("audit", "seal")
    cli("set", "later", "1")
    head = cli("audit", "verify", "--no-seal", "--json").json["hash"]
    assert cli("audit", "verify", "--expect", "00", "--json", code=18).json["hash"] == head


@pytest.mark.usefixtures("history")
def test_a_chain_that_was_changed_ends_with_18(cli: Cli, folder: Path) -> None:
    cli("audit", "seal")
    assert "is not part of this chain" in cli("audit", "verify", "--expect", "00", code=18).out
    connection = apsw.Connection(str(folder / STORE))
    change = "UPDATE large SET value = CAST(replace(CAST(value AS TEXT), 'risk', 'mark') AS BLOB) WHERE key LIKE 'audit/log/%'"
    connection.execute(change)
    connection.close()
    refused = cli("audit", "verify", code=18)
    assert refused.out.startswith("NOT SOUND")
    assert "was changed after it was sealed" in refused.out
    assert refused.err.startswith("holdfast: the audit of space 'default' is not sound")
    as_json = cli("audit", "verify", "--json", code=18)
    assert as_json.json["sound"] is False
    assert as_json.error["error"] == "damaged"


@pytest.mark.usefixtures("history")
def test_a_segment_that_was_overwritten_ends_with_18(cli: Cli, folder: Path) -> None:
    cli("audit", "seal")
    connection = apsw.Connection(str(folder / STORE))
    connection.execute("UPDATE large SET value = CAST('{}' AS BLOB) WHERE key LIKE 'audit/log/%'")
    connection.close()
    for words in (["audit", "verify"], ["audit"]):
        assert cli(*words, "--json", code=18).error["error"] == "damaged"


def test_an_unknown_space_has_no_audit(cli: Cli) -> None:
    cli("set", "k", "1")
    for words in (["audit"], ["audit", "verify"], ["audit", "seal"]):
        assert cli("--space", "nowhere", *words, "--json", code=4).error["error"] == "not_found"
