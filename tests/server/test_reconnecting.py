"""A client whose connection breaks: it comes again by itself, and never guesses what became of a commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from holdfast.clock import ManualClock, SystemClock
from holdfast.engine import Absent, Batch, Engine, Entry, Increment, Put, Receipt
from holdfast.engines import remote_link
from holdfast.engines.memory import MemoryEngine
from holdfast.errors import (
    AccessDenied,
    AuthenticationFailed,
    Conflict,
    Error,
    OutcomeUnknown,
    RateLimitExceeded,
    Unavailable,
)
from holdfast.ids import new_id
from holdfast.middleware.policy import Policy
from holdfast.middleware.rules import RateLimit, Rules
from holdfast.middleware.wrapper import Wrapper
from holdfast.server.binary import Limits
from holdfast.testing.servers.proxy import CUTS, Cut, Proxy
from tests.server.conftest import ADMIN, AGENT, Running, Serve

SPACE = "contoso"
DEADLINE_S = 10.0


@pytest.fixture
def proxy(running: Running) -> Iterator[Proxy]:
    with Proxy.running(running.number) as between:
        yield between


def once(cut: Cut) -> Iterator[Cut | None]:
    yield cut
    while True:
        yield None


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("fresh", [True, False])
async def test_a_commit_takes_effect_once_wherever_the_connection_is_cut(
    running: Running, proxy: Proxy, cut: Cut, fresh: bool
) -> None:
    client = await running.client(port=proxy.port)
    cuts = once(cut)
    proxy.choose = lambda: next(cuts)
    batch = Batch("market", (Increment("records/n", 1),), (), new_id(), fresh)
    async with asyncio.timeout(DEADLINE_S):
        receipt = await client.commit(SPACE, batch)
    assert proxy.cuts[cut] == 1
    assert receipt.results == [1]
    await asyncio.sleep(remote_link.RETRY_S_MIN)
    [entry] = await running.keeper.engine.get(SPACE, ["records/n"])
    assert entry is not None
    assert entry.value == b"1"


async def test_a_refusal_is_a_refusal_also_when_it_was_asked_twice(running: Running, proxy: Proxy) -> None:
    client = await running.client(port=proxy.port)
    await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),)))
    cuts = once("after")
    proxy.choose = lambda: next(cuts)
    with pytest.raises(Conflict) as caught:
        await client.commit(
            SPACE, Batch("market", (Put("records/a", b"2"),), (Absent("records/a"),), new_id(), fresh=True)
        )
    assert caught.value.actual is not None
    assert caught.value.actual.value == b"1"


@pytest.mark.parametrize("cut", ["inside", "after"])
async def test_a_commit_without_a_request_id_is_never_repeated(running: Running, proxy: Proxy, cut: Cut) -> None:
    client = await running.client(port=proxy.port)
    cuts = once(cut)
    proxy.choose = lambda: next(cuts)
    with pytest.raises(OutcomeUnknown):
        await client.commit(SPACE, Batch("market", (Increment("records/n", 1),)))
    assert await client.get(SPACE, ["records/other"]) == [None]


@pytest.mark.parametrize("cut", CUTS)
async def test_a_read_is_asked_again(running: Running, proxy: Proxy, cut: Cut) -> None:
    client = await running.client(port=proxy.port)
    await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),)))
    cuts = once(cut)
    proxy.choose = lambda: next(cuts)
    [entry] = await client.get(SPACE, ["records/a"])
    assert entry is not None


async def test_a_watch_goes_on_without_a_gap_and_without_a_repetition(running: Running, proxy: Proxy) -> None:
    client, writer = await running.client(port=proxy.port), await running.client()
    rng = random.Random(1)
    seen: list[int] = []

    async def follow() -> None:
        async for commit in client.watch(SPACE, cursor="r0"):
            seen.append(commit.version)

    following = asyncio.create_task(follow())
    for number in range(200):
        await writer.commit(SPACE, Batch("market", (Put("records/a", b"%d" % number),)))
        if rng.random() < 0.1:
            proxy.part()
            await asyncio.sleep(0.01)
            proxy.heal()
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < 200:
            await asyncio.sleep(0.01)
    following.cancel()
    assert seen == list(range(1, 201))


async def test_what_never_left_is_unavailable_and_nothing_was_changed(
    running: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.client(port=proxy.port)
    monkeypatch.setattr(remote_link, "CONNECT_S", 0.2)
    proxy.part()
    async with asyncio.timeout(DEADLINE_S):
        while client._client._line is not None:
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="Nothing was changed"):
        await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),), (), new_id(), fresh=True))
    monkeypatch.undo()
    proxy.heal()
    await client.commit(SPACE, Batch("market", (Put("records/b", b"1"),), (), new_id(), fresh=True))
    assert await client.get(SPACE, ["records/a"]) == [None]


async def test_an_answer_that_cannot_be_found_out_is_unknown(
    running: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "RESOLVE_S", 0.2)
    client = await running.client(port=proxy.port)

    def cut() -> Cut:
        proxy._refusing = True
        return "after"

    proxy.choose = cut
    id = new_id()
    with pytest.raises(OutcomeUnknown) as caught:
        await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),), (), id, fresh=True))
    assert caught.value.request_id == id


async def test_a_token_revoked_while_the_connection_was_broken_ends_everything(running: Running, proxy: Proxy) -> None:
    client = await running.client(port=proxy.port)
    changes = client.watch(SPACE, cursor="r0")
    waiting = asyncio.ensure_future(anext(changes))
    await client.get(SPACE, ["records/a"])
    del running.keeper.tokens[ADMIN]
    proxy.part()
    proxy.heal()
    with pytest.raises(AuthenticationFailed):
        await asyncio.wait_for(waiting, DEADLINE_S)
    with pytest.raises(AuthenticationFailed):
        await asyncio.wait_for(client.get(SPACE, ["records/a"]), DEADLINE_S)


async def test_a_silent_keeper_is_given_up(running: Running, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await running.client(port=proxy.port)
    line = client._client._line
    assert line is not None
    monkeypatch.setattr(line, "heard_at", line.heard_at - remote_link.PING_S - 1)
    client._client.look()
    await client.get(SPACE, ["records/a"])
    assert client._client._line is line
    monkeypatch.setattr(line, "heard_at", line.heard_at - remote_link.SILENCE_S - 1)
    client._client.look()
    await client.get(SPACE, ["records/a"])
    assert client._client._line is not line


async def test_a_connection_that_went_dead_is_given_up_soon_while_somebody_waits_for_an_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running.client()
    link = client._client
    line = link._line
    assert line is not None
    monkeypatch.setattr(line, "heard_at", line.heard_at - remote_link.ANSWER_S - 1)
    link.look()
    assert link._line is line, "nobody waits: there is time"
    monkeypatch.setattr(line, "write", lambda data, patient=False: None)  # nothing gets through any more
    waiting = asyncio.ensure_future(client.get(SPACE, ["records/a"]))
    await asyncio.sleep(0)
    link.look()
    assert link._line is line, "it was asked only now"
    monkeypatch.setattr(line, "mute_since", line.mute_since - remote_link.ANSWER_S - 1)
    link.look()
    assert await asyncio.wait_for(waiting, DEADLINE_S) == [None]
    assert link._line is not line


async def test_many_requests_at_once_survive_a_broken_connection(running: Running, proxy: Proxy) -> None:
    client = await running.client(port=proxy.port)
    rng = random.Random(2)
    proxy.choose = lambda: rng.choice(CUTS) if rng.random() < 0.2 else None
    batches = [Batch("market", (Increment("records/n", 1),), (), new_id(), fresh=True) for _ in range(300)]
    async with asyncio.timeout(60):
        receipts = await asyncio.gather(*(client.commit(SPACE, batch) for batch in batches))
        for _ in range(50):
            batches.append(Batch("market", (Increment("records/n", 1),), (), new_id(), fresh=True))
            receipts.append(await client.commit(SPACE, batches[-1]))
    proxy.choose = lambda: None
    assert sorted(receipt.results[0] for receipt in receipts) == list(range(1, 351))  # type: ignore[type-var]
    assert sum(proxy.cuts.values()) > 3


async def test_a_closed_store_refuses(running: Running) -> None:
    client = await running.client()
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await client.get(SPACE, ["records/a"])
    with pytest.raises(Unavailable, match="closed"):
        await anext(client.watch(SPACE))


class Slow(Wrapper):
    """Does what is asked until it is told to refuse: what a policy may say of something that was done before."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.refusals: list[Error] = []
        self.done = 0

    async def commit(self, space: str, batch: Batch) -> Receipt:
        if self.done and self.refusals:
            raise self.refusals.pop(0)
        receipt = await super().commit(space, batch)
        self.done += 1
        return receipt


