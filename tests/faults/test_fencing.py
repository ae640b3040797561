"""A lock's holder is stopped with SIGSTOP for longer than its lease: another has the lock, and the first writes nothing.

The test is also run with a holder that does not write through its guard, and must notice.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.servers.keeper import KeeperServer
from tests.faults.driver import ROOT
from tests.stopping import stop

_numbers = itertools.count(1)


@pytest.fixture(params=["sqlite", "redis", "postgres", "keeper"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "keeper":
            keeper = stack.enter_context(KeeperServer.temporary())
            monkeypatch.setenv("HOLDFAST_TOKEN", keeper.admin)
            yield keeper.url
        elif request.param == "redis":
            yield f"{request.getfixturevalue('redis_server').url}?prefix=fencing{next(_numbers)}"
        elif request.param == "postgres":
            yield f"{request.getfixturevalue('postgres_server').url}?schema=fencing_{next(_numbers)}"
        else:
            yield str(tmp_path / "team.db")


async def outlive_a_holder(url: str, how: str) -> tuple[str, str]:
    """What the holder that was stopped is told when it goes on, and what the record holds then."""
    command = [sys.executable, "-m", "tests.faults.holder", url, how]
    holder = subprocess.Popen(  # noqa: ASYNC220
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        held, token = holder.stdout.readline().split()
        assert held == "held"
        stop(holder.pid, url)
        credential = os.environ["HOLDFAST_TOKEN"] if url.startswith("holdfast") else None
        async with holdfast.open(url, background=False, token=credential) as store:
            space = store.space("fencing", agent="successor")
            async with space.lock("l", wait="20s") as guard:
                assert guard.token > int(token)
                await guard.space.records.set("k", "successor")
                os.kill(holder.pid, signal.SIGCONT)
                holder.stdin.write("paused\n")
                holder.stdin.flush()
                answer = holder.stdout.readline().strip()
            return answer, await space.records.get("k")
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


async def test_a_holder_stopped_past_its_ttl_writes_nothing_when_it_goes_on(url: str) -> None:
    assert await outlive_a_holder(url, "fenced") == ("LeaseLost", "successor")


async def test_without_the_fencing_condition_the_test_above_fails(url: str) -> None:
    assert await outlive_a_holder(url, "unfenced") == ("written", "paused")


@pytest.mark.parametrize("url", ["sqlite", "keeper"], indirect=True)
async def test_a_waiter_that_was_killed_is_skipped_long_before_its_ttl(url: str) -> None:
    credential = os.environ["HOLDFAST_TOKEN"] if url.startswith("holdfast") else None
    async with holdfast.open(url, background=False, token=credential) as store:
        space = store.space("fencing", agent="successor")
        guard = await space.lock("l", ttl="600s").acquire()
        command = [sys.executable, "-m", "tests.faults.holder", url, "fenced", "600s"]
        waiter = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            while not (await space.locks.list())[0].waiters:
                await asyncio.sleep(0.05)
                assert waiter.poll() is None
        finally:
            waiter.kill()
            waiter.wait()
        await guard.release()
        async with space.lock("l", wait="60s") as successor:
            assert successor.token > guard.token
