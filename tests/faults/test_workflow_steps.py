"""Workers that do steps of a queue, killed with -9 in the middle of them: every step counts once. HOLDFAST_SOAK=1 kills more."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import holdfast
from tests.faults.driver import ROOT
from tests.faults.serving_steps import SPACE, film

SOAK = os.environ.get("HOLDFAST_SOAK") == "1"
SCENES = 400 if SOAK else 24
KILLS = 40 if SOAK else 2
LEASE = "1s"
DEADLINE = "600s" if SOAK else "60s"


async def test_steps_of_a_queue_count_once_whatever_is_killed(tmp_path: Path) -> None:
    url, rng = str(tmp_path / "team.db"), random.Random(7)
    command = [sys.executable, "-m", "tests.faults.serving_steps", json.dumps({"url": url, "lease": LEASE})]

    with (tmp_path / "workers.log").open("ab") as log:

        def spawn() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

        async with holdfast.open(url) as store:
            workflows = store.space(SPACE, agent="boss").workflows
            async with workflows.worker([film], lease=LEASE):
                serving = [spawn(), spawn()]
                try:
                    handle = await workflows.start(film, SCENES)
                    killed = 0
                    async with asyncio.timeout(60):
                        while killed < KILLS:
                            held = (await store.space(SPACE, agent="boss").queue("gpu").stats()).reserved
                            if held:  # somebody is in the middle of a step
                                place = rng.randrange(2)
                                serving[place].kill()
                                serving[place].wait()
                                serving[place] = spawn()
                                killed += 1
                                await asyncio.sleep(0.3)
                            await asyncio.sleep(0.01)
                    found = await handle.result(DEADLINE)
                finally:
                    for process in serving:
                        process.kill()
                        process.wait()
            text = (tmp_path / "workers.log").read_text()[-4000:]
            assert found == {"frames": [n * 10 for n in range(SCENES)], "rendered": SCENES}, text
            state = await handle.state()
            assert sorted(state["scenes"]) == list(range(SCENES))
            stats = await store.space(SPACE, agent="boss").queue("gpu").stats()
            assert (stats.message_count, stats.reserved, stats.dead) == (0, 0, 0)
