"""watch: lines of the feed, cursors, and its end."""

from __future__ import annotations

from tests.cli.conftest import Cli


def test_the_feed_is_told_from_its_start(cli: Cli) -> None:
    cli("set", "orders/1", "new", "--agent", "market")
    cli("append", "files", "two\nlines")
    cli("add", "seen", "x")
    cli("remove", "seen", "x")
    cli("increment", "n", "2")
    cli("delete", "orders/1")
    lines = cli("watch", "--from-start", "-n", "6").out.splitlines()
    told = [line.split(maxsplit=3) for line in lines]
    assert [(each[1], each[2], each[3]) for each in told] == [
        ("market", "put", 'orders/1  "new"'),
        ("cli", "append", 'files  "two\\nlines"'),
        ("cli", "add", 'seen  "x"'),
        ("cli", "remove", 'seen  "x"'),
        ("cli", "increment", "n  2"),
        ("cli", "delete", "orders/1"),
    ]


def test_json_lines_carry_a_cursor_that_resumes_exactly(cli: Cli) -> None:
    for number in range(4):
        cli("set", f"k{number}", str(number))
    first, second = cli("watch", "--from-start", "-n", "2", "--json").json_lines
    assert [first["key"], second["key"]] == ["k0", "k1"]
    assert set(first) == {
        *("cursor", "version", "at", "actor", "request_id", "op", "key", "value", "large", "owner"),
        *("expires_at", "type", "state"),
    }
    [third] = cli("watch", "--cursor", second["cursor"], "-n", "1", "--json").json_lines
    assert (third["key"], third["value"]) == ("k2", 2)


def test_going_on_in_the_middle_of_a_commit_repeats_it(cli: Cli) -> None:
    cli("set", "before", "1")
    cli("append", "l", "a", "b", "c")
    lines = cli("watch", "--from-start", "-n", "4", "--json").json_lines
    assert [line["cursor"] for line in lines] == ["r1", "r1", "r1", "r2"]
    again = cli("watch", "--cursor", lines[2]["cursor"], "-n", "3", "--json").json_lines
    assert [line["value"] for line in again] == ["a", "b", "c"]


def test_a_prefix_selects(cli: Cli) -> None:
    for name in ("a/1", "b/1", "a/2"):
        cli("set", name, "1")
    assert [line["key"] for line in cli("watch", "a/", "--from-start", "-n", "2", "--json").json_lines] == [
        "a/1",
        "a/2",
    ]


def test_a_large_value_is_not_in_the_feed(cli: Cli) -> None:
    cli("set", "big", "-", stdin="x" * 100_000)
    assert cli("watch", "--from-start", "-n", "1").out.endswith("big  (large: read it with get)\n")
    [line] = cli("watch", "--from-start", "-n", "1", "--json").json_lines
    assert (line["large"], line["value"]) == (True, None)


def test_long_values_are_cut_for_people_and_whole_for_programs(cli: Cli) -> None:
    cli("set", "k", "y" * 1000)
    line = cli("watch", "--from-start", "-n", "1").out
    assert line.endswith("y…\n")
    assert len(line) < 300
    assert cli("watch", "--from-start", "-n", "1", "--json").json_lines[0]["value"] == "y" * 1000


def test_wrong_cursors_and_counts_are_refused(cli: Cli) -> None:
    cli("set", "k", "1")
    cli("watch", "--cursor", "nonsense", code=2)
    assert cli("watch", "--cursor", "r99", "--json", code=8).error["error"] == "compacted"
    cli("watch", "--cursor", "r0", "--from-start", code=2)
    for wrong in ("0", "-1", "many"):
        cli("watch", "--from-start", "-n", wrong, code=2)
