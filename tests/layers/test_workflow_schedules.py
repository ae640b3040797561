"""Schedules: each due time is one execution, whoever fires it; missed ones, changed clocks, bad input."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from holdfast import (
    AccessDenied,
    Conflict,
    Context,
    InvalidInput,
    ManualClock,
    NotFound,
    Space,
    Store,
    Unavailable,
    blocking,
    workflow,
)
from holdfast.codec import encode
from holdfast.engine import Batch, Put
from holdfast.layers.workflows.cron import Cron
from holdfast.layers.workflows.firing import Firing
from holdfast.layers.workflows.schedules import CATCH_UP_MAX
from tests.layers.test_workflows import Hosts, hosts, soon, until

__all__ = ["hosts"]

ZURICH = "Europe/Zurich"
LEASE = "1000d"
"""So that no worker takes the hours that pass in a moment for its own death."""


@workflow
async def research(ctx: Context, symbol: str) -> str:
    return f"{ctx.id} {symbol}"


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def move(clock: ManualClock, to: str) -> None:
    clock.advance((ms(to) - clock.now_ms()) / 1000)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(ms("2026-11-16T06:59:00+00:00"))


async def ended(space: Space, count: int) -> list[str]:
    """The ids of those that have completed, when there are so many."""

    async def are() -> bool:
        return len(await space.workflows.list(status="completed")) >= count

    await until(are)
    return sorted(view.id for view in await space.workflows.list(status="completed"))


async def test_each_due_time_is_one_execution_however_many_workers_there_are(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    for _ in range(3):
        await hosts.start(research, lease=LEASE)
    made = await boss.workflows.schedules.add("0 7-9 * * 1-5", research, "MSFT")
    assert (made.id, made.next_at) == ("research", datetime(2026, 11, 16, 7, tzinfo=UTC))
    await asyncio.sleep(0.02)
    assert await boss.workflows.list(status="completed") == []
    for hour in (7, 8, 9):
        move(clock, f"2026-11-16T0{hour}:00:00+00:00")
        ids = await ended(boss, hour - 6)
    assert ids == [f"research@2026-11-16T0{hour}:00:00Z" for hour in (7, 8, 9)]
    assert await (await boss.workflows.get(ids[0])).result() == "research@2026-11-16T07:00:00Z MSFT"
    schedule = await boss.workflows.schedules.get("research")
    assert (schedule.started, schedule.missed, schedule.last_id) == (3, 0, ids[2])
    assert schedule.next_at == datetime(2026, 11, 17, 7, tzinfo=UTC)


async def test_a_start_and_the_next_time_are_one_commit(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(research, lease=LEASE)
    await boss.workflows.schedules.add("0 7 * * *", research)
    cursor = await boss.cursor()
    move(clock, "2026-11-16T07:00:00+00:00")
    [id] = await ended(boss, 1)
    commits = [
        commit
        async for commit in boss._scope.engine.watch(boss.name, "schedules/", "workflows/", cursor=cursor, live=False)
    ]
    keys = [{change.key for change in commit.changes} for commit in commits]
    [start] = [each for each in keys if f"workflows/meta/{id}" in each]
    assert "schedules/research" in start
    assert sum("schedules/research" in each for each in keys) == 1


async def test_a_schedule_follows_the_clock_of_its_zone(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(research, lease=LEASE)
    made = await boss.workflows.schedules.add("0 7 * * 1-5", "research", timezone="America/New_York", id="ny")
    assert made.next_at == datetime(2026, 11, 16, 12, tzinfo=UTC)
    move(clock, "2026-11-16T12:00:00+00:00")
    assert await ended(boss, 1) == ["ny@2026-11-16T12:00:00Z"]


@pytest.mark.parametrize(
    ("catch_up", "expected", "missed"),
    [("none", [], 4), ("one", ["10:00"], 3), ("all", ["07:00", "08:00", "09:00", "10:00"], 0)],
)
async def test_what_was_missed_is_caught_up_with_as_the_schedule_says(
    boss: Space, hosts: Hosts, clock: ManualClock, catch_up: Any, expected: list[str], missed: int
) -> None:
    await boss.workflows.schedules.add("0 * * * *", research, catch_up=catch_up)
    move(clock, "2026-11-16T10:30:00+00:00")
    await hosts.start(research, lease=LEASE)

    async def done() -> bool:
        schedule = await boss.workflows.schedules.get("research")
        return schedule.next_at == datetime(2026, 11, 16, 11, tzinfo=UTC)

    await until(done)
    schedule = await boss.workflows.schedules.get("research")
    assert (schedule.started, schedule.missed) == (len(expected), missed)
    assert await ended(boss, len(expected)) == [f"research@2026-11-16T{at}:00Z" for at in expected]


async def test_what_is_a_little_late_is_not_missed(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await boss.workflows.schedules.add("0 * * * *", research, catch_up="none")
    move(clock, "2026-11-16T08:00:30+00:00")
    await hosts.start(research, lease=LEASE)
    assert await ended(boss, 1) == ["research@2026-11-16T08:00:00Z"]
    assert (await boss.workflows.schedules.get("research")).missed == 1


async def test_catching_up_with_all_is_bounded(space: Space, clock: ManualClock) -> None:
    from holdfast.layers.workflows.schedules import Schedule, due_instants

    since = ms("2026-11-16T07:00:00+00:00")
    schedule = Schedule("s", "research", "* * * * *", "UTC", since, since, catch_up="all")
    instants, missed = due_instants(schedule, since + 365 * 86_400_000)
    assert len(instants) == CATCH_UP_MAX
    assert instants[-1] == since + 365 * 86_400_000
    assert missed == 1_000


async def test_a_paused_schedule_starts_nothing_and_makes_up_for_nothing(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(research, lease=LEASE)
    await boss.workflows.schedules.add("0 * * * *", research, catch_up="all")
    await boss.workflows.schedules.pause("research")
    move(clock, "2026-11-16T09:30:00+00:00")
    await asyncio.sleep(0.02)
    assert (await boss.workflows.schedules.get("research")).paused
    await boss.workflows.schedules.resume("research")
    move(clock, "2026-11-16T10:00:00+00:00")
    assert await ended(boss, 1) == ["research@2026-11-16T10:00:00Z"]


async def test_a_removed_schedule_starts_nothing_and_one_made_again_starts_nothing_twice(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(research, lease=LEASE)
    schedules = boss.workflows.schedules
    await schedules.add("0 * * * *", research)
    move(clock, "2026-11-16T07:00:00+00:00")
    await ended(boss, 1)
    await schedules.remove("research")
    move(clock, "2026-11-16T08:00:00+00:00")
    await schedules.add("30 * * * *", research, id="other")
    clock.advance("30m")
    assert await ended(boss, 2) == ["other@2026-11-16T08:30:00Z", "research@2026-11-16T07:00:00Z"]
    clock.set_back("91m")  # as a corrected clock does
    await schedules.add("0 * * * *", research, "again")
    clock.advance("1m")

    async def fired() -> bool:
        return (await schedules.get("research")).next_at == datetime(2026, 11, 16, 8, tzinfo=UTC)

    await until(fired)
    assert len(await boss.workflows.list(status="completed")) == 2
    assert await (await boss.workflows.get("research@2026-11-16T07:00:00Z")).result() == (
        "research@2026-11-16T07:00:00Z None"
    )
    with pytest.raises(NotFound):
        await schedules.remove("nothing")


async def test_a_schedule_of_a_workflow_that_nobody_serves_waits(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    @workflow(name="another")
    async def another(ctx: Context) -> None: ...

    await hosts.start(another, lease=LEASE)
    await boss.workflows.schedules.add("0 * * * *", research)
    await until(lambda: boss.workflows.is_served("another"))
    assert not await boss.workflows.is_served("research")
    move(clock, "2026-11-16T07:00:30+00:00")
    await asyncio.sleep(0.02)
    assert await boss.workflows.list() == []
    await hosts.start(research, lease=LEASE)
    assert await ended(boss, 1) == ["research@2026-11-16T07:00:00Z"]


async def test_a_schedule_that_cannot_be_fired_does_not_keep_others_from_theirs(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    @workflow(name="keyed", concurrency=1, key=lambda input: input["key"])
    async def keyed(ctx: Context, input: Any) -> None: ...

    await hosts.start(research, keyed, lease=LEASE)
    await boss.workflows.schedules.add("0 * * * *", keyed, 7, id="a-broken-one")
    await boss.workflows.schedules.add("0 * * * *", research)
    move(clock, "2026-11-16T07:00:00+00:00")
    assert await ended(boss, 1) == ["research@2026-11-16T07:00:00Z"]
    assert (await boss.workflows.schedules.get("a-broken-one")).started == 0


async def test_bad_schedules_are_refused_when_they_are_made(boss: Space) -> None:
    schedules = boss.workflows.schedules
    for cron in (
        "",
        "* * * *",
        "60 * * * *",
        "0 7 * * 8",
        "every day",
        "0 0 30 2 *",
        "x" * 1000,
        None,
        "0 0 * * * * *",
    ):
        with pytest.raises(InvalidInput, match="cron expression"):
            await schedules.add(cron, research)  # type: ignore[arg-type]
    for zone in ("Europe/Zurych", "", "../../etc/passwd", "Europe", "/etc/localtime", "\0", 3):
        with pytest.raises(InvalidInput, match="no time zone"):
            await schedules.add("0 7 * * *", research, timezone=zone)  # type: ignore[arg-type]
    for wrong in (
        {"catch_up": "some"},
        {"id": ""},
        {"id": "x" * 200},
        {"priority": 1000},
        {"input": object()},
        {"workflow": 7},
        {"workflow": "a/b"},
    ):
        with pytest.raises(InvalidInput):
            await schedules.add("0 7 * * *", **{"workflow": research, **wrong})
    assert await schedules.list() == []


async def test_the_same_schedule_again_is_the_same_and_another_of_its_id_is_refused(boss: Space) -> None:
    schedules = boss.workflows.schedules
    made = await schedules.add("0  7 * * 1-5", research, [1], timezone=ZURICH)
    assert await schedules.add("0 7 * * 1-5", "research", [1], timezone=ZURICH) == made
    for changed in ({"cron": "0 8 * * 1-5"}, {"timezone": "UTC"}, {"input": [2]}, {"catch_up": "all"}):
        given = {"cron": "0 7 * * 1-5", "input": [1], "timezone": ZURICH, **changed}
        with pytest.raises(Conflict, match="an id of its own"):
            await schedules.add(given.pop("cron"), research, given.pop("input"), **given)
    await schedules.add("0 8 * * 1-5", research, id="later")
    assert [each.id for each in await schedules.list()] == ["later", "research"]


async def test_agents_read_schedules_and_orchestrators_write_them(store: Store, boss: Space, url: str) -> None:
    if url != "policed:":
        pytest.skip("there is no policy")
    agent = store.space("contoso", agent="market")
    await boss.workflows.schedules.add("0 7 * * *", research)
    with pytest.raises(AccessDenied):
        await agent.workflows.schedules.add("0 7 * * *", research, id="mine")
    for act in (agent.workflows.schedules.remove, agent.workflows.schedules.pause):
        with pytest.raises(AccessDenied):
            await act("research")
    for key in ("schedules/forged", "schedules/research", "journal/archives/x", "journal/known/research"):
        with pytest.raises(AccessDenied):
            await store.engine.commit("contoso", Batch("market", (Put(key, encode({})),)))
    assert [each.id for each in await agent.workflows.schedules.list()] == ["research"]


def test_instants_are_the_same_forwards_and_backwards_also_where_clocks_change() -> None:
    for zone in ("UTC", ZURICH, "Australia/Lord_Howe"):
        for expression in ("30 2 * * *", "*/20 * * * *", "0 */2 * * *", "0 7 * * 1-5"):
            cron = Cron(expression, zone)
            since, upto = ms("2026-03-27T00:00:00+00:00"), ms("2026-04-07T00:00:00+00:00")
            forwards, at = [], since - 1
            while (at := cron.after(at)) <= upto:
                forwards.append(at)
            assert cron.last(since, upto, 100_000) == forwards
            assert all(datetime.fromtimestamp(at / 1000, ZoneInfo(zone)).second == 0 for at in forwards)


def test_schedules_without_await(tmp_path: Any) -> None:
    with blocking.open(str(tmp_path / "b.db")) as store:
        workflows = store.space("default", agent="desk").workflows
        assert workflows.schedules.add("0 7 * * *", "research", timezone=ZURICH).id == "research"
        workflows.schedules.pause("research")
        assert [each.paused for each in workflows.schedules.list()] == [True]
        workflows.schedules.remove("research")
        with pytest.raises(NotFound):
            workflows.schedules.get("research")


async def test_a_worker_that_comes_late_fires_what_it_then_hears_of(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    worker = await hosts.start(research, lease=LEASE)
    await soon(worker.stop())
    await boss.workflows.schedules.add("0 * * * *", research)
    await hosts.start(research, lease=LEASE)
    move(clock, "2026-11-16T07:00:00+00:00")
    assert await ended(boss, 1) == ["research@2026-11-16T07:00:00Z"]


async def test_a_store_that_was_out_of_reach_for_a_moment_delays_a_schedule_by_no_more_than_that(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = Firing._start, list[int]()

    async def fails_once(self: Firing, *given: Any) -> Any:
        if not failures:
            failures.append(clock.now_ms())
            raise Unavailable("for a moment")
        return await start(self, *given)

    monkeypatch.setattr(Firing, "_start", fails_once)
    await hosts.start(research, lease=LEASE)
    await boss.workflows.schedules.add("0 7 * * *", research)
    move(clock, "2026-11-16T07:00:00+00:00")

    async def has_failed() -> bool:
        return bool(failures)

    await until(has_failed)
    await asyncio.sleep(0.02)
    clock.advance("1s")
    assert await ended(boss, 1) == ["research@2026-11-16T07:00:00Z"]
