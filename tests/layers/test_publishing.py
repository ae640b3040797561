"""Whose decisions are published: in a space where somebody publishes, everybody's; where nobody does, nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from holdfast import Decision, ManualClock, Space, Store
from holdfast.layers.correlation_entries import OUTBOX, PUBLISHING
from tests.layers.desk import DEADLINE_S, RISK, running, seen_by, signal

FUSION = "momentum_risk_fusion"


@pytest.fixture
def desk(store: Store) -> Space:
    return seen_by(store, "orchestrator")


async def until(condition: Callable[[], object], clock: ManualClock) -> None:
    """Wait for it, while time passes."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)
            clock.advance("20ms")


async def marked(space: Space) -> None:
    """Until it is known that decisions of the space are published."""
    async with asyncio.timeout(DEADLINE_S):
        while (await space._scope.engine.get(space.name, [PUBLISHING]))[0] is None:
            await asyncio.sleep(0.002)


async def outbox(space: Space) -> list[str]:
    return [entry.key[len(OUTBOX) :] for entry in (await space._scope.engine.scan(space.name, OUTBOX)).entries]


async def due(store: Store, desk: Space, corr_id: str) -> None:
    await desk.correlation(corr_id, expect=["risk"])
    await signal(store, corr_id, "risk", RISK)


async def test_what_one_decides_that_does_not_publish_another_publishes_while_both_run(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    published: list[str] = []
    ids = [f"c-{number}" for number in range(10)]
    silent = desk.orchestrator(merge=FUSION)
    loud = desk.orchestrator(merge=FUSION, on_decision=lambda each: published.append(each.corr_id))
    async with running(silent, loud):
        await until(lambda: silent._term is not None and loud._term is not None, clock)
        for name in ids:
            await due(store, desk, name)
        await until(lambda: len(published) == len(ids), clock)
        assert silent.decided > 0, "otherwise this shows nothing"
    assert sorted(published) == ids
    assert await outbox(desk) == []


async def test_one_that_began_before_anybody_published_leaves_its_decisions_to_those_who_came(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    published: list[Decision] = []
    early = desk.orchestrator(merge=FUSION)
    async with running(early):
        await due(store, desk, "before")
        await until(lambda: early.decided == 1, clock)
        assert await outbox(desk) == [], "nobody would ever take it out"
        async with running(desk.orchestrator(on_decision=published.append)):
            await marked(desk)
        await due(store, desk, "after")
        await until(lambda: early.decided == 2, clock)
        assert await outbox(desk) == ["after"], "it waits for whoever publishes next"
        async with running(desk.orchestrator(on_decision=published.append)):
            await until(lambda: published, clock)
    assert [(each.corr_id, each.to_publish) for each in published] == [("after", True)]
    before = await (await desk.correlation("before")).decision()
    assert before is not None
    assert before.to_publish is False


async def test_to_decide_now_publishes_where_decisions_are_published(
    store: Store, desk: Space, clock: ManualClock
) -> None:
    published: list[str] = []
    for name in ("c-1", "c-2", "c-3"):
        await desk.correlation(name, expect=["momentum"])
    assert (await desk.orchestrator().decide("c-1")).to_publish is False
    async with running(desk.orchestrator(on_decision=lambda each: published.append(each.corr_id))):
        await marked(desk)
        assert (await desk.orchestrator().decide("c-2")).to_publish is True
        assert (await desk.orchestrator(publish=False).decide("c-3")).to_publish is False
        await until(lambda: published, clock)
    assert published == ["c-2"]


async def test_that_decisions_are_published_is_written_down_once(store: Store, desk: Space, clock: ManualClock) -> None:
    for _ in range(2):
        orchestrator = desk.orchestrator(on_decision=print)
        async with running(orchestrator):
            await until(lambda running=orchestrator: running._term is not None, clock)
    [mark] = await desk._scope.engine.get(desk.name, [PUBLISHING])
    assert mark is not None
    assert (mark.expires_at, mark.version) == (None, 1)
