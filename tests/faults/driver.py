"""Real processes on one store, some of them killed, and the inspection of what they leave.

`Fleet` starts worker processes, kills them with SIGKILL at random instants and starts each again, until every one has done
its share or the deadline has passed; whatever happens, none is left behind. `contradictions` compares what the clients
were told with the feed and with the entries that are there in the end: the feed is replayed as the operations it names.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import SystemClock
from holdfast.codec import integer
from holdfast.engine import SYSTEM_ACTOR, Batch, ChangeSet, Engine, Entry, Put
from holdfast.engines.registry import open_engine
from holdfast.testing.history import Operation, Started, events
from holdfast.testing.linearizability import check, is_write
from tests.faults import nursery
from tests.faults.nursery import ROOT, Child

__all__ = ["ROOT"]

SPACE = "crash"
END = "records/end"
KILLED_EARLY = 0.1
"""How many of the kills that come before a worker has done much are carried out; else a slow machine would do nothing but start."""
LIFE_BYTES_MAX = 150_000
OPERATION_BYTES = 100
"""Less than what is recorded of an operation."""


class Worker:
    """One worker through all its lives."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.life = 0
        self.left = fleet.operations
        """What of its share its present life began with."""
        self.process = self._spawn()

    def _spawn(self) -> Child:
        settings = {
            "url": self.fleet.url,
            "folder": str(self.fleet.folder),
            "name": self.name,
            "life": self.life,
            "space": SPACE,
            "keys": self.fleet.keys,
            "clients": self.fleet.clients,
            "operations": max(1, self.left),
        }
        return nursery.start("tests.faults.worker", settings, self.fleet.folder / f"{self.name}.log")

    def files(self) -> list[Path]:
        return [
            path for life in range(self.life + 1) if (path := self.fleet.folder / f"{self.name}.{life}.jsonl").exists()
        ]

    def may_die(self, rng: random.Random) -> bool:
        """Mostly when it has done some of its share; and not when it has only its end to reach, or it would never reach it."""
        if self.left <= 0:
            return False
        recorded = self.fleet.folder / f"{self.name}.{self.life}.jsonl"
        size = recorded.stat().st_size if recorded.exists() else 0
        enough = rng.randrange(1, 2 + min(LIFE_BYTES_MAX, self.left * OPERATION_BYTES))
        return size >= enough or rng.random() < KILLED_EARLY

    def sent(self) -> int:
        return sum(isinstance(event, Started) for path in self.files() for event in events(path))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        # A life that was killed before it wrote anything leaves no file; its number is used again.
        self.life = len(self.files())
        self.left = self.fleet.operations - self.sent()
        self.process = self._spawn()


class Fleet:
    """Workers on one store, by default a file in `folder`, each with `clients` clients that send `operations` in all."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int,
        clients: int,
        operations: int,
        keys: int,
        timeout: float,
        url: str | None = None,
    ) -> None:
        self.folder = folder
        self.url = url or str(folder / "store.db")
        self.clients = clients
        self.operations = operations
        self.keys = [f"records/{number}" for number in range(keys)]
        self.deadline = time.monotonic() + timeout
        self.kills = 0
        self.workers = [Worker(self, f"w{number}") for number in range(workers)]

    def run(self, *, kill_every: float | None, kills_max: int | None = None, seed: int = 1) -> None:
        """Let them finish; meanwhile kill one about every `kill_every` seconds, at a random instant, and start it again."""
        rng = random.Random(seed)
        next_kill = time.monotonic() + (kill_every or 0)
        while any(running := [worker for worker in self.workers if worker.process.poll() is None]):
            self.check()
            if kill_every is not None and time.monotonic() >= next_kill and self.kills != kills_max:
                victim = rng.choice(running)
                if not self.kills or victim.may_die(rng):
                    victim.kill()
                    victim.restart()
                    self.kills += 1
                next_kill = time.monotonic() + rng.uniform(0, 2 * kill_every)
            time.sleep(rng.uniform(0.001, 0.01))
        self.check()

    def work_then_kill_all(self, seed: int) -> None:
        """Start whoever does not run, wait until each has recorded a random amount, and kill all of them at once."""
        rng = random.Random(seed)
        for worker in self.workers:
            if worker.process.poll() is not None:
                worker.restart()
        grown = [worker.fleet.folder / f"{worker.name}.{worker.life}.jsonl" for worker in self.workers]
        size = rng.randrange(4096, 65536)
        while not all(path.exists() and path.stat().st_size > size for path in grown):
            self.check()
            time.sleep(0.01)
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()

    def check(self) -> None:
        """Fail when a worker has, or when the time is over."""
        for worker in self.workers:
            if worker.process.poll() not in (None, 0):
                log = (self.folder / f"{worker.name}.log").read_text()
                raise AssertionError(f"{worker.name} ended with {worker.process.returncode}:\n{log[-4000:]}")
        if time.monotonic() > self.deadline:
            done = {worker.name: worker.sent() for worker in self.workers}
            raise AssertionError(f"not done in time; operations sent: {done}")

    def files(self) -> list[Path]:
        return [path for worker in self.workers for path in worker.files()]

    def stop(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()


@contextmanager
def fleet(folder: Path, **settings: Any) -> Iterator[Fleet]:
    """A fleet at work; none of its processes outlives this."""
    running = Fleet(folder, **settings)
    try:
        yield running
    finally:
        running.stop()


async def opened(url: str) -> Engine:
    """The store; a keeper's token is in the environment, where workers find it too."""
    token = os.environ.get("HOLDFAST_TOKEN") if url.startswith("holdfast") else None
    return await open_engine(url, SystemClock(), token)


