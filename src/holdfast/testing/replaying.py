"""Would changed code go the way that executions went which are under way? Recorded histories, replayed against it.

    history = await record_history(handle)                   # JSON: keep it beside the tests
    await assert_replays(approve, history)                   # NonDeterminism names what was recorded and what is called now

Nothing is done in a replay: what is recorded is given, and a step that is not is where it ends. That is right for an execution that
was still under way, and for one that had ended it is a difference; so is an end before everything recorded was called again, or
a failure where there was a result.
Only what the code's trunk calls is looked for at the end: which branch of a gather got how far is a matter of time.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import holdfast
from holdfast.clock import ManualClock
from holdfast.codec import decode, encode
from holdfast.engine import Increment, Operation, Push, Put
from holdfast.errors import InvalidInput, MigrationFailed, NonDeterminism
from holdfast.layers.blobs import Blobs
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.messages import Message
from holdfast.layers.queues import Queue, split
from holdfast.layers.scope import Scope
from holdfast.layers.task_handle import TaskHandle
from holdfast.layers.workflows.definitions import Definition, definition_of
from holdfast.layers.workflows.entries import (
    BEGUN,
    COMPLETED,
    RUNNING,
    Execution,
    Fault,
    LogEvent,
    Meta,
    StepRecord,
    data_prefix,
    execution_key,
    execution_of,
    items_prefix,
    log_prefix,
    meta_key,
    queue_name,
    steps_prefix,
    tag_of,
    tally_key,
)
from holdfast.layers.workflows.handles import ExecutionHandle
from holdfast.layers.workflows.journal import Journal
from holdfast.layers.workflows.reading import every, journal_of
from holdfast.layers.workflows.running import Run
from holdfast.layers.workflows.standing import Standing
from holdfast.testing.dying import Inline

FORMAT: Final = 1
BATCH: Final = 100
REPLAY_S_MAX: Final = 60
CALLS: Final = ("step", "item", "sleep", "signal", "child", "now")
END: Final = "its end"

History = dict[str, Any]
"""What is recorded of one execution, as JSON."""


async def record_history(handle: ExecutionHandle) -> History:
    """What was recorded of an execution, up to now; large results included."""
    scope, workflows, id = handle._scope, handle._workflows, handle.id
    entry, meta = await scope.engine.get(scope.space, [execution_key(id), meta_key(id)])
    if entry is None or meta is None:
        raise InvalidInput(f"there is no execution {id!r} to record")
    steps: dict[str, Any] = {}
    records, _ = await journal_of(scope, id)
    for path, record in records.items():
        if record.blob is not None:
            kept = msgspec.Raw(encode(await workflows._value(record.result, record.blob)))
            record = msgspec.structs.replace(record, result=kept, blob=None)
        steps[path] = decode(encode(record))
    return {
        "format": FORMAT,
        "meta": decode(meta.value),
        "status": execution_of(entry).status,
        "ended": execution_of(entry).ended,
        "steps": steps,
        "log": [decode(found.value) async for found in every(scope, log_prefix(id))],
        "data": {
            found.key[len(data_prefix(id)) :]: [found.tag, decode(found.value)]
            async for found in every(scope, data_prefix(id))
        },
        "items": {
            found.key[len(items_prefix(id)) :]: decode(found.value) async for found in every(scope, items_prefix(id))
        },
    }


async def assert_replays(workflow: Any, history: History) -> None:
    """Return if the code goes the way that was recorded; NonDeterminism, which names both, where it does not."""
    definition = definition_of(workflow)
    if history.get("format") != FORMAT:
        raise InvalidInput("this is no history that record_history has made")
    meta = decode(encode(history["meta"]), Meta)
    if meta.name != definition.name:
        raise InvalidInput(f"the history is one of workflow {meta.name!r}, and not of {definition.name!r}")
    recorded = {path: decode(encode(each), StepRecord) for path, each in history["steps"].items()}
    records = {path: each for path, each in recorded.items() if each.status != BEGUN}  # that is where it was
    log = [decode(encode(each), LogEvent) for each in history["log"]]
    clock = ManualClock(max([meta.created_at, *(event.at for event in log), *_times(records)]) + 1)
    with tempfile.TemporaryDirectory(prefix="holdfast-replay-") as folder:
        async with holdfast.open("memory:", clock=clock, background=False) as store:
            scope = store.space("replay", agent="replay")._scope
            host = _Host(scope, definition, Path(folder))
            await _load(scope, host.queue_of(meta.name), meta, records, log, history)
            try:
                await _replay(host, meta, records, ended=history["status"] if history["ended"] else "")
            finally:
                await host.coordination.close()


def _times(records: dict[str, StepRecord]) -> list[int]:
    return [at for record in records.values() for at in (record.until, record.completed_at) if at is not None]


async def _load(
    scope: Scope,
    queue: Queue,
    meta: Meta,
    records: dict[str, StepRecord],
    log: list[LogEvent],
    history: History,
) -> None:
    execution = Execution(meta.id, meta.name, RUNNING, meta.created_at, meta.created_at)
    putting, _ = split(queue.putting({"execution": meta.id}))
    operations: list[Operation] = [
        Put(meta_key(meta.id), encode(meta)),
        Put(execution_key(meta.id), encode(execution), tag=tag_of(RUNNING)),
        Increment(tally_key(meta.name, RUNNING), 1),
        *putting,
        *(Put(steps_prefix(meta.id) + path, encode(record)) for path, record in records.items()),
        *(Push(log_prefix(meta.id), encode(event)) for event in log),
        *(Put(data_prefix(meta.id) + key, encode(value), tag=tag) for key, (tag, value) in history["data"].items()),
        *(Put(items_prefix(meta.id) + key, encode(value)) for key, value in history.get("items", {}).items()),
    ]
    for start in range(0, len(operations), BATCH):
        await scope.commit(tuple(operations[start : start + BATCH]))


async def _replay(host: _Host, meta: Meta, records: dict[str, StepRecord], *, ended: str) -> None:
    message = await host.queue_of(meta.name).take()
    [entry] = await host.scope.engine.get(host.scope.space, [execution_key(meta.id)])
    assert entry is not None
    standing = Standing(host.scope, message, execution_of(entry), entry.version)
    run = _Replay(host, host.definition, message, meta, standing)
    running = asyncio.ensure_future(run.run(fresh=False, claim=None))
    beyond = asyncio.ensure_future(host.beyond.wait())
    try:
        async with asyncio.timeout(REPLAY_S_MAX):
            await asyncio.wait([running, beyond], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, beyond):
            task.cancel()
        await asyncio.gather(running, beyond, return_exceptions=True)
    if run.surprise is not None:
        raise run.surprise
    if not run.over_with and not ended:
        return  # it goes on from where it stood
    if not run.over_with:
        raise _different(meta.id, END, host.called or "something that is waited for")
    left = [path for path, record in records.items() if record.kind in CALLS and "/" not in path]
    missed = sorted((path for path in left if path not in run.visited), key=lambda path: records[path].position)
    if missed:
        raise _different(meta.id, missed[0], END)
    if ended == COMPLETED != run.over_with:
        raise _different(meta.id, f"{END}, {ended}", f"{END}, {run.over_with}")


def _different(id: str, recorded: str, called: str) -> NonDeterminism:
    return NonDeterminism(
        f"execution {id!r} came to {recorded!r} when it was recorded, and comes to {called!r} now",
        recorded=recorded,
        called=called,
    )


class _Replay(Run):
    """A run that remembers what it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.surprise: NonDeterminism | MigrationFailed | None = None
        self.over_with = ""
        self.visited: set[str] = set()
        before, self.journal = self.journal, _Visited(self.scope, self.meta.id, self.message.key, self.visited)
        for hook in ("opening", "opened", "on_failure"):
            setattr(self.journal, hook, getattr(before, hook))

    async def _pause(self, fault: Fault | None) -> None:
        raised = sys.exception()
        if isinstance(raised, NonDeterminism | MigrationFailed):
            self.surprise = raised
        await super()._pause(fault)

    async def _end(self, status: str, value: msgspec.Raw | None, fault: Fault | None) -> None:
        self.over_with = status if fault is None else f"{status} with {fault.type}: {fault.message}"
        await super()._end(status, value, fault)


