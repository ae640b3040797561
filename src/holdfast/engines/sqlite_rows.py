"""The rows of a SQLite store: one function for one question or one change.

Everything here runs inside a transaction that the engine has begun. A cursor that still has rows keeps its snapshot, and
an old snapshot keeps the write-ahead log from being folded, so every statement is read to its end at once, or ends with
the transaction it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec

from holdfast.engine import REQUEST_WINDOW_MS, Batch, ChangeSet, Durability, Entry, SpaceInfo, Usage
from holdfast.engines.evaluation import Group, ids_upto, keys_of, size_of
from holdfast.engines.sqlite_file import REVISION_MAX, VALUE, VALUE_INLINE_MAX, feed_id
from holdfast.engines.stored import Stored
from holdfast.errors import Damaged, InvalidInput
from holdfast.ids import is_generated
from holdfast.keys import prefix_end, subspace_of

Execute = Callable[..., Any]

COMPACT_ROWS: Final = 64
"""Feed rows removed per transaction."""

AT_ONCE_MAX: Final = 64
"""Keys whose rows one statement reads."""
KNOWN_MAX: Final = 32_768
"""Entries remembered of a space; more, and it is read afresh."""
COLUMNS: Final = f"key, {VALUE}, version, owner, created_at, updated_at, expires_at, tag"
GET: Final = (
    f"SELECT {VALUE}, version, owner, created_at, updated_at, expires_at, tag FROM entries "  # noqa: S608
    "WHERE space = ? AND key = ?"
)
"""All of an entry but its key."""
_ONE: Final = f"SELECT {COLUMNS} FROM entries WHERE space = ? AND key = ?"  # noqa: S608
_PUT: Final = "REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""The whole row is new, and nothing hangs on the old one: cheaper than to update each column."""
_PUT_LARGE: Final = "INSERT INTO large VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_DELETE: Final = "DELETE FROM entries WHERE space = ? AND key = ?"
_DELETE_LARGE: Final = "DELETE FROM large WHERE space = ? AND key = ?"
_SPACE: Final = "SELECT id, durability, dropped FROM spaces WHERE name = ?"
_HEAD: Final = "SELECT id - ?1, time, last_id FROM feed WHERE id BETWEEN ?1 AND ?2 ORDER BY id DESC LIMIT 1"
_BEHEADED: Final = (
    "SELECT name FROM spaces WHERE id = ?1 AND (floor > 0 OR EXISTS (SELECT 1 FROM entries WHERE space = ?1))"
)
_REVIVE: Final = "UPDATE spaces SET dropped = 0, durability = 'sync', audit_reads = 0, created_at = ? WHERE id = ?"
_DUE: Final = f"SELECT {COLUMNS} FROM entries WHERE space = ? AND expires_at <= ? ORDER BY expires_at, key LIMIT ?"  # noqa: S608
_REQUEST: Final = (
    "SELECT version, commits FROM requests JOIN feed ON feed.id >= ?1 + version "
    "WHERE space = ?2 AND actor = ?3 AND requests.id = ?4 ORDER BY feed.id LIMIT 1"
)
_CHARGE: Final = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
    "SET keys = keys + excluded.keys, bytes = bytes + excluded.bytes"
)
_BACKWARDS: Final = "SELECT commits FROM feed WHERE id BETWEEN ? AND ? AND time > ? ORDER BY id DESC"
_BATCHED: Final = {
    count: f"SELECT {COLUMNS} FROM entries WHERE space = ? AND key IN ({', '.join('?' * count)})"  # noqa: S608
    for count in (2, 8, 16, AT_ONCE_MAX)
}

_IS_FRESH = attrgetter("fresh")
_encode_commits = msgspec.msgpack.Encoder().encode
_decode_commits = msgspec.msgpack.Decoder(list[ChangeSet]).decode
_decode_stored = msgspec.msgpack.Decoder(list[Stored]).decode


# --- reading ---


def first_row(execute: Execute, sql: str, values: tuple[Any, ...] = ()) -> Any:
    """The first row of an answer, or None."""
    rows = execute(sql, values).fetchall()
    return rows[0] if rows else None


