"""Nobody takes all connections of the binary port: neither one agent, nor somebody without a token."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from holdfast.identity import Identity
from holdfast.server.binary import Limits
from holdfast.wire import PROTOCOL, Done, Failed, Hello, Ping, Welcome
from tests.server.conftest import ADMIN, AGENT, Running, Serve
from tests.server.test_binary import Raw, connected

OTHER = "hf_other"
DEADLINE_S = 10


async def asking(running: Running, stack: AsyncExitStack, token: str | None, client: str = "c") -> Raw:
    """A connection; with a token it has said Hello."""
    raw = await stack.enter_async_context(connected(running, None))
    if token is not None:
        raw.say(Hello(PROTOCOL, token, client))
    return raw


async def answer(raw: Raw) -> str:
    """What it hears first: welcome, or why not."""
    async with asyncio.timeout(DEADLINE_S):
        heard = await raw.hear()
    if isinstance(heard, Welcome):
        return "welcome"
    assert isinstance(heard, Failed)
    assert heard.code == "unavailable"
    assert await raw.ended()
    return heard.message


async def come(running: Running, count: int) -> None:
    """Return when the port has so many connections."""
    async with asyncio.timeout(DEADLINE_S):
        while len(running.port.connections) != count:
            await asyncio.sleep(0.01)


def refused(running: Running) -> int:
    return running.observed.count(("hello", "unavailable"))


async def test_somebody_without_a_token_keeps_nobody_out(serve: Serve) -> None:
    running = await serve(limits=Limits(connections=3, connections_before_hello=4))
    async with AsyncExitStack() as stack:
        silent = []
        for count in range(1, 5):
            silent.append(await asking(running, stack, None))
            await come(running, count)
        for number, token in enumerate((AGENT, ADMIN, AGENT)):
            assert await answer(await asking(running, stack, token, f"c{number}")) == "welcome"
        assert "silent for longest" in await answer(silent[0])  # it has made room for the first of them
        assert refused(running) == 1
        silent[1].say(Hello(PROTOCOL, ADMIN, "late"))
        assert await answer(silent[1]) == "welcome"


async def test_of_those_who_say_nothing_there_are_never_more_than_allowed(serve: Serve) -> None:
    running = await serve(limits=Limits(connections_before_hello=4))
    async with AsyncExitStack() as stack:
        flood = [await asking(running, stack, None) for _ in range(40)]
        async with asyncio.timeout(DEADLINE_S):
            while refused(running) < 36:
                await asyncio.sleep(0.01)
        await come(running, 4)
        assert {await answer(raw) for raw in flood[:36]} != set()
        assert await answer(await asking(running, stack, AGENT)) == "welcome"


async def test_one_credential_has_so_many_connections_and_others_have_theirs(serve: Serve) -> None:
    running = await serve(limits=Limits(connections=10, connections_per_token=2))
    running.keeper.tokens[OTHER] = Identity("risk", "agent", "contoso", "3")
    async with AsyncExitStack() as stack:
        first, second, third = [await asking(running, stack, AGENT, f"c{number}") for number in range(3)]
        assert [await answer(first), await answer(second)] == ["welcome", "welcome"]
        assert "'market' has 2 connections with this token already" in await answer(third)
        assert await answer(await asking(running, stack, OTHER)) == "welcome"
        for number in range(4):
            assert await answer(await asking(running, stack, ADMIN, f"a{number}")) == "welcome"
        again = await asking(running, stack, AGENT, "c0")  # it comes back before its old connection is gone
        assert await answer(again) == "welcome"
        assert "already" in await answer(await asking(running, stack, AGENT, "c3"))
        second.writer.close()
        await come(running, 6)
        assert await answer(await asking(running, stack, AGENT, "c4")) == "welcome"
        again.say(Ping(1))
        assert await again.hear() == Done(1)


async def test_when_all_connections_are_taken_there_is_room_for_administrators(serve: Serve) -> None:
    running = await serve(limits=Limits(connections=3, connections_for_administrators=2))
    async with AsyncExitStack() as stack:
        for number in range(3):
            assert await answer(await asking(running, stack, AGENT, f"c{number}")) == "welcome"
        assert "there are 3 connections already" in await answer(await asking(running, stack, AGENT, "c3"))
        admins = [await asking(running, stack, ADMIN, f"a{number}") for number in range(3)]
        assert [await answer(admins[0]), await answer(admins[1])] == ["welcome", "welcome"]
        assert "those that are kept for administrators included" in await answer(admins[2])
        assert "there are 5 connections already" in await answer(await asking(running, stack, AGENT, "c4"))
        assert refused(running) == 3


async def test_refusals_are_told_to_the_keeper_which_logs_them(serve: Serve) -> None:
    running = await serve(limits=Limits(connections=1))
    async with AsyncExitStack() as stack:
        assert await answer(await asking(running, stack, AGENT, "c")) == "welcome"
        for number in range(3):
            assert "already" in await answer(await asking(running, stack, AGENT, f"c{number}"))
    assert running.port.keeper.away == ["there are 1 connections already; try again later"] * 3


async def test_nothing_is_kept_of_connections_that_are_gone(serve: Serve) -> None:
    running = await serve()
    async with AsyncExitStack() as stack:
        for number in range(5):
            assert await answer(await asking(running, stack, AGENT, f"c{number}")) == "welcome"
            await asking(running, stack, None)
        await come(running, 10)
    await come(running, 0)
    admission = running.port.admission
    assert (admission._silent, admission._entered, admission._of_token) == ({}, {}, {})
