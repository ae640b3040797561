"""A task as whoever submitted it, or looks at it, sees it: its state, result, output and log, and its control.

    handle = await space.tasks.submit(TaskSpec(function="pkg.mod:func", args=[3]))
    await handle.result()
    async for chunk in handle.stream(): ...
    await handle.stop()

Everything is read from the store; nobody asks the task. Waiting follows the feed and never polls. A command that only a manager can
do is given through `tasks/ctrl_in` and its answer awaited; one that ends a task which no manager has taken yet is done by the
store alone, in one commit that also withdraws the request to spawn it.

How it fails. A task that is not kept any more, or never was, is NotFound. A result of a task that did not complete raises
TaskFailed, with its state. A time to wait that is over raises TaskPending: the task goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple

from holdfast.clock import Clock, Duration, as_datetime, sleep_or, wait_ms
from holdfast.codec import decode
from holdfast.engine import Delete, Entry, Increment, cursor_at
from holdfast.errors import Compacted, Conflict, Damaged, NotFound, TaskFailed, TaskPending
from holdfast.layers.blobs import Blobs
from holdfast.layers.coordination import Coordination
from holdfast.layers.queue_entries import depth_key
from holdfast.layers.scope import Scope
from holdfast.layers.task_control import ENDING, Command, ControlAnswer, asking, writing
from holdfast.layers.task_output import (
    StreamName,
    chunk_key,
    chunk_number,
    data_of,
    outbox_prefix,
    read_result,
    read_spilled,
    ref_of,
)
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import (
    CTRL_OUT,
    ENDED,
    RESULTS,
    STATES,
    TaskEvent,
    TaskState,
    TaskStatus,
    advance,
    ending,
    event_of,
    log_prefix,
    spec_key,
    state_key,
    state_of,
    status_in,
)
from holdfast.layers.task_submission import SPAWN_REQUESTS, ready_key, request_key
from holdfast.layers.tid import check_tid
from holdfast.layers.transact import Transaction, transact

ANSWER_WAIT: Final = "30s"
PAGE: Final = 64
LOG_PAGE: Final = 500


class OutputChunk(NamedTuple):
    """Output, as far as it was printed at once. `number` is where `stream(after=…)` goes on."""

    number: int
    data: bytes
    final: bool
    stream: StreamName | None
    attempt: int


class TaskHandle:
    """One task. Made by `space.tasks`."""

    def __init__(self, scope: Scope, coordination: Coordination, blobs: Callable[[], Blobs], tid: str) -> None:
        self.tid = check_tid(tid)
        self._scope = scope
        self._coordination = coordination
        self._blobs = blobs
        self._key = state_key(tid)

    # --- what it is ---

    async def state(self) -> TaskState:
        """Everything that is known of it now: one look-up."""
        return state_of(await self._read())

    async def status(self) -> TaskStatus:
        """created, spawning, running, completed, failed, timeout, cancelled or killed."""
        return (await self.state()).status

    async def spec(self) -> TaskSpec:
        """What it is to do, secrets included. For orchestrators; everybody else finds it redacted in the events."""
        [entry] = await self._scope.engine.get(self._scope.space, [spec_key(self.tid)])
        if entry is None:
            raise self._not_found()
        return decode(entry.value, TaskSpec)

    async def wait(self, wait: Duration | None = None) -> TaskState:
        """Its state when it has ended; TaskPending when that takes longer."""
        state = state_of(await self._read())
        given = wait_ms(wait)
        clock = self._scope.clock
        deadline = None if given is None else clock.now_ms() + given
        if not state.ended:
            async with self._coordination.awaiting(self._scope, STATES).listening(self._key) as changed:
                while not (state := state_of(await self._read())).ended:
                    if given == 0 or not await sleep_or(clock, deadline, changed):
                        raise TaskPending(
                            f"task {self.tid} is {state.status} and goes on; wait longer, or ask again", state=state
                        )
                    changed.clear()
        return state

    async def result(self, wait: Duration | None = None) -> Any:
        """What the function returned, or what the command printed, as bytes, when it is done.

        `wait` is how long to wait for that: None as long as it takes. TaskFailed when it did not complete.
        """
        state = await self.wait(wait)
        if state.status != "completed":
            raise TaskFailed(f"task {self.tid} {_how(state)}: {state.reason or state.status}", state=state)
        if state.result is None:
            return await self.output()
        [entry] = await self._scope.engine.get(self._scope.space, [RESULTS + self.tid])
        if entry is None:
            raise self._not_found()
        return await read_result(self._blobs(), decode(entry.value, dict))

    async def output(self) -> bytes:
        """What the last attempt printed so far, as it was."""
        state = await self.state()
        parts = []
        async for entry in self._envelopes():
            told = decode(entry.value, dict)
            if told.get("attempt") != max(state.attempt, 1):
                continue
            if told.get("type") == "large_output":
                return b"".join([piece async for piece in read_spilled(self._blobs(), ref_of(told))])
            parts.append(data_of(told))
        return b"".join(parts)

    async def stream(self, *, after: int | None = None, live: bool = True) -> AsyncIterator[OutputChunk]:
        """What it prints, live and in order, from the beginning or behind a chunk that was seen; the last one is final.

        With `live=False` it ends when everything printed so far has been told.
        A task that did not stream gives its output when it ends. What was too large to be kept inline comes from its blob, in
        pieces of 1 MiB, all of them under the number of the last chunk.
        """
        number, read = 0, 0
        if after is not None:
            async for entry in self._envelopes(upto=after):
                told = decode(entry.value, dict)
                read = read + told.get("size", 0) if told.get("type") == "stream" else read
            number = after + 1
        async with aclosing(self._follow(number, live)) as envelopes:
            async for told in envelopes:
                number, attempt = int(told.get("chunk", 0)), int(told.get("attempt", 1))
                if told.get("type") == "large_output":
                    held: bytes | None = None
                    async for piece in read_spilled(self._blobs(), ref_of(told), skip=read):
                        if held is not None:
                            yield OutputChunk(number, held, False, None, attempt)
                        held = piece
                    yield OutputChunk(number, held or b"", True, None, attempt)
                    return
                data = data_of(told)
                read += len(data)
                yield OutputChunk(number, data, bool(told.get("final")), told.get("stream"), attempt)

    async def _follow(self, number: int, live: bool) -> AsyncGenerator[dict[str, Any], None]:
        """Envelopes from a number on, until the final one or the end of the task."""
        engine, space = self._scope.engine, self._scope.space
        while True:
            found = await engine.spaces(space)
            cursor = cursor_at(found[0].revision if found else 0)
            ended = state_of(await self._read()).ended
            async for entry in self._envelopes(after=number - 1):
                told = decode(entry.value, dict)
                yield told
                number = chunk_number(entry.key) + 1
                if told.get("final"):
                    return
            if ended or not live:
                return
            try:
                async for commit in engine.watch(space, outbox_prefix(self.tid), self._key, cursor=cursor):
                    for change in commit.changes:
                        if change.exists and change.key >= chunk_key(self.tid, number) and change.key != self._key:
                            break
                        if change.key == self._key and (not change.exists or _is_over(change.tag)):
                            break
                    else:
                        continue
                    break  # something new: read it in order
            except Compacted:
                continue

    async def envelopes(self, *, after: int = -1) -> AsyncIterator[dict[str, Any]]:
        """What its outbox holds so far, behind a chunk: output as it is kept, in order."""
        async for entry in self._envelopes(after):
            yield decode(entry.value, dict)

    async def _envelopes(self, after: int = -1, upto: int | None = None) -> AsyncIterator[Entry]:
        last = None if after < 0 else chunk_key(self.tid, after)
        while True:
            page = await self._scope.engine.scan(self._scope.space, outbox_prefix(self.tid), after=last, limit=PAGE)
            for entry in page.entries:
                if upto is not None and chunk_number(entry.key) > upto:
                    return
                yield entry
            if not page.more:
                return
            last = page.entries[-1].key

    async def events(self, *, after: str | None = None, live: bool = False) -> AsyncIterator[TaskEvent]:
        """Its log, from the beginning or behind an event that was seen; with `live` until the task has ended."""
        engine, space, prefix = self._scope.engine, self._scope.space, log_prefix(self.tid)
        last = None if after is None else prefix + after
        while True:
            found = await engine.spaces(space) if live else []
            ended = not live or state_of(await self._read()).ended
            while True:
                page = await engine.scan(space, prefix, after=last, limit=LOG_PAGE)
                for entry in page.entries:
                    yield event_of(entry.key, entry.value, entry.tag)
                    last = entry.key
                if not page.more:
                    break
            if ended:
                return
            cursor = cursor_at(found[0].revision if found else 0)
            with suppress(Compacted):
                async for commit in engine.watch(space, prefix, self._key, cursor=cursor):
                    if any(change.key == self._key or change.key > (last or "") for change in commit.changes):
                        break  # something new: read it in order

    # --- control ---

    async def stop(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """End it, politely first: cancelled. A task that has not begun is cancelled at once."""
        return await self.control("STOP", wait=wait)

    async def cancel(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """What `stop` does, by its other name."""
        return await self.control("CANCEL", wait=wait)

    async def kill(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """End it at once: killed; cancelled if it has not begun."""
        return await self.control("KILL", wait=wait)

    async def pause(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """Let it rest: none of its processes runs until `resume`."""
        return await self.control("PAUSE", wait=wait)

    async def resume(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """Let it go on."""
        return await self.control("RESUME", wait=wait)

    async def ping(self, *, wait: Duration | None = ANSWER_WAIT) -> ControlAnswer:
        """Whether its manager answers."""
        return await self.control("PING", wait=wait)

    async def write(
        self, data: bytes | str, *, eof: bool = False, wait: Duration | None = ANSWER_WAIT
    ) -> ControlAnswer:
        """Type into an interactive task; `eof` closes its standard input."""
        raw = data.encode() if isinstance(data, str) else data
        return await self.control("WRITE", wait=wait, **writing(raw, eof))

    async def control(self, command: Command, *, wait: Duration | None = ANSWER_WAIT, **fields: Any) -> ControlAnswer:
        """Give a command and await its answer. Conflict when the task has ended; TaskPending when no answer comes in time."""
        if command in ENDING and (answer := await self._cancel_unbegun(command)) is not None:
            return answer
        state = await self.state()
        if state.ended:
            raise self._over(state)
        push = asking(self.tid, command, self._scope.actor, self._scope.clock.now_ms(), **fields)
        receipt = await self._scope.commit((push,))
        id = str(receipt.results[0]).rpartition("/")[2]
        return await self._answer(id, command, wait)

    async def _answer(self, id: str, command: str, wait: Duration | None) -> ControlAnswer:
        key, clock, given = f"{CTRL_OUT}{self.tid}/{id}", self._scope.clock, wait_ms(wait)
        deadline = None if given is None else clock.now_ms() + given
        awaiting = self._coordination.awaiting
        async with (
            awaiting(self._scope, CTRL_OUT).listening(key) as changed,
            awaiting(self._scope, STATES).listening(self._key) as moved,
        ):
            while True:
                answer, entry = await self._scope.engine.get(self._scope.space, [key, self._key])
                if answer is not None:
                    return decode(answer.value, ControlAnswer)
                if entry is None or (state := state_of(entry)).ended:
                    return _ended(command, None if entry is None else state)
                if given == 0 or not await _either(clock, deadline, changed, moved):
                    raise TaskPending(
                        f"task {self.tid} was told to {command}, and no manager has answered yet; the command stays",
                        state=state,
                    )
                changed.clear()
                moved.clear()

    async def _cancel_unbegun(self, command: Command) -> ControlAnswer | None:
        """End a task that no manager has taken: the store alone does it. None when one has."""

        async def work(tx: Transaction) -> ControlAnswer | None:
            [entry] = await tx.read(self._key)
            if entry is None:
                raise self._not_found()
            state = state_of(entry)
            if state.ended:
                raise self._over(state)
            if state.status != "created":
                return None
            request, message = await tx.read(request_key(state), ready_key(state))
            now = self._scope.clock.now_ms()
            after = ending(state, "cancelled", now, reason=command.lower())
            told = await self._shown_spec()
            kept_ms = self._scope.retention.ttl_ms("task", "cancelled")
            tx.operations += advance(state, entry.version, after, told, now, kept_ms=kept_ms).operations
            if request is not None:  # otherwise a manager has it in its hands, and will see that the task is over
                tx.operations += [Delete(request.key), Increment(depth_key(SPAWN_REQUESTS, "ready"), -1)]
            if message is not None:
                tx.operations.append(Delete(message.key))
            return _ended(command, after)

        return await transact(lambda: Transaction(self._scope), work)

    async def _shown_spec(self) -> dict[str, Any]:
        """The redacted spec, as the first event has it: the full one is not everybody's to read."""
        page = await self._scope.engine.scan(self._scope.space, log_prefix(self.tid), limit=1)
        for entry in page.entries:
            told = event_of(entry.key, entry.value, entry.tag).fields.get("taskspec")
            if isinstance(told, dict):
                return told
        raise Damaged(f"the log of task {self.tid} does not begin with its spec")

    # --- what they share ---

    async def _read(self) -> Entry:
        [entry] = await self._scope.engine.get(self._scope.space, [self._key])
        if entry is None:
            raise self._not_found()
        return entry

    def _not_found(self) -> NotFound:
        return NotFound(
            f"there is no task {self.tid}: it was never submitted to this space, or it ended long ago and is not kept any more"
        )

    def _over(self, state: TaskState) -> Conflict:
        return Conflict(f"task {self.tid} is {state.status} already, and that is final", key=self._key)

    def __repr__(self) -> str:
        return f"<TaskHandle {self.tid}>"


async def _either(clock: Clock, deadline: int | None, *events: asyncio.Event) -> bool:
    """Wait until one of the events is set, or the time has come."""
    any_set = asyncio.Event()

    async def relay(event: asyncio.Event) -> None:
        await event.wait()
        any_set.set()

    relays = [asyncio.ensure_future(relay(event)) for event in events]
    try:
        return await sleep_or(clock, deadline, any_set)
    finally:
        for each in relays:
            each.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


def _ended(command: str, state: TaskState | None) -> ControlAnswer:
    """The answer that the end of a task is."""
    at = as_datetime(0) if state is None or state.completed_at is None else state.completed_at
    done = state is not None and command in ENDING and state.status in ("cancelled", "killed")
    what = "gone" if state is None else state.status
    return ControlAnswer(command, "ok" if done else "rejected", at, f"the task is {what}", {"state": what})


def _is_over(tag: str) -> bool:
    return status_in(tag) in ENDED


def _how(state: TaskState) -> str:
    ways = {"failed": "failed", "timeout": "took too long", "cancelled": "was cancelled", "killed": "was killed"}
    return ways.get(state.status, state.status)
