"""Archives of executions: nothing is deleted that was not archived, and what comes back is what there was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    Archive,
    Conflict,
    Context,
    ExecutionHandle,
    InvalidInput,
    ManualClock,
    NotFound,
    Space,
    StorageFull,
    Store,
    blocking,
    workflow,
)
from holdfast.layers.blobs import Blobs
from holdfast.layers.collector import collect
from tests.layers.test_workflows import Hosts, hosts, soon, until, waits_for

__all__ = ["hosts"]


async def half(ctx: Context, n: int) -> str:
    ctx.state["n"] = n
    await ctx.state.append_to_list("seen", n)
    await ctx.state.add_to_set("sizes", n % 2)
    return "x" * n


@workflow
async def grows(ctx: Context, sizes: list[int]) -> str:
    parts = await ctx.map("half", half, sizes)
    if not sizes:
        await ctx.wait_for("never")
    return "".join(parts)


async def told(handle: ExecutionHandle) -> tuple[Any, ...]:
    return (
        await handle.status(),
        await handle.result("1s"),
        await handle.steps(),
        await handle.state(),
        await handle.log(),
        await handle.history(),
    )


async def left(space: Space) -> list[str]:
    """What is kept of executions."""
    found = []
    for prefix in ("workflows/meta/", "workflows/executions/", "workflows/ended/", "journal/steps/", "journal/log/"):
        page = await space._scope.engine.scan(space.name, prefix, limit=1000)
        found += [entry.key for entry in page.entries]
    return found


async def collected(store: Store) -> None:
    await collect(getattr(store.engine, "inner", store.engine), "contoso")


async def test_what_was_cleaned_up_comes_back_as_it_was(
    store: Store, boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, [3, 4, 70_000], id="desk/17")
    await soon(handle.result())
    before = await told(handle)
    clock.advance("2h")
    assert (await boss.workflows.cleanup("3h")).removed == 0
    done = await boss.workflows.cleanup("1h")
    assert (done.archived, done.removed, done.more) == (1, 1, False)
    with pytest.raises(NotFound):
        await handle.status()
    await collected(store)
    assert await left(boss) == []
    clock.advance("30d")
    await boss.blobs.sweep("1h") if "policed" not in store.url else None
    [archived] = await boss.workflows.archives()
    assert (archived.id, archived.name, archived.status) == ("desk/17", "grows", "completed")
    restored = await boss.workflows.restore("desk/17")
    assert await told(restored) == before
    assert [view.id for view in await boss.workflows.list(status="completed")] == ["desk/17"]
    assert (await boss.workflows.counts())["grows"]["completed"] == 1
    await collected(store)
    await restored.retry(from_step="half#0/0")
    assert len(await soon(restored.result())) == 70_007
    clock.advance("25h")
    await boss._scope.engine.commit(boss.name, _nothing())
    await collected(store)
    assert await left(boss) == [], "it is kept as long as one that has just ended"
    with pytest.raises(NotFound):
        await boss.workflows.restore("none")


def _nothing() -> Any:
    from holdfast.engine import SYSTEM_ACTOR, Batch

    return Batch(SYSTEM_ACTOR)


async def test_a_failed_archive_deletes_nothing(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.start(grows)
    handles = [await boss.workflows.start(grows, [n], id=f"e{n}") for n in (1, 2)]
    for handle in handles:
        await soon(handle.result())
    before = [await told(handle) for handle in handles]
    clock.advance("2h")

    async def full(self: Blobs, data: Any) -> Any:
        async for _ in data:
            pass
        raise StorageFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "put", full)
        with pytest.raises(StorageFull):
            await boss.workflows.cleanup("1h")
    assert [await told(handle) for handle in handles] == before
    assert await boss.workflows.archives() == []
    assert (await boss.workflows.cleanup("1h")).removed == 2


async def test_cleaning_up_without_an_archive_is_possible_and_by_name(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, [1])
    await soon(handle.result())
    clock.advance("2h")
    assert (await boss.workflows.cleanup("1h", name="other")).removed == 0
    done = await boss.workflows.cleanup("1h", archive=False)
    assert (done.archived, done.removed) == (0, 1)
    assert await boss.workflows.archives() == []


async def test_what_lives_is_neither_archived_nor_cleaned_up(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, [])
    await waits_for(handle, "signal")
    clock.advance("1h")
    with pytest.raises(Conflict, match="only what has ended"):
        await handle.archive()
    assert (await boss.workflows.cleanup("1s")).removed == 0
    assert (await handle.status()).status == "running"


async def test_an_execution_that_is_tried_again_while_it_is_archived_is_not(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, [1])
    await soon(handle.result())
    clock.advance("2h")
    put = Blobs.put

    async def meanwhile(self: Blobs, data: Any) -> Any:
        ref = await put(self, data)
        await handle.retry(from_step="half")
        return ref

    monkeypatch.setattr(Blobs, "put", meanwhile)
    with pytest.raises(Conflict):
        await boss.workflows.cleanup("1h")
    assert await boss.workflows.archives() == []
    assert await soon(handle.result()) == "x"


async def test_an_archive_is_kept_as_long_as_it_is_told_and_restored_once(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, [1], id="a")
    await soon(handle.result())
    made = await handle.archive(keep="7d")
    assert isinstance(made, Archive)
    assert [each.id for each in await boss.workflows.archives(name="grows")] == ["a"]
    assert await boss.workflows.archives(name="other") == []
    with pytest.raises(Conflict, match="nothing to restore"):
        await boss.workflows.restore("a")
    clock.advance("8d")
    assert await boss.workflows.archives() == []
    with pytest.raises(NotFound):
        await boss.workflows.restore("a")
    for wrong in (lambda: boss.workflows.cleanup(0), lambda: boss.workflows.cleanup("soon")):
        with pytest.raises(InvalidInput):
            await wrong()


async def test_an_archive_of_more_than_one_commit_comes_back_whole(store: Store, boss: Space, hosts: Hosts) -> None:
    await hosts.start(grows)
    handle = await boss.workflows.start(grows, list(range(60)), id="a")
    await soon(handle.result())
    before = await told(handle)
    boss._scope.clock.advance("1h")  # type: ignore[attr-defined]
    await boss.workflows.cleanup("1s")
    await collected(store)
    restored = await boss.workflows.restore("a")
    assert await told(restored) == before


def test_archives_without_await(tmp_path: Path) -> None:
    with blocking.open(str(tmp_path / "b.db")) as store:
        workflows = store.space("default", agent="desk").workflows
        with workflows.worker([grows]):
            workflows.start(grows, [1], id="a").result("30s")
        assert workflows.get("a").archive().id == "a"
        assert workflows.get("a").history()[0].state["n"] == 1
        assert workflows.cleanup("1ms").removed == 1
        assert workflows.restore("a").result() == "x"


# --- workflows that want it ---


@workflow(archive=True)
async def kept(ctx: Context, n: int) -> int:
    await ctx.step("half", half, n)
    if n == 0:
        await ctx.wait_for("never")
    if n == 1:
        raise ValueError("no")
    return n


@workflow(name="kept", archive="2d")
async def kept_for_days(ctx: Context, n: int) -> int:
    return n


async def archived(space: Space, number: int) -> None:
    async def are() -> bool:
        return len(await space.workflows.archives()) == number and not await space.queue("archives.kept").peek()

    await until(are)


async def test_what_has_ended_is_archived_by_a_worker_before_it_expires(
    store: Store, boss: Space, admin: Space, hosts: Hosts, clock: ManualClock
) -> None:
    await hosts.start(kept)
    handles = [await boss.workflows.start(kept, n, id=f"e{n}") for n in range(3)]
    await waits_for(handles[0], "signal")
    await handles[0].cancel()
    await archived(boss, 3)
    assert [each.status for each in await boss.workflows.archives()] == ["cancelled", "failed", "completed"]
    clock.advance("25h")
    await admin.commit()  # what is due is swept
    for handle in handles:
        with pytest.raises(NotFound):
            await handle.status()
    restored = await boss.workflows.restore("e2")
    assert await restored.result(0) == 2


async def test_nothing_expires_before_it_was_archived(
    boss: Space, hosts: Hosts, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> None:
        raise StorageFull("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(Blobs, "put", full)
        worker = await hosts.start(kept)
        handle = await boss.workflows.start(kept, 2, id="e")
        await soon(handle.result())
        clock.advance("9s")
        await worker.stop()
        clock.advance("30d")
        await worker.scope.commit(())
        assert (await handle.status()).status == "completed"
        assert await boss.workflows.archives() == []
        with pytest.raises(StorageFull):
            await boss.workflows.cleanup("1d", name="kept", archive=False)  # its workflow wants it archived
        assert (await handle.status()).status == "completed"
    worker = await hosts.start(kept)
    await archived(boss, 1)
    assert (await handle.status()).status == "completed"
    clock.advance("25h")
    with pytest.raises(NotFound):
        await handle.status()


async def test_cleaning_up_archives_what_its_workflow_wants_archived(
    boss: Space, hosts: Hosts, clock: ManualClock
) -> None:
    handle = await boss.workflows.start(kept, 2, id="e")
    await handle.cancel()  # nobody serves it, so nobody has archived it
    clock.advance("1s")
    done = await boss.workflows.cleanup("1ms", name="kept", archive=False)
    assert (done.archived, done.removed) == (1, 1)
    await hosts.start(kept)  # the message that is left is not needed any more
    await archived(boss, 1)


async def test_archives_are_kept_as_long_as_the_workflow_says(boss: Space, hosts: Hosts, clock: ManualClock) -> None:
    await hosts.start(kept_for_days)
    await soon((await boss.workflows.start(kept_for_days, 1)).result())
    await archived(boss, 1)
    clock.advance("49h")
    assert await boss.workflows.archives() == []


async def test_one_that_is_tried_again_before_it_was_archived_is_archived_when_it_ends_again(
    boss: Space, hosts: Hosts
) -> None:
    handle = await boss.workflows.start(kept, 2, id="e")
    await handle.cancel()
    await handle.retry()
    await hosts.start(kept)
    assert await soon(handle.result()) == 2
    await archived(boss, 1)
    assert [each.status for each in await boss.workflows.archives()] == ["completed"]
