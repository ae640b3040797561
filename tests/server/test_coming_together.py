"""Commits that come together in a connection go together, where nothing has to be looked at in any; nobody can tell otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Batch, Increment, Put
from holdfast.engines.resident import ResidentEngine
from holdfast.identity import Identity
from holdfast.ids import new_id
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import Quota, RateLimit, Rules
from holdfast.offers import Replies
from holdfast.server import connection
from holdfast.server.binary import Limits
from holdfast.wire import LENGTH, Commit, Committed, Failed, Get, Message, frame
from tests.server.conftest import ADMIN, Running, Serve
from tests.server.test_binary import SPACE, Raw, connected


class Counting(ResidentEngine):
    """Notes how many came at once."""

    runs: list[int]

    def submit_all(self, space: str, batches: list[Batch], replies: Replies) -> bool:
        went = super().submit_all(space, batches, replies)
        if went:
            self.runs.append(len(batches))
        return went


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Counting]:
    opened = await Counting.open(tmp_path / "k.db")
    assert isinstance(opened, Counting)
    opened.runs = []
    await opened.commit(SPACE, Batch("market", (Put("records/first", b"1"),)))
    yield opened
    await opened.close()


def put(id: int, key: str = "k", *, fresh: bool = True, space: str = SPACE) -> Commit:
    return Commit(id, space, Batch("market", (Put(f"records/{key}", b"%d" % id),), (), new_id(), fresh))


def add(id: int) -> Commit:
    return Commit(id, SPACE, Batch("market", (Increment("records/n", 1),), (), new_id(), True))


async def replies_to(raw: Raw, *messages: Message | bytes) -> list[Message]:
    """What is answered to these, which are sent in one piece."""
    bodies = [LENGTH.pack(len(each)) + each if isinstance(each, bytes) else frame(each) for each in messages]
    raw.writer.write(b"".join(bodies))
    return [await raw.hear() for _ in messages]


def versions(replies: list[Message]) -> list[tuple[int, int]]:
    return [(reply.id, reply.receipt.version) for reply in replies if isinstance(reply, Committed)]


async def test_what_comes_in_one_piece_goes_as_one_and_is_answered_in_order(serve: Serve, engine: Counting) -> None:
    running = await serve(engine)
    async with connected(running) as raw:
        raw.say(*(put(id) for id in range(1, 21)))
        replies = [await raw.hear() for _ in range(20)]
    assert versions(replies) == [(id, id + 1) for id in range(1, 21)]
    assert sum(engine.runs) >= 18, "hardly any of them came alone"
    assert running.observed.count(("commit", "ok")) == 20


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_no_more_are_taken_than_may_be_in_flight(serve: Serve, engine: Counting, limit: int) -> None:
    running = await serve(engine, Limits(in_flight=limit))
    async with connected(running) as raw:
        raw.say(*(put(id) for id in range(1, 31)))
        assert versions([await raw.hear() for _ in range(30)]) == [(id, id + 1) for id in range(1, 31)]
    assert max(engine.runs, default=0) <= limit


async def test_others_have_a_turn_after_so_many(
    serve: Serve, engine: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TURN_FRAMES", 4)
    running = await serve(engine)
    async with connected(running) as raw:
        raw.say(*(put(id) for id in range(1, 31)))
        assert versions([await raw.hear() for _ in range(30)]) == [(id, id + 1) for id in range(1, 31)]
    assert max(engine.runs) <= 4


async def test_whatever_else_comes_between_keeps_its_place(serve: Serve, engine: Counting) -> None:
    running = await serve(engine)
    await engine.commit("elsewhere", Batch("market", (Put("records/x", b"1"),)))
    async with connected(running) as raw:
        sent = [put(1), put(2), add(3), put(4, fresh=False), put(5), put(6), put(7, space="elsewhere"), put(8), put(9)]
        replies = await replies_to(raw, *sent)
        assert dict(versions(replies)) == {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7, 7: 2, 8: 8, 9: 9}
        replies = await replies_to(raw, put(11), put(12), Get(13, SPACE, ["records/first"]), put(14), put(15))
        assert [id for id, _ in versions(replies)] == [11, 12, 14, 15]
        assert [version for _, version in versions(replies)] == [10, 11, 12, 13]


async def test_a_message_that_cannot_be_understood_is_answered_by_itself(serve: Serve, engine: Counting) -> None:
    running = await serve(engine)
    async with connected(running) as raw:
        replies = await replies_to(raw, put(1), put(2), b"\x93\x02\x07\xa1s", put(3), put(4))
        assert [reply.id for reply in replies if isinstance(reply, Failed)] == [7]
        assert [id for id, _ in versions(replies)] == [1, 2, 3, 4]


async def test_a_batch_no_engine_takes_is_refused_and_those_around_it_are_not(serve: Serve, engine: Counting) -> None:
    running = await serve(engine)
    wrong = Commit(3, SPACE, Batch("market", (Put("nonsense", b"1"),), (), new_id(), True))
    async with connected(running) as raw:
        replies = await replies_to(raw, put(1), put(2), wrong, put(4), put(5))
    assert [(reply.id, reply.code) for reply in replies if isinstance(reply, Failed)] == [(3, "invalid_request")]
    assert versions(replies) == [(1, 2), (2, 3), (4, 4), (5, 5)]


async def under(serve: Serve, engine: Counting, rules: Rules) -> Running:
    """A port whose one client is an agent under these rules."""
    policy = Policy(engine, ManualClock(), rules)
    market = policy.engine_for(Identity("market", "agent", SPACE))
    await market.commit(SPACE, Batch("market", (Put("records/first", b"2"),)))
    running = await serve(engine)
    running.keeper.engine_for = lambda identity: market  # type: ignore[method-assign, assignment]
    return running


async def test_over_its_rate_a_connection_gets_what_is_left_and_is_then_slowed_down(
    serve: Serve, engine: Counting
) -> None:
    running = await under(serve, engine, Rules(rate_limits=(RateLimit("*", 1, 12),), quotas=()))
    async with connected(running, ADMIN) as raw:
        raw.say(*(put(id) for id in range(1, 41)))
        replies = [await raw.hear() for _ in range(11)]
        assert sorted(id for id, _ in versions(replies)) == list(range(1, 11)), (
            "one was used before, and one is for renewals"
        )
        [refused] = [reply for reply in replies if isinstance(reply, Failed)]
        assert (refused.id, refused.code) == (11, "rate_limit_exceeded")
        assert len(running.port.connections) == 1
        [theirs] = running.port.connections
        assert theirs._paused, "the others have not been looked at"


async def test_at_the_quota_those_that_fit_pass(serve: Serve, engine: Counting) -> None:
    running = await under(serve, engine, Rules(rate_limits=(), quotas=(Quota("*", max_keys_per_agent=6),)))
    async with connected(running, ADMIN) as raw:
        replies = await replies_to(raw, *(put(id, f"k{id}") for id in range(1, 11)))
    assert len(versions(replies)) == 5
    assert {reply.code for reply in replies if isinstance(reply, Failed)} == {"quota_exceeded"}


async def test_where_others_commit_too_none_go_together(serve: Serve, engine: Counting) -> None:
    running = await serve(engine)
    running.port.sole_owner = False
    async with connected(running) as raw:
        assert len(versions(await replies_to(raw, *(put(id) for id in range(1, 9))))) == 8
    assert engine.runs == []
