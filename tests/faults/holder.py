"""A process that holds a lock and writes under it: `python -m tests.faults.holder URL fenced|unfenced [TTL]`.

It says `held` when it has the lock, and then writes once for each line it is sent, telling what became of it. A keeper's
token is in the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys

import holdfast


async def main(url: str, how: str, ttl: str = "200ms") -> None:
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    async with holdfast.open(url, background=False, token=token) as store:
        space = store.space("fencing", agent="paused")
        guard = await space.lock("l", ttl=ttl, wait="20s").acquire()
        view = guard.space if how == "fenced" else space
        print("held", guard.token, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await view.records.set("k", line.strip())
                print("written", flush=True)
            except holdfast.LeaseLost:
                print("LeaseLost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
