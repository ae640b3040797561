"""What happened to an execution, with the state after each step, and what differs between any two points.

A point is a line of the log; its number counts from 1, and 0 is before the first. The state is folded from what the log says was
written, so that it can be told for any point, also of an execution that has long ended. What was taken back by a retry is in
the state up to the point of the retry, and not after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.clock import as_datetime
from holdfast.errors import InvalidInput
from holdfast.layers.diffs import Difference, differences
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import LogEvent
from holdfast.layers.workflows.reading import log_of, standing_of
from holdfast.layers.workflows.rewinding import Fold, path_of

POINTS: Final = 1_000
"""Points that are given at a time, unless told otherwise."""
POINTS_MAX: Final = 10_000


class HistoryPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened, and the state after it."""

    number: int
    at: datetime
    event: str
    path: str = ""
    by: str = ""
    error: dict[str, str] | None = None
    changed: tuple[str, ...] = ()
    """The keys of the state that it wrote."""
    state: dict[str, Any] = {}


async def history_of(scope: Scope, id: str, after: int, limit: int) -> list[HistoryPoint]:
    """The points after a number."""
    if type(limit) is not int or not 1 <= limit <= POINTS_MAX:
        raise InvalidInput(f"a history has between 1 and {POINTS_MAX:,} points at a time, not {limit!r}")
    fold, found = Fold(), list[HistoryPoint]()
    state: dict[str, Any] | None = None
    for number, event in enumerate(await _events(scope, id), 1):
        changed = fold.add(event)
        if number <= after:
            continue
        if number > after + limit:
            break
        state = fold.state() if state is None else _next(state, fold, changed)
        found.append(_point(number, event, changed, state))
    return found


async def state_at(scope: Scope, id: str, point: int | str) -> dict[str, Any]:
    """The state after a point, by its number or the name of a step: after its last event."""
    events = await _events(scope, id)
    fold = Fold()
    for event in events[: _number(events, id, point)]:
        fold.add(event)
    return fold.state()


async def diff_of(scope: Scope, id: str, old: int | str, new: int | str) -> Sequence[Difference]:
    """What differs between the state after one point and the state after another."""
    return list(differences(await state_at(scope, id, old), await state_at(scope, id, new)))


async def _events(scope: Scope, id: str) -> list[LogEvent]:
    await standing_of(scope, id)
    return [event for _, event in await log_of(scope, id)]


def _next(state: dict[str, Any], fold: Fold, changed: list[str]) -> dict[str, Any]:
    """The state after the next event; what it did not touch is shared with the one before."""
    if not changed:
        return state
    later = {key: value for key, value in state.items() if key not in changed}
    later |= {key: cell.read() for key in changed if (cell := fold.view.cell(key)) is not None}
    return dict(sorted(later.items()))


def _point(number: int, event: LogEvent, changed: list[str], state: dict[str, Any]) -> HistoryPoint:
    error = None if event.error is None else msgspec.to_builtins(event.error)
    keys = tuple(sorted(set(changed)))
    return HistoryPoint(number, as_datetime(event.at), event.event, event.path, event.by, error, keys, state)


def _number(events: list[LogEvent], id: str, point: int | str) -> int:
    if isinstance(point, str):
        path = path_of(point)
        found = [
            number for number, event in enumerate(events, 1) if event.path == path or event.path.startswith(f"{path}/")
        ]
        if not found:
            raise InvalidInput(f"the history of execution {id!r} has no step {point!r}")
        return found[-1]
    if type(point) is not int or not 0 <= point <= len(events):
        raise InvalidInput(
            f"a point of the history of execution {id!r} is a step's name or between 0 and {len(events):,}"
        )
    return point
