"""Several entries and a page read together: one round trip to the shelf, and every promise that each of them has alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.middleware.cache import CachedEngine
from holdfast.middleware.cache_options import Cache
from tests.middleware.caching import SPACE, Bench, Durable, MemoryShelf

BODY, HEAD, SECTIONS = "documents/bodies/d", "documents/heads/d", "sections/documents/d/"
SHARED = Cache("redis://…", entries=0)
"""Nothing is kept in the process, so that every read asks the shelf."""


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


async def document(engine: CachedEngine, seen: int = 0) -> tuple[list[bytes | None], list[bytes], int]:
    entries, page, upto = await engine.read_seen(SPACE, [BODY, HEAD], SECTIONS, seen)
    values = [None if entry is None else entry.value for entry in entries]
    return values, [entry.value for entry in page.entries], upto


async def written(bench: Bench) -> int:
    for key in (BODY, HEAD, SECTIONS + "a/1"):
        seen = await bench.put(key, "1")
    return seen


async def test_what_the_shelf_has_comes_in_one_round_trip_and_no_durable_read(bench: Bench) -> None:
    shelf = MemoryShelf()
    left, right = bench.process(SHARED, shelf), bench.process(SHARED, shelf)
    seen = await written(bench)
    assert await document(left, seen) == ([b"1", b"1"], [b"1"], seen)
    await bench.told()
    reads, asked = bench.durable.reads, shelf.round_trips
    assert await document(right, seen) == ([b"1", b"1"], [b"1"], seen)
    assert (bench.durable.reads - reads, shelf.round_trips - asked, right.stats.shared_hits) == (0, 1, 3)


async def test_what_memory_has_is_not_asked_for_anywhere(bench: Bench) -> None:
    shelf = MemoryShelf()
    engine = bench.process(Cache("redis://…"), shelf)
    seen = await written(bench)
    await document(engine, seen)
    await bench.told()
    reads, asked = bench.durable.reads, shelf.round_trips
    assert await document(engine, seen) == ([b"1", b"1"], [b"1"], seen)
    assert (bench.durable.reads - reads, shelf.round_trips - asked, engine.stats.hits) == (0, 0, 3)


async def test_who_has_seen_more_than_the_copies_is_answered_by_the_durable_engine(bench: Bench) -> None:
    shelf = MemoryShelf()
    left, right = bench.process(SHARED, shelf), bench.process(SHARED, shelf, durable=Durable(bench.store))
    seen = await written(bench)
    await document(left, seen)
    await document(right, seen)
    await bench.told()
    bench.durable.flowing.clear()  # whoever reads through it hears nothing of what comes now
    changed = await bench.put(SECTIONS + "a/1", "2")
    assert (await document(left, changed))[1] == [b"2"]
    assert (await document(left, seen))[0] == [b"1", b"1"]


async def test_those_who_ask_at_the_same_time_ask_the_shelf_and_the_engine_once(bench: Bench) -> None:
    shelf = MemoryShelf()
    engine = bench.process(Cache("redis://…"), shelf)
    seen = await written(bench)
    await engine.get_seen(SPACE, ["records/x"], 0)
    await bench.told()
    reads, asked = bench.durable.reads, shelf.round_trips
    bench.durable.ready.clear()
    waiting = [asyncio.ensure_future(document(engine, seen)) for _ in range(20)]
    await bench.told()
    assert (bench.durable.reads - reads, shelf.round_trips - asked) == (1, 1)
    bench.durable.ready.set()
    assert {each[2] for each in await asyncio.gather(*waiting)} == {seen}
    assert bench.durable.reads - reads == 3


async def test_when_the_one_who_asks_the_shelf_is_cancelled_the_others_are_answered(bench: Bench) -> None:
    shelf = MemoryShelf()
    engine = bench.process(SHARED, shelf)
    seen = await written(bench)
    await document(engine, seen)
    hold = asyncio.Event()
    get_all = shelf.get_all

    async def slow(space: str, names: list[str]) -> list[bytes | None]:
        await hold.wait()
        return await get_all(space, names)

    shelf.get_all = slow  # type: ignore[method-assign]
    waiting = [asyncio.ensure_future(document(engine, seen)) for _ in range(5)]
    await bench.told()
    waiting[0].cancel()
    await bench.told()
    hold.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [each for each in answers[1:] if each != ([b"1", b"1"], [b"1"], seen)] == []
    assert engine._copying == {}


async def test_a_copy_of_what_has_changed_since_is_not_shown(bench: Bench) -> None:
    shelf = MemoryShelf()
    engine = bench.process(SHARED, shelf)
    await written(bench)
    await document(engine)
    await bench.told()
    changed = await bench.put(BODY, "2")
    await bench.told()
    assert await document(engine) == ([b"2", b"1"], [b"1"], changed)


async def test_what_is_not_there_is_told_as_of_a_revision(bench: Bench) -> None:
    engine = bench.process(SHARED, MemoryShelf())
    seen = await bench.put("records/x", "1")
    assert await document(engine, seen) == ([None, None], [], seen)
    later = await written(bench)
    assert (await document(engine, later))[0] == [b"1", b"1"]


async def test_where_nothing_is_cached_it_is_read_from_the_engine(bench: Bench) -> None:
    await bench.store.create(SPACE, "volatile")
    engine = bench.process(SHARED, MemoryShelf())
    seen = await written(bench)
    for _ in range(2):
        assert await document(engine, seen) == ([b"1", b"1"], [b"1"], seen)
    assert bench.durable.reads == 4
