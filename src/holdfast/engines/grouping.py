"""Group commit: what arrives while one commit is under way is committed as one.

`CommitQueue` holds batches, each with whom to answer. The engine takes a group when it can write, commits it, and answers
everybody. There is no timer: a lone writer is a group of one, and the busier the store the larger its groups. Only a batch that is
patient (`Batch.patience_ms`) begins no group for so long. A caller that was cancelled
before its batch was taken is left out; one that is cancelled later just does not hear the answer.

Who waits is mostly a task, which `answer` wakes by calling it: a future would take a step of the loop for each.

`Turns` says when, for an engine with one connection that writes. The first batch to come asks for the loop's next step,
so that whoever is ready may queue up too; the engine then begins whatever comes next, on the loop or in the one thread
that may have the connection. A task that was alone the last time commits at once, without the queue, and steps back
every STEP_BACK_S so that others get to run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from holdfast.engine import PATIENCE_MS_MAX, Batch, Receipt
from holdfast.errors import Unavailable
from holdfast.offers import Replies, Reply

# Of many items at once: a comprehension takes three times as long.
_SIZE, _COUNT, _DURABILITY = attrgetter("size"), attrgetter("count"), attrgetter("durability")
_IS_CANCELLED = attrgetter("_is_cancelled")

T = TypeVar("T")
Outcome: TypeAlias = "Receipt | BaseException | None"

log = logging.getLogger("holdfast.grouping")

GROUP_BATCHES_MAX: Final = 1024
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
STEP_BACK_S: Final = 0.002
"""How long a lone writer may go on without letting other tasks run."""


class Waiting(msgspec.Struct, eq=False):
    """A batch in the queue, and whom to answer: `reply`, or else the one task that awaits this.

    To a task it is a future: it has of one what a task uses (`asyncio.isfuture`).
    """

    space: str
    durability: str
    batch: Batch
    size: int
    outcome: Outcome = None
    reply: Reply | None = None
    """Of one who does not wait, and is told (`offers.Submits`)."""
    _loop: asyncio.AbstractEventLoop | None = None
    _asyncio_future_blocking: bool = False
    _wake: Callable[[Waiting], object] | None = None
    """Until it was called, or is about to be."""
    _context: Context | None = None
    _is_cancelled: bool = False
    _why: object = None
    """What was said when it was cancelled; there are those who know by it that it was them."""
    _is_answered: bool = False
    count: int = 1
    """Batches."""

    def __repr__(self) -> str:
        return f"<a batch that waits in {self.space!r}>"  # asyncio shows what a task waits for; values are nobody's business

    def told(self) -> Receipt:
        """The outcome, which is there; raised if it is none to be glad of."""
        if type(self.outcome) is Receipt:
            return self.outcome
        raise self.outcome or Unavailable("the batch was not committed")  # type: ignore[misc]

    def __await__(self) -> Generator[Waiting, None, None]:
        if not self._is_answered:
            self._asyncio_future_blocking = True
            yield self

    def add_done_callback(self, wake: Callable[[Waiting], object], *, context: Context) -> None:
        self._wake, self._context = wake, context

    def result(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError if self._why is None else asyncio.CancelledError(self._why)

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled. False: it is being told what became of the batch, or is cancelled already."""
        if self._wake is None:
            return False
        self._is_cancelled, self._why = True, msg
        self.wake_later()
        return True

    def wake_later(self) -> None:
        """Let the task go on, in a step of the loop."""
        wake, self._wake = self._wake, None
        if wake is not None:
            self._loop.call_soon(wake, self, context=self._context)  # type: ignore[union-attr]


class Together(Waiting):
    """Batches that were submitted together, all of them fresh: one place in the queue. `batch` is the first of them."""

    batches: list[Batch] = []
    outcomes: list[Receipt | BaseException] = []
    replies: Replies | None = None


