"""The binary port: what it accepts, what it refuses, and that nobody harms anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast.engine import Batch, Entry, Increment, Put, Receipt
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.remote import RemoteEngine
from holdfast.errors import AuthenticationFailed, InvalidInput, Unavailable
from holdfast.ids import new_id
from holdfast.middleware.wrapper import Wrapper
from holdfast.server.binary import Limits
from holdfast.wire import (
    HELLO_BYTES_MAX,
    LENGTH,
    PROTOCOL,
    Changes,
    Commit,
    Committed,
    Done,
    Entries,
    Failed,
    Get,
    Goodbye,
    Hello,
    Message,
    Ping,
    Reply,
    Watch,
    Watching,
    Welcome,
    decode_reply,
    frame,
)
from tests.server.conftest import ADMIN, AGENT, Running, Serve

SPACE = "contoso"
DEADLINE_S = 10.0


class Raw:
    """A client that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def say(self, *messages: Message) -> None:
        self.writer.write(b"".join(frame(message) for message in messages))

    async def hear(self) -> Reply:
        async with asyncio.timeout(DEADLINE_S):
            (length,) = LENGTH.unpack(await self._reader.readexactly(4))
            return decode_reply(await self._reader.readexactly(length))

    async def ended(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read() == b""


@asynccontextmanager
async def connected(running: Running, token: str | None = ADMIN, client: str = "c1") -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.number)
    raw = Raw(reader, writer)
    try:
        if token is not None:
            raw.say(Hello(PROTOCOL, token, client))
            assert isinstance(await raw.hear(), Welcome)
        yield raw
    finally:
        writer.close()


def put(id: int, key: str, value: bytes = b"1", request_id: str | None = None) -> Commit:
    return Commit(id, SPACE, Batch("market", (Put(f"records/{key}", value),), (), request_id))


class Slow(Wrapper):
    """Commits wait until they are let through."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.gate = asyncio.Event()
        self.waiting = 0

    async def commit(self, space: str, batch: Batch) -> Receipt:
        self.waiting += 1
        await self.gate.wait()
        return await super().commit(space, batch)


class Broken(Wrapper):
    """An engine with a fault of its own."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        raise RuntimeError("secret detail")

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        raise RuntimeError("secret detail")


# --- who comes in ---


async def test_without_hello_nothing_is_answered(running: Running) -> None:
    async with connected(running, None) as raw:
        raw.say(Get(1, SPACE, ["records/a"]))
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert (reply.id, reply.code) == (0, "authentication_failed")
        assert await raw.ended()


async def test_a_wrong_token_is_refused_and_the_connection_ends(running: Running) -> None:
    async with connected(running, None) as raw:
        raw.say(Hello(PROTOCOL, "hf_wrong", "c"), put(1, "a"))
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert reply.code == "authentication_failed"
        assert await raw.ended()
    with pytest.raises(AuthenticationFailed):
        await running.client("hf_wrong")
    assert await running.keeper.engine.spaces() == []


async def test_another_version_of_the_protocol_is_told_which_is_spoken(running: Running) -> None:
    async with connected(running, None) as raw:
        raw.say(Hello(99, ADMIN, "c"))
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert (reply.code, "version 1" in reply.message) == ("invalid_request", True)


async def test_who_says_nothing_is_let_go(running: Running) -> None:
    async with connected(running, None) as raw:
        await asyncio.sleep(0)
        [connection] = await soon_connected(running, 1)
        connection.look(asyncio.get_running_loop().time() + 11)
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert await raw.ended()


async def test_who_is_silent_for_too_long_is_let_go_and_who_speaks_is_not(serve: Serve) -> None:
    running = await serve(limits=Limits(idle_s=60))
    async with connected(running) as raw:
        [connection] = list(running.port.connections)
        now = asyncio.get_running_loop().time()
        connection.look(now + 59)
        raw.say(Ping(1))
        assert await raw.hear() == Done(1)
        connection.look(now + 59)
        connection.look(now + 1000)
        assert isinstance(await raw.hear(), Failed)
        assert await raw.ended()


async def test_a_token_that_is_revoked_ends_its_connections(running: Running) -> None:
    async with connected(running, AGENT) as agent, connected(running, ADMIN, "c2") as admin:
        del running.keeper.tokens[AGENT]
        for connection in list(running.port.connections):
            connection.look(asyncio.get_running_loop().time())
        reply = await agent.hear()
        assert isinstance(reply, Failed)
        assert reply.code == "authentication_failed"
        assert await agent.ended()
        admin.say(Ping(1))
        assert await admin.hear() == Done(1)


