"""The remote engine passes the conformance suite (whole in a soak) through a keeper in another process, over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.remote import *  # noqa: F403
from tests.engines.remote import served
from tests.schemas import Schemas
from tests.server.host import Host, host

from holdfast.testing.conformance import EngineFactory


@pytest.fixture(scope="module")
def keepers() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture
def engine_factory(keepers: Host, tmp_path: Path, schemas: Schemas) -> Iterator[EngineFactory]:
    taken: list[str] = []

    def store(number: int) -> str:
        taken.append(schemas.take())
        return taken[-1]

    with served(keepers, tmp_path, store, sole=False) as factory:
        yield factory
    for url in taken:
        schemas.give_back(url)
