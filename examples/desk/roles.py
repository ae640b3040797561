"""Who works at the desk. Each of these runs in a process of its own and knows a URL, a token and its name.

    python -m desk.roles agent|lead|worker URL FOLDER LIFE LEASE_S

- An agent (market, risk, compliance, reporting) books orders all day, contributes its opinion, and sends its signal.
- A lead stands for election. Whoever leads counts beats, starts the research, and settles what the agents contradict
  each other in; all it writes goes through `term.space`, so the store refuses it once it leads no more. A successor
  does the same things again: those that are done already have no second effect. Both leads decide correlations.
- A worker runs workflows.

Nobody asks twice whether something has happened: they wait for a record (`there`), which is a watch of the feed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from desk.flows import SYMBOLS, Research
from holdfast import (
    Decision,
    Guard,
    LeaseLost,
    Limits,
    Space,
    TaskFailed,
    TaskSpec,
    WeightedAverage,
    absent,
    increment,
    set_,
)

SPACE = "desk"
DOCUMENT = "research/MSFT"
CORRELATION = "MSFT-position"
EXECUTION = "morning-research"
AGENTS = ["market", "risk", "compliance", "reporting"]
ORDER_S, BEAT_S = 0.08, 0.05
MEMORY_MB = {"backtest": 256, "runaway": 160}

OPINIONS: dict[str, dict[str, Any]] = {
    "market": {"symbol": "MSFT", "outlook": "growth", "recommendation": "increase position size"},
    "risk": {"symbol": "MSFT", "sector_risk": "elevated", "recommendation": "reduce exposure"},
    "compliance": {"symbol": "MSFT", "summary": "no restriction"},
    "reporting": {"summary": "market and risk read the same numbers differently"},
}
CONFIDENCE = {"market": 0.8, "risk": 0.9, "compliance": 1.0, "reporting": 0.7}
READS = {"market": None, "risk": "market", "compliance": "risk", "reporting": "compliance"}
"""Whose opinion an agent has read when it writes its own."""
SIGNALS: dict[str, dict[str, Any]] = {
    "market": {"action": "hold", "direction": None, "size": 0, "confidence": 0.6},
    "risk": {"action": "trade", "direction": "sell", "size": 4000, "confidence": 0.9},
    "compliance": {"action": "trade", "direction": "sell", "size": 3000, "confidence": 0.8},
}
WEIGHTS = {"market": 1, "risk": 2, "compliance": 1}


@dataclass
class Notes:
    """What an agent wrote down beside the store: `?` before a commit, `+` and the sum it was told after it.

    All its lives share one file.
    """

    asked: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Notes:
        notes = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, request, *total = line.split()
            if kind == "?":
                notes.asked.append(request)
            else:
                notes.told[request] = int(total[0])
        return notes


async def play(role: str, url: str, folder: Path, life: int, lease_s: float) -> None:
    """Do what the role asks until the desk closes, or whoever started this process is gone."""
    alone = asyncio.create_task(left_alone())
    store = await found(url, alone)
    try:
        space = store.space(SPACE, instance=str(life))
        acts = {"agent": lambda: agent(space, folder, life), "lead": lambda: lead(space, folder, lease_s)}
        act = asyncio.ensure_future(acts.get(role, lambda: worker(space, lease_s))())
        done, pending = await asyncio.wait([act, alone], return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()
        for each in done:
            each.result()
    finally:
        await store.close()


async def found(url: str, alone: asyncio.Task[None]) -> holdfast.Store:
    """The store. Who starts while the keeper is down waits for it; who is connected does so without being told."""
    while True:
        try:
            return await holdfast.open(url, token=os.environ["HOLDFAST_TOKEN"])
        except holdfast.Unavailable:
            if alone.done():
                raise
            await asyncio.sleep(0.1)


async def left_alone() -> None:
    """Return when the process that started this one has ended: the one thing that no feed tells."""
    director = os.getppid()
    while os.getppid() == director:  # noqa: ASYNC110
        await asyncio.sleep(0.3)


async def there(space: Space, key: str) -> Any:
    """The value of a record, as soon as there is one."""
    cursor = await space.cursor()
    if (value := await space.records.get(key)) is not None:
        return value
    async for commit in space.watch(key, cursor=cursor):
        for change in commit:
            if change.key == key and change.value is not None:
                return change.value
    raise AssertionError("a watch has no end")


# --- agents ---


async def agent(space: Space, folder: Path, life: int) -> None:
    async with asyncio.TaskGroup() as group:
        closing = group.create_task(there(space, "scene/closing"))
        aimed = group.create_task(there(space, "scene/orders"))
        group.create_task(book(space, folder / f"{space.agent}.notes", life, closing, aimed))
        group.create_task(advise(space))
        await closing


async def book(space: Space, path: Path, life: int, closing: asyncio.Future[Any], aimed: asyncio.Future[Any]) -> None:
    """Orders, each one commit under a request id. First those that a former life has no answer to."""
    before = Notes.read(path)
    notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def order(request: str) -> None:
        # The content is the same in every life: a request id stands for it.
        receipt = await space.commit(
            increment("orders"), set_(f"order/{request}", {"agent": space.agent}), request_id=request
        )
        if space.agent == "market" and life == 1 and aimed.done():
            os.kill(os.getpid(), signal.SIGKILL)  # the store has answered, and nobody has heard it
        os.write(notes, f"+ {request} {receipt.results[0]}\n".encode())

    for request in before.asked:
        if request not in before.told:
            await order(request)
    number = 0
    while not closing.done():
        number += 1
        request = f"{space.agent}-{life}-{number}"
        os.write(notes, f"? {request}\n".encode())
        await order(request)
        await asyncio.wait([closing], timeout=ORDER_S)


async def advise(space: Space) -> None:
    """An opinion, a signal and, from risk, two tasks, each when it is asked for. A second life repeats nothing."""
    await there(space, "scene/opinions")
    if (before := READS[space.agent]) is not None:
        await there(space, f"said/{before}")
    document = space.document(DOCUMENT)
    view = await document.read()
    if space.agent not in view.contributions:
        mine = OPINIONS[space.agent]
        await document.contribute(mine, inputs=view.versions, confidence=CONFIDENCE[space.agent])
    said = OPINIONS[space.agent]
    await space.records.set(f"said/{space.agent}", said.get("recommendation") or said["summary"])
    if space.agent in SIGNALS:
        correlation = await space.correlation(await there(space, "asked"))
        await correlation.signal({"analysis": SIGNALS[space.agent]})
    if space.agent == "risk":
        await there(space, "scene/tasks")
        await asyncio.gather(*(run_task(space, name) for name in MEMORY_MB))


async def run_task(space: Space, name: str) -> None:
    """A function in a process of its own that may use so much memory and no more."""
    args = (250,) if name == "backtest" else ()
    limits = Limits(memory_mb=MEMORY_MB[name], cpu_percent=150)
    handle = await space.tasks.submit(
        TaskSpec(function=f"desk.flows:{name}", args=args, timeout="30s", limits=limits, name=name)
    )
    await space.records.set(f"task/{name}", handle.tid)
    try:
        await handle.result("45s")
    except TaskFailed as failed:
        await space.records.set(f"ended/{name}", failed.state.status)
    else:
        await space.records.set(f"ended/{name}", "completed")


# --- leads ---


async def lead(space: Space, folder: Path, lease_s: float) -> None:
    async def publish(decision: Decision) -> None:
        with contextlib.suppress(holdfast.Conflict):  # it may be called again: the decision's id tells
            await space.commit(absent(f"trade/{decision.id}"), set_(f"trade/{decision.id}", decision.action))

    space.judgement.priorities["market"] = 50  # compliance 100 and risk 75 are shipped
    orchestrator = space.orchestrator(merge=WeightedAverage(WEIGHTS), on_decision=publish, lease=lease_s)
    deciding = asyncio.create_task(orchestrator.run())
    closing = asyncio.create_task(there(space, "scene/closing"))
    told = os.open(folder / f"{space.agent}.beats", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        while not closing.done():
            with contextlib.suppress(holdfast.LockAcquisitionError, LeaseLost):
                async with space.election("lead", ttl=lease_s) as term:
                    await first_of(beat(term, told), duties(term), closing)
        await orchestrator.stop()
        await deciding
    finally:
        closing.cancel()
        deciding.cancel()


async def first_of(*works: Awaitable[Any]) -> None:
    """Return, or raise, as soon as one of them does; the others are cancelled, but for those that somebody else has."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each, work in zip(tasks, works, strict=True):
            if each is not work:
                each.cancel()


