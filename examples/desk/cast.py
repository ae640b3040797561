"""The processes of the desk: keeper, agents, leads, workers, task manager; started, killed with -9, replaced, stopped.

All of them belong to whoever made the `Cast` and end with it. What they have to say goes to files in its folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import holdfast
from desk.flows import FOLDER, STEP_S
from desk.roles import AGENTS, SPACE
from holdfast.clock import SystemClock
from holdfast.identity import Role
from holdfast.layers.tokens import Tokens
from holdfast.testing.servers.keeper import KeeperServer

EXAMPLES = Path(__file__).resolve().parents[1]
LEADS, WORKERS, MANAGER = ["ada", "grace"], ["worker-1", "worker-2"], "manager"
ROLES = {
    **dict.fromkeys(AGENTS, "agent"),
    **dict.fromkeys(LEADS, "lead"),
    **dict.fromkeys(WORKERS, "worker"),
    MANAGER: "manager",
}
STOP_S_MAX = 10.0


@dataclass
class Kill:
    """A process that was killed with -9, and who took over."""

    name: str
    when: str
    successor: str = ""


@dataclass
class Cast:
    folder: Path
    lease_s: float
    step_s: float
    keeper: KeeperServer = field(init=False)
    tokens: dict[str, str] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    pids: dict[int, str] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keeper = KeeperServer(self.folder)

    @property
    def url(self) -> str:
        return self.keeper.url

    async def make_tokens(self, store: holdfast.Store) -> None:
        """One for each; agents are agents, and whoever leads, runs workflows or tasks is an orchestrator."""
        tokens = Tokens(store.engine, SystemClock(), "director")
        for name, part in ROLES.items():
            role: Role = "agent" if part == "agent" else "orchestrator"
            self.tokens[name], _ = await tokens.create(name, SPACE, role)

    def start(self, name: str) -> None:
        """Start a process, or its next life."""
        life = self.lives[name] = self.lives.get(name, 0) + 1
        if ROLES[name] == "manager":
            command = [sys.executable, "-m", "holdfast.manager", "--store", self.url, "--space", SPACE]
            command += ["--idle", "30s", "--grace", "1s", "--allow-module", "desk.flows"]
        else:
            command = [sys.executable, "-m", "desk.roles", ROLES[name], self.url, str(self.folder)]
            command += [str(life), str(self.lease_s)]
        environment = {
            **os.environ,
            "HOLDFAST_TOKEN": self.tokens[name],
            "XDG_STATE_HOME": str(self.folder),  # where a manager has its lock
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
            FOLDER: str(self.folder),
            STEP_S: str(self.step_s),
        }
        with (self.folder / f"{name}.errors").open("ab") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, cwd=self.folder
            )
        self.running[name] = process
        self.pids[process.pid] = name

    def kill(self, name: str, when: str) -> Kill:
        """kill -9."""
        process = self.running.pop(name)
        process.kill()
        process.wait()
        self.kills.append(Kill(name, when))
        return self.kills[-1]

    def kill_keeper(self) -> Kill:
        self.keeper.kill()
        self.kills.append(Kill("keeper", "with everybody connected"))
        return self.kills[-1]

    def died(self, name: str) -> bool:
        """Whether this one was killed, by its own hand: then it is no longer among those that run."""
        process = self.running.get(name)
        if process is None or process.poll() != -signal.SIGKILL:
            return False
        del self.running[name]
        return True

    def check(self, *, mortal: str | None = None) -> None:
        """Raise if somebody ended who should not have."""
        for name, process in self.running.items():
            if process.poll() is not None and name != mortal:
                raise RuntimeError(f"{name} ended with {process.returncode}: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.errors").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    async def end(self) -> None:
        """Wait until everybody has gone home; the manager is told to."""
        self.running[MANAGER].terminate()
        for name, process in self.running.items():
            if await asyncio.to_thread(process.wait, 30) != 0:
                raise RuntimeError(f"{name} ended with {process.returncode}: {self.last_words(name)}")

    def stop(self) -> None:
        """Whatever still runs is ended, whatever happened before."""
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.keeper.stop()
