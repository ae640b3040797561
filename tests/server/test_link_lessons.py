"""Lessons of the link between client and keeper: endless reconnecting, starved askers, slow links, connections that linger."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Put, Receipt
from holdfast.engines import remote_line, remote_link
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.remote import RemoteEngine
from holdfast.engines.resident import ResidentEngine
from holdfast.errors import Error, InvalidInput, OutcomeUnknown, Unavailable
from holdfast.identity import EVERY_SPACE, Identity
from holdfast.ids import new_id
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import Quota, Rules
from holdfast.server import connection
from holdfast.server.binary import Limits
from holdfast.testing.servers.proxy import Proxy
from holdfast.wire import (
    LENGTH,
    PROTOCOL,
    Commit,
    Committed,
    Done,
    Hello,
    Message,
    Ping,
    Scan,
    Watch,
    Welcome,
    decode_request,
    frame,
)
from tests.server.conftest import ADMIN, Running, Serve
from tests.server.test_binary import SPACE, Raw, connected

DEADLINE_S = 10.0
IDENTITY = Identity("admin", "admin", EVERY_SPACE, "1")


class Fake:
    """A keeper that answers as it is told: `answer` gets each request and says what is sent; None ends the connection."""

    def __init__(self, answer: Callable[[Message], Awaitable[Message | None]], in_flight: int = 1024) -> None:
        self._answer = answer
        self._in_flight = in_flight
        self.connections = 0
        self.heard: list[Message] = []

    async def open(self) -> RemoteEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return await RemoteEngine.open(f"holdfast://127.0.0.1:{port}", token="t")

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(4))
                message = decode_request(await reader.readexactly(length))
                self.heard.append(message)
                if isinstance(message, Hello):
                    answer: Message | None = Welcome(IDENTITY, self._in_flight, 24 << 20)
                elif isinstance(message, Ping):
                    answer = Done(message.id)
                else:
                    answer = await self._answer(message)
                if answer is None:
                    return
                writer.write(frame(answer))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()


async def committed(message: Message, gate: asyncio.Event) -> Message | None:
    """The answer to a commit, when the gate is open."""
    await gate.wait()
    assert isinstance(message, Commit)
    return Committed(message.id, Receipt(1, 1, [None]))


def put(key: str) -> Batch:
    return Batch("admin", (Put(f"records/{key}", b"1"),), (), new_id(), fresh=True)


async def test_a_commit_that_ends_every_connection_is_unknown_in_time_and_not_said_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_link, "RESOLVE_S", 0.5)

    async def ends(message: Message) -> Message | None:
        return None

    fake = Fake(ends)
    client = await fake.open()
    try:
        async with asyncio.timeout(5):
            with pytest.raises(OutcomeUnknown):
                await client.commit(SPACE, put("a"))
        assert fake.connections < 15
    finally:
        monkeypatch.setattr(remote_link, "CLOSE_S", 0.05)
        await client.close()
        fake.close()


async def test_who_waits_for_room_has_a_turn_although_others_ask_on_and_on(serve: Serve, tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db")
    running = await serve(engine, Limits(in_flight=2))
    running.stack.push_async_callback(engine.close)
    client = await running.client()
    over = False

    async def on_and_on(name: str) -> None:
        while not over:
            await client.commit(SPACE, put(name))

    busy = [asyncio.create_task(on_and_on(name)) for name in "ab"]
    while len(client._client._asked) < 2:
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(1):
            await client.commit(SPACE, put("renewal"))
    finally:
        over = True
        await asyncio.gather(*busy)


async def test_who_gives_up_waiting_for_room_leaves_its_turn_to_the_next() -> None:
    gate = asyncio.Event()
    fake = Fake(lambda message: committed(message, gate), in_flight=1)
    client = await fake.open()
    try:
        asked = [asyncio.ensure_future(client.commit(SPACE, put(name))) for name in "abcd"]
        while len(client._client._turns) < 3:
            await asyncio.sleep(0)
        asked[1].cancel()
        gate.set()
        asyncio.get_running_loop().call_soon(asked[2].cancel)
        async with asyncio.timeout(5):
            await asked[3]
    finally:
        await client.close()
        fake.close()


async def test_who_cannot_be_sent_when_its_turn_comes_leaves_it_to_the_next() -> None:
    gate = asyncio.Event()
    fake = Fake(lambda message: committed(message, gate), in_flight=1)
    client = await fake.open()
    try:
        asked = [asyncio.ensure_future(client.commit(SPACE, put(name))) for name in ("a", "b" * 500, "c")]
        while len(client._client._turns) < 2:
            await asyncio.sleep(0)
        client._client._frame_bytes_max = 400
        gate.set()
        async with asyncio.timeout(5):
            await asked[2]
        with pytest.raises(InvalidInput):
            await asked[1]
    finally:
        await client.close()
        fake.close()


async def test_a_large_request_on_a_slow_link_is_not_broken_off_while_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_link, "LOOK_S", 0.02)
    monkeypatch.setattr(remote_line, "LOOK_S", 0.02)
    monkeypatch.setattr(remote_link, "ANSWER_S", 0.1)

    async def answer(message: Message) -> Message | None:
        assert isinstance(message, Commit)
        return Committed(message.id, Receipt(1, 1, [None]))

    class Slowly(Fake):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            between = asyncio.StreamReader(limit=1 << 26)

            async def trickle() -> None:
                while data := await reader.read(1 << 16):
                    between.feed_data(data)
                    await asyncio.sleep(0.005)  # 8 MiB in about a second
                between.feed_eof()

            task = asyncio.create_task(trickle())
            await super()._serve(between, writer)
            task.cancel()

    fake = Slowly(answer)
    client = await fake.open()
    try:
        async with asyncio.timeout(8):
            await client.commit(
                SPACE,
                Batch("admin", (Put("records/large", b'"' + b"x" * (8 << 20) + b'"'),), (), new_id(), fresh=True),
            )
        assert fake.connections == 1
    finally:
        monkeypatch.setattr(remote_link, "CLOSE_S", 0.05)
        await client.close()
        fake.close()


async def large(serve: Serve) -> Running:
    engine = MemoryEngine()
    for n in range(8):
        await engine.commit(SPACE, Batch("a", (Put(f"records/{n}", b'"' + b"x" * 1_000_000 + b'"'),)))
    return await serve(engine)


async def held_back(running: Running) -> connection.Connection:
    """Return when the client's answers wait for it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            [held] = list(running.port.connections)
            if not held._writable.is_set():
                return held
            await asyncio.sleep(0.01)


