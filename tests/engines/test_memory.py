"""The memory engine passes the conformance suite, of which it is the specification."""

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.memory import MemoryEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory


async def open_memory(clock: Clock) -> Engine:
    return MemoryEngine(clock=clock)


@pytest.fixture
def engine_factory() -> EngineFactory:
    return EngineFactory(lambda: open_memory, Capabilities(shared=False, survives_reopen=False), histories=8)
