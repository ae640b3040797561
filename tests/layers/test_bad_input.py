"""Bad input: a typed error, a sentence a person can act on, and nothing changed."""

from __future__ import annotations

import re
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Error, IncompatibleStore, InvalidInput, ManualClock, Retention, Space, Store, Unavailable
from holdfast.codec import NESTING_MAX, encode
from holdfast.engine import Batch, Entry, Put
from holdfast.layers.transfer import export_lines, read_lines
from tests.layers.conftest import everything

BAD_KEYS = {
    "empty": "",
    "nul": "a\0b",
    "surrogate": "a\ud800",
    "too long": "x" * 513,
    "too long in bytes": "ä" * 257,
    "a megabyte": "x" * 1_000_000,
    "a number": 5,
    "bytes": b"k",
    "none": None,
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
async def test_a_bad_key_is_refused_everywhere(space: Space, key: Any) -> None:
    await space.records.set("k", 1)
    before = await everything(space)
    records = space.records
    calls = [
        lambda: records.set(key, 1),
        lambda: records.get(key),
        lambda: records.entry(key),
        lambda: records.get_many(["k", key]),
        lambda: records.exists(key),
        lambda: records.delete(key),
        lambda: records.increment(key),
        lambda: records.compare_and_swap(key, 1, expect=1),
        lambda: records.append_to_list(key, 1),
        lambda: records.add_to_set(key, 1),
        lambda: records.remove_from_set(key, 1),
        lambda: records.list(key),
        lambda: records.members(key),
    ]
    for call in calls:
        with pytest.raises(InvalidInput) as caught:
            await call()
        assert len(str(caught.value)) < 200
    assert await everything(space) == before


async def test_a_key_is_told_in_its_own_letters_and_without_what_a_terminal_would_obey(space: Space) -> None:
    await space.records.set("prüfung/日本", 1)
    with pytest.raises(holdfast.Conflict, match="'prüfung/日本' was expected to be absent"):
        await space.commit(holdfast.absent("prüfung/日本"), holdfast.set_("k", 1))
    with pytest.raises(InvalidInput, match=r"key 'ä+\.\.\.' is 514 bytes long"):
        await space.records.set("ä" * 257, 1)
    with pytest.raises(InvalidInput, match=r"'a\\x1b\[31m\\u202e\\x00'"):
        await space.records.set("a\x1b[31m\u202e\0", 1)


@pytest.mark.parametrize("prefix", [None, 0, False, b"", [], 5, "nul\0", "x" * 513], ids=lambda each: repr(each)[:20])
async def test_a_bad_prefix_is_refused_everywhere(space: Space, prefix: Any) -> None:
    await space.records.set("k", 1)
    with pytest.raises(InvalidInput, match="prefix"):
        await space.records.keys(prefix)
    with pytest.raises(InvalidInput, match="prefix"):
        await anext(space.records.scan(prefix))
    with pytest.raises(InvalidInput, match="prefix"):
        await anext(space.watch(prefix, live=False))
    assert await space.records.keys("") == ["k"]


@pytest.mark.every_engine
@pytest.mark.parametrize(
    "key", ["ä" * 256, "x" * 512, "a b", "\n", "{}", "*?[%_", "../..", "😀", "\U0010ffff", "'; --"]
)
async def test_an_odd_key_is_a_key(space: Space, key: str) -> None:
    await space.records.set(key, 1)
    assert await space.records.keys() == [key]
    assert await space.records.keys(key[:1]) == [key]
    assert await space.records.delete(key)


BAD_TTLS = [
    0,
    -1,
    0.0,
    -0.5,
    "0s",
    "-5s",
    "",
    "soon",
    "5 minutes",
    "1h30m",
    float("nan"),
    float("inf"),
    True,
    [],
    timedelta(0),
    10**12,
]


@pytest.mark.parametrize("ttl", BAD_TTLS, ids=repr)
async def test_a_bad_ttl_is_refused(space: Space, ttl: Any) -> None:
    await space.records.set("k", 1, ttl="1h")
    before = await everything(space)
    for call in (space.records.set, space.records.append_to_list, space.records.add_to_set, space.records.increment):
        with pytest.raises(InvalidInput, match="ttl"):
            await call("k", 1, ttl=ttl)  # type: ignore[operator]
    assert await everything(space) == before


@pytest.mark.parametrize(
    "ttl", [1, 0.25, "90s", "250ms", "5m", "1h", "7d", " 2 h ", "1.5h", timedelta(minutes=1)], ids=repr
)
async def test_a_good_ttl_is_accepted(space: Space, ttl: Any) -> None:
    await space.records.set("k", 1, ttl=ttl)
    assert (await space.records.entry("k")).expires_at is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("delta", [1.5, "1", 2**63, None, True], ids=repr)
async def test_a_bad_delta_is_refused(space: Space, delta: Any) -> None:
    before = await everything(space)
    with pytest.raises(InvalidInput, match="64-bit"):
        await space.records.increment("n", delta)
    assert await everything(space) == before


async def test_too_many_operations_are_refused(space: Space) -> None:
    with pytest.raises(InvalidInput, match="at most 128 operations"):
        await space.commit(*(holdfast.set_(f"k{number}", 1) for number in range(129)))
    with pytest.raises(InvalidInput, match="between 1 and 100"):
        await space.records.append_to_list("l", *range(101))
    with pytest.raises(InvalidInput, match="between 1 and 100"):
        await space.records.append_to_list("l")
    with pytest.raises(InvalidInput, match="16,777,216"):
        await space.commit(*(holdfast.set_(f"k{number}", "x" * 9_000_000) for number in range(2)))
    assert await space.records.keys() == []


@pytest.mark.parametrize("name", ["", "a b", "ä", "a/b", "-x", "x" * 129, "a\0", 5, "holdfast"], ids=repr)
def test_a_bad_agent_is_refused(store: Store, name: Any) -> None:
    with pytest.raises(InvalidInput, match="agent"):
        store.space("s", agent=name)


@pytest.mark.parametrize("name", ["", "a b", "_system", "a/b", ".x", "x" * 129, None], ids=repr)
def test_a_bad_space_name_is_refused(store: Store, name: Any) -> None:
    with pytest.raises(InvalidInput, match="space"):
        store.space(name)


def test_a_bad_durability_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInput, match="volatile, async, sync"):
        store.space("s", durability="eventual")  # type: ignore[arg-type]