async def test_a_connection_that_was_told_its_end_is_ended_also_after_it_took_what_was_ready(serve: Serve) -> None:
    running = await large(serve)
    async with connected(running) as raw:
        raw.say(*(Scan(n, SPACE, "records/", None, 1000, False) for n in range(1, 5)))
        held = await held_back(running)
        del running.keeper.tokens[ADMIN]
        now = asyncio.get_running_loop().time()
        held.look(now)  # the token is not good any more: it is told so, and has to close
        async with asyncio.timeout(DEADLINE_S):
            while not held._writable.is_set():
                await raw._reader.read(1 << 20)
            await raw._reader.read()  # all of it, and the end; it does not close
        assert running.port.connections
        held.look(now + connection.STUCK_S + 5)
        held.look(now + 2 * connection.STUCK_S + 10)
        async with asyncio.timeout(2):
            while running.port.connections:
                await asyncio.sleep(0.01)


async def test_a_client_that_takes_a_large_answer_slowly_is_not_one_that_takes_nothing(serve: Serve) -> None:
    running = await large(serve)
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # what the system takes for it is not what it takes
    small.connect(("127.0.0.1", running.number))
    reader, writer = await asyncio.open_connection(sock=small)
    raw = Raw(reader, writer)
    raw.say(Hello(PROTOCOL, ADMIN, "c1"))
    assert isinstance(await raw.hear(), Welcome)
    raw.say(*(Scan(n, SPACE, "records/", None, 1000, False) for n in range(1, 5)))
    held = await held_back(running)
    now, taken = asyncio.get_running_loop().time(), 0
    for n in range(1, 5):
        while taken < n * 5_000_000:
            taken += len(await reader.read(1 << 20))
        await asyncio.sleep(0.05)
        assert not held._writable.is_set()
        held.look(now + n * connection.STUCK_S * 0.6)
        assert not held._transport.is_closing(), n
    held.look(now + 4 * connection.STUCK_S)  # and now nothing
    assert held._transport.is_closing()
    writer.close()


async def test_what_waited_for_a_connection_and_was_sent_has_the_time_of_what_was_sent(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "CONNECT_S", 0.4)
    with Proxy.running(running.number) as proxy:
        client = await running.client(port=proxy.port)
        proxy.part()
        async with asyncio.timeout(DEADLINE_S):
            while client._client._line is not None:
                await asyncio.sleep(0.01)
        gate = asyncio.Event()
        real = running.keeper.engine.commit

        async def commit(space: str, batch: Batch) -> Receipt:
            await gate.wait()
            return await real(space, batch)

        monkeypatch.setattr(running.keeper.engine, "commit", commit)
        asked = asyncio.ensure_future(client.commit(SPACE, put("a")))
        await asyncio.sleep(0)
        proxy.heal()
        await asyncio.sleep(0.5)  # it was sent, and is longer under way than it may wait for a connection
        proxy.part()
        await asyncio.sleep(0.2)
        assert not asked.done(), "its answer was lost a moment ago; there are RESOLVE_S to find out"
        gate.set()
        proxy.heal()
        assert isinstance(await asyncio.wait_for(asked, DEADLINE_S), Receipt)


