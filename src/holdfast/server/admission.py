"""Who may be connected to a port, so that nobody takes the room of all the others.

    before Hello      at most `connections_before_hello`; whoever has been silent for longest makes room for the next one
    after Hello       at most `connections` in all, and `connections_per_token` of one credential
    administrators    as many as they like of those, and `connections_for_administrators` more, where nobody else comes in

    half a request    large ones that are not complete: at most `unfinished_bytes_per_token` of one credential, whatever number
                      of connections it has, and `unfinished_bytes` in all; their whole length counts from their first bytes on

Nobody is counted among `connections` before it has said who it is. So somebody without a token takes no place of those who have
one, and cannot keep them from asking: who says Hello at once is not the one that was silent for longest. A client that comes
again takes the place of its connection before. Over HTTP, Hello is the first request with a good token; a later one with another
token counts for that.

How it fails. Who is refused hears Unavailable, which says why, and is closed; its client tries again. Refusals are counted (op
hello, or other for half a request, outcome unavailable); those who do not get in are logged (`refusals.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from holdfast.errors import Error, Unavailable
from holdfast.identity import Identity


class Bounds(Protocol):
    """How many there may be."""

    @property
    def connections(self) -> int: ...
    @property
    def connections_before_hello(self) -> int: ...
    @property
    def connections_per_token(self) -> int: ...
    @property
    def connections_for_administrators(self) -> int: ...


class Admitting(Protocol):
    """A port, as far as it lets somebody in."""

    @property
    def limits(self) -> Bounds: ...

    def observe(self, op: str, outcome: str, seconds: float, /) -> None: ...


class Connection(Protocol):
    """One that comes to a port."""

    def turn_away(self, error: Error) -> None: ...


class Admission:
    """The connections of one port, by who they are. `hello` is what they do to say it, in the words of a refusal."""

    def __init__(self, port: Admitting, hello: str = "said Hello") -> None:
        self._port = port
        self._hello = hello
        self._silent: dict[Connection, None] = {}
        """Those that have not said who they are, the oldest first."""
        self._entered: dict[Connection, str] = {}
        """The others, with the id of their token."""
        self._of_token: Counter[str] = Counter()

    def come(self, connection: Connection) -> None:
        """A new one; it has not said anything yet."""
        self._silent[connection] = None
        limit = self._port.limits.connections_before_hello
        if len(self._silent) > limit:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.turn_away(
                self._refusal(
                    f"more than {limit:,} connections have not {self._hello}, and this one has been silent for longest; "
                    "connect again, and say at once who you are"
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

    def known_as(self, connection: Connection) -> str | None:
        """The id of the token it has entered with."""
        return self._entered.get(connection)

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
        self._silent.pop(connection, None)
        token = self._entered.pop(connection, None)
        if token is not None:
            self._of_token[token] -= 1
            if not self._of_token[token]:
                del self._of_token[token]

    def _refusal(self, reason: str) -> Unavailable:
        self._port.observe("hello", Unavailable.code, 0.0)
        return Unavailable(reason)
