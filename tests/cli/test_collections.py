"""append, list, add, remove, members."""

from __future__ import annotations

from tests.cli.conftest import Cli


def test_a_list_keeps_its_order(cli: Cli) -> None:
    assert cli("append", "files", "a.csv", "2", '{"x": 1}').out == "3\n"
    assert cli("append", "files", "-5", "--json").json == {"key": "files", "appended": 1}
    assert cli("list", "files").out.splitlines() == ["a.csv", "2", '{"x":1}', "-5"]
    assert cli("list", "files", "--json").json == ["a.csv", 2, {"x": 1}, -5]
    assert cli("list", "absent", "--json").json == []


def test_lines_of_stdin_become_items(cli: Cli) -> None:
    lines = [f"file {number}" for number in range(250)]
    assert cli("append", "files", "-", stdin="\n".join(lines) + "\n").out == "250\n"
    assert cli("list", "files", "--json").json == lines
    assert cli("add", "seen", "-", stdin="1\n2\n2\n").out == "2\n"
    assert cli("members", "seen", "--json").json == [1, 2]
    assert "pipe it" in cli("append", "files", "-", code=2).err


def test_text_forces_text_in_lists_and_sets(cli: Cli) -> None:
    cli("append", "l", "1", "--text")
    cli("add", "s", "1", "--text")
    assert cli("list", "l", "--json").json == ["1"]
    assert cli("members", "s", "--json").json == ["1"]


def test_a_set_holds_each_member_once(cli: Cli) -> None:
    assert cli("add", "errors", "E1", "E2").out == "2\n"
    assert cli("add", "errors", "E2", "E3", "--json").json == {"key": "errors", "added": 1}
    assert cli("remove", "errors", "E1", "E9").out == "1\n"
    assert cli("remove", "errors", "E9", "--json").json == {"key": "errors", "removed": 0}
    assert cli("members", "errors").out.splitlines() == ["E2", "E3"]


def test_items_with_line_ends_stay_on_one_line(cli: Cli) -> None:
    cli("append", "l", "two\nlines")
    assert cli("list", "l").out == '"two\\nlines"\n'


def test_the_wrong_kind_is_refused_and_unchanged(cli: Cli) -> None:
    cli("append", "l", "1")
    cli("set", "r", "1")
    cli("add", "l", "x", code=2)
    cli("append", "r", "x", code=2)
    cli("members", "l", code=2)
    cli("append", "l", "x", "--ttl", "0", code=2)
    cli("append", "l", *["x"] * 101, code=2)
    assert cli("list", "l", "--json").json == [1]
    assert cli("get", "r").out == "1\n"


def test_what_is_repeated_under_its_request_id_is_done_once_and_prints_the_same(cli: Cli) -> None:
    lines = "\n".join(f"file {number}" for number in range(250)) + "\n"
    for _ in range(2):
        assert cli("append", "files", "-", "--request-id", "a", stdin=lines).out == "250\n"
        assert cli("add", "seen", "1", "2", "--request-id", "b").out == "2\n"
        assert cli("remove", "seen", "1", "--request-id", "c").out == "1\n"
        assert cli("increment", "orders", "--request-id", "d").out == "1\n"
        version = cli("set", "regime", "risk-on", "--if-absent", "--request-id", "e").out
        assert int(version) == cli("entry", "regime", "--json").json["version"]
        assert cli("delete", "gone", "orders", "--request-id", "f").out == "1\n"
    assert len(cli("list", "files", "--json").json) == 250
    assert "another batch" in cli("increment", "orders", "5", "--request-id", "d", code=2).err
