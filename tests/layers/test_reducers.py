"""Reducers: sum, max and union take any order."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import InvalidInput
from holdfast.layers.reducers import REDUCERS_MAX, check_reducers, reduced

DECLARED = {"cost": "sum", "risk.worst": "max", "risk.tags": "union"}
change = st.fixed_dictionaries(
    {},
    optional={
        "cost": st.integers(-9, 9),
        "risk": st.fixed_dictionaries(
            {},
            optional={
                "worst": st.integers(-9, 9),
                "tags": st.lists(st.integers(0, 5) | st.text(max_size=1), max_size=4),
            },
        ),
    },
)


@settings(max_examples=100, deadline=None)
@given(st.lists(change, max_size=5), st.randoms())
def test_the_order_of_changes_makes_no_difference(changes: list[Any], random: Any) -> None:
    def all_of(order: list[Any]) -> Any:
        body = reduce(lambda body, each: reduced(body, each, DECLARED), order, {"kept": 1})
        tags = body.get("risk", {}).get("tags")
        return {**body, "risk": {**body.get("risk", {}), "tags": None if tags is None else {repr(tag) for tag in tags}}}

    shuffled = [*changes]
    random.shuffle(shuffled)
    assert all_of(changes) == all_of(shuffled)


def test_each_reducer_does_what_it_is_called() -> None:
    declared = {"a": "sum", "b": "max", "c": "union", "d": "append", "e": "last", "f.g": "max"}
    body = {"a": 1, "b": 2, "c": [1, "1"], "d": [1], "e": {"x": 1}}
    given = {"a": 2.5, "b": 1, "c": ["1", 2, 2], "d": [1], "e": {"y": 1}, "f": {"g": "z"}}
    kept = {**body}
    assert reduced(body, given, declared) == {
        "a": 3.5, "b": 2, "c": [1, "1", 2], "d": [1, 1], "e": {"y": 1}, "f": {"g": "z"},
    }  # fmt: skip
    assert body == kept


@pytest.mark.parametrize(
    ("body", "given", "declared"),
    [
        ({"a": 1}, {"a": "1"}, {"a": "sum"}),
        ({"a": "1"}, {"a": 1}, {"a": "sum"}),
        ({"a": True}, {"a": 1}, {"a": "sum"}),
        ({"a": 1}, {"a": "1"}, {"a": "max"}),
        ({"a": 1}, {"a": None}, {"a": "max"}),
        ({"a": 1}, {"a": [1]}, {"a": "union"}),
        ({}, {"a": 1}, {"a": "append"}),
        ({"a": 1}, {"a": {"b": 1}}, {"a.b": "sum"}),
        ([], {"a": 1}, {"a": "sum"}),
        ({}, {"a": 1, "b": 1}, {"a": "sum"}),
        ({}, {"a": {"b": 1, "c": 1}}, {"a.b": "sum"}),
        ({}, {"a": 1}, {"a.b": "sum"}),
        ({}, 3, {"a": "sum"}),
        ({}, {"a": 1}, {}),
    ],
)
def test_what_does_not_fit_is_refused(body: Any, given: Any, declared: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        reduced(body, given, declared)


@pytest.mark.parametrize(
    "wrong",
    [{"a": "average"}, {"": "sum"}, {"a..b": "sum"}, {"a": "sum", "a.b": "max"}, {1: "sum"}, {"a": 1}, [], "sum",
     {".".join("a" * 33): "sum"}, {f"p{number}": "sum" for number in range(REDUCERS_MAX + 1)}],
)  # fmt: skip
def test_what_cannot_be_declared_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        check_reducers(wrong)
