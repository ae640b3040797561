"""What one request takes of the port, and what all requests of one token may take together.

    bodies      the bytes that have arrived of bodies, until their requests are answered
    running     requests whose body has arrived, until they are answered

A request that waits for its body is not running: whoever sends one byte and nothing more takes a connection, and no place of
others. The first `body_bytes_free` of a body count nowhere, so an ordinary request passes whatever large ones are under
way; connections bound how many of those there are. Administrators have no bound of their own.

A large body is read in a thread, and one at a time: decoding keeps the interpreter, so two at once would only keep everybody
waiting for longer. `limits.ELEMENTS_MAX` bounds for how long.

How it fails. Who has too much under way hears RateLimitExceeded, and when all together have, Unavailable; nothing was done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from holdfast.errors import RateLimitExceeded, Unavailable
from holdfast.identity import Identity
from holdfast.server.http.failures import BodyTooLarge, BodyTooSlow, NotJSON

if TYPE_CHECKING:
    from holdfast.server.http.limits import Limits

T = TypeVar("T")
LARGE_BYTES: Final = 64 * 1024
"""A body over this is read in a thread."""
RETRY_S: Final = 1.0
"""When to come again, for whoever has too much under way."""


class Shares:
    """What is under way at one port, by token."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.stopping = asyncio.Event()
        self._running: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._waiting: set[asyncio.Timeout] = set()
        """For the bodies that are not here yet."""
        self._reading = asyncio.Lock()

    def stop(self) -> None:
        """Nothing is waited for any more."""
        self.stopping.set()
        for deadline in self._waiting:
            deadline.reschedule(0)

    async def read(self, data: bytes, read: Callable[[bytes], T]) -> T:
        """What a body says."""
        if len(data) <= LARGE_BYTES:
            return read(data)
        async with self._reading:
            return await asyncio.to_thread(read, data)


class Share:
    """What one request takes."""

    def __init__(self, shares: Shares, identity: Identity) -> None:
        self._shares = shares
        self._identity = identity
        self._token = identity.token_id or identity.agent
        self._is_bound = identity.role != "admin"
        self._bytes = 0
        self._counted = 0
        self._runs = False

    async def body(self, request: Request) -> bytes:
        """The whole body, or a refusal as soon as it is too large, too slow, or too much besides others."""
        limits = self._shares.limits
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NotJSON("the body must be application/json")
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limits.body_bytes_max):
            raise _too_large(limits)
        data, waiting = bytearray(), self._shares._waiting
        try:
            async with asyncio.timeout(limits.body_s_max) as deadline:
                waiting.add(deadline)
                try:
                    async for chunk in request.stream():
                        self._take(len(chunk))
                        data += chunk
                        if len(data) > limits.body_bytes_max:
                            raise _too_large(limits)
                finally:
                    waiting.discard(deadline)
        except TimeoutError:
            if self._shares.stopping.is_set():
                raise Unavailable("the server is stopping, and the body was not here yet; nothing was done") from None
            raise BodyTooSlow(f"the body did not arrive within {limits.body_s_max:g} s; nothing was done") from None
        except ClientDisconnect:
            raise BodyTooSlow("the client went away before its body had arrived; nothing was done") from None
        return bytes(data)

    def _take(self, size: int) -> None:
        """So many bytes more of its body."""
        shares, limits = self._shares, self._shares.limits
        self._bytes += size
        more = max(self._bytes - limits.body_bytes_free, 0) - self._counted
        if not more:
            return
        self._counted += more
        shares._bytes[self._token] += more
        if self._is_bound and shares._bytes[self._token] > limits.bodies_bytes_per_token_max:
            raise RateLimitExceeded(
                f"{self._identity.agent!r} has bodies of more than {limits.bodies_bytes_per_token_max:,} bytes under way "
                "with this token; nothing was done. Send large ones one after the other",
                retry_after=RETRY_S,
            )
        if shares._bytes.total() > limits.bodies_bytes_max:
            raise Unavailable(
                f"bodies of more than {limits.bodies_bytes_max:,} bytes are under way; nothing was done. Try again later"
            )

    def run(self) -> None:
        """Its body is here: it runs from now on."""
        running, limits = self._shares._running, self._shares.limits
        if self._is_bound and running[self._token] >= limits.requests_per_token_max:
            raise RateLimitExceeded(
                f"{self._identity.agent!r} has {limits.requests_per_token_max:,} requests under way with this token; "
                "nothing was done. Wait for some",
                retry_after=RETRY_S,
            )
        if self._is_bound and running.total() >= limits.requests_max:
            raise Unavailable(f"the server is busy with {limits.requests_max:,} requests; nothing was done")
        running[self._token] += 1
        self._runs = True

    def leave(self) -> None:
        """It was answered."""
        if self._counted:
            _give_back(self._shares._bytes, self._token, self._counted)
        if self._runs:
            _give_back(self._shares._running, self._token, 1)


def _give_back(of_token: Counter[str], token: str, amount: int) -> None:
    of_token[token] -= amount
    if not of_token[token]:
        del of_token[token]


def _too_large(limits: Limits) -> BodyTooLarge:
    return BodyTooLarge(f"a body has at most {limits.body_bytes_max:,} bytes; nothing was done")
