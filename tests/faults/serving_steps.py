"""A process that does the steps of a queue until it is told to stop; killed and paused by `test_workflow_steps.py`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import holdfast
from holdfast import Context, workflow

SPACE = "flows"


async def render(ctx: Context, scene: int) -> int:
    await ctx.state.increment("rendered")
    await ctx.state.append_to_list("scenes", scene)
    await asyncio.sleep(0.05)
    return scene * 10


@workflow(name="film")
async def film(ctx: Context, n: int) -> dict[str, Any]:
    frames = await ctx.map("render", render, range(n), max_workers=4, queue="gpu")
    return {"frames": frames, "rendered": ctx.state["rendered"]}


async def main() -> None:
    settings = json.loads(sys.argv[1])
    async with holdfast.open(settings["url"]) as store:
        space = store.space(SPACE, agent="boss")
        async with space.workflows.worker(
            [film], concurrency=2, lease=settings["lease"], queues=["gpu"], steps_only=True
        ):
            print("running", flush=True)
            await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
