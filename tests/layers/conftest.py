"""Stores for the tests of layers, with a clock that each test moves itself.

A layer knows no engine, and that all engines do the same is what the conformance suite proves. So a test runs on the memory
engine behind the policy of a keeper (no layer needs more than an agent may do), and on one engine more, without a policy,
which the test's name tells. A test of what engines do each in its own way is marked `every_engine`. In a soak, all of
them run everywhere.
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
from tests.soak import SOAK, in_turn

KEPT = ["sqlite", "redis", "postgres"]
"""Stores outside the process."""

_numbers = itertools.count(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a store and does not say on what runs on these."""
    told = any("url" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "url" in metafunc.fixturenames and not told:
        metafunc.parametrize("url", kinds_for(metafunc), indirect=True)


def kinds_for(metafunc: pytest.Metafunc) -> list[str]:
    """In a module that is FOR_ADMINISTRATORS agents have no business: nothing is tested with a policy."""
    in_memory = ["memory"] if getattr(metafunc.module, "FOR_ADMINISTRATORS", False) else ["memory", "policed"]
    if SOAK or metafunc.definition.get_closest_marker("every_engine"):
        return [*in_memory, *KEPT]
    return [in_memory[-1], *in_turn(metafunc.definition.nodeid, KEPT)]


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


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A new store of each kind; what one of them needs is not made for the others."""
    if request.param == "policed":
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
