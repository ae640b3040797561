"""Bad input: a typed error, a sentence a person can act on, and nothing changed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from holdfast.engines.registry import shown_url
from tests.cli.conftest import Cli, files


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "must not be empty"),
        ("x" * 1_000_000, "1,000,000 bytes long; the limit is 512"),
        ("nul\0", "NUL"),
        ("lone\ud800", "lone surrogate"),
    ],
)
def test_keys_that_cannot_be_are_refused(cli: Cli, folder: Path, key: str, why: str) -> None:
    cli("set", "k", "1")
    before = cli("audit", "--json").out
    for words in (["set", key, "1"], ["get", key], ["increment", key], ["delete", "k", key], ["append", key, "1"]):
        refused = cli(*words, "--json", code=2)
        assert refused.error["error"] == "invalid_request"
        assert why in refused.error["message"]
        assert refused.err.count("\n") == 1
    assert cli("audit", "--json").out == before


def test_values_that_cannot_be_are_refused(cli: Cli) -> None:
    cli("set", "k", "1")
    too_large = cli("set", "k", "-", stdin="x" * (10 * 1024 * 1024 - 1), code=2)
    assert "the limit is 10,485,760" in too_large.err
    assert "40" in cli("set", "k", "-", stdin=b"x" * (41 * 1024 * 1024), code=2).err
    assert "lone surrogate" in cli("set", "k", "lone\ud800", code=2).err
    assert "nested too deeply" in cli("set", "k", "-", stdin="[" * 100_000, code=2).err
    assert "nested at most 100 levels" in cli("set", "k", "-", stdin="[" * 101 + "]" * 101, code=2).err
    cli("set", "k", "-", stdin="x" * (10 * 1024 * 1024 - 2))
    assert len(cli("get", "k").out) == 10 * 1024 * 1024 - 1


def test_names_that_cannot_be_are_refused(cli: Cli) -> None:
    cli("set", "k", "1")
    for words in (["--space", "a/b"], ["--space", ""], ["--agent", "a b"], ["--agent", "holdfast"], ["--agent", ""]):
        assert cli(*words, "get", "k", "--json", code=2).error["error"] == "invalid_request"


def test_an_empty_agent_is_told_as_one_by_every_command(cli: Cli) -> None:
    cli("set", "k", "1")
    for words in (["set", "k", "2"], ["get", "k"], ["increment", "n"], ["audit"], ["delete", "k"]):
        assert cli("--agent", "", *words, code=2).err == "holdfast: --agent is empty; name an agent, or leave it out\n"
    assert cli("get", "k").out == "1\n"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/store", "no engine for https://"),
        ("memory:x", "a memory store has no path"),
        ("nowhere/team.db", "folder"),
        (".", "is a folder"),
        ("sqlite:", "path"),
        (":memory:", "'memory:'"),
        ("file:x.db", "path alone"),
        ("foo:bar", "./foo:…"),
        ("sqlite:x.db?mode=ro", "no options"),
        ("x" * 5000, "bytes long"),
        ("~nobody_of_this_name/x.db", "not known"),
    ],
)
def test_urls_that_cannot_be_are_refused(cli: Cli, folder: Path, url: str, why: str) -> None:
    refused = cli("--store", url, "set", "k", "1", "--json", code=2)
    assert why in refused.error["message"]
    assert files(folder) == {}


def test_a_credential_in_a_url_is_not_repeated(cli: Cli) -> None:
    for words in (["get", "k"], ["set", "k", "1"], ["copy", "https://ann:hunter2@x/y", "b.db"]):
        assert "hunter2" not in cli("--store", "https://ann:hunter2@example.org/s", *words, code=2).err


def test_a_foreign_file_is_left_as_it_is(cli: Cli, folder: Path) -> None:
    connection = sqlite3.connect("foreign.db")
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    (folder / "text.db").write_text("a diary, not a database\n" * 100)
    before = files(folder)
    for name in ("foreign.db", "text.db"):
        for words in (["set", "k", "1"], ["get", "k"], ["doctor"], ["spaces"], ["import", "-"]):
            refused = cli("--store", name, *words, "--json", stdin="", code=None)
            assert refused.code == (9 if words != ["import", "-"] else 2)
        assert name in cli("--store", name, "get", "k", code=9).err
    assert files(folder) == before


def test_a_newer_store_is_left_as_it_is(cli: Cli, folder: Path) -> None:
    cli("--store", "new.db", "set", "k", "1")
    connection = apsw.Connection("new.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (folder / "new.db").read_bytes()
    refused = cli("--store", "new.db", "set", "k", "2", "--json", code=9)
    assert refused.error["error"] == "incompatible_store"
    assert "upgrade holdfast" in refused.error["message"]
    assert (folder / "new.db").read_bytes() == before


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder with a store in it, outside of the folders that only this user may enter."""
    place = Path(tempfile.mkdtemp(prefix="holdfast-test-"))
    yield place
    place.chmod(0o755)
    shutil.rmtree(place)


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Permissions do not bind root; while this lasts, we are nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_unavailable_and_unchanged(
    cli: Cli, read_only_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("--store", str(read_only_folder / "team.db"), "set", "k", "1")
    read_only_folder.chmod(0o555)
    before = files(read_only_folder)
    monkeypatch.chdir(read_only_folder)
    with an_ordinary_user():
        for words in (["--store", "team.db"], ["--store", "new.db"], []):
            refused = cli(*words, "set", "k", "2", "--json", code=14)
            assert refused.error["error"] == "unavailable"
            assert str(read_only_folder) in refused.error["message"]
        assert "permissions" in cli("--store", "new.db", "set", "k", "2", code=14).err
        assert "cannot be made" in cli("set", "k", "2", code=14).err
    assert files(read_only_folder) == before


def test_a_wrong_call_says_what_is_wrong_and_where_to_look(cli: Cli) -> None:
    assert cli("get", code=2).err == "holdfast: Missing argument 'KEY'. See: holdfast get --help\n"
    assert "No such command 'frobnicate'" in cli("frobnicate", code=2).err
    assert "No such option" in cli("get", "k", "--frob", code=2).err
    assert cli("get", "k", "--frob", "--json", code=2).error["error"] == "invalid_request"
    assert cli("keys", "--", "--json", code=4).err.startswith("holdfast: ")


def test_a_failing_library_is_a_sentence_and_not_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.layers.records import Records

    async def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("no\nluck")

    cli("set", "k", "1")
    monkeypatch.setattr(Records, "get", fail)
    refused = cli("get", "k", code=1)
    assert refused.err == "holdfast: unexpected ZeroDivisionError: no luck (HOLDFAST_DEBUG=1 shows where)\n"
    assert cli("get", "k", "--json", code=1).error["error"] == "error"
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli("get", "k")


@pytest.mark.parametrize(
    "url",
    [
        "holdfast://me:sesame@127.0.0.1:1",
        "holdfast://sesame@127.0.0.1:1",
        "holdfast://127.0.0.1:1?password=sesame",
        "holdfast://me:sesame@127.0.0.1:99999",
        "holdfasts://me:sesame@[::1",
        "redis://me:sesame@127.0.0.1:x",
        "postgresql://me:sesame@127.0.0.1/y?nothing=x",
        "mysql://me:sesame@127.0.0.1/y",
    ],
)
@pytest.mark.parametrize("token", [(), ("--token", "hf_x")])
def test_a_url_that_is_refused_is_not_repeated_with_its_password(cli: Cli, url: str, token: tuple[str, ...]) -> None:
    refused = cli("--store", url, *token, "get", "k", code=2)
    assert refused.err
    assert "sesame" not in refused.err + refused.out


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:s@me@h:5/db?password=s&schema=x", "postgresql://h:5/db"),
        ("redis+sentinel://:sesame@a:1,b:2/main/0", "redis+sentinel://a:1,b:2/main/0"),
        ("redis:///var/run/redis.sock", "redis:///var/run/redis.sock"),
        ("team@home.db", "team@home.db"),
        ("resident:/srv/a@b.db", "resident:/srv/a@b.db"),
    ],
)
def test_a_store_is_told_without_its_password(url: str, told: str) -> None:
    assert shown_url(url) == told