def revise(items: list[Waiting], change: Callable[[Outcome, Batch], Receipt | BaseException]) -> None:
    """Let each batch have another outcome than it had."""
    for item in items:
        if type(item) is Together:
            olds = item.outcomes or repeat(None)  # it may not have come to any
            item.outcomes = [change(old, batch) for old, batch in zip(olds, item.batches, strict=False)]
        else:
            item.outcome = change(item.outcome, item.batch)


class CommitQueue:
    """Batches that wait to be committed. They are added on the loop, and each is taken once, in whichever thread."""

    def __init__(self) -> None:
        self._items: deque[Waiting] = deque()
        self._taking = threading.Lock()
        self._added = self._taken = 0
        """Bytes; one is written by who adds, the other by who takes."""
        self.has_more = False
        """Not all that was there went into the last group."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def bytes(self) -> int:
        return self._added - self._taken

    def add(self, item: Waiting) -> None:
        self._added += item.size
        self._items.append(item)

    def take_group(self) -> list[Waiting]:
        """The oldest batches: of one durability, bounded in number and bytes."""
        with self._taking:
            items = self._items
            group = [items.popleft() for _ in range(min(len(items), GROUP_BATCHES_MAX))]
            size, count = sum(map(_SIZE, group)), sum(map(_COUNT, group))
            if size > GROUP_BYTES_MAX or count > GROUP_BATCHES_MAX or len(set(map(_DURABILITY, group))) > 1:
                fitting = _fitting(group)
                items.extendleft(reversed(group[fitting:]))
                del group[fitting:]
                size = sum(map(_SIZE, group))
            self._taken += size
            self.has_more = bool(items)
        return [item for item in group if not item._is_cancelled] if any(map(_IS_CANCELLED, group)) else group

    def refuse_all(self, reason: str) -> None:
        """Tell whoever still waits that nothing of theirs was written."""
        refused: list[Waiting] = []
        while self._items:
            refused += self.take_group()
        revise(refused, lambda outcome, batch: Unavailable(reason))
        answer(refused)


def _fitting(items: list[Waiting]) -> int:
    """How many of the first ones have one durability and not too many bytes together; one at least."""
    size = count = 0
    for place, item in enumerate(items):
        size += item.size
        count += item.count
        too_many = size > GROUP_BYTES_MAX or count > GROUP_BATCHES_MAX
        if place and (too_many or item.durability != items[0].durability):
            return place
    return len(items)


def answer(items: list[Waiting]) -> None:
    """Give everybody their outcome; on the event loop. One who cannot take it keeps nobody else from theirs."""
    in_task = asyncio.current_task() is not None  # within one, no other can run
    left = iter(items)
    try:
        for item in left:
            item._is_answered = True
            if (reply := item.reply) is not None:
                _tell(reply, item.outcome)
            elif type(item) is Together:
                _tell_all(item)
            elif in_task:
                item.wake_later()
            elif (wake := item._wake) is not None:
                item._wake = None
                item._context.run(wake, item)  # type: ignore[union-attr]
    finally:  # somebody ends the program; the others may yet be heard
        for item in left:
            item._is_answered = True
            if item.reply is not None:
                _tell(item.reply, item.outcome)
            elif type(item) is Together:
                _tell_all(item)
            else:
                item.wake_later()


def _tell(reply: Reply, outcome: Receipt | BaseException | None) -> None:
    try:
        if type(outcome) is Receipt:
            reply.set_result(outcome)
        else:
            reply.set_exception(outcome or Unavailable("the batch was not committed"))  # type: ignore[arg-type]
    except Exception:
        log.exception("somebody could not be told what became of a batch")


def _tell_all(item: Together) -> None:
    try:
        item.replies.set_results(item.outcomes)  # type: ignore[union-attr]
    except Exception:
        log.exception("somebody could not be told what became of %d batches", item.count)


class Turns:
    """Whose turn it is to use the one connection that writes.

    `begin` starts what comes next, in a step of the loop in which no thread has the connection. `at_once` commits a batch
    there and then and leaves its outcome in it, or says False: it is to wait in the queue.
    """

    def __init__(self, name: str, begin: Callable[[], None], at_once: Callable[[Waiting], bool]) -> None:
        self.queue = CommitQueue()
        self.in_thread: asyncio.Future[Any] | None = None
        self._begin = begin
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._asked = self._closed = False
        self._first: asyncio.Task[Any] | None = None
        self._alone: asyncio.Task[Any] | None = None
        self._stepped_back_at = 0.0
        self._later: asyncio.Handle | None = None
        """For those that are patient."""
        self._later_at = 0.0
        """When that is. uvloop does not tell: it takes what is due within half a millisecond for due now, and gives no timer."""

    def enter(self, item: Waiting) -> bool:
        """Queue a batch that `check_batch` has accepted, and is to be awaited; True: it was committed, and has its outcome."""
        if not self._asked:
            self._first = task = asyncio.current_task(self._loop)
            is_quick = task is self._alone and self._later is None
            if is_quick and self._loop.time() - self._stepped_back_at <= STEP_BACK_S and self._at_once(item):
                return True
        item._loop = self._loop
        self.queue.add(item)
        if not self._asked:
            self._ask_for(item.batch.patience_ms / 1000)
        return False

    def submit(self, item: Waiting) -> None:
        """Queue a batch that `check_batch` has accepted; the reply comes when it was committed, or refused."""
        self.queue.add(item)
        if not self._asked:
            self._ask_for(item.batch.patience_ms / 1000)

    def _ask_for(self, patience_s: float) -> None:
        """Begin what comes next soon, or, if nobody else wants it sooner, after so long."""
        if patience_s <= 0:
            self.ask()
            return
        at = self._loop.time() + min(patience_s, PATIENCE_MS_MAX / 1000)
        if self._later is None or at < self._later_at:
            self._wait_no_more()
            self._later_at = at
            self._later = self._loop.call_at(at, self._begin_for_the_patient)

    def _wait_no_more(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _begin_for_the_patient(self) -> None:
        self._later = None
        if self.queue:
            self.ask()

    def ask(self) -> None:
        """Begin what comes next in the loop's next step, or as soon as the thread is done."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        if self.in_thread is not None or self._closed:
            return  # the thread asks again when it is done
        self._asked = False
        self._stepped_back_at = self._loop.time()
        self._alone = self._first if len(self.queue) == 1 else None
        self._first = None
        self._wait_no_more()  # whoever was patient goes with this one
        try:
            self._begin()
        except BaseException:  # somebody ends the program; others may clean up yet
            self.ask()
            raise
        if self.queue and (self.queue.has_more or self._later is None):  # else they are patient
            self.ask()

    def start_thread(self, work: Callable[[], T], then: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """Let the thread have the connection; until it is done, batches wait in the queue. `then` runs on the loop.

        `run_in_executor` makes two futures and copies one into the other, which takes as long as handing over itself.
        """
        loop = self._loop
        running: asyncio.Future[T] = loop.create_future()
        left = [work]

        def run() -> None:
            if not left:
                return  # a thread that came later; it is done
            outcome: T | None = None
            error: BaseException | None = None
            try:
                outcome = left.pop()()
            except BaseException as exc:  # whoever waits must hear of it
                error = exc
            if not loop.is_closed():  # else nobody waits any more
                loop.call_soon_threadsafe(done, outcome, error)

        def done(outcome: T | None, error: BaseException | None) -> None:
            self.in_thread, self._asked = None, False
            if error is None:
                running.set_result(outcome)  # type: ignore[arg-type]
            else:
                running.set_exception(error)
            try:
                if then is not None:
                    then(running.result())
            finally:
                self.ask()

        self._asked = True
        self.in_thread = running
        try:
            self._threads.submit(run)
        except RuntimeError:  # no thread is to be had: the loop waits for the disk itself, or all would wait for ever
            run()
        return running

    async def close(self) -> None:
        """Finish what was accepted."""
        while self.queue or self.in_thread is not None:
            self.ask()
            await (asyncio.wait([self.in_thread]) if self.in_thread is not None else asyncio.sleep(0))
        self._closed = True
        self._threads.shutdown()
