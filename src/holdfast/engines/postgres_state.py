"""A space of a PostgreSQL store as its batches are evaluated.

`SpaceState` is kept from one group to the next. While only this process writes to the space, all it remembers is true as
long as the head is (revision, step), and every group is written under the condition that it still is. When others write
too it is not `sure`: what it remembers is what it saw last, and each group names what it relied on, for the server to
compare. Either way nothing is believed without the server's consent.

What it does not know of a key it takes for absent, and notes it (`assumed`): the server looks before it writes. So a new
key costs no read. One that was there after all is replaced unseen if it is just put (`Uses.blind`), whatever it held; else
it comes back with the answer, and the group is evaluated again. Of a range that is taken from it knows the
first entries (`_Window`) and keeps up with what is written. A range that a condition wants empty, and that it does not know,
it takes for empty (`emptied`), and the server looks; if it is not, its first entries are read.

`Wanted` is what must be read before a group can be evaluated when nothing is remembered; all of it is one round trip.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable
from typing import Final

from holdfast.engine import Batch, Durability, Empty, Entry, Increment, Push, Put, Receipt, Take, Touch, VersionIs
from holdfast.engines.evaluation import SWEEP_MAX, Group, keys_of
from holdfast.engines.postgres_link import Call, Rows, int4, int8, number, optional_number, string, text, text_array
from holdfast.engines.postgres_rows import Reply, entry_of, find
from holdfast.engines.postgres_statements import DUE, FETCH, RANGE, REQUESTS, SEARCH
from holdfast.engines.stored import Stored
from holdfast.ids import is_generated
from holdfast.keys import prefix_end

KNOWN_MAX: Final = 32_768
"""Entries remembered of a space; more, and it begins anew."""
KNOWN_BYTES_MAX: Final = 16 * 1024 * 1024
"""The same, in bytes of values that came in since the last beginning."""
AHEAD: Final = 64
"""Entries of a range read beyond what is about to be taken."""
WINDOWS_MAX: Final = 1024
WINDOWS_FEW: Final = 16
"""Of so few it is asked at once whether a key is in any."""


class Missing(Exception):
    """The evaluation needs what this state does not know, and cannot assume."""


class Uses:
    """How a group uses keys, as far as it matters when others write at the same time."""

    __slots__ = ("exact", "lives", "movable", "timed", "version_max")

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.exact: set[str] = set()
        """Keys whose entry decides about more than what replaces it; of the rest a put needs no more than the outlines."""
        self.movable = True
        """Whether the group depends on nothing but the entries of its keys."""
        self.version_max = 0
        """The highest version a condition names."""
        self.lives: dict[str, set[int]] = {}
        """Times to live that begin with the group, by key."""
        self.timed = False
        """Whether an answer depends on the very time of the evaluation."""
        for batch in batches:
            for condition in batch.conditions:
                if isinstance(condition, Empty):
                    continue
                self.exact.add(condition.key)
                if isinstance(condition, VersionIs):
                    self.version_max = max(self.version_max, condition.version)
            for op in batch.operations:
                if type(op) is Take:
                    self.movable = False
                elif type(op) is not Put and type(op) is not Push:
                    self.exact.add(op.key)  # type: ignore[union-attr]

    def answered(self, batch: Batch, receipt: Receipt, now: int) -> None:
        """What a batch was answered, by an evaluation at this time: what of it is a life that begins when it is written."""
        for op, result in zip(batch.operations, receipt.results, strict=False):
            if isinstance(op, Put | Increment) and op.ttl_ms is not None:
                self.lives.setdefault(op.key, set()).add(op.ttl_ms)
            elif isinstance(op, Touch) and result is not None:
                self.lives.setdefault(op.key, set()).add(op.ttl_ms)
                # One that lasts longer anyway may not do so later; and what a repetition is answered is in the feed.
                self.timed |= result != now + op.ttl_ms or batch.request_id is not None

    def blind(self, assumed: set[str], written: Collection[str]) -> set[str]:
        """Keys taken for absent that are just put: the server replaces what is there. A take names its targets nowhere."""
        return (assumed - self.exact).intersection(written) if self.movable else set()


class Wanted:
    """What a group may need to know: keys, ranges to take from, request ids."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        batches = list(batches)
        self.keys = sorted(keys_of(batches))
        self.ranges: dict[str, int] = {}
        self.asked = [(b.actor, b.request_id) for b in batches if b.request_id is not None and not b.fresh]
        self.searched = {(actor, id): 0 for actor, id in self.asked if is_generated(id)}
        """Ids that may stand in the feed only, and the revision up to which they have been looked for in vain."""
        self.found: dict[tuple[str, str], Stored] = {}
        """Those that were found."""
        operations = sum(len(batch.operations) for batch in batches)
        for batch in batches:
            for condition in batch.conditions:
                if isinstance(condition, Empty):
                    self.ranges.setdefault(condition.prefix, AHEAD)
            for op in batch.operations:
                if isinstance(op, Take):
                    self.ranges[op.source] = self.ranges.get(op.source, AHEAD + operations) + 2 * op.n

    def more(self) -> None:
        """It was not enough."""
        self.ranges = {prefix: 4 * count for prefix, count in self.ranges.items()}

    def calls(self, space: int, clock: int | None, oldest: int) -> list[Call]:
        """The reads, beside that of the head; `SpaceState.learn` takes the answers in the same order."""
        id = int4(space)
        calls: list[Call] = []
        if self.keys:
            calls.append((FETCH, (id, text_array(self.keys))))
        for prefix, count in self.ranges.items():
            calls.append((RANGE, (id, text(prefix), text(prefix_end(prefix)), int8(count))))
        calls.append((DUE, (id, int8(clock))))
        if self.asked:
            actors, ids = zip(*self.asked, strict=True)
            calls.append((REQUESTS, (id, text_array(actors), text_array(ids))))
        return calls + self.searches(space, oldest)

    def searches(self, space: int, oldest: int) -> list[Call]:
        """Through the feed, for generated ids."""
        return [
            (SEARCH, (int4(space), int8(after), int8(oldest), request_id.encode()))
            for (_, request_id), after in self.searched.items()
        ]

    def search_done(self, upto: int, answers: list[Rows]) -> None:
        """The answers to `searches`, from a snapshot at this revision."""
        for (actor, request_id), rows in zip(self.searched, answers, strict=True):
            for row in rows:
                if (commit := find(row, actor, request_id)) is not None:
                    self.found[actor, request_id] = commit
        self.searched = {asked: upto for asked in self.searched if asked not in self.found}


