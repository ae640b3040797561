"""Alerts on tasks: when one comes to a state, stays in one for too long, or too many do so too fast.

    async for alert in space.tasks.alerts(AlertRule("failures", status="failed", count=10, within="1m")): ...

A rule with an `age` is about tasks that are in a state for longer; one with a `count` about so many within a time; any other about each
task that comes to the state. Everything is from the feed and the indexes: those that live are read at the beginning, and from then
on the feed tells; between events it is slept until the first age is reached. A task raises an alert of age once for each rule; a rule
on the rate rests, after an alert, until its time has passed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.clock import Duration, duration_ms, sleep_or
from holdfast.engine import SCAN_MAX, cursor_at
from holdfast.errors import InvalidInput
from holdfast.layers.observers import Selection, observe
from holdfast.layers.scope import Scope
from holdfast.layers.task_states import (
    RUNNING,
    STATUSES,
    WAITING,
    TaskEvent,
    TaskState,
    TaskStatus,
    readable_state,
    state_key,
)

RULES_MAX: Final = 100
COUNT_MAX: Final = 100_000
PENDING_MAX: Final = 10_000
"""Events that wait for whoever reads the alerts; more are not read from the feed until then."""


class AlertRule(msgspec.Struct, frozen=True):
    """When to raise an alert."""

    name: str
    status: TaskStatus | tuple[TaskStatus, ...]
    age: Duration | None = None
    count: int | None = None
    within: Duration = "1m"
    tags: tuple[str, ...] = ()
    pattern: str | None = None

    def __post_init__(self) -> None:
        for status in self.statuses:
            if status not in STATUSES:
                raise InvalidInput(f"rule {self.name!r}: there is no status {status!r:.60}")
        if self.age is not None and self.count is not None:
            raise InvalidInput(f"rule {self.name!r} is about an age or about a count, not both")
        if self.count is not None and (type(self.count) is not int or not 0 < self.count <= COUNT_MAX):
            raise InvalidInput(f"rule {self.name!r}: count is between 1 and {COUNT_MAX:,}, not {self.count!r:.40}")
        if self.age is not None:
            duration_ms(self.age, name="age")
        duration_ms(self.within, name="within")

    @property
    def statuses(self) -> frozenset[TaskStatus]:
        return frozenset((self.status,) if isinstance(self.status, str) else self.status)

    @property
    def selection(self) -> Selection:
        return Selection(self.statuses, frozenset(self.tags), self.pattern)


class Alert(NamedTuple):
    """A rule that applies. `state` is the task's, of the last one for a rate; `number` how many there were."""

    rule: AlertRule
    state: TaskState
    at_ms: int
    number: int
    cursor: str | None
    """Where the feed had been followed to: resume there."""


class _Watch:
    """What the rules know of the tasks so far."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self.rules = rules
        self.living: dict[str, TaskState] = {}
        """By tid, those that an age may be reached by."""
        self.ages: list[tuple[int, str, int]] = []
        self.raised: dict[str, set[int]] = {}
        self.rates: dict[int, deque[int]] = {}
        self.rests: dict[int, int] = {}

    def note(self, state: TaskState, at_ms: int, cursor: str | None, *, loaded: bool = False) -> list[Alert]:
        """A task came to a state."""
        if state.ended:
            self.living.pop(state.tid, None)
            self.raised.pop(state.tid, None)
        found = []
        for number, rule in enumerate(self.rules):
            if not rule.selection.fits(state):
                continue
            if rule.age is not None:
                if not state.ended:
                    self.living[state.tid] = state
                    heapq.heappush(self.ages, (_since(state, at_ms) + duration_ms(rule.age), state.tid, number))
            elif loaded:
                continue
            elif rule.count is not None:
                found += self._rated(rule, number, state, at_ms, cursor)
            else:
                found.append(Alert(rule, state, at_ms, 1, cursor))
        return found

    def _rated(self, rule: AlertRule, number: int, state: TaskState, at_ms: int, cursor: str | None) -> list[Alert]:
        times = self.rates.setdefault(number, deque(maxlen=COUNT_MAX))
        times.append(at_ms)
        within = duration_ms(rule.within)
        while times and times[0] <= at_ms - within:
            times.popleft()
        if len(times) < (rule.count or 1) or self.rests.get(number, 0) > at_ms:
            return []
        self.rests[number] = at_ms + within
        return [Alert(rule, state, at_ms, len(times), cursor)]

    def due(self, now_ms: int, cursor: str | None) -> list[Alert]:
        """Those of which an age is reached."""
        found = []
        while self.ages and self.ages[0][0] <= now_ms:
            _, tid, number = heapq.heappop(self.ages)
            state, rule = self.living.get(tid), self.rules[number]
            if state is not None and state.status in rule.statuses and number not in self.raised.get(tid, ()):
                self.raised.setdefault(tid, set()).add(number)
                found.append(Alert(rule, state, now_ms, 1, cursor))
        return found


async def alerts(scope: Scope, rules: Sequence[AlertRule], cursor: str | None) -> AsyncIterator[Alert]:
    """Alerts as they are due, without end."""
    if not 0 < len(rules) <= RULES_MAX:
        raise InvalidInput(f"there are between 1 and {RULES_MAX} rules, not {len(rules)}")
    watch, news = _Watch(rules), asyncio.Event()
    events: asyncio.Queue[tuple[TaskEvent, str]] = asyncio.Queue(PENDING_MAX)
    if cursor is None:
        found = await scope.engine.spaces(scope.space)
        cursor = cursor_at(found[0].revision if found else 0)
    if any(rule.age is not None for rule in rules):
        await _load(scope, watch)

    async def follow(start: str) -> None:
        async for seen in observe(scope, Selection(), start, True):
            await events.put(seen)
            news.set()

    following = asyncio.ensure_future(follow(cursor))
    following.add_done_callback(lambda _: news.set())
    try:
        while True:
            news.clear()
            while not events.empty():
                event, cursor = events.get_nowait()
                if event.state is not None and event.event == "state_update":
                    for alert in watch.note(event.state, int(event.timestamp.timestamp() * 1000), cursor):
                        yield alert
            for alert in watch.due(scope.clock.now_ms(), cursor):
                yield alert
            if following.done() and events.empty():
                following.result()
            if events.empty():
                await sleep_or(scope.clock, watch.ages[0][0] if watch.ages else None, news)
    finally:
        following.cancel()
        await asyncio.wait([following])


async def _load(scope: Scope, watch: _Watch) -> None:
    """The tasks that live."""
    for prefix in (WAITING, RUNNING):
        after = None
        while True:
            page = await scope.engine.scan(scope.space, prefix, after=after, limit=SCAN_MAX // 10)
            keys = [state_key(entry.key.rpartition("/")[2]) for entry in page.entries]
            for entry in await scope.engine.get(scope.space, keys) if keys else []:
                if entry is not None and (state := readable_state(entry)) is not None:
                    watch.note(state, entry.updated_at, None, loaded=True)
            if not page.more:
                break
            after = page.entries[-1].key


def _since(state: TaskState, at_ms: int) -> int:
    """Since when a task is in its state."""
    if state.status == "running" and state.started_at is not None:
        return int(state.started_at.timestamp() * 1000)
    return int(state.created_at.timestamp() * 1000) if state.status == "created" else at_ms