@pytest.fixture
async def slow(serve: Serve) -> tuple[Running, Slow]:
    engine = Slow(MemoryEngine(clock=ManualClock()))
    return await serve(engine), engine


async def test_what_was_done_is_not_called_undone_because_its_repetition_was_over_the_rate(
    slow: tuple[Running, Slow],
) -> None:
    running, engine = slow
    engine.refusals = [RateLimitExceeded("over its rate; nothing was done", retry_after=0.01)] * 2
    with Proxy.running(running.number) as proxy:
        client = await running.client(port=proxy.port)
        cuts = once("after")
        proxy.choose = lambda: next(cuts)
        async with asyncio.timeout(DEADLINE_S):
            receipt = await client.commit(
                SPACE, Batch("market", (Increment("records/n", 1),), (), new_id(), fresh=True)
            )
        assert receipt.results == [1]
        assert not engine.refusals


@pytest.mark.parametrize(
    "refusal",
    [
        RateLimitExceeded("over its rate; nothing was done", retry_after=60.0),
        AccessDenied("not any more"),
        Unavailable("the disk is full"),
    ],
)
async def test_a_repetition_that_is_refused_leaves_open_what_became_of_the_first(
    slow: tuple[Running, Slow], refusal: Error
) -> None:
    running, engine = slow
    engine.refusals = [refusal]
    with Proxy.running(running.number) as proxy:
        client = await running.client(port=proxy.port)
        cuts = once("after")
        proxy.choose = lambda: next(cuts)
        id = new_id()
        with pytest.raises(OutcomeUnknown) as caught:
            await client.commit(SPACE, Batch("market", (Increment("records/n", 1),), (), id, fresh=True))
        assert caught.value.request_id == id
        assert str(refusal) in str(caught.value)


