"""The time that an attempt of a step has. It passes also while the execution lies aside.

A step's timeout makes an instant of each of its attempts. As long as nothing in the step waits, only its run knows that: whoever does
the step again after a crash begins anew, as with any step. Before anything in it waits, the instant is written down, by the commit
that says what is waited for: the step's record is `begun`, with how often it had failed before. An execution that is put aside comes back
for the first of what it waits for and of these instants, and a step that finds that its own has passed is over without being run again.

What an attempt had begun within it ends with it: steps within it get their time anew in the next one. So they do when an execution
that has ended is tried again, and in a fork.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.errors import TimedOut
from holdfast.layers.workflows.entries import BEGUN, Fault, StepRecord

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.layers.workflows.performing import Task
    from holdfast.layers.workflows.running import Run


class Deadline:
    """Of one attempt of a step, as long as that lasts."""

    __slots__ = ("_failures", "_fault", "_is_noted", "_run", "_task", "around", "at", "over", "passed", "started_at")

    def __init__(
        self, run: Run, task: Task, timeout_ms: int, failures: int, fault: Fault | None, record: StepRecord | None
    ) -> None:
        """`record` is what is known of the step; if this attempt is begun, it is begun no later for being resumed."""
        now, begun = run.clock.now_ms(), record if record is not None and record.status == BEGUN else None
        self.around = task.branch.deadline
        """Of the step that this one is in."""
        self.started_at = now if begun is None else begun.started_at or now
        self._is_noted = begun is not None and begun.over_at is not None
        self.at = now + timeout_ms if begun is None else begun.over_at or now + timeout_ms
        self.over = asyncio.Event()
        """Set when the attempt is over, or has to be."""
        self.passed = False
        self._run = run
        self._task = task
        self._failures = failures
        self._fault = fault

    def __enter__(self) -> None:
        if self.at <= self._run.clock.now_ms():
            self.passed = True
            self._run.leave([self._task.path])  # what was done within it is not come to again
            raise late(self._task)
        self._run.waiting.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.waiting.end(self)
        if self.passed:
            self._run.runnable.less()

    def note(self) -> None:
        """Something in the step is about to wait, here or in a step around: that it may not take longer than this is written down."""
        deadline: Deadline | None = self
        while deadline is not None:
            if deadline.passed:
                raise asyncio.CancelledError  # as it is told anyway: whatever it does then, it waits no more
            if not deadline._is_noted:
                deadline._write(deadline.at)
            deadline = deadline.around

    def forget(self) -> None:
        """The attempt has failed in time. If what handles that waits, and the attempt is made again to get there, it has its time anew."""
        if self._is_noted and not self.passed:
            self._write(None)

    def _write(self, at: int | None) -> None:
        self._is_noted = True
        task, journal = self._task, self._run.journal
        record = StepRecord(
            BEGUN, task.position, task.kind, self.started_at, None, self._failures, error=self._fault, over_at=at
        )
        journal.begun.add(task.path)
        journal.stage([journal.record(task.path, record)])

    def pass_by(self) -> None:
        """Its time has come."""
        if not self.passed:
            self.passed = True
            self._run.runnable.more()  # what ends it goes on
            self.over.set()


def late(task: Task) -> TimedOut:
    """What a step fails with that took too long."""
    return TimedOut(f"step {task.path!r} took longer than {(task.timeout_ms or 0) / 1000:g} s")
