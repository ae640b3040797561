"""Whose signal it is, when several branches wait for signals of one name: who began to wait first gets the first.

When its code runs again, an execution comes to its waits in another order than at first: a branch that slept for an hour before it
waited is there at once. So a wait that is written down has its turn in its record, and whoever is further back leaves as many
letters as there are waits before it to which the code has not come yet. A branch that was cancelled does not come there any more:
that is known when those are over it was one of, and at the latest when nothing goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.layers.workflows.entries import StepRecord

CALL: Final = "wait:"
"""What a call is named with that waits for a signal, before the signal's name."""


class Turns:
    """The waits of an execution for signals, as they are written down."""

    def __init__(self) -> None:
        self._last = 0
        self._absent: dict[int, tuple[str, str]] = {}
        """By turn: the name and the path of those to which the code has not come yet."""

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Those that were written down before."""
        for path, record in records.items():
            if record.status == "waiting" and record.turn:
                name = path.rpartition("/")[2].removeprefix(CALL).rpartition("#")[0]
                self._absent[record.turn] = name, path
                self._last = max(self._last, record.turn)

    def draw(self) -> int:
        """The turn of a wait that begins."""
        self._last += 1
        return self._last

    def come(self, turn: int) -> None:
        """The code has come to this wait."""
        self._absent.pop(turn, None)

    def before(self, name: str, turn: int) -> int:
        """How many come before this one, and are not there yet."""
        return sum(other < turn and wait[0] == name for other, wait in self._absent.items()) if self._absent else 0

    def forget(self, *branches: str) -> bool:
        """The code does not come there any more: these branches are over, or, with none, nothing goes on. Whether that was news."""
        gone = [
            turn
            for turn, (_, path) in self._absent.items()
            if not branches or any(path.startswith(f"{branch}/") for branch in branches)
        ]
        for turn in gone:
            del self._absent[turn]
        return bool(gone)
