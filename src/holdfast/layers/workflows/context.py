"""`ctx`: what the code of a workflow calls. Everything it gives is the same when the code runs again.

    quote = await ctx.step("quote", fetch_quote, order)       # ran once; replays from the journal
    parts = await ctx.map("check", run_check, quote["legs"], max_workers=8)
    await ctx.sleep("1h")                                     # holds no process
    answer = await ctx.wait_for("approval", timeout="2d")
    paid = await ctx.child(settle, {"answer": answer})

One object serves an execution; where in the code it is used (the trunk, a branch of a gather, a step) it knows from the context of the
running task (`branches.py`). Names and durations are checked when a call is made, before anything is awaited.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import datetime
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms, optional_ms
from holdfast.codec import decode, encode
from holdfast.engine import Delete, Operation, Put
from holdfast.errors import InvalidInput, NonDeterminism, StepFailed, TimedOut
from holdfast.keys import check_name
from holdfast.layers.queue_entries import check_queue
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.workflows.away import AsTask, OnQueue, importable
from holdfast.layers.workflows.branches import Branch, Call, Within, call, here, refused
from holdfast.layers.workflows.branching import Work, branch_out, refuse
from holdfast.layers.workflows.children import await_child, begin_child
from holdfast.layers.workflows.definitions import (
    MAP_WORKERS,
    Retry,
    check_label,
    check_rate,
    check_workers,
    retry_of,
    skipped,
)
from holdfast.layers.workflows.entries import SHARED, TOLERATED, StepRecord, Wait, check_execution, raw
from holdfast.layers.workflows.performing import Elsewhere, Task, carry, flush, perform, show
from holdfast.layers.workflows.state import State
from holdfast.layers.workflows.turns import CALL

if TYPE_CHECKING:
    from holdfast.layers.workflows.running import Run

MAP_MAX: Final = 1_000_000
"""Items of one map."""
BRANCHES_MAX: Final = 10_000
_UNSET: Final = object()

OnError = Callable[..., Any] | Literal["skip"] | None


class Context:
    """What a workflow's code works with. Made by the worker that runs it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.shared_state = SharedState(run)
        """What workflows share with each other, with a ttl if it is given one."""

    @property
    def id(self) -> str:
        """The execution's id."""
        return self._run.meta.id

    @property
    def input(self) -> Any:
        """What the execution was started with; a copy."""
        return decode(bytes(self._run.meta.input))

    @property
    def name(self) -> str:
        """The workflow's name."""
        return self._run.meta.name

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of the step that asks, and for no other: hand it on to whoever must not do it twice."""
        path = here().path
        return f"{self.id}:{path}" if path else self.id

    @property
    def attempt(self) -> int:
        """Which attempt of the step this is, from 1."""
        return here().attempt

    @property
    def state(self) -> State:
        """The execution's state; what is written here is committed with the step."""
        run, branch = self._run, here()

        written = lambda key, write: branch.write(run.journal, key, write)  # noqa: E731
        return State(branch.buffer, written, self._flush, run.definition.shape)

    async def _flush(self) -> None:
        if operations := flush(self._run, here()):
            await self._run.journal.commit(operations)

    # --- steps ---

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        retry: Retry | int | None = None,
        timeout: Duration | None = None,
        on_error: OnError = None,
        queue: str | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Do this once: its result is recorded, and given again when the code runs again.

        A function with a parameter `ctx` gets it. `on_error(ctx, error)` gives the result when all attempts failed ("skip": None).
        With a `queue` it is done by a worker that serves that queue, and the execution holds no process meanwhile.
        """
        _check_function(function, name)
        elsewhere = _on_queue(queue, function, name)
        given = self._run.definition.retry if retry is None else retry_of(retry)
        timeout_ms = optional_ms(timeout, name=f"timeout of step {name!r}")
        made = self._call(check_label(name, "step's name"))
        task = Task(
            made.branch,
            made.path,
            made.position,
            function,
            args,
            retry=given,
            timeout_ms=timeout_ms,
            on_error=_handler(on_error),
            elsewhere=elsewhere,
        )
        return self.performed(task)

    def task(
        self,
        name: str,
        spec: TaskSpec,
        message: Any = None,
        *,
        retry: Retry | int | None = None,
        on_error: OnError = None,
    ) -> Coroutine[Any, Any, Any]:
        """Run a task, as a process of its own under its own limits, and wait for it without holding a process here.

        Gives what its function returned; of a command, `{"task": tid, "return_code": …, "output_bytes": …}`. StepFailed, with the
        task's reason, if it did not complete. Each attempt is a new task; its timeout and limits are the spec's.
        """
        if not isinstance(spec, TaskSpec):
            raise InvalidInput(f"task {name!r} wants a TaskSpec, not {type(spec).__name__}")
        given = self._run.definition.retry if retry is None else retry_of(retry)
        made = self._call(check_label(name, "step's name"))
        task = Task(
            made.branch,
            made.path,
            made.position,
            skipped,
            (),
            kind="task",
            retry=given,
            on_error=_handler(on_error),
            elsewhere=AsTask(spec, message),
        )
        return self.performed(task)

    async def performed(self, task: Task) -> Any:
        with Within(self._run.runnable, self._run.journal, task.branch):
            return await perform(self._run, task)

    def map(
        self,
        name: str,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        max_workers: int = MAP_WORKERS,
        retry: Retry | int | None = None,
        timeout: Duration | None = None,
        on_error: OnError = None,
        min_success_rate: float = 1.0,
        queue: str | None = None,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Do this for each item, up to `max_workers` at a time, each recorded by itself; gives the results in the items' order.

        At least the share `min_success_rate` must succeed; the results of the others are None. With a `queue` the items are done by
        the workers that serve it.
        """
        _check_function(function, name)
        elsewhere = _on_queue(queue, function, name)
        given = self._run.definition.retry if retry is None else retry_of(retry)
        timeout_ms = optional_ms(timeout, name=f"timeout of map {name!r}")
        check_workers(max_workers)
        check_rate(min_success_rate)
        wanted = list(items)
        if len(wanted) > MAP_MAX:
            raise InvalidInput(f"a map has at most {MAP_MAX:,} items, not {len(wanted):,}")
        made = self._call(check_label(name, "map's name"))
        return self.mapped(
            made,
            function,
            wanted,
            max_workers,
            given,
            timeout_ms,
            _handler(on_error),
            min_success_rate,
            elsewhere=elsewhere,
        )

    async def mapped(
        self,
        made: Call,
        function: Callable[..., Any],
        items: list[Any],
        max_workers: int,
        retry: Retry,
        timeout_ms: int | None,
        on_error: Callable[..., Any] | None,
        rate: float,
        extra: tuple[Any, ...] = (),
        with_ctx: str = "",
        elsewhere: Elsewhere | None = None,
    ) -> list[Any]:
        run, journal = self._run, self._run.journal
        with Within(run.runnable, journal, made.branch):
            if journal.last.get(made.path, -1) >= len(items):
                raise NonDeterminism(
                    f"map {made.path!r} of execution {journal.id!r} had more than {len(items):,} items when it ran before",
                    recorded=f"{made.path}/{journal.last[made.path]}",
                    called=made.path,
                )
            show(run, made.branch)
            results: list[Any] = [None] * len(items)
            failures: dict[int, StepFailed] = {}
            numbers = iter(range(len(items)))

            async def work() -> None:
                branch = here()
                for number in numbers:
                    if failures and rate >= 1:
                        return
                    path = f"{made.path}/{number}"
                    task = Task(
                        branch,
                        path,
                        number,
                        function,
                        (items[number], *extra),
                        kind="item",
                        retry=retry,
                        timeout_ms=timeout_ms,
                        on_error=on_error,
                        with_ctx=with_ctx,
                        elsewhere=elsewhere,
                    )
                    try:
                        results[number] = await perform(run, task)
                    except StepFailed as exc:
                        failures[number] = exc
                        if rate >= 1:
                            return  # no more are begun; those under way are finished

            branches: list[Work] = [(made.path, work()) for _ in range(min(max_workers, len(items)))]
            try:
                await branch_out(run, branches)
            finally:
                journal.visit(made.path)  # what a fork has edited after it
            if failures and (rate >= 1 or len(items) - len(failures) < rate * len(items)):
                first = failures[min(failures)]
                raise StepFailed(
                    f"{len(failures):,} of {len(items):,} items of {made.path!r} failed; the first: {first}",
                    step=first.step,
                    kind=first.kind,
                    reason=first.reason,
                    attempts=first.attempts,
                )
            if failures:
                made.branch.failures += 1  # the code goes on without them
                tolerated = f"{made.path}/{TOLERATED}"
                if tolerated not in journal.records:
                    journal.hold([journal.record(tolerated, StepRecord("completed", kind="tolerated"))])
            return results

    def gather(self, *awaitables: Awaitable[Any], return_exceptions: bool = False) -> Coroutine[Any, Any, list[Any]]:
        """Several things at the same time: calls of ctx, or coroutines that make such calls. Gives their results in order.

        When one fails, the others are cancelled; with `return_exceptions` its error is its result.
        """
        if len(awaitables) > BRANCHES_MAX:
            raise InvalidInput(f"gather takes at most {BRANCHES_MAX:,} branches, not {len(awaitables):,}; use ctx.map")
        return self._gathered(self._call("gather"), awaitables, return_exceptions)

    async def _gathered(self, made: Call, awaitables: tuple[Awaitable[Any], ...], return_exceptions: bool) -> list[Any]:
        if refused(here(), self._run.journal):
            await refuse(awaitables)
        with Within(self._run.runnable, self._run.journal, made.branch):
            show(self._run, made.branch)
            named = [(f"{made.path}/{number}", each) for number, each in enumerate(awaitables)]
            try:
                results = await branch_out(self._run, named, return_exceptions=return_exceptions)
                if return_exceptions and any(isinstance(each, Exception) for each in results):
                    made.branch.failures += 1
                return results
            finally:
                self._run.journal.visit(made.path)  # what a fork has edited after it

    # --- waiting ---

    def sleep(self, duration: Duration) -> Coroutine[Any, Any, None]:
        """Go on after this time. Meanwhile the execution is put aside, and needs no process."""
        ms = duration_ms(duration, name="sleep")
        return self._slept(self._call("sleep"), ms)

    async def _slept(self, made: Call, ms: int) -> None:
        run, journal = self._run, self._run.journal
        with Within(run.runnable, journal, made.branch):
            record = journal.visit(made.path)
            until = record.until if record is not None else None
            if until is None:
                until = run.clock.now_ms() + ms
                self._note(made, StepRecord("waiting", made.position, "sleep", until - ms, until=until), "sleeping")
            await run.waiting.until(Wait("sleep", made.path, until=until))

    def wait_for(
        self, name: str, *, timeout: Duration | None = None, default: Any = _UNSET
    ) -> Coroutine[Any, Any, Any]:
        """The value of the next signal of this name. After the timeout: the default if there is one, TimedOut otherwise."""
        check_label(name, "signal's name")
        ms = optional_ms(timeout, name="timeout")
        return self._waited(self._call(f"{CALL}{name}"), name, ms, default)

    async def _waited(self, made: Call, name: str, ms: int | None, default: Any) -> Any:
        run, journal = self._run, self._run.journal
        with Within(run.runnable, journal, made.branch):
            record = journal.visit(made.path)
            if record is None:
                now = run.clock.now_ms()
                record = StepRecord("waiting", made.position, "signal", now, until=None if ms is None else now + ms)
                if not run.waiting.may_take(name):
                    record = msgspec.structs.replace(record, turn=run.turns.draw())
                    self._note(made, record, "waiting")
            if record.status == "waiting":
                taken = await run.waiting.receive(Wait("signal", made.path, name, record.until), turn=record.turn)
                now, operations = run.clock.now_ms(), list[Operation]()
                value = raw(None, "") if taken is None else taken.value
                status = "failed" if taken is None else "completed"
                record = StepRecord(status, made.position, "signal", record.started_at, now, result=value)
                if taken is not None:
                    operations.append(Delete(taken.key))
                self._note(made, record, "timed out" if taken is None else "signalled", operations)
            if record.status == "completed":
                return await run.result(record)
            if default is not _UNSET:
                made.branch.failures += 1
                return default
            raise TimedOut(f"no signal {name!r} came in the time that {made.path!r} waited for it", step=made.path)

    def child(
        self, workflow: Any, input: Any = None, *, id: str | None = None, detached: bool = False, priority: int = 0
    ) -> Coroutine[Any, Any, Any]:
        """Start another workflow and wait for its result; StepFailed if it fails. A detached one is not waited for: its id is given."""
        name = workflow if isinstance(workflow, str) else getattr(workflow, "__name__", "child")
        made = self._call(f"child:{check_label(name, 'workflow')}")
        return self._bore(made, workflow, input, None if id is None else check_execution(id), detached, priority)

    async def _bore(self, made: Call, workflow: Any, input: Any, id: str | None, detached: bool, priority: int) -> Any:
        with Within(self._run.runnable, self._run.journal, made.branch):
            record = self._run.journal.visit(made.path)
            if record is None:
                record = await begin_child(self._run, made, workflow, input, id, detached, priority)
            return await await_child(self._run, made, record)

    # --- what would differ from run to run ---

    def now(self) -> datetime:
        """The time, recorded: the same when the code runs again."""
        run, branch = self._run, here()
        if branch.is_step:
            return as_datetime(run.clock.now_ms())
        made = self._made("now")
        if refused(branch, run.journal):
            raise asyncio.CancelledError
        record = run.journal.visit(made.path)
        if record is None:
            record = StepRecord("completed", made.position, "now", run.clock.now_ms())
            self._note(made, record, None)
        return as_datetime(record.started_at or 0)

    def random(self) -> float:
        """A number from 0 to 1 that is the same when the code runs again. Not for secrets: whoever knows the id can know it."""
        branch = here()
        branch.randoms += 1
        return random.Random(f"{self.id}\n{branch.path}\n{branch.randoms}").random()  # noqa: S311

    def version(self, change: str) -> bool:
        """Whether a change of the code applies: True for executions that come here after it, False for those that came before."""
        run, branch, path = self._run, here(), f"~version:{check_label(change, 'change')}"
        record = run.journal.records.get(path)
        if record is not None:
            return bool(decode(bytes(record.result)))
        if run.journal.went_on(branch.path, branch.position, branch.ordinals):
            return False  # the code that ran before went on from here without it
        record = StepRecord("completed", kind="version", result=raw(True, ""))
        run.journal.stage([run.journal.record(path, record)])
        return True

    # --- ---

    def _made(self, name: str) -> Call:
        return call(self._run.journal, name)

    def _call(self, name: str) -> Call:
        """The next call, which somebody is going to await."""
        made = self._made(name)
        self._run.runnable.made += 1
        return made

    def _note(
        self, made: Call, record: StepRecord, event: str | None, operations: list[Operation] | None = None
    ) -> None:
        """Stage the record of a call, with what the code around it wrote."""
        run, journal = self._run, self._run.journal
        carried, body, writes = carry(run, made.branch)
        staged = [*carried, *(operations or ())]
        record = msgspec.structs.replace(record, body=body)
        staged.append(journal.record(made.path, record))
        if event is not None or writes:
            staged.append(
                journal.event(
                    event or record.kind, made.path, None, None, made.branch.path, body if writes else 0, writes
                )
            )
        journal.stage(staged)


