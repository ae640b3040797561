"""Batches that are submitted together are done as if each had come by itself, in their order, and answered at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import apsw
import pytest

from holdfast.clock import ManualClock
from holdfast.engine import Absent, Batch, Increment, Put, Receipt
from holdfast.engines import grouping
from holdfast.engines.resident import ResidentEngine
from holdfast.errors import Conflict, InvalidInput, OutcomeUnknown, StorageFull, Unavailable
from holdfast.ids import new_id

SPACE = "s"
Outcomes = list[Receipt | BaseException]


class Told:
    """What was told, and how often."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = []
        self.times = 0
        self._event = asyncio.Event()

    def set_results(self, outcomes: Outcomes) -> None:
        self.outcomes += outcomes
        self.times += 1
        self._event.set()

    async def all(self) -> Outcomes:
        async with asyncio.timeout(10):
            await self._event.wait()
        assert self.times == 1
        return self.outcomes

    async def kinds(self) -> list[type]:
        return [type(outcome) for outcome in await self.all()]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ResidentEngine]:
    opened = await ResidentEngine.open(tmp_path / "k.db", clock=ManualClock())
    await opened.commit(SPACE, put(0))
    yield opened
    await opened.close()


def put(number: int, *conditions: Absent, key: str | None = None, fresh: bool = True) -> Batch:
    return Batch("a", (Put(key or f"records/{number}", b"%d" % number),), conditions, new_id(), fresh)


async def test_they_are_one_after_the_other_and_each_has_its_version(engine: ResidentEngine) -> None:
    told = Told()
    counting = Batch("a", (Increment("records/n", 2),), (), new_id(), True)
    assert engine.submit_all(SPACE, [put(1), counting, put(2), counting_again()], told)
    receipts = await told.all()
    assert [(each.version, each.results) for each in receipts if isinstance(each, Receipt)] == [
        (2, [None]),
        (3, [2]),
        (4, [None]),
        (5, [5]),
    ]
    seen = [commit.version async for commit in engine.watch(SPACE, cursor="r1", live=False)]
    assert seen == [2, 3, 4, 5]


def counting_again() -> Batch:
    return Batch("a", (Increment("records/n", 3),), (), new_id(), True)


async def test_one_that_is_refused_takes_nothing_from_the_others(engine: ResidentEngine) -> None:
    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2, Absent("records/1")), put(3)], told)
    assert await told.kinds() == [Receipt, Conflict, Receipt]
    assert [entry is not None for entry in await engine.get(SPACE, ["records/1", "records/2", "records/3"])] == [
        True,
        False,
        True,
    ]


async def test_a_request_that_is_repeated_among_them_or_later_has_its_first_answer(engine: ResidentEngine) -> None:
    told, one = Told(), put(1)
    assert engine.submit_all(SPACE, [one, put(2)], told)
    first = (await told.all())[0]
    again = Batch(one.actor, one.operations, (), one.request_id)
    assert await engine.commit(SPACE, again) == first
    assert engine.submit_all(SPACE, [put(3), again], Told()) is False, "what may have been answered goes by itself"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: put(1, fresh=False),
        lambda: put(1, key="nonsense"),
        lambda: put(1, key="records/\0"),
        lambda: Batch("a", (Put("records/1", b"1", -5),), (), new_id(), True),
    ],
)
async def test_with_one_that_must_go_by_itself_nothing_is_done(
    engine: ResidentEngine, wrong: Callable[[], Batch]
) -> None:
    told = Told()
    assert engine.submit_all(SPACE, [put(7), wrong(), put(8)], told) is False
    assert engine.submit_all("unknown", [put(7), put(8)], told) is False
    await engine.create("passing", "volatile")
    assert engine.submit_all("passing", [put(7), put(8)], told) is False
    await asyncio.sleep(0.01)
    assert (await engine.spaces(SPACE))[0].revision == 1
    assert told.times == 0


async def test_they_keep_their_place_among_others(engine: ResidentEngine) -> None:
    replies = [asyncio.get_running_loop().create_future() for _ in range(2)]
    first, last = Told(), Told()
    engine.submit(SPACE, put(1), replies[0])
    assert engine.submit_all(SPACE, [put(2), put(3)], first)
    engine.submit(SPACE, put(4), replies[1])
    assert engine.submit_all(SPACE, [put(5), put(6)], last)
    versions = [each.version for each in [*await first.all(), *await last.all()] if isinstance(each, Receipt)]
    assert versions == [3, 4, 6, 7]
    assert [(await reply).version for reply in replies] == [2, 5]


