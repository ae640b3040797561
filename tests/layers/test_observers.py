"""Observing tasks: events selected and sampled, the aggregated view, alerts. Everything from the feed, resumable."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Alert, AlertRule, InvalidInput, ManualClock, Space, TaskSpec
from holdfast.layers.observers import Selection
from tests.layers.works import BROKEN, DONE, begun, done, mortal, soon


def spec(name: str, *tags: str) -> TaskSpec:
    return TaskSpec(command=("x",), name=name, tags=tags)


async def seen(space: Space, **options: Any) -> list[tuple[str, str]]:
    """What an observer sees of everything so far."""
    found = []
    async for each in space.tasks.observe(cursor="r0", live=False, **options):
        title = each.event.state.title if each.event.state else "-"
        found.append((title, each.event.status or each.event.event))
    return found


async def test_events_are_selected_by_status_tags_and_pattern(space: Space, boss: Space) -> None:
    async with mortal(boss) as (ledger, view, _):
        await space.tasks.submit(spec("a-1", "nightly", "big"))
        await space.tasks.submit(spec("b-1", "nightly"))
        await done(view, ledger, BROKEN)
        await done(view, ledger, DONE)
    assert await seen(space, status="failed") == [("a-1", "failed")]
    assert await seen(space, tags=["nightly"], status=["created", "completed"]) == [
        ("a-1", "created"), ("b-1", "created"), ("b-1", "completed")
    ]  # fmt: skip
    assert [status for _, status in await seen(space, pattern="a-*")] == [
        "created", "spawning", "running", "message_failed", "failed"
    ]  # fmt: skip
    assert len(await seen(space)) == 4 + 5 + 4  # the manager, and both tasks
    with pytest.raises(InvalidInput, match="no status"):
        await seen(space, status="done")


async def test_a_sample_is_of_tasks_and_the_same_for_everybody(space: Space) -> None:
    for number in range(40):
        await space.tasks.submit(spec(f"t-{number}"))
    some = await seen(space, sample=0.5)
    assert some == await seen(space, sample=0.5)
    assert 5 < len(some) < 35
    assert set(await seen(space, sample=0.2)) <= set(some)
    for sample in (0, 1.5, True, "x"):
        with pytest.raises(InvalidInput, match="share of all tasks"):
            await seen(space, sample=sample)


async def test_an_observer_goes_on_where_it_was(space: Space) -> None:
    await space.tasks.submit(spec("a"))
    stream = space.tasks.observe(cursor="r0")
    first = await soon(anext(stream))
    await stream.aclose()  # type: ignore[attr-defined]
    await space.tasks.submit(spec("b"))
    again = space.tasks.observe(cursor=first.cursor)
    assert (await soon(anext(again))).event.state.title == "b"  # type: ignore[union-attr]
    await again.aclose()  # type: ignore[attr-defined]


async def test_a_hostile_event_does_not_end_a_watch(space: Space, boss: Space) -> None:
    from holdfast.codec import encode
    from holdfast.engine import Push

    await boss._scope.commit((Push(f"tasks/log/{'1' * 19}/", encode([1])),))
    await boss._scope.commit((Push(f"tasks/log/{'1' * 19}/", encode({"event": "x", "state": {"a": 1}})),))
    await space.tasks.submit(spec("a"))
    assert await seen(space) == [("a", "created")]


async def test_the_overview_knows_counts_durations_and_rate(space: Space, boss: Space, clock: ManualClock) -> None:
    await space.tasks.submit(spec("before"))
    view = await space.tasks.overview(window="10m")
    assert view.counts["created"] == 1
    async with mortal(boss, lease="1h") as (ledger, seen_by, _):
        for seconds in (1, 2, 9):
            await space.tasks.submit(spec("t"))
            launch = await begun(seen_by, ledger)
            clock.advance(seconds)
            await ledger.finished(launch, BROKEN if seconds == 9 else DONE)
        async for _ in view.follow(live=False):
            pass
        assert {status: count for status, count in view.counts.items() if count} == {
            "created": 1, "running": 1, "completed": 2, "failed": 1
        }  # fmt: skip
        assert view.counts == await space.tasks.counts()
        assert (view.duration(0.5), view.duration(1.0), view.duration(0.01)) == (2.0, 9.0, 1.0)
        assert (view.rate(), view.rate("failed")) == (0.3, 0.1)
        clock.advance("11m")
        assert view.rate() == 0
        await space.tasks.submit(spec("t"))
        async for _ in view.follow(live=False):
            pass
        assert view.counts["created"] == 2


async def first_alert(space: Space, clock: ManualClock, *rules: AlertRule) -> Alert:
    """The next alert, while time passes."""
    stream = space.tasks.alerts(*rules, cursor="r0")
    waiting = asyncio.ensure_future(anext(stream))
    for _ in range(500):
        await asyncio.sleep(0.005)
        if waiting.done():
            break
        clock.advance("5s")
    alert: Alert = await soon(waiting)
    await stream.aclose()  # type: ignore[attr-defined]
    return alert


async def test_a_state_raises_an_alert(space: Space, boss: Space, clock: ManualClock) -> None:
    async with mortal(boss, lease="1h") as (ledger, view, _):
        await space.tasks.submit(spec("a", "prod"))
        await space.tasks.submit(spec("b"))
        await done(view, ledger, DONE)
        await done(view, ledger, BROKEN)
        rules = AlertRule("prod", "failed", tags=("prod",)), AlertRule("any", ("failed", "timeout"))
        alert = await first_alert(space, clock, *rules)
    assert (alert.rule.name, alert.state.title, alert.state.reason) == ("any", "b", "it broke")
    assert alert.cursor is not None


async def test_an_age_raises_an_alert_for_tasks_from_before_and_from_now_on(space: Space, clock: ManualClock) -> None:
    old = await space.tasks.submit(spec("old"))
    clock.advance("1m")
    started = clock.now_ms()
    alert = await first_alert(space, clock, AlertRule("stuck", "created", age="2m"))
    assert (alert.state.tid, alert.rule.name) == (old.tid, "stuck")
    assert 60_000 <= alert.at_ms - started <= 90_000


async def test_a_task_that_moved_on_is_not_too_old(space: Space, clock: ManualClock) -> None:
    gone = await space.tasks.submit(spec("gone"))
    stays = await space.tasks.submit(spec("stays"))
    await gone.stop()
    alert = await first_alert(space, clock, AlertRule("stuck", "created", age="1m"))
    assert alert.state.tid == stays.tid


async def test_a_rate_raises_one_alert(space: Space, boss: Space, clock: ManualClock) -> None:
    async with mortal(boss, lease="1h") as (ledger, view, _):
        for _ in range(3):
            await space.tasks.submit(spec("t"))
            await done(view, ledger, BROKEN)
            clock.advance("10s")
    alert = await first_alert(space, clock, AlertRule("storm", "failed", count=3, within="1m"))
    assert (alert.number, alert.rule.name) == (3, "storm")
    stream = space.tasks.alerts(AlertRule("storm", "failed", count=3, within="15s"), cursor="r0")
    waiting = asyncio.ensure_future(anext(stream))
    done_now, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done_now
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize(
    "fields",
    [{"status": "done"}, {"status": "failed", "age": "1m", "count": 2}, {"status": "failed", "count": 0}],
)
def test_a_wrong_rule_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="rule 'r'"):
        AlertRule("r", **fields)


def test_a_selection_takes_about_its_share() -> None:
    taken = sum(Selection(sample=0.1).takes(f"{number:019d}") for number in range(10_000))
    assert 900 < taken < 1100
