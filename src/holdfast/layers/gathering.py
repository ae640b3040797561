"""Small batches that come at the same time, sent as one.

A message that is put, or acknowledged, is a batch of two or three operations. Every batch costs its round trip, its request id, its
place in the feed. So while one commit is under way, those of the same agent that arrive meanwhile are gathered, and go
together as soon as it is back: up to OPERATIONS_MAX operations, CONDITIONS_MAX conditions and GATHERED_BYTES_MAX bytes. Nobody waits for
company; whoever comes alone goes alone. Increments of one number become one, whose sum everybody is told.

What each of them means does not change. All conditions of a batch are judged before its operations, so two batches are not
gathered if one tests or writes a key that the other writes; adding to the same number is all they may have in common. If what was gathered is refused, each goes alone, and only who
is to blame is told. When nobody knows what became of it (OutcomeUnknown), all are told so. A caller that is cancelled
meanwhile misses its answer, and breaks nobody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from holdfast.engine import (
    CONDITIONS_MAX,
    OPERATIONS_MAX,
    Condition,
    Delete,
    Empty,
    Increment,
    Operation,
    Push,
    Put,
    Receipt,
    Result,
)
from holdfast.errors import Error, OutcomeUnknown, Unavailable
from holdfast.layers.scope import Scope

GATHERED_BYTES_MAX: Final = 1024 * 1024
ALONE_BYTES_MIN: Final = 128 * 1024
"""A batch of this size has nothing to gain from company."""


class _Part:
    """One caller's batch."""

    __slots__ = ("added", "conditions", "operations", "reply", "size", "tested", "written")

    def __init__(self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...], size: int) -> None:
        self.operations = operations
        self.conditions = conditions
        self.size = size
        self.reply: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self.tested = [condition.key for condition in conditions]  # type: ignore[union-attr]
        self.written = [op.key for op in operations if type(op) is Put or type(op) is Delete]
        self.added = [op.key for op in operations if type(op) is Increment]


class _Keys:
    """What those that go together have to do with which keys."""

    __slots__ = ("added", "tested", "written")

    def __init__(self) -> None:
        self.tested: set[str] = set()
        self.written: set[str] = set()
        self.added: set[str] = set()

    def allow(self, part: _Part) -> bool:
        """Whether it makes no difference that this one goes with them: numbers are the only thing that they may share."""
        return (
            self.written.isdisjoint(part.tested)
            and self.written.isdisjoint(part.written)
            and self.written.isdisjoint(part.added)
            and self.added.isdisjoint(part.tested)
            and self.added.isdisjoint(part.written)
            and self.tested.isdisjoint(part.written)
            and self.tested.isdisjoint(part.added)
        )

    def add(self, part: _Part) -> None:
        self.tested.update(part.tested)
        self.written.update(part.written)
        self.added.update(part.added)


class Gathering:
    """The small batches of one agent in one space."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._waiting: deque[_Part] = deque()
        self._task: asyncio.Task[None] | None = None

    async def commit(self, operations: tuple[Operation, ...], conditions: tuple[Condition, ...] = ()) -> Receipt:
        """As `scope.commit`; the receipt's results are those of these operations."""
        size = _size(operations, conditions)
        if size is None:
            return await self._scope.commit(operations, conditions)
        part = _Part(operations, conditions, size)
        if not set(part.added).isdisjoint(part.written):
            return await self._scope.commit(operations, conditions)  # its order matters, number by number
        self._waiting.append(part)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return await part.reply

    async def close(self) -> None:
        """Send what was accepted."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._send(self._gather())
        finally:
            self._task = None

    def _gather(self) -> list[_Part]:
        """The first ones that go together."""
        waiting = self._waiting
        gathered: list[_Part] = []
        operations = conditions = size = 0
        keys = _Keys()
        while waiting:
            part = waiting[0]
            if part.reply.cancelled():
                waiting.popleft()
                continue
            operations += len(part.operations)
            conditions += len(part.conditions)
            size += part.size
            if gathered and (
                operations > OPERATIONS_MAX
                or conditions > CONDITIONS_MAX // 2  # a policy adds its own
                or size > GATHERED_BYTES_MAX
                or not keys.allow(part)
            ):
                break
            keys.add(part)
            gathered.append(waiting.popleft())
        return gathered

    async def _send(self, parts: list[_Part]) -> None:
        if not parts:
            return
        if len(parts) == 1:
            await self._alone(parts[0])
            return
        operations: list[Operation] = []
        where: list[list[int]] = []
        numbers: dict[str, int] = {}
        for part in parts:
            places = []
            for op in part.operations:
                if type(op) is Increment and op.ttl_ms is None:
                    place = numbers.get(op.key)
                    if place is not None:
                        before = operations[place]
                        operations[place] = Increment(op.key, before.delta + op.delta)  # type: ignore[union-attr]
                    else:
                        place = numbers[op.key] = len(operations)
                        operations.append(op)
                else:
                    place = len(operations)
                    operations.append(op)
                places.append(place)
            where.append(places)
        conditions = tuple(dict.fromkeys(condition for part in parts for condition in part.conditions))
        try:
            receipt = await self._scope.commit(tuple(operations), conditions)
        except (OutcomeUnknown, Unavailable) as exc:  # nobody knows, or nothing was done: the same for all
            for part in parts:
                _fail(part, exc)
        except Error:
            # At the same time: the engine commits them in one go. Who came later goes later.
            await asyncio.gather(*(self._alone(part) for part in parts))
        except BaseException as exc:
            for part in parts:
                _fail(part, exc)
            raise
        else:
            for part, places in zip(parts, where, strict=True):
                results: list[Result] = [receipt.results[place] for place in places]
                _answer(part, Receipt(receipt.version, receipt.at, results))

    async def _alone(self, part: _Part) -> None:
        if part.reply.cancelled():
            return
        try:
            receipt = await self._scope.commit(part.operations, part.conditions)
        except Exception as exc:
            _fail(part, exc)
        except BaseException as exc:
            _fail(part, exc)
            raise
        else:
            _answer(part, receipt)


def _size(operations: tuple[Operation, ...], conditions: tuple[Condition, ...]) -> int | None:
    """The bytes of a batch that may be gathered; None when it goes alone."""
    if len(operations) > OPERATIONS_MAX // 2 or len(conditions) > CONDITIONS_MAX // 4:
        return None
    size = 0
    for op in operations:
        kind = type(op)
        if kind is Put or kind is Push:
            if type(op.value) is not bytes:  # type: ignore[union-attr]
                return None  # to be told so by itself
            size += len(op.value)  # type: ignore[union-attr]
        elif kind is not Delete and kind is not Increment:
            return None
    for condition in conditions:
        if type(condition) is Empty:
            return None
    return size if size < ALONE_BYTES_MIN else None


def _answer(part: _Part, receipt: Receipt) -> None:
    if not part.reply.done():
        part.reply.set_result(receipt)


def _fail(part: _Part, exc: BaseException) -> None:
    if not part.reply.done():
        part.reply.set_exception(exc)
