"""What a batch does: the executable specification of the contract.

A `Group` evaluates batches one after the other on an overlay over some `State` and collects the post-images: the
entries to write or remove, the commits for the feed, the usage that changed. It never writes to the state, and a refused
batch leaves no trace in the overlay, so an engine takes a whole group, writes the post-images once, and answers.

The memory engine applies a group to its dictionaries, SQLite upserts it in one transaction. Given the same state, the
same batches and the same `now`, every engine that evaluates here ends up with the same bytes.

Expiry. An entry whose time has come is treated as absent everywhere. The first commit of a group that finds expired
entries writes their removal as a commit of its own (actor `holdfast`), with the revision before the batch's, so that
the feed tells of an expiry exactly once and before whatever replaced the entry. At most SWEEP_MAX entries are swept per
group, besides those the batches touch: a mass expiry never makes one unlucky commit slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import islice
from typing import Final, Protocol

import msgspec
from sortedcontainers import SortedList

from holdfast.codec import INT64_MAX, INT64_MIN, integer
from holdfast.engine import (
    FEED_VALUE_BYTES_MAX,
    ID_DIGITS,
    ID_SHIFT,
    REQUEST_WINDOW_MS,
    SYSTEM_ACTOR,
    Absent,
    Batch,
    Change,
    Condition,
    Delete,
    Empty,
    Entry,
    Increment,
    Mine,
    Operation,
    Present,
    Push,
    Put,
    Receipt,
    Result,
    Take,
    Touch,
    ValueIs,
    VersionIs,
)
from holdfast.engines.refusals import no_number, refusal
from holdfast.engines.stored import Stored, copied, digest_of
from holdfast.errors import Conflict, Error, InvalidInput
from holdfast.ids import is_generated
from holdfast.keys import KEY_BYTES_MAX, prefix_end, shown, subspace_of

SWEEP_MAX: Final = 256
WALKED_MAX: Final = 32
"""Writes of a group that are looked through one by one; of more there is an order."""
ID_MS_MAX: Final = 1 << 42
"""The year 2109: whatever claims to be of later was written by somebody who did not know the time."""
_NOTHING: Final[Callable[[], list[int]]] = partial(list, (0, 0))


class State(Protocol):
    """What the evaluation reads. Entries come as stored, expired ones included."""

    revision: int
    time: int
    last_id: int

    def entry(self, key: str, /) -> Entry | None: ...

    def first(self, prefix: str, after: str | None, limit: int) -> list[Entry]:
        """Entries under the prefix in key order, after the key `after`."""
        ...

    def vacant(self, prefix: str) -> bool:
        """Whether there is no entry under the prefix, expired or not; False if that takes a look at the first ones."""
        ...

    def due(self, now: int, limit: int) -> list[Entry]:
        """Entries that expire at or before `now`, the earliest first."""
        ...

    def request(self, actor: str, request_id: str) -> Stored | None: ...


class Group:
    """Batches evaluated together; what they wrote is in `writes`, `commits`, `usage`, `revision`, `last_id`."""

    def __init__(self, state: State, now: int) -> None:
        self._state = state
        self.now = max(now, state.time)
        self.revision = state.revision
        self.last_id = state.last_id
        self.writes: dict[str, Entry | None] = {}
        self.usage: defaultdict[tuple[str, str], list[int]] = defaultdict(_NOTHING)
        """By owner and subspace: how many keys and bytes more there are."""
        self.commits: list[Stored] = []
        self.touched = False
        self.is_plain = True
        """Every key in `writes` was there before and still is, and none of them expires or did."""
        self.untold: set[str] = set()
        """Keys whose entry has something the feed does not tell: a touched expiry, another's age, a large value."""
        self._requests: dict[tuple[str, str], Stored] = {}
        """Commits by the request ids that must be found again quickly."""
        self._told: dict[tuple[str, str], Stored] = {}
        """All commits by their request ids, as far as somebody has asked for one: the first attempt may be in this very group."""
        self._told_upto = 0
        self._due = state.due(self.now, SWEEP_MAX)
        self._swept: Stored
        self._ordered: SortedList[str] | None = None
        """The keys of `writes`, as far as somebody has asked for a range of them."""

    @property
    def empty(self) -> bool:
        """Nothing to write."""
        return not self.commits and not self.touched

    def evaluate(self, batch: Batch, *, known_new: bool = False) -> Receipt:
        """Apply one batch to the overlay, or raise and leave the overlay as it was."""
        [outcome] = self.evaluate_all([batch], known_new=known_new)
        if type(outcome) is Receipt:
            return outcome
        raise outcome  # type: ignore[misc]

    def evaluate_all(self, batches: list[Batch], *, known_new: bool = False) -> list[Receipt | BaseException]:
        """Apply them to the overlay, one after the other; of one that is refused nothing is there, and its outcome says why.

        `known_new` skips the look-up of the request ids; the caller then finds out at the write that one was not new.
        """
        outcomes: list[Receipt | BaseException] = []
        writes, commits, entry_of, now = self.writes, self.commits, self._state.entry, self.now
        for batch in batches:
            operations, conditions, actor = batch.operations, batch.conditions, batch.actor
            asks, unsure = not batch.fresh and batch.request_id is not None, False
            try:
                if asks:
                    # A batch without operations is not written, and a generated id only when it is repeated.
                    unsure = known_new and bool(operations) and not is_generated(batch.request_id or "")
                    if (receipt := self._known(batch, unsure)) is not None:
                        outcomes.append(receipt)
                        continue
                # What is seen most often is written out, not called: this is where a busy store spends its time.
                is_put = len(operations) == 1 and not self._due and type(operations[0]) is Put
                if is_put and (not conditions or self._hold(conditions)):
                    op: Put = operations[0]  # type: ignore[assignment]
                    key, value, tag, size = op.key, op.value, op.tag, len(op.value)
                    old = writes[key] if key in writes else entry_of(key)
                    if size <= FEED_VALUE_BYTES_MAX and (old is None or old.expires_at is None or old.expires_at > now):
                        self.revision = revision = self.revision + 1
                        owner = actor if op.owner is None else op.owner
                        expires_at = None if op.ttl_ms is None else now + op.ttl_ms
                        created_at, was = (now, "") if old is None else (old.created_at, old.tag)
                        writes[key] = new = Entry(key, value, revision, owner, created_at, now, expires_at, tag)
                        if old is None or old.owner != owner or len(old.value) != size:
                            self._account(((old, new),))
                        if old is None or old.expires_at is not None or expires_at is not None:
                            self.is_plain = False
                        change = Change("put", key, True, value, size, owner, tag, was, expires_at)
                        if conditions and batch.request_id is not None:
                            told = digest_of(batch)
                            stored = Stored(revision, now, actor, [change], batch.request_id, told, [None])
                        else:  # written out: to unpack what may be missing costs more
                            stored = Stored(revision, now, actor, [change], batch.request_id)
                        commits.append(stored)
                        if asks:
                            self._requests[actor, batch.request_id] = stored  # type: ignore[index]
                        outcomes.append(Receipt(revision, now, [None]))
                        continue
                outcomes.append(self._evaluate(batch, unsure))
            except Error as exc:
                outcomes.append(exc)
        return outcomes

    def _hold(self, conditions: tuple[Condition, ...]) -> bool:
        """Whether all of them hold, without a doubt; if not, `_Step.check` tells."""
        writes, entry_of, now = self.writes, self._state.entry, self.now
        for condition in conditions:
            kind = type(condition)
            if kind is not VersionIs and kind is not Absent and kind is not Present:
                return False
            key = condition.key  # type: ignore[union-attr]
            entry = writes[key] if key in writes else entry_of(key)
            if (entry is None) is not (kind is Absent):
                return False
            if entry is not None:
                has_ended = entry.expires_at is not None and entry.expires_at <= now
                if has_ended or (kind is VersionIs and entry.version != condition.version):  # type: ignore[union-attr]
                    return False
        return True

    def _evaluate(self, batch: Batch, unsure: bool) -> Receipt:
        """Any batch. It may have been answered before, if that is unsure."""
        step = _Step(self, batch)
        try:
            step.check(batch.conditions)
            results = step.perform(batch.operations)
        except Error:
            # Nothing of it will be written, so only a look-up tells whether it was done before.
            if not unsure or (receipt := self._known(batch, False)) is None:
                raise
            return receipt
        return self._accept(step, results)

    def written_under(self, prefix: str) -> list[str]:
        """The keys under the prefix that batches of the group have written or removed."""
        if len(self.writes) <= WALKED_MAX:
            return [key for key in self.writes if key.startswith(prefix)]
        if self._ordered is None:
            self._ordered = SortedList(self.writes)
        elif len(self._ordered) < len(self.writes):
            self._ordered.update(list(islice(self.writes, len(self._ordered), None)))
        return list(self._ordered.irange(prefix, prefix_end(prefix), inclusive=(True, False)))

    @property
    def asked(self) -> Collection[Stored]:
        """The commits whose request ids an engine indexes. A fresh id is in the feed only."""
        return self._requests.values()

    def _known(self, batch: Batch, known_new: bool) -> Receipt | None:
        """The answer to a request that was answered before."""
        asked = (batch.actor, batch.request_id or "")
        stored = self._requests.get(asked)
        if stored is None and is_generated(asked[1]):
            stored = self._first_attempt(asked)
        if stored is None and not known_new:
            stored = self._state.request(*asked)
        if stored is None or stored.at <= self.now - REQUEST_WINDOW_MS:
            return None
        if not stored.answers(batch):
            raise InvalidInput(
                f"request id {batch.request_id!r} was used before for another batch; give every request its own id"
            )
        return stored.receipt()

    def _first_attempt(self, asked: tuple[str, str]) -> Stored | None:
        """The commit of a fresh request in this group, which nobody can find elsewhere yet."""
        for stored in islice(self.commits, self._told_upto, None):
            if stored.request_id is not None:
                self._told[stored.actor, stored.request_id] = stored
        self._told_upto = len(self.commits)
        return self._told.get(asked)

    def _accept(self, step: _Step, results: list[Result]) -> Receipt:
        if self._due or step.expired:
            self._sweep(step.expired)
        batch = step.batch
        if step.changes or (batch.request_id is not None and batch.operations):
            self.revision = step.revision
            self.last_id = step.last_id
            if batch.request_id is None:
                stored = Stored(step.revision, self.now, batch.actor, step.changes)
            else:  # a repeated request may ask for the results
                told = digest_of(batch), copied(results) if step.has_taken else [*results]
                stored = Stored(step.revision, self.now, batch.actor, step.changes, batch.request_id, *told)
                if not batch.fresh:
                    self._requests[batch.actor, batch.request_id] = stored
            self.commits.append(stored)
        elif step.writes:
            self.touched = True
        if step.writes:
            self.writes.update(step.writes)
            self.is_plain = False  # it may be
        if step.untold:
            self.untold.update(step.untold)
        self._account(step.replaced)
        for prefix, (count, size) in step.pushed.items():
            charged = self.usage[batch.actor, subspace_of(prefix)]
            charged[0] += count
            charged[1] += size + count * (len(prefix.encode()) + ID_DIGITS)
        return Receipt(self.revision, self.now, results)

    def _sweep(self, touched: dict[str, Entry]) -> None:
        """Tell of what has expired, in a commit before the group's first.

        A later batch of the group may touch an entry that had expired too and was beyond SWEEP_MAX: it joins that same
        commit. Nobody touched it in between, so its place in the order is as good.
        """
        gone = dict(touched)
        if self._due:
            gone.update((entry.key, entry) for entry in self._due)
            self._due = []
            self.revision += 1
            self._swept = Stored(self.revision, self.now, SYSTEM_ACTOR, [])
            self.commits.append(self._swept)
        for key, entry in gone.items():
            if self.writes.get(key, entry) is not None:
                self.is_plain = False
                self._swept.changes.append(Change("expire", key, False, was=entry.tag, owner=entry.owner))
                self.writes[key] = None
                self._account(((entry, None),))

    def _account(self, replaced: Iterable[tuple[Entry | None, Entry | None]]) -> None:
        """Charge the owners for what was replaced by what; None: there was nothing, or there is nothing any more."""
        usage = self.usage
        for old, new in replaced:
            if old is not None and new is not None and old.owner == new.owner:
                usage[new.owner, subspace_of(new.key)][1] += len(new.value) - len(old.value)
                continue
            key = new.key if new is not None else old.key  # type: ignore[union-attr]
            subspace, key_size = key[: key.index("/")], len(key) if key.isascii() else len(key.encode())
            if old is not None:
                charged = usage[old.owner, subspace]
                charged[0] -= 1
                charged[1] -= key_size + len(old.value)
            if new is not None:
                charged = usage[new.owner, subspace]
                charged[0] += 1
                charged[1] += key_size + len(new.value)


