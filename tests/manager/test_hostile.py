"""Hostile programs through the whole stack: each ends as it should, is written down, and leaves the machine clean."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast import Limits, StorageFull, TaskHandle, TaskSpec, TaskState
from holdfast.layers.blobs import Blobs
from tests.manager.conftest import Served, inside, running, until
from tests.processes.conftest import is_alive, living

pytestmark = pytest.mark.asyncio(loop_scope="module")
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
PRINTED = (1 << 30) if SOAK else (64 << 20)
HERE = "tests.processes.targets"


async def started(served: Served, name: str, *args: Any, **options: Any) -> TaskHandle:
    spec = TaskSpec(function=f"{HERE}:{name}", args=args, stream_output=True, **options)
    return await served.space.tasks.submit(spec)


async def said(handle: TaskHandle) -> int:
    """The number it prints when it is ready."""
    text = b""
    async for chunk in handle.stream():
        text += chunk.data
        if text.endswith(b"\n"):
            break
    return int(text)


async def is_clean(served: Served, *pids: int) -> bool:
    return await until(lambda: not living(served.marker) and not any(map(is_alive, pids)))


async def stopped(handle: TaskHandle) -> TaskState:
    began = time.monotonic()
    assert (await handle.stop()).status == "ok"
    assert time.monotonic() - began < 5
    return await handle.state()


async def test_ignores_term(served: Served) -> None:
    handle = await started(served, "ignore_term")
    pid = await said(handle)
    assert (await stopped(handle)).status == "cancelled"
    assert await is_clean(served, pid)


@pytest.mark.parametrize("stay", [True, False])
async def test_forks_twice_and_changes_its_session(served: Served, stay: bool) -> None:
    handle = await started(served, "fork_twice", stay, kwargs={"change_session": True})
    daemon = await said(handle)
    if stay:
        assert (await stopped(handle)).status == "cancelled"
    else:
        assert await handle.result("20s") == "gone"
    assert await is_clean(served, daemon)


async def test_fills_the_disk(served: Served, tmp_path: Path) -> None:
    handle = await started(served, "fill_the_disk", str(tmp_path / "full"), 1_000_000)
    state = await handle.wait("20s")
    assert state.status == "failed"
    assert await is_clean(served)


async def test_prints_a_gigabyte(served: Served) -> None:
    process = psutil.Process(served.info.pid)
    before = most = process.memory_info().rss
    handle = await served.space.tasks.submit(TaskSpec(command=("head", "-c", str(PRINTED), "/dev/zero")))
    ended = asyncio.ensure_future(handle.wait("120s"))
    while not ended.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.01)
    state = await ended
    assert state.status == "completed"
    assert state.output is not None
    assert state.output.size == PRINTED
    assert most - before < 60 << 20
    assert await is_clean(served)


async def test_closes_its_stdout(served: Served) -> None:
    handle = await started(served, "close_stdout")
    assert await handle.result("20s") == "still here"
    assert await is_clean(served)


async def test_exits_while_its_children_live(served: Served) -> None:
    handle = await started(served, "exit_while_children_live")
    child = await handle.result("20s")
    assert await is_clean(served, child)


async def test_allocates_more_than_its_limit_in_several_processes(served: Served) -> None:
    handle = await started(served, "allocate", 150, 3, limits=Limits(memory_mb=90))
    state = await handle.wait("30s")
    assert state.status == "killed"
    assert "memory" in (state.reason or "")
    assert await is_clean(served)


async def test_opens_more_files_than_its_limit(served: Served) -> None:
    handle = await started(served, "open_files", 100, limits=Limits(max_fds=50))
    state = await handle.wait("20s")
    assert (state.status, "fds" in (state.reason or "")) == ("killed", True)
    assert await is_clean(served)


async def test_stops_its_warden(served: Served) -> None:
    handle = await started(served, "signal_warden", 19)
    pid = await said(handle)
    await handle.kill()
    assert (await handle.wait("30s")).status == "killed"
    assert await is_clean(served, pid)


async def test_does_not_read_what_is_typed(served: Served) -> None:
    handle = await served.space.tasks.submit(TaskSpec(command=("sleep", "60"), interactive=True))
    await running(handle)
    typing = [asyncio.ensure_future(handle.write(b"x" * 200_000)) for _ in range(3)]
    await asyncio.sleep(0.2)
    assert (await stopped(handle)).status == "cancelled"
    for each in typing:
        await each
    assert await is_clean(served)


async def test_a_full_disk_fails_the_task_whose_output_cannot_be_kept_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def put(*_: object) -> None:
        raise StorageFull("the disk is full")

    monkeypatch.setattr(Blobs, "put", put)
    async with holdfast.open("memory:") as store, inside(store) as space:
        for printed in ("3000000", "30000000"):
            spec = TaskSpec(command=("head", "-c", printed, "/dev/zero"), output_size_limit_mb=1)
            state = await (await space.tasks.submit(spec)).wait("20s")
            assert state.status == "failed"
            assert "the disk is full" in (state.reason or "")
        assert await (await space.tasks.submit(TaskSpec(command=("echo", "well")))).result("20s") == b"well\n"
