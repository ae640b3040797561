"""The commits of a manager: each step of a task is one batch, made only while the manager's lease lives.

    async with space.tasks.ledger(capacity=8) as ledger:                # registered, with heartbeats, before it serves
        launch = await ledger.spawning(request)                         # a reserved message of holdfast.spawn.requests
        await ledger.running(launch, pid)                               # acknowledges the request: only now
        await ledger.output(launch, [("stdout", data)])
        await ledger.finished(launch, TaskOutcome("completed", return_code=0))

A manager is itself a task, without timeout: its tid is in the registry, `tasks/managers/<tid>`, an entry that expires when its
heartbeats stop, and every batch here is conditional on it. What it has is indexed under it, `tasks/running/<manager>/<tid>`.

How it fails. A manager that dies in between leaves a task that says spawning or running, and nothing else: no state is invented
for it. When its lease has ended, `left_by` lists what it had, and `adopt` takes a task over: on condition that the lease is
gone, with one attempt more, or, when its attempts are used up, failed, with its message among the dead letters. The request of a task that was
adopted may come again from the queue; it is acknowledged and nothing else, since the task has a manager that lives. A manager that was paused past
its lease is refused by the store (LeaseLost), whatever it tries to write. A commit that was cut off is looked at: either
the state is the one that was to be written, or OutcomeUnknown is raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, Literal

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Condition, Entry, Page, Present, Put
from holdfast.errors import Conflict, Damaged, InvalidInput, LeaseLost, NotFound, OutcomeUnknown
from holdfast.layers.blobs import Blobs
from holdfast.layers.leases import Lease
from holdfast.layers.scope import Scope
from holdfast.layers.task_control import ENDING, Control, answering, control_of
from holdfast.layers.task_launch import RESULT_UNSET, Launch, ManagerInfo, Request, TaskOutcome
from holdfast.layers.task_output import (
    PIECE_BYTES_MAX,
    StreamName,
    Written,
    chunk_number,
    chunk_put,
    final_output,
    kept_result,
    outbox_prefix,
    pieces,
)
from holdfast.layers.task_spec import TaskSpec, shown
from holdfast.layers.task_states import (
    CTRL_IN,
    MANAGERS,
    RUNNING,
    STOP_STATUS,
    Parts,
    StopReason,
    TaskState,
    TaskStatus,
    TaskStop,
    advance,
    ending,
    error_of,
    event,
    index_key,
    readable_state,
    spec_key,
    state_key,
    state_of,
)
from holdfast.layers.task_submission import Settling, message_key, requesting, reserving, settling
from holdfast.layers.tid import check_tid

FINAL_BYTES_MAX: Final = 8 * PIECE_BYTES_MAX
"""Of output in the commit that ends a task; what is before it goes ahead, in commits of its own."""
OUTPUT_BATCH_MAX: Final = 16
"""Envelopes in one commit."""
PENDING_MAX: Final = 1000
"""Commands to one task that are looked at together."""


class TaskLedger:
    """What one manager writes. Made by `space.tasks.ledger`."""

    def __init__(self, scope: Scope, info: ManagerInfo, lease: Lease, blobs: Blobs) -> None:
        self.info = info
        self.tid = info.tid
        self.lease = lease
        self.ends_as: TaskStatus = "completed"
        """What becomes of the manager as a task when it leaves in order."""
        self._scope = lease.guarding()
        self._clock = scope.clock
        self._blobs = blobs
        self._shown: dict[str, dict[str, Any]] = {}

    @property
    def lost(self) -> bool:
        """Whether its lease is known to have ended: it must stop, and end what it has launched."""
        return self.lease.lost.is_set()

    async def drain(self) -> None:
        """Say that it launches nothing more; what it has goes on."""
        info = msgspec.structs.replace(self.info, draining=True)
        await self._scope.commit((Put(MANAGERS + self.tid, encode(info), self.lease.ttl_ms),))
        self.info = info

    # --- control ---

    async def pending(self, tid: str) -> list[Control]:
        """The commands that wait for an answer of this task's manager."""
        page = await self._scan(f"{CTRL_IN}{check_tid(tid)}/", limit=PENDING_MAX)
        return [control_of(entry.key, entry.value, entry.owner) for entry in page.entries]

    async def controls(self, cursor: str | None = None) -> AsyncIterator[Control]:
        """Commands as they come, for all tasks: a manager answers those of its own. `pending` tells of those before."""
        async for commit in self._scope.engine.watch(self._scope.space, CTRL_IN, cursor=cursor):
            for change in commit.changes:
                if change.exists and change.op == "push":
                    value = change.value
                    if not value:  # too large for the feed
                        [entry] = await self._get([change.key])
                        if entry is None:
                            continue
                        value = entry.value
                    yield control_of(change.key, value, change.owner)

    async def answer(
        self, control: Control, status: Literal["ok", "rejected", "error"], message: str | None = None, **details: Any
    ) -> None:
        """Answer a command; Conflict when that was done already."""
        parts = answering(control, status, self._clock.now_ms(), message, **details)
        await self._scope.commit(parts.operations, parts.conditions)

    # --- taking tasks ---

    async def spawning(self, request: Request) -> Launch | None:
        """Take the task of a request. None when there is nothing to launch: the request is acknowledged then."""
        found = await self._read(check_tid(request.id))
        if found is None or found[0].ended or await self._is_held(found[0]):
            await self._drop(request)
            return None
        return await self._take(*found, request)

    async def adopt(self, tid: str, manager: str) -> Launch | None:
        """Take over what a dead manager left. None when it was settled: by this call, or by another manager before."""
        found = await self._read(check_tid(tid))
        if found is None or found[0].ended or found[0].manager != manager or await self._is_held(found[0]):
            return None
        if tid == manager:  # itself, as a task
            await self._settle(found[0], found[1], "the manager was lost: its lease ended", None)
            return None
        return await self._take(*found, None)

    async def dead(self) -> list[str]:
        """Managers whose lease has ended and which have left tasks. Costs as much as there are managers, not tasks."""
        found, after = [], None
        while page := (await self._scan(RUNNING, after=after, limit=1)).entries:
            manager = page[0].key[len(RUNNING) :].partition("/")[0]
            found.append(manager)
            after = f"{RUNNING}{manager}/\U0010ffff"
        leases = await self._get([MANAGERS + manager for manager in found])
        return [manager for manager, lease in zip(found, leases, strict=True) if lease is None]

    async def left_by(self, manager: str) -> AsyncIterator[str]:
        """The tasks a dead manager left, itself included; nothing as long as its lease lives."""
        if (await self._get([MANAGERS + check_tid(manager)]))[0] is not None:
            return
        prefix, after = f"{RUNNING}{manager}/", None
        while True:
            page = await self._scan(prefix, after=after, limit=SCAN_MAX // 10)
            for entry in page.entries:
                yield entry.key[len(prefix) :]
            if not page.more:
                return
            after = page.entries[-1].key

    async def _take(
        self, state: TaskState, version: int, spec: TaskSpec | None, request: Request | None
    ) -> Launch | None:
        conditions: tuple[Condition, ...] = ()
        if state.manager is not None and state.manager != self.tid:
            conditions = (Absent(MANAGERS + state.manager),)
        if spec is None:
            await self._settle(
                state, version, "its spec cannot be read, or is not its owner's", request, "failed", conditions
            )
            return None
        if (stop := await self._wanted_stop(state)) is not None:
            await self._settle(state, version, stop, request, "cancelled", conditions)
            return None
        if state.attempt >= spec.retry.attempts:
            why = f"its {state.attempt} attempts are used up; the last one was lost with its manager"
            await self._settle(state, version, why, request, "failed", conditions)
            return None
        [message] = await self._get([message_key(state)])
        if message is None:
            await self._settle(state, version, "its message is gone from the inbox", request, "failed", conditions)
            return None
        after = msgspec.structs.replace(
            state,
            status="spawning" if state.status == "created" else state.status,
            manager=self.tid,
            host=self.info.host,
            attempt=state.attempt + 1,
            pid=None,
            paused=False,
        )
        launch = Launch(spec, after, message.value, self._blobs, request)
        if state.link is not None and state.link.input is not None:
            try:
                launch.input = await self._blobs.read(state.link.input)
            except (NotFound, Damaged) as exc:
                await self._settle(state, version, f"its input cannot be read: {exc}", request, "failed", conditions)
                return None
        launch.written = Written(await self._chunks(state), after.attempt)
        parts = advance(state, version, after, self._spec(spec, after.tid), self._clock.now_ms())
        parts |= Parts(conditions, ()) | reserving(state, message.value, self.tid)
        if request is not None:
            parts |= Parts((Present(request.key),), ())
        launch.version = await self._commit(after, parts)
        return launch

    async def _wanted_stop(self, state: TaskState) -> str | None:
        """Why a task that waits to be begun again is not: somebody asked for its end meanwhile."""
        if state.stop is not None:
            return state.stop.reason
        commands = [control.command for control in await self.pending(state.tid)]
        return next((command.lower() for command in commands if command in ENDING), None)

    async def _is_held(self, state: TaskState) -> bool:
        """Whether a manager that lives has it."""
        if state.manager is None:
            return False
        return state.manager == self.tid or (await self._get([MANAGERS + state.manager]))[0] is not None

    async def _drop(self, request: Request) -> None:
        parts = Parts.of(request.acking())
        await self._scope.commit(parts.operations, parts.conditions)
        request.committed()

    # --- its life ---

    async def running(self, launch: Launch, pid: int) -> None:
        """It was launched; the request is acknowledged by the same commit."""
        now = self._clock.now_ms()
        after = msgspec.structs.replace(
            launch.state, status="running", pid=pid, started_at=launch.state.started_at or as_datetime(now)
        )
        parts = advance(launch.state, launch.version, after, self._spec(launch.spec, launch.tid), now)
        await self._move(launch, after, parts, acks=True)

    async def pausing(self, launch: Launch, paused: bool) -> None:
        """PAUSE or RESUME has been done: a flag, not a state."""
        after = msgspec.structs.replace(launch.state, paused=paused)
        await self._note(launch, after, "control", command="PAUSE" if paused else "RESUME")

    async def stopping(self, launch: Launch, reason: StopReason, by: str | None = None) -> None:
        """The task is going to be ended for this reason. The first one stays: Conflict when there is another."""
        if reason not in STOP_STATUS:
            raise InvalidInput(f"{reason!r:.40} is no reason to stop; there are {', '.join(STOP_STATUS)}")
        after = msgspec.structs.replace(launch.state, stop=TaskStop(reason, as_datetime(self._clock.now_ms()), by))
        await self._note(launch, after, "control", command=reason.upper(), by=by)

    async def output(self, launch: Launch, chunks: Iterable[tuple[StreamName, bytes]]) -> None:
        """What it printed, in order: into its spool, and, as long as the limit is not reached, to whoever listens."""
        live: list[tuple[StreamName, bytes]] = []
        for stream, data in chunks:
            await launch.spool.write(data)
            if launch.is_live and not launch.spool.spilled and (told := launch.split(stream, data)):
                live.append((stream, told))
        await self._send(launch, live)

    async def _send(self, launch: Launch, chunks: list[tuple[StreamName, bytes]]) -> None:
        parts = [(stream, piece) for stream, data in chunks for piece in pieces(data)]
        named = launch.spec.interactive
        for start in range(0, len(parts), OUTPUT_BATCH_MAX):
            group, written = parts[start : start + OUTPUT_BATCH_MAX], launch.written
            puts = tuple(
                chunk_put(
                    launch.tid,
                    written.chunks + place,
                    piece,
                    attempt=written.attempt,
                    stream=stream if named or stream == "stderr" else None,
                    text=named,
                )
                for place, (stream, piece) in enumerate(group)
            )
            await self._scope.commit(puts, (Present(index_key(launch.state)),))
            sent = sum(len(piece) for _, piece in group)
            launch.written = Written(written.chunks + len(group), written.attempt, written.size + sent)

    async def finished(self, launch: Launch, outcome: TaskOutcome) -> TaskState:
        """Result, output, what becomes of its message, state, event, index and counts: one commit. Gives the state.

        A task that failed and whose policy is requeue does not end while it has attempts left: it waits to be begun again.
        """
        state, spec = launch.state, launch.spec
        status: TaskStatus = outcome.status if state.stop is None else STOP_STATUS[state.stop.reason]
        is_stopped = state.stop is not None and state.stop.reason in ("stop", "cancel", "kill", "shutdown")
        policy = spec.reserved_policy_on_stop if is_stopped else spec.reserved_policy_on_error
        error = None if outcome.error is None else error_of(outcome.error)
        reason = outcome.reason or (None if error is None else f"{error.type}: {error.message}"[:500])
        if state.stop is not None:
            reason = reason or state.stop.reason
        again = outcome.lost or (status != "completed" and policy == "requeue")
        if again and not is_stopped and state.attempt < spec.retry.attempts:
            return await self._again(launch, reason or status)
        now = self._clock.now_ms()
        kept_ms, spilled_ms = self._kept(status)
        kept, parts = await self._final_output(launch, kept_ms, spilled_ms)
        result = None
        if outcome.result is not RESULT_UNSET and status == "completed":
            result, more = await kept_result(
                launch.tid,
                outcome.result,
                self._blobs,
                limit=spec.output_bytes_max,
                kept_ms=kept_ms,
                spilled_ms=spilled_ms,
            )
            parts |= more
        stop = state.stop
        if stop is None and outcome.stop is not None:
            stop = TaskStop(outcome.stop, as_datetime(now))
        after = ending(
            state,
            status,
            now,
            stop=stop,
            return_code=outcome.return_code,
            reason=None if status == "completed" else reason or status,
            error=error,
            peak_memory_mb=outcome.peak_memory_mb,
            cpu_seconds=outcome.cpu_seconds,
            max_fds=outcome.max_fds,
            output=kept,
            result=result,
        )
        how: Settling = "ack" if status == "completed" else policy
        if how == "requeue" and not is_stopped:
            how = "keep"  # there is no attempt left for which it could be
        parts |= settling(state, launch.raw, how, now_ms=now, actor=self._scope.actor, reason=after.reason)
        told = [
            event(launch.tid, "output_spilled", now, {"size": each.size, "path": self._blobs.path(each.spilled)})
            for each in (kept, result)
            if each is not None and each.spilled is not None
        ]
        if status != "completed":
            told.append(event(launch.tid, "message_failed", now, {"message_id": launch.tid, "error": after.reason}))
        parts |= Parts((), tuple(told))
        parts |= advance(state, launch.version, after, self._spec(spec, launch.tid), now, kept_ms=kept_ms)
        await self._move(launch, after, parts, acks=True)
        self._shown.pop(launch.tid, None)
        return after

    async def abandon(self, launch: Launch, reason: str) -> None:
        """End it as failed, without what it printed: its outcome cannot be written as it should be."""
        await self._settle(launch.state, launch.version, reason, None)

    async def _final_output(self, launch: Launch, kept_ms: int | None, spilled_ms: int | None) -> tuple[Any, Parts]:
        spec, content = launch.spec, await launch.spool.finish()
        rest = content
        if isinstance(content, bytes):
            rest = b"".join(launch.split(stream, b"", final=True) for stream in ("stdout", "stderr"))
            rest = rest if launch.is_live else content
            while len(rest) > FINAL_BYTES_MAX:
                await self._send(launch, [("stdout", rest[:FINAL_BYTES_MAX])])
                rest = rest[FINAL_BYTES_MAX:]
            if not content and not launch.is_live:
                return None, Parts((), ())
        return final_output(
            launch.tid,
            rest,
            launch.spool.preview,
            self._blobs,
            launch.written,
            interactive=spec.interactive,
            kept_ms=kept_ms,
            spilled_ms=spilled_ms,
        )

    async def _again(self, launch: Launch, reason: str) -> TaskState:
        """It failed and is begun again after a while, by whichever manager comes first."""
        state, now = launch.state, self._clock.now_ms()
        after = msgspec.structs.replace(state, manager=None, host=None, pid=None, paused=False, reason=reason)
        failed = event(launch.tid, "message_failed", now, {"message_id": launch.tid, "error": reason})
        parts = Parts((), (failed,))
        parts |= advance(state, launch.version, after, self._spec(launch.spec, launch.tid), now)
        parts |= settling(state, launch.raw, "requeue", now_ms=now, actor=self._scope.actor, reason=reason)
        delay_ms = launch.spec.retry.pause_ms(state.attempt)
        parts |= requesting(after, now_ms=now, delay_ms=delay_ms, by=self._scope.actor)
        await launch.spool.discard()
        await self._move(launch, after, parts, acks=True)
        return after

    async def _settle(
        self,
        state: TaskState,
        version: int,
        reason: str,
        request: Request | None,
        status: Literal["failed", "cancelled"] = "failed",
        conditions: tuple[Condition, ...] = (),
    ) -> None:
        """End a task that nobody runs, and that is not begun again."""
        now = self._clock.now_ms()
        found = await self._read(state.tid)
        spec = None if found is None else found[2]
        kept_ms, _ = self._kept(status)
        after = ending(state, status, now, reason=reason)
        told = event(state.tid, "message_failed", now, {"message_id": state.tid, "error": reason})
        parts = Parts(conditions, (told,)) | advance(
            state, version, after, self._spec(spec, state.tid), now, kept_ms=kept_ms
        )
        if state.manager is not None and state.manager != self.tid:
            parts |= Parts((Absent(MANAGERS + state.manager),), ())
        [message] = await self._get([message_key(state)])
        if message is not None:
            policy: Settling = spec.reserved_policy_on_stop if spec and status == "cancelled" else "keep"
            parts |= settling(state, message.value, policy, now_ms=now, actor=self._scope.actor, reason=reason)
        if (chunks := await self._chunks(state)) and state.tid != state.manager:
            parts |= Parts((), (chunk_put(state.tid, chunks, b"", final=True, attempt=state.attempt),))
        if request is not None:
            parts |= Parts.of(request.acking())
        await self._commit(after, parts)
        if request is not None:
            request.committed()

    # --- what they share ---

    def _kept(self, status: TaskStatus) -> tuple[int | None, int | None]:
        """For how long a task that ended so is kept, and for how long what it spilled is: a day longer."""
        kept_ms = self._scope.retention.ttl_ms("task", status)
        more_ms = self._scope.retention.ttl_ms("spilled_output")
        return kept_ms, None if kept_ms is None or more_ms is None else kept_ms + more_ms

    async def _note(self, launch: Launch, after: TaskState, name: str, **fields: Any) -> None:
        now = self._clock.now_ms()
        await self._move(launch, after, advance(launch.state, launch.version, after, {}, now, name=name, **fields))

    async def _move(self, launch: Launch, after: TaskState, parts: Parts, *, acks: bool = False) -> None:
        """Commit a step of a task; with `acks` its request is acknowledged by it, if that was not done before."""
        request = launch.request if acks else None
        acking = parts if request is None else parts | Parts.of(request.acking())
        try:
            launch.version = await self._commit(after, acking)
        except Conflict as conflict:
            if request is None or conflict.key != request.key:
                raise
            # Its reservation ended, though the manager's lease did not. Whoever has the request now sees that the task is
            # in these hands, and acknowledges it.
            launch.version = await self._commit(after, parts)
        launch.state = after
        if request is not None:
            request.committed()
            launch.request = None

    async def _commit(self, after: TaskState, parts: Parts) -> int:
        """Commit a step; when it was cut off, see what became of it."""
        try:
            return (await self._scope.commit(parts.operations, parts.conditions)).version
        except OutcomeUnknown:
            [entry] = await self._get([state_key(after.tid)])
            if entry is None or state_of(entry) != after:
                raise
            return entry.version
        except Conflict as conflict:
            if conflict.key == index_key(after) or conflict.key == state_key(after.tid):
                raise LeaseLost(f"nothing was written: task {after.tid} is not this manager's any more") from conflict
            raise

    async def _read(self, tid: str) -> tuple[TaskState, int, TaskSpec | None] | None:
        """A task's state and spec; no spec when it is none, or was written by somebody else than the state says."""
        entry, stored = await self._get([state_key(tid), spec_key(tid)])
        state = readable_state(entry)
        if entry is None or state is None:
            return None
        if stored is None or stored.owner != state.owner:
            return state, entry.version, None
        try:
            return state, entry.version, decode(stored.value, TaskSpec)
        except InvalidInput:
            return state, entry.version, None

    async def _chunks(self, state: TaskState) -> int:
        """How many envelopes earlier attempts have left."""
        if state.attempt == 0:
            return 0
        page = await self._scope.engine.scan(self._scope.space, outbox_prefix(state.tid), limit=1, reverse=True)
        return chunk_number(page.entries[0].key) + 1 if page.entries else 0

    def _spec(self, spec: TaskSpec | None, tid: str) -> dict[str, Any]:
        """The spec as the log shows it; worked out once per task."""
        if spec is None:
            return {}
        if tid not in self._shown:
            self._shown[tid] = shown(spec, self._scope.redaction)
        return self._shown[tid]

    async def _get(self, keys: list[str]) -> list[Entry | None]:
        return await self._scope.engine.get(self._scope.space, keys)

    async def _scan(self, prefix: str, *, after: str | None = None, limit: int) -> Page:
        return await self._scope.engine.scan(self._scope.space, prefix, after=after, limit=limit)
