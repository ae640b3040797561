"""What a process notes of the groups it writes to a PostgreSQL store: what it has sent, and how others' commits meet its own."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.engines.evaluation import Group
from holdfast.engines.postgres_link import Rows
from holdfast.engines.postgres_state import SpaceState

TURNS_MAX: Final = 32
"""Groups that wait for their turn, at most, before one is tried at once again."""
ALONE_MAX: Final = 64
"""Groups without a trace of others after which a process takes itself for the only one."""


class Sent:
    """What was sent and not answered yet."""

    __slots__ = ("group", "number", "open", "revision")

    def __init__(self, number: int) -> None:
        self.group: Group | None = None
        self.number = number
        """Of the group, the same for every attempt: what of it is written is written once."""
        self.open = False
        self.revision = 0
        """Where the space was before."""


class Attempt:
    """A group that was evaluated and sent at once, before anybody had to wait for anything."""

    __slots__ = ("group", "reply", "sent", "state")

    def __init__(self, state: SpaceState, group: Group, sent: Sent) -> None:
        self.state = state
        self.group = group
        self.sent = sent
        self.reply: asyncio.Future[list[Rows]] | None = None


class Traffic:
    """How others' commits have met ours in a space."""

    __slots__ = ("_alone", "_pause", "_turns", "left", "shared")

    def __init__(self) -> None:
        self.left = (0, 0)
        """The head that our last group left."""
        self.shared = False
        """Others write here too."""
        self._alone = 0
        self._turns = 0
        self._pause = 0

    def takes_turns(self) -> bool:
        """Whether the next group had better wait for its turn: trying at once has been in vain lately."""
        if self._turns == 0:
            return False
        self._turns -= 1
        return True

    def was_in_vain(self) -> None:
        if self.shared:
            self._pause = min(TURNS_MAX, 2 * self._pause + 1)
            self._turns = self._pause

    def met_others(self) -> None:
        self.shared, self._alone = True, 0

    def met(self, others: bool, *, at_once: bool) -> bool:
        """A group was written, after others' or not. False when others have not been seen for long."""
        if others:
            self.met_others()
        elif self.shared:
            self._alone += 1
            if self._alone > ALONE_MAX:
                self.shared, self._alone, self._pause, self._turns = False, 0, 0, 0
                return False
        if at_once:
            self._pause = 0
        return True
