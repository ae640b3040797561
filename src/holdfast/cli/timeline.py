"""An execution drawn as a timeline: a line per step, with a bar that shows when it ran.

The tasks of a map are one line with counts, however many there are. What is nested in a branch is indented under it. Nothing here
reads or prints: lines of text are made of what was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from holdfast.cli import output
from holdfast.layers.workflows.handles import ExecutionView

BAR: Final = 30
NAME_MAX: Final = 32
LINES_MAX: Final = 200
"""Steps that are drawn; the rest is counted."""
FOLDED_MIN: Final = 2
"""So many tasks of one map become one line."""
MARKS: Final = {
    "completed": "✓",
    "failed": "✗",
    "skipped": "-",
    "retrying": "↻",
    "waiting": "…",
    "begun": "▸",
    "running": "▸",
    "cancelled": "✗",
    "paused": "‖",
    "pending": "·",
}
HIDDEN: Final = ("body", "when", "version", "result", "now", "tolerated")
"""Kinds of records that are not steps."""

Steps = dict[str, dict[str, Any]]


class Row(msgspec.Struct):
    """A line of the timeline; also what --json gives."""

    path: str
    name: str
    kind: str
    status: str
    depth: int = 0
    started_at: datetime | None = None
    completed_at: datetime | None = None
    until: datetime | None = None
    attempts: int = 1
    tasks: dict[str, int] = {}
    """Of a map: how many tasks there are of each status."""
    notes: list[str] = []


def rows_of(steps: Steps) -> list[Row]:
    """What is drawn, in the order in which it began; what began in the same millisecond as it is given."""
    shown = {path: step for path, step in steps.items() if step["kind"] not in HIDDEN and path[0] != "~"}
    drawn: dict[tuple[str, bool], list[tuple[str, dict[str, Any]]]] = {}
    for path, step in shown.items():
        is_item = step["kind"] == "item"
        drawn.setdefault((path.rpartition("/")[0] if is_item else path, is_item), []).append((path, step))
    rows: list[Row] = []
    for (root, _), tasks in drawn.items():
        rows += [_folded(root, tasks)] if len(tasks) >= FOLDED_MIN else [_row(*task) for task in tasks]
    return sorted(rows, key=lambda row: (row.started_at is None, row.started_at or 0))


def _row(path: str, step: dict[str, Any]) -> Row:
    row = Row(
        path,
        _name(path),
        step["kind"],
        step["status"],
        path.count("/"),
        step.get("started_at"),
        step.get("completed_at"),
        step.get("until"),
        step["attempts"],
    )
    notes = []
    if step["attempts"] > 1:
        notes.append(f"{step['attempts']} attempts")
    if row.until is not None and step["status"] in ("waiting", "retrying"):
        notes.append(f"until {output.moment(row.until)}")
    if step["status"] == "begun" and step.get("over_at"):
        notes.append(f"has until {output.moment(step['over_at'])}")
    if step.get("queue"):
        notes.append(f"queue {output.shown(step['queue'])}")
    if step.get("task"):
        notes.append(f"task {output.shown(step['task'])}")
    if step.get("child"):
        notes.append(f"child {output.shown(step['child'])}")
    if step.get("error"):
        notes.append(_error(step["error"]))
    row.notes = notes
    return row


def _folded(root: str, tasks: list[tuple[str, dict[str, Any]]]) -> Row:
    """The tasks of a map as one."""
    counts = Counter(step["status"] for _, step in tasks)
    attempts = sum(step["attempts"] for _, step in tasks)
    status = next((each for each in ("retrying", "failed", "waiting", "begun") if counts[each]), "completed")
    ends = [step.get("completed_at") for _, step in tasks]
    notes = [f"{len(tasks):,} tasks: " + ", ".join(f"{count:,} {each}" for each, count in sorted(counts.items()))]
    if attempts > len(tasks):
        notes.append(f"{attempts:,} attempts")
    if failed := next((step["error"] for _, step in tasks if step.get("error")), None):
        notes.append("the first error: " + _error(failed))
    return Row(
        root,
        _name(root),
        "map",
        status,
        root.count("/"),
        min((step["started_at"] for _, step in tasks if step.get("started_at")), default=None),
        None if any(end is None for end in ends) else max(end for end in ends if end is not None),
        None,
        attempts,
        dict(counts),
        notes,
    )


def _name(path: str) -> str:
    name, _, ordinal = path.rpartition("/")[2].partition("#")
    if not ordinal:  # an item, or a branch
        return "/".join(path.split("/")[-2:])
    return name if ordinal == "0" else f"{name}#{ordinal}"


def _error(error: dict[str, Any]) -> str:
    text = f"{error.get('type')}: {error.get('message')}"
    return output.shown(text if len(text) <= 100 else text[:99] + "…")


def lines_of(
    view: ExecutionView, steps: Steps, state: dict[str, Any], result: Any, *, served: bool, now: datetime
) -> Iterator[str]:
    """Everything that `show` tells of an execution."""
    yield _headline(view, now)
    for wait in view.waits:
        yield "  waits for " + _wait(wait)
    if view.error is not None:
        yield "  error: " + _error(view.error)
        raised = steps.get(view.error.get("step", ""), {}).get("error") or view.error
        for line in raised.get("trace", "").splitlines():
            yield "    " + output.shown(line)
    if view.ended_at is None and not served:
        yield f"  no worker serves {output.shown(view.name)}: it waits until one does (holdfast worker MODULE)"
    rows = rows_of(steps)
    begin = min((row.started_at for row in rows if row.started_at), default=view.started_at or view.created_at)
    end = max(view.ended_at or now, begin + timedelta(milliseconds=1))
    width = min(NAME_MAX, max((2 * row.depth + len(row.name) for row in rows), default=0))
    for row in rows[:LINES_MAX]:
        yield _line(row, width, begin, end, view.ended_at or now)
    if len(rows) > LINES_MAX:
        yield f"  and {len(rows) - LINES_MAX:,} more (--json has them all)"
    if state:
        yield f"state: {output.brief(state)}"
    if view.status == "completed":
        yield f"result: {output.brief(result)}"


def _headline(view: ExecutionView, now: datetime) -> str:
    name = f"{output.shown(view.name)} {view.version}".rstrip()
    text = f"{MARKS[view.status]} {output.shown(view.id)}: {name}, {view.status}"
    if view.started_at is None:
        return f"{text}, since {output.moment(view.created_at)}"
    return f"{text}, {took((view.ended_at or now) - view.started_at)}, from {output.moment(view.started_at)}"


def _wait(wait: dict[str, Any]) -> str:
    what = {"signal": "signal", "child": "child", "slot": "its turn", "code": "newer code than version"}
    told: str = what.get(wait["kind"], wait["kind"])
    if wait.get("name") and wait["kind"] != "slot":
        told += f" {output.shown(wait['name'])}"
    return told + (f", until {output.moment(wait['until'])}" if wait.get("until") else "")


def _line(row: Row, width: int, begin: datetime, end: datetime, now: datetime) -> str:
    name = output.shown("  " * row.depth + row.name)
    name = name if len(name) <= width else name[: width - 1] + "…"
    slept = _slept(row, now)
    over: datetime = row.completed_at or (row.until if slept and row.until is not None else now)
    mark = MARKS["completed" if slept else row.status]
    lasted = "" if row.started_at is None else took(max(over - row.started_at, timedelta()))
    bar = (
        ""
        if row.started_at is None
        else _bar(row.started_at, over, begin, end, waits=row.kind in ("sleep", "signal", "child"))
    )
    return f"  {mark} {name:<{width}}  {lasted:>8}  {bar:<{BAR}}  {', '.join(row.notes)}".rstrip()


def _slept(row: Row, now: datetime) -> bool:
    """A sleep is not recorded as over: its time says so."""
    return row.kind == "sleep" and row.until is not None and row.until <= now


def _bar(start: datetime, over: datetime, begin: datetime, end: datetime, *, waits: bool) -> str:
    whole = (end - begin) / BAR
    first = min(BAR - 1, int((start - begin) / whole))
    last = min(BAR, max(first + 1, round((over - begin) / whole)))
    return " " * first + ("░" if waits else "█") * (last - first)


def took(lasted: timedelta) -> str:
    """How long something lasted, in a few characters."""
    seconds = lasted.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s"
