"""Transactions: batches with conditions, functions that read and write, and a retry that counts once.

python examples/transactions.py
"""

from __future__ import annotations

import asyncio
import random

import holdfast
from holdfast import Conflict, RecordTransaction, Space, at_least, increment, set_

ACCOUNTS = ["fx", "rates", "credit", "equity"]


async def transfer(space: Space) -> None:
    source, target = random.sample(ACCOUNTS, 2)

    async def move(tx: RecordTransaction) -> None:  # runs again when somebody changed what it read
        amount = random.randint(1, 50)
        available = await tx.get(source)
        if available >= amount:
            tx.set(source, available - amount)
            tx.set(target, await tx.get(target) + amount)
            tx.increment("transfers")

    await space.transact(move)


async def main() -> None:
    async with holdfast.open("memory:") as store:
        space = store.space("bank", agent="treasury")

        await space.commit(set_("licences", 3))
        wanted = [
            space.commit(at_least("licences", 1), increment("licences", -1), set_(f"licence/{name}", True))
            for name in ("market", "risk", "news", "research", "pricing")
        ]
        outcomes = await asyncio.gather(*wanted, return_exceptions=True)
        refused = sum(isinstance(outcome, Conflict) for outcome in outcomes)
        print(f"3 licences, 5 who want one: {5 - refused} got it, {refused} were refused")

        await space.commit(*(set_(account, 100) for account in ACCOUNTS))
        await asyncio.gather(*(transfer(space) for _ in range(100)))
        balances = await space.records.get_many(ACCOUNTS)
        print(f"after {await space.records.get('transfers')} transfers at once: {balances}")
        print(f"sum: {sum(balances.values())}, as before")

        first = await space.commit(increment("paid", 250), request_id="invoice-17")
        again = await space.commit(increment("paid", 250), request_id="invoice-17")
        print(f"paid twice under one request id: {await space.records.get('paid')}; same answer: {first == again}")


if __name__ == "__main__":
    asyncio.run(main())
