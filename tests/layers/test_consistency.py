"""Strong, session and eventual reads, with a hot tier and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast import Cache, InvalidInput, ManualClock, Space, Store, blocking
from holdfast.engine import Put
from holdfast.layers.consistency import Consistency, read, read_prefix

ALL: tuple[Consistency, ...] = ("strong", "session", "eventual")
DEADLINE_S = 10.0


@pytest.fixture
async def opened(url: str, clock: ManualClock) -> AsyncIterator[Callable[..., object]]:
    """Opens stores on one storage: as many processes have it. In memory there is one."""
    stores: list[Store] = []
    async with AsyncExitStack() as stack:

        async def open_one(cache: str | Cache | None = "memory") -> Store:
            if stores and url in ("memory:", "policed:"):
                return stores[0]
            stores.append(
                await stack.enter_async_context(holdfast.open(url, clock=clock, background=False, cache=cache))
            )
            return stores[-1]

        yield open_one


def view(store: Store, session: str | None = None, agent: str = "market") -> Space:
    return store.space("contoso", agent=agent, session=session)


async def test_a_session_reads_its_own_writes(opened: Callable[..., object]) -> None:
    store: Store = await opened()  # type: ignore[misc]
    space = view(store)
    for number in range(5):
        await space.records.set("n", number)
        assert await space.records.get("n", consistency="session") == number
        record = await space.records.entry("n", consistency="session")
        assert record is not None
        assert (record.value, record) == (number, await space.records.entry("n"))
    await space.records.delete("n")
    assert await space.records.get("n", "gone", consistency="session") == "gone"
    assert await space.records.increment("n", 3) == 3
    assert await space.records.get_many(["n", "m"], consistency="session") == {"n": 3}


async def test_a_token_makes_another_process_see_as_much(opened: Callable[..., object]) -> None:
    here, there = await opened(), await opened()  # type: ignore[misc]
    for number in range(5):
        space = view(here)
        await space.records.set("n", number)
        other = view(there, space.session.token, "risk")
        assert await other.records.get("n", consistency="session") == number
        page = await read_prefix(other._scope, "records/", "session")
        assert [entry.value for entry in page.entries] == [b"%d" % number]
        await other.records.delete("n")
        space.session.join(other.session.token)
        assert await space.records.get("n", consistency="session") is None


async def test_an_eventual_read_sees_what_others_wrote_in_the_end(opened: Callable[..., object]) -> None:
    here, there = await opened(), await opened()  # type: ignore[misc]
    await view(here).records.set("n", 1)
    reader = view(there, agent="risk")
    assert await reader.records.get("n", consistency="eventual") == 1
    await view(here).records.set("n", 2)
    async with asyncio.timeout(DEADLINE_S):
        while await reader.records.get("n", consistency="eventual") != 2:
            await asyncio.sleep(0.005)
    assert reader.session.seen == 0  # what it saw, it may not see again


async def test_without_a_cache_every_read_is_strong_and_the_session_counts(opened: Callable[..., object]) -> None:
    store: Store = await opened(None)  # type: ignore[misc]
    assert store.cache is None
    space, other = view(store), view(store, agent="risk")
    version = await space.records.set("n", 1)
    for consistency in ALL:
        assert await other.records.get("n", consistency=consistency) == 1
        assert [entry.key async for entry in _entries(other, consistency)] == ["records/n"]
    assert space.session.token == f"contoso@{version}"
    assert other.session.seen >= version
    gone = await space.records.delete("n")
    assert gone
    assert await other.records.get("n", consistency="session") is None
    assert other.session.seen >= space.session.seen


async def _entries(space: Space, consistency: Consistency) -> AsyncIterator[holdfast.Record]:
    for entry in (await read_prefix(space._scope, "records/", consistency)).entries:
        yield entry  # type: ignore[misc]


async def test_a_space_made_on_first_use_is_cached_as_any_other(opened: Callable[..., object]) -> None:
    store: Store = await opened()  # type: ignore[misc]
    if store.url == "policed:":
        pytest.skip("how durable a space is, administrators decide")
    space = store.space("fast", durability="async")
    await space.records.set("n", 1)
    for _ in range(3):
        assert await space.records.get("n", consistency="session") == 1
        assert len((await read_prefix(space._scope, "records/", "session")).entries) == 1
    assert store.cache is not None
    assert store.cache.stats.hits >= 4


async def test_where_reads_are_audited_each_of_them_is(clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False, cache="memory") as store:
        space = store.space("watched", audit_reads=True)
        await space.records.set("n", 1)
        for _ in range(3):
            await space.records.get("n", consistency="session")
            await space.records.get("n", consistency="eventual")
        notes = await store.engine.scan("watched", "audit/notes/")
        assert len(notes.entries) == 6


async def test_a_guarded_view_goes_on_with_the_session(clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False, cache="memory") as store:
        space = view(store)
        async with space.lock("l") as guard:
            version = await guard.space.records.set("n", 1)
        assert space.session.seen >= version
        assert guard.space.session is space.session


async def test_what_is_no_token_and_no_consistency_is_refused(clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = view(store)
        for wrong in ("", "contoso", "contoso@", "contoso@-1", "contoso@x", "other@3", "contoso@" + "9" * 20, 7):
            with pytest.raises(InvalidInput):
                view(store, wrong)  # type: ignore[arg-type]
        for reading in (
            lambda: space.records.get("n", consistency="weak"),  # type: ignore[call-overload]
            lambda: space.records.entry("n", consistency="weak"),  # type: ignore[arg-type]
            lambda: read(space._scope, ["records/n"], "weak"),  # type: ignore[arg-type]
            lambda: read_prefix(space._scope, "records/", "weak"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidInput, match="consistency"):
                await reading()


async def test_a_cache_that_does_not_exist_is_refused_and_the_store_is_let_go(tmp_path: Path) -> None:
    for wrong in ("postgresql://localhost/x", "team.db", "memory:", "holdfast://localhost"):
        with pytest.raises(InvalidInput, match="cache"):
            await holdfast.open(str(tmp_path / "team.db"), cache=wrong)


@pytest.mark.parametrize("wrong", [True, False, 1, b"memory", {}])
def test_what_is_no_cache_is_told_what_there_is(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="'memory', the 'redis://"):
        holdfast.open("memory:", cache=wrong)  # type: ignore[arg-type]


async def test_the_stores_own_drop_forgets_what_was_cached(clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False, cache="memory") as store:
        space = view(store)
        await space.records.set("n", 1)
        await space.records.get("n", consistency="eventual")
        await store.drop_space("contoso")
        assert await space.records.get("n", consistency="eventual") is None


@pytest.mark.parametrize("contributions", [1, 250, 1000])
async def test_session_reads_of_a_document_with_many_contributions_hit(clock: ManualClock, contributions: int) -> None:
    async with holdfast.open("memory:", clock=clock, background=False, cache="memory") as store:
        await view(store).document("d").replace({"round": 1}, etag=0)
        for number in range(contributions):
            await view(store, agent=f"a{number}").document("d").contribute(number)
        reader = view(store, agent="risk").document("d")
        assert len((await reader.read()).contributions) == contributions
        assert store.cache is not None
        missed, hits = store.cache.stats.misses, store.cache.stats.hits
        for _ in range(5):
            assert len((await reader.read()).contributions) == contributions
        assert (store.cache.stats.misses - missed, store.cache.stats.hits - hits) == (0, 15)


def test_sessions_and_the_cache_work_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "team.db"), background=False, cache="memory") as store:
        space = store.space("contoso")
        version = space.records.set("n", 1)
        for _ in range(2):
            assert space.records.get("n", consistency="session") == 1
        assert space.session.token == f"contoso@{version}"
        other = store.space("contoso", session=space.session.token)
        assert other.records.get("n", consistency="session") == 1
        assert store.cache.stats.hits >= 1


async def test_a_hand_written_batch_is_part_of_the_session(clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False) as store:
        space = view(store)
        receipt = await space._scope.commit((Put("documents/d", b"1"),))
        assert space.session.seen == receipt.version
        receipt = await space.commit(holdfast.set_("n", 1))
        assert space.session.seen == receipt.version
