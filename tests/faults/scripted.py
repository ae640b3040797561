"""A short run of fixed commits on a SQLite file, for faults at chosen system calls.

`python -m tests.faults.scripted FILE LOG MODE ENGINE`, where ENGINE is sqlite or resident.

The commits use every operation, conditions, ttls and large values, each with a request id, on a clock that stands still
between them. So a run is the same every time, and what it must lead to can be computed on the memory engine.

It writes one JSON line per attempt to LOG, before (`{"n": 3}`) and after: the receipt, or the name of the error. After
an error it does what the error asks for:

    recover  repeat the request; if the engine will not, open it again and repeat the request; give up after ATTEMPTS_MAX
    die      kill itself with SIGKILL, so that the file is left as the error left it

and says `{"lie": …}` if an error that promises "nothing was changed" is followed by a state that has changed. An error
that is no `holdfast.Error` ends the process with a traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from holdfast.clock import ManualClock
from holdfast.engine import (
    Absent,
    AtLeast,
    Batch,
    Delete,
    Engine,
    Entry,
    Increment,
    Push,
    Put,
    Receipt,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.errors import Error, OutcomeUnknown, Unavailable

SPACE: Final = "scripted"
ACTOR: Final = "script"
ATTEMPTS_MAX: Final = 4
REOPEN_AT: Final = 5
"""Before this step the store is closed, which folds its log into the file, and opened again."""
LARGE: Final = b'"' + b"x" * 8_000 + b'"'


class Step(NamedTuple):
    """Move the clock, then commit."""

    advance: str
    batch: Batch


class Line(msgspec.Struct, omit_defaults=True):
    """One line of the log. `n` is the step; -1 stands for opening."""

    n: int
    receipt: Receipt | None = None
    error: str | None = None
    lie: str | None = None


def _steps() -> list[Step]:
    batches: list[tuple[str, tuple[object, ...], tuple[object, ...]]] = [
        ("1ms", (Put("records/a", b"1"),), ()),
        ("1ms", (Put("records/b", b'"two"', ttl_ms=5_000), Increment("records/n", 5)), (Absent("records/b"),)),
        ("1ms", (Increment("records/n", 2),), (AtLeast("records/n", 5),)),
        ("1ms", tuple(Push("queues/q/", b"%d" % number) for number in range(6)), ()),
        ("1ms", (Put("records/a", b"2"),), (VersionIs("records/a", 1),)),
        ("1s", (Take("queues/q/", "queues/taken/", 2, None, "records/waiting", "records/taken"),), ()),
        ("1s", (Touch("records/b", 60_000), Put("records/c", b"[]", ttl_ms=2_000)), ()),
        ("1s", (Put("records/large", LARGE), Delete("records/a")), (ValueIs("records/a", b"2"),)),
        ("3s", (Increment("records/n", -1),), ()),  # records/c has expired: its expiry is a commit of its own
        ("1ms", tuple(Put(f"records/many/{number}", b"0") for number in range(20)), ()),
        ("1ms", (Delete("records/absent"),), ()),
        ("1ms", (Put("records/large", LARGE[:3_000] + b'"', tag="x"), Increment("records/n", 10)), ()),
        ("30m", (Put("records/last", b"1"), Delete("records/many/7")), ()),  # so has records/b
        ("1ms", (Increment("records/n", 100),), ()),
    ]
    return [
        Step(advance, Batch(ACTOR, operations, conditions, f"step-{number}"))  # type: ignore[arg-type]
        for number, (advance, operations, conditions) in enumerate(batches)
    ]


STEPS: Final = _steps()


def clock_at(step: int) -> ManualClock:
    """The clock as it stands when this step is committed; -1: before all of them."""
    clock = ManualClock()
    for each in STEPS[: step + 1]:
        clock.advance(each.advance)
    return clock


async def open_store(engine: str, path: str | Path, clock: ManualClock) -> Engine:
    """The engine of that name. No thread: strace counts the calls of each thread on its own."""
    if engine == "sqlite":
        from holdfast.engines.sqlite import SqliteEngine

        return await SqliteEngine.open(path, clock=clock)
    from holdfast.engines import resident, resident_commit, resident_folding

    resident_commit.INLINE_COMMIT_S = 3600.0  # type: ignore[misc]
    resident_folding.FOLD_COMMITS = 3  # type: ignore[misc]
    resident_folding.SLICE_ROWS = 1  # type: ignore[misc]
    return await resident.ResidentEngine.open(path, clock=clock)


class Run:
    """One run: the engine, its clock, and the log."""

    def __init__(self, path: str, log: str, mode: str, kind: str) -> None:
        self.kind = kind
        self.path = path
        self.mode = mode
        self.clock = clock_at(-1)
        self.engine: Engine | None = None
        self.fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def log(self, line: Line) -> None:
        os.write(self.fd, msgspec.json.encode(line) + b"\n")

    async def opened(self) -> Engine | None:
        """The engine, opened if need be; None when that fails."""
        if self.engine is None:
            try:
                self.engine = await open_store(self.kind, self.path, self.clock)
            except Error as exc:
                self.failed(-1, exc)
        return self.engine

    async def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await engine.close()

    def failed(self, n: int, exc: Error) -> None:
        self.log(Line(n, error=type(exc).__name__))
        if self.mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    async def step(self, n: int) -> bool:
        """Commit a step, through errors. False when it cannot be done."""
        for attempt in range(ATTEMPTS_MAX):
            engine = await self.opened()
            if engine is None:
                continue
            before = await state_of(engine)
            self.log(Line(n))
            try:
                receipt = await engine.commit(SPACE, STEPS[n].batch)
            except Error as exc:
                after = await state_of(engine)
                if isinstance(exc, Unavailable) and before is not None and after is not None and before != after:
                    self.log(Line(n, lie=f"{type(exc).__name__} said that nothing was changed"))
                self.failed(n, exc)
                if attempt or isinstance(exc, OutcomeUnknown):
                    await self.close()
            else:
                self.log(Line(n, receipt=receipt))
                return True
        return False


async def state_of(engine: Engine) -> tuple[int, list[Entry]] | None:
    """Everything in the space; None when it cannot be read."""
    try:
        page = await engine.scan(SPACE, "", limit=1000)
    except Error:
        return None
    return page.revision, page.entries


async def at_once(function: Callable[..., object], *arguments: object) -> object:
    """`asyncio.to_thread` without the thread."""
    return function(*arguments)


async def main(path: str, log: str, mode: str, kind: str) -> None:
    asyncio.to_thread = at_once  # type: ignore[assignment]
    run = Run(path, log, mode, kind)
    for n, step in enumerate(STEPS):
        run.clock.advance(step.advance)
        if n == REOPEN_AT:
            await run.close()
        if not await run.step(n):
            break
    await run.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
