"""Eight agent processes share one SQLite file; some are killed with -9 in full work; nothing acknowledged is lost.

    python examples/demo.py [--seconds 10] [--agents 8] [--kills 6]

Each agent takes orders as fast as the store lets it. An order is one commit: a shared counter grows by one and the
order is written down, under a request id. Then the agent appends a line to a shared journal. Beside the store it keeps
notes of its own: `?` before a commit, `+` and the sum it was told after it, `j` after the journal's line.

Most kills come from outside, at random. One is aimed: an agent kills itself after the store has answered and before it
could write that down, the moment in which a naive retry counts twice. Whoever is killed is replaced. The successor reads the notes of the dead, finds the order that was asked for and never
answered, and asks again with the same request id: if it had been committed the store gives the same answer and does
nothing, otherwise it happens now. At the end the notes are compared with the store and with its feed, order by order.
Exit code 0 means that they agree; otherwise 1, and the files stay where the last line says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast import increment, set_

NAMES = ["market", "risk", "news", "research", "compliance", "pricing", "reporting", "execution"]
TICK_S = 0.2
ABSENCE_S = 0.6
"""How long a killed agent is missing before its successor starts."""
START_S_MAX = 30.0
PACE_TICKS = 24
BARS = " ▁▂▃▄▅▆▇█"


# --- an agent: runs in a process of its own ---


@dataclass
class Notes:
    """What an agent wrote down beside the store. All lives of an agent share one file."""

    asked: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    journalled: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Notes:
        notes = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, request, *total = line.split()
            if kind == "?":
                notes.asked.append(request)
            elif kind == "+":
                notes.told[request] = int(total[0])
            else:
                notes.journalled.append(request)
        return notes


async def agent(folder: Path, name: str, life: int, die_after_s: float) -> None:
    path = folder / f"{name}.notes"
    before = Notes.read(path)
    notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    director = os.getppid()
    dies_at = time.monotonic() + die_after_s if die_after_s else float("inf")

    async with holdfast.open(str(folder / "team.db")) as store:
        space = store.space("desk", agent=name, instance=str(life))

        async def order(request: str) -> None:
            receipt = await space.commit(
                increment("orders"),
                set_(
                    f"order/{request}", {"agent": name}
                ),  # the same for every life: a request id stands for its content
                request_id=request,
            )
            if time.monotonic() > dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(notes, f"+ {request} {receipt.results[0]}\n".encode())
            await space.records.append_to_list("journal", request)
            os.write(notes, f"j {request}\n".encode())

        for request in before.asked:
            if request not in before.told:
                await order(request)
        number = 0
        while await space.records.get("open") and os.getppid() == director:
            number += 1
            request = f"{name}-{life}-{number}"
            os.write(notes, f"? {request}\n".encode())
            await order(request)


# --- the director: starts agents, kills them, watches the feed ---


@dataclass
class Seat:
    """One agent's place: the process that has it now, and what the feed told of it."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    life: int = 0
    orders: int = 0
    orders_before: int = 0
    die_after_s: float = 0.0
    pace: deque[int] = field(default_factory=lambda: deque(maxlen=PACE_TICKS))
    counted: int = 0
    back_at: float = 0.0

    @property
    def at_work(self) -> bool:
        """Alive, and past its first order."""
        return self.process is not None and self.orders > self.orders_before

    def tick(self) -> None:
        self.pace.append(self.orders - self.counted)
        self.counted = self.orders


@dataclass
class Cut:
    """An order whose agent was killed before it heard the answer."""

    request: str
    committed: bool


