"""The short way of a server, without a coroutine, obeys the same rules and keeps the same books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Absent, Batch, Delete, Empty, Present, Push, Put, Receipt, Touch
from holdfast.engines import grouping
from holdfast.engines.resident import ResidentEngine
from holdfast.errors import AccessDenied, Conflict, InvalidInput, RateLimitExceeded
from holdfast.identity import Identity
from holdfast.ids import new_id
from holdfast.middleware.denials import Denial
from holdfast.middleware.policy import PolicedEngine, Policy
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules
from holdfast.middleware.verbs import claims, claims_in_line, demands

SPACE = "contoso"
MARKET = Identity("market", "agent", SPACE)
LINE = "locks/lock/l/"


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ResidentEngine]:
    opened = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    yield opened
    await opened.close()


def policed(engine: ResidentEngine, **rules: object) -> tuple[Policy, PolicedEngine]:
    settings = {"rate_limits": (), "quotas": (), **rules}
    policy = Policy(engine, ManualClock(), Rules(**settings))  # type: ignore[arg-type]
    return policy, policy.engine_for(MARKET)


def put(key: str, value: bytes = b"1", **changes: object) -> Batch:
    return Batch("market", (Put(f"records/{key}", value),), **changes)  # type: ignore[arg-type]


def submit(engine: PolicedEngine, batch: Batch) -> asyncio.Future[Receipt] | None:
    reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
    return reply if engine.submit(SPACE, batch, reply) else None


def place(*conditions: Empty | Present, prefix: str = LINE, ttl_ms: int | None = 1000, actor: str = "market") -> Batch:
    return Batch(actor, (Push(prefix, b"{}", ttl_ms),), conditions)


async def test_a_place_in_a_line_comes_and_goes_the_short_way(engine: ResidentEngine) -> None:
    policy, market = policed(engine)
    assert submit(market, place(Empty(LINE))) is None, "nobody has read the usage of this space yet"
    await market.commit(SPACE, put("a"))
    coming = submit(market, place(Empty(LINE)))
    assert coming is not None
    [key] = (await coming).results
    refused = submit(market, place(Empty(LINE)))
    assert refused is not None
    with pytest.raises(Conflict) as caught:
        await refused
    assert (caught.value.key, caught.value.condition) == (key, "empty")
    going = submit(market, Batch("market", (Delete(str(key)),)))
    assert going is not None
    assert (await going).results == [True]
    book = policy.quotas.books[SPACE]
    assert (book.pending, book.flying) == (0, 0)
    assert (book.accounts["market"].pending, book.accounts["market"].flying) == (0, 0)
    assert [each.keys for each in (await engine.spaces(SPACE))[0].usage if each.subspace == "locks"] in ([], [0])


async def test_the_short_way_out_of_a_line_is_for_its_owner(engine: ResidentEngine) -> None:
    told: list[Denial] = []
    settings = Rules(rate_limits=(), quotas=())
    policy = Policy(engine, ManualClock(), settings, denied=told.append)
    market, risk = policy.engine_for(MARKET), policy.engine_for(Identity("risk", "agent", SPACE))
    for agent, each in (("market", market), ("risk", risk)):
        await each.commit(SPACE, Batch(agent, (Put(f"records/{agent}", b"1"),)))
    [key] = (await market.commit(SPACE, place())).results
    stealing = submit(risk, Batch("risk", (Delete(str(key)),)))
    assert stealing is not None
    with pytest.raises(AccessDenied, match="belongs to 'market'"):
        await stealing
    assert [(each.identity.agent, each.verb, each.key) for each in told] == [("risk", "Unlock", key)]
    assert (await engine.get(SPACE, [str(key)]))[0] is not None
    for wrong in (place(ttl_ms=None), place(prefix="locks/lock/"), place(prefix=f"{LINE}1/"), place(Empty("system/"))):
        with pytest.raises(AccessDenied):
            submit(market, wrong)
    assert submit(market, place(actor="risk")) is None


async def test_who_leaves_hands_over_the_short_way_to_itself_and_to_nobody_else(engine: ResidentEngine) -> None:
    told: list[Denial] = []
    policy = Policy(engine, ManualClock(), Rules(rate_limits=(), quotas=()), denied=told.append)
    market, risk = policy.engine_for(MARKET), policy.engine_for(Identity("risk", "agent", SPACE))
    for agent, each in (("market", market), ("risk", risk)):
        await each.commit(SPACE, Batch(agent, (Put(f"records/{agent}", b"1"),)))
    mine, next_of_mine, others = [
        str((await each.commit(SPACE, place(actor=agent))).results[0])
        for agent, each in (("market", market), ("market", market), ("risk", risk))
    ]

    def leaving(first: str, heir: str) -> Batch:
        return Batch("market", (Delete(first), Touch(heir, 60_000)))

    before = (await engine.scan(SPACE, LINE)).entries
    for wrong, key in ((leaving(mine, others), others), (leaving(others, mine), others)):
        refused = submit(market, wrong)
        assert refused is not None
        with pytest.raises(AccessDenied, match="belongs to 'risk'"):
            await refused
        assert (told[-1].identity.agent, told[-1].verb, told[-1].key) == ("market", "Transaction", key)
    assert (await engine.scan(SPACE, LINE)).entries == before, "nothing changed"

    for other in (
        Batch("market", (Delete(mine), Touch("records/market", 60_000))),
        Batch("market", (Delete(mine), Delete(next_of_mine))),
        Batch("market", (Touch(next_of_mine, 60_000), Delete(mine))),
        Batch("market", (Delete(mine), Touch(next_of_mine, 60_000), Touch(mine, 60_000))),
    ):
        assert submit(market, other) is None, "that is no handover"
    handed = submit(market, leaving(mine, next_of_mine))
    assert handed is not None
    assert (await handed).results[0] is True
    gone, held = await engine.get(SPACE, [mine, next_of_mine])
    assert gone is None
    assert held is not None
    assert held.expires_at == ManualClock().now_ms() + 60_000
    lost = submit(market, leaving(next_of_mine, mine))
    assert lost is not None
    with pytest.raises(Conflict):
        await lost  # who was next has gone
    assert (await engine.get(SPACE, [next_of_mine]))[0] is not None
    book = policy.quotas.books[SPACE]
    assert (book.pending, book.flying) == (0, 0)


async def test_handing_over_counts_as_two(engine: ResidentEngine) -> None:
    _, market = policed(engine, rate_limits=(RateLimit("*", 1, 5),))
    await market.commit(SPACE, put("a"))
    first, second = [str((await market.commit(SPACE, place())).results[0]) for _ in range(2)]
    with pytest.raises(RateLimitExceeded):
        submit(market, Batch("market", (Delete(first), Touch(second, 60_000))))
    assert submit(market, Batch("market", (Delete(first),))) is not None


async def test_a_rate_that_is_exceeded_is_told_alike_on_both_ways(engine: ResidentEngine) -> None:
    told: list[Denial] = []
    policy = Policy(engine, ManualClock(), Rules(rate_limits=(RateLimit("*", 1, 5),), quotas=()), denied=told.append)
    market = policy.engine_for(MARKET)
    await market.commit(SPACE, put("a"))
    first, second = [str((await market.commit(SPACE, place())).results[0]) for _ in range(2)]
    leaving = Batch("market", (Delete(first), Touch(second, 60_000)))
    with pytest.raises(RateLimitExceeded):
        submit(market, leaving)
    with pytest.raises(RateLimitExceeded):
        await market.commit(SPACE, leaving)
    assert told[0] == told[1]


async def test_places_count_for_rate_and_quota_on_the_short_way(engine: ResidentEngine) -> None:
    _, market = policed(engine, quotas=(Quota("*", max_keys_per_agent=3),), rate_limits=(RateLimit("*", 1, 7),))
    await market.commit(SPACE, put("a"))
    taken = [reply for n in range(4) if (reply := submit(market, place())) is not None]
    assert len(taken) == 2
    for reply in taken:
        await reply
    assert submit(market, place(Present("records/a"), Present("records/a"))) is None
    assert submit(market, Batch("market", (Delete(f"{LINE}1"),), (Present("records/a"),) * 3)) is not None
    with pytest.raises(RateLimitExceeded):
        submit(market, Batch("market", (Delete(f"{LINE}1"),)))


async def test_a_put_of_a_record_goes_the_short_way_and_anything_else_does_not(engine: ResidentEngine) -> None:
    _, market = policed(engine)
    assert submit(market, put("a")) is None, "nobody has read the usage of this space yet"
    await market.commit(SPACE, put("a"))
    reply = submit(market, put("a", b"2"))
    assert reply is not None
    assert (await reply).version == 2
    assert submit(market, put("a", conditions=(Absent("records/a"),))) is None
    assert submit(market, Batch("market", (Put("locks/lock/l/1", b"1"),))) is None
    assert submit(market, Batch("risk", (Put("records/a", b"1"),))) is None
    assert market.read(SPACE, ["locks/lock/l/1"]) is None
    assert market.read("fabrikam", ["records/a"]) is None
    [entry] = market.read(SPACE, ["records/a"]) or [None]
    assert entry is not None
    assert entry.value == b"2"


async def test_who_may_not_set_or_get_has_no_short_way(engine: ResidentEngine) -> None:
    await engine.commit(SPACE, put("a"))
    _, market = policed(engine, access_control=(AccessRule("*", allow=("Watch",)),))
    assert submit(market, put("a")) is None
    assert market.read(SPACE, ["records/a"]) is None


async def test_the_rate_is_charged_on_the_short_way(engine: ResidentEngine) -> None:
    _, market = policed(engine, rate_limits=(RateLimit("*", 1, 5),))
    await market.commit(SPACE, put("a"))
    assert submit(market, put("a")) is not None
    assert market.read(SPACE, ["records/a"]) is not None
    assert submit(market, put("a")) is not None
    with pytest.raises(RateLimitExceeded):
        submit(market, put("a"))
    with pytest.raises(RateLimitExceeded):
        market.read(SPACE, ["records/a"])


async def test_what_is_in_flight_counts_for_the_quota(engine: ResidentEngine) -> None:
    _, market = policed(engine, quotas=(Quota("*", max_keys_per_agent=5),))
    await market.commit(SPACE, put("a"))
    replies = [submit(market, put(f"k{n}")) for n in range(10)]
    taken = [reply for reply in replies if reply is not None]
    await asyncio.gather(*taken)
    assert len(taken) == 4
    [info] = await engine.spaces(SPACE)
    assert sum(each.keys for each in info.usage if each.owner == "market") == 5


async def test_what_the_engine_refuses_at_once_is_taken_off_the_books(engine: ResidentEngine) -> None:
    policy, market = policed(engine)
    await market.commit(SPACE, put("a"))
    book = policy.quotas.books[SPACE]
    before = (book.begun, book.pending, book.flying)
    with pytest.raises(InvalidInput):
        submit(market, put("a", request_id="x" * 500))
    assert (book.begun, book.pending, book.flying) == before


async def test_everything_has_landed_when_all_is_answered(engine: ResidentEngine) -> None:
    policy, market = policed(engine)
    await market.commit(SPACE, put("a"))
    await asyncio.gather(*(reply for n in range(50) if (reply := submit(market, put(f"k{n}"))) is not None))
    book = policy.quotas.books[SPACE]
    assert (book.pending, book.flying) == (0, 0)
    assert (book.accounts["market"].pending, book.accounts["market"].flying) == (0, 0)


def joining(prefix: str = LINE, patience_ms: int = 1) -> Batch:
    return Batch("market", (Push(prefix, b"{}", 1000),), (), new_id(), True, patience_ms)


async def test_who_joins_a_line_goes_with_the_next_commit(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "PATIENCE_MS_MAX", 600_000)
    _, market = policed(engine)
    await market.commit(SPACE, put("a"))
    [first] = (await market.commit(SPACE, place())).results
    waiting = submit(market, joining(patience_ms=600_000))
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting is not None
    assert not waiting.done()
    leaving = submit(market, Batch("market", (Delete(str(first)),)))
    assert leaving is not None
    gone = await leaving
    assert waiting.done(), "one COMMIT for both"
    assert (await waiting).version == gone.version - 1, "in the order in which they came"


async def test_who_joins_a_line_waits_a_moment_at_most(engine: ResidentEngine) -> None:
    _, market = policed(engine)
    await market.commit(SPACE, put("a"))
    for _ in range(2):
        waiting = submit(market, joining())
        assert waiting is not None
        async with asyncio.timeout(10):
            await waiting


async def test_a_store_that_is_closed_finishes_what_was_patient(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "p.db", clock=ManualClock())
    _, market = policed(engine)
    await market.commit(SPACE, put("a"))
    waiting = submit(market, joining())
    assert waiting is not None
    await engine.close()
    assert (await waiting).results


@pytest.mark.parametrize("orchestrator", [False, True])
def test_what_a_place_in_a_line_needs_is_the_same_at_one_look(orchestrator: bool) -> None:
    """Where the quick look says yes, the rules for every batch do, and ask for the same conditions."""
    key = f"{LINE}1"
    prefixes = (LINE, "locks/lock/", "locks/lock/a/b/", "locks/", "locks/rw/x/")
    pushes = [Push(prefix, b"{}", ttl_ms) for prefix in prefixes for ttl_ms in (None, 5)]
    tested = [(), (Empty(LINE),), (Empty("records/"),), (Present(key),), (Absent(key),), (Empty(LINE), Empty(LINE))]
    heirs = [(Delete(key), Touch(heir, 5)) for heir in (f"{LINE}2", "locks/rw/x/1", key)]
    plain = 0
    for operations in [*((push,) for push in pushes), (Delete(key),), (Delete("locks/lock/x"),), *heirs]:
        for conditions in tested:
            for verbs in map(frozenset, ([], ["Lock"], ["Unlock"], ["Get"], ["Lock", "Unlock"])):
                batch = Batch("market", operations, conditions)
                quick = claims_in_line(operations, conditions, verbs)
                if quick is not None:
                    plain += 1
                    assert {verb for verb, _ in demands(batch)} <= verbs, batch
                    assert quick == claims(batch, orchestrator=orchestrator), batch
    assert plain == 12, (
        "three ways to take a place and two to leave one, by two of the sets of verbs; two to hand over, by one"
    )
