"""The same objects without `await`.

    with holdfast.blocking.open("team.db") as store:
        store.space("contoso").records.set("regime", "risk-on")

Every class here is made from its asynchronous original: an `async def` becomes a method that waits, an asynchronous
iterator an ordinary one, and what they return is wrapped in turn. The work runs on one background event loop per store.
A function given to `transact` is an ordinary function; it runs in a thread of its own and gets a blocking `tx`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar, cast

from holdfast import store as _store
from holdfast.errors import InvalidInput, Unavailable
from holdfast.layers.audit import Audit as _Audit
from holdfast.layers.blobs import Blobs as _Blobs
from holdfast.layers.correlations import Correlation as _Correlation
from holdfast.layers.correlations import Correlations as _Correlations
from holdfast.layers.correlations import SharedContext as _SharedContext
from holdfast.layers.dead_letters import DeadLetters as _DeadLetters
from holdfast.layers.document_heads import Documents as _Documents
from holdfast.layers.documents import Document as _Document
from holdfast.layers.documents import Locked as _Locked
from holdfast.layers.guards import Guard as _Guard
from holdfast.layers.locks import Wanted as _Wanted
from holdfast.layers.messages import Message as _Message
from holdfast.layers.observers import TaskOverview as _TaskOverview
from holdfast.layers.orchestrator import Orchestrator as _Orchestrator
from holdfast.layers.pipelines import PipelineHandle as _PipelineHandle
from holdfast.layers.pipelines import Pipelines as _Pipelines
from holdfast.layers.pools import Pool as _Pool
from holdfast.layers.queues import Queue as _Queue
from holdfast.layers.queues import Queues as _Queues
from holdfast.layers.queues import Reservation as _Reservation
from holdfast.layers.records import Records as _Records
from holdfast.layers.records import RecordTransaction as _RecordTransaction
from holdfast.layers.schemas import Schemas as _Schemas
from holdfast.layers.standings import Locks as _Locks
from holdfast.layers.task_handle import TaskHandle as _TaskHandle
from holdfast.layers.task_launch import ManagerInfo
from holdfast.layers.tasks import Tasks as _Tasks
from holdfast.layers.workflows.handles import ExecutionHandle as _ExecutionHandle
from holdfast.layers.workflows.handles import Workflows as _Workflows
from holdfast.layers.workflows.schedules import Schedules as _Schedules
from holdfast.layers.workflows.worker import Worker as _Worker
from holdfast.space import Space as _Space

if TYPE_CHECKING:
    from holdfast.manager.options import ManagerOptions

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._closed = False
        self._closing = threading.RLock()  # the garbage collector may call in here at any moment
        self._ending: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-blocking", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work. What still waits when the store is closed is ended, with Unavailable."""
        if os.getpid() != self._process:  # the loop's thread is the parent's, and nobody would answer
            work.close()
            raise Unavailable("this store was opened before a fork; open it again in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidInput(
                "a blocking store was used by a function that the store itself has called, on its own event loop, and would wait "
                "for itself for ever; do this in a thread, or before or after"
            )
        with self._closing:
            if self._closed:
                work.close()
                raise Unavailable("the store is closed; open it again")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            if not self._closed:
                raise
            raise Unavailable("the store was closed while this call waited; whether it was done is not known") from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[Any], wrap: Callable[[Any], Any]) -> Iterator[Any]:
        end = object()

        async def step() -> Any:
            return await anext(items, end)

        try:
            while (item := self.run(step())) is not end:
                yield wrap(item)
        finally:
            if inspect.isasyncgen(items):
                self._finish(items)

    def _finish(self, items: AsyncGenerator[T, Never]) -> None:
        """End an iteration. Whoever left it may be the garbage collector: in any thread, after a fork, or as Python ends."""

        async def finish() -> None:
            await items.aclose()

        if self._closed or os.getpid() != self._process or sys.is_finalizing():
            return
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(finish())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            with suppress(Unavailable):
                self.run(finish())

    def close(self) -> None:
        """End what still waits, and the loop."""
        with self._closing:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


class Blocking:
    """Something asynchronous, waited for."""

    def __init__(self, loop: _Loop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner

    def _wrap(self, value: Any) -> Any:
        kind = _KINDS.get(type(value))
        if kind is not None:
            return kind(self._loop, value)
        if isinstance(value, AsyncIterator):
            return self._loop.iterate(value, self._wrap)
        return value

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the asynchronous one and waits for it."""

    @functools.wraps(original)
    def method(self: Blocking, *args: Any, **kwargs: Any) -> Any:
        if original.__name__ == "transact" and args:
            args = (_in_thread(self, args[0]), *args[1:])
        elif original.__name__ == "transact" and "work" in kwargs:
            kwargs["work"] = _in_thread(self, kwargs["work"])
        answer = original(self._inner, *args, **kwargs)
        return self._wrap(self._loop.run(answer) if inspect.iscoroutine(answer) else answer)

    return method


def _in_thread(self: Blocking, work: Callable[[Any], T]) -> Callable[[Any], Coroutine[Any, Any, T]]:
    async def run(tx: Any) -> T:
        answer = await _threaded(work, self._wrap(tx))
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                answer.close()
            raise InvalidInput(
                f"{getattr(work, '__qualname__', work)!r:.60} is asynchronous, and nothing of it was done: with a blocking store, "
                "transact takes a plain function"
            )
        return answer

    return run


async def _threaded(work: Callable[[Any], T], tx: Any) -> T:
    """Call it in a thread of its own: in a pool, those that wait for the store would take the threads the store needs."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def tell(answer: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((answer, error))

    def call() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(work, tx), None
        except BaseException as exc:
            outcome = None, exc
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=call, name="holdfast-transact", daemon=True).start()
    answer, error = await done
    if error is not None:
        raise error
    return cast(T, answer)