class Demo:
    def __init__(self, folder: Path, agents: int, seconds: float, kills: int, console: Console) -> None:
        self.folder = folder
        self.seats = {name: Seat(name) for name in names(agents)}
        self.seconds = seconds
        self.kills = kills
        self.console = console
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.killed = 0
        self.cuts: list[Cut] = []
        self.news: deque[str] = deque(maxlen=6)
        self.feed: list[tuple[int, str]] = []  # version and request id of every order
        self.began = 0.0

    # --- what happens ---

    async def run(self) -> bool:
        async with holdfast.open(str(self.folder / "team.db")) as store:
            space = store.space("desk", agent="director")
            watcher = asyncio.create_task(self.watch(space, await space.cursor()))
            await space.records.set("open", True)
            try:
                await self.direct(space, watcher)
                await space.records.set("open", False)
                await asyncio.to_thread(self.wait_for_all)
                await space.records.set("closed", True)
                await asyncio.wait_for(watcher, timeout=30)
            finally:
                for seat in self.seats.values():
                    if seat.process and seat.process.poll() is None:
                        seat.process.kill()
                        seat.process.wait()
                watcher.cancel()
            verdict = Verdict()
            orders = [key.removeprefix("order/") for key in await space.records.keys("order/")]
            notes = {name: Notes.read(self.folder / f"{name}.notes") for name in self.seats}
            verdict.compare(
                notes,
                self.cuts,
                await space.records.get("orders", 0),
                orders,
                await space.records.list("journal"),
                self.feed,
            )
        self.console.print(verdict.table())
        return verdict.well

    async def watch(self, space: holdfast.Space, cursor: str) -> None:
        """Follow the feed from the first order to the end of the day."""
        async for commit in space.watch(cursor=cursor):
            for change in commit:
                if change.key == "orders":
                    self.feed.append((commit.version, commit.request_id or ""))
                    self.seats[commit.actor].orders += 1
                elif change.key == "closed":
                    return

    async def direct(self, space: holdfast.Space, watcher: asyncio.Task[None]) -> None:
        random.choice(list(self.seats.values())).die_after_s = 0.4 * self.seconds if self.kills else 0.0
        for seat in self.seats.values():
            self.start(seat)
        deadline = time.monotonic() + START_S_MAX
        while not all(seat.at_work for seat in self.seats.values()) and time.monotonic() < deadline:
            self.bury_or_raise(watcher)
            await asyncio.sleep(TICK_S)
        self.say(
            f"{len(self.seats)} agent processes share one SQLite file; {self.kills} of them will be killed with -9"
        )
        self.began = time.monotonic()
        first, last = 0.15 * self.seconds, 0.85 * self.seconds
        due = deque(first + (last - first) * n / max(1, self.kills - 2) for n in range(self.kills - 1))
        told = 0.0
        with Live(console=self.console, auto_refresh=False) if self.live else _Silent() as live:
            while (now := self.now()) < self.seconds or self.missing():
                for seat in self.bury_or_raise(watcher):
                    await self.kill(seat, space)
                targets = [seat for seat in self.seats.values() if seat.at_work and not seat.die_after_s]
                if due and now >= due[0] and targets:
                    due.popleft()
                    await self.kill(random.choice(targets), space)
                for seat in self.seats.values():
                    seat.tick()
                    if seat.process is None and now >= seat.back_at:
                        self.start(seat)
                        self.say(f"{now:4.1f} s  {seat.name} is replaced")
                if not self.live and now - told >= 2:
                    told = now
                    self.say(f"{now:4.1f} s  {len(self.feed):,} orders in the feed")
                live.update(self.picture(now), refresh=True)
                await asyncio.sleep(TICK_S)
            live.update(self.picture(self.seconds), refresh=True)

    def now(self) -> float:
        return time.monotonic() - self.began if self.began else 0.0

    def start(self, seat: Seat) -> None:
        seat.life += 1
        seat.orders_before = seat.orders
        command = [sys.executable, __file__, "--folder", str(self.folder), "--agent", seat.name]
        command += ["--life", str(seat.life), "--die-after", str(seat.die_after_s)]
        with (self.folder / f"{seat.name}.errors").open("ab") as errors:
            seat.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)

    def bury_or_raise(self, watcher: asyncio.Task[None]) -> list[Seat]:
        """The agents that killed themselves as planned. Any other end, an agent's or the watcher's, is a failure."""
        if watcher.done():
            watcher.result()
        ended = [seat for seat in self.seats.values() if seat.process and seat.process.poll() is not None]
        for seat in ended:
            if not seat.die_after_s or seat.process is None or seat.process.returncode != -signal.SIGKILL:
                raise RuntimeError(f"{seat.name} ended by itself: {self.last_words(seat)}")
        return ended

    async def kill(self, seat: Seat, space: holdfast.Space) -> None:
        process, now = seat.process, self.now()
        assert process is not None
        process.kill()
        process.wait()
        seat.process, seat.die_after_s, seat.back_at = None, 0.0, now + ABSENCE_S
        self.killed += 1
        what = "between two orders"
        notes = Notes.read(self.folder / f"{seat.name}.notes")
        if notes.asked and notes.asked[-1] in notes.told and notes.asked[-1] not in notes.journalled:
            what = "at its journal"
        for request in notes.asked:
            if request not in notes.told:
                # Nobody can commit it now until the successor does, so this is what the dead agent could not know.
                committed = await space.records.exists(f"order/{request}")
                self.cuts.append(Cut(request, committed))
                what = f"before the answer to {request}, which {'was' if committed else 'was not'} committed"
        self.say(f"{now:4.1f} s  kill -9 {seat.name}, {what}")

    def missing(self) -> bool:
        return any(seat.process is None for seat in self.seats.values())

    def wait_for_all(self) -> None:
        for seat in self.seats.values():
            assert seat.process is not None
            if seat.process.wait(timeout=30) != 0:
                raise RuntimeError(f"{seat.name} failed: {self.last_words(seat)}")

    def last_words(self, seat: Seat) -> str:
        text = (self.folder / f"{seat.name}.errors").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"

    # --- what is seen ---

    def say(self, text: str) -> None:
        self.news.append(text)
        if not self.live:
            self.console.print(text, highlight=False, soft_wrap=True)

    def picture(self, now: float) -> Panel:
        table = Table(box=None, expand=False, pad_edge=False, padding=(0, 2, 0, 0))
        for heading, justify in (("agent", "left"), ("process", "right"), ("life", "right"), ("orders", "right")):
            table.add_column(heading, justify=justify, header_style="dim")  # type: ignore[arg-type]
        table.add_column("pace", header_style="dim", min_width=PACE_TICKS)
        top = max((count for seat in self.seats.values() for count in seat.pace), default=0) or 1
        for seat in self.seats.values():
            pace = "".join(BARS[-(-count * (len(BARS) - 1) // top)] for count in seat.pace)
            process = str(seat.process.pid) if seat.process else "kill -9"
            style = "" if seat.process else "bold red"
            table.add_row(
                seat.name, process, str(seat.life), f"{seat.orders:,}", Text(pace, style="green"), style=style
            )
        rate = sum(sum(list(seat.pace)[-5:]) for seat in self.seats.values()) / (5 * TICK_S)
        state = Text.assemble(
            (f"{len(self.feed):,}", "bold"), " orders in the feed   ", (f"{rate:,.0f}", "bold"), " a second   ",
            (f"{self.killed}", "bold red"), f" of {self.kills} killed   {min(now, self.seconds):.0f} of {self.seconds:.0f} s",
        )  # fmt: skip
        news = Text("\n".join(self.news), style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(Group(table, "", state, "", news), title="Holdfast: one SQLite file, no server", padding=(1, 2))


class _Silent:
    """Stands in for the live picture where there is no terminal."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, picture: object, *, refresh: bool) -> None:
        pass


def names(agents: int) -> list[str]:
    return [NAMES[n % len(NAMES)] + (f"-{n // len(NAMES) + 1}" if n >= len(NAMES) else "") for n in range(agents)]


# --- the verdict: the notes against the store ---


class Verdict:
    """The comparison, line by line. A line that does not hold says by how much."""

    def __init__(self) -> None:
        self.lines: list[tuple[bool, str, str]] = []

    @property
    def well(self) -> bool:
        return all(holds for holds, _, _ in self.lines)

    def line(self, holds: bool, subject: str, text: str) -> None:
        self.lines.append((holds, subject, text))

    def compare(
        self,
        notes: dict[str, Notes],
        cuts: list[Cut],
        counter: int,
        orders: list[str],
        journal: list[str],
        feed: list[tuple[int, str]],
    ) -> None:
        told = {request: total for note in notes.values() for request, total in note.told.items()}
        count = len(told)

        lost, strange = told.keys() - set(orders), set(orders) - told.keys()
        self.line(
            not lost and not strange and len(orders) == count > 0,
            "orders",
            f"{count:,} acknowledged, {len(orders):,} stored: {len(lost)} lost, {len(strange)} unexplained",
        )
        self.line(counter == count, "counter", f"stands at {counter:,}; acknowledged increments: {count:,}")
        gaps = set(range(1, count + 1)) ^ set(told.values())
        self.line(
            not gaps and len(set(told.values())) == count,
            "answers",
            f"the sums the agents were told are 1 to {count:,}, each once"
            if not gaps
            else f"{len(gaps)} sums missing or doubled",
        )

        acknowledged = [request for note in notes.values() for request in note.journalled]
        lost_lines, doubled = set(acknowledged) - set(journal), _doubled(journal)
        # The journal has no request ids: a line that was cut off is there or not, but never twice.
        pending = told.keys() - set(acknowledged)
        unknown = set(journal) - set(acknowledged) - pending
        in_order = all(_in_order(note.journalled, journal) for note in notes.values())
        self.line(
            not lost_lines and not doubled and not unknown and in_order,
            "journal",
            f"{len(acknowledged):,} lines acknowledged: {len(lost_lines)} lost, {len(doubled)} doubled, "
            f"{'in' if in_order else 'NOT in'} each agent's order; {len(pending)} cut off, "
            f"{len(pending & set(journal))} of them there",
        )

        versions = [version for version, _ in feed]
        requests = [request for _, request in feed]
        rising = all(earlier < later for earlier, later in pairwise(versions))
        missing = told.keys() ^ set(requests)
        self.line(
            rising and not missing and not _doubled(requests),
            "feed",
            f"{len(feed):,} orders: {len(missing)} missing, {len(_doubled(requests))} doubled, versions "
            f"{'always' if rising else 'NOT always'} rising",
        )
        self.line(*self.resolved(cuts, set(orders), told, requests))

    @staticmethod
    def resolved(cuts: list[Cut], orders: set[str], told: dict[str, int], requests: list[str]) -> tuple[bool, str, str]:
        happened = Counter(requests)
        once = all(cut.request in told and cut.request in orders and happened[cut.request] == 1 for cut in cuts)
        text = (
            f"kill -9 hit {len(cuts)} orders before their answer, {sum(cut.committed for cut in cuts)} of them committed "
            f"already; all were asked again under their request id and are {'' if once else 'NOT '}there once each"
        )
        return once, "cut off", text

    def table(self) -> Panel:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for holds, subject, text in self.lines:
            table.add_row(Text("ok", style="bold green") if holds else Text("NO", style="bold red"), subject, text)
        words = (
            "nothing acknowledged was lost, nothing was done twice" if self.well else "the store and the notes DIFFER"
        )
        style = "green" if self.well else "red"
        return Panel(table, title=words, border_style=style, padding=(1, 2))


def _doubled(items: Iterable[str]) -> list[str]:
    return [item for item, times in Counter(items).items() if times > 1]


def _in_order(expected: list[str], journal: list[str]) -> bool:
    wanted = set(expected)
    return [line for line in journal if line in wanted] == expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--kills", type=int, default=6)
    for inner in ("--folder", "--agent", "--life", "--die-after"):  # how the director starts its agents
        parser.add_argument(inner, help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.agent:
        asyncio.run(agent(Path(options.folder), options.agent, int(options.life), float(options.die_after)))
        return 0

    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    well = False
    try:
        well = asyncio.run(Demo(folder, options.agents, options.seconds, options.kills, console).run())
    except KeyboardInterrupt:
        console.print("stopped")
    except (RuntimeError, holdfast.Error, OSError) as exc:
        console.print(f"failed: {exc}", style="bold red", soft_wrap=True)
    finally:
        if well:
            shutil.rmtree(folder)
        else:
            console.print(f"the store and the notes are in {folder}", soft_wrap=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