@pytest.mark.parametrize(("type", "state"), [(None, "failed"), ("a:b", None), ("a", "b:c"), ("", None)])
async def test_a_bad_type_or_state_is_refused(space: Space, type: str | None, state: str | None) -> None:
    with pytest.raises(InvalidInput):
        await space.records.compare_and_swap("k", 1, expect=1, type=type, state=state)
    with pytest.raises(InvalidInput):
        holdfast.set_("k", 1, type=type, state=state)


def test_a_bad_retention_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs a 'default'"):
        Retention(durable={"mine": {"done": "1h"}})
    with pytest.raises(InvalidInput, match="retention of mine/default"):
        Retention(durable={"mine": {"default": "0s"}})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"report": "7d"}, "type 'report' is told by state, as in {'report': {'default': '7d'}}, not '7d'"),
        ({"x": None}, "type 'x' is told by state"),
        ({"x": [1]}, "type 'x' is told by state"),
        ({"x": {5: "7d"}}, "type 'x' is told by state"),
        ({5: {"default": "7d"}}, "a type of a retention is text"),
        ([1], "a retention is a table such as"),
        ("", "a retention is a table such as"),
    ],
    ids=repr,
)
def test_a_retention_that_is_no_table_is_refused_in_words(table: Any, words: str) -> None:
    for name in ("durable", "volatile"):
        with pytest.raises(InvalidInput, match=re.escape(words)):
            Retention(**{name: table})


@pytest.mark.parametrize("wrong", ["yes", "", None, 0, 2**70, [1]], ids=repr)
async def test_a_switch_that_is_neither_true_nor_false_is_refused(store: Store, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="audit_reads must be True or False"):
        store.space("d", agent="m", audit_reads=wrong)
    with pytest.raises(InvalidInput, match="background must be True or False"):
        holdfast.open("memory:", background=wrong)
    assert await store.engine.spaces("d") == []


@pytest.mark.parametrize("wrong", ["x", None, True, 1.5, -1, 2**70], ids=repr)
def test_a_clock_that_stands_at_no_instant_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="whole milliseconds since 1970"):
        ManualClock(wrong)


async def test_a_key_that_slashes_make_too_long_is_told_as_it_was_written(space: Space) -> None:
    key = "orders/" + "a/" * 250
    watched = "/" * 500
    for call in (
        lambda: space.records.append_to_list(key, 1),
        lambda: space.records.add_to_set(key, 1),
        lambda: space.records.append_to_list("orders/" + "/" * 322, 1),  # room for the list, and none for an item
        lambda: anext(space.watch(watched)),
    ):
        with pytest.raises(
            InvalidInput, match=r"^key '(orders/)?[a/]+\.\.\.' is too long: .* takes three bytes"
        ) as caught:
            await call()
        assert "%" not in str(caught.value).replace("'%'", "")
        assert len(str(caught.value)) < 250
    assert await space.records.keys() == []


