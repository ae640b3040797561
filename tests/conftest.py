"""Servers that tests share: each is started once, when the first test asks for it, and stopped at the end."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.places import real_disk
from hypothesis import settings

from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.redis import RedisCluster, RedisServer
from tests.schemas import Schemas
from tests.servers import started
from tests.soak import SEED

TOLD_MAX = 1500
"""Characters of what is told of a failure at the end of `make test`; all of it is told above."""

settings.register_profile("holdfast", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("holdfast")


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end; the search for garbage need not go through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which samples were taken. `make test` runs the suite in two parts and tells at its end what failed in either."""
    terminalreporter.write_line(f"samples of this run: HOLDFAST_SEED={SEED}")
    reports = [each for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, [])]
    if reports and "HOLDFAST_FAILED" in os.environ:
        with Path(os.environ["HOLDFAST_FAILED"]).open("a") as file:
            file.writelines(f"{each.nodeid}\n{each.longreprtext[-TOLD_MAX:]}\n" for each in reports)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a disk, for what must not be in memory; `tmp_path` may be."""
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=real_disk()) as folder:
        yield Path(folder)


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
