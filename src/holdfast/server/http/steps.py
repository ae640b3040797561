"""Several operations and conditions at once, all or nothing, each with its result; also one operation alone.

Two ways. When nothing must be read first, everything is one batch, and repeating it under its request id gives the receipt
of the first time. When something is read (Get of what the transaction has not written itself, CompareAndSwap of what it
has incremented), it is a transaction that reads, computes and writes, and its answer is remembered (`layers/answers.py`).

A Get sees the transaction's own writes. Conditions are about how things were before it. A transaction of nothing but Gets
is one snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

from holdfast.clock import Clock
from holdfast.codec import encode
from holdfast.engine import Condition, Operation
from holdfast.errors import Conflict
from holdfast.keys import shown
from holdfast.layers.batch import (
    ABSENT,
    absent,
    at_least,
    delete_,
    increment,
    present,
    record_key,
    set_,
    value_is,
    version_is,
)
from holdfast.layers.records import RecordTransaction
from holdfast.server.http.shapes import Int64, Key, Lifetime, Version, Wire, Word, plain
from holdfast.space import Space

STEPS_MAX: Final = 120
"""Of one transaction; a batch has 128 operations, one of which may be the answer."""
CONDITIONS_MAX: Final = 64


class Step(Wire, frozen=True, tag_field="operation"):
    """One operation."""

    key: Key


class Get(Step, frozen=True, tag="Get"):
    """The value, or null."""


class Set(Step, frozen=True, tag="Set"):
    """Write a value; without a ttl it stays, unless its type has a retention."""

    value: Any
    ttl: Lifetime | None = None
    type: Word | None = None
    state: Word | None = None


class Delete(Step, frozen=True, tag="Delete"):
    """Remove a record; tells whether there was one."""


class Increment(Step, frozen=True, tag="Increment"):
    """Add to a 64-bit number; gives the sum."""

    delta: Int64 = 1
    ttl: Lifetime | None = None


class CompareAndSwap(Step, frozen=True, tag="CompareAndSwap"):
    """Write `new` if the record holds `old`; null: if there is none."""

    new: Any
    old: Any = None
    ttl: Lifetime | None = None


AnyStep: TypeAlias = Get | Set | Delete | Increment | CompareAndSwap


class Absent(Wire, frozen=True, tag_field="condition", tag="Absent"):
    """There is no such record."""

    key: Key


class Present(Wire, frozen=True, tag_field="condition", tag="Present"):
    """There is one."""

    key: Key


class VersionIs(Wire, frozen=True, tag_field="condition", tag="VersionIs"):
    """It is at this version."""

    key: Key
    version: Version


class ValueIs(Wire, frozen=True, tag_field="condition", tag="ValueIs"):
    """It holds exactly this."""

    key: Key
    value: Any


class AtLeast(Wire, frozen=True, tag_field="condition", tag="AtLeast"):
    """Its number is at least this; no record counts as 0."""

    key: Key
    number: Int64


AnyCondition: TypeAlias = Absent | Present | VersionIs | ValueIs | AtLeast

Steps: TypeAlias = Annotated[list[AnyStep], Meta(min_length=1, max_length=STEPS_MAX)]
Conditions: TypeAlias = Annotated[list[AnyCondition], Meta(max_length=CONDITIONS_MAX)]


@dataclass(frozen=True)
class Outcome:
    """One result per step, and when it was committed (or read)."""

    results: list[Any]
    at: int


async def run_steps(
    space: Space, clock: Clock, conditions: list[AnyCondition], steps: list[AnyStep], request_id: str | None
) -> Outcome:
    """Do it, or raise and change nothing."""
    plan = _Plan()
    if all(plan.add(step) for step in steps):
        receipt = await space.commit(
            *(_condition(condition) for condition in conditions),
            *plan.conditions,
            *plan.operations,
            request_id=request_id,
        )
        return Outcome([result(receipt.results) for result in plan.results], receipt.at)

    async def work(tx: RecordTransaction) -> Any:
        for condition in conditions:
            await _require(tx, condition)
        return [[await _do(tx, step) for step in steps], clock.now_ms()]

    asked = [[plain(condition) for condition in conditions], [plain(step) for step in steps]]
    if all(isinstance(step, Get) for step in steps):
        request_id = None  # it changes nothing: repeating it reads anew
    results, at = await space.records.transact(work, request_id=request_id, asked=asked)
    return Outcome(results, at)


class _Plan:
    """One batch, made step by step, as long as no step must read something first."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.conditions: list[Condition] = []
        self.results: list[Any] = []
        """Functions from a receipt's results."""
        self._known: dict[str, Any] = {}
        """What the steps before wrote, or ABSENT."""
        self._sums: dict[str, int] = {}
        """The operation that gave a number that is known to the store alone."""

    def add(self, step: AnyStep) -> bool:
        """Whether it could be added."""
        key, at = step.key, len(self.operations)
        if isinstance(step, Get):
            if key in self._sums:
                at = self._sums[key]
                self.results.append(lambda results: results[at])
                return True
            if key not in self._known:
                return False
            value = self._known[key]
            self.results.append(lambda results: None if value is ABSENT else value)
            return True
        if isinstance(step, Delete):
            self.operations.append(delete_(key))
            self.results.append(lambda results: results[at])
            self._write(key, ABSENT)
        elif isinstance(step, Increment):
            self.operations.append(increment(key, step.delta, ttl=step.ttl))
            self.results.append(lambda results: results[at])
            self._sums[key] = at
        else:
            if isinstance(step, CompareAndSwap) and not self._compares(step):
                return False
            self.operations.append(_put(step))
            self.results.append(lambda results: True)
            self._write(key, step.value if isinstance(step, Set) else step.new)
        return True

    def _compares(self, step: CompareAndSwap) -> bool:
        if step.key in self._sums:
            return False
        expected = ABSENT if step.old is None else step.old
        if step.key not in self._known:
            self.conditions.append(value_is(step.key, expected))
        else:
            _compare(step, self._known[step.key])
        return True

    def _write(self, key: str, value: Any) -> None:
        self._known[key] = value
        self._sums.pop(key, None)


