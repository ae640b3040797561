"""Where in its execution a piece of code is: which branch, at which place, with what it has read and written there.

The code of an execution is a tree. Its trunk is the workflow's function; a branch of `ctx.gather` and the body of a step are branches. In
each, calls are numbered as they are made, and named by their name and how often it was used: `pay#0`, `pay#1`. That is the
same each time the code runs, whatever ran at the same time. A call that is made where another one is recorded is NonDeterminism.

`Runnable` counts what can go on by itself. When nothing can, because all branches wait for a time, a signal or a child, the
execution is put aside. Code that waits for tasks it started itself counts as going on: it is not put aside until they are done.
A call that was made and is not awaited yet counts for nothing: whoever comes to it when it is resumed makes it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from holdfast.engine import Operation
from holdfast.errors import InvalidInput, NonDeterminism
from holdfast.layers.workflows.journal import Journal
from holdfast.layers.workflows.state import Buffer, Write

if TYPE_CHECKING:
    from holdfast.layers.workflows.deadlines import Deadline

PATH_BYTES_MAX: Final = 512
"""A path is part of a key, and of the name of what it keeps as a blob."""


class Branch:
    """A piece of code that runs from its beginning to its end, one call after the other."""

    __slots__ = (
        "attempt",
        "body",
        "buffer",
        "deadline",
        "echoes",
        "failures",
        "is_step",
        "ordinals",
        "path",
        "position",
        "randoms",
        "refuses",
        "shared",
        "task",
    )

    def __init__(
        self, path: str, journal: Journal, *, is_step: bool = False, attempt: int = 1, within: Branch | None = None
    ) -> None:
        """`within` a step, what a branch writes is the step's."""
        step = within if within is not None and within.is_step else None
        self.path = path
        self.is_step: bool = is_step or step is not None
        self.attempt: int = attempt if step is None else step.attempt
        self.deadline: Deadline | None = None if within is None else within.deadline
        """Of the step that it is in, or is."""
        self.task: asyncio.Task[Any] | None = None
        self.refuses = False
        """Whether it was cancelled before it began."""
        self.position = 0
        self.ordinals: dict[str, int] = {}
        self.randoms = 0
        self.failures: int = journal.came_after(path) if within is None else within.failures
        """How many calls have failed, as its code was told: what it calls then comes after those."""
        self.buffer = Buffer(journal.view, path if self.is_step else None)
        self.body = 0 if self.is_step else journal.past.body(path)
        """How many writes its own code has made; those of a step are the step's, and not counted."""
        self.echoes = False
        """Whether it holds writes that were committed under an earlier version of the state."""
        self.shared: list[Operation] = []
        """What a step writes for others, to be committed with it."""
        if step is not None:
            self.buffer, self.shared = step.buffer, step.shared

    def below(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def write(self, journal: Journal, key: str, write: Write) -> None:
        """A write to the state. What the branch's own code wrote in an earlier run is in the store already."""
        if not self.is_step:
            if journal.left:
                return  # nobody will come to it; a step that still ends has all that it wrote
            if journal.past.covers(self.path, self.position):
                self.buffer.put(key, write)  # until the next call
                return
            self.body += 1
            if journal.past.wrote(self.path, self.body):
                self.buffer.put(key, write)
                self.echoes = True
                return
            if self.echoes:
                self.forget(journal)
            if journal.carried(self.path, self.body, key, write):
                return
        self.buffer.put(key, write)

    def forget(self, journal: Journal) -> None:
        """What it wrote was committed under an earlier version of the state: that counts from here on."""
        self.buffer.take()
        self.echoes = False
        journal.past.go_on(self.path)


BRANCH: ContextVar[Branch] = ContextVar("holdfast_branch")


def here() -> Branch:
    """The branch whose code is running."""
    try:
        return BRANCH.get()
    except LookupError:
        raise InvalidInput("ctx is for the code of its workflow, while it runs") from None


class Call:
    """One call of code that is recorded: its path, and its place in its branch."""

    __slots__ = ("branch", "path", "position")

    def __init__(self, branch: Branch, path: str, position: int) -> None:
        self.branch = branch
        self.path = path
        self.position = position


def refused(branch: Branch, journal: Journal) -> bool:
    """Whether no call is made here any more."""
    return branch.refuses or journal.left


def call(journal: Journal, name: str) -> Call:
    """The next call of the branch whose code is running."""
    branch = here()
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if branch.task is not None and task is not branch.task:
        raise InvalidInput(
            f"{name!r} was called in a task that the workflow's code started by itself, or in a thread: such calls have no "
            "order that could be repeated. Use await ctx.gather(…) to do several things at the same time"
        )
    if refused(branch, journal):
        return Call(branch, branch.below(name), branch.position)  # whoever awaits it is told
    ordinal = branch.ordinals.get(name, 0)
    branch.ordinals[name] = ordinal + 1
    position, branch.position = branch.position, branch.position + 1
    path = branch.below(f"{name}#{ordinal}")
    if (known := journal.records.get(path)) is not None:
        branch.failures = max(branch.failures, known.after)  # some of what had failed may not be told again
    if branch.failures:
        journal.after[path] = branch.failures
    if not branch.is_step and journal.past.knows(branch.path):
        if journal.past.covers(branch.path, position):
            branch.buffer.take()  # the log has what was written here
        else:
            if branch.echoes:
                branch.forget(journal)
            branch.body = max(branch.body, journal.past.go_on(branch.path))
    if len(path.encode()) > PATH_BYTES_MAX:
        raise InvalidInput(f"{path[:60]!r}… is nested too deeply: a path has at most {PATH_BYTES_MAX} bytes")
    recorded = journal.placed.get((branch.path, position))
    if recorded is not None and recorded != path:
        raise NonDeterminism(
            f"execution {journal.id!r} called {recorded!r} here when it ran before, and calls {path!r} now: its code has changed, "
            "or is not the same each time. Put changes under `if ctx.version(…)`, and what differs from run to run into steps",
            recorded=recorded,
            called=path,
        )
    return Call(branch, path, position)


class Runnable:
    """How many pieces of code of one execution can go on by themselves."""

    def __init__(self, idle: Callable[[], None]) -> None:
        self.count = 1
        """The trunk."""
        self.made = 0
        """Calls that were made, and that nobody awaits yet: whoever will goes on by itself until then."""
        self._idle = idle

    def more(self, n: int = 1) -> None:
        self.count += n

    def less(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle()


class Within:
    """As long as a call lasts: the call counts instead of the branch that awaits it, or beside it, in a task of the code's own."""

    __slots__ = ("_blocks", "_branch", "_journal", "_runnable")

    def __init__(self, runnable: Runnable, journal: Journal, branch: Branch) -> None:
        """`branch` is where the call was made."""
        self._runnable = runnable
        self._journal = journal
        self._branch = branch
        self._blocks = False

    def __enter__(self) -> None:
        branch, runnable = here(), self._runnable
        runnable.made -= 1
        if refused(branch, self._journal):
            raise asyncio.CancelledError
        self._blocks = branch.task is None or asyncio.current_task() is branch.task
        if not self._blocks:
            runnable.count += 1

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if isinstance(exc, Exception):
            self._branch.failures += 1
        if not self._blocks:
            self._runnable.less()
