"""What one client does must not harm another, double a commit, or keep the keeper from its work."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from holdfast.engine import Batch, Delete, Entry, Increment, Put, Receipt
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.resident import ResidentEngine
from holdfast.ids import new_id
from holdfast.middleware.wrapper import Wrapper
from holdfast.server import connection
from holdfast.server.binary import Limits
from holdfast.server.requests import id_in
from holdfast.wire import (
    LENGTH,
    PREFIXES_MAX,
    PROTOCOL,
    Cancel,
    Commit,
    Committed,
    Done,
    Failed,
    Get,
    Hello,
    Ping,
    Scan,
    Watch,
    Watching,
    Welcome,
)
from tests.server.conftest import ADMIN, Running, Serve
from tests.server.test_binary import SPACE, Raw, Slow, connected, put


async def reached(running: Running, client: str) -> Raw:
    """A connection that has said Hello, and is not welcome yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.number)
    new = Raw(reader, writer)
    new.say(Hello(PROTOCOL, ADMIN, client))
    return new


@pytest.mark.parametrize("body", [b"\x94\x03\x07\xa1s\x91\xa2\xff\xfe", b"\x91" * 5000, b"\x94\x02\x07\xa2\xff\xffx"])
async def test_a_frame_that_breaks_its_reader_keeps_nobody_from_their_answer(
    serve: Serve, tmp_path, body: bytes
) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db")
    running = await serve(engine, Limits(in_flight=4))
    async with connected(running, client="bad") as bad, connected(running, client="good") as good:
        for _ in range(20):
            bad.say(*(put(n, f"b{n}") for n in range(1, 5)))
            bad.writer.write(LENGTH.pack(len(body)) + body)
            good.say(*(put(n, f"g{n}") for n in range(1, 4)))
            replies = [await good.hear() for _ in range(3)]
            assert all(isinstance(reply, Committed) for reply in replies)
    await engine.close()


