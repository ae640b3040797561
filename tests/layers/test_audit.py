"""Audit: complete, redacted, chained, verified, pruned with an anchor."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from holdfast import AuditRecord, Damaged, InvalidInput, ManualClock, Redaction, Space, Store, set_
from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import Batch, ChangeSet, Delete, Page, Push, Put, cursor_at
from holdfast.layers.audit import HEAD, LOG, SEGMENT_RECORDS_MAX, Audit, Segment, pressed
from holdfast.middleware.wrapper import Wrapper


async def all_records(space: Space, **filters: object) -> list[AuditRecord]:
    return [record async for record in space.audit.records(**filters)]  # type: ignore[arg-type]


async def rewrite(space: Space, key: str, change: object) -> None:
    """What somebody does who has the file, and no respect."""
    engine = space._scope.engine
    [entry] = await engine.get(space.name, [key])
    assert entry is not None
    value = decode(entry.value)
    change(value)  # type: ignore[operator]
    await engine.commit(space.name, Batch("intruder", (Put(key, encode(value)),)))


async def segment_keys(space: Space) -> list[str]:
    return [entry.key for entry in (await space._scope.engine.scan(space.name, LOG)).entries]


async def test_every_mutation_is_recorded_with_who_what_and_when(
    store: Store, space: Space, clock: ManualClock
) -> None:
    await space.records.set("k", 1, request_id="r-1")
    clock.advance("1s")
    await store.space("contoso", agent="risk").records.increment("k", 2)
    await space.records.delete("k")
    records = await all_records(space)
    assert [(r.version, r.actor, r.operation, r.key, r.outcome, r.value) for r in records] == [
        (1, "market", "put", "records/k", "committed", 1),
        (2, "risk", "increment", "records/k", "committed", 3),
        (3, "market", "delete", "records/k", "committed", None),
    ]
    assert records[0].request_id == "r-1"
    assert records[1].at - records[0].at == 1000


async def test_a_window_of_time_may_be_given_as_people_have_it(space: Space, clock: ManualClock) -> None:
    await space.records.set("k", "old")
    clock.advance("1h")
    began = as_datetime(clock.now_ms())
    await space.records.set("k", "new")
    clock.advance("10m")
    for since in (began, began.isoformat(), "30m", timedelta(minutes=30), clock.now_ms() - 600_000):
        assert [record.value for record in await all_records(space, since=since)] == ["new"], since
        assert [record.value for record in await all_records(space, until=since)] == ["old"], since
    assert len(await all_records(space, since="2h")) == 2
    zoned = began.astimezone(timezone(timedelta(hours=5)))
    assert [record.value for record in await all_records(space, since=zoned)] == ["new"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"since": None},
        {"since": True},
        {"since": 1.5},
        {"since": "yesterday"},
        {"since": "-1h"},
        {"until": [1]},
        {"until": datetime(2026, 1, 31)},  # without a zone it means another instant to everybody
        {"key": None},
        {"key": 5},
        {"actor": 5},
        {"operation": b"put"},
    ],
    ids=repr,
)
async def test_a_wrong_filter_is_told_as_one(space: Space, wrong: dict[str, Any]) -> None:
    await space.records.set("k", 1)
    [name] = wrong
    with pytest.raises(InvalidInput, match=name):
        await all_records(space, **wrong)


async def test_sealing_and_pruning_take_what_they_understand(space: Space, clock: ManualClock) -> None:
    for share in (0, -1, 2, True, "half", None):
        with pytest.raises(InvalidInput, match="share"):
            await space.audit.seal(share=share)  # type: ignore[arg-type]
    for number in range(2):
        await space.records.set("k", number)
        await space.audit.seal()
        clock.advance("1h")
    with pytest.raises(InvalidInput, match="before"):
        await space.audit.prune("last year")
    assert await space.audit.prune("90m") == 1


async def test_sealed_and_unsealed_records_are_one_sequence(space: Space) -> None:
    for number in range(7):
        await space.records.set("k", number)
        if number % 3 == 0:
            await space.audit.seal()
    assert [record.value for record in await all_records(space)] == list(range(7))
    assert (await space.audit.verify()).sound


async def test_records_are_filtered(store: Store, space: Space, clock: ManualClock) -> None:
    await space.records.set("a/1", 1)
    clock.advance("1h")
    await store.space("contoso", agent="risk").records.delete("a/1")
    await space.records.set("b", 1)
    later = clock.now_ms()
    assert len(await all_records(space, key="records/a")) == 2
    assert len(await all_records(space, actor="risk")) == 1
    assert len(await all_records(space, operation="put")) == 2
    assert len(await all_records(space, since=later)) == 2
    assert len(await all_records(space, until=later)) == 1
    assert await all_records(space, outcome="denied") == []


async def test_secrets_are_redacted_in_the_audit_and_true_in_the_feed(space: Space) -> None:
    await space.records.set("service/api_key", "sk-123")
    await space.records.set(
        "user", {"name": "x", "accessToken": "t", "nested": [{"Client-Secret": "s", "tokens_used": 5}]}
    )
    await space.audit.seal()
    key, user = await all_records(space)
    assert key.value == "[redacted]"
    assert user.value == {
        "name": "x",
        "accessToken": "[redacted]",
        "nested": [{"Client-Secret": "[redacted]", "tokens_used": 5}],
    }
    page = await space._scope.engine.scan(space.name, "audit/")
    assert not any(b"sk-123" in entry.value for entry in page.entries)
    assert await space.records.get("service/api_key") == "sk-123"


def test_more_names_and_keys_can_be_declared_secret() -> None:
    redaction = Redaction(fields=["iban"], keys=["vault/*"])
    assert redaction.value("k", {"customer_iban": 1, "name": 2}) == {"customer_iban": "[redacted]", "name": 2}
    assert redaction.value("vault/x", 5) == "[redacted]"
    assert redaction.value("other", 5) == 5


async def test_a_denial_and_a_note_are_part_of_the_chain(space: Space) -> None:
    await space.records.set("k", 1)
    await space.audit.note("denied", "Delete", "records/k", reason="role agent", actor="risk")
    await space.audit.seal()
    denied = await all_records(space, outcome="denied")
    assert [(r.actor, r.operation, r.key, r.reason) for r in denied] == [("risk", "Delete", "records/k", "role agent")]
    assert (await space.audit.verify()).records == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("refused", "get", "k"), "an outcome is one of committed, expired, denied, read, lost, not 'refused'"),
        ((None, "get", "k"), "an outcome is one of"),
        ((["denied"], "get", "k"), "an outcome is one of"),
        (("denied", 5, "k"), "operation must be text, not 5"),
        (("denied", "get", None), "key must be text, not None"),
    ],
)
async def test_a_note_that_could_not_be_read_again_is_refused(space: Space, given: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        await space.audit.note(*given)
    for wrong in ({"reason": 5}, {"actor": 5}):
        with pytest.raises(InvalidInput, match=r"must be text, not 5"):
            await space.audit.note("denied", "get", "k", **wrong)
    assert await all_records(space) == []


@pytest.mark.parametrize("value", [b'{"outcome":"refused"}', b"[1]", b'"hunter2"', b"\xff", b"["])
async def test_a_note_that_nobody_can_read_is_told_by_its_hash_and_stops_nothing(
    store: Store, space: Space, value: bytes
) -> None:
    await space.records.set("k", 1)
    await space._scope.engine.commit(space.name, Batch("intruder", (Push("audit/notes/", value, 60_000),)))
    await space.records.set("k", 2)
    for _ in range(2):  # before it is sealed, and after
        first, odd, last = await all_records(space)
        assert (first.value, last.value) == (1, 2)
        assert (odd.actor, odd.operation, odd.value) == (
            "intruder",
            "push",
            {"sha256": hashlib.sha256(value).hexdigest()},
        )
        assert "cannot be read" in odd.reason
        await store.tidy()
    assert (await space.audit.verify()).sound


async def test_reads_are_recorded_where_the_space_asks_for_it(store: Store) -> None:
    space = store.space("secret", agent="market", audit_reads=True)
    await space.records.set("k", 1)
    await space.records.get("k")
    await space.records.keys("k")
    again = store.space("secret", agent="risk")  # the space asks, not the caller
    await again.records.get("k")
    reads = await all_records(space, outcome="read")
    assert [(r.actor, r.operation, r.key) for r in reads] == [
        ("market", "get", "records/k"),
        ("market", "scan", "records/k"),
        ("risk", "get", "records/k"),
        ("market", "watch", ""),  # of the audit itself
    ]


async def test_an_untouched_chain_is_sound(space: Space) -> None:
    for number in range(5):
        await space.records.set("k", number)
        await space.audit.seal()
    verification = await space.audit.verify()
    assert verification.sound
    assert (verification.segments, verification.records, verification.upto) == (5, 5, 9)
    assert (await space.audit.verify(expect=verification.hash)).sound


@pytest.mark.parametrize(
    "tampering", ["change", "remove_first", "remove_middle", "remove_last", "forge", "swap", "skip"]
)
async def test_tampering_is_found(space: Space, tampering: str) -> None:
    for number in range(4):
        await space.records.set("k", number)
        await space.audit.seal()
    keys, engine = await segment_keys(space), space._scope.engine
    if tampering == "change":
        await rewrite(space, keys[1], lambda segment: segment["records"][0].update(actor="nobody"))
    elif tampering == "forge":  # changed, with a matching hash of its own

        def forge(segment: dict[str, object]) -> None:
            segment["records"], segment["hash"] = [], "0" * 64

        await rewrite(space, keys[1], forge)
    elif tampering == "skip":  # so that what comes next is never sealed

        def skip(head: dict[str, object]) -> None:
            head["cursor"] = cursor_at(1000)

        await rewrite(space, HEAD, skip)
    elif tampering == "swap":
        [one, two] = await engine.get(space.name, keys[1:3])
        assert one
        assert two
        await engine.commit(space.name, Batch("intruder", (Put(keys[1], two.value), Put(keys[2], one.value))))
    else:
        position = {"remove_first": 0, "remove_middle": 1, "remove_last": -1}[tampering]
        await engine.commit(space.name, Batch("intruder", (Delete(keys[position]),)))
    assert not (await space.audit.verify()).sound


async def test_a_chain_rewritten_as_a_whole_is_found_by_a_noted_hash(space: Space, clock: ManualClock) -> None:
    for number in range(2):
        await space.records.set("k", number)
    await space.audit.seal()
    noted = (await space.audit.verify()).hash
    [key] = await segment_keys(space)
    engine = space._scope.engine
    await engine.commit(space.name, Batch("intruder", (Delete(key), Delete(HEAD))))
    clock.advance("1s")
    await space.audit.seal()  # a new chain that begins now, consistent in itself
    assert (await space.audit.verify()).sound
    assert not (await space.audit.verify(expect=noted)).sound


async def test_a_sealed_record_that_differs_from_the_feed_is_found(space: Space) -> None:
    await space.records.set("k", 1)
    await space.audit.seal()
    [key] = await segment_keys(space)
    [entry] = await space._scope.engine.get(space.name, [key])
    assert entry is not None
    segment = decode(entry.value, Segment)
    lie = Segment(segment.after, segment.upto, segment.at, segment.previous, [])
    forged = Segment(lie.after, lie.upto, lie.at, lie.previous, [], lie.digest())
    engine = space._scope.engine
    await engine.commit(space.name, Batch("intruder", (Put(key, encode(forged)),)))
    await rewrite(space, HEAD, lambda head: head.update(hash=forged.hash))
    verification = await space.audit.verify()
    assert any("differently from what the feed tells" in problem for problem in verification.problems)


async def test_versions_whose_segment_was_removed_are_said_to_be_sealed_no_more(space: Space) -> None:
    for number in range(3):
        await space.records.set("k", number)
        await space.audit.seal()
    keys = await segment_keys(space)
    await space._scope.engine.commit(space.name, Batch("intruder", (Delete(keys[1]),)))
    problems = (await space.audit.verify()).problems
    assert "version 3 is not sealed any more: the segment with it was removed" in problems
    assert not any("differently" in problem for problem in problems)
    await space._scope.engine.commit(space.name, Batch("intruder", (Delete(keys[2]),)))
    problems = (await space.audit.verify()).problems
    assert "version 5 is not sealed any more: the segment with it was removed" in problems


async def test_a_segment_is_kept_and_hashed_as_it_always_was(space: Space) -> None:
    await space.commit(*(set_(name, {"text": "x" * 300}) for name in ("a", "b")))
    await space.audit.seal()
    [key] = await segment_keys(space)
    [entry] = await space._scope.engine.get(space.name, [key])
    assert entry is not None
    segment = decode(entry.value, Segment)
    whole = encode([segment.after, segment.upto, segment.at, segment.previous, segment.records])
    assert segment.hash == hashlib.sha256(whole).hexdigest()
    assert entry.value == encode(segment)


async def test_what_is_no_secret_here_is_one_there(space: Space) -> None:
    value = {"text": "x" * 300, "password": "p"}
    await space.commit(*(set_(name, value) for name in ("plan", "secret/plan", "copy")))
    await space.audit.seal()
    shown = {"text": "x" * 300, "password": "[redacted]"}
    assert [record.value for record in await all_records(space)] == [shown, "[redacted]", shown]


async def test_pruning_leaves_an_anchor_the_rest_hangs_on(space: Space, clock: ManualClock) -> None:
    for number in range(6):
        await space.records.set("k", number)
        await space.audit.seal()
        clock.advance("1d")
    assert await space.audit.prune(clock.now_ms() - 3 * 86_400_000 + 1) == 4
    verification = await space.audit.verify()
    assert verification.sound
    assert verification.segments == 2
    keys = await segment_keys(space)
    await space._scope.engine.commit(space.name, Batch("intruder", (Delete(keys[0]),)))
    assert not (await space.audit.verify()).sound


async def test_two_sealers_do_not_fork_the_chain(space: Space) -> None:
    for number in range(30):
        await space.records.set("k", number)
    await asyncio.gather(*(space.audit.seal() for _ in range(4)))
    verification = await space.audit.verify()
    assert verification.sound
    assert verification.records == 30


async def test_feed_lost_before_it_was_sealed_is_told(space: Space) -> None:
    for number in range(4):
        await space.records.set("k", number)
    await space._scope.engine.compact(space.name, 3)
    await space.audit.seal()
    records = await all_records(space)
    assert [record.outcome for record in records] == ["lost", "committed"]
    assert "versions 1 to 3" in records[0].reason


async def test_following_goes_on_with_what_happens(space: Space) -> None:
    await space.records.set("k", 0)
    follow = space.audit.records(follow=True)
    assert (await asyncio.wait_for(anext(follow), 10)).value == 0
    waiting = asyncio.ensure_future(anext(follow))
    await asyncio.sleep(0)
    await space.records.set("k", 1)
    assert (await asyncio.wait_for(waiting, 10)).value == 1


async def test_an_outcome_that_does_not_exist_is_refused(space: Space) -> None:
    with pytest.raises(InvalidInput, match="committed, expired, denied"):
        await all_records(space, outcome="commited")


async def test_what_is_sealed_in_parts_is_read_once(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3 * SEGMENT_RECORDS_MAX // 20):
        await space.commit(*(set_(f"k/{n}/{i}", i) for i in range(20)))
    engine, read = space.audit._engine, list[object]()
    was = engine.watch

    def watch(*given: object, **options: object) -> object:
        read.append(options.get("cursor"))
        return was(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "watch", watch)
    assert await space.audit.seal() >= 3 * SEGMENT_RECORDS_MAX
    assert len(read) <= 2  # the second finds the sealer's own commits
    found = await space.audit.verify()
    assert (found.problems, found.segments) == ([], 3)


def test_a_sealer_that_falls_behind_takes_a_larger_share() -> None:
    minute = 60_000
    assert [round(pressed(0.02, n * minute), 2) for n in (-1, 0, 10, 60, 600, 60_000)] == [
        0.02,
        0.02,
        0.04,
        0.14,
        0.5,
        0.5,
    ]
    assert pressed(1, 0) == 1


@pytest.mark.parametrize("meanwhile", ["sealed", "pruned", "forgotten"])
async def test_a_chain_that_grows_or_is_pruned_while_it_is_verified_is_sound(
    store: Store, space: Space, clock: ManualClock, meanwhile: str
) -> None:
    for number in range(3):
        await space.records.set("k", number)
        await space.audit.seal()
        clock.advance("1d")

    class Busy(Wrapper):
        """While the chain is read, at each page of it and at the feed, the store goes on with its work."""

        left = 2

        async def scan(self, space_: str, prefix: str, **how: Any) -> Page:
            if meanwhile != "pruned":
                page = await self.inner.scan(space_, prefix, **how)
                await self._work()
            else:
                await self._work()
                page = await self.inner.scan(space_, prefix, **how)
            return page

        async def watch(self, space_: str, *prefixes: str, **how: Any) -> AsyncIterator[ChangeSet]:
            await self._work()
            async for commit in self.inner.watch(space_, *prefixes, **how):
                yield commit

        async def _work(self) -> None:
            if not self.left:
                return
            self.left -= 1
            if meanwhile == "sealed":
                await space.records.set("k", f"then {self.left}")
                await space.audit.seal()
            elif meanwhile == "pruned":
                await space.audit.prune(clock.now_ms() - (2 + self.left) * 86_400_000 + 1)
            else:
                await self.inner.compact(space.name, 3 - self.left)

    busy = Audit(msgspec.structs.replace(space._scope, engine=Busy(space._scope.engine)))
    assert (await busy.verify()).problems == []
    assert (await space.audit.verify()).problems == []


async def test_a_head_that_is_none_any_more_is_damaged(space: Space) -> None:
    await space.records.set("k", 1)
    await space.audit.seal()
    await space._scope.engine.commit(space.name, Batch("intruder", (Put(HEAD, b'"gone"'),)))
    with pytest.raises(Damaged, match="somebody changed it"):
        await space.audit.verify()


# --- a look that must not take long ---


async def chained(space: Space, segments: int) -> None:
    for number in range(segments):
        await space.records.set("k", number)
        await space.audit.seal()


async def test_the_newest_segments_alone_can_be_verified(space: Space) -> None:
    await chained(space, 5)
    whole, end = await space.audit.verify(), await space.audit.verify(newest=2)
    assert whole.sound
    assert end.sound
    assert (whole.segments, end.segments, end.records) == (5, 2, 2)
    assert (end.upto, end.hash) == (whole.upto, whole.hash)
    assert whole.after == 0 < end.after < end.upto
    assert await space.audit.verify(newest=5) == whole


async def test_a_change_among_the_newest_segments_is_found_and_an_older_one_is_left_to_the_whole_look(
    space: Space,
) -> None:
    await chained(space, 5)
    keys = await segment_keys(space)
    await rewrite(space, keys[0], lambda segment: segment["records"][0].update(actor="nobody"))
    assert (await space.audit.verify(newest=2)).sound
    assert not (await space.audit.verify()).sound
    await rewrite(space, keys[3], lambda segment: segment["records"][0].update(actor="nobody"))
    assert any("changed after it was sealed" in problem for problem in (await space.audit.verify(newest=2)).problems)


async def test_a_gap_among_the_newest_segments_is_found(space: Space) -> None:
    await chained(space, 5)
    keys = await segment_keys(space)
    await space._scope.engine.commit(space.name, Batch("intruder", (Delete(keys[3]),)))
    assert not (await space.audit.verify(newest=3)).sound
    await space._scope.engine.commit(space.name, Batch("intruder", (Delete(keys[4]),)))
    assert not (await space.audit.verify(newest=2)).sound


async def test_what_is_not_sealed_is_counted_only_as_far_as_a_short_look_goes(space: Space) -> None:
    await chained(space, 1)
    for number in range(SEGMENT_RECORDS_MAX + 10):
        await space.records.set("k", number)
    assert (await space.audit.verify()).unsealed == SEGMENT_RECORDS_MAX + 10
    assert (await space.audit.verify(newest=1)).unsealed == SEGMENT_RECORDS_MAX
    for wrong in (0, -1, True, "2", 1.5):
        with pytest.raises(InvalidInput, match="newest"):
            await space.audit.verify(newest=wrong)  # type: ignore[arg-type]