def _put(step: Set | CompareAndSwap) -> Operation:
    if isinstance(step, Set):
        return set_(step.key, step.value, ttl=step.ttl, type=step.type, state=step.state)
    return set_(step.key, step.new, ttl=step.ttl)


def _condition(condition: AnyCondition) -> Condition:
    match condition:
        case Absent(key):
            return absent(key)
        case Present(key):
            return present(key)
        case VersionIs(key, version):
            return version_is(key, version)
        case ValueIs(key, value):
            return value_is(key, value)
        case AtLeast(key, number):
            return at_least(key, number)


async def _do(tx: RecordTransaction, step: AnyStep) -> Any:
    """One step of a transaction that reads."""
    if isinstance(step, Get):
        return await tx.get(step.key)
    if isinstance(step, Delete):
        existed = await tx.exists(step.key)
        tx.delete(step.key)
        return existed
    if isinstance(step, Increment):
        tx.increment(step.key, step.delta, ttl=step.ttl)
        return await tx.get(step.key)
    if isinstance(step, CompareAndSwap):
        _compare(step, await tx.get(step.key) if await tx.exists(step.key) else ABSENT)
        tx.set(step.key, step.new, ttl=step.ttl)
    else:
        tx.set(step.key, step.value, ttl=step.ttl, type=step.type, state=step.state)
    return True


def _compare(step: CompareAndSwap, value: Any) -> None:
    holds = (
        value is ABSENT if step.old is None else value is not ABSENT and encode(value, known=True) == encode(step.old)
    )
    if not holds:
        raise _refused(step.key, "absent" if step.old is None else "value")


async def _require(tx: RecordTransaction, condition: AnyCondition) -> None:
    """A condition of a transaction that reads: its reads are part of the commit, so it may be decided here."""
    key = condition.key
    match condition:
        case Absent():
            kind, holds = "absent", not await tx.exists(key)
        case Present():
            kind, holds = "present", await tx.exists(key)
        case VersionIs():
            record = await tx.entry(key)
            kind, holds = "version", record is not None and record.version == condition.version
        case ValueIs():
            kind = "value"
            holds = await tx.exists(key) and encode(await tx.get(key), known=True) == encode(condition.value)
        case AtLeast():
            number = await tx.get(key, 0)
            kind, holds = "at_least", type(number) is int and number >= condition.number
    if not holds:
        raise _refused(key, kind)


def _refused(key: str, kind: str) -> Conflict:
    return Conflict(
        f"nothing was changed: the condition {kind!r} on {shown(record_key(key))} does not hold",
        key=record_key(key),
        condition=kind,
    )