def head_of(execute: Execute, space: int) -> tuple[int, int, int]:
    """A space's revision, time and last assigned id. Damaged, if there was a commit and the feed does not know."""
    row: tuple[int, int, int] | None = first_row(execute, _HEAD, (feed_id(space, 0), feed_id(space, REVISION_MAX)))
    if row is None and (name := first_row(execute, _BEHEADED, (space,))) is not None:
        raise Damaged(
            f"the feed of space {name[0]!r} is missing, so its versions would be given out again; restore the file from a backup"
        )
    return (0, 0, 0) if row is None else row


def first_revision(execute: Execute) -> int:
    """Where new spaces begin: at 0, but in a store that was restored, which may have had more spaces (`sqlite_restore.py`)."""
    row = first_row(execute, "SELECT value FROM meta WHERE key = 'first_revision'")
    return 0 if row is None else int(row[0])


def next_expiry(execute: Execute, space: int) -> int | None:
    """When the first entry of a space expires."""
    (at,) = first_row(
        execute, "SELECT min(expires_at) FROM entries WHERE space = ? AND expires_at IS NOT NULL", (space,)
    )
    return None if at is None else int(at)


def fetch(execute: Execute, space: int, keys: list[str]) -> list[Entry]:
    """The rows of many keys in few statements, whose number of parameters comes from a short list."""
    found: list[Entry] = []
    start = 0
    while start < len(keys):
        left = len(keys) - start
        count = 2 if left <= 2 else 8 if left <= 8 else 16 if left <= 16 else AT_ONCE_MAX
        chunk = keys[start : start + count]
        chunk += chunk[-1:] * (count - len(chunk))
        found += starmap(Entry, execute(_BATCHED[count], (space, *chunk)))
        start += count
    return found


def select_range(
    execute: Execute, space: int, prefix: str, after: str | None, limit: int, *, reverse: bool = False, now: int = -1
) -> list[Entry]:
    """The entries under a prefix beyond the key `after`, in order; those expired at `now` are left out."""
    end = prefix_end(prefix)
    low, over, high = prefix, ">=", end
    if after is not None and reverse:
        high = after if end is None else min(end, after)
    elif after is not None and after >= low:
        low, over = after, ">"
    below, order = ("" if high is None else "AND key < ?3"), ("DESC" if reverse else "ASC")
    sql = (
        f"SELECT {COLUMNS} FROM entries WHERE space = ?1 AND key {over} ?2 {below} "  # noqa: S608
        f"AND (expires_at IS NULL OR expires_at > ?4) ORDER BY key {order} LIMIT ?5"
    )
    return [Entry(*row) for row in execute(sql, (space, low, high, now, limit))]


def read_feed(execute: Execute, space: int, after: int, limit: int) -> list[ChangeSet]:
    """About `limit` commits after a revision; groups are kept whole."""
    sql = "SELECT commits FROM feed WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
    found: list[ChangeSet] = []
    for (commits,) in execute(
        sql, (feed_id(space, after), feed_id(space, REVISION_MAX), limit)
    ):  # the cursor's next statement ends this one, which must not be long in coming
        found.extend(commit for commit in _decode_commits(commits) if commit.version > after)
        if len(found) >= limit:
            break
    return found


def describe(execute: Execute, name: str | None) -> list[SpaceInfo]:
    """Every space, or the one of that name."""
    sql = "SELECT id, name, durability, created_at, audit_reads, floor FROM spaces WHERE NOT dropped"
    if name is None:
        rows = execute(sql + " ORDER BY name").fetchall()
    else:
        rows = execute(sql + " AND name = ?", (name,)).fetchall()
    return [_describe_one(execute, *row) for row in rows]


def _describe_one(
    execute: Execute, space: int, name: str, durability: Durability, created_at: int, audit_reads: int, floor: int
) -> SpaceInfo:
    usage = execute("SELECT owner, subspace, keys, bytes FROM usage WHERE space = ? AND keys > 0", (space,))
    held = [Usage(*row) for row in usage]
    revision, due = head_of(execute, space)[0], next_expiry(execute, space)
    return SpaceInfo(name, durability, revision, created_at, bool(audit_reads), floor, due, held)


