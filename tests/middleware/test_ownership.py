"""Whose it is: outside of records one creates what is absent and changes what one owns, whatever batch is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.codec import encode
from holdfast.engine import (
    Absent,
    Batch,
    Delete,
    Empty,
    Engine,
    Entry,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
)
from holdfast.errors import AccessDenied, Conflict, Error
from holdfast.identity import Role
from holdfast.layers.blobs import Blobs
from tests.middleware.keeper import SPACE, Keeper, batch, contribution, counted, refusal
from tests.soak import examples

LINE = "locks/lock/l/"
HERE = b'{"instance":"1"}'


async def place(keeper: Keeper, agent: str, ttl_ms: int = 60_000) -> str:
    """Stand in the line."""
    receipt = await keeper.engine_of(agent).commit(SPACE, batch(agent, Push(LINE, HERE, ttl_ms)))
    return str(receipt.results[0])


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_nobody_frees_extends_or_changes_the_lock_of_another(role: str) -> None:
    keeper = Keeper()
    key = await place(keeper, "alice")
    before = await keeper.entries()
    mallory = keeper.engine_of("mallory", role)  # type: ignore[arg-type]
    said = ValueIs(key, HERE)
    for operation in (Delete(key), Put(key, HERE, 1), Touch(key, 99_000)):
        with pytest.raises(AccessDenied, match="alice") as caught:
            await mallory.commit(SPACE, batch("mallory", Put("records/k", b"1"), operation, when=(said,)))
        assert isinstance(caught.value.__cause__, Conflict)
        assert await keeper.entries() == before
    assert [denial.key for denial in keeper.denials] == [key] * 3
    await keeper.engine_of("alice").commit(
        SPACE, batch("alice", Touch(key, 99_000), Put(key, HERE, 60_000), when=(said,))
    )
    await keeper.engine_of("alice").commit(SPACE, batch("alice", Delete(key)))


@pytest.mark.parametrize("lower", ["0", "0000000000000000000", "!", ""])
async def test_nobody_chooses_a_place_in_a_line(lower: str) -> None:
    keeper = Keeper()
    first = await place(keeper, "alice")
    before = await keeper.entries()
    mallory = keeper.engine_of("mallory")
    for operation in (Put(LINE + lower, b"{}", 1000), Increment(LINE + lower, 1)):
        with pytest.raises(AccessDenied):
            await mallory.commit(SPACE, batch("mallory", operation))
    for prefix in (f"{LINE}{lower}/", f"{LINE}0/", "locks/", "locks/lock/", f"{LINE}{lower}/x/"):
        with pytest.raises(AccessDenied, match="line"):
            await mallory.commit(SPACE, batch("mallory", Push(prefix, b"{}", 1000)))
    assert await keeper.entries() == before
    assert await place(keeper, "mallory") > first


async def test_a_place_in_a_line_needs_a_ttl() -> None:
    keeper = Keeper()
    key = await place(keeper, "alice")
    for operation in (Push(LINE, b"{}"), Put(key, b"{}")):
        with pytest.raises(AccessDenied, match="ttl"):
            await keeper.engine_of("alice").commit(SPACE, batch("alice", operation))


async def test_one_s_own_place_may_be_rewritten_only_while_it_is_there() -> None:
    keeper = Keeper()
    key = await place(keeper, "alice", 1000)
    alice = keeper.engine_of("alice")
    rewritten = batch("alice", Put(key, HERE, 1000), when=(ValueIs(key, HERE),))
    await alice.commit(SPACE, rewritten)
    keeper.clock.advance("1s")
    with pytest.raises(Conflict):
        await alice.commit(SPACE, rewritten)


async def test_a_place_that_is_written_anew_takes_what_it_took_and_pushes_nobody_out() -> None:
    keeper = Keeper()
    alice = keeper.engine_of("alice")
    for line, said, more in (
        ("locks/rw/doc/", b'{"instance":"a","shared":true}', b'{"instance":"a"}'),
        ("locks/pool/lic/", b'{"instance":"a","units":1}', b'{"instance":"a","units":10}'),
        ("locks/pool/lic/", b'{"instance":"a","units":2}', b'{"instance":"a","units":2,"token":"x"}'),
        (
            "locks/rw/doc/",
            b'{"instance":"a","shared":true}',
            b'{"instance":"a","shared":true,"token":' + b"9" * 30 + b"}",
        ),
        ("locks/rw/doc/", b'{"instance":"a","shared":true}', b'{"instance":"' + b"a" * 5000 + b'","shared":true}'),
        ("locks/lock/doc/", b"[]", b'{"instance":"a","shared":true}'),
    ):
        key = str((await alice.commit(SPACE, batch("alice", Push(line, said, 60_000)))).results[0])
        for conditions in (
            (),
            (Present(key),),
            (ValueIs(key, said),),
            (ValueIs(key, more),),
            (Present(key), ValueIs(line + "0", more)),
        ):
            with pytest.raises((AccessDenied, Conflict)):
                await alice.commit(SPACE, batch("alice", Put(key, more, 60_000), when=conditions))
            assert (await keeper.entries())[key].value == said
        await alice.commit(SPACE, batch("alice", Put(key, said, 60_000), when=(ValueIs(key, said),)))
    said, begun = b'{"instance":"a","units":3}', b'{"instance":"a","token":7,"units":3}'
    key = str((await alice.commit(SPACE, batch("alice", Push("locks/pool/lic/", said, 60_000)))).results[0])
    await alice.commit(SPACE, batch("alice", Put(key, begun, 60_000), when=(ValueIs(key, said),)))
    await alice.commit(SPACE, batch("alice", Put(key, begun, 30_000), when=(ValueIs(key, begun),)))


async def test_the_number_of_permits_is_written_once() -> None:
    keeper = Keeper()
    key = "permits/semaphore/gpu"
    alice = keeper.engine_of("alice")
    await alice.commit(SPACE, batch("alice", Put(key, b"4"), when=(Absent(key),)))
    with pytest.raises(Conflict) as caught:
        await alice.commit(SPACE, batch("alice", Put(key, b"5"), when=(Absent(key),)))
    assert caught.value.actual is not None
    with pytest.raises(AccessDenied, match="once"):
        await alice.commit(SPACE, batch("alice", Put(key, b"5")))
    for operation in (Increment(key, 1), Touch(key, 1)):
        with pytest.raises(AccessDenied):
            await alice.commit(SPACE, batch("alice", operation))
    assert (await keeper.entries())[key].value == b"4"


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_the_size_of_a_line_is_a_number_that_everybody_can_read(role: Role) -> None:
    keeper = Keeper()
    alice = keeper.engine_of("alice", role)
    key = "permits/semaphore/gpu"
    for operation in (
        *(
            Put(key, value)
            for value in (b'"x"', b"0", b"-1", b"1000001", b"4.0", b"[4]", b"null", b'"' + b"x" * 900 + b'"')
        ),
        Put(key, b"4", 60_000),  # a size that ends by itself, while somebody holds
        *(
            Put(name, b"4")
            for name in ("permits/zzz", "permits/lock/l", "permits/semaphore/", "permits/semaphore/" + "/" * 400)
        ),
    ):
        with pytest.raises(AccessDenied):
            await alice.commit(SPACE, batch("alice", operation))
    assert await keeper.entries() == {}
    await alice.commit(SPACE, batch("alice", Put(key, b"1000000")))


async def test_who_made_the_size_of_a_line_or_an_orchestrator_deletes_it_while_nobody_uses_it() -> None:
    keeper = Keeper()
    alice, bob, boss = keeper.engine_of("alice"), keeper.engine_of("bob"), keeper.engine_of("boss", "orchestrator")
    key = "permits/semaphore/gpu/1"
    for engine, agent in ((alice, "alice"), (boss, "boss")):
        await alice.commit(SPACE, batch("alice", Put(key, b"4")))
        held = await bob.commit(SPACE, batch("bob", Push("locks/semaphore/gpu%2F1/", HERE, 60_000)))
        with pytest.raises(Conflict):
            await engine.commit(SPACE, batch(agent, Delete(key)))
        await bob.commit(SPACE, batch("bob", Delete(str(held.results[0]))))
        with pytest.raises(AccessDenied, match="alice"):
            await bob.commit(SPACE, batch("bob", Delete(key)))
        assert (await keeper.entries())[key].value == b"4"
        await engine.commit(SPACE, batch(agent, Delete(key)))
        assert await keeper.entries() == {}


async def test_the_mode_of_a_document_is_written_once_and_changed_by_orchestrators_alone() -> None:
    keeper = Keeper()
    key = "modes/documents/d"
    alice, bob = keeper.engine_of("alice"), keeper.engine_of("bob")
    await alice.commit(SPACE, batch("alice", Put(key, b'"merge"'), when=(Absent(key),)))
    for agent, engine in (("alice", alice), ("bob", bob)):
        for operation in (Put(key, b'"reject"'), Delete(key), Increment(key, 1), Touch(key, 1)):
            with pytest.raises(AccessDenied):
                await engine.commit(SPACE, batch(agent, operation))
    assert (await keeper.entries())[key].value == b'"merge"'
    await keeper.engine_of("lead", role="orchestrator").commit(SPACE, batch("lead", Delete(key)))
    assert key not in await keeper.entries()


async def test_records_lists_and_sets_belong_to_everybody() -> None:
    keeper = Keeper()
    keys = ("records/k", "lists/l/1/1", "sets/s/1/1")
    made = Put("records/l", b'"1"', tag="list"), Put("records/s", b'"1"', tag="set")
    await keeper.engine_of("alice").commit(SPACE, batch("alice", *made, *(Put(key, b"1", 1000) for key in keys)))
    for key in keys:
        for operation in (Touch(key, 5000), Increment(key, 1), Put(key, b"2"), Delete(key)):
            await keeper.engine_of("bob").commit(SPACE, batch("bob", operation))
    assert set(await keeper.entries()) == {"records/l", "records/s"}


@pytest.mark.parametrize("subspace", ["documents", "correlations"])
async def test_orchestrators_write_documents_and_correlations_and_agents_read_them(subspace: str) -> None:
    keeper = Keeper()
    key = f"{subspace}/d"
    alice, boss = keeper.engine_of("alice"), keeper.engine_of("boss", "orchestrator")
    for operation in (Put(key, b"1"), Push(f"{subspace}/d/", b"1"), Increment(key, 1), Touch(key, 1), Delete(key)):
        for behind in ((), (Put("records/k", b"1"),)):
            with pytest.raises(AccessDenied, match="orchestrators"):
                await alice.commit(SPACE, batch("alice", *behind, operation))
    assert await keeper.entries() == {}
    await boss.commit(SPACE, batch("boss", Put(key, b"3")))
    assert [entry and entry.value for entry in await alice.get(SPACE, [key])] == [b"3"]
    await keeper.engine_of("chief", "orchestrator").commit(SPACE, batch("chief", Put(key, b"4")))
    await boss.commit(SPACE, batch("boss", Delete(key)))


SECTION = "sections/documents/d/"


@pytest.mark.parametrize("present", [True, False])
async def test_a_section_is_written_by_the_agent_it_is_named_after(present: bool) -> None:
    keeper = Keeper()
    mallory = keeper.engine_of("mallory")
    if present:
        await keeper.engine_of("alice").commit(SPACE, batch("alice", Put(SECTION + "alice/1", b"1")))
    before = await keeper.entries()
    forged = [
        SECTION + "alice/1",
        SECTION + "alice/mallory/1",
        SECTION + "alice/2",
        "sections/documents/mallory/alice/1",
    ]
    odd = [
        SECTION + "mallory",
        "sections/mallory/1",
        "sections/documents/mallory/1",
        "sections/mallory",
        SECTION + "%6Dallory/1",
    ]
    for key in forged + odd:
        for operation in (
            Put(key, b"2"), Put(key, b"2", owner="alice"), Put(key, b"2", owner="mallory"), Put(key, b"2", 1000),
            Delete(key), Touch(key, 1000), Increment(key, 1), Push(key + "/", b"2"), Take(SECTION + "alice/", "queues/q/"),
        ):  # fmt: skip
            for when in ((), (Absent(key),), (Mine(key),)):
                for batched in ((operation,), (Put(SECTION + "mallory/1", b"1"), operation)):
                    with pytest.raises(AccessDenied):
                        await mallory.commit(SPACE, batch("mallory", *batched, when=when))
    assert await keeper.entries() == before
    with pytest.raises(AccessDenied):  # not even its own, where keys are chosen by the store
        await mallory.commit(SPACE, batch("mallory", Push(SECTION + "mallory/", b"2")))
    await mallory.commit(
        SPACE, batch("mallory", Put(SECTION + "mallory/1", b"1", 1000), Touch(SECTION + "mallory/1", 2000))
    )
    await mallory.commit(SPACE, batch("mallory", Delete(SECTION + "mallory/1")))


async def test_an_orchestrator_writes_the_section_of_another_and_it_stays_the_other_s() -> None:
    keeper = Keeper()
    boss, key = keeper.engine_of("boss", "orchestrator"), SECTION + "alice/1"
    await boss.commit(SPACE, batch("boss", Put(key, b"1", owner="alice")))
    assert (await keeper.entries())[key].owner == "alice"
    for other in (
        Put(key, b"1", owner="bob"),
        Put("records/k", b"1", owner="alice"),
        Put("documents/d", b"1", owner="alice"),
    ):
        with pytest.raises(AccessDenied, match="nobody else"):
            await boss.commit(SPACE, batch("boss", other))
    await keeper.engine_of("alice").commit(SPACE, batch("alice", Put(key, b"2")))
    await boss.commit(SPACE, batch("boss", Delete(key)))
    assert await keeper.entries() == {}


async def test_history_is_appended_to_and_never_changed() -> None:
    keeper = Keeper()
    for role in ("agent", "orchestrator"):
        writer = keeper.engine_of("alice", role)  # type: ignore[arg-type]
        receipt = await writer.commit(SPACE, batch("alice", *contribution("alice", b"1")))
        key = str(receipt.results[1])
        before = await keeper.entries()
        for operation in (
            Put(key, b"2"), Delete(key), Touch(key, 5000), Increment(key, 1), Put("history/documents/d/0", b"{}"),
            Push("history/documents/", b"{}"), Push("history/documents/d/0/", b"{}"), Push("history/", b"{}"),
        ):  # fmt: skip
            with pytest.raises(AccessDenied):
                await writer.commit(SPACE, batch("alice", operation))
        assert await keeper.entries() == before


async def test_an_agent_appends_to_history_only_what_it_does_in_the_same_batch() -> None:
    keeper = Keeper()
    alice = keeper.engine_of("alice")
    put, told = contribution("alice", b'{"data":1}')
    withdrew = Push("history/documents/d/", encode({"kind": "withdrew", "section": "alice/1"}), 1000)
    omitted = encode({"kind": "contributed", "section": "alice/1", "omitted": len(put.value)})
    await alice.commit(SPACE, batch("alice", put, told))
    await alice.commit(SPACE, batch("alice", Delete(put.key), withdrew))
    await alice.commit(SPACE, batch("alice", put, Push("history/documents/d/", omitted, 1000)))
    before = await keeper.entries()
    elsewhere = Push("history/documents/e/", told.value, 1000)
    of_signals = Put("sections/correlations/d/alice/1", put.value)
    forged: list[tuple[Operation, ...]] = [
        (told,), (withdrew,), (put, withdrew), (Delete(put.key), told), (put, elsewhere), (of_signals, told),
        (put, Push(told.prefix, omitted.replace(b"10", b"11"), 1000)), (Touch(put.key, 1000), told), (put, told, withdrew),
        (put, Push("history/other/d/", told.value, 1000)),
    ]  # fmt: skip
    for operations in forged:
        with pytest.raises(AccessDenied, match="their own contribution"):
            await alice.commit(SPACE, batch("alice", *operations))
    assert await keeper.entries() == before
    for role in ("orchestrator", "admin"):
        decided = Push("history/documents/d/", encode({"kind": "deleted"}), 1000)
        await keeper.engine_of("boss", role).commit(SPACE, batch("boss", decided))  # type: ignore[arg-type]


async def test_taking_from_others_is_for_queues_alone() -> None:
    keeper = Keeper()
    key = await place(keeper, "alice")
    line, lease = "queues/ready/in/499/", "0" * 30
    await keeper.engine_of("alice").commit(SPACE, batch("alice", *counted(Push(line, b"1"))))
    mallory = keeper.engine_of("mallory")
    await mallory.commit(SPACE, batch("mallory", Put(f"consumers/in/{lease}", b"{}", 1000)))
    mine = f"reserved/in/{lease}/"
    for take in (
        Take(LINE, "locks/lock/m/"),
        Take(LINE, mine),
        Take("queues/ready/in/", LINE),
        Take("queues/ready/in/", "records/mine/"),
        Take("queues/ready/in/", mine, source_counter=key),
        Take("queues/ready/in/", mine, target_counter="records/n"),
    ):
        with pytest.raises(AccessDenied):
            await mallory.commit(SPACE, batch("mallory", take))
    receipt = await mallory.commit(SPACE, batch("mallory", *counted(Take("queues/ready/in/", mine))))
    assert isinstance(receipt.results[0], list)
    assert [entry.owner for entry in receipt.results[0]] == ["mallory"]


async def test_a_repeated_request_is_answered_although_its_entry_is_another_s_by_now() -> None:
    keeper = Keeper()
    key = await place(keeper, "alice")
    alice = keeper.engine_of("alice")
    release = batch("alice", Delete(key), request_id="release")
    first = await alice.commit(SPACE, release)
    await keeper.admin.commit(SPACE, batch("mallory", Put(key, b"{}")))
    assert await alice.commit(SPACE, release) == first
    assert (await keeper.entries())[key].owner == "mallory"


async def test_two_agents_keep_the_same_blob_and_each_lets_go_of_its_own(tmp_path: Path) -> None:
    keeper = Keeper()
    blobs = {name: Blobs(keeper.engine_of(name), SPACE, name, tmp_path, keeper.clock) for name in ("alice", "bob")}
    refs = {name: await each.put(b"report") for name, each in blobs.items()}
    assert refs["alice"] == refs["bob"]
    for name, each in blobs.items():
        part = each.attach(refs[name], f"tasks/{name}")
        await keeper.engine_of(name).commit(SPACE, batch(name, *part.operations, when=part.conditions))
    with pytest.raises(AccessDenied, match="alice"):
        await keeper.engine_of("bob").commit(
            SPACE, batch("bob", *blobs["bob"].detach(refs["bob"], "tasks/alice").operations)
        )
    await keeper.engine_of("bob").commit(SPACE, batch("bob", *blobs["bob"].detach(refs["bob"], "tasks/bob").operations))
    assert await blobs["bob"].read(refs["bob"]) == b"report"
    assert sorted(await keeper.entries("blobs/"))[1].endswith("tasks/alice")
    keeper.clock.advance("2h")
    assert (await blobs["bob"].sweep()).removed == 0  # alice refers to it
    await keeper.engine_of("alice").commit(
        SPACE, batch("alice", *blobs["alice"].detach(refs["alice"], "tasks/alice").operations)
    )
    keeper.clock.advance("2h")
    with pytest.raises(AccessDenied, match="alice"):  # it was hers
        await blobs["bob"].sweep()
    assert await blobs["bob"].read(refs["bob"]) == b"report"


# --- three hostile agents ---

AGENTS = ("eve", "mallory", "trudy")
NAMES = ("0", "0000000000000000000", "9", "9999999999999999999", "x/1", "")
prefixes = st.sampled_from(
    (LINE, "locks/lock/m/", "locks/rw/l/", f"{LINE}0/", "locks/lock/", "locks/", "permits/pool/")
)
chosen = st.tuples(prefixes, st.sampled_from(NAMES)).map("".join)
existing = st.integers(0, 9)
"""The key of the so-manieth entry that is there."""
where = st.one_of(chosen, existing, existing)
ttl = st.sampled_from((None, 500, 60_000, 60_000))
hostile = st.one_of(
    st.tuples(st.just("put"), where, ttl, st.sampled_from((None, None, *AGENTS))),
    st.tuples(st.just("delete"), where),
    st.tuples(st.just("increment"), where),
    st.tuples(st.just("touch"), where),
    st.tuples(st.just("push"), prefixes, ttl),
    st.tuples(st.just("push"), st.just(LINE), st.just(60_000)),
    st.tuples(st.just("push"), prefixes, st.just(60_000)),
    st.tuples(st.just("take"), prefixes, prefixes),
)
tested = st.tuples(st.sampled_from((Present, Absent, Mine)), where)
step = st.one_of(
    st.tuples(
        st.sampled_from(AGENTS),
        st.sampled_from((None, None, None, None, *AGENTS)),
        st.lists(hostile, min_size=1, max_size=2),
        st.lists(tested, max_size=1),
    ),
    st.sampled_from((1, 400, 60_000)),
)


def made(drawn: tuple[object, ...], keys: list[str]) -> object:
    def key(where: object) -> str:
        return where if isinstance(where, str) else keys[int(where) % len(keys)] if keys else "locks/lock/l/1"  # type: ignore[call-overload, no-any-return]

    match drawn:
        case ("put", at, ttl_ms, owner):
            return Put(key(at), b"{}", ttl_ms, owner=owner)  # type: ignore[arg-type]
        case ("delete", at):
            return Delete(key(at))
        case ("increment", at):
            return Increment(key(at), 1)
        case ("touch", at):
            return Touch(key(at), 90_000)
        case ("push", prefix, ttl_ms):
            return Push(prefix, b"{}", ttl_ms)  # type: ignore[arg-type]
        case ("take", source, target):
            return Take(source, target)  # type: ignore[arg-type]
    raise AssertionError(drawn)


def check_nothing_of_others_changed(actor: str, now: int, before: dict[str, Entry], after: dict[str, Entry]) -> None:
    for key, entry in before.items():
        if entry.owner != actor and (entry.expires_at is None or entry.expires_at > now):
            assert after.get(key) == entry, f"{actor} changed {key}"
    for key, entry in after.items():
        if key not in before:
            assert entry.owner == actor
            line = key[: key.rindex("/") + 1]
            overtaken = [each for each in before if each.startswith(line) and each > key and each in after]
            assert not overtaken or not key.startswith("locks/"), f"{actor} got before {overtaken}"
            beside = [each for each in before if key.startswith(each[: each.rindex("/") + 1]) and each > key]
            assert not key.startswith("locks/") or not beside, f"{actor} got before {beside}"


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(step, max_size=25))
def test_hand_made_batches_do_not_break_the_ownership_of_lines(steps: list[object]) -> None:
    async def work() -> None:
        keeper = Keeper()
        for number, drawn in enumerate(steps):
            before = await keeper.entries()
            if isinstance(drawn, int):
                keeper.clock.advance(drawn / 1000)
                continue
            agent, other, operations, conditions = drawn  # type: ignore[misc]
            actor = other or agent
            keys = sorted(before)
            when = [made(("delete", at), keys) for _, at in conditions]  # only for their keys
            tests = tuple(kind(each.key) for (kind, _), each in zip(conditions, when, strict=True))  # type: ignore[attr-defined]
            sent = Batch(actor, tuple(made(each, keys) for each in operations), tests, f"r{number}")  # type: ignore[arg-type]
            refused = await refusal(keeper.engine_of(agent).commit(SPACE, sent))
            after = await keeper.entries()
            assert refused is None or isinstance(refused, Error)
            if refused is not None:
                assert after == before
            check_nothing_of_others_changed(agent, keeper.clock.now_ms(), before, after)

    asyncio.run(work())


async def test_the_holder_keeps_the_lock_through_every_single_hostile_operation() -> None:
    """Exhaustively: each operation, on each key that matters, alone and behind an innocent one."""
    for behind in ((), (Put("records/k", b"1"),)):
        for key in ("", "0", "9", "x/1", "0/1"):
            keeper = Keeper()
            held = await place(keeper, "alice")
            entry = (await keeper.entries())[held]
            at = held if not key else LINE + key
            for operation in (
                Put(at, b"{}", 1), Put(at, b"{}", 1, owner="alice"), Delete(at), Increment(at, 1), Touch(at, 1),
                Push(at[: at.rindex("/") + 1], b"{}", 1000), Push(at + "/", b"{}", 1000), Take(LINE, "locks/lock/z/"),
            ):  # fmt: skip
                for when in ((), (Present(held),), (ValueIs(held, entry.value),), (Mine(at),), (Empty(LINE),)):
                    await refusal(
                        keeper.engine_of("mallory").commit(SPACE, batch("mallory", *behind, operation, when=when))
                    )
                    entries = await keeper.entries(LINE)
                    assert entries[held] == entry
                    assert min(entries) == held


ANSWER = "answers/market/order-17"


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_nobody_answers_for_another_before_it_has_asked(role: Role) -> None:
    keeper = Keeper()
    mallory = keeper.engine_of("mallory", role)
    for operation in (Put(ANSWER, b'["",1]', 1000), Put(ANSWER, b'["",1]'), Put("answers/market", b"1", 1000)):
        for when in ((), (Absent(ANSWER),), (Mine(ANSWER),)):
            with pytest.raises(AccessDenied):
                await mallory.commit(SPACE, batch("mallory", operation, when=when))
    assert await keeper.entries() == {}
    own = batch("market", Put("records/k", b"1"), Put(ANSWER, b'["",1]', 1000), when=(Absent(ANSWER),))
    await keeper.engine_of("market").commit(SPACE, own)


@pytest.mark.parametrize("role", ["agent", "orchestrator"])
async def test_what_one_was_answered_nobody_else_reads(role: Role) -> None:
    keeper = Keeper()
    market, mallory = keeper.engine_of("market"), keeper.engine_of("mallory", role)
    await market.commit(SPACE, batch("market", Put("records/k", b"1"), Put(ANSWER, b'["","secret"]', 1000)))

    async def follow(engine: Engine, *prefixes: str) -> list[str]:
        commits = engine.watch(SPACE, *prefixes, cursor="r0", live=False)
        return [change.key async for commit in commits for change in commit.changes]

    for attempt in (
        mallory.get(SPACE, [ANSWER]),
        mallory.get(SPACE, ["records/a", ANSWER]),
        mallory.scan(SPACE, "answers/"),
        mallory.scan(SPACE, "answers/market"),
        mallory.scan(SPACE, "answers/market/"),
        mallory.scan(SPACE, "answers/mallory"),
        follow(mallory, "answers/market/"),
        follow(mallory, "answers/"),
        mallory.commit(SPACE, batch("mallory", when=(Absent(ANSWER),))),
        mallory.commit(SPACE, batch("mallory", when=(Empty("answers/market/"),))),
    ):
        assert isinstance(await refusal(attempt), AccessDenied)
    if role == "orchestrator":  # which has Audit
        assert await follow(mallory) == ["records/k"]
    assert [entry.key for entry in (await market.scan(SPACE, "answers/market/")).entries] == [ANSWER]
    assert await follow(market, "answers/market/") == [ANSWER]
    assert (await mallory.scan(SPACE, "answers/mallory/")).entries == []
