"""A worker that dies at one of its commits, as a process does that is killed: nothing goes through any more, nothing is said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from holdfast.clock import Duration
from holdfast.engine import SCAN_MAX, SYSTEM_ACTOR, Batch, ChangeSet, Delete, Engine, Entry, Page, Receipt, Touch
from holdfast.errors import Error
from holdfast.layers.coordination import Coordination
from holdfast.layers.leases import Leases
from holdfast.layers.queue_entries import CONSUMERS
from holdfast.layers.workflows.worker import Worker
from holdfast.middleware.wrapper import Wrapper
from holdfast.space import Space

T = TypeVar("T")
P = ParamSpec("P")


class Dying(Wrapper):
    """An engine whose user dies at the commit with this number, counted from 0: before it, or after it and before the answer.

    Touches are not counted: to die at one is to die before the commit that comes next.
    """

    def __init__(self, inner: Engine, at: int | None = None, *, after: bool = False) -> None:
        super().__init__(inner)
        self.commits = 0
        self.dead = asyncio.Event()
        self.dying = False
        """Whether the commit after which it dies is under way."""
        self._at = at
        self._after = after

    async def _live(self) -> None:
        """Return, unless it is dead."""
        if self.dead.is_set():
            await asyncio.get_running_loop().create_future()

    async def commit(self, space: str, batch: Batch) -> Receipt:
        await self._live()
        if all(isinstance(op, Touch) for op in batch.operations):
            return await self.inner.commit(space, batch)
        number, self.commits = self.commits, self.commits + 1
        if number == self._at:
            self.dying = self._after
            self.dead.set()
            if self._after:
                with contextlib.suppress(Error):  # a refusal is an answer, too, that nobody hears
                    await self.inner.commit(space, batch)
                self.dying = False
            await self._live()
        return await self.inner.commit(space, batch)

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        await self._live()
        return await self.inner.get(space, keys)

    async def scan(self, space: str, prefix: str, **how: Any) -> Page:
        await self._live()
        return await self.inner.scan(space, prefix, **how)

    async def watch(self, space: str, *prefixes: str, **how: Any) -> AsyncIterator[ChangeSet]:
        async for commit in self.inner.watch(space, *prefixes, **how):
            await self._live()
            yield commit


class Life:
    """The life of one worker that has nothing in common with others but the store."""

    def __init__(
        self,
        space: Space,
        folder: Path,
        workflows: Sequence[Any],
        at: int | None = None,
        *,
        after: bool = False,
        replaced: Mapping[str, Callable[..., Any]] | None = None,
        lease: Duration | None = None,
        queues: Sequence[str] = (),
    ) -> None:
        self.engine = Dying(space._scope.engine, at, after=after)
        self.coordination = Coordination(Leases(space._scope.clock))
        scope = msgspec.structs.replace(space._scope, engine=self.engine)
        self.worker: Worker = Space(scope, lambda: folder, self.coordination).workflows.worker(
            workflows, lease=lease, queues=queues
        )
        self.worker.threads = Inline()
        self.worker.replaced = replaced or {}
        self._task = asyncio.ensure_future(self.worker.run())

    async def end(self) -> None:
        """As a killed process ends."""
        self.engine.dead.set()
        self.worker.abandon()
        await self.coordination.leases.close()
        ended = False
        while not ended:  # what it does on its way out is cancelled too
            self._task.cancel()
            for part in self.coordination._shared.values():
                for task in (part._task, getattr(part, "_watch", None)):
                    if task is not None:
                        task.cancel()
            await asyncio.wait([self._task], timeout=0)
            ended = self._task.done()

    async def bury(self) -> None:
        """Let its leases end now, however long they were."""
        engine, space = self.engine.inner, self.worker.scope.space
        page = await engine.scan(space, CONSUMERS.prefix(), limit=SCAN_MAX)
        await engine.commit(space, Batch(SYSTEM_ACTOR, tuple(Delete(entry.key) for entry in page.entries)))


class Inline(Executor):
    """Instead of threads: whatever is submitted is done at once, so that time does not pass it by."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as exc:
            done.set_exception(exc)
        return done