class Requests:
    """The commits of requests that come again, in one space.

    An id that somebody chose is in an index. One that the library made is in the feed alone, most likely near its end, and is
    searched there: for all batches of a group in one pass (`expect`), since after a crash they come together.
    """

    def __init__(self) -> None:
        self._searched: dict[tuple[str, str], Stored | None] = {}

    def expect(self, execute: Execute, space: int, time: int, batches: Collection[Batch]) -> None:
        """These are about to be evaluated; what was found is true until anything is committed (`forget`)."""
        self.forget()
        if all(map(_IS_FRESH, batches)):
            return
        asked = {
            (batch.actor, batch.request_id)
            for batch in batches
            if not batch.fresh and batch.request_id is not None and is_generated(batch.request_id)
        }
        if len(asked) > 1:
            self._searched = dict.fromkeys(asked)
            for (data,) in _backwards(execute, space, time):
                for commit in _decode_stored(data):
                    if (id := (commit.actor, commit.request_id or "")) in asked:
                        self._searched[id] = commit
                        asked.discard(id)
                if not asked:
                    break

    def forget(self) -> None:
        """A group was committed. Of those that were expected, some may have been answered by it without being asked for here."""
        self._searched = {}

    def find(self, execute: Execute, space: int, time: int, actor: str, request_id: str) -> Stored | None:
        """The commit that answered a request, in a space whose time is `time`."""
        row = first_row(execute, _REQUEST, (feed_id(space, 0), space, actor, request_id))
        if row is not None:
            return _find(row[1], actor, request_id)
        if not is_generated(request_id):
            return None
        if (actor, request_id) in self._searched:
            return self._searched.pop((actor, request_id))  # true of this group alone
        needle, rows = request_id.encode(), _backwards(execute, space, time)
        return next((found for (data,) in rows if needle in data and (found := _find(data, actor, request_id))), None)


def _backwards(execute: Execute, space: int, time: int) -> Iterator[tuple[bytes]]:
    """The rows of the feed for as long as request ids are remembered, the newest first."""
    rows: Iterator[tuple[bytes]] = execute(
        _BACKWARDS, (feed_id(space, 0), feed_id(space, REVISION_MAX), time - REQUEST_WINDOW_MS)
    )
    return rows


def _find(commits: bytes, actor: str, request_id: str) -> Stored | None:
    """The commit of this request in a row of the feed."""
    found = (commit for commit in _decode_stored(commits) if (commit.actor, commit.request_id) == (actor, request_id))
    return next(found, None)


class _Known(dict[str, Entry | None]):
    """Entries of a space by key, None for what is not there. What is not remembered is read, and not remembered for that."""

    def __init__(self, execute: Execute, space: int | None) -> None:
        self._execute = execute
        self._space = space
        self.missed = True
        """Whether anything had to be read one by one."""
        self.large: set[str] = set()

    def __missing__(self, key: str) -> Entry | None:
        self.missed = True
        row = None if self._space is None else first_row(self._execute, _ONE, (self._space, key))
        return None if row is None else self.seen([Entry(*row)])[0]

    def seen(self, entries: list[Entry]) -> list[Entry]:
        """The entries, having noted which of them are large. Whatever a batch changes was read here before."""
        for entry in entries:
            if len(entry.value) > VALUE_INLINE_MAX:
                self.large.add(entry.key)
        return entries


