"""Schedules: executions that are started at the times of a cron expression, each once, by whichever worker is there.

    schedules/<id>     workflow, cron, zone, input, when it is due next, what it started last; until it is removed

    await space.workflows.schedules.add("0 7 * * 1-5", "research", timezone="America/New_York")

Workers fire the schedules of the workflows they serve (`firing.py`). The commit that starts an execution is the one that says when the
schedule is due next, on condition that nobody has; and the execution's id is made of the schedule's and the instant, so even a
schedule that was removed and made again starts nothing twice.

What was due while no worker was there is missed. `catch_up` says what becomes of it: "none" is started, "one", the last, or "all" of the
last CATCH_UP_MAX. What is due while it is paused is not missed: it does not happen.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import SCAN_MAX, Absent, Delete, Entry, Present, Put
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.keys import Subspace, check_name
from holdfast.layers.queue_entries import priority_element
from holdfast.layers.scope import Scope
from holdfast.layers.transact import Transaction, transact
from holdfast.layers.workflows.cron import Cron
from holdfast.layers.workflows.definitions import DEFINITION, Definition, check_label
from holdfast.layers.workflows.entries import raw

SCHEDULES: Final = Subspace("schedules")
ID_BYTES_MAX: Final = 128
CATCH_UP_MAX: Final = 100
"""Missed ones that are started at most, the last ones."""
LATE_MS: Final = 60_000
"""What is started so late is late; what was due before that is missed."""

CatchUp = Literal["none", "one", "all"]
CATCH_UPS: Final = ("none", "one", "all")


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule, as it is kept. Instants are milliseconds."""

    id: str
    workflow: str
    cron: str
    timezone: str
    created_at: int
    next_at: int
    input: msgspec.Raw = msgspec.Raw(b"null")
    priority: int = 0
    catch_up: CatchUp = "one"
    paused: bool = False
    last_at: int | None = None
    """When what it started last was due."""
    last_id: str = ""
    started: int = 0
    missed: int = 0
    """Instants for which nothing was started."""


class ScheduleView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule, as people see it."""

    id: str
    workflow: str
    cron: str
    timezone: str
    next_at: datetime
    input: Any = None
    priority: int = 0
    catch_up: CatchUp = "one"
    paused: bool = False
    last_at: datetime | None = None
    last_id: str = ""
    started: int = 0
    missed: int = 0


def schedule_key(id: str) -> str:
    return SCHEDULES.root + id


def schedule_in(entry: Entry) -> Schedule:
    return decode(entry.value, Schedule)


def execution_id(schedule: Schedule, due: int) -> str:
    """The id of what a schedule starts for an instant."""
    at = as_datetime(due).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{schedule.id}@{at}"


class Schedules:
    """The schedules of a space, as `space.workflows.schedules`. Orchestrators write them; agents may look."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def add(
        self,
        cron: str,
        workflow: Any,
        input: Any = None,
        *,
        timezone: str = "UTC",
        id: str | None = None,
        catch_up: CatchUp = "one",
        priority: int = 0,
    ) -> ScheduleView:
        """Start a workflow, or one of this name, at these times. The same again changes nothing; another of the same id is Conflict."""
        name = _name_of(workflow)
        label = check_schedule(name if id is None else id)
        if catch_up not in CATCH_UPS:
            raise InvalidInput(f"catch_up is one of {', '.join(CATCH_UPS)}, not {catch_up!r}")
        priority_element(priority)
        times, now = Cron(cron, timezone), self._scope.clock.now_ms()
        given = raw(input, f"the input of schedule {label!r}")
        made = Schedule(label, name, times.expression, timezone, now, times.after(now), given, priority, catch_up)
        key = schedule_key(label)
        try:
            await self._scope.commit((Put(key, encode(made)),), (Absent(key),))
        except Conflict as conflict:
            if conflict.actual is None:
                raise
            before = schedule_in(conflict.actual)
            if _terms(before) != _terms(made):
                raise Conflict(
                    f"there is another schedule {label!r}: {before.cron!r} ({before.timezone}) for {before.workflow!r}. "
                    "Remove it first, or give this one an id of its own",
                    key=key,
                    actual=conflict.actual,
                ) from conflict
            made = before
        return _view(made)

    async def list(self) -> Sequence[ScheduleView]:
        """All of them, by id."""
        page = await self._scope.engine.scan(self._scope.space, SCHEDULES.root, limit=SCAN_MAX)
        return [_view(schedule_in(entry)) for entry in page.entries]

    async def get(self, id: str) -> ScheduleView:
        """One of them; NotFound when there is none."""
        [entry] = await self._scope.engine.get(self._scope.space, [schedule_key(check_schedule(id))])
        if entry is None:
            raise _none(id)
        return _view(schedule_in(entry))

    async def remove(self, id: str) -> None:
        """It starts nothing more. What it has started goes on."""
        key = schedule_key(check_schedule(id))
        try:
            await self._scope.commit((Delete(key),), (Present(key),))
        except Conflict as conflict:
            raise _none(id) from conflict

    async def pause(self, id: str) -> None:
        """Start nothing until it is resumed."""
        await self._change(id, paused=True)

    async def resume(self, id: str) -> None:
        """Go on with the next time after now; what was due meanwhile is not made up for."""
        await self._change(id, paused=False)

    async def _change(self, id: str, *, paused: bool) -> None:
        key = schedule_key(check_schedule(id))

        async def work(transaction: Transaction) -> None:
            [entry] = await transaction.read(key)
            if entry is None:
                raise _none(id)
            schedule = schedule_in(entry)
            if schedule.paused != paused:
                due = schedule.next_at if paused else _cron(schedule).after(self._scope.clock.now_ms())
                changed = msgspec.structs.replace(schedule, paused=paused, next_at=due)
                transaction.operations.append(Put(key, encode(changed)))

        await transact(lambda: Transaction(self._scope), work)


