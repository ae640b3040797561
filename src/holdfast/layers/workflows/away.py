"""Steps that are done elsewhere: by whoever serves a queue, or as a process of their own.

    frames = await ctx.step("render", render, scene, queue="gpu")
    model = await ctx.task("train", TaskSpec(command=["train.sh"], limits=Limits(memory_mb=4096)))

The commit that records such a step as `waiting` is the one that puts its message, or submits its task, and mostly also the one that
puts the execution aside: until it is told how that went it holds no slot and no process. What is to be done is in the record, and the
message names the record; so whoever may put messages can make nobody do anything.

How it went comes as a letter, `~step:<path>`, and is recorded here, on condition that it is about the message, or the task, that the
record names. A success for an execution that lies aside needs no letter: `serving.py` records it at once. Retries, pauses between
them and error handlers are the execution's own business, as with any step. Every attempt is a message, or a task, of its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import Absent, Condition, Delete, Operation, Put, VersionIs
from holdfast.errors import Conflict, InvalidInput, NonDeterminism, NotFound, StepFailed
from holdfast.layers.queue_entries import Place
from holdfast.layers.queues import split
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import TaskState
from holdfast.layers.task_submission import submission
from holdfast.layers.tid import new_tid
from holdfast.layers.workflows.branches import Branch
from holdfast.layers.workflows.definitions import Retry
from holdfast.layers.workflows.entries import (
    STEP,
    Away,
    Errand,
    Fault,
    StepRecord,
    Told,
    Wait,
    data_prefix,
    errand_key,
    fault_of,
    raw,
)
from holdfast.layers.workflows.journal import Abandoned
from holdfast.layers.workflows.performing import Task, attempt_once, carry, give_up
from holdfast.layers.workflows.state import View

if TYPE_CHECKING:
    from holdfast.layers.workflows.mail import Letter
    from holdfast.layers.workflows.running import Run


class Errands:
    """What both ways of doing a step elsewhere have in common."""

    async def begin(self, run: Run, task: Task, failures: int, before: StepRecord | None) -> StepRecord:
        """Have it done, and record that."""
        raise NotImplementedError

    def wait(self, task: Task, away: Away) -> Wait:
        """What the execution waits for meanwhile."""
        raise NotImplementedError

    async def heard(self, run: Run, told: Told) -> Told:
        """What a letter means."""
        return told

    async def perform(self, run: Run, task: Task, record: StepRecord | None) -> Any:
        """The step's result, when it has one. StepFailed when all attempts have failed."""
        journal = run.journal
        failures = record.attempts if record is not None else 0
        while True:
            if record is None or record.away is None or record.status != "waiting":
                if record is not None and record.until is not None:
                    await run.waiting.until(Wait("retry", task.path, until=record.until))
                await journal.settled()
                try:
                    record = await self.begin(run, task, failures, record)
                except NonDeterminism:
                    raise
                except Exception as exc:
                    failures += 1
                    fault, now = fault_of(exc, task.path), run.clock.now_ms()
                    if not _again(task.retry, failures, Told("", kinds=kinds_of(exc), final=_is_final(exc))):
                        return await give_up(run, task, now, failures, fault, exc)
                    record = self._retrying(run, task, now, failures, fault, [])
                    continue
            away = record.away
            assert away is not None  # noqa: S101 - it is waiting
            letter = await run.waiting.receive(self.wait(task, away), STEP + task.path)
            assert letter is not None  # noqa: S101 - there is no timeout
            told = decode(bytes(letter.value), Told)
            if told.message != away.message:  # of an attempt that was given up
                journal.stage([Delete(letter.key)])
                continue
            told = await self.heard(run, told)
            started_at = record.started_at or 0
            if told.ok:
                if await _is_stale(run, task.path, told):
                    record = msgspec.structs.replace(record, status="retrying", away=None)  # what it read has changed
                    journal.stage([Delete(letter.key), journal.record(task.path, record)])
                    continue
                return await self._record(run, task, letter, told, started_at, failures + 1)
            failures += 1
            fault = told.error or Fault("Error", "")
            if not _again(task.retry, failures, told):
                error = StepFailed(
                    f"step {task.path!r} failed: {fault.type}: {fault.message}",
                    step=task.path,
                    kind=fault.type,
                    reason=fault.message,
                    attempts=failures,
                )
                return await give_up(run, task, started_at, failures, fault, error, [Delete(letter.key)])
            record = self._retrying(run, task, started_at, failures, fault, [Delete(letter.key)])

    def _retrying(
        self, run: Run, task: Task, started_at: int, failures: int, fault: Fault, also: list[Operation]
    ) -> StepRecord:
        journal, due = run.journal, run.clock.now_ms() + task.retry.pause_ms(failures)
        record = StepRecord("retrying", task.position, task.kind, started_at, None, failures, error=fault, until=due)
        journal.stage([*also, journal.record(task.path, record), journal.event("retrying", task.path, fault)])
        return record

    async def _record(self, run: Run, task: Task, letter: Letter, told: Told, started_at: int, attempts: int) -> Any:
        journal = run.journal
        carried, body, writes = carry(run, task.branch)
        record = StepRecord(
            "completed",
            task.position,
            task.kind,
            started_at,
            run.clock.now_ms(),
            attempts,
            told.result,
            told.blob,
            body=body,
        )
        operations = [
            *carried,
            *journal.writing(told.writes),
            Delete(letter.key),
            journal.record(task.path, record),
            journal.event("completed", task.path, None, told.writes, task.branch.path, body if writes else 0, writes),
        ]
        conditions = [_unchanged(run, key, version) for key, (_, version) in told.seen.items()]
        if not conditions:
            journal.stage(operations)
            return await run.result(record)
        try:
            await journal.commit(operations, conditions)
        except Conflict as conflict:  # what is in memory is wrong now; the next run finds the letter, and the change
            raise Abandoned from conflict
        return await run.result(record)


