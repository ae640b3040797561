"""What is kept of an execution, and under which keys.

    workflows/meta/<id>                  what it is: name, version, input, parent; written once, at the start
    workflows/executions/<id>            how it stands: status, times, error or result, what it waits for
    workflows/live/<name>/<id>           there as long as it has not ended: what a listing reads
    workflows/ended/<name>/<13 digits>/<id>   when it ended, as long as it is kept
    workflows/line/<name>/<key>/<pp>/<19 digits>  one that waits for another to end (`limits.py`)
    journal/log/<id>/<19 digits>         what happened, in order, with the state that was written; the end of a step has its record
    journal/steps/<id>/<path>            one step that the log does not tell: it waits, was tried before, is begun, has a large result, or is done
                                         elsewhere: status, attempts, times, result or error; `~state` has the version of a typed state,
                                         `~tolerated` below a map says that enough of it succeeded
    journal/data/<id>/<key>              the state, as it is now; a list or set is named here and kept in chunks in
    journal/items/<id>/<key>/<generation>/<19 digits>
    journal/mail/<id>/<name>/<19 digits> what its worker is to do (`~cancel`, `~pause`, `~resume`), how its children ended, and steps done elsewhere
    journal/errands/<tid>                which step a task is the work of, until the execution was told of its end
    signals/<id>/<name>/<19 digits>      what agents sent to it, and was not taken yet
    tallies/inbox/<id>                   how much was ever sent to it: what parking is conditional on
    tallies/status/<name>/<status>       how many are pending, running, paused; how many have completed, failed, been cancelled
    tallies/slots/<name>/<key>           minus the number of those that are begun, where that is limited
    shared/<key>                         what workflows share

A path names a step by its name and its ordinal within its parent: `fetch#0`, `check#0/17` (an item of a map), `gather#0/1/pay#0` (in a
branch). All but `workflows/executions/<id>` is read through it: when that has expired, `collecting.py` removes the rest.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from traceback import StackSummary, walk_tb
from typing import Any, Final

import msgspec

import holdfast
from holdfast.codec import decode, encode
from holdfast.engine import Entry
from holdfast.errors import InvalidInput, StepFailed, TimedOut
from holdfast.keys import Subspace, check_name, escape
from holdfast.layers.batch import type_tag
from holdfast.layers.blobs import BlobRef

WORKFLOWS: Final = Subspace("workflows")
JOURNAL: Final = Subspace("journal")
SIGNALS: Final = Subspace("signals")
TALLIES: Final = Subspace("tallies")
SHARED: Final = Subspace("shared")

META: Final = WORKFLOWS.prefix("meta")
EXECUTIONS: Final = WORKFLOWS.prefix("executions")
LIVE: Final = WORKFLOWS.prefix("live")
ENDED: Final = WORKFLOWS.prefix("ended")
INBOX: Final = TALLIES.prefix("inbox")

TYPE: Final = "workflow_execution"
ID_BYTES_MAX: Final = 256
FAULT_CHARS_MAX: Final = 2_000
TRACE_MAX: Final = 8
"""Calls that are told of where something was raised."""
TRACE_CHARS_MAX: Final = 300
_OURS: Final = os.path.dirname(holdfast.__file__) + os.sep
RESULT_BYTES_MAX: Final = 10_000_000
"""A larger result is refused: keep such data as a blob, and return its reference."""
INLINE_BYTES_MAX: Final = 60_000
"""A larger result becomes a blob: the feed shows values up to about this size."""

PENDING: Final = "pending"
RUNNING: Final = "running"
PAUSED: Final = "paused"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
ENDINGS: Final = (COMPLETED, FAILED, CANCELLED)
STATUSES: Final = (PENDING, RUNNING, PAUSED, *ENDINGS)

CANCEL: Final = "~cancel"
PAUSE: Final = "~pause"
RESUME: Final = "~resume"
CHILD: Final = "~child:"
"""Before the path of the step that started it: how a child tells its end."""
STEP: Final = "~step:"
"""Before the path of a step that is done elsewhere: how that went."""
STATE: Final = "~state"
"""Instead of a step's name: of which version its state is."""
TOLERATED: Final = "~tolerated"
"""Below a map, instead of an item's number: that enough of its items succeeded, although others had failed."""
BEGUN: Final = "begun"
"""The status of a step that is under way, and waits; of others that are, nothing is recorded."""
RETRIED: Final = "retried"
"""The event of the log that takes back what it names."""
ERRANDS: Final = JOURNAL.prefix("errands")


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something failed."""

    type: str
    message: str
    step: str = ""
    trace: str = ""
    """Where in the workflow's and the step's own code, a line for each call, the innermost last."""


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that an execution waits for."""

    kind: str
    """sleep, signal, child, retry, queue, task, resume, rewind, or slot."""
    path: str = ""
    name: str = ""
    """Of the signal or the queue, or the child's id, or the task's."""
    until: int | None = None


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an execution is; it never changes."""

    id: str
    name: str
    version: str
    created_at: int
    input: msgspec.Raw = msgspec.Raw(b"null")
    config: dict[str, Any] = {}
    priority: int = 0
    slot: str | None = None
    """The key whose limit it counts against."""
    parent: str = ""
    parent_path: str = ""
    detached: bool = False


class Execution(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an execution stands."""

    id: str
    name: str
    status: str
    updated_at: int
    started_at: int | None = None
    ended_at: int | None = None
    error: Fault | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")
    blob: BlobRef | None = None
    message: str = ""
    """The id of the message that is the right to run it."""
    rests: str = ""
    """The key under which that message was left."""
    waits: tuple[Wait, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in ENDINGS


class Away(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step that is done elsewhere is, written down for whoever does it."""

    message: str
    """The id of the message, with the name of who chose it; or the task's tid. Nobody else's word counts."""
    queue: str = ""
    step: str = ""
    """Of a class: the step's name."""
    function: str = ""
    """Otherwise `module:function`."""
    args: msgspec.Raw = msgspec.Raw(b"[]")
    timeout_ms: int | None = None
    branch: str = ""


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one step."""

    status: str
    """completed, failed, skipped, retrying, waiting, begun."""
    position: int = -1
    """Where in its parent it was called."""
    kind: str = "step"
    started_at: int | None = None
    completed_at: int | None = None
    attempts: int = 1
    result: msgspec.Raw = msgspec.Raw(b"null")
    blob: BlobRef | None = None
    error: Fault | None = None
    until: int | None = None
    child: str = ""
    body: int = 0
    """How many writes of the code around it, in the same branch, were committed up to it."""
    away: Away | None = None
    turn: int = 0
    """Of a wait for a signal: which of the execution's waits it is, in the order in which they began (`turns.py`)."""
    after: int = 0
    """How many calls had failed, as its branch's code had been told, when that made this one."""
    over_at: int | None = None
    """Of one that is begun: when its time is over (`deadlines.py`)."""


class LogEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to an execution."""

    at: int
    event: str
    path: str = ""
    by: str = ""
    error: Fault | None = None
    writes: dict[str, Any] = {}
    """Of the step, by key: what was done to the state."""
    branch: str = ""
    body: int = 0
    """So many writes of this branch's code are in the state from here on."""
    body_writes: dict[str, Any] = {}
    version: str = ""
    """Of the state, from here on, where it has a type."""
    filled: dict[str, Any] = {}
    """Of a migration: fields that are new, and got their default."""
    places: dict[str, tuple[int, int]] = {}
    """Of a migration, by branch: the last call that had been made, and how many of the branch's own writes were committed up to it."""
    record: StepRecord | None = None
    """Of the step that this tells the end of, unless it is kept as an entry of its own."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a child ended, as it is told to its parent."""

    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    blob: BlobRef | None = None
    error: Fault | None = None
    child: str = ""
    """Its id: a step that was taken back may have started another."""


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a step that was done elsewhere went, as its execution is told."""

    message: str
    ok: bool = True
    result: msgspec.Raw = msgspec.Raw(b"null")
    blob: BlobRef | None = None
    error: Fault | None = None
    kinds: tuple[str, ...] = ()
    """The classes of what was raised, which is what retries ask for."""
    final: bool = False
    """Another attempt would fail as well."""
    writes: dict[str, Any] = {}
    state: str = ""
    """The version of the state that was written."""
    seen: dict[str, tuple[str, int]] = {}
    """Of what was read and then set: what it was, as a hash, and the version of its entry; 0 when there was none."""


class Errand(msgspec.Struct, frozen=True):
    """Which step a task is the work of."""

    execution: str
    path: str


def check_execution(id: str) -> str:
    check_name(id, "execution's id")
    if len(escape(id).encode()) > ID_BYTES_MAX or not id.isprintable():
        raise InvalidInput(f"an execution's id is printable text of at most {ID_BYTES_MAX} bytes, not {id!r:.60}")
    return id


def child_id(parent: str, path: str) -> str:
    """The id of a child that was given none: the same each time. What would get too long is cut, and told apart by its hash."""
    id = f"{parent}.{path}"
    if len(escape(id).encode()) <= ID_BYTES_MAX:
        return id
    return f"{parent[:40]}…{hashlib.sha256(id.encode()).hexdigest()[:40]}"


def meta_key(id: str) -> str:
    return META + id


def execution_key(id: str) -> str:
    return EXECUTIONS + id


def live_key(name: str, id: str) -> str:
    return WORKFLOWS.key("live", name, id)


def ended_key(name: str, at: int, id: str) -> str:
    return WORKFLOWS.key("ended", name, f"{at:013d}", id)


def steps_prefix(id: str) -> str:
    return JOURNAL.prefix("steps", id)


def log_prefix(id: str) -> str:
    return JOURNAL.prefix("log", id)


def data_prefix(id: str) -> str:
    return JOURNAL.prefix("data", id)


def items_prefix(id: str, key: str | None = None, generation: str = "") -> str:
    return JOURNAL.prefix("items", id) if key is None else JOURNAL.prefix("items", id, key, generation)


def signals_prefix(id: str, name: str) -> str:
    """Where what is sent under a name goes: what agents send, and apart from it what only orchestrators may."""
    return JOURNAL.prefix("mail", id, name) if name.startswith("~") else SIGNALS.prefix(id, name)


def mail_prefixes(id: str) -> tuple[str, str]:
    return JOURNAL.prefix("mail", id), SIGNALS.prefix(id)


def inbox_key(id: str) -> str:
    return INBOX + id


def errand_key(tid: str) -> str:
    return ERRANDS + tid


@lru_cache(1024)
def tally_key(name: str, status: str) -> str:
    return TALLIES.key("status", name, status)


def queue_name(workflow: str) -> str:
    """The queue of a workflow's runnable executions."""
    return f"workflows.{workflow}"


def tag_of(status: str) -> str:
    return type_tag(TYPE, status)


def state_key(id: str) -> str:
    return steps_prefix(id) + STATE


def state_record(version: str) -> StepRecord:
    """What says of which version a state is."""
    return StepRecord("completed", kind="state", result=msgspec.Raw(encode(version)))


def state_version(record: StepRecord | None) -> str:
    """Of which version a state is, by that record; "" when it has no type."""
    return "" if record is None else decode(bytes(record.result), str)


def meta_of(entry: Entry) -> Meta:
    return decode(entry.value, Meta)


def execution_of(entry: Entry) -> Execution:
    return decode(entry.value, Execution)


def fault_of(error: BaseException, step: str = "") -> Fault:
    """An exception, as it is kept."""
    given = getattr(error, "fault", None)
    if isinstance(given, Fault):
        return given
    cause: BaseException | None = error
    while not step and cause is not None:
        step = cause.step if isinstance(cause, StepFailed | TimedOut) else ""
        cause = cause.__cause__
    return Fault(type(error).__name__, _printable(str(error))[:FAULT_CHARS_MAX], step, _trace(error))


def _trace(error: BaseException) -> str:
    frames = [
        frame
        for frame in StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)
        if not frame.filename.startswith(_OURS)
    ]
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-TRACE_MAX:]]
    return "\n".join(_printable(line)[:TRACE_CHARS_MAX] for line in lines)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def raw(value: Any, what: str) -> msgspec.Raw:
    """A value as canonical JSON, or InvalidInput that says whose it is."""
    try:
        data = encode(value)
    except InvalidInput as exc:
        raise InvalidInput(f"{what} cannot be kept: {exc}") from exc
    if len(data) > RESULT_BYTES_MAX:
        raise InvalidInput(
            f"{what} has {len(data):,} bytes; the limit is {RESULT_BYTES_MAX:,}. Keep it with space.blobs and return the reference"
        )
    return msgspec.Raw(data)
