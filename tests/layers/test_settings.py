"""What every process on a store must agree on."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import InvalidInput, ManualClock, Redaction, Retention
from holdfast.clock import SystemClock
from holdfast.layers.tokens import Tokens
from holdfast.layers.transfer import copy_store


async def values(space: holdfast.Space) -> list[object]:
    return [record.value async for record in space.audit.records()]


async def test_what_one_process_declares_secret_is_sealed_redacted_by_another(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path, redact=Redaction(keys=["vault/*"], fields=["iban"]), background=False) as store:
        await store.space("s").records.set("vault/x", "hidden")
        await store.space("s").records.set("customer", {"iban": "DE1", "name": "n"})
    async with holdfast.open(path) as store:  # told nothing, and seals
        await store.tidy()
        assert await values(store.space("s")) == ["[redacted]", {"iban": "[redacted]", "name": "n"}]
        page = await store.engine.scan("s", "audit/")
        assert not any(b"hidden" in entry.value or b"DE1" in entry.value for entry in page.entries)


async def test_a_process_learns_of_new_secrets_before_it_seals(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path, background=False) as sealing:
        async with holdfast.open(path, redact=Redaction(keys=["vault/*"]), background=False) as writing:
            await writing.space("s").records.set("vault/x", "hidden")
        await sealing.tidy()
        assert await values(sealing.space("s")) == ["[redacted]"]


async def test_names_that_become_secret_later_do_not_look_like_tampering(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path) as store:
        await store.space("s").records.set("k", {"iban": "DE1"})
        await store.tidy()
    async with holdfast.open(path, redact=Redaction(fields=["iban"])) as store:
        assert (await store.space("s").audit.verify()).sound


async def test_the_lifetime_of_audit_and_feed_is_the_stores(tmp_path: Path, clock: ManualClock) -> None:
    path = str(tmp_path / "team.db")
    told = Retention(durable={"audit_logs": {"default": "365d"}, "feed": {"default": "2d"}})
    async with holdfast.open(path, retention=told, clock=clock):
        pass
    other = Retention()
    async with holdfast.open(path, retention=other, clock=clock):
        assert other.ttl_ms("audit_logs") == 365 * 86_400_000
        assert other.ttl_ms("feed") == 2 * 86_400_000
    async with holdfast.open(path, retention=Retention(durable={"feed": {"default": "3d"}}), clock=clock):
        pass
    async with holdfast.open(path, retention=other, clock=clock):
        assert other.ttl_ms("feed") == 3 * 86_400_000


async def test_a_short_lived_process_seals_as_it_closes(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path) as store:
        await store.space("s").records.set("k", 1)
    async with holdfast.open(path, background=False) as store:
        verification = await store.space("s").audit.verify()
        assert (verification.sound, verification.records, verification.unsealed) == (True, 1, 0)
        await store.space("s").records.set("k", 2)
        assert (await store.space("s").audit.verify()).unsealed == 1


async def test_a_sealed_copy_tells_of_nothing_lost(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "a.db")) as one, holdfast.open(str(tmp_path / "b.db")) as two:
        await one.space("s").records.set("k", 1)
        await one.space("s").audit.seal()
        await copy_store(one.engine, two.engine)
        copied = two.space("s")
        await copied.records.set("k", 2)
        await copied.audit.seal()
        assert [record.outcome async for record in copied.audit.records()] == ["committed", "committed"]
        assert (await copied.audit.verify()).sound


async def test_a_lifetime_for_one_state_leaves_that_of_the_others_as_it_was_told(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    for durable in ({"audit_logs": {"default": "2d"}}, {"audit_logs": {"compliance": "500d"}}, {}):
        retention = Retention(durable=durable)
        async with holdfast.open(path, retention=retention, background=False):
            assert retention.ttl_ms("audit_logs") == 2 * 86_400_000


async def test_strict_names_of_agents_belong_to_the_store(tmp_path: Path) -> None:
    path = str(tmp_path / "team.db")
    async with holdfast.open(path, background=False) as store:
        store.space("contoso", agent="Worker-7")
    async with holdfast.open(path, background=False, agent_names="strict") as store:
        store.space("contoso", agent="market_data")
        store.space("contoso")
    async with holdfast.open(path, background=False) as store:
        for wrong in ("Worker", "worker-7", "worker7"):
            with pytest.raises(InvalidInput, match="agent_names: strict"):
                store.space("contoso", agent=wrong)
        tokens = Tokens(store.engine, SystemClock())
        with pytest.raises(InvalidInput, match="agent_names: strict"):
            await tokens.create("worker-7", "contoso", "agent")
        assert await tokens.list() == []
        await tokens.create("worker", "contoso", "agent")
    async with holdfast.open(path, background=False, agent_names="plain") as store:
        store.space("contoso", agent="Worker-7")
    with pytest.raises(InvalidInput, match="plain, strict"):
        holdfast.open(path, agent_names="Strict")  # type: ignore[arg-type]
