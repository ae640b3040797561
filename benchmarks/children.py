"""Processes of a benchmark: modules of this package, told what to do by JSON lines and answering in kind.

A child waits for its next order with a plain blocking read. Its event loop stands still meanwhile, so what its store
would do in the background (sealing, above all) is done in its own turns and not in a peer's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PATIENCE_S: Final = 30.0


class Child:
    """A running module; it ends when it is told nothing more."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")

    def answer(self) -> dict[str, Any]:
        """Its next line; an error when it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended early, with {self._process.wait(PATIENCE_S)}")
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()


@contextmanager
def children(count: int, module: str, *arguments: str) -> Iterator[list[Child]]:
    """So many processes, each of which has said that it is ready."""
    started: list[Child] = []
    try:
        for _ in range(count):
            started.append(Child(module, *arguments))
        for child in started:
            child.answer()
        yield started
    finally:
        for child in started:
            child.end()


def orders() -> Iterator[dict[str, Any]]:
    """In a child: what it is told, until nothing more comes."""
    for line in sys.stdin:
        yield json.loads(line)


def say(**told: Any) -> None:
    """In a child: answer."""
    print(json.dumps(told), flush=True)
