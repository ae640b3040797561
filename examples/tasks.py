"""Tasks that survive their manager: one is killed with -9 in the middle, the next takes its work over, nothing is lost."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import holdfast
from holdfast import TaskRetry, TaskSpec, ensure_manager

PROGRAM = "import sys, time; print('working on', sys.stdin.read().strip(), flush=True); time.sleep(0.3)"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with holdfast.open(str(Path(folder, "team.db"))) as store:
            space = store.space("contoso", agent="desk")
            command = (sys.executable, "-c", PROGRAM)
            spec = TaskSpec(command=command, stream_output=True, retry=TaskRetry(backoff="50ms"))
            handles = [await space.tasks.submit(spec, name) for name in ("MSFT", "AAPL", "SAP")]
            first = await ensure_manager(space, lease="1s", idle="30s")
            text = ""
            async for chunk in handles[0].stream():
                text += chunk.data.decode()
                if "\n" in text:
                    print(text.strip())
                    break
            os.kill(first.pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{first.pid}/exe"):  # noqa: ASYNC110 - nobody tells of its death
                await asyncio.sleep(0.01)
            print("the manager was killed; the task says:", await handles[0].status())
            second = await ensure_manager(space, lease="1s", idle="30s")
            outputs = [await handle.result("30s") for handle in handles]
            print("done:", [output.decode().split()[-1] for output in outputs])
            print("attempts:", max([(await handle.state()).attempt for handle in handles]))
            print("by another manager:", (await handles[0].state()).manager == second.tid)
            await (await space.tasks.get(second.tid)).stop()


asyncio.run(main())
