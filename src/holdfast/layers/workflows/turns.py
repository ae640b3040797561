"""Whose signal it is, when several branches wait for signals of one name: who began to wait first gets the first.

When its code runs again, an execution comes to its waits in another order than at first: a branch that slept for an hour before it
waited is there at once. So a wait that is written down has its turn in its record, and whoever is further back leaves as many
letters as there are waits before it to which the code has not come yet.
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
        self._absent: dict[str, set[int]] = {}
        """By name: the turns of those to which the code has not come yet."""

    def load(self, records: Mapping[str, StepRecord]) -> None:
        """Those that were written down before."""
        for path, record in records.items():
            if record.status == "waiting" and record.turn:
                name = path.rpartition("/")[2].removeprefix(CALL).rpartition("#")[0]
                self._absent.setdefault(name, set()).add(record.turn)
                self._last = max(self._last, record.turn)

    def draw(self) -> int:
        """The turn of a wait that begins."""
        self._last += 1
        return self._last

    def come(self, name: str, turn: int) -> None:
        """The code has come to this wait."""
        if (absent := self._absent.get(name)) is not None:
            absent.discard(turn)

    def before(self, name: str, turn: int) -> int:
        """How many come before this one, and are not there yet."""
        return sum(other < turn for other in self._absent.get(name, ()))

    def any_absent(self, name: str) -> bool:
        return bool(self._absent.get(name))

    def forget_absent(self) -> bool:
        """Nothing goes on any more, so the code does not come to them: their branches were cancelled. Whether there were any."""
        found = any(self._absent.values())
        self._absent.clear()
        return found
