"""The day as it can be read afterwards: from the store, from its audit, and from what the processes noted beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import holdfast
from desk.cast import Kill
from desk.flows import SYMBOLS
from desk.roles import AGENTS, CORRELATION, DOCUMENT, EXECUTION, MEMORY_MB, Notes
from holdfast import Space


class Beat(NamedTuple):
    """A leader's sign of life, as the feed told it."""

    number: int
    agent: str
    epoch: int


class Cut(NamedTuple):
    """An order whose agent was killed before it heard the answer."""

    request: str
    committed: bool


class Start(NamedTuple):
    """A step that began, as its process noted it."""

    step: str
    at: int
    process: str
    attempt: int


class Finish(NamedTuple):
    """A step that was finished, as the execution's log has it. Instants are milliseconds since 1970."""

    step: str
    started_at: int
    at: int
    worker: str
    attempts: int


@dataclass
class Day:
    """All that the verdict and the report look at."""

    notes: dict[str, Notes] = field(default_factory=dict)
    counter: int = 0
    orders: dict[str, str] = field(default_factory=dict)
    """By request: whose it is."""
    cuts: list[Cut] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    told_beats: dict[int, int] = field(default_factory=dict)
    """By number: the epoch in which a leader was told of it."""
    kills: list[Kill] = field(default_factory=list)

    symbols: list[str] = field(default_factory=lambda: list(SYMBOLS))
    status: str = ""
    note: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)

    opinions: dict[str, Any] = field(default_factory=dict)
    seen_by: str = ""
    open_conflicts: int = 0
    resolutions: list[holdfast.Resolution] = field(default_factory=list)
    decision: holdfast.Decision | None = None
    signals: dict[str, Any] = field(default_factory=dict)
    trades: list[str] = field(default_factory=list)
    """The ids of published decisions, one for each time that one was acted on."""
    tasks: dict[str, holdfast.TaskState] = field(default_factory=dict)

    refused: str = ""
    """What the store said to an agent that wrote what is not its to write."""
    audited: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Orders in the audit, by actor and request."""
    denials: int = 0
    actors: Counter[str] = field(default_factory=Counter)
    chain: holdfast.Verification | None = None


async def read_day(day: Day, space: Space, folder: Path, names: dict[int, str], leads: list[str]) -> None:
    """Fill in what can be read when everybody has gone home. `names` are the processes by pid."""
    day.notes = {name: Notes.read(folder / f"{name}.notes") for name in AGENTS}
    day.counter = await space.records.get("orders", 0)
    async for entry in space.records.scan("order/"):
        day.orders[entry.key.removeprefix("order/")] = entry.value["agent"]
    for name in leads:
        for line in (folder / f"{name}.beats").read_text().splitlines():
            number, epoch = map(int, line.split())
            day.told_beats[number] = epoch

    handle = await space.workflows.get(EXECUTION)
    day.status, day.state = (await handle.status()).status, await handle.state()
    day.note = await handle.result(0) if day.status == "completed" else None
    day.starts = read_starts(folder / "starts", names)
    day.finishes = await read_finishes(handle, day.symbols)

    document = space.document(DOCUMENT)
    day.opinions = dict((await document.read()).contributions)
    day.resolutions, day.open_conflicts = await document.resolutions(), len(await document.conflicts())
    day.seen_by = (await space.records.get("seen"))["by"]
    correlation = await space.correlation(CORRELATION)
    day.decision, day.signals = await correlation.decision(), dict(await correlation.signals())
    for name in MEMORY_MB:
        day.tasks[name] = await (await space.tasks.get(await space.records.get(f"task/{name}"))).state()

    await space.audit.seal()
    day.chain = await space.audit.verify()
    async for record in space.audit.records():
        day.actors[record.actor] += 1
        day.denials += record.outcome == "denied"
        if record.key.startswith("records/order/"):
            day.audited[record.actor, record.key.removeprefix("records/order/")] += 1
        if record.key.startswith("records/trade/") and record.operation == "put":
            day.trades.append(record.key.removeprefix("records/trade/"))


def read_starts(path: Path, names: dict[int, str]) -> list[Start]:
    starts = []
    for line in path.read_text().splitlines():
        step, at, pid, attempt = line.split()
        starts.append(Start(step, int(at), names.get(int(pid), pid), int(attempt)))
    return starts


async def read_finishes(handle: holdfast.ExecutionHandle, symbols: list[str]) -> list[Finish]:
    """The steps that the log has an end of, in order, with the worker that wrote it."""
    steps = await handle.steps()
    found = []
    for event in await handle.log():
        if event.path and event.event == "completed":
            record = steps[event.path]
            started_at = round(record["started_at"].timestamp() * 1000)
            found.append(Finish(name_of(event.path, symbols), started_at, event.at, event.by, record["attempts"]))
    return found


def name_of(path: str, symbols: list[str]) -> str:
    """A step as people call it; a task of `analyse` by its symbol: "analyse#0/2" is the third."""
    name, _, item = path.partition("/")
    return symbols[int(item)] if item else name.partition("#")[0]
