"""The hot tier answers what it can prove and asks for the rest; whatever is lost on the way, nobody is shown less than they have seen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from holdfast.engine import Batch, Delete, Increment, Operation, Push, Put, SpaceInfo, Take, Touch
from holdfast.errors import InvalidInput, Unavailable
from holdfast.middleware import cache_followed, cache_memory
from holdfast.middleware.cache import REWRITTEN_ENTRIES_MAX, CachedEngine
from holdfast.middleware.cache_memory import NEGATIVE_TTL_MS, NEGATIVES_MAX
from holdfast.middleware.cache_options import Cache
from tests.middleware.caching import SPACE, Bench, Durable, MemoryShelf, value, values

A, B = "records/a", "records/b"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


# --- hits ---


async def test_a_hit_makes_no_durable_read(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await bench.put(B, "2")
    for _ in range(2):
        assert await value(engine, A) == b"1"
        assert await value(engine, B) == b"2"
        assert await values(engine, "records/") == [b"1", b"2"]
    assert bench.durable.reads == 3
    entries, _ = await engine.get_seen(SPACE, [A, B, A], 0)
    assert [entry and entry.value for entry in entries] == [b"1", b"2", b"1"]
    assert bench.durable.reads == 3
    assert (engine.stats.misses, engine.stats.hits) == (3, 4)
    assert engine.stats.hit_rate == pytest.approx(4 / 7)


async def test_a_strong_read_always_asks_the_durable_engine(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, A)
    bench.durable.flowing.clear()
    await bench.put(A, "2")
    before = bench.durable.reads
    [entry] = await engine.get(SPACE, [A])
    assert entry is not None
    assert entry.value == b"2"
    assert (await engine.scan(SPACE, "records/")).entries == [entry]
    assert bench.durable.reads == before + 2


async def test_what_others_write_is_heard_from_the_feed(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    assert (await value(engine, A), await values(engine, "records/")) == (b"1", [b"1"])
    await bench.put(A, "2")
    await bench.told()
    assert (await value(engine, A), await values(engine, "records/")) == (b"2", [b"2"])


async def test_what_the_process_writes_itself_is_known_without_reading_it(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await bench.put("records/b", "1")
    await value(engine, A)
    await values(engine, "records/")
    before = bench.durable.reads
    bench.durable.flowing.clear()  # nor from the feed
    version = await bench.put(A, "2", engine)
    assert await value(engine, A, version) == b"2"
    assert await values(engine, "records/", version) == [b"2", b"1"]
    version = await bench.delete(A, engine)
    assert await value(engine, A, version) is None
    assert await values(engine, "records/", version) == [b"1"]
    version = await bench.put("records/c", "3", engine)
    assert await values(engine, "records/", version) == [b"1", b"3"]
    assert bench.durable.reads == before


async def test_a_write_below_a_large_prefix_costs_what_the_write_costs(bench: Bench) -> None:
    """The page is read anew by who wants it, not made anew by who writes."""
    engine = bench.process()
    for number in range(REWRITTEN_ENTRIES_MAX + 1):
        await bench.put(f"records/{number:03}", "1")
    await values(engine, "records/")
    before, fills = bench.durable.reads, engine.stats.fills
    version = await bench.put("records/000", "2", engine)
    assert engine.stats.fills <= fills + 1
    assert (await values(engine, "records/", version))[0] == b"2"
    assert bench.durable.reads == before + 1


async def test_entries_that_are_handed_out_can_be_changed_without_harm(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    for _ in range(3):
        page = await engine.scan_seen(SPACE, "records/", 0)
        assert len(page.entries) == 1
        page.entries.clear()


async def test_a_page_answers_smaller_ones_and_a_part_of_one_answers_nothing(bench: Bench) -> None:
    engine = bench.process()
    for number in range(5):
        await bench.put(f"records/{number}", str(number))
    part = await engine.scan_seen(SPACE, "records/", 0, limit=3)
    assert (len(part.entries), part.more) == (3, True)
    whole = await engine.scan_seen(SPACE, "records/", 0, limit=5)
    assert (len(whole.entries), whole.more) == (5, False)
    before = bench.durable.reads
    part = await engine.scan_seen(SPACE, "records/", 0, limit=2)
    assert ([entry.value for entry in part.entries], part.more) == ([b"0", b"1"], True)
    assert bench.durable.reads == before
    with pytest.raises(InvalidInput):
        await engine.scan_seen(SPACE, "records/", 0, limit=0)


# --- sessions ---


async def test_who_has_seen_a_write_is_not_shown_less_although_the_feed_tells_nothing(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await bench.put(B, "1")
    await value(engine, A)
    await value(engine, B)
    await values(engine, "records/")
    bench.durable.flowing.clear()
    seen = await bench.put(A, "2")
    assert await value(engine, A, seen) == b"2"
    assert await values(engine, "records/", seen) == [b"2", b"1"]
    entries, _ = await engine.get_seen(SPACE, [A, B], seen)
    assert [entry and entry.value for entry in entries] == [b"2", b"1"]
    await bench.put(A, "3")
    assert await value(engine, A, seen) == b"2"  # it has not seen more, and need not
    assert engine.stats.behind >= 1


async def test_who_has_seen_that_something_is_gone_never_sees_it_again(bench: Bench) -> None:
    here, there = bench.process(), bench.process()
    await bench.put(A, "1")
    await value(there, A)
    bench.durable.flowing.clear()
    await bench.delete(A)
    [entry], seen = await here.get_seen(SPACE, [A], 0)
    assert entry is None
    assert await value(there, A, seen) is None
    entries, seen = await here.get_seen(SPACE, [A, B], 0)
    assert entries == [None, None]
    assert await value(there, A, seen) is None


async def test_several_keys_are_from_one_snapshot(bench: Bench) -> None:
    """Both are written together; one is known from before, the other from after."""
    engine = bench.process()
    await bench.commit(Put(A, b"1"), Put(B, b"1"))
    await value(engine, A)
    bench.durable.flowing.clear()
    await bench.commit(Put(A, b"2"), Put(B, b"2"))
    assert await value(engine, B) == b"2"
    entries, _ = await engine.get_seen(SPACE, [A, B], 0)
    assert len({entry.value for entry in entries if entry is not None}) == 1


async def test_a_batch_that_changes_nothing_is_not_taken_for_the_commit_of_another(bench: Bench) -> None:
    """Its receipt shows the revision that somebody else's commit made."""
    engine = bench.process()
    await bench.put(A, "1")
    await bench.put(B, "1", ttl_ms=600_000)
    await value(engine, A)
    bench.durable.flowing.clear()
    seen = await bench.put(A, "2")
    for empty in (Touch(B, 700_000), Delete("records/absent")):
        assert (await bench.commit(empty, engine=engine)).version == seen
        assert await value(engine, A, seen) == b"2"


