"""The remote engine over a keeper in another process, for the conformance suite, whatever the keeper's store is."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.host import TOKEN, Host

from holdfast.clock import Clock
from holdfast.engine import Engine
from holdfast.engines.remote import RemoteEngine
from holdfast.testing import conformance
from holdfast.testing.conformance import Capabilities, EngineFactory
from holdfast.testing.conformance.subject import OpenEngine
from holdfast.testing.shared_clock import SharedClock

PARTS = [
    "TestDurability",
    "TestOneEvaluator",
    "TestOutcome",
    "TestRequests",
    "TestTotalOrder",
    "TestWatching",
    "subject",
]
"""Where a connection, a keeper and another process's clock can make a difference; the whole suite runs in a soak."""

OPEN_MAX = 4
"""Storages served at a time; a test uses one or two, and random histories one after the other, each of which has connections."""

__all__ = conformance.__all__ if os.environ.get("HOLDFAST_SOAK") == "1" else PARTS
globals().update({name: getattr(conformance, name) for name in __all__})


@contextmanager
def served(
    keepers: Host, folder: Path, store: Callable[[int], str], *, sole: bool, histories: int = 4
) -> Iterator[EngineFactory]:
    """A factory of remote engines; `store` gives the URL of each new storage, by its number."""
    numbers = itertools.count(1)
    ports: deque[int] = deque()

    def clock() -> SharedClock:
        return SharedClock(folder / f"clock-{next(numbers)}")

    def new_storage() -> OpenEngine:
        if len(ports) == OPEN_MAX:
            keepers.close(ports.popleft())
        number = next(numbers)
        port = keepers.open(store(number), folder / f"clock-{number - 1}", sole=sole)
        ports.append(port)

        async def open_remote(clock: Clock) -> Engine:
            return await RemoteEngine.open(f"holdfast://127.0.0.1:{port}", token=TOKEN)

        return open_remote

    yield EngineFactory(new_storage, Capabilities(shared=True, survives_reopen=True), clock, histories)
    for port in ports:
        keepers.close(port)
