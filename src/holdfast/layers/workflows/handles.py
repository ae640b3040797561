"""Starting executions, and what can be done about them from outside.

    handle = await space.workflows.start(Research, {"symbol": "MSFT"}, id="msft-2026-11-15")
    result = await handle.result()

Starting is one commit, and idempotent by id: whoever starts the same again gets the same execution. Everything else is sent to the
execution (`mail.py`), and done by the worker that has it; what nobody has is cancelled, paused and resumed in the store alone
(`outside.py`). Waiting for a result follows the feed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, TypeVar, overload

import msgspec

from holdfast.clock import Duration, as_datetime, duration_ms, sleep_or, wait_ms
from holdfast.codec import decode, encode, integer
from holdfast.engine import SCAN_MAX, cursor_at
from holdfast.errors import ExecutionFailed, InvalidInput, NotFound, TimedOut
from holdfast.ids import new_id
from holdfast.layers.awaiting import Listener
from holdfast.layers.blobs import BlobRef, Blobs
from holdfast.layers.coordination import Coordination
from holdfast.layers.diffs import Difference
from holdfast.layers.queues import Queue
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.archiving import (
    Archive,
    Cleanup,
    archive_execution,
    archives_in,
    clean_up,
    restore_execution,
)
from holdfast.layers.workflows.definitions import check_label, definition_of
from holdfast.layers.workflows.entries import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    ENDINGS,
    EXECUTIONS,
    PAUSE,
    RESUME,
    SHARED,
    STATUSES,
    TALLIES,
    WORKFLOWS,
    Execution,
    LogEvent,
    Meta,
    StepRecord,
    Wait,
    check_execution,
    execution_key,
    execution_of,
    log_prefix,
    meta_key,
    meta_of,
    queue_name,
    raw,
    tag_of,
)
from holdfast.layers.workflows.forking import UNCHANGED, fork_execution
from holdfast.layers.workflows.history import POINTS, HistoryPoint, diff_of, history_of, state_at
from holdfast.layers.workflows.known import is_served, known
from holdfast.layers.workflows.outside import Outside
from holdfast.layers.workflows.reading import every, journal_of, log_of, standing_of, state_of
from holdfast.layers.workflows.retrying import retry_execution
from holdfast.layers.workflows.rewinding import in_order
from holdfast.layers.workflows.schedules import Schedules
from holdfast.layers.workflows.sending import send
from holdfast.layers.workflows.starting import meta_by_name, meta_for, start_execution
from holdfast.layers.workflows.worker import CONCURRENCY, LEASE_MS, Worker

ENDED_TAGS: Final = frozenset(tag_of(status) for status in ENDINGS)
T = TypeVar("T")
LIST_MAX: Final = 1_000
"""Executions that a listing shows unless told otherwise."""


class ExecutionView(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an execution stands, as people see it."""

    id: str
    name: str
    version: str
    status: str
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    error: dict[str, str] | None = None
    waits: tuple[dict[str, Any], ...] = ()
    parent: str = ""
    input: Any = None
    config: dict[str, Any] = {}


