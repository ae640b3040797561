"""The remote engine passes the conformance suite through a keeper in another process, over the resident engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.remote import served
from tests.server.host import Host, host

from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import EngineFactory


@pytest.fixture(scope="module")
def keepers() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture
def engine_factory(keepers: Host, tmp_path: Path) -> Iterator[EngineFactory]:
    with served(
        keepers, tmp_path, lambda number: f"resident:{tmp_path}/{number}.db", sole=True, histories=15
    ) as factory:
        yield factory
