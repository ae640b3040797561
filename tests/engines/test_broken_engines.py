"""The conformance suite catches what it is for.

Each engine here is a real one with one fault, a change of at most ten lines. For each there is a test of the suite that
names the broken guarantee; it must fail on the broken engine and pass on the real one. Whoever weakens that test hears
of it here.
"""

import ast
import asyncio
import inspect
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.engine import Batch, ChangeSet, Empty, Engine, Entry, Mine, Put, Receipt
from holdfast.engines.evaluation import Group
from holdfast.engines.memory import MemoryEngine
from holdfast.engines.sqlite import SqliteEngine
from holdfast.engines.sqlite_rows import SpaceState
from holdfast.errors import Conflict
from holdfast.testing import conformance
from holdfast.testing.conformance import Capabilities, EngineFactory, Subject
from holdfast.testing.conformance.subject import OpenEngine

CHANGED_LINES_MAX = 10
FAILING_DEADLINE_S = 0.5
"""How long a test waits on a broken engine for what never comes."""


class AcknowledgesBeforeDurable(SqliteEngine):
    """Answers as soon as it knows the answer, and writes a moment later."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        with self._snapshot() as read:
            receipt = Group(SpaceState(read, space), self._clock.now_ms()).evaluate(batch)
        self._late = asyncio.ensure_future(super().commit(space, batch))
        return receipt


class ServesStaleReads(MemoryEngine):
    """Caches what it has read, and never hears that it changed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: dict[str, Entry | None] = {}

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        for key, entry in zip(keys, await super().get(space, keys), strict=True):
            self._seen.setdefault(key, entry)
        return [self._seen[key] for key in keys]


class SetsTheTtlInASecondStep(MemoryEngine):
    """Writes the value, then its ttl: whoever looks in between sees an entry that lives for ever."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        puts = [op for op in batch.operations if isinstance(op, Put)]
        bare = tuple(replace(op, ttl_ms=None) if op in puts else op for op in batch.operations)
        receipt = await super().commit(space, replace(batch, operations=bare))
        await asyncio.sleep(0)
        for put in puts:
            entry = self._spaces[space].entries[put.key]
            self._spaces[space].store(put.key, replace(entry, expires_at=put.ttl_ms and receipt.at + put.ttl_ms))
        return receipt


class SplitsBatchesInTheFeed(MemoryEngine):
    """Tells of each change by itself."""

    async def watch(self, space: str, *prefixes: str, **options: Any) -> AsyncIterator[ChangeSet]:  # type: ignore[override]
        async for commit in super().watch(space, *prefixes, **options):
            for change in commit.changes:
                yield replace(commit, changes=[change])


class ReusesVersions(MemoryEngine):
    """Forgets with a dropped space how far it had come."""

    async def drop(self, space: str) -> None:
        await super().drop(space)
        self._dropped.pop(space, None)


class DoublesRetries(MemoryEngine):
    """Does not look at request ids."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        return await super().commit(space, replace(batch, request_id=None))


class JudgesRetriesByTheirConditions(MemoryEngine):
    """Checks the conditions before it asks whether the request was answered already."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        await super().commit(space, Batch(batch.actor, (), batch.conditions))
        return await super().commit(space, batch)


class LosesWakeUps(MemoryEngine):
    """Looks, and only then starts to listen: what is committed in between wakes nobody."""

    async def _rung(self, space: str) -> None:
        await asyncio.sleep(0)
        await super()._rung(space)


class ShowsExpiredEntries(MemoryEngine):
    """Leaves expired entries visible until they are swept."""

    async def get(self, space: str, keys: list[str]) -> list[Entry | None]:
        return [self._spaces[space].entry(key) for key in keys]


class LetsAnybodyClaim(MemoryEngine):
    """Does not ask whose an entry is."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        others = tuple(each for each in batch.conditions if not isinstance(each, Mine))
        return await super().commit(space, replace(batch, conditions=others))


