"""How long a request took is told as it was, also below a millisecond and in uvloop, whose time stands still within a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Engine, Entry, Put, Receipt
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.remote import RemoteEngine
from holdfast.middleware.telemetry import Observed
from holdfast.middleware.wrapper import Wrapper
from holdfast.offers import Replies, Reply
from holdfast.server.binary import BinaryPort, Limits
from holdfast.server.traces import Traces
from tests.server.conftest import ADMIN, Doorkeeper

WORK_S = 0.0004
"""Less than a millisecond."""
TIMES = 20

Heard = list[tuple[str, float]]


def work() -> None:
    """Be busy for so long: the loop has no turn meanwhile."""
    end = time.perf_counter() + WORK_S
    while time.perf_counter() < end:
        pass


class Busy(Wrapper):
    """An engine that takes its time."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        work()
        return await self.inner.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        work()
        return await self.inner.get(space, keys)


class BusyAtOnce(Busy):
    """The same for who asks without a coroutine."""

    def submit(self, space: str, batch: Batch, reply: Reply) -> bool:
        work()
        reply.set_result(Receipt(1, 1, [None]))
        return True

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        for _ in batches:
            work()
        replies.set_results([Receipt(1, 1, [None]) for _ in batches])
        return True

    def read(self, space: str, keys: list[str]) -> list[Entry | None] | None:
        work()
        return [None]


async def through_the_binary_port(engine: Engine, heard: Heard) -> None:
    clock = ManualClock()
    await engine.create("contoso")
    port = BinaryPort(
        Doorkeeper(clock, engine),
        Limits(),
        lambda op, outcome, seconds, count=1: heard.extend([(op, seconds)] * count),
        sole_owner=True,
    )
    number = await port.listen("127.0.0.1", 0)
    client = await RemoteEngine.open(f"holdfast://127.0.0.1:{number}", token=ADMIN)
    try:
        await ask(client)
    finally:
        await client.close()
        await port.stop("the test is over", 1.0)


async def ask(engine: Engine) -> None:
    batch = Batch("admin", (Put("records/k", b"1"),))
    for _ in range(TIMES):
        await engine.get("contoso", ["records/k"])
        await engine.commit("contoso", batch)
    await asyncio.gather(*(engine.commit("contoso", batch) for _ in range(TIMES)))


async def through_http(engine: Engine, heard: Heard) -> None:
    await engine.create("contoso")
    await ask(Observed(engine, lambda op, outcome, seconds, count=1: heard.append((op, seconds)), Traces().span))


@pytest.mark.parametrize("engine", [Busy, BusyAtOnce])
@pytest.mark.parametrize("through", [through_the_binary_port, through_http])
def test_what_takes_less_than_a_millisecond_is_told_as_that(engine: type[Wrapper], through: Any) -> None:
    heard: Heard = []
    work: Coroutine[Any, Any, None] = through(engine(MemoryEngine(clock=ManualClock())), heard)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
    gets, commits = ([seconds for op, seconds in heard if op == name] for name in ("get", "commit"))
    assert (len(gets), len(commits)) == (TIMES, 2 * TIMES)
    assert min(gets + commits) >= WORK_S
    assert sorted(gets)[TIMES // 2] < 0.25, "and not as much more"
