"""Requests that come again together, after a crash: they are found in one pass through the feed, each with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Engine, Increment, Put
from holdfast.engines import sqlite_rows
from holdfast.engines.resident import ResidentEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.ids import new_id

OPEN = {"resident": ResidentEngine.open, "sqlite": SqliteEngine.open}


@pytest.mark.parametrize("kind", list(OPEN))
async def test_those_that_were_done_are_answered_and_the_others_are_done_once(kind: str, tmp_path: Path) -> None:
    engine: Engine = await OPEN[kind](tmp_path / "k.db", clock=ManualClock())
    ids = [new_id() for _ in range(60)]
    for number, id in enumerate(ids):
        if number % 3:
            await engine.commit("s", Batch("a", (Increment("records/n", 1),), (), id, fresh=True))
    first = {id: number for number, id in enumerate([id for n, id in enumerate(ids) if n % 3], 1)}
    for _ in range(2):
        receipts = await asyncio.gather(
            *(engine.commit("s", Batch("a", (Increment("records/n", 1),), (), id)) for id in ids)
        )
        for id, receipt in zip(ids, receipts, strict=True):
            assert receipt.results == [first.setdefault(id, len(first) + 1)]
    [entry] = await engine.get("s", ["records/n"])
    assert entry is not None
    assert entry.value == b"60"
    await engine.close()


@pytest.mark.parametrize("kind", list(OPEN))
async def test_many_that_were_never_done_cost_one_look_at_the_feed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = await OPEN[kind](tmp_path / "k.db", clock=ManualClock())
    batches = [Batch("a", (Put(f"records/{n}", b"1"),), (), new_id(), fresh=True) for n in range(100)]
    await asyncio.gather(*(engine.commit("s", batch) for batch in batches))
    looks, backwards = [], sqlite_rows._backwards

    def counted(execute: sqlite_rows.Execute, space: int, time: int) -> Iterator[tuple[bytes]]:
        looks.append(space)
        return backwards(execute, space, time)

    monkeypatch.setattr(sqlite_rows, "_backwards", counted)
    await engine.commit("s", Batch("a", (Put("records/x", b"1"),), (), new_id()))
    assert len(looks) == 1, "one alone is searched for as well"
    await asyncio.gather(
        *(engine.commit("s", Batch("a", (Put(f"records/{n}", b"2"),), (), new_id())) for n in range(100))
    )
    assert len(looks) - 1 <= 2, "one for a group; the first to come may be a group of its own"
    await engine.close()
