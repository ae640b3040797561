"""What the code of a run waits for, and until when: letters, times, and the deadlines of steps that are under way.

Whoever waits does not count as going on, and does again from the moment that what it waits for has come. Letters are given by turn
(`turns.py`), times by whoever looks after the run: `first_at` is when there is something to look at, and `tick` looks.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from holdfast.clock import Clock
from holdfast.layers.workflows.branches import Runnable, here
from holdfast.layers.workflows.entries import Wait
from holdfast.layers.workflows.mail import Letter, Mail
from holdfast.layers.workflows.turns import Turns

if TYPE_CHECKING:
    from holdfast.layers.workflows.deadlines import Deadline


class Waiting:
    """The waits and the deadlines of one run."""

    def __init__(self, clock: Clock, mail: Mail, turns: Turns, runnable: Runnable, news: asyncio.Event) -> None:
        self.runnable = runnable
        self.looked_at: int | None = None
        """When whoever looks after the run will look at the time; None: not before there is news."""
        self._clock = clock
        self._mail = mail
        self._turns = turns
        self._news = news
        self._waits: dict[asyncio.Future[Letter | None], tuple[Wait, str, int]] = {}
        self._deadlines: set[Deadline] = set()

    def __bool__(self) -> bool:
        return bool(self._waits)

    @property
    def waits(self) -> tuple[Wait, ...]:
        return tuple(wait for wait, *_ in self._waits.values())

    def first_at(self) -> int | None:
        """When the first of these times comes."""
        if not self._waits and not self._deadlines:
            return None
        times = [wait.until for wait, *_ in self._waits.values() if wait.until is not None]
        times += [deadline.at for deadline in self._deadlines if not deadline.passed]  # that may take a while to end
        return min(times, default=None)

    # --- for the code ---

    async def until(self, wait: Wait) -> None:
        """Return when its time has come."""
        await self.receive(wait)

    async def receive(self, wait: Wait, name: str = "", turn: int = 0) -> Letter | None:
        """What is waited for: a letter of this name; None when its time has come first. With a turn it is one of several."""
        name = name or wait.name
        self._turns.come(turn)
        if name and (letter := self._mail.take(name, self._before(name, turn))) is not None:
            return letter
        if wait.until is not None and wait.until <= self._clock.now_ms():
            return None
        if (deadline := here().deadline) is not None:
            deadline.note()
        answer: asyncio.Future[Letter | None] = asyncio.get_running_loop().create_future()
        self._waits[answer] = wait, name, turn
        if wait.until is not None:
            self._news.set()  # there is a time to look at
        try:
            self.runnable.less()
            return await answer
        except asyncio.CancelledError:
            if not answer.done() or answer.cancelled():
                self.runnable.more()
            elif (letter := answer.result()) is not None:
                self._mail.put_back(letter)  # it came in the same moment, and is somebody else's now
                self.distribute()
            raise
        finally:
            self._waits.pop(answer, None)

    def may_take(self, name: str) -> bool:
        """Whether a signal is there for who begins to wait for one now: nobody who waits, or waited before, comes first."""
        return self._mail.has(name) and not self._before(name, sys.maxsize)

    def _before(self, name: str, turn: int) -> int:
        """How many others come first."""
        if not turn:
            return 0
        waiting = sum(0 < other < turn and name == own for _, own, other in self._waits.values())
        return waiting + self._turns.before(name, turn)

    def begin(self, deadline: Deadline) -> None:
        """A step is under way that has a deadline."""
        self._deadlines.add(deadline)
        if self.looked_at is None or deadline.at < self.looked_at:
            self._news.set()

    def end(self, deadline: Deadline) -> None:
        """It is not any more."""
        self._deadlines.discard(deadline)

    # --- for whoever looks after the run ---

    def tick(self) -> None:
        """Those whose time has come go on."""
        now = self._clock.now_ms()
        for answer, (wait, *_) in list(self._waits.items()):
            if wait.until is not None and wait.until <= now:
                self._go_on(answer, None)
        for deadline in [each for each in self._deadlines if each.at <= now]:
            deadline.pass_by()

    def distribute(self) -> None:
        """Those for whom something has come go on."""
        for answer, (_, name, turn) in sorted(self._waits.items(), key=lambda item: item[1][2]):
            if name and not answer.done():
                letter = self._mail.take(name, self._turns.before(name, turn))
                if letter is not None:
                    self._go_on(answer, letter)

    def _go_on(self, answer: asyncio.Future[Letter | None], letter: Letter | None) -> None:
        if not answer.done():
            self._waits.pop(answer, None)
            self.runnable.more()
            answer.set_result(letter)
