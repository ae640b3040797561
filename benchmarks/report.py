"""What a benchmark says: a JSON line per comparison on stdout, and a table for people on stderr."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import apsw

from benchmarks.places import file_system
from benchmarks.rounds import Rates


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should reach: `ratio >= 0.65`, or `ours <= 20` where there is no peer."""

    of: Literal["ratio", "ours"]
    at: Literal["at least", "at most"]
    limit: float

    def __str__(self) -> str:
        return f"{self.of} {'>=' if self.at == 'at least' else '<='} {self.limit:g}"

    def met(self, figure: float) -> bool:
        return figure >= self.limit if self.at == "at least" else figure <= self.limit


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison. `ratio` is ours / peer; without a peer both are null."""

    bench: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    goal: Goal | None = None
    runs: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def ok(self) -> bool | None:
        if self.goal is None:
            return None
        figure = self.ratio if self.goal.of == "ratio" else self.ours
        return figure is not None and self.goal.met(figure)

    def json(self) -> str:
        goal = None if self.goal is None else str(self.goal)
        told = {"bench": self.bench, "ours": self.ours, "peer": self.peer, "peer_name": self.peer_name}
        told |= {"ratio": self.ratio, "unit": self.unit, "goal": goal, "ok": self.ok, "runs": self.runs}
        told |= {**self.more, "load": self.load}
        return json.dumps({name: _short(value) for name, value in told.items()})


def compare(
    bench: str, ours: Rates, peer: Rates, peer_name: str, goal: Goal | None, unit: str = "sets/s", **more: Any
) -> Line:
    """A line about two rates measured in turns."""
    more = {"overall": ours.overall(peer), **more}
    return Line(
        bench, ours.median, unit, peer.median, peer_name, ours.ratio(peer), goal, runs=len(ours.values), more=more
    )


def table(lines: Sequence[Line]) -> str:
    """The lines as people read them."""
    rows: list[tuple[str, ...]] = [("bench", "ours", "peer", "unit", "ratio", "goal", "", "load", "peer's name")]
    for line in lines:
        verdict = {True: "ok", False: "MISSED", None: ""}[line.ok]
        figures = [_grouped(line.ours), _grouped(line.peer)]
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        goal = "" if line.goal is None else str(line.goal)
        rows.append((line.bench, *figures, line.unit, ratio, goal, verdict, f"{line.load:.1f}", line.peer_name or ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _grouped(figure: float | None) -> str:
    return "" if figure is None else f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"


def environment(folder: Path) -> str:
    """What the figures depend on, in a line."""
    return (
        f"# Python {platform.python_version()}, apsw's SQLite {apsw.sqlite_lib_version()}, "
        f"stdlib's SQLite {sqlite3.sqlite_version}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"{file_system(folder)} at {folder}, an fsync takes {_fsync_ms(folder):.2f} ms"
    )


def _fsync_ms(folder: Path) -> float:
    """The median of a few appends with fsync."""
    path, taken = folder / f"holdfast-fsync-{os.getpid()}", []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(21):
            began = time.perf_counter()
            os.write(fd, bytes(4096))
            os.fsync(fd)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
    return sorted(taken)[len(taken) // 2] * 1000


def _short(value: Any) -> Any:
    """Four significant digits; more would be noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
