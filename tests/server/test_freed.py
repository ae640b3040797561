"""A connection that has ended takes no room, without Python having to look for cycles: floods of them come faster than it looks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Delete, Put
from holdfast.engines.resident import ResidentEngine
from holdfast.identity import Identity
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import RateLimit, Rules
from holdfast.server.connection import Connection
from holdfast.wire import LENGTH, Commit, Drop, Get, Message, Scan, Watch, frame
from tests.server.conftest import Running, Serve
from tests.server.test_binary import SPACE, connected, put


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Connection]]:
    """The connections that are there, while nobody collects garbage."""
    there: weakref.WeakSet[Connection] = weakref.WeakSet()
    begin = Connection.__init__

    def noted(self: Connection, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        there.add(self)

    monkeypatch.setattr(Connection, "__init__", noted)
    gc.disable()
    yield there
    gc.enable()


async def under_rules(serve: Serve, tmp_path: Path) -> tuple[ResidentEngine, Running]:
    """A port whose clients are an agent who may do five things."""
    engine = await ResidentEngine.open(tmp_path / "k.db")
    policy = Policy(engine, ManualClock(), Rules(rate_limits=(RateLimit("*", 1, 5),)))
    running = await serve(engine)
    market = Identity("market", "agent", SPACE)
    running.keeper.engine_for = lambda identity: policy.engine_for(market)  # type: ignore[method-assign, assignment]
    return engine, running


def body(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


SENT: dict[str, list[Message | bytes]] = {
    "nothing": [],
    "a set": [put(1, "x")],
    "a read": [Get(1, SPACE, ["records/x"]), Scan(2, SPACE, "records/", None, 10, False)],
    "a watch": [Watch(1, SPACE, ["records/"], "r0", True, 1000)],
    "a watch that begins now": [Watch(1, SPACE, ["records/"], None, True, 1000)],
    "what cannot be understood": [body(b"\x93\x02\x07\xa1s"), put(2, "y"), body(b"\x91\x91\xc1")],
    "a frame without end": [LENGTH.pack(1 << 31)],
    "what no agent may": [Drop(1, SPACE), Watch(2, "elsewhere", ["records/"], "r0", True, 1000), put(3, "z")],
    "another's": [Commit(1, SPACE, Batch("risk", (Put("records/x", b"1"),)))],
    "what is wrong": [Commit(1, SPACE, Batch("market", (Put("nonsense", b"1"), Delete("")))), put(2, "x", b"not json")],
    "too much": [put(id, "x") for id in range(1, 20)],
}


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("sent", SENT)
async def test_it_is_freed_at_once_whatever_it_sent(
    serve: Serve, tmp_path: Path, made: weakref.WeakSet[Connection], sent: str, how: str
) -> None:
    engine, running = await under_rules(serve, tmp_path)
    for number in range(3):
        async with connected(running, client=f"c{number}") as raw:
            for each in SENT[sent]:
                raw.writer.write(each if isinstance(each, bytes) else frame(each))
            await raw.writer.drain()
            await until(lambda: len(running.port.connections) == 0, 0.02)  # it may be ended by the other side
            if how == "abort":
                raw.writer.transport.abort()
    await until(lambda: not made, 10)
    assert not made, [gc.get_referrers(each) for each in made]
    await engine.close()


async def until(over: Callable[[], bool], seconds: float) -> None:
    """Return when it is over, or after this time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not over() and loop.time() < end:
        await asyncio.sleep(0.002)
