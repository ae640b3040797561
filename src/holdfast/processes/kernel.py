"""What Linux offers for keeping processes together, and Python's library does not reach.

- A *subreaper* becomes the parent of every orphan below it, so that nothing it started can leave it, however often it forks
  and whatever session it makes.
- A *parent death signal* ends a process when its parent dies, also when that was killed.
- A *pidfd* names one process, not whoever has its number by now.
- `/proc/<pid>/environ` shows the memory that held the environment when the program was started. A process that forked and
  did not exec can write its marker there (`Slot`); what it sets later in `os.environ` would not be seen.

Everything here is Linux; `check` says so on other systems.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

from holdfast.errors import InvalidInput

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

SLOT_VARIABLE: Final = "HOLDFAST_SLOT"
"""Reserves the room of a marker at the end of an environment."""


def check() -> None:
    """Raise where trees of processes cannot be controlled."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/stat"):
        raise InvalidInput(
            "processes are controlled on Linux alone, with /proc mounted: elsewhere nothing keeps a tree of processes together"
        )


def become_subreaper() -> None:
    """Be the parent of every orphan among one's descendants from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the parent dies. The parent may have died already: compare os.getppid() afterwards."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def started_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; with its number it names the process for good."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal the process that has this number and started then; tells whether it is still there."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # From here on the descriptor names one process; if it is the right one now, it stays the right one.
        if started_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Slot:
    """The place in this process's original environment where a marker can be written."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._at = 0
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end
        with open("/proc/self/environ", "rb") as file:
            found = file.read(end - start).rfind(f"{SLOT_VARIABLE}=".encode())
        if found >= 0 and room <= end - start - found:
            self._at = start + found

    def write(self, text: str) -> None:
        """Show this text as a variable of the environment; nothing happens where no room was reserved."""
        if self._at:
            ctypes.memmove(self._at, text.encode()[: self._room - 1].ljust(self._room, b"\0"), self._room)
