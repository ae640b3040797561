"""What is done is counted and traced: an engine that tells somebody of every operation, its outcome and its time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from holdfast.clock import elapsed_s
from holdfast.engine import Batch, ChangeSet, Durability, Engine, Entry, Page, Receipt, SpaceInfo
from holdfast.errors import Error
from holdfast.middleware.wrapper import Wrapper

T = TypeVar("T")


class Observe(Protocol):
    """Told of every operation: its name, its outcome ("ok" or an error's code), how many seconds it took, how many they were."""

    def __call__(self, op: str, outcome: str, seconds: float, count: int = 1) -> None: ...


Span = Callable[[str, str], AbstractContextManager[None]]
"""Something around an operation on a space."""
Tell = Callable[[str], None]
"""Told of the request id of a batch, by which the audit knows it."""


class Observed(Wrapper):
    """Tells of each commit, get, scan, watch and create."""

    def __init__(self, inner: Engine, observe: Observe, span: Span, tell: Tell | None = None) -> None:
        super().__init__(inner)
        self._tell = tell
        self._observe = observe
        self._span = span

    async def commit(self, space: str, batch: Batch) -> Receipt:
        if self._tell is not None and batch.request_id is not None:
            self._tell(batch.request_id)
        return await self._told("commit", space, self.inner.commit(space, batch))

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return await self._told("get", space, self.inner.get(space, keys))

    async def scan(
        self, space: str, prefix: str, *, after: str | None = None, limit: int = 1000, reverse: bool = False
    ) -> Page:
        work = self.inner.scan(space, prefix, after=after, limit=limit, reverse=reverse)
        return await self._told("scan", space, work)

    async def create(self, space: str, durability: Durability = "sync", *, audit_reads: bool = False) -> SpaceInfo:
        return await self._told("create", space, self.inner.create(space, durability, audit_reads=audit_reads))

    def watch(
        self, space: str, *prefixes: str, cursor: str | None = None, live: bool = True
    ) -> AsyncIterator[ChangeSet]:
        self._observe("watch", "ok", 0.0)
        return self.inner.watch(space, *prefixes, cursor=cursor, live=live)

    async def _told(self, op: str, space: str, work: Awaitable[T]) -> T:
        began, outcome = elapsed_s(), "ok"
        try:
            with self._span(op, space):
                return await work
        except Error as exc:
            outcome = exc.code
            raise
        except BaseException:
            outcome = "error"
            raise
        finally:
            self._observe(op, outcome, elapsed_s() - began)