class _Step:
    """One batch under evaluation; nothing of it counts until the group accepts it."""

    __slots__ = (
        "batch", "changes", "expired", "group", "has_taken", "last_id", "now", "pushed", "replaced", "revision", "untold", "writes",
    )  # fmt: skip

    def __init__(self, group: Group, batch: Batch) -> None:
        self.group = group
        self.batch = batch
        self.now = group.now
        # One number is kept free before the batch's while there is an expiry to tell of first.
        self.revision = group.revision + (2 if group._due else 1)
        self.last_id = group.last_id
        self.writes: dict[str, Entry | None] = {}
        self.changes: list[Change] = []
        self.replaced: list[tuple[Entry | None, Entry | None]] = []
        self.pushed: dict[str, list[int]] = {}
        """By prefix: how many entries were appended, and the bytes of their values."""
        self.expired: dict[str, Entry] = {}
        self.untold: list[str] = []
        self.has_taken = False

    def live(self, key: str) -> Entry | None:
        """The entry as this batch sees it; an expired one is not there."""
        writes = self.writes
        if key in writes:
            return writes[key]
        writes = self.group.writes
        entry = writes[key] if key in writes else self.group._state.entry(key)
        if entry is not None and entry.expires_at is not None and entry.expires_at <= self.now:
            self.expired[key] = entry
            return None
        return entry

    def check(self, conditions: tuple[Condition, ...]) -> None:
        """Refuse the batch unless all of them hold. No operation comes before: only the group's writes lie over the state."""
        writes, entry_of, now = self.group.writes, self.group._state.entry, self.now
        for condition in conditions:
            if type(condition) is Empty:
                self._check_empty(condition)
                continue
            key = condition.key  # type: ignore[union-attr]
            entry = writes[key] if key in writes else entry_of(key)  # `live`, written out
            if entry is not None and entry.expires_at is not None and entry.expires_at <= now:
                self.expired[key], entry = entry, None
            if type(condition) is VersionIs:
                held = entry is not None and entry.version == condition.version
            elif type(condition) is Absent:
                held = entry is None
            elif type(condition) is Present:
                held = entry is not None
            elif type(condition) is ValueIs:
                held = entry is not None and entry.value == condition.value
            elif type(condition) is Mine:
                held = entry is None or entry.owner == self.batch.actor
            else:
                held = self._number(key, entry) >= condition.number  # type: ignore[union-attr]
            if not held:
                raise refusal(condition, entry)

    def _check_empty(self, condition: Empty) -> None:
        """Before any operation of its batch, so only the group's writes lie over the state."""
        prefix = condition.prefix
        if self.group._state.vacant(prefix) and not self.group.written_under(prefix):
            return
        for entry in self._first_live(prefix, 1, None):
            raise refusal(condition, entry)

    def perform(self, operations: tuple[Operation, ...]) -> list[Result]:
        own, writes, entry_of, now = self.writes, self.group.writes, self.group._state.entry, self.now
        results: list[Result] = []
        for op in operations:
            if type(op) is not Put and type(op) is not Delete:
                results.append(self._perform(op))
                continue
            key = op.key
            if key in own:  # `live`, written out
                old = own[key]
            else:
                old = writes[key] if key in writes else entry_of(key)
                if old is not None and old.expires_at is not None and old.expires_at <= now:
                    self.expired[key], old = old, None
            if type(op) is Put:
                owner = self.batch.actor if op.owner is None else op.owner
                expires_at = None if op.ttl_ms is None else now + op.ttl_ms
                self._put("put", key, op.value, old, owner, expires_at, op.tag)
                results.append(None)
            else:
                if old is not None:
                    self._remove("delete", old)
                results.append(old is not None)
        return results

    def _perform(self, op: Operation) -> Result:
        """Any but Put and Delete, which are seen most often."""
        if type(op) is Push:
            return self._push(op)
        if type(op) is Increment:
            return self._increment(op.key, op.delta, op.ttl_ms)
        if type(op) is Touch:
            return self._touch(op)
        return self._take(op)  # type: ignore[arg-type]

    def _push(self, op: Push) -> str:
        """What `_put` does where nothing can be yet; written out, because many are appended together."""
        self.last_id = last = max(self.last_id + 1, self.now << ID_SHIFT)
        prefix, value, tag, now = op.prefix, op.value, op.tag, self.now
        key, owner, size = f"{prefix}{last:0{ID_DIGITS}d}", self.batch.actor, len(value)
        expires_at = None if op.ttl_ms is None else now + op.ttl_ms
        self.writes[key] = Entry(key, value, self.revision, owner, now, now, expires_at, tag)
        told = value
        if size > FEED_VALUE_BYTES_MAX:
            told = b""
            self.untold.append(key)
        self.changes.append(Change("push", key, True, told, size, owner, tag, "", expires_at))
        added = self.pushed.get(prefix)
        if added is None:
            self.pushed[prefix] = [1, size]
        else:
            added[0] += 1
            added[1] += size
        return key

    def _number(self, key: str, entry: Entry | None) -> int:
        if entry is None:
            return 0
        number = integer(entry.value)
        if number is None:
            raise no_number(key, entry.value[:1], entry.tag)
        return number

    def _put(
        self, op: str, key: str, value: bytes, old: Entry | None, owner: str, expires_at: int | None, tag: str
    ) -> None:
        now, size = self.now, len(value)
        created_at, was = (now, "") if old is None else (old.created_at, old.tag)
        self.writes[key] = new = Entry(key, value, self.revision, owner, created_at, now, expires_at, tag)
        if old is None or old.owner != owner or len(old.value) != size:
            self.replaced.append((old, new))
        told = value
        if size > FEED_VALUE_BYTES_MAX:
            told = b""
            self.untold.append(key)
        self.changes.append(Change(op, key, True, told, size, owner, tag, was, expires_at))  # type: ignore[arg-type]

    def _remove(self, op: str, old: Entry) -> None:
        self.writes[old.key] = None
        self.replaced.append((old, None))
        self.changes.append(Change(op, old.key, False, was=old.tag, owner=old.owner))  # type: ignore[arg-type]

    def _increment(self, key: str, delta: int, ttl_ms: int | None) -> int:
        old = self.live(key)
        total = self._number(key, old) + delta
        if not INT64_MIN <= total <= INT64_MAX:
            raise InvalidInput(f"{shown(key)} would become {total}, which is no 64-bit integer any more")
        value = b"%d" % total
        expires_at = None if ttl_ms is None else self.now + ttl_ms
        if old is None:
            self._put("increment", key, value, None, self.batch.actor, expires_at, "")
        else:
            kept_until = old.expires_at if ttl_ms is None else expires_at
            self._put("increment", key, value, old, old.owner, kept_until, old.tag)
        return total

    def _touch(self, op: Touch) -> int | None:
        entry = self.live(op.key)
        if entry is None:
            raise Conflict(
                f"{shown(op.key)} cannot be extended: it has expired or was never there", key=op.key, condition="touch"
            )
        if entry.expires_at is None:
            return None  # it never expires; there is nothing to extend
        expires_at = max(entry.expires_at, self.now + op.ttl_ms)
        if expires_at != entry.expires_at:
            self.writes[op.key] = msgspec.structs.replace(entry, expires_at=expires_at)
            self.untold.append(op.key)
        return expires_at

    def _take(self, op: Take) -> list[Entry]:
        self.has_taken = True
        taken = self._first_live(op.source, op.n, op.upto)
        moved: list[Entry] = []
        for old in taken:
            key = op.target + old.key[len(op.source) :]
            if len(key.encode()) > KEY_BYTES_MAX:
                raise InvalidInput(f"{old.key!r} cannot move under {op.target!r}: the key would be too long")
            self._remove("take", old)
            there = self.live(key)
            self._put("take", key, old.value, there, self.batch.actor, old.expires_at, old.tag)
            new = msgspec.structs.replace(self.writes[key], created_at=old.created_at)  # type: ignore[type-var]
            self.writes[key] = new
            self.untold.append(key)
            moved.append(new)  # type: ignore[arg-type]
        if moved:
            if op.source_counter is not None:
                self._increment(op.source_counter, -len(moved), None)
            if op.target_counter is not None:
                self._increment(op.target_counter, len(moved), None)
        return moved

    def _first_live(self, prefix: str, n: int, upto: str | None) -> list[Entry]:
        """The first n live entries under the prefix, the overlay's writes over the state's."""
        overlay = {k: self.group.writes[k] for k in self.group.written_under(prefix)}
        overlay.update((k, v) for k, v in self.writes.items() if k.startswith(prefix))
        found = [k for k, v in overlay.items() if v is not None and (upto is None or k < upto) and self.live(k)]
        after: str | None = None
        seen = 0
        while seen < n:
            page = self.group._state.first(prefix, after, n + len(overlay))
            if not page:
                break
            after = page[-1].key
            for entry in page:
                if upto is not None and entry.key >= upto:
                    seen = n
                    break
                if entry.key not in overlay and self.live(entry.key) is not None:
                    found.append(entry.key)
                    seen += 1
        live = (self.live(key) for key in sorted(found)[:n])
        return [entry for entry in live if entry is not None]


def size_of(entry: Entry) -> int:
    """What an entry counts for in its owner's usage."""
    return len(entry.key.encode()) + len(entry.value)


def keys_of(batches: Iterable[Batch]) -> set[str]:
    """Every key these batches name, so that an engine can fetch them at once."""
    keys: set[str] = set()
    for batch in batches:
        for condition in batch.conditions:
            if type(condition) is not Empty:
                keys.add(condition.key)  # type: ignore[union-attr]
        for op in batch.operations:
            if type(op) is Take:
                keys.update(key for key in (op.source_counter, op.target_counter) if key is not None)
            elif type(op) is not Push:
                keys.add(op.key)  # type: ignore[union-attr]
    return keys


def ids_upto(entries: Iterable[Entry]) -> int:
    """The last id that can have been assigned when the latest of these entries was written."""
    latest = max((entry.updated_at for entry in entries if entry.updated_at < ID_MS_MAX), default=-1)
    return (latest + 1 << ID_SHIFT) - 1
