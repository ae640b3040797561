"""The versions of a type's data, and the shortest way from one to another.

A version is three numbers, `1.1.0`, or `v1.1.0` as some write it; it is kept without the v. Steps are functions from the data
of one version to that of another. They form a graph: what is registered decides which ways there are, and the shortest one
is taken, so a direct step from 1.0.0 to 3.0.0 is preferred to two that lead through 2.0.0. Of two ways of the same length the
one through the newer versions is taken: whoever migrates gets the same.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from holdfast.errors import InvalidInput

_VERSION: Final = re.compile(r"v?((?:0|[1-9][0-9]{0,8})(?:\.(?:0|[1-9][0-9]{0,8})){2})", re.ASCII)

Step: TypeAlias = Callable[[Any], Any]
"""From the data of one version to the data of another."""


def read_version(text: str) -> str:
    """A version as it is kept: `1.1.0`."""
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidInput(f"{text!r:.60} is no version; write three numbers, such as '1.1.0' or 'v1.1.0'")
    return found[1]


def version_order(version: str) -> tuple[int, ...]:
    """What versions are sorted by: 1.10.0 comes after 1.9.0."""
    return tuple(map(int, version.split(".")))


def shortest_chain(steps: Mapping[str, Collection[str]], start: str, goal: str) -> list[str] | None:
    """The versions to go through, the goal included and the start not; None when no way leads there."""
    came_from: dict[str, str] = {start: start}
    waiting = deque([start])
    while waiting and goal not in came_from:
        here = waiting.popleft()
        for there in sorted(steps.get(here, ()), key=version_order, reverse=True):
            if there not in came_from:
                came_from[there] = here
                waiting.append(there)
    if goal not in came_from:
        return None
    chain: list[str] = []
    while goal != start:
        chain.append(goal)
        goal = came_from[goal]
    return chain[::-1]
