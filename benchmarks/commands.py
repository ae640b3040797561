"""How long does a whole command take, from its start to its end: `holdfast run -- true` and `holdfast status`?

Beside each stand, in the same rounds, an interpreter that does nothing and one that imports the libraries which every command
needs: what is above them is ours. A manager serves, so `run` is warm. Compiled files are kept in a folder of this run's own,
also where Python is told to keep none: an installed package has them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.report import Goal, Line
from benchmarks.rounds import Plan

ROUNDS_MAX = 15
BARE = [sys.executable, "-c", "pass"]
LIBRARIES = [sys.executable, "-c", "import asyncio, msgspec, typer"]
HOLDFAST = [sys.executable, "-m", "holdfast"]
COMMANDS = {
    "bare": BARE,
    "libraries": LIBRARIES,
    "run_true": [*HOLDFAST, "run", "--", "true"],
    "status": [*HOLDFAST, "status"],
}


async def run(plan: Plan) -> AsyncIterator[Line]:
    env = _environment(plan.folder)
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    try:
        for _ in range(min(plan.rounds, ROUNDS_MAX) + 1):
            for name, argv in COMMANDS.items():
                taken[name].append(_timed(argv, env))
    finally:
        _timed([*HOLDFAST, "manager", "stop", "--kill"], env)
    times = {name: values[1:] for name, values in taken.items()}  # the first one starts the manager, and compiles
    bare = statistics.median(times["bare"])
    for name in ("run_true", "status"):
        ours = statistics.median(times[name])
        more = {f"{each}_min": min(values) for each, values in times.items() if each in (name, "libraries")}
        more["libraries"] = statistics.median(times["libraries"])
        goal = Goal("ours", "at most", 200)
        yield Line(f"command_{name}", ours, "ms", bare, "python -c pass", ours / bare, goal, len(times[name]), more)


def _timed(argv: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1000


def _environment(folder: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return env | {"HOLDFAST_STORE": str(folder / "store.db"), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
