"""Doing a step: run it, record it, try it again, give it up.

A step's result, what it wrote to the state, and the event are one effect of the journal. What it wrote before it failed is forgotten
with the attempt. A failed attempt is recorded, so that attempts are counted over crashes too; the pause before the next one is
a wait like any other, and a long one puts the execution aside.

An item of a map is done the same way, under the map's path and the item's number.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.clock import Clock, sleep_or
from holdfast.codec import decode, encode
from holdfast.engine import Condition, Operation
from holdfast.errors import InvalidInput, NonDeterminism, StepFailed
from holdfast.layers.blobs import BlobRef
from holdfast.layers.workflows.branches import BRANCH, Branch
from holdfast.layers.workflows.deadlines import Deadline, late
from holdfast.layers.workflows.definitions import ONCE, Retry
from holdfast.layers.workflows.entries import INLINE_BYTES_MAX, Fault, StepRecord, Wait, fault_of, raw
from holdfast.layers.workflows.journal import BODY

if TYPE_CHECKING:
    import msgspec

    from holdfast.layers.workflows.context import Context
    from holdfast.layers.workflows.running import Run

STALE_MAX: Final = 1_000
"""How often a parallel task is run again because what it read was changed meanwhile."""


class Caller(Protocol):
    """Who runs a step's function: a run of the execution, or whoever serves the step's queue."""

    clock: Clock
    threads: Executor | None
    context: Context
    replaced: Mapping[str, Callable[..., Any]]
    """What tests do instead of a step, by its name."""


class Elsewhere(Protocol):
    """How a step is done that is not done here (`away.py`)."""

    async def perform(self, run: Run, task: Task, record: StepRecord | None) -> Any: ...


class Task:
    """What is to be done, and how: a step, or an item of a map."""

    __slots__ = (
        "args",
        "branch",
        "elsewhere",
        "function",
        "kind",
        "on_error",
        "path",
        "position",
        "retry",
        "timeout_ms",
        "with_ctx",
    )

    def __init__(
        self,
        branch: Branch,
        path: str,
        position: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        kind: str = "step",
        retry: Retry = ONCE,
        timeout_ms: int | None = None,
        on_error: Callable[..., Any] | None = None,
        with_ctx: str = "",
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.branch = branch
        """In which it was called."""
        self.path = path
        self.position = position
        self.function = function
        self.args = args
        self.kind = kind
        self.retry = retry
        self.timeout_ms = timeout_ms
        self.on_error = on_error
        self.with_ctx = with_ctx
        self.elsewhere = elsewhere


def takes_ctx(function: Callable[..., Any]) -> str:
    """How a step's function wants ctx: "first", by "name", or not at all."""
    try:
        return _takes_ctx(function)
    except TypeError:  # an object that is called, and cannot be remembered
        return _takes_ctx.__wrapped__(function)


@lru_cache(maxsize=4096)
def _takes_ctx(function: Callable[..., Any]) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ""
    for number, parameter in enumerate(parameters):
        if parameter.name == "ctx":
            first = number == 0 and parameter.kind is not parameter.KEYWORD_ONLY
            return "first" if first else "name"
    return ""


def name_in(path: str) -> str:
    """The name of the step, or of the map, that a path is about."""
    *above, last = path.split("/")
    return (last if "#" in last else above[-1]).rpartition("#")[0]


