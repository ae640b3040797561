"""Stores for the tests of layers: every test runs on every engine, with a clock it moves itself.

One of them is a memory engine behind the policy of a keeper: no layer needs more than an agent may do.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import ManualClock, Space, Store, blocking
from holdfast.engines import registry
from tests.layers.policed import open_policed

_numbers = itertools.count(1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an empty store, to be copied: making one takes five fsyncs."""
    path = tmp_path_factory.mktemp("empty") / "team.db"
    with blocking.open(str(path), background=False):
        pass
    return path


@pytest.fixture(params=["memory", "policed", "sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A new store of each kind; what one of them needs is not made for the others."""
    if request.param == "policed":
        if getattr(request.module, "FOR_ADMINISTRATORS", False):
            pytest.skip("agents have no business in this layer")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(registry.ENGINES, "policed", open_policed)
            yield "policed:"
    elif request.param == "redis":
        yield f"{request.getfixturevalue('redis_server').url}?prefix=layers{next(_numbers)}"
    elif request.param == "postgres":
        with request.getfixturevalue("schemas").empty() as empty:
            yield empty
    elif request.param == "sqlite":
        yield shutil.copy(request.getfixturevalue("empty_file"), f"{request.getfixturevalue('tmp_path')}/team.db")
    else:
        yield "memory:"


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
