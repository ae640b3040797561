"""A manager for tests that kill it: `python -m tests.processes.manager MARKER FUNCTION …` starts each function and tells the pids."""

from __future__ import annotations

import asyncio
import json
import sys

import psutil

from holdfast.processes import Launcher, Order
from tests.processes.conftest import first_line


async def main(marker: str, functions: list[str]) -> None:
    async with Launcher() as launcher:
        told = []
        for number, function in enumerate(functions):
            name, _, args = function.partition(" ")
            wanted = Order(
                function=f"tests.processes.targets:{name}", args=json.loads(args or "[]"), marker=f"{marker}/{number}"
            )
            child = await launcher.start(wanted)
            told.append(
                {"target": child.pid, "warden": psutil.Process(child.pid).ppid(), "said": await first_line(child)}
            )
        print(json.dumps({"zygote": launcher.zygote_pid, "children": told}), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
