"""Other people's queues, each in a process of its own with an environment of its own: `python queue_peers.py NAME PLACE`.

Reads a number of seconds and how many messages may be in flight per line, puts no-op messages and lets them be worked on for that long,
and prints how many a second were finished. Runs in the environment that `environment()` makes, which Holdfast is no part of.

    huey           SqliteHuey with fsync: enqueue, dequeue, execute; a message is gone when it is dequeued
    simplebroker   a persistent queue: write, move to another queue, delete there
    procrastinate  deferred by as many tasks as may be in flight, done by a worker with that concurrency
    awa-pg         inserted by as many tasks as may be in flight, done by 32 workers
    celery         a solo worker in a thread, acks late, no results
    rq             a SimpleWorker, in bursts

A peer whose worker runs all the time, awa-pg and celery, can be fed in two ways: so many at once, then wait for all of them; or one more
for each that is done. Each gets the way in which it was faster when it was asked before its first turn; stderr says which.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

IN_FLIGHT = 32
PACKAGES = {
    "huey": "huey",
    "simplebroker": "simplebroker",
    "procrastinate": "procrastinate",
    "awa-pg": "awa-pg",
    "celery": "celery[redis]",
    "rq": "rq",
}
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".bench-peers"
INSTALL_S = 600

TRIAL_S = 1.0

Round = Callable[[int], Awaitable[object]]
"""Put so many messages and see them done."""
Way = Callable[[float, int], Awaitable[int]]
"""Put messages for so many seconds, so many in flight, and see them done; gives how many."""


def rounds(round_: Round) -> Way:
    """So many at once, then the next so many."""

    async def at_once(seconds: float, in_flight: int) -> int:
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            await round_(in_flight)
            count += in_flight
        return count

    return at_once


def environment(packages: Iterable[str] = tuple(PACKAGES.values()), folder: Path = ENVIRONMENT) -> Path:
    """The Python of the peers, made on first use."""
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_S)
        command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
        done.touch()
    return python


async def huey(place: str) -> list[Way]:
    from huey import SqliteHuey

    queue = SqliteHuey(filename=place, fsync=True, results=False)

    @queue.task()
    def work(number: int) -> None:
        pass

    async def round_(count: int) -> None:
        for number in range(count):
            work(number)
        for _ in range(count):
            queue.execute(queue.dequeue())

    return [rounds(round_)]


async def simplebroker(place: str) -> list[Way]:
    from simplebroker import Queue

    inbox, reserved = (Queue(name, db_path=place, persistent=True) for name in ("inbox", "reserved"))

    async def round_(count: int) -> None:
        for number in range(count):
            inbox.write(str(number))
        for _ in range(count):
            _, id = inbox.move_one(reserved, with_timestamps=True)
            reserved.delete(message_id=id)

    return [rounds(round_)]


async def procrastinate(place: str) -> list[Way]:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=place, min_size=IN_FLIGHT, max_size=IN_FLIGHT + 4))

    @app.task(queue="work")
    async def work(number: int) -> None:
        pass

    await app.open_async()
    await app.schema_manager.apply_schema_async()

    async def round_(count: int) -> None:
        await asyncio.gather(*(work.defer_async(number=number) for number in range(count)))
        await app.run_worker_async(
            wait=False,
            concurrency=count,
            install_signal_handlers=False,
            listen_notify=False,
            delete_jobs="successful",
        )

    return [rounds(round_)]


async def awa(place: str) -> list[Way]:
    from dataclasses import make_dataclass

    from awa import AsyncClient

    client = AsyncClient(place)
    await client.migrate()
    work = make_dataclass("Work", [("number", int)])
    done = asyncio.Semaphore(0)

    @client.task(work, queue="work")
    async def handle(job: object) -> None:
        done.release()

    await client.start([("work", IN_FLIGHT)])

    async def round_(count: int) -> None:
        await asyncio.gather(*(client.insert(work(number), queue="work") for number in range(count)))
        for _ in range(count):
            await done.acquire()

    async def steadily(seconds: float, in_flight: int) -> int:
        end, count = time.perf_counter() + seconds, 0

        async def feed() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await client.insert(work(count), queue="work")
                await done.acquire()
                count += 1

        await asyncio.gather(*(feed() for _ in range(in_flight)))
        return count

    return [rounds(round_), steadily]


async def celery(place: str) -> list[Way]:
    from celery import Celery

    app = Celery("bench", broker=place)
    app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=IN_FLIGHT)
    done = threading.Semaphore(0)

    @app.task(name="work")
    def work(number: int) -> None:
        done.release()

    worker = app.Worker(pool="solo", concurrency=1, loglevel="ERROR", without_gossip=True, without_mingle=True)
    threading.Thread(target=worker.start, daemon=True).start()

    async def round_(count: int) -> None:
        for number in range(count):
            work.delay(number)
        for _ in range(count):
            done.acquire()

    async def steadily(seconds: float, in_flight: int) -> int:
        end, count = time.perf_counter() + seconds, in_flight
        for number in range(in_flight):
            work.delay(number)
        while time.perf_counter() < end:
            done.acquire()
            work.delay(count)
            count += 1
        for _ in range(in_flight):
            done.acquire()
        return count

    return [rounds(round_), steadily]


def nothing(number: int) -> None:
    """What an RQ job does."""


async def rq(place: str) -> list[Way]:
    from redis import Redis
    from rq import Queue, SimpleWorker

    connection = Redis.from_url(place)
    queue = Queue("work", connection=connection)
    worker = SimpleWorker([queue], connection=connection)
    sys.modules["queue_peers"] = sys.modules["__main__"]
    nothing.__module__ = "queue_peers"

    async def round_(count: int) -> None:
        for number in range(count):
            queue.enqueue(nothing, number, result_ttl=0)
        worker.work(burst=True, logging_level="ERROR")

    return [rounds(round_)]


PEERS = {
    "huey": huey,
    "simplebroker": simplebroker,
    "procrastinate": procrastinate,
    "awa-pg": awa,
    "celery": celery,
    "rq": rq,
}


async def best_of(ways: list[Way]) -> tuple[Way, str]:
    """The way in which a peer is fastest, and how they did."""
    if len(ways) == 1:
        return ways[0], ""
    counts = [await way(TRIAL_S, IN_FLIGHT) for way in ways for _ in range(2)][1::2]  # the first time is to warm up
    way = ways[counts.index(max(counts))]
    told = ", ".join(f"{count} {each.__name__}" for each, count in zip(ways, counts, strict=True))
    return way, f"{told} in {TRIAL_S:g} s; so it is fed {way.__name__}"


async def main(name: str, place: str) -> None:
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some of them greet
    way, told = await best_of(await PEERS[name](place))
    print("ready", told, file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seconds, in_flight = line.split()
        began = time.perf_counter()
        count = await way(float(seconds), int(in_flight))
        print(count / (time.perf_counter() - began), file=answers, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
