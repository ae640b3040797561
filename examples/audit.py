"""Audit: who did what, secrets redacted, and a chain of hashes that shows who tampered with it.

python examples/audit.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import apsw

import holdfast


async def main(folder: Path) -> None:
    path = folder / "team.db"
    async with holdfast.open(str(path), background=False) as store:
        market = store.space("contoso", agent="market")
        risk = store.space("contoso", agent="risk")
        await market.records.set("broker", {"host": "fix.example", "password": "hunter2"})
        await market.records.set("limits/MSFT", 100)
        await risk.records.set("limits/MSFT", 50, request_id="cut-7")
        await risk.records.delete("broker")

        async for record in market.audit.records():
            shown = "" if record.value is None else record.value
            print(f"  {record.version}  {record.actor:<7} {record.operation:<7} {record.key:<20} {shown}")

        sealed = await market.audit.seal()  # the store does this by itself every few seconds
        checked = await market.audit.verify()
        print(f"sealed {sealed} records; the chain is {'sound' if checked.sound else 'NOT sound'}")
        print(f"note this elsewhere: {checked.hash}")

    print("somebody edits the file: the limit was never cut that far …")
    file = apsw.Connection(str(path))
    forged = """CAST(replace(value, '"value":50', '"value":90') AS BLOB)"""
    file.execute(f"UPDATE entries SET value = {forged} WHERE key LIKE 'audit/log/%'")
    file.close()

    async with holdfast.open(str(path), background=False) as store:
        again = await store.space("contoso").audit.verify(expect=checked.hash)
        print(f"the chain is {'sound' if again.sound else 'NOT sound'}:")
        for problem in again.problems:
            print(f"  {problem}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
