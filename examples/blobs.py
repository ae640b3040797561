"""Blobs: large data as verified files, referenced in the same commit as the record that points to them.

python examples/blobs.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import holdfast
from holdfast import BlobRef, Damaged, ManualClock, delete_, set_

MIB = 1024 * 1024


async def download() -> AsyncIterator[bytes]:
    for _ in range(8):
        yield os.urandom(MIB)


async def main() -> None:
    clock = ManualClock()
    async with holdfast.open("memory:", clock=clock) as store:
        space = store.space("contoso", agent="research")

        ref = await space.blobs.put(download())
        conditions, operations = space.blobs.attach(ref, "reports/q1")
        await space.commit(*conditions, *operations, set_("reports/q1", ref))
        print(f"put         {ref.size // MIB} MiB as {ref.sha256[:16]}…, referenced by reports/q1")

        assert await space.records.get("reports/q1", as_type=BlobRef) == ref
        pieces = [len(piece) async for piece in space.blobs.stream(ref)]
        print(f"streamed    {len(pieces)} pieces, {sum(pieces) // MIB} MiB, hash verified")

        try:
            await space.blobs.read(BlobRef(ref.sha256, ref.size - 1))
        except Damaged as refused:
            print(f"refused     {str(refused).partition('. ')[0].replace(ref.sha256, ref.sha256[:16] + '…')}")

        clock.advance("2h")
        report = await space.blobs.sweep(grace="1h")
        print(f"swept       {report.removed} removed, {report.kept} kept: it is referenced")

        conditions, operations = space.blobs.detach(ref, "reports/q1")
        await space.commit(*conditions, *operations, delete_("reports/q1"))
        clock.advance("2h")
        report = await space.blobs.sweep(grace="1h")
        print(f"swept       {report.removed} removed, {report.freed_bytes // MIB} MiB freed: nobody references it")


if __name__ == "__main__":
    asyncio.run(main())
