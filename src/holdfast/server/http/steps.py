"""Several operations and conditions at once, all or nothing, each with its result; also one operation alone.

Two ways. When nothing must be read first, everything is one batch, and repeating it under its request id gives the receipt
of the first time. When something is read (Get of what the transaction has not written itself, CompareAndSwap of what it
has incremented), it is a transaction that reads, computes and writes, and its answer is remembered (`layers/answers.py`).

A Get sees the transaction's own writes. What it reads is passed on as it is stored, and never read, as far as it can be: to be
remembered it must be, and then it has a bound (`limits.ELEMENTS_MAX`). Conditions are about how things were before it. A transaction of nothing but Gets
is one snapshot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Raw

from holdfast.clock import Clock
from holdfast.codec import encode, integer, passed_on
from holdfast.engine import Condition, Operation, Put
from holdfast.errors import Conflict, InvalidInput
from holdfast.keys import shown
from holdfast.layers.batch import (
    ABSENT,
    AbsentType,
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
from holdfast.server.http.reading import between_texts
from holdfast.server.http.shapes import Int64, Key, Lifetime, Version, Wire, Word, plain
from holdfast.space import Space

STEPS_MAX: Final = 120
"""Of one transaction; a batch has 128 operations, one of which may be the answer."""
CONDITIONS_MAX: Final = 64
READ_BYTES_MAX: Final = 16 * 1024 * 1024
"""What the Gets of one transaction give together."""
READ_AT_ONCE_BYTES: Final = 64 * 1024
"""Of what they give, up to here nobody needs to know how many values are in it."""


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
    plan = _Plan(_Reads())
    if all(plan.add(step) for step in steps):
        receipt = await space.commit(
            *(_condition(condition) for condition in conditions),
            *plan.conditions,
            *plan.operations,
            request_id=request_id,
        )
        return Outcome([result(receipt.results) for result in plan.results], receipt.at)

    asked = [[plain(condition) for condition in conditions], [plain(step) for step in steps]]
    if all(isinstance(step, Get) for step in steps):
        request_id = None  # it changes nothing: repeating it reads anew

    async def work(tx: RecordTransaction) -> Any:
        for condition in conditions:
            await _require(tx, condition)
        reads = _Reads()
        results = [await _do(tx, step, reads) for step in steps]
        if request_id is not None and reads.size > READ_AT_ONCE_BYTES:
            # Remembered, it is read again.
            await asyncio.to_thread(
                between_texts, encode(results, known=True), "what a transaction that writes may read"
            )
        return [results, clock.now_ms()]

    results, at = await space.records.transact(work, request_id=request_id, asked=asked)
    return Outcome(results, at)


class _Reads:
    """What the Gets of a transaction give."""

    def __init__(self) -> None:
        self.size = 0
        """In bytes."""

    def give(self, value: Raw | None) -> Raw | None:
        if value is None:
            return None
        self.size += memoryview(value).nbytes
        if self.size > READ_BYTES_MAX:
            raise InvalidInput(
                f"the Gets of one transaction give at most {READ_BYTES_MAX:,} bytes together; nothing was done. Read fewer at once"
            )
        return passed_on(value)


class _Plan:
    """One batch, made step by step, as long as no step must read something first."""

    def __init__(self, reads: _Reads) -> None:
        self._reads = reads
        self.operations: list[Operation] = []
        self.conditions: list[Condition] = []
        self.results: list[Any] = []
        """Functions from a receipt's results."""
        self._known: dict[str, Raw | AbsentType] = {}
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
            known = self._known[key]
            value = self._reads.give(known if isinstance(known, Raw) else None)
            self.results.append(lambda results: value)
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
            put = _put(step)
            self.operations.append(put)
            self.results.append(lambda results: True)
            self._write(key, Raw(put.value))
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

    def _write(self, key: str, value: Raw | AbsentType) -> None:
        self._known[key] = value
        self._sums.pop(key, None)


def _put(step: Set | CompareAndSwap) -> Put:
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


async def _do(tx: RecordTransaction, step: AnyStep, reads: _Reads) -> Any:
    """One step of a transaction that reads."""
    if isinstance(step, Get):
        return reads.give(await tx.get(step.key, as_type=Raw))
    if isinstance(step, Delete):
        existed = await tx.exists(step.key)
        tx.delete(step.key)
        return existed
    if isinstance(step, Increment):
        tx.increment(step.key, step.delta, ttl=step.ttl)
        return await tx.get(step.key)
    if isinstance(step, CompareAndSwap):
        _compare(step, await tx.get(step.key, ABSENT, as_type=Raw))
        tx.set(step.key, step.new, ttl=step.ttl)
    else:
        tx.set(step.key, step.value, ttl=step.ttl, type=step.type, state=step.state)
    return True


def _compare(step: CompareAndSwap, value: Raw | AbsentType) -> None:
    """As engines do, by the bytes."""
    if not (value is ABSENT if step.old is None else isinstance(value, Raw) and bytes(value) == encode(step.old)):
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
            holds = bytes(await tx.get(key, b"", as_type=Raw)) == encode(condition.value)
        case AtLeast():
            number = integer(bytes(await tx.get(key, b"0", as_type=Raw)))
            kind, holds = "at_least", number is not None and number >= condition.number
    if not holds:
        raise _refused(key, kind)


def _refused(key: str, kind: str) -> Conflict:
    return Conflict(
        f"nothing was changed: the condition {kind!r} on {shown(record_key(key))} does not hold",
        key=record_key(key),
        condition=kind,
    )
