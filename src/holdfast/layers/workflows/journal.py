"""What an execution has done, and the commits by which it does more.

A journal is read when a worker takes an execution: what each step gave, by path, and what the log says it wrote. While it runs, whatever
happens is staged as an effect (result, state, event: the operations that belong together) and sent with the others that were
staged in the same moment, as one batch. Every batch is conditional on the reservation: on the message that is the right to run this
execution standing under this worker's lease. A worker that lost it writes nothing any more.

No step begins before everything staged before it is durable (`settled`). The code between steps goes on meanwhile: it has no
effects of its own, so if it comes to its end, or has to wait, that is part of the same commit as the last step's result.

How it fails. A refused condition of one effect is that effect's, and the others go without it. Whatever else goes wrong ends this run of
the execution, not the execution: `Abandoned` goes through all its code, and whoever has the message next reads the journal anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from holdfast.codec import decode, encode
from holdfast.engine import OPERATIONS_MAX, Condition, Delete, Operation, Present, Push, Put, Receipt
from holdfast.errors import Conflict, LeaseLost, Unavailable
from holdfast.layers.scope import Scope
from holdfast.layers.workflows.earlier import Earlier
from holdfast.layers.workflows.entries import (
    BEGUN,
    RETRIED,
    STATE,
    Fault,
    LogEvent,
    StepRecord,
    data_prefix,
    execution_key,
    log_prefix,
    state_version,
    steps_prefix,
)
from holdfast.layers.workflows.past import Carried, Past
from holdfast.layers.workflows.reading import every, told_in
from holdfast.layers.workflows.rewinding import FORKED, MIGRATED, TYPED, Cut, taken_back
from holdfast.layers.workflows.state import View, Write

GATHERED_MAX: Final = OPERATIONS_MAX - 24
"""Operations of effects in one batch; the rest is for what begins or ends a run."""
GATHERED_BYTES_MAX: Final = 1_000_000
TOLD_BYTES_MAX: Final = 4_096
"""A step with a larger result has an entry of its own, so that the log is read quickly."""
BODY: Final = "~body"
"""Instead of a step's name: how much of a branch's own writes were committed without a step."""

Parts = tuple[list[Operation], list[Condition]]
Upgrade = Callable[[dict[str, Any], str, str], dict[str, Any]]
"""From a state, and the version it is of, to that of another version."""


def as_it_is(data: dict[str, Any], version: str, to: str) -> dict[str, Any]:
    """Where nobody reads a state of another version."""
    return data


class Abandoned(BaseException):
    """This run of the execution is over; the execution is not. Not an Exception, so that no step takes it for a failure."""


class Effect:
    """What belongs together in one commit."""

    __slots__ = ("conditions", "operations", "reply", "size")

    def __init__(
        self, operations: list[Operation], conditions: list[Condition], reply: asyncio.Future[Receipt] | None
    ) -> None:
        self.operations = operations
        self.conditions = conditions
        self.reply = reply
        self.size = 0
        for op in operations:
            if type(op) is Put or type(op) is Push:
                self.size += len(op.value)


class Journal:
    """The journal of one execution, in the hands of the worker that runs it."""

    def __init__(self, scope: Scope, id: str, right: str) -> None:
        self.scope = scope
        self.id = id
        self.right = right
        """The key of the reserved message."""
        self.records: dict[str, StepRecord] = {}
        self.placed: dict[tuple[str, int], str] = {}
        """Which step was called where: by branch and position."""
        self.begun: set[str] = set()
        """Paths of steps that are begun, as far as they have not ended."""
        self.last: dict[str, int] = {}
        """By branch: the last position that is recorded."""
        self.after: dict[str, int] = {}
        """By path: how many calls had failed before it was called, where some had."""
        self.view = View()
        self.opening: Callable[[], Parts] | None = None
        """What the first commit of this run adds: that it runs."""
        self.opened: Callable[[Receipt], None] | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._steps = steps_prefix(id)
        self._log = log_prefix(id)
        self.past = Past()
        """What was written under earlier versions of the state."""
        self.has_state = False
        self.left = False
        """Whether this run is being left to another: its code is cancelled, and calls and writes nothing any more."""
        self._written: dict[str, list[tuple[View, int, dict[str, Write]]]] = {}
        """By step: what it wrote, the number of that in the log, and the view that it belongs to."""
        self._carried: dict[str, list[Carried]] = {}
        self._below: dict[str, list[str]] = {}
        """By call or branch: where in it something was written, as the log tells."""
        self._staged: deque[Effect] = deque()
        self._closing: tuple[Callable[[], Parts], asyncio.Future[Receipt]] | None = None
        self._opens = False
        self._task: asyncio.Task[None] | None = None

    # --- reading ---

    async def load(self, upgrade: Upgrade = as_it_is) -> None:
        """Read what was done before; what was written under an earlier version of the state is shown as `upgrade` makes it."""
        events = [decode(entry.value, LogEvent) async for entry in every(self.scope, self._log)]
        for path, record in told_in(events).items():
            self._remember(path, record)
        async for entry in every(self.scope, self._steps):
            path, record = entry.key[len(self._steps) :], decode(entry.value, StepRecord)
            self._remember(path, record)
            if record.status == BEGUN:
                self.begun.add(path)
        prefix, generations = data_prefix(self.id), self.view.generations
        async for entry in every(self.scope, prefix):
            self.has_state = True
            if entry.tag:
                generations[entry.key[len(prefix) :]] = entry.tag, decode(entry.value, str)
        lost, version = taken_back(events), ""
        for place, event in enumerate(events):
            number = self.view.next()
            if event.event == RETRIED:
                self._take_back(Cut(frozenset(event.writes), event.body_writes))
            elif place in lost:
                continue
            elif event.event == MIGRATED:
                self.migrated(event, version, upgrade)
            else:
                self._recall(event, number)
            version = event.version or version
        self.view.settled = self.view.number
        self._index()

    def _index(self) -> None:
        self._below = {}
        for path in {*self._written, *self._carried}:
            around = path if path in self._carried else path.rpartition("/")[0]
            while around:
                self._below.setdefault(around, []).append(path)
                around = around.rpartition("/")[0]

    def _recall(self, event: LogEvent, number: int) -> None:
        """What happened, to be seen by the code when it comes there."""
        view = self.view
        if event.event == TYPED or (event.event == FORKED and not event.branch):  # from the beginning on
            for key, write in event.writes.items():
                view.apply(key, write, number)
            return
        if event.body:
            carried = Carried(event.body, number, event.path, event.body_writes)
            self._carried.setdefault(event.branch, []).append(carried)
            view.expect(event.branch, event.body_writes, number)
        if event.event == FORKED:  # what the code sees after the last step that was taken over
            self._written.setdefault(event.branch, []).append((view, number, event.writes))
        if event.writes:
            self._written.setdefault(event.path, []).append((view, number, event.writes))
            view.expect(event.path, event.writes, number)

    def migrated(self, event: LogEvent, version: str, upgrade: Upgrade) -> None:
        """From here on the state is of another version; what comes before is shown in that."""
        old, to = self.view, event.version
        old.settled = old.number
        self.view = View()
        self.view.number, self.view.generations = old.number, old.generations
        self.view.earlier = Earlier(old, lambda data: {**event.filled, **upgrade(data, version, to)}, event.writes)
        for path, parts in self.past.close(old, self._carried, event.places, self.records).items():
            self._written[path] = [*parts, *self._written.get(path, ())]
        self._carried = {}
        self._index()

    @property
    def version(self) -> str:
        """Of the state, as it is stored; "" when it has no type."""
        return state_version(self.records.get(STATE))

    def _take_back(self, cut: Cut) -> None:
        for path in cut.dropped:
            for view, _, writes in self._written.pop(path, ()):
                view.came_to(writes)
        for branch, carried in self._carried.items():
            for each in carried:
                if cut.takes_writes(branch, each.path, each.upto):
                    self.view.came_to(each.writes)
            self._carried[branch] = [each for each in carried if not cut.takes_writes(branch, each.path, each.upto)]

    def _remember(self, path: str, record: StepRecord) -> None:
        self.records[path] = record
        if record.position >= 0:
            branch = path.rpartition("/")[0]
            self.placed[branch, record.position] = path
            self.last[branch] = max(record.position, self.last.get(branch, -1))

    def end_within(self, path: str) -> list[Operation]:
        """What ends whatever was begun within a step, an attempt of which is over: in another one it begins anew."""
        found = [each for each in self.begun if each.startswith(f"{path}/")]
        self.begun.difference_update(found, (path,))
        found = [each for each in found if each in self.records and self.records[each].status == BEGUN]
        for each in found:
            del self.records[each]
        return [Delete(self._steps + each) for each in found]

    def visit(self, path: str) -> StepRecord | None:
        """The record of a step that the code has come to; what it wrote is in the state from here on."""
        if self._written and (writes := self._written.pop(path, None)) is not None:
            for view, number, written in writes:
                view.replay(written, number)
        record = self.records.get(path)
        if path in self._below and record is not None and record.status in ("completed", "failed", "skipped"):
            self.leave(path)
        return record

    def leave(self, *branches: str) -> None:
        """The code does not come any more to what was done below these: what was written there is in the state from here on."""
        found: list[tuple[View, int, dict[str, Write]]] = []
        for path in dict.fromkeys(each for branch in branches for each in (branch, *self._below.pop(branch, ()))):
            found += self._written.pop(path, ())
            found += [(self.view, each.number, each.writes) for each in self._carried.pop(path, ())]
        for view, number, writes in sorted(found, key=lambda each: each[1]):
            view.replay(writes, number)

    def carried(self, branch: str, ordinal: int, key: str, write: Write) -> bool:
        """Whether a write that a branch's own code makes was committed: then it is in the state from here on."""
        for each in self._carried.get(branch, ()):
            if each.upto >= ordinal:
                self.view.apply(key, write, each.number, new=self.view.came_to(each.writes, key))
                return True
        return False

    def went_on(self, branch: str, position: int, ordinals: dict[str, int]) -> bool:
        """Whether the code of a branch had made a further call than these. A map or gather is known by what is below it."""
        if self.last.get(branch, -1) >= position:
            return True
        begin = f"{branch}/" if branch else ""
        for path in self.records:
            if path.startswith(begin):
                name, _, ordinal = path[len(begin) :].partition("/")[0].rpartition("#")
                if name and ordinal.isdecimal() and int(ordinal) >= ordinals.get(name, 0):
                    return True
        return False

    # --- writing ---

    def record(self, path: str, record: StepRecord) -> Put:
        """Remember a step, and what writes it down."""
        record = self._in_order(path, record)
        self._remember(path, record)
        return Put(self._steps + path, encode(record))

    def ended(
        self,
        path: str,
        record: StepRecord,
        event: str,
        writes: dict[str, Write],
        branch: str,
        body_writes: dict[str, Write],
    ) -> list[Operation]:
        """Remember how a step ended, and what tells it: the log, and the record by itself where there is one already, or a large one."""
        body = record.body if body_writes else 0
        within = self.end_within(path) if self.begun else []
        if path in self.records or record.blob is not None or len(bytes(record.result)) > TOLD_BYTES_MAX:
            return [
                *within,
                self.record(path, record),
                self.event(event, path, record.error, writes, branch, body, body_writes),
            ]
        record = self._in_order(path, record)
        self._remember(path, record)
        return [*within, self.event(event, path, record.error, writes, branch, body, body_writes, record)]

    def _in_order(self, path: str, record: StepRecord) -> StepRecord:
        """With what it came after."""
        after = 0 if record.after else self.came_after(path)
        return msgspec.structs.replace(record, after=after) if after else record

    def came_after(self, path: str) -> int:
        """How many calls had failed before this one was made; an item of a map comes when its map does."""
        if not self.after:
            return 0
        return self.after.get(path) or self.after.get(path.rpartition("/")[0], 0)

    def event(
        self,
        event: str,
        path: str = "",
        error: Fault | None = None,
        writes: dict[str, Write] | None = None,
        branch: str = "",
        body: int = 0,
        body_writes: dict[str, Write] | None = None,
        record: StepRecord | None = None,
    ) -> Push:
        now = self.scope.clock.now_ms()
        told = LogEvent(now, event, path, "", error, writes or {}, branch, body, body_writes or {}, record=record)
        return Push(self._log, encode(told))

    def writing(self, writes: dict[str, Write]) -> list[Operation]:
        """State that is written: as operations, and in the view."""
        if not writes:
            return []
        operations = self.view.operations(self.id, writes)
        number = self.view.next()
        for key, write in writes.items():
            self.view.apply(key, write, number)
        return operations

    def hold(self, operations: Iterable[Operation]) -> None:
        """To go with the next commit that there is; nobody has to wait for it."""
        if self.failure is not None:
            raise Abandoned from self.failure
        self._staged.append(Effect(list(operations), [], None))

    def stage(self, operations: Iterable[Operation], conditions: Iterable[Condition] = ()) -> None:
        """To be committed with whatever else is staged; `settled` tells when."""
        self._stage(Effect(list(operations), list(conditions), None))

    async def commit(self, operations: Iterable[Operation], conditions: Iterable[Condition] = ()) -> Receipt:
        """The same, and wait for it; a refusal of these conditions is raised here."""
        reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._stage(Effect(list(operations), list(conditions), reply))
        return await self._answer(reply)

    def close(self, parts: Callable[[], Parts]) -> asyncio.Future[Receipt]:
        """What ends this run, to go with the last of what is staged. Made when it is sent."""
        reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._closing = (parts, reply)
        self._start()
        return reply

    async def _answer(self, reply: asyncio.Future[Receipt]) -> Receipt:
        try:
            return await reply
        except Conflict:
            raise
        except Exception as exc:
            raise Abandoned from exc

    def _stage(self, effect: Effect) -> None:
        if self.failure is not None:
            raise Abandoned from self.failure
        self._staged.append(effect)
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_all())

    def open(self) -> None:
        """Say that it runs, if no commit has said so yet."""
        if self.opening is not None and self.failure is None and self._closing is None:
            self._opens = True
            self._start()

    async def settled(self) -> None:
        """Return when everything staged so far is durable."""
        if self.failure is not None or self.left:
            raise Abandoned from self.failure
        if self._task is not None:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._staged.append(Effect([], [], waiting))  # type: ignore[arg-type]
            try:
                await waiting
            except Exception as exc:
                raise Abandoned from exc

    async def _send_all(self) -> None:
        try:
            while self._staged or self._closing is not None or self._opens:
                await self._send()
                await asyncio.sleep(0)  # who was answered may have more to send
        except asyncio.CancelledError:
            self._fail(Unavailable("the worker was stopped"))
            raise
        except Exception as exc:
            self._fail(exc)
        finally:
            self._task = None

    async def _send(self) -> None:
        group: list[Effect] = []
        operations = size = 0
        while self._staged:
            effect = self._staged[0]
            operations += len(effect.operations)
            size += effect.size
            if group and (operations > GATHERED_MAX or size > GATHERED_BYTES_MAX):
                break
            group.append(self._staged.popleft())
        closing = None
        if not self._staged and self._closing is not None:
            closing, self._closing = self._closing, None
        try:
            await self._send_group(group, closing)
        except BaseException:
            self._put_back(group, closing)  # to be told
            raise

    async def _send_group(
        self, group: list[Effect], closing: tuple[Callable[[], Parts], asyncio.Future[Receipt]] | None
    ) -> None:
        told, self._opens = self._opens, False
        opens = closing is None and self.opening is not None
        some = any(effect.operations or effect.conditions for effect in group)
        first: Parts = ([], [])
        if closing is not None:
            first = closing[0]()
        elif self.opening is not None and (some or told):
            first = self.opening()
        if not first[0] and not some:
            for effect in group:
                _reply(effect, Receipt(0, 0))
            return
        operations = [op for effect in group for op in effect.operations] + first[0]
        conditions: list[Condition] = [Present(self.right)]
        for effect in group:
            conditions += effect.conditions
        conditions += first[1]
        try:
            receipt = await self.scope.commit(tuple(operations), tuple(dict.fromkeys(conditions)))
        except Conflict as conflict:
            await self._refused(conflict, group, closing)
            return
        self.opening, opened = None, self.opened if opens else None
        if opened is not None:
            opened(receipt)
        places = 0
        for effect in group:
            count = len(effect.operations)
            if effect.reply is not None:
                _reply(effect, Receipt(receipt.version, receipt.at, receipt.results[places : places + count]))
            places += count
        if closing is not None and not closing[1].done():
            closing[1].set_result(receipt)

    async def _refused(
        self,
        conflict: Conflict,
        group: list[Effect],
        closing: tuple[Callable[[], Parts], asyncio.Future[Receipt]] | None,
    ) -> None:
        if conflict.key in (self.right, execution_key(self.id)):
            raise LeaseLost(f"execution {self.id!r} is not this worker's any more; nothing was written") from conflict
        if closing is not None:  # it goes without its end, and who wanted the end looks again
            if not closing[1].done():
                closing[1].set_exception(conflict)
                closing[1].exception()  # who wanted it may be gone
            if group:
                await self._send_group(group, None)
            return
        if len(group) == 1:
            effect = group[0]
            if effect.reply is None:
                raise conflict
            if not effect.reply.done():
                effect.reply.set_exception(conflict)
            return
        for effect in group:
            await self._send_group([effect], None)

    def _put_back(
        self, group: list[Effect], closing: tuple[Callable[[], Parts], asyncio.Future[Receipt]] | None
    ) -> None:
        self._staged.extendleft(reversed(group))
        if closing is not None:
            self._closing = closing

    def _fail(self, error: BaseException) -> None:
        """Nothing more is written in this run."""
        if self.failure is None:
            self.failure = error
        for effect in self._staged:
            if effect.reply is not None and not effect.reply.done():
                effect.reply.set_exception(self.failure)
                effect.reply.exception()
        self._staged.clear()
        if self._closing is not None and not self._closing[1].done():
            self._closing[1].set_exception(self.failure)
            self._closing[1].exception()  # whoever wants to know asks; nobody may
        self._closing = None
        self.on_failure()

    def lose(self, error: LeaseLost) -> None:
        """The reservation is known to be gone: nothing that is tried could be written."""
        self._fail(error)

    async def stop(self) -> None:
        """Send nothing more; what is under way may or may not be committed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(Unavailable("the worker was stopped"))


def _reply(effect: Effect, receipt: Receipt) -> None:
    if effect.reply is not None and not effect.reply.done():
        effect.reply.set_result(receipt)
