"""What launcher, zygote and wardens say to each other: msgpack in frames of a length and that many bytes.

A launch is one byte to the zygote with the descriptors of the new child; all else passes between the launcher and the
child's warden, on a socket of their own. The first frame to a warden is its Work; afterwards every request gets one Answer, in
order. A peer that is gone shows as an end of the stream, never as a message.
"""

from __future__ import annotations

import socket
from typing import Final, Literal

import msgspec

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""More than any message has; a longer one is a mistake of ours."""
LENGTH_BYTES: Final = 4
FAILURE_CHARACTERS_MAX: Final = 16 * 1024
"""Of an exception's message, and of its traceback."""

Reason = Literal["exited", "timeout", "stopped", "killed", "memory", "fds", "lost"]
"""Why a child ended. Lost: its warden was killed, and what was left of the tree with it."""


class Work(msgspec.Struct, frozen=True, tag="work"):
    """An order as a warden gets it, complete."""

    argv: list[str] | None
    function: str | None
    parameters: bytes
    env: dict[str, str]
    cwd: str | None
    timeout_ms: int | None
    memory_bytes: int | None
    cpu_percent: float | None
    max_fds: int | None
    modules: frozenset[str] | None
    """Whose functions may be called; None is anybody's."""
    marker: str
    short: str
    name: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the tree: TERM now, KILL after the grace."""

    reason: Reason
    grace_ms: int


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stop the tree's CPU."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Let it run again."""


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Tell what the tree uses."""


Request = Work | Stop | Pause | Resume | Measure


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A warden is there and waits for its work."""

    pid: int
    started: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The target runs: the command was executed, or the function is being looked for."""

    pid: int
    started: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The target could not be started."""

    missing: bool
    message: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A request was done; with figures if it asked for them."""

    memory: int = 0
    peak_memory: int = 0
    cpu_seconds: float = 0.0
    fds: int = 0
    max_fds: int = 0
    processes: int = 0


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The whole tree is dead: the warden has no child left, and so no descendant."""

    reason: Reason
    code: int | None
    signal: int | None
    peak_memory: int
    cpu_seconds: float
    max_fds: int
    duration_ms: int


Report = Hello | Started | Refused | Answer | Over


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A zygote can fork; or it cannot, and why."""

    problem: str = ""


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """A warden died before its tree, and what was left of the tree is dead now."""

    warden: int


News = Ready | Settled


class Failure(msgspec.Struct, frozen=True):
    """An exception that a function ended with."""

    type: str
    message: str
    traceback: str


class Outcome(msgspec.Struct, frozen=True):
    """What a function came to; on a pipe of its own, so that nothing it prints is taken for it."""

    value: bytes | None = None
    """JSON."""
    failure: Failure | None = None


pack: Final = msgspec.msgpack.Encoder().encode
refusals: Final = msgspec.msgpack.Decoder(Refused)
requests: Final = msgspec.msgpack.Decoder(Request)
reports: Final = msgspec.msgpack.Decoder(Report)
news: Final = msgspec.msgpack.Decoder(News)
outcomes: Final = msgspec.msgpack.Decoder(Outcome)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    body = pack(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def say(link: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; a peer that is gone will be noticed where it is listened to."""
    try:
        link.sendall(frame(message))
    except OSError:
        return


def hear(link: socket.socket) -> bytes | None:
    """Wait for a whole message; None if the peer is gone."""
    head = _exactly(link, LENGTH_BYTES)
    return None if head is None else _exactly(link, int.from_bytes(head, "big"))


def _exactly(link: socket.socket, count: int) -> bytes | None:
    if count > FRAME_BYTES_MAX:
        return None
    parts = []
    while count:
        try:
            part = link.recv(min(count, 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
