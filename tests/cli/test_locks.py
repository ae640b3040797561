"""locks: who holds what, and taking it away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from tests.cli.conftest import Cli


def test_locks_shows_holders_and_waiters_in_order_and_breaks_one(cli: Cli, folder: Path) -> None:
    cli("set", "k", "1")
    assert cli("locks", "--json").json == []
    assert cli("locks").out == ""
    with holdfast.blocking.open(str(folder / ".holdfast" / "store.db")) as store:
        market, risk = store.space("default", agent="market"), store.space("default", agent="risk")
        guard = market.lock("portfolio/MSFT").acquire()
        waiting = asyncio.run_coroutine_threadsafe(
            risk._inner.lock("portfolio/MSFT", wait="20s").acquire(), store._loop._loop
        )
        while not (told := cli("locks", "--json").json)[0]["waiters"]:
            pass
        [state] = told
        [holder], [waiter] = state["holders"], state["waiters"]
        assert (state["kind"], state["name"]) == ("lock", "portfolio/MSFT")
        assert (holder["agent"], holder["token"], waiter["agent"]) == ("market", guard.token, "risk")
        assert [row.split("\t")[:4] for row in cli("locks").out.splitlines()] == [
            ["lock", "portfolio/MSFT", "holds", "market"],
            ["lock", "portfolio/MSFT", "waits", "risk"],
        ]
        assert cli("locks", "--prefix", "other", "--json").json == []
        assert cli("locks", "break", "portfolio/MSFT", "--agent", "boss").out == "market\n"
        assert waiting.result(20).token > guard.token
        with pytest.raises(holdfast.LeaseLost):
            guard.space.records.set("k", 2)
    cli("locks", "break", "absent", code=4)
    cli("locks", "break", "absent", "--kind", "odd", code=2)


def test_locks_without_await(folder: Path) -> None:
    with holdfast.blocking.open(str(folder / "b.db")) as store:
        space = store.space("default", agent="market")
        with space.lock("l") as guard:
            guard.space.records.set("k", 1)
            with pytest.raises(holdfast.LockAcquisitionError):
                space.lock("l").acquire()
        with space.pool("p", size=2).allocate(), space.semaphore("s", permits=1), space.election("e") as term:
            assert term.epoch > guard.token
            assert {state.kind for state in space.locks.list()} == {"pool", "semaphore", "election"}
        with pytest.raises(ZeroDivisionError), space.lock("l"):
            raise ZeroDivisionError
        assert space.locks.list() == []
