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
