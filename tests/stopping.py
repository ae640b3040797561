"""Processes that are stopped for a while, as by a debugger or a machine that sleeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil


def stop(pid: int, store: str) -> None:
    """SIGSTOP, while it has not the turn to write to a SQLite file, nor waits for it: nobody else would get it before it goes on."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        if not _has_the_turn(pid, store):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


def _has_the_turn(pid: int, store: str) -> bool:
    beside = [Path(f"{store}{end}") for end in ("-lock", "-turn")]
    inodes = {str(path.stat().st_ino) for path in beside if path.exists()}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.replace("->", " ").split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:12345 0 EOF
        if fields[1] == "FLOCK" and fields[4] == str(pid) and fields[5].rpartition(":")[2] in inodes:
            return True
    return False
