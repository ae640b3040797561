"""export, import, copy, backup, restore: exact, checked, and nothing half done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, files


@pytest.fixture
def filled(cli: Cli) -> None:
    cli("set", "a", '{"x": [1, 2.5, null]}', "--agent", "market")
    cli("set", "odd\nkey ü", "text", "--ttl", "1h")
    cli("set", "typed", "1", "--type", "correlation_state", "--state", "failed")
    cli("append", "files", "a.csv", "b.csv")
    cli("add", "seen", "E1")
    cli("set", "gone", "1")
    cli("delete", "gone")
    cli("--space", "other", "set", "k", "2")


def exported(cli: Cli, *options: str) -> list[dict[str, Any]]:
    return cli(*options, "export").json_lines


@pytest.mark.usefixtures("filled")
def test_an_import_is_the_export_to_the_last_field(cli: Cli, folder: Path) -> None:
    cli("export", "out.jsonl")
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "kind": "space",
        "format": 1,
        "space": "default",
        "durability": "sync",
        "revision": lines[0]["revision"],
        "audit_reads": False,
    }
    assert lines[-1] == {"kind": "end", "space": "default", "entries": len(lines) - 2}
    told = cli("--store", "other.db", "import", "out.jsonl", "--json").json
    assert told == {"spaces": {"default": len(lines) - 2}}
    again = exported(cli, "--store", "other.db")
    mine = {line["key"]: line for line in lines[1:-1] if not line["key"].startswith("audit/")}
    theirs = {line["key"]: line for line in again[1:-1] if not line["key"].startswith("audit/")}
    assert theirs == mine
    assert cli("--store", "other.db", "list", "files", "--json").json == ["a.csv", "b.csv"]
    assert cli("--store", "other.db", "set", "next", "1", "--json").json["version"] > lines[0]["revision"]
    assert cli("--store", "other.db", "audit", "verify", "--json").json["sound"] is True


@pytest.mark.usefixtures("filled")
def test_an_exported_file_is_its_users_alone(cli: Cli, folder: Path) -> None:
    before = os.umask(0o022)
    try:
        for options in ([], ["--force"]):
            cli("export", "out.jsonl", *options)
            assert (folder / "out.jsonl").stat().st_mode & 0o777 == 0o600
            (folder / "out.jsonl").chmod(0o644)
    finally:
        os.umask(before)


@pytest.mark.usefixtures("filled")
def test_all_exports_every_space_and_import_can_take_one(cli: Cli) -> None:
    printed = cli("export", "--all").out
    assert [line["space"] for line in map(json.loads, printed.splitlines()) if line["kind"] == "space"] == [
        "default",
        "other",
    ]
    cli("--store", "one.db", "--space", "other", "import", stdin=printed)
    assert [each["name"] for each in cli("--store", "one.db", "spaces", "--json").json] == ["other"]
    cli("--store", "both.db", "import", stdin=printed)
    assert [each["name"] for each in cli("--store", "both.db", "spaces", "--json").json] == ["default", "other"]
    assert "it has default, other" in cli("--space", "third", "import", stdin=printed, code=4).err
    cli("export", "--all", "--space", "other", code=2)


def test_the_stores_own_space_travels_with_all(cli: Cli) -> None:
    cli("--space", "scratch", "set", "k", "1")
    cli("spaces", "drop", "scratch", "--yes")
    cli("--store", "other.db", "import", stdin=cli("export", "--all").out)
    assert len(cli("--store", "other.db", "audit", "--system", "--json").json_lines) >= 1


@pytest.mark.usefixtures("filled")
def test_a_space_that_is_further_or_holds_something_else_is_refused(cli: Cli, folder: Path) -> None:
    printed = cli("export").out
    cli("--store", "further.db", "import", stdin=printed)
    cli("--store", "further.db", "set", "k", "1")
    before = cli("--store", "further.db", "keys").out
    refused = cli("--store", "further.db", "import", "--json", stdin=printed, code=3)
    assert "is further" in refused.error["message"]
    assert cli("--store", "further.db", "keys").out == before
    cli("--store", "different.db", "set", "mine", "1")
    assert "is not the export's" in cli("--store", "different.db", "import", stdin=printed, code=3).err
    assert cli("--store", "different.db", "keys").out == "mine\n"
    cli("--store", "again.db", "import", stdin=printed)
    cli("--store", "again.db", "import", stdin=printed)  # as after an interruption


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("damage", "line", "why"),
    [
        (lambda lines: [*lines[:2], "not json", *lines[2:]], 3, "no line of an export"),
        (lambda lines: lines[1:], 1, 'kind "space" must come first'),
        (lambda lines: lines[:-1], -1, "it was cut off"),
        (lambda lines: [*lines[:1], *lines[2:]], -1, "should have come"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 3, "is not in order"),
        (lambda lines: [*lines, *lines], -1, "comes twice"),
        (lambda lines: [lines[0].replace('"format":1', '"format":2'), *lines[1:]], 1, "upgrade holdfast"),
        (lambda lines: [lines[0].replace('"sync"', '"eternal"'), *lines[1:]], 1, "eternal"),
        (lambda lines: [line.replace('"default"', '"no/slash"') for line in lines], None, "a space's name"),
        (lambda lines: [lines[0], lines[1].replace('"key":"', '"key":"/'), *lines[2:]], 2, "names no subspace"),
        (lambda lines: [lines[0], lines[1].replace('"version":', '"version":99'), *lines[2:]], 2, "beyond the space's"),
        (lambda lines: [lines[0], lines[1].replace('"version":', '"version":-'), *lines[2:]], 2, "between 0 and"),
        (lambda lines: [lines[0], lines[1].replace('"version":', '"surprise":'), *lines[2:]], 2, "surprise"),
        (
            lambda lines: [lines[0], lines[1].replace('"owner":"holdfast"', '"owner":"a\\nb"'), *lines[2:]],
            2,
            "an owner",
        ),
        (
            lambda lines: [lines[0], lines[1].replace('"value":{', '"value":{"bad":1e999,'), *lines[2:]],
            2,
            "is not JSON",
        ),
        (lambda lines: [], None, "no export"),
    ],
)
def test_a_damaged_export_names_its_line_and_changes_nothing(
    cli: Cli, folder: Path, damage: Any, line: int | None, why: str
) -> None:
    lines = damage(cli("export").out.splitlines())
    before = files(folder)
    refused = cli("--store", "other.db", "import", stdin="\n".join(lines) + "\n", code=None)
    assert refused.code in (2, 9)
    assert why in refused.err
    if line is not None:
        assert f"line {line if line > 0 else ''}" in refused.err
    assert files(folder) == before


def test_an_export_that_was_laid_out_anew_is_still_exact(cli: Cli) -> None:
    cli("set", "k", '{"b": 1, "a": [1.0, 1]}')
    spaced = "\n\n".join(json.dumps(line) for line in exported(cli))
    cli("--store", "other.db", "import", stdin=spaced)
    assert cli("--store", "other.db", "get", "k").out == '{"a":[1.0,1],"b":1}\n'
    cli("--store", "other.db", "set", "k", "2", "--if-value", '{"a": [1.0, 1], "b": 1}')


@pytest.mark.usefixtures("filled")
def test_an_export_file_appears_whole_and_replaces_nothing_unasked(cli: Cli, folder: Path) -> None:
    cli("export", "out.jsonl")
    before = files(folder)
    assert "--force" in cli("export", "out.jsonl", code=2).err
    assert files(folder).keys() == before.keys()
    cli("export", "out.jsonl", "--force", "--json")
    assert "cannot be written" in cli("export", "nowhere/out.jsonl", code=14).err
    cli("export", "/dev/null")
    cli("--space", "absent", "export", "new.jsonl", code=4)
    assert sorted(path.name for path in folder.iterdir()) == [".git", ".holdfast", "out.jsonl"]
    cli("import", "absent.jsonl", code=4)
    cli("import", ".", code=2)
    assert "pipe it" in cli("import", code=2).err


@pytest.mark.usefixtures("filled")
def test_a_copy_is_compared_and_counts_what_it_copied(cli: Cli) -> None:
    told = cli("copy", ".holdfast/store.db", "copy.db", "--json").json["spaces"]
    assert set(told) == {"default", "other"}
    assert cli("--store", "copy.db", "keys").out == cli("keys").out
    assert cli("--store", "copy.db", "entry", "typed").out == cli("entry", "typed").out
    cli("copy", ".holdfast/store.db", "one.db", "--space", "other")
    assert [each["name"] for each in cli("--store", "one.db", "spaces", "--json").json] == ["other"]


@pytest.mark.usefixtures("filled")
def test_a_copy_needs_a_source_and_a_target_of_its_own(cli: Cli, folder: Path) -> None:
    before = sorted(files(folder))
    cli("copy", "absent.db", "copy.db", code=4)
    cli("copy", ".holdfast/store.db", "./.holdfast/../.holdfast/store.db", code=2)
    cli("copy", ".holdfast/store.db", "copy.db", "--space", "absent", code=4)
    assert sorted(files(folder)) == before
    cli("copy", ".holdfast/store.db", "copy.db")
    cli("--store", "copy.db", "set", "ahead", "1")
    for _ in range(5):
        cli("--store", "copy.db", "increment", "n")
    cli("copy", ".holdfast/store.db", "copy.db", code=3)
    assert cli("--store", "copy.db", "get", "n").out == "5\n"


def test_a_copy_never_overwrites_a_space_of_the_target(cli: Cli) -> None:
    cli("--store", "s1.db", "set", "a", "1")
    cli("--store", "d9.db", "set", "a", "precious")
    audit = cli("--store", "d9.db", "audit").out
    assert "nothing was copied" in cli("copy", "s1.db", "d9.db", code=3).err
    cli("--store", "d9.db", "audit", "seal")
    assert "nothing was copied" in cli("copy", "s1.db", "d9.db", code=3).err
    assert cli("--store", "d9.db", "get", "a").out == "precious\n"
    assert cli("--store", "d9.db", "audit").out == audit


@pytest.mark.usefixtures("filled")
def test_a_backup_is_a_store_like_any_other(cli: Cli, folder: Path) -> None:
    told = cli("backup", "monday.db", "--json").json
    assert told == {"file": "monday.db", "bytes": (folder / "monday.db").stat().st_size}
    assert cli("--store", "monday.db", "keys").out == cli("keys").out
    cli("doctor", "monday.db")
    before = (folder / "monday.db").read_bytes()
    assert "exists already" in cli("backup", "monday.db", code=2).err
    assert (folder / "monday.db").read_bytes() == before
    assert cli("backup", "nowhere/monday.db", code=None).code in (2, 14)


def test_blobs_that_stay_behind_are_mentioned(cli: Cli) -> None:
    import holdfast

    cli("set", "k", "1")
    with holdfast.blocking.open(".holdfast/store.db") as store:
        store.space("default").blobs.put(b"large")
    assert "blobs of default" in cli("export").err
    assert "blobs of default" in cli("backup", "b.db").err
    assert "blobs of default" in cli("copy", ".holdfast/store.db", "c.db").err


# --- restore ---


def versions(cli: Cli, *options: str) -> dict[str, int]:
    return {info["name"]: info["revision"] for info in cli(*options, "spaces", "--json").json}


@pytest.mark.usefixtures("filled")
def test_a_restored_store_has_every_field_of_its_entries_and_gives_no_version_again(cli: Cli, folder: Path) -> None:
    cli("backup", "monday.db")
    held = {line["key"]: line for line in exported(cli)[1:-1]}
    late = cli("set", "a", "99", "--json").json["version"]
    cli("--space", "other", "set", "k", "3")
    given = versions(cli)
    told = cli("restore", "monday.db", "--replace", "--json").json
    assert told["replaced"] == str(folder / ".holdfast/store.db.replaced")
    assert {"default", "other"} <= set(told["spaces"])
    assert {line["key"]: line for line in exported(cli)[1:-1]}.items() >= {
        key: line for key, line in held.items() if not key.startswith("audit/")
    }.items()
    for space, revision in given.items():
        assert cli("--space", space, "set", "next", "1", "--json").json["version"] > revision + 2**32
    assert cli("get", "a", "--json").json == {"x": [1, 2.5, None]}
    cli("set", "a", "0", "--if-version", str(late), code=3)
    cli("doctor")
    cli("--store", ".holdfast/store.db.replaced", "doctor")
    assert cli("--store", ".holdfast/store.db.replaced", "get", "a").out == "99\n"


@pytest.mark.usefixtures("filled")
def test_spaces_that_the_backup_has_not_go_on_beyond_what_they_had(cli: Cli) -> None:
    cli("--space", "dropped", "set", "k", "1")
    cli("spaces", "drop", "dropped", "--yes")
    cli("backup", "monday.db")
    for space in ("dropped", "late"):
        for _ in range(3):
            cli("--space", space, "increment", "k")
    cli("restore", "monday.db", "--replace")
    assert set(versions(cli)) == {"default", "other"}
    for space in ("dropped", "late", "never-seen"):
        assert cli("--space", space, "increment", "k", "--json").json["value"] == 1
        assert cli("--space", space, "entry", "k", "--json").json["version"] > 2**32


@pytest.mark.usefixtures("filled")
def test_a_restore_through_a_link_replaces_the_store_and_not_the_link(cli: Cli, folder: Path) -> None:
    cli("backup", "monday.db")
    (folder / "real").mkdir()
    (folder / "link.db").symlink_to("real/team.db")
    cli("--store", "link.db", "restore", "monday.db")
    cli("--store", "link.db", "restore", "monday.db", "--replace")
    assert (folder / "link.db").is_symlink()
    assert cli("--store", "real/team.db", "get", "odd\nkey ü").out == "text\n"
    assert not [name for name in os.listdir(folder) if name.startswith("link.db") and name != "link.db"]


@pytest.mark.usefixtures("filled")
def test_a_backup_that_is_restored_again_elsewhere_goes_on_beyond_the_first_time(cli: Cli, folder: Path) -> None:
    """The store that was restored first may be gone altogether: only the time tells how far it may have come."""
    cli("backup", "monday.db")
    cli("--store", "first.db", "restore", "monday.db")
    first = versions(cli, "--store", "first.db")["default"]
    cli("--store", "second.db", "restore", "monday.db")
    assert versions(cli, "--store", "second.db")["default"] > first


@pytest.mark.usefixtures("filled")
def test_the_audit_comes_back_sound_and_tells_of_the_restore_and_of_what_is_lost(cli: Cli) -> None:
    cli("backup", "monday.db")
    cli("set", "a", "99")
    cli("restore", "monday.db", "--replace", "--agent", "oscar")
    cli("set", "after", "1")
    cli("tidy")
    assert cli("audit", "verify", "--json").json["sound"] is True
    told = [(line["outcome"], line["key"], line.get("value")) for line in cli("audit", "--json").json_lines]
    assert ("committed", "records/gone", 1) in told, "what was not sealed when the backup was made"
    assert ("committed", "records/a", 99) not in told
    assert [outcome for outcome, *_ in told].count("lost") == 1
    restored = [line for line in cli("audit", "--system", "--json").json_lines if line["operation"] == "restore"]
    assert [(line["actor"], line["key"]) for line in restored] == [("oscar", "backups/monday.db")]


@pytest.mark.usefixtures("filled")
def test_a_store_that_holds_something_is_not_replaced_unasked(cli: Cli, folder: Path) -> None:
    cli("backup", "monday.db")
    cli("set", "a", "99")
    before = sorted(path.name for path in (folder / ".holdfast").iterdir())
    refused = cli("restore", "monday.db", "--json", code=3)
    assert "is not empty; add --replace" in refused.error["message"]
    assert cli("get", "a").out == "99\n"
    assert sorted(path.name for path in (folder / ".holdfast").iterdir()) == before


@pytest.mark.usefixtures("filled")
def test_a_store_that_somebody_has_open_is_not_replaced(cli: Cli, folder: Path) -> None:
    import holdfast

    cli("backup", "monday.db")
    with holdfast.blocking.open(".holdfast/store.db") as store:
        store.space("default").records.set("a", 99)
        assert "is in use by another program" in cli("restore", "monday.db", "--replace", code=14).err
        store.space("default").records.set("a", 100)
    with holdfast.blocking.open("resident:.holdfast/store.db"):
        assert f"is in use by process {os.getpid()}" in cli("restore", "monday.db", "--replace", code=14).err
    assert cli("get", "a").out == "100\n"
    assert not (folder / ".holdfast/store.db.replaced").exists()


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("sound_bytes", [0, 2048])
def test_a_damaged_store_is_replaced_if_asked(cli: Cli, folder: Path, sound_bytes: int) -> None:
    cli("backup", "monday.db")
    store = folder / ".holdfast/store.db"
    damaged = store.read_bytes()[:sound_bytes].ljust(40_960, b"\xff")
    store.write_bytes(damaged)
    (folder / ".holdfast/store.db-wal").write_bytes(b"the log of another file")
    assert "cannot be read as a store" in cli("restore", "monday.db", code=3).err
    cli("restore", "monday.db", "--replace")
    assert cli("get", "odd\nkey ü").out == "text\n"
    assert (folder / ".holdfast/store.db.replaced").read_bytes()[2048:] == damaged[2048:]
    cli("restore", "monday.db", "--replace")
    assert (folder / ".holdfast/store.db.replaced-2").exists()


@pytest.mark.usefixtures("filled")
def test_what_is_no_backup_is_refused_and_leaves_nothing(cli: Cli, folder: Path) -> None:
    cli("backup", "monday.db")
    whole = (folder / "monday.db").read_bytes()
    (folder / "torn.db").write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    (folder / "text.db").write_text("no database\n" * 1000)
    (folder / "empty.db").write_bytes(b"")
    before = files(folder)
    cli("--store", "new.db", "restore", "absent.db", code=4)
    cli("--store", "new.db", "restore", "empty.db", code=2)
    assert "not a SQLite file" in cli("--store", "new.db", "restore", "text.db", code=9).err
    assert cli("--store", "new.db", "restore", "torn.db", code=18).err
    cli("--store", "monday.db", "restore", "monday.db", "--replace", code=2)
    assert "holdfast copy" in cli("--space", "other", "restore", "monday.db", code=2).err
    assert "stop it" in cli("--store", "holdfast://127.0.0.1:1", "restore", "monday.db", code=2).err
    assert files(folder) == before
    (folder / "monday.db").chmod(0o400)
    cli("--store", "new.db", "restore", "monday.db")
    assert (folder / "monday.db").read_bytes() == whole, "a backup stays as it is"


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_server_is_restored_from_its_backup(cli: Cli, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "redis":
        url = f"{request.getfixturevalue('redis_server').url}?prefix=restore"
    else:
        url = request.getfixturevalue("schemas").take()
    cli("--store", url, "set", "a", '{"x": 1}', "--agent", "market")
    cli("--store", url, "set", "short", "1", "--ttl", "1h")
    held = cli("--store", url, "entry", "a", "--json").json
    cli("--store", url, "backup", "monday.db")
    cli("--store", url, "set", "a", "99")
    cli("--store", url, "--space", "late", "set", "k", "1")
    given = versions(cli, "--store", url)
    assert "not empty (default, late); add --replace" in cli("--store", url, "restore", "monday.db", code=3).err
    assert cli("--store", url, "get", "a").out == "99\n"
    told = cli("--store", url, "restore", "monday.db", "--replace", "--json").json
    assert (told["spaces"]["default"] >= 2, told["replaced"]) == (True, None)
    assert cli("--store", url, "entry", "a", "--json").json == held
    assert cli("--store", url, "set", "b", "1", "--json").json["version"] > given["default"] + 2**32
    assert cli("--store", url, "--space", "late", "set", "k", "2", "--json").json["version"] > given["late"]
    assert cli("--store", url, "audit", "verify", "--json").json["sound"] is True
