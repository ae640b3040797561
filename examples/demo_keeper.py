"""A keeper and agents over the network: leaders are killed with -9, others take over with a higher epoch; so is the keeper.

    python examples/demo_keeper.py [--seconds 10] [--agents 4]

A keeper (`holdfast serve`) is started on free ports of the loopback. Agents connect with tokens of their own and stand for
election. Whoever leads counts one beat after the other, through `term.space`: the store refuses a beat the moment the lease
is lost. The director kills leaders with -9, and once the keeper itself, which comes back on the same file within the lease
of its leader, who just goes on. All is seen in the feed. At the end it must show: epochs only rise, every beat was written
by the leader of its epoch, and every beat that a leader was told of is there, once. Exit code 0 means that it is so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import holdfast
from holdfast import increment, set_

NAMES = ["ada", "barbara", "grace", "katherine", "margaret", "radia"]
SPACE = "desk"
TTL = "2s"
BEAT_S = 0.02


# --- an agent: runs in a process of its own, and knows a URL and a token ---


async def agent(url: str, notes: Path) -> None:
    told = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    director = os.getppid()
    store = await found(url, director)
    try:
        space = store.space(SPACE)
        while await space.records.get("open") and os.getppid() == director:
            try:
                async with space.election("leader", ttl=TTL) as term:
                    await lead(term, told)
            except (holdfast.LockAcquisitionError, holdfast.LeaseLost, holdfast.Unavailable):
                continue
    finally:
        await store.close()


async def found(url: str, director: int) -> holdfast.Store:
    """The store. An agent that starts while the keeper is down waits for it; one that is connected does so by itself."""
    while True:
        try:
            return await holdfast.open(url, token=os.environ["HOLDFAST_TOKEN"])
        except holdfast.Unavailable:
            if os.getppid() != director:
                raise
            await asyncio.sleep(0.1)


async def lead(term: holdfast.Guard, told: int) -> None:
    """Count, for as long as the store lets this leader."""
    while await term.space.records.get("open"):
        beat = {"agent": term.space.agent, "epoch": term.epoch}
        receipt = await term.space.commit(increment("beats"), set_("last", beat))
        os.write(told, f"{receipt.results[0]} {term.epoch}\n".encode())
        await asyncio.sleep(BEAT_S)


# --- the director ---


@dataclass
class Beat:
    """One beat of the feed."""

    number: int
    agent: str
    epoch: int


@dataclass
class Director:
    folder: Path
    console: Console
    agents: list[str]
    keeper: subprocess.Popen[bytes] | None = None
    token: str = ""
    url: str = ""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    beats: list[Beat] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.began:5.1f} s  {text}", highlight=False, soft_wrap=True)

    # --- the keeper ---

    def start_keeper(self) -> None:
        binary, http = free_port(), free_port()
        listen = {"binary": f"127.0.0.1:{binary}", "http": f"127.0.0.1:{http}"}
        (self.folder / "keeper.yaml").write_text(json.dumps({"store": "resident:team.db", "listen": listen}))
        self.url = f"holdfast://127.0.0.1:{binary}"
        ready = self.run_keeper()
        self.token = ready["admin_token"]
        self.say(f"a keeper serves {self.url} and {ready['http']}; ready in {ready['seconds']:.2f} s")

    def run_keeper(self) -> dict[str, str]:
        command = [sys.executable, "-m", "holdfast", "serve", "--config", str(self.folder / "keeper.yaml"), "--json"]
        with (self.folder / "keeper.errors").open("ab") as errors:
            self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL)
        assert self.keeper.stdout is not None
        line = self.keeper.stdout.readline()
        if not line:
            raise RuntimeError(f"the keeper did not start: {(self.folder / 'keeper.errors').read_text()[-300:]}")
        ready: dict[str, str] = json.loads(line)
        return ready

    # --- the agents ---

    def make_token(self, name: str) -> str:
        command = [
            sys.executable,
            "-m",
            "holdfast",
            "token",
            "create",
            name,
            "--space",
            SPACE,
            "--role",
            "agent",
            "--json",
        ]
        made = subprocess.run(
            [*command, "--store", self.url],
            env={**os.environ, "HOLDFAST_TOKEN": self.token},
            check=True,
            capture_output=True,
        )
        return str(json.loads(made.stdout)["token"])

    def start_agent(self, name: str) -> None:
        if name not in self.tokens:
            self.tokens[name] = self.make_token(name)
        command = [sys.executable, __file__, "--agent", self.url, "--notes", str(self.folder / f"{name}.notes")]
        with (self.folder / f"{name}.errors").open("ab") as errors:
            self.running[name] = subprocess.Popen(
                command,
                env={**os.environ, "HOLDFAST_TOKEN": self.tokens[name]},
                stdin=subprocess.DEVNULL,
                stderr=errors,
            )

    # --- the play ---

    async def run(self, seconds: float) -> bool:
        await asyncio.to_thread(self.start_keeper)
        async with holdfast.open(self.url, token=self.token) as store:
            space = store.space(SPACE, agent="director")
            await space.records.set("open", True)
            watching = asyncio.create_task(self.watch(space, await space.cursor()))
            for name in self.agents:
                await asyncio.to_thread(self.start_agent, name)
            self.say(f"{len(self.agents)} agents stand for election, each in a process of its own with its own token")
            await self.until(lambda: bool(self.beats))
            for act in (self.kill_leader, self.kill_keeper, self.kill_leader):
                await asyncio.sleep(seconds / 4)
                await act()
            await asyncio.sleep(seconds / 4)
            await space.records.set("open", False)
            for process in self.running.values():
                await asyncio.to_thread(process.wait, 30)
            await space.records.set("closed", True)
            await asyncio.wait_for(watching, 30)
        return self.verdict()

    async def watch(self, space: holdfast.Space, cursor: str) -> None:
        """Follow the feed; it goes on by itself when the keeper comes back."""
        async for commit in space.watch(cursor=cursor):
            changes = {change.key: change for change in commit}
            if "beats" in changes:
                last = changes["last"].value
                beat = Beat(int(changes["beats"].value), commit.actor, last["epoch"])
                if not self.beats or self.beats[-1].epoch != beat.epoch:
                    self.say(f"[bold green]{beat.agent} leads[/], epoch {beat.epoch}, from beat {beat.number} on")
                self.beats.append(beat)
            if "closed" in changes:
                return

    async def kill_leader(self) -> None:
        name, epoch = self.beats[-1].agent, self.beats[-1].epoch
        self.running[name].kill()
        self.running[name].wait()
        self.say(f"[bold red]kill -9 {name}[/], who leads in epoch {epoch}")
        await self.until(lambda: self.beats[-1].epoch > epoch)
        await asyncio.to_thread(self.start_agent, name)
        self.say(f"{name} is back, and stands in line")

    async def kill_keeper(self) -> None:
        assert self.keeper is not None
        before = self.beats[-1]
        self.keeper.kill()
        self.keeper.wait()
        self.say("[bold red]kill -9 of the keeper[/]")
        ready = await asyncio.to_thread(self.run_keeper)
        self.say(f"the keeper is back, ready in {ready['seconds']:.2f} s")
        await self.until(lambda: self.beats[-1].number > before.number)
        same = self.beats[-1].epoch == before.epoch
        self.say(
            f"beat {self.beats[-1].number}: {self.beats[-1].agent} " + ("leads on, same epoch" if same else "took over")
        )

    async def until(self, happened: object, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not happened():  # type: ignore[operator]
                for name, process in self.running.items():
                    if process.poll() not in (None, 0, -signal.SIGKILL):
                        raise RuntimeError(f"{name} failed: {(self.folder / f'{name}.errors').read_text()[-300:]}")
                await asyncio.sleep(0.02)

    def verdict(self) -> bool:
        told: dict[int, int] = {}
        doubled = 0
        for name in self.agents:
            path = self.folder / f"{name}.notes"
            for line in path.read_text().splitlines() if path.exists() else ():
                number, epoch = map(int, line.split())
                doubled += number in told
                told[number] = epoch
        seen = {beat.number: beat.epoch for beat in self.beats}
        epochs = [beat.epoch for beat in self.beats]
        leaders = {(beat.epoch, beat.agent) for beat in self.beats}
        lines = [
            (epochs == sorted(epochs), f"{len(set(epochs))} epochs, which only rise"),
            (len(leaders) == len(set(epochs)), "every beat was written by the leader of its epoch"),
            (
                [beat.number for beat in self.beats] == list(range(1, len(self.beats) + 1)),
                f"{len(self.beats)} beats, no gap, none twice",
            ),
            (
                not doubled and all(seen.get(number) == epoch for number, epoch in told.items()),
                f"{len(told)} of them acknowledged, all there",
            ),
        ]
        table = Table(box=None, show_header=False)
        for holds, text in lines:
            table.add_row("[bold green]ok[/]" if holds else "[bold red]NO[/]", text)
        self.console.print(table)
        return all(holds for holds, _ in lines)

    def stop(self) -> None:
        for process in (*self.running.values(), *([self.keeper] if self.keeper else [])):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--agents", type=int, default=4)
    for inner in ("--agent", "--notes"):  # how the director starts its agents
        parser.add_argument(inner, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        asyncio.run(agent(options.agent, Path(options.notes)))
        return 0
    console = Console()
    with tempfile.TemporaryDirectory(prefix="holdfast-keeper-demo-") as folder:
        director = Director(Path(folder), console, NAMES[: options.agents])
        try:
            return 0 if asyncio.run(director.run(options.seconds)) else 1
        except KeyboardInterrupt:
            console.print("stopped")
        except (RuntimeError, TimeoutError, holdfast.Error, OSError, subprocess.CalledProcessError) as exc:
            console.print(f"failed: {exc!r}", style="bold red", soft_wrap=True)
        finally:
            director.stop()
    return 1


if __name__ == "__main__":
    sys.exit(main())