async def test_a_refusal_of_what_was_said_once_is_what_it_says(slow: tuple[Running, Slow]) -> None:
    running, engine = slow
    client = await running.client()
    await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),)))
    engine.refusals = [RateLimitExceeded("over its rate", retry_after=0.01)]
    with pytest.raises(RateLimitExceeded):
        await client.commit(SPACE, Batch("market", (Put("records/a", b"2"),), (), new_id(), fresh=True))


async def test_watches_of_an_agent_that_is_over_its_rate_go_on_after_a_broken_connection(serve: Serve) -> None:
    clock = SystemClock()
    policy = Policy(MemoryEngine(clock=clock), clock, Rules(rate_limits=(RateLimit("*", 100, 4),)))
    running = await serve(policy.engine)
    running.keeper.engine_for = policy.engine_for  # type: ignore[method-assign]
    with Proxy.running(running.number) as proxy:
        client = await running.client(AGENT, port=proxy.port)
        watches = [client.watch(SPACE, f"records/{n}", cursor="r0") for n in range(8)]
        first = []
        for each in watches:
            first.append(asyncio.ensure_future(anext(each)))
            await asyncio.sleep(0.03)
        proxy.part()
        proxy.heal()
        for n in range(8):
            await policy.engine.commit(SPACE, Batch("market", (Put(f"records/{n}", b"1"),)))
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.gather(*first)
        assert [commit.changes[0].key for commit in found] == [f"records/{n}" for n in range(8)]
        for each in watches:
            await each.aclose()  # type: ignore[attr-defined]


async def test_a_watch_sees_what_was_asked_for_after_it_also_when_both_wait_for_a_connection(
    running: Running, proxy: Proxy
) -> None:
    client = await running.client(port=proxy.port)
    await client.commit(SPACE, Batch("market", (Put("records/a", b"1"),)))
    proxy.part()
    async with asyncio.timeout(DEADLINE_S):
        while client._client._line is not None:
            await asyncio.sleep(0.01)
        changes = client.watch(SPACE, "records/")
        first = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        put = asyncio.ensure_future(client.commit(SPACE, Batch("market", (Put("records/a", b"2"),), (), new_id())))
        await asyncio.sleep(0)
        proxy.heal()
        receipt = await put
        assert (await first).version == receipt.version
    await changes.aclose()  # type: ignore[attr-defined]


async def test_closing_ends_also_those_who_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(remote_link, "CLOSE_S", 0.05)
    never = asyncio.Event()

    class Stuck(Wrapper):
        async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
            await never.wait()
            return []

    running = await serve(Stuck(MemoryEngine(clock=ManualClock())), Limits(in_flight=1))
    client = await running.client()
    asked = [asyncio.ensure_future(client.get(SPACE, ["records/a"])) for _ in range(3)]
    await asyncio.sleep(0.05)
    await client.close()
    async with asyncio.timeout(DEADLINE_S):
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    never.set()
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
