"""A space of the resident engine: its entries in memory, its requests in the file; and how it is loaded.

Loading is the whole of recovery: the rows, and over them what the feed tells of since they were folded. The rows of a space come in the order of its keys, so its sorted lists are built at once
rather than key by key; owners, tags and instants that are equal share one object, which is most of what a small entry
would cost besides its key and value. A row that cannot be read, or a large value that is missing, is damage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import apsw
from sortedcontainers import SortedList

from holdfast.engine import Batch, Entry
from holdfast.engines.evaluation import Group
from holdfast.engines.memory import Space
from holdfast.engines.resident_feed import Recent
from holdfast.engines.resident_folding import Unfolded
from holdfast.engines.sqlite_file import VALUE_INLINE_MAX
from holdfast.engines.sqlite_folds import folded_upto, newer
from holdfast.engines.sqlite_rows import Execute, Requests, first_row, head_of
from holdfast.engines.stored import Stored

_SPACES: Final = "SELECT name FROM spaces"
_SPACE: Final = "SELECT id, durability, audit_reads, floor, created_at, dropped FROM spaces WHERE name = ?"
_ENTRIES: Final = "SELECT key, value, version, owner, created_at, updated_at, expires_at, tag FROM entries WHERE space = ? ORDER BY key"
_LARGE: Final = "SELECT key, value FROM large WHERE space = ?"
_USAGE: Final = "SELECT owner, subspace, keys, bytes FROM usage WHERE space = ? AND keys > 0"


class DamagedRows(Exception):
    """Rows that do not fit together."""


class Link(NamedTuple):
    """The connection that writes, and how to execute on it."""

    connection: apsw.Connection
    execute: Execute


class ResidentSpace(Space):
    """One space; also the `State` its batches are evaluated on, and what the writer of rows knows of it."""

    def __init__(self, link: Link, name: str, first_revision: int = 0) -> None:
        super().__init__(first_revision)
        self._connection, self._execute = link
        self.name = name
        self.id: int | None = None
        """None until its first commit is in the file."""
        self.dropped = False
        self.large: set[str] = set()
        """The keys that have a row in `large`."""
        self.recent = Recent(first_revision)
        self.unfolded = Unfolded()
        self._requests = Requests()

    @property
    def exists(self) -> bool:
        return self.id is not None and not self.dropped

    def request(self, actor: str, request_id: str) -> Stored | None:
        if self.id is None:
            return None
        if not self._connection.in_transaction:
            self._execute("BEGIN IMMEDIATE")  # it ends with the group, and so does a search that stopped half-way
        return self._requests.find(self._execute, self.id, self.time, actor, request_id)

    def expect(self, batches: list[Batch]) -> None:
        """These have request ids that may be known, and are about to be evaluated."""
        if self.id is not None:
            if not self._connection.in_transaction:
                self._execute("BEGIN IMMEDIATE")
            self._requests.expect(self._execute, self.id, self.time, batches)

    def adopt(self, group: Group, id: int, size: int) -> None:
        """Take over a group that is in the file now, as a row of so many bytes. The first one makes the space."""
        if not self.exists:
            self.id, self.dropped = id, False
            self.durability, self.audit_reads, self.created_at = "sync", False, group.now
        if group.untold:
            self.note_rows({key: group.writes[key] for key in group.untold})
        if group.commits:
            self.unfolded.add(group, self.revision, size)
            self._requests.forget()
        self.apply(group)

    def note_rows(self, rows: Mapping[str, Entry | None]) -> None:
        """Remember which of the rows that were written, or removed, are large."""
        large = {key for key, entry in rows.items() if entry is not None and len(entry.value) > VALUE_INLINE_MAX}
        if self.large:
            self.large.difference_update(rows)
        self.large |= large

    # --- what the file has ---

    def refresh(self) -> None:
        """Take everything but the entries and their usage from the file, and forget the recent commits."""
        row = first_row(self._execute, _SPACE, (self.name,))
        self.id, self.durability, audit_reads, self.floor, self.created_at, dropped = row
        self.audit_reads, self.dropped = bool(audit_reads), bool(dropped)
        self.revision, self.time, self.last_id = head_of(self._execute, row[0])
        self.recent = Recent(self.revision)

    def fill(self) -> None:
        """Load the entries, and what their owners use."""
        entries, revision = self.entries, self.revision
        large = dict(self._execute(_LARGE, (self.id,)))
        same: dict[str, str] = {}
        for key, value, version, owner, created_at, updated_at, expires_at, tag in self._execute(_ENTRIES, (self.id,)):
            if value is None:
                value = large.pop(key, None)
                if value is None:
                    raise DamagedRows(f"the value of {key!r} in space {self.name!r} is missing")
                self.large.add(key)
            if version > revision:
                raise DamagedRows(f"{key!r} in space {self.name!r} is newer than the feed knows of")
            owner, tag = same.setdefault(owner, owner), same.setdefault(tag, tag)
            if updated_at == created_at:
                updated_at = created_at
            entries[key] = Entry(key, value, version, owner, created_at, updated_at, expires_at, tag)
        folded = folded_upto(self._execute, self.id or 0)
        if folded is not None:
            self._catch_up(folded)
        self.keys = SortedList(entries)
        self.expiries = SortedList((e.expires_at, e.key) for e in entries.values() if e.expires_at is not None)
        self.usage = {
            (owner, subspace): [keys, size] for owner, subspace, keys, size in self._execute(_USAGE, (self.id,))
        }

    def _catch_up(self, folded: int) -> None:
        """Lay over the entries what the feed tells of since they were folded."""
        changed = newer(self._execute, self.id or 0, folded)
        for key, entry in changed.items():
            if entry is not None:
                self.entries[key] = entry
            else:
                self.entries.pop(key, None)
        self.unfolded.inherit(changed, folded, self.revision)


def load_spaces(link: Link) -> list[ResidentSpace]:
    """Every space of the file, dropped ones included, in one snapshot."""
    execute = link.execute
    execute("BEGIN")
    try:
        spaces = [ResidentSpace(link, name) for (name,) in execute(_SPACES).fetchall()]
        for space in spaces:
            space.refresh()
            if not space.dropped:
                space.fill()
    finally:
        execute("ROLLBACK")
    return spaces