def _enter(self: Blocking) -> Any:
    return self._wrap(self._loop.run(self._inner.__aenter__()))


def _exit(self: Blocking, *exc: object) -> None:
    self._loop.run(self._inner.__aexit__(*exc))


def _acquire(self: Blocking) -> Any:
    guard = self._loop.run(self._inner.acquire())
    self._inner._entered(threading.get_ident(), guard)
    return self._wrap(guard)


def _release(self: Blocking, kind: object, exc: BaseException | None, trace: object) -> None:
    self._loop.run(self._inner._left(threading.get_ident(), exc))


def _passing(name: str, original: Any) -> property:
    return property(lambda self: self._wrap(getattr(self._inner, name)), doc=original.__doc__)


_ANY_BLOCK: Final[tuple[Callable[..., Any], Callable[..., Any]]] = (_enter, _exit)


def _blocking(
    original: type,
    attributes: tuple[str, ...] = (),
    block: tuple[Callable[..., Any], Callable[..., Any]] = _ANY_BLOCK,
) -> type[Blocking]:
    """The blocking twin of a class, made from its public methods and properties; `block` is how `with` begins and ends."""
    members: dict[str, Any] = {"__doc__": original.__doc__}
    for name, member in vars(original).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            members[name] = _waiting(member)
        elif isinstance(member, property | functools.cached_property):
            members[name] = _passing(name, member)
    for name in attributes:
        members[name] = _passing(name, _KINDS_DOC)
    if hasattr(original, "__aenter__"):
        members |= {"__enter__": block[0], "__exit__": block[1]}
    return type(original.__name__, (Blocking,), members)


class _KINDS_DOC:
    """An attribute of the original."""


Records = _blocking(_Records)
RecordTransaction = _blocking(_RecordTransaction)
Audit = _blocking(_Audit)
Blobs = _blocking(_Blobs)
Locks = _blocking(_Locks)
Schemas = _blocking(_Schemas)
Pool = _blocking(_Pool, ("size",))
Wanted = _blocking(_Wanted, block=(_acquire, _release))  # by thread: each call is a task of its own
Guard = _blocking(_Guard, ("acquired_at", "holder", "id", "name", "space", "token"))
Documents = _blocking(_Documents)
Document = _blocking(_Document, ("mode", "name"))
Locked = _blocking(_Locked)
Correlation = _blocking(_Correlation, ("context", "id"))
Correlations = _blocking(_Correlations)
SharedContext = _blocking(_SharedContext)
Orchestrator = _blocking(_Orchestrator, ("decided", "merge", "published"))
Queue = _blocking(_Queue, ("name", "options"))
Queues = _blocking(_Queues)
Tasks = _blocking(_Tasks)
TaskHandle = _blocking(_TaskHandle, ("tid",))
TaskOverview = _blocking(_TaskOverview, ("counts", "cursor", "window_ms"))
Pipelines = _blocking(_Pipelines)
PipelineHandle = _blocking(_PipelineHandle, ("id",))
Message = _blocking(_Message, ("attempts", "id", "queue"))
Reservation = _blocking(_Reservation)
DeadLetters = _blocking(_DeadLetters)
Workflows = _blocking(_Workflows)
ExecutionHandle = _blocking(_ExecutionHandle, ("id",))
Schedules = _blocking(_Schedules)
Worker = _blocking(_Worker, ("concurrency",))
Space = _blocking(_Space, ("judgement", "records"))


class Store(_blocking(_store.Store, ("url",))):  # type: ignore[misc]
    """An open store. Made by `holdfast.blocking.open`; a context manager that closes it."""

    def close(self) -> None:
        """Close the store and end its loop; calls that still wait end with Unavailable. Closing again does nothing."""
        if self._loop.closed:
            return
        try:
            self._loop.run(self._inner.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_KINDS: dict[type, type[Blocking]] = {
    _store.Store: Store,
    _Space: Space,
    _Records: Records,
    _RecordTransaction: RecordTransaction,
    _Audit: Audit,
    _Blobs: Blobs,
    _Locks: Locks,
    _Schemas: Schemas,
    _Pool: Pool,
    _Wanted: Wanted,
    _Guard: Guard,
    _Documents: Documents,
    _Document: Document,
    _Locked: Locked,
    _Correlation: Correlation,
    _Correlations: Correlations,
    _SharedContext: SharedContext,
    _Orchestrator: Orchestrator,
    _Queue: Queue,
    _Queues: Queues,
    _Tasks: Tasks,
    _TaskHandle: TaskHandle,
    _TaskOverview: TaskOverview,
    _Pipelines: Pipelines,
    _PipelineHandle: PipelineHandle,
    _Message: Message,
    _Reservation: Reservation,
    _DeadLetters: DeadLetters,
    _Workflows: Workflows,
    _ExecutionHandle: ExecutionHandle,
    _Schedules: Schedules,
    _Worker: Worker,
}


@functools.wraps(_store.open, assigned=("__doc__",))
def open(url: str | os.PathLike[str], **options: Any) -> Store:
    loop = _Loop()
    try:
        return Store(loop, loop.run(_store.open(url, **options).__aenter__()))
    except BaseException:
        loop.close()
        raise


def ensure_manager(space: Blocking, options: ManagerOptions | None = None, **changes: Any) -> ManagerInfo:
    """See that a manager serves this space on this host, as `holdfast.ensure_manager` does."""
    from holdfast.manager.starting import ensure_manager

    info: ManagerInfo = space._loop.run(ensure_manager(space._inner, options, **changes))
    return info
