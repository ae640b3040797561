"""Clients that do random things to an engine and record what they were told, for `linearizability` to judge.

`Clients` runs several clients in one process, each sending one operation after the other: reads, writes, swaps by value
and by version, increments and deletes on a few keys that all of them share. Every change carries a request id, which is
the operation's id in the history; now and then an acknowledged one is sent again, and must get the same answer.

`Clients.resolve` repeats, under the same request id, what an earlier life of this process started and never saw answered.
That is what a client is told to do after OutcomeUnknown, and it must lead to exactly one effect. It leaves a share of
them alone, so that the history also has operations whose outcome nobody ever learns.

Values are unique, so that a value tells which write it came from. The generator is seeded; what happens depends on the
timing of the processes all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.engine import (
    Absent,
    Batch,
    Condition,
    Delete,
    Engine,
    Entry,
    Increment,
    Operation,
    Put,
    ValueIs,
    VersionIs,
)
from holdfast.errors import Conflict, InvalidInput, OutcomeUnknown, Unavailable
from holdfast.testing.history import NOTHING, Ended, Found, Kind, Recorder, Started

KINDS: Final[dict[Kind, int]] = {"read": 7, "increment": 3, "write": 2, "swap": 2, "swap_version": 2, "delete": 1}
"""What clients send, and how often."""
TEXT_SHARE: Final = 0.03
"""Writes of text, which an increment must refuse."""
GUESS_SHARE: Final = 0.1
"""Swaps that expect something made up."""
REPEAT_SHARE: Final = 0.02
"""Acknowledged changes that are sent again."""
PAUSE_S: Final = 0.02
"""How long a client waits when the store cannot be reached."""
ABANDON_SHARE: Final = 0.1
"""Operations of a former life that nobody asks about again."""


def batch_of(started: Started, actor: str) -> Batch:
    """The batch of a recorded operation that is not a read: always the same for the same operation."""
    value = (started.value or "").encode()
    operations: tuple[Operation, ...] = (Put(started.key, value),)
    conditions: tuple[Condition, ...] = ()
    if started.kind == "increment":
        operations = (Increment(started.key, started.delta),)
    elif started.kind == "delete":
        operations = (Delete(started.key),)
    elif started.kind == "swap_version":
        conditions = (VersionIs(started.key, started.expect_version),)
    elif started.kind == "swap":
        expected = None if started.expect is None else started.expect.encode()
        conditions = (Absent(started.key) if expected is None else ValueIs(started.key, expected),)
    return Batch(actor, operations, conditions, started.id)


class Clients:
    """The clients of one process. `name` is unique among the processes of a run and stays over restarts; `life` counts
    these."""

    def __init__(self, engine: Engine, space: str, recorder: Recorder, name: str, life: int, keys: list[str]) -> None:
        self._engine = engine
        self._space = space
        self._recorder = recorder
        self._name = name
        self._life = life
        self._keys = keys
        self._random = random.Random(f"{name}.{life}")  # noqa: S311
        self._numbers = itertools.count(1)

    async def run(self, clients: int, operations: int) -> None:
        """Send this many operations in all, from this many clients; a swap and the read before it count as one."""
        left = itertools.repeat(None, operations)
        await asyncio.gather(*(self._client(number, left) for number in range(clients)))

    async def resolve(self, former: Iterable[Started | Ended]) -> None:
        """Repeat what former lives of this process left without an answer."""
        events = list(former)
        answered = {event.id for event in events if isinstance(event, Ended) and event.outcome != "unknown"}
        for event in events:
            if isinstance(event, Ended) or event.id in answered or event.kind == "read":
                continue
            # Drawn by its id, so that what was abandoned in one life stays so in the next.
            if random.Random(event.id).random() >= ABANDON_SHARE:  # noqa: S311
                await self._change(event, first=False)

    async def _client(self, number: int, left: Iterator[None]) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        for _ in left:
            # Some keys are hot, for contention; on the others a swap has a chance.
            key = self._keys[int(len(self._keys) * self._random.random() ** 2)]
            (kind,) = self._random.choices(kinds, weights)
            found: Found | None = NOTHING
            if kind in ("read", "swap", "swap_version"):
                found = await self._read(self._new_id(number), key)
            if found is None:
                continue
            if kind != "read":
                started = self._start(self._new_id(number), key, kind, found)
                if await self._change(started) and self._random.random() < REPEAT_SHARE:
                    await self._change(started)
            await asyncio.sleep(0)  # reads are done at once and would keep the other clients waiting

    def _new_id(self, client: int) -> str:
        return f"{self._name}.{self._life}.{client}.{next(self._numbers)}"

    async def _read(self, id: str, key: str) -> Found | None:
        """What is there; None when the store did not answer, which says nothing about anything."""
        self._recorder.start(id, key, "read")
        try:
            (entry,) = await self._engine.get(self._space, [key])
        except Unavailable:
            await asyncio.sleep(PAUSE_S)
            return None
        found = _found(entry)
        self._recorder.end(id, "ok", found=found)
        return found

    def _start(self, id: str, key: str, kind: Kind, found: Found) -> Started:
        if kind == "increment":
            return self._recorder.start(id, key, kind, delta=self._random.randint(-3, 9) or 1)
        if kind == "delete":
            return self._recorder.start(id, key, kind)
        number = int.from_bytes(hashlib.blake2b(id.encode(), digest_size=7).digest(), "big")
        value = f'"{id}"' if self._random.random() < TEXT_SHARE else str(number)
        guessed = self._random.random() < GUESS_SHARE
        if kind == "swap":
            return self._recorder.start(id, key, kind, value=value, expect="-1" if guessed else found.value)
        if kind == "swap_version":
            expect_version = (found.version or 0) + guessed
            return self._recorder.start(id, key, kind, value=value, expect_version=expect_version)
        return self._recorder.start(id, key, kind, value=value)

    async def _change(self, started: Started, *, first: bool = True) -> bool:
        """Send an operation and record the answer; tell whether it was acknowledged.

        A repetition that fails says nothing about the first attempt: it is recorded as unknown.
        """
        try:
            receipt = await self._engine.commit(self._space, batch_of(started, self._name))
        except Conflict as exc:
            self._recorder.end(started.id, "refused", found=_found(exc.actual))
        except InvalidInput:
            self._recorder.end(started.id, "refused")
        except OutcomeUnknown:
            self._recorder.end(started.id, "unknown")
            await asyncio.sleep(PAUSE_S)
        except Unavailable:
            self._recorder.end(started.id, "failed" if first else "unknown")
            await asyncio.sleep(PAUSE_S)
        else:
            (result,) = receipt.results
            existed = result if isinstance(result, bool) else None
            total = result if isinstance(result, int) and existed is None else None
            self._recorder.end(started.id, "ok", version=receipt.version, total=total, existed=existed)
            return True
        return False


def _found(entry: Entry | None) -> Found:
    return NOTHING if entry is None else Found(entry.value.decode(), entry.version)
