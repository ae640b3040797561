"""What does a contribution cost, beside a bare versioned put on the same engine; and in a document of 5 MB, beside an empty one?

A contribution is a section and an event of history in one commit. The peer is one Put, conditional on the version that its
writer saw last, without a layer. The large document has a body of 2.5 MB and 500 contributions of 5 KB.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

import holdfast
from benchmarks.report import Goal, Line, compare
from benchmarks.rounds import Plan, take_turns, timed_async
from benchmarks.stores import stores
from holdfast import Space
from holdfast.codec import encode
from holdfast.engine import Absent, Put, VersionIs

KINDS: Final = ("sqlite", "redis", "postgres")
WRITERS: Final = 32
SECTIONS: Final = 500
SECTION: Final = {"text": "x" * 5_000}
BODY: Final = {f"part{number}": "y" * 5_000 for number in range(500)}

_numbers = itertools.count(1)


def data() -> Any:
    """What an agent says; nobody has said it before."""
    return {"symbol": "MSFT", "outlook": "growth", "target": next(_numbers)}


class Swapper:
    """The peer: one key, put again and again on the version seen last."""

    def __init__(self, space: Space, key: str) -> None:
        self._scope = space._scope
        self._key = f"records/{key}"
        self._version = 0

    async def __call__(self) -> None:
        expected = VersionIs(self._key, self._version) if self._version else Absent(self._key)
        receipt = await self._scope.commit((Put(self._key, encode(data())),), (expected,))
        self._version = receipt.version


async def run(plan: Plan) -> AsyncIterator[Line]:
    for kind in KINDS:
        with stores(kind, plan.folder) as new_url:
            async with holdfast.open(new_url()) as store:
                async for line in _measure(plan, kind, store):
                    yield line


async def _measure(plan: Plan, kind: str, store: holdfast.Store) -> AsyncIterator[Line]:
    space = store.space("bench", agent="writer")
    large, empty = space.document("large"), space.document("empty")
    await large.replace(BODY, etag=0)
    for start in range(0, SECTIONS, 50):
        await asyncio.gather(*(large.contribute(SECTION, instance=f"i{start + each}") for each in range(50)))
    others = [store.space("bench", agent=f"agent{number}") for number in range(WRITERS)]
    many = [each.document("many") for each in others]
    swappers = [Swapper(each, f"peer{number}") for number, each in enumerate(others)]

    async def contribute_all() -> None:
        await asyncio.gather(*(each.contribute(data()) for each in many))

    async def put_all() -> None:
        await asyncio.gather(*(each() for each in swappers))

    rates = await take_turns(
        plan,
        {
            "empty": timed_async(lambda: empty.contribute(data())),
            "large": timed_async(lambda: large.contribute(data())),
            "bare": timed_async(Swapper(space, "peer")),
            "many": timed_async(contribute_all, WRITERS),
            "bare many": timed_async(put_all, WRITERS),
        },
    )
    half, same, unit = Goal("ratio", "at least", 0.5), Goal("ratio", "at least", 1 / 1.2), "contributions/s"
    yield compare(f"contribute_{kind}", rates["empty"], rates["bare"], "versioned put", half, unit)
    peer = f"{WRITERS} x versioned put"
    yield compare(f"contribute_{kind}_{WRITERS}", rates["many"], rates["bare many"], peer, half, unit)
    yield compare(f"contribute_{kind}_5mb", rates["large"], rates["empty"], "in an empty document", same, unit)
