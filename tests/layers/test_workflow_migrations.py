"""Executions whose state was written under an older version of its type: they are migrated, and go on, and can be taken back."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import (
    Context,
    ManualClock,
    MigrationFailed,
    Space,
    workflow,
)
from holdfast.testing.replaying import assert_replays, record_history
from tests.layers.hosting import Hosts, soon, until, waits_for
from tests.layers.tills import (
    ENDED,
    MIGRATED,
    Cents,
    begun,
    events,
    hosts,
    is_paused,
    migrated_and_ended,
    redefined,
    till_1,
    till_2,
    till_3,
    waits_for_signal,
)

__all__ = ["hosts"]


async def test_newer_code_goes_on_with_an_older_state_that_it_has_migrated(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}
    worker = await hosts.start(till_2)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    assert await handle.state() == ENDED
    await worker.stop()
    await hosts.start(till_2)  # replays what both versions wrote
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED
    assert await events(handle, "migrated") == 1
    states = {(point.event, point.path): point.state for point in await handle.history()}
    assert states["completed", "two#0"] == {"euros": 3, "items": ["e1", "e2"], "note": "begun"}
    assert states["migrated", ""] == MIGRATED
    assert states["completed", ""] == ENDED
    assert [str(each) for each in await handle.diff("two", "three")] == [
        "+ cents: 600",
        '+ currency: "EUR"',
        "- euros: 3",
        '+ items[2]: "c3"',
        '~ note: "begun" → "two"',
    ]


async def test_a_state_goes_through_several_versions_and_all_are_replayed(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    worker = await hosts.start(till_2)
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    await worker.stop()
    await hosts.start(till_3)
    await handle.signal("end")
    ended = {"amount": {"EUR": 600, "SEK": 1}, "items": ["e1", "e2", "c3"], "note": "three"}
    assert await soon(handle.result()) == ended
    assert await handle.state() == ended
    assert await events(handle, "migrated") == 2


async def test_a_state_that_nobody_can_migrate_pauses_its_execution_until_somebody_can(
    boss: Space, hosts: Hosts
) -> None:
    handle = await begun(boss, hosts)
    missing = redefined(till_2, state=Cents, state_version="1.1.0")
    worker = await hosts.start(missing)
    await handle.signal("go")
    await until(lambda: is_paused(handle))
    found = await handle.status()
    assert found.error is not None
    assert (found.error["type"], "1.0.0 to 1.1.0" in found.error["message"]) == ("MigrationFailed", True)
    assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}, "nothing was changed"
    await worker.stop()
    await hosts.start(till_2)
    await handle.resume()
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED


async def test_a_faulty_migration_pauses_with_what_is_wrong(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    await handle.signal("go")
    faults: list[tuple[Any, str]] = [
        (lambda state: state, "gave is refused"),
        (lambda state: {"cents": "many"}, "/cents"),
        (lambda state: 1 // 0, "ZeroDivisionError"),
        (lambda state: None, "does it return"),
    ]
    for migration, told in faults:

        @workflow(name="till", state=Cents, state_version="1.1.0", state_migrations={"1.0.0": migration})
        async def faulty(ctx: Context) -> None: ...

        worker = await hosts.start(faulty)
        await handle.resume()

        async def has_failed(told: str = told) -> bool:
            return told in ((await handle.status()).error or {}).get("message", "")

        await until(has_failed)
        assert (await handle.status()).status == "paused"
        assert await handle.state() == {"euros": 3, "items": ["e1", "e2"], "note": "two"}
        await worker.stop()


async def test_older_code_puts_off_what_has_a_newer_state(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    worker = await hosts.start(till_2)
    handle = await boss.workflows.start(till_2, id="newer")
    await handle.signal("go")
    await waits_for_signal(handle, "end")
    await worker.stop()
    old = await hosts.start(till_1)
    await handle.signal("end")
    await waits_for(handle, "code")
    [wait] = (await handle.status()).waits
    assert "state 1.0.0" in wait["name"]
    fresh = await boss.workflows.start(till_2, id="fresh")  # nothing of it has run, and it was started by newer code
    await waits_for(fresh, "code")
    await old.stop()
    await hosts.start(till_2)
    clock.advance("6s")
    assert (await soon(handle.result()))["cents"] == 600


async def test_state_without_a_type_is_of_version_zero(boss: Space, hosts: Hosts) -> None:
    @workflow(name="till")
    async def untyped(ctx: Context) -> None:
        ctx.state["euros"] = 4
        await ctx.wait_for("go")

    @workflow(name="till", state=Cents, state_migrations={"0.0.0": lambda s: {"cents": s["euros"] * 100}})
    async def typed(ctx: Context) -> Any:
        ctx.state["cents"] = 400
        await ctx.wait_for("go")
        return ctx.state.all()

    worker = await hosts.start(untyped)
    handle = await boss.workflows.start(untyped)
    await waits_for(handle, "signal")
    await worker.stop()
    await hosts.start(typed)
    await handle.signal("go")
    assert await soon(handle.result()) == {"cents": 400, "items": [], "note": "", "currency": "EUR"}


# --- going back ---


async def test_a_retry_from_after_a_migration_leaves_it(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    await handle.retry("three")
    await waits_for_signal(handle, "end")
    await handle.signal("end")
    assert await soon(handle.result()) == ENDED
    assert await events(handle, "migrated") == 1


async def test_a_retry_from_before_a_migration_takes_it_back_and_it_is_made_anew(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    await handle.retry("two")
    await handle.signal("go")
    await handle.signal("end")
    # "two" and "three" were done again, by the newer code; "one" was not
    ended = {"cents": 600, "items": ["e1", "c2", "c3"], "note": "three", "currency": "EUR"}
    assert await soon(handle.result()) == ended
    assert await handle.state() == ended
    assert await events(handle, "migrated") == 2
    states = [(point.event, point.state) for point in await handle.history()]
    assert ("retried", {"euros": 1, "items": ["e1"], "note": "begun"}) in states
    assert ("migrated", {"cents": 100, "items": ["e1"], "note": "begun", "currency": "EUR"}) in states
    assert states[-1] == ("completed", ended)


async def test_forks_from_before_and_after_a_migration_have_the_state_of_then(boss: Space, hosts: Hosts) -> None:
    handle = await migrated_and_ended(boss, hosts)
    after = await handle.fork("three", id="after", state={"cents": 1000})
    await waits_for_signal(after, "end")
    await after.signal("end")
    assert (await soon(after.result()))["cents"] == 1300
    before = await handle.fork("two", id="before", state={"euros": 1})
    await before.signal("go")
    await before.signal("end")
    found = await soon(before.result())
    assert (found["cents"], found["items"]) == (600, ["e1", "c2", "c3"])
    assert [await events(each, "migrated") for each in (handle, after, before)] == [1, 1, 1]


async def test_what_is_archived_after_a_migration_comes_back_whole(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await migrated_and_ended(boss, hosts)
    clock.advance("1s")
    history = await handle.history()
    await boss.workflows.cleanup("1ms", name="till")
    restored = await boss.workflows.restore("t")
    assert (await restored.history(), await restored.state()) == (history, ENDED)


async def test_recorded_histories_are_replayed_by_code_with_a_newer_state(boss: Space, hosts: Hosts) -> None:
    handle = await begun(boss, hosts)
    history = await record_history(handle)
    await assert_replays(till_2, history)
    missing = redefined(till_3, state=Cents, state_version="1.2.0")
    with pytest.raises(MigrationFailed, match=r"1\.0\.0"):
        await assert_replays(missing, history)
