"""Other people's durable executions, each in a process and an environment of its own: `python workflow_peers.py NAME PLACE`.

Reads a number of seconds per line, runs executions of three no-op steps one after the other for that long, and prints how many a
second were finished. Runs in the environment that `environment()` makes, which Holdfast is no part of.

    dbos       a workflow with three steps, called; on SQLite as it comes, or on PostgreSQL
    dbos-wal   the same on SQLite, with WAL switched on
    absurd     a task with three steps, spawned and worked on in the same process
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("dbos", "absurd-sdk", "absurdctl")
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".bench-peers-flows"


def dbos(place: str) -> Callable[[], object]:
    from dbos import DBOS

    url = place if "://" in place else f"sqlite:///{place}"
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "run_admin_server": False})

    @DBOS.step()
    def nothing(number: int) -> int:
        return number

    @DBOS.workflow()
    def three(number: int) -> int:
        for _ in range(3):
            nothing(number)
        return number

    DBOS.launch()
    return lambda: three(1)


def dbos_wal(place: str) -> Callable[[], object]:
    connection = sqlite3.connect(place)
    if connection.execute("PRAGMA journal_mode = WAL").fetchall() != [("wal",)]:
        raise RuntimeError(f"{place} cannot be put into WAL mode")
    connection.close()
    return dbos(place)


def absurd(place: str) -> Callable[[], object]:
    import psycopg
    from absurd_sdk import Absurd
    from absurdctl import BUNDLED_SCHEMA_SQL

    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute(BUNDLED_SCHEMA_SQL)
    app = Absurd(place, queue_name="bench")
    app.create_queue("bench")

    @app.register_task(name="three")
    def three(params: object, ctx: object) -> object:
        for number in range(3):
            ctx.step(f"step{number}", lambda: 1)  # type: ignore[attr-defined]
        return 1

    def run() -> None:
        app.spawn("three", {"number": 1})
        app.work_batch(batch_size=1)

    return run


PEERS = {"dbos": dbos, "dbos-wal": dbos_wal, "absurd": absurd}


async def main(name: str, place: str) -> None:
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = PEERS[name](place)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        began = time.perf_counter()
        end, count = began + float(line), 0
        while (now := time.perf_counter()) < end:
            run()
            count += 1
        print(count / (now - began), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
