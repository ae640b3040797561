"""What a hot tier follows: when it may follow less than it had thought, and when there are more spaces than it has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.engine import Batch, ChangeSet, Put
from holdfast.errors import AccessDenied
from holdfast.middleware import cache_following
from holdfast.middleware.cache_following import READABLE
from tests.middleware.caching import SPACE, Bench, Durable, value, values

UNHEARD = "tasks/states/"
"""Of what is here, one who may not watch everything is not told."""
SPACES = tuple(f"s{number}" for number in range(6))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


class Guarded(Durable):
    """Behind rules that let one watch only what one may name; that they do is told after a while."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.store)
        self.refuses = asyncio.Event()

    async def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        if not prefixes:
            await self.refuses.wait()
            raise AccessDenied("not everything may be watched")
        async for commit in super().watch(space, *prefixes, cursor=cursor, live=live):
            yield commit


@pytest.mark.parametrize("kind", ["page", "entry"])
async def test_a_session_never_goes_back_when_less_is_followed_than_before(bench: Bench, kind: str) -> None:
    """What is not followed any more must not count as unchanged because nothing is heard of it."""
    durable = Guarded(bench)
    engine = bench.process(durable=durable)
    key = UNHEARD + "risk/1"

    async def read(seen: int) -> list[bytes | None]:
        return [*await values(engine, UNHEARD, seen)] if kind == "page" else [await value(engine, key, seen)]

    await bench.put(key, "old")
    assert await read(0) == [b"old"]
    durable.refuses.set()
    await bench.told()
    assert engine._spaces[SPACE].prefixes == READABLE
    seen = await bench.put(key, "new")  # by another process
    assert await read(seen) == [b"new"]
    later = await bench.put("records/x", "1")  # of this one the feed tells
    await bench.told()
    assert engine._spaces[SPACE].applied == later
    assert await read(seen) == [b"new"]
    assert await read(later) == [b"new"]


async def followers() -> int:
    """Tasks that follow a feed, known to the tier or not."""
    await asyncio.sleep(0)
    return sum(getattr(task.get_coro(), "__qualname__", "") == "Following._follow" for task in asyncio.all_tasks())


async def test_spaces_asked_for_at_the_same_time_leave_no_followers_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_following, "SPACES_MAX", 2)
    engine = bench.process()
    for space in SPACES:
        await bench.store.commit(space, Batch("alice", (Put("records/x", b"1"),)))
    for _ in range(5):
        for space in SPACES:
            found = await asyncio.gather(*(engine.get_seen(space, ["records/x"], 0) for _ in range(3)))
            assert [entry and entry.value for [entry], _ in found] == [b"1"] * 3
    assert await followers() == len(engine._following._tasks)
    assert len(engine._following._tasks) <= 2
    await engine.close()
    assert await followers() == 0


async def test_nothing_is_followed_that_began_while_the_tier_was_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_following, "SPACES_MAX", 1)
    engine = bench.process()
    for space in SPACES:
        await bench.store.commit(space, Batch("alice", (Put("records/x", b"1"),)))
    await engine.get_seen(SPACES[0], ["records/x"], 0)
    reading = [asyncio.ensure_future(engine.get_seen(space, ["records/x"], 0)) for space in SPACES]
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.gather(*reading)
    assert (await followers(), engine._spaces) == (0, {})


# --- whether what is kept is up to date ---


async def test_a_feed_that_stands_still_is_told_by_how_old_the_last_proof_is(bench: Bench) -> None:
    engine = bench.process()
    await bench.put("records/x", "1")
    assert await value(engine, "records/x") == b"1"
    await bench.told()
    bench.durable.flowing.clear()
    await bench.put("records/x", "2")
    for _ in range(3):
        bench.clock.advance("1s")
        assert await value(engine, "records/x") == b"1", "eventual readers are answered, within the ttl"
        await engine._following.look()
    assert (engine.stats.behind, engine.stats.feeds_cut, engine.stats.proof_age_ms) == (1, 1, 3_000)
    bench.durable.flowing.set()
    await bench.told()
    assert await value(engine, "records/x") == b"2"
    await engine._following.look()
    assert await value(engine, "records/x") == b"2"
    assert (engine.stats.behind, engine.stats.feeds_cut, engine.stats.proof_age_ms) == (0, 0, 0)


async def test_a_quiet_feed_is_proved_by_a_look_and_only_while_somebody_reads(bench: Bench) -> None:
    engine = bench.process()
    await bench.put("records/x", "1")
    await value(engine, "records/x")
    for _ in range(3):
        assert await value(engine, "records/x") == b"1"
        bench.clock.advance("1s")
        assert engine.stats.proof_age_ms == 1_000
        await engine._following.look()
        assert engine.stats.proof_age_ms == 0
    looks = bench.durable.looks
    bench.clock.advance("1h")
    await engine._following.look()
    assert bench.durable.looks == looks, "nobody has read"
    assert (engine.stats.proof_age_ms, engine.stats.feeds_cut) == (0, 0)


@pytest.mark.parametrize("how", ["broken", "silent"])
async def test_a_store_that_does_not_answer_a_look_counts_as_cut(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_following, "LOOK_ANSWER_S", 0.01)
    engine = bench.process()
    await bench.put("records/x", "1")
    for _ in range(2):  # the second is answered from memory
        assert await value(engine, "records/x") == b"1"
    bench.clock.advance("3s")
    if how == "broken":
        bench.durable.broken = True
    else:
        bench.durable.ready.clear()
    await engine._following.look()
    assert (engine.stats.proof_age_ms, engine.stats.feeds_cut) == (3_000, 1)
    bench.durable.broken = False
    bench.durable.ready.set()
    await engine._following.look()
    assert (engine.stats.proof_age_ms, engine.stats.feeds_cut) == (0, 0)


async def test_a_feed_that_fails_counts_as_cut_until_it_is_taken_up(bench: Bench) -> None:
    engine = bench.process()
    await bench.put("records/x", "1")
    assert await value(engine, "records/x") == b"1"
    await bench.told()
    bench.durable.cut = True
    await bench.put("records/x", "2")
    await bench.told()
    assert engine.stats.feeds_cut == 1
    bench.durable.cut = False
    async with asyncio.timeout(5):
        while await value(engine, "records/x") != b"2":
            await asyncio.sleep(0.01)
    assert engine.stats.feeds_cut == 0


async def test_one_who_may_not_watch_everything_is_proved_up_to_what_it_may(bench: Bench) -> None:
    """Commits that it does not hear of must not count as ones that the feed has not told."""
    durable = Guarded(bench)
    durable.refuses.set()
    engine = bench.process(durable=durable)
    await bench.put("records/x", "1")
    await value(engine, "records/x")
    await bench.told()
    assert await value(engine, "records/x") == b"1"
    await bench.told()
    reads = durable.reads
    for number in range(3):
        bench.clock.advance("1s")
        seen = await bench.put(UNHEARD + "risk", str(number))
        assert await value(engine, "records/x") == b"1"
        await engine._following.look()
        assert (engine.stats.behind, engine.stats.feeds_cut) == (0, 0)
        assert await value(engine, "records/x", seen) == b"1"
        assert engine.stats.proof_age_ms == 0
    assert durable.reads == reads, "and who has seen those commits is answered from memory too"
