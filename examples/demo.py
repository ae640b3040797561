"""A day at a research desk: agents, a keeper, a workflow, a contradiction, a decision, tasks, and four kills with -9.

    python examples/demo.py [--fast]

Nine processes work on one space of a keeper: four agents, two leads, two workers and a task manager. In eight scenes an
agent dies in the moment in which a naive retry counts twice, a worker in the middle of a workflow, a leader with a
contradiction in its hands, and the keeper itself; each is followed by another that goes on. What is printed was read
from the store. At the end the whole day is read again, from the store, its audit, and what the processes noted beside
it, and compared promise by promise. Exit code 0 means that all of them hold; otherwise 1, and the files stay where the
last line says.

The parts are in `desk/`: `flows.py` (the workflow, the tasks), `roles.py` (what each process does), `cast.py` (the
processes), `books.py` (the day as it is read afterwards), `verdict.py` (the promises), `report.py` (what is seen).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from desk.books import Beat, Cut, Day, name_of, read_day
from desk.cast import LEADS, ROLES, Cast, Kill
from desk.report import Teller
from desk.roles import AGENTS, CORRELATION, DOCUMENT, EXECUTION, MEMORY_MB, SPACE, Notes
from desk.verdict import verdict

PATIENCE_S = 40.0
"""How long a scene may wait for what must come, on a machine that has much else to do."""


class Director:
    """Opens the scenes, watches the feed, kills."""

    def __init__(self, folder: Path, teller: Teller, *, fast: bool) -> None:
        self.folder = folder
        self.teller = teller
        self.pause_s = 0.1 if fast else 1.2
        self.cast = Cast(folder, lease_s=1.5 if fast else 3.0, step_s=0.25 if fast else 0.9)
        self.day = Day(kills=self.cast.kills)
        self.seen: dict[str, Any] = {}
        """The newest value of each record that is not an order."""
        self.last = 0
        """The sum that the newest order made."""

    async def run(self) -> bool:
        self.teller.scene("The desk opens", "a keeper, and nine processes that know its URL and a token")
        self.cast.keeper.start()
        self.teller.say("keeper", f"serves {self.cast.url}")
        async with holdfast.open(self.cast.url, token=self.cast.keeper.admin) as store:
            self.space = store.space(SPACE, agent="director")
            await self.cast.make_tokens(store)
            watching = asyncio.create_task(self.watch(await self.space.cursor()))
            try:
                morning = (self.opening, self.orders, self.research, self.opinions)
                for scene in (*morning, self.decision, self.tasks, self.keeper):
                    await scene()
                    await asyncio.sleep(self.pause_s)
                await self.closing()
                await asyncio.wait_for(watching, PATIENCE_S)
            finally:
                watching.cancel()
            await read_day(self.day, self.space, self.folder, self.cast.pids, LEADS)
        self.teller.report(self.day)
        return self.teller.verdict(verdict(self.day))

    # --- the scenes ---

    async def opening(self) -> None:
        for name in ROLES:
            self.cast.start(name)
        await self.until(lambda: len(self.day.beats) > 2 and self.last > 8, "everybody is at work")
        self.teller.say("desk", f"agents book orders and leads stand for election: {len(ROLES)} processes")

    async def orders(self) -> None:
        """The moment in which a naive retry counts twice: the store has answered, and the agent does not know."""

        self.teller.scene("Orders", "each is one commit, under a request id")
        await self.begin("orders")
        await self.until(lambda: self.cast.died("market"), "market has died", mortal="market")
        notes = Notes.read(self.folder / "market.notes")
        [request] = [each for each in notes.asked if each not in notes.told]
        committed = await self.space.records.exists(f"order/{request}")
        self.day.cuts.append(Cut(request, committed))
        kill = Kill("market", f"before it heard the answer to {request}")
        self.cast.kills.append(kill)
        self.teller.killed("market", kill.when)
        self.cast.start("market")
        await self.until(lambda: request in Notes.read(self.folder / "market.notes").told, "market has asked again")
        total = Notes.read(self.folder / "market.notes").told[request]
        kill.successor = f"its next life asked again: {total}"
        self.teller.took_over("market", f"is back, asks again under the same request id: {total}, counted once")

    async def research(self) -> None:
        """A workflow fans out and reduces. Whoever runs it is killed when two of the six are done."""

        self.teller.scene("Research", "a workflow: six symbols in parallel, reduced to one note")
        await self.begin("research")
        await self.until(lambda: "execution" in self.seen, "a leader has started the research")
        handle = await self.space.workflows.get(EXECUTION)
        told = 0
        kill = None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.cast.check()
                log = await handle.log()
                for event in log[told:]:
                    what = name_of(event.path, self.day.symbols) if event.path else ""
                    if what and event.event == "retrying":
                        self.teller.say(event.by, f"{what}: {event.error.message if event.error else ''}; tries again")
                    elif what:
                        if kill is not None and not kill.successor:
                            kill.successor = f"{event.by} went on"
                            self.teller.took_over(event.by, "goes on after the last finished step")
                        self.teller.say(event.by, f"{what} done")
                told = len(log)
                if (await handle.status()).status == "completed":
                    break
                if kill is None and told > 2:
                    kill = self.cast.kill(log[-1].by, f"with {told - 1} of {len(self.day.symbols)} symbols done")
                    self.teller.killed(kill.name, kill.when)
                await asyncio.sleep(0.05)
        note = await handle.result()
        self.teller.say("desk", f"the note: best is {note['best']}, the mean score {note['mean']}")
        if kill is not None:
            self.cast.start(kill.name)

    async def opinions(self) -> None:
        """Four opinions in one document. Two contradict each other; who finds that is killed before it is settled."""

        self.teller.scene("Opinions", "one document, a section for each agent")
        await self.begin("opinions")
        for name in AGENTS:
            self.teller.say(name, f"contributes: {await self.record(f'said/{name}')}")
        async with holdfast.open(self.cast.url, token=self.cast.tokens["market"]) as store:
            try:
                await store.space(self.space.name).document(DOCUMENT).replace({"winner": "market"}, etag=0)
            except holdfast.AccessDenied as denied:
                self.day.refused = str(denied)
                self.teller.say("market", "tries to write the leader's part as well, and is refused")
        seen = await self.record("seen")
        self.teller.say(
            seen["by"], "finds a contradiction: " + " against ".join(seen["values"].values()), "bold yellow"
        )
        kill = self.cast.kill(seen["by"], f"leading in epoch {seen['epoch']}, the conflict unsettled")
        self.teller.killed(kill.name, kill.when)
        await self.until(lambda: self.day.beats[-1].agent != kill.name, "another one leads")
        after = self.day.beats[-1]
        self.teller.took_over(after.agent, f"leads, in epoch {after.epoch}")
        settled = await self.record("settled")
        kill.successor = f"{after.agent}, in epoch {after.epoch}, settled it"
        self.teller.say(after.agent, f"settles it for {settled['winner']}: {settled['reason']}; both opinions stay")
        self.cast.start(kill.name)

    async def decision(self) -> None:
        """Three signals, two orchestrators, one decision."""

        self.teller.scene("Decision", "three agents signal; two orchestrators run, one decides")
        await self.begin("decision")
        correlation = await self.space.correlation(CORRELATION, wait=PATIENCE_S)
        decision = await correlation.decision(wait=PATIENCE_S)
        assert decision is not None
        for name, signalled in (await correlation.signals()).items():
            wants = signalled["analysis"]
            self.teller.say(name, f"signals {wants['action']} {wants['direction'] or ''}".rstrip())
        await self.record(f"trade/{decision.id}")
        words = f"{decision.action} {decision.direction} {decision.size:,.0f}, confidence {decision.confidence:.2f}"
        self.teller.say("desk", f"decides: {words}; published once", "bold yellow")

    async def tasks(self) -> None:
        """Two functions run as processes; one of them takes more than it may."""

        self.teller.scene("Tasks", "functions in processes of their own, with limits")
        await self.begin("tasks")
        for name, limit in MEMORY_MB.items():
            await self.record(f"task/{name}")
            self.teller.say("risk", f"submits {name}, with {limit} MB and one and a half cores")
        for name in MEMORY_MB:
            status = await self.record(f"ended/{name}")
            state = await (await self.space.tasks.get(self.seen[f"task/{name}"])).state()
            words = f"{name} {status}, {state.peak_memory_mb or 0:.0f} MB at its peak"
            self.teller.say("manager", words, "" if status == "completed" else "bold red")

    async def keeper(self) -> None:
        """The keeper itself; everybody connects again by themselves."""
        self.teller.scene("The keeper", "every commit is in its file before it is answered")
        leader, orders, beats = self.day.beats[-1], self.last, len(self.day.beats)
        kill, killed_at = self.cast.kill_keeper(), time.monotonic()
        self.teller.killed("keeper", kill.when)
        self.cast.keeper.start()
        away = f"back on the same file after {time.monotonic() - killed_at:.1f} s"
        self.teller.took_over("keeper", f"is {away}")
        await self.until(lambda: self.last > orders + 8 and len(self.day.beats) > beats, "all go on")
        kill.successor = f"{away}; all went on"
        now = self.day.beats[-1]
        leads = f"{now.agent} {'leads on' if now.epoch == leader.epoch else 'leads'} in epoch {now.epoch}"
        self.teller.say("desk", f"all connect again by themselves: agents book on, {leads}")

    async def closing(self) -> None:
        self.teller.scene("The desk closes", "and the books are compared")
        await self.begin("closing")
        await self.cast.end()
        self.teller.say("desk", f"everybody has gone home, after {self.last:,} orders")
        await self.space.records.set("closed", True)

    # --- what they need ---

    async def begin(self, scene: str) -> None:
        await self.space.records.set(f"scene/{scene}", True)

    async def watch(self, cursor: str) -> None:
        """Follow the feed; it goes on by itself when the keeper comes back."""

        async for commit in self.space.watch(cursor=cursor):
            changes = {change.key: change.value for change in commit}
            if "orders" in changes:
                self.last = int(changes["orders"])
                continue
            self.seen |= changes
            if "beats" in changes:
                leader = changes["leader"]
                beat = Beat(int(changes["beats"]), leader["agent"], leader["epoch"])
                if not self.day.beats:
                    self.teller.say(beat.agent, f"leads, in epoch {beat.epoch}")
                self.day.beats.append(beat)
            if "closed" in changes:
                return

    async def record(self, key: str) -> Any:
        """The value of a record, as soon as the feed has told it."""
        await self.until(lambda: key in self.seen, f"there is {key}")
        return self.seen[key]

    async def until(self, happened: Callable[[], bool], what: str, mortal: str | None = None) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            self.cast.check(mortal=mortal)
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {PATIENCE_S:.0f} s until {what}")
            await asyncio.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fast", action="store_true", help="shorter leases, shorter steps, no pauses")
    options = parser.parse_args()
    teller = Teller()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    director = Director(folder, teller, fast=options.fast)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    well = failed = False
    try:
        well = asyncio.run(director.run())
        failed = not well
    except KeyboardInterrupt:
        teller.console.print("stopped")
    except (RuntimeError, TimeoutError, holdfast.Error, OSError) as exc:
        failed = True
        teller.console.print(f"failed: {exc!r}", style="bold red", soft_wrap=True)
    finally:
        director.cast.stop()
        if failed:
            teller.console.print(f"the store and the notes are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
