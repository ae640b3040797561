"""The tests of the hot tier catch what they are for.

Each tier here is the real one with one fault, a change of at most ten lines. For each there is a test that names the fault;
it must fail on the broken tier (that it passes on the real one is shown where it stands).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.engine import Batch, Entry, Receipt, Touch
from holdfast.middleware.cache import CachedEngine
from holdfast.middleware.cache_followed import Followed
from holdfast.middleware.cache_memory import Item, Name
from holdfast.middleware.cache_shelf import item_of
from tests.middleware import test_cache as tests
from tests.middleware import test_cache_together as together
from tests.middleware.caching import Bench, MemoryShelf

CHANGED_LINES_MAX = 10


class FillsWithoutComparing(CachedEngine):
    """Keeps what was read, whatever happened while it was read."""

    def _keep(self, home: Followed, name: Name, changed: str, item: Item, *, share: bool = False) -> None:
        item.at = max(item.at, home.changed.get(changed, 0))
        super()._keep(home, name, changed, item, share=share)


class TrustsThatNoNewsIsGoodNews(CachedEngine):
    """Believes that what it was not told of did not happen."""

    def _holds(self, home: Followed, name: str, item: Item, seen: int) -> bool:
        return super()._holds(home, name, item, 0)


class RemembersNothingForEver(CachedEngine):
    """What was not there once is not looked for again."""

    def _holds(self, home: Followed, name: str, item: Item, seen: int) -> bool:
        return not item.entries or super()._holds(home, name, item, seen)


class TakesEveryReceiptForACommit(CachedEngine):
    """Goes on to the revision of a receipt although the batch changed nothing."""

    async def commit(self, space: str, batch: Batch) -> Receipt:
        receipt = await super().commit(space, batch)
        if all(isinstance(op, Touch) for op in batch.operations):
            self._spaces[space].note(receipt.version, ())
        return receipt


class GuessesWhenItWasCreated(CachedEngine):
    """Takes what it does not know for absent."""

    def _before(self, home: Followed, key: str) -> Entry | None:
        found = super()._before(home, key)
        return found if isinstance(found, Entry) else None


class TellsNoRevisionOfWhatIsGone(CachedEngine):
    """A reader that finds nothing has seen nothing."""

    async def get_seen(self, space: str, keys: list[str], seen: int) -> tuple[list[Entry | None], int]:
        entries, _ = await super().get_seen(space, keys, seen)
        return entries, max((entry.version for entry in entries if entry is not None), default=0)


class ReadsOncePerReader(CachedEngine):
    """Everybody who misses asks for himself."""

    async def _fetch(self, home: Followed, name: Name, flight: object, *others: Any) -> Item:
        return await super()._fetch(home, name, object(), *others)


class GoesOnAfterAGap(CachedEngine):
    """Follows the feed from now on, and keeps what it has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._following._flush = lambda home: None  # type: ignore[method-assign]
        self._following.flushes = 1


class WaitsForTheFeed(CachedEngine):
    """Counts on the feed for the end of what is old, and on nothing else."""

    def _keep(self, home: Followed, name: Name, changed: str, item: Item, *, share: bool = False) -> None:
        super()._keep(home, name, changed, item, share=share)
        item.until = 1 << 62


class ReplacesLaterCopies(MemoryShelf):
    """Keeps whatever arrives last."""

    async def put(self, space: str, name: str, at: int, copy: bytes, ttl_ms: int) -> bool:
        self.copies[space, name] = (at, copy)
        return True


class TakesCopiesAsTheyAre(CachedEngine):
    """Does not ask whether a copy has changed since, or shows what its reader has seen."""

    def _judged(self, home: Followed, identity: str, name: Name, data: bytes | None, seen: int) -> Item | None:
        return None if data is None else item_of(data)


@dataclass(frozen=True)
class Fault:
    """What is broken, and the test that says so."""

    broken: type
    caught_by: Callable[[Bench], Awaitable[None]]


FAULTS = [
    Fault(FillsWithoutComparing, tests.test_a_fill_with_an_old_value_after_an_invalidation_is_refused),
    Fault(
        TrustsThatNoNewsIsGoodNews,
        tests.test_who_has_seen_a_write_is_not_shown_less_although_the_feed_tells_nothing,
    ),
    Fault(RemembersNothingForEver, tests.test_nothing_stays_absent_for_ever),
    Fault(
        TakesEveryReceiptForACommit,
        tests.test_a_batch_that_changes_nothing_is_not_taken_for_the_commit_of_another,
    ),
    Fault(
        GuessesWhenItWasCreated,
        tests.test_readers_who_write_themselves_and_hear_of_others_late_or_never_are_not_shown_less,
    ),
    Fault(TellsNoRevisionOfWhatIsGone, tests.test_who_has_seen_that_something_is_gone_never_sees_it_again),
    Fault(ReadsOncePerReader, tests.test_those_who_miss_at_the_same_time_read_once),
    Fault(GoesOnAfterAGap, tests.test_all_is_forgotten_after_a_gap_in_the_feed),
    Fault(WaitsForTheFeed, tests.test_an_eventual_read_is_never_older_than_the_ttl_although_the_feed_is_cut),
    Fault(
        ReplacesLaterCopies,
        tests.test_a_copy_of_an_earlier_revision_never_replaces_a_later_one_on_the_shelf,
    ),
    Fault(TakesCopiesAsTheyAre, together.test_a_copy_of_what_has_changed_since_is_not_shown),
    Fault(TakesCopiesAsTheyAre, together.test_who_has_seen_more_than_the_copies_is_answered_by_the_durable_engine),
]

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.broken.__name__)


@each_fault
async def test_the_broken_cache_fails_the_test_that_names_its_fault(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    if issubclass(fault.broken, CachedEngine):
        bench.kind = fault.broken
    else:
        monkeypatch.setattr(tests, "MemoryShelf", fault.broken)
    try:
        with pytest.raises(AssertionError):
            await fault.caught_by(bench)
    finally:
        await bench.close()


@each_fault
def test_the_broken_cache_differs_from_the_real_one_by_a_few_lines(fault: Fault) -> None:
    [defined] = ast.parse(textwrap.dedent(inspect.getsource(fault.broken))).body
    assert isinstance(defined, ast.ClassDef)
    changed = sum((part.end_lineno or 0) - part.lineno + 1 for part in defined.body[1:])  # after the docstring
    assert 0 < changed <= CHANGED_LINES_MAX
