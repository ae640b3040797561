"""What was sent to an execution: signals, the ends of its children, and what its worker is to do.

Sending is one commit: the entry under `signals/<id>/<name>/` (or `journal/mail/`, for what agents may not send), one more in the inbox's count, and a message that wakes the execution if
it was put aside, all on condition that it stands as it was read. An execution is put aside on condition that the count is as its
worker read it. So either the worker sees what came, or who sends sees that nobody is awake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from holdfast.engine import (
    SCAN_MAX,
    Absent,
    Condition,
    Entry,
    Increment,
    Operation,
    Push,
    VersionIs,
)
from holdfast.keys import unescape
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.entries import (
    CANCEL,
    PAUSED,
    Execution,
    StepRecord,
    execution_key,
    inbox_key,
    mail_prefixes,
    signals_prefix,
)
from holdfast.layers.workflows.journal import Parts

SIGNALS_MAX: Final = SCAN_MAX
"""Of one execution that are read at a time; the rest when those were taken."""


class Letter(NamedTuple):
    """One thing that was sent."""

    key: str
    value: msgspec.Raw
    name: str


def sending(
    queue: Queue, entry: Entry, execution: Execution, name: str, value: bytes, *, wake: bool | None = None
) -> Parts:
    """Send it to an execution that stands as it was read."""
    operations: list[Operation] = [
        Push(signals_prefix(execution.id, name), value),
        Increment(inbox_key(execution.id), 1),
    ]
    conditions: list[Condition] = [VersionIs(execution_key(execution.id), entry.version)]
    if needs_waking(execution, name) if wake is None else wake:
        woken, needed = waking(queue, execution)
        operations += woken
        conditions += needed
    return operations, conditions


def waking(queue: Queue, execution: Execution) -> Parts:
    """A message that lets a worker go on with it."""
    operations, conditions = split(queue.putting({"execution": execution.id}))
    return list(operations), list(conditions)


def needs_waking(execution: Execution, name: str) -> bool:
    """Whether somebody has to be told: it was put aside, and not to wait for its turn."""
    if any(wait.kind == "slot" for wait in execution.waits):
        return name == CANCEL
    return bool(execution.waits) or execution.status == PAUSED


def calling_off(id: str, records: Iterable[StepRecord]) -> Parts:
    """What lets those know that do steps of an execution which ends; they follow the count of what is sent to it."""
    is_any = any(record.status == "waiting" and record.away is not None for record in records)
    return ([Increment(inbox_key(id), 1)] if is_any else []), []


class Mail:
    """What an execution has received and not taken, as its worker knows it."""

    def __init__(self, scope: Scope, id: str) -> None:
        self._scope = scope
        self._id = id
        self._letters: dict[str, deque[Letter]] = {}
        self._known: set[str] = set()
        self.unchanged: Condition = Absent(inbox_key(id))
        """What holds as long as nothing more has come."""

    async def read(self, inbox: Entry | None = None) -> None:
        """Look at what came. The count is read before what it counts."""
        scope = self._scope
        if inbox is None:
            [inbox] = await scope.engine.get(scope.space, [inbox_key(self._id)])
        if inbox is None:
            return
        for prefix in mail_prefixes(self._id):
            page = await scope.engine.scan(scope.space, prefix, limit=SIGNALS_MAX)
            for entry in page.entries:
                if entry.key not in self._known:
                    self._known.add(entry.key)
                    name = unescape(entry.key[len(prefix) :].partition("/")[0])
                    letter = Letter(entry.key, msgspec.Raw(entry.value), name)
                    self._letters.setdefault(name, deque()).append(letter)
        self.unchanged = VersionIs(inbox.key, inbox.version)  # only now: what it counts is known

    def has(self, name: str) -> bool:
        return bool(self._letters.get(name))

    def take(self, name: str, leave: int = 0) -> Letter | None:
        """The first of this name, or the one behind those that are left to others; whoever takes it deletes it."""
        letters = self._letters.get(name)
        if letters is None or len(letters) <= leave:
            return None
        letter = letters[leave]
        del letters[leave]
        return letter

    def put_back(self, letter: Letter) -> None:
        """It was taken and is not wanted: it is the first of its name again, but for those that came before it."""
        letters = self._letters.setdefault(letter.name, deque())
        place = next((at for at, other in enumerate(letters) if other.key > letter.key), len(letters))
        letters.insert(place, letter)

    def all(self, *names: str) -> list[Letter]:
        """Those of these names, in the order in which they were sent."""
        found = [letter for name in names for letter in self._letters.get(name, ())]
        return sorted(found, key=lambda letter: letter.key.rpartition("/")[2])
