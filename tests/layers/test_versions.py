"""The shortest chain of steps, compared with a search that tries everything; and the order of versions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import InvalidInput, MigrationFailed
from holdfast.layers.state_type import Schema, StateType
from holdfast.layers.versions import Step, read_version, shortest_chain, version_order
from tests.soak import examples

VERSIONS = [f"{number}.0.0" for number in range(8)]
EDGES = st.tuples(st.sampled_from(VERSIONS), st.sampled_from(VERSIONS))
GRAPHS = st.sets(EDGES, max_size=6) | st.sets(EDGES, min_size=8, max_size=20)


def distance(edges: set[tuple[str, str]], start: str, goal: str) -> int | None:
    """By repeated relaxation over all edges: nothing like a search."""
    away = {start: 0}
    for _ in VERSIONS:
        for here, there in edges:
            if here in away:
                away[there] = min(away.get(there, 99), away[here] + 1)
    return away.get(goal)


@settings(max_examples=examples(100), deadline=None)
@given(GRAPHS, st.sampled_from(VERSIONS), st.sampled_from(VERSIONS))
def test_the_chain_is_a_way_and_the_shortest(edges: set[tuple[str, str]], start: str, goal: str) -> None:
    steps: dict[str, set[str]] = {}
    for here, there in edges:
        steps.setdefault(here, set()).add(there)
    chain = shortest_chain(steps, start, goal)
    length = distance(edges, start, goal)
    assert (None if chain is None else len(chain)) == length
    if chain is not None:
        assert [start, *chain][-1] == goal
        assert all(step in edges for step in pairwise([start, *chain]))


@settings(max_examples=100, deadline=None)
@given(GRAPHS, st.sampled_from(VERSIONS))
def test_data_goes_the_shortest_way_to_the_newest_version_or_is_refused(
    edges: set[tuple[str, str]], start: str
) -> None:
    def step(there: str) -> Step:
        return lambda trail: [*trail, there]

    steps: dict[str, dict[str, Step]] = {}
    for here, there in edges:
        steps.setdefault(here, {})[there] = step(there)
    known = StateType("t", {version: Schema(version, {"type": "array"}) for version in VERSIONS}, steps)
    length = distance(edges, start, VERSIONS[-1])
    if length is None:
        with pytest.raises(MigrationFailed, match="no step"):
            known.upgrade([], start)
    else:
        trail = known.upgrade([], start)
        assert len(trail) == length
        assert trail == shortest_chain(steps, start, VERSIONS[-1])


def test_of_two_ways_the_one_through_newer_versions_is_taken() -> None:
    steps = {"1.0.0": ["1.2.0", "1.10.0"], "1.2.0": ["2.0.0"], "1.10.0": ["2.0.0"]}
    assert shortest_chain(steps, "1.0.0", "2.0.0") == ["1.10.0", "2.0.0"]


@given(st.tuples(*[st.integers(0, 999_999_999)] * 3))
def test_versions_are_ordered_by_their_numbers(numbers: tuple[int, int, int]) -> None:
    text = ".".join(map(str, numbers))
    assert read_version(text) == read_version("v" + text) == text
    assert version_order(text) == numbers


@given(st.text(max_size=12))
def test_anything_else_is_no_version(text: str) -> None:
    try:
        assert read_version(text) in (text, text[1:])
    except InvalidInput:
        return
    assert text.count(".") == 2
