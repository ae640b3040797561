"""Copies and exports: exact on every engine, checked, repeatable, and never half trusted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Conflict, Damaged, InvalidInput, ManualClock, NotFound, Store
from holdfast.engine import LOSS_JUMP, Batch, Engine, Entry, Page, Put, cursor_at
from holdfast.errors import Compacted, IncompatibleStore, Unavailable
from holdfast.layers import transfer
from holdfast.layers.transfer import (
    compare,
    copy_space,
    copy_store,
    entries_of,
    export_lines,
    import_lines,
    restore_store,
    survey,
)
from holdfast.middleware.wrapper import Wrapper

pytestmark = pytest.mark.every_engine


@pytest.fixture(params=["memory", "sqlite"])
async def target(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = "memory:" if request.param == "memory" else str(tmp_path / "target.db")
    async with holdfast.open(url, clock=clock, background=False) as opened:
        yield opened


@pytest.fixture
async def filled(store: Store) -> Store:
    records = store.space("contoso", agent="market").records
    await records.set("a", {"x": [1, 1.0, None, "ü\n"]})
    await records.set("short", 1, ttl="1h")
    await records.set("typed", 1, type="correlation_state", state="failed")
    await records.append_to_list("files", "a.csv", "b.csv")
    await records.add_to_set("seen", "E1", {"y": 2})
    await records.set("gone", 1)
    await records.delete("gone")
    await store.space("metrics", durability="async", audit_reads=True).records.set("k", 2**70)
    return store


async def everything(engine: Engine, space: str) -> list[Entry]:
    return [entry async for entry in entries_of(engine, space)]


async def exported(engine: Engine, *spaces: str) -> list[bytes]:
    return [line for space in spaces for line in [line async for line in export_lines(engine, space)]]


# --- copies ---


async def test_a_copy_has_the_same_entries_revision_durability_and_usage(filled: Store, target: Store) -> None:
    counts = await copy_store(filled.engine, target.engine)
    assert set(counts) == {"contoso", "metrics"}
    for info in await filled.engine.spaces():
        assert await everything(target.engine, info.name) == await everything(filled.engine, info.name)
        [there] = await target.engine.spaces(info.name)
        assert (there.revision, there.durability, there.audit_reads) == (
            info.revision,
            info.durability,
            info.audit_reads,
        )
        assert sorted(there.usage, key=str) == sorted(info.usage, key=str)
    version = await target.space("contoso").records.set("a", 2)
    assert version > (await filled.space("contoso").info()).revision


async def test_a_copy_reports_its_progress(filled: Store, target: Store) -> None:
    [info] = await filled.engine.spaces("contoso")
    told: list[tuple[str, int, int]] = []
    count = await copy_space(filled.engine, target.engine, info, lambda *progress: told.append(progress))
    assert told[-1] == ("contoso", count, count)


async def test_a_copy_can_be_repeated_and_refuses_a_target_that_went_on(filled: Store, target: Store) -> None:
    await copy_store(filled.engine, target.engine)
    await copy_store(filled.engine, target.engine)
    await target.space("contoso").records.set("mine", 1)
    before = await everything(target.engine, "contoso")
    with pytest.raises(Conflict, match="further than the source"):
        await copy_store(filled.engine, target.engine)
    assert await everything(target.engine, "contoso") == before


class Interrupted(Wrapper):
    """A target that fails after some pages; it counts the entries it was given."""

    def __init__(self, inner: Engine, pages: int) -> None:
        super().__init__(inner)
        self.pages = pages
        self.loaded = 0

    async def load(self, space: str, entries: list[Entry], revision: int) -> None:
        if self.pages == 0:
            raise Unavailable("the network is gone")
        self.pages -= 1
        self.loaded += len(entries)
        await self.inner.load(space, entries, revision)


async def test_an_interrupted_copy_goes_on_where_it_stopped(filled: Store, target: Store) -> None:
    for number in range(300):
        await filled.space("contoso").records.set(f"many/{number:03d}", number)
    [info] = await filled.engine.spaces("contoso")
    broken = Interrupted(target.engine, 2)
    with pytest.raises(Unavailable):
        await copy_space(filled.engine, broken, info)
    again = Interrupted(target.engine, -1)
    told: list[tuple[str, int, int]] = []
    count = await copy_space(filled.engine, again, info, lambda *progress: told.append(progress))
    assert (broken.loaded > 0, again.loaded) == (True, count - broken.loaded)
    assert told[-1] == ("contoso", count, count)
    assert await everything(target.engine, "contoso") == await everything(filled.engine, "contoso")


async def test_an_interrupted_copy_is_completed_though_the_source_has_new_entries_before_where_it_stopped(
    filled: Store, target: Store
) -> None:
    await copy_store(filled.engine, target.engine)
    await filled.space("contoso").records.set("b", "new")
    await copy_store(filled.engine, target.engine)
    assert await everything(target.engine, "contoso") == await everything(filled.engine, "contoso")


async def state_of(engine: Engine) -> list[object]:
    return [(info, await everything(engine, info.name)) for info in await engine.spaces()]


async def test_a_copy_never_overwrites_what_the_target_has_of_its_own(filled: Store, target: Store) -> None:
    await target.space("metrics", durability="async").records.set("k", "precious")
    before = await state_of(target.engine)
    with pytest.raises(Conflict, match="'metrics' exists in the target and was written to there; nothing was copied"):
        await copy_store(filled.engine, target.engine)
    assert await state_of(target.engine) == before
    await target.engine.compact("metrics", 1)
    before = await state_of(target.engine)
    with pytest.raises(Conflict, match="its entry 'records/k' is not the source's"):
        await copy_store(filled.engine, target.engine)
    assert await state_of(target.engine) == before


async def test_a_copy_refuses_a_target_with_an_entry_that_the_source_has_not(filled: Store, target: Store) -> None:
    [entry] = await filled.engine.get("contoso", ["records/a"])
    assert entry is not None
    await target.engine.create("contoso", "sync")
    await target.engine.load("contoso", [Entry("zzz/last", b"2", *_rest(entry))], 1)
    before = await state_of(target.engine)
    with pytest.raises(Conflict, match="its entry 'zzz/last' is not the source's"):
        await copy_store(filled.engine, target.engine)
    assert await state_of(target.engine) == before


async def test_a_copy_does_not_forget_what_was_done_in_a_space_that_is_empty_now(filled: Store, target: Store) -> None:
    records = target.space("contoso").records
    await records.set("a", 1)
    await records.delete("a")
    with pytest.raises(Conflict, match="was written to there"):
        await copy_store(filled.engine, target.engine)
    assert [change.op async for changes in target.space("contoso").watch(cursor="r0", live=False) for change in changes]


async def test_a_copy_refuses_another_durability_before_it_writes(filled: Store, target: Store) -> None:
    await target.engine.create("metrics", "sync")
    with pytest.raises(InvalidInput, match="'metrics' exists in the target with durability 'sync'"):
        await copy_store(filled.engine, target.engine)
    assert [info.name for info in await target.engine.spaces()] == ["metrics"]


async def test_a_copy_begins_in_a_space_that_was_only_made(filled: Store, target: Store) -> None:
    await target.engine.create("contoso", "sync")
    await copy_store(filled.engine, target.engine)
    assert await everything(target.engine, "contoso") == await everything(filled.engine, "contoso")


async def test_a_copy_goes_into_every_engine_in_parts_and_again(store: Store, clock: ManualClock) -> None:
    async with holdfast.open("memory:", clock=clock, background=False) as source:
        for number in range(120):
            await source.space("contoso").records.set(f"k{number:03}", number)
        await source.space("contoso").records.set("short", 1, ttl="1h")
        with pytest.raises(Unavailable):
            await copy_store(source.engine, Interrupted(store.engine, 1))
        for _ in range(2):
            await copy_store(source.engine, store.engine)
            assert await everything(store.engine, "contoso") == await everything(source.engine, "contoso")
        await store.space("contoso").records.set("k000", "precious")
        await source.space("contoso").records.set("more", 1)
        with pytest.raises(Conflict, match="was written to there"):
            await copy_store(source.engine, store.engine)
        assert await store.space("contoso").records.get("k000") == "precious"


async def test_a_difference_between_source_and_copy_is_damage(filled: Store, target: Store) -> None:
    with pytest.raises(NotFound):
        await compare(filled.engine, target.engine, "contoso")
    await copy_store(filled.engine, target.engine)
    [entry] = await filled.engine.get("contoso", ["records/a"])
    assert entry is not None
    await target.engine.load("contoso", [Entry(entry.key, b"2", *_rest(entry))], 0)
    with pytest.raises(Damaged, match="differs at 'records/a'"):
        await compare(filled.engine, target.engine, "contoso")
    await target.engine.load("contoso", [entry, Entry("zzz/last", b"2", *_rest(entry))], 0)
    with pytest.raises(Damaged, match="that the source has not"):
        await compare(filled.engine, target.engine, "contoso")


def _rest(entry: Entry) -> tuple[int, str, int, int]:
    return entry.version, entry.owner, entry.created_at, entry.updated_at


async def test_what_has_expired_does_not_travel(filled: Store, target: Store, clock: ManualClock) -> None:
    clock.advance("2h")
    await copy_store(filled.engine, target.engine)
    assert await target.space("contoso").records.keys("s") == ["seen"]


class Counting(Wrapper):
    """Remembers how many bytes each page had."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.pages: list[int] = []

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        page = await self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        self.pages.append(sum(len(entry.value) for entry in page.entries))
        return page


