"""token: made once, listed without secrets, revoked; and how a command comes by the token it shows to a keeper."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from holdfast import InvalidInput
from holdfast.cli.session import Session
from holdfast.clock import SystemClock
from holdfast.identity import Identity
from holdfast.layers.tokens import Tokens
from holdfast.testing.servers.keeper import KeeperServer
from tests.cli.conftest import Cli, files


def known(path: Path, text: str) -> Identity:
    async def ask() -> Identity:
        async with holdfast.open(str(path), background=False) as store:
            return await Tokens(store.engine, SystemClock()).authenticate(text)

    return asyncio.run(ask())


def test_a_token_is_printed_once_and_opens_what_it_is_for(cli: Cli, folder: Path) -> None:
    made = cli("token", "create", "worker-7", "--space", "contoso", "--role", "agent", "--ttl", "30d")
    text = made.out.strip()
    identity = known(folder / ".holdfast" / "store.db", text)
    assert (identity.agent, identity.role, identity.space) == ("worker-7", "agent", "contoso")
    assert "worker-7 is agent in contoso until 20" in made.err
    assert text not in made.err
    for later in (cli("token", "list"), cli("token", "list", "--json"), cli("token"), cli("audit", "--system")):
        assert identity.token_id in later.out
        assert text.split("_")[2] not in later.out + later.err


def test_a_script_gets_json(cli: Cli) -> None:
    made = cli("token", "create", "w", "--space", "contoso", "--agent", "boss", "--ttl", "1h", "--json").json
    assert made["token"].startswith(f"hf_{made['id']}_")
    assert made["expires_at"] > made["created_at"]
    [listed] = cli("token", "list", "--json").json
    assert listed == {name: value for name, value in made.items() if name != "token"}
    assert (listed["name"], listed["space"], listed["role"], listed["created_by"]) == ("w", "contoso", "agent", "boss")
    assert cli("token", "revoke", made["id"], "--json").json == [listed]
    assert cli("token", "list", "--json").json == []


def test_the_list_may_be_of_one_space(cli: Cli) -> None:
    cli("token", "create", "a", "--space", "contoso")
    cli("token", "create", "b", "--space", "fabrikam", "--role", "orchestrator")
    cli("token", "create", "root", "--role", "admin")
    rows = [line.split("\t")[1:4] for line in cli("token", "list").out.splitlines()]
    assert rows == [["*", "root", "admin"], ["contoso", "a", "agent"], ["fabrikam", "b", "orchestrator"]]
    assert [told["name"] for told in cli("token", "list", "--space", "contoso", "--json").json] == ["a"]


def test_revoking_by_name_needs_the_space_when_two_have_it(cli: Cli) -> None:
    cli("token", "create", "a", "--space", "contoso")
    cli("token", "create", "a", "--space", "fabrikam")
    assert "contoso, fabrikam" in cli("token", "revoke", "a", code=2).err
    cli("token", "revoke", "a", "--space", "contoso")
    assert [told["space"] for told in cli("token", "list", "--json").json] == ["fabrikam"]
    cli("token", "revoke", "a", "--space", "contoso", code=4)


def test_a_wrong_call_makes_no_token_and_no_store(cli: Cli, folder: Path) -> None:
    assert "name it, with space= or --space" in cli("token", "create", "w", code=2).err
    cli("token", "create", "not ok", "--space", "s", code=2)
    cli("token", "create", "w", "--space", "no/slash", code=2)
    cli("token", "create", "w", "--space", "s", "--role", "boss", code=2)
    cli("token", "create", "w", "--space", "s", "--role", "admin", code=2)
    cli("token", "create", "w", "--space", "s", "--ttl", "0", code=2)
    cli("token", "create", "w", "--space", "s", "--agent", "not ok", code=2)
    cli("token", "list", code=4)
    cli("token", "revoke", "w", code=4)
    assert files(folder) == {}


def test_the_space_may_come_from_the_environment_but_not_for_an_administrator(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SPACE", "contoso")
    cli("token", "create", "w")
    cli("token", "create", "root", "--role", "admin")
    assert [told["space"] for told in cli("token", "list", "--json").json] == ["*", "contoso"]


# --- the token that a command shows ---


def test_what_is_for_administrators_says_so_to_everybody_else(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeeperServer.temporary() as keeper:
        monkeypatch.setenv("HOLDFAST_STORE", keeper.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
        agent = cli("token", "create", "market", "--space", "contoso").out.strip()
        cli("doctor")
        monkeypatch.setenv("HOLDFAST_TOKEN", agent)
        cli("set", "a", "1")
        for words in (
            ["export"],
            ["tidy"],
            ["doctor"],
            ["copy", keeper.url, "copy.db"],
            ["token"],
            ["token", "create", "x", "--space", "contoso"],
            ["token", "revoke", "market"],
        ):
            refused = cli(*words, code=11)
            assert refused.err == (
                f"holdfast: {words[0]} is for administrators; this token is that of 'market', agent in 'contoso'\n"
            )
        assert cli("get", "a").out == "1\n"
        monkeypatch.delenv("HOLDFAST_TOKEN")
        assert "set HOLDFAST_TOKEN, or give token= or --token" in cli("get", "a", code=2).err
    assert files(folder) == {}


def test_only_a_keeper_is_shown_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "from-environment")
    assert Session().token_for("holdfast://host") == "from-environment"
    assert Session(given_token="given").token_for("holdfasts://host") == "given"
    assert Session(given_token="given").token_for("redis://host") is None
    assert "s3cret" not in repr(Session(given_token="s3cret"))


def test_a_token_in_the_environment_does_not_disturb_other_stores(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_x")
    cli("set", "k", "1")
    assert cli("get", "k").out == "1\n"


def test_a_token_given_for_a_store_that_takes_none_is_refused(cli: Cli, folder: Path) -> None:
    assert "--token is for a keeper" in cli("set", "k", "1", "--token", "hf_x", code=2).err
    assert "hf_x" not in cli("--token", "hf_x", "set", "k", "1", code=2).err
    assert "--token is for a keeper" in cli("set", "k", "1", "--token", "", code=2).err
    assert not list(folder.rglob("*.db"))


async def test_open_takes_a_token_for_keepers_alone(tmp_path: Path) -> None:
    for url in ("memory:", str(tmp_path / "team.db")):
        with pytest.raises(InvalidInput, match="takes no token") as caught:
            await holdfast.open(url, token="hf_secret")
        assert "hf_secret" not in str(caught.value)
        with pytest.raises(InvalidInput, match="takes no token"):
            await asyncio.to_thread(holdfast.blocking.open, url, token="hf_secret")
    assert not (tmp_path / "team.db").exists()
