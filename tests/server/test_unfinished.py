"""Requests that begin and do not end: one credential cannot fill the keeper's memory with them, nor keep one for ever."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from holdfast.engine import Batch, Put
from holdfast.identity import Identity
from holdfast.server import binary
from holdfast.server.binary import Limits
from holdfast.wire import LARGE_FRAME_BYTES, Commit, Committed, Done, Failed, Ping, frame
from tests.server.conftest import ADMIN, AGENT, Running, Serve
from tests.server.test_binary import SPACE, Raw, Slow, connected, put

OTHER = "hf_other"
LARGE = frame(Commit(7, SPACE, Batch("market", (Put("records/large", b'"' + b"x" * 199_000 + b'"'),))))
"""About 200 KB."""


async def half(running: Running, stack: AsyncExitStack, token: str, client: str) -> Raw:
    """A connection that has sent a part of a large request; the keeper has read it, or turned it away."""
    raw = await stack.enter_async_context(connected(running, token, client))
    raw.writer.write(LARGE[:1000])
    return raw


async def waits_for(running: Running, count: int) -> None:
    """Return when the keeper knows of so many large requests that are not complete."""
    async with asyncio.timeout(10):
        while len(running.port.unfinished._of) != count:
            await asyncio.sleep(0.005)


async def turned_away(raw: Raw, code: str = "unavailable") -> str:
    heard = await raw.hear()
    assert isinstance(heard, Failed)
    assert (heard.id, heard.code) == (0, code)
    assert await raw.ended()
    return heard.message


async def test_halves_of_large_requests_are_bounded_for_a_credential_over_all_its_connections(serve: Serve) -> None:
    running = await serve(limits=Limits(unfinished_bytes_per_token=450_000))
    async with AsyncExitStack() as stack:
        first = await half(running, stack, AGENT, "c1")
        await half(running, stack, AGENT, "c2")
        await waits_for(running, 2)
        third = await half(running, stack, AGENT, "c3")
        third.writer.write(LARGE[1000:])  # it is in the middle of it, and hears why nevertheless
        told = await turned_away(third)
        assert "'market' has begun requests of" in told
        assert "send fewer at once, or smaller ones" in told
        other = await half(running, stack, ADMIN, "c4")  # others have their own
        await waits_for(running, 3)
        for raw in (first, other):
            raw.writer.write(LARGE[1000:])
            assert isinstance(await raw.hear(), Committed)
        again = await half(running, stack, AGENT, "c5")  # what is complete makes room
        again.writer.write(LARGE[1000:])
        assert isinstance(await again.hear(), Committed)
    await waits_for(running, 0)  # and so does who goes


async def test_halves_of_large_requests_are_bounded_for_all_together(serve: Serve) -> None:
    running = await serve(limits=Limits(unfinished_bytes=450_000))
    running.keeper.tokens[OTHER] = Identity("other", "agent", SPACE, "3")
    async with AsyncExitStack() as stack:
        await half(running, stack, AGENT, "c1")
        await half(running, stack, ADMIN, "c2")
        await waits_for(running, 2)
        third = await half(running, stack, OTHER, "c3")
        assert "clients have begun requests of 450,000 bytes, and not finished them" in await turned_away(third)
        assert ("frame", "unavailable") in running.observed
        small = await stack.enter_async_context(connected(running, OTHER, "c4"))
        small.say(Ping(1))
        assert await small.hear() == Done(1)


async def test_a_request_that_is_larger_than_the_bound_comes_in_alone(serve: Serve) -> None:
    running = await serve(limits=Limits(unfinished_bytes=100_000, unfinished_bytes_per_token=100_000))
    async with AsyncExitStack() as stack:
        raw = await half(running, stack, AGENT, "c1")
        await waits_for(running, 1)
        raw.writer.write(LARGE[1000:])
        assert isinstance(await raw.hear(), Committed)


async def test_small_requests_are_not_counted(serve: Serve) -> None:
    running = await serve(limits=Limits(unfinished_bytes=1, unfinished_bytes_per_token=1))
    data = frame(put(1, "k", b'"' + b"x" * (LARGE_FRAME_BYTES - 100) + b'"'))
    async with connected(running, AGENT, "c1") as one, connected(running, AGENT, "c2") as two:
        for raw in (one, two):
            raw.writer.write(data[:1000])
            await raw.writer.drain()
        await asyncio.sleep(0.02)
        for raw in (one, two):
            raw.writer.write(data[1000:])
            assert isinstance(await raw.hear(), Committed)


async def test_a_request_that_comes_byte_by_byte_is_turned_away_in_words(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "CHECK_S", 0.02)
    running = await serve(limits=Limits(frame_s=0.1))
    async with AsyncExitStack() as stack:
        raw = await half(running, stack, AGENT, "c1")
        heard = asyncio.ensure_future(turned_away(raw))
        while not heard.done():
            raw.writer.write(b"x")
            await asyncio.sleep(0.01)
        assert "a request was not complete 0.1 s after it began; it was not done" in heard.result()
        await waits_for(running, 0)


async def test_a_request_that_the_keeper_itself_does_not_read_is_not_late(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "CHECK_S", 0.01)
    engine = Slow()
    running = await serve(engine, Limits(frame_s=0.05, in_flight=1))
    async with connected(running) as raw:
        second = frame(put(2, "b"))
        raw.writer.write(frame(put(1, "a")) + second[:10])
        await asyncio.sleep(0.2)
        engine.gate.set()
        assert isinstance(await raw.hear(), Committed)
        raw.writer.write(second[10:])
        assert isinstance(await raw.hear(), Committed)
