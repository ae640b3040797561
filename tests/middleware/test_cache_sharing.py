"""Two processes on one file, each with a hot tier of its own: who has seen what the other wrote is shown it."""

import itertools
from pathlib import Path

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.middleware.cache_options import Cache
from holdfast.testing.conformance import Capabilities, EngineFactory, TestTotalOrder, subject
from holdfast.testing.conformance.subject import OpenEngine
from tests.middleware.caching import ReadsThroughTheTier

__all__ = ["TestTotalOrder", "subject"]


@pytest.fixture
def engine_factory(tmp_path: Path) -> EngineFactory:
    numbers = itertools.count()

    def new_storage() -> OpenEngine:
        path = tmp_path / f"{next(numbers)}.db"

        async def opened(clock: Clock) -> Engine:
            return ReadsThroughTheTier(await SqliteEngine.open(path, clock=clock), clock, Cache())

        return opened

    return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True))
