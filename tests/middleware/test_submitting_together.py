"""Sets that come together obey the same rules as one after the other, and leave the same books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.engine import Absent, Batch, Delete, Put, Receipt
from holdfast.engines.resident import ResidentEngine
from holdfast.errors import OutcomeUnknown, StorageFull
from holdfast.identity import Identity
from holdfast.ids import new_id
from holdfast.middleware.policy import PolicedEngine, Policy
from holdfast.middleware.rates import Bucket, Rates
from holdfast.middleware.rules import AccessRule, Quota, RateLimit, Rules

SPACE = "contoso"
Outcomes = list[Receipt | BaseException]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ResidentEngine]:
    opened = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    yield opened
    await opened.close()


async def policed(engine: ResidentEngine, **rules: object) -> tuple[Policy, PolicedEngine]:
    """Of an agent whose usage is known, and who has set one record."""
    settings = {"rate_limits": (), "quotas": (), **rules}
    policy = Policy(engine, ManualClock(), Rules(**settings))  # type: ignore[arg-type]
    market = policy.engine_for(Identity("market", "agent", SPACE))
    await market.commit(SPACE, put("a"))
    return policy, market


def put(key: str, value: bytes = b"1", *, key_whole: str | None = None, **changes: object) -> Batch:
    settings: dict[str, object] = {"actor": "market", "request_id": new_id(), "fresh": True, **changes}
    return Batch(operations=(Put(key_whole or f"records/{key}", value),), **settings)  # type: ignore[arg-type]


def books(policy: Policy) -> list[tuple[int, int, int, int]]:
    book = policy.quotas.books[SPACE]
    return [(each.begun, each.pending, each.doubtful, each.flying) for each in (book, book.accounts["market"])]


class Told(asyncio.Future[Outcomes]):
    """One future for all of them."""

    def set_results(self, outcomes: Outcomes) -> None:
        self.set_result(outcomes)


def together(market: PolicedEngine, *batches: Batch) -> Told | None:
    told = Told()
    return told if market.submit_all(SPACE, list(batches), told) else None


async def test_they_land_together_and_leave_what_each_would_have_left(engine: ResidentEngine) -> None:
    policy, market = await policed(engine)
    began = books(policy)
    told = together(market, *(put(f"k{n}") for n in range(5)))
    assert told is not None
    assert [each[1] for each in books(policy)] == [5 * 11, 5], "bytes and keys under way"
    assert [type(each) for each in await told] == [Receipt] * 5
    by_hand = [(begun + more, 0, 0, 0) for (begun, *_), more in zip(began, (5 * 11, 5), strict=True)]
    assert books(policy) == by_hand
    for n in range(5):
        await market.commit(SPACE, put(f"k{n}"))
    assert [each[0] - before[0] for each, before in zip(books(policy), by_hand, strict=True)] == [5 * 11, 5]


@pytest.mark.parametrize(
    "odd",
    [
        lambda: put("b", b"not json"),
        lambda: put("b", actor="risk"),
        lambda: put("b", conditions=(Absent("records/b"),)),
        lambda: put("b", key_whole="locks/lock/l/1"),
        lambda: put("b", key_whole="records/\0"),
        lambda: put("b", key_whole="records/é"),
        lambda: put("b", b'"' + b"x" * 2000 + b'"'),
        lambda: put("b", fresh=False),
        lambda: Batch("market", (Put("records/b", b"1", owner="market"),), (), new_id(), True),
        lambda: Batch("market", (Put("records/b", b"1"), Put("records/c", b"1")), (), new_id(), True),
        lambda: Batch("market", (Delete("records/a"),), (), new_id(), True),
        lambda: Batch("market", (), (), new_id(), True),
        lambda: Batch("market", (Put("records/b", "text"),), (), new_id(), True),  # type: ignore[arg-type]
        lambda: Batch("market", (Put("records/b", b"1", 0),), (), new_id(), True),
    ],
)
async def test_where_one_is_anything_else_none_is_sent_and_none_is_charged(
    engine: ResidentEngine, odd: Callable[[], Batch]
) -> None:
    policy, market = await policed(
        engine, quotas=(Quota("*", max_value_size=1000),), rate_limits=(RateLimit("*", 1, 6),)
    )
    before = books(policy)
    assert together(market, put("x"), odd(), put("y")) is None
    assert books(policy) == before
    assert (await engine.spaces(SPACE))[0].revision == 1
    told = together(market, *(put(f"k{n}") for n in range(4)))
    assert told is not None, "of six one is for renewals, and there are still four"
    await told
    assert together(market, put("x"), put("y")) is None


async def test_who_may_not_set_or_is_unknown_or_elsewhere_has_no_such_way(engine: ResidentEngine) -> None:
    await engine.commit(SPACE, put("a"))
    policy = Policy(
        engine, ManualClock(), Rules(rate_limits=(), quotas=(), access_control=(AccessRule("*", allow=("Get",)),))
    )
    market = policy.engine_for(Identity("market", "agent", SPACE))
    assert together(market, put("x"), put("y")) is None
    policy.reload(Rules(rate_limits=(), quotas=()))
    assert together(market, put("x"), put("y")) is None, "nobody has read its usage yet"
    await market.commit(SPACE, put("a"))
    assert market.submit_all("fabrikam", [put("x"), put("y")], Told()) is False
    told = together(market, put("x"), put("y"))
    assert told is not None
    await told
    admin = policy.engine_for(Identity("market", "admin", "*"))
    assert together(admin, put("x"), put("y")) is None
    policy.reload(Rules(rate_limits=(), quotas=(), access_control=(AccessRule("*", allow=("Get",)),)))
    assert together(market, put("x"), put("y")) is None, "new rules count at once"


@pytest.mark.parametrize("quota", [Quota("*", max_keys_per_agent=5), Quota("*", max_total_size=11 * 4 + 10)])
async def test_they_go_together_as_long_as_all_of_them_fit(engine: ResidentEngine, quota: Quota) -> None:
    policy, market = await policed(engine, quotas=(quota,))
    assert together(market, *(put(f"k{n}") for n in range(5))) is None
    assert books(policy)[0][3] == 0
    told = together(market, *(put(f"k{n}") for n in range(4)))
    assert told is not None
    assert together(market, put("x"), put("y")) is None, "what is under way counts"
    assert [type(each) for each in await told] == [Receipt] * 4


@pytest.mark.parametrize("rules", [{"rate_limits": (RateLimit("*", 1, 2),)}, {"quotas": (Quota("*", 2),)}])
async def test_of_who_is_over_its_rate_or_its_quota_no_value_is_read(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch, rules: dict[str, object]
) -> None:
    _, market = await policed(engine, **rules)
    read: list[bytes] = []
    monkeypatch.setattr("holdfast.middleware.policy.check_json", read.append)
    assert together(market, *(put(f"k{n}") for n in range(64))) is None
    assert read == []


async def test_while_one_goes_alone_they_wait_their_turn(engine: ResidentEngine) -> None:
    policy, market = await policed(engine)
    for tally in (policy.quotas.books[SPACE], policy.quotas.books[SPACE].accounts["market"]):
        tally.gate = asyncio.Event()
        assert together(market, put("x"), put("y")) is None
        tally.gate = None


@pytest.mark.parametrize("error", [StorageFull("no room"), OutcomeUnknown("who knows")])
async def test_what_failed_is_given_back_or_in_doubt(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    policy, market = await policed(engine)
    before = books(policy)

    def answered(space: str, batches: list[Batch], replies: Told) -> bool:
        replies.set_results([Receipt(2, 1, [None]), error, Receipt(3, 1, [None])])
        return True

    monkeypatch.setattr(engine, "submit_all", answered)
    told = together(market, put("x"), put("longer"), put("y"))
    assert told is not None
    assert [type(each) for each in await told] == [Receipt, type(error), Receipt]
    doubtful = isinstance(error, OutcomeUnknown)
    grown = [(11 * 2 - 2 + (15 if doubtful else 0), 15), (2 + doubtful, 1)]
    expected = [
        (begun + more, 0, doubt if doubtful else 0, 0) for (begun, *_), (more, doubt) in zip(before, grown, strict=True)
    ]
    assert books(policy) == expected


async def test_a_fault_of_the_engine_leaves_nothing_on_the_books(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, market = await policed(engine, rate_limits=(RateLimit("*", 1, 4),))
    before = books(policy)

    def broken(*args: object) -> bool:
        raise RuntimeError("inside")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "submit_all", broken)
        with pytest.raises(RuntimeError):
            together(market, put("x"), put("y"))
    assert books(policy) == before
    assert together(market, put("x"), put("y")) is not None


@given(st.integers(1, 8), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 6)), max_size=30))
def test_so_many_at_once_pass_exactly_if_they_pass_one_by_one(
    burst: int, rate: int, drawn: list[tuple[int, int]]
) -> None:
    limit = RateLimit("*", rate, burst)
    at_once, singly = Bucket(Rates(), limit), Bucket(Rates(), limit)
    now = 0
    for pause, count in drawn:
        now += pause
        passed = 0
        while passed < count and not singly.charge(1, now):
            passed += 1
        if at_once.charge_all(count, now):
            assert passed == count
        else:
            assert passed < count
            singly.give_back(passed)
        at_once.charge(0, now)
        assert at_once._owed == singly._owed
