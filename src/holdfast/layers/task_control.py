"""Control of tasks: commands to whoever has a task, and the answers.

    tasks/ctrl_in/<tid>/<19 digits>    {command, by, at, …}: STOP, CANCEL, KILL, PAUSE, RESUME, STATUS, PING, WRITE
    tasks/ctrl_out/<tid>/<19 digits>   {command, status, timestamp, …}, under the id of what it answers; kept for an hour

A command is appended, and stays until it is answered: the manager of the task, or the next one if that dies, deletes it in the
commit that writes the answer. Only the owner of a task and orchestrators may append; that is a rule of the store. STOP and CANCEL
end as cancelled, KILL as killed. A task that no manager has taken yet needs none: the store alone ends it (`task_handle.py`).

What somebody wrote there that is no command is answered with an error, and nothing else happens.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from holdfast.clock import as_datetime
from holdfast.codec import decode, encode
from holdfast.engine import Delete, Present, Push, Put
from holdfast.errors import Error, InvalidInput
from holdfast.layers.task_states import CTRL_IN, CTRL_OUT, Parts
from holdfast.layers.tid import check_tid

Command: TypeAlias = Literal["STOP", "CANCEL", "KILL", "PAUSE", "RESUME", "STATUS", "PING", "WRITE"]
COMMANDS: Final[tuple[str, ...]] = get_args(Command)
ENDING: Final = ("STOP", "CANCEL", "KILL")
ANSWER_TTL_MS: Final = 3_600_000
WRITE_BYTES_MAX: Final = 256 * 1024
"""What is typed into a task at once."""


class Control(NamedTuple):
    """A command that waits for its answer."""

    tid: str
    id: str
    command: str
    by: str
    fields: dict[str, Any]
    error: str | None = None
    """Why it is none: it must be answered with this."""

    @property
    def key(self) -> str:
        return f"{CTRL_IN}{self.tid}/{self.id}"

    @property
    def data(self) -> bytes:
        """What is to be written to the task's standard input."""
        return base64.b64decode(self.fields.get("data", ""), validate=True)

    @property
    def closes(self) -> bool:
        """Whether nothing more is going to be written."""
        return bool(self.fields.get("eof"))


class ControlAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a command."""

    command: str
    status: Literal["ok", "rejected", "error"]
    timestamp: datetime
    message: str | None = None
    details: dict[str, Any] = {}


def asking(tid: str, command: Command, by: str, now_ms: int, **fields: Any) -> Push:
    """The operation that gives a command; its result is the key."""
    if command not in COMMANDS:
        raise InvalidInput(f"{command!r:.40} is no command; there are {', '.join(COMMANDS)}")
    told = {"command": command, "by": by, "at": as_datetime(now_ms), **fields}
    return Push(f"{CTRL_IN}{check_tid(tid)}/", encode(told))


def writing(data: bytes, eof: bool) -> dict[str, Any]:
    """The fields of a WRITE."""
    if len(data) > WRITE_BYTES_MAX:
        raise InvalidInput(f"at most {WRITE_BYTES_MAX:,} bytes are written at once, not {len(data):,}")
    return {"data": base64.b64encode(data).decode(), **({"eof": True} if eof else {})}


def control_of(key: str, value: bytes, owner: str) -> Control:
    """Read a command; what is none says why."""
    tid, _, id = key[len(CTRL_IN) :].partition("/")
    try:
        told: Any = decode(value)
    except Error as exc:
        return Control(tid, id, "", owner, {}, str(exc))
    if not isinstance(told, dict) or not isinstance(told.get("command"), str):
        return Control(tid, id, "", owner, {}, 'a control message is an object such as {"command": "STOP"}')
    command = told["command"].upper()
    if command not in COMMANDS:
        return Control(
            tid, id, command, owner, {}, f"there is no command {command!r:.40}; there are {', '.join(COMMANDS)}"
        )
    control = Control(tid, id, command, owner, told)
    try:
        control.data  # noqa: B018 - read to see whether it can be
    except (ValueError, TypeError):
        return control._replace(error="the data of a WRITE is base64")
    return control


def answering(
    control: Control,
    status: Literal["ok", "rejected", "error"],
    now_ms: int,
    message: str | None = None,
    **details: Any,
) -> Parts:
    """What answers a command, on condition that nobody has."""
    told = ControlAnswer(control.command, status, as_datetime(now_ms), message, details)
    put = Put(f"{CTRL_OUT}{control.tid}/{control.id}", encode(told), ANSWER_TTL_MS)
    return Parts((Present(control.key),), (Delete(control.key), put))
