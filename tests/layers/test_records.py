"""Records: values, versions, counters, lists, sets, batches."""

from __future__ import annotations

import asyncio
from enum import Enum, StrEnum
from typing import Any

import msgspec
import pytest

from holdfast import (
    ABSENT,
    Conflict,
    InvalidInput,
    ManualClock,
    Space,
    Store,
    absent,
    at_least,
    delete_,
    increment,
    present,
    set_,
    value_is,
    version_is,
)
from holdfast.layers.records import Records
from tests.layers.conftest import everything


async def test_a_value_comes_back_as_it_was_written(space: Space) -> None:
    values = [None, True, 0, -5, 2**63, 2**80, 1.5, "", "ünï\u0000 ☃ 😀", [], [1, [2, []]], {}, {"a": {"b": None}}]
    for number, value in enumerate(values):
        await space.records.set(f"k{number}", value)
    for number, value in enumerate(values):
        assert await space.records.get(f"k{number}") == value


async def test_none_is_a_value_and_absence_is_not(space: Space) -> None:
    await space.records.set("k", None)
    assert await space.records.get("k", "default") is None
    assert await space.records.get("other", "default") == "default"
    assert await space.records.exists("k")
    assert not await space.records.exists("other")
    assert await space.records.entry("other") is None


async def test_an_entry_tells_version_owner_and_times(store: Store, space: Space, clock: ManualClock) -> None:
    first = await space.records.set("k", 1, ttl="1h")
    made = await space.records.entry("k")
    clock.advance("10s")
    second = await store.space("contoso", agent="risk").records.set("k", 2)
    entry = await space.records.entry("k")
    assert made is not None
    assert entry is not None
    assert (made.version, made.owner) == (first, "market")
    assert (entry.version, entry.owner, entry.value, entry.key) == (second, "risk", 2, "k")
    assert entry.created_at == made.created_at
    assert (entry.updated_at - entry.created_at).total_seconds() == 10
    assert made.created_at.tzinfo is not None
    assert made.expires_at is not None
    assert (made.expires_at - made.created_at).total_seconds() == 3600
    assert entry.expires_at is None


async def test_get_many_gives_those_that_exist(space: Space) -> None:
    await space.records.set("a", 1)
    await space.records.set("b", None)
    assert await space.records.get_many(["a", "b", "c"]) == {"a": 1, "b": None}


async def test_keys_are_listed_by_prefix_in_order(space: Space) -> None:
    for key in ["orders/2", "orders/10", "orders", "order", "ordersX", "z%_*?[{", "orders/ä"]:
        await space.records.set(key, 1)
    await space.records.append_to_list("orders/list", 1)
    assert await space.records.keys("orders/") == ["orders/10", "orders/2", "orders/list", "orders/ä"]
    assert await space.records.keys("z%_*?[{") == ["z%_*?[{"]
    assert await space.records.size() == len(await space.records.keys()) == 8


async def test_a_scan_pages_through_everything_both_ways(space: Space) -> None:
    for number in range(25):
        await space.records.set(f"k{number:02}", number)
    forwards = [record.value async for record in space.records.scan("k", page=7)]
    backwards = [record.value async for record in space.records.scan("k", page=7, reverse=True)]
    assert forwards == list(range(25))
    assert backwards == forwards[::-1]


async def test_delete_tells_whether_there_was_something(space: Space) -> None:
    await space.records.set("k", 1)
    assert await space.records.delete("k") is True
    assert await space.records.delete("k") is False
    assert await space.records.get("k") is None


async def test_concurrent_increments_are_all_counted(space: Space) -> None:
    sums = await asyncio.gather(*(space.records.increment("n") for _ in range(200)))
    assert sorted(sums) == list(range(1, 201))


async def test_increment_keeps_the_lifetime_unless_it_names_one(space: Space, clock: ManualClock) -> None:
    await space.records.increment("n", 5, ttl="10s")
    clock.advance("6s")
    assert await space.records.increment("n", 1) == 6
    clock.advance("4s")
    assert await space.records.get("n") is None
    assert await space.records.increment("n", 1, ttl="1s") == 1


async def test_increment_of_text_is_refused(space: Space) -> None:
    await space.records.set("k", "five")
    before = await everything(space)
    with pytest.raises(InvalidInput, match="no 64-bit integer"):
        await space.records.increment("k")
    assert await everything(space) == before


async def test_increment_of_a_list_is_refused_as_that_and_shows_nothing_of_it(space: Space) -> None:
    await space.records.append_to_list("l", 1)
    await space.records.add_to_set("s", 1)
    await space.records.set("clé", "hunter2")
    for key, kind in (("l", "a list"), ("s", "a set"), ("clé", "text")):
        with pytest.raises(InvalidInput, match=f"^'{key}' holds {kind}, which is no 64-bit integer"):
            await space.records.increment(key)


