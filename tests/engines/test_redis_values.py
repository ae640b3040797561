"""What Lua and Redis make hard: wide integers, raw bytes, odd keys, the words of refusals, ids that are remembered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import (
    FEED_VALUE_BYTES_MAX,
    REQUEST_WINDOW_MS,
    SCAN_MAX,
    Absent,
    AtLeast,
    Batch,
    Change,
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
    cursor_at,
)
from holdfast.engines import redis_engine
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.redis_engine import RedisEngine, space_keys
from holdfast.engines.redis_packing import entry_of, raw_of
from holdfast.errors import Error, InvalidInput
from holdfast.ids import new_id
from holdfast.testing.servers.redis import RedisServer

SPACE = "s"
EDGES = (0, 9, 10**9, 10**15, 2**31, 2**53, 10**18, 2**63)
NUMBERS = sorted(
    {
        sign * (edge + step)
        for edge in EDGES
        for step in (-2, -1, 0, 1, 2)
        for sign in (1, -1)
        if -(2**63) <= sign * (edge + step) < 2**63
    }
)
NO_INTEGERS = [b"", b"-0", b"01", b"+1", b" 1", b"1 ", b"1.0", b"1e3", b'"1"', b"null", b"[]", b"\xff", b"1\n", b"9" * 19,
               b"-" + b"9" * 19, b"1" * 20, b"9223372036854775808", b"-9223372036854775809", b"1" * 4000]  # fmt: skip

prefixes = itertools.count(1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return f"{redis_server.url}?prefix=values-{next(prefixes)}"


@pytest.fixture
async def engine(url: str, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    opened = await RedisEngine.open(url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def model(clock: ManualClock) -> MemoryEngine:
    return MemoryEngine(clock=clock)


async def outcome(engine: RedisEngine | MemoryEngine, *batches: Batch) -> list[object]:
    """Receipts, and errors with their words."""

    async def one(batch: Batch) -> object:
        try:
            return await engine.commit(SPACE, batch)
        except Error as exc:
            return type(exc), str(exc)

    return list(await asyncio.gather(*(one(batch) for batch in batches)))


def batch(*operations: object, when: tuple[object, ...] = (), request_id: str | None = None) -> Batch:
    return Batch("alice", operations, when, request_id)  # type: ignore[arg-type]


async def test_integers_are_exact_at_every_edge_of_doubles_and_of_64_bits(
    engine: RedisEngine, model: MemoryEngine
) -> None:
    """Every sum and comparison of two numbers near an edge, as the memory engine has it, its refusals included."""
    pairs = list(itertools.product(NUMBERS, NUMBERS))
    for start in range(0, len(pairs), 500):
        batches = []
        for i, (a, b) in enumerate(pairs[start : start + 500]):
            batches.append(batch(Put(f"n/{i}", b"%d" % a), Increment(f"n/{i}", b)))
            batches.append(batch(Put(f"m/{i}", b"%d" % a)))
            batches.append(batch(when=(AtLeast(f"m/{i}", b),)))
        assert await outcome(engine, *batches) == await outcome(model, *batches)
    assert (await engine.scan(SPACE, "", limit=SCAN_MAX)).entries == (
        await model.scan(SPACE, "", limit=SCAN_MAX)
    ).entries


async def test_what_is_no_canonical_integer_is_refused_in_the_same_words(
    engine: RedisEngine, model: MemoryEngine
) -> None:
    batches = [batch(Put(f"n/{i}", value)) for i, value in enumerate(NO_INTEGERS)]
    batches += [batch(Increment(f"n/{i}", 1)) for i in range(len(NO_INTEGERS))]
    batches += [batch(when=(AtLeast(f"n/{i}", 1),)) for i in range(len(NO_INTEGERS))]
    batches += [batch(when=(AtLeast("n/none", number),)) for number in (-1, 0, 1)]
    assert await outcome(engine, *batches) == await outcome(model, *batches)


async def test_refusals_have_the_words_of_the_specification(engine: RedisEngine, model: MemoryEngine) -> None:
    long = "q/" + "x" * 1000
    batches = [
        batch(Put("records/k", b"1"), Put("n/max", b"%d" % (2**63 - 1)), Put(long, b"1"), Put("n/text", b'"x"')),
        batch(when=(Absent("records/k"),)),
        batch(when=(Present("records/none"),)),
        batch(when=(VersionIs("records/k", 77),)),
        batch(when=(VersionIs("records/none", 2**63 - 1),)),
        batch(when=(ValueIs("records/k", b"2"),)),
        batch(when=(AtLeast("records/k", 2),)),
        batch(when=(AtLeast("records/none", 2),)),
        Batch("somebody else", (), (Mine("records/k"),)),
        batch(when=(Empty("records/"),)),
        batch(when=(Empty("q/"),)),
        batch(Increment("n/max", 1)),
        batch(Increment("n/max", 2**63 - 1)),
        batch(Touch("records/none", 1000)),
        batch(Take("q/", "a-longer-prefix-than-that-of-the-source/")),
        batch(Put("q/1", b"1"), Take("q/", "r/", source_counter="n/text")),
        batch(Put("records/k", b"2"), request_id="r"),
        batch(Put("records/k", b"3"), request_id="r"),
    ]
    assert await outcome(engine, *batches) == await outcome(model, *batches)


@pytest.mark.parametrize(
    "value",
    [b"", b"\0", b"a\0b", b"\xff\xfe", b"\n\n\n", b"[]", b"{}", b'""', b"null", b'{"a":[],"b":{}}', bytes(range(256)),
     b"x" * FEED_VALUE_BYTES_MAX, b"x" * (FEED_VALUE_BYTES_MAX + 1), b"x" * 255, b"x" * 256, b"x" * 65_535],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
async def test_values_are_bytes_and_come_back_as_they_were(engine: RedisEngine, value: bytes) -> None:
    receipt = await engine.commit(SPACE, batch(Put("q/1", value), request_id="put"))
    [entry] = await engine.get(SPACE, ["q/1"])
    assert entry is not None
    assert (entry.value, entry.version) == (value, receipt.version)
    taken = await engine.commit(SPACE, batch(Take("q/", "r/"), when=(ValueIs("q/1", value),), request_id="take"))
    assert (
        await engine.commit(SPACE, batch(Take("q/", "r/"), when=(ValueIs("q/1", value),), request_id="take")) == taken
    )
    [moved] = taken.results[0]  # type: ignore[misc]
    assert isinstance(moved, Entry)
    assert moved.value == value
    told = [
        change async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False) for change in commit.changes
    ]
    assert [change.size for change in told if change.exists] == [len(value)] * 2
    assert {change.value for change in told if change.exists} == {value if len(value) <= FEED_VALUE_BYTES_MAX else b""}


@pytest.mark.parametrize(
    "key",
    ["{a}/1", "}{/1", "a/{1}", "a*/1", "a?/[x]", "a/\\", "a/\n1", "a/ ", "a/'\"", "a/%7B", "[a/1", "(a/1", "-/1", "+/1",
     "a/\u00e9\U0010ffff", "a/\x7f\x01"],
    ids=ascii,
)  # fmt: skip
async def test_keys_are_any_text(engine: RedisEngine, key: str) -> None:
    await engine.commit(SPACE, batch(Put(key, b"1", ttl_ms=1000, tag="t"), Put("b/beside", b"1")))
    receipt = await engine.commit(SPACE, batch(Increment(key, 1), when=(Present(key),)))
    assert receipt.results == [2]
    assert [entry.key for entry in (await engine.scan(SPACE, key)).entries] == [key]
    assert [entry.key for entry in (await engine.scan(SPACE, key, reverse=True)).entries] == [key]
    assert [entry.key for entry in (await engine.scan(SPACE, "b/")).entries] == ["b/beside"]
    [info] = await engine.spaces(SPACE)
    assert {usage.subspace for usage in info.usage} == {key[: key.index("/")], "b"}


@pytest.mark.parametrize(
    "space", ["{", "}", "{}", "{a}b", "a}{b", "%7B", "%", "", " ", "a:b", "*", "[a]", "\n", "\u00e9"]
)
async def test_spaces_may_have_any_name_and_do_not_meet(engine: RedisEngine, space: str) -> None:
    await engine.commit(space, batch(Put("a/k", b"1"), Push("q/", b"1"), request_id="r"))
    assert [info.name for info in await engine.spaces()] == [space]
    assert await engine.get("{a", ["a/k"]) == [None]


def test_no_two_spaces_share_a_hash_tag() -> None:
    names = ["", "%", "%25", "{", "}", "%7B", "%7D", "{}", "a", "a}", "{a", "{a}"]
    tags = {space_keys("p", name).tag for name in names}
    assert len(tags) == len(names)
    assert not any(set("{}") & set(tag) for tag in tags)
    assert all(tags)


def test_an_entry_is_readable_text() -> None:
    entry = Entry("a/k", b'{"x":\n1}', 7, "Zo\u00eb", 1, 2, 3, "kind")
    assert raw_of(entry) == b'7\n1\n2\n3\nZo\xc3\xab\nkind\n{"x":\n1}'
    assert entry_of("a/k", raw_of(entry)) == entry
    with pytest.raises(InvalidInput):
        raw_of(Entry("a/k", b"1", 7, "two\nlines", 1, 2))


async def test_pages_reads_and_groups_larger_than_one_command_takes(engine: RedisEngine) -> None:
    """Lua's unpack ends near 8,000 arguments, Redis's commands at a million."""
    count = 9_500
    await engine.load(SPACE, [Entry(f"a/{i:05d}", b"%d" % i, i + 1, "bob", 1, 1) for i in range(count)], count)
    page = await engine.scan(SPACE, "a/", limit=SCAN_MAX)
    assert (len(page.entries), page.more, page.revision) == (count, False, count)
    assert [entry.value for entry in page.entries] == [b"%d" % i for i in range(count)]
    backwards = await engine.scan(SPACE, "a/", limit=count - 1, reverse=True)
    assert (backwards.entries, backwards.more) == (page.entries[:0:-1], True)
    keys = [f"a/{i:05d}" for i in reversed(range(count))]
    assert await engine.get(SPACE, [*keys, "a/none"]) == [*reversed(page.entries), None]
    operations = [tuple(Put(f"b/{n}/{i}", b"1", ttl_ms=1000) for i in range(128)) for n in range(100)]
    receipts = await asyncio.gather(*(engine.commit(SPACE, Batch("bob", each)) for each in operations))
    assert [receipt.version for receipt in receipts] == list(range(count + 1, count + 101))
    [info] = await engine.spaces(SPACE)
    assert {usage.subspace: usage.keys for usage in info.usage} == {"a": count, "b": 12_800}


async def test_a_group_that_is_too_large_for_one_script_is_sent_in_parts(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_engine, "ARGUMENTS_MAX", 40)
    receipts = await asyncio.gather(*(engine.commit(SPACE, batch(Increment("a/n", 1))) for _ in range(100)))
    assert [receipt.results for receipt in receipts] == [[i] for i in range(1, 101)]


async def test_the_feed_is_read_in_parts_that_fit_in_memory(engine: RedisEngine) -> None:
    value = b"x" * FEED_VALUE_BYTES_MAX
    for i in range(100):
        await engine.commit(SPACE, Batch("bob", tuple(Put(f"a/{i}/{n}", value) for n in range(4))))
    told: list[Change] = []
    async for commit in engine.watch(SPACE, cursor=cursor_at(0), live=False):
        told += commit.changes
    assert [change.key for change in told] == [f"a/{i}/{n}" for i in range(100) for n in range(4)]


async def test_ids_are_assigned_as_the_specification_has_them(
    engine: RedisEngine, model: MemoryEngine, clock: ManualClock
) -> None:
    for step in range(6):
        pushes = batch(*(Push("q/", b"1") for _ in range(128)))
        assert await outcome(engine, pushes) == await outcome(model, pushes)
        clock.set_back(1) if step == 2 else clock.advance("1ms")


async def test_request_ids_are_remembered_for_their_window_and_take_no_room_after_it(
    engine: RedisEngine, url: str, redis_server: RedisServer, clock: ManualClock
) -> None:
    names = space_keys(url.partition("=")[2], SPACE)

    def remembered() -> int:
        return sum(int(redis_server.command("HLEN", key)[1:]) for key in names.requests)

    first = batch(Increment("a/n", 1), request_id="first")
    receipt = await engine.commit(SPACE, first)
    for step in range(12):
        for _ in range(10):
            fresh = Batch("alice", (Increment("a/n", 1),), (), new_id(), fresh=True)
            done = await engine.commit(SPACE, fresh)
            assert await engine.commit(SPACE, fresh) == done
        if step < 3:
            assert await engine.commit(SPACE, first) == receipt
        assert remembered() <= 10 * 8 + 1
        clock.advance(REQUEST_WINDOW_MS / 4 / 1000)
    clock.advance("3h")
    await engine.commit(SPACE, batch(Increment("a/n", 1), request_id="last"))
    assert remembered() == 1
    assert (await engine.commit(SPACE, first)).results == [123]
