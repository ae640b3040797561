"""What is seen of the day: a line per event while it goes on, and the report and the verdict at its end.

On a terminal there are colours; elsewhere it is plain text, a line per event.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from desk.books import Day
from desk.roles import AGENTS, MEMORY_MB, WEIGHTS
from desk.verdict import Line

WIDTH = 110
BAR = 34
COLOURS = {
    "market": "cyan",
    "risk": "magenta",
    "compliance": "yellow",
    "reporting": "blue",
    "ada": "green",
    "grace": "green",
}


class Teller:
    """Prints what happens, with the time since the beginning."""

    def __init__(self) -> None:
        console = Console()
        self.console = Console(width=min(console.width, WIDTH) if console.is_terminal else WIDTH)
        self.began = time.monotonic()
        self._scenes = 0

    def scene(self, title: str, words: str) -> None:
        self._scenes += 1
        self.console.print()
        self.console.print(Text.assemble((f"{self._scenes}  {title}", "bold"), (f"   {words}", "dim")))

    def say(self, who: str, what: str, style: str = "") -> None:
        at = f"{time.monotonic() - self.began:6.1f} s  "
        line = Text.assemble((at, "dim"), (f"{who:<11} ", COLOURS.get(who, "bold")), (what, style))
        self.console.print(line, soft_wrap=True)

    def killed(self, who: str, when: str) -> None:
        self.say(who, f"kill -9  {when}", "bold red")

    def took_over(self, who: str, what: str) -> None:
        self.say(who, what, "bold green")

    # --- the end ---

    def report(self, day: Day) -> None:
        self.console.print()
        self.console.rule("what happened", style="dim")
        for title, table in (
            ("the research", timeline(day)),
            ("the opinions", opinions(day)),
            ("the decision", decided(day)),
            ("the tasks", tasks(day)),
            ("who was killed", kills(day)),
            ("in numbers", numbers(day)),
        ):
            self.console.print(Text(f"\n{title}", style="bold"))
            self.console.print(table)

    def verdict(self, lines: list[Line]) -> bool:
        well = all(line.holds for line in lines)
        table = columns("", "", "")
        for line in lines:
            mark = Text("ok", style="bold green") if line.holds else Text("NO", style="bold red")
            table.add_row(mark, line.subject, line.text)
        words = "nothing was lost, nothing was done twice" if well else "the day did NOT go as promised"
        self.console.print()
        self.console.print(Panel(table, title=words, border_style="green" if well else "red", padding=(1, 2)))
        return well


def columns(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headings))
    for number, heading in enumerate(headings):
        last = number == len(headings) - 1
        table.add_column(heading, header_style="dim", no_wrap=not last, overflow="fold" if last else "ellipsis")
    return table


def timeline(day: Day) -> Table:
    """A bar per step, from when its last attempt began to when it was committed; `x` marks what a death cut off."""
    table = columns("step", "attempts", "worker", "when")
    if not day.finishes:
        return table
    first = min(start.at for start in day.starts)
    length = max(1, max(finish.at for finish in day.finishes) - first)

    def place(at: int) -> int:
        return min(BAR - 1, round((at - first) * (BAR - 1) / length))

    killed = {kill.name for kill in day.kills}
    for finish in sorted(day.finishes, key=lambda each: (each.started_at, each.step)):
        bar = [" "] * BAR
        for start in day.starts:
            if start.step == finish.step and start.at < finish.started_at - 5:
                bar[place(start.at)] = "x" if start.process in killed else "!"
        for n in range(place(finish.started_at), place(finish.at) + 1):
            bar[n] = "━"
        begun = sum(start.step == finish.step for start in day.starts)
        when = Text("".join(bar), style="red" if begun > 1 else "green")
        when.append(f"  {(finish.at - first) / 1000:.1f} s", style="dim")
        table.add_row(finish.step, str(begun), finish.worker, when)
    table.add_row("", "", "", Text("x began on a worker that was killed   ! failed and was tried again", style="dim"))
    return table


def opinions(day: Day) -> Table:
    table = columns("agent", "said", "sure")
    for name in AGENTS:
        if name in day.opinions:
            opinion = day.opinions[name]
            said = opinion.data.get("recommendation") or opinion.data.get("summary")
            table.add_row(name, said, str(opinion.confidence))
    for settled in day.resolutions:
        table.add_row(Text("settled", style="bold"), Text(f"by {settled.method}: {settled.reason}", style="bold"), "")
        table.add_row("", f"found by {day.seen_by}, settled by {settled.by}; nothing was discarded", "")
    return table


def decided(day: Day) -> Table:
    table = columns("agent", "weight", "wants", "sure")
    for name, signal in day.signals.items():
        wants = signal["analysis"]
        what = f"{wants['action']} {wants['direction'] or ''} {wants['size'] or ''}".strip()
        table.add_row(name, str(WEIGHTS[name]), what, str(wants["confidence"]))
    if day.decision is not None:
        what = f"{day.decision.action} {day.decision.direction} {day.decision.size:,.0f}"
        table.add_row(Text("decided", style="bold"), "", Text(what, style="bold"), f"{day.decision.confidence:.2f}")
    return table


def tasks(day: Day) -> Table:
    table = columns("task", "memory, peak of limit", "cpu", "end")
    for name, state in day.tasks.items():
        memory = f"{state.peak_memory_mb or 0:.0f} of {MEMORY_MB[name]} MB"
        end = state.status + (f": {state.reason}" if state.reason else "")
        table.add_row(name, memory, f"{state.cpu_seconds or 0:.2f} s", end)
    return table


def kills(day: Day) -> Table:
    table = columns("kill -9", "when", "then")
    for kill in day.kills:
        table.add_row(Text(kill.name, style="red"), kill.when, kill.successor)
    return table


def numbers(day: Day) -> Table:
    table = columns("", "")
    table.add_row("orders", f"{day.counter:,}, by {len(day.notes)} agents")
    table.add_row("beats", f"{len(day.beats):,}, by {len({beat.agent for beat in day.beats})} leaders")
    chain = day.chain
    if chain is not None:
        sound = "sound" if chain.sound else "NOT sound"
        table.add_row("audit", f"{chain.records:,} records of {len(day.actors)} actors; the chain is {sound}")
        table.add_row("its hash", f"{chain.hash[:32]}…  (note it elsewhere)")
    return table
