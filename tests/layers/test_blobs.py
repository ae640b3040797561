"""Blobs: what is referenced is there, what is not referenced goes, and what is read is what was put.

Run as a program this file is the other process of the tests that need one (see `main` at the end).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import io
import os
import random
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import errors
from holdfast.clock import ManualClock
from holdfast.codec import decode, encode
from holdfast.engine import Batch, Delete, Entry, Increment, Page, Put, Receipt, VersionIs
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import Conflict, Damaged, InvalidInput, NotFound, StorageFull, Unavailable
from holdfast.layers import blobs as module
from holdfast.layers.blobs import CHUNK_BYTES, BlobRef, Blobs, Part, SweepReport

SPACE = "contoso"
MIB = 1024**2
LIVES = 40 if os.environ.get("HOLDFAST_SOAK") == "1" else 8


class House:
    """A store in memory, a folder, and the blobs of one space in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.engine = MemoryEngine(clock=self.clock)
        self.blobs = self.open(self.engine)

    def open(
        self, engine: Any, *, space: str = SPACE, actor: str = "market", clock: ManualClock | None = None
    ) -> Blobs:
        return Blobs(engine, space, actor, self.root, clock or self.clock)

    def path(self, ref: BlobRef, space: str = SPACE) -> Path:
        return self.root / space / ref.sha256[:2] / ref.sha256

    def files(self) -> list[Path]:
        """Every file but the locks."""
        return sorted(path for path in self.root.rglob("*") if path.is_file() and path.name != ".lock")

    async def commit(self, *parts: Part, operations: tuple[Any, ...] = (), space: str = SPACE) -> Receipt:
        conditions = tuple(condition for part in parts for condition in part.conditions)
        return await self.engine.commit(
            space, Batch("market", (*(op for part in parts for op in part.operations), *operations), conditions)
        )

    async def keys(self, space: str = SPACE) -> list[str]:
        return [entry.key for entry in (await self.engine.scan(space, "")).entries]


class Hooked:
    """An engine that calls `before(method, argument)` ahead of every read and write."""

    def __init__(self, engine: MemoryEngine, before: Callable[[str, Any], Awaitable[None]]) -> None:
        self._engine = engine
        self._before = before

    async def commit(self, space: str, batch: Batch) -> Receipt:
        await self._before("commit", batch)
        return await self._engine.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        await self._before("get", keys)
        return await self._engine.get(space, keys)

    async def scan(self, space: str, prefix: str, **options: Any) -> Page:
        await self._before("scan", prefix)
        return await self._engine.scan(space, prefix, **options)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "blobs")


