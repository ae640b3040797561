"""Denials in the audit: told, bounded, never in the way."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.codec import decode
from holdfast.engine import Batch, Delete, Engine, Put, Receipt
from holdfast.errors import AccessDenied, QuotaExceeded, RateLimitExceeded, Unavailable
from holdfast.identity import Identity
from holdfast.layers.audit import Audit
from holdfast.layers.redaction import Redaction
from holdfast.layers.retention import Retention
from holdfast.layers.scope import Scope
from holdfast.middleware.audited_reads import NOTES
from holdfast.middleware.denials import WAITING_MAX, Denial, DenialNotes
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules
from holdfast.middleware.wrapper import Wrapper
from tests.middleware.keeper import SPACE, Keeper, batch

READING = Rules((AccessRule("*", ("Get",)),), (), ())
MALLORY = Identity("mallory", "agent", SPACE)


def keeper_with(notes_of: Engine | None = None) -> tuple[Keeper, DenialNotes]:
    keeper = Keeper(READING)
    notes = DenialNotes(notes_of or keeper.engine, keeper.clock)
    keeper.policy = Policy(keeper.engine, keeper.clock, READING, denied=notes)
    return keeper, notes


async def notes_in(keeper: Keeper, space: str = SPACE) -> list[dict[str, str]]:
    return [decode(entry.value) for entry in (await keeper.entries(NOTES, space)).values()]


async def be_denied(keeper: Keeper, times: int = 1, agent: str = "mallory") -> None:
    for i in range(times):
        with pytest.raises(AccessDenied):
            await keeper.engine_of(agent).commit(SPACE, batch(agent, Delete(f"records/{i}")))


async def settle(notes: DenialNotes) -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_denial_gets_into_the_audit_with_who_what_and_why() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    await be_denied(keeper)
    await settle(notes)
    [note] = await notes_in(keeper)
    assert (note["actor"], note["operation"], note["key"], note["outcome"]) == (
        "mallory",
        "Delete",
        "records/0",
        "denied",
    )
    assert note["reason"].startswith("access_denied: ")
    audit = Audit(Scope(keeper.engine, SPACE, "holdfast", "1", keeper.clock, Retention(), Redaction()))
    await audit.seal()
    assert [(record.actor, record.outcome) async for record in audit.records()] == [("mallory", "denied")]
    await notes.close()


async def test_a_denial_names_the_request_that_was_denied() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    mallory = keeper.engine_of("mallory")
    for space, denied in (
        (SPACE, batch("mallory", Delete("records/k"), request_id="verb")),
        (SPACE, batch("alice", Put("records/k", b"1"), request_id="actor")),
        ("fabrikam", batch("mallory", Put("records/k", b"1"), request_id="space")),
        (SPACE, batch("mallory", Delete("records/k"))),
    ):
        with pytest.raises(AccessDenied):
            await mallory.commit(space, denied)
    keeper.policy.reload(Rules())
    await keeper.engine.commit(SPACE, batch("alice", Put("locks/lock/l/1", b"{}", 60_000)))
    with pytest.raises(AccessDenied, match="alice"):
        await mallory.commit(SPACE, batch("mallory", Delete("locks/lock/l/1"), request_id="owner"))
    await notes.close()
    audit = Audit(Scope(keeper.engine, SPACE, "holdfast", "1", keeper.clock, Retention(), Redaction()))
    await audit.seal()
    told = [record.request_id async for record in audit.records() if record.outcome == "denied"]
    assert told == ["verb", "actor", "space", None, "owner"]


async def test_a_rate_or_quota_that_refuses_names_the_request_too() -> None:
    keeper = Keeper(Rules(None, (RateLimit("*", 1, 2),), (Quota("*", 0),)))
    engine = keeper.engine_of("a")
    for _ in range(2):
        with pytest.raises((QuotaExceeded, RateLimitExceeded)):
            await engine.commit(SPACE, batch("a", Put("records/k", b"1"), request_id="r"))
    told = [(denial.code, denial.request_id) for denial in keeper.denials]
    assert told == [("quota_exceeded", "r"), ("rate_limit_exceeded", "r")]


async def test_of_a_flood_of_denials_a_few_are_told_and_the_rest_is_counted() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    await be_denied(keeper, 100)
    await be_denied(keeper, 2, "eve")
    await settle(notes)
    assert [note["actor"] for note in await notes_in(keeper)] == ["mallory"] * 5 + ["eve"] * 2
    keeper.clock.advance("1s")
    await settle(notes)
    told = await notes_in(keeper)
    assert told[-1]["reason"].startswith("95 more")
    assert len(told) == 8
    await be_denied(keeper)
    await settle(notes)
    assert len(await notes_in(keeper)) == 9
    await notes.close()
    assert len(await notes_in(keeper)) == 9


async def test_what_was_counted_is_told_when_the_keeper_closes() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    await be_denied(keeper, 7)
    await notes.close()
    assert len(await notes_in(keeper)) == 6


async def test_a_space_that_does_not_exist_is_not_made_for_its_denials() -> None:
    keeper, notes = keeper_with()
    await be_denied(keeper)
    await notes.close()
    assert await keeper.engine.spaces() == []


async def test_another_space_never_hears_of_a_denial() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    await keeper.engine.create("fabrikam")
    with pytest.raises(AccessDenied):
        await keeper.engine_of("mallory").get("fabrikam", ["records/k"])
    await notes.close()
    assert await notes_in(keeper, "fabrikam") == []
    assert len(await notes_in(keeper)) == 1


async def test_an_audit_that_cannot_be_written_fails_no_request() -> None:
    class Broken(Wrapper):
        async def commit(self, space: str, batch: Batch) -> Receipt:
            raise Unavailable("no")

    inner = Keeper().engine
    await inner.create(SPACE)
    keeper, notes = keeper_with(Broken(inner))
    await be_denied(keeper, 3)
    await settle(notes)
    await be_denied(keeper, 1)
    await notes.close()


async def test_hostile_keys_and_reasons_do_not_break_the_notes() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    for key in ("records/" + "x" * 5000, "\ud800", "\0"):
        notes(Denial(MALLORY, SPACE, "Get", key, "access_denied", key))
    await notes.close()
    assert len(await notes_in(keeper)) == 3


async def test_notes_that_wait_are_bounded() -> None:
    keeper, notes = keeper_with()
    await keeper.engine.create(SPACE)
    for i in range(WAITING_MAX + 500):
        notes(Denial(Identity(f"agent-{i}", "agent", SPACE), SPACE, "Get", "k", "access_denied", "no"))
    assert len(notes._waiting) == WAITING_MAX
    await keeper.engine.commit(SPACE, batch("x", Put("records/k", b"1")))
    notes._waiting.clear()
    await notes.close()
