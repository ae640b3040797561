"""The clients of one server of the keeper's benchmarks, in a process of their own: `python -m benchmarks.keeper_clients`.

It is told where the server is and what to do there (JOBS), then, again and again, `{"in_flight", "one_name", "seconds"}`: so
many tasks repeat the job for that long. It answers with how many were done, how long each took and what CPU it used.

Every server is used through the fastest client there is for Python: ours through the library with an agent's token, etcd
through `etcd_client.py`, Redis through redis-py with hiredis, PostgreSQL through psycopg's C, all on uvloop. `CONNECTIONS`
says over how many connections; where another number was faster, that one is taken.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import psycopg
import redis.asyncio
import uvloop

import holdfast
from benchmarks import server_peers
from benchmarks.children import orders, say
from benchmarks.etcd_client import EtcdClient
from holdfast import Space

CONNECTIONS: Final = {"ours": 8, "etcd": 8, "redis": 128, "postgres": 32}
"""Redis and PostgreSQL answer one request of a connection at a time: eight connections made a third of these rates."""
STORES: Final = {"set": CONNECTIONS["ours"], "get": CONNECTIONS["ours"], "lock": 1}
"""Of ours, by job. Tasks of one process share what they know of a line, if they share their store. etcd's locks are as fast on one as on 32."""
KEYS: Final = 1024
VALUE_CHARS: Final = 254
"""With its quotation marks: 256 bytes of JSON."""
TTL_S: Final = 60
RETRY_S: Final = 0.001
"""How often redis-py's lock looks whether it is free; its default of 0.1 s would be far slower."""
LEASE_S: Final = 3600
LOCKERS_MAX: Final = 32
"""Each has a lease of its own: for etcd, who comes with the same lease has the lock already."""

Step = Callable[[], Awaitable[object]]
Steps = Callable[[int, bool], Step]
"""What a task repeats, by its number; all tasks on one name, or each on its own."""

_numbers = itertools.count(1)


def key_of(number: int) -> str:
    return f"agents/{number % KEYS:04d}/state"


def next_row() -> tuple[str, str]:
    number = next(_numbers)
    return key_of(number), f"{number:012d}".ljust(VALUE_CHARS, "x")


def _name(task: int, one_name: bool) -> str:
    return "the-one" if one_name else f"task-{task:04d}"


@asynccontextmanager
async def ours(job: str, target: dict[str, Any]) -> AsyncIterator[Steps]:
    async with AsyncExitStack() as stack:
        spaces: list[Space] = []
        for _ in range(STORES[job]):
            store = holdfast.open(target["url"], token=target["token"])
            spaces.append((await stack.enter_async_context(store)).space("bench"))

        def steps(task: int, one_name: bool) -> Step:
            space = spaces[task % len(spaces)]

            async def set() -> None:
                await space.records.set(*next_row())

            async def get() -> None:
                if await space.records.get(key_of(next(_numbers))) is None:
                    raise RuntimeError("a key that was set is not there")

            async def lock() -> None:
                async with space.lock(_name(task, one_name), ttl=TTL_S, wait=TTL_S):
                    pass

            return {"set": set, "get": get, "lock": lock}[job]

        if job == "get":
            for _ in range(KEYS):
                await spaces[0].records.set(*next_row())
        yield steps


@asynccontextmanager
async def etcd(job: str, target: dict[str, Any]) -> AsyncIterator[Steps]:
    client = await EtcdClient.connect("127.0.0.1", target["port"], CONNECTIONS["etcd"])
    leases = [await client.lease(LEASE_S) for _ in range(LOCKERS_MAX if job == "lock" else 1)]

    def steps(task: int, one_name: bool) -> Step:
        name, lease = _name(task, one_name).encode(), leases[task % len(leases)]

        async def set() -> None:
            key, value = next_row()
            await client.put(key.encode(), f'"{value}"'.encode())

        async def get() -> None:
            if await client.get(key_of(next(_numbers)).encode()) is None:
                raise RuntimeError("a key that was set is not there")

        async def lock() -> None:
            await client.unlock(await client.lock(name, lease))

        return {"set": set, "get": get, "lock": lock}[job]

    if job == "get":
        for _ in range(KEYS):
            key, value = next_row()
            await client.put(key.encode(), f'"{value}"'.encode())
        for _ in range(
            5
        ):  # etcd 3.4 copies its buffer of recent writes at each read, until some other write has emptied it
            await client.lease(LEASE_S)
            await asyncio.sleep(0.15)
    try:
        yield steps
    finally:
        client.close()


