"""A process whose children run executions and die: each at a commit of its own, by its own kill -9. Driven by `test_workflow_crashes.py`.

Reads a line of JSON for each child: the store, and at which commit it dies. Prints how it ended. Children are forked, because
to import everything anew takes longer than to live.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import holdfast
from holdfast.layers.workflows import running
from holdfast.testing.dying import Dying, Life
from tests.layers import test_workflow_crashes as programs

LEASE = "700ms"
SPEED = 100.0
HOLD_MS = 10
LIFE_S_MAX = 60


def hurry() -> None:
    """Time passes a hundred times faster, and waits are put aside all the same."""
    programs.SPEED = SPEED
    running.HOLD_MS = HOLD_MS  # type: ignore[misc]


async def live(url: str, token: str | None, name: str, at: int, after: bool) -> None:
    async with holdfast.open(url, token=token, background=False) as store:
        space = store.space(name, agent="boss")
        with tempfile.TemporaryDirectory() as folder:
            life = Life(space, Path(folder), [programs.interpret], at, after=after, lease=LEASE, queues=["q"])
            await asyncio.wait_for(die(life.engine), LIFE_S_MAX)


async def die(engine: Dying) -> None:
    await engine.dead.wait()
    while engine.dying:  # the commit after which it dies is under way
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    hurry()
    for line in sys.stdin:
        given: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if not pid:
            asyncio.run(live(given["url"], given["token"], given["space"], given["at"], given["after"]))
            os._exit(0)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}), flush=True)


if __name__ == "__main__":
    main()
