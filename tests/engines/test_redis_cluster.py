"""The Redis engine passes the conformance suite (whole in a soak) on a cluster of three primaries, where spaces live on different nodes."""

from __future__ import annotations

import itertools

import pytest
from tests.soak import SOAK

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.redis_engine import RedisEngine
from holdfast.testing import conformance
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.servers.redis import RedisCluster

PARTS = [
    "TestDurability",
    "TestEmpty",
    "TestFeed",
    "TestOneEvaluator",
    "TestOutcome",
    "TestRequests",
    "TestSpaces",
    "TestTotalOrder",
    "TestWatching",
    "subject",
]
"""Where it can make a difference that a space's node has to be found, and that there are several; what a node does by itself
is what one server does (`test_redis.py`). The random histories go through all of it. The whole suite runs in a soak."""

globals().update({name: getattr(conformance, name) for name in (conformance.__all__ if SOAK else PARTS)})

numbers = itertools.count(1)


@pytest.fixture
def engine_factory(redis_cluster: RedisCluster) -> EngineFactory:
    def new_storage() -> OpenEngine:
        url = f"{redis_cluster.url}?prefix=conformance-{next(numbers)}"

        async def open_redis(clock: Clock) -> Engine:
            return await RedisEngine.open(url, clock=clock)

        return open_redis

    return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), histories=6)
