"""A lock that locks: five agents take turns on one balance, and the one that was paused too long writes nothing any more."""

import asyncio
import tempfile
from pathlib import Path

import holdfast


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with holdfast.open(str(Path(folder, "team.db"))) as store:
            agents = [store.space("contoso", agent=f"agent-{number}") for number in range(5)]

            async def work(space: holdfast.Space) -> None:
                for _ in range(20):
                    async with space.lock("balance", wait="30s") as guard:
                        balance = await guard.space.records.get("balance", 0)  # safe: nobody else is in here
                        await guard.space.records.set("balance", balance + 1)

            await asyncio.gather(*map(work, agents))
            print("balance:", await agents[0].records.get("balance"))

            guard = await agents[0].lock("balance", ttl="60s").acquire()
            await agents[1].locks.break_("balance")  # as an operator would, or the end of its lease
            async with agents[2].lock("balance") as successor:
                print("the token has grown:", successor.token > guard.token)
                try:
                    await guard.space.records.set("balance", 0)
                except holdfast.LeaseLost:
                    print("the former holder was refused")
            print("balance:", await agents[0].records.get("balance"))


asyncio.run(main())