class ExecutionHandle:
    """One execution. Made by `space.workflows.start` or `.get`."""

    def __init__(self, workflows: Workflows, id: str, started: int | None = None) -> None:
        """`started`: at which version, if that was here and just now."""
        self._workflows = workflows
        self._scope = workflows._scope
        self._started = started
        self.id = id
        """The execution's id."""

    async def status(self) -> ExecutionView:
        """How it stands; NotFound when there is none, or none any more."""
        return _view(*await self._read())

    async def _read(self) -> tuple[Execution, Meta]:
        _, execution, meta = await standing_of(self._scope, self.id)
        return execution, meta

    async def _execution(self, changed: Listener | None = None) -> Execution:
        """How it stands; whoever listens need not be told of anything before that."""
        scope = self._scope
        [entry] = await scope.engine.get(scope.space, [execution_key(self.id)])
        if entry is None:
            raise NotFound(f"there is no execution {self.id!r}; it was never started, or its record has expired")
        if changed is not None:
            changed.has_read(entry.version)
        return execution_of(entry)

    async def result(self, wait: Duration | None = None) -> Any:
        """Its result, when it has one; ExecutionFailed if it failed or was cancelled, TimedOut after `wait` (None: never)."""
        scope, key = self._scope, execution_key(self.id)
        patience = wait_ms(wait)
        deadline = None if patience is None else scope.clock.now_ms() + patience
        if patience == 0:
            execution = await self._execution()
        else:
            awaiting = self._workflows._coordination.awaiting(scope, EXECUTIONS)
            started, self._started = self._started, None
            async with awaiting.listening(key, ENDED_TAGS, started) as changed:
                if changed.missed_nothing:  # it has been started, and has not ended
                    await sleep_or(scope.clock, deadline, changed)
                while True:
                    changed.clear()
                    shown, changed.value = changed.value, None
                    execution = await self._execution(changed) if shown is None else decode(shown, Execution)
                    if execution.ended or not await sleep_or(scope.clock, deadline, changed):
                        break
        if not execution.ended:
            raise TimedOut(f"execution {self.id!r} is {execution.status}; it had no result in the time that was waited")
        if execution.status == COMPLETED:
            return await self._workflows._value(execution.result, execution.blob)
        raise _failed(execution)

    async def signal(self, name: str, value: Any = None, *, request_id: str | None = None) -> None:
        """Send it a value, which its `ctx.wait_for(name)` gets; Conflict if it has ended. Within an hour a request id sends once."""
        check_label(name, "signal's name")
        value = bytes(raw(value, f"the signal {name!r}"))
        await send(self._scope, self._workflows._queue_of, self.id, name, value, request_id=request_id)

    async def cancel(self) -> None:
        """End it: its steps are cancelled, and its children with it. Conflict if it has ended."""
        await self._workflows._outside.control(self.id, CANCEL)

    async def pause(self) -> None:
        """Let it stay where it is, after what runs has been cancelled; a step that was cancelled is done again."""
        await self._workflows._outside.control(self.id, PAUSE)

    async def resume(self) -> None:
        """Let it go on."""
        await self._workflows._outside.control(self.id, RESUME)

    async def retry(self, from_step: str | None = None) -> None:
        """Let one that failed or was cancelled try again: what failed and was not handled or tolerated, or all from this step on, with its state."""
        await retry_execution(self._scope, self._workflows._queue_of, self.id, from_step)
        self._started = None  # the feed may still tell of the end that was before

    async def steps(self, *, results: bool = True, as_called: bool = False) -> dict[str, dict[str, Any]]:
        """What is recorded of each of its steps, by path; their results too, unless told otherwise.

        They are sorted by path; if they are wanted `as_called`, by the order in which the code makes the calls.
        """
        records, events = await journal_of(self._scope, self.id)
        if as_called:
            [described] = await self._scope.engine.get(self._scope.space, [meta_key(self.id)])
            records = in_order(records, events, [] if described is None else meta_of(described).config.get("steps", []))
        found: dict[str, dict[str, Any]] = {}
        for path, record in records.items():
            found[path] = await self._workflows._shown(record, results)
        return found

    async def watch(self) -> AsyncIterator[ExecutionView]:
        """How it stands, and again whenever it has moved or a step of it was done, until it has ended."""
        scope = self._scope
        found = await scope.engine.spaces(scope.space)
        cursor = cursor_at(found[0].revision if found else 0)
        view = await self.status()
        yield view
        if view.status in ENDINGS:
            return
        async for _ in scope.engine.watch(scope.space, execution_key(self.id), log_prefix(self.id), cursor=cursor):
            view = await self.status()
            yield view
            if view.status in ENDINGS:
                return

    @overload
    async def state(self) -> dict[str, Any]: ...
    @overload
    async def state(self, as_type: type[T]) -> T: ...

    async def state(self, as_type: type[Any] | None = None) -> Any:
        """Its state, as it is now, plain or as a type. A running one may be between two commits where it is large."""
        found = await state_of(self._scope, self.id)
        return found if as_type is None else decode(encode(found), as_type)

    async def log(self) -> list[LogEvent]:
        """What happened to it, in order, with the state that was written."""
        return [event for _, event in await log_of(self._scope, self.id)]

    async def history(self, *, after: int = 0, limit: int = POINTS) -> Sequence[HistoryPoint]:
        """The same, with the state after each: the points after a number."""
        return await history_of(self._scope, self.id, after, limit)

    async def state_at(self, point: int | str) -> dict[str, Any]:
        """The state after a point of its history: a number, or the name of a step."""
        return await state_at(self._scope, self.id, point)

    async def diff(self, old: int | str, new: int | str) -> Sequence[Difference]:
        """What differs between the states after two points."""
        return await diff_of(self._scope, self.id, old, new)

    async def fork(
        self,
        from_step: str,
        *,
        id: str | None = None,
        input: Any = UNCHANGED,
        state: dict[str, Any] | None = None,
        without: Sequence[str] = (),
    ) -> ExecutionHandle:
        """A new execution that goes on from this step, with what was done before it; with another input or state, if given.

        `state` sets keys of the state, `without` takes some away. This one is left as it is.
        """
        workflows, made = self._workflows, new_id() if id is None else id
        _, meta = await self._read()
        await fork_execution(
            self._scope,
            workflows._queue_of(meta.name),
            workflows._blobs(),
            self.id,
            made,
            from_step,
            input=input,
            state=state,
            without=without,
        )
        return ExecutionHandle(workflows, made)

    async def archive(self, *, keep: Duration | None = None) -> Archive:
        """Keep what there is of it as a blob, for so long or for ever. Conflict as long as it has not ended."""
        return await archive_execution(self._scope, self._workflows._blobs(), self.id, keep)

    def __repr__(self) -> str:
        return f"<Execution {self.id!r}>"