class LooksBeforeItCommits(MemoryEngine):
    """Finds out whether a range is empty, and then commits: somebody may have come in between."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        await super().commit(space, Batch(batch.actor, (), batch.conditions))
        await asyncio.sleep(0)
        others = tuple(each for each in batch.conditions if not isinstance(each, Empty))
        return await super().commit(space, replace(batch, conditions=others))


@dataclass(frozen=True)
class Fault:
    """What is broken, in which engine, and the test of the suite that says so."""

    name: str
    broken: type[MemoryEngine] | type[SqliteEngine]
    caught_by: Callable[[Subject], Awaitable[None]]
    fails_with: type[Exception] = AssertionError

    @property
    def real(self) -> type[MemoryEngine] | type[SqliteEngine]:
        return SqliteEngine if issubclass(self.broken, SqliteEngine) else MemoryEngine


FAULTS = [
    Fault(
        "acknowledged before durable",
        AcknowledgesBeforeDurable,
        conformance.TestDurability().test_what_a_reply_shows_is_in_the_storage_at_that_moment,
    ),
    Fault(
        "stale read",
        ServesStaleReads,
        conformance.TestTotalOrder().test_a_read_shows_every_commit_acknowledged_before_it,
    ),
    Fault(
        "non-atomic ttl",
        SetsTheTtlInASecondStep,
        conformance.TestExpiry().test_value_and_ttl_are_set_together,
    ),
    Fault(
        "split feed",
        SplitsBatchesInTheFeed,
        conformance.TestFeed().test_a_batch_is_never_split,
    ),
    Fault(
        "reused version",
        ReusesVersions,
        conformance.TestVersions().test_a_version_is_not_reused_when_a_dropped_space_comes_back,
    ),
    Fault(
        "double effect of a retry",
        DoublesRetries,
        conformance.TestRequests().test_a_repeated_increment_counts_once,
    ),
    Fault(
        "retry refused by its own effect",
        JudgesRetriesByTheirConditions,
        conformance.TestRequests().test_a_repeated_request_is_answered_although_the_world_moved_on,
        fails_with=Conflict,
    ),
    Fault(
        "lost wake-up",
        LosesWakeUps,
        conformance.TestWatching().test_a_commit_at_any_moment_of_a_watcher_wakes_it,
        fails_with=TimeoutError,
    ),
    Fault(
        "expired entry visible",
        ShowsExpiredEntries,
        conformance.TestExpiry().test_an_entry_is_visible_until_the_instant_it_expires_and_not_from_then_on,
    ),
    Fault(
        "somebody else's entry",
        LetsAnybodyClaim,
        conformance.TestOwnership().test_mine_holds_for_the_owner_and_for_nobody_else,
        fails_with=pytest.fail.Exception,
    ),
    Fault(
        "a range that was empty",
        LooksBeforeItCommits,
        conformance.TestEmpty().test_of_many_at_once_one_is_first,
        fails_with=ValueError,
    ),
]

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def factory_of(engine: type[MemoryEngine] | type[SqliteEngine], folder: Path) -> EngineFactory:
    def new_storage() -> OpenEngine:
        async def opened(clock: Clock) -> Engine:
            if issubclass(engine, SqliteEngine):
                return await engine.open(folder / "store.db", clock=clock)
            return engine(clock=clock)

        return opened

    kept = issubclass(engine, SqliteEngine)
    return EngineFactory(new_storage, Capabilities(shared=kept, survives_reopen=kept))


@each_fault
async def test_the_broken_engine_fails_the_test_that_names_its_fault(fault: Fault, tmp_path: Path) -> None:
    async with Subject(factory_of(fault.broken, tmp_path), deadline_s=FAILING_DEADLINE_S) as subject:
        with pytest.raises(fault.fails_with) as caught:
            await fault.caught_by(subject)
    assert any(entry.path.parent.name == "conformance" for entry in caught.traceback), "failed outside of the suite"


@each_fault
async def test_the_real_engine_passes_the_test_that_names_the_fault(fault: Fault, tmp_path: Path) -> None:
    async with Subject(factory_of(fault.real, tmp_path)) as subject:
        await fault.caught_by(subject)


@each_fault
def test_the_broken_engine_differs_from_the_real_one_by_a_few_lines(fault: Fault) -> None:
    [defined] = ast.parse(textwrap.dedent(inspect.getsource(fault.broken))).body
    assert isinstance(defined, ast.ClassDef)
    changed = sum(part.end_lineno - part.lineno + 1 for part in defined.body[1:])  # the first part is the docstring
    assert 0 < changed <= CHANGED_LINES_MAX
