"""Doing a step for an execution that runs elsewhere, or lies aside: what a worker does that serves a step's queue.

    async with space.workflows.worker([Research], queues=["gpu"], steps_only=True):
        ...

A message names an execution and a step. What is to be done is read from the step's record, which only orchestrators write, and
only if that names this very message. The function is found in the worker's own code: a class's step by its name in the definition, a
function by its module and name.

What comes of it is one commit, on condition that the message is still reserved here. A success for an execution that lies aside is
recorded at once, result, state, event, acknowledgement and waking together; to one that runs, and has its state in memory, it is sent as a
letter, and so is every failure, because whether it is tried again is the execution's to say. `ctx` is the execution's, for reading
its input and its state, and for writing state; a step that was sent away calls no steps, waits for nothing, and does not flush.

How it fails. A worker that dies loses its lease, and another gets the message. One that learns that it has lost its lease, or that the execution has
ended, cancels the step; one that runs in a thread cannot be cancelled, and goes on to its end for nothing.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from holdfast.clock import Clock
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Condition, Entry, Operation, Push, Put
from holdfast.errors import Conflict, InvalidInput, LeaseLost
from holdfast.layers.blobs import BlobRef, Part
from holdfast.layers.messages import Message
from holdfast.layers.queue_entries import place_of, rest_of
from holdfast.layers.queues import split
from holdfast.layers.transact import Transaction, transact
from holdfast.layers.workflows.away import digest, kinds_of
from holdfast.layers.workflows.branches import Branch, Call
from holdfast.layers.workflows.context import Context
from holdfast.layers.workflows.definitions import Definition
from holdfast.layers.workflows.entries import (
    INLINE_BYTES_MAX,
    PAUSED,
    STEP,
    Away,
    Execution,
    Fault,
    LogEvent,
    Meta,
    StepRecord,
    Told,
    data_prefix,
    execution_key,
    execution_of,
    fault_of,
    items_prefix,
    log_prefix,
    raw,
    state_key,
    state_version,
    steps_prefix,
    tag_of,
)
from holdfast.layers.workflows.journal import Journal
from holdfast.layers.workflows.mail import sending, waking
from holdfast.layers.workflows.performing import Task, attempt_once, takes_ctx
from holdfast.layers.workflows.state import DELETE, KINDS, SET, View

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Host

STALE_MAX: Final = 100
"""How often a step is run again because what it read was changed meanwhile."""

log = logging.getLogger("holdfast.workflows")


class Unwanted(Exception):
    """The step is not this message's to do, or not any more."""


class Outdated(Exception):
    """The state was migrated while the step was done: what it wrote is of an earlier version."""


