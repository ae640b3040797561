"""Where does a keeper spend its time? `python -m benchmarks.keeper_profile --py-spy PATH [--job set] [--in-flight 256] [--one-name] [--clients]`.

It runs one job of `keeper_clients.py` against a private keeper, lets py-spy (from PyPI; any environment's will do) take
samples of the keeper, or of its clients, and prints three tables: by module, by function, and by function with all that it
calls. Only what holds the interpreter is sampled, so waiting is not counted, nor what SQLite and the kernel do meanwhile:
`perf record -e cpu-clock` shows that share. A sample belongs to the innermost frame of Python; what C does on its behalf
counts there. Shares are multiplied with the CPU per operation that was measured in a turn before, without py-spy.
docs/performance.md tells what it showed, and what followed.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.keeper_clients import JOBS
from benchmarks.keeper_sides import Sides
from benchmarks.places import real_disk

SAMPLES_PER_S: Final = 400
WARM_S: Final = 3.0
ROWS: Final = 30


async def record(
    py_spy: str, job: str, in_flight: int, seconds: float, *, one_name: bool, clients: bool
) -> tuple[float, list[str]]:
    """The CPU per operation in microseconds, and the stacks that were seen, each with its count."""
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-", dir=real_disk()) as folder:
        async with Sides(Path(folder), job, ()) as sides:
            ours = sides.sides["ours"]
            turn = ours.turn(in_flight, one_name=one_name)
            await turn(WARM_S)
            ours.spent.clear()
            await ours.turn(in_flight, one_name=one_name)(seconds)
            spent, out = ours.spent[in_flight, one_name], Path(folder) / "stacks"
            pid = ours.clients_pid if clients else ours.server.pid
            command = [py_spy, "record", "--pid", str(pid), "--duration", str(int(seconds)), "--format", "raw"]
            command += ["--rate", str(SAMPLES_PER_S), "--gil", "--function", "--output", str(out)]
            spy = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            await turn(seconds + 2)
            _, told = await spy.communicate()
            if spy.returncode:
                raise RuntimeError(f"py-spy failed: {told.decode()}")
            return (spent.client_us if clients else spent.server_us), out.read_text().splitlines()


def tables(us: float, stacks: list[str]) -> str:
    modules: Counter[str] = Counter()
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        modules[frames[-1].partition(" ")[2].partition(":")[0]] += int(count)
        own[frames[-1]] += int(count)
        within.update(dict.fromkeys(frames, int(count)))
    total = sum(own.values()) or 1
    text = [f"{us:.1f} us of CPU per operation; {total} samples"]
    for title, counter in (("by module", modules), ("by function", own), ("with what it calls", within)):
        text += ["", f"{title:<70}    share       us"]
        for name, count in counter.most_common(ROWS):
            text.append(f"{name:<70} {count / total:>8.1%} {us * count / total:>8.2f}")
    return "\n".join(text)


def _short(frame: str) -> str:
    """`function (path/file.py)` as `function file.py`, with the folder."""
    name, _, path = frame.partition(" (")
    return f"{name} {'/'.join(path.rstrip(')').split('/')[-2:])}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeper_profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--py-spy", default="py-spy", help="the program; by default the one in PATH")
    parser.add_argument("--job", default="set", choices=JOBS)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--one-name", action="store_true", help="of a lock: all on one name")
    parser.add_argument("--clients", action="store_true", help="look at the process of clients instead of the keeper")
    given = parser.parse_args()
    sides = {"one_name": given.one_name, "clients": given.clients}
    print(tables(*asyncio.run(record(given.py_spy, given.job, given.in_flight, given.seconds, **sides))))


if __name__ == "__main__":
    main()
