"""The remote engine passes the conformance suite through a keeper in another process, over the resident engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.host import TOKEN, Host, host

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.remote import RemoteEngine
from holdfast.testing.conformance import *  # noqa: F403
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.shared_clock import SharedClock


@pytest.fixture(scope="module")
def keepers() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture
def engine_factory(keepers: Host, tmp_path: Path) -> Iterator[EngineFactory]:
    numbers = itertools.count(1)
    ports = []

    def clock() -> SharedClock:
        return SharedClock(tmp_path / f"clock-{next(numbers)}")

    def new_storage() -> OpenEngine:
        number = next(numbers)
        port = keepers.open(f"resident:{tmp_path}/{number}.db", tmp_path / f"clock-{number - 1}", sole=True)
        ports.append(port)

        async def open_remote(clock: Clock) -> Engine:
            return await RemoteEngine.open(f"holdfast://127.0.0.1:{port}", token=TOKEN)

        return open_remote

    yield EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), clock)
    for port in ports:
        keepers.close(port)
