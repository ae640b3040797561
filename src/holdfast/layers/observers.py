"""Observing tasks: their events as they happen, selected and sampled, and an aggregated view of them.

    async for seen in space.tasks.observe(status="failed", tags=["nightly"], sample=0.1): ...
    view = await space.tasks.overview()
    async for _ in view.follow(): print(view.counts, view.rate)

Everything comes from the feed: the log of every task, and the counters that are maintained with it. So an observer disturbs nobody, can be
resumed from a cursor, and needs no memory for tasks it has seen, except for the last KNOWN_MAX, by which events that carry no
state are selected. A sample is one of tasks, not of events: a task is in it with everything, or not at all, for every observer.

How it fails. A cursor that the feed does not reach back to any more raises Compacted: begin anew, without it.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from holdfast.clock import Duration, duration_ms
from holdfast.codec import integer
from holdfast.engine import Change, cursor_at
from holdfast.errors import Error, InvalidInput
from holdfast.layers.scope import Scope
from holdfast.layers.task_states import COUNTS, LOG, STATUSES, TaskEvent, TaskState, TaskStatus, event_of

KNOWN_MAX: Final = 10_000
DURATIONS_MAX: Final = 1_000
"""The last ones, of which a view knows the distribution."""
ENDS_MAX: Final = 100_000
"""Ends within the window of a view that are counted one by one."""


class Selection(NamedTuple):
    """Which tasks are meant."""

    statuses: frozenset[TaskStatus] | None = None
    tags: frozenset[str] = frozenset()
    pattern: str | None = None
    """Of titles or tids."""
    sample: float = 1.0

    def check(self) -> Selection:
        if isinstance(self.sample, bool) or not isinstance(self.sample, int | float) or not 0 < self.sample <= 1:
            raise InvalidInput(f"a sample is a share of all tasks, more than 0 and at most 1, not {self.sample!r:.40}")
        return self

    def takes(self, tid: str) -> bool:
        """Whether the task is in the sample."""
        if self.sample >= 1:
            return True
        digest = hashlib.sha256(tid.encode()).digest()[:8]
        return int.from_bytes(digest) < self.sample * 2**64

    def fits(self, state: TaskState) -> bool:
        if self.statuses is not None and state.status not in self.statuses:
            return False
        if not self.tags <= set(state.tags):
            return False
        return self.pattern is None or fnmatchcase(state.title, self.pattern) or fnmatchcase(state.tid, self.pattern)


class Seen(NamedTuple):
    """An event, and where to go on after it."""

    event: TaskEvent
    cursor: str


async def observe(scope: Scope, selection: Selection, cursor: str | None, live: bool) -> AsyncIterator[Seen]:
    """Events that are selected, in order."""
    selection.check()
    known: OrderedDict[str, bool] = OrderedDict()
    async for commit in scope.engine.watch(scope.space, LOG, cursor=cursor, live=live):
        for change in commit.changes:
            event = await read_event(scope, change)
            if event is None or not selection.takes(event.tid):
                continue
            if event.state is not None:
                known[event.tid] = selection.fits(event.state)
                known.move_to_end(event.tid)
                if len(known) > KNOWN_MAX:
                    known.popitem(last=False)
            if known.get(event.tid, selection[:3] == Selection()[:3]):
                yield Seen(event, commit.cursor)


async def read_event(scope: Scope, change: Change) -> TaskEvent | None:
    """The event that a change of the log is; None when it is none, or cannot be read: hostile clients must not end a watch."""
    if not change.exists or change.op != "push" or not change.key.startswith(LOG):
        return None
    value = change.value
    if not value:  # too large for the feed
        [entry] = await scope.engine.get(scope.space, [change.key])
        if entry is None:
            return None
        value = entry.value
    try:
        return event_of(change.key, value, change.tag)
    except Error:
        return None


class TaskOverview:
    """How many tasks are in each state, how long they took, how many end per minute. Made by `space.tasks.overview`."""

    def __init__(self, scope: Scope, window: Duration = "5m") -> None:
        self.counts: dict[TaskStatus, int] = dict.fromkeys(STATUSES, 0)
        """As the store counts them."""
        self.cursor: str | None = None
        """How far the feed has been followed."""
        self.window_ms = duration_ms(window, name="window")
        self._scope = scope
        self._durations: deque[float] = deque(maxlen=DURATIONS_MAX)
        self._ends: deque[tuple[int, TaskStatus]] = deque(maxlen=ENDS_MAX)

    async def load(self) -> None:
        """The counts as they are now; from here on the feed is followed."""
        found = await self._scope.engine.spaces(self._scope.space)
        self.cursor = cursor_at(found[0].revision if found else 0)
        entries = await self._scope.engine.get(self._scope.space, [COUNTS + status for status in STATUSES])
        for status, entry in zip(STATUSES, entries, strict=True):
            self.counts[status] = 0 if entry is None else integer(entry.value) or 0

    async def follow(self, *, live: bool = True) -> AsyncIterator[TaskOverview]:
        """Itself, each time it has changed; with `live=False` until it is up to date."""
        async for commit in self._scope.engine.watch(self._scope.space, COUNTS, LOG, cursor=self.cursor, live=live):
            for change in commit.changes:
                if change.key.startswith(COUNTS):
                    status = change.key[len(COUNTS) :]
                    if status in self.counts:
                        self.counts[status] = integer(change.value) or 0 if change.exists else 0
                elif (event := await read_event(self._scope, change)) is not None:
                    self._note(event, commit.at)
            self.cursor = commit.cursor
            yield self

    def _note(self, event: TaskEvent, at_ms: int) -> None:
        state = event.state
        if state is None or not state.ended:
            return
        self._ends.append((at_ms, state.status))
        if state.started_at is not None and state.completed_at is not None:
            self._durations.append((state.completed_at - state.started_at).total_seconds())

    def rate(self, status: TaskStatus | None = None) -> float:
        """How many tasks ended per minute, in that state or at all, within the window."""
        since = self._scope.clock.now_ms() - self.window_ms
        while self._ends and self._ends[0][0] < since:
            self._ends.popleft()
        count = sum(1 for _, ended in self._ends if status is None or ended == status)
        return count * 60_000 / self.window_ms

    def duration(self, share: float = 0.5) -> float | None:
        """Seconds in which that share of the last tasks that ran had ended; None when none has."""
        if not self._durations:
            return None
        ordered = sorted(self._durations)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


async def overview(scope: Scope, window: Duration) -> TaskOverview:
    """A view with the counts of now."""
    view = TaskOverview(scope, window)
    await view.load()
    return view