async def beat(term: Guard, told: int) -> None:
    """Count, for as long as the store lets this leader."""
    while True:
        leader = {"agent": term.space.agent, "epoch": term.epoch}
        receipt = await term.space.commit(increment("beats"), set_("leader", leader))
        os.write(told, f"{receipt.results[0]} {term.epoch}\n".encode())
        await asyncio.sleep(BEAT_S)


async def duties(term: Guard) -> None:
    """What a leader has to see to, from the beginning: what a predecessor has done is done."""
    space = term.space
    await there(space, "scene/research")
    await space.workflows.start(Research, {"symbols": SYMBOLS}, id=EXECUTION)
    await space.records.set("execution", EXECUTION)

    await there(space, "scene/opinions")
    await there(space, "said/reporting")
    document = space.document(DOCUMENT)
    for conflict in await document.conflicts():
        if await space.records.get("seen") is None:
            seen = {"by": space.agent, "epoch": term.epoch, "values": dict(conflict.values)}
            await space.records.set("seen", seen)
            await asyncio.sleep(20)  # it thinks about it, and does not live to tell
        settled = await document.resolve(conflict, by="priority")
        await space.records.set("settled", {"winner": settled.winner, "reason": settled.reason})

    await there(space, "scene/decision")
    if await space.records.get("asked") is None:  # agents signal once it is there, and then the context stays as it is
        correlation = await space.correlation(CORRELATION, expect=list(SIGNALS), timeout="2m")
        await correlation.context.publish({"regime": "risk-off", "settled": await space.records.get("settled")})
        await space.records.set("asked", CORRELATION)
    await asyncio.Event().wait()


# --- workers ---


async def worker(space: Space, lease_s: float) -> None:
    async with space.workflows.worker([Research], lease=lease_s):
        await there(space, "scene/closing")


if __name__ == "__main__":
    part, address, place, number, lease = sys.argv[1:]
    asyncio.run(play(part, address, Path(place), int(number), float(lease)))
