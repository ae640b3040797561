"""A client written by hand, with frames of its own making, against a keeper's rules.

It cannot free, take over, extend or overtake what another agent holds, cannot write as another, cannot write where nobody
may, and cannot see another space, whatever it sends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import AccessDenied, Conflict, Error, InvalidInput
from holdfast.engine import (
    Absent,
    Batch,
    Delete,
    Empty,
    Entry,
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
from holdfast.engines.remote import RemoteEngine
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import (
    Commit,
    Compact,
    Create,
    Drop,
    Failed,
    Get,
    Grant,
    Inspect,
    Load,
    Ping,
    Scan,
    Spaces,
    Watch,
    frame,
)
from tests.server.live import SPACE, Hand, by_hand, make_token

FREELY = {"policies": {"rate_limits": [], "quotas": []}}


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(**FREELY) as running:
        yield running


@pytest.fixture
async def mallory(keeper: KeeperServer) -> AsyncIterator[Hand]:
    async with by_hand(keeper, await make_token(keeper, "mallory")) as hand:
        yield hand


async def everything(engine: RemoteEngine, space: str = SPACE) -> list[Entry]:
    """What is there, but the notes of refusals and the store's own affairs."""
    page = await engine.scan(space, "", limit=10_000)
    return [entry for entry in page.entries if entry.key.split("/")[0] not in ("audit", "system")]


@pytest.fixture
async def admin(keeper: KeeperServer) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.open(keeper.url, token=keeper.admin)
    yield engine
    await engine.close()


async def test_the_lock_of_another_cannot_be_freed_taken_extended_or_overtaken(
    keeper: KeeperServer, mallory: Hand, admin: RemoteEngine
) -> None:
    token = await make_token(keeper, "alice")
    async with holdfast.open(keeper.url, token=token) as store:
        guard = await store.space(SPACE).lock("vault", ttl="60s").acquire()
        [entry] = (await admin.scan(SPACE, "locks/")).entries
        line, place = entry.key.rsplit("/", 1)
        before = await everything(admin)
        attempts: list[Any] = [
            (Delete(entry.key),),
            (Put(entry.key, b'{"instance":"1"}', 60_000),),
            (Put(entry.key, entry.value, 60_000, entry.tag, "mallory"),),
            (Put(entry.key, entry.value, 60_000, entry.tag, "alice"),),
            (Touch(entry.key, 10**9),),
            (Increment(entry.key, 1),),
            (Put(f"{line}/0000000000000000000", b'{"instance":"1"}', 60_000),),
            (Put(f"{line}/!", b'{"instance":"1"}', 60_000),),
            (Push(f"{line}/{place}/", b'{"instance":"1"}', 60_000),),
            (Push(f"{line}/", b'{"instance":"1"}'),),
            (Push("locks/lock/", b'{"instance":"1"}', 60_000),),
            (Take(f"{line}/", "queues/mine/", 1),),
            (Take(f"{line}/", "records/mine/", 1),),
            (Put("records/k", b"1"), Delete(entry.key)),
        ]
        for operations in attempts:
            with pytest.raises((AccessDenied, InvalidInput)):
                await mallory.commit(*operations)
            assert await everything(admin) == before, operations
        with pytest.raises(Conflict):
            await mallory.commit(Put("records/k", b"1"), when=(Mine(entry.key),))
        await guard.space.records.set("still", "held")
        await guard.release()


async def test_nobody_writes_as_another_actor_or_for_another_owner(mallory: Hand, admin: RemoteEngine) -> None:
    before = await everything(admin)
    for actor in ("alice", "admin", "holdfast", "local", ""):
        with pytest.raises((AccessDenied, InvalidInput)):
            await mallory.ask(Commit(mallory.id(), SPACE, Batch(actor, (Put("records/k", b"1"),))))
    for owner in ("alice", "admin", "holdfast"):
        with pytest.raises(AccessDenied):
            await mallory.commit(Put("records/k", b"1", owner=owner))
    assert await everything(admin) == before


