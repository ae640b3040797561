"""Who puts messages, or works on them, and may be killed at any instant. Started from the nursery.

A sender puts every number once, under its dedup key, and begins anew when it is started again. A consumer takes from `first` and puts
the result into `second`, and from there into `done`. A `broken` one writes the result, and acknowledges with another commit.
"""

from __future__ import annotations

import asyncio
import os

import holdfast
from holdfast import LeaseLost, Message, Queue, Requeue, Space

SPACE = "desk"
CONCURRENCY = 4
AGAIN = Requeue(attempts=1000, backoff="20ms", factor=1)


async def main(url: str, role: str, count: int, lease: str, name: str) -> None:
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    async with holdfast.open(url, background=False, token=token) as store:
        space = store.space(SPACE, agent=name)
        print("running", flush=True)
        if role == "sender":
            queue = space.queue("first")
            for number in range(count):
                await queue.put(number, dedup=str(number), priority=number % 3, delay=0.05 if number % 7 == 0 else None)
            print("sent", flush=True)
            return
        stages = [("first", "second"), ("second", "done")]
        async with asyncio.TaskGroup() as tasks:
            for source, target in stages:
                queue = space.queue(source, lease=lease, on_death=AGAIN, on_error=AGAIN, prefetch=4)
                for _ in range(CONCURRENCY):
                    tasks.create_task(work(space, queue, target, broken=role == "broken"))


async def work(space: Space, queue: Queue, target: str, *, broken: bool) -> None:
    while True:
        message = await queue.take(wait=None)
        await asyncio.sleep(0.002)
        try:
            if broken:
                await in_two_commits(space, message, target)
            else:
                await message.complete(message.body, to=target)
        except LeaseLost:
            pass  # it was given to somebody else meanwhile, which is what this is about


async def in_two_commits(space: Space, message: Message, target: str) -> None:
    await space.queue(target).put(message.body)
    await asyncio.sleep(0.02)
    await message.ack()
