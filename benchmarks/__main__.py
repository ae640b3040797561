"""The command: `python -m benchmarks [--quick] [--strict] [--folder DIR] [NAME …]`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks import NAMES
from benchmarks.places import real_disk
from benchmarks.report import Line, environment, table
from benchmarks.rounds import FULL, QUICK, Plan


async def measure(names: list[str], plan: Plan) -> list[Line]:
    """Run the benchmarks one after the other; each in a folder of its own, which is gone when it ends."""
    lines: list[Line] = []
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"# {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"holdfast-bench-{name}-", dir=plan.folder) as folder:
            async for line in module.run(plan.within(Path(folder))):
                lines.append(line)
                print(line.json(), flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which ones; all if none is named: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: short rounds, small stores; no figures to quote"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a goal is missed")
    parser.add_argument("--folder", type=Path, help="where the files are made; by default a temporary folder on a disk")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    try:
        plan = (QUICK if options.quick else FULL).within(real_disk(options.folder))
    except OSError as exc:
        parser.error(str(exc))
    print(environment(plan.folder), file=sys.stderr)
    lines = asyncio.run(measure(options.names or list(NAMES), plan))
    print(table(lines), file=sys.stderr)
    return 1 if options.strict and any(line.ok is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