class Workflows:
    """The workflows of a space, as `space.workflows`."""

    def __init__(self, scope: Scope, coordination: Coordination, blobs: Callable[[], Blobs]) -> None:
        self._scope = scope
        self._coordination = coordination
        self._blobs = blobs
        self._queues: dict[str, Queue] = {}
        self._outside = Outside(scope, self._queue_of, lambda tid: TaskHandle(scope, coordination, blobs, tid))

    @cached_property
    def schedules(self) -> Schedules:
        """What is started at certain times."""
        return Schedules(self._scope)

    async def start(
        self, workflow: Any, input: Any = None, *, id: str | None = None, priority: int = 0, key: str | None = None
    ) -> ExecutionHandle:
        """Start an execution. One with this id that is there already, of the same workflow, is not started again: its handle is given.

        A workflow may be given by its name. What its workers said of it counts then; where its limit is by `key`, that is given too.
        """
        execution, now = new_id() if id is None else id, self._scope.clock.now_ms()
        if isinstance(workflow, str):
            told = await known(self._scope, workflow)
            meta = meta_by_name(workflow, told, input, execution, now, priority=priority, key=key)
            limit = None if told is None else told.concurrency
        else:
            definition = definition_of(workflow)
            if key is not None:
                raise InvalidInput("key is for a workflow that is started by its name; its code makes it otherwise")
            meta = meta_for(definition, input, execution, now, priority=priority)
            limit = definition.concurrency
        receipt = await start_execution(self._scope, self._queue_of(meta.name), meta, limit, hands_over=True)
        return ExecutionHandle(self, execution, None if receipt is None else receipt.version)

    async def is_served(self, name: str) -> bool:
        """Whether there is a worker that knows this workflow, and lives."""
        return await is_served(self._scope, name)

    async def archives(self, *, name: str | None = None, limit: int = LIST_MAX) -> Sequence[Archive]:
        """What was archived, by id."""
        return await archives_in(self._scope, name, limit)

    async def restore(self, id: str) -> ExecutionHandle:
        """Bring an archived execution back, as it was; it is kept as long as one that has just ended."""
        await restore_execution(self._scope, self._blobs(), check_execution(id))
        return ExecutionHandle(self, id)

    async def cleanup(
        self,
        older_than: Duration,
        *,
        name: str | None = None,
        archive: bool = True,
        keep: Duration | None = None,
    ) -> Cleanup:
        """Remove executions that ended so long ago, each after it was archived. A failed archive deletes nothing."""
        names = await self._names() if name is None else [check_label(name, "workflow's name")]
        return await clean_up(self._scope, self._blobs(), names, older_than, archive=archive, keep=keep)

    async def get(self, id: str) -> ExecutionHandle:
        """An execution that was started; NotFound when there is none."""
        handle = ExecutionHandle(self, check_execution(id))
        await handle._read()
        return handle

    def worker(
        self,
        workflows: Sequence[Any],
        *,
        concurrency: int = CONCURRENCY,
        lease: Duration | None = None,
        queues: Sequence[str] = (),
        steps_only: bool = False,
    ) -> Worker:
        """One that runs executions of these workflows, up to so many at a time; `lease` is how soon another takes over when it dies.

        It also does the steps of these workflows that are sent to `queues`; with `steps_only` nothing else.
        """
        if not isinstance(workflows, Sequence):
            raise InvalidInput(
                f"a worker is given a list of workflows, such as worker([{getattr(workflows, '__name__', '…')}])"
            )
        lease_ms = LEASE_MS if lease is None else duration_ms(lease, name="lease")
        return Worker(
            self._scope, self._coordination, workflows, concurrency, lease_ms, self._blobs, queues, steps_only
        )

    async def list(
        self, *, name: str | None = None, status: str | None = None, limit: int = LIST_MAX
    ) -> Sequence[ExecutionView]:
        """Executions: those that have not ended; with a status that is an end, those that ended so, the last ones first."""
        if status is not None and status not in STATUSES:
            raise InvalidInput(f"a status is one of {', '.join(STATUSES)}, not {status!r}")
        if type(limit) is not int or not 1 <= limit <= SCAN_MAX:
            raise InvalidInput(f"a listing shows between 1 and {SCAN_MAX:,} executions, not {limit!r}")
        names = [name] if name is not None else list(await self._names())
        found: list[ExecutionView] = []
        ended = status in (COMPLETED, CANCELLED, "failed")
        for each in names:
            prefix = WORKFLOWS.prefix("ended" if ended else "live", each)
            after: str | None = None
            while len(found) < limit:
                page = await self._scope.engine.scan(
                    self._scope.space, prefix, after=after, limit=min(limit, 1000), reverse=ended
                )
                ids = [entry.key[len(prefix) :] for entry in page.entries if not ended or decode(entry.value) == status]
                found += [
                    view
                    for view in await self._views([id.partition("/")[2] if ended else id for id in ids])
                    if status is None or view.status == status
                ]
                if not page.more:
                    break
                after = page.entries[-1].key
        return found[:limit]

    async def counts(self, name: str | None = None) -> dict[str, dict[str, int]]:
        """By workflow: how many are pending, running, paused, and how many have ever completed, failed, been cancelled."""
        prefix = TALLIES.prefix("status") if name is None else TALLIES.prefix("status", name)
        found: dict[str, dict[str, int]] = {}
        async for entry in every(self._scope, prefix):
            _, workflow, status = TALLIES.split(entry.key, 3)
            found.setdefault(workflow, {})[status] = integer(entry.value) or 0
        return found

    async def shared(self, key: str, default: Any = None) -> Any:
        """What workflows share under a key."""
        [entry] = await self._scope.engine.get(self._scope.space, [SHARED.key(key)])
        return default if entry is None else decode(entry.value)

    # --- ---

    async def _names(self) -> Sequence[str]:
        return list(await self.counts())

    async def _views(self, ids: Sequence[str]) -> Sequence[ExecutionView]:
        keys = [key for id in ids for key in (execution_key(id), meta_key(id))]
        entries = await self._scope.engine.get(self._scope.space, keys) if keys else []
        pairs = zip(entries[::2], entries[1::2], strict=True)
        return [
            _view(execution_of(one), meta_of(other)) for one, other in pairs if one is not None and other is not None
        ]

    def _queue_of(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(self._scope, self._coordination, queue_name(name))
        return self._queues[name]

    async def _value(self, value: msgspec.Raw, blob: BlobRef | None) -> Any:
        return decode(bytes(value) if blob is None else await self._blobs().read(blob))

    async def _shown(self, record: StepRecord, results: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {"status": record.status, "kind": record.kind, "attempts": record.attempts}
        for name in ("started_at", "completed_at", "until", "over_at"):
            if (at := getattr(record, name)) is not None:
                shown[name] = as_datetime(at)
        if record.error is not None:
            shown["error"] = msgspec.to_builtins(record.error)
        if record.child:
            shown["child" if record.kind == "child" else "task"] = record.child
        if record.away is not None and record.away.queue:
            shown["queue"] = record.away.queue
        if record.status == "completed" and results:
            shown["result"] = await self._value(record.result, record.blob)
        return shown


def _view(execution: Execution, meta: Meta) -> ExecutionView:
    def at(instant: int | None) -> datetime | None:
        return None if instant is None else as_datetime(instant)

    return ExecutionView(
        meta.id,
        meta.name,
        meta.version,
        execution.status,
        as_datetime(meta.created_at),
        as_datetime(execution.updated_at),
        at(execution.started_at),
        at(execution.ended_at),
        None if execution.error is None else msgspec.to_builtins(execution.error),
        tuple(_wait(wait) for wait in execution.waits),
        meta.parent,
        decode(bytes(meta.input)),
        meta.config,
    )


def _wait(wait: Wait) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(wait)
    if wait.until is not None:
        shown["until"] = as_datetime(wait.until)
    return shown


def _failed(execution: Execution) -> ExecutionFailed:
    if execution.status == CANCELLED:
        return ExecutionFailed(f"execution {execution.id!r} was cancelled", id=execution.id, status=CANCELLED)
    fault = execution.error
    kind, reason = ("", "") if fault is None else (fault.type, fault.message)
    return ExecutionFailed(
        f"execution {execution.id!r} failed: {kind}: {reason}",
        id=execution.id,
        kind=kind,
        reason=reason,
        step="" if fault is None else fault.step,
    )