class Name(StrEnum):
    ORDERS = "orders/1"
    FILES = "files"


class Older(str, Enum):  # noqa: UP042 - as many still are
    ORDERS = "orders/1"
    FILES = "files"


@pytest.mark.parametrize("names", [Name, Older])
async def test_a_member_of_an_enum_of_texts_is_a_key_by_its_value(space: Space, names: Any) -> None:
    records = space.records
    await records.set(names.ORDERS, names.ORDERS)
    assert await records.get("orders/1") == await records.get(names.ORDERS) == "orders/1"
    assert await records.get_many([names.ORDERS]) == {"orders/1": "orders/1"}
    await records.append_to_list(names.FILES, 1)
    assert await records.list(names.FILES) == await records.list("files") == [1]
    assert await records.keys() == ["files", "orders/1"]
    await space.commit(value_is(names.ORDERS, "orders/1"), delete_(names.ORDERS))
    await space.transact(lambda transaction: transaction.append_to_list(names.FILES, 2))
    assert await records.list("files") == [1, 2]
    assert await records.delete(names.FILES)
    assert await records.keys() == []


async def test_compare_and_swap_by_value_version_and_absence(space: Space) -> None:
    version = await space.records.compare_and_swap("leader", "a", expect=ABSENT)
    for refused in ({"expect": ABSENT}, {"expect": "b"}, {"expect": None}, {"expect_version": version - 1}):
        before = await everything(space)
        with pytest.raises(Conflict) as caught:
            await space.records.compare_and_swap("leader", "x", **refused)  # type: ignore[arg-type]
        assert caught.value.key == "records/leader"
        assert caught.value.actual is not None
        assert await everything(space) == before
    await space.records.compare_and_swap("leader", "b", expect="a")
    newest = await space.records.compare_and_swap("leader", "c", expect="b")
    await space.records.compare_and_swap("leader", "d", expect_version=newest)
    assert await space.records.get("leader") == "d"


async def test_compare_and_swap_needs_exactly_one_expectation(space: Space) -> None:
    with pytest.raises(InvalidInput, match="either expect= or expect_version="):
        await space.records.compare_and_swap("k", 1)
    with pytest.raises(InvalidInput, match="either"):
        await space.records.compare_and_swap("k", 1, expect=1, expect_version=1)


async def test_equal_objects_are_equal_whatever_the_order_of_their_fields(space: Space) -> None:
    await space.records.set("k", {"a": 1, "b": 2})
    await space.records.compare_and_swap("k", "swapped", expect={"b": 2, "a": 1})
    assert await space.records.get("k") == "swapped"