async def test_nobody_writes_where_only_the_store_does(mallory: Hand, admin: RemoteEngine) -> None:
    with pytest.raises(AccessDenied):
        await mallory.commit(Put(f"tokens/{'a' * 16}", b'{"name":"mallory","role":"admin"}'))
    before = await everything(admin)
    for key in ("audit/notes/1", "audit/head", "system/caretaker", "system/settings", "tokens/x", "unknown/x", "x/y"):
        attempts = [Put(key, b"1"), Delete(key), Increment(key, 1), Touch(key, 1000)]
        attempts += [Push(f"{key}/", b"1", 1000), Take(f"{key}/", "queues/a/", 1), Take("queues/a/", f"{key}/", 1)]  # type: ignore[list-item]
        for operation in attempts:
            with pytest.raises(AccessDenied):
                await mallory.commit(operation)
            with pytest.raises(AccessDenied):
                await mallory.commit(Put("records/k", b"1"), operation)
        for condition in (
            Present(key),
            Absent(key),
            Mine(key),
            ValueIs(key, b"1"),
            VersionIs(key, 1),
            Empty(f"{key}/"),
        ):
            with pytest.raises(AccessDenied):
                await mallory.commit(Put("records/k", b"1"), when=(condition,))
        with pytest.raises(AccessDenied):
            await mallory.ask(Get(mallory.id(), SPACE, ["records/k", key]))
        with pytest.raises(AccessDenied):
            await mallory.ask(Scan(mallory.id(), SPACE, f"{key}/", None, 10, False))
        with pytest.raises(AccessDenied):
            await mallory.ask(Watch(mallory.id(), SPACE, ["records/", f"{key}/"], "r0", False, 1000))
    for prefix in ("", "r", "/", "record", "audit/"):
        with pytest.raises((AccessDenied, InvalidInput)):
            await mallory.ask(Scan(mallory.id(), SPACE, prefix, None, 10, False))
    with pytest.raises(AccessDenied):
        await mallory.ask(Watch(mallory.id(), SPACE, [], "r0", False, 1000))
    assert await everything(admin) == before


@pytest.mark.parametrize("space", ["other", "_holdfast", "*", "", "Contoso", "contoso "])
async def test_nobody_does_anything_in_another_space(keeper: KeeperServer, mallory: Hand, space: str) -> None:
    asked = [
        Commit(1, space, Batch("mallory", (Put("records/k", b"1"),))),
        Get(2, space, ["records/k"]),
        Scan(3, space, "records/", None, 10, False),
        Watch(4, space, ["records/"], "r0", False, 1000),
        Watch(5, space, ["records/"], None, True, 1000),
        Create(6, space, "sync", False),
        Spaces(7, space),
        Drop(8, space),
        Load(9, space, [], 1 << 40),
        Compact(10, space, 1 << 40),
        Inspect(11),
    ]
    for message in asked:
        with pytest.raises(AccessDenied):
            await mallory.ask(message)
    assert (await mallory.ask(Ping(12))).id == 12


async def test_an_administrators_work_in_ones_own_space_is_denied(mallory: Hand) -> None:
    for message in (Drop(1, SPACE), Load(2, SPACE, [], 1 << 40), Compact(3, SPACE, 1 << 40), Inspect(4)):
        with pytest.raises(AccessDenied):
            await mallory.ask(message)


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"{", b"NaN", b'"\xff"', b"1e999", b"[" * 5000])
async def test_what_is_not_json_is_refused(mallory: Hand, admin: RemoteEngine, value: bytes) -> None:
    before = await everything(admin)
    for operations in ((Put("records/k", value),), (Push("locks/lock/l/", value, 1000),), (Put("lists/l/1/1", value),)):
        with pytest.raises(InvalidInput, match="must be JSON"):
            await mallory.commit(*operations)
    assert await everything(admin) == before


async def test_frames_that_are_none_end_the_connection_and_nothing_else(keeper: KeeperServer, mallory: Hand) -> None:
    mallory.writer.write(b"\x00\x00\x00\x03\xc1\xc1\xc1")
    with pytest.raises(InvalidInput):
        await mallory.answer(1)
    with pytest.raises(EOFError):
        await mallory.next()
    async with by_hand(keeper, await make_token(keeper, "careful")) as hand:
        hand.writer.write(frame(Grant(77, 1 << 62)))
        body = msgspec.msgpack.encode([2, 5, SPACE, "no batch"])
        hand.writer.write(len(body).to_bytes(4, "big") + body)
        with pytest.raises(InvalidInput):
            await hand.answer(5)
        assert (await hand.ask(Ping(6))).id == 6


# --- one space never sees another ---

