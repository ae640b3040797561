"""What does a durable `set` on PostgreSQL cost, beside psycopg's own upserts on the same server, alone and among others?

One writer; 32 writers in one process; 4 processes with 8 writers each, and 16 with one each, all on one space, where
commits are totally ordered and the peer's are not; and 4 processes on a space each, which commit in parallel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import holdfast
from benchmarks import ours, server_peers
from benchmarks.processes import processes
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns
from holdfast.testing.servers.postgres import PostgresServer

WRITERS: Final = 32
ROUNDS: Final = 9
LONGER: Final = 3
"""Fewer and longer turns with processes: they need some time to take turns at all."""


async def run(plan: Plan) -> AsyncIterator[Line]:
    with PostgresServer.temporary() as server:
        server_peers.make_table(server.url)
        async for line in _one_process(plan, server.url):
            yield line
        plan = replace(plan, rounds=min(plan.rounds, ROUNDS), seconds=plan.seconds * LONGER)
        for count, writers, limit in ((4, 8, 0.7), (16, 1, 0.35)):
            yield await _processes(plan, server.url, count, writers, Goal("ratio", "at least", limit))
        yield await _spaces(plan, server.url)


async def _one_process(plan: Plan, url: str) -> AsyncIterator[Line]:
    async with holdfast.open(url) as store, server_peers.postgres_writers(url, WRITERS) as bare:
        space = store.space("bench", agent="writer")
        rates = await take_turns(
            plan,
            {
                "one": ours.writers(space, 1),
                "bare one": ours.writing(bare[:1]),
                "many": ours.writers(space, WRITERS),
                "bare many": ours.writing(bare),
            },
        )
        sealed = await space.audit.sealed_upto()
    peer, at_least = f"upsert, {server_peers.POSTGRES}", "at least"
    one = Goal("ratio", at_least, 0.6)  # type: ignore[arg-type]
    yield compare("postgres_set_sequential", rates["one"], rates["bare one"], peer, one, sealed_upto=sealed)
    many = Goal("ratio", at_least, 1.0)  # type: ignore[arg-type]
    yield compare("postgres_set_32", rates["many"], rates["bare many"], f"{WRITERS} x {peer}", many)


async def _processes(plan: Plan, url: str, count: int, writers: int, goal: Goal) -> Line:
    with ExitStack() as stack:
        mine = stack.enter_context(processes(count, "ours", url, writers))
        theirs = stack.enter_context(processes(count, "bare", url, writers))
        rates = await take_turns(plan, {"ours": mine.turn, "bare": theirs.turn})
    share = min(mine.done) / (sum(mine.done) / count)
    name = f"postgres_set_{count}x{writers}"
    peer = f"{count} x {writers} upserts, {server_peers.POSTGRES}"
    return compare(name, rates["ours"], rates["bare"], peer, goal, share=share, slowest_set_ms=mine.slowest_s * 1000)


async def _spaces(plan: Plan, url: str) -> Line:
    """The same processes and writers, on four spaces and on one."""
    with ExitStack() as stack:
        apart = stack.enter_context(processes(4, "ours", url, 8, "own-{}"))
        together = stack.enter_context(processes(4, "ours", url, 8))
        rates = await take_turns(plan, {"apart": apart.turn, "together": together.turn})
    return compare("postgres_set_4_spaces", rates["apart"], rates["together"], "the same on one space", None)
