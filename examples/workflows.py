"""Code that survives: state that parallel tasks share, a checkpoint that a crash goes back to, data between workflows, a person's answer."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Context, Retry, step, workflow

interruptions = [1500]
"""Where the import is interrupted once, as by a crash."""


@workflow(name="accumulator")
class Accumulator:
    """Parallel tasks add to counters, lists and sets; each counts once, however often it is tried."""

    @step
    async def files(self, ctx: Context) -> list[str]:
        return [f"{name}.csv" for name in ctx.input["names"]]

    @step(each="files", max_workers=4, retry=Retry(3, initial="10ms"))
    async def process(self, ctx: Context, file: str) -> int:
        await ctx.state.increment("total_processed")
        await ctx.state.append_to_list("processed_files", file)
        if len(file) > 8:
            await ctx.state.add_to_set("unique_errors", "name too long")
        if ctx.attempt == 1 and file.startswith("b"):
            raise ConnectionError("the network, for a moment")
        return len(file)

    @step(after="process")
    async def report(self, ctx: Context, sizes: list[int]) -> dict[str, Any]:
        return {"sizes": sizes, "state": ctx.state.all()}


@workflow(name="import")
async def import_dataset(ctx: Context, total: int) -> Any:
    return await ctx.step("import", import_batches, total, retry=Retry(2, initial="10ms"))


async def import_batches(ctx: Context, total: int) -> list[int]:
    """Go on where the last checkpoint was."""
    begun_at = ctx.state.get("items_processed", 0)
    for start in range(begun_at, total, 500):
        if interruptions and start == interruptions[0]:
            interruptions.pop()
            raise ConnectionError("interrupted")
        ctx.state["items_processed"] = min(start + 500, total)
        await ctx.state.flush()  # this much is safe, whatever comes
    return [begun_at, ctx.state["items_processed"]]


@workflow(name="producer")
async def producer(ctx: Context) -> None:
    await ctx.shared_state.set("dataset:latest", {"rows": 3}, ttl="1h")


@workflow(name="consumer")
async def consumer(ctx: Context) -> Any:
    await ctx.child(producer)
    data = await ctx.shared_state.get("dataset:latest")
    answer = await ctx.wait_for("approval", timeout="2d", default="nobody")
    await ctx.sleep("50ms")
    return {**data, "approved": answer}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with holdfast.open(str(Path(folder, "team.db"))) as store:
            workflows = store.space("contoso", agent="desk").workflows
            async with workflows.worker([Accumulator, import_dataset, producer, consumer]):
                names = ["a", "b", "long-name", "d"]
                handle = await workflows.start(Accumulator, {"names": names}, id="files-2026-11-15")
                result = await handle.result("30s")
                print("sizes, in the order of the files:", result["sizes"])
                state = result["state"]
                print("counted once each:", state["total_processed"], sorted(state["processed_files"]))
                print("errors:", state["unique_errors"])

                print("began again at, came to:", await (await workflows.start(import_dataset, 3000)).result("30s"))

                handle = await workflows.start(consumer)
                while not (await handle.status()).waits:  # noqa: ASYNC110 - a person would look at a list
                    await asyncio.sleep(0.01)
                await handle.signal("approval", "ann")
                print("with an answer:", await handle.result("30s"))
                print("ended:", {name: counts["completed"] for name, counts in (await workflows.counts()).items()})


asyncio.run(main())