TENANTS = ("acme", "globex")
keys = st.sampled_from(["records/a", "records/b", "lists/l/1/1", "locks/lock/l/1", "queues/q/1", "system/x", "audit/x"])
prefixes = st.sampled_from(["records/", "locks/lock/l/", "queues/q/", "lists/l/1/", "sets/s/1/", "", "r"])
spaces = st.sampled_from([*TENANTS, *TENANTS, "_holdfast", "*", "nowhere"])
operations = st.one_of(
    st.builds(
        Put, keys, st.just(b"SECRET"), st.sampled_from([None, 60_000]), st.just(""), st.sampled_from([None, "a"])
    ),
    st.builds(Push, prefixes, st.just(b"SECRET"), st.sampled_from([None, 60_000])),
    st.builds(Delete, keys),
    st.builds(Increment, keys, st.integers(-2, 2)),
    st.builds(Touch, keys, st.just(1000)),
    st.builds(Take, st.just("queues/q/"), prefixes, st.just(1)),
)
conditions = st.one_of(st.builds(Absent, keys), st.builds(Present, keys), st.builds(VersionIs, keys, st.integers(0, 5)))
requests = st.one_of(
    st.builds(
        lambda space, actor, ops, when, id: Commit(0, space, Batch(actor, tuple(ops), tuple(when), id)),
        spaces,
        st.sampled_from(["a", "a", "b", "admin"]),
        st.lists(operations, max_size=3),
        st.lists(conditions, max_size=2),
        st.sampled_from([None, "r1", "r2"]),
    ),
    st.builds(Get, st.just(0), spaces, st.lists(keys, max_size=3)),
    st.builds(Scan, st.just(0), spaces, prefixes, st.none(), st.integers(-1, 5), st.booleans()),
    st.builds(
        Watch,
        st.just(0),
        spaces,
        st.lists(prefixes, max_size=2),
        st.sampled_from(["r0", "r3", None, "?"]),
        st.just(False),
        st.just(1 << 20),
    ),
    st.builds(Create, st.just(0), spaces, st.just("sync"), st.booleans()),
    st.builds(Spaces, st.just(0), st.one_of(st.none(), spaces)),
    st.builds(Drop, st.just(0), spaces),
    st.builds(Load, st.just(0), spaces, st.just([]), st.integers(0, 1 << 40)),
    st.builds(Compact, st.just(0), spaces, st.integers(0, 100)),
    st.builds(Inspect, st.just(0)),
)


async def test_no_sequence_of_requests_shows_one_tenant_anything_of_another(keeper: KeeperServer) -> None:
    """Both have an agent `a`. What either is told names neither the other nor what the other wrote."""
    tokens = [await make_token(keeper, "a", tenant) for tenant in TENANTS]
    async with by_hand(keeper, tokens[0]) as first, by_hand(keeper, tokens[1], "second") as second:
        hands = (first, second)
        outcomes: Counter[str] = Counter()

        async def say(who: int, message: Any) -> None:
            mine, other, hand = TENANTS[who], TENANTS[1 - who], hands[who]
            message = msgspec.structs.replace(message, id=hand.id())
            if isinstance(message, Commit):
                value = msgspec.json.encode(f"written in {mine}")
                written = tuple(
                    msgspec.structs.replace(op, value=value) if isinstance(op, Put | Push) else op
                    for op in message.batch.operations
                )
                message = msgspec.structs.replace(message, batch=Batch(message.batch.actor, written, message.batch.conditions, message.batch.request_id))  # fmt: skip
            hand.told.clear()
            try:
                answer = await hand.ask(message)
            except Error as exc:
                answer = Failed(0, exc.code, str(exc), {"conflict": repr(exc.__dict__)})
            outcomes[answer.code if isinstance(answer, Failed) else "ok"] += 1
            said = repr(answer) + repr(hand.told)
            asked_for = message.space if not isinstance(message, Spaces | Inspect) else getattr(message, "name", None)
            if asked_for != other:
                assert other not in said, (message, said)
            assert f"written in {other}" not in said, (message, said)
            if asked_for not in (mine, None):
                assert isinstance(answer, Failed), (message, answer)
                assert answer.code in ("access_denied", "invalid_request"), (message, answer)

        loop = asyncio.get_running_loop()

        @settings(
            max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
        )
        @given(st.lists(st.tuples(st.integers(0, 1), requests), min_size=1, max_size=12))
        def sequence(steps: list[tuple[int, Any]]) -> None:
            async def play() -> None:
                for who, message in steps:
                    await say(who, message)

            asyncio.run_coroutine_threadsafe(play(), loop).result(60)

        await asyncio.to_thread(sequence)
        assert min(outcomes["ok"], outcomes["access_denied"]) > 20, outcomes
