"""How commits are answered: those that were done together in one frame, to whom understands it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import holdfast
from holdfast.engine import Absent, Batch, Condition, Put
from holdfast.errors import InvalidInput
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.wire import Commit, Committed, Failed, Frames, Message, Receipts, frame
from tests.server.live import SPACE, Hand, by_hand, http, make_token

FREELY = {"policies": {"rate_limits": [], "quotas": []}}


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperServer]:
    with KeeperServer.temporary(**FREELY) as running:
        yield running


@pytest.fixture
async def token(keeper: KeeperServer) -> str:
    token = await make_token(keeper, "market")
    async with holdfast.open(keeper.url, token=token) as store:
        await store.space(SPACE).records.set("a", 1)  # from now on it is known how much the agent has
    return token


def put(hand: Hand, id: int, *when: Condition) -> Commit:
    return Commit(id, SPACE, Batch(hand.agent, (Put(f"records/{id}", b"1"),), when))


async def said(hand: Hand, *messages: Message) -> list[Message]:
    """What is answered to these."""
    hand.writer.write(b"".join(frame(message) for message in messages))
    replies: list[Message] = []
    while len(answered(replies)) < len(messages):
        replies.append(await hand.next())
    return replies


def answered(replies: list[Message]) -> list[int]:
    ids = [[reply.id] if isinstance(reply, Committed | Failed) else getattr(reply, "ids", []) for reply in replies]
    return [id for each in ids for id in each]


async def test_what_was_done_together_is_answered_together_in_its_order(keeper: KeeperServer, token: str) -> None:
    async with by_hand(keeper, token, together=True) as hand:
        replies = await said(hand, *(put(hand, id) for id in range(1, 9)))
        [receipts] = [reply for reply in replies if isinstance(reply, Receipts)]
        assert receipts.ids == list(range(1, 9))
        versions = [receipt.version for receipt in receipts.receipts]
        assert versions == list(range(versions[0], versions[0] + 8))


async def test_a_client_that_did_not_ask_for_it_gets_an_answer_for_each(keeper: KeeperServer, token: str) -> None:
    async with by_hand(keeper, token) as hand:
        replies = await said(hand, *(put(hand, id) for id in range(1, 9)))
        assert [reply.id for reply in replies if isinstance(reply, Committed)] == list(range(1, 9))
        assert not any(isinstance(reply, Receipts) for reply in replies)


async def test_what_was_refused_among_them_is_told_by_itself(keeper: KeeperServer, token: str) -> None:
    async with by_hand(keeper, token, together=True) as hand:
        await said(hand, put(hand, 11))
        replies = await said(hand, put(hand, 12), put(hand, 11, Absent("records/11")), put(hand, 13))
        [failure] = [reply for reply in replies if isinstance(reply, Failed)]
        assert (failure.id, failure.code) == (11, "conflict")
        assert sorted(answered(replies)) == [11, 12, 13]


async def test_an_id_that_is_used_twice_is_answered_twice_and_nothing_stays_under_way(
    keeper: KeeperServer, token: str
) -> None:
    async with by_hand(keeper, token, together=True) as hand:
        assert answered(await said(hand, put(hand, 21), put(hand, 21), put(hand, 21))) == [21, 21, 21]
    async with by_hand(keeper, token, together=True) as again:  # welcome only when everything before it is settled
        assert answered(await said(again, put(again, 22))) == [22]


async def test_each_of_them_is_counted(keeper: KeeperServer, token: str) -> None:
    async def commits() -> float:
        async with http(keeper, keeper.admin) as web:
            text = (await web.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("holdfast_operation"))
        counted = float(values['holdfast_operations_total{op="commit",outcome="ok"}'])
        assert float(values['holdfast_operation_seconds_count{op="commit"}']) >= counted
        return counted

    before = await commits()
    async with by_hand(keeper, token, together=True) as hand:
        await said(hand, *(put(hand, id) for id in range(1, 9)))
    assert await commits() >= before + 8


def test_frames_are_taken_as_many_as_there_are_and_no_more_than_asked_for() -> None:
    frames = Frames(10)
    bodies = [b"a", b"bb", b"", b"dddd"]
    data = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    frames.feed(data[:-1])
    assert frames.take(2) == [b"a", b"bb"]
    assert frames.take(9) == [b""]
    assert frames.take(9) == []
    frames.feed(data[-1:] + b"\0\0\0\1e\0\0\0\x0b")
    assert frames.take(9) == [b"dddd", b"e"], "what came before one that is too long"
    with pytest.raises(InvalidInput, match="a frame of 11 bytes"):
        frames.take(9)
