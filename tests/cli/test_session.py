"""Which store, space and agent a command works with, and how its options are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, files


def test_the_default_store_is_in_the_project_and_made_by_the_first_write(cli: Cli, folder: Path) -> None:
    missing = cli("get", "k", code=4)
    assert f"there is no store at {folder / '.holdfast' / 'store.db'}" in missing.err
    for reading in (["keys"], ["watch"], ["audit"], ["spaces"], ["doctor"], ["export"], ["backup", "b.db"], ["tidy"]):
        cli(*reading, code=4)
    for changing in (["delete", "k"], ["remove", "s", "m"], ["spaces", "drop", "x", "--yes"], ["audit", "seal"]):
        cli(*changing, code=4)
    assert files(folder) == {}
    cli("set", "k", "1")
    assert (folder / ".holdfast" / "store.db").is_file()
    assert (folder / ".holdfast" / ".gitignore").read_text() == "*\n"


def test_a_refused_first_write_makes_no_store(cli: Cli, folder: Path) -> None:
    cli("set", "", "1", code=2)
    cli("set", "k", "1", "--ttl", "0", code=2)
    cli("set", "k", "1", "--space", "no/slash", code=2)
    cli("set", "k", "1", "--agent", "not ok", code=2)
    cli("set", "k", "-", stdin="x" * (10 * 1024 * 1024), code=2)
    cli("increment", "n", "many", code=2)
    cli("import", "-", stdin="nonsense\n", code=2)
    assert files(folder) == {}


def test_the_nearest_project_above_is_used(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("set", "k", "1")
    deep = folder / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert cli("get", "k").out == "1\n"
    (folder / "a" / ".holdfast").mkdir()
    cli("get", "k", code=4)
    cli("set", "k", "2")
    assert (folder / "a" / ".holdfast" / "store.db").is_file()


def test_options_win_over_the_environment(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", "env.db")
    monkeypatch.setenv("HOLDFAST_SPACE", "env-space")
    monkeypatch.setenv("HOLDFAST_AGENT", "env-agent")
    cli("set", "k", "1")
    assert (folder / "env.db").is_file()
    assert not (folder / ".holdfast").exists()
    told = cli("--space", "env-space", "entry", "k", "--json").json
    assert told["owner"] == "env-agent"
    cli("--store", "other.db", "set", "k", "2", "--agent", "me", "--space", "mine")
    assert cli("--store", "other.db", "--space", "mine", "entry", "k", "--json").json["owner"] == "me"
    cli("--store", "other.db", "get", "k", code=4)


def test_an_option_may_stand_before_or_after_and_the_nearer_one_wins(cli: Cli) -> None:
    cli("--space", "a", "set", "k", "1")
    cli("set", "k", "2", "--space", "b")
    assert cli("--space", "b", "get", "k", "--space", "a").out == "1\n"
    assert cli("get", "k", "--space=b").out == "2\n"
    assert cli("--json", "--space", "a", "audit", "verify").json["sound"] is True
    assert cli("audit", "--json", "--space", "a", "verify").json["sound"] is True
    assert cli("audit", "verify", "--json", "--space", "a").json["sound"] is True


def test_an_empty_store_option_is_not_the_default(cli: Cli, folder: Path) -> None:
    assert "--store is empty" in cli("--store", "", "set", "k", "1", code=2).err
    assert files(folder) == {}


def test_empty_variables_count_as_unset(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_STORE", "HOLDFAST_SPACE", "HOLDFAST_AGENT"):
        monkeypatch.setenv(name, "")
    cli("set", "k", "1")
    assert cli("entry", "k", "--json").json["owner"] == "cli"
    assert cli("spaces", "--json").json[0]["name"] == "default"


def test_a_volatile_space_and_a_memory_store_come_with_a_warning(cli: Cli) -> None:
    cli("spaces", "create", "scratch", "--durability", "volatile")
    assert "is volatile" in cli("--space", "scratch", "set", "k", "1").err
    assert "is volatile" in cli("--space", "scratch", "set", "k", "1", "--json").error["note"]
    cli("--space", "scratch", "get", "k", code=4)
    assert "ends with this command" in cli("--store", "memory:", "set", "k", "1").err


def test_reads_of_a_space_that_asks_for_it_are_audited(cli: Cli) -> None:
    cli("spaces", "create", "strict", "--audit-reads")
    cli("--space", "strict", "set", "k", "1")
    cli("--space", "strict", "--agent", "nosy", "get", "k")
    [told, looked] = cli("--space", "strict", "audit", "--outcome", "read", "--json").json_lines
    assert (looked["actor"], looked["operation"]) == ("cli", "watch"), "whoever reads the audit is in it too"
    assert (told["actor"], told["operation"], told["key"]) == ("nosy", "get", "records/k")


def test_rule_54_there_is_one_store_per_context_by_default_under_the_projects_folder(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projects = [folder / "one", folder / "two"]
    for project in projects:
        inner = project / "src" / "deep"
        inner.mkdir(parents=True)
        (project / ".git").mkdir()
        monkeypatch.chdir(inner)
        cli("set", "project", project.name)
        monkeypatch.chdir(project)
        assert cli("get", "project").out == f"{project.name}\n"
    assert sorted(folder.rglob("*.db")) == [project / ".holdfast" / "store.db" for project in projects]