class Guest:
    """One step, in the hands of a worker that serves its queue. Made for a message."""

    def __init__(
        self, host: Host, definition: Definition, message: Message, meta: Meta, path: str, record: StepRecord
    ) -> None:
        assert record.away is not None  # noqa: S101 - whoever makes this has looked
        self.scope = host.scope
        self.clock: Clock = host.scope.clock
        self.threads = host.threads
        self.replaced = host.replaced
        self.definition = definition
        self.message = message
        self.meta = meta
        self.path = path
        self.journal = Journal(host.scope, meta.id, message.key)
        self.context: Context = StepContext(self)
        self._host = host
        self._record = record
        self._version = "" if definition.shape is None else definition.shape.version
        self._away: Away = record.away

    async def serve(self) -> None:
        """Do it, and tell what came of it."""
        for _ in range(STALE_MAX):
            if await self._tell(*await self._do()):
                return
        await self._tell(
            self._failed(Conflict(f"what it read was changed each of {STALE_MAX} times")), [], Part((), ())
        )

    async def die(self, deaths: int) -> None:
        """Say that it cannot be done: so many workers have died of it."""
        fault = Fault("WorkerDied", f"{deaths} workers died while they did it", self.path)
        await self._tell(Told(self._away.message, ok=False, error=fault, final=True), [], Part((), ()))

    async def wanted(self) -> bool:
        """Whether its execution still waits for it."""
        keys = [execution_key(self.meta.id), steps_prefix(self.meta.id) + self.path]
        entry, stored = await self.scope.engine.get(self.scope.space, keys)
        if entry is None or stored is None:
            return False
        return is_wanted(execution_of(entry), decode(stored.value, StepRecord), self.message)

    async def _do(self) -> tuple[Told, list[Operation], Part]:
        branch = Branch(self.path, self.journal, is_step=True, attempt=self._record.attempts + 1)
        try:
            task = self._task(branch)
        except Exception as exc:
            return self._failed(exc), [], Part((), ())
        versions: dict[str, int] = {}
        if task.with_ctx or takes_ctx(task.function):
            self.journal.view, versions = await read_state(self, None)
            branch.buffer.view = self.journal.view
        try:
            value = await attempt_once(self, task, branch)
            result = raw(value, f"the result of step {self.path!r}")
        except Exception as exc:
            return self._failed(exc), [], Part((), ())
        blob: BlobRef | None = None
        kept = Part((), ())
        if len(bytes(result)) > INLINE_BYTES_MAX:
            blob = await self._host.blobs().put(bytes(result))
            kept = self._host.blobs().attach(blob, steps_prefix(self.meta.id) + self.path)
            result = raw(None, "")
        read, writes = branch.buffer.read, branch.buffer.take()
        seen = {
            key: (digest(self.journal.view, key), versions.get(key, 0))
            for key, (kind, _) in writes.items()
            if key in read and kind in (SET, DELETE)
        }
        told = Told(self._away.message, result=result, blob=blob, writes=writes, state=self._version, seen=seen)
        return told, branch.shared, kept

    def _failed(self, exc: Exception) -> Told:
        fault = fault_of(exc, self.path)
        return Told(self._away.message, ok=False, error=fault, kinds=kinds_of(exc), final=isinstance(exc, InvalidInput))

    def _task(self, branch: Branch) -> Task:
        """The function, found in this worker's code."""
        args, timeout_ms = tuple(decode(bytes(self._away.args), list)), self._away.timeout_ms
        if not self._away.step:
            module, _, path = self._away.function.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            return Task(branch, self.path, -1, found, args, timeout_ms=timeout_ms)
        step = next(each for each in self.definition.steps if each.name == self._away.step)
        function = getattr(self.definition.target(), step.function.__name__)
        return Task(branch, self.path, -1, function, args, timeout_ms=timeout_ms, with_ctx="first")

    async def _tell(self, told: Told, shared: list[Operation], kept: Part) -> bool:
        """One commit with everything that came of it; False when it must be done again, because what it read has changed."""
        scope, key = self.scope, steps_prefix(self.meta.id) + self.path
        acking, needed = split(self.message.acking())

        async def work(transaction: Transaction) -> bool:
            entry, stored = await transaction.read(execution_key(self.meta.id), key)
            record = None if stored is None else decode(stored.value, StepRecord)
            if entry is None or record is None or not is_wanted(execution_of(entry), record, self.message):
                raise Unwanted
            execution = execution_of(entry)
            transaction.operations += [*acking, *shared, *kept.operations]
            transaction.conditions += [*needed, *kept.conditions]
            if not told.ok or not is_aside(execution):
                operations, conditions = sending(
                    self._host.queue_of(execution.name), entry, execution, STEP + self.path, encode(told)
                )
            else:
                [typed] = await transaction.read(state_key(self.meta.id))
                version = state_version(None if typed is None else decode(typed.value, StepRecord))
                if told.writes and version != told.state:
                    raise Outdated
                view, _ = await read_state(self, told)
                if any(digest(view, each) != seen for each, (seen, _) in told.seen.items()):
                    transaction.operations.clear()
                    return False
                operations, conditions = self._recording(execution, record, told, view)
            transaction.operations += operations
            transaction.conditions += [each for each in conditions if each not in transaction.conditions]
            return True

        try:
            if await transact(lambda: Transaction(scope), work):
                self.message.committed()
                return True
            return False
        except Conflict as conflict:
            if conflict.key == self.message.key:
                raise LeaseLost(
                    f"step {self.path!r} of execution {self.meta.id!r} is another worker's now"
                ) from conflict
            raise

    def _recording(
        self, execution: Execution, record: StepRecord, told: Told, view: View
    ) -> tuple[list[Operation], list[Condition]]:
        """What the step's own execution would write, were it awake. Its record is written anew, so that no run that has just begun,
        and has read the journal, can write any more."""
        now = self.clock.now_ms()
        done = StepRecord(
            "completed",
            record.position,
            record.kind,
            record.started_at,
            now,
            record.attempts + 1,
            told.result,
            told.blob,
            body=record.body,
            after=record.after,
        )
        event = LogEvent(now, "completed", self.path, "", None, told.writes, self._away.branch)
        stands = msgspec.structs.replace(execution, updated_at=now)
        operations: list[Operation] = [
            *view.operations(self.meta.id, told.writes),
            Put(steps_prefix(self.meta.id) + self.path, encode(done)),
            Push(log_prefix(self.meta.id), encode(event)),
            Put(execution_key(self.meta.id), encode(stands), tag=tag_of(execution.status)),
        ]
        if execution.status == PAUSED:
            return operations, []
        woken, needed = waking(self._host.queue_of(execution.name), execution)
        return [*operations, *woken], needed


