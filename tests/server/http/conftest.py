"""A keeper over each kind of store that needs no server, its HTTP port, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import ManualClock, Store
from tests.server.http.keeping import ADMIN, MARKET, RISK, Keeper, Running, running


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = "memory:" if request.param == "memory" else str(tmp_path / "team.db")
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
