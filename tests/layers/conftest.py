"""Stores for the tests of layers: every test runs on every engine, with a clock it moves itself.

One of them is a memory engine behind the policy of a keeper: no layer needs more than an agent may do. A module whose
ON_SERVERS names tests runs only those on Redis and PostgreSQL, and all of them there in the soak.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import ManualClock, Space, Store
from holdfast.engines import registry
from tests.layers.policed import open_policed

_numbers = itertools.count(1)
SOAK = os.environ.get("HOLDFAST_SOAK") == "1"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "policed", "sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new store of each kind."""
    chosen = getattr(request.module, "ON_SERVERS", None)
    on_server = request.param in ("redis", "postgres")
    if chosen is not None and on_server and not SOAK and request.function.__name__ not in chosen:
        pytest.skip("runs on servers in the soak")
    if request.param == "policed":
        if getattr(request.module, "FOR_ADMINISTRATORS", False):
            pytest.skip("agents have no business in this layer")
        monkeypatch.setitem(registry.ENGINES, "policed", open_policed)
        yield "policed:"
    elif request.param == "redis":
        yield f"{request.getfixturevalue('redis_server').url}?prefix=layers{next(_numbers)}"
    elif request.param == "postgres":
        with request.getfixturevalue("schemas").empty() as empty:
            yield empty
    else:
        yield "memory:" if request.param == "memory" else str(tmp_path / "team.db")


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Store]:
    async with holdfast.open(url, clock=clock, background=False) as opened:
        yield opened


@pytest.fixture
def space(store: Store) -> Space:
    return store.space("contoso", agent="market")


@pytest.fixture
def boss(store: Store) -> Space:
    """An orchestrator, where there is a policy."""
    return store.space("contoso", agent="boss")


@pytest.fixture
def admin(store: Store) -> Space:
    """An administrator, where there is a policy."""
    return store.space("contoso", agent="admin")


async def everything(space: Space) -> tuple[object, ...]:
    """All a refusal must leave as it was: entries, revision, usage."""
    engine, info = space._scope.engine, await space._scope.engine.spaces(space.name)
    page = await engine.scan(space.name, "", limit=10_000)
    return (page.entries, [(each.revision, each.usage) for each in info])