async def whole_feed(engine: Engine, space: str = SPACE) -> list[ChangeSet]:
    """Every commit of the space, from its beginning to a last one that is made here."""
    last = await engine.commit(space, Batch("driver", (Put(END, b"1"),)))
    feed = []
    async for commit in engine.watch(space, cursor="r0"):
        feed.append(commit)
        if commit.version >= last.version:
            break
    return feed


async def all_entries(engine: Engine, space: str = SPACE) -> dict[str, Entry]:
    page = await engine.scan(space, "records/", limit=10_000)
    assert not page.more
    return {entry.key: entry for entry in page.entries}


async def judge(history: list[Operation], url: str) -> Counter[str]:
    """Fail on whatever is wrong with what clients were told and what they left; otherwise count the outcomes."""
    violations = [str(violation) for violation in check(history)]
    assert not violations, "\n".join(violations)
    engine = await opened(url)
    try:
        feed = await whole_feed(engine)
        entries = await all_entries(engine)
        findings = await engine.inspect()
    finally:
        await engine.close()
    found = list(contradictions(history, feed, entries))
    assert not found, "\n".join(found[:20])
    assert [finding for finding in findings if finding.level == "error"] == []
    return Counter(op.outcome for op in history)


class _Held(NamedTuple):
    value: str
    version: int


def contradictions(history: list[Operation], feed: list[ChangeSet], entries: dict[str, Entry]) -> Iterator[str]:
    """Where the answers, the feed and the entries do not agree."""
    operations = {op.id: op for op in history}
    state: dict[str, _Held] = {}
    told: dict[str, int] = {}
    version = 0
    for commit in feed:
        if commit.version <= version:
            yield f"the feed goes from version {version} to {commit.version}"
        version = commit.version
        if commit.actor == SYSTEM_ACTOR:
            continue  # a keeper looks after its spaces
        (change,) = commit.changes
        if change.key == END:
            state[END] = _Held("1", version)
            continue
        op = operations.get(commit.request_id or "")
        if op is None:
            yield f"version {version} is of request {commit.request_id}, which nobody sent"
            continue
        if op.id in told:
            yield f"{op} took effect twice, as version {told[op.id]} and as version {version}"
        told[op.id] = version
        if op.outcome in ("refused", "failed"):
            yield f"{op} took effect as version {version}"
        value = _effect(op, state.get(op.key))
        shown = bytes(change.value).decode() if change.exists else None
        if (change.key, shown) != (op.key, value):
            yield f"{op} became {change} at version {version}"
        state.pop(op.key, None)
        if value is not None:
            state[op.key] = _Held(value, version)
    for op in history:
        if is_write(op) and told.get(op.id) != op.version:
            yield f"{op} was acknowledged, and the feed has it as version {told.get(op.id)}"
    held = {key: _Held(entry.value.decode(), entry.version) for key, entry in entries.items()}
    for key in held.keys() | state.keys():
        if held.get(key) != state.get(key):
            yield f"{key} is {held.get(key)}, and by the feed {state.get(key)}"


def _effect(op: Operation, held: _Held | None) -> str | None:
    """What the operation makes of the key; a text that no store would write when it should not have taken effect."""
    if op.kind == "increment":
        number = 0 if held is None else integer(held.value.encode())
        return "an increment of text" if number is None else str(number + op.delta)
    if op.kind == "delete":
        return "a delete of nothing" if held is None else None
    if op.kind == "swap" and op.expect != (None if held is None else held.value):
        return "a swap of another value"
    if op.kind == "swap_version" and (held is None or op.expect_version != held.version):
        return "a swap of another version"
    return op.value
