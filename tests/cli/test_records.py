"""get, entry, set, delete, increment, keys: what they print, and with which code they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, files

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.mark.parametrize(
    ("word", "printed", "as_json"),
    [
        ("risk-on", "risk-on", '"risk-on"'),
        ("42", "42", "42"),
        ('"42"', "42", '"42"'),
        ("-7", "-7", "-7"),
        ("-1.5e3", "-1500.0", "-1500.0"),
        ("007", "007", '"007"'),
        ("null", "null", "null"),
        ('{"b": 1, "a": [true]}', '{"a":[true],"b":1}', '{"a":[true],"b":1}'),
        ("123456789012345678901234567890", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("grüße 🌊", "grüße 🌊", '"grüße 🌊"'),
        ("", "", '""'),
        ("not {json}", "not {json}", '"not {json}"'),
    ],
)
def test_a_word_is_json_if_it_is_json_and_text_otherwise(cli: Cli, word: str, printed: str, as_json: str) -> None:
    cli("set", "k", word)
    assert cli("get", "k").out == printed + "\n"
    assert cli("get", "k", "--json").out == as_json + "\n"


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("{symbol: MSFT}", "expecting property name enclosed in double quotes at line 1, column 2"),
        (' {"a": 1', "expecting ',' delimiter at line 1, column 9"),
        ("[1,\n2,]", "expecting value at line 2, column 3"),
        ('"abc', "unterminated string starting at line 1, column 1"),
        ("[NaN]", "invalid character"),
    ],
)
def test_what_begins_as_json_and_is_none_is_refused(cli: Cli, folder: Path, word: str, where: str) -> None:
    before = files(folder)
    for call in (["set", "k", word], ["append", "k", "a", word], ["queue", "put", "q", word]):
        refused = cli(*call, code=2)
        assert where in refused.err
        assert "--text" in refused.err
    assert where in cli("set", "k", "-", stdin=word, code=2).err
    assert where in cli("set", "k", "1", "--if-value", word, code=2).err
    assert where in cli("get", "k", "--default", word, code=2).err
    assert files(folder) == before
    cli("set", "k", word, "--text")
    assert cli("get", "k", "--json").json == word


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_have_is_no_text_by_mistake(cli: Cli, folder: Path, word: str) -> None:
    before = files(folder)
    for call in (["set", "k", "--", word], ["append", "k", "a", "--", word]):
        refused = cli(*call, code=2)
        assert "a number that JSON does not have; if text is meant, give --text" in refused.err
    assert "a number that JSON does not have" in cli("set", "k", "-", stdin=f"{word}\n", code=2).err
    assert f"""write it as JSON text: '"{word}"'""" in cli("doc", "contribute", "d", "--", word, code=2).err
    assert files(folder) == before
    cli("set", "k", "--text", "--", word)
    assert cli("get", "k", "--json").json == word
    for text in ("nan", "info", "Infinity War"):
        cli("set", "k", text)


def test_where_there_is_no_text_option_the_refusal_says_how_text_is_written(cli: Cli) -> None:
    refused = cli("doc", "contribute", "d", "[a]", code=2)
    assert refused.err.endswith("""write it as JSON text: '"[a]"'\n""")
    cli("doc", "contribute", "d", '"[a]"')
    assert '"data":"[a]"' in cli("doc", "show", "d", "--json").out


def test_a_line_that_is_broken_json_is_named_with_what_was_done_before(cli: Cli) -> None:
    lines = "".join(f"{number}\n" for number in range(102)) + "[id].tsx\n"
    refused = cli("append", "files", "-", stdin=lines, code=2)
    assert "line 103 (100 before it are done): '[id].tsx' looks like JSON" in refused.err
    assert len(cli("list", "files", "--json").json) == 100


def test_text_forces_text(cli: Cli) -> None:
    cli("set", "k", "42", "--text")
    assert cli("--json", "get", "k").json == "42"


def test_a_value_that_begins_with_a_dash_needs_two_dashes_before_it(cli: Cli) -> None:
    refused = cli("set", "k", "--tpyo", code=2)
    assert "there is no option --tpyo" in refused.err
    assert cli("set", "k", "v", "--tpyo", "3", code=2).out == ""
    cli("set", "k", "--", "--tpyo")
    assert cli("get", "k").out == "--tpyo\n"


def test_a_piped_value_loses_one_final_line_end(cli: Cli) -> None:
    cli("set", "k", "-", stdin='{"a": 1}\n')
    assert cli("get", "k", "--json").json == {"a": 1}
    cli("set", "k", stdin="two\nlines\n\n")
    assert cli("get", "k", "--json").json == "two\nlines\n"
    cli("set", "k", "-", stdin="")
    assert cli("get", "k", "--json").json == ""


def test_without_a_value_nothing_is_written(cli: Cli) -> None:
    assert "give a value" in cli("set", "k", code=2).err
    assert "give a value" in cli("set", "k", stdin="", code=2).err
    assert "not UTF-8" in cli("set", "k", "-", stdin=b"\xff\xfe", code=2).err
    cli("get", "k", code=4)


def test_get_of_what_is_not_there_ends_with_4(cli: Cli) -> None:
    cli("set", "other", "1")
    refused = cli("get", "k", code=4)
    assert (refused.out, refused.err) == ("", "holdfast: there is no record 'k' in space 'default'\n")
    assert cli("get", "k", "--json", code=4).error["error"] == "not_found"


def test_get_prints_its_default_with_and_without_a_store(cli: Cli) -> None:
    assert cli("get", "k", "--default", "3").out == "3\n"
    cli("set", "other", "1")
    assert cli("get", "k", "--default", "none", "--json").out == '"none"\n'
    assert cli("get", "k", "--default", "-5").out == "-5\n"
    cli("set", "k", "null")
    assert cli("get", "k", "--default", "3").out == "null\n"


def test_set_prints_the_version_it_wrote(cli: Cli) -> None:
    assert cli("set", "a", "1").out == "1\n"
    assert cli("set", "a", "2", "--json").json == {"key": "a", "version": 2}


def test_conditions_that_do_not_hold_end_with_3_and_change_nothing(cli: Cli) -> None:
    cli("set", "k", "1", "--if-absent")
    for condition in (["--if-absent"], ["--if-version", "7"], ["--if-value", "2"], ["--if-value", "1", "--text"]):
        cli("set", "k", "9", *condition, code=3)
    assert cli("set", "k", "9", "--if-absent", "--json", code=3).error == {
        "error": "conflict",
        "message": "'k' was expected to be absent, but it is at version 1",
        "key": "records/k",
        "version": 1,
    }
    assert cli("get", "k").out == "1\n"
    cli("set", "k", "2", "--if-value", "1")
    cli("set", "k", "3", "--if-version", "2")
    assert cli("get", "k").out == "3\n"
    assert "give one of" in cli("set", "k", "4", "--if-absent", "--if-version", "3", code=2).err
    cli("set", "k", "4", "--if-version", "three", code=2)


def test_ttl_type_and_state_are_written_with_the_value(cli: Cli) -> None:
    cli("set", "k", "1", "--ttl", "1h", "--type", "correlation_state", "--state", "failed")
    told = cli("entry", "k", "--json").json
    assert told["type"] == "correlation_state"
    assert told["state"] == "failed"
    assert MOMENT.fullmatch(told["expires_at"])
    for wrong in ("0", "-1", "soon"):
        assert "ttl" in cli("set", "k", "2", "--ttl", wrong, code=2).err
    assert cli("get", "k").out == "1\n"
    assert "needs a type" in cli("set", "k", "2", "--state", "failed", code=2).err


def test_entry_tells_everything_about_a_record(cli: Cli) -> None:
    cli("--agent", "market", "set", "k", '{"a": 1}')
    told = cli("entry", "k", "--json").json
    assert {name: told[name] for name in ("key", "value", "version", "owner", "expires_at")} == {
        "key": "k",
        "value": {"a": 1},
        "version": 1,
        "owner": "market",
        "expires_at": None,
    }
    assert MOMENT.fullmatch(told["created_at"])
    assert MOMENT.fullmatch(told["updated_at"])
    lines = cli("entry", "k").out.splitlines()
    assert lines[0] == 'value       {"a":1}'
    assert "owner       market" in lines
    cli("entry", "absent", code=4)


def test_entry_describes_a_list_without_its_items(cli: Cli) -> None:
    cli("append", "files", "a", "b")
    cli("append", "files2", "a")
    told = cli("entry", "files", "--json").json
    assert (told["key"], told["type"], told["value"]) == ("files", "list", None)
    assert "is a list" in cli("get", "files", code=2).err


def test_delete_tells_what_was_there(cli: Cli) -> None:
    cli("set", "a", "1")
    cli("set", "b", "1")
    assert cli("delete", "a", "absent").out == "1\n"
    assert cli("delete", "a", "b", "--json").json == {"deleted": ["b"], "absent": ["a"]}
    assert cli("keys").out == ""


def test_delete_takes_more_keys_than_a_batch_has_operations(cli: Cli) -> None:
    names = [f"k{number}" for number in range(200)]
    cli("set", "k0", "1")
    cli("set", "k199", "1")
    assert cli("delete", *names).out == "2\n"


def test_increment_gives_the_sum(cli: Cli) -> None:
    assert cli("increment", "n").out == "1\n"
    assert cli("increment", "n", "41").out == "42\n"
    assert cli("increment", "n", "-50", "--json").json == {"key": "n", "value": -8}
    for wrong in ("1.5", "many", str(2**63)):
        cli("increment", "n", wrong, code=2)
    cli("set", "t", "text")
    cli("increment", "t", code=2)
    assert cli("get", "n").out == "-8\n"


def test_keys_are_in_order_and_filtered_by_prefix(cli: Cli) -> None:
    for name in ("orders/2", "orders/1", "other", "ördern"):
        cli("set", name, "1")
    cli("append", "orders/list", "x")
    assert cli("keys").out.splitlines() == ["orders/1", "orders/2", "orders/list", "other", "ördern"]
    assert cli("keys", "orders/").out.splitlines() == ["orders/1", "orders/2", "orders/list"]
    told = cli("keys", "orders/l", "--json").json_lines
    assert [(each["key"], each["type"], each["owner"]) for each in told] == [("orders/list", "list", "cli")]


def test_keys_that_do_not_print_are_shown_quoted(cli: Cli) -> None:
    odd = ["two\nlines", "tab\there", '"quoted"', "bell\x07", "back\\slash", "esc\x1b[31m", "\u202eright", "sp ace"]
    for name in odd:
        cli("set", name, "1")
    lines = cli("keys").out.splitlines()
    assert len(lines) == len(odd)
    assert set(lines) == {
        '"two\\nlines"',
        '"tab\\there"',
        '"\\"quoted\\""',
        '"bell\\u0007"',
        "back\\slash",
        '"esc\\u001b[31m"',
        '"\\u202eright"',
        "sp ace",
    }
    assert {each["key"] for each in cli("keys", "--json").json_lines} == set(odd)
    assert cli("get", "two\nlines").out == "1\n"


def test_a_piped_value_is_exact_whatever_it_contains(cli: Cli) -> None:
    cli("set", "k", "esc\x1b[31m\u2028end")
    assert cli("get", "k").out == "esc\x1b[31m\u2028end\n"
    assert cli("get", "k", "--json").out == '"esc\\u001b[31m\\u2028end"\n'
