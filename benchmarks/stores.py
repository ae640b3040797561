"""A store of each kind for a benchmark, with a private server where it needs one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisServer

KINDS: Final = ("sqlite", "memory", "redis", "postgres")

NewUrl = Callable[[], str]
"""Gives the URL of one more, empty store."""


@contextmanager
def stores(kind: str, folder: Path) -> Iterator[NewUrl]:
    """New stores of a kind, as long as this lasts."""
    numbers = itertools.count(1)
    if kind == "redis":
        with RedisServer.temporary() as redis:
            yield lambda: f"{redis.url}?prefix=bench{next(numbers)}"
    elif kind == "postgres":
        with PostgresServer.temporary() as postgres:
            yield lambda: f"{postgres.url}?schema=bench{next(numbers)}"
    elif kind == "sqlite":
        yield lambda: str(folder / f"store{next(numbers)}.db")
    else:
        yield lambda: "memory:"
