"""Records: values with versions and lifetimes, counters, compare-and-swap, lists, sets, typed values.

python examples/records.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import holdfast
from holdfast import ABSENT, Conflict


@dataclass
class Order:
    symbol: str
    size: int


async def main() -> None:
    async with holdfast.open("memory:") as store:  # a path, such as "team.db", keeps it and shares it
        market = store.space("contoso", agent="market").records
        risk = store.space("contoso", agent="risk").records

        await market.set("regime", "risk-on", ttl="1h")
        entry = await risk.entry("regime")
        assert entry is not None
        print(f"regime      {entry.value!r}, version {entry.version}, by {entry.owner}, until {entry.expires_at:%H:%M}")

        await asyncio.gather(*(records.increment("orders") for records in (market, risk) for _ in range(50)))
        print(f"orders      {await market.get('orders')} after 100 increments by two agents at once")

        version = await market.compare_and_swap("leader", "market", expect=ABSENT)
        try:
            await risk.compare_and_swap("leader", "risk", expect=ABSENT)
        except Conflict as refused:
            print(f"leader      market; risk is told: {refused}")
        await risk.compare_and_swap("leader", "risk", expect_version=version)
        print(f"leader      {await market.get('leader')}, who named the version it had seen")

        await market.append_to_list("files", "a.csv", "b.csv")
        await risk.append_to_list("files", "c.csv")
        await market.add_to_set("errors", "E1", "E2", "E1")
        print(f"files       {await market.list('files')}")
        print(f"errors      {await risk.members('errors')}")

        await market.set("order/1", Order("MSFT", 5))
        print(f"order/1     {await risk.get('order/1', as_type=Order)}")
        print(f"keys        {await risk.keys()}")


if __name__ == "__main__":
    asyncio.run(main())
