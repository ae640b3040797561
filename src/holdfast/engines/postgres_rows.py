"""How entries, commits and groups look as rows and parameters of a PostgreSQL store.

A group that is written after others have written, as it is, gets other versions than its evaluation gave it, and possibly a
later time. The row of the feed carries the true ones: the revision is that of the row's last commit, and all its commits have
its time, with which the life of whatever expires begins. `decode_row` puts them right, and `Reply` does so for what the writer remembers and answers. It also tells since
when an entry is there that was replaced unseen.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from holdfast.engine import ID_SHIFT, Batch, Change, ChangeSet, Entry, Receipt, Touch
from holdfast.engines.evaluation import Group, ids_upto
from holdfast.engines.postgres_functions import CHANGED, DONE, REBASED
from holdfast.engines.postgres_link import (
    FALSE,
    TRUE,
    Call,
    Rows,
    Value,
    bool_array,
    bytea_array,
    int4,
    int8,
    int8_array,
    int8s,
    joined,
    number,
    optional_number,
    string,
    text,
    text_array,
)
from holdfast.engines.postgres_statements import WRITE_GROUP, WRITE_ONE
from holdfast.engines.stored import Stored
from holdfast.keys import prefix_end

if TYPE_CHECKING:
    from holdfast.engines.postgres_state import SpaceState, Uses

LAST: Final = "\U0010ffff" * 257
"""Greater than every key."""
NOTHING: Final = b"\x90"
"""No commits, as msgpack."""

AnyCommit = TypeVar("AnyCommit", bound=ChangeSet)

encode_commits = msgspec.msgpack.Encoder().encode
_decode_commits = msgspec.msgpack.Decoder(list[ChangeSet]).decode
_decode_stored = msgspec.msgpack.Decoder(list[Stored]).decode
_with = msgspec.structs.replace


# --- reading ---


def entry_of(row: Sequence[Value]) -> Entry:
    """A row of COLUMNS."""
    key, value, version, owner, created_at, updated_at, expires_at, tag = row
    return Entry(
        string(key),
        value or b"",
        number(version),
        string(owner),
        number(created_at),
        number(updated_at),
        optional_number(expires_at),
        string(tag),
    )


def bounds_of(prefix: str, after: str | None, reverse: bool) -> tuple[str, str]:
    """The keys of a scan: from the first, included, to the second, which is not."""
    low, high = prefix, prefix_end(prefix) or LAST
    if after is not None and reverse:
        high = min(high, after)
    elif after is not None and after >= low:
        low = after + "\x01"  # no key has a smaller character, so this is the first that can follow
    return low, high


def decode_row(row: Sequence[Value]) -> list[ChangeSet]:
    """The commits of a row of the feed: its revision, time and commits."""
    revision, time, commits = row
    return _settled(_decode_commits(commits or NOTHING), number(revision), number(time))


def find(row: Sequence[Value], actor: str, request_id: str) -> Stored | None:
    """The commit of this request in a row of the feed."""
    revision, time, commits = row
    found = _settled(_decode_stored(commits or NOTHING), number(revision), number(time))
    return next((c for c in found if c.request_id == request_id and c.actor == actor), None)


def _settled(commits: list[AnyCommit], revision: int, time: int) -> list[AnyCommit]:
    if not commits or (commits[-1].version == revision and commits[-1].at == time):
        return commits
    shift = revision - commits[-1].version
    return [
        _with(commit, version=commit.version + shift, at=time, changes=_later(commit.changes, time - commit.at))
        for commit in commits
    ]


def _later(changes: list[Change], lag: int) -> list[Change]:
    """Changes that happened so much later than they were evaluated."""
    if lag <= 0 or all(change.expires_at is None for change in changes):
        return changes
    return [_with(change, expires_at=_plus(change.expires_at, lag)) for change in changes]


def _plus(moment: int | None, lag: int) -> int | None:
    return None if moment is None else moment + lag


class Reply:
    """What the server answered to a group."""

    __slots__ = ("clock", "created", "entries", "last_id", "outcome", "revision", "step", "time")

    def __init__(self, rows: Rows) -> None:
        self._take(*map(number, rows[0][:6]))
        self.entries: dict[str, Entry | None] = {}
        """With outcome CHANGED: the entries as they are."""
        self.created: dict[str, int] = {}
        """When written: since when those keys are there that were replaced unseen."""
        if self.outcome == CHANGED:
            self.entries = {string(row[6]): None if row[8] is None else entry_of(row[6:]) for row in rows}
        else:
            self.created = {string(row[6]): number(row[10]) for row in rows if row[6] is not None}

    @classmethod
    def as_sent(cls, clock: int, group: Group) -> Reply:
        """The group is written just as it was evaluated."""
        reply = cls.__new__(cls)
        reply._take(DONE, clock, group.revision, 0, group.now, group.last_id)
        reply.entries, reply.created = {}, {}
        return reply

    def _take(self, outcome: int, clock: int, revision: int, step: int, time: int, last_id: int) -> None:
        self.outcome, self.clock, self.revision, self.step = outcome, clock, revision, step
        self.time, self.last_id = time, last_id

    @property
    def moved(self) -> bool:
        """Written after what others wrote."""
        return self.outcome == REBASED

    def settled(self, group: Group, base: int) -> dict[str, Entry | None]:
        """What a group wrote, as it was written; `base` is the revision it was evaluated at."""
        if not self.moved and not self.created:
            return group.writes
        shift, now, time = self.revision - group.revision, group.now, self.time
        lag = max(time - now, 0)
        return {
            key: entry
            if entry is None
            else _with(
                entry,
                version=entry.version + shift if entry.version > base else entry.version,
                created_at=self.created.get(key, time if entry.created_at == now else entry.created_at),
                updated_at=time if entry.updated_at == now else entry.updated_at,
                expires_at=_plus(entry.expires_at, lag),
            )
            for key, entry in group.writes.items()
        }


def settle(batch: Batch, receipt: Receipt, group: Group, revision: int, time: int) -> Receipt:
    """A receipt as it is if its group was written after what others wrote, up to this revision and at this time."""
    lag, results = time - group.now, receipt.results
    if lag > 0 and any(isinstance(op, Touch) for op in batch.operations):
        results = [
            result + lag if isinstance(op, Touch) and isinstance(result, int) else result
            for op, result in zip(batch.operations, results, strict=True)
        ]
    version = receipt.version + revision - group.revision
    return _with(receipt, version=version, at=max(group.now, time), results=results)


# --- writing ---


class Terms(NamedTuple):
    """On what terms a group is written."""

    locks: int
    clock: int | None
    deadline: int
    writer: int
    uses: Uses | None = None
    """When others write too: what must be compared, so that the group can be written although they did."""
    blind: Set[str] = frozenset()
    """Unknown keys that may be replaced unseen."""
    sums: bool = False
    """Whether the usage it charges is summed up."""


def write_call(state: SpaceState, group: Group, terms: Terms) -> Call:
    """The call that commits a group, if everything it relied on is still so."""
    writes, uses, blind = group.writes, terms.uses, terms.blind
    absent = state.assumed - blind
    movable = (
        uses is not None
        and uses.movable
        and uses.version_max <= state.revision
        and not state.swept
        and not state.ranged
    )
    empty = sorted(state.emptied) if state.emptied else ()
    pushed = group.last_id != state.last_id
    expected: tuple[Value, ...] = (
        int4(terms.locks),
        int4(state.id or 0),
        int8(state.revision),
        int8(state.step),
        int8(group.now),
        int8(terms.clock),
        int8(state.until),
        int8(terms.deadline),
        TRUE if state.durability == "async" else FALSE,
        TRUE if state.sure else FALSE,
        TRUE if movable else FALSE,
        int8(max(state.last_id + 1, group.now << ID_SHIFT)) if pushed else None,
        TRUE if movable and uses is not None and (pushed or _is_timed(state, group, uses)) else FALSE,
        int8(group.revision),
        int8(group.last_id),
        int8(terms.writer),
        TRUE if terms.sums else FALSE,
        None if group.empty else encode_commits(group.commits),
        text_array(empty) if empty else None,
        text_array([prefix_end(prefix) for prefix in empty]) if empty else None,
    )
    usage = [(where, amount) for where, amount in group.usage.items() if amount[0] or amount[1]]
    asked = [] if group.empty else list(group.asked)
    is_sure = uses is None and state.sure  # then, as long as the head is where it was, all that was seen is too
    compared = absent if is_sure else state.seen - blind
    if len(writes) == 1 and len(usage) <= 1 and not asked and compared <= writes.keys():
        [(key, entry)] = writes.items()
        charged, charge = usage[0] if usage else ((None, None), (None, None))
        guesses = (TRUE if absent else FALSE, TRUE if blind else FALSE)
        one = (key.encode(), *guesses, *_fact(state, uses, key), *columns_of(entry))
        return WRITE_ONE, (*expected, *one, text(charged[0]), text(charged[1]), int8(charge[0]), int8(charge[1]))
    gone = [(key, old.version) for key in writes if (old := state.known(key)) is not None]
    entries = [entry for entry in writes.values() if entry is not None]
    if blind:
        entries.sort(key=lambda entry: entry.key not in blind)
    seen = [*sorted(absent), *sorted(compared - absent)]
    return WRITE_GROUP, (
        *expected,
        *_post_images(entries, gone, usage, seen, len(blind), len(absent)),
        *(_NO_FACTS if is_sure or not seen else _facts(state, uses, seen)),
        text_array([commit.actor for commit in asked]),
        text_array([commit.request_id or "" for commit in asked]),
        int8_array([commit.version for commit in asked]),
    )


def _is_timed(state: SpaceState, group: Group, uses: Uses) -> bool:
    """Whether what is written depends on the time of the evaluation by more than lives that begin with it."""
    if uses.timed:
        return True
    for key, entry in group.writes.items():
        if entry is not None:
            if not _begins(key, entry.expires_at, group.now, uses):
                return True
            old = state.known(key)
            if old is not None and group.now in (old.created_at, old.updated_at):
                return True
    told = (change for commit in group.commits for change in commit.changes)
    return not all(_begins(change.key, change.expires_at, group.now, uses) for change in told)


def _begins(key: str, expires_at: int | None, now: int, uses: Uses) -> bool:
    """Whether it expires never, or a time after the group that an operation of the group named."""
    return expires_at is None or expires_at - now in uses.lives.get(key, ())


def columns_of(entry: Entry | None) -> tuple[Value, ...]:
    if entry is None:
        return (None,) * 7
    return (
        int8(entry.version),
        entry.value,
        entry.owner.encode(),
        int8(entry.created_at),
        int8(entry.updated_at),
        int8(entry.expires_at),
        entry.tag.encode(),
    )


def _fact(state: SpaceState, uses: Uses | None, key: str) -> tuple[Value, ...]:
    """How the entry of a key was taken to be."""
    old = state.known(key)
    if old is None:
        return (FALSE, *(None,) * 6)
    exact = TRUE if uses is None or key in uses.exact else FALSE
    outlines = (int8(old.created_at), old.owner.encode(), old.tag.encode(), int8(len(old.value)))
    return (exact, int8(old.version), int8(old.expires_at), *outlines)


def _facts(state: SpaceState, uses: Uses | None, keys: Sequence[str]) -> tuple[Value, ...]:
    """How the entries of these keys were taken to be."""
    old = [state.known(key) for key in keys]
    return (
        bool_array([uses is None or key in uses.exact for key in keys]),
        int8_array([None if each is None else each.version for each in old]),
        int8_array([None if each is None else each.expires_at for each in old]),
        int8_array([None if each is None else each.created_at for each in old]),
        text_array([None if each is None else each.owner for each in old]),
        text_array([None if each is None else each.tag for each in old]),
        int8_array([None if each is None else len(each.value) for each in old]),
    )


_NO_FACTS: Final = (None,) * 7
_NO_REQUESTS: Final = (None,) * 3


def _post_images(
    entries: Sequence[Entry],
    gone: Sequence[tuple[str, int]],
    usage: Sequence[tuple[tuple[str, str], list[int]]],
    seen: Sequence[str] = (),
    blind: int = 0,
    absent: int = 0,
) -> tuple[Value, ...]:
    """What is written, and the keys that were looked at, as `commit_group` takes them."""
    texts = [e.key for e in entries]
    texts += [e.owner for e in entries]
    texts += [e.tag for e in entries]
    texts += [key for key, _ in gone]
    texts += [owner for (owner, _), _ in usage]
    texts += [subspace for (_, subspace), _ in usage]
    texts += seen
    numbers = [e.version for e in entries]
    numbers += [e.created_at for e in entries]
    numbers += [e.updated_at for e in entries]
    numbers += [-1 if e.expires_at is None else e.expires_at for e in entries]
    numbers += [version for _, version in gone]
    numbers += [keys for _, (keys, _) in usage]
    numbers += [size for _, (_, size) in usage]
    counts = map(int4, (blind, len(gone), len(usage), len(seen), absent))
    return (joined(texts), int8s(numbers), bytea_array([e.value for e in entries]), *counts)


def load_call(
    state: SpaceState,
    entries: Sequence[Entry],
    gone: Sequence[tuple[str, int]],
    usage: dict[tuple[str, str], list[int]],
    locks: int,
    revision: int,
) -> Call:
    """The call that writes entries as they are given, with the lock held: a group without commits."""
    return WRITE_GROUP, (
        int4(locks),
        int4(state.id or 0),
        int8(state.revision),
        int8(state.step),
        int8(state.time),
        int8(state.time),
        None,
        int8(2**62),
        TRUE if state.durability == "async" and not state.dropped else FALSE,
        *(TRUE, FALSE, None, FALSE),
        int8(revision),
        int8(max(state.last_id, ids_upto(entries))),
        int8(0),
        TRUE,
        NOTHING,
        *(None, None),
        *_post_images(entries, gone, [(where, amount) for where, amount in usage.items() if amount[0] or amount[1]]),
        *_NO_FACTS,
        *_NO_REQUESTS,
    )
