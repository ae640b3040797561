"""What is done to a SQLite file in a transaction of its own: making, dropping, loading and compacting spaces.

A duty waits for its turn like a group of batches, and they take turns: neither a busy writer nor a long compaction keeps the
other waiting for longer than one transaction. One that is cancelled before its turn is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.engines.grouping import CommitQueue
from holdfast.errors import Unavailable

T = TypeVar("T")


class Duties:
    """Duties that wait. They are added on the loop, and each is taken once, in whichever thread."""

    def __init__(self, queue: CommitQueue) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.was_last = False
        """The last turn was that of a duty, so that a group comes next."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def are_next(self) -> bool:
        return bool(self._waiting) and not (self.was_last and self._queue)

    def add(self, work: Callable[[], T]) -> asyncio.Future[T]:
        reply: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append((work, reply))
        return reply

    def refuse_all(self, reason: str) -> None:
        """Tell whoever still waits that nothing of theirs was done."""
        with contextlib.suppress(IndexError):  # the thread has taken the last one
            while self._waiting:
                self._tell(self._waiting.popleft()[1], None, Unavailable(reason))

    def do_next(self, do: Callable[[Callable[[], Any]], Any], then: Callable[[], None]) -> bool:
        """In the thread: have the first one done, and answer; `then` is called on the loop. False: there is none any more."""
        outcome: Any = None
        error: BaseException | None = None
        try:
            work, reply = self._waiting.popleft()
            while reply.cancelled():
                work, reply = self._waiting.popleft()
        except IndexError:
            return False
        try:
            outcome = do(work)
        except BaseException as exc:  # whoever waits must hear of it
            error = exc

        def tell() -> None:
            then()
            self._tell(reply, outcome, error)

        self._loop.call_soon_threadsafe(tell)
        return True

    def _tell(self, reply: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
        if reply.done():
            return
        if error is None:
            reply.set_result(outcome)
        else:
            reply.set_exception(error)
