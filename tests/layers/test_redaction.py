"""Redaction: which names are secret, however they are written, and which only look like it."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import InvalidInput, ManualClock, Redaction, Space
from holdfast.codec import decode, encode

TOKEN = f"hf_{'a' * 16}_{'b' * 52}"
SECRET = (
    "password", "passWord", "passPhrase", "passwords", "api_key", "api_keys", "apiKeys", "APIKey", "accessToken",
    "access_tokens", "accesstoken", "authtoken", "secretkey", "privatekey", "dbpassword", "client-secret",
    "Authorization", "x-api-key", "user_pwd", "sessionKey",
    "passcode", "userPasscode", "ssh_key", "sshKeys", "auth", "Auth", "bearer", "JWT", "otp",
)  # fmt: skip
OPEN = (
    "tokens", "max_tokens", "total_tokens", "state", "signals", "session", "connections", "author", "access", "compass",
    "bypass", "passenger", "pass", "signature", "api", "cookbook", "privacy", "name", "keys", "secretary",
    "auth_method", "authors", "bearer_of_news", "forbearer", "jwt_expiry", "footprint", "otp_length", "ssh_host",
)  # fmt: skip


def secret(names: tuple[str, ...], redaction: Redaction) -> list[str]:
    """Those of the names whose values are hidden."""
    value = redaction.value("records/x", dict.fromkeys(names, 1))
    return [name for name in names if value[name] == "[redacted]"]


def test_a_name_is_secret_with_and_without_capitals_separators_and_a_plural() -> None:
    assert secret(SECRET, Redaction()) == [*SECRET]


def test_a_name_that_only_begins_or_sounds_like_a_secret_is_none() -> None:
    assert secret(OPEN, Redaction()) == []


@pytest.mark.parametrize("wrong", ["iban", "", b"iban", 5, None, [5], ["iban", None], [["iban"]]])
@pytest.mark.parametrize("name", ["fields", "keys"])
def test_names_and_patterns_that_are_no_list_of_texts_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be a list of texts"):
        Redaction(**{name: wrong})
    redaction = Redaction(fields=["iban"])
    with pytest.raises(InvalidInput):
        redaction.add(**{"fields": ["x"], "keys": [], name: wrong})
    assert (redaction.fields, redaction.keys) == ({"iban"}, set())


@pytest.mark.parametrize("field", ["пароль", "Пароль"])
def test_a_field_of_ones_own_may_be_in_any_script(field: str) -> None:
    redaction = Redaction(fields=[field])
    names = ("пароль", f"мой_{field}2", "имя", "пароход", "日本")
    assert secret(names, redaction) == [*names[:2]]


def test_a_field_of_ones_own_that_has_no_words_is_secret_and_makes_nothing_else_so() -> None:
    redaction = Redaction(fields=["№"])
    assert secret(("№", "name", "имя", "", "-", "日本"), redaction) == ["№"]
    assert secret(SECRET, redaction) == [*SECRET]


@pytest.mark.parametrize("filler", ["x", "x_", "é"])
def test_a_name_of_any_length_is_read_to_its_end(filler: str) -> None:
    names = (filler * 300 + "_password", filler * 300 + "_name")
    assert secret(names, Redaction()) == [names[0]]


def test_a_token_is_hidden_as_the_name_of_a_field_too() -> None:
    value = Redaction().value("records/x", {TOKEN: 1, "of": {TOKEN: [TOKEN]}})
    shown = f"hf_{'a' * 16}_…"
    assert value == {shown: 1, "of": {shown: [shown]}}


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "data",
    [
        encode({"name": "Ada", "of": [1, None, {"state": "on"}]}),
        encode(dict.fromkeys((*SECRET, *OPEN), "x")),
        encode(["plain", {"of": f"by {TOKEN}"}]),
        encode({"of": {TOKEN: 1}}),
        encode({"МОЙ_ПАРОЛЬ": 1, "имя": 2}),
        b'{"p\\u0061ssword": 1}',
        encode('a text that says "password"'),
        nested(60),
        nested(70),
    ],
    ids=range(9),
)
def test_an_encoded_value_is_shown_as_the_value_itself_is(data: bytes) -> None:
    redaction = Redaction(fields=["пароль"], keys=["vault/*"])
    assert redaction.read("user", data) == redaction.value("user", decode(data))
    assert redaction.read("vault/x", data) == "[redacted]"
    unlocked = Redaction(fields=["пароль"])
    plain = unlocked.is_plain(f"user\n{data.decode()}")
    assert unlocked.disclosed(data, plain) == unlocked.value("user", decode(data))


async def test_many_commits_looked_at_together_hide_what_each_by_itself_hides(url: str, clock: ManualClock) -> None:
    async with holdfast.open(url, clock=clock, background=False, redact=Redaction(keys=["vault/*"])) as store:
        space = store.space("contoso", agent="market")
        kept = {"a": {"name": "Ada"}, "api_key": "p-1", "b": {"pwd": "p-2"}, "vault/x": "p-3", "c": decode(nested(70))}
        for key, value in kept.items():
            await space.records.set(key, value)
        await space.audit.seal()
        shown = {record.key: record.value async for record in space.audit.records()}
        hidden = {"records/api_key", "records/vault/x"}
        assert {key for key, value in shown.items() if value == "[redacted]"} == hidden
        assert (shown["records/a"], shown["records/b"]) == ({"name": "Ada"}, {"pwd": "[redacted]"})
        assert "[redacted]" in str(shown["records/c"])


async def test_commits_that_hold_nothing_suspicious_are_shown_but_for_what_is_too_deep(space: Space) -> None:
    await space.records.set("a", {"name": "Ada"})
    await space.records.set("b", decode(nested(70)))
    await space.audit.seal()
    shown = {record.key: record.value async for record in space.audit.records()}
    assert shown["records/a"] == {"name": "Ada"}
    assert "[redacted]" in str(shown["records/b"])


async def test_the_audit_shows_neither_secrets_nor_tokens_however_they_are_named(space: Space) -> None:
    kept = {"passPhrase": "p-1", "api_keys": ["p-2"], "dbpassword": {"of": "p-3"}, "total_tokens": 5, TOKEN: 6}
    await space.records.set("user", kept)
    await space.audit.seal()
    [record] = [record async for record in space.audit.records()]
    assert record.value == {
        "passPhrase": "[redacted]",
        "api_keys": "[redacted]",
        "dbpassword": "[redacted]",
        "total_tokens": 5,
        f"hf_{'a' * 16}_…": 6,
    }
    page = await space._scope.engine.scan(space.name, "audit/")
    assert not any(word in entry.value for entry in page.entries for word in (b"p-1", b"p-2", b"p-3", b"bbbb"))
    assert await space.records.get("user") == kept


async def test_the_audit_shows_no_secrets_of_lists_and_sets(url: str, clock: ManualClock) -> None:
    async with holdfast.open(url, clock=clock, background=False) as store:
        space = store.space("contoso", agent="market", audit_reads=True)
        records = space.records
        await records.append_to_list("vault/list", "s-1")
        await records.append_to_list("service/pwd", "s-2")
        await records.add_to_set("vault/set", "s-3", "s-4" * 100)
        await records.add_to_set("api_keys", "s-5")
        await records.add_to_set("users", {"name": "x", "password": "s-6"}, TOKEN, "plain")
        await records.remove_from_set("api_keys", "s-5")
        store._redaction.add((), ["vault/*"])
        await space.audit.seal()
        told = [record async for record in space.audit.records()]
        assert not [record for record in told if "s-" in repr(record) or "bbbb" in repr(record)]
        added = [record.key.split("/", 3)[3] for record in told if record.key.startswith("sets/users/")]
        assert '{"name":"x","password":"[redacted]"}' in added
        assert '"plain"' in added
        store._redaction.add((), ["users"])
        assert (await space.audit.verify()).problems == []