async def pieces(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def collect(stream: AsyncIterator[bytes]) -> list[bytes]:
    return [piece async for piece in stream]


def ref_of(content: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(content).hexdigest(), len(content))


# --- putting and reading ---


async def test_content_comes_back_as_it_was_put_from_bytes_a_file_or_an_iterable(house: House, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(3 * MIB + 17)
    source = tmp_path / "source.bin"
    source.write_bytes(content)
    uneven = [content[:5], b"", content[5 : 2 * MIB], bytearray(content[2 * MIB :])]
    plain = content, bytearray(content), memoryview(content), source, uneven, iter(uneven), io.BytesIO(content)
    with source.open("rb") as file:
        for data in (*plain, file, pieces(*uneven)):
            ref = await house.blobs.put(data)
            assert ref == ref_of(content)
            assert await house.blobs.read(ref) == content
            assert b"".join(await collect(house.blobs.stream(ref))) == content
    assert source.read_bytes() == content


async def test_a_stream_has_pieces_of_the_size_that_was_asked_for(house: House) -> None:
    ref = await house.blobs.put(b"abcdefgh")
    assert await collect(house.blobs.stream(ref, 3)) == [b"abc", b"def", b"gh"]
    assert await collect(house.blobs.stream(ref, 4)) == [b"abcd", b"efgh"]
    assert [len(piece) for piece in await collect(house.blobs.stream(await house.blobs.put(bytes(2 * MIB + 1))))] == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        1,
    ]


async def test_nothing_is_also_content(house: House, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for data in (b"", tmp_path / "empty", pieces()):
        ref = await house.blobs.put(data)
        assert ref == ref_of(b"")
        assert await house.blobs.read(ref) == b""
        assert await collect(house.blobs.stream(ref)) == []


async def test_a_reference_travels_as_json(house: House) -> None:
    ref = await house.blobs.put(b"report")
    assert decode(encode(ref), BlobRef) == ref


async def test_the_same_content_twice_is_one_file_and_one_entry(house: House) -> None:
    first = await house.blobs.put(b"report")
    second = await house.open(house.engine, actor="risk").put(pieces(b"rep", b"ort"))
    assert first == second
    assert house.files() == [house.path(first)]
    (entry,) = (await house.engine.scan(SPACE, "")).entries
    assert (entry.key, entry.owner) == (f"blobs/{first.sha256}", "market")


async def test_the_same_content_put_by_many_at_once_is_one_file(house: House) -> None:
    refs = await asyncio.gather(*(house.blobs.put(b"report") for _ in range(40)))
    assert set(refs) == {ref_of(b"report")}
    assert house.files() == [house.path(refs[0])]


async def test_another_space_does_not_see_a_blob_and_does_not_sweep_it(house: House) -> None:
    other = house.open(house.engine, space="fabrikam")
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"))
    with pytest.raises(NotFound):
        await other.read(ref)
    with pytest.raises(Conflict):
        await house.commit(other.attach(ref, "tasks/1"), space="fabrikam")
    house.clock.advance("1d")
    await other.put(b"something else")
    house.clock.advance("1d")
    assert (await other.sweep()).removed == 1
    assert await house.blobs.read(ref) == b"report"


async def test_spaces_with_odd_names_have_folders_of_their_own_below_the_root(house: House) -> None:
    names = ["a", "A", "..", ".", "a/b", "a%2fb", "%", "%41", "%41.", "é", "x" * 128, "X" * 128, "日本" * 21, "uploads"]
    for name in names:
        await house.open(house.engine, space=name).put(b"report")
    folders = sorted(path.name for path in house.root.iterdir())
    assert len({folder.lower() for folder in folders}) == len(names)
    assert sorted(path.parent.parent.parent for path in house.files()) == [house.root] * len(names)
    assert os.listdir(house.root.parent) == ["blobs"]


async def test_a_put_leaves_the_event_loop_free(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                loop_thread.append(real.__name__)
            return real(*args, **kwargs)

        return call

    for name in ("write", "fsync", "replace", "utime", "unlink", "listdir"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    ref = await house.blobs.put(b"report")
    await house.blobs.read(ref)
    house.clock.advance("1h")
    await house.blobs.sweep()
    assert loop_thread == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files come from /proc")
async def test_a_blob_is_durable_before_its_entry_is_committed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")))

    def noted_replace(source: Path, target: Path) -> None:
        assert steps == [source, *steps[1:]]
        replace(source, target)
        steps.append("rename")

    async def noted_commit(method: str, argument: Any) -> None:
        steps.append(method)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    ref = await house.open(Hooked(house.engine, noted_commit)).put(b"report")
    shard = house.path(ref).parent
    assert steps[1:4] == [shard.parent, house.root, house.root.parent]  # the new folders' names
    assert steps[4:] == ["rename", shard, "commit"]


async def test_a_hundred_megabytes_pass_in_bounded_memory(house: House) -> None:
    async def content() -> AsyncIterator[bytes]:
        for number in range(100):
            yield number.to_bytes(4, "big") * (MIB // 4)

    tracemalloc.start()
    try:
        ref = await house.blobs.put(content())
        written_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        size = 0
        async for piece in house.blobs.stream(ref):
            size += len(piece)
        read_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert await house.blobs.put(house.path(ref)) == ref
        copied_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == ref.size == 100 * MIB
    assert max(written_peak, read_peak, copied_peak) < 16 * MIB


# --- references ---


async def test_what_points_to_a_blob_and_its_reference_are_one_commit(house: House) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"), operations=(Put("tasks/1", encode(ref)),))
    reference, owner = await house.engine.get(SPACE, [f"blobs/{ref.sha256}/tasks/1", "tasks/1"])
    assert reference is not None
    assert owner is not None
    assert reference.version == owner.version


async def test_a_refused_batch_changes_no_reference(house: House) -> None:
    ref = await house.blobs.put(b"report")
    before = await house.keys()
    stale = Part((VersionIs("tasks/1", 99),), ())
    with pytest.raises(Conflict):
        await house.commit(house.blobs.attach(ref, "tasks/1"), stale)
    assert await house.keys() == before


async def test_attaching_what_was_never_put_is_refused_and_changes_nothing(house: House) -> None:
    ref = ref_of(b"never")
    with pytest.raises(Conflict) as caught:
        await house.commit(house.blobs.attach(ref, "tasks/1"), operations=(Put("tasks/1", b"1"),))
    assert caught.value.key == f"blobs/{ref.sha256}"
    assert await house.keys() == []


async def test_attaching_with_a_wrong_size_is_refused(house: House) -> None:
    ref = await house.blobs.put(b"report")
    with pytest.raises(Conflict):
        await house.commit(house.blobs.attach(BlobRef(ref.sha256, ref.size + 1), "tasks/1"))


async def test_attaching_twice_as_the_same_holder_counts_once(house: House) -> None:
    ref = await house.blobs.put(b"report")
    for _ in range(2):
        await house.commit(house.blobs.attach(ref, "tasks/1"))
    await house.commit(house.blobs.detach(ref, "tasks/1"))
    house.clock.advance("1h")
    assert (await house.blobs.sweep()).removed == 1


async def test_detaching_twice_takes_nothing_from_other_holders(house: House) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"), house.blobs.attach(ref, "tasks/2"))
    for _ in range(2):
        await house.commit(house.blobs.detach(ref, "tasks/1"))
    house.clock.advance("1d")
    assert (await house.blobs.sweep()).removed == 0
    assert await house.blobs.read(ref) == b"report"


async def test_a_holders_name_cannot_reach_another_blobs_references(house: House) -> None:
    ref, other = await house.blobs.put(b"report"), await house.blobs.put(b"other")
    await house.commit(house.blobs.attach(ref, f"../{other.sha256}/x"))
    house.clock.advance("1d")
    await house.blobs.sweep()
    assert house.files() == [house.path(ref)]


# --- the sweep ---


async def test_an_upload_that_is_never_attached_goes_after_the_grace_period(house: House) -> None:
    ref = await house.blobs.put(b"report")
    house.clock.advance("59m")
    assert await house.blobs.sweep() == SweepReport(removed=0, freed_bytes=0, kept=1, abandoned=0)
    house.clock.advance("1m")
    assert await house.blobs.sweep() == SweepReport(removed=1, freed_bytes=6, kept=0, abandoned=0)
    assert house.files() == []
    assert await house.keys() == []
    with pytest.raises(NotFound):
        await house.blobs.read(ref)
    with pytest.raises(Conflict):
        await house.commit(house.blobs.attach(ref, "tasks/1"))


async def test_putting_again_begins_a_new_grace_period(house: House) -> None:
    ref = await house.blobs.put(b"report")
    house.clock.advance("59m")
    await house.blobs.put(b"report")
    house.clock.advance("59m")
    assert (await house.blobs.sweep()).kept == 1
    await house.commit(house.blobs.attach(ref, "tasks/1"))


async def test_a_referenced_blob_stays_for_ever_and_goes_after_its_last_reference(house: House) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"), house.blobs.attach(ref, "tasks/2"))
    for _ in range(5):
        house.clock.advance("30d")
        assert (await house.blobs.sweep()).removed == 0
    await house.commit(house.blobs.detach(ref, "tasks/1"))
    house.clock.advance("30d")
    assert (await house.blobs.sweep()).removed == 0
    await house.commit(house.blobs.detach(ref, "tasks/2"))
    assert (await house.blobs.sweep()).removed == 0  # the last sweep saw it wanted: within the grace period
    house.clock.advance("1h")
    assert (await house.blobs.sweep()).removed == 1
    assert await house.keys() == []


async def test_a_reference_with_a_ttl_ends_by_itself_exactly(house: House) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1", ttl="24h"))
    house.clock.advance("24h")
    house.clock.set_back("1ms")
    assert (await house.blobs.sweep("1ms")).kept == 1
    house.clock.advance("1ms")
    assert (await house.blobs.sweep("1ms")).removed == 1


async def test_attaching_again_with_a_ttl_lets_go_of_a_blob_later(house: House) -> None:
    ref = await house.blobs.put(b"spilled output")
    await house.commit(house.blobs.attach(ref, "tasks/1"))
    house.clock.advance("30d")
    await house.commit(house.blobs.attach(ref, "tasks/1", ttl="24h"), operations=(Delete("tasks/1"),))
    house.clock.advance("23h")
    assert (await house.blobs.sweep()).removed == 0
    house.clock.advance("1h")
    assert (await house.blobs.sweep()).removed == 1


async def test_a_reference_without_ttl_outlives_one_with_a_ttl(house: House) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "a", ttl="1m"), house.blobs.attach(ref, "b"))
    house.clock.advance("1d")
    assert (await house.blobs.sweep()).kept == 1


async def test_a_sweep_looks_at_no_other_subspace_and_once_at_a_wanted_blob_per_grace_period(house: House) -> None:
    looked_at: list[str] = []

    async def note(method: str, argument: Any) -> None:
        looked_at.extend([argument] if method == "scan" else argument if method == "get" else [])

    refs = [await house.blobs.put(bytes([number])) for number in range(100)]
    for ref in refs:
        await house.commit(house.blobs.attach(ref, "tasks/1"), operations=(Increment("records/orders", 1),))
    sweeper = house.open(Hooked(house.engine, note), actor="sweeper")
    house.clock.advance("1h")
    assert (await sweeper.sweep()).kept == 100
    assert sorted(looked_at) == sorted(key for ref in refs for key in (f"blobs/{ref.sha256}", f"blobs/{ref.sha256}/"))
    looked_at.clear()
    house.clock.advance("59m")
    assert (await sweeper.sweep()).kept == 100
    assert looked_at == []


async def test_many_blobs_of_one_folder_are_decided_about_in_bounded_steps(house: House) -> None:
    await house.blobs.put(b"")
    house.clock.advance("1h")
    folder = house.path(ref_of(b"")).parent
    for number in range(200):  # files without entries, as a killed upload leaves them
        path = folder / f"{folder.name}{number:062x}"
        path.write_bytes(b"12345")
        os.utime(path, (1, 1))
    sizes: list[int] = []

    async def note(method: str, argument: Any) -> None:
        if method == "commit":
            sizes.append(len(argument.operations))

    report = await house.open(Hooked(house.engine, note)).sweep()
    assert report == SweepReport(removed=201, freed_bytes=1000, kept=0, abandoned=0)
    assert sizes == [64, 64, 64, 9]


async def test_a_sweep_leaves_files_alone_that_are_not_its_own(house: House) -> None:
    ref = await house.blobs.put(b"report")
    strangers = [
        house.root / SPACE / "notes.txt",
        house.path(ref).parent / "README",
        house.root / SPACE / "uploads" / "x",
    ]
    for path in strangers:
        path.write_text("mine")
        os.utime(path, (1, 1))
    house.clock.advance("1d")
    assert (await house.blobs.sweep()).removed == 1
    assert house.files() == sorted(strangers)


async def test_sweeping_where_nothing_was_ever_put_finds_nothing(house: House) -> None:
    assert await house.blobs.sweep() == SweepReport(removed=0, freed_bytes=0, kept=0, abandoned=0)
    assert not house.root.exists()


async def test_a_stream_under_way_survives_the_sweep(house: House) -> None:
    ref = await house.blobs.put(b"abcdef")
    stream = house.blobs.stream(ref, 2)
    assert await anext(stream) == b"ab"
    house.clock.advance("1d")
    assert (await house.blobs.sweep()).removed == 1
    assert await collect(stream) == [b"cd", b"ef"]


# --- races ---


@pytest.mark.parametrize("moment", ["the first look", "the entry's removal", "the second look"])
async def test_an_attach_at_any_moment_of_a_sweep_is_seen_or_refused(house: House, moment: str) -> None:
    ref = await house.blobs.put(b"report")
    attached: list[bool] = []
    scans = 0

    async def attach_at_the_moment(method: str, argument: Any) -> None:
        nonlocal scans
        scans += method == "scan"
        now = {
            "the first look": method == "scan" and scans == 1,
            "the entry's removal": method == "commit",
            "the second look": method == "scan" and scans == 2,
        }[moment]
        if now and not attached:
            attached.append(False)
            with contextlib.suppress(Conflict):
                await house.commit(house.blobs.attach(ref, "tasks/1"))
                attached[0] = True

    house.clock.advance("1d")
    report = await house.open(Hooked(house.engine, attach_at_the_moment), actor="sweeper").sweep()
    assert attached == [moment != "the second look"]
    assert report.removed == (not attached[0])
    if attached[0]:
        assert await house.blobs.read(ref) == b"report"
        await house.commit(house.blobs.attach(ref, "tasks/2"))  # the entry is back as well
    else:
        assert await house.keys() == []


@pytest.mark.parametrize("moment", ["scan", "commit"])
async def test_a_put_of_the_same_content_while_a_sweep_runs_is_kept(house: House, moment: str) -> None:
    ref = await house.blobs.put(b"report")
    puts: list[asyncio.Task[BlobRef]] = []

    async def put_at_the_moment(method: str, argument: Any) -> None:
        if method == moment and not puts:
            puts.append(asyncio.create_task(house.blobs.put(b"report")))
            await asyncio.wait(puts, timeout=0.1)  # it waits for the sweep's lock, and must

    house.clock.advance("1d")
    report = await house.open(Hooked(house.engine, put_at_the_moment), actor="sweeper").sweep()
    assert report.removed == 1
    assert await puts[0] == ref
    await house.commit(house.blobs.attach(ref, "tasks/1"))
    assert await house.blobs.read(ref) == b"report"


async def test_a_put_after_the_sweep_has_listed_its_folder_begins_a_new_grace_period(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await house.blobs.put(b"report")
    step = Blobs._sweep_step

    async def put_first(self: Blobs, shard: Path, names: list[str], before: int) -> list[int]:
        assert names == [ref.sha256]
        await house.blobs.put(b"report")
        return await step(self, shard, names, before)

    monkeypatch.setattr(Blobs, "_sweep_step", put_first)
    house.clock.advance("1d")
    assert (await house.blobs.sweep()).kept == 1
    await house.commit(house.blobs.attach(ref, "tasks/1"))


async def test_a_sweep_does_not_touch_a_blob_whose_put_is_between_rename_and_commit(house: House) -> None:
    reports: list[SweepReport] = []
    ahead = ManualClock(house.clock.now_ms() + 86_400_000)

    async def sweep_now(method: str, argument: Any) -> None:
        reports.append(await house.open(house.engine, clock=ahead).sweep())

    ref = await house.open(Hooked(house.engine, sweep_now)).put(b"report")
    assert [report.removed for report in reports] == [0]
    await house.commit(house.blobs.attach(ref, "tasks/1"))
    assert await house.blobs.read(ref) == b"report"


async def test_a_sweep_killed_halfway_leaves_a_referenced_blob_readable_and_the_next_one_restores_it(
    house: House,
) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"), operations=(Delete(f"blobs/{ref.sha256}"),))
    assert await house.blobs.read(ref) == b"report"
    with pytest.raises(Conflict):
        await house.commit(house.blobs.attach(ref, "tasks/2"))
    house.clock.advance("1h")
    assert (await house.blobs.sweep()).kept == 1
    await house.commit(house.blobs.attach(ref, "tasks/2"))


async def test_a_put_gives_up_when_a_sweep_is_stopped_for_ever(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = await house.blobs.put(b"report")
    monkeypatch.setattr(module, "LOCK_POLLS_MAX", 2)
    with (house.path(ref).parent / ".lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="sweep"):
            await house.blobs.put(b"report")
    assert house.files() == [house.path(ref)]
    assert await house.blobs.put(b"report") == ref


async def hold(blobs: Blobs, commit: Callable[[Batch], Awaitable[Receipt]], name: str, rounds: int, seed: int) -> int:
    """Put, attach, read, let go, over and over; the number of attaches that a sweep made us repeat."""
    rng = random.Random(seed)
    refused = 0
    for turn in range(rounds):
        content, holder = b"content %d" % rng.randrange(4), f"{name}/{turn}"
        while True:
            ref = await blobs.put(content)
            part = blobs.attach(ref, holder)
            try:
                await commit(Batch(name, part.operations, part.conditions))
                break
            except Conflict:
                refused += 1
        for _ in range(rng.randrange(4)):
            assert await blobs.read(ref) == content
        await commit(Batch(name, blobs.detach(ref, holder).operations))
    return refused


async def sweep_on(blobs: Blobs, clock: ManualClock, done: Callable[[], bool]) -> int:
    """Sweep as if no grace period protected anybody, until it is done; the number of blobs removed."""
    removed = 0
    while not done():
        clock.advance("1s")
        removed += (await blobs.sweep("1ms")).removed
    return removed


async def test_no_sweep_takes_a_referenced_blob_however_the_steps_interleave(house: House) -> None:
    rng = random.Random(7)

    async def waver(method: str, argument: Any) -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)

    engine = Hooked(house.engine, waver)
    blobs, ahead = house.open(engine), ManualClock(house.clock.now_ms() + 86_400_000)
    holders = [
        asyncio.create_task(hold(blobs, lambda batch: engine.commit(SPACE, batch), f"holder{n}", 60, seed=n))
        for n in range(6)
    ]
    sweeper = house.open(engine, actor="sweeper", clock=ahead)
    removed = await sweep_on(sweeper, ahead, lambda: all(holder.done() for holder in holders))
    await asyncio.gather(*holders)
    assert removed > 0
    ahead.advance("1d")
    await sweeper.sweep()
    assert house.files() == []
    assert await house.keys() == []


# --- other processes: they reach this one's engine through a socket ---


class Call(msgspec.Struct, array_like=True):
    method: str
    batch: Batch | None = None
    keys: list[str] | None = None
    prefix: str = ""


class Reply(msgspec.Struct, array_like=True):
    receipt: Receipt | None = None
    entries: list[Entry | None] | None = None
    refused: str = ""


class Distant:
    """The engine of the process that started this one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._turn = reader, writer, asyncio.Lock()

    async def _call(self, call: Call) -> Reply:
        async with self._turn:
            self._writer.write(msgspec.json.encode(call) + b"\n")
            reply = msgspec.json.decode(await self._reader.readline(), type=Reply)
        if reply.refused:
            raise getattr(errors, reply.refused)("refused")
        return reply

    async def commit(self, space: str, batch: Batch) -> Receipt:
        receipt = (await self._call(Call("commit", batch))).receipt
        assert receipt is not None
        return receipt

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return (await self._call(Call("get", keys=keys))).entries or []

    async def scan(self, space: str, prefix: str, *, limit: int) -> Page:
        found = (await self._call(Call("scan", prefix=prefix))).entries or []
        return Page([entry for entry in found if entry is not None][:limit], len(found) > limit, 0)


async def serve(engine: MemoryEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while line := await reader.readline():
            if not line.endswith(b"\n"):
                break  # cut off by a kill
            call, reply = msgspec.json.decode(line, type=Call), Reply()
            try:
                if call.batch is not None:
                    reply.receipt = await engine.commit(SPACE, call.batch)
                elif call.keys is not None:
                    reply.entries = await engine.get(SPACE, call.keys)
                else:
                    reply.entries = list((await engine.scan(SPACE, call.prefix, limit=2)).entries)
            except errors.Error as exc:
                reply.refused = type(exc).__name__
            writer.write(msgspec.json.encode(reply) + b"\n")
    writer.close()


@contextlib.asynccontextmanager
async def process(*args: object) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *map(str, args), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@contextlib.asynccontextmanager
async def served(house: House, tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "engine.sock"
    server = await asyncio.start_unix_server(lambda r, w: serve(house.engine, r, w), path, limit=MIB)
    async with server:
        yield path


async def finish(started: asyncio.subprocess.Process) -> int:
    output, _ = await started.communicate(b"")  # an empty input closes it: a sweeper ends
    assert started.returncode == 0
    return int(output)


async def test_no_sweep_takes_a_referenced_blob_of_another_process(house: House, tmp_path: Path) -> None:
    ahead = ManualClock(house.clock.now_ms() + 86_400_000)
    sweeper = house.open(house.engine, actor="sweeper", clock=ahead)
    async with served(house, tmp_path) as socket, contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(process("hold", house.root, socket, n)) for n in range(3)]
        second = await stack.enter_async_context(process("sweep", house.root, socket))
        holding = [asyncio.create_task(finish(other)) for other in others]
        removed = await sweep_on(sweeper, ahead, lambda: all(task.done() for task in holding))
        await asyncio.gather(*holding)
        removed += await finish(second)
    assert removed > 0
    ahead.advance("30d")
    await sweeper.sweep()
    assert house.files() == []
    assert await house.keys() == []


async def test_holders_killed_anywhere_leave_no_reference_without_its_blob(house: House, tmp_path: Path) -> None:
    ahead, rng = ManualClock(house.clock.now_ms() + 86_400_000), random.Random(3)
    sweeper = house.open(house.engine, actor="sweeper", clock=ahead)

    async def live_and_be_killed(socket: Path, number: int) -> None:
        async with process("hold", house.root, socket, number, "forever") as holder:
            assert holder.stdout is not None
            await holder.stdout.readline()
            await asyncio.sleep(rng.random() / 10)  # a random point of its work, not a time to wait for
            holder.kill()
            await holder.wait()

    async with served(house, tmp_path) as socket:
        for start in range(0, LIVES, 4):
            lives = asyncio.gather(*(live_and_be_killed(socket, start + n) for n in range(4)))
            await sweep_on(sweeper, ahead, lives.done)
            await lives
    references = [entry for entry in (await house.engine.scan(SPACE, "blobs/")).entries if entry.key.count("/") > 1]
    for entry in references:
        ref = BlobRef(entry.key.split("/")[1], decode(entry.value))
        assert (await house.blobs.read(ref)).startswith(b"content ")
        await house.commit(house.blobs.detach(ref, entry.key.split("/", 2)[2]))
    ahead.advance("30d")
    await sweeper.sweep()
    assert house.files() == []
    assert await house.keys() == []


async def test_an_upload_killed_with_9_leaves_only_a_file_that_the_sweep_removes(house: House) -> None:
    async with process("upload", house.root) as uploader:
        assert uploader.stdout is not None
        assert await uploader.stdout.readline() == b"uploading\n"
        (unfinished,) = house.files()
        assert unfinished.parent == house.root / SPACE / "uploads"
        house.clock.advance("30d")
        assert (await house.blobs.sweep()).abandoned == 0  # as slow as it may be, it lives
        uploader.kill()
        await uploader.wait()
    assert house.files() == [unfinished]
    report = await house.blobs.sweep()
    assert (report.abandoned, report.removed, report.freed_bytes) == (1, 0, 2 * MIB)
    assert house.files() == []


async def test_an_upload_taken_for_abandoned_before_it_had_its_lock_begins_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[tuple[int, int]] = []

    def sweep_first(fd: Any, mode: int) -> None:
        uploads = house.root / SPACE / "uploads"
        if mode == fcntl.LOCK_EX and len(swept) < 3:
            swept.append(module._remove_abandoned(uploads))
        flock(fd, mode)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    ref = await house.blobs.put(b"report")
    assert swept == [(1, 0)] * 3
    assert house.files() == [house.path(ref)]
    assert await house.blobs.read(ref) == b"report"


# --- damage ---


async def test_an_altered_blob_is_damaged_and_its_last_piece_is_never_given(house: House) -> None:
    ref = await house.blobs.put(b"abcdef")
    house.path(ref).write_bytes(b"Xbcdef")
    with pytest.raises(Damaged):
        await house.blobs.read(ref)
    stream = house.blobs.stream(ref, 2)
    assert [await anext(stream), await anext(stream)] == [b"Xb", b"cd"]
    with pytest.raises(Damaged):
        await anext(stream)


@pytest.mark.parametrize("content", [b"", b"abcde", b"abcdefg"])
async def test_a_blob_of_another_size_is_damaged_before_its_first_piece(house: House, content: bytes) -> None:
    ref = await house.blobs.put(b"abcdef")
    house.path(ref).write_bytes(content)
    with pytest.raises(Damaged):
        await house.blobs.read(ref)
    with pytest.raises(Damaged):
        await anext(house.blobs.stream(ref, 2))


async def test_a_blob_truncated_while_it_is_streamed_is_damaged(house: House) -> None:
    ref = await house.blobs.put(bytes(3 * MIB))
    stream = house.blobs.stream(ref)
    await anext(stream)
    os.truncate(house.path(ref), MIB + 100)
    with pytest.raises(Damaged):
        await collect(stream)


async def test_a_missing_blob_is_not_found(house: House) -> None:
    ref = await house.blobs.put(b"report")
    house.path(ref).unlink()
    with pytest.raises(NotFound):
        await house.blobs.read(ref)
    with pytest.raises(NotFound):
        await anext(house.blobs.stream(ref))


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"?"), Path.unlink], ids=["altered", "lost"])
async def test_putting_the_same_content_heals_a_damaged_blob(house: House, damage: Callable[[Path], Any]) -> None:
    ref = await house.blobs.put(b"report")
    await house.commit(house.blobs.attach(ref, "tasks/1"))
    damage(house.path(ref))
    await house.blobs.put(b"report")
    assert await house.blobs.read(ref) == b"report"


# --- bad input and bad luck ---


@pytest.mark.parametrize("data", ["text", None, 5, {b"a": 1}, ["a"], [None], [5]], ids=repr)
async def test_what_is_not_content_is_refused_and_leaves_nothing(house: House, data: Any) -> None:
    with pytest.raises(InvalidInput):
        await house.blobs.put(data)
    assert house.files() == []


@pytest.mark.parametrize("item", ["text", None, 5])
async def test_an_iterable_of_something_else_is_refused_and_leaves_nothing(house: House, item: Any) -> None:
    with pytest.raises(InvalidInput):
        await house.blobs.put(pieces(bytes(2 * MIB), item))
    assert house.files() == []
    assert await house.keys() == []


async def test_an_iterable_that_fails_raises_its_own_error_and_leaves_nothing(house: House) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield bytes(2 * MIB)
        raise ConnectionResetError("the other side went away")

    with pytest.raises(ConnectionResetError):
        await house.blobs.put(failing())
    assert house.files() == []


async def test_what_an_iterable_raises_is_not_taken_for_a_fault_of_the_blob_folder(house: House) -> None:
    def failing() -> Iterator[bytes]:
        yield b"a"
        raise ConnectionResetError("the other side went away")

    with pytest.raises(ConnectionResetError):
        await house.blobs.put(failing())
    assert house.files() == []


async def test_a_file_that_cannot_be_read_is_blamed_and_not_the_blob_folder(house: House, tmp_path: Path) -> None:
    closed = (tmp_path / "a").open("wb")
    closed.close()
    with (tmp_path / "b").open("wb") as writing, tempfile.NamedTemporaryFile() as temporary:
        temporary.close()
        for source in (closed, writing, temporary):
            with pytest.raises(InvalidInput, match=r"^the file .* cannot be read: .* open for reading bytes"):
                await house.blobs.put(source)  # type: ignore[arg-type]
    assert house.files() == []


async def test_a_view_of_parts_of_something_is_refused_with_what_to_give_instead(house: House) -> None:
    view = memoryview(b"abcdef")[::2]
    gone = memoryview(b"abcdef")
    gone.release()
    for source in (view, [view], gone):
        with pytest.raises(InvalidInput, match="memoryview"):
            await house.blobs.put(source)
    assert house.files() == []
    ref = await house.blobs.put(memoryview(view.tobytes()))
    assert await house.blobs.read(ref) == b"ace"


async def test_a_cancelled_put_leaves_nothing(house: House) -> None:
    halfway = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MIB)
            halfway.set()

    for _ in range(5):
        halfway.clear()
        put = asyncio.create_task(house.blobs.put(endless()))
        await halfway.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
    assert house.files() == []


async def test_a_cancelled_put_closes_no_file_under_the_thread_that_writes_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, go_on = os.write, threading.Event(), threading.Event()

    def slow_write(fd: int, data: bytes) -> int:
        writing.set()
        go_on.wait(10)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow_write)
    put = asyncio.create_task(house.blobs.put(b"report"))
    await asyncio.to_thread(writing.wait, 10)
    for _ in range(3):
        put.cancel()
        await asyncio.wait([put], timeout=0.01)
    assert not put.done()
    assert len(house.files()) == 1
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert house.files() == []


async def test_a_source_that_is_missing_or_no_file_is_named_in_the_error(house: House, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.bin"):
        await house.blobs.put(tmp_path / "nowhere.bin")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidInput, match="not a regular file"):
            await house.blobs.put(path)
    assert house.files() == []


GOOD = ref_of(b"report")


@pytest.mark.parametrize(
    "ref",
    [
        None,
        GOOD.sha256,
        BlobRef("", 1),
        BlobRef("../../../../etc/passwd", 1),
        BlobRef(GOOD.sha256.upper(), 6),
        BlobRef(GOOD.sha256 + "\n", 6),
        BlobRef(GOOD.sha256, -1),
        BlobRef(GOOD.sha256, True),
        BlobRef(GOOD.sha256, module.BLOB_BYTES_MAX + 1),
    ],
)
async def test_a_wrong_reference_is_refused_everywhere(house: House, ref: Any) -> None:
    with pytest.raises(InvalidInput):
        await house.blobs.read(ref)
    with pytest.raises(InvalidInput):
        house.blobs.stream(ref)
    with pytest.raises(InvalidInput):
        house.blobs.attach(ref, "tasks/1")
    with pytest.raises(InvalidInput):
        house.blobs.detach(ref, "tasks/1")


@pytest.mark.parametrize("holder", ["", "a\0b", "\ud800", "x" * 513, None])
async def test_a_wrong_holder_is_refused(house: House, holder: Any) -> None:
    with pytest.raises(InvalidInput):
        house.blobs.attach(GOOD, holder)
    with pytest.raises(InvalidInput):
        house.blobs.detach(GOOD, holder)


async def test_wrong_durations_and_chunks_are_refused(house: House) -> None:
    for ttl in (0, -1, "soon", True):
        with pytest.raises(InvalidInput):
            house.blobs.attach(GOOD, "tasks/1", ttl=ttl)
        with pytest.raises(InvalidInput):
            await house.blobs.sweep(ttl)
    for chunk in (0, -1, 2**40, True):
        with pytest.raises(InvalidInput):
            house.blobs.stream(GOOD, chunk)


async def test_content_over_the_limit_is_refused_and_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOB_BYTES_MAX", 3 * MIB)
    await house.blobs.put(pieces(*[bytes(MIB)] * 3))
    before = house.files()
    with pytest.raises(InvalidInput, match="at most 3,145,728 bytes"):
        await house.blobs.put(pieces(*[bytes(MIB)] * 4))
    assert house.files() == before


async def test_a_write_that_takes_only_a_part_is_continued(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
    ref = await house.blobs.put(bytes(10_500))
    assert await house.blobs.read(ref) == bytes(10_500)


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("write", errno.ENOSPC, StorageFull),
        ("fsync", errno.ENOSPC, StorageFull),
        ("write", errno.EDQUOT, StorageFull),
        ("replace", errno.ENOSPC, StorageFull),
        ("fsync", errno.EIO, Unavailable),
        ("open", errno.EROFS, Unavailable),
    ],
)
async def test_a_failing_disk_is_a_typed_error_and_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, call: str, number: int, error: type[Exception]
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(error) as caught:
            await house.blobs.put(b"report")
    assert type(caught.value) is error
    assert str(house.root) in str(caught.value)
    assert house.files() == []
    assert await house.keys() == []
    assert await house.blobs.read(await house.blobs.put(b"report")) == b"report"


async def test_a_root_that_is_no_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    house = House(tmp_path / "taken")
    with pytest.raises(Unavailable, match="It must be a folder"):
        await house.blobs.put(b"report")
    with pytest.raises(Unavailable, match="It must be a folder"):
        await house.blobs.sweep()
    assert await house.keys() == []


async def test_a_put_whose_commit_fails_can_be_repeated_and_leaves_what_a_sweep_removes(house: House) -> None:
    failures = [Unavailable("the server is away")]

    async def fail_once(method: str, argument: Any) -> None:
        if failures:
            raise failures.pop()

    blobs = house.open(Hooked(house.engine, fail_once))
    with pytest.raises(Unavailable, match="away"):
        await blobs.put(b"report")
    with pytest.raises(Conflict):
        await house.commit(blobs.attach(ref_of(b"report"), "tasks/1"))
    ref = await blobs.put(b"report")
    await house.commit(blobs.attach(ref, "tasks/1"))

    failures.append(Unavailable("the server is away"))
    with pytest.raises(Unavailable):
        await blobs.put(b"another")
    house.clock.advance("1h")
    assert (await blobs.sweep()).removed == 1
    assert house.files() == [house.path(ref)]


# --- the other process ---


async def main(role: str, root: str, socket: str = "", number: str = "0", life: str = "") -> None:
    clock = ManualClock()
    if role == "upload":

        async def never_finished() -> AsyncIterator[bytes]:
            yield bytes(2 * MIB)
            sys.stdout.write("uploading\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

        await Blobs(MemoryEngine(clock=clock), SPACE, "uploader", Path(root), clock).put(never_finished())
    engine: Any = Distant(*await asyncio.open_unix_connection(socket, limit=MIB))
    if role == "hold":
        blobs = Blobs(engine, SPACE, f"holder{number}", Path(root), clock)
        if life:
            sys.stdout.write("holding\n")
            sys.stdout.flush()
        rounds = 10**9 if life else 100
        refused = await hold(blobs, lambda batch: engine.commit(SPACE, batch), f"holder{number}", rounds, int(number))
        sys.stdout.write(f"{refused}\n")
    if role == "sweep":
        clock.advance("2d")
        closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        removed = await sweep_on(Blobs(engine, SPACE, "sweeper2", Path(root), clock), clock, closed.done)
        sys.stdout.write(f"{removed}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