async def test_more_connections_than_allowed_are_turned_away(serve: Serve) -> None:
    running = await serve(limits=Limits(connections=2, connections_for_administrators=0))
    async with connected(running, client="a") as first, connected(running, client="b"):
        async with connected(running, None) as third:
            third.say(Hello(PROTOCOL, ADMIN, "c"))
            reply = await third.hear()
            assert isinstance(reply, Failed)
            assert reply.code == "unavailable"
        first.say(Ping(5))
        assert await first.hear() == Done(5)


# --- what is sent ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x63\x01\x02",
        b"\x92\x02\x01",
        b"\x80",
        b"hello",
        b"\x94\x02\x07\xa1s\x91\x01",
        b"\xdd" + b"\xff" * 8,
    ],
)
async def test_what_is_no_message_harms_nobody(running: Running, body: bytes) -> None:
    async with connected(running) as raw, connected(running, client="good") as good:
        raw.writer.write(LENGTH.pack(len(body)) + body)
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert reply.code == "invalid_request"
        good.say(put(1, "a"))
        assert isinstance(await good.hear(), Committed)


async def test_a_wrong_message_with_an_id_is_answered_and_the_connection_goes_on(running: Running) -> None:
    async with connected(running) as raw:
        body = b"\x94\x02\x07\xa1s\x91\x01"  # Commit, id 7, and a batch that is none
        raw.writer.write(LENGTH.pack(len(body)) + body)
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert reply.id == 7
        raw.say(Ping(8))
        assert await raw.hear() == Done(8)


async def test_a_frame_over_the_limit_is_refused_before_it_is_kept(serve: Serve) -> None:
    running = await serve(limits=Limits(frame_bytes=1000))
    async with connected(running) as raw:
        raw.writer.write(LENGTH.pack(1001))
        reply = await raw.hear()
        assert isinstance(reply, Failed)
        assert (reply.id, reply.code) == (0, "invalid_request")
    async with connected(running, None) as raw:
        raw.writer.write(LENGTH.pack(HELLO_BYTES_MAX + 1))
        assert isinstance(await raw.hear(), Failed)
    client = await running.client()
    with pytest.raises(InvalidInput, match="the keeper takes 1,000"):
        await client.commit(SPACE, Batch("a", (Put("records/a", b'"' + b"x" * 2000 + b'"'),)))


async def test_frames_may_come_in_any_pieces(running: Running) -> None:
    async with connected(running) as raw:
        data = b"".join(frame(put(n, f"k{n}", b'"' + b"x" * 3000 * n + b'"')) for n in range(1, 8))
        for start in range(0, len(data), 997):
            raw.writer.write(data[start : start + 997])
            await asyncio.sleep(0)
        replies = [await raw.hear() for _ in range(7)]
        assert [reply.id for reply in replies if isinstance(reply, Committed)] == list(range(1, 8))