class StepContext(Context):
    """`ctx` of a step that was sent away: the execution's, without what only its own code can do."""

    def __init__(self, guest: Guest) -> None:
        super().__init__(cast("Any", guest))

    def _made(self, name: str) -> Call:
        raise InvalidInput(
            f"{name!r} was called by a step that is done on a queue: such a step reads the input and the state, and writes state; "
            "calling steps, sleeping and waiting is for the workflow's code"
        )

    async def _flush(self) -> None:
        raise InvalidInput("a step that is done on a queue does not flush: what it writes is committed with its result")


async def read_state(guest: Guest, told: Told | None) -> tuple[View, dict[str, int]]:
    """The state as it is now, and the versions of its keys. With `told`, only as far as what is to be written needs it."""
    scope, id = guest.scope, guest.meta.id
    prefix, view = data_prefix(id), View()
    entries: list[Entry] = []
    if told is None:
        entries = await _all(guest, prefix)
    elif told.writes:
        found = await scope.engine.get(scope.space, [prefix + key for key in told.writes])
        entries = [entry for entry in found if entry is not None]
    for entry in entries:
        key = entry.key[len(prefix) :]
        if not entry.tag:
            view.apply(key, [SET, decode(entry.value)], view.next())
            continue
        kind, generation = KINDS[entry.tag], decode(entry.value, str)
        view.generations[key] = entry.tag, generation
        view.apply(key, [kind, []], view.next())
        if told is None or key in told.seen:
            for chunk in await _all(guest, items_prefix(id, key, generation)):
                view.apply(key, [kind, decode(chunk.value)], view.next())
    return view, {entry.key[len(prefix) :]: entry.version for entry in entries}


async def _all(guest: Guest, prefix: str) -> list[Entry]:
    scope, found = guest.scope, list[Entry]()
    while True:
        page = await scope.engine.scan(scope.space, prefix, after=found[-1].key if found else None, limit=SCAN_MAX)
        found += page.entries
        if not page.more:
            return found


def is_aside(execution: Execution) -> bool:
    """Nobody runs it, and nobody has its state in memory; or somebody has just begun to, and has written nothing."""
    return bool(execution.waits) or execution.status == PAUSED


def is_wanted(execution: Execution, record: StepRecord, message: Message) -> bool:
    """Whether a message is the one that the step waits for."""
    away = record.away
    return (
        not execution.ended
        and record.status == "waiting"
        and away is not None
        and bool(away.queue)
        and away.message == place_of(rest_of(message.key)).tail
    )
