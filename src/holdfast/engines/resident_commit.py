"""Group commit of the resident engine: batches become a row of the feed, a COMMIT, and only then entries in memory and replies.

Everything queued is taken as one group: evaluate it on the entries in memory (`evaluation.Group`), write its row of the feed
and a slice of what is to be folded (`resident_folding.py`) in one transaction, COMMIT with an fsync, then apply the group to
memory and answer. What arrives during a COMMIT is the next group (`grouping.Turns`). One transaction is under way at a
time, and it may hold groups of several spaces.

What runs where. Evaluating and writing rows happen on the event loop: they need the interpreter anyway, and a thread
would hand it back and forth at every row. COMMIT leaves the interpreter alone while the disk works, so where it takes
much longer than handing over (INLINE_COMMIT_S) it runs in a thread, and the loop goes on serving reads and collecting. So
do jobs: creating, dropping, loading, compacting a space. A writer that was alone the last time commits at once, without
the queue, as long as COMMIT is quick. The write-ahead log is folded beside all this (`resident_log.py`).

Failure. A full disk rolls back: StorageFull, nothing changed. An I/O error in COMMIT leaves open what is on the disk:
OutcomeUnknown for what was accepted. From then on everything is refused (`failure` says why); so it is when the log
cannot be folded, when a transaction cannot be taken back, when the file was removed, renamed or replaced, and when another program has
written to it, since memory would show what the file does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import apsw
import msgspec

from holdfast.clock import Clock, elapsed_s
from holdfast.engine import Batch, Receipt
from holdfast.engines.evaluation import Group
from holdfast.engines.grouping import Outcome, Together, Turns, Waiting, answer, revise
from holdfast.engines.resident_file import Opened
from holdfast.engines.resident_folding import FOLD_PAUSE_S, FOLD_S, Folding, Slice
from holdfast.engines.resident_log import Log
from holdfast.engines.resident_space import ResidentSpace
from holdfast.engines.sqlite_file import FileLock, in_doubt, translate
from holdfast.engines.sqlite_place import gone
from holdfast.engines.sqlite_rows import Writer
from holdfast.errors import Error, OutcomeUnknown, Unavailable

INLINE_COMMIT_S: Final = 0.001
"""Where a COMMIT usually takes longer than this, it runs in a thread; handing over costs a fifth of it."""
INLINE_BYTES_MAX: Final = 512 * 1024
"""The COMMIT of a group with more bytes than this runs in a thread."""
PROBE_EVERY: Final = 256
"""One COMMIT of so many runs on the loop, to see how long it takes by now."""


class Done(NamedTuple):
    """A group of one space whose rows are written, the id of the space, and the bytes of the feed's row."""

    home: ResidentSpace
    group: Group
    id: int
    size: int


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

    def homes(self) -> list[ResidentSpace]:
        """All there are."""
        ...

    def write_volatile(self, space: str, batch: Batch) -> Receipt:
        """Commit to a space that is in no file."""
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
        self._gone = gone(self._writer, path)
        self._synchronous = "sync"
        self._turns = Turns("holdfast-resident", self._begin_next, self._commit_at_once)
        self.enter, self.submit = self._turns.enter, self._turns.submit
        self._jobs: deque[_Job] = deque()
        self._commit_s = INLINE_COMMIT_S / 10
        self._until_probe = PROBE_EVERY
        self._log = Log(path, self._writer)
        self.folding = Folding(self.rows)
        self.fold_every_s = FOLD_S
        self._slice: Slice | None = None
        """Of the transaction under way."""
        self._folds = True
        self._fold_alone_due = False
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    async def administer(self, work: Callable[[], Any], then: Callable[[], None]) -> Any:
        """A transaction of its own, when its turn has come: `work` in the thread, and after COMMIT `then` on the loop."""
        job = _Job(work, then, self._loop.create_future())
        self._jobs.append(job)
        self._turns.ask()
        return await job.reply

    async def close(self) -> None:
        """Finish what was accepted, and close the file."""
        while self._jobs or self._log.folding:
            running = self._turns.in_thread or self._log.folding
            await (asyncio.wait([running]) if running is not None else asyncio.sleep(0))
        await self._turns.close()
        for timer in self._timers.values():
            timer.cancel()
        self._fold_everything()
        self._log.close()
        with contextlib.suppress(apsw.Error):  # the disk may have failed
            self._writer.close()

    # --- whose turn it is ---

    def _commit_at_once(self, item: Waiting) -> bool:
        """For a writer that was alone the last time too."""
        if not self._is_quick(item.durability, item.size):
            return False
        self._commit_inline([item])
        return True

    def _begin_next(self) -> None:
        """A job, folding the log, or a group of what is queued."""
        self._log.fold_if_long(self._log_folded)
        queue = self._turns.queue
        if self._jobs:
            self._run_job(self._jobs.popleft())
        elif self._log.is_folded_but_for_the_rest:
            self._turns.start_thread(self._log.fold_rest, self._log_folded)
        elif queue:
            size, items = queue.bytes, queue.take_group()
            if items and self._is_quick(items[0].durability, size):
                answer(self._commit_inline(items))
            elif items and (done := self._write_group(items)):
                self._turns.start_thread(self._commit_rows, lambda error: answer(self._settle(items, done, error)))
            else:
                answer(items)
        elif self._fold_alone_due:
            self._fold_alone()
        self._fold_alone_due = False
        if self._jobs:
            self._turns.ask()
        if self.folding.is_under_way:
            self._call_later(FOLD_PAUSE_S, self._fold_slice)

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

    # --- a group ---

    def _commit_inline(self, items: list[Waiting]) -> list[Waiting]:
        done = self._write_group(items)
        if not done:
            return items
        began = elapsed_s()
        error = self._commit_rows()
        if items[0].durability == "sync":
            # About the median, however long the longest take: a step towards each one that is measured.
            self._commit_s *= 1.1 if elapsed_s() - began > self._commit_s else 0.9
        return self._settle(items, done, error)

    def _write_group(self, items: list[Waiting]) -> list[Done]:
        """Evaluate a group and write its rows; COMMIT comes next, unless nothing was written. Outcomes are in the items."""
        done: list[Done] = []
        try:
            try:
                done = self._evaluate(items, known_new=True)
            except apsw.ConstraintError:  # a request id is not new
                self._rollback()
                done = self._evaluate(items, known_new=False)
        except BaseException as exc:  # whoever waits must hear of it
            failure = translate(self._path, exc) if isinstance(exc, apsw.Error) else exc
            revise(_of_the_file(items), lambda outcome, batch: failure)
            self._folds = False
        if not done:
            self._rollback()
        return done

    def _evaluate(self, items: list[Waiting], *, known_new: bool) -> list[Done]:
        self.check()
        now = self._clock.now_ms()
        groups: dict[str, tuple[ResidentSpace, Group]] = {}
        self._expect(items)
        for item in items:
            space = item.space
            if space not in groups:
                home = self._keeping.home_of(space)
                groups[space] = home, Group(home, now)
            home, group = groups[space]
            if home.durability == "volatile" and home.exists:  # made anew while it waited
                if known_new:  # the second time it is done already, and no rollback takes it back
                    item.durability = "volatile"
                    revise([item], partial(self._write_volatile, space))
            elif type(item) is Together:
                item.outcomes = group.evaluate_all(item.batches, known_new=known_new)
            else:
                try:
                    item.outcome = group.evaluate(item.batch, known_new=known_new)
                except Error as exc:
                    item.outcome = exc
        written = [(home, group) for home, group in groups.values() if not group.empty]
        if not written:
            return []
        # The strictest that any of them asks for; one may have been made anew while its batch waited.
        relaxed = all(home.exists and home.durability == "async" for home, _ in written)
        self._begin("async" if relaxed else "sync")
        done: list[Done] = []
        for home, group in written:
            is_behind = home.unfolded.folded is not None
            id, size = self.rows.log(home, group, requests_are_new=known_new, is_behind=is_behind)
            done.append(Done(home, group, id, size))
        if self._folds:
            self._slice = self.folding.write_slice(dict(written))
        return done

    def _write_volatile(self, space: str, _: Outcome, batch: Batch) -> Receipt | Error:
        try:
            return self._keeping.write_volatile(space, batch)
        except Error as exc:
            return exc

    def _expect(self, items: list[Waiting]) -> None:
        """Requests that were sent before are searched together: after a crash there are many."""
        repeated: dict[str, list[Batch]] = {}
        for item in [item for item in items if not item.batch.fresh]:
            if item.batch.request_id is not None and item.durability != "volatile":
                repeated.setdefault(item.space, []).append(item.batch)
        for space, batches in repeated.items():
            if len(batches) > 1:
                self._keeping.home_of(space).expect(batches)

    def _begin(self, durability: str) -> None:
        """Begin a transaction, or go on with the one that a look-up has begun."""
        self._slice = None  # of one that was rolled back
        if durability != self._synchronous:
            self._rollback()  # what was looked up is known by now, and within a transaction the pragma has no effect
            self._write(f"PRAGMA synchronous = {'FULL' if durability == 'sync' else 'NORMAL'}")
            self._synchronous = durability
        if not self._writer.in_transaction:
            self._write("BEGIN IMMEDIATE")
        [(version,)] = self._write("PRAGMA data_version").fetchall()
        if version != self._data_version:
            self._fail(f"another program has written to {self._path} while this process owned it; open the store again")
        elif (reason := self._gone()) is not None:
            self._fail(reason)
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
            error = self._show(lambda: self._apply(done))
        if error is None:
            self._lock.ring()
            return items
        self._folds = False
        verdict = self._judge(error)

        def become(outcome: Outcome, batch: Batch) -> Error:
            if not isinstance(verdict, OutcomeUnknown):
                return verdict
            if isinstance(outcome, Receipt):
                return OutcomeUnknown(str(verdict), request_id=batch.request_id)
            # It was refused, on the strength of what may not have happened.
            return Unavailable(f"the disk that holds {self._path} failed; nothing was changed")

        revise(_of_the_file(items), become)
        return items

    def _apply(self, done: list[Done]) -> None:
        if self._slice is not None:
            self.folding.committed(self._slice)
        self._folds = True
        self._keeping.apply(done)
        for home, _, _, _ in done:
            self.folding.begin_if_due(home)
        if done:
            self._call_later(self.fold_every_s, self._fold_what_is_old)

    def _show(self, change: Callable[[], None]) -> BaseException | None:
        """Bring memory up to date with the file. If that fails half-way, memory is of no use any more."""
        try:
            change()
        except BaseException as exc:
            return exc
        return None

    # --- folding ---

    def _call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Once, however often it is asked for meanwhile."""

        def run() -> None:
            del self._timers[work]
            work()

        if work not in self._timers:
            self._timers[work] = self._loop.call_later(seconds, run)

    def _fold_what_is_old(self) -> None:
        for home in self._keeping.homes():
            self.folding.begin_if_due(home, now=True)
        self._turns.ask()

    def _fold_slice(self) -> None:
        self._fold_alone_due = True
        self._turns.ask()

    def _fold_alone(self) -> bool:
        """Commit a slice when no group takes it along. It needs no fsync: the feed has what it has."""
        try:
            self.check()
            self._begin("async")
            self._slice = self.folding.write_slice({})
        except (apsw.Error, Error):
            self._rollback()
            return False
        self._settle([], [], self._commit_rows())
        return self._folds and self.failure is None

    def _fold_everything(self) -> None:
        """When closing. If it cannot be done, whoever opens the file next does it."""
        for _ in range(2):  # a pass that is under way leaves what came since it began
            for home in self._keeping.homes():
                self.folding.begin_if_due(home, now=True)
            while self.folding.is_under_way and self._fold_alone():
                pass

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
            self._turns.start_thread(run, done)

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
        self._turns.queue.refuse_all(reason)
        self._keeping.fail(reason)

    def _log_folded(self, error: apsw.Error | None) -> None:
        # With no room for it the log stays longer, and with no room for the log commits are refused.
        if error is not None and not isinstance(error, apsw.FullError | apsw.BusyError | apsw.LockedError):
            self._fail(f"writing to {self._path} failed ({error}); check the disk and open the store again")
        elif self._log.is_folded_but_for_the_rest:
            self._turns.ask()


def _of_the_file(items: list[Waiting]) -> list[Waiting]:
    """All but what went to no file, and stays done whatever becomes of the others."""
    return [item for item in items if item.durability != "volatile"]
