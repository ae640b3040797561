"""How much memory does a keeper take for so many keys of 256 bytes, and how soon is it back after kill -9?

The keys are set through the library, in batches of 128, so the feed and the audit know of them too. Memory is what the
process has right after that (its peak is told as well), and again after it was killed and started. The time until it is
ready runs from the start of the process; `opening_s` is the part that the keeper itself counts, without Python's imports,
and `cpu_s` the CPU time of all of it, which a busy machine does not change much.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import holdfast
from benchmarks.keeper_sides import SPACE, agent_token, cpu_s, new_keeper, rss_bytes, serving
from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan
from holdfast.engine import OPERATIONS_MAX, Put
from holdfast.testing.servers.keeper import KeeperServer

VALUE: Final = b'"' + b"x" * 254 + b'"'
CONNECTIONS: Final = 4
PER_CONNECTION: Final = 4
"""Batches in flight."""
GIB: Final = 2**30


async def run(plan: Plan) -> AsyncIterator[Line]:
    for keys, ready_s, rss_gib in ((plan.keys // 10, 1.0, None), (plan.keys, 5.0, 1.5)):
        keeper = new_keeper(plan.folder / f"keeper-{keys}")
        with serving(keeper):
            await _fill(keeper, await agent_token(keeper), keys)
            rss, peak = rss_bytes(keeper.pid), _peak_bytes(keeper.pid)
            keeper.kill()
            began = time.perf_counter()
            keeper.start()
            took = time.perf_counter() - began
            used_s, after = cpu_s(keeper.pid), rss_bytes(keeper.pid)
            opening_s = _opening_s(keeper)
        goal = Goal("ours", "at most", ready_s)
        yield Line(f"keeper_ready_{keys}", took, "s", goal=goal, more={"opening_s": opening_s, "cpu_s": used_s})
        if rss_gib is not None:
            more = {"peak_gib": peak / GIB, "after_restart_gib": after / GIB, "bytes_per_key": rss / keys}
            yield Line(f"keeper_rss_{keys}", rss / GIB, "GiB", goal=Goal("ours", "at most", rss_gib), more=more)


async def _fill(keeper: KeeperServer, token: str, keys: int) -> None:
    starts = iter(range(0, keys, OPERATIONS_MAX))

    async def write(store: holdfast.Store) -> None:
        space = store.space(SPACE)
        for start in starts:
            numbers = range(start, min(start + OPERATIONS_MAX, keys))
            await space.commit(*(Put(f"records/items/{number:09d}", VALUE) for number in numbers))

    stores = [await holdfast.open(keeper.url, token=token) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(write(store) for store in stores for _ in range(PER_CONNECTION)))
    for store in stores:
        await store.close()


def _peak_bytes(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _opening_s(keeper: KeeperServer) -> float:
    """What the last start said."""
    lines = [line for line in keeper.log.read_text().splitlines() if line.startswith('{"store"')]
    return float(json.loads(lines[-1])["seconds"])