async def test_requests_are_answered_as_they_are_ready(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    async with connected(running) as raw:
        raw.say(put(1, "a"), Get(2, SPACE, ["records/a"]))
        assert await raw.hear() == Entries(2, [None])
        slow.gate.set()
        assert isinstance(await raw.hear(), Committed)


async def test_one_that_floods_is_read_no_further_and_others_are_served(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow, Limits(in_flight=10))
    async with connected(running, client="flood") as flood, connected(running, client="good") as good:
        flood.say(*(put(n, f"k{n}") for n in range(1, 101)))
        good.say(Ping(1))
        assert await good.hear() == Done(1)
        assert slow.waiting == 10
        slow.gate.set()
        replies = [await flood.hear() for _ in range(100)]
        assert [reply.id for reply in replies if isinstance(reply, Committed)] == list(range(1, 101))
    versions = [reply.receipt.version for reply in replies if isinstance(reply, Committed)]
    assert versions == sorted(versions), "commits of a connection are taken in order"


async def test_a_fault_inside_tells_nothing_of_the_inside(serve: Serve) -> None:
    running = await serve(Broken(MemoryEngine()))
    async with connected(running) as raw:
        raw.say(put(1, "a"), Get(2, SPACE, ["records/a"]))
        answers = {reply.id: reply for reply in [await raw.hear(), await raw.hear()] if isinstance(reply, Failed)}
        assert (answers[1].code, answers[2].code) == ("outcome_unknown", "unavailable")
        assert "secret" not in answers[1].message + answers[2].message
    assert ("commit", "error") in running.observed


async def test_errors_arrive_as_they_were_raised(running: Running) -> None:
    client = await running.client()
    await client.commit(SPACE, Batch("a", (Put("records/a", b'"text"'),)))
    with pytest.raises(InvalidInput, match="no 64-bit integer"):
        await client.commit(SPACE, Batch("a", (Increment("records/a", 1),)))
    with pytest.raises(InvalidInput):
        await client.scan(SPACE, "records/", limit=0)


# --- a client that comes again ---


async def test_a_client_that_comes_again_is_welcomed_after_its_old_requests_are_settled(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    id = new_id()
    first = Batch("market", (Increment("records/n", 1),), (), id, fresh=True)
    again = Batch("market", (Increment("records/n", 1),), (), id)
    async with connected(running) as old:
        old.say(Commit(1, SPACE, first))
        while not slow.waiting:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.number)
        new = Raw(reader, writer)
        new.say(Hello(PROTOCOL, ADMIN, "c1"), Commit(1, SPACE, again))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await new.hear()
        slow.gate.set()
        assert isinstance(await new.hear(), Welcome)
        answer = await new.hear()
        assert isinstance(answer, Committed)
        assert answer.receipt.results == [1]
        writer.close()
    [entry] = await running.keeper.engine.get(SPACE, ["records/n"])
    assert entry is not None
    assert entry.value == b"1"


async def test_what_an_abandoned_connection_sends_takes_no_effect(running: Running) -> None:
    async with connected(running) as old, connected(running):
        old.say(put(1, "late"))
        assert await old.ended()
    assert await running.keeper.engine.get(SPACE, ["records/late"]) == [None]


async def test_clients_of_different_tokens_do_not_displace_each_other(running: Running) -> None:
    async with connected(running, ADMIN, "same") as one, connected(running, AGENT, "same"):
        one.say(Ping(1))
        assert await one.hear() == Done(1)


# --- watches ---


async def test_a_watch_begins_before_what_is_sent_after_it(running: Running) -> None:
    async with connected(running) as raw:
        raw.say(put(1, "before"), Watch(2, SPACE, [], None, True, 10_000), put(3, "after"))
        replies = [await raw.hear() for _ in range(4)]
        [changes] = [reply for reply in replies if isinstance(reply, Changes)]
        assert [change.key for commit in changes.commits for change in commit.changes] == ["records/after"]


async def test_a_watch_sends_no_more_than_was_granted(running: Running) -> None:
    async with connected(running) as raw:
        raw.say(Watch(1, SPACE, [], "r0", True, 1))
        assert await raw.hear() == Watching(1, "r0")
        raw.say(*(put(n, f"k{n}") for n in range(2, 12)))
        replies = [await raw.hear() for _ in range(11)]
        assert sum(isinstance(reply, Changes) for reply in replies) == 1
        raw.say(Ping(20))
        assert await raw.hear() == Done(20)


async def test_a_consumer_that_is_slow_holds_up_nobody(running: Running) -> None:
    slow, writer = await running.client(), await running.client()
    changes = slow.watch(SPACE, "records/", cursor="r0")
    await writer.commit(SPACE, Batch("a", (Put("records/0", b"0"),)))
    assert (await anext(changes)).version == 1
    big = b'"' + b"x" * 60_000 + b'"'
    for n in range(1, 60):
        await writer.commit(SPACE, Batch("a", (Put(f"records/{n}", big),)))
    await slow.get(SPACE, ["records/0"])
    assert [(await anext(changes)).version for _ in range(59)] == list(range(2, 61))
    await changes.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await slow.get(SPACE, ["records/0"])
    assert running.port.watchers == 0


async def test_watches_are_bounded(serve: Serve) -> None:
    running = await serve(limits=Limits(watches=2))
    async with connected(running) as raw:
        raw.say(*(Watch(n, SPACE, [], "r0", True, 1000) for n in (1, 2, 3)))
        replies = {
            reply.id: reply
            for reply in [await raw.hear() for _ in range(3)]
            if not isinstance(reply, Welcome | Goodbye)
        }
        assert isinstance(replies[3], Failed)


# --- the end ---


async def test_a_keeper_that_stops_finishes_what_it_took_and_takes_no_more(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    async with connected(running) as raw:
        raw.say(put(1, "a"))
        while not slow.waiting:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(running.port.stop("it is late", 5))
        assert await raw.hear() == Goodbye("it is late")
        raw.say(put(2, "b"))
        refusal = await raw.hear()
        assert isinstance(refusal, Failed)
        assert (refusal.id, refusal.code) == (2, "unavailable")
        slow.gate.set()
        assert isinstance(await raw.hear(), Committed)
        await stopping
        assert await raw.ended()


async def test_a_keeper_that_stops_does_not_wait_for_ever(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    async with connected(running) as raw:
        raw.say(put(1, "a"))
        while not slow.waiting:
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await running.port.stop("now", 0.01)
        slow.gate.set()


async def test_an_address_without_a_keeper_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="holdfast serve"):
        await RemoteEngine.open("holdfast://127.0.0.1:1", token="hf_x")


async def soon_connected(running: Running, count: int) -> list[object]:
    async with asyncio.timeout(DEADLINE_S):
        while len(running.port.connections) < count:
            await asyncio.sleep(0)
    return list(running.port.connections)
