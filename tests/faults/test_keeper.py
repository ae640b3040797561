"""A keeper over each engine: eight processes, kill -9 of the keeper under load again and again, connections that are cut.

The tests are those of the engines with a server; here the server is ours. A client that finds its keeper gone waits for the
next one and asks again, so nobody need notice that it was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.postgres import PostgresServer
from holdfast.testing.servers.proxy import Proxy
from holdfast.testing.servers.redis import RedisServer
from tests.faults.test_servers import OPERATIONS, SOAK
from tests.faults.test_servers import (
    test_a_connection_that_is_cut_leaves_no_doubt_that_is_not_told as test_a_connection_that_is_cut,
)
from tests.faults.test_servers import (
    test_a_server_killed_under_load_loses_nothing_and_watches_go_on as test_a_keeper_killed_under_load,
)
from tests.faults.test_servers import (
    test_eight_processes_are_linearizable as test_eight_processes,
)
from tests.servers import started

__all__ = ["test_a_connection_that_is_cut", "test_a_keeper_killed_under_load", "test_eight_processes"]


class Healing(KeeperServer):
    """Its clients wait for it."""

    heals = True


@contextmanager
def keeper(store: str | None = None) -> Iterator[KeeperServer]:
    limits = {"limits": {"in_flight": 1024}}
    with Healing.temporary(store, **limits) as running:
        yield running


KINDS: dict[str, Callable[[ExitStack], str | None]] = {
    "resident": lambda stack: None,
    "sqlite": lambda stack: "sqlite:shared.db",
    "redis": lambda stack: stack.enter_context(started(RedisServer.temporary())).url,
    "postgres": lambda stack: stack.enter_context(started(PostgresServer.temporary())).url,
}


@pytest.fixture
def operations() -> int:
    """Fewer than without a keeper: the engines below were tried by themselves."""
    return OPERATIONS if SOAK else 1_200


@pytest.fixture(params=list(KINDS))
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperServer]:
    with ExitStack() as stack:
        running = stack.enter_context(keeper(KINDS[request.param](stack)))
        monkeypatch.setenv("HOLDFAST_TOKEN", running.admin)
        yield running


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KeeperServer, Proxy]]:
    with keeper() as running, Proxy.running(running.port) as proxy:
        monkeypatch.setenv("HOLDFAST_TOKEN", running.admin)
        yield running, proxy