class SharedState:
    """`ctx.shared_state`: values that workflows of the space share. A step's are written in the commit of the step."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def set(self, key: str, value: Any, *, ttl: Duration | None = None) -> None:
        """Write a value, for everybody, with its ttl."""
        put = Put(SHARED.key(check_name(key)), encode(value), optional_ms(ttl))
        await self._write(put, "shared_state.set")

    async def delete(self, key: str) -> None:
        """Remove a value."""
        await self._write(Delete(SHARED.key(check_name(key))), "shared_state.delete")

    async def get(self, key: str, default: Any = None) -> Any:
        """The value as it is now; in the code between steps it is recorded, and the same when the code runs again."""
        branch, name = here(), SHARED.key(check_name(key))
        if branch.is_step:
            return await self._read(branch, name, default)
        context = self._run.context
        found = await context.step("shared_state.get", self._found, name)
        return found["value"] if found["is_there"] else default

    async def _found(self, name: str) -> dict[str, Any]:
        missing = object()
        value = await self._read(here(), name, missing)
        return {"is_there": value is not missing, "value": None if value is missing else value}

    async def _read(self, branch: Branch, name: str, default: Any) -> Any:
        for op in reversed(branch.shared):
            if op.key == name:  # type: ignore[union-attr]
                return decode(op.value) if isinstance(op, Put) else default
        scope = self._run.scope
        [entry] = await scope.engine.get(scope.space, [name])
        return default if entry is None else decode(entry.value)

    async def _write(self, op: Put | Delete, name: str) -> None:
        branch = here()
        if branch.is_step:
            branch.shared.append(op)
            return

        async def writing() -> None:
            here().shared.append(op)

        await self._run.context.step(name, writing)


def _handler(on_error: OnError) -> Callable[..., Any] | None:
    if on_error is None or callable(on_error):
        return on_error
    if on_error == "skip":
        return skipped
    raise InvalidInput(f"on_error is a function or 'skip', not {on_error!r:.60}")


def _on_queue(queue: str | None, function: Callable[..., Any], name: str) -> OnQueue | None:
    return None if queue is None else OnQueue(check_queue(queue), function=importable(function, name))


def _check_function(function: Any, name: str) -> None:
    if type(function) is FunctionType:
        return
    if asyncio.iscoroutine(function):
        function.close()
        raise InvalidInput(
            f"step {name!r} wants a function and its arguments, not a coroutine: ctx.step({name!r}, f, x)"
        )
    if not callable(function):
        raise InvalidInput(f"step {name!r} wants a function, not {function!r:.60}")
