"""Servers that tests share: each is started once, when the first test asks for it, and stopped at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisCluster, RedisServer
from tests.schemas import Schemas
from tests.servers import started

settings.register_profile("holdfast", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("holdfast")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server; tests use schemas of their own."""
    with started(PostgresServer.temporary()) as running:
        yield running


@pytest.fixture(scope="session")
def schemas(postgres_server: PostgresServer) -> Iterator[Schemas]:
    """Empty schemas of it, used again and again."""
    pool = Schemas(postgres_server)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server that fsyncs every write; tests use prefixes of their own."""
    with started(RedisServer.temporary()) as running:
        yield running


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """Three primaries."""
    with started(RedisCluster.temporary()) as running:
        yield running
