"""What does a durable `set` on Redis cost, beside redis-py's own `SET` on the same server, both with appendfsync always?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import holdfast
from benchmarks import ours, server_peers
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns
from holdfast.testing.servers.redis import RedisServer

WRITERS: Final = 64


async def run(plan: Plan) -> AsyncIterator[Line]:
    with RedisServer.temporary() as server:
        async with holdfast.open(server.url) as store, server_peers.redis_writer(server.url) as bare:
            space = store.space("bench", agent="writer")
            rates = await take_turns(
                plan,
                {
                    "one": ours.writers(space, 1),
                    "bare one": ours.writing([bare]),
                    "many": ours.writers(space, WRITERS),
                    "bare many": ours.writing([bare] * WRITERS),
                },
            )
            sealed = await space.audit.sealed_upto()
    peer = f"SET, {server_peers.REDIS}"
    goal = Goal("ratio", "at least", 0.6)
    yield compare("redis_set_sequential", rates["one"], rates["bare one"], peer, goal, sealed_upto=sealed)
    goal = Goal("ratio", "at least", 0.8)
    yield compare("redis_set_64", rates["many"], rates["bare many"], f"{WRITERS} x {peer}", goal)
