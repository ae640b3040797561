"""spaces, doctor, tidy."""

from __future__ import annotations

from pathlib import Path

import apsw

from holdfast import ManualClock, blocking
from tests.cli.conftest import Cli


def test_spaces_are_listed_with_what_they_hold(cli: Cli) -> None:
    cli("set", "k", "1")
    cli("append", "l", "a", "b")
    cli("spaces", "create", "metrics", "--durability", "async")
    told = cli("spaces", "--json").json
    assert [(each["name"], each["durability"], each["revision"], each["keys"]) for each in told] == [
        ("default", "sync", 2, 2),
        ("metrics", "async", 0, 0),
    ]
    assert told[0]["bytes"] > 0
    assert cli("spaces").out.splitlines()[1] == "metrics\tasync\t0\t0\t0"


def test_a_space_is_made_with_a_durability_that_stays(cli: Cli) -> None:
    assert cli("spaces", "create", "a", "--durability", "async").out == "a\n"
    cli("spaces", "create", "a", "--durability", "async")
    assert "exists with durability" in cli("spaces", "create", "a", code=2).err
    cli("spaces", "create", "b", "--durability", "eternal", code=2)
    cli("spaces", "create", "no/slash", code=2)
    assert [each["name"] for each in cli("spaces", "--json").json] == ["a"]


def test_a_space_is_dropped_only_when_one_means_it(cli: Cli) -> None:
    cli("--space", "scratch", "set", "k", "1")
    assert "add --yes" in cli("spaces", "drop", "scratch", stdin="y\n", code=2).err
    assert "add --yes" in cli("spaces", "drop", "scratch", "--json", code=2).error["message"]
    assert cli("--space", "scratch", "get", "k").out == "1\n"
    assert cli("spaces", "drop", "scratch", "--yes", "--agent", "boss", "--json").json == {"dropped": "scratch"}
    cli("--space", "scratch", "get", "k", code=4)
    cli("spaces", "drop", "scratch", "--yes", code=4)
    cli("spaces", "drop", "_holdfast", "--yes", code=2)
    [told] = cli("audit", "--system", "--json").json_lines
    assert (told["actor"], told["operation"], told["key"]) == ("boss", "drop_space", "spaces/scratch")


def test_dropping_asks_at_a_terminal(cli: Cli) -> None:
    cli("--space", "scratch", "set", "k", "1")
    asked = cli("spaces", "drop", "scratch", code=1)  # nobody answers
    assert (asked.out, asked.err) == ("", "Delete space 'scratch' with all it holds? [y/N] ")
    assert cli("--space", "scratch", "get", "k").out == "1\n"


def test_a_healthy_store_has_no_error(cli: Cli) -> None:
    cli("set", "k", "1")
    findings = cli("doctor", "--json").json
    assert {finding["level"] for finding in findings} <= {"ok", "note", "warning"}
    assert {"level", "subject", "message", "advice"} == set(findings[0])
    lines = cli("doctor", ".holdfast/store.db").out.splitlines()
    assert all(len(line.split("\t")) == 4 for line in lines)


def test_an_error_finding_ends_with_1(cli: Cli, folder: Path) -> None:
    cli("set", "k", "1")
    connection = apsw.Connection(str(folder / ".holdfast/store.db"))
    connection.execute("UPDATE usage SET keys = 7")
    connection.close()
    told = cli("doctor", "--json", code=1)
    assert [finding["subject"] for finding in told.json if finding["level"] == "error"] == ["usage"]
    assert told.err == ""


def test_keys_that_have_expired_are_counted_until_they_are_swept_and_the_help_says_so(cli: Cli) -> None:
    clock = ManualClock(1_750_000_000_000)  # so that a ttl of today is long over
    with blocking.open("team.db", clock=clock, background=False) as store:
        records = store.space("default").records
        records.set("gone", 1, ttl="1h")
        records.set("stays", 1)
    assert cli("--store", "team.db", "keys").out == "stays\n"
    assert cli("--store", "team.db", "spaces", "--json").json[0]["keys"] == 2
    assert "counted until it is swept" in " ".join(cli("spaces", "--help").out.split())
    cli("--store", "team.db", "tidy")
    assert cli("--store", "team.db", "spaces", "--json").json[0]["keys"] == 1


def test_the_doctor_tells_how_durable_the_spaces_of_this_store_are(cli: Cli) -> None:
    cli("set", "k", "1")
    assert not any("async" in line for line in cli("doctor").out.splitlines())
    cli("spaces", "create", "metrics", "--durability", "async")
    [line] = [line for line in cli("doctor").out.splitlines() if "durability async" in line]
    assert line.startswith("note\t")
    assert line.split("\t")[2].endswith("may lose the latest: space metrics")


def test_the_doctor_finds_an_audit_that_was_changed(cli: Cli, folder: Path) -> None:
    cli("set", "k", "1")
    cli("tidy")
    connection = apsw.Connection(str(folder / ".holdfast/store.db"))
    for table in ("entries", "large"):
        connection.execute(
            f"UPDATE {table} SET value = CAST(replace(CAST(value AS TEXT), '\"cli\"', '\"abc\"') AS BLOB) "
            "WHERE key LIKE 'audit/log/%'"
        )
    connection.close()
    for words in (["doctor"], ["doctor", "--full"]):
        told = cli(*words, "--json", code=1).json
        [error] = [finding for finding in told if finding["level"] == "error"]
        assert error["subject"] == "audit of default"
        assert "changed after it was sealed" in error["message"]


def test_the_doctor_finds_a_copy_that_was_left_without_its_blobs(cli: Cli, folder: Path) -> None:
    with blocking.open("team.db") as store:
        space = store.space("default")
        conditions, operations = space.blobs.attach(space.blobs.put(b"report"), "reports/q1")
        space.commit(*conditions, *operations)
    cli("--store", "team.db", "backup", "monday.db")
    told = cli("doctor", "monday.db", "--json", code=1).json
    [error] = [finding for finding in told if finding["level"] == "error"]
    assert (error["subject"], "monday.db-blobs is not there" in error["message"]) == ("blobs of default", True)
    cli("doctor", "monday.db", "--blobs", "team.db-blobs")
    assert not (folder / "monday.db-blobs").exists()


def test_tidy_seals_and_sweeps(cli: Cli) -> None:
    cli("set", "k", "1")
    assert cli("tidy", "--json").json == {"tidied": ["default"]}
    assert cli("audit", "verify", "--json").json["records"] == 1
