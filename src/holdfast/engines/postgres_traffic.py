"""What a process notes of the groups it writes to a PostgreSQL store: what it has sent, and how others' commits meet its own."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.engines.evaluation import Group
from holdfast.engines.postgres_link import Rows
from holdfast.engines.postgres_state import SpaceState

SPARED_MAX: Final = 32
"""Tries that are not made, at most, before one is made again."""
ALONE_MAX: Final = 64
"""Groups without a trace of others after which a process takes itself for the only one."""


class Sent:
    """What was sent and not answered yet."""

    __slots__ = ("group", "number", "open", "revision", "sums")

    def __init__(self, number: int, *, sums: bool) -> None:
        self.group: Group | None = None
        self.number = number
        """Of the group, the same for every attempt: what of it is written is written once."""
        self.open = False
        self.revision = 0
        """Where the space was before."""
        self.sums = sums
        """Whether it sums up the usage it charges, drawn once: plain SQL leaves to a function what does, and were that to draw
        again, hardly any group of a lone writer would, and every count would read all that was charged since."""

    def leaves(self, state: SpaceState, group: Group) -> None:
        """From here on the group's fate is open until it is answered."""
        self.open, self.revision, self.group = True, state.revision, group


class Attempt:
    """A group that was evaluated and sent at once, before anybody had to wait for anything."""

    __slots__ = ("group", "plain", "reply", "sent", "state")

    def __init__(self, state: SpaceState, group: Group, sent: Sent) -> None:
        self.state = state
        self.group = group
        self.sent = sent
        self.plain = False
        """Whether it was sent in plain SQL."""
        self.reply: asyncio.Future[list[Rows]] | None = None


class Restraint:
    """Something that is mostly worth a try: after each that was in vain, twice as many are not made."""

    __slots__ = ("_left", "_pause")

    def __init__(self) -> None:
        self._left = self._pause = 0

    def holds(self) -> bool:
        """Whether not to try this time."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def was_in_vain(self) -> None:
        self._pause = min(SPARED_MAX, 2 * self._pause + 1)
        self._left = self._pause

    def was_worth_it(self) -> None:
        self._pause = 0


class Traffic:
    """How others' commits have met ours in a space."""

    __slots__ = ("_alone", "at_once", "guessing", "left", "shared")

    def __init__(self) -> None:
        self.left = (0, 0)
        """The head that our last group left."""
        self.shared = False
        """Others write here too."""
        self.at_once = Restraint()
        """Writing without waiting for one's turn, among others."""
        self.guessing = Restraint()
        """Taking unknown keys for absent, in plain SQL."""
        self._alone = 0

    def was_in_vain(self) -> None:
        if self.shared:
            self.at_once.was_in_vain()

    def met_others(self) -> None:
        self.shared, self._alone = True, 0

    def met(self, others: bool, *, at_once: bool) -> bool:
        """A group was written, after others' or not. False when others have not been seen for long."""
        if others:
            self.met_others()
        elif self.shared:
            self._alone += 1
            if self._alone > ALONE_MAX:
                self.shared, self._alone, self.at_once = False, 0, Restraint()
                return False
        if at_once:
            self.at_once.was_worth_it()
        return True