# --- names and durations ---


@pytest.mark.parametrize(
    "name", ["", "_x", "..", ".x", "-x", "a/b", "x" * 129, None, 5], ids=lambda each: repr(each)[:20]
)
async def test_a_space_is_refused_by_a_rule_that_its_name_breaks(store: Store, name: Any) -> None:
    with pytest.raises(InvalidInput, match=r"1 to 128 letters.*of which the first is a letter or a digit"):
        store.space(name)


@pytest.mark.parametrize("name", ["", "-x", "a.b", "x" * 129, None, 5], ids=lambda each: repr(each)[:20])
async def test_agents_and_instances_are_refused_by_their_own_names(store: Store, name: Any) -> None:
    if name is not None:
        with pytest.raises(InvalidInput, match=r"^an agent's name is 1 to 128 .* the first is no '-'"):
            store.space("s", agent=name)
    with pytest.raises(InvalidInput, match=r"^an instance is 1 to 128 "):
        store.space("s", instance=name)


@pytest.mark.parametrize("ttl", ["-5m", " -1h", "-0.5", "0s", -5, timedelta(minutes=-5)], ids=repr)
async def test_a_duration_that_is_not_positive_is_told_as_that(space: Space, ttl: Any) -> None:
    with pytest.raises(InvalidInput, match="must be more than zero"):
        await space.records.set("k", 1, ttl=ttl)


# --- stores ---


async def refused(url: Any, kind: type[Error]) -> str:
    with pytest.raises(kind) as caught:
        async with holdfast.open(url):
            pass
    return str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "  ", None, 5, "redis+x://host", "mysql://host/db", "memory:x", "sqlite:", "a\0b"], ids=repr
)
async def test_a_wrong_url_is_refused(url: Any) -> None:
    await refused(url, InvalidInput)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        (":memory:", "'memory:'"),
        ("memory", "'memory:'"),
        ("Memory", "'memory:'"),
        ("MEMORY:", "memory:"),
        ("sqlite::memory:", "'memory:'"),
        ("sqlite:///:memory:", "'memory:'"),
        ("file:x.db", "path alone"),
        ("file:///tmp/x.db", "path alone"),
        ("foo:bar", "./foo:…"),
        ("localhost:7420", "holdfast://HOST:PORT"),
        ("Redis://ann:hunter2@host", "redis:"),
        ("sqlite:x.db?mode=ro", "'?mode=…'"),
        ("resident:x.db?cache=shared&mode=ro", "'?cache=…'"),
        ("x" * 5000, "5,000 bytes long"),
        ("\ud800.db", "not valid Unicode"),
        ("a/" * 3000 + "x.db", "bytes long"),
        ("x" * 250, "bytes long"),  # the file alone would fit, and what is kept beside it would not
    ],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)
async def test_a_url_that_is_none_makes_no_file_and_says_what_was_probably_meant(
    url: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = await refused(url, InvalidInput)
    assert meant in message
    assert "hunter2" not in message
    assert len(message) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["foo:bar", "memory", ":memory:", "what?mode=ro"])
async def test_a_file_may_have_any_name_where_it_is_named_as_a_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"./{name}", Path(name), tmp_path / name, f"{tmp_path}/{name}"):
        async with holdfast.open(url) as store:
            await store.space("s").records.increment("n")
    async with holdfast.open(Path(name)) as store:
        assert await store.space("s").records.get("n") == 4
    async with holdfast.open(Path(name)) as store:
        await store.backup(tmp_path / "copy?mode=ro")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == "" and "-" not in path.name) == sorted(
        [name, "copy?mode=ro"]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clock", 5),
        ("clock", 0),
        ("retention", {}),
        ("retention", {"durable": {}}),
        ("redact", {}),
        ("redact", []),
        ("redact", ["password"]),
        ("blobs", 5),
        ("blobs", ""),
        ("blobs", "a\0b"),
        ("blobs", b"folder"),
        ("blobs", "\ud800"),
        ("blobs", "x" * 5000),
    ],
    ids=lambda each: repr(each)[:20],
)
def test_a_wrong_option_of_a_store_is_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"clock|retention|redact|blobs"):
        holdfast.open("memory:", **{name: value})