async def test_readers_who_write_themselves_and_hear_of_others_late_or_never_are_not_shown_less(bench: Bench) -> None:
    """Three processes and a stranger write at random; what each reads is what the store has at the revision it asks for."""
    chance = random.Random(20)
    shelf = MemoryShelf()
    processes = [bench.process(), bench.process(shelf=shelf), bench.process(shelf=shelf)]
    keys = [f"records/{name}" for name in ("a", "b", "c/1", "c/2", "d\u00e9")]

    def operation() -> Operation:
        key, kind = chance.choice(keys), chance.random()
        ttl_ms = chance.choice((None, None, 3_000, 100_000))
        if kind < 0.5:
            return Put(key, b"%d" % chance.randrange(1000), ttl_ms, chance.choice(("", ":t:s")))
        if kind < 0.7:
            return Increment(key, chance.randrange(9), ttl_ms)
        if kind < 0.8:
            return Push("records/c/", b"0", ttl_ms)
        if kind < 0.85:
            return Take("records/c/", "taken/", 1)
        return Delete(key)

    await bench.put(A, "1")
    for step in range(2000):
        writer = chance.choice((bench.store, *processes))
        operations = tuple(operation() for _ in range(chance.choice((1, 1, 1, 2, 4))))
        await writer.commit(SPACE, Batch(f"writer-{step % 3}", operations, (), chance.choice((None, f"r{step}"))))
        if chance.random() < 0.2:
            bench.clock.advance(chance.choice((0.1, 1, 10, 70)))
        if chance.random() < 0.05:
            bench.durable.flowing.clear()
        elif chance.random() < 0.2:
            bench.durable.flowing.set()
        if chance.random() < 0.7:
            await bench.told()
        seen = (await bench.info()).revision
        for engine in chance.sample(processes, 2):
            key, what = chance.choice(keys), chance.random()
            if what < 0.5:
                assert (await engine.get_seen(SPACE, [key], seen))[0] == await bench.store.get(SPACE, [key])
            if 0.3 < what < 0.9:
                page = await bench.store.scan(SPACE, "records/c/")
                assert (await engine.scan_seen(SPACE, "records/c/", seen)).entries == page.entries
            if what < 0.1:
                pair = [key, chance.choice(keys)]
                entries, part, _ = await engine.read_seen(SPACE, pair, "records/c/", seen)
                assert entries == await bench.store.get(SPACE, pair)
                assert part.entries == (await bench.store.scan(SPACE, "records/c/")).entries
            if what > 0.8:
                assert (await engine.get_seen(SPACE, keys, seen))[0] == await bench.store.get(SPACE, keys)
    for engine in processes:
        assert engine.stats.hits > 100
        assert engine.stats.misses > 100


