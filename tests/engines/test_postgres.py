"""The PostgreSQL engine passes the conformance suite; a second engine on the same schema stands for another process."""

from collections.abc import Iterator

import pytest
from tests.schemas import Schemas

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.postgres import PostgresEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine


@pytest.fixture
def engine_factory(schemas: Schemas) -> Iterator[EngineFactory]:
    taken: list[str] = []

    def new_storage() -> OpenEngine:
        url = schemas.take()
        taken.append(url)

        async def open_postgres(clock: Clock) -> Engine:
            return await PostgresEngine.open(url, clock=clock)

        return open_postgres

    yield EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), histories=6)
    for url in taken:
        schemas.give_back(url)
