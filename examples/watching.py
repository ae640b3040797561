"""Watching: one agent works, another follows every change, is interrupted, and goes on where it stopped.

python examples/watching.py
"""

from __future__ import annotations

import asyncio

import holdfast
from holdfast import Space, increment, set_


async def work(space: Space) -> None:
    for number in range(1, 5):
        await space.commit(set_(f"orders/{number}", {"size": number * 10}), increment("orders/count"))
        await asyncio.sleep(0.01)
    await space.records.set("orders/hint", "closing", ttl="100ms")  # expires by itself, which is a change too


async def follow(space: Space, cursor: str, upto: str) -> str:
    """Print changes until one is to the key; gives the cursor after it."""
    async for commit in space.watch("orders/", cursor=cursor):
        for change in commit:
            value = "" if change.value is None else change.value
            print(f"  version {commit.version:>2}  {commit.actor:<9} {change.op:<10} {change.key:<13} {value}")
        cursor = commit.cursor
        if any(change.key == upto for change in commit):
            break
    return cursor


async def main() -> None:
    async with holdfast.open("memory:") as store:
        worker = store.space("contoso", agent="market")
        watcher = store.space("contoso", agent="reporting")

        start = await watcher.cursor()
        working = asyncio.create_task(work(worker))
        print("live, commit by commit:")
        saved = await follow(watcher, start, upto="orders/2")

        await working
        print(f"interrupted at cursor {saved}; the worker has finished meanwhile. Going on:")
        saved = await follow(watcher, saved, upto="orders/hint")

        print("waiting for the expiry:")
        await follow(watcher, saved, upto="orders/hint")


if __name__ == "__main__":
    asyncio.run(main())
