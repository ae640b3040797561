"""A task in the hands of a manager: what it knows of it between its commits.

Nothing here is stored. `Launch` carries the spec, the state as this manager wrote it last, with its version, the message, and how far
its output has come; `Outcome` is what the manager saw when the task ended.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal, Protocol

import msgspec

from holdfast.codec import decode
from holdfast.engine import Condition, Operation
from holdfast.layers.blobs import Blobs
from holdfast.layers.task_output import Spool, StreamName, TextSplitter, Written
from holdfast.layers.task_spec import TaskSpec
from holdfast.layers.task_states import StopReason, TaskError, TaskState

RESULT_UNSET: Final = msgspec.UNSET
MANAGER: Final = "holdfast.manager"
"""What managers, which are tasks themselves, are called."""


class ManagerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One manager, as the registry shows it."""

    tid: str
    host: str
    pid: int
    capacity: int
    since: datetime
    draining: bool = False


class Request(Protocol):
    """A reserved message of the queue of spawn requests."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str:
        """Where it stands while it is reserved."""
        ...

    def acking(self) -> list[Condition | Operation]:
        """What a batch needs to acknowledge it."""
        ...

    def committed(self) -> None:
        """Such a batch was committed."""
        ...


class TaskOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a task ended, as its manager saw it."""

    status: Literal["completed", "failed", "timeout", "cancelled", "killed"]
    return_code: int | None = None
    result: Any = RESULT_UNSET
    """What a function returned; left out where there is none."""
    error: TaskError | None = None
    reason: str | None = None
    stop: StopReason | None = None
    """The limit for which it was ended, if it was."""
    peak_memory_mb: float | None = None
    cpu_seconds: float | None = None
    max_fds: int | None = None
    lost: bool = False
    """Whether nobody saw it end, because whoever watched over it was killed: it is begun again, whatever its policy, as long as
    it has attempts left."""


class Launch:
    """A task in the hands of a manager."""

    def __init__(self, spec: TaskSpec, state: TaskState, message: bytes, blobs: Blobs, request: Request | None) -> None:
        self.spec = spec
        self.state = state
        self.version = 0
        self.written = Written(0, state.attempt)
        self._raw = message
        self.input: bytes | None = None
        """Its message, where that was in a blob."""
        self.request = request
        self._blobs = blobs
        self.spool = Spool(blobs, spec.output_bytes_max)
        self._splitters: dict[str, TextSplitter] = {}

    @property
    def tid(self) -> str:
        """The task's name."""
        return self.state.tid

    @property
    def message(self) -> Any:
        """What its inbox message says; None when it says nothing."""
        return decode(self._raw if self.input is None else self.input)

    @property
    def raw(self) -> bytes:
        return self._raw

    @property
    def is_live(self) -> bool:
        """Whether its output is shown as it is produced."""
        return self.spec.stream_output or self.spec.interactive

    async def drop_output(self) -> None:
        """Forget what it printed and is not sent yet: it could not be kept."""
        await self.spool.discard()
        self.spool = Spool(self._blobs, self.spec.output_bytes_max)

    def split(self, stream: StreamName, data: bytes, *, final: bool = False) -> bytes:
        if not self.spec.interactive:
            return data
        return self._splitters.setdefault(stream, TextSplitter()).feed(data, final=final)
