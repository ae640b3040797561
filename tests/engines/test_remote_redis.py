"""The remote engine passes the conformance suite (whole in a soak) through a keeper in another process, over Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.remote import *  # noqa: F403
from tests.engines.remote import served
from tests.server.host import Host, host

from holdfast.testing.conformance import EngineFactory
from holdfast.testing.servers.redis import RedisServer


@pytest.fixture(scope="module")
def keepers() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture
def engine_factory(keepers: Host, tmp_path: Path, redis_server: RedisServer) -> Iterator[EngineFactory]:
    name = uuid.uuid4().hex[:12]
    with served(
        keepers, tmp_path, lambda number: f"{redis_server.url}?prefix=remote-{name}-{number}", sole=False
    ) as factory:
        yield factory
