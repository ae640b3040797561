"""A hot tier: two processes' stores on one file, session reads from memory, and a token that hands a session on."""

import asyncio
import tempfile
from pathlib import Path

import holdfast


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder, "team.db"))
        async with holdfast.open(url, cache="memory") as here, holdfast.open(url, cache="memory") as there:
            market = here.space("contoso", agent="market")
            risk = there.space("contoso", agent="risk")
            for number in range(3):
                await market.records.set("regime", f"round {number}")
                print("market reads what it wrote:", await market.records.get("regime", consistency="session"))
                risk.session.join(market.session.token)  # handed over, in a message or a header
                print("  and risk at least as much:", await risk.records.get("regime", consistency="session"))
            for _ in range(1000):
                await risk.records.get("regime", consistency="session")
            assert there.cache is not None
            print("most reads asked nobody:", there.cache.stats.hit_rate > 0.9)


if __name__ == "__main__":
    asyncio.run(main())
