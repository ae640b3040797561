"""One server process: started, waited for, stopped, killed, paused.

A server belongs to whoever started it. It runs in a session of its own, so that a Ctrl-C in the terminal reaches the
tests first, and it dies with the thread that started it (Linux: PR_SET_PDEATHSIG), even if its process is killed: start
servers in the main thread.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 30.0
"""How long a server may take to start, or to stop."""
PR_SET_PDEATHSIG: Final = 1
PORTS: Final = (15_000, 32_000)
"""Below those that Linux gives to outgoing connections."""


class MissingServer(Exception):
    """The program is not installed. Tests skip, and fail where CI=true."""


def find_program(name: str, *folders: str) -> str:
    """The path of a program, in PATH or in the folders packages use."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingServer(f"{name} is not installed; `scripts/system-packages` installs what the tests need")
    return found


def free_port(beside: int = 0) -> int:
    """A port of the loopback that nobody listens on, and that no outgoing connection is given meanwhile; the one `beside` it likewise."""
    first, last = PORTS
    while True:
        port = random.SystemRandom().randrange(first, last - beside)
        if all(map(_is_free, {port, port + beside})):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until(ready: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return when `ready` says so; TimeoutError, naming what was waited for, when it does not."""
    deadline = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s:g} s for {what}")
        time.sleep(0.01)


class ServerProcess:
    """A program that runs until it is told to stop; what it prints goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, *, user: str | None = None) -> None:
        self._command = list(command)
        self._log = log
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, ready: Callable[[], bool]) -> None:
        """Run it, and return when it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self._user,
                preexec_fn=_die_with_parent,
            )
        wait_until(lambda: self._ready(ready), f"{self._command[0]} to start; see {self._log}")

    def _ready(self, ready: Callable[[], bool]) -> bool:
        if not self.running:
            raise RuntimeError(f"{self._command[0]} ended at once:\n{self._log.read_text(errors='replace')[-2000:]}")
        return ready()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait for that; one that does not end is killed."""
        if self._process is None:
            return
        if self.running:
            if how != signal.SIGKILL:  # which ends one that is paused, too, and before it answers anybody
                self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """kill -9."""
        self.stop(signal.SIGKILL)

    def signal(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def pause(self) -> None:
        """SIGSTOP: alive, and silent, as behind a broken network. It may still run for a moment: wait until it does not."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def _die_with_parent() -> None:
    """In the child, before the program begins."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