async def test_a_watch_whose_place_was_not_heard_sees_the_commit_that_was_asked_for_after_it(
    running: Running,
) -> None:
    with Proxy.running(running.number) as proxy:
        client = await running.client(port=proxy.port)
        await client.commit(SPACE, put("a"))
        cuts = iter(["after"])
        proxy.choose = lambda: next(cuts, None)  # type: ignore[assignment,return-value]
        changes = client.watch(SPACE, "records/")
        first = asyncio.ensure_future(anext(changes))
        asked = asyncio.ensure_future(client.commit(SPACE, put("b")))
        receipt = await asyncio.wait_for(asked, DEADLINE_S)
        assert proxy.cuts["after"] == 1
        try:
            assert (await asyncio.wait_for(first, 1)).version == receipt.version
        finally:
            await client.close()


async def test_a_watch_that_is_over_is_not_asked_for_again() -> None:
    async def answer(message: Message) -> Message | None:
        if isinstance(message, Watch):
            return Done(message.id)
        return None  # ends the connection

    fake = Fake(answer)
    client = await fake.open()
    follower = client._client.follow(SPACE, ["records/"], "r0", False)
    try:
        async with asyncio.timeout(5):
            while not follower._over:
                await asyncio.sleep(0.01)
            with pytest.raises(OutcomeUnknown):
                await client.drop(SPACE)
            client._client._connect()
            while client._client._connecting is not None:
                await asyncio.sleep(0.01)
        assert len([each for each in fake.heard if isinstance(each, Watch)]) == 1
        assert await follower.next() is None
    finally:
        follower.close()
        await client.close()
        fake.close()


async def test_closing_does_not_wait_for_answers_when_the_connection_is_gone() -> None:
    hangs = asyncio.Event()

    async def answer(message: Message) -> Message | None:
        await hangs.wait()
        return None

    fake = Fake(answer)
    client = await fake.open()
    asked = asyncio.ensure_future(client.commit(SPACE, put("a")))
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(client.close())
    await asyncio.sleep(0.05)
    hangs.set()
    await asyncio.wait_for(closing, 2)
    with pytest.raises(OutcomeUnknown):
        await asked
    fake.close()


# CC


async def test_what_never_left_is_unavailable_in_time_also_while_a_connection_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(message: Message) -> Message | None:
        return None

    fake = Fake(nothing)
    client = await fake.open()
    monkeypatch.setattr(remote_link, "CONNECT_S", 1.0)
    silent = asyncio.Event()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.transport.abort()

    monkeypatch.setattr(fake, "_serve", silence)
    port = fake._server.sockets[0].getsockname()[1]
    fake.close()
    server = await asyncio.start_server(silence, "127.0.0.1", port)
    loop = asyncio.get_running_loop()
    try:
        with pytest.raises(OutcomeUnknown):
            await client.drop(SPACE)  # ends the connection
        client._client._followers.clear()
        asyncio.ensure_future(client.get(SPACE, ["records/a"])).add_done_callback(lambda each: each.exception())
        await asyncio.sleep(0.2)
        began = loop.time()
        with pytest.raises(Unavailable):
            await client.get(SPACE, ["records/b"])
        assert loop.time() - began < 1.4
    finally:
        await client.close()
        silent.set()
        server.close()


async def test_a_repetition_over_a_new_quota_of_a_value_is_answered_as_the_first_was(serve: Serve) -> None:
    clock = ManualClock()
    policy = Policy(MemoryEngine(clock=clock), clock, Rules())
    agent = policy.engine_for(Identity("market", "agent", SPACE, "2"))
    batch = Batch("market", (Put("records/a", b'"' + b"x" * 1000 + b'"'),), (), "chosen-id")
    receipt = await agent.commit(SPACE, batch)
    policy.reload(Rules(quotas=(Quota("*", max_value_size=100),)))
    assert await agent.commit(SPACE, batch) == receipt


async def test_a_host_that_cannot_be_one_is_told_in_words() -> None:
    with pytest.raises(Error):
        await RemoteEngine.open("holdfast://a..b:7420", token="t")