def due_instants(schedule: Schedule, now: int) -> tuple[builtins.list[int], int]:
    """For which instants something is to be started now, and how many are passed over."""
    cron = _cron(schedule)
    wanted = CATCH_UP_MAX if schedule.catch_up == "all" else 1
    last = cron.last(schedule.next_at, now, wanted)
    if schedule.catch_up == "none" and last and last[-1] < now - LATE_MS:
        last = []
    return last, _count(cron, schedule.next_at, last[0] - 1 if last else now)


def next_after(schedule: Schedule, ms: int) -> int:
    return _cron(schedule).after(ms)


COUNTED_MAX: Final = 1_000
"""Missed instants that are counted one by one; that there were more is told as so many."""


def _count(cron: Cron, since: int, upto: int) -> int:
    return len(cron.last(since, upto, COUNTED_MAX)) if upto >= since else 0


def _cron(schedule: Schedule) -> Cron:
    return Cron(schedule.cron, schedule.timezone)


def check_schedule(id: str) -> str:
    """The id of a schedule: part of the ids of what it starts."""
    check_name(id, "schedule's id")
    if len(id.encode()) > ID_BYTES_MAX or not id.isprintable():
        raise InvalidInput(f"a schedule's id is printable text of at most {ID_BYTES_MAX} bytes, not {id!r:.60}")
    return id


def _name_of(workflow: Any) -> str:
    made = getattr(workflow, DEFINITION, workflow)
    if isinstance(made, Definition):
        return made.name
    if not isinstance(workflow, str):
        raise InvalidInput(f"{workflow!r:.60} is no workflow, and no name of one")
    return check_label(workflow, "workflow's name")


def _terms(schedule: Schedule) -> tuple[Any, ...]:
    return (
        schedule.workflow,
        schedule.cron,
        schedule.timezone,
        bytes(schedule.input),
        schedule.priority,
        schedule.catch_up,
    )


def _none(id: str) -> NotFound:
    return NotFound(f"there is no schedule {id!r}; `holdfast schedule list` shows those that there are")


def _view(schedule: Schedule) -> ScheduleView:
    return ScheduleView(
        schedule.id,
        schedule.workflow,
        schedule.cron,
        schedule.timezone,
        as_datetime(schedule.next_at),
        decode(bytes(schedule.input)),
        schedule.priority,
        schedule.catch_up,
        schedule.paused,
        None if schedule.last_at is None else as_datetime(schedule.last_at),
        schedule.last_id,
        schedule.started,
        schedule.missed,
    )
