"""Children: executions that another one started and waits for.

The commit that starts a child is the one that records, in its parent, that it was started. The commit that ends it tells the parent, by a
signal named after the step, and wakes it: result and waking are one batch. A parent that is cancelled, or fails, cancels those
that are left before it ends; a detached child lives its own life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from holdfast.codec import decode, encode
from holdfast.engine import Delete
from holdfast.errors import Conflict, InvalidInput, NotFound, TaskPending
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.branches import Call
from holdfast.layers.workflows.definitions import Definition, definition_of
from holdfast.layers.workflows.entries import (
    CANCEL,
    CHILD,
    COMPLETED,
    Execution,
    Fault,
    Meta,
    Outcome,
    StepRecord,
    Wait,
    child_id,
    execution_key,
    execution_of,
    meta_key,
    raw,
)
from holdfast.layers.workflows.journal import Parts
from holdfast.layers.workflows.mail import sending
from holdfast.layers.workflows.performing import carry, failed
from holdfast.layers.workflows.starting import meta_for, starting

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Run

AGAIN_MAX: Final = 1_000
"""How often a step that starts a child can be taken back."""


async def begin_child(
    run: Run, made: Call, workflow: Any, input: Any, id: str | None, detached: bool, priority: int
) -> StepRecord:
    """Start it, and record that."""
    journal, now = run.journal, run.clock.now_ms()
    definition: Definition = run.defined(workflow) if isinstance(workflow, str) else definition_of(workflow)
    child, again = child_id(run.meta.id, made.path) if id is None else id, 0
    told = {} if detached else {"parent": run.meta.id, "parent_path": made.path}
    carried, body, writes = carry(run, made.branch)
    event = journal.event("started child", made.path, None, None, made.branch.path, body if writes else 0, writes)
    in_line = False
    while True:
        meta = meta_for(definition, input, child, now, priority=priority, detached=detached, **told)
        record = StepRecord(
            "completed" if detached else "waiting",
            made.position,
            "child",
            now,
            now if detached else None,
            result=raw(child if detached else None, ""),
            child=child,
            body=body,
        )
        operations, conditions = starting(run.queue_of(definition.name), meta, definition.concurrency, in_line=in_line)
        try:
            await journal.commit([*carried, *operations, journal.record(made.path, record), event], conditions)
            return record
        except Conflict as conflict:
            if conflict.key == meta_key(child):
                again += 1
                if id is not None or again > AGAIN_MAX:
                    raise InvalidInput(
                        f"there is an execution {child!r} already; a child needs an id of its own"
                    ) from conflict
                child = child_id(run.meta.id, f"{made.path}~{again}")  # a step that was taken back had started that one
                continue
            if conflict.key is None or not conflict.key.startswith("tallies/slots/"):
                raise
            in_line = not in_line


async def await_child(run: Run, made: Call, record: StepRecord) -> Any:
    """Its result, when it has one."""
    journal = run.journal
    if record.status == "waiting":
        while True:
            letter = await run.waiting.receive(Wait("child", made.path, record.child), CHILD + made.path)
            assert letter is not None  # noqa: S101 - there is no timeout
            outcome, now = decode(bytes(letter.value), Outcome), run.clock.now_ms()
            if outcome.child in ("", record.child):
                break
            journal.stage([Delete(letter.key)])  # of a child whose start was taken back
        carried, body, writes = carry(run, made.branch)
        status = "completed" if outcome.status == COMPLETED else "failed"
        error = outcome.error or (
            None if status == "completed" else Fault("Cancelled", f"execution {record.child!r} was cancelled")
        )
        record = StepRecord(
            status,
            made.position,
            "child",
            record.started_at,
            now,
            result=outcome.result,
            blob=outcome.blob,
            error=error,
            child=record.child,
            body=body,
        )
        kept, needed = run.attaching(outcome.blob, made.path)
        event = journal.event(
            f"child {outcome.status}", made.path, error, None, made.branch.path, body if writes else 0, writes
        )
        operations = [*carried, *kept, journal.record(made.path, record), Delete(letter.key), event]
        if needed:
            await journal.commit(operations, needed)
        else:
            journal.stage(operations)
    if record.status == "failed":
        raise failed(made.path, record)
    return await run.result(record)


async def telling(scope: Scope, queue_of: Callable[[str], Queue], meta: Meta, outcome: Outcome) -> Parts:
    """What an execution's end tells its parent. Conflict when the parent moved meanwhile: ask again."""
    if not meta.parent:
        return [], []
    [entry] = await scope.engine.get(scope.space, [execution_key(meta.parent)])
    if entry is None or (parent := execution_of(entry)).ended:
        return [], []
    return sending(queue_of(parent.name), entry, parent, CHILD + meta.parent_path, encode(outcome))


async def cancel_children(run: Run) -> None:
    """Ask those that have not ended, and the tasks it waits for, to end. Asking twice does no harm."""
    for record in list(run.journal.records.values()):
        if record.status != "waiting" or not record.child:
            continue
        if record.kind == "child":
            await run.control(record.child, CANCEL)
        else:
            await stop_task(run.task(record.child))


async def stop_task(handle: TaskHandle) -> None:
    """Ask for the end of a task; its manager sees to it, or the store alone if it has none."""
    try:
        await handle.cancel(wait=0)
    except (Conflict, NotFound, TaskPending):
        return


def outcome_of(execution: Execution) -> Outcome:
    return Outcome(execution.status, execution.result, execution.blob, execution.error, execution.id)