@asynccontextmanager
async def of_redis(job: str, target: dict[str, Any]) -> AsyncIterator[Steps]:
    async with AsyncExitStack() as stack:
        clients: list[redis.asyncio.Redis] = []
        for _ in range(CONNECTIONS["redis"]):
            client = redis.asyncio.Redis.from_url(target["url"], single_connection_client=True)
            clients.append(await stack.enter_async_context(client))

        def steps(task: int, one_name: bool) -> Step:
            client = clients[task % len(clients)]

            async def set() -> None:
                await client.set(*next_row())

            async def get() -> None:
                if await client.get(key_of(next(_numbers))) is None:
                    raise RuntimeError("a key that was set is not there")

            async def lock() -> None:
                async with client.lock(_name(task, one_name), timeout=TTL_S, sleep=RETRY_S):
                    pass

            return {"set": set, "get": get, "lock": lock}[job]

        if job == "get":
            for _ in range(KEYS):
                await clients[0].set(*next_row())
        yield steps


@asynccontextmanager
async def postgres(job: str, target: dict[str, Any]) -> AsyncIterator[Steps]:
    """A lock is an advisory one and a durable row that tells who has it, in one transaction: two trips, one fsync."""
    async with AsyncExitStack() as stack:
        connections: list[psycopg.AsyncConnection[tuple[object, ...]]] = []
        for _ in range(CONNECTIONS["postgres"]):
            made = await psycopg.AsyncConnection.connect(target["url"], autocommit=True, prepare_threshold=0)
            connections.append(await stack.enter_async_context(made))

        def steps(task: int, one_name: bool) -> Step:
            connection = connections[task % len(connections)]
            cursor, name = connection.cursor(), _name(task, one_name)
            take = f"BEGIN; SELECT pg_advisory_xact_lock(hashtext('{name}'));"
            take += f"INSERT INTO bench_kv VALUES ('{name}', '{task}') ON CONFLICT (key) DO UPDATE SET value = '{task}'"

            async def set() -> None:
                await cursor.execute(server_peers.UPSERT, next_row())

            async def get() -> None:
                await cursor.execute("SELECT value FROM bench_kv WHERE key = %s", (key_of(next(_numbers)),))
                if await cursor.fetchone() is None:
                    raise RuntimeError("a key that was set is not there")

            async def lock() -> None:
                await cursor.execute(take.encode(), prepare=False)
                await cursor.execute("COMMIT")

            return {"set": set, "get": get, "lock": lock}[job]

        if job == "get":
            for _ in range(KEYS):
                await connections[0].execute(server_peers.UPSERT, next_row())
        yield steps


JOBS: Final = ("set", "get", "lock")
CLIENTS: Final = {"ours": ours, "etcd": etcd, "redis": of_redis, "postgres": postgres}


async def repeat(step: Step, end: float, took: list[int]) -> None:
    clock = time.perf_counter
    began = clock()
    while began < end:
        await step()
        now = clock()
        took.append(int((now - began) * 1e6))
        began = now


async def work() -> None:
    say(ready=True)
    incoming = orders()
    target = next(incoming)
    async with CLIENTS[target["kind"]](target["job"], target) as steps:
        say(connected=True)
        for order in incoming:
            tasks = [steps(number, order["one_name"]) for number in range(order["in_flight"])]
            took: list[int] = []
            began, used = time.perf_counter(), time.process_time()
            end = began + order["seconds"]
            await asyncio.gather(*(repeat(step, end, took) for step in tasks))
            say(took_s=time.perf_counter() - began, took_us=took, cpu_s=time.process_time() - used)


if __name__ == "__main__":
    uvloop.run(work())
