"""Measuring on a noisy machine: contenders take turns in short rounds, and rounds are compared one by one.

A disturbance mostly lasts longer than a round, so it hits ours and the peer's neighbouring rounds alike and leaves their ratio.
The order of turns is rotated, so that nobody always runs after the same neighbour. Rates are told as medians, ratios as
the median of the rounds' ratios. What happens only now and then, such as sealing the audit or folding the log, falls
into some rounds and a median may not show it: `overall`, the ratio of the sums, does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

BUDGET_S: Final = 30.0
"""No further round begins after this time, once there are ROUNDS_MIN of them."""
ROUNDS_MIN: Final = 3

Turn = Callable[[float], Awaitable[float]]
"""Work for about so many seconds and give the rate: how many per second were finished."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Every benchmark is bounded by it in time and in number."""

    folder: Path
    rounds: int
    seconds: float
    """Of one turn."""
    keys: int
    """Of the large store in `flat`."""
    commits: int
    """Of its history."""
    pings: int
    """Changes a watcher is timed on."""
    idle_s: float
    """How long an idle watcher's CPU time is counted."""

    def within(self, folder: Path) -> Plan:
        return replace(self, folder=folder)


FULL: Final = Plan(Path(), rounds=25, seconds=0.15, keys=1_000_000, commits=200_000, pings=400, idle_s=10.0)
QUICK: Final = Plan(Path(), rounds=3, seconds=0.1, keys=20_000, commits=2_000, pings=50, idle_s=2.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one contender reached, round by round."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def ratio(self, peer: Rates) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.values, peer.values, strict=True))

    def overall(self, peer: Rates) -> float:
        """The ratio of the sums: what happens now and then counts in full."""
        return sum(self.values) / sum(peer.values)


async def take_turns(plan: Plan, contenders: dict[str, Turn]) -> dict[str, Rates]:
    """Let everybody run once to warm up, then round by round."""
    order = list(contenders)
    values: dict[str, list[float]] = {name: [] for name in order}
    for name in order:
        await contenders[name](plan.seconds)
    deadline = time.monotonic() + BUDGET_S
    for number in range(plan.rounds):
        if number >= ROUNDS_MIN and time.monotonic() > deadline:
            break  # something takes far longer than its turn; the rounds there are tell enough
        first = number % len(order)
        for name in order[first:] + order[:first]:
            values[name].append(await contenders[name](plan.seconds))
    return {name: Rates(rates) for name, rates in values.items()}


def timed(step: Callable[[], object], per_step: int = 1) -> Turn:
    """A turn that repeats a plain function; `per_step` is how many it finishes at once."""

    async def turn(seconds: float) -> float:
        clock, count = time.perf_counter, 0
        began = clock()
        end = began + seconds
        while (now := clock()) < end:
            step()
            count += per_step
        return count / (now - began)

    return turn


def timed_async(step: Callable[[], Awaitable[object]], per_step: int = 1) -> Turn:
    """The same for a coroutine function."""

    async def turn(seconds: float) -> float:
        clock, count = time.perf_counter, 0
        began = clock()
        end = began + seconds
        while (now := clock()) < end:
            await step()
            count += per_step
        return count / (now - began)

    return turn
