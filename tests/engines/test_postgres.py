"""The PostgreSQL engine passes the conformance suite; a second engine on the same schema stands for another process."""

import itertools
import uuid

import pytest

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.postgres import PostgresEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.servers.postgres import PostgresServer


@pytest.fixture
def engine_factory(postgres_server: PostgresServer) -> EngineFactory:
    name, numbers = uuid.uuid4().hex[:12], itertools.count(1)

    def new_storage() -> OpenEngine:
        url = f"{postgres_server.url}?schema=t_{name}_{next(numbers)}"

        async def open_postgres(clock: Clock) -> Engine:
            return await PostgresEngine.open(url, clock=clock)

        return open_postgres

    return EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), histories=10)