async def test_one_of_many_concurrent_swaps_wins(space: Space) -> None:
    outcomes = await asyncio.gather(
        *(space.records.compare_and_swap("leader", number, expect=ABSENT) for number in range(50)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 49


# --- batches ---


async def test_a_batch_happens_as_a_whole_with_a_result_per_operation(space: Space) -> None:
    await space.records.set("available", 3)
    receipt = await space.commit(
        at_least("available", 1), increment("available", -1), set_("owner", "market"), delete_("nothing")
    )
    assert receipt.results == [2, None, False]
    assert await space.records.get_many(["available", "owner"]) == {"available": 2, "owner": "market"}


@pytest.mark.parametrize(
    "condition",
    [absent("k"), present("other"), version_is("k", 99), value_is("k", 2), value_is("k", ABSENT), at_least("k", 2)],
    ids=lambda condition: type(condition).__name__,
)
async def test_a_batch_whose_condition_fails_changes_nothing(space: Space, condition: object) -> None:
    await space.records.set("k", 1)
    before = await everything(space)
    with pytest.raises(Conflict):
        await space.commit(condition, set_("a", 1), increment("k"), delete_("k"))  # type: ignore[arg-type]
    assert await everything(space) == before


async def test_a_batch_takes_only_conditions_and_operations(space: Space) -> None:
    with pytest.raises(InvalidInput, match="neither a condition nor an operation"):
        await space.commit("set k")  # type: ignore[arg-type]


async def test_the_same_request_twice_has_one_effect_and_one_answer(space: Space) -> None:
    assert await space.records.increment("n", request_id="r-1") == 1
    assert await space.records.increment("n", request_id="r-1") == 1
    assert await space.records.get("n") == 1
    with pytest.raises(InvalidInput, match="used before"):
        await space.records.increment("n", 2, request_id="r-1")


# --- lists and sets ---


async def test_a_list_keeps_the_order_of_arrival(space: Space) -> None:
    await space.records.append_to_list("files", "a.csv", "b.csv")
    await space.records.append_to_list("files", {"c": 1})
    assert await space.records.list("files") == ["a.csv", "b.csv", {"c": 1}]
    assert await space.records.list("none") == []


async def test_concurrent_appends_are_all_kept(space: Space) -> None:
    await asyncio.gather(*(space.records.append_to_list("l", number) for number in range(100)))
    assert sorted(await space.records.list("l")) == list(range(100))


async def test_lists_whose_names_begin_alike_are_separate(space: Space) -> None:
    for name in ["a", "a/b", "a%2Fb", "a/", "%"]:
        await space.records.append_to_list(name, name)
    for name in ["a", "a/b", "a%2Fb", "a/", "%"]:
        assert await space.records.list(name) == [name]


async def test_a_set_has_each_member_once(space: Space) -> None:
    assert await space.records.add_to_set("errors", "E1") == 1
    assert await space.records.add_to_set("errors", "E1", "E2", "E2", {"code": 3}, "x" * 1000) == 3
    assert sorted(map(str, await space.records.members("errors"))) == sorted(["E1", "E2", "{'code': 3}", "x" * 1000])
    assert await space.records.remove_from_set("errors", "E1", "E9", "x" * 1000) == 2
    assert await space.records.remove_from_set("nothing", "E1") == 0
    assert len(await space.records.members("errors")) == 2


async def test_concurrent_additions_count_each_member_once(space: Space) -> None:
    counts = await asyncio.gather(*(space.records.add_to_set("s", number % 10) for number in range(100)))
    assert sum(counts) == 10
    assert len(await space.records.members("s")) == 10


async def test_a_deleted_list_is_empty_at_once_and_starts_anew(space: Space) -> None:
    await space.records.append_to_list("l", 1, 2)
    assert await space.records.delete("l")
    assert await space.records.list("l") == []
    await space.records.append_to_list("l", 3)
    assert await space.records.list("l") == [3]


async def test_a_list_expires_as_a_whole_and_its_ttl_only_extends(space: Space, clock: ManualClock) -> None:
    await space.records.append_to_list("l", 1, ttl="10s")
    clock.advance("5s")
    await space.records.append_to_list("l", 2, ttl="1s")
    clock.advance("4s")
    assert await space.records.list("l") == [1, 2]
    await space.records.append_to_list("l", 3, ttl="10s")
    clock.advance("9s")
    assert await space.records.list("l") == [1, 2, 3]
    clock.advance("1s")
    assert await space.records.list("l") == []
    await space.records.append_to_list("l", 4)
    assert await space.records.list("l") == [4]


@pytest.mark.parametrize("wrong", ["append_to_list", "add_to_set", "list", "members", "get", "increment"])
async def test_a_list_is_not_a_set_is_not_a_record(space: Space, wrong: str) -> None:
    await space.records.set("record", 1)
    await space.records.append_to_list("list", 1)
    await space.records.add_to_set("set", 1)
    fits = {"append_to_list": "list", "list": "list", "add_to_set": "set", "members": "set", "get": "record"}
    for name in {"record", "list", "set"} - {fits.get(wrong, "record")}:
        call = getattr(space.records, wrong)
        before = await everything(space)
        with pytest.raises(InvalidInput):
            await (call(name) if wrong in ("list", "members", "get", "increment") else call(name, 5))
        assert await everything(space) == before


async def test_a_list_counts_as_one_key(space: Space) -> None:
    await space.records.append_to_list("l", *range(50))
    await space.records.add_to_set("s", *range(50))
    assert await space.records.size() == 2


async def test_spaces_do_not_see_each_other(store: Store, space: Space) -> None:
    other = store.space("fabrikam", agent="market")
    await space.records.set("k", 1)
    await space.records.append_to_list("l", 1)
    assert await other.records.get("k") is None
    assert await other.records.keys() == []
    assert await other.records.list("l") == []


@pytest.mark.parametrize("off", [-30_000, 30_000])
async def test_the_size_goes_by_the_clock_of_the_store(space: Space, clock: ManualClock, off: int) -> None:
    await space.records.set("kept", 1)
    await space.records.set("a", 1, ttl="10s")
    here = Records(msgspec.structs.replace(space._scope, clock=ManualClock(clock.now_ms() + off)))
    assert await asyncio.wait_for(here.size(), 10) == 2
    clock.advance("11s")
    assert await asyncio.wait_for(here.size(), 10) == 1