@pytest.mark.parametrize(
    "target", [None, 5, "", b"x.db", "a\0b", "\ud800.db", "x" * 5000], ids=lambda each: repr(each)[:20]
)
async def test_a_wrong_target_of_a_backup_is_refused(store: Store, target: Any) -> None:
    with pytest.raises(InvalidInput, match="backup"):
        await store.backup(target)


async def test_an_unknown_scheme_names_the_ways_that_exist() -> None:
    message = await refused("mysql://host/db", InvalidInput)
    assert "memory:" in message
    assert "path" in message


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "does not exist" in await refused(str(tmp_path / "no" / "team.db"), InvalidInput)
    assert "folder" in await refused(str(tmp_path), InvalidInput)


async def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    text, foreign = tmp_path / "notes.txt", tmp_path / "foreign.db"
    text.write_text("just some text, long enough to be no empty database " * 50)
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    before = text.read_bytes(), foreign.read_bytes()
    assert "not a SQLite file" in await refused(str(text), IncompatibleStore)
    assert "another program" in await refused(str(foreign), IncompatibleStore)
    assert (text.read_bytes(), foreign.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [foreign, text]


async def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with holdfast.open(str(path)) as store:
        await store.space("s").records.set("k", 1)
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    assert "upgrade holdfast" in await refused(str(path), IncompatibleStore)


async def test_a_store_that_is_not_open_or_closed_says_so(tmp_path: Path) -> None:
    store = holdfast.open(str(tmp_path / "team.db"))
    with pytest.raises(Unavailable, match="not open"):
        store.space("s")
    async with store:
        space = store.space("s")
        with pytest.raises(InvalidInput, match="open already"):
            await store
    for call in (space.records.get("k"), space.records.set("k", 1), space.records.keys()):
        with pytest.raises(Unavailable, match="closed"):
            await call


async def test_what_is_no_list_of_keys_no_page_no_type_and_no_number_of_attempts_is_refused(space: Space) -> None:
    async def nothing(tx: object) -> None:
        pass

    async def all_of(page: Any) -> list[Any]:
        return [each async for each in space.records.scan(page=page)]

    for keys in (None, "abc", 5):
        with pytest.raises(InvalidInput, match="a list of keys"):
            await space.records.get_many(keys)  # type: ignore[arg-type]
    for page in ("x", 0, None, True):
        with pytest.raises(InvalidInput, match="a page has"):
            await all_of(page)
    for attempts in ("x", 0, 1.5):
        with pytest.raises(InvalidInput, match="attempts must be"):
            await space.transact(nothing, attempts=attempts)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="must not be empty"):
        await space.records.set("k", 1, type="")
    assert await space.records.keys() == []


def nested(levels: int) -> Any:
    value: Any = "[[["  # brackets in a text are no levels
    for level in range(levels):
        value = {"a": value} if level % 2 else [value, "]", 1]
    return value


async def test_a_value_nested_deeper_than_the_limit_is_refused_by_everything_that_writes_one(space: Space) -> None:
    records = space.records
    await records.set("k", nested(NESTING_MAX))
    assert await records.get("k") == nested(NESTING_MAX)
    await records.append_to_list("l", nested(NESTING_MAX), request_id="r")  # what is remembered has it inside of more
    before, deep = await everything(space), nested(NESTING_MAX + 1)
    calls = [
        lambda: records.set("k", deep),
        lambda: records.compare_and_swap("k", deep, expect=nested(NESTING_MAX)),
        lambda: records.append_to_list("l", deep),
        lambda: records.add_to_set("s", deep),
        lambda: space.queue("q").put(deep),
        lambda: space.document("d").contribute(deep),
    ]
    for call in calls:
        with pytest.raises(
            InvalidInput, match="nested at most 100 levels deep, and this one is deeper; make it flatter"
        ):
            await call()
    assert await everything(space) == before


async def test_a_value_that_an_older_version_stored_deeper_is_read_exported_and_imported() -> None:
    value = b"[" * 500 + b"]" * 500
    async with holdfast.open("memory:", background=False) as store:
        await store.engine.commit("contoso", Batch("a", (Put("records/old", value),)))
        space = store.space("contoso", agent="a")
        assert encode(await space.records.get("old"), known=True) == value
        assert [record.key async for record in space.records.scan()] == await space.records.keys() == ["old"]
        lines = [line async for line in export_lines(store.engine, "contoso")]
        [imported] = [item for item in read_lines(lines) if isinstance(item, Entry) and item.key == "records/old"]
        assert imported.value == value
