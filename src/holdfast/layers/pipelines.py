"""Pipelines: stages that are tasks, whose results flow by commit. Any manager moves them on.

    handle = await space.tasks.pipelines.start(json.load(file))
    await handle.result()
    await space.tasks.pipelines.run()            # in every manager: moves on whatever has become ready

What has become ready is seen in the states of the pipeline's tasks. A step reads them, and writes in one commit where the pipeline
stands now and the tasks that begin: on condition that the pipeline is as it was read. So of several who do the same step one
succeeds, and whoever dies in between has done it or not; nothing is submitted twice and nothing forgotten. `run` begins with every
pipeline that is open, so what nobody was there for is made up for.

A result that is too large to be a message is put as a blob, which the next task's state names (`link.input`) and its manager reads;
it is kept as long as that task is.

How it fails. A task that does not complete, and has no retries left, fails its stage and the pipeline: nothing new is submitted, what
still runs ends by itself. So does a result of more than FLOW_BYTES_MAX, or one that is no list where there should be items.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import msgspec

from holdfast.clock import Duration, as_datetime, sleep_or, wait_ms
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Condition, Entry, Operation, Put, cursor_at
from holdfast.errors import Conflict, Error, InvalidInput, NotFound, TaskFailed, TaskPending
from holdfast.keys import check_name
from holdfast.layers.blobs import Blobs
from holdfast.layers.coordination import Coordination
from holdfast.layers.pipeline_states import (
    ITEMS_MAX,
    OPEN,
    PIPELINES,
    Part,
    PipelineSpec,
    PipelineState,
    StageState,
    encoded,
    pipeline_of,
    pipeline_tag,
)
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.task_output import holder_of
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import ENDED, STATES, Link, TaskState, state_key, state_of, status_in
from holdfast.layers.task_submission import MESSAGE_BYTES_MAX, submission
from holdfast.layers.tid import new_tid
from holdfast.layers.transact import Transaction, transact

SUBMITTED_MAX: Final = 10
"""Tasks that one step submits: a batch has room for that many. The next step submits the next."""
STEP_BYTES: Final = 8 * 1024 * 1024
"""When the messages of one step have so many, the next step goes on: a batch has room for twice that."""
FLOW_BYTES_MAX: Final = 64 * 1024 * 1024
"""What flows from the tasks of one stage to the next: whoever moves the pipeline on has it in memory."""
RETRY_MS: Final = 200
Items = list

log = logging.getLogger("holdfast.pipelines")


class Pipelines:
    """The pipelines of a space, as `space.tasks.pipelines`."""

    def __init__(self, scope: Scope, coordination: Coordination, blobs: Callable[[], Blobs]) -> None:
        self._scope = scope
        self._coordination = coordination
        self._blobs = blobs

    async def start(
        self, spec: PipelineSpec | Mapping[str, Any], input: Any = None, *, id: str | None = None
    ) -> PipelineHandle:
        """Begin a pipeline; `input` is the message of the stages that come first. An `id` that is there already is found again."""
        scope, now = self._scope, self._scope.clock.now_ms()
        spec = spec if isinstance(spec, PipelineSpec) else PipelineSpec.of(spec)
        id = new_tid(now) if id is None else check_name(id, "pipeline's id")
        state = PipelineState(
            id=id,
            owner=scope.actor,
            status="running",
            created_at=as_datetime(now),
            spec=spec,
            stages={stage.name: StageState() for stage in spec.stages},
            input=input,
        )
        tag = pipeline_tag("running")
        operations = Put(PIPELINES + id, encoded(state), tag=tag), Put(OPEN + id, encode(spec.name), tag=tag)
        try:
            await scope.commit(operations, (Absent(PIPELINES + id),))
        except Conflict as conflict:
            if conflict.key != PIPELINES + id or conflict.actual is None:
                raise
            found = pipeline_of(conflict.actual)
            if (found.spec, found.input) != (spec, decode(encode(input))):
                raise Conflict(
                    f"pipeline {id!r} exists already and is another one; choose another id", key=PIPELINES + id
                ) from None
        return self._handle(id)

    async def get(self, id: str) -> PipelineHandle:
        """The handle of a pipeline; NotFound if there is none."""
        handle = self._handle(check_name(id, "pipeline's id"))
        await handle.state()
        return handle

    async def list(self, *, limit: int = 1000) -> Items[PipelineState]:
        """Pipelines by id, those that ended and are kept included."""
        page = await self._scope.engine.scan(self._scope.space, PIPELINES, limit=min(limit, SCAN_MAX))
        return [pipeline_of(entry) for entry in page.entries]

    def _handle(self, id: str) -> PipelineHandle:
        return PipelineHandle(self._scope, self._coordination, self._blobs, id)

    # --- moving on: what managers do ---

    async def run(self) -> None:
        """Move every pipeline on as its tasks end, without end. For orchestrators; any number may do it at once."""
        clock = self._scope.clock
        while True:
            try:
                await self._follow()
            except Error as exc:
                log.warning("the pipelines of %s are followed anew: %s", self._scope.space, exc)
                await clock.sleep_until(clock.now_ms() + RETRY_MS)

    async def _follow(self) -> None:
        scope = self._scope
        found = await scope.engine.spaces(scope.space)
        cursor = cursor_at(found[0].revision if found else 0)
        await self.advance()
        async for commit in scope.engine.watch(scope.space, STATES, OPEN, cursor=cursor):
            moved: dict[str, None] = {}
            for change in commit.changes:
                if change.key.startswith(OPEN) and change.exists:
                    moved[change.key[len(OPEN) :]] = None
                elif change.key.startswith(STATES) and change.exists and (link := _link_of(change.value, change.tag)):
                    moved[link.pipeline] = None
            for id in moved:
                await self.advance(id)

    async def advance(self, id: str | None = None) -> int:
        """Move on what has become ready, of one pipeline or of all that are open; gives how many steps that were."""
        if id is None:
            return sum([await self.advance(each) async for each in self._open()])
        steps = 0
        while await self._step(id):
            steps += 1
        return steps

    async def _open(self) -> AsyncIterator[str]:
        after = None
        while True:
            page = await self._scope.engine.scan(self._scope.space, OPEN, after=after, limit=SCAN_MAX // 10)
            for entry in page.entries:
                yield entry.key[len(OPEN) :]
            if not page.more:
                return
            after = page.entries[-1].key

    async def _step(self, id: str) -> bool:
        """One step, if there is one: where it stands now, and what begins, in one commit."""

        async def work(tx: Transaction) -> bool:
            [entry] = await tx.read(PIPELINES + id)
            if entry is None or pipeline_of(entry).ended:
                return False
            before = pipeline_of(entry)
            step = _Step(self._scope, self._handle(id), before)
            after = await step.taken()
            if after == before:
                return False
            ttl = self._scope.retention.ttl_ms("task", after.status) if after.ended else None
            tx.put(Put(PIPELINES + id, encoded(after), ttl, pipeline_tag(after.status)))
            if after.ended:
                tx.delete(OPEN + id)
            tx.operations += step.operations
            tx.conditions += step.conditions
            return True

        return await transact(lambda: Transaction(self._scope), work)


class _Step:
    """What one step makes of a pipeline."""

    def __init__(self, scope: Scope, handle: PipelineHandle, state: PipelineState) -> None:
        self.operations: Items[Operation] = []
        self.conditions: Items[Condition] = []
        self._scope = scope
        self._handle = handle
        self._before = state
        self._stages = dict(state.stages)
        self._submitted = 0
        self._bytes = 0

    async def taken(self) -> PipelineState:
        """Where the pipeline stands after it."""
        before, spec = self._before, self._before.spec
        reason = None
        try:
            await self._look()
            for number in range(len(spec.stages)):
                if (reason := reason or self._failed(number)) is None:
                    await self._begin(number)
        except InvalidInput as exc:
            reason = str(exc)
        stages = self._stages
        after = msgspec.structs.replace(before, stages=stages, reason=reason)
        if reason is not None and not any(_live(stage) for stage in stages.values()):
            return self._ended(after, "failed")
        if all(stage.status == "completed" for stage in stages.values()):
            return self._ended(after, "completed")
        return after

    def _ended(self, state: PipelineState, status: Any) -> PipelineState:
        at = as_datetime(self._scope.clock.now_ms())
        return msgspec.structs.replace(state, status=status, completed_at=at)

    async def _look(self) -> None:
        """See what has become of the tasks that were not over."""
        keys = [
            state_key(part.tid) for stage in self._stages.values() for part in stage.parts if part.status not in ENDED
        ]
        entries = await self._scope.engine.get(self._scope.space, keys) if keys else []
        now = dict(zip(keys, entries, strict=True))
        for name, stage in self._stages.items():
            parts = tuple(_looked_at(part, now) for part in stage.parts)
            done = stage.items is not None and len(parts) == stage.items
            status = stage.status
            if done and all(part.status == "completed" for part in parts):
                status = "completed"
            self._stages[name] = msgspec.structs.replace(stage, parts=parts, status=status)

    def _failed(self, number: int) -> str | None:
        """Why a stage has failed, if it has; what may be tried again is, as far as there is room."""
        stage = self._before.spec.stages[number]
        state = self._stages[stage.name]
        for item, part in enumerate(state.parts):
            if part.status in ENDED and part.status != "completed" and part.try_ > stage.retries:
                self._stages[stage.name] = msgspec.structs.replace(state, status="failed")
                return f"stage {stage.name!r}: task {part.tid} (item {item}) is {part.status}, after {part.try_} tries"
        return None

    async def _begin(self, number: int) -> None:
        """Submit what a stage lacks."""
        stage = self._before.spec.stages[number]
        state = self._stages[stage.name]
        before = self._before.spec.before(number)
        if state.status in ("completed", "failed"):
            return
        if any(self._stages[name].status != "completed" for name in before):
            return
        if not self._lacks(state, stage.max_workers):
            return
        message = await self._message(before, stage.each)
        items = message if stage.each else [message]
        if stage.each and not isinstance(items, list):
            raise InvalidInput(f"stage {stage.name!r} is for each item of {stage.each!r}, whose result is no list")
        if len(items) > ITEMS_MAX:
            raise InvalidInput(f"stage {stage.name!r} has {len(items):,} items; the limit is {ITEMS_MAX:,}")
        parts = Items(state.parts)
        live = sum(part.status not in ENDED for part in parts)
        for item, part in enumerate(parts):
            if self._room(live, stage.max_workers) and part.status in ENDED and part.status != "completed":
                parts[item] = await self._submit(stage, items[item], item, part.try_ + 1)
                live += 1
        while len(parts) < len(items) and self._room(live, stage.max_workers):
            parts.append(await self._submit(stage, items[len(parts)], len(parts), 1))
            live += 1
        status = "completed" if not items else "running"
        self._stages[stage.name] = msgspec.structs.replace(state, status=status, items=len(items), parts=tuple(parts))

    def _lacks(self, state: StageState, workers: int) -> bool:
        live = sum(part.status not in ENDED for part in state.parts)
        wants = state.items is None or len(state.parts) < state.items
        again = any(part.status in ENDED and part.status != "completed" for part in state.parts)
        return (wants or again) and self._room(live, workers)

    def _room(self, live: int, workers: int) -> bool:
        return live < workers and self._submitted < SUBMITTED_MAX and self._bytes < STEP_BYTES

    async def _submit(self, stage: Any, message: Any, item: int, try_: int) -> Part:
        scope, now = self._scope, self._scope.clock.now_ms()
        tid = new_tid(now)
        spec = TaskSpec.of({"name": f"{self._before.spec.name}.{stage.name}"[:128], **stage.spec})
        link = Link(self._before.id, stage.name, item, try_)
        if len(body := encode(message)) > MESSAGE_BYTES_MAX:
            blobs = self._handle.blobs
            ref, message = await blobs.put(body), None
            link = msgspec.structs.replace(link, input=ref)
            conditions, operations = blobs.attach(ref, holder_of(tid, "inbox"))
            self.conditions += conditions
            self.operations += operations
        else:
            self._bytes += len(body)
        made = submission(tid, spec, message, owner=scope.actor, now_ms=now, redaction=scope.redaction, link=link)
        self.operations += made.operations
        self._submitted += 1
        return Part(tid, try_)

    async def _message(self, before: tuple[str, ...], each: str | None) -> Any:
        if each is not None:
            return await self._result(each)
        if not before:
            return self._before.input
        results = {name: await self._result(name) for name in before}
        return results[before[0]] if len(before) == 1 else results

    async def _result(self, name: str) -> Any:
        """What a stage gave, unless that is too much to flow."""
        keys = [state_key(part.tid) for part in self._stages[name].parts]
        entries = await self._scope.engine.get(self._scope.space, keys)
        states = [state_of(entry) for entry in entries if entry is not None]
        kept = [state.result or state.output for state in states]
        if (size := sum(each.size for each in kept if each is not None)) > FLOW_BYTES_MAX:
            raise InvalidInput(
                f"stage {name!r} gave {size:,} bytes; {FLOW_BYTES_MAX:,} can flow to the next: give a reference instead"
            )
        return await self._handle.stage_result(name, self._stages[name])


class PipelineHandle:
    """One pipeline. Made by `space.tasks.pipelines`."""

    def __init__(self, scope: Scope, coordination: Coordination, blobs: Callable[[], Blobs], id: str) -> None:
        self.id = id
        self._scope = scope
        self._coordination = coordination
        self._blobs = blobs

    @property
    def blobs(self) -> Blobs:
        """Where what is too large for a message is."""
        return self._blobs()

    async def state(self) -> PipelineState:
        """Where it stands: its status, that of each stage, and their tasks."""
        [entry] = await self._scope.engine.get(self._scope.space, [PIPELINES + self.id])
        if entry is None:
            raise NotFound(f"there is no pipeline {self.id!r}: it was never started here, or it ended long ago")
        return pipeline_of(entry)

    async def wait(self, wait: Duration | None = None) -> PipelineState:
        """Its state when it has ended; TaskPending when that takes longer."""
        clock, given = self._scope.clock, wait_ms(wait)
        deadline = None if given is None else clock.now_ms() + given
        async with self._coordination.awaiting(self._scope, PIPELINES).listening(PIPELINES + self.id) as changed:
            while not (state := await self.state()).ended:
                if given == 0 or not await sleep_or(clock, deadline, changed):
                    raise TaskPending(f"pipeline {self.id} is running and goes on; wait longer, or ask again")
                changed.clear()
        return state

    async def result(self, wait: Duration | None = None) -> Any:
        """The result of its last stage; TaskFailed when it did not complete."""
        state = await self.wait(wait)
        if state.status != "completed":
            raise TaskFailed(f"pipeline {self.id} {state.status}: {state.reason}")
        last = state.spec.stages[-1].name
        return await self.stage_result(last, state.stages[last])

    async def stage_result(self, name: str, stage: StageState) -> Any:
        """What a stage gave: its task's result, or the list of them where it is one of items."""
        results = []
        for part in stage.parts:
            results.append(_plain(await self._task(part.tid).result(wait=0)))
        spec = next(each for each in (await self.state()).spec.stages if each.name == name)
        return results if spec.each else results[0]

    async def cancel(self) -> PipelineState:
        """Submit nothing more, and stop what runs. For orchestrators."""

        async def work(tx: Transaction) -> PipelineState:
            [entry] = await tx.read(PIPELINES + self.id)
            if entry is None or (before := pipeline_of(entry)).ended:
                raise Conflict(f"pipeline {self.id} has ended already", key=PIPELINES + self.id)
            at = as_datetime(self._scope.clock.now_ms())
            after = msgspec.structs.replace(before, status="cancelled", completed_at=at, reason="cancelled")
            ttl = self._scope.retention.ttl_ms("task", "cancelled")
            tx.put(Put(PIPELINES + self.id, encoded(after), ttl, pipeline_tag("cancelled")))
            tx.delete(OPEN + self.id)
            return after

        state = await transact(lambda: Transaction(self._scope), work)
        live = [part.tid for stage in state.stages.values() for part in stage.parts if part.status not in ENDED]
        await asyncio.gather(*(self._stop(tid) for tid in live))
        return state

    async def _stop(self, tid: str) -> None:
        try:
            await self._task(tid).stop(wait=0)
        except (Conflict, NotFound, TaskPending) as exc:
            log.debug("task %s of pipeline %s: %s", tid, self.id, exc)

    def _task(self, tid: str) -> TaskHandle:
        return TaskHandle(self._scope, self._coordination, self._blobs, tid)

    def __repr__(self) -> str:
        return f"<PipelineHandle {self.id!r}>"


def _plain(result: Any) -> Any:
    """A result as a message: what a command printed is JSON if it can be read as such, or text."""
    if not isinstance(result, bytes):
        return result
    try:
        return decode(result)
    except Error:
        return result.decode("utf-8", errors="replace")


def _live(stage: StageState) -> bool:
    return any(part.status not in ENDED for part in stage.parts)


def _looked_at(part: Part, now: dict[str, Entry | None]) -> Part:
    key = state_key(part.tid)
    if key not in now:
        return part
    entry = now[key]
    # A task of which nothing is left ended so long ago that its record is gone: it is not known to have completed.
    return Part(part.tid, part.try_, "failed" if entry is None else state_of(entry).status)


def _link_of(value: bytes, tag: str) -> Link | None:
    """The pipeline of a task that has just ended."""
    try:
        if not value or status_in(tag) not in ENDED:
            return None
        return decode(value, TaskState).link
    except Error:
        return None