# --- eventual reads ---


async def test_an_eventual_read_is_never_older_than_the_ttl_although_the_feed_is_cut(bench: Bench) -> None:
    engine = bench.process(Cache(ttl="60s"))
    await bench.put(A, "1")
    await value(engine, A)
    await bench.told()
    bench.durable.cut = True
    await bench.put(A, "2")
    await bench.told()
    bench.clock.advance(59.9)
    assert await value(engine, A) == b"1"
    bench.clock.advance(0.1)
    assert await value(engine, A) == b"2"


async def test_a_shared_copy_is_never_older_than_its_ttl_whoever_left_it(bench: Bench) -> None:
    shelf = MemoryShelf()
    left, right = (bench.process(Cache("redis://…"), shelf) for _ in range(2))
    await bench.put(A, "1")
    await value(left, A)
    await bench.told()
    bench.durable.cut = True
    await value(right, B)  # from now on it knows the space, and hears nothing
    await bench.put(A, "2")
    bench.clock.advance(299)
    assert await value(right, A) == b"1"
    bench.clock.advance(1)
    assert await value(right, A) == b"2"


async def test_nothing_stays_absent_for_ever(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(B, "1")
    assert await value(engine, A) is None
    await bench.told()
    before = bench.durable.reads
    assert await value(engine, A) is None
    assert bench.durable.reads == before
    assert engine.stats.negative_hits == 1
    bench.durable.cut = True
    await bench.put(A, "1")
    bench.clock.advance(NEGATIVE_TTL_MS / 1000)
    assert await value(engine, A) == b"1"


async def test_what_is_not_there_takes_little_room_and_pushes_nothing_out(bench: Bench) -> None:
    engine = bench.process(Cache(entries=10))
    await bench.put(A, "1")
    await value(engine, A)
    for number in range(NEGATIVES_MAX + 50):
        assert await value(engine, f"records/absent/{number}") is None
    assert len(engine._memory) == NEGATIVES_MAX + 1
    before = bench.durable.reads
    assert await value(engine, A) == b"1"
    assert bench.durable.reads == before


# --- fills ---


async def test_a_fill_with_an_old_value_after_an_invalidation_is_refused(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, B)
    for read in (lambda: value(engine, A), lambda: values(engine, "records/")):
        bench.durable.ready.clear()
        late = asyncio.ensure_future(read())
        await bench.told()  # it has its snapshot, and the answer is on its way
        await bench.put(A, "2")
        await bench.told()
        bench.durable.ready.set()
        await late
        assert engine.stats.fills_refused >= 1
        assert await value(engine, A) == b"2"
        assert await values(engine, "records/") == [b"2"]
        await bench.put(A, "1")
        await bench.told()


async def test_a_copy_of_an_earlier_revision_never_replaces_a_later_one_on_the_shelf(bench: Bench) -> None:
    shelf = MemoryShelf()
    slow, fast = bench.process(shelf=shelf), bench.process(shelf=shelf, durable=Durable(bench.store))
    await bench.put(A, "1")
    await value(slow, B)
    bench.durable.flowing.clear()  # it hears nothing: only the revisions tell
    bench.durable.ready.clear()
    late = asyncio.ensure_future(value(slow, A))
    await bench.told()
    seen = await bench.put(A, "2")
    assert await value(fast, A, seen) == b"2"
    await bench.told()
    bench.durable.ready.set()
    await late
    await bench.told()
    assert slow.stats.fills_refused == 1
    third = bench.process(Cache(entries=0, url="redis://…"), shelf)
    assert await value(third, A, seen) == b"2"
    assert third.stats.shared_hits == 1


async def test_those_who_miss_at_the_same_time_read_once(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, B)
    before = bench.durable.reads
    bench.durable.ready.clear()
    waiting = [asyncio.ensure_future(value(engine, A)) for _ in range(50)]
    await bench.told()
    bench.durable.ready.set()
    assert await asyncio.gather(*waiting) == [b"1"] * 50
    assert bench.durable.reads == before + 1


async def test_when_the_one_who_reads_for_all_is_cancelled_another_goes_on(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, B)
    before = bench.durable.reads
    bench.durable.ready.clear()
    waiting = [asyncio.ensure_future(value(engine, A)) for _ in range(50)]
    await bench.told()
    waiting[0].cancel()
    await bench.told()
    waiting[7].cancel()  # it only waits
    bench.durable.ready.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert answers.count(b"1") == 48
    assert bench.durable.reads == before + 2


async def test_who_has_seen_more_than_a_read_under_way_reads_again(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, B)
    bench.durable.flowing.clear()
    bench.durable.ready.clear()
    first = asyncio.ensure_future(value(engine, A))
    await bench.told()
    seen = await bench.put(A, "2")
    second = asyncio.ensure_future(value(engine, A, seen))
    await bench.told()
    bench.durable.ready.set()
    assert (await first, await second) == (b"1", b"2")


async def test_an_error_of_the_durable_engine_reaches_all_who_wait_and_is_not_kept(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, B)
    bench.durable.broken = True
    answers = await asyncio.gather(*(value(engine, A) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unavailable] * 3
    bench.durable.broken = False
    assert await value(engine, A) == b"1"


# --- gaps ---


async def test_all_is_forgotten_after_a_gap_in_the_feed(bench: Bench) -> None:
    shelf = MemoryShelf()
    engine = bench.process(shelf=shelf)
    await bench.put(A, "1")
    await bench.put(B, "1")
    await value(engine, A)
    await value(engine, B)
    await bench.told()
    bench.durable.cut = True
    await bench.put(A, "2")  # breaks the watch
    await bench.told()
    await bench.put(A, "3")
    await bench.store.compact(SPACE, await bench.put(A, "4"))
    bench.durable.cut = False
    while not engine.stats.flushes:
        await asyncio.sleep(0.01)
    await bench.told()
    assert len(engine._memory) == 0
    before = bench.durable.reads
    assert (await value(engine, A), await value(engine, B)) == (b"4", b"1")
    assert bench.durable.reads == before + 2  # nor is what others share trusted
    assert (await value(engine, A), await value(engine, B)) == (b"4", b"1")
    assert bench.durable.reads == before + 2


async def test_a_feed_that_was_cut_is_taken_up_where_it_was(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await bench.put(B, "1")
    await value(engine, A)
    await value(engine, B)
    bench.durable.cut = True
    await bench.put(A, "2")
    await bench.told()
    bench.durable.cut = False
    while engine._spaces[SPACE].applied < 3:
        await asyncio.sleep(0.01)
    before = bench.durable.reads
    assert (await value(engine, A), await value(engine, B)) == (b"2", b"1")
    assert bench.durable.reads == before + 1
    assert engine.stats.flushes == 0


async def test_a_dropped_space_is_forgotten_by_whoever_drops_it(bench: Bench) -> None:
    here, there = bench.process(), bench.process()
    await bench.put(A, "1")
    for engine in (here, there):
        await value(engine, A)
    await here.drop(SPACE)
    await bench.told()
    for engine in (here, there):
        assert await value(engine, A) is None
    await bench.put(A, "2")
    await bench.told()
    for engine in (here, there):
        assert await value(engine, A) == b"2"


async def test_a_space_that_was_loaded_is_forgotten(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, A)
    [entry] = await bench.store.get(SPACE, [A])
    assert entry is not None
    entry = type(entry)(A, b"9", 7, "x", 1, 1)
    await engine.load(SPACE, [entry], 7)
    assert await value(engine, A) == b"9"


async def test_what_is_known_of_changes_is_bounded_and_what_falls_out_is_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_followed, "CHANGED_MAX", 40)
    engine = bench.process()
    await bench.put(A, "1")
    await value(engine, A)
    for number in range(100):
        await bench.put(f"records/other/{number}", "1")
    await bench.told()
    home = engine._spaces[SPACE]
    assert len(home.changed) <= 40
    assert home.floor > 1
    before = bench.durable.reads
    assert await value(engine, A, home.applied) == b"1"
    assert bench.durable.reads == before + 1


# --- time ---


async def test_an_expired_entry_is_not_shown_and_one_that_somebody_extended_is(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1", ttl_ms=5_000)
    await bench.put(B, "1", ttl_ms=5_000)
    await value(engine, A)
    await value(engine, B)
    await values(engine, "records/")
    await bench.commit(Touch(B, 50_000))
    bench.clock.advance(5)
    assert (await value(engine, A), await value(engine, B)) == (None, b"1")
    assert await values(engine, "records/") == [b"1"]


async def test_who_extends_a_life_sees_it(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "1", ttl_ms=5_000)
    await value(engine, A)
    await values(engine, "records/")
    await bench.commit(Touch(A, 50_000), engine=engine)
    [entry], _ = await engine.get_seen(SPACE, [A], 0)
    assert entry is not None
    assert entry.expires_at == bench.clock.now_ms() + 50_000
    assert (await engine.scan_seen(SPACE, "records/", 0)).entries == [entry]


# --- bounds ---


async def test_the_least_recently_used_goes_first(bench: Bench) -> None:
    engine = bench.process(Cache(entries=3))
    for number in range(4):
        await bench.put(f"records/{number}", "1")
    for number in (0, 1, 2, 0, 3):
        await value(engine, f"records/{number}")
    before = bench.durable.reads
    for number in (0, 2, 3):
        await value(engine, f"records/{number}")
    assert bench.durable.reads == before
    await value(engine, "records/1")
    assert bench.durable.reads == before + 1


async def test_what_is_too_large_is_not_kept_and_bytes_are_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_memory, "ITEM_BYTES_MAX", 100)
    monkeypatch.setattr(cache_memory, "BYTES_MAX", 250)
    engine = bench.process()
    await bench.put("records/large", b"1" * 101)
    for number in range(5):
        await bench.put(f"records/{number}", b"1" * 80)
        assert await value(engine, f"records/{number}") == b"1" * 80
        await value(engine, "records/large")
    assert len(engine._memory) == 2
    assert engine._memory._size <= 250


@pytest.mark.parametrize("settings", [{"durability": "volatile"}, {"audit_reads": True}])
async def test_volatile_and_audited_spaces_pass_through(bench: Bench, settings: dict[str, object]) -> None:
    engine = bench.process()
    await bench.store.create(SPACE, **settings)  # type: ignore[arg-type]
    await bench.put(A, "1")
    for expected in (1, 2):
        assert await value(engine, A) == b"1"
        assert bench.durable.reads == 2 * expected - 1
        assert await values(engine, "records/") == [b"1"]
        assert bench.durable.reads == 2 * expected
    assert engine.stats.spaces == 0


async def test_a_space_that_does_not_exist_is_asked_for_until_it_does(bench: Bench) -> None:
    engine = bench.process()
    assert await value(engine, A) is None
    assert await values(engine, "records/") == []
    await bench.put(A, "1")
    assert await value(engine, A) == b"1"


async def test_a_store_that_cannot_describe_its_spaces_can_still_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spaces(name: str | None = None) -> list[SpaceInfo]:
        raise Unavailable("not now")

    engine = bench.process()
    await bench.put(A, "1")
    monkeypatch.setattr(bench.durable, "spaces", spaces)
    assert await value(engine, A) == b"1"
    assert await values(engine, "records/") == [b"1"]


async def test_nothing_runs_on_when_it_is_closed(bench: Bench) -> None:
    before = asyncio.all_tasks()
    engine = bench.process(shelf=MemoryShelf())
    await bench.put(A, "1")
    await value(engine, A)
    await engine.close()
    await bench.told()
    assert asyncio.all_tasks() == before


async def test_a_cache_that_holds_nothing_or_is_wrongly_described_is_refused() -> None:
    for wrong in ({"entries": 0}, {"entries": -1}, {"entries": True}, {"ttl": 0}, {"shared_ttl": "soon"}):
        with pytest.raises(InvalidInput):
            Cache(**wrong)  # type: ignore[arg-type]


def test_the_engine_is_one_that_caches() -> None:
    from holdfast.offers import Caches

    assert issubclass(CachedEngine, Caches)
