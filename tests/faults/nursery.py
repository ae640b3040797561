"""Processes for tests that kill many: forked from one that has imported everything, which takes a hundredth of a start.

`start` gives a child that runs `main(**settings)` of a module. It is a process like any other, with its own connections and
files: nothing is open in the nursery but its pipes. The nursery is told what to do in lines of JSON: `{"start": module, …}` is
answered with the child's process id, `{"poll": pid}` with its exit code or null, `{"wait": pid}` with its exit code once it has
ended. When its standard input ends it kills whoever is left, so that nobody outlives the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("sqlite", "resident", "redis_engine", "postgres", "remote")
"""Their drivers are imported when a store is opened; here, before."""


class Child:
    """One of its processes, in the words of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"wait": self.pid})
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, which: signal.Signals) -> None:
        if self.poll() is None:  # nobody else can have its number before it is collected
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process, as a test holds it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.nursery"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lock = threading.Lock()

    def start(self, module: str, settings: dict[str, Any], log: Path, environment: dict[str, str]) -> Child:
        """Run `main(**settings)` of a module in a process whose output goes to the end of `log`."""
        order = {"start": module, "settings": settings, "log": str(log), "environment": environment}
        return Child(self, self.ask(order))

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


_nursery: Nursery | None = None


def start(module: str, settings: dict[str, Any], log: Path, **environment: str) -> Child:
    """A process of the nursery, which is started when it is first needed; `environment` is added to that of the test."""
    global _nursery
    if _nursery is None:
        _nursery = Nursery()
    return _nursery.start(module, settings, log, {**os.environ, **environment})


def close() -> None:
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


# --- in the nursery ---


def _serve() -> None:
    children: set[int] = set()
    for engine in ENGINES:
        importlib.import_module(f"holdfast.engines.{engine}")
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            importlib.import_module(asked["start"])
            pid = os.fork()
            if not pid:
                _live(asked)
            children.add(pid)
            answer: int | None = pid
        else:
            pid, status = os.waitpid(asked.get("poll", asked.get("wait")), os.WNOHANG if "poll" in asked else 0)
            children.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _live(order: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, stream in enumerate((nothing, log, log)):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(order["environment"])
        random.seed()
        asyncio.run(sys.modules[order["start"]].main(**order["settings"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