async def perform(run: Run, task: Task) -> Any:
    """The step's result: recorded, or by doing it. StepFailed when all attempts have failed."""
    journal = run.journal
    record = journal.visit(task.path)
    if record is not None and record.kind != task.kind:
        raise NonDeterminism(
            f"{task.path!r} of execution {journal.id!r} was a {record.kind} when it ran before, and is a {task.kind} now",
            recorded=f"{record.kind} {task.path}",
            called=f"{task.kind} {task.path}",
        )
    if record is not None and record.status in ("completed", "skipped"):
        return await run.result(record)
    if record is not None and record.status == "failed":
        raise failed(task.path, record)
    if task.elsewhere is not None:
        return await task.elsewhere.perform(run, task, record)
    show(run, task.branch)
    failures = record.attempts if record is not None else 0
    due = record.until if record is not None else None
    fault = record.error if record is not None else None
    stale = 0
    while True:
        if due is not None:
            await run.waiting.until(Wait("retry", task.path, until=due))
        await journal.settled()
        branch = Branch(task.path, journal, is_step=True, attempt=failures + 1)
        branch.deadline = task.branch.deadline
        deadline: Deadline | None = None
        if task.timeout_ms is None:
            started_at = run.clock.now_ms()
        else:
            branch.deadline = deadline = Deadline(run, task, task.timeout_ms, failures, fault, record)
            started_at, record = deadline.started_at, None
        try:
            if deadline is None:
                value = await _call(run, task, branch)
            else:
                with deadline:
                    value = await attempt_once(run, task, branch, deadline)
            result = raw(value, f"the result of step {task.path!r}")
            if (key := branch.buffer.stale()) is not None:
                stale += 1
                if stale > STALE_MAX:
                    raise StepFailed(
                        f"{key!r} was changed by others each of {STALE_MAX:,} times that it was read and set"
                    )
                due = None
                continue
        except NonDeterminism:
            raise
        except Exception as exc:
            failures += 1
            fault = fault_of(exc, task.path)
            if failures < task.retry.attempts and isinstance(exc, task.retry.on) and not isinstance(exc, InvalidInput):
                due = run.clock.now_ms() + task.retry.pause_ms(failures)
                pausing = StepRecord(
                    "retrying", task.position, task.kind, started_at, None, failures, error=fault, until=due
                )
                event = journal.event("retrying", task.path, fault)
                journal.stage([*journal.end_within(task.path), journal.record(task.path, pausing), event])
                continue
            if deadline is not None and task.on_error is not None:
                deadline.forget()
            return await give_up(run, task, started_at, failures, fault, exc)
        await complete(run, task, branch, started_at, failures + 1, result)
        return decode(bytes(result))


async def attempt_once(run: Caller, task: Task, branch: Branch, deadline: Deadline | None = None) -> Any:
    """Run the function for as long as it may take. Where its execution runs, its deadline says when that is over."""
    if task.timeout_ms is None:
        return await _call(run, task, branch)
    over = asyncio.Event() if deadline is None else deadline.over
    at = run.clock.now_ms() + task.timeout_ms if deadline is None else None
    running = asyncio.get_running_loop().create_task(_call(run, task, branch))
    running.add_done_callback(lambda _: over.set())
    try:
        await sleep_or(run.clock, at, over)
        if not running.done() or (running.cancelled() and deadline is not None and deadline.passed):
            raise late(task)
        return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # nobody else asks


async def _call(run: Caller, task: Task, branch: Branch) -> Any:
    """Run the function as a branch of its own. One that is not async runs in a thread."""
    branch.task = asyncio.current_task()
    token = BRANCH.set(branch)
    try:
        args, named = task.args, {}
        function, how = task.function, task.with_ctx or takes_ctx(task.function)
        if run.replaced and (replacement := run.replaced.get(name_in(task.path))) is not None:
            function, how = replacement, takes_ctx(replacement)
        if how == "first":
            args = (run.context, *args)
        elif how == "name":
            named = {"ctx": run.context}
        if _is_async(function):
            return await function(*args, **named)
        context = contextvars.copy_context()
        work = asyncio.get_running_loop().run_in_executor(run.threads, lambda: context.run(function, *args, **named))
        value = await work
        return await value if inspect.isawaitable(value) else value
    finally:
        BRANCH.reset(token)


def _is_async(function: Callable[..., Any]) -> bool:
    if type(function) is FunctionType and function.__code__.co_flags & inspect.CO_COROUTINE:
        return True  # by far the most common
    return inspect.iscoroutinefunction(function)