class _Window:
    """The first keys of a range, all of them up to `end`; None: the whole range."""

    __slots__ = ("end", "keys", "prefix")

    def __init__(self, prefix: str, keys: list[str], complete: bool) -> None:
        self.prefix = prefix
        self.keys = keys
        self.end = None if complete else keys[-1]

    def note(self, key: str, present: bool) -> None:
        """Keep up with a write."""
        if not key.startswith(self.prefix) or (self.end is not None and key > self.end):
            return
        at = bisect_right(self.keys, key)
        there = at > 0 and self.keys[at - 1] == key
        if present and not there:
            insort(self.keys, key)
        elif there and not present:
            del self.keys[at - 1]


class SpaceState:
    """One space as its batches are evaluated; the `State` of a `Group`."""

    def __init__(self, name: str, head: Rows) -> None:
        self.name = name
        self.id: int | None = None
        self.durability: Durability = "sync"
        self.dropped = False
        self.revision = self.step = self.time = self.last_id = self.now = 0
        self._later: int | None = None
        """When the first entry expires that has not expired yet."""
        if head:
            id, durability, dropped, revision, step, time, last_id, now, later = head[0]
            self.id = number(id)
            self.durability = string(durability)  # type: ignore[assignment]
            self.dropped = dropped == b"\x01"
            self.revision, self.step, self.time = number(revision), number(step), number(time)
            self.last_id, self.now, self._later = number(last_id), number(now), optional_number(later)
        self.sure = True
        self._known: dict[str, Entry | None] = {}
        self._bytes = 0
        self._windows: dict[str, _Window] = {}
        self._due: list[Entry] | None = None if self.id is not None else []
        self._requests: dict[tuple[str, str], Stored] = {}
        self._looked_up = self.id is None
        """Whether `_requests` has the answers to the group's request ids."""
        self.assumed: set[str] = set()
        self.seen: set[str] = set()
        """The keys this evaluation has looked at."""
        self.emptied: set[str] = set()
        """Ranges it took for empty."""
        self.ranged = False
        """Whether it depends on what the first entries of a range are."""
        self.until: int | None = None
        """When the first entry expires that the evaluation took for live."""

    def learn(self, wanted: Wanted, answers: list[Rows]) -> None:
        """Take the answers to `wanted.calls`."""
        replies = iter(answers)
        if wanted.keys:
            self._known.update(dict.fromkeys(wanted.keys))
            self._learn_rows(next(replies))
        for prefix, count in wanted.ranges.items():
            rows = next(replies)
            self._learn_rows(rows)
            keys = [string(row[0]) for row in rows]
            self._windows[prefix] = _Window(prefix, keys, len(keys) < count)
        self._due = self._learn_rows(next(replies))
        if wanted.asked:
            for actor, id, *row in next(replies):
                if (commit := find(row, string(actor), string(id))) is not None:
                    self._requests[string(actor), string(id)] = commit
        wanted.search_done(self.revision, list(replies))
        self._requests |= wanted.found
        self._looked_up = True

    def _learn_rows(self, rows: Rows) -> list[Entry]:
        """These entries are there."""
        entries = [entry_of(row) for row in rows]
        for entry in entries:
            self._known[entry.key] = entry
            self._bytes += len(entry.value)
        return entries

    def correct(self, reply: Reply) -> None:
        """The server says how the entries are that were not as they were taken to be."""
        if (reply.revision, reply.step) != (self.revision, self.step):
            self._move(reply)
        self._known.update(reply.entries)

    def inherit(self, before: SpaceState, *, sure: bool) -> None:
        """Keep what was remembered before this was read; not `sure` if others have written in between."""
        self._known = {**before._known, **self._known}
        self._bytes += before._bytes
        if not sure:
            self._windows.clear()
            self.sure = False

    def retract(self) -> None:
        """Forget what was assumed in an evaluation that came to nothing."""
        for key in self.assumed:
            self._known.pop(key, None)

    def _move(self, reply: Reply) -> None:
        self.revision, self.step, self.last_id = reply.revision, reply.step, reply.last_id
        self.time = max(self.time, reply.time)
        self._windows.clear()
        self.sure = False

    def begin(self, now: int) -> None:
        """Before an evaluation at this time."""
        self.now = max(now, self.time)
        self.assumed = set()
        self.seen = set()
        self.emptied = set()
        self.ranged = False
        self.until = None

    # --- State ---

    def entry(self, key: str) -> Entry | None:
        known = self._known
        self.seen.add(key)
        if key not in known:
            self.assumed.add(key)
            known[key] = None
            return None
        entry = known[key]
        if entry is not None and entry.expires_at is not None:
            expires_at = entry.expires_at
            if expires_at <= self.now:
                if not self._due:
                    raise Missing("what has expired")
            elif self.until is None or expires_at < self.until:
                self.until = expires_at
        return entry

    def first(self, prefix: str, after: str | None, limit: int) -> list[Entry]:
        if self.id is None:
            return []
        if prefix in self.emptied:
            return []
        window = self._windows.get(prefix)
        if window is None:
            raise Missing(prefix)
        self.ranged = True
        start = 0 if after is None else bisect_right(window.keys, after)
        keys = window.keys[start : start + limit]
        if len(keys) < limit and window.end is not None:
            raise Missing(prefix)
        return [entry for key in keys if (entry := self._known[key]) is not None]

    def vacant(self, prefix: str) -> bool:
        if self.id is None:
            return True
        window = self._windows.get(prefix)
        if window is not None and (window.keys or window.end is not None):
            return False
        self.emptied.add(prefix)
        return True

    def due(self, now: int, limit: int) -> list[Entry]:
        if self._later is not None and self._later <= now:
            raise Missing("what has expired")
        return [entry for entry in self._due or () if entry.expires_at is not None and entry.expires_at <= now][:limit]

    def request(self, actor: str, request_id: str) -> Stored | None:
        if not self._looked_up:
            raise Missing(request_id)
        return self._requests.get((actor, request_id))

    # --- after the evaluation ---

    def known(self, key: str) -> Entry | None:
        """The entry as it was taken to be."""
        return self._known.get(key)

    @property
    def swept(self) -> bool:
        """Whether the evaluation depends on what has expired, or on earlier answers."""
        return bool(self._due) or bool(self._requests)

    def outdated_requests(self, group: Group) -> list[Stored]:
        """The earlier use of ids that were used before, so long ago that they are new again."""
        asked = ((commit.actor, commit.request_id or "") for commit in group.asked)
        return [self._requests[each] for each in asked if each in self._requests]

    def keep(self, group: Group, writes: dict[str, Entry | None], reply: Reply) -> bool:
        """Take over what a group wrote, once it is committed. False when this state is not worth keeping."""
        if self.id is None or self.dropped or (self._due and (group.empty or len(self._due) >= SWEEP_MAX)):
            return False  # there may be more to sweep
        if reply.moved:
            self._move(reply)
        self._due = None
        self._requests.clear()
        self._looked_up = False
        self.revision, self.step, self.last_id = reply.revision, reply.step, reply.last_id
        if group.commits:
            self.time = reply.time
        if self.sure:
            for prefix in self.emptied:
                self._windows[prefix] = _Window(prefix, [], complete=True)
        known = self._known
        windows = tuple(self._windows) if len(self._windows) <= WINDOWS_FEW else ("",)
        for key, entry in writes.items():
            known[key] = entry
            if entry is not None:
                self._bytes += len(entry.value)
                if entry.expires_at is not None and (self._later is None or entry.expires_at < self._later):
                    self._later = entry.expires_at
            if key.startswith(windows):
                self._note(key, entry is not None)
        if len(known) > KNOWN_MAX or self._bytes > KNOWN_BYTES_MAX or len(self._windows) > WINDOWS_MAX:
            self._known, self._windows, self._bytes = {}, {}, 0
        return True

    def _note(self, key: str, present: bool) -> None:
        """Keep the windows up with a write. They are ranges of whole elements, so those a key is in are named by it."""
        slash = key.find("/")
        while slash >= 0:
            window = self._windows.get(key[: slash + 1])
            if window is not None:
                window.note(key, present)
            slash = key.find("/", slash + 1)
