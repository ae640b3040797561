"""Mistakes of section 8 of the list (tests/layers/test_mistakes.py), as a cache could make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.middleware.cache_memory import NEGATIVE_TTL_MS
from holdfast.middleware.cache_options import Cache
from tests.middleware.caching import SPACE, Bench, Durable, MemoryShelf, value

A, B = "records/a", "records/b"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


async def test_8_a_fill_with_an_old_value_after_an_invalidation_is_not_kept(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(A, "old")
    await value(engine, B)
    bench.durable.ready.clear()
    late = asyncio.ensure_future(value(engine, A))  # it has its snapshot, and not its answer
    await bench.told()
    await bench.put(A, "new")
    await bench.told()
    bench.durable.ready.set()
    await late
    assert await value(engine, A) == b"new"
    assert engine.stats.fills_refused == 1


async def test_8_that_there_is_nothing_is_not_believed_for_long(bench: Bench) -> None:
    engine = bench.process()
    await bench.put(B, "1")
    assert await value(engine, A) is None
    await bench.put(A, "1", engine=engine)
    assert await value(engine, A) == b"1", "its own write is seen at once"
    await bench.delete(A)
    await bench.told()
    assert await value(engine, A) is None
    await bench.put(A, "2")
    await bench.told()
    assert await value(engine, A) == b"2", "that of others with the feed"
    await bench.delete(A)
    await bench.told()
    assert await value(engine, A) is None
    bench.durable.cut = True
    await bench.put(A, "3")
    bench.clock.advance(NEGATIVE_TTL_MS / 1000)
    assert await value(engine, A) == b"3", "and without the feed in the end"


async def test_8_an_invalidation_takes_away_ones_own_answer_and_nobodys_shared_copy(bench: Bench) -> None:
    shelf = MemoryShelf()
    left, right = (bench.process(Cache("redis://…"), shelf) for _ in range(2))
    await bench.put(A, "1")
    assert await value(left, A) == await value(right, A) == b"1"
    await bench.told()
    bench.durable.cut = True
    [name] = [name for name in shelf.copies if name[1] == "entry:" + A]
    before = shelf.copies[name]
    seen = await bench.put(A, "2")
    assert shelf.copies[name] == before, "nobody removes it; whoever reads it judges it"
    assert await value(left, A, seen) == b"2"
    await bench.told()
    assert shelf.copies[name][0] >= seen, "and whoever has a later one replaces it"


async def test_8_a_message_of_the_feed_that_is_lost_makes_nobody_see_less_than_before(bench: Bench) -> None:
    deaf, hears = bench.process(), bench.process(durable=Durable(bench.store))
    await bench.put(A, "1")
    assert await value(deaf, A) == await value(hears, A) == b"1"
    await bench.told()
    bench.durable.flowing.clear()  # from now on one of them is told nothing
    seen = await bench.put(A, "2")
    await bench.told()
    assert await value(hears, A) == b"2"
    assert await value(deaf, A, seen) == b"2", "who comes with what the other has shown is not shown less"
    bench.clock.advance("60s")
    assert await value(deaf, A) == b"2", "and the ttl bounds the rest"


async def test_8_a_writer_that_dies_right_after_its_write_leaves_no_old_value_behind(bench: Bench) -> None:
    """Nobody but the feed, which is part of the commit, tells the others."""
    writer, reader = bench.process(), bench.process(durable=Durable(bench.store))
    await bench.put(A, "1")
    assert await value(writer, A) == await value(reader, A) == b"1"
    await bench.told()
    seen = await bench.put(A, "2")  # committed, and its process does nothing more
    await writer.close()
    await bench.told()
    assert await value(reader, A) == b"2"
    assert await value(reader, A, seen) == b"2"
    assert (await reader.get(SPACE, [A]))[0] is not None
