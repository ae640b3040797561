"""Tasks: functions and commands that are run as processes, and what is kept of them.

    handle = await space.tasks.submit(TaskSpec(function="pkg.mod:func", args=[3]))
    await handle.result()

A task is submitted in one commit (`task_submission.py`), taken and run by a manager whose every step is one commit (`task_ledger.py`),
and seen through its handle (`task_handle.py`). Here is what begins with the space: submitting, finding, listing, counting.

Names. `T<tid>.inbox` and `T<tid>.reserved` are a queue's, `holdfast.spawn.requests` is a queue. `T<tid>.outbox`, `T<tid>.ctrl_in` and
`T<tid>.ctrl_out`, `holdfast.tasks.log` and `holdfast.workers.registry` are views of what is kept under `tasks/`; `peek` shows each by its name.

Listing costs what is listed: tasks that live are in the indexes of their managers and of those that wait, tasks that have ended in
an index by the time their record may go, read from its end, page by page.

What is rarely needed is imported when it is: a command that asks for one state should not wait for pipelines and observers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from holdfast.clock import Duration
from holdfast.codec import decode, integer
from holdfast.engine import SCAN_MAX, Entry
from holdfast.errors import AccessDenied, Conflict, InvalidInput, NotFound
from holdfast.layers.coordination import Coordination
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_launch import ManagerInfo
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import (
    COUNTS,
    CTRL_IN,
    CTRL_OUT,
    ENDED,
    FINISHED,
    LOG,
    MANAGERS,
    OUTBOX,
    RUNNING,
    STATUSES,
    WAITING,
    Parts,
    TaskState,
    TaskStatus,
    readable_state,
    state_key,
    status_in,
)
from holdfast.layers.task_submission import TASKS_LOG, WORKERS_REGISTRY, submission
from holdfast.layers.tid import SHORT_DIGITS, check_tid, is_suffix, new_tid
from holdfast.layers.transact import Transaction, transact

if TYPE_CHECKING:
    from holdfast.layers.alerts import Alert, AlertRule
    from holdfast.layers.blobs import Blobs
    from holdfast.layers.observers import Seen, TaskOverview
    from holdfast.layers.pipelines import Pipelines
    from holdfast.layers.task_ledger import TaskLedger

TIDS_TRIED_MAX: Final = 3
"""Names that are tried for a new task; that one is taken already happens once in a long while."""
PAGE: Final = 500
LOOKED_AT_MAX: Final = 100_000
"""Tasks that are looked through for a short tid."""
Items = list
_VIEW: Final = re.compile(r"T([0-9]{19})\.(outbox|ctrl_in|ctrl_out)")
_VIEWS: Final = {"outbox": OUTBOX, "ctrl_in": CTRL_IN, "ctrl_out": CTRL_OUT}


class Tasks:
    """The tasks of a space, as `space.tasks`."""

    def __init__(self, scope: Scope, coordination: Coordination, blobs: Callable[[], Blobs]) -> None:
        self._scope = scope
        self._coordination = coordination
        self._blobs = blobs

    @property
    def pipelines(self) -> Pipelines:
        """Tasks whose results flow into the next ones."""
        from holdfast.layers.pipelines import Pipelines

        return Pipelines(self._scope, self._coordination, self._blobs)

    # --- submitting ---

    async def submit(
        self, spec: TaskSpec, message: Any = None, *, retry_of: str | None = None, request_id: str | None = None
    ) -> TaskHandle:
        """Submit a task, in one commit. `message` is the first argument of a function, and what a command reads.

        Repeated under the same `request_id`, it gives the task that was submitted the first time.
        """
        if request_id is not None:
            return await self._submit_once(spec, message, retry_of, request_id)
        for tried in range(1, TIDS_TRIED_MAX + 1):
            tid, parts = self._submission(spec, message, retry_of)
            try:
                await self._scope.commit(parts.operations, parts.conditions)
            except Conflict as conflict:
                if conflict.key != state_key(tid) or tried == TIDS_TRIED_MAX:
                    raise
            else:
                return self._handle(tid)
        raise AssertionError("unreachable")

    async def _submit_once(self, spec: TaskSpec, message: Any, retry_of: str | None, request_id: str) -> TaskHandle:
        from holdfast.layers.answers import once

        async def work(tx: Transaction) -> Any:
            async def make() -> str:
                tid, parts = self._submission(spec, message, retry_of)
                tx.conditions += parts.conditions
                tx.operations += parts.operations
                return tid

            return await once(tx, request_id, ["submit", spec, message, retry_of], make)

        return self._handle(str(await transact(lambda: Transaction(self._scope), work)))

    def _submission(self, spec: TaskSpec, message: Any, retry_of: str | None) -> tuple[str, Parts]:
        scope, now = self._scope, self._scope.clock.now_ms()
        tid = new_tid(now)
        return tid, submission(
            tid, spec, message, owner=scope.actor, now_ms=now, redaction=scope.redaction, retry_of=retry_of
        )

    async def retry(self, tid: str) -> TaskHandle:
        """A new task from the spec of one that has ended, linked to it by `retry_of`.

        Who may not read specs needs one in which nothing is redacted; otherwise submit the spec again.
        """
        state = await self._handle(tid).state()
        if not state.ended:
            raise Conflict(f"task {tid} is {state.status}; it is retried when it has ended", key=state_key(tid))
        spec, message = await self._spec_of(state), await self._message_of(state)
        return await self.submit(spec, message, retry_of=tid)

    async def _spec_of(self, state: TaskState) -> TaskSpec:
        handle = self._handle(state.tid)
        try:
            return await handle.spec()
        except AccessDenied as denied:
            if state.secrets:
                raise AccessDenied(
                    f"the spec of task {state.tid} has secrets that only orchestrators read; submit it again as a new task"
                ) from denied
        async for event in handle.events():
            told = event.fields.get("taskspec")
            if isinstance(told, dict):
                return TaskSpec.of(told)
        raise NotFound(f"the log of task {state.tid} does not tell its spec")

    async def _message_of(self, state: TaskState) -> Any:
        """What its message said, if it is still there: a failed one is among the dead letters."""
        if state.link is not None and state.link.input is not None:
            return decode(await self._blobs().read(state.link.input))
        from holdfast.layers.queues import Queue

        name = f"T{state.tid}.reserved"
        found = await Queue(self._scope, self._coordination, name).peek(1)
        return found[0].body if found else None

    # --- finding ---

    async def get(self, tid: str) -> TaskHandle:
        """The handle of a task, by its tid or its last ten digits, or fewer that mean one; NotFound if there is none."""
        if is_suffix(tid):
            return await self._find(tid)
        handle = self._handle(tid)
        await handle.state()
        return handle

    def _handle(self, tid: str) -> TaskHandle:
        return TaskHandle(self._scope, self._coordination, self._blobs, check_tid(tid))

    async def _find(self, suffix: str) -> TaskHandle:
        """The task whose tid ends like this. A short tid means one within all reason; what is shorter must mean one alone."""
        looked_at, found = 0, dict[str, None]()
        async for entry in self._entries((WAITING, RUNNING), (FINISHED,)):
            looked_at += 1
            if (tid := entry.key.rpartition("/")[2]).endswith(suffix):
                found[tid] = None
                if len(suffix) >= SHORT_DIGITS:
                    break
            if looked_at >= LOOKED_AT_MAX:
                break
        if len(found) > 1:
            some = ", ".join(list(found)[:3])
            raise InvalidInput(f"{len(found)} tasks end in {suffix}, such as {some}; give more digits")
        if found:
            return self._handle(next(iter(found)))
        if looked_at >= LOOKED_AT_MAX:
            raise NotFound(f"none of the last {LOOKED_AT_MAX:,} tasks ends in {suffix}; use the whole tid")
        raise NotFound(f"there is no task whose tid ends in {suffix}")

    async def list(
        self,
        *,
        status: TaskStatus | Iterable[TaskStatus] | None = None,
        pattern: str | None = None,
        limit: int = 1000,
    ) -> Items[TaskState]:
        """Tasks, those that live first and then those that have ended, the newest first; `pattern` is one of titles or tids.

        `status` is one or several; naming only such as live, or only such as have ended, looks at no others.
        """
        wanted = _statuses(status)
        if type(limit) is not int or not 0 < limit <= SCAN_MAX:
            raise InvalidInput(f"a list has between 1 and {SCAN_MAX:,} tasks, not {limit!r}")
        live = (WAITING, RUNNING) if wanted - ENDED else ()
        found: Items[TaskState] = []
        tids: Items[str] = []
        seen: set[str] = set()
        """One that moves on while the pages are read is found twice."""
        async for entry in self._entries(live, (FINISHED,) if wanted & ENDED else ()):
            tid = entry.key.rpartition("/")[2]
            if tid in seen or status_in(entry.tag) not in wanted or not _fits(pattern, tid, entry):
                continue
            seen.add(tid)
            tids.append(tid)
            if len(tids) == PAGE or len(found) + len(tids) == limit:
                found += await self._states(tids, wanted)
                tids = []
            if len(found) >= limit:
                break
        return (found + await self._states(tids, wanted))[:limit]

    async def _states(self, tids: Items[str], wanted: frozenset[TaskStatus]) -> Items[TaskState]:
        if not tids:
            return []
        entries = await self._scope.engine.get(self._scope.space, [state_key(tid) for tid in tids])
        states = [readable_state(entry) for entry in entries]
        return [state for state in states if state is not None and state.status in wanted]

    async def _entries(self, live: tuple[str, ...], ended: tuple[str, ...]) -> AsyncIterator[Entry]:
        for prefix in (*live, *ended):
            after, reverse = None, prefix in ended
            while True:
                page = await self._scope.engine.scan(
                    self._scope.space, prefix, after=after, limit=PAGE, reverse=reverse
                )
                for entry in page.entries:
                    yield entry
                if not page.more:
                    break
                after = page.entries[-1].key

    async def counts(self) -> dict[TaskStatus, int]:
        """How many tasks are in each state, those that have ended as long as they are kept. Maintained, not counted."""
        entries = await self._scope.engine.get(self._scope.space, [COUNTS + status for status in STATUSES])
        return {
            status: 0 if entry is None else integer(entry.value) or 0
            for status, entry in zip(STATUSES, entries, strict=True)
        }

    async def peek(self, name: str, limit: int = 10) -> Items[Any]:
        """What is to be seen under the name of a view: `T<tid>.outbox`, `.ctrl_in`, `.ctrl_out`, the log, the registry."""
        match = _VIEW.fullmatch(name)
        if match is not None:
            prefix = f"{_VIEWS[match[2]]}{match[1]}/"
        elif name in (TASKS_LOG, WORKERS_REGISTRY):
            prefix = LOG if name == TASKS_LOG else MANAGERS
        else:
            raise InvalidInput(f"{name!r:.60} is no view of tasks; see space.queue(name).peek() for queues")
        page = await self._scope.engine.scan(self._scope.space, prefix, limit=limit)
        return [decode(entry.value) for entry in page.entries]

    # --- managing ---

    async def managers(self) -> Items[ManagerInfo]:
        """The managers that live."""
        page = await self._scope.engine.scan(self._scope.space, MANAGERS, limit=SCAN_MAX)
        return [decode(entry.value, ManagerInfo) for entry in page.entries]

    async def managers_changed(self, cursor: str | None = None) -> None:
        """Return when a manager comes or goes, after this cursor."""
        async with aclosing(self._registry(cursor)) as changes:
            await anext(changes)

    async def _registry(self, cursor: str | None) -> AsyncGenerator[None, None]:
        async for _ in self._scope.engine.watch(self._scope.space, MANAGERS, cursor=cursor):
            yield

    def ledger(
        self, *, host: str | None = None, capacity: int = 1, lease: Duration | None = None, pid: int | None = None
    ) -> AbstractAsyncContextManager[TaskLedger]:
        """What a manager needs: registered as long as the block lasts. For orchestrators. The lease is 10 s unless given."""
        import socket

        from holdfast.layers.task_managers import LEASE_MS, registered

        return registered(
            self._scope,
            self._coordination.leases,
            self._blobs(),
            host=host or socket.gethostname(),
            capacity=capacity,
            lease=LEASE_MS / 1000 if lease is None else lease,
            pid=pid,
        )

    # --- watching all of them ---

    def observe(
        self,
        *,
        status: TaskStatus | Iterable[TaskStatus] | None = None,
        tags: Iterable[str] = (),
        pattern: str | None = None,
        sample: float = 1.0,
        cursor: str | None = None,
        live: bool = True,
    ) -> AsyncIterator[Seen]:
        """Events of tasks as they happen, from now or from a saved cursor on; selected, and sampled by task."""
        from holdfast.layers.observers import Selection, observe

        selection = Selection(None if status is None else _statuses(status), frozenset(tags), pattern, sample)
        return observe(self._scope, selection, cursor, live)

    async def overview(self, *, window: Duration = "5m") -> TaskOverview:
        """How many, how fast, how long: an aggregated view of the feed; `async for` follows it."""
        from holdfast.layers.observers import overview

        return await overview(self._scope, window)

    def alerts(self, *rules: AlertRule, cursor: str | None = None) -> AsyncIterator[Alert]:
        """Alerts as they are due, without end: rules on state, age and rate."""
        from holdfast.layers.alerts import alerts

        return alerts(self._scope, rules, cursor)


def _statuses(status: TaskStatus | Iterable[TaskStatus] | None) -> frozenset[TaskStatus]:
    if status is None:
        return frozenset(STATUSES)
    wanted = frozenset([status] if isinstance(status, str) else status)
    for each in wanted:
        if each not in STATUSES:
            raise InvalidInput(f"there is no status {each!r:.60}; there are {', '.join(STATUSES)}")
    return wanted


def _fits(pattern: str | None, tid: str, entry: Entry) -> bool:
    return pattern is None or fnmatchcase(tid, pattern) or fnmatchcase(str(decode(entry.value)), pattern)
