"""Who may do what: every verb of a batch is asked for, wherever it hides."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.codec import decode
from holdfast.engine import (
    SYSTEM_ACTOR,
    Absent,
    AtLeast,
    Batch,
    Delete,
    Empty,
    Increment,
    Mine,
    Present,
    Push,
    Put,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import AccessDenied, InvalidInput
from holdfast.identity import Identity, Role
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.middleware.audited_reads import AuditedReads
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules
from holdfast.middleware.verbs import VERBS
from tests.middleware.keeper import FREELY, SPACE, Keeper, batch, counted, depth, refusal
from tests.soak import examples


def allowing(*verbs: str) -> Rules:
    return Rules((AccessRule("*", verbs),), (), ())


# --- named cases ---


@pytest.mark.parametrize(
    ("verb", "needed_for"),
    [
        ("Set", batch("a", Put("records/k", b"1"))),
        ("Set", batch("a", Put("lists/l/1/1", b"1"))),
        ("Set", batch("a", Push("lists/l/1/", b"1"))),
        ("Set", batch("a", Touch("records/k", 1000))),
        ("Delete", batch("a", Delete("records/k"))),
        ("Delete", batch("a", Delete("sets/s/1/1"))),
        ("Increment", batch("a", Increment("records/n", 1))),
        ("Get", batch("a", when=(Absent("records/k"),))),
        ("CompareAndSwap", batch("a", Put("records/k", b"1"), when=(Absent("records/k"),))),
        ("Get", batch("a", Put("records/k", b"1"), when=(Absent("records/k"),))),
        ("Transaction", batch("a", Put("records/k", b"1"), Put("records/l", b"1"))),
        ("Lock", batch("a", Push("locks/lock/l/", b"{}", 1000))),
        ("Lock", batch("a", when=(Present("locks/lock/l/1"),))),
        ("Lock", batch("a", Put("permits/semaphore/s", b"1"), when=(Absent("permits/semaphore/s"),))),
        ("Unlock", batch("a", Delete("locks/lock/l/1"))),
        ("Reserve", batch("a", *counted(Take("queues/ready/in/", f"reserved/in/{'0' * 30}/")))),
        ("Set", batch("a", *counted(Push("queues/ready/in/499/", b"1")))),
        ("Audit", batch("a", when=(Absent("audit/head"),))),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
async def test_a_batch_needs_the_verb_of_what_it_does(verb: str, needed_for: Batch) -> None:
    keeper = Keeper(allowing(*(each for each in VERBS if each != verb)))
    with pytest.raises(AccessDenied, match=verb):
        await keeper.engine_of("a").commit(SPACE, needed_for)
    assert keeper.witness.seen == []
    keeper.policy.reload(allowing(*VERBS))
    await keeper.engine_of("a").commit(SPACE, batch("a", Put(f"consumers/in/{'0' * 30}", b"{}", 1000)))
    await keeper.engine_of("a").commit(SPACE, batch("a", Put("records/l", b'"1"', tag="list")))
    assert not isinstance(await refusal(keeper.engine_of("a").commit(SPACE, needed_for)), AccessDenied)
    assert keeper.witness.seen


async def test_a_denied_verb_does_not_hide_in_a_batch() -> None:
    keeper = Keeper(Rules((AccessRule("*", ("*",), ("Delete",)),), (), ()))
    engine = keeper.engine_of("a")
    await engine.commit(SPACE, batch("a", Put("records/k", b"1"), Put("records/l", b"1")))
    with pytest.raises(AccessDenied, match="Delete"):
        await engine.commit(SPACE, batch("a", Put("records/m", b"1"), Increment("records/n", 1), Delete("records/k")))
    assert sorted(await keeper.entries()) == ["records/k", "records/l"]


async def test_what_is_remembered_of_a_request_needs_no_verb_of_its_own_and_does_not_come_alone() -> None:
    keeper = Keeper(allowing("Increment"))
    engine, answer = keeper.engine_of("a"), "answers/a/r1"
    remembered = Put(answer, b"[]", 1000)
    assert await engine.get(SPACE, [answer]) == [None]
    await engine.commit(SPACE, batch("a", Increment("records/n", 1), remembered, when=(Absent(answer),)))
    for alone in (batch("a", remembered), batch("a", remembered, Put("answers/a/r2", b"[]"), when=(Absent(answer),))):
        with pytest.raises(AccessDenied, match="along with what it tells of"):
            await engine.commit(SPACE, alone)
    with pytest.raises(AccessDenied, match="Set"):
        await engine.commit(SPACE, batch("a", Put("records/k", b"1"), Put("answers/a/r3", b"[]")))
    with pytest.raises(AccessDenied):
        await engine.commit(SPACE, batch("a", Increment("records/n", 1), Delete(answer)))


async def test_a_condition_reads_its_key() -> None:
    keeper = Keeper(allowing("Set", "CompareAndSwap", "Transaction"))
    await keeper.admin.commit(SPACE, batch("root", Put("records/secret", b'"42"')))
    keeper.witness.seen.clear()
    for probe in (
        ValueIs("records/secret", b'"41"'),
        Present("records/secret"),
        AtLeast("records/secret", 1),
        Empty("records/"),
    ):
        with pytest.raises(AccessDenied, match="Get"):
            await keeper.engine_of("a").commit(SPACE, batch("a", when=(probe,)))
        with pytest.raises(AccessDenied, match="Get"):
            await keeper.engine_of("a").commit(SPACE, batch("a", Put("records/mine", b"1"), when=(probe,)))
    assert keeper.witness.seen == []


@pytest.mark.parametrize("prefix", ["", "rec", "records", "system/", "audit/", "unknown/"])
async def test_a_watch_or_scan_outside_of_one_subspace_is_denied(prefix: str) -> None:
    keeper = Keeper()
    engine = keeper.engine_of("a")
    with pytest.raises(AccessDenied):
        await engine.scan(SPACE, prefix)
    with pytest.raises(AccessDenied):
        await anext(aiter(engine.watch(SPACE, prefix, live=False)), None)
    with pytest.raises(AccessDenied):
        await anext(aiter(engine.watch(SPACE, "records/", prefix, live=False)), None)
    with pytest.raises(AccessDenied):
        await anext(aiter(engine.watch(SPACE, live=False)), None)
    with pytest.raises(AccessDenied):
        await engine.commit(SPACE, batch("a", Put("records/k", b"1"), when=(Empty(prefix),)))
    assert keeper.witness.seen == []
    await keeper.admin.scan(SPACE, prefix)


async def test_a_watch_needs_watch_and_the_right_to_read() -> None:
    keeper = Keeper(allowing("Watch", "Get"))
    engine = keeper.engine_of("a")
    assert [commit async for commit in engine.watch(SPACE, "records/", "lists/", live=False)] == []
    with pytest.raises(AccessDenied, match="Lock"):
        await anext(aiter(engine.watch(SPACE, "locks/", live=False)), None)
    keeper.policy.reload(allowing("Get"))
    with pytest.raises(AccessDenied, match="Watch"):
        await anext(aiter(engine.watch(SPACE, "records/", live=False)), None)


async def test_a_watch_tells_of_a_commit_only_what_may_be_read() -> None:
    keeper = Keeper(allowing("*"))
    await keeper.admin.commit(
        SPACE,
        batch(
            "root", Put("records/k", b"1"), Put("system/x", b"1"), Put("locks/lock/l/1", b"{}"), Put("audit/y", b"1")
        ),
    )
    engine = keeper.engine_of("a")
    told = [
        [change.key for change in commit.changes]
        async for commit in engine.watch(SPACE, "records/", cursor="r0", live=False)
    ]
    assert told == [["records/k"]]
    # Without a prefix, for who may read the audit: all that may be read, and nothing else.
    told = [[change.key for change in commit.changes] async for commit in engine.watch(SPACE, cursor="r0", live=False)]
    assert told == [["records/k", "locks/lock/l/1", "audit/y"]]


async def test_a_watch_ends_when_the_right_to_it_is_taken_away() -> None:
    keeper = Keeper(allowing("Get", "Set", "Watch"))
    engine = keeper.engine_of("a")
    watch = aiter(engine.watch(SPACE, "records/"))
    first = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await engine.commit(SPACE, batch("a", Put("records/k", b"1")))
    assert (await first).changes[0].key == "records/k"
    keeper.policy.reload(allowing("Set", "Watch"))
    await engine.commit(SPACE, batch("a", Put("records/k", b"2")))
    with pytest.raises(AccessDenied, match="Get"):
        await anext(watch)


async def test_nobody_but_an_administrator_writes_the_store_s_own_book_keeping() -> None:
    keeper = Keeper(allowing("*"))
    for role in ("agent", "orchestrator"):
        engine = keeper.engine_of("a", role)  # type: ignore[arg-type]
        for key in ("audit/head", "audit/notes/1", "system/settings", "unknown/k"):
            for operation in (Put(key, b"1"), Delete(key), Increment(key, 1), Touch(key, 1000), Push(f"{key}/", b"1")):
                with pytest.raises(AccessDenied):
                    await engine.commit(SPACE, batch("a", operation))
        with pytest.raises(AccessDenied):
            await engine.get(SPACE, ["system/settings"])
        with pytest.raises(AccessDenied):
            await engine.get(SPACE, ["records/k", "system/settings"])
    await keeper.admin.commit(SPACE, batch("root", Put("system/settings", b"1"), Put("anything/k", b"1")))


async def test_deny_wins_and_what_is_not_named_is_denied() -> None:
    rules = Rules(
        (
            AccessRule("worker-*", ("Get", "Set", "Increment"), ("Delete",)),
            AccessRule("worker-7", ("*",)),
            AccessRule("admin", ("*",)),
        ),
        (),
        (),
    )
    keeper = Keeper(rules)
    worker, seven, stranger = (keeper.engine_of(name) for name in ("worker-1", "worker-7", "Worker-1"))
    await worker.commit(SPACE, batch("worker-1", Put("records/k", b"1")))
    await seven.commit(SPACE, batch("worker-7", Put("records/k", b"1"), Put("records/l", b"1")))
    for engine, name in ((worker, "worker-1"), (seven, "worker-7")):
        with pytest.raises(AccessDenied, match="Delete"):
            await engine.commit(SPACE, batch(name, Delete("records/k")))
    with pytest.raises(AccessDenied, match="Transaction"):
        await worker.commit(SPACE, batch("worker-1", Put("records/k", b"1"), Put("records/l", b"1")))
    with pytest.raises(AccessDenied, match="Get"):
        await stranger.get(SPACE, ["records/k"])


async def test_the_verbs_of_the_role_count_where_there_are_no_rules() -> None:
    keeper = Keeper(FREELY)
    with pytest.raises(AccessDenied, match="Audit"):
        await keeper.engine_of("a").get(SPACE, ["audit/head"])
    assert await keeper.engine_of("a", "orchestrator").get(SPACE, ["audit/head"]) == [None]
    assert await keeper.engine_of("a").get(SPACE, ["records/k", "locks/lock/l/1"]) == [None, None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AccessRule("*", ("Get", "Sett")),
        lambda: AccessRule("*", (), ("Admin",)),
        lambda: RateLimit("*", 0),
        lambda: RateLimit("*", float("nan")),
        lambda: RateLimit("*", 10, 0),
        lambda: Quota("*", -1),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_when_they_are_made(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput):
        make()


# --- identity ---


async def test_a_sender_does_not_name_itself() -> None:
    keeper = Keeper()
    engine = keeper.engine_of("mallory")
    for actor in ("alice", SYSTEM_ACTOR):
        with pytest.raises(AccessDenied, match="mallory"):
            await engine.commit(SPACE, batch(actor, Put("records/k", b"1")))
    with pytest.raises(AccessDenied, match="mallory"):
        await engine.commit(SPACE, batch("mallory", Put("records/k", b"1", owner="alice")))
    await engine.commit(SPACE, batch("mallory", Put("records/k", b"1", owner="mallory")))
    assert {key: entry.owner for key, entry in (await keeper.entries()).items()} == {"records/k": "mallory"}


async def test_an_administrator_acts_as_anybody() -> None:
    keeper = Keeper(allowing())
    await keeper.admin.commit(SPACE, batch("alice", Put("locks/lock/l/1", b"{}"), Put("records/k", b"1", owner="bob")))
    await keeper.admin.commit(SPACE, batch(SYSTEM_ACTOR, Delete("locks/lock/l/1")))
    assert {entry.owner for entry in (await keeper.entries()).values()} == {"bob"}


def test_no_agent_has_the_store_s_name_or_every_space() -> None:
    keeper = Keeper()
    with pytest.raises(InvalidInput):
        keeper.policy.engine_for(Identity(SYSTEM_ACTOR, "agent", SPACE))
    with pytest.raises(InvalidInput):
        keeper.policy.engine_for(Identity("alice", "orchestrator", "*"))


async def test_closing_a_connection_leaves_the_engine_open() -> None:
    keeper = Keeper()
    await keeper.engine_of("a").close()
    assert await keeper.engine_of("b").get(SPACE, ["records/k"]) == [None]


# --- spaces ---


async def test_another_space_is_denied_in_the_same_words_whether_it_exists_or_not() -> None:
    keeper = Keeper()
    await keeper.admin.commit("fabrikam", batch("root", Put("records/k", b"1")))
    keeper.witness.seen.clear()
    engine = keeper.engine_of("a")
    words = set()
    for space in ("fabrikam", "nowhere", "_holdfast", "*", ""):
        for attempt in (
            engine.commit(space, batch("a", Put("records/k", b"1"))),
            engine.commit(space, batch("a", Delete("records/k"))),
            engine.commit(space, batch("a")),
            engine.get(space, ["records/k"]),
            engine.get(space, ["records/k", "records/l"]),
            engine.scan(space, "records/"),
            anext(aiter(engine.watch(space, "records/"))),
            engine.spaces(space),
            engine.create(space),
            engine.drop(space),
            engine.compact(space, 1),
            engine.load(space, [], 1),
        ):
            with pytest.raises(AccessDenied) as caught:
                await attempt
            words.add(str(caught.value))
    assert len(words) == 1
    assert keeper.witness.seen == []


async def test_who_may_read_nothing_is_not_told_who_keeps_how_much() -> None:
    keeper = Keeper(allowing("Set"))
    await keeper.admin.commit(SPACE, batch("bob", Put("records/secret-project", b"1")))
    engine = keeper.engine_of("a")
    for [info] in (await engine.spaces(), await engine.spaces(SPACE), [await engine.create(SPACE)]):
        assert info.usage == []
        assert (info.durability, info.revision) == ("sync", 1)
    async with holdfast.open("memory:", clock=keeper.clock, background=False) as store:
        space = store.seen_through(engine, SPACE, "a", Coordination(Leases(keeper.clock), engine))
        assert (await space.info()).revision == 1
        with pytest.raises(AccessDenied, match="Get"):  # and not told a number that is wrong
            await space.records.size()
        keeper.policy.reload(allowing("Get"))
        assert [each.owner for each in (await space.info()).usage] == ["bob"]
        assert await space.records.size() == 1


async def test_one_sees_and_makes_one_s_own_space_only() -> None:
    keeper = Keeper()
    await keeper.admin.create("fabrikam", "async")
    engine = keeper.engine_of("a")
    assert await engine.spaces() == await engine.spaces(SPACE) == []
    with pytest.raises(AccessDenied):
        await engine.create(SPACE, "volatile")
    with pytest.raises(AccessDenied):
        await engine.create(SPACE, audit_reads=True)
    await engine.create(SPACE)
    assert (await engine.create(SPACE)).durability == "sync"
    assert [info.name for info in await engine.spaces()] == [SPACE]
    assert [info.name for info in await keeper.admin.spaces()] == [SPACE, "fabrikam"]
    for attempt in (engine.drop(SPACE), engine.compact(SPACE, 1), engine.load(SPACE, [], 1), engine.inspect()):
        with pytest.raises(AccessDenied):
            await attempt
    await keeper.admin.drop(SPACE)
    assert await keeper.admin.inspect()


async def test_an_administrator_of_one_space_stays_in_it() -> None:
    keeper = Keeper()
    admin = keeper.engine_of("root", "admin", SPACE)
    await admin.commit(SPACE, batch("alice", Put("system/x", b"1")))
    for attempt in (admin.get("fabrikam", ["records/k"]), admin.drop("fabrikam"), admin.inspect()):
        with pytest.raises(AccessDenied):
            await attempt


async def test_rules_are_reloaded_for_connections_that_are_open() -> None:
    keeper = Keeper(allowing("Get"))
    engine = keeper.engine_of("a")
    with pytest.raises(AccessDenied):
        await engine.commit(SPACE, batch("a", Put("records/k", b"1")))
    keeper.policy.reload(allowing("Get", "Set"))
    await engine.commit(SPACE, batch("a", Put("records/k", b"1")))
    keeper.policy.reload(allowing("Set"))
    with pytest.raises(AccessDenied):
        await engine.get(SPACE, ["records/k"])


async def test_whoever_is_told_of_denials_cannot_break_a_request() -> None:
    def explode(denial: object) -> None:
        raise RuntimeError("told")

    keeper = Keeper(allowing("Get"))
    keeper.policy._denied = explode
    with pytest.raises(AccessDenied):
        await keeper.engine_of("a").commit(SPACE, batch("a", Put("records/k", b"1")))


async def test_every_refusal_is_told_with_who_where_what_and_why() -> None:
    keeper = Keeper(allowing("Get"))
    with pytest.raises(AccessDenied):
        await keeper.engine_of("a").commit(SPACE, batch("a", Delete("records/k")))
    with pytest.raises(AccessDenied):
        await keeper.engine_of("a").get("fabrikam", ["records/k"])
    [first, second] = keeper.denials
    assert (first.identity.agent, first.space, first.verb, first.key, first.code) == (
        "a", SPACE, "Delete", "records/k", "access_denied",
    )  # fmt: skip
    assert "Delete" in first.reason
    assert (second.space, second.verb, second.key) == ("fabrikam", "Get", "records/k")


# --- nothing hides: random rules and batches against the rules read naively ---

KEYS = (
    "records/1", "records/2", "lists/l/1/1", "sets/s/1/1", "locks/lock/l/1", "permits/semaphore/s", "blobs/x",
    "queues/ready/q/499/0000000000000000001/@a", "queues/ready/q/499/0000000000000000002",
    "queues/ready/q/499/0000000000000000003/@b", "queues/q/1", f"consumers/q/{'0' * 30}", "consumers/q/-", "depths/q/ready",
    "depths/q/other", "dedup/q/x", "reserved/q/-/499/0000000000000000004", "reasons/q/0000000000000000004", "documents/d", "correlations/c", "sections/documents/d/a/1", "sections/documents/d/b/1", "sections/a",
    "history/documents/d/1", "audit/log/1", "system/settings", "other/1",
)  # fmt: skip
PREFIXES = (
    "records/p/",
    "lists/l/1/",
    "locks/lock/l/",
    "queues/in/",
    "queues/ready/q/",
    "queues/ready/q/499/",
    "queues/delayed/q/499/",
    f"reserved/q/{'0' * 30}/",
    "blobs/x/",
    "history/documents/d/",
    "history/documents/",
    "sections/documents/d/a/",
    "audit/notes/",
    "system/q/",
)
key = st.sampled_from(KEYS)
prefix = st.sampled_from(PREFIXES)
operation = st.one_of(
    st.builds(Put, key, st.just(b"1"), st.sampled_from((None, 1000))),
    st.builds(Delete, key),
    st.builds(Increment, key, st.just(1)),
    st.builds(Touch, key, st.just(1000)),
    st.builds(Push, prefix, st.just(b"1"), st.sampled_from((None, 1000))),
    st.tuples(prefix, prefix, st.sampled_from((None, *KEYS)), st.sampled_from((None, "depths/q/reserved", "records/1")))
    .filter(lambda drawn: drawn[0] != drawn[1])
    .map(lambda drawn: Take(drawn[0], drawn[1], source_counter=drawn[2], target_counter=drawn[3])),
    st.just(Take("queues/ready/q/", f"reserved/q/{'0' * 30}/")),
)
condition = st.one_of(
    st.builds(Absent, key),
    st.builds(Present, key),
    st.builds(Mine, key),
    st.builds(VersionIs, key, st.just(1)),
    st.builds(ValueIs, key, st.just(b"1")),
    st.builds(AtLeast, key, st.just(1)),
    st.builds(Empty, prefix),
)
verbs = st.lists(st.sampled_from((*VERBS, *VERBS, "*")), max_size=9).map(tuple)
rule = st.builds(AccessRule, st.sampled_from(("*", "a", "a*", "b")), verbs, verbs.map(lambda drawn: drawn[:2]))
rules = st.lists(rule, max_size=4).map(lambda drawn: Rules(tuple(drawn), (), ()))


def may(rules: Rules, verb: str) -> bool:
    """Whether agent `a` may: as a person would read the rules."""
    named = [rule for rule in rules.access_control or () if rule.agent_pattern in ("*", "a", "a*")]
    if any(word in (verb, "*") for rule in named for word in rule.deny):
        return False
    return any(word in (verb, "*") for rule in named for word in rule.allow)


def reads(key: str) -> str | None:
    """What reading needs; None is never."""
    if key.startswith(("locks/", "permits/")):
        return "Lock"
    if key.startswith("audit/"):
        return "Audit"
    return None if key.startswith(("system/", "other/")) else "Get"


def needs(sent: Batch) -> Iterable[str | None]:
    """What a batch needs, from the table in the guide."""
    touched = [
        part.prefix if isinstance(part, Push) else part.key for part in sent.operations if not isinstance(part, Take)
    ]
    if sum(name.startswith("records/") for name in touched) > 1:
        yield "Transaction"
    for part in sent.conditions:
        yield reads(part.prefix if isinstance(part, Empty) else part.key)
    if not counts(sent):
        yield None
    for part in sent.operations:
        if isinstance(part, Take):
            hands = (part.source, part.target) == ("queues/ready/q/", f"reserved/q/{'0' * 30}/")
            counters = part.source_counter, part.target_counter
            yield "Reserve" if hands and counters == ("depths/q/ready", "depths/q/reserved") else None
            continue
        name = part.prefix if isinstance(part, Push) else part.key
        home = name.split("/")[0]
        if home in ("audit", "system", "other"):
            yield None
        elif home in ("documents", "correlations"):
            yield None  # orchestrators write these
        elif home == "history":
            yield None  # agents tell there of what they contribute in the same batch
        elif home == "sections" and (
            not name.startswith("sections/documents/d/a/") or isinstance(part, Push | Increment)
        ):
            yield None
        elif home == "permits":
            yield "Lock" if isinstance(part, Delete) or (isinstance(part, Put) and part.ttl_ms is None) else None
        elif home in ("locks", "consumers", "dedup") and isinstance(part, Put | Push) and part.ttl_ms is None:
            yield None  # it is held by a lease
        elif home == "locks":
            kept = not isinstance(part, Put) or ValueIs(name, part.value) in sent.conditions
            yield {Delete: "Unlock", Increment: None}.get(type(part), "Lock") if kept else None
        elif home in ("queues", "consumers", "depths", "dedup", "reserved", "reasons"):
            yield needs_for_messages(
                home, name, part, {each.key for each in sent.operations if isinstance(each, Delete)}
            )
        elif isinstance(part, Delete):
            yield "Delete"
        elif isinstance(part, Increment):
            yield "Increment"
        elif isinstance(part, Put) and home in ("records", "sections"):
            yield "CompareAndSwap" if any(getattr(each, "key", None) == name for each in sent.conditions) else "Set"
        else:
            yield "Set"


def counts(sent: Batch) -> bool:
    """Whether a batch adds to the numbers of messages what it does to messages, each of them once."""
    added: Counter[str] = Counter()
    put: set[str] = set()
    deleted: set[str] = set()
    for part in sent.operations:
        if isinstance(part, Take):
            continue
        name = part.prefix if isinstance(part, Push) else part.key
        if isinstance(part, Increment) and name.startswith("depths/"):
            added[name] += part.delta
        place = depth(name)
        if place is None:
            continue
        added[place] -= -1 if isinstance(part, Delete) else 1
        if isinstance(part, Delete):
            if name in put | deleted:
                return False
            deleted.add(name)
        elif isinstance(part, Put | Push):
            if part.ttl_ms is not None or name in put:
                return False
            if isinstance(part, Put):
                put.add(name)
    taken = (
        {"depths/q/ready", "depths/q/reserved"} if any(isinstance(part, Take) for part in sent.operations) else set()
    )
    forgotten = {part.key for part in sent.operations if isinstance(part, Delete)}
    return not any(added.values()) and not added.keys() & (taken | forgotten)


def needs_for_messages(home: str, name: str, part: object, deleted: set[str]) -> str | None:
    """`deleted` are the keys that the batch deletes: a message is written on by who has it and gives it up."""
    if home == "queues":
        if isinstance(part, Push):
            return "Set" if name == "queues/ready/q/499/" else None
        if name == "queues/q/1" or not isinstance(part, Put | Delete):
            return None
        if isinstance(part, Delete):
            return "Delete"
        return "Set" if name.endswith("/@a") or name in deleted else None
    if home == "reserved":
        return "Reserve" if isinstance(part, Delete) or (isinstance(part, Put) and name in deleted) else None
    if home == "reasons":
        settled = "reserved/q/-/499/0000000000000000004" in deleted
        return "Reserve" if settled and isinstance(part, Put | Delete) else None
    if home == "consumers":
        return None if name == "consumers/q/-" or isinstance(part, Increment) else "Reserve"
    if home == "depths":
        return "Set" if name == "depths/q/ready" and isinstance(part, Increment | Delete) else None
    return {Put: "Set", Delete: "Delete"}.get(type(part))


@settings(max_examples=examples(200), deadline=None)
@given(rules, st.lists(operation, max_size=4), st.lists(condition, max_size=3), st.booleans())
def test_nothing_denied_reaches_the_engine_and_everything_allowed_does(
    rules: Rules, operations: list[object], conditions: list[object], counting: bool
) -> None:
    sent = batch("a", *(counted(*operations) if counting else operations), when=tuple(conditions))
    allowed = all(verb is not None and may(rules, verb) for verb in needs(sent))
    keeper = Keeper(rules)
    refused = asyncio.run(refusal(keeper.engine_of("a").commit(SPACE, sent)))
    if allowed:  # then only the state of the space can refuse it
        assert not isinstance(refused, AccessDenied) or refused.__cause__ is not None
    else:
        assert isinstance(refused, AccessDenied)
    assert bool(keeper.witness.seen) == allowed


@settings(max_examples=examples(100), deadline=None)
@given(
    rules, st.lists(key, min_size=1, max_size=3), st.sampled_from((*KEYS, *PREFIXES, "", "rec", "records", "locks/"))
)
def test_nothing_that_may_not_be_read_is_read(rules: Rules, keys: list[str], start: str) -> None:
    def permits(verb: str | None) -> bool:
        return verb is not None and may(rules, verb)

    async def reached(attempt: object) -> bool:
        keeper.witness.seen.clear()
        try:
            await attempt  # type: ignore[misc]
        except AccessDenied:
            assert keeper.witness.seen == []
            return False
        return bool(keeper.witness.seen)

    async def work() -> None:
        engine = keeper.engine_of("a")
        inside = "/" in start and permits(reads(start))
        assert await reached(engine.get(SPACE, keys)) == all(permits(reads(key)) for key in keys)
        assert await reached(engine.scan(SPACE, start)) == inside
        watch = engine.watch(SPACE, start, live=False)
        assert await reached(anext(aiter(watch), None)) == (inside and may(rules, "Watch"))

    keeper = Keeper(rules)
    asyncio.run(work())


async def test_reads_of_a_guarded_space_are_noted_although_the_reader_may_not_write_notes() -> None:
    keeper = Keeper(allowing("Get"))
    await keeper.admin.commit(SPACE, batch("root", Put("records/k", b"1")))
    reader = AuditedReads(keeper.engine_of("a"), "a", keeper.engine)
    assert len(await reader.get(SPACE, ["records/k"])) == 1
    [note] = (await keeper.entries("audit/notes/")).values()
    assert decode(note.value)["actor"] == "a"
    with pytest.raises(AccessDenied):
        await AuditedReads(keeper.engine_of("a"), "a").get(SPACE, ["records/k"])


@pytest.mark.parametrize("role", ["agent", "admin"])
async def test_what_is_no_batch_at_all_is_invalid_in_words(role: Role) -> None:
    keeper = Keeper()
    engine = keeper.engine_of("a", role)
    broken: list[Any] = [
        batch("a", "nonsense"),
        batch("a", Put(5, b"1")),  # type: ignore[arg-type]
        batch("a", Put("records/k", 5)),  # type: ignore[arg-type]
        batch("a", Put("records/k", "text"), Put("records/l", b"1")),  # type: ignore[arg-type]
        batch("a", Absent("records/k")),
        batch("a", Put("records/k", b"1"), when=("nonsense",)),
        batch("a", Delete(None)),  # type: ignore[arg-type]
    ]
    for each in broken:
        with pytest.raises((InvalidInput, AccessDenied)):
            await engine.commit(SPACE, each)
    with pytest.raises(InvalidInput):
        await engine.get(SPACE, [5])  # type: ignore[list-item]
    assert await keeper.entries() == {}


async def test_a_key_that_is_no_text_is_invalid_for_agents_too() -> None:
    keeper = Keeper()
    for key in ("records/\ud800", "records/\0", "records/" + "x" * 2000):
        for sent in (batch("a", Put(key, b"1")), batch("a", Put(key, b"1"), Put("records/l", b"1"))):
            with pytest.raises(InvalidInput):
                await keeper.engine_of("a").commit(SPACE, sent)
        with pytest.raises(InvalidInput):
            await keeper.engine_of("a").get(SPACE, [key])


async def test_an_error_does_not_show_what_may_not_be_read() -> None:
    keeper = Keeper(allowing("Increment"))
    await keeper.admin.commit(SPACE, batch("root", Put("records/secret", b'"the password"')))
    with pytest.raises(InvalidInput) as caught:
        await keeper.engine_of("a").commit(SPACE, batch("a", Increment("records/secret", 1)))
    assert "password" not in f"{caught.value}{caught.value.__cause__}"
    keeper.policy.reload(allowing("Increment", "Get"))
    with pytest.raises(InvalidInput, match="'secret' holds text"):  # its value to nobody: errors are logged
        await keeper.engine_of("a").commit(SPACE, batch("a", Increment("records/secret", 1)))


async def test_conditions_that_ownership_adds_count_as_conditions() -> None:
    keeper = Keeper()
    many = tuple(Absent(f"blobs/{i}") for i in range(256))
    with pytest.raises(InvalidInput, match="ownership"):
        await keeper.engine_of("a").commit(SPACE, batch("a", Put("blobs/x", b"1"), when=many))


async def test_nonsense_for_another_space_is_denied_like_anything_else() -> None:
    keeper = Keeper()
    with pytest.raises(AccessDenied):
        await keeper.engine_of("a").commit("fabrikam", batch("a", "nonsense"))
