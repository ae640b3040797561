"""How the tests call the command line: in this process for the many small ones, as a real command for the main paths.

In this process means `holdfast.cli.main`, not typer's runner: the boundary that turns errors into sentences and exit codes
is part of what is tested.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main

COMMAND = str(Path(sys.executable).with_name("holdfast"))
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err)


class _Terminal(io.TextIOWrapper):
    """A stdin nobody types into."""

    def isatty(self) -> bool:
        return True


Cli = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test stands in an empty folder that is a project of its own, without settings from outside."""
    home = tmp_path / "project"
    (home / ".git").mkdir(parents=True)
    monkeypatch.chdir(home)
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    return home


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process. Without `stdin` it is as if at a terminal."""

    def run(*args: str, stdin: str | bytes | None = None, code: int | None = 0) -> Outcome:
        given = stdin.encode() if isinstance(stdin, str) else stdin or b""
        source = (_Terminal if stdin is None else io.TextIOWrapper)(io.BytesIO(given))
        streams = {"stdin": source, "stdout": io.TextIOWrapper(io.BytesIO()), "stderr": io.TextIOWrapper(io.BytesIO())}
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            ended = main(args)
        printed = []
        for name in ("stdout", "stderr"):
            streams[name].flush()
            printed.append(streams[name].buffer.getvalue().decode())  # type: ignore[attr-defined]
        outcome = Outcome(ended, *printed)
        if code is not None:
            assert outcome.code == code, outcome
        return outcome

    return run


@pytest.fixture
def command() -> Cli:
    """Run the real command, as a process of its own."""

    def run(*args: str, stdin: str | bytes = b"", code: int | None = 0, **options: Any) -> Outcome:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run([COMMAND, *args], input=given, capture_output=True, timeout=DEADLINE_S, **options)
        outcome = Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
        if code is not None:
            assert outcome.code == code, outcome
        return outcome

    return run


@pytest.fixture
def shell() -> Callable[[str], Outcome]:
    """Run a line of shell, in which `holdfast` is the real command."""

    def run(line: str) -> Outcome:
        path = f"{Path(COMMAND).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line], env={**os.environ, "PATH": path}, capture_output=True, timeout=DEADLINE_S
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def files(folder: Path) -> dict[str, bytes]:
    """Everything under a folder, to see that nothing changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
