"""What does `await records.get(key)` cost on SQLite, beside a prepared SELECT of one value by primary key?"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Final

import holdfast
from benchmarks import peers
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, Turn, take_turns, timed, timed_async

KEYS: Final = 10_000
PER_STEP: Final = 100
"""Reads between two looks at the clock."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    values = {f"agents/{number:05d}/state": f"value {number:012d}" for number in range(KEYS)}
    wanted = list(values)
    random.Random(7).shuffle(wanted)
    with (
        closing(peers.with_apsw(plan.folder / "apsw.db")) as apsw,
        closing(peers.with_stdlib(plan.folder / "stdlib.db")) as stdlib,
    ):
        for bare in (apsw, stdlib):
            bare.upsert_many((key, f'"{value}"'.encode()) for key, value in values.items())
        async with holdfast.open(str(plan.folder / "ours.db")) as store:
            space = store.space("bench", agent="reader")
            names = list(values)
            for start in range(0, KEYS, 100):
                await space.commit(*(holdfast.set_(key, values[key]) for key in names[start : start + 100]))
            await store.tidy()
            assert await space.records.get(wanted[0]) == values[wanted[0]]
            rates = await take_turns(
                plan,
                {"ours": _reads(space, wanted), "apsw": _selects(apsw, wanted), "stdlib": _selects(stdlib, wanted)},
            )
    name, goal = "sqlite_get", Goal("ratio", "at least", 0.5)
    yield compare(name, rates["ours"], rates["apsw"], f"prepared SELECT ({peers.APSW})", goal, "gets/s")
    yield compare(name, rates["ours"], rates["stdlib"], f"prepared SELECT ({peers.STDLIB})", None, "gets/s")


def _reads(space: holdfast.Space, wanted: list[str]) -> Turn:
    position, get = 0, space.records.get

    async def step() -> None:
        nonlocal position
        for key in wanted[position : position + PER_STEP]:
            await get(key)
        position = (position + PER_STEP) % KEYS

    return timed_async(step, PER_STEP)


def _selects(bare: peers.Bare, wanted: list[str]) -> Turn:
    position, execute, sql = 0, bare.execute, peers.SELECT

    def step() -> None:
        nonlocal position
        for key in wanted[position : position + PER_STEP]:
            execute(sql, (key,)).fetchall()[0][0]
        position = (position + PER_STEP) % KEYS

    return timed(step, PER_STEP)
