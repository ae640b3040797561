"""Other people's queues, each in a process of its own with an environment of its own: `python queue_peers.py NAME PLACE`.

Reads a number of seconds per line, puts no-op messages and lets them be worked on for that long, IN_FLIGHT at a time, and prints how many
a second were finished. Runs in the environment that `environment()` makes, which Holdfast is no part of.

    huey           SqliteHuey with fsync: enqueue, dequeue, execute; a message is gone when it is dequeued
    simplebroker   a persistent queue: write, move to another queue, delete there
    procrastinate  deferred by 32 tasks, done by a worker with concurrency 32
    awa-pg         inserted by 32 tasks, done by 32 workers
    celery         a solo worker in a thread, acks late, no results
    rq             a SimpleWorker, in bursts
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

Round = Callable[[], Awaitable[object]]
"""Put IN_FLIGHT messages and see them done."""


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


async def huey(place: str) -> Round:
    from huey import SqliteHuey

    queue = SqliteHuey(filename=place, fsync=True, results=False)

    @queue.task()
    def work(number: int) -> None:
        pass

    async def round_() -> None:
        for number in range(IN_FLIGHT):
            work(number)
        for _ in range(IN_FLIGHT):
            queue.execute(queue.dequeue())

    return round_


async def simplebroker(place: str) -> Round:
    from simplebroker import Queue

    inbox, reserved = (Queue(name, db_path=place, persistent=True) for name in ("inbox", "reserved"))

    async def round_() -> None:
        for number in range(IN_FLIGHT):
            inbox.write(str(number))
        for _ in range(IN_FLIGHT):
            _, id = inbox.move_one(reserved, with_timestamps=True)
            reserved.delete(message_id=id)

    return round_


async def procrastinate(place: str) -> Round:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=place, min_size=IN_FLIGHT, max_size=IN_FLIGHT + 4))

    @app.task(queue="work")
    async def work(number: int) -> None:
        pass

    await app.open_async()
    await app.schema_manager.apply_schema_async()

    async def round_() -> None:
        await asyncio.gather(*(work.defer_async(number=number) for number in range(IN_FLIGHT)))
        await app.run_worker_async(
            wait=False,
            concurrency=IN_FLIGHT,
            install_signal_handlers=False,
            listen_notify=False,
            delete_jobs="successful",
        )

    return round_


async def awa(place: str) -> Round:
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

    async def round_() -> None:
        await asyncio.gather(*(client.insert(work(number), queue="work") for number in range(IN_FLIGHT)))
        for _ in range(IN_FLIGHT):
            await done.acquire()

    return round_


async def celery(place: str) -> Round:
    from celery import Celery

    app = Celery("bench", broker=place)
    app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=IN_FLIGHT)
    done = threading.Semaphore(0)

    @app.task(name="work")
    def work(number: int) -> None:
        done.release()

    worker = app.Worker(pool="solo", concurrency=1, loglevel="ERROR", without_gossip=True, without_mingle=True)
    threading.Thread(target=worker.start, daemon=True).start()

    async def round_() -> None:
        for number in range(IN_FLIGHT):
            work.delay(number)
        for _ in range(IN_FLIGHT):
            done.acquire()

    return round_


def nothing(number: int) -> None:
    """What an RQ job does."""


async def rq(place: str) -> Round:
    from redis import Redis
    from rq import Queue, SimpleWorker

    connection = Redis.from_url(place)
    queue = Queue("work", connection=connection)
    worker = SimpleWorker([queue], connection=connection)
    sys.modules["queue_peers"] = sys.modules["__main__"]
    nothing.__module__ = "queue_peers"

    async def round_() -> None:
        for number in range(IN_FLIGHT):
            queue.enqueue(nothing, number, result_ttl=0)
        worker.work(burst=True, logging_level="ERROR")

    return round_


PEERS = {
    "huey": huey,
    "simplebroker": simplebroker,
    "procrastinate": procrastinate,
    "awa-pg": awa,
    "celery": celery,
    "rq": rq,
}


async def main(name: str, place: str) -> None:
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some of them greet
    round_ = await PEERS[name](place)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        began = time.perf_counter()
        end, count = began + float(line), 0
        while (now := time.perf_counter()) < end:
            await round_()
            count += IN_FLIGHT
        print(count / (now - began), file=answers, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
