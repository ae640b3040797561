"""Who may be connected to the binary port, so that nobody takes the room of all the others.

    before Hello      at most `connections_before_hello`; whoever has been silent for longest makes room for the next one
    after Hello       at most `connections` in all, and `connections_per_token` of one credential
    administrators    as many as they like of those, and `connections_for_administrators` more, where nobody else comes in

    half a request    large ones that are not complete: at most `unfinished_bytes_per_token` of one credential, whatever number
                      of connections it has, and `unfinished_bytes` in all; their whole length counts from their first bytes on

Nobody is counted among `connections` before it has said who it is. So somebody without a token takes no place of those who have
one, and cannot keep them from asking: who says Hello at once is not the one that was silent for longest. A client that comes
again takes the place of its connection before.

How it fails. Who is refused hears Unavailable, which says why, and is closed; its client tries again. Refusals are counted (op
hello, or other for half a request, outcome unavailable); those who do not get in are logged (`refusals.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.errors import Unavailable
from holdfast.identity import Identity

if TYPE_CHECKING:
    from holdfast.server.binary import BinaryPort
    from holdfast.server.connection import Connection


class Admission:
    """The connections of one port, by who they are."""

    def __init__(self, port: BinaryPort) -> None:
        self._port = port
        self._silent: dict[Connection, None] = {}
        """Those that have not said who they are, the oldest first."""
        self._entered: dict[Connection, str] = {}
        """The others, with the id of their token."""
        self._of_token: Counter[str] = Counter()
        self._unfinished: dict[Connection, tuple[str, int]] = {}
        """Who has sent a part of a large request, with the id of its token and the length."""
        self._unfinished_bytes: Counter[str] = Counter()
        """By token."""

    def come(self, connection: Connection) -> None:
        """A new one; it has not said anything yet."""
        self._silent[connection] = None
        limit = self._port.limits.connections_before_hello
        if len(self._silent) > limit:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.turn_away(
                self._refusal(
                    f"more than {limit:,} connections have not said Hello, and this one has been silent for longest; "
                    "connect again, and say Hello at once"
                )
            )

    def enter(self, connection: Connection, identity: Identity, before: Connection | None) -> None:
        """It has said who it is, and maybe was connected before; Unavailable if there is no room for it."""
        self._silent.pop(connection, None)
        if before is not None and before in self._entered:
            self.leave(before)
        elif (reason := self._no_room(identity)) is not None:
            raise self._refusal(reason)
        self._entered[connection] = identity.token_id
        self._of_token[identity.token_id] += 1

    def _no_room(self, identity: Identity) -> str | None:
        limits, count = self._port.limits, len(self._entered)
        if identity.role == "admin":
            if count < limits.connections + limits.connections_for_administrators:
                return None
            return (
                f"there are {count:,} connections already, those that are kept for administrators included; "
                "raise limits.connections, or try again later"
            )
        if count >= limits.connections:
            return f"there are {count:,} connections already; try again later"
        if self._of_token[identity.token_id] >= limits.connections_per_token:
            return (
                f"{identity.agent!r} has {limits.connections_per_token:,} connections with this token already; "
                "close some, or share one: each carries many requests at once"
            )
        return None

    def leave(self, connection: Connection) -> None:
        """It is gone, or another one has taken its place."""
        self.wait_for(connection, 0)
        self._silent.pop(connection, None)
        token = self._entered.pop(connection, None)
        if token is not None:
            self._of_token[token] -= 1
            if not self._of_token[token]:
                del self._of_token[token]

    def wait_for(self, connection: Connection, frame_bytes: int) -> None:
        """A large request of it has begun and is not complete; or, if it is 0, is complete. Unavailable if there is no room for it."""
        before = self._unfinished.pop(connection, None)
        if before is not None:
            token, size = before
            self._unfinished_bytes[token] -= size
            if not self._unfinished_bytes[token]:
                del self._unfinished_bytes[token]
        if not frame_bytes or connection.identity is None:
            return
        token, limits = connection.identity.token_id, self._port.limits
        if self._unfinished_bytes[token] + frame_bytes > max(limits.unfinished_bytes_per_token, frame_bytes):
            raise self._refusal(
                f"{connection.identity.agent!r} has begun requests of {self._unfinished_bytes[token]:,} bytes with this token, "
                f"and not finished them; with this one of {frame_bytes:,} that is over {limits.unfinished_bytes_per_token:,}. "
                "It was not done: send fewer at once, or smaller ones",
                "frame",
            )
        if self._unfinished_bytes.total() + frame_bytes > max(limits.unfinished_bytes, frame_bytes):
            raise self._refusal(
                f"clients have begun requests of {limits.unfinished_bytes:,} bytes, and not finished them; there is no room for "
                f"one of {frame_bytes:,} now. It was not done: try again later, or send smaller ones",
                "frame",
            )
        self._unfinished[connection] = (token, frame_bytes)
        self._unfinished_bytes[token] += frame_bytes

    def _refusal(self, reason: str, op: str = "hello") -> Unavailable:
        self._port.observe(op, Unavailable.code, 0.0)
        return Unavailable(reason)