async def _is_stale(run: Run, path: str, told: Told) -> bool:
    """Whether something it read and then set was changed meanwhile: as this run knows it, or as the store does. What was written to
    an earlier version of the state is."""
    if told.writes and told.state != run.journal.version:
        return True
    if not told.seen:
        return False
    found = await run.scope.engine.get(run.scope.space, [data_prefix(run.meta.id) + key for key in told.seen])
    return any(
        digest(run.journal.view, key, path) != seen or version != (0 if entry is None else entry.version)
        for (key, (seen, version)), entry in zip(told.seen.items(), found, strict=True)
    )


def _unchanged(run: Run, key: str, version: int) -> Condition:
    name = data_prefix(run.meta.id) + key
    return VersionIs(name, version) if version else Absent(name)


class OnQueue(Errands):
    """A step that is done by whoever serves a queue."""

    def __init__(self, queue: str, *, step: str = "", function: str = "") -> None:
        self.queue = queue
        self.step = step
        self.function = function

    async def begin(self, run: Run, task: Task, failures: int, before: StepRecord | None) -> StepRecord:
        journal, queue = run.journal, run.queue_of(run.meta.name).sibling(self.queue)
        id = queue.new_id()
        away = Away(
            Place("", id, id, run.scope.actor).tail,
            self.queue,
            self.step,
            self.function,
            raw(list(task.args), f"what step {task.path!r} is called with"),
            task.timeout_ms,
            task.branch.path,
        )
        body_of = {"execution": run.meta.id, "step": task.path}
        putting, conditions = split(queue.putting(body_of, priority=run.meta.priority, id=id))
        carried, body, writes = carry(run, task.branch)
        record = StepRecord(
            "waiting", task.position, task.kind, run.clock.now_ms(), attempts=failures, body=body, away=away
        )
        event = journal.event("dispatched", task.path, None, None, task.branch.path, body if writes else 0, writes)
        journal.stage([*carried, *putting, journal.record(task.path, record), event], conditions)
        return record

    def wait(self, task: Task, away: Away) -> Wait:
        return Wait("queue", task.path, away.queue)


