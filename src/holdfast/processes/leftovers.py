"""What is left when launcher, zygote and wardens were all killed at once: found by its marker and ended.

Every process of a tree has `HOLDFAST_TASK=<marker>` in its environment, functions that never executed a program included
(kernel.py, Slot). A program can remove it from the environment of what it starts, so the descendants of whoever is found are
ended with it; a process that did both, left its tree and hid its marker, is not found here. That takes a warden and a zygote
that were both killed, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

from holdfast.errors import OutcomeUnknown
from holdfast.processes import tree
from holdfast.processes.kernel import send
from holdfast.processes.orders import MARKER_VARIABLE

SETTLING_S_MAX: Final = 5.0
"""How long dying processes are waited for."""
SETTLING_S: Final = 0.005
"""Between two looks."""


async def settle_leftovers(marker: str, *, below: bool = False) -> int:
    """End every process that has this marker, and prove it; gives how many there were.

    With `below`, the marker is a beginning: `settle_leftovers("<store>/", below=True)` ends whatever a store's tasks left.
    This process, and those it descends from, are never ended.
    """
    killed: dict[tuple[int, int], tree.Member] = {}
    deadline = asyncio.get_running_loop().time() + SETTLING_S_MAX
    while True:
        found = find_leftovers(marker, below=below)
        for member in found:
            send(member.pid, member.started, signal.SIGSTOP)
        for member in found:
            tree.kill_all(member.pid)
            send(member.pid, member.started, signal.SIGKILL)
            killed[member[:2]] = member
        # Who is on its way out has no environment any more, and is not found above.
        living = [member.pid for member in killed.values() if is_living(member.pid, member.started)]
        if not found and not living:
            return len(killed)
        if asyncio.get_running_loop().time() > deadline:
            pids = ", ".join(map(str, living))
            raise OutcomeUnknown(
                f"processes of {marker!r} were killed and do not die: {pids}; the machine must let go of them"
            )
        await asyncio.sleep(SETTLING_S)


def is_living(pid: int, started: int) -> bool:
    """Whether the process that has this number and started then is not dead."""
    member = tree.look(pid)
    return member is not None and member.started == started and not member.is_dead


def find_leftovers(marker: str, *, below: bool = False) -> list[tree.Member]:
    """The living processes that have this marker."""
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    spared = _lineage()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spared:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                variables = file.readall().split(b"\0")
        except OSError:
            continue
        if wanted in variables or (below and any(variable.startswith(wanted) for variable in variables)):
            member = tree.look(int(name))
            if member is not None and not member.is_dead:
                found.append(member)
    return found


def _lineage() -> set[int]:
    """This process and its ancestors."""
    pid, lineage = os.getpid(), set[int]()
    while pid > 0 and pid not in lineage:
        lineage.add(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            break
    return lineage
