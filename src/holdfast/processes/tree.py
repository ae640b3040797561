"""The descendants of a process: found, measured, stopped and signalled, by reading /proc.

A tree changes while it is looked at. Three facts of Linux make it tractable: a process that stands still (state T) forks
nothing; one that has SIGKILL pending finishes no fork; and the children of a subreaper's dead descendants become the subreaper's
own. SIGSTOP alone is not enough: a fork that is under way when it arrives is finished first. So `freeze` walks top-down and
stops whoever moves until a walk finds everybody still. Numbers are reused; a member is a number and a start time, and is
signalled through a pidfd (kernel.py).

Resident memory is summed over the members. Forks share pages, so the sum can be too high; where it is above a limit, the
proportional share (PSS), which is dearer to read, decides.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from typing import Final, NamedTuple

from holdfast.processes.kernel import send

ROUNDS_MAX: Final = 100
"""Walks of one freeze. Whoever is not still then is stopped by the next: a tree that is to stand still is looked at again."""
ROUND_S: Final = 0.001
KILLING_ROUNDS: Final = 3
"""Walks before a kill. They only keep a dying tree from changing its parents; the passes of its warden do the rest."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HAS_SHARES: Final = os.path.exists("/proc/self/smaps_rollup")
_STOPPED: Final = frozenset("TtZXx")


class Member(NamedTuple):
    """A process of a tree, as /proc/<pid>/stat shows it."""

    pid: int
    started: int
    """In ticks; with the pid it names the process for good."""
    state: str
    group: int
    session: int
    threads: int
    memory: int
    """Resident bytes."""
    cpu_seconds: float
    """Its own, and that of the children it waited for."""

    @property
    def is_dead(self) -> bool:
        return self.state in "ZXx"

    @property
    def is_still(self) -> bool:
        """Whether it uses no CPU until somebody continues it."""
        return self.state in _STOPPED


def look(pid: int) -> Member | None:
    """The process with this number, if there is one."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            data = file.read(4096)
    except OSError:
        return None
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 22:
        return None
    return Member(
        pid,
        started=int(fields[19]),
        state=fields[0].decode(),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        memory=int(fields[21]) * _PAGE,
        cpu_seconds=sum(map(int, fields[11:15])) / _TICKS,
    )


def children(pid: int, threads: int = 1) -> list[int]:
    """The numbers of a process's children; each belongs to the thread that forked it."""
    try:
        tasks = [str(pid)] if threads == 1 else os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found = []
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found += [int(number) for number in file.readall().split()]
        except OSError:
            continue
    return found


def members(root: int) -> Iterator[Member]:
    """The descendants of a process, parents first. Children are read after their parent was handed out."""
    waiting = children(root)
    seen = {root}
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        member = look(pid)
        if member is not None:
            yield member
            waiting += children(pid, member.threads)


def freeze(root: int, rounds: int = ROUNDS_MAX) -> bool:
    """Stop every descendant, also those that appear meanwhile; tells whether a walk found them all still."""
    for number in range(rounds):
        if number > 1:
            select.select([], [], [], ROUND_S)  # a running process stands still when it is next scheduled
        moving = 0
        for member in members(root):
            if not member.is_still:
                moving += 1
                send(member.pid, member.started, signal.SIGSTOP)
        if not moving:
            return True
    return False


def signal_all(root: int, number: signal.Signals) -> int:
    """Signal every descendant that lives; gives how many."""
    return sum(send(member.pid, member.started, number) for member in members(root) if not member.is_dead)


def kill_all(root: int, *, groups: bool = False) -> int:
    """Freeze and kill every descendant; gives how many lived. With `groups`, their process groups too.

    A group is signalled at once, with nobody able to fork out of it: against those who fork and die faster than they are
    read. It is for a root that is this process, and for groups of other sessions than its own: they began below it, where
    nobody else can be a member.
    """
    freeze(root, KILLING_ROUNDS)
    found, own_session = 0, os.getsid(0)
    for member in members(root):
        if not member.is_dead:
            found += send(member.pid, member.started, signal.SIGKILL)
        if groups and member.session != own_session and member.group > 1:
            try:
                os.killpg(member.group, signal.SIGKILL)
            except OSError:
                continue
    return found


class Use(NamedTuple):
    """What a tree uses."""

    memory: int
    cpu_seconds: float
    """Of all members, and of those they waited for."""
    fds: int
    processes: int


def measure(root: int, *, memory_limit: int | None = None) -> Use:
    """What the descendants of a process use now, all together."""
    found = list(members(root))
    living = [member for member in found if not member.is_dead]
    memory = sum(member.memory for member in living)
    if memory_limit is not None and memory > memory_limit:
        memory = _shares(living)
    fds = sum(_open_files(member.pid) for member in living)
    # Who is dead and not yet waited for still has its CPU time; afterwards its parent has it.
    return Use(memory, sum(member.cpu_seconds for member in found), fds, len(living))


def _shares(living: list[Member]) -> int:
    """The proportional shares of memory, summed. Read twice: who ends in between leaves its share to those read later."""
    return min(sum(map(_share, living)) for _ in range(2))


def _share(member: Member) -> int:
    """A process's proportional share of the memory it uses; resident memory where that may not be read."""
    try:
        with open(f"/proc/{member.pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.readall().splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except PermissionError:
        return member.memory
    except OSError:
        return 0 if _HAS_SHARES else member.memory
    return 0  # it has ended meanwhile


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
