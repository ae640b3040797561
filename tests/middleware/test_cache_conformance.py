"""A reader that has seen everything is shown everything: read through the hot tier, an engine still does what the contract says."""

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.memory import MemoryEngine
from holdfast.middleware.cache_options import Cache
from holdfast.testing.conformance import (
    Capabilities,
    EngineFactory,
    TestConditions,
    TestExpiry,
    TestOneEvaluator,
    TestOperations,
    TestReading,
    TestSpaces,
    TestTake,
    TestTotalOrder,
    TestTouch,
    subject,
)
from tests.middleware.caching import ReadsThroughTheTier

__all__ = [
    "TestConditions",
    "TestExpiry",
    "TestOneEvaluator",
    "TestOperations",
    "TestReading",
    "TestSpaces",
    "TestTake",
    "TestTotalOrder",
    "TestTouch",
    "subject",
]


async def open_cached(clock: Clock) -> Engine:
    return ReadsThroughTheTier(MemoryEngine(clock=clock), clock, Cache())


@pytest.fixture
def engine_factory() -> EngineFactory:
    return EngineFactory(lambda: open_cached, Capabilities(shared=False, survives_reopen=False), histories=8)
