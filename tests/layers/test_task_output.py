"""Output of tasks: inline and spilled, live and afterwards, whole again byte for byte. Rules 35 to 39 by their words."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import BlobRef, Damaged, ManualClock, NotFound, Space, Store, TaskOutcome, TaskSpec
from holdfast.engines.memory import MemoryEngine
from holdfast.layers.blobs import Blobs
from holdfast.layers.task_output import PREVIEW_BYTES, Spool, StreamName, TextSplitter, data_of, envelope, pieces
from tests.layers.works import DONE, begun, done, mortal, soon

ON_SERVERS = {
    "test_rule_36_above_the_limit_output_is_spilled_with_path_size_preview_and_sha256",
    "test_rule_39_chunks_come_live_in_order_and_the_last_one_is_final",
    "test_a_stream_over_the_limit_goes_on_from_the_blob_where_it_was",
}

SMALL = TaskSpec(command=("x",), output_size_limit_mb=0.001)
"""Whose limit is 1,048 bytes."""
LIVE = TaskSpec(command=("x",), stream_output=True, output_size_limit_mb=0.001)


@pytest.fixture
async def store(url: str, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    async with holdfast.open(url, clock=clock, background=False, blobs=tmp_path / "blobs") as opened:
        yield opened


def blob_file(tmp_path: Path, data: bytes) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    return tmp_path / "blobs" / "contoso" / digest[:2] / digest


async def test_rule_35_up_to_the_limit_output_is_inline(space: Space, boss: Space, tmp_path: Path) -> None:
    handle = await space.tasks.submit(SMALL)
    data = bytes(range(256)) * 4
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, output=data + b"x" * 24)
    [told] = await space.tasks.peek(f"T{handle.tid}.outbox")
    assert (told["type"], told["chunk"], told["final"], told["encoding"]) == ("stream", 0, True, "base64")
    assert told["size"] == 1048
    assert await handle.result() == data + b"x" * 24
    assert not blob_file(tmp_path, data).parent.parent.exists()


async def test_rule_36_above_the_limit_output_is_spilled_with_path_size_preview_and_sha256(
    space: Space, boss: Space, tmp_path: Path
) -> None:
    handle = await space.tasks.submit(SMALL)
    data = b"line \xff\n" * 300
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, output=data)
    [told] = await space.tasks.peek(f"T{handle.tid}.outbox")
    assert told == {
        "type": "large_output",
        "path": str(blob_file(tmp_path, data)),
        "size": 2100,
        "size_mb": 0.0,
        "truncated_preview": data[:PREVIEW_BYTES].decode(errors="replace"),
        "sha256": hashlib.sha256(data).hexdigest(),
        "message": f"Output too large (2,100 bytes), saved to {blob_file(tmp_path, data)}",
        "chunk": 0,
        "final": True,
        "attempt": 1,
    }
    assert Path(told["path"]).read_bytes() == data
    assert await handle.result() == await handle.output() == data
    [spilled] = [event.fields async for event in handle.events() if event.event == "output_spilled"]
    assert spilled == {"size": 2100, "path": told["path"]}
    assert (await handle.state()).output.spilled == BlobRef(told["sha256"], 2100)  # type: ignore[union-attr]


async def test_rule_37_a_reference_never_outlives_its_blob(
    store: Store, space: Space, boss: Space, clock: ManualClock, tmp_path: Path
) -> None:
    data, value = b"x" * 5000, "y" * 5000
    handle = await space.tasks.submit(SMALL)
    other = await space.tasks.submit(TaskSpec(function="a:b", output_size_limit_mb=0.001))
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, output=data)
        await done(view, ledger, TaskOutcome("completed", result=value))
    file = blob_file(tmp_path, data)
    outbox = f"T{handle.tid}.outbox"
    for days in range(1, 8):
        clock.advance("1d")
        await store._sweep_blobs("contoso")
        assert file.exists()
        if days < 7:
            assert await handle.result() == data
            assert await other.result() == value
    assert await space.tasks.peek(outbox) == []  # the reference is gone: nobody needs to collect it first
    with pytest.raises(NotFound):
        await handle.result()
    clock.advance("23h")
    await store._sweep_blobs("contoso")
    assert file.exists()
    clock.advance("2h")
    await store._sweep_blobs("contoso")
    clock.advance("2h")  # the sweep's own grace
    await store._sweep_blobs("contoso")
    assert not file.exists()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=700), max_size=8), st.booleans())
async def test_rule_38_bytes_come_back_as_they_were(parts: list[bytes], live: bool) -> None:
    async with holdfast.open("memory:", background=False) as store:
        space = store.space("contoso")
        handle = await space.tasks.submit(LIVE if live else SMALL)
        async with mortal(space) as (ledger, view, _):
            launch = await begun(view, ledger)
            for part in parts:
                await ledger.output(launch, [("stdout", part)])
            await ledger.finished(launch, DONE)
        whole = b"".join(parts)
        assert await handle.output() == whole
        chunks = [chunk async for chunk in handle.stream()]
        assert b"".join(chunk.data for chunk in chunks) == whole
        if chunks:
            assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        else:
            assert not live


async def test_rule_39_chunks_come_live_in_order_and_the_last_one_is_final(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(LIVE)
    seen: list[tuple[int, bytes, bool]] = []
    told = asyncio.Condition()

    async def listen() -> None:
        async for chunk in handle.stream():
            async with told:
                seen.append((chunk.number, chunk.data, chunk.final))
                told.notify_all()

    listening = asyncio.ensure_future(listen())
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        for number, data in enumerate((b"one", b"two", b"three")):
            await ledger.output(launch, [("stdout", data)])
            async with told:  # it arrives while the task runs
                await soon(told.wait_for(lambda number=number: len(seen) == number + 1))  # type: ignore[misc]
        await ledger.finished(launch, DONE)
        await soon(listening)
    assert seen == [(0, b"one", False), (1, b"two", False), (2, b"three", False), (3, b"", True)]
    assert [chunk.number async for chunk in handle.stream(after=1)] == [2, 3]


async def test_a_stream_over_the_limit_goes_on_from_the_blob_where_it_was(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(LIVE)
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        for letter in (b"a", b"b", b"c"):
            await ledger.output(launch, [("stdout", letter * 500)])
        assert [chunk async for chunk in _upto(handle.stream(), 2)] == [b"a" * 500, b"b" * 500]
        await ledger.finished(launch, DONE)
    chunks = [chunk async for chunk in handle.stream()]
    assert [chunk.data for chunk in chunks] == [b"a" * 500, b"b" * 500, b"c" * 500]
    assert chunks[-1].final
    assert [chunk.data async for chunk in handle.stream(after=0)] == [b"b" * 500, b"c" * 500]
    assert await handle.output() == b"a" * 500 + b"b" * 500 + b"c" * 500


async def _upto(chunks: AsyncIterator[holdfast.OutputChunk], count: int) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk.data
        count -= 1
        if not count:
            return


async def test_an_interactive_task_tells_text_of_both_streams(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(command=("x",), interactive=True))
    text = "née\n".encode()
    async with mortal(boss) as (ledger, view, _):
        launch = await begun(view, ledger)
        await ledger.output(launch, [("stdout", text[:2]), ("stderr", b"oops"), ("stdout", text[2:])])
        await ledger.output(launch, [("stdout", b"\xff\xfe")])
        await ledger.finished(launch, DONE)
    told = await space.tasks.peek(f"T{handle.tid}.outbox")
    assert [(each["stream"], each["encoding"]) for each in told] == [
        ("stdout", "text"), ("stderr", "text"), ("stdout", "text"), ("stdout", "base64"), ("stdout", "text")
    ]  # fmt: skip
    assert [each["data"] for each in told[:3]] == ["n", "oops", "ée\n"]
    stdout = [chunk.data async for chunk in handle.stream() if chunk.stream == "stdout"]
    assert b"".join(stdout) == text + b"\xff\xfe"


async def test_what_an_attempt_printed_that_was_lost_is_not_in_the_output_of_the_next(
    space: Space, boss: Space, clock: ManualClock
) -> None:
    handle = await space.tasks.submit(LIVE)
    async with mortal(boss) as (ledger, view, leases):
        await ledger.output(await begun(view, ledger), [("stdout", b"first")])
        lost = ledger.tid
        await leases.close()
        clock.advance("11s")
    async with mortal(boss) as (ledger, _, _):
        launch = await ledger.adopt(handle.tid, lost)
        assert launch is not None
        await ledger.running(launch, 5)
        await ledger.output(launch, [("stdout", b"second")])
        await ledger.finished(launch, DONE)
    assert await handle.output() == b"second"
    chunks = [(chunk.number, chunk.attempt, chunk.data, chunk.final) async for chunk in handle.stream()]
    assert chunks == [(0, 1, b"first", False), (1, 2, b"second", False), (2, 2, b"", True)]


async def test_a_large_result_is_a_blob_and_comes_back(space: Space, boss: Space) -> None:
    handle = await space.tasks.submit(TaskSpec(function="a:b", output_size_limit_mb=0.001))
    value = {"rows": [{"n": number, "text": "ü" * 20} for number in range(100)]}
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, TaskOutcome("completed", result=value))
    assert await handle.result() == value
    assert (await handle.state()).result.spilled is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["altered", "truncated", "removed"])
async def test_a_blob_that_was_altered_or_removed_is_a_clear_error(
    space: Space, boss: Space, tmp_path: Path, damage: str
) -> None:
    handle = await space.tasks.submit(SMALL)
    data = b"x" * 5000
    async with mortal(boss) as (ledger, view, _):
        await done(view, ledger, output=data)
    file = blob_file(tmp_path, data)
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(b"y" * 5000 if damage == "altered" else data[:10])
    with pytest.raises(NotFound if damage == "removed" else Damaged, match=r"gone|altered|should have 5,000"):
        await handle.result()
    with pytest.raises((NotFound, Damaged)):
        async for _ in handle.stream():
            pass


async def test_ten_mebibytes_are_inline_and_one_byte_more_is_not(tmp_path: Path) -> None:
    async with holdfast.open(str(tmp_path / "t.db"), background=False) as store:
        space = store.space("contoso")
        for extra, is_spilled in ((0, False), (1, True)):
            handle = await space.tasks.submit(TaskSpec(command=("x",)))
            data = b"0123456789abcdef" * (10 * 1024 * 64) + b"!" * extra
            async with mortal(space) as (ledger, view, _):
                await done(view, ledger, output=data)
            assert ((await handle.state()).output.spilled is not None) is is_spilled  # type: ignore[union-attr]
            assert await handle.result() == data


async def test_a_spool_holds_no_more_than_its_limit_and_what_is_under_way(tmp_path: Path) -> None:
    engine, clock = MemoryEngine(), ManualClock()
    spool = Spool(Blobs(engine, "contoso", "a", tmp_path, clock), limit=1000)
    for number in range(2000):
        await spool.write(bytes([number % 256]) * 1000)
        assert sum(map(len, spool._parts)) <= 1000
        assert spool._way.qsize() <= 16
    ref = await spool.finish()
    assert isinstance(ref, BlobRef)
    assert ref.size == spool.size == 2_000_000
    assert len(spool.preview) == PREVIEW_BYTES


async def test_a_spool_whose_folder_cannot_be_written_says_so_and_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    spool = Spool(Blobs(MemoryEngine(), "contoso", "a", tmp_path / "file", ManualClock()), limit=10)
    with pytest.raises(holdfast.Error):  # noqa: PT012 - whichever of them it is
        for _ in range(100):
            await soon(spool.write(b"x" * 1000))
        await soon(spool.finish())


async def test_a_discarded_spool_leaves_no_blob(tmp_path: Path) -> None:
    blobs = Blobs(MemoryEngine(), "contoso", "a", tmp_path, ManualClock())
    spool = Spool(blobs, limit=10)
    await spool.write(b"x" * 1000)
    await asyncio.sleep(0)
    await soon(spool.discard())
    await blobs.sweep()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_text_is_cut_where_characters_end_and_nothing_is_lost(parts: list[bytes]) -> None:
    splitter = TextSplitter()
    sent = [splitter.feed(part) for part in parts] + [splitter.feed(b"", final=True)]
    assert b"".join(sent) == b"".join(parts)


@given(st.binary(max_size=100), st.sampled_from([None, "stdout"]))
def test_an_envelope_gives_back_what_was_put_into_it(data: bytes, stream: StreamName | None) -> None:
    assert data_of(envelope(0, data, stream=stream)) == data


def test_an_envelope_that_was_tampered_with_is_damaged() -> None:
    for change in ({"size": 3}, {"data": "%%%"}, {"encoding": None, "data": 5}):
        with pytest.raises(Damaged):
            data_of({**envelope(0, b"abcd"), **change})
    assert [len(piece) for piece in pieces(b"x" * 600_000)] == [262_144, 262_144, 75_712]