async def test_pages_have_fewer_entries_where_values_are_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAGE_BYTES", transfer.PAGE_BYTES // 10)
    records = store.space("contoso").records
    for number in range(120):
        await records.set(f"k{number:03}", "x" * 100_000)
    engine = Counting(store.engine)
    assert len(await everything(engine, "contoso")) == 120
    assert max(engine.pages[1:]) <= transfer.PAGE_BYTES


# --- exports ---


async def test_an_export_of_one_engine_is_the_same_in_another(filled: Store, target: Store) -> None:
    lines = await exported(filled.engine, "contoso", "metrics")
    spaces = survey(lambda: lines)
    counts = await import_lines(target.engine, lambda: lines, spaces)
    assert counts == {info.name: sum(usage.keys for usage in info.usage) for info in await filled.engine.spaces()}
    assert await exported(target.engine, "contoso", "metrics") == lines
    assert await target.space("contoso").records.list("files") == ["a.csv", "b.csv"]
    assert await target.space("metrics").records.get("k") == 2**70


async def test_one_space_of_an_export_can_be_taken(filled: Store, target: Store) -> None:
    lines = await exported(filled.engine, "contoso", "metrics")
    assert set(await import_lines(target.engine, lambda: lines, survey(lambda: lines, "metrics"))) == {"metrics"}
    assert [info.name for info in await target.engine.spaces()] == ["metrics"]
    with pytest.raises(NotFound, match="it has contoso, metrics"):
        survey(lambda: lines, "other")