class _Visited(Journal):
    """A journal that remembers which records were asked for."""

    def __init__(self, scope: Scope, id: str, right: str, visited: set[str]) -> None:
        super().__init__(scope, id, right)
        self._visited = visited

    def visit(self, path: str) -> StepRecord | None:
        self._visited.add(path)
        return super().visit(path)


class _Nothing(dict[str, Callable[..., Any]]):
    """Instead of every step there is: one that is asked for was not recorded."""

    def __init__(self, asked: Callable[[str], None]) -> None:
        super().__init__({"": lambda: None})
        self._asked = asked

    def get(self, name: str, default: Any = None) -> Any:
        async def never(*_: Any) -> None:
            self._asked(name)
            await asyncio.get_running_loop().create_future()

        return never


class _Host:
    """What a run needs of a worker, without one."""

    def __init__(self, scope: Scope, definition: Definition, folder: Path) -> None:
        self.scope = scope
        self.definition = definition
        self.threads = Inline()
        self.replaced: Mapping[str, Callable[..., Any]] = _Nothing(self._asked)
        shape = definition.shape
        self.state_types = {} if shape is None else {definition.name: shape.state_type({})}
        self.coordination = Coordination(Leases(scope.clock))
        self.beyond = asyncio.Event()
        self.called = ""
        self._folder = folder

    def _asked(self, name: str) -> None:
        self.called = name
        self.beyond.set()

    def queue_of(self, name: str) -> Queue:
        return Queue(self.scope, self.coordination, queue_name(name))

    def defined(self, name: str) -> Definition:
        return self.definition

    def blobs(self) -> Blobs:
        scope = self.scope
        return Blobs(scope.engine, scope.space, scope.actor, self._folder, scope.clock)

    def task(self, tid: str) -> TaskHandle:
        return TaskHandle(self.scope, self.coordination, self.blobs, tid)

    def make_room(self, message: Message) -> None:
        """There is room for one."""

    async def control(self, id: str, what: str) -> None:
        """There are no others."""
