"""Following a task and submitting it once: what the command line and the HTTP port rest on."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import InvalidInput, Space, TaskSpec
from tests.layers.works import DONE, TRUE, begun, soon

LIVE = TaskSpec(command=("true",), stream_output=True)


async def test_a_log_is_followed_until_the_task_has_ended(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TRUE)
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def follow() -> None:
        async for event in handle.events(live=True):
            await seen.put(str(event.status))

    following = asyncio.ensure_future(follow())
    assert await soon(seen.get()) == "created"
    async with boss.tasks.ledger(capacity=1, host="h") as ledger:
        launch = await begun(boss, ledger)
        assert [await soon(seen.get()) for _ in range(2)] == ["spawning", "running"]
        assert not following.done()
        await ledger.finished(launch, DONE)
        await soon(following)
    assert seen.get_nowait() == "completed"
    assert seen.empty()
    last = [event.id async for event in handle.events()][-2]
    assert [event.status async for event in handle.events(after=last, live=True)] == ["completed"]


async def test_output_so_far_is_read_without_waiting_and_stderr_is_told_apart(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(LIVE)
    assert [chunk async for chunk in handle.stream(live=False)] == []
    async with boss.tasks.ledger(capacity=1, host="h") as ledger:
        launch = await begun(boss, ledger)
        await ledger.output(launch, [("stdout", b"out\n"), ("stderr", b"\xfferr\n")])
        chunks = [chunk async for chunk in handle.stream(live=False)]
        assert [(chunk.stream, chunk.data) for chunk in chunks] == [(None, b"out\n"), ("stderr", b"\xfferr\n")]
        assert [told["encoding"] async for told in handle.envelopes()] == ["base64", "base64"]
        assert [told["chunk"] async for told in handle.envelopes(after=0)] == [1]
        await ledger.finished(launch, DONE)
    assert await handle.output() == b"out\n\xfferr\n"


async def test_a_submission_under_a_request_id_is_made_once(space: Space) -> None:
    first, again = [await space.tasks.submit(TRUE, {"x": 1}, request_id="r1") for _ in range(2)]
    assert first.tid == again.tid
    assert (await space.tasks.counts())["created"] == 1
    assert (await space.queue("holdfast.spawn.requests").stats()).ready == 1
    with pytest.raises(InvalidInput, match="used before for something else"):
        await space.tasks.submit(TRUE, {"x": 2}, request_id="r1")
    both = await asyncio.gather(*(space.tasks.submit(TRUE, request_id="r2") for _ in range(4)))
    assert len({handle.tid for handle in both}) == 1


async def test_a_short_tid_must_mean_one_task(space: Space) -> None:
    handles = [await space.tasks.submit(TRUE) for _ in range(3)]
    assert (await space.tasks.get(handles[1].tid[-10:])).tid == handles[1].tid
    for length in range(4, 19):
        suffix = handles[0].tid[-length:]
        if sum(handle.tid.endswith(suffix) for handle in handles) == 1:
            assert (await space.tasks.get(suffix)).tid == handles[0].tid
    with pytest.raises(InvalidInput):
        await space.tasks.get("123")
