"""What no library would write, in lines and elsewhere: the others go on, and nobody gets in beside a holder."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import Space, Store
from holdfast.engine import Batch, Delete, Push, Put
from holdfast.errors import InvalidInput, LockAcquisitionError
from holdfast.layers.lines import place_of
from holdfast.middleware.line_claims import PLACE_BYTES_MAX
from tests.layers.policed import PolicedStore
from tests.layers.test_locks import soon, waiting

HOSTILE = [
    b'{"instance":"x","units":0}',
    b'{"instance":"x","units":-5}',
    b'{"instance":"x","units":"many"}',
    b'{"instance":7}',
    b"[]",
    b"null",
    b"\xff\xfe",
    b"",
    b'{"instance":"' + b"x" * 5000 + b'","units":3}',
    b'{"instance":"' + b"x" * 70_000 + b'","units":3}',
]
ids = [value[:24].decode(errors="replace") for value in HOSTILE]


async def push(space: Space, prefix: str, value: bytes, ttl_ms: int | None = 60_000) -> str:
    engine = space._scope.engine
    if isinstance(engine, PolicedStore):
        engine = engine.inner  # as an administrator, who may write anything
    receipt = await engine.commit(space.name, Batch("mallory", (Push(prefix, value, ttl_ms),)))
    return str(receipt.results[0])


async def put(space: Space, key: str, value: bytes, ttl_ms: int | None = None) -> None:
    engine = space._scope.engine
    if isinstance(engine, PolicedStore):
        engine = engine.inner
    await engine.commit(space.name, Batch("mallory", (Put(key, value, ttl_ms),)))


@pytest.mark.parametrize("value", HOSTILE, ids=ids)
def test_a_place_that_cannot_be_believed_is_one_unit_that_is_not_shared(value: bytes) -> None:
    place = place_of(value)
    assert (place.units, place.shared) == (1, False)
    assert len(value) <= PLACE_BYTES_MAX or place.instance == "?"


@pytest.mark.parametrize("value", HOSTILE, ids=ids)
async def test_a_hostile_place_holds_the_lock_like_any_other_and_breaks_it_for_nobody(
    space: Space, value: bytes
) -> None:
    await push(space, "locks/lock/l/", value, 1000)
    with pytest.raises(LockAcquisitionError, match="held by mallory"):
        await space.lock("l").acquire()
    assert [stand.agent for state in await space.locks.list() for stand in state.holders] == ["mallory"]
    space._scope.clock.advance("1s")  # type: ignore[attr-defined]
    async with space.lock("l"):
        pass


@pytest.mark.parametrize("value", HOSTILE, ids=ids)
async def test_a_hostile_place_makes_no_room_in_a_semaphore(space: Space, store: Store, value: bytes) -> None:
    other, third = (store.space("contoso", agent=name) for name in ("risk", "third"))
    async with space.semaphore("gpu", permits=2):
        await push(space, "locks/semaphore/gpu/", value)
        for late in (other, third):
            with pytest.raises(LockAcquisitionError):
                await late.semaphore("gpu", permits=2).acquire()


async def test_a_waiter_is_woken_although_a_hostile_place_comes_and_goes_before_it(space: Space, store: Store) -> None:
    other = store.space("contoso", agent="risk")
    async with space.lock("l"):
        key = await push(space, "locks/lock/l/", HOSTILE[1])
        waiter = asyncio.create_task(other.lock("l", wait=None).acquire())
        await soon(waiting(space, "l", 2))
    assert not waiter.done()
    await put(space, key, b"[7]", 60_000)
    await space._scope.engine.commit(space.name, Batch("mallory", (Delete(key),)))
    async with asyncio.timeout(10):
        guard = await waiter
    await guard.release()


async def test_keys_that_are_no_places_do_not_break_the_list_of_locks() -> None:
    async with holdfast.open("memory:", background=False) as store:
        space = store.space("contoso", agent="market")
        for prefix in ("locks/", "locks/lock/", "locks/lock/l/0/", "locks/who/l/", "permits/pool/"):
            await push(space, prefix, b'"x"')
        async with space.lock("m"):
            assert [state.name for state in await space.locks.list()] == ["m"]


async def test_a_number_of_permits_that_is_none_is_told_and_does_not_break_the_list(space: Space) -> None:
    await put(space, "permits/semaphore/gpu", b'"four"')
    with pytest.raises(InvalidInput, match="no number of permits"):
        await space.semaphore("gpu", permits=4).acquire()
    async with space.lock("l"):
        assert [state.name for state in await space.locks.list()] == ["l"]


async def test_a_key_that_is_no_member_of_a_set_does_not_end_the_watch_of_others(space: Space) -> None:
    await space.records.set("first", 1)
    cursor = await space.cursor()
    for operation in (Put("sets/x", b"1"), Delete("sets/x"), Push("lists/", b"1"), Put("records/k", b"2")):
        await space._scope.engine.commit(space.name, Batch("intruder", (operation,)))
    told = [change.key async for item in space.watch(cursor=cursor, live=False) for change in item]
    assert told[-1] == "k"
