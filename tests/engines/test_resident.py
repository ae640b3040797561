"""The resident engine passes the conformance suite; its storage has one owner at a time, and survives it."""

import itertools
from pathlib import Path

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.resident import ResidentEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine


@pytest.fixture
def engine_factory(tmp_path: Path) -> EngineFactory:
    numbers = itertools.count(1)

    def new_storage() -> OpenEngine:
        path = tmp_path / f"{next(numbers)}.db"

        async def open_resident(clock: Clock) -> Engine:
            return await ResidentEngine.open(path, clock=clock)

        return open_resident

    return EngineFactory(new_storage, Capabilities(shared=False, survives_reopen=True))