class AsTask(Errands):
    """A step that is a process of its own: its function, or the code around it, gives the spec."""

    def __init__(self, spec: TaskSpec | None = None, message: Any = None) -> None:
        self.spec = spec
        self.message = message

    async def begin(self, run: Run, task: Task, failures: int, before: StepRecord | None) -> StepRecord:
        journal, scope, now = run.journal, run.scope, run.clock.now_ms()
        spec, wrote, shared = self.spec, dict[str, Any](), list[Operation]()
        if spec is None:
            branch = Branch(task.path, journal, is_step=True, attempt=failures + 1)
            spec = await attempt_once(run, task, branch)
            if not isinstance(spec, TaskSpec):
                raise InvalidInput(f"step {task.path!r} is a task's: it returns a TaskSpec, not {type(spec).__name__}")
            wrote, shared = branch.buffer.take(), branch.shared
        tid = new_tid(now)
        conditions, submitting = submission(
            tid, spec, self.message, owner=scope.actor, now_ms=now, redaction=scope.redaction
        )
        carried, body, writes = carry(run, task.branch)
        record = StepRecord(
            "waiting", task.position, task.kind, now, attempts=failures, child=tid, body=body, away=Away(tid)
        )
        event = journal.event("submitted", task.path, None, wrote, task.branch.path, body if writes else 0, writes)
        operations = [
            *carried,
            *journal.writing(wrote),
            *shared,
            *submitting,
            Put(errand_key(tid), encode(Errand(run.meta.id, task.path))),
            journal.record(task.path, record),
            event,
        ]
        journal.stage(operations, conditions)
        return record

    def wait(self, task: Task, away: Away) -> Wait:
        return Wait("task", task.path, away.message)

    async def heard(self, run: Run, told: Told) -> Told:
        """A letter about a task says that it has ended; how, its record says."""
        handle = run.task(told.message)
        try:
            state = await handle.state()
            if state.status == "completed":
                value = await handle.result(0) if state.result is not None else _printed(state)
                return Told(told.message, result=raw(value, f"the result of task {state.tid}"))
        except (InvalidInput, NotFound) as exc:
            return Told(told.message, ok=False, error=fault_of(exc), kinds=kinds_of(exc), final=True)
        kind = state.error.type if state.error is not None else "TaskFailed"
        why = f"task {state.tid} {state.status}: {state.reason or state.status}"
        final = state.status == "cancelled"
        return Told(told.message, ok=False, error=Fault(kind, why), kinds=kinds_of(StepFailed("")), final=final)


def _printed(state: TaskState) -> dict[str, Any]:
    """Of a command: where to find what it printed."""
    return {
        "task": state.tid,
        "return_code": state.return_code,
        "output_bytes": state.output.size if state.output else 0,
    }


def _again(retry: Retry, failures: int, told: Told) -> bool:
    wanted = {name_of(kind) for kind in retry.on}
    return failures < retry.attempts and not told.final and not wanted.isdisjoint(told.kinds)


def name_of(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """What an exception is, for somebody who cannot see it."""
    return tuple(name_of(kind) for kind in type(error).__mro__ if issubclass(kind, BaseException))


def _is_final(error: BaseException) -> bool:
    return isinstance(error, InvalidInput)


def digest(view: View, key: str, beside: str | None = None) -> str:
    """What a key of the state is, told apart from whatever else it could be."""
    cell = view.cell(key, beside)
    return "" if cell is None else hashlib.sha256(encode([cell.kind, cell.read()])).hexdigest()


def importable(function: Callable[..., Any], name: str) -> str:
    """`module:function`, by which another process finds it; InvalidInput when none would."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in path.split(".") if isinstance(path, str) else ():
        found = getattr(found, part, None)
    if found is not function:
        raise InvalidInput(
            f"step {name!r} goes to a queue, so other processes must be able to import its function: define it at the top of a "
            f"module. {function!r:.80} is a lambda, is made inside of another function, or is not found under its name"
        )
    return f"{module}:{path}"
