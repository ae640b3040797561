"""Group commit of the resident engine: batches become rows, a COMMIT, and only then entries in memory and replies.

Everything queued is taken as one group: evaluate it on the entries in memory (`evaluation.Group`), write the post-images
in one transaction, COMMIT with an fsync, then apply the group to memory and answer. What arrives during a COMMIT is the
next group; there is no timer. One transaction is under way at a time, and it may hold groups of several spaces of one
durability.

What runs where. Evaluating and writing rows happen on the event loop: they need the interpreter anyway, and a thread
would hand it back and forth at every row. COMMIT leaves the interpreter alone while the disk works, so where it takes
much longer than handing over (INLINE_COMMIT_S) it runs in a thread, and the loop goes on serving reads and collecting. So
do jobs: creating, dropping, loading, compacting a space. A writer that was alone the last time commits at once, without
the queue, as long as COMMIT is quick. The write-ahead log is folded beside all this (`resident_log.py`).

Failure. A full disk rolls back: StorageFull, nothing changed. An I/O error in COMMIT leaves open what is on the disk:
OutcomeUnknown for what was accepted. From then on everything is refused (`failure` says why); so it is when the log
cannot be folded, when a transaction cannot be taken back, and when another program has written to the file, since memory
would show what the file does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import apsw
import msgspec

from holdfast.clock import Clock
from holdfast.engine import Receipt
from holdfast.engines.evaluation import Group
from holdfast.engines.grouping import CommitQueue, Waiting, answer
from holdfast.engines.resident_file import Opened
from holdfast.engines.resident_log import Log
from holdfast.engines.resident_space import ResidentSpace
from holdfast.engines.sqlite_file import FileLock, in_doubt, translate
from holdfast.engines.sqlite_rows import Writer
from holdfast.errors import Error, OutcomeUnknown, Unavailable

T = TypeVar("T")

INLINE_COMMIT_S: Final = 0.001
"""Where a COMMIT usually takes longer than this, it runs in a thread; handing over costs a fifth of it."""
INLINE_BYTES_MAX: Final = 512 * 1024
"""The COMMIT of a group with more bytes than this runs in a thread."""
PROBE_EVERY: Final = 256
"""One COMMIT of so many runs on the loop, to see how long it takes by now."""
STEP_BACK_S: Final = 0.002
"""How long a lone writer may go on without letting other tasks run."""


class Moved(Exception):
    """The space was dropped and made anew, with another durability, while the batch waited."""


class Done(NamedTuple):
    """A group of one space whose rows are written, and the id of the space."""

    home: ResidentSpace
    group: Group
    id: int


class _Job(msgspec.Struct):
    """A transaction of its own: `work` writes rows in the thread, `then` brings memory up to date on the loop."""

    work: Callable[[], Any]
    then: Callable[[], None]
    reply: asyncio.Future[Any]


class _Outcome(NamedTuple):
    """What a job gives; or why it wrote nothing; or how its COMMIT failed."""

    given: Any = None
    refusal: BaseException | None = None
    error: BaseException | None = None


class Keeping(Protocol):
    """Who has the spaces in memory."""

    def home_of(self, space: str) -> ResidentSpace:
        """The space, or one to make."""
        ...

    def apply(self, done: list[Done]) -> None:
        """Show what is in the file now."""
        ...

    def fail(self, reason: str) -> None:
        """Show nothing any more."""
        ...


class GroupCommit:
    """The connection that writes, and whose turn it is to use it."""

    def __init__(self, path: Path, lock: FileLock, clock: Clock, opened: Opened, keeping: Keeping) -> None:
        self.failure: str | None = None
        self.rows = Writer(opened.link.execute, opened.link.connection.cursor().executemany)
        self._path = path
        self._lock = lock
        self._clock = clock
        self._keeping = keeping
        self._loop = asyncio.get_running_loop()
        self._writer, self._write = opened.link
        self._data_version = opened.data_version
        self._synchronous = "sync"
        self._queue = CommitQueue()
        self._jobs: deque[_Job] = deque()
        self._scheduled = False
        self._in_thread: asyncio.Future[Any] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="holdfast-resident")
        self._alone: asyncio.Task[Any] | None = None
        self._stepped_back_at = 0.0
        self._commit_s = INLINE_COMMIT_S / 10
        self._until_probe = PROBE_EVERY
        self._log = Log(path, self._writer)

    async def commit(self, item: Waiting) -> Receipt:
        """Queue a batch that `check_batch` has accepted, and wait for what becomes of it."""
        if self._scheduled:
            return await self._join(item)
        return self._commit_alone(item) or await self._commit_for_all(item)

    async def administer(self, work: Callable[[], Any], then: Callable[[], None]) -> Any:
        """A transaction of its own, when its turn has come: `work` in the thread, and after COMMIT `then` on the loop."""
        job = _Job(work, then, self._loop.create_future())
        self._jobs.append(job)
        if not self._scheduled:
            self._flush()
        return await job.reply

    async def close(self) -> None:
        """Finish what was accepted, and close the file."""
        while self._queue or self._jobs or self._in_thread or self._log.folding:
            running = self._in_thread or self._log.folding
            await (asyncio.wait([running]) if running is not None else asyncio.sleep(0))
        self._threads.shutdown()
        self._log.close()
        with contextlib.suppress(apsw.Error):  # the disk may have failed
            self._writer.close()

    # --- whose turn it is ---

    def _commit_alone(self, item: Waiting) -> Receipt | None:
        """At once, for a writer that was alone the last time too; it steps back often enough to let other tasks run."""
        if self._alone is None or self._alone is not asyncio.current_task():
            return None
        if self._loop.time() - self._stepped_back_at > STEP_BACK_S or not self._is_quick(item.durability, item.size):
            return None
        self._commit_inline([item])
        if isinstance(item.outcome, Receipt):
            return item.outcome
        raise item.outcome or Unavailable("the batch was not committed")

    def _join(self, item: Waiting) -> asyncio.Future[Receipt]:
        """Queue up; the reply comes when somebody has committed for all."""
        item.reply = reply = self._loop.create_future()
        self._queue.add(item)
        return reply

    async def _commit_for_all(self, item: Waiting) -> Receipt:
        """The first to come lets whoever is ready queue up too, and takes them along."""
        reply = self._join(item)
        self._scheduled = True
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            reply.cancel()
            self._loop.call_soon(self._flush)
            raise
        self._stepped_back_at = self._loop.time()
        self._alone = asyncio.current_task() if len(self._queue) == 1 else None
        self._flush()
        return await reply

    def _flush(self) -> None:
        """Begin what comes next: a job, folding the log, or a group of what is queued."""
        if self._in_thread is not None:
            return  # the thread comes back here
        self._scheduled = False
        self._log.fold_if_long(self._log_folded)
        if self._jobs:
            self._run_job(self._jobs.popleft())
        elif self._log.is_folded_but_for_the_rest:
            self._start_thread(self._log.fold_rest, self._log_folded)
        elif self._queue:
            size, items = self._queue.bytes, self._queue.take_group()
            if items and self._is_quick(items[0].durability, size):
                answer(self._commit_inline(items))
            elif items and (done := self._write_group(items)):
                self._start_thread(self._commit_rows, lambda error: answer(self._settle(items, done, error)))
            else:
                answer(items)
        if not self._scheduled and (self._queue or self._jobs):
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _is_quick(self, durability: str, size: int) -> bool:
        """Whether a COMMIT is better done on the loop than handed over: it is short, or it must be measured."""
        if size > INLINE_BYTES_MAX:
            return False
        if durability != "sync" or self._commit_s <= INLINE_COMMIT_S:
            return True
        self._until_probe -= 1
        if self._until_probe > 0:
            return False
        self._until_probe = PROBE_EVERY
        return True

    def _start_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Let the thread have the connection that writes; until it is done, batches wait in the queue."""

        def done(future: asyncio.Future[T]) -> None:
            self._in_thread = None
            then(future.result())
            self._flush()

        self._scheduled = True
        self._in_thread = running = self._loop.run_in_executor(self._threads, work)
        running.add_done_callback(done)

    # --- a group ---

    def _commit_inline(self, items: list[Waiting]) -> list[Waiting]:
        done = self._write_group(items)
        if not done:
            return items
        began = self._loop.time()
        error = self._commit_rows()
        if items[0].durability == "sync":
            # About the median, however long the longest take: a step towards each one that is measured.
            self._commit_s *= 1.1 if self._loop.time() - began > self._commit_s else 0.9
        return self._settle(items, done, error)

    def _write_group(self, items: list[Waiting]) -> list[Done]:
        """Evaluate a group and write its rows; COMMIT comes next, unless nothing was written. Outcomes are in the items."""
        by_space: dict[str, list[Waiting]] = {}
        for item in items:
            by_space.setdefault(item.space, []).append(item)
        done: list[Done] = []
        try:
            try:
                done = self._evaluate(by_space, items[0].durability, known_new=True)
            except apsw.ConstraintError:  # a request id is not new
                self._rollback()
                done = self._evaluate(by_space, items[0].durability, known_new=False)
        except BaseException as exc:  # whoever waits must hear of it
            outcome = translate(self._path, exc) if isinstance(exc, apsw.Error) else exc
            for item in items:
                item.outcome = outcome
        if not done:
            self._rollback()
        return done

    def _evaluate(self, by_space: dict[str, list[Waiting]], durability: str, *, known_new: bool) -> list[Done]:
        self.check()
        now = self._clock.now_ms()
        groups: list[tuple[ResidentSpace, Group]] = []
        for name, items in by_space.items():
            home = self._keeping.home_of(name)
            if home.exists and home.durability != durability:
                for item in items:
                    item.outcome = Moved()
                continue
            group = Group(home, now)
            for item in items:
                try:
                    item.outcome = group.evaluate(item.batch, known_new=known_new)
                except Error as exc:
                    item.outcome = exc
            if not group.empty:
                groups.append((home, group))
        if not groups:
            return []
        self._begin(durability)
        done: list[Done] = []
        for home, group in groups:
            home.look_at(group)
            done.append(Done(home, group, self.rows.group(home, group, requests_are_new=known_new)))
        return done

    def _begin(self, durability: str) -> None:
        """Begin a transaction, or go on with the one that a look-up has begun."""
        if durability != self._synchronous:
            self._rollback()  # what was looked up is known by now, and within a transaction the pragma has no effect
            self._write(f"PRAGMA synchronous = {'FULL' if durability == 'sync' else 'NORMAL'}")
            self._synchronous = durability
        if not self._writer.in_transaction:
            self._write("BEGIN IMMEDIATE")
        [(version,)] = self._write("PRAGMA data_version").fetchall()
        if version != self._data_version:
            self._fail(f"another program has written to {self._path} while this process owned it; open the store again")
        self.check()

    def _commit_rows(self) -> BaseException | None:
        """COMMIT, in whichever thread. What went wrong, if anything did."""
        try:
            self._write("COMMIT")
        except BaseException as exc:
            return exc
        return None

    def _settle(self, items: list[Waiting], done: list[Done], error: BaseException | None) -> list[Waiting]:
        """After a COMMIT: bring memory up to date, or change the outcomes to what has become of them."""
        if error is None:
            error = self._show(lambda: self._keeping.apply(done))
        if error is None:
            self._lock.ring()
            return items
        verdict = self._judge(error)
        for item in items:
            if not isinstance(verdict, OutcomeUnknown):
                item.outcome = verdict
            elif isinstance(item.outcome, Receipt):
                item.outcome = OutcomeUnknown(str(verdict), request_id=item.batch.request_id)
            else:  # it was refused, on the strength of what may not have happened
                item.outcome = Unavailable(f"the disk that holds {self._path} failed; nothing was changed")
        return items

    def _show(self, change: Callable[[], None]) -> BaseException | None:
        """Bring memory up to date with the file. If that fails half-way, memory is of no use any more."""
        try:
            change()
        except BaseException as exc:
            return exc
        return None

    # --- a job ---

    def _run_job(self, job: _Job) -> None:
        def run() -> _Outcome:
            try:
                given = job.work()
            except BaseException as exc:  # whoever waits must hear of it
                return _Outcome(refusal=exc)
            return _Outcome(given, error=self._commit_rows())

        def done(outcome: _Outcome) -> None:
            refusal, error = outcome.refusal, outcome.error
            if refusal is not None:
                self._rollback()
            elif (error := error or self._show(job.then)) is not None:
                refusal = self._judge(error)
            else:
                self._lock.ring()
            if job.reply.done():
                return  # nobody waits any more
            if refusal is None:
                job.reply.set_result(outcome.given)
            else:
                job.reply.set_exception(translate(self._path, refusal) if isinstance(refusal, apsw.Error) else refusal)

        try:
            self.check()
            self._begin("sync")
        except (apsw.Error, Error) as exc:
            done(_Outcome(refusal=exc))
        else:
            self._start_thread(run, done)

    # --- failure ---

    def check(self) -> None:
        if self.failure is not None:
            raise Unavailable(self.failure)

    def _judge(self, error: BaseException) -> Error:
        """What a COMMIT that failed means. Unless the disk was just full, nobody can tell what is on it."""
        if isinstance(error, apsw.FullError):
            self._rollback()
            return translate(self._path, error)
        self._fail(f"a commit to {self._path} failed ({error}); check the disk and open the store again")
        return in_doubt(self._path, error)

    def _rollback(self) -> None:
        if self._writer.in_transaction:
            try:
                self._write("ROLLBACK")
            except apsw.Error as exc:
                self._fail(f"{self._path} does not take a write back ({exc}); check the disk and open the store again")

    def _fail(self, reason: str) -> None:
        """Stop: from now on everything is refused."""
        if self.failure is not None:
            return
        self.failure = reason
        with contextlib.suppress(apsw.Error):
            if self._writer.in_transaction:
                self._write("ROLLBACK")
        self._queue.refuse_all(reason)
        self._keeping.fail(reason)

    def _log_folded(self, error: apsw.Error | None) -> None:
        # With no room for it the log stays longer, and with no room for the log commits are refused.
        if error is not None and not isinstance(error, apsw.FullError | apsw.BusyError | apsw.LockedError):
            self._fail(f"writing to {self._path} failed ({error}); check the disk and open the store again")
        elif self._log.is_folded_but_for_the_rest:
            self._flush()
