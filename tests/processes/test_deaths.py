"""Whoever is killed, nothing is left running that nobody answers for, and what can go on goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.processes import Launcher, settle_leftovers
from holdfast.processes.zygote import LEAVING_MS_MAX
from tests.processes.conftest import MakeOrder, below, first_line, is_alive, living, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = "tests.processes.targets"
ROOT = Path(__file__).parent.parent.parent

popen = subprocess.Popen


@contextmanager
def manager(marker: str, *functions: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.processes.manager", marker, *functions]
    with popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()
            for left in living(marker):  # of a test that failed
                left.kill()


def everybody(pid: int) -> list[int]:
    return [pid, *(process.pid for process in below(pid))]


async def gone(pids: list[int]) -> bool:
    """Sooner than the zygote would kill wardens that do nothing."""
    return await until(lambda: not any(is_alive(pid) for pid in pids), LEAVING_MS_MAX / 1000 - 1)


async def test_a_manager_killed_with_9_leaves_nothing() -> None:
    functions = ("ignore_term", "fork_twice [true]", "spin_in_children [2]", "sleep")
    with manager("dead-manager", *functions) as (process, told):
        pids = everybody(process.pid)
        assert len(pids) >= 1 + 1 + 4 + 7
        assert {child["target"] for child in told["children"]} <= set(pids)
        process.kill()
        assert await gone(pids), living("dead-manager")


async def test_a_manager_and_its_zygote_killed_at_once_leave_nothing() -> None:
    with manager("dead-pair", "ignore_term", "fork_twice [true]") as (process, told):
        pids = everybody(process.pid)
        os.kill(told["zygote"], signal.SIGKILL)
        process.kill()
        assert await gone(pids)


async def test_when_all_are_killed_at_once_the_next_manager_settles_what_is_left() -> None:
    with manager("dead-all", "fork_twice [true]", "spin_in_children [2]") as (process, told):
        pids = everybody(process.pid)
        bystander = popen(["sleep", "60"], env={"HOLDFAST_TASK": "dead-allies/1"})
        keepers = [process.pid, told["zygote"], *(child["warden"] for child in told["children"])]
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)  # so that none can act on another's death
        for pid in keepers:
            os.kill(pid, signal.SIGKILL)
        # Targets die with their wardens.
        assert await gone([*keepers, *(child["target"] for child in told["children"])])
        left = [pid for pid in pids if is_alive(pid)]
        assert len(left) == 3  # a daemon and two children
        assert await settle_leftovers("dead-all/0") == 1
        assert await settle_leftovers("dead-all/", below=True) == 2
        assert await gone(pids)
        assert await settle_leftovers("dead-all/", below=True) == 0
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()


async def test_leftovers_of_a_function_are_found_though_it_executed_nothing(
    launcher: Launcher, order: MakeOrder
) -> None:
    wanted = order(function=f"{HERE}:spin_in_children", args=[1])
    child = await launcher.start(wanted)
    await first_line(child)
    assert await settle_leftovers(wanted.marker) >= 3
    assert (await child.wait()).reason == "lost"


async def test_settling_never_ends_the_one_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import asyncio, os\n"
        "from holdfast.processes import settle_leftovers\n"
        "print(asyncio.run(settle_leftovers('nested/1')))\n"
    )
    env = {**os.environ, "HOLDFAST_TASK": "nested/1"}
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, script]
    done = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n")


async def test_a_warden_killed_with_9_takes_its_tree_along_and_no_other(launcher: Launcher, order: MakeOrder) -> None:
    other = await launcher.start(order("sleep", "600"))
    child = await launcher.start(
        order(function=f"{HERE}:fork_twice", args=[True], kwargs={"change_session": True, "hide": True})
    )
    daemon = int(await first_line(child))
    os.kill(psutil.Process(child.pid).ppid(), signal.SIGKILL)
    ended = await child.wait()
    assert (ended.reason, ended.code, ended.signal) == ("lost", 137, signal.SIGKILL)
    assert not is_alive(daemon)
    assert not is_alive(child.pid)
    assert is_alive(other.pid)
    assert (await other.kill()).reason == "killed"


async def test_a_zygote_killed_with_9_is_replaced_and_running_children_go_on(
    launcher: Launcher, order: MakeOrder
) -> None:
    child = await launcher.start(order("sh", "-c", "read line; echo got $line", interactive=True))
    first = launcher.zygote_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    quick = await launcher.start(order("true"))
    assert (await quick.wait()).code == 0
    assert launcher.zygote_pid not in (None, first)
    await child.write(b"it\n")
    assert await first_line(child) == "got it"
    assert (await child.wait()).code == 0


async def test_a_warden_without_a_zygote_that_is_killed_leaves_nothing(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order(function=f"{HERE}:fork_twice", args=[True], kwargs={"change_session": True}))
    daemon = int(await first_line(child))
    warden = psutil.Process(child.pid).ppid()
    os.kill(launcher.zygote_pid or 0, signal.SIGKILL)
    os.kill(warden, signal.SIGKILL)
    assert (await child.wait()).reason == "lost"
    assert not is_alive(daemon)


async def test_zygotes_killed_again_and_again_lose_no_launch(launcher: Launcher, order: MakeOrder) -> None:
    async def one(number: int) -> None:
        child = await launcher.start(order("sh", "-c", f"exit {number}"))
        assert (await child.wait()).code == number

    launches = [asyncio.ensure_future(one(number)) for number in range(12)]
    for _ in range(2):
        await asyncio.sleep(0.02)
        if launcher.zygote_pid is not None:
            os.kill(launcher.zygote_pid, signal.SIGKILL)
    await asyncio.gather(*launches)


async def test_a_warden_that_does_not_answer_is_killed_with_its_tree(launcher: Launcher, order: MakeOrder) -> None:
    child = await launcher.start(order("sleep", "600"))
    warden = psutil.Process(child.pid).ppid()
    os.kill(launcher.zygote_pid or 0, signal.SIGSTOP)  # or it would continue the warden
    os.kill(warden, signal.SIGSTOP)
    killing = asyncio.ensure_future(child.kill())
    assert await until(lambda: not is_alive(warden))
    os.kill(launcher.zygote_pid or 0, signal.SIGCONT)
    ended = await killing
    assert (ended.reason, ended.code) == ("killed", 137)
    assert not is_alive(child.pid)


async def test_a_fork_of_the_manager_does_not_hide_its_death() -> None:
    """As multiprocessing makes them: a copy of the manager's descriptors lives on in another process."""
    script = (
        "import asyncio, os, time\n"
        "from holdfast.processes import Launcher, Order\n"
        "async def main():\n"
        "    async with Launcher() as launcher:\n"
        "        child = await launcher.start(Order(argv=('sleep', '600'), marker='forked-manager/1'))\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            os.closerange(0, 3)\n"
        "            time.sleep(30)\n"
        "        print(child.pid, pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        target, copy = map(int, process.stdout.readline().split())
        process.kill()
        assert await gone([target])
        assert is_alive(copy)
        os.kill(copy, signal.SIGKILL)
