"""Lessons of audit and transactions: others prune, seal and forget meanwhile; a condition counts although nothing is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast import Conflict, ManualClock, Space, at_least
from holdfast.engine import Batch, Page, Push, Take
from holdfast.layers import audit as audit_layer
from holdfast.layers.audit import LOG, Audit
from holdfast.middleware.wrapper import Wrapper

FOR_ADMINISTRATORS = True


def interrupted(space: Space, by: Callable[[], Awaitable[None]]) -> Audit:
    """An audit whose first look at its segments is followed by this before it hears of them."""

    class Slow(Wrapper):
        is_first = True

        async def scan(self, space_name: str, prefix: str, **options: Any) -> Page:
            page = await self.inner.scan(space_name, prefix, **options)
            if self.is_first and prefix == LOG:
                self.is_first = False
                await by()
            return page

    return Audit(msgspec.structs.replace(space._scope, engine=Slow(space._scope.engine)))


async def test_a_condition_holds_although_nothing_is_written(space: Space) -> None:
    async def work(tx: Any) -> str:
        tx.require(at_least("available", 1))
        return "there is one"

    with pytest.raises(Conflict):
        await space.transact(work)


async def test_two_that_prune_at_once_leave_a_sound_chain(
    space: Space, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_layer, "PRUNE_MAX", 2)
    for n in range(7):
        await space.records.set("k", n)
        await space.audit.seal()
        clock.advance("1s")
    before = clock.now_ms()
    clock.advance("1s")
    await space.records.set("k", 9)
    await space.audit.seal()

    async def prune() -> None:
        await space.audit.prune(before)

    await interrupted(space, prune).prune(before)
    verification = await space.audit.verify()
    assert verification.problems == []


async def test_what_is_sealed_and_forgotten_while_it_is_read_is_told(space: Space, clock: ManualClock) -> None:
    await space.records.set("k", 1)
    await space.audit.seal()
    await space.records.set("k", 2)
    await space.records.set("k", 3)

    async def seal_and_forget() -> None:
        await space.audit.seal()
        await space._scope.engine.compact(space.name, await space.audit.sealed_upto())

    assert [record.value async for record in interrupted(space, seal_and_forget).records(key="records/")] == [1, 2, 3]


VALUES = [
    2**62,
    -(2**63),
    2**64 - 1,
    1.0,
    1e16,
    1e22,
    1e-7,
    -0.0,
    0.1,
    1.7976931348623157e308,
    5e-324,
    '\u2028\x00\x7f"\\/',
    "é",
    "😀",
    [],
    {},
    {"": None},
    None,
    True,
    {"b": 1, "a": [1.0, 2]},
]


async def test_odd_values_do_not_break_the_chain(space: Space) -> None:
    for n, value in enumerate(VALUES):
        await space.records.set(f"k{n}", value)
        await space.records.add_to_set("set", value)
    await space.audit.seal()
    assert (await space.audit.verify()).problems == []


async def test_a_mass_expiry_that_one_take_meets_can_be_sealed(space: Space, clock: ManualClock) -> None:
    engine = space._scope.engine
    prefix = "lists/" + "x" * 180 + "/1/"
    for _ in range(300):
        await engine.commit(space.name, Batch("market", tuple(Push(prefix, b"1", 1000) for _ in range(128))))
    await space.audit.seal()
    clock.advance("2s")
    await engine.commit(space.name, Batch("market", (Take(prefix, "lists/taken/1/"),)))
    await space.audit.seal()
    assert (await space.audit.verify()).problems == []