async def test_two_broken_connections_in_a_row_do_not_double_a_commit(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    id = new_id()
    async with connected(running) as first:
        first.say(Commit(1, SPACE, Batch("market", (Increment("records/n", 1),), (), id, fresh=True)))
        while not slow.waiting:
            await asyncio.sleep(0)
        second = await reached(running, "c1")
        await asyncio.sleep(0.02)
        second.writer.transport.abort()
        await asyncio.sleep(0.02)
        third = await reached(running, "c1")
        third.say(Commit(1, SPACE, Batch("market", (Increment("records/n", 1),), (), id)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await third.hear()
        slow.gate.set()
        assert isinstance(await third.hear(), Welcome)
        answer = await third.hear()
        assert isinstance(answer, Committed)
        assert answer.receipt.results == [1]
        third.writer.close()
    await gone(running)


async def gone(running: Running) -> None:
    """Return when the keeper remembers no client."""
    async with asyncio.timeout(5):
        while running.port.clients:
            await asyncio.sleep(0.01)


class Roundabout(Wrapper):
    """A resident engine whose deletes take a task, as under a policy, and whose puts do not."""

    def __init__(self, inner: ResidentEngine) -> None:
        super().__init__(inner)
        self._resident = inner

    def submit(self, space: str, batch: Batch, reply) -> bool:
        return type(batch.operations[0]) is Put and self._resident.submit(space, batch, reply)

    def submit_all(self, space: str, batches: list[Batch], replies) -> bool:
        puts = all(type(batch.operations[0]) is Put for batch in batches)
        return puts and self._resident.submit_all(space, batches, replies)

    def read(self, space: str, keys: list[str]):
        return self._resident.read(space, keys)


async def test_commits_of_a_connection_do_not_overtake_each_other(serve: Serve, tmp_path) -> None:
    engine = await ResidentEngine.open(tmp_path / "k.db")
    running = await serve(Roundabout(engine))
    async with connected(running) as raw:
        raw.say(
            put(1, "x"),
            Commit(2, SPACE, Batch("market", (Delete("records/x"),))),
            put(3, "x", b"3"),
        )
        replies = {reply.id: reply for reply in [await raw.hear() for _ in range(3)] if isinstance(reply, Committed)}
        assert [replies[n].receipt.version for n in (1, 2, 3)] == [1, 2, 3]
    await engine.close()


def test_the_id_of_a_wrong_message_is_found_without_reading_it() -> None:
    for id in (1, 127, 128, 300, 70_000, 1 << 40):
        assert id_in(msgspec.msgpack.encode([2, id, "x"])) == id
        assert id_in(msgspec.msgpack.encode([2, id, *range(100)])) == id
    huge = b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20)
    began = time.thread_time()
    assert id_in(huge) is None
    assert time.thread_time() - began < 0.01
    for wrong in (b"", b"\x92", b"\x92\x02", b"\x92\x02\x00", b"\x92\x02\xcf", b"\x80", b"\x92\xa1a\x01", b"\xdc"):
        assert id_in(wrong) is None


async def test_what_has_no_end_is_refused_by_its_length(running: Running) -> None:
    async with connected(running) as raw:
        raw.say(Watch(1, SPACE, ["records/"] * (PREFIXES_MAX + 1), "r0", True, 1000))
        refused = await raw.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == (1, "invalid_request")
        raw.say(Get(2, SPACE, ["records/a"] * 10_001))
        refused = await raw.hear()
        assert isinstance(refused, Failed)
        assert refused.id == 2


async def test_a_client_that_does_not_read_costs_little_and_is_let_go(serve: Serve) -> None:
    engine = MemoryEngine()
    for n in range(20):
        await engine.commit(SPACE, Batch("a", (Put(f"records/{n}", b'"' + b"x" * 1_000_000 + b'"'),)))
    running = await serve(engine)
    async with connected(running) as raw:
        raw.say(*(Scan(n, SPACE, "records/", None, 1000, False) for n in range(1, 101)))
        [held] = [each for each in running.port.connections if each.in_flight or not each._writable.is_set()] or [None]
        async with asyncio.timeout(10):
            while held is None or held._writable.is_set():
                await asyncio.sleep(0.01)
                [held] = list(running.port.connections)
        await asyncio.sleep(0.1)
        assert held._transport.get_write_buffer_size() + held._unsent < 6 * (9 << 20)
        now = asyncio.get_running_loop().time()
        held.look(now + connection.STUCK_S + 1)
        async with asyncio.timeout(10):
            while running.port.connections:
                await asyncio.sleep(0.01)


async def test_many_large_answers_that_come_together_wait_until_they_are_taken(serve: Serve) -> None:
    class Gathering(Wrapper):
        """Gives all answers in one moment, as an engine does that notes reads in one commit."""

        asked = 0
        all_asked = asyncio.Event()

        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            self.asked += 1
            if self.asked == 100:
                self.all_asked.set()
            await self.all_asked.wait()
            return await super().get(space, keys)

    engine = MemoryEngine()
    await engine.commit(SPACE, Batch("a", (Put("records/a", b'"' + b"x" * 1_000_000 + b'"'),)))
    gathering = Gathering(engine)
    running = await serve(gathering)
    async with connected(running) as raw:
        raw.say(*(Get(n, SPACE, ["records/a"]) for n in range(1, 101)))
        async with asyncio.timeout(10):
            await gathering.all_asked.wait()
        await asyncio.sleep(0.1)
        [held] = list(running.port.connections)
        assert held._transport.get_write_buffer_size() + held._unsent < 10 * (1 << 20)
        async with asyncio.timeout(10):
            answers = [await raw.hear() for _ in range(100)]
        assert {answer.id for answer in answers} == set(range(1, 101))


async def test_a_page_is_cut_where_it_gets_large(serve: Serve) -> None:
    engine = MemoryEngine()
    for n in range(20):
        await engine.commit(SPACE, Batch("a", (Put(f"records/{n:02}", b'"' + b"x" * 1_000_000 + b'"'),)))
    client = await (await serve(engine)).client()
    seen, after = [], None
    while True:
        page = await client.scan(SPACE, "records/", after=after)
        seen += [entry.key for entry in page.entries]
        if not page.more:
            break
        assert 1 <= len(page.entries) < 20
        after = seen[-1]
    assert seen == [f"records/{n:02}" for n in range(20)]


async def test_a_byte_at_a_time_is_no_hello(running: Running) -> None:
    async with connected(running, None) as raw:
        for byte in b"\x00\x00\x00\x50\x94":
            raw.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        [held] = list(running.port.connections)
        held.look(held._began_at + connection.HELLO_S + 0.1)
        assert isinstance(await raw.hear(), Failed)
        assert await raw.ended()


async def test_a_watch_of_a_space_that_is_not_there_yet_misses_nothing_over_a_broken_connection(
    running: Running,
) -> None:
    async with connected(running) as raw:
        raw.say(Watch(1, "later", [], None, True, 10_000))
        answer = await raw.hear()
        assert answer == Watching(1, "r0")
    client = await running.client()
    await client.commit("gone", Batch("a", (Put("records/a", b"1"),)))
    await client.drop("gone")
    changes = client.watch("gone")
    waiting = asyncio.ensure_future(anext(changes))
    await client.get("gone", ["records/a"])
    await asyncio.sleep(0.05)
    receipt: Receipt = await client.commit("gone", Batch("a", (Put("records/b", b"1"),)))
    assert (await asyncio.wait_for(waiting, 5)).version == receipt.version


async def test_an_id_that_is_used_again_for_a_watch_is_that_of_the_new_one(running: Running) -> None:
    async with connected(running) as raw:
        for _ in range(50):
            raw.say(Watch(7, SPACE, [], "r0", True, 10_000), Cancel(7))
        raw.say(Watch(7, SPACE, [], "r0", True, 10_000), Ping(9))
        while (reply := await raw.hear()) != Done(9):
            assert isinstance(reply, Watching | Done)
        assert running.port.watchers == 1
        raw.say(Cancel(7), Ping(10))
        while await raw.hear() != Done(10):
            pass
        assert running.port.watchers == 0


async def test_a_keeper_that_stops_leaves_what_can_be_repeated_to_the_next(serve: Serve) -> None:
    slow = Slow()
    running = await serve(slow)
    async with connected(running) as raw:
        raw.say(put(1, "a"))
        while not slow.waiting:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(running.port.stop("it is late", 5))
        await raw.hear()  # Goodbye
        raw.say(put(2, "b", request_id=new_id()), Get(3, SPACE, ["records/a"]), put(4, "c"))
        refused = await raw.hear()
        assert isinstance(refused, Failed)
        assert refused.id == 4, "only what its client cannot repeat"
        slow.gate.set()
        assert isinstance(await raw.hear(), Committed)
        await stopping
