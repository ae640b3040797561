"""Processes that open a store which does not exist yet, all at the same instant: `python -m tests.faults.openers FOLDER ROUNDS`.

Every round is a new file and PROCESSES forks that wait for one instant, open it, commit once and close it. Prints what went
wrong, one line for each; nothing when all of them succeeded and each file has every commit.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from holdfast.engine import Batch, Increment
from holdfast.engines.sqlite import SqliteEngine

PROCESSES = 8


async def commit(path: Path) -> int:
    """One more in the store's counter."""
    engine = await SqliteEngine.open(path)
    receipt = await engine.commit("space", Batch("opener", (Increment("records/n", 1),)))
    await engine.close()
    (total,) = receipt.results
    assert isinstance(total, int)
    return total


def child(path: Path, instant: float) -> int:
    while time.monotonic() < instant:
        pass
    try:
        asyncio.run(commit(path))
    except Exception as exc:  # whatever it is, it is the finding
        print(f"{type(exc).__name__}: {exc}", flush=True)
        return 1
    return 0


def main(folder: str, rounds: str) -> None:
    for number in range(int(rounds)):
        path = Path(folder, f"{number}.db")
        instant = time.monotonic() + 0.02
        children = []
        for _ in range(PROCESSES):
            if (pid := os.fork()) == 0:
                os._exit(child(path, instant))
            children.append(pid)
        failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
        if (total := asyncio.run(commit(path))) != PROCESSES + 1 - failed:
            print(f"{path} counts {total} instead of {PROCESSES + 1 - failed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
