"""What the code of an execution wrote between its steps under an earlier version of its state, when newer code comes to it again.

Newer code may write other keys, and more or fewer of them, than the code did that was there before. So what it writes where the old
code has been does not count: the log tells what was written there. Such a write is seen by the branch that makes it until its next call,
and is forgotten then; with that call, what the log says was committed up to it is in the state.

Where the old code has been is told by the migration's event, of each branch: the last call that it had made. What it had written after
that call, and committed by a flush, is counted: so many writes of the newer code were made before. They are seen and forgotten in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.layers.workflows.entries import BEGUN, StepRecord
from holdfast.layers.workflows.state import View, Write


class Carried(NamedTuple):
    """Writes of a branch's own code that were committed together."""

    upto: int
    """How many of its writes there were with them."""
    number: int
    """Of the event in the log."""
    path: str
    """Of the step that they were committed with; "" for a flush."""
    writes: dict[str, Write]


class Tail(NamedTuple):
    """What a branch had written after its last call."""

    view: View
    carried: Carried


Recalled = list[tuple[View, int, dict[str, Write]]]


class Past:
    """Up to where each branch had come under earlier versions."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self._tails: dict[str, list[Tail]] = {}

    def close(
        self,
        view: View,
        carried: Mapping[str, list[Carried]],
        places: Mapping[str, tuple[int, int]],
        records: Mapping[str, StepRecord],
    ) -> dict[str, Recalled]:
        """A version has ended: gives what its branches wrote, by the call with which that is in the state."""
        self._places.update(places)
        found: dict[str, Recalled] = {}
        for branch in {*carried, *self._tails}:
            upto = self.body(branch)
            left = self._tails.pop(branch, [])
            for each in (*left, *(Tail(view, part) for part in carried.get(branch, ()))):
                path = each.carried.path or _next(records, branch, each.carried.upto)
                if each.carried.upto > upto or not path:
                    self._tails.setdefault(branch, []).append(each)
                else:
                    found.setdefault(path, []).append((each.view, each.carried.number, each.carried.writes))
        return found

    def covers(self, branch: str, position: int) -> bool:
        """Whether the old code had made the call at this place."""
        return position <= self._places.get(branch, (-1, 0))[0]

    def body(self, branch: str) -> int:
        """How many writes a branch had made, up to its last call."""
        return self._places.get(branch, (-1, 0))[1]

    def knows(self, branch: str) -> bool:
        return branch in self._places or branch in self._tails

    def wrote(self, branch: str, ordinal: int) -> bool:
        """Whether a write after the last call had been made, and committed."""
        return any(each.carried.upto >= ordinal for each in self._tails.get(branch, ()))

    def go_on(self, branch: str) -> int:
        """A branch goes on where nobody has been: all that it had written is in the state. Gives how many writes there were."""
        tails = self._tails.get(branch, [])
        for each in tails:
            _apply(each)
        return max((each.carried.upto for each in tails), default=self.body(branch))


def _apply(tail: Tail) -> None:
    tail.view.replay(tail.carried.writes, tail.carried.number)
    tail.carried.writes.clear()  # once


def _next(records: Mapping[str, StepRecord], branch: str, upto: int) -> str:
    """The call of a branch before which so many writes had been made."""
    found = [
        (record.position, path)
        for path, record in records.items()
        if record.position >= 0 and record.body >= upto and path.rpartition("/")[0] == branch
    ]
    return min(found, default=(0, ""))[1]


def places_of(records: Mapping[str, StepRecord]) -> dict[str, tuple[int, int]]:
    """By branch: the last call that had been made, with what was written before it, and how many writes that were."""
    found: dict[str, tuple[int, int]] = {}
    for path, record in records.items():
        if record.position < 0 or (record.status in ("retrying", BEGUN) and not record.body):
            continue  # an attempt that failed, or is under way, commits nothing of the code around it
        branch = path.rpartition("/")[0]
        last, body = found.get(branch, (-1, 0))
        found[branch] = max(last, record.position), max(body, record.body)
    return found
