"""Large requests of the binary port that have begun and are not complete: how many bytes of them there may be.

A request over `wire.LARGE_FRAME_BYTES` counts with its whole length from its first bytes to its last, for its token and for all
together, so that nobody's memory is the product of connections and frames. Small ones, and those that come whole, are not
counted and cost nothing here.

How it fails. Who begins one more than there is room for hears Unavailable, which says how much there is; it was not done.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.errors import Unavailable

if TYPE_CHECKING:
    from holdfast.server.binary import BinaryPort
    from holdfast.server.connection import Connection


class Unfinished:
    """What of one port's requests is waited for."""

    def __init__(self, port: BinaryPort) -> None:
        self._port = port
        self._of: dict[Connection, tuple[str, int]] = {}
        """Who has sent a part of a large request, with the id of its token and the length."""
        self._bytes: Counter[str] = Counter()
        """By token."""

    def forget(self, connection: Connection) -> None:
        """Its request is complete, or it is gone."""
        before = self._of.pop(connection, None)
        if before is not None:
            token, size = before
            self._bytes[token] -= size
            if not self._bytes[token]:
                del self._bytes[token]

    def wait_for(self, connection: Connection, frame_bytes: int) -> None:
        """A large request of it has begun and is not complete; or, if it is 0, is complete. Unavailable if there is no room for it."""
        self.forget(connection)
        if not frame_bytes or connection.identity is None:
            return
        token, limits = connection.identity.token_id, self._port.limits
        if self._bytes[token] + frame_bytes > max(limits.unfinished_bytes_per_token, frame_bytes):
            raise self._refusal(
                f"{connection.identity.agent!r} has begun requests of {self._bytes[token]:,} bytes with this token, "
                f"and not finished them; with this one of {frame_bytes:,} that is over {limits.unfinished_bytes_per_token:,}. "
                "It was not done: send fewer at once, or smaller ones"
            )
        if self._bytes.total() + frame_bytes > max(limits.unfinished_bytes, frame_bytes):
            raise self._refusal(
                f"clients have begun requests of {limits.unfinished_bytes:,} bytes, and not finished them; there is no room for "
                f"one of {frame_bytes:,} now. It was not done: try again later, or send smaller ones"
            )
        self._of[connection] = (token, frame_bytes)
        self._bytes[token] += frame_bytes

    def _refusal(self, reason: str) -> Unavailable:
        self._port.observe("frame", Unavailable.code, 0.0)
        return Unavailable(reason)
