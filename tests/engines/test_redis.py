"""The Redis engine passes the conformance suite on one server; a second engine stands for another machine."""

from __future__ import annotations

import itertools

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.redis_engine import RedisEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.servers.redis import RedisServer

numbers = itertools.count(1)


@pytest.fixture
def engine_factory(redis_server: RedisServer) -> EngineFactory:
    def new_storage() -> OpenEngine:
        url = f"{redis_server.url}?prefix=conformance-{next(numbers)}"

        async def open_redis(clock: Clock) -> Engine:
            return await RedisEngine.open(url, clock=clock)

        return open_redis

    return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), histories=8)