async def test_an_import_that_was_interrupted_is_run_again(
    filled: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PAGE", 3)
    lines = await exported(filled.engine, "contoso")

    class Interrupted(Exception):
        pass

    def stumbling() -> Iterator[bytes]:
        yield from lines[:6]
        raise Interrupted

    spaces = survey(lambda: lines)
    with pytest.raises(Interrupted):
        await import_lines(target.engine, stumbling, spaces)
    assert 0 < len(await everything(target.engine, "contoso")) < len(lines) - 2
    await import_lines(target.engine, lambda: lines, spaces)
    assert await everything(target.engine, "contoso") == await everything(filled.engine, "contoso")


async def test_a_space_with_entries_of_its_own_is_refused_and_unchanged(filled: Store, target: Store) -> None:
    lines = await exported(filled.engine, "contoso")
    await target.space("contoso").records.set("mine", 1)
    before = await everything(target.engine, "contoso")
    with pytest.raises(Conflict, match="is not the export's"):
        await import_lines(target.engine, lambda: lines, survey(lambda: lines))
    assert await everything(target.engine, "contoso") == before


async def test_a_space_of_another_durability_is_refused(filled: Store, target: Store) -> None:
    lines = await exported(filled.engine, "contoso")
    await target.engine.create("contoso", "async")
    with pytest.raises(InvalidInput, match="exists with durability 'async'"):
        await import_lines(target.engine, lambda: lines, survey(lambda: lines))
    assert await everything(target.engine, "contoso") == []


async def test_lines_that_changed_after_they_were_checked_are_noticed(filled: Store, target: Store) -> None:
    lines = await exported(filled.engine, "contoso")
    later = [line.replace(b'"value":"a.csv"', b'"value":"z.csv"') for line in lines]
    readings = iter([lines, later])
    with pytest.raises(Damaged, match="differs from the export"):
        await import_lines(target.engine, lambda: next(readings), survey(lambda: lines))


async def test_a_space_that_is_written_to_meanwhile_gives_no_end_line(store: Store) -> None:
    records = store.space("contoso").records
    for number in range(200):
        await records.set(f"k{number:03}", number)
    lines = export_lines(store.engine, "contoso")
    got = [await anext(lines) for _ in range(10)]
    await records.set("late", 1)
    with pytest.raises(Conflict, match="was written to while it was exported"):
        got.extend([line async for line in lines])
    assert not any(b'"kind":"end"' in line for line in got)


async def test_what_is_not_json_is_damage_and_not_exported(store: Store) -> None:
    await store.engine.commit("contoso", Batch("admin", (Put("records/bad", b'{"torn'),)))
    with pytest.raises(Damaged):
        await exported(store.engine, "contoso")
    with pytest.raises(NotFound):
        await exported(store.engine, "absent")


async def test_an_entry_that_expires_during_an_import_is_not_missed(
    filled: Store, target: Store, clock: ManualClock
) -> None:
    lines = await exported(filled.engine, "contoso")
    clock.advance("2h")
    await import_lines(target.engine, lambda: lines, survey(lambda: lines))
    assert await target.space("contoso").records.get("short") is None


@pytest.mark.parametrize(
    ("line", "error", "why"),
    [
        (b"\xff\xfe", InvalidInput, "line 2: this is no line of an export"),
        (b"[]", InvalidInput, "line 2: this is no line of an export"),
        (b'{"kind":"other"}', InvalidInput, "line 2: this is no line of an export"),
        (b"[" * 100_000, InvalidInput, "line 2: this is no line of an export"),
        (b'{"kind":"end","space":"s","entries":7}', InvalidInput, "line 2: 7 entries of space 's' should have come"),
        (b'{"kind":"space","format":1,"space":"t","durability":"sync","revision":1}', InvalidInput, "before space 's'"),
        (b'{"kind":"space","format":9,"space":"t","durability":"sync","revision":1}', IncompatibleStore, "upgrade"),
        (b'{"kind":"entry","key":"records/k"}', InvalidInput, "line 2: .*value"),
        (
            b'{"kind":"entry","key":"records/k","value":1,"version":1,"owner":"o","created_at":1,"updated_at":1,"expires_at":'
            b"9223372036854775807}",
            InvalidInput,
            "line 2: expires_at must be an instant",
        ),
        (b" " * (transfer.LINE_BYTES_MAX + 1) + b"1", InvalidInput, "line 2: the line has more than"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: bytes, error: type[Exception], why: str) -> None:
    begin = b'{"kind":"space","format":1,"space":"s","durability":"sync","revision":5}'
    with pytest.raises(error, match=why):
        survey(lambda: [begin, line])


def test_an_export_without_an_end_was_cut_off() -> None:
    begin = b'{"kind":"space","format":1,"space":"s","durability":"sync","revision":5}\n'
    with pytest.raises(InvalidInput, match="line 1: the export ends in the middle of space 's'"):
        survey(lambda: [begin])
    with pytest.raises(InvalidInput, match="no export"):
        survey(list)


# --- restores ---


async def test_a_restored_space_goes_on_beyond_all_that_was_given(filled: Store, target: Store) -> None:
    records = target.space("contoso").records
    for _ in range(30):
        await records.increment("n")
    await target.space("late").records.set("k", 1)
    watch = target.engine.watch("contoso")
    pending = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    before = {info.name: info.revision for info in await target.engine.spaces()}
    with pytest.raises(Conflict, match=r"not empty \(contoso, late\)"):
        await restore_store(filled.engine, target.engine, age_ms=0)
    assert {info.name: info.revision for info in await target.engine.spaces()} == before
    counts = await restore_store(filled.engine, target.engine, age_ms=1_000, replace=True)
    assert set(counts) == {"contoso", "metrics"}
    for name in counts:
        assert await everything(target.engine, name) == await everything(filled.engine, name)
        [there] = await target.engine.spaces(name)
        [mine] = await filled.engine.spaces(name)
        assert there.revision == there.feed_floor >= max(mine.revision, before.get(name, 0)) + LOSS_JUMP + 16_000
    with pytest.raises(Compacted):
        await pending
    with pytest.raises(Compacted):
        await anext(target.engine.watch("contoso", cursor=cursor_at(before["contoso"]), live=False))
    assert await target.space("late").records.set("k", 2) > before["late"]


async def test_a_restore_that_was_interrupted_is_run_again(filled: Store, target: Store) -> None:
    class Interrupted(Exception):
        pass

    def stop(space: str, done: int, total: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await restore_store(filled.engine, target.engine, age_ms=0, progress=stop)
    await restore_store(filled.engine, target.engine, age_ms=0, replace=True)
    assert await everything(target.engine, "contoso") == await everything(filled.engine, "contoso")
