"""The SQLite engine passes the conformance suite; a second engine on the same file stands for another process."""

import itertools
from pathlib import Path

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine


@pytest.fixture
def engine_factory(tmp_path: Path) -> EngineFactory:
    numbers = itertools.count(1)

    def new_storage() -> OpenEngine:
        path = tmp_path / f"{next(numbers)}.db"

        async def open_sqlite(clock: Clock) -> Engine:
            return await SqliteEngine.open(path, clock=clock)

        return open_sqlite

    return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True))
