"""The peers of the engines with a server: their own drivers, on the same server, with the same durability.

Redis: `SET` with redis-py's asyncio client, whose pool gives each concurrent writer a connection. PostgreSQL: an upsert
into a table of two columns with psycopg, prepared, each its own transaction, a connection for each writer. Neither has a
feed, versions, an audit or request ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import psycopg
import redis.asyncio

Write = Callable[[str, str], Awaitable[object]]

TABLE: Final = "CREATE TABLE IF NOT EXISTS bench_kv (key text PRIMARY KEY, value text NOT NULL) WITH (fillfactor = 70)"
UPSERT: Final = "INSERT INTO bench_kv VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
REDIS: Final = f"redis-py asyncio {redis.__version__}"
POSTGRES: Final = f"psycopg {psycopg.__version__}"


@asynccontextmanager
async def redis_writer(url: str) -> AsyncIterator[Write]:
    """A SET, from any number of tasks."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.ping()

        async def write(key: str, value: str) -> object:
            return await client.set(key, value)

        yield write


@asynccontextmanager
async def postgres_writers(url: str, count: int) -> AsyncIterator[list[Write]]:
    """Upserts, each on a connection of its own."""
    async with AsyncExitStack() as stack:
        writes: list[Write] = []
        for _ in range(count):
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=0)
            await stack.enter_async_context(connection)
            writes.append(_upsert_on(connection))
        yield writes


def _upsert_on(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> Write:
    cursor = connection.cursor()

    async def write(key: str, value: str) -> object:
        return await cursor.execute(UPSERT, (key, value))

    return write


def make_table(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