class SpaceState:
    """One space as the evaluation and single reads see it, on the connection that writes.

    It is kept from one group to the next and remembers what was written, for as long as no other connection commits
    (`data_version` tells); the engine drops it then, and after anything but a successful commit.
    """

    def __init__(self, execute: Execute, name: str) -> None:
        self._execute = execute
        self.name = name
        self.id: int | None = None
        self.durability = "sync"
        self.dropped = False
        self.revision = self.time = self.last_id = 0
        self._requests = Requests()
        self._next_due: int | None = None
        self._passing: list[str] = []
        """Keys of large entries that are known for this group only."""
        row = first_row(execute, _SPACE, (name,))
        if row is not None:
            self.id, self.durability, self.dropped = row
            self.revision, self.time, self.last_id = head_of(execute, row[0])
            self._next_due = next_expiry(execute, row[0])
        else:
            self.revision = first_revision(execute)
        self._known = _Known(execute, self.id)
        self.entry = self._known.__getitem__
        self.large = self._known.large
        """Keys seen with a large value."""

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Read the entries these batches name at once, if the group before had to look up any."""
        known = self._known
        if self.id is not None and known.missed:
            unknown = [key for key in keys_of(batches) if key not in known]
            known.missed = bool(unknown)
            if unknown:
                known.update(dict.fromkeys(unknown))
                for entry in known.seen(fetch(self._execute, self.id, unknown)):
                    known[entry.key] = entry
                self._passing = [key for key in unknown if key in self.large]

    def first(self, prefix: str, after: str | None, limit: int) -> list[Entry]:
        return [] if self.id is None else self._known.seen(select_range(self._execute, self.id, prefix, after, limit))

    def vacant(self, prefix: str) -> bool:
        return not self.first(prefix, None, 1)

    def due(self, now: int, limit: int) -> list[Entry]:
        if self.id is None or self._next_due is None or now < self._next_due:
            return []
        return self._known.seen([Entry(*row) for row in self._execute(_DUE, (self.id, now, limit))])

    def request(self, actor: str, request_id: str) -> Stored | None:
        return None if self.id is None else self._requests.find(self._execute, self.id, self.time, actor, request_id)

    def expect(self, batches: Collection[Batch]) -> None:
        """These are about to be evaluated."""
        if self.id is not None:
            self._requests.expect(self._execute, self.id, self.time, batches)

    def keep(self, group: Group, noted: list[str]) -> bool:
        """Take over what a group wrote, once it is committed. False when it is not worth keeping any longer.

        `noted` are the keys that `Writer.group` gave: of entries that are large, or expire.
        """
        known = self._known
        self._requests.forget()
        if self.id is None or self.dropped or len(known) + len(self.large) > KNOWN_MAX:
            return False
        self.revision, self.last_id = group.revision, group.last_id
        if group.commits:
            self.time = group.now
        if self._next_due is not None and self._next_due <= group.now:
            return False  # something expired: what comes next must be looked up
        while self._passing:
            known.pop(self._passing.pop(), None)
        known.update(group.writes)
        if self.large:
            self.large.difference_update(group.writes)
        for key in noted:
            if (entry := known[key]) is None:
                continue
            expires_at = entry.expires_at
            if expires_at is not None and (self._next_due is None or expires_at < self._next_due):
                self._next_due = expires_at
            if len(entry.value) > VALUE_INLINE_MAX:
                del known[key]
                self.large.add(key)
        return True


# --- writing ---


class Written(Protocol):
    """A space as the writer of its rows must know it."""

    name: str
    id: int | None
    dropped: bool
    revision: int
    large: set[str]
    """The keys that have a row in `large`; or those of them, at least, that a group writes."""


class Writer:
    """What changes rows. `execute` and `execute_many` belong to the connection that writes."""

    def __init__(self, execute: Execute, execute_many: Execute) -> None:
        self.execute = execute
        self._execute_many = execute_many

    def group(self, state: Written, group: Group, *, requests_are_new: bool) -> list[str]:
        """The post-images of a group: entries, the feed's row, requests and usage. Gives what `fold` gives.

        With `requests_are_new` a request id that is known already raises ConstraintError; otherwise it is replaced.
        """
        space = state.id
        if space is None or state.dropped:
            space = self._revive(state.name, space, state.dropped, group.now)
        noted = self.fold(space, group.writes, state.large)
        self._tell(space, group, requests_are_new)
        return noted

    def log(self, state: Written, group: Group, *, requests_are_new: bool, is_behind: bool) -> tuple[int, int]:
        """The same, but of the entries only what the feed does not tell; the others are left to be folded later.

        Gives the space's id, and the bytes of the feed's row.
        """
        space = self._revive(state.name, state.id, state.dropped, group.now)
        if group.commits and not is_behind:
            self.execute("INSERT INTO folds VALUES (?, ?)", (space, state.revision))
        if group.untold:
            self.fold(space, {key: group.writes[key] for key in group.untold}, state.large)
        return space, self._tell(space, group, requests_are_new)

    def fold(self, space: int, entries: Mapping[str, Entry | None], large: set[str] | None = None) -> list[str]:
        """Write these entries, or remove them. Gives the keys of those that are large, or expire.

        `large` has those of the keys that have a row in `large`; None: any may.
        """
        were_large = entries.keys() if large is None else large
        rows: list[tuple[Any, ...]] = []
        gone: list[tuple[Any, ...]] = []
        noted: list[str] = []
        for key, e in entries.items():
            if e is None:
                gone.append((space, key))
                continue
            value: bytes | None = e.value
            expires_at = e.expires_at
            if len(e.value) > VALUE_INLINE_MAX:
                self.execute(_PUT_LARGE, (space, key, value))
                value = None
                noted.append(key)
            else:
                if were_large and key in were_large:
                    self.execute(_DELETE_LARGE, (space, key))
                if expires_at is not None:
                    noted.append(key)
            rows.append((space, key, value, e.version, e.owner, e.created_at, e.updated_at, expires_at, e.tag))
        if gone:
            self._each(_DELETE, gone)
            if were_large:
                self._each(_DELETE_LARGE, [row for row in gone if row[1] in were_large])
        if rows:
            self._each(_PUT, rows)
        return noted

    def folded(self, space: int, upto: int | None) -> None:
        """Note how far the entries of a space have been folded; None: they are up to date."""
        if upto is None:
            self.execute("DELETE FROM folds WHERE space = ?", (space,))
        else:
            self.execute("UPDATE folds SET revision = ? WHERE space = ?", (upto, space))

    def _tell(self, space: int, group: Group, requests_are_new: bool) -> int:
        """The feed's row, with its number of bytes, the requests and the usage."""
        size = 0
        if group.commits:
            size = self._head(space, group.revision, group.now, group.last_id, group.commits)
            if group.asked:
                verb = "INSERT" if requests_are_new else "INSERT OR REPLACE"
                asked = [(space, c.actor, c.request_id, c.version) for c in group.asked]
                self._each(f"{verb} INTO requests VALUES (?, ?, ?, ?)", asked)
        if group.usage:
            self._charge(space, group.usage)
        return size

    def create(self, name: str, durability: Durability, audit_reads: bool, now: int) -> None:
        row = first_row(self.execute, _SPACE, (name,))
        if row is None:
            self._insert(name, durability, audit_reads, now)
        elif row[2]:
            self.execute(
                "UPDATE spaces SET dropped = 0, durability = ?, audit_reads = ?, created_at = ? WHERE id = ?",
                (durability, audit_reads, max(now, head_of(self.execute, row[0])[1]), row[0]),
            )
        elif row[1] != durability:
            raise InvalidInput(
                f"space {name!r} exists with durability {row[1]!r}; it cannot be opened as {durability!r}"
            )
        elif audit_reads:
            self.execute("UPDATE spaces SET audit_reads = 1 WHERE id = ?", (row[0],))

    def drop(self, space: int) -> None:
        """Empty the space; what stays is its name and a head one revision further."""
        revision, time, last_id = head_of(self.execute, space)
        for table in ("entries", "large", "requests", "usage", "folds"):
            self.execute(f"DELETE FROM {table} WHERE space = ?", (space,))  # noqa: S608
        self._clear_feed(space)
        self._head(space, revision + 1, time, last_id, [])
        self.execute("UPDATE spaces SET dropped = 1, floor = ? WHERE id = ?", (revision + 1, space))

    def load(self, name: str, entries: list[Entry], revision: int, now: int) -> None:
        row = first_row(self.execute, _SPACE, (name,))
        if row is not None:
            now = max(now, head_of(self.execute, row[0])[1])
        space = self._revive(name, row[0] if row else None, bool(row and row[2]), now)
        usage: dict[tuple[str, str], list[int]] = {}
        entries = list(
            {entry.key: entry for entry in entries}.values()
        )  # of one that is given twice the last counts, once
        replaced = fetch(self.execute, space, [entry.key for entry in entries])
        for sign, group in ((-1, replaced), (1, entries)):
            for entry in group:
                amount = usage.setdefault((entry.owner, subspace_of(entry.key)), [0, 0])
                amount[0] += sign
                amount[1] += sign * size_of(entry)
        large = {entry.key for entry in replaced if len(entry.value) > VALUE_INLINE_MAX}
        self.advance(space, revision, ids_upto(entries))  # a space has a head before it has entries
        self.fold(space, {entry.key: entry for entry in entries}, large)
        self._charge(space, usage)

    def advance(self, space: int, revision: int, last_id: int = 0) -> None:
        """Forget the feed and its request ids, and go on after this revision, if the space has not passed it."""
        reached, time, given = head_of(self.execute, space)
        self.execute("DELETE FROM requests WHERE space = ?", (space,))
        self._clear_feed(space)
        self._head(space, max(reached, revision), time, max(given, last_id), [])
        self.execute("UPDATE spaces SET floor = ? WHERE id = ?", (max(reached, revision), space))

    def compact(self, space: int, upto: int) -> bool:
        """Remove some of the feed up to a revision; True when there is more to remove. The head stays, emptied."""
        revision = head_of(self.execute, space)[0]
        rows = self.execute(
            "SELECT id - ?1, commits FROM feed WHERE id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3",
            (feed_id(space, 0), feed_id(space, min(upto, REVISION_MAX)), COMPACT_ROWS),
        ).fetchall()
        for last, commits in rows:
            asked = [(space, c.actor, c.request_id, c.version) for c in _decode_commits(commits) if c.request_id]
            self._execute_many("DELETE FROM requests WHERE space = ? AND actor = ? AND id = ? AND version = ?", asked)
            row = feed_id(space, last)
            if last == revision:
                self.execute("UPDATE feed SET commits = ? WHERE id = ?", (_encode_commits([]), row))
            else:
                self.execute("DELETE FROM feed WHERE id = ?", (row,))
        more = len(rows) == COMPACT_ROWS
        floor = rows[-1][0] if more else min(upto, revision)
        self.execute("UPDATE spaces SET floor = max(floor, ?) WHERE id = ?", (floor, space))
        return more

    def _each(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        if len(rows) == 1:
            self.execute(sql, rows[0])
        elif rows:
            self._execute_many(sql, rows)

    def _revive(self, name: str, space: int | None, dropped: bool, now: int) -> int:
        if space is None:
            return self._insert(name, "sync", False, now)
        if dropped:
            self.execute(_REVIVE, (now, space))
        return space

    def _insert(self, name: str, durability: Durability, audit_reads: bool, now: int) -> int:
        sql = "INSERT INTO spaces VALUES (NULL, ?, ?, ?, 0, ?, 0) RETURNING id"
        (space,) = first_row(self.execute, sql, (name, durability, audit_reads, now))
        if first := first_revision(self.execute):
            self.advance(space, first)
        return int(space)

    def remember(self, name: str, revision: int) -> int:
        """Note how far a space was that this store does not have, as if it had been dropped; gives its id."""
        space = self._insert(name, "sync", False, 0)
        self.execute("UPDATE spaces SET dropped = 1 WHERE id = ?", (space,))
        self.advance(space, revision)
        return space

    def _head(self, space: int, revision: int, time: int, last_id: int, commits: list[Stored]) -> int:
        if revision > REVISION_MAX:
            raise InvalidInput(f"revision {revision} is beyond what a SQLite store can count to ({REVISION_MAX})")
        row = _encode_commits(commits)
        self.execute("INSERT INTO feed VALUES (?, ?, ?, ?)", (feed_id(space, revision), time, last_id, row))
        return len(row)

    def _clear_feed(self, space: int) -> None:
        self.execute("DELETE FROM feed WHERE id BETWEEN ? AND ?", (feed_id(space, 0), feed_id(space, REVISION_MAX)))

    def _charge(self, space: int, usage: dict[tuple[str, str], list[int]]) -> None:
        self._each(_CHARGE, [(space, *where, *amount) for where, amount in usage.items() if amount[0] or amount[1]])
