"""A keeper over a store that needs no server, its HTTP port, and clients of it.

The port knows no engine: a test runs in memory or on a file, as its name tells, and on both in a soak.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import ManualClock, Store
from tests.server.http.keeping import ADMIN, MARKET, RISK, Keeper, Running, running
from tests.soak import in_turn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", in_turn(metafunc.definition.nodeid, ["memory", "sqlite"]))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(kind: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = "memory:" if kind == "memory" else str(tmp_path / "team.db")
    async with holdfast.open(url, clock=clock, background=False) as opened:
        yield opened


@pytest.fixture
async def port(store: Store, clock: ManualClock) -> AsyncIterator[Running]:
    async with running(Keeper(store, clock)) as opened:
        yield opened


@pytest.fixture
async def market(port: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client(MARKET) as client:
        yield client


@pytest.fixture
async def risk(port: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client(RISK) as client:
        yield client


@pytest.fixture
async def admin(port: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client(ADMIN) as client:
        yield client