async def complete(
    run: Run,
    task: Task,
    branch: Branch,
    started_at: int,
    attempts: int,
    result: msgspec.Raw,
    event: str = "completed",
    also: Iterable[Operation] = (),
) -> None:
    journal = run.journal
    now, status = run.clock.now_ms(), "skipped" if event == "skipped" else "completed"
    blob: BlobRef | None = None
    operations: list[Operation] = [*also]
    conditions: list[Condition] = []
    if len(bytes(result)) > INLINE_BYTES_MAX:
        blob, part = await run.keep(bytes(result), task.path)
        operations += part.operations
        conditions += part.conditions
        result = raw(None, "")
    writes, shared = branch.buffer.take(), branch.shared
    carried, body, body_writes = carry(run, task.branch)
    operations += carried
    operations += journal.writing(writes)
    operations += shared
    record = StepRecord(
        status, task.position, task.kind, started_at, now, attempts, result=result, blob=blob, body=body
    )
    operations += journal.ended(task.path, record, event, writes, task.branch.path, body_writes)
    if blob is None:
        journal.stage(operations, conditions)
    else:
        await journal.commit(operations, conditions)


def carry(run: Run, branch: Branch) -> tuple[list[Operation], int, dict[str, Any]]:
    """What the code of a branch wrote since its last commit, to go with this one."""
    if branch.is_step:
        return [], 0, {}
    if branch.echoes or run.journal.past.covers(branch.path, branch.position):
        return [], branch.body, {}  # that was committed, under an earlier version of the state
    writes = branch.buffer.take() if branch.buffer.writes else {}
    return run.journal.writing(writes), branch.body, writes


def flush(run: Run, branch: Branch) -> list[Operation]:
    """What a branch wrote, to be committed without a step."""
    journal = run.journal
    if branch.is_step:
        writes, shared = branch.buffer.take(), [*branch.shared]
        branch.shared.clear()
        if not writes and not shared:
            return []
        step = branch.buffer.beside or branch.path  # in a branch of a step: the step
        return [*journal.writing(writes), *shared, journal.event("flushed", step, None, writes)]
    if not branch.buffer.writes:
        return []
    operations, body, writes = carry(run, branch)
    if not writes:
        return []
    record = journal.record(branch.below(BODY), StepRecord("completed", kind="body", body=body))
    return [*operations, record, journal.event("flushed", "", None, None, branch.path, body, writes)]


def show(run: Run, branch: Branch) -> None:
    """Let what is begun from here see what the code around it wrote; that is committed with whatever comes next."""
    if not branch.is_step and (operations := flush(run, branch)):
        run.journal.hold(operations)


async def give_up(
    run: Run,
    task: Task,
    started_at: int,
    attempts: int,
    fault: Fault,
    exc: Exception,
    also: Iterable[Operation] = (),
) -> Any:
    """All attempts failed: the error handler's result counts, or the failure is recorded; `also` goes with that."""
    journal = run.journal
    if task.on_error is not None:
        branch = Branch(f"{task.path}/~error", journal, is_step=True, attempt=attempts)
        branch.deadline = task.branch.deadline
        handler = Task(task.branch, task.path, task.position, task.on_error, (run.context, exc), with_ctx="none")
        try:
            result = raw(await _call(run, handler, branch), f"the result of the error handler of {task.path!r}")
        except NonDeterminism:
            raise
        except Exception as again:
            fault = fault_of(again, task.path)
        else:
            await complete(run, task, branch, started_at, attempts, result, "handled", also)
            return decode(bytes(result))
    carried, body, body_writes = carry(run, task.branch)
    record = StepRecord(
        "failed", task.position, task.kind, started_at, run.clock.now_ms(), attempts, error=fault, body=body
    )
    written = journal.ended(task.path, record, "failed", {}, task.branch.path, body_writes)
    journal.stage([*carried, *written, *also])
    raise failed(task.path, record) from exc


def failed(path: str, record: StepRecord) -> StepFailed:
    """The error of a recorded failure: the same when it happens and when it is replayed."""
    fault = record.error or Fault("Error", "")
    times = "" if record.attempts == 1 else f" {record.attempts} times"
    return StepFailed(
        f"step {path!r} failed{times}: {fault.type}: {fault.message}",
        step=path,
        kind=fault.type,
        reason=fault.message,
        attempts=record.attempts,
    )


async def skip(run: Run, task: Task) -> None:
    """Record that a step is not done."""
    record = run.journal.visit(task.path)
    if record is None:
        branch = Branch(task.path, run.journal, is_step=True)
        await complete(run, task, branch, run.clock.now_ms(), 0, raw(None, ""), "skipped")


def json_copy(value: Any) -> Any:
    """What code gets is what it would get from the store."""
    return decode(encode(value))