async def test_a_group_has_so_many_batches_and_no_more(engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "GROUP_BATCHES_MAX", 5)
    groups: list[int] = []
    evaluate = engine._commits._evaluate

    def counted(items: list[grouping.Waiting], *, known_new: bool) -> list[object]:
        groups.append(sum(item.count for item in items))
        return evaluate(items, known_new=known_new)  # type: ignore[return-value]

    monkeypatch.setattr(engine._commits, "_evaluate", counted)
    many = [Told() for _ in range(4)]
    for n, told in enumerate(many):
        assert engine.submit_all(SPACE, [put(10 * n + each) for each in range(3)], told)
    huge = Told()
    assert engine.submit_all(SPACE, [put(100 + each) for each in range(8)], huge)
    for told in (*many, huge):
        assert set(await told.kinds()) == {Receipt}
    assert groups == [3, 3, 3, 3, 8], "what was submitted together is not torn apart"


@pytest.mark.parametrize(
    ("failure", "accepted", "refused"),
    [
        (apsw.IOError("fsync"), OutcomeUnknown, Unavailable),
        (apsw.FullError("no room"), StorageFull, StorageFull),
    ],
)
async def test_a_commit_that_fails_is_told_to_each(
    engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch, failure: apsw.Error, accepted: type, refused: type
) -> None:
    monkeypatch.setattr(engine._commits, "_commit_rows", lambda: failure)
    told, sent = Told(), [put(1), put(2, Absent("records/0")), put(3)]
    assert engine.submit_all(SPACE, sent, told)
    outcomes = await told.all()
    assert [type(each) for each in outcomes] == [accepted, refused, accepted]
    for batch, outcome in zip(sent, outcomes, strict=True):
        if isinstance(outcome, OutcomeUnknown):
            assert outcome.request_id == batch.request_id


async def test_a_store_that_has_failed_refuses_each(engine: ResidentEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._commits, "failure", "the disk is gone")
    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2)], told)
    assert await told.kinds() == [Unavailable, Unavailable]


async def test_what_waits_while_a_store_fails_is_refused(engine: ResidentEngine) -> None:
    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2)], told)
    engine._commits._fail("the disk is gone")
    assert await told.kinds() == [Unavailable, Unavailable]


async def test_a_space_that_was_made_anew_meanwhile_keeps_them_as_it_asks(engine: ResidentEngine) -> None:
    dropping = asyncio.ensure_future(engine.drop(SPACE))
    making = asyncio.ensure_future(engine.create(SPACE, "volatile"))
    await asyncio.sleep(0)
    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2, Absent("records/1")), put(3)], told)
    assert await told.kinds() == [Receipt, Conflict, Receipt]
    await asyncio.gather(dropping, making)
    assert (await engine.spaces(SPACE))[0].durability == "volatile"
    assert (await engine.get(SPACE, ["records/3"]))[0] is not None


async def test_what_goes_to_no_file_is_done_once_although_the_group_is_looked_at_again(engine: ResidentEngine) -> None:
    known = Batch("a", (Put("records/1", b"1"),), (), "chosen")
    first = await engine.commit("other", known)
    dropping = asyncio.ensure_future(engine.drop(SPACE))
    making = asyncio.ensure_future(engine.create(SPACE, "volatile"))
    await asyncio.sleep(0)
    told, single = Told(), asyncio.get_running_loop().create_future()
    assert engine.submit_all(SPACE, [counting_again(), counting_again()], told)
    engine.submit(SPACE, counting_again(), single)
    again = await engine.commit("other", known)
    await asyncio.gather(dropping, making)
    assert again == first, "its id was found when the rows were written"
    assert [each.results for each in [*await told.all(), await single] if isinstance(each, Receipt)] == [[3], [6], [9]]
    assert [entry and entry.value for entry in await engine.get(SPACE, ["records/n"])] == [b"9"]


async def test_who_cannot_be_told_keeps_nobody_from_their_answer(
    engine: ResidentEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf:
        def set_results(self, outcomes: Outcomes) -> None:
            raise RuntimeError("deaf")

    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2)], Deaf())
    assert engine.submit_all(SPACE, [put(3), put(4)], told)
    assert await told.kinds() == [Receipt, Receipt]
    assert "could not be told what became of 2 batches" in caplog.text


async def test_a_closed_store_takes_none(tmp_path: Path) -> None:
    engine = await ResidentEngine.open(tmp_path / "c.db")
    await engine.commit(SPACE, put(0))
    told = Told()
    assert engine.submit_all(SPACE, [put(1), put(2)], told)
    await engine.close()
    assert await told.kinds() == [Receipt, Receipt], "what was taken is finished"
    assert engine.submit_all(SPACE, [put(3), put(4)], Told()) is False
    with pytest.raises((Unavailable, InvalidInput)):
        await engine.commit(SPACE, put(3))
